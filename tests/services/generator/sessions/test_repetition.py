"""Requests that are sent again, and connections that are lost: each request is answered once."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable

import httpx2 as httpx
import openai
import pytest
from starlette.requests import Request

from quartet.contract.agent import AgentResult, AgentRun
from quartet.services.generator.sessions import app
from tests.services.generator.sessions.agent_requests import ask, fine_after, post, user
from tests.services.generator.sessions.harness import Rig, Script, wait_until

Scripted = Callable[[Script], Rig]


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": "1"}, {"idempotency-key": "a"}])
def test_a_repeated_request_gets_the_same_answer(rig: Rig, run: str, headers: dict[str, str]) -> None:
    def agent(start: AgentRun) -> AgentResult:
        first = post(start, [user("one")], {name: value for name, value in headers.items() if name[0] == "i"}, n=2)
        assert first.status_code == 200
        again = post(start, [user("one")], headers, n=2)
        assert again.content == first.content
        # Without a sign of a repetition, it is another request.
        assert post(start, [user("one")], n=2).content != first.content
        return AgentResult(1.0)

    [result] = rig.checked(rig.batch(run), agent)
    assert len(result.turns) == 4


def test_an_idempotency_key_is_for_one_request(rig: Rig, run: str) -> None:
    def agent(start: AgentRun) -> AgentResult:
        assert post(start, [user("one")], {"idempotency-key": "a"}).status_code == 200
        other = post(start, [user("two")], {"idempotency-key": "a"})
        assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_error")
        return AgentResult(1.0)

    rig.checked(rig.batch(run), agent)


def test_requests_with_other_idempotency_keys_get_answers_of_their_own(scripted: Scripted, run: str) -> None:
    """Also a repetition whose first request got an error, and one after a lost answer."""
    go = threading.Event()
    rig = scripted(fine_after(go))

    def agent(start: AgentRun) -> AgentResult:
        with pytest.raises(httpx.ReadTimeout):
            post(start, [user("one")], {"idempotency-key": "lost"}, timeout=0.3)
        wait_until(lambda: not rig.server._waiting)
        go.set()
        headers = ({"idempotency-key": "a"}, {"idempotency-key": "b", "x-stainless-retry-count": "1"}, {})
        answers = [post(start, [user("one")], each).json()["id"] for each in (*headers, {"idempotency-key": "lost"})]
        assert len({*answers}) == 4
        assert post(start, [user("one")], headers[1]).json()["id"] == answers[1]
        return AgentResult(1.0)

    [result] = rig.checked(rig.batch(run), agent)
    assert rig.turns["generated"] == len(result.turns) == 4


def test_a_request_that_was_refused_is_new_when_the_client_repeats_it(
    scripted: Scripted, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MAX_WAITING", 3)
    refused = threading.Event()
    rig, ids = scripted(fine_after(refused)), list[str]()

    def agent(start: AgentRun) -> AgentResult:
        client = openai.OpenAI(base_url=start.base_url, api_key=start.api_key, max_retries=9)
        threads = [
            threading.Thread(
                target=lambda: ids.append(client.chat.completions.create(model=start.model, messages=[user("one")]).id)
            )
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: any(session.refused >= 3 for session in rig.server._sessions.values()))
        refused.set()
        for thread in threads:
            thread.join()
        return AgentResult(1.0)

    rig.checked(rig.batch(run), agent)
    assert len({*ids}) == 6


def test_a_repetition_that_ends_early_does_not_take_back_an_answer(
    scripted: Scripted, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = scripted(lambda prompt: "fine")

    async def always(request: Request) -> bool:
        return True

    def agent(start: AgentRun) -> AgentResult:
        assert post(start, [user("one")], {"idempotency-key": "a"}).status_code == 200
        monkeypatch.setattr(Request, "is_disconnected", always)
        assert post(start, [user("one")], {"idempotency-key": "a"}).status_code == 200
        return AgentResult(1.0)

    [result] = rig.checked(rig.batch(run), agent)
    assert len(result.turns) == 1


def test_a_repetition_may_differ_in_fields_without_an_effect(rig: Rig, run: str) -> None:
    attempts: list[AgentRun] = []

    def agent(start: AgentRun) -> AgentResult:
        attempts.append(start)
        answer = post(start, [user("one")], metadata={"trace": str(len(attempts))}, seed=len(attempts))
        assert answer.status_code == 200
        assert len(attempts) == 2, "the first attempt fails"
        return AgentResult(1.0)

    rig.max_attempts = lambda outcome: 2
    rig.play(rig.batch(run), agent)
    assert rig.turns == {"generated": 1, "recorded": 1}


def test_a_connection_that_ends_before_its_answer_leaves_it_to_the_next_request(scripted: Scripted, run: str) -> None:
    asked, go = threading.Event(), threading.Event()

    def script(prompt: str) -> str:
        asked.set()
        assert go.wait(20)
        return f"answer {len(rig.engine.requests)}"

    rig = scripted(script)

    def agent(start: AgentRun) -> AgentResult:
        with pytest.raises(httpx.ReadTimeout):
            post(start, [user("one")], timeout=0.3)
        assert asked.is_set()
        go.set()
        assert ask(start, [user("one")]).choices[0].message.content == "answer 1"
        assert ask(start, [user("one")]).choices[0].message.content == "answer 2"
        return AgentResult(1.0)

    [result] = rig.checked(rig.batch(run), agent)
    assert len(result.turns) == 2


def test_an_answer_that_the_agent_never_got_is_no_part_of_the_episode(scripted: Scripted, run: str) -> None:
    go = threading.Event()

    def script(prompt: str) -> str:
        if "two" in prompt:
            assert go.wait(20)
        return "fine"

    rig = scripted(script)

    def agent(start: AgentRun) -> AgentResult:
        ask(start, [user("one")])
        with pytest.raises(openai.APITimeoutError):
            ask(start, [user("two")], timeout=0.3)
        threading.Timer(0.2, go.set).start()
        return AgentResult(0.5)

    [result] = rig.checked(rig.batch(run), agent)
    assert len(result.turns) == 1
    assert result.turn_rewards == (0.5,)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_may_end_as_soon_as_it_has_its_answer(
    scripted: Scripted, run: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the server is slow."""
    rig, is_disconnected = scripted(lambda prompt: "fine"), Request.is_disconnected

    async def slowly(request: Request) -> bool:
        await asyncio.sleep(0.3)
        return await is_disconnected(request)

    monkeypatch.setattr(Request, "is_disconnected", slowly)

    def agent(start: AgentRun) -> AgentResult:
        with openai.OpenAI(base_url=start.base_url, api_key=start.api_key, max_retries=0) as client:
            answer = client.chat.completions.create(model=start.model, messages=[user("one")], stream=stream)
            if stream:
                assert next(chunk for chunk in answer if chunk.choices[0].finish_reason)
        return AgentResult(1.0)

    [result] = rig.checked(rig.batch(run), agent)
    assert len(result.turns) == 1


