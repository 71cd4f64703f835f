"""The endpoint of a run with traffic, and the users that talk to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx2 as httpx
import openai

from quartet.services.generator.sessions.traffic import TrafficSessions
from tests.training.generator_runs import Generators
from tests.training.runs import ActiveRun, Run
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


def train_on(endpoint: Endpoint, name: str) -> Run:
    """Let a run of one step train on new sessions with this name, and return it."""
    assert endpoint.active is not None
    sessions = {f"{name}-{number}" for number in range(SESSIONS)}
    for session in sorted(sessions):
        endpoint.converse(session, 1)
    run = endpoint.active.finish()
    assert run.code == 0, run.progress.error
    assert {row["logged"]["session"] for row in run.trajectories(1)} == sessions
    return run


@contextmanager
def busy_users(endpoint: Endpoint, count_users: int, turns: int = 1, pause: float = 0.0) -> Iterator[None]:
    """Let users hold conversations of up to ``turns`` turns inside the context, with a pause in seconds after each."""
    stop = threading.Event()

    def hold_conversations(user: int) -> None:
        for index in count():
            if stop.is_set():
                return
            endpoint.converse(f"user-{user}-{index}", 1 + index % turns)
            stop.wait(pause)

    threads = [threading.Thread(target=hold_conversations, args=[user]) for user in range(count_users)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(LIMIT)


def has_weights(endpoint: Endpoint, number: int = -1) -> bool:
    try:
        endpoint.ask(None, "ab", store=False, number=number)
    except openai.InternalServerError:
        return False
    return True
