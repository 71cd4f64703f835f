"""Errors and limits as the official client of OpenAI sees them, and the end of a key."""

from __future__ import annotations

from collections.abc import Callable

import openai
import pytest

from quartet.contract.agent import AgentResult, AgentRun
from quartet.contract.trajectory import FinishReason, Outcome
from tests.services.generator.sessions.harness import Rig, Script
from tests.services.generator.sessions.test_openai_client import client_of, user

Scripted = Callable[[Script], Rig]


def test_errors_are_those_of_the_api(rig: Rig, run: str) -> None:
    def agent(start: AgentRun) -> AgentResult:
        client, messages = client_of(start), [user("one")]
        with pytest.raises(openai.NotFoundError) as not_found:
            client.chat.completions.create(model="gpt-4o", messages=messages)
        assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-4o")
        assert client.models.retrieve(start.model).id == start.model
        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            client.chat.completions.create(model=start.model, messages=messages, logprobs=True, top_logprobs=2)
        with pytest.raises(openai.BadRequestError, match=r"no such role.*may not know the role bad, expected system"):
            client.chat.completions.create(model=start.model, messages=[{"role": "bad", "content": "x"}])
        with pytest.raises(openai.NotFoundError, match="POST /v1/chat/completions"):
            client.embeddings.create(model=start.model, input="x")
        with pytest.raises(openai.BadRequestError, match="outside 0"):
            client.completions.create(model=start.model, prompt=[100_000])
        wrong = openai.OpenAI(base_url=start.base_url, api_key="quartet-wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError, match="Wrong API key") as refused:
            wrong.chat.completions.create(model=start.model, messages=messages)
        assert refused.value.code == "invalid_api_key"
        client.chat.completions.create(model=start.model, messages=messages, max_tokens=2)
        return AgentResult(0.5)

    [trajectory] = rig.checked(rig.batch(run), agent)
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("turns", "max_turns"),
        ("branches", "max_branches"),
        ("tokens", "max_tokens"),
        ("context", "context_length_exceeded"),
    ],
)
def test_a_limit_is_an_error_that_names_it_and_the_reason_of_the_end(
    scripted: Scripted, run: str, limit: str, code: str
) -> None:
    rig = scripted(lambda prompt: "one two three…")
    rig.max_branches = 2 if limit == "branches" else 16
    rig.max_tokens = 7 if limit == "tokens" else None
    rig.max_prompt_tokens = 60

    def agent(start: AgentRun) -> AgentResult:
        client = client_of(start)

        def ask_on() -> None:
            for number in range(9):
                text = "long " * 100 if limit == "context" and number else f"try {number}"
                client.chat.completions.create(model=start.model, messages=[user(text)], max_tokens=3)

        with pytest.raises(openai.BadRequestError) as caught:
            ask_on()
        assert caught.value.code == code
        return AgentResult(0.5)

    [trajectory] = rig.checked(rig.batch(run, max_turns=3 if limit == "turns" else 8, limit=30), agent)
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert trajectory.turn_rewards[-1] == 0.5
    assert sum(len(turn.token_ids) for turn in trajectory.turns) <= 9


def test_answers_that_need_more_branches_than_are_left_are_refused_before_the_first(rig: Rig, run: str) -> None:
    rig.max_branches = 2

    def agent(start: AgentRun) -> AgentResult:
        client = client_of(start)
        with pytest.raises(openai.BadRequestError, match="it begins 3 conversations, 2 are left of the 2") as refused:
            client.chat.completions.create(model=start.model, messages=[user("one")], n=3, max_tokens=2)
        assert refused.value.code == "max_branches"
        assert (
            len(client.chat.completions.create(model=start.model, messages=[user("one")], n=2, max_tokens=2).choices)
            == 2
        )
        return AgentResult(1.0)

    rig.checked(rig.batch(run), agent)
    assert rig.turns["generated"] == 2


def test_an_agent_that_goes_on_after_a_limit_ends_normally(rig: Rig, run: str) -> None:
    def agent(start: AgentRun) -> AgentResult:
        client = client_of(start)
        with pytest.raises(openai.BadRequestError, match="prompt has"):
            client.chat.completions.create(model=start.model, messages=[user("one " * 4000)])
        client.chat.completions.create(model=start.model, messages=[user("the summary")], max_tokens=2)
        return AgentResult(1.0)

    [trajectory] = rig.checked(rig.batch(run), agent)
    assert trajectory.finish_reason is FinishReason.DONE


def test_an_agent_that_fails_at_a_limit_is_a_failure_that_names_it(rig: Rig, run: str) -> None:
    def agent(start: AgentRun) -> AgentResult:
        client = client_of(start)
        client.chat.completions.create(model=start.model, messages=[user("one")], max_tokens=2)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=start.model, messages=[user("two")], max_tokens=2)
        return AgentResult.failed(Outcome.ENVIRONMENT_ERROR, "agent: ended with status 1")

    [trajectory] = rig.checked(rig.batch(run, max_turns=1), agent)
    assert (trajectory.finish_reason, trajectory.outcome) == (FinishReason.FAILED, Outcome.ENVIRONMENT_ERROR)
    assert trajectory.detail.startswith("agent: ended with status 1; it had got the error max_turns of a limit")


def test_a_key_ends_with_its_episode(rig: Rig, run: str) -> None:
    runs: list[AgentRun] = []

    def agent(start: AgentRun) -> AgentResult:
        client_of(start).chat.completions.create(model=start.model, messages=[user("one")], max_tokens=2)
        runs.append(start)
        return AgentResult(1.0)

    rig.checked(rig.batch(run, 2), agent)
    assert len({start.api_key for start in runs}) == 2
    with pytest.raises(openai.AuthenticationError, match="episode of this API key has ended"):
        client_of(runs[0]).models.list()
