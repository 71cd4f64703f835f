"""Fuzzing campaign: sends mutated requests, checks each response, and saves requests with invalid responses."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from quartet.contract.status import Role
from quartet.rpc.call_interceptors import SUBSCRIPTIONS
from quartet.rpc.limits import CHANNEL_OPTIONS
from quartet.v1 import orchestrator_pb2, status_pb2, status_pb2_grpc
from tests.fuzz.environment import SEALED, FuzzEnvironment, Target
from tests.fuzz.methods import Method, all_methods
from tests.fuzz.monitoring import Monitor
from tests.fuzz.mutations import mutated
from tests.fuzz.seeds import CHECKPOINT, RUN, SEEDS, ServiceState

DEADLINE = 3.0
"""Deadline of a request in seconds. Only valid requests for much work take longer."""
SHORT = 0.005
"""Deadline of some requests in seconds, which ends before or during the work."""
ALLOWED_CODES = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.DATA_LOSS,  # ComputationFailed: the result is not finite.
    }
)
"""Allowed status codes. Every other code is a defect."""
UNREACHABLE_SOURCE = ("UpdateWeights", grpc.StatusCode.UNAVAILABLE)
"""Method and status of a generator that cannot connect to a source. A mutated request may name any address."""
MAX_TEXT = 2048
"""Maximum characters of an error text."""
FORBIDDEN_TEXT = ("\n", "Traceback", "metadata")
"""Text that callers must not see, or that gRPC returns instead of a response with too long a text."""
LOW = 0.25
"""Weight of methods that write to disk, or have few fields to mutate."""
HIGH = 4.0
"""Weight of a method of which few mutated requests are valid."""
WEIGHTS = {
    **dict.fromkeys(("Save", "Restore", "GetStatus", "Check", "Watch", "WatchProgress"), LOW),
    "UpdateWeights": HIGH,
}
STATUS_EVERY = 20
"""Requests between two status requests to a process."""
CLEAN_EVERY = 500
"""Requests between two deletions of unread trajectories."""


@dataclass(frozen=True)
class Failure:
    """A request with an invalid response."""

    role: str
    method: str
    request: bytes
    code: str
    text: str

    def __str__(self) -> str:
        shown = self.request.hex() if len(self.request) < 2000 else f"{self.request[:40].hex()}... (see the file)"
        return f"{self.role} {self.method} returned {self.code}: {self.text[:500]}\n  request {shown}"


@dataclass
class Campaign:
    """``requests`` requests to all targets. The seed determines their order and content."""

    environment: FuzzEnvironment
    requests: int
    seed: int = 0
    responses: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of responses by method path and status."""
    failures: list[Failure] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    growth: list[str] = field(default_factory=list)
    slowest: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Send all requests, with one thread per target."""
        plan = self._plan()
        targets = self.environment.targets
        with (
            Monitor(targets, lambda: sum(self.responses.values())) as monitor,
            ThreadPoolExecutor(len(targets)) as pool,
        ):
            for future in [pool.submit(self._fuzz, *each) for each in zip(targets, plan, strict=True)]:
                future.result()
        self.slowest = monitor.slowest
        self.problems += monitor.problems
        if any(target.pid for target in self.environment.targets):
            self.growth, leaks = monitor.growth(self.requests)
            self.problems += leaks
        self.problems += [f"file outside the run directory: {path}" for path in self.environment.misplaced_files()]

    def _plan(self) -> list[list[tuple[int, Method]]]:
        """Return the requests of each target: number and method."""
        offered = [
            (index, method)
            for index, target in enumerate(self.environment.targets)
            for method in all_methods().values()
            if method.service in target.services
        ]
        weights = [WEIGHTS.get(method.name, 1.0) for _, method in offered]
        plan: list[list[tuple[int, Method]]] = [[] for _ in self.environment.targets]
        # Every method gets at least one request.
        chosen = [*offered, *Random(self.seed).choices(offered, weights, k=max(0, self.requests - len(offered)))]
        for number, (index, method) in enumerate(chosen):
            plan[index].append((number, method))
        return plan

    def _fuzz(self, target: Target, plan: list[tuple[int, Method]]) -> None:
        with grpc.insecure_channel(target.address, options=CHANNEL_OPTIONS) as channel:
            sender = _Sender(target, channel)
            for count, (number, method) in enumerate(plan):
                if count % STATUS_EVERY == 0:
                    sender.update_state()
                if count % CLEAN_EVERY == 0 and target.role is Role.ACTOR:
                    self.environment.clean_buffer()
                random = Random(f"{self.seed}/{number}")
                data = _request(random, method, sender.state)
                code, text = sender.send(method, data, SHORT if random.random() < 0.03 else DEADLINE)
                self._note(target, method, data, code, text)
            self._send_valid_requests(sender, {method.path: method for _, method in plan})

    def _send_valid_requests(self, sender: _Sender, methods: dict[str, Method]) -> None:
        """Send a valid request to each method. Unlike mutated requests, these must not exceed their deadline."""
        sender.update_state()
        for path, method in methods.items():
            if path != STOP:
                data = SEEDS[path](Random(self.seed), sender.state).SerializeToString()
                code, text = sender.send(method, data, 10 * DEADLINE)
                if code not in ALLOWED_CODES - {grpc.StatusCode.DEADLINE_EXCEEDED}:
                    self.problems.append(f"{path}: a valid request at the end returned {code.name}: {text[:500]}")

    def _note(self, target: Target, method: Method, data: bytes, code: grpc.StatusCode, text: str) -> None:
        with self._lock:
            self.responses[method.path, code.name] += 1
            allowed = code in ALLOWED_CODES or (method.name, code) == UNREACHABLE_SOURCE
            if allowed and len(text) <= MAX_TEXT and not any(part in text for part in FORBIDDEN_TEXT):
                return
            failure = Failure(target.role, method.path, data, code.name, text)
            self.failures.append(failure)
            folder = self.environment.folder / "failures"
            folder.mkdir(exist_ok=True)
            content = {"method": method.path, "code": code.name, "text": text, "request": data.hex()}
            (folder / f"{len(self.failures):04}.json").write_text(json.dumps(content))
        if len(self.failures) <= 20:
            print(failure, flush=True)

    def table(self) -> Iterator[str]:
        """Yield a line for each method with the number of responses by status."""
        for path in all_methods():
            results = {code: count for (method, code), count in self.responses.items() if method == path}
            codes = ", ".join(f"{code} {count}" for code, count in sorted(results.items(), key=lambda item: -item[1]))
            yield f"{path} {sum(results.values())}: {codes}"

    def unreached(self) -> list[str]:
        """Return the methods without a successful request, which are not fuzzed in depth."""
        return [path for path in all_methods() if not self.responses[path, "OK"] and path != STOP]


STOP = "/quartet.v1.OrchestratorService/Stop"


def _request(random: Random, method: Method, state: ServiceState) -> bytes:
    others = [SEEDS[path](random, state).SerializeToString() for path in random.sample(sorted(SEEDS), 2)]
    while True:
        data = mutated(random, SEEDS[method.path](random, state), others)
        # Stop has no fields, so every valid message ends the run.
        if method.path != STOP or not _is_message(data):
            return data


def _is_message(data: bytes) -> bool:
    try:
        orchestrator_pb2.StopRequest.FromString(data)
    except DecodeError:
        return False
    return True


class _Sender:
    """Client of one target. Tracks the target's run and step."""

    def __init__(self, target: Target, channel: grpc.Channel) -> None:
        self._target, self._channel = target, channel
        self._status = status_pb2_grpc.StatusServiceStub(channel)
        self._methods = all_methods()
        self.state = ServiceState()

    def send(self, method: Method, data: bytes, deadline: float) -> tuple[grpc.StatusCode, str]:
        """Return status and text of the response. Of a subscription, only the first message is read."""
        kind: Any = self._channel.unary_stream if method.streams else self._channel.unary_unary
        call = kind(method.path, None, None)
        try:
            if not method.streams:
                call(data, timeout=deadline)
                return grpc.StatusCode.OK, ""
            stream = call(data, timeout=deadline)
            list(islice(stream, 1 if method.name in SUBSCRIPTIONS else None))
            stream.cancel()
            return grpc.StatusCode.OK, ""
        except grpc.RpcError as error:
            return error.code(), error.details() or ""

    def update_state(self) -> None:
        """Query the state of the target, and restore it if it can accept no more updates."""
        try:
            role = self._status.GetStatus(status_pb2.GetStatusRequest(), timeout=DEADLINE).roles[0]
        except grpc.RpcError:  # The monitor reports it.
            return
        self.state = ServiceState(
            role.run,
            role.step,
            role.policy_version,
            max(1, role.leader_epoch),
            role.broken,
            role.last_transfer.weights_digest,
            self._target.policies,
        )
        if self._target.role not in (Role.ACTOR, Role.CRITIC):
            return
        lost = not (self._target.root / CHECKPOINT / "model.safetensors").exists()  # type: ignore[operator]
        if role.broken or lost or role.step >= SEALED or role.run not in ("", RUN):
            self._restore(save=lost)

    def _restore(self, save: bool) -> None:
        service = f"/quartet.v1.{self._target.role.capitalize()}Service"
        epoch = self.state.leader_epoch
        requests: list[tuple[str, dict[str, Any]]] = [("Restore", {})]
        if save:
            requests.append(("Save", {"directory": CHECKPOINT, "kind": 1}))
        for name, fields in requests:
            method = self._methods[f"{service}/{name}"]
            request = method.request(run=RUN, leader_epoch=epoch, **fields)
            self.send(method, request.SerializeToString(), 10 * DEADLINE)
        self.state = ServiceState(RUN, 0, 0, epoch)
