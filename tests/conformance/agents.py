"""A service that runs agents in this process: each is one request to the endpoint. Correct, fast, and easy to make wrong."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from urllib.parse import urlsplit

from quartet.contract.agent import AgentResult, AgentRun
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import Outcome
from quartet.errors import ServiceBusy
from quartet.rewards.reward_source import parse_fields

MAX_AGENTS = 40


class TinyAgent:
    """One run: a request on a socket, which ``cancel`` shuts down."""

    def __init__(self, agents: TinyAgents, run: AgentRun) -> None:
        self.agents, self.run = agents, run
        self.socket: socket.socket | None = None
        self.cancelled = False
        self.lock = threading.Lock()

    def cancel(self) -> None:
        """See RunningAgent."""
        with self.lock:
            self.cancelled = True
            if self.socket is not None:
                self.socket.shutdown(socket.SHUT_RDWR)

    def result(self) -> AgentResult:
        """See RunningAgent."""
        try:
            return self.agents.finished(self, self.play())
        finally:
            self.agents.end(self)

    def play(self) -> AgentResult:
        """Ask the policy once; the reward is the length of the answer."""
        (fields,) = parse_fields([self.run.fields] if self.run.fields else (), 1)
        if fields.get("fail"):
            return AgentResult.failed(Outcome.ENVIRONMENT_ERROR, self.agents.cause(self.run))
        try:
            text = self.ask(self.agents.key(self.run))
        except OSError as error:
            return AgentResult.failed(Outcome.CANCELLED if self.cancelled else Outcome.ENVIRONMENT_ERROR, str(error))
        return AgentResult(float(len(text)), logged={"answer": text})

    def ask(self, key: str) -> str:
        """Send one chat and return the text of the answer. Raises OSError."""
        url = urlsplit(self.run.base_url)
        body = json.dumps({"model": self.run.model, "messages": [{"role": "user", "content": "hi"}]}).encode()
        head = (
            f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        connection = socket.create_connection((url.hostname, url.port), timeout=60)
        with connection:
            with self.lock:
                if self.cancelled:
                    raise OSError("was cancelled")
                self.socket = connection
            connection.sendall(head.encode() + body)
            answer = bytearray()
            while chunk := connection.recv(65536):
                answer += chunk
            with self.lock:
                self.socket = None
        _, _, text = bytes(answer).partition(b"\r\n\r\n")
        if not text:
            raise OSError("no answer")
        return str(json.loads(text)["choices"][0]["message"]["content"])


class TinyAgents:
    """Runs of an agent. See AgentHost."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: set[TinyAgent] = set()
        self.ended: Counter[Outcome] = Counter()

    def start(self, run: AgentRun) -> TinyAgent:
        """See AgentHost."""
        self.check(run)
        agent = TinyAgent(self, run)
        with self.lock:
            if len(self.running) >= self.room():
                raise ServiceBusy(f"{self.room()} agents run")
            self.running.add(agent)
        return agent

    def check(self, run: AgentRun) -> None:
        """Raise InvalidRequest for a run that cannot be started."""
        parse_fields([run.fields] if run.fields else (), 1)

    def room(self) -> int:
        """Return the number of agents that may run at once."""
        return MAX_AGENTS

    def key(self, run: AgentRun) -> str:
        """Return the key that the agent sends."""
        return run.api_key

    def cause(self, run: AgentRun) -> str:
        """Return the cause of a failure."""
        return "the tool is broken"

    def finished(self, agent: TinyAgent, result: AgentResult) -> AgentResult:
        """Return the result of an agent that has ended."""
        return result

    def end(self, agent: TinyAgent) -> None:
        """Forget an agent."""
        with self.lock:
            self.running.discard(agent)

    def status(self) -> ServiceStatus:
        """See AgentHost."""
        return ServiceStatus(role=Role.ENVIRONMENT, model="tiny", work_pending=len(self.running))

    def close(self) -> None:
        """Do nothing: there are no processes."""
