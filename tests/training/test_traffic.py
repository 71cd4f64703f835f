"""Training on the sessions of users: each one with a reward is trained exactly once, whatever process is lost."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx2 as httpx
import openai
import pytest
from prometheus_client import CollectorRegistry

from quartet.buffer.traffic import TrafficStore
from quartet.errors import ServiceFailed
from quartet.services.generator import factory, generator, servicer
from quartet.services.generator.attestation import Attestation
from quartet.services.generator.sessions.metrics import TrafficMetrics
from quartet.services.generator.sessions.traffic import TrafficSessions
from quartet.services.orchestrator.rollout.generator_pool import MAX_FAILURES
from tests.training.conftest import MakeConfig
from tests.training.generator_runs import Generators, active_run_with_generators
from tests.training.runs import ActiveRun, Run, wait_for
from tests.waiting import LIMIT

TEMPLATE = "{% for message in messages %}{{ message.content }};{% endfor %}"
VIEWER = "viewer-0123456789ab"  # pragma: allowlist secret
OTHER = "viewer-abcdefghijkl"  # pragma: allowlist secret
OPERATOR = "operator-0123456789ab"  # pragma: allowlist secret
STEPS, SESSIONS = 4, 4
"""Steps of a run, and sessions of a step."""


@dataclass
class Endpoint:
    """The servers of all generators that have started, the newest one last, and a run with them."""

    servers: list[TrafficSessions] = field(default_factory=list)
    active: ActiveRun | None = None
    generators: Generators | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    answers: dict[str, list[str]] = field(default_factory=dict)

    @property
    def model(self) -> str:
        assert self.active is not None
        return self.active.config.run.name

    def url(self, number: int = -1) -> str:
        return f"http://{self.servers[number]._server.address}/v1"

    def client(self, key: str = VIEWER, number: int = -1, **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(api_key=key, base_url=self.url(number), **{"max_retries": 0, "timeout": LIMIT, **settings})

    def request(self, method: str, path: str, key: str = OPERATOR, **arguments: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.request(method, f"{self.url()}{path}", headers=headers, timeout=LIMIT, **arguments)

    def ask(self, session: str | None, *texts: str, key: str = VIEWER, number: int = -1, **fields: Any) -> Any:
        """Send the texts of a conversation, those of the user and the policy in turn, and return the response."""
        roles = ("user", "assistant")
        messages: Any = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
        headers = {} if session is None else {"x-session-id": session}
        with self.client(key, number) as client:
            create = client.chat.completions.create
            result = create(model=self.model, messages=messages, extra_headers=headers, **fields)
            return list(result) if fields.get("stream") else result

    def reward(self, session: str, reward: Any, **fields: Any) -> httpx.Response:
        return self.request("POST", f"/sessions/{session}/reward", json={"reward": reward, **fields})

    def state(self, session: str) -> str:
        return str(self.request("GET", f"/sessions/{session}").json()["state"])

    def converse(self, session: str, turns: int) -> None:
        """Hold a conversation to its end, and give its reward. Each turn goes to the next server, and again if it fails."""
        texts, answers = ["ab"], list[str]()
        for turn in range(turns):
            for attempt in count():
                try:
                    answer = self.ask(session, *texts, number=-1 - (turn + attempt) % min(2, len(self.servers)))
                except openai.APIError:
                    assert attempt < 200
                    threading.Event().wait(0.05)
                    continue
                break
            answers.append(answer.choices[0].message.content or "")
            texts += [answers[-1], "cd"]
        reward = float(len(self.rewards) % 5)
        for attempt in count():
            try:
                response = self.reward(session, reward)
            except httpx.HTTPError:
                response = None
            if response is not None and response.status_code == 200:
                break
            assert attempt < 200, response
            threading.Event().wait(0.05)
        self.answers[session], self.rewards[session] = answers, reward


@pytest.fixture(scope="module")
def settings(make: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function that returns a config of a run with traffic, with changes."""
    folder = tmp_path_factory.mktemp("traffic")
    for name, text in {"template": TEMPLATE, "viewers": f"{VIEWER}\n{OTHER}\n", "operators": OPERATOR}.items():
        (folder / name).write_text(text)

    def config(traffic: dict[str, Any] | None = None, **changes: Any) -> Any:
        tree: dict[str, Any] = {
            "run": {"steps": STEPS},
            "data": {"prompts": None, "max_prompt_tokens": 60},
            "rollout": {
                "prompts_per_step": SESSIONS,
                "max_turns": 4,
                "max_turn_tokens": 5,
                "max_response_tokens": 60,
                "generators": 1,
                "max_off_policy_steps": 4,
                "in_flight_updates": True,
            },
            "checkpoint": {"every_steps": 2},
            "reward": {"source": "none", "model": None},
            "environment": {
                "kind": "traffic",
                "chat_template": str(folder / "template"),
                "traffic": {
                    "viewer_keys_file": str(folder / "viewers"),
                    "operator_keys_file": str(folder / "operators"),
                    "requests_per_minute": 100_000,
                    **(traffic or {}),
                },
            },
            "recovery": {"backoff_seconds": 0.01},
        }
        return make(**{name: {**tree.get(name, {}), **changes.get(name, {})} for name in {*tree, *changes}})

    return config


