"""Checks of a service that runs agents: results, keys, failures, cancellation, and invalid calls."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from quartet.conformance.agent_endpoint import AgentEndpoint, open_endpoint
from quartet.conformance.batch_checks import LARGE_MESSAGE, LIMITS, require_idle, require_quick_status
from quartet.conformance.batches import padded
from quartet.conformance.check import Check, within
from quartet.conformance.environment_sessions import MAX_DETAIL
from quartet.conformance.outcome import Skipped, Violation, expect
from quartet.conformance.target import ERRORS, Refusal, Target, require_class, require_garbage_refused, require_text
from quartet.contract.logged_values import problem_of
from quartet.v1 import environment_pb2, trajectory_pb2

ENVIRONMENT = "proto/quartet/v1/environment.proto"
REQUEST = f"{ENVIRONMENT}: RunAgentRequest"
RESPONSE = f"{ENVIRONMENT}: RunAgentResponse"
SERVICE = f"{ENVIRONMENT}: EnvironmentService"
CONCURRENT_RUNS = 8
END_SECONDS = 10.0
"""Time that an agent has to end after its caller is gone."""


NO_REQUEST = "the agent makes no request with its key; give --fields with which it does"


class Runs:
    """Runs of the agent under test, with an endpoint of their own."""

    def __init__(self, target: Target, endpoint: AgentEndpoint) -> None:
        self.target, self.endpoint = target, endpoint
        self._run = f"conformance-{secrets.token_hex(4)}"
        self._count = 0

    def request(self, **changes: Any) -> Any:
        """Return the request of a run in a new session, with these fields changed."""
        self._count += 1
        values = {
            "session": f"{self._run}/1/{self._count}/0/1.1",
            "seed": self._count,
            "fields": self.target.limits.fields or "{}",
            "base_url": self.endpoint.base_url,
            "api_key": self.endpoint.key(),
            "model": self.endpoint.model,
        }
        return environment_pb2.RunAgentRequest(**{**values, **changes})

    def call(self, request: Any) -> Any:
        """Run the agent to its end and return the response. Raises Violation."""
        response = self.target.call(self.target.stub.RunAgent, request)
        require_response(response, request.api_key)
        return response

    def calling(self, request: Any) -> Any:
        """Start a run and wait until its agent has called. Return the call. Raises Skipped if it ends without a request."""
        call = self.target.start(self.target.stub.RunAgent, request)
        seen = self.target.wait_for(
            lambda: self.endpoint.requests(request.api_key) > 0 or call.done(), self.target.limits.seconds
        )
        if not self.endpoint.requests(request.api_key):
            call.cancel()
            how = f"ended with {call.code().name}" if seen else f"has none after {self.target.limits.seconds:g} s"
            raise Skipped(f"the agent makes no request with its key: it {how}; give --fields with which it does")
        return call

    def refused(self, request: Any, what: str) -> Refusal:
        """Return the error of a run that must be INVALID_ARGUMENT. Raises Violation."""
        try:
            refusal = self.target.refusal(self.target.stub.RunAgent, request)
        except Violation as violation:
            raise Violation(f"{what}: {violation}; expected INVALID_ARGUMENT") from None
        expect(
            refusal.code is grpc.StatusCode.INVALID_ARGUMENT,
            f"{what} is refused with {refusal}; expected INVALID_ARGUMENT",
        )
        return refusal


@contextmanager
def _opened(target: Target) -> Iterator[Runs]:
    with open_endpoint(target.address) as endpoint:
        yield Runs(target, endpoint)


def require_response(response: Any, key: str) -> None:
    """Raise Violation if the result of a run contradicts itself or the contract."""
    outcomes = trajectory_pb2.Outcome
    expect(
        response.outcome in outcomes.values() and response.outcome != trajectory_pb2.OUTCOME_UNSPECIFIED,
        f"outcome is {response.outcome}; expected a number of Outcome, but not OUTCOME_UNSPECIFIED",
    )
    name, detail = outcomes.Name(response.outcome), response.detail
    expect(len(detail) <= MAX_DETAIL, f"detail has {len(detail)} characters; expected at most {MAX_DETAIL}")
    expect(key not in detail, "detail has the key of the session; expected no secret in it")
    if response.outcome != trajectory_pb2.OUTCOME_OK:
        expect(
            not response.HasField("reward"), f"a reward is there with {name}; expected none: a failure is not a number"
        )
    else:
        expect(not detail, f"detail is {detail[:100]!r} with {name}; expected no text")
        expect(math.isfinite(response.reward), f"reward is {response.reward:g}; expected a finite number, or none")
    try:
        logged = json.loads(response.logged or "{}")
    except ValueError:
        logged = None
    if not isinstance(logged, dict):
        raise Violation("logged is not a JSON object; expected one, or no text")
    problem = problem_of(logged)
    expect(problem is None, f"logged has {problem}")


def _result(runs: Runs) -> None:
    for _ in range(3):
        runs.call(runs.request())


def _endpoint(runs: Runs) -> None:
    request = runs.request()
    runs.call(request)
    others = runs.endpoint.keys() - {request.api_key}
    expect(not others, f"the agent calls with {len(others)} other keys than the one of its session; expected only this")
    if not runs.endpoint.requests(request.api_key):
        raise Skipped(NO_REQUEST)


def _repeated(runs: Runs) -> None:
    first = runs.request()
    runs.call(first)
    if not runs.endpoint.requests(first.api_key):
        raise Skipped(NO_REQUEST)
    again = runs.request(session=first.session, seed=first.seed)
    runs.call(again)
    expect(
        runs.endpoint.requests(again.api_key),
        "a second run of a session makes no request with its new key; expected the agent to run again",
    )


def _concurrent(runs: Runs) -> None:
    """Start runs whose agents all wait for their answer."""
    requests = [runs.request(api_key=runs.endpoint.key(held=True)) for _ in range(CONCURRENT_RUNS)]
    first = runs.calling(requests[0])
    calls = [first, *(runs.target.start(runs.target.stub.RunAgent, request) for request in requests[1:])]

    def all_called() -> bool:
        return all(
            runs.endpoint.requests(request.api_key) or call.done()
            for request, call in zip(requests, calls, strict=True)
        )

    reached = runs.target.wait_for(all_called, runs.target.limits.seconds)
    waiting = sum(runs.endpoint.requests(request.api_key) > 0 for request in requests)
    codes = {call.code() for call in calls if call.done()}
    for call in calls:
        call.cancel()
    full = grpc.StatusCode.RESOURCE_EXHAUSTED
    expect(
        reached and codes <= {full},
        f"of {CONCURRENT_RUNS} runs at once, {waiting} call the endpoint; expected all to run, or {full.name}",
    )
    if codes:
        raise Skipped(f"the service runs fewer than {CONCURRENT_RUNS} agents at once")


def _gone(how: str, leave: Callable[[Any], None], seconds: float | None = None) -> Callable[[Runs], None]:
    """Return a check that an agent ends once its caller has left. ``seconds``: deadline of the call."""

    def check(runs: Runs) -> None:
        request = runs.request(api_key=runs.endpoint.key(held=True))
        if seconds is None:
            call = runs.calling(request)
        else:
            runs.calling(runs.request(api_key=runs.endpoint.key(held=True))).cancel()
            call = runs.target.start(runs.target.stub.RunAgent, request, seconds)
            runs.target.wait_for(lambda: runs.endpoint.requests(request.api_key) > 0 or call.done(), seconds)
            if not runs.endpoint.requests(request.api_key):
                raise Skipped(f"the agent makes no request within {seconds:g} s")
        leave(call)
        limit = min(END_SECONDS, runs.target.limits.seconds)
        ended = runs.target.wait_for(lambda: runs.endpoint.is_closed(request.api_key), limit)
        expect(ended, f"after {how}, the agent still waits for its answer {limit:g} s later; expected it to be ended")
        require_idle(runs.target, how)

    return check


def _wait_for_deadline(call: Any) -> None:
    code = call.code()
    expect(code is grpc.StatusCode.DEADLINE_EXCEEDED, f"the call ends with {code.name}; expected DEADLINE_EXCEEDED")


def _failure(runs: Runs) -> None:
    fields = runs.target.limits.failing_fields
    if fields is None:
        raise Skipped("needs fields with which the agent fails; give --failing-fields")
    response = runs.call(runs.request(fields=fields))
    expect(
        response.outcome != trajectory_pb2.OUTCOME_OK,
        "the outcome is OUTCOME_OK with --failing-fields; expected another",
    )


def _refuses(what: str, **changes: Any) -> Callable[[Runs], None]:
    """Return a check that a run with these changes is refused."""

    def check(runs: Runs) -> None:
        request = runs.request(**changes)
        refusal = runs.refused(request, what)
        key = request.api_key
        expect(not key or key not in refusal.text, "the text of an error has the key; expected no secret in it")

    return check


def _no_session(runs: Runs) -> Refusal:
    return runs.refused(runs.request(session=""), "a run without a session")


def _garbage(runs: Runs) -> None:
    require_garbage_refused(runs.target, "RunAgent")
    runs.call(runs.request())


def _status(runs: Runs) -> None:
    requests = [runs.request(api_key=runs.endpoint.key(held=True)) for _ in range(CONCURRENT_RUNS)]
    require_quick_status(runs.target, [runs.target.start(runs.target.stub.RunAgent, each) for each in requests])


def _large_message(runs: Runs) -> None:
    runs.call(padded(runs.request(), LARGE_MESSAGE))


def agent_checks() -> list[Check]:
    """Return the checks of a service that runs agents, in the order in which they run."""
    invalid = "is INVALID_ARGUMENT, and its text has no key"
    listed: list[tuple[str, str, str, Callable[[Runs], None]]] = [
        ("run.result", "A run has an outcome, a finite reward or none, and logged values or none.", RESPONSE, _result),
        ("run.endpoint", "The agent calls the endpoint with the key of its session, and with no other.", REQUEST, _endpoint),
        ("run.repeated", "Each call runs the agent, also in a session of an earlier call.", SERVICE, _repeated),
        ("run.concurrent", f"{CONCURRENT_RUNS} agents run at once, or are refused without room.", SERVICE, _concurrent),
        ("run.cancel", "An agent ends when its call is cancelled.", SERVICE,
         _gone("a cancellation", lambda call: call.cancel())),
        ("run.deadline", "An agent ends with the deadline of its call.", SERVICE,
         _gone("the deadline of its call", _wait_for_deadline, seconds=2.0)),
        ("run.failure", "A failure is an outcome without a reward, and its detail has no key.", RESPONSE, _failure),
        ("run.refuses_no_session", f"A run without a session {invalid}.", REQUEST, _refuses("no session", session="")),
        ("run.refuses_seed", f"The seed 2^63 {invalid}.", REQUEST, _refuses("the seed 2^63", seed=2**63)),
        ("run.refuses_fields", f"A text of fields that is no JSON object {invalid}.", REQUEST,
         _refuses("fields that are a list", fields="[1]")),
        ("run.refuses_url", f"A base URL that is not HTTP {invalid}.", REQUEST,
         _refuses("a base URL of FTP", base_url="ftp://host/v1")),
        ("run.refuses_key", f"A key that is too short, or has a space, {invalid}.", REQUEST,
         _refuses("a key with a space", api_key="a key that has spaces in it")),  # pragma: allowlist secret
        ("run.error_class", "The class of an error in google.rpc.ErrorInfo is of the domain quartet, and fits the status code.",
         ERRORS, lambda runs: require_class(_no_session(runs))),
        ("run.error_text", "The text of an error is one line that is not too long.", ERRORS,
         lambda runs: require_text(_no_session(runs))),
        ("run.garbage", "A request that is not the message fails, and the service continues.", "docs/threat-model.md",
         _garbage),
        ("run.status", "GetStatus answers at once, also while agents run.", "proto/quartet/v1/status.proto", _status),
        ("run.large_message", f"A message of {LARGE_MESSAGE // 1024**2} MiB is accepted, and unknown fields are ignored.",
         LIMITS, _large_message),
    ]  # fmt: skip
    return [Check(id_, requirement, source, within(_opened, run)) for id_, requirement, source, run in listed]
