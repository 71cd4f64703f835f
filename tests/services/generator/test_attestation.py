"""Weights that are read back at the end of a Generate call: all, or some of them in turn, and what a change does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quartet.buffer.connection import Redis
from quartet.buffer.rollout_stream import RolloutStream
from quartet.buffer.turn_records import TurnRecordStore
from quartet.contract.generation import EpisodeSettings, SamplingParameters
from quartet.contract.status import Role, ServiceStatus
from quartet.engines.engine import ServedModel
from quartet.errors import (
    BufferFailed,
    Cancelled,
    EngineFailed,
    FailedPrecondition,
    MismatchError,
    ServiceUnavailable,
    WeightsChanged,
)
from quartet.models.generation.torch_engine import DetachedTorchEngine
from quartet.services.generator import attestation as module
from quartet.services.generator.attestation import SHARE, Attestation
from quartet.services.generator.episodes import EnvironmentAccess
from quartet.services.generator.generator import Generator
from quartet.services.generator.sessions.traffic import TrafficSessions
from quartet.services.generator.sessions.traffic_turns import TrafficTurns
from quartet.weight_transfer.tensors import HostTensor, tensor_digest
from tests.services.generator.environments import EchoEnvironment
from tests.services.generator.test_generator import (
    REQUESTS,
    RUN,
    SAMPLING,
    CopyingEngine,
    batch,
    generate,
    generator_of,
    load,
    weight_set,
)
from tests.services.generator.test_generator import stream as stream
from tests.unit.models import tiny
from tests.unit.models.adapters import adapted, learn
from tests.unit.models.adapters import weight_set as weights_of

NAMES = [f"t{index}" for index in range(10)]


class ReadableCopies(CopyingEngine):
    """A copying engine whose tensors can be read back. It changes "b" after ``changes_after`` generations."""

    changes_after = 0

    def held_digests(self, names: Collection[str]) -> Mapping[str, bytes]:
        return {name: tensor_digest(self.tensors[name]) for name in names}

    def generate(self, *arguments: Any) -> Any:
        responses = list(super().generate(*arguments))
        yield responses[0]
        self.changes_after -= 1
        if self.changes_after == 0:
            self.tensors["b"] = HostTensor("F32", (1,), np.ones(4, np.uint8))
        yield from responses[1:]


class Failing(ReadableCopies):
    """One that raises ``error`` after the first response of its second round of turns. Its weights may ``change`` before that."""

    error: BaseException | None = None
    change = False
    readable = True
    rounds = 0

    def held_digests(self, names: Collection[str]) -> Mapping[str, bytes]:
        if not self.readable:
            raise ServiceUnavailable("copying: away")
        return super().held_digests(names)

    def generate(self, *arguments: Any) -> Any:
        self.rounds += 1
        for response in super().generate(*arguments):
            yield response
            if self.rounds == 2:
                if self.change:
                    self.tensors["b"] = HostTensor("F32", (1,), np.ones(4, np.uint8))
                if self.error is not None:
                    raise self.error


class Timed:
    """An engine that takes ``seconds`` to read a tensor back, by the clock that it replaces."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.properties = CopyingEngine().properties
        self.digests = {name: name.encode() for name in NAMES}
        self.read: list[str] = []
        self._seconds, self._now = seconds, 0.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self._now)

    def held_digests(self, names: Collection[str]) -> Mapping[str, bytes]:
        self.read += names
        self._now += self._seconds * len(names)
        return {name: self.digests[name] for name in names}

    def take(self) -> list[str]:
        read, self.read = self.read, []
        return read


def attestation_of(engine: Any) -> Attestation:
    result = Attestation()
    result.expect(dict(engine.digests))
    return result


def test_all_tensors_are_read_back_if_that_takes_less_than_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = Timed(monkeypatch, 0.001)
    attestation = attestation_of(engine)
    for _ in range(3):
        assert attestation.changed(engine, 1.1) == ([], 10)
        assert sorted(engine.take()) == NAMES