@pytest.fixture(scope="module")
def start(settings: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Return a function that returns a context with the endpoint of a run."""

    @contextmanager
    def started(count: int = 1, traffic: dict[str, Any] | None = None, **changes: Any) -> Iterator[Endpoint]:
        endpoint, create = Endpoint(), factory.traffic_sessions

        def traffic_sessions(*arguments: Any) -> Any:
            result = create(*arguments)
            if result is not None:
                endpoint.servers.append(result)
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(factory, "traffic_sessions", traffic_sessions)
            with active_run_with_generators(settings(traffic, **changes), count) as (active, generators):
                endpoint.active, endpoint.generators = active, generators
                wait_for(active, lambda: _has_weights(endpoint))
                yield endpoint
                active.control.stop()

    return started


def _has_weights(endpoint: Endpoint, number: int = -1) -> bool:
    try:
        endpoint.ask(None, "ab", store=False, number=number)
    except openai.InternalServerError:
        return False
    return True


@pytest.fixture(scope="module")
def waiting(start: Callable[..., Any]) -> Iterator[Endpoint]:
    """A run whose first step waits for more sessions than the tests end."""
    with start(rollout={"prompts_per_step": 512}) as endpoint:
        yield endpoint


def test_a_session_continues_with_the_ids_that_were_generated(waiting: Endpoint) -> None:
    first = waiting.ask("chat", "ab")
    assert first.session_id == "chat"
    text = first.choices[0].message.content
    second = waiting.ask("chat", "ab", text, "cd")
    # One sequence: the ids of the first answer, and those of ";cd;" after it.
    expected = first.usage.prompt_tokens + first.usage.completion_tokens + 4
    assert second.usage.prompt_tokens in (expected, expected - 1)
    assert waiting.request("GET", "/sessions/chat").json() == {
        "id": "chat",
        "object": "session",
        "state": "open",
        "requests": 2,
    }


def test_a_request_without_an_id_opens_a_session_that_its_answer_names(waiting: Endpoint) -> None:
    with waiting.client() as client:
        raw = client.completions.with_raw_response.create(model=waiting.model, prompt="ab", max_tokens=3)
    session = raw.headers["x-session-id"]
    assert raw.parse().session_id == session  # type: ignore[attr-defined]
    assert waiting.state(session) == "open"
    assert waiting.reward(session, 0.5).json() == {
        "id": session,
        "object": "session",
        "state": "rewarded",
        "requests": 1,
        "reward": 0.5,
    }


def test_streams_name_their_session(waiting: Endpoint) -> None:
    chunks = waiting.ask("streamed", "ab", stream=True)
    assert {chunk.session_id for chunk in chunks} == {"streamed"}


def test_a_request_with_store_false_leaves_nothing_behind(waiting: Endpoint) -> None:
    answer = waiting.ask("private", "ab", store=False)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert waiting.request("GET", "/sessions/private").status_code == 404
    waiting.ask("mixed", "ab")
    waiting.ask("mixed", "secret", store=False)
    assert waiting.request("GET", "/sessions/mixed").json()["requests"] == 1


def test_keys_of_viewers_give_no_rewards_and_see_no_sessions(waiting: Endpoint) -> None:
    waiting.ask("guarded", "ab")
    for method, path in (("POST", "/reward"), ("GET", ""), ("DELETE", "")):
        response = waiting.request(method, f"/sessions/guarded{path}", VIEWER, content='{"reward": 1}')
        assert (response.status_code, response.json()["error"]["code"]) == (403, "permission_denied")
    response = waiting.request("GET", "/models", "wrong")
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert waiting.request("GET", "/models", VIEWER).json()["data"][0]["id"] == waiting.model


def test_users_do_not_see_sessions_of_other_keys(waiting: Endpoint) -> None:
    waiting.ask("mine", "ab")
    with pytest.raises(openai.ConflictError, match="another key"):
        waiting.ask("mine", "ab", key=OTHER)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "expected a JSON object"),
        (b"[1]", "expected an object such as"),
        (b'{"reward": "1"}', "expected a number from"),
        (b'{"reward": true}', "expected a number from"),
        (b'{"reward": NaN}', "expected a number from"),
        (b'{"reward": 1, "step": 2}', "expected an object such as"),
        (b'{"reward": 1, "logged": [1]}', "expected an object of numbers"),
        (b'{"reward": 1, "logged": {"a": null}}', "expected an object of numbers"),
    ],
)
def test_a_malformed_reward_changes_nothing(waiting: Endpoint, body: bytes, problem: str) -> None:
    session = waiting.ask(None, "ab").session_id
    response = waiting.request("POST", f"/sessions/{session}/reward", content=body)
    assert response.status_code == 400
    assert problem in response.json()["error"]["message"]
    assert waiting.state(session) == "open"


def test_a_session_has_one_reward_and_ends_with_it(waiting: Endpoint) -> None:
    waiting.ask("ended", "ab")
    logged = {"a": 1, "b": "x"}
    assert waiting.reward("ended", 1, logged=logged).status_code == 200
    assert waiting.reward("ended", 1.0, logged=dict(reversed(logged.items()))).status_code == 200
    for reward, other in ((2, logged), (1, {"a": 1}), (1, None)):
        refused = waiting.reward("ended", reward, logged=other)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_ended")
    with pytest.raises(openai.ConflictError, match="begin another one"):
        waiting.ask("ended", "ab")
    assert waiting.reward("never", 1).status_code == 404


def test_a_deleted_session_is_gone(waiting: Endpoint) -> None:
    waiting.ask("withdrawn", "ab")
    for method in ("DELETE", "GET"):
        found = waiting.request(method, "/sessions/withdrawn").json()
        assert (found["state"], found["requests"]) == ("deleted", 1)
    assert waiting.reward("withdrawn", 1).json()["error"]["code"] == "session_ended"


@pytest.mark.parametrize("id", ["", "a b", "é", "x" * 129, "a/b"])
def test_an_unusable_id_is_refused(waiting: Endpoint, id: str) -> None:
    headers = {"authorization": f"Bearer {VIEWER}", "x-session-id": id.encode()}
    body = {"model": waiting.model, "prompt": "ab"}
    response = httpx.post(f"{waiting.url()}/completions", headers=headers, json=body, timeout=LIMIT)
    assert response.status_code == 400
    assert "X-Session-Id" in response.json()["error"]["message"]


def test_a_request_with_two_ids_is_refused(waiting: Endpoint) -> None:
    headers = [("authorization", f"Bearer {VIEWER}"), ("x-session-id", "one"), ("x-session-id", "two")]
    body = {"model": waiting.model, "prompt": "ab"}
    response = httpx.post(f"{waiting.url()}/completions", headers=headers, json=body, timeout=LIMIT)
    assert response.status_code == 400
    assert "X-Session-Id: expected one header, not 2" in response.json()["error"]["message"]


def test_a_refused_first_request_leaves_no_session(waiting: Endpoint) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        waiting.ask("refused", "a" * 500)
    assert refused.value.code == "context_length_exceeded"
    assert waiting.request("GET", "/sessions/refused").status_code == 404
    # Its id belongs to no one.
    assert waiting.ask("refused", "ab", key=OTHER).session_id == "refused"
    assert waiting.state("refused") == "open"


def test_metrics_count_responses_and_sessions_that_wait(waiting: Endpoint) -> None:
    registry, traffic = CollectorRegistry(), waiting.servers[-1]
    registry.register(TrafficMetrics(traffic.responses, traffic.waiting))

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(f"quartet_traffic_{name}", labels) or 0.0

    before = [value("requests_total", status=status) for status in ("2xx", "4xx", "5xx")]
    opened = value("sessions", state="open")
    for id in ("counted", "counted-open"):
        waiting.ask(id, "ab")
    waiting.reward("counted", 1)
    waiting.request("GET", "/models", "wrong")
    assert [value("requests_total", status=status) for status in ("2xx", "4xx", "5xx")] == [
        before[0] + 3,
        before[1] + 1,
        before[2],
    ]
    assert value("sessions", state="open") == opened + 1
    # The step takes those with a reward.
    assert registry.get_sample_value("quartet_traffic_sessions", {"state": "rewarded"}) is not None


def test_errors_for_users_speak_of_sessions(waiting: Endpoint) -> None:
    def error(**fields: Any) -> str:
        key, path = fields.pop("key", VIEWER), fields.pop("path", "/completions")
        body = {"model": waiting.model, "prompt": "ab", **fields}
        return waiting.request("POST", path, key, json=body).text

    texts = [
        error(prompt="a" * 500),
        error(n=5),
        error(model="other"),
        httpx.get(f"{waiting.url()}/models", timeout=LIMIT).text,
        error(key="wrong"),
        waiting.request("GET", "/models/other", VIEWER).text,
    ]
    waiting.ask("ended-early", "ab")
    waiting.reward("ended-early", 1)
    with pytest.raises(openai.ConflictError) as ended:
        waiting.ask("ended-early", "ab")
    assert all("message" in text for text in texts)
    for text in (*texts, str(ended.value)):
        assert "agent" not in text.replace("environment.agent.", "")
        assert "episode" not in text


def test_concurrent_requests_of_many_sessions_are_all_answered(waiting: Endpoint) -> None:
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda number: waiting.ask(f"many-{number}", "ab"), range(32)))
    assert {answer.session_id for answer in answers} == {f"many-{number}" for number in range(32)}


def test_an_engine_that_takes_no_requests_in_between_answers_users_in_batches(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class TakesTurns:
        """A class that the engine is not of."""

    monkeypatch.setattr(generator, "TurnEngine", TakesTurns)
    with start(rollout={"prompts_per_step": 512}) as endpoint, ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda number: endpoint.ask(f"batched-{number}", "ab"), range(8)))
        assert len({answer.session_id for answer in answers}) == 8


def test_too_many_requests_and_sessions_get_a_429(start: Callable[..., Any]) -> None:
    limits = {"requests_per_minute": 12, "max_sessions": 2}
    with start(traffic=limits, rollout={"prompts_per_step": 512}) as endpoint:
        for id in ("a", "b"):
            endpoint.ask(id, "ab", key=OTHER)
        with pytest.raises(openai.RateLimitError, match="wait for a reward") as refused:
            endpoint.ask("c", "ab", key=OTHER)
        assert int(refused.value.response.headers["retry-after"]) > 0
        # Those that are open continue.
        endpoint.ask("a", "ab", key=OTHER)
        with ThreadPoolExecutor(4) as threads:
            requests = [threads.submit(endpoint.ask, "a", "ab", store=False, key=OTHER) for _ in range(12)]
        assert any("More than 12 requests" in str(request.exception()) for request in requests)
        assert endpoint.state("a") == "open"


def trained(run: Run) -> list[dict[str, Any]]:
    """Return the trajectories of all steps, in order, and check their versions."""
    rows = [row for step in range(1, STEPS + 1) for row in run.trajectories(step)]
    for row in rows:
        assert row["policy_version"] < int(row["id"].split("/")[1])
    return rows


def test_sessions_are_trained_once_although_generator_and_actor_are_lost(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(2) as endpoint:
        stop = threading.Event()

        def users(number: int) -> None:
            for index in count():
                if stop.is_set():
                    return
                endpoint.converse(f"user-{number}-{index}", 1 + index % 3)

        threads = [threading.Thread(target=users, args=[number]) for number in range(3)]
        for thread in threads:
            thread.start()
        addresses = endpoint.generators.addresses
        for step, address in ((1, addresses[0]), (2, addresses[1])):
            wait_for(endpoint.active, lambda step=step: endpoint.active.board.current().step >= step)
            endpoint.generators.replace(address)
        run = endpoint.active.finish()
        stop.set()
        for thread in threads:
            thread.join(LIMIT)
        rows = trained(run)
        sessions = [row["logged"]["session"] for row in rows]
        assert len(set(sessions)) == len(sessions) == STEPS * SESSIONS
        for row in rows:
            session = row["logged"]["session"]
            assert row["score"] == endpoint.rewards[session]
            branches = [row, *row.get("further_branches", [])]
            policy = [each for branch in branches for each in branch["segments"] if each["role"] == "policy"]
            assert len(policy) == len(endpoint.answers[session])
        left = {id for id in endpoint.rewards if id not in sessions}
        assert {endpoint.state(id) for id in left} <= {"rewarded", "stale", "taken"}
    assert run.code == 0, run.progress.error


def test_any_generator_answers_a_repeated_idempotency_key(start: Callable[..., Any]) -> None:
    with start(2, rollout={"prompts_per_step": 512}) as endpoint:
        headers = {"idempotency-key": "once", "x-session-id": "shared"}

        def answer(number: int, text: str = "ab") -> Any:
            with endpoint.client(number=number) as client:
                return client.completions.create(model=endpoint.model, prompt=text, extra_headers=headers)

        wait_for(endpoint.active, lambda: _has_weights(endpoint, 0))
        first = answer(0)
        assert answer(1).choices == answer(0).choices == first.choices
        with pytest.raises(openai.BadRequestError) as refused:
            answer(1, "cd")
        assert refused.value.code == "idempotency_error"
        assert endpoint.request("GET", "/sessions/shared").json()["requests"] == 1


def test_a_session_of_damaged_weights_is_not_trained_although_its_reward_comes_first(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    takes, changed, damages = list[str | None](), Attestation.changed, threading.Event()
    may_read, take = threading.Event(), TrafficStore.take
    may_read.set()

    def read_back(*arguments: Any) -> tuple[list[str], int]:
        assert may_read.wait(LIMIT)
        return (["damaged"], 1) if damages.is_set() else changed(*arguments)

    def taken(*arguments: Any) -> str | None:
        takes.append(take(*arguments))
        return takes[-1]

    monkeypatch.setattr(Attestation, "changed", read_back)
    monkeypatch.setattr(TrafficStore, "take", taken)
    with start(run={"steps": 1}) as endpoint:
        may_read.clear()
        damages.set()
        for number in range(SESSIONS):
            endpoint.converse(f"damaged-{number}", 1)
        # The step looks for sessions, and the weights are not read back yet.
        looks = len(takes) + 3
        wait_for(endpoint.active, lambda: len(takes) >= looks)
        assert {endpoint.state(f"damaged-{number}") for number in range(SESSIONS)} == {"rewarded"}
        may_read.set()
        wait_for(endpoint.active, lambda: endpoint.state("damaged-0") == "unusable")
        damages.clear()
        for number in range(SESSIONS):
            endpoint.converse(f"whole-{number}", 1)
        run = endpoint.active.finish()
    assert run.code == 0, run.progress.error
    assert {row["logged"]["session"] for row in run.trajectories(1)} == {f"whole-{index}" for index in range(SESSIONS)}


def test_busy_users_do_not_delay_the_attestation_of_others(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The servings of these tests end by themselves only.
    monkeypatch.setattr(servicer, "MAX_SERVING_SECONDS", 10 * LIMIT)
    with start(run={"steps": 2}) as endpoint:
        stop = threading.Event()

        def users(number: int) -> None:
            for index in count():
                if stop.is_set():
                    return
                endpoint.converse(f"busy-{number}-{index}", 1)

        threads = [threading.Thread(target=users, args=[number]) for number in range(2)]
        for thread in threads:
            thread.start()
        run = endpoint.active.finish()
        stop.set()
        for thread in threads:
            thread.join(LIMIT)
    assert run.code == 0, run.progress.error


def test_a_new_run_does_not_take_sessions_of_an_earlier_one_with_its_name(
    settings: Callable[..., Any], start: Callable[..., Any], redis_url: str
) -> None:
    changes = {"run": {"steps": 1, "name": "replaced"}, "buffer": {"url": redis_url}}
    with start(**changes) as endpoint:
        # More than the step takes.
        for number in range(SESSIONS + 2):
            endpoint.converse(f"earlier-{number}", 1)
        assert endpoint.active.finish().code == 0
    shutil.rmtree(endpoint.active.config.run_directory)
    with start(**changes) as endpoint:
        assert endpoint.request("GET", "/sessions/earlier-0").status_code == 404
        for number in range(SESSIONS):
            endpoint.converse(f"later-{number}", 1)
        run = endpoint.active.finish()
    assert run.code == 0, run.progress.error
    assert {row["logged"]["session"] for row in run.trajectories(1)} == {f"later-{index}" for index in range(SESSIONS)}


def test_the_first_answer_that_an_engine_fails_is_shown_once(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check, fails, failed = generator.check_response, threading.Event(), list[int]()

    def broken(*arguments: Any) -> Any:
        if fails.is_set():
            failed.append(1)
            raise ServiceFailed("the engine is broken")
        return check(*arguments)

    monkeypatch.setattr(generator, "check_response", broken)
    with start(run={"steps": 1}) as endpoint:
        fails.set()

        def shown() -> list[str]:
            return [note for note in endpoint.active.board.current().notes if "does not answer users" in note]

        for number in range(2):
            with pytest.raises(openai.InternalServerError):
                endpoint.ask(f"failed-{number}", "ab")
            wait_for(endpoint.active, lambda: shown() != [])
        fails.clear()
        for number in range(SESSIONS):
            endpoint.converse(f"answered-{number}", 1)
        run = endpoint.active.finish()
        (note,) = shown()
    assert note.startswith("warning: generator ")
    assert "the engine is broken" in note
    assert len(failed) >= 1
    assert not [each for each in run.progress.notes if "in_flight" in each]


def test_a_step_without_users_waits_longer_than_the_limit_of_a_call(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, take = list[int](), generator.Generator._take_sessions

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return take(*arguments)

    monkeypatch.setattr(generator.Generator, "_take_sessions", counted)
    with start(run={"steps": 1}, timeouts={"generate_seconds": 0.5}) as endpoint:
        endpoint.converse("first", 1)
        wait_for(endpoint.active, lambda: len(calls) > 2 * MAX_FAILURES + 2)
        for number in range(1, SESSIONS):
            endpoint.converse(f"later-{number}", 1)
        run = endpoint.active.finish()
    assert run.code == 0, run.progress.error
    assert "first" in {row["logged"]["session"] for row in run.trajectories(1)}


def test_a_session_that_is_too_old_is_not_trained(start: Callable[..., Any]) -> None:
    with start(run={"steps": 1000}, rollout={"max_off_policy_steps": 1}) as endpoint:
        endpoint.ask("old", "ab")
        for number in count():
            endpoint.converse(f"new-{number}", 1)
            if endpoint.active.board.current().step >= 2:
                break
        # The step that takes it is the third one at least.
        assert endpoint.reward("old", 100.0).status_code == 200
        for number in count():
            if endpoint.state("old") != "rewarded":
                break
            endpoint.converse(f"newer-{number}", 1)
        assert endpoint.state("old") == "stale"
