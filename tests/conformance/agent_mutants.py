"""Mutants of a service that runs agents: its faults, and the check that must fail for each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quartet.contract.agent import AgentResult, AgentRun
from quartet.errors import InvalidRequest, QuartetError, ServiceFailed
from quartet.v1 import trajectory_pb2
from tests.conformance.faults import Misnamed, health, model, request, response
from tests.conformance.models import Service

Mutation = Callable[[Service], None]
"""A change of a service before it is served."""


def changed(**values: Any) -> Mutation:
    """Return a mutation of all results."""

    def change(answer: Any) -> None:
        for name, value in values.items():
            setattr(answer, name, value)

    return response("RunAgent", change)


def on_failure(change: Callable[[Any], None]) -> Mutation:
    """Return a mutation of the results of an agent that has failed."""
    return response("RunAgent", lambda answer: change(answer) if answer.outcome != trajectory_pb2.OUTCOME_OK else None)


def zero_reward(answer: Any) -> None:
    answer.reward = 0.0


def as_ok(answer: Any) -> None:
    answer.outcome, answer.reward, answer.detail = trajectory_pb2.OUTCOME_OK, 0.0, ""


def first_key(service: Service) -> None:
    """Use the key of the first session in all of them."""
    seen: list[str] = []

    def key(_: Any, right: Any, run: AgentRun) -> str:
        seen.append(run.api_key)
        return f"{seen[0]}x"

    model("key", key)(service)


def remembers_sessions(service: Service) -> None:
    """Answer a repeated session with its earlier result."""
    results: dict[str, Any] = {}
    right = service.servicer.RunAgent

    def wrong(message: Any, context: Any) -> Any:
        if message.session not in results:
            results[message.session] = right(message, context)
        return results[message.session]

    service.servicer.RunAgent = wrong


def one_at_a_time(service: Service) -> None:
    right, busy = service.servicer.RunAgent, threading.Lock()

    def wrong(message: Any, context: Any) -> Any:
        with busy:
            return right(message, context)

    service.servicer.RunAgent = wrong


def fails_together(service: Service) -> None:
    right, busy = service.servicer.RunAgent, threading.Lock()

    def wrong(message: Any, context: Any) -> Any:
        if not busy.acquire(blocking=False):
            raise ServiceFailed("busy")
        try:
            return right(message, context)
        finally:
            busy.release()

    service.servicer.RunAgent = wrong


def never_cancelled(service: Service) -> None:
    """Let agents run on when their caller has gone."""
    right = service.model.start

    def start(run: AgentRun) -> Any:
        agent = right(run)
        agent.cancel = lambda: None
        return agent

    service.model.start = start


def cancelled_late(service: Service) -> None:
    """Count an agent as running after its caller has gone."""
    right = service.model.end

    def end(agent: Any) -> None:
        if not agent.cancelled:
            right(agent)

    service.model.end = end


def accepts(field: str, value: Any) -> Mutation:
    """Return a mutation that replaces an invalid field by a valid one."""

    def change(message: Any) -> None:
        wrong = {
            "session": not message.session,
            "seed": message.seed >= 2**63,
            "fields": message.fields == "[1]",
            "base_url": not message.base_url.startswith("http"),
            "api_key": " " in message.api_key,
        }
        if wrong[field]:
            setattr(message, field, value)

    return request("RunAgent", change)


def refused_with(error: type[QuartetError], text: str) -> Mutation:
    """Return a mutation of the error of a run without a session."""

    def mutate(service: Service) -> None:
        right = service.servicer.RunAgent

        def wrong(message: Any, context: Any) -> Any:
            if not message.session:
                raise error(text)
            return right(message, context)

        service.servicer.RunAgent = wrong

    return mutate


def quotes_key(service: Service) -> None:
    right = service.servicer.RunAgent

    def wrong(message: Any, context: Any) -> Any:
        if message.fields == "[1]":
            raise InvalidRequest(f"wrong fields in {message}")
        return right(message, context)

    service.servicer.RunAgent = wrong


def slow_status(service: Service) -> None:
    right = service.servicer.status

    def wrong() -> Any:
        if service.model.running:
            time.sleep(1.2)
        return right()

    service.servicer.status = wrong


def small_messages(service: Service) -> None:
    right = service.servicer.RunAgent

    def wrong(message: Any, context: Any) -> Any:
        if message.ByteSize() > 4 * 1024 * 1024:
            raise InvalidRequest("message larger than 4 MiB")
        return right(message, context)

    service.servicer.RunAgent = wrong


def cause(text: Callable[[AgentRun], str]) -> Mutation:
    return model("cause", lambda _, right, run: text(run))


def finished(change: Callable[[AgentResult], AgentResult]) -> Mutation:
    return model("finished", lambda _, right, agent, result: change(result))


AGENT_MUTANTS: list[tuple[str, str, Mutation]] = [
    ("a service of agents that does not serve", "health.service", health("quartet.v1.EnvironmentService", 2)),
    ("no outcome of a run", "run.result", changed(outcome=0)),
    ("NaN as the reward of a run", "run.result", changed(reward=float("nan"))),
    ("a detail without a failure", "run.result", changed(detail="all is well")),
    ("a list of logged values", "run.result", changed(logged="[1]")),
    ("a nested logged value", "run.result", finished(lambda result: replace(result, logged={"a": {"b": 1}}))),
    ("a key of another session", "run.endpoint", first_key),
    ("a session that runs once", "run.repeated", remembers_sessions),
    ("one agent at a time", "run.concurrent", one_at_a_time),
    ("INTERNAL while an agent runs", "run.concurrent", fails_together),
    ("an agent that outlives its call", "run.cancel", never_cancelled),
    ("a cancelled agent that still counts", "run.cancel", cancelled_late),
    ("an agent that outlives its deadline", "run.deadline", never_cancelled),
    ("a reward of 0 for an agent that fails", "run.failure", on_failure(zero_reward)),
    ("a failure of an agent as a result", "run.failure", on_failure(as_ok)),
    ("the key in the cause of a failure", "run.failure", cause(lambda run: f"401 for {run.api_key}")),
    ("a run without a session accepted", "run.refuses_no_session", accepts("session", "s")),
    ("a seed of 64 bits accepted", "run.refuses_seed", accepts("seed", 1)),
    ("fields of a run that are no object accepted", "run.refuses_fields", accepts("fields", "{}")),
    ("the key in an error", "run.refuses_fields", quotes_key),
    ("any base URL accepted", "run.refuses_url", accepts("base_url", "http://127.0.0.1:9/v1")),
    ("any key accepted", "run.refuses_key", accepts("api_key", "k" * 20)),
    ("another class of the error of a run", "run.error_class", refused_with(Misnamed, "no")),
    ("an error of a run without a text", "run.error_text", refused_with(InvalidRequest, "")),
    ("a status that waits for agents", "run.status", slow_status),
    ("small messages only for agents", "run.large_message", small_messages),
]  # fmt: skip