def test_calls_that_are_too_short_read_the_tensors_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = Timed(monkeypatch, 0.001)
    attestation, read = attestation_of(engine), list[str]()
    for _ in range(10):
        attestation.changed(engine, 0.25)
        read += engine.take()
    # 2.5 tensors for each call, in a fixed order.
    assert read == (NAMES * 3)[: len(read)]
    assert 25 <= len(read) <= 26


@pytest.mark.parametrize("seconds", [0.001, 0.03, 0.7])
def test_reading_back_takes_no_more_than_the_share_in_the_long_run(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = Timed(monkeypatch, seconds)
    attestation, calls = attestation_of(engine), 400
    for _ in range(calls):
        attestation.changed(engine, 0.5)
    # The last tensor may take more than was left.
    assert len(engine.read) * seconds <= SHARE * calls * 0.5 + seconds
    assert set(engine.read) == set(NAMES) or seconds == 0.7


def test_a_short_call_uses_what_a_long_one_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = Timed(monkeypatch, 0.001)
    attestation = attestation_of(engine)
    attestation.changed(engine, 10.0)
    assert attestation.changed(engine, 0.001)[1] == 10


def test_a_change_is_found_when_its_tensor_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = Timed(monkeypatch, 0.0101)
    attestation = attestation_of(engine)
    engine.digests["t3"] = b"other"
    changed = [attestation.changed(engine, 1.0)[0] for _ in range(5)]
    assert changed == [[], [], [], ["t3"], []]


@pytest.mark.parametrize("digest", ["reported", "none"])
def test_an_engine_that_cannot_be_read_back_is_not_attested(digest: str, stream: RolloutStream) -> None:
    engine = ReadableCopies(digest)
    engine.changes_after = 1
    generator = generator_of(engine, stream)
    assert generate(generator, 7, load(generator, 7)) == (3, 6)
    # An engine without the method is not, either.
    other = generator_of(CopyingEngine(), stream)
    assert generate(other, 7, load(other, 7)) == (3, 6)


def test_weights_that_change_during_a_call_fail_it_and_are_loaded_again(
    stream: RolloutStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARE", 1000.0)  # These calls take microseconds.
    engine = ReadableCopies()
    generator = generator_of(engine, stream)
    digest = load(generator, 7)
    engine.changes_after = 2
    assert generate(generator, 7, digest) == (3, 6)
    with pytest.raises(WeightsChanged, match=r"1 of 2 tensors .* the first b, have changed since version 7 was loaded"):
        generate(generator, 7, digest)
    # What it holds is unknown now.
    assert generator.status().last_transfer is None
    with pytest.raises(FailedPrecondition, match="this generator holds none"):
        generate(generator, 7, digest)
    load(generator, 7, changed=())
    assert engine.loads[-1] == {"a", "b"}
    assert generate(generator, 7, digest) == (3, 6)
    assert load(generator, 8, changed=("a",)) == weight_set(8).digest
    assert generate(generator, 8, weight_set(8).digest) == (3, 6)


@pytest.mark.parametrize(
    ("error", "change", "readable", "raised", "kept"),
    [
        (None, False, True, None, True),
        (None, True, True, WeightsChanged, False),
        (Cancelled("gone"), False, True, Cancelled, True),
        (Cancelled("gone"), True, True, WeightsChanged, False),
        (Cancelled("gone"), False, False, ServiceUnavailable, False),
        (BufferFailed("full"), False, True, BufferFailed, True),
        (EngineFailed("dead"), False, True, EngineFailed, False),
        (MismatchError("wrong"), False, True, MismatchError, False),
        # The process is killed.
        (SystemExit(), False, True, SystemExit, True),
    ],
)
def test_turn_records_outlive_their_call_only_if_its_weights_are_attested_or_its_process_dies(
    error: BaseException | None,
    change: bool,
    readable: bool,
    raised: type[BaseException] | None,
    kept: bool,
    stream: RolloutStream,
    redis_client: Redis,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SHARE", 1000.0)
    engine = Failing()
    store = TurnRecordStore(redis_client, redis_url, RUN)
    store.forget_all()
    access = EnvironmentAccess(EchoEnvironment(turns=2, tokens=1), 10, records=store.records_of)
    served = ServedModel("m", "float32", frozenset(), tiny.VOCABULARY, 64)
    generator = Generator(lambda: engine, served, ServiceStatus(Role.GENERATOR), lambda run: stream, access)
    call = replace(
        batch(7, load(generator, 7)), sampling=SamplingParameters(8), episode=EpisodeSettings(4, max_turn_tokens=2)
    )
    engine.error, engine.change, engine.readable = error, change, readable
    if raised is None:
        generator.generate(call, lambda: False)
    else:
        with pytest.raises(raised):
            generator.generate(call, lambda: False)
    records = [store.records_of(call).load(request.id) for request in call.requests]
    assert [len(record.turns) > 0 for record in records] == [kept] * len(records)
    store.forget_all()


class Users(TrafficSessions):
    """Users who ask for the turns of REQUESTS. ``outcomes``: those of the periods that have ended."""

    def __init__(self) -> None:
        self.turns, self.outcomes = TrafficTurns(), list[bool]()
        self.sampling, self.seed = SAMPLING, 0

    @property
    def model(self) -> str:
        return RUN

    async def ask(self, serve: Callable[[], object]) -> list[Any]:
        """Call ``serve`` on another thread while the users wait, and return their answers or errors."""
        answers = [self.turns.put(request) for request in REQUESTS]
        await asyncio.to_thread(serve)
        self.turns.fail(ServiceUnavailable("over"))
        return await asyncio.gather(*answers, return_exceptions=True)

    def end_period(self, attested: bool) -> None:
        self.outcomes.append(attested)
        self.turns.end_period(attested)


@pytest.mark.parametrize(
    ("error", "change", "readable", "fails_update", "raised", "attested"),
    [
        (None, False, True, False, None, True),
        (None, True, True, False, WeightsChanged, False),
        (None, False, True, True, None, False),
        (Cancelled("gone"), False, True, False, Cancelled, True),
        (Cancelled("gone"), True, True, False, WeightsChanged, False),
        (Cancelled("gone"), False, False, False, ServiceUnavailable, False),
        (EngineFailed("dead"), False, True, False, EngineFailed, False),
    ],
)
def test_answers_to_users_count_only_if_the_weights_are_attested_after_them(
    error: BaseException | None,
    change: bool,
    readable: bool,
    fails_update: bool,
    raised: type[BaseException] | None,
    attested: bool,
    stream: RolloutStream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SHARE", 1000.0)
    engine, users = Failing(), Users()
    served = ServedModel("m", "float32", frozenset(), 10, 64)
    generator = Generator(lambda: engine, served, ServiceStatus(Role.GENERATOR), lambda run: stream, users)
    load(generator, 7)
    engine.error, engine.change, engine.readable, engine.rounds = error, change, readable, 1
    finish = users.turns.finish

    def finished(turn: Any) -> None:
        finish(turn)
        if fails_update:
            engine.failure = ServiceUnavailable("away")
            with pytest.raises(ServiceUnavailable):
                load(generator, 8)

    monkeypatch.setattr(users.turns, "finish", finished)

    def serve() -> None:
        if raised is None:
            generator.serve(lambda: False, lambda: False)
        else:
            with pytest.raises(raised):
                generator.serve(lambda: False, lambda: False)

    results = asyncio.run(users.ask(serve))
    (_, period) = results[0]
    assert period.is_attested is attested
    assert users.outcomes == [attested]


@pytest.mark.parametrize("merge", [False, True])
def test_the_torch_engine_reads_base_and_adapter_back(merge: bool) -> None:
    model, adapter = adapted("llama")
    learn(model)
    sent = weights_of(model, adapter)
    engine = DetachedTorchEngine(*adapted("llama", seed=5), frozenset({tiny.EOS}), 8, merge_adapter=merge)
    held = engine.load_weights(sent, list(sent.tensors))
    assert engine.held_digests(list(held)) == held
    attestation = Attestation()
    attestation.expect(held)
    assert attestation.changed(engine, 100.0) == ([], len(held))
    name = next(name for name in held if "lora_B" in name)
    with torch.no_grad():
        engine._weights[name].view(-1)[0] += 1e-6
    assert attestation.changed(engine, 100.0) == ([name], len(held))