def test_a_request_whose_client_left_while_it_waited_is_not_generated(scripted: Scripted, run: str) -> None:
    go = threading.Event()
    rig = scripted(fine_after(go))

    def agent(start: AgentRun) -> AgentResult:
        first = threading.Thread(target=lambda: ask(start, [user("one")]))
        first.start()
        wait_until(lambda: len(rig.engine.requests) == 1)
        with pytest.raises(openai.APITimeoutError):
            ask(start, [user("two")], timeout=0.3)
        go.set()
        first.join()
        assert ask(start, [user("three")]).choices[0].message.content == "fine"
        return AgentResult(1.0)

    rig.checked(rig.batch(run), agent)
    assert [request.turn for request in rig.engine.requests] == [0, 1]


def test_the_client_repeats_a_request_by_itself_after_a_lost_connection(scripted: Scripted, run: str) -> None:
    rig = scripted(lambda prompt: f"answer {len(rig.engine.requests)}")
    losses = Counter[str]()

    def agent(start: AgentRun) -> AgentResult:
        host, _, port = rig.server.address.rpartition(":")
        proxy = socket.create_server(("127.0.0.1", 0))

        def forward() -> None:
            """Send the first request on and drop its response; let the second one pass."""
            for number in range(2):
                inside, _ = proxy.accept()
                outside = socket.create_connection((host, int(port)))
                data = b""
                while b"}]" not in data:
                    data += inside.recv(65536)
                outside.sendall(data)
                response = b""
                while not response.endswith(b"}}"):
                    response += outside.recv(65536)
                if number:
                    inside.sendall(response)
                else:
                    losses["response"] += 1
                inside.close()
                outside.close()

        thread = threading.Thread(target=forward)
        thread.start()
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{proxy.getsockname()[1]}/v1", api_key=start.api_key, max_retries=2
        )
        answer = client.chat.completions.create(model=start.model, messages=[user("one")])
        assert answer.choices[0].message.content == "answer 1"
        thread.join()
        proxy.close()
        return AgentResult(1.0)

    [result] = rig.checked(rig.batch(run), agent)
    assert losses == {"response": 1}
    assert len(rig.engine.requests) == len(result.turns) == 1
