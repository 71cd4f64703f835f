"""Sending mutated requests, and judging each answer. A request that was answered badly is kept in hexadecimal."""

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

from quartet.rpc.call_interceptors import SUBSCRIPTIONS
from quartet.rpc.limits import CHANNEL_OPTIONS
from quartet.types import Role
from quartet.v1 import orchestrator_pb2, status_pb2, status_pb2_grpc
from tests.fuzz.ground import SEALED, Ground, Target
from tests.fuzz.methods import Method, all_methods
from tests.fuzz.mutations import mutated
from tests.fuzz.seeds import CHECKPOINT, RUN, SEEDS, Standing
from tests.fuzz.watching import Watch

DEADLINE = 3.0
"""Seconds that a request waits: more than any work that is not refused takes, unless the request asks for much."""
SHORT = 0.005
"""Seconds that some requests wait: their work continues after the deadline, or never starts."""
PROPER = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.DATA_LOSS,  # ComputationFailed: what was asked for has no finite result.
    }
)
"""Status codes that are allowed. Every other one is a defect."""
MAX_TEXT = 2048
"""Characters of an answer's text, at most."""
SIGNS = ("\n", "Traceback", "metadata")
"""Of what is not for callers, or of gRPC refusing an answer for the length of its text."""
FEW = 0.25
"""Weight of methods that write to the disk, or have little to mutate."""
WEIGHTS = {"Save": FEW, "Restore": FEW, "GetStatus": FEW, "Check": FEW, "Watch": FEW, "WatchProgress": FEW}
LOOK_EVERY = 20
"""Requests after which a process is asked where it stands."""
CLEAN_EVERY = 500


@dataclass(frozen=True)
class Failure:
    """A request that was not answered properly."""

    role: str
    method: str
    request: bytes
    code: str
    text: str

    def __str__(self) -> str:
        shown = self.request.hex() if len(self.request) < 2000 else f"{self.request[:40].hex()}... (see the file)"
        return f"{self.role} {self.method} answered {self.code}: {self.text[:500]}\n  request {shown}"


@dataclass
class Campaign:
    """``requests`` requests to the targets of a ground. The seed determines their order and content."""

    ground: Ground
    requests: int
    seed: int = 0
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of answers by method path and status."""
    failures: list[Failure] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    growth: list[str] = field(default_factory=list)
    slowest: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Send all requests, with one thread per target."""
        plan = self._plan()
        targets = self.ground.targets
        with Watch(targets, lambda: sum(self.answers.values())) as watch, ThreadPoolExecutor(len(targets)) as pool:
            for ended in [pool.submit(self._fuzz, target, plan[target.role]) for target in targets]:
                ended.result()
        self.slowest = watch.slowest
        self.problems += watch.problems
        if any(target.pid for target in self.ground.targets):
            self.growth, grown = watch.growth(self.requests)
            self.problems += grown
        self.problems += [f"file where none may be: {path}" for path in self.ground.strayed()]

    def _plan(self) -> dict[Role, list[tuple[int, Method]]]:
        """Return what each target is sent: the number of each request, and its method."""
        offered = [
            (target.role, method)
            for target in self.ground.targets
            for method in all_methods().values()
            if method.service in target.services
        ]
        weights = [WEIGHTS.get(method.name, 1.0) for _, method in offered]
        plan: dict[Role, list[tuple[int, Method]]] = {target.role: [] for target in self.ground.targets}
        # Each at least once, however few they are.
        chosen = [*offered, *Random(self.seed).choices(offered, weights, k=max(0, self.requests - len(offered)))]
        for number, (role, method) in enumerate(chosen):
            plan[role].append((number, method))
        return plan

    def _fuzz(self, target: Target, plan: list[tuple[int, Method]]) -> None:
        with grpc.insecure_channel(target.address, options=CHANNEL_OPTIONS) as channel:
            sender = _Sender(target, channel)
            for count, (number, method) in enumerate(plan):
                if count % LOOK_EVERY == 0:
                    sender.look()
                if count % CLEAN_EVERY == 0 and target.role is Role.ACTOR:
                    self.ground.clean_buffer()
                random = Random(f"{self.seed}/{number}")
                data = _request(random, method, sender.standing)
                code, text = sender.send(method, data, SHORT if random.random() < 0.03 else DEADLINE)
                self._note(target, method, data, code, text)
            self._ask_properly(sender, {method.path: method for _, method in plan})

    def _ask_properly(self, sender: _Sender, methods: dict[str, Method]) -> None:
        """Send each method a request as it should be: a mutated one may ask for more time than it has, and these may not."""
        sender.look()
        for path, method in methods.items():
            if path != STOP:
                data = SEEDS[path](Random(self.seed), sender.standing).SerializeToString()
                code, text = sender.send(method, data, 10 * DEADLINE)
                if code not in PROPER - {grpc.StatusCode.DEADLINE_EXCEEDED}:
                    self.problems.append(f"{path}: a proper request at the end was answered {code.name}: {text[:500]}")

    def _note(self, target: Target, method: Method, data: bytes, code: grpc.StatusCode, text: str) -> None:
        with self._lock:
            self.answers[method.path, code.name] += 1
            if code in PROPER and len(text) <= MAX_TEXT and not any(sign in text for sign in SIGNS):
                return
            failure = Failure(target.role, method.path, data, code.name, text)
            self.failures.append(failure)
            folder = self.ground.folder / "failures"
            folder.mkdir(exist_ok=True)
            kept = {"method": method.path, "code": code.name, "text": text, "request": data.hex()}
            (folder / f"{len(self.failures):04}.json").write_text(json.dumps(kept))
        if len(self.failures) <= 20:
            print(failure, flush=True)

    def table(self) -> Iterator[str]:
        """A line for each method: how often it was answered how."""
        for path in all_methods():
            results = {code: count for (of, code), count in self.answers.items() if of == path}
            told = ", ".join(f"{code} {count}" for code, count in sorted(results.items(), key=lambda item: -item[1]))
            yield f"{path} {sum(results.values())}: {told}"

    def unreached(self) -> list[str]:
        """Methods none of whose requests were taken: they would not be fuzzed in depth."""
        return [path for path in all_methods() if not self.answers[path, "OK"] and path != STOP]


STOP = "/quartet.v1.OrchestratorService/Stop"


def _request(random: Random, method: Method, standing: Standing) -> bytes:
    others = [SEEDS[path](random, standing).SerializeToString() for path in random.sample(sorted(SEEDS), 2)]
    while True:
        data = mutated(random, SEEDS[method.path](random, standing), others)
        # Stop has no fields: what is any message at all ends the run, as it is meant to.
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
        self.standing = Standing()

    def send(self, method: Method, data: bytes, deadline: float) -> tuple[grpc.StatusCode, str]:
        """The status and the text of the answer; of a subscription its first message is enough."""
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

    def look(self) -> None:
        """Ask where the target stands, and sets it back where nothing more could be done with it."""
        try:
            role = self._status.GetStatus(status_pb2.GetStatusRequest(), timeout=DEADLINE).roles[0]
        except grpc.RpcError:  # The watch says so.
            return
        self.standing = Standing(role.run, role.step, role.policy_version, max(1, role.leader_epoch), role.broken)
        if self._target.role not in (Role.ACTOR, Role.CRITIC):
            return
        lost = not (self._target.root / CHECKPOINT / "model.safetensors").exists()  # type: ignore[operator]
        if role.broken or lost or role.step >= SEALED or role.run not in ("", RUN):
            self._set_back(save=lost)

    def _set_back(self, save: bool) -> None:
        service = f"/quartet.v1.{self._target.role.capitalize()}Service"
        epoch = self.standing.leader_epoch
        requests: list[tuple[str, dict[str, Any]]] = [("Restore", {})]
        if save:
            requests.append(("Save", {"directory": CHECKPOINT, "kind": 1}))
        for name, fields in requests:
            method = self._methods[f"{service}/{name}"]
            request = method.request(run=RUN, leader_epoch=epoch, **fields)
            self.send(method, request.SerializeToString(), 10 * DEADLINE)
        self.standing = Standing(RUN, 0, 0, epoch)
