"""The generator: weights that it accepts, and requests that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.root import Config
from quartet.contract.generation import (
    EngineProperties,
    GenerationBatch,
    GenerationRequest,
    SamplingParameters,
    requests_of,
)
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import Prompt
from quartet.engines.engine import EngineResponse, ServedModel
from quartet.errors import (
    Cancelled,
    ComputationFailed,
    FailedPrecondition,
    InvalidRequest,
    MismatchError,
    ServiceFailed,
)
from quartet.rpc.clients import GenerationClient
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.security.credentials import LOCAL
from quartet.services.generator.factory import build_generator
from quartet.services.generator.generator import Generator
from quartet.v1 import generation_pb2, generation_pb2_grpc
from quartet.weight_transfer.receiver import PulledWeights
from quartet.weight_transfer.tensors import HostTensor, WeightSet, combined_digest, tensor_digest
from tests.services.model_services import TIMEOUTS, Services

RUN = "generator"
REQUESTS = requests_of(RUN, 1, [Prompt(4, np.array([1, 2], np.int32))], samples=3)
SAMPLING = SamplingParameters(2)


def weight_set(version: int) -> WeightSet:
    """Return two tensors, of which only the first differs between versions."""
    tensors = {
        "a": HostTensor("F32", (1,), np.full(4, version, np.uint8)),
        "b": HostTensor("F32", (1,), np.zeros(4, np.uint8)),
    }
    return WeightSet(
        version, combined_digest({name: tensor_digest(tensor) for name, tensor in tensors.items()}), tensors
    )


class CopyingEngine:
    """An engine that holds copies of the tensors, and loses those in ``lost``."""

    def __init__(self, digest: Any = "read back") -> None:
        self.properties = EngineProperties("copying", True, True, "whole", "tensors", digest)
        self.lost: set[str] = set()
        self.failure: Exception | None = None
        self.loads: list[set[str]] = []
        self.tensors: dict[str, HostTensor] = {}

    def load_weights(self, weights: WeightSet, changed: Collection[str]) -> Mapping[str, bytes]:
        self.loads.append(set(changed))
        if self.failure:
            raise self.failure
        self.tensors |= {name: weights.tensors[name] for name in changed if name not in self.lost}
        return {name: tensor_digest(tensor) for name, tensor in self.tensors.items()}

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParameters, seed: int, cancelled: Any
    ) -> Iterator[EngineResponse]:
        for request in requests:
            yield EngineResponse(request, [3, 4], [-1.0, -2.0])

    def sleep(self, everything: bool = True) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def engine() -> CopyingEngine:
    return CopyingEngine()


@pytest.fixture
def stream(redis_client: Any, redis_url: str) -> RolloutStream:
    result = RolloutStream(redis_client, redis_url, RUN)
    result.reset()
    return result


@pytest.fixture
def generator(engine: CopyingEngine, stream: RolloutStream) -> Generator:
    return generator_of(engine, stream)


def generator_of(engine: CopyingEngine, stream: RolloutStream) -> Generator:
    served = ServedModel("m", "float32", frozenset(), 10, 64)
    return Generator(lambda: engine, served, ServiceStatus(Role.GENERATOR), lambda run: stream)


def load(
    generator: Generator, version: int, epoch: int = 1, changed: Collection[str] = ("a", "b"), base: int | None = None
) -> bytes:
    """Load a version of which these tensors differ from version ``base``, by default the one before. Return its digest."""
    weights, before = weight_set(version), weight_set(version - 1 if base is None else base)
    pulled = PulledWeights(weights, before.digest, frozenset(changed), 8, 0.5, "actor at here:1", "delta")
    generator.load(RUN, epoch, version, weights.digest, lambda: pulled)
    return weights.digest


def batch(version: int, digest: bytes, epoch: int = 1) -> GenerationBatch:
    return GenerationBatch(RUN, 1, epoch, REQUESTS, SAMPLING, 0, version, digest, "me:1")


def generate(generator: Generator, version: int, digest: bytes, epoch: int = 1) -> tuple[int, int]:
    return generator.generate(batch(version, digest, epoch), lambda: False)


def no_pull() -> PulledWeights:
    raise AssertionError("the weights are pulled again")


def test_trajectories_carry_version_digest_and_generator(generator: Generator, stream: RolloutStream) -> None:
    digest = load(generator, 7)
    progress: list[tuple[int, int]] = []
    assert generator.generate(
        batch(7, digest), lambda: False, on_progress=lambda *numbers: progress.append(numbers)
    ) == (3, 6)
    result = [delivery.trajectory for delivery in stream.read(10, 0.01)]
    assert [item.id for item in result] == [request.id for request in REQUESTS]
    assert {(item.policy_version, item.weights_digest, item.generator) for item in result} == {(7, digest, "me:1")}
    assert progress[-1] == (3, 6)
    status = generator.status()
    assert (status.policy_version, status.tokens, status.engine) == (7, {"generated": 6}, generator._engine.properties)
    transfer = status.last_transfer
    assert transfer is not None
    assert (transfer.weights_digest, transfer.source, transfer.bytes) == (digest, "actor at here:1", 8)


@pytest.mark.parametrize("lost", [{"a"}, {"a", "b"}])
def test_an_engine_that_holds_other_weights_is_refused_and_gets_everything_next(
    lost: set[str], generator: Generator, engine: CopyingEngine
) -> None:
    digest = load(generator, 1)
    engine.lost = lost
    with pytest.raises(MismatchError, match=r"engine copying: holds weights of digest .* after it loaded version 2"):
        load(generator, 2, changed=["a"])
    for version, wrong in ((1, digest), (2, weight_set(2).digest)):
        with pytest.raises(FailedPrecondition, match="this generator holds none"):
            generate(generator, version, wrong)
    engine.lost = set()
    assert generate(generator, 2, load(generator, 2, changed=["a"])) == (3, 6)
    assert engine.loads == [{"a", "b"}, {"a"}, {"a", "b"}]


def test_memory_that_its_source_changes_during_a_load_is_no_fault_of_the_engine(
    generator: Generator, stream: RolloutStream
) -> None:
    weights = weight_set(1)
    digests = {name: tensor_digest(tensor) for name, tensor in weights.tensors.items()}
    pulled = PulledWeights(weights, b"", frozenset(), 0, 0.5, "actor at here:1", "shared memory", digests)
    weights.tensors["a"].data[0] ^= 1
    with pytest.raises(
        ServiceFailed, match=r"actor at here:1: shared memory: version 1: a has another digest .* ends during"
    ):
        generator.load(RUN, 1, 1, weights.digest, lambda: pulled)
    assert generate(generator, 2, load(generator, 2)) == (3, 6)


def test_an_engine_that_fails_to_load_gets_everything_next(generator: Generator, engine: CopyingEngine) -> None:
    load(generator, 1)
    engine.failure = ComputationFailed("no memory")
    with pytest.raises(ComputationFailed, match="no memory"):
        load(generator, 2, changed=["a"])
    engine.failure = None
    load(generator, 2, changed=["a"])
    assert engine.loads == [{"a", "b"}, {"a"}, {"a", "b"}]


def test_an_engine_gets_everything_if_it_holds_another_version_than_the_one_before(
    generator: Generator, engine: CopyingEngine
) -> None:
    load(generator, 1)
    load(generator, 3, changed=["a"])
    # The mirror has the version already, and the engine has not.
    load(generator, 4, changed=[], base=4)
    load(generator, 5, changed=["a"])
    assert engine.loads == [{"a", "b"}, {"a", "b"}, {"a", "b"}, {"a"}]


@pytest.mark.parametrize(
    ("error", "loads_again"),
    [
        (ServiceFailed, True),
        (ComputationFailed, True),
        (OSError, True),
        (Cancelled, False),
        (InvalidRequest, False),
        (FailedPrecondition, False),
    ],
)
def test_an_engine_gets_everything_again_after_it_has_failed(
    error: type[Exception],
    loads_again: bool,
    generator: Generator,
    engine: CopyingEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digest = load(generator, 1)

    def failing(*_: Any) -> Iterator[EngineResponse]:
        raise error("the server was restarted")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "generate", failing)
        with pytest.raises(error, match="the server was restarted"):
            generate(generator, 1, digest)
    assert (generator.status().last_transfer is None) is loads_again
    # The mirror still has the version.
    load(generator, 1, changed=[], base=1)
    assert engine.loads == [{"a", "b"}] * (2 if loads_again else 1)
    assert generate(generator, 1, digest) == (3, 6)


def test_an_engine_that_reports_no_digest_is_not_compared(stream: RolloutStream) -> None:
    engine = CopyingEngine("none")
    engine.lost = {"a"}
    generator = generator_of(engine, stream)
    assert generate(generator, 1, load(generator, 1)) == (3, 6)


def test_a_failed_pull_leaves_the_weights_as_they_are(generator: Generator) -> None:
    digest = load(generator, 1)

    def pull() -> PulledWeights:
        raise ServiceFailed("the source sent other weights")

    with pytest.raises(ServiceFailed, match="other weights"):
        generator.load(RUN, 1, 2, weight_set(2).digest, pull)
    assert generate(generator, 1, digest) == (3, 6)


def test_a_load_is_idempotent_by_digest(generator: Generator, engine: CopyingEngine) -> None:
    digest = load(generator, 1)
    assert generator.load(RUN, 1, 1, digest, no_pull).policy_version == 1
    # An update without epochs changes the version and not the weights.
    assert generator.load(RUN, 1, 2, digest, no_pull).policy_version == 2
    assert len(engine.loads) == 1
    assert generate(generator, 2, digest) == (3, 6)


def test_another_version_and_another_digest_are_refused(generator: Generator, stream: RolloutStream) -> None:
    with pytest.raises(FailedPrecondition, match="this generator holds none; update its weights first"):
        generate(generator, 0, b"")
    digest = load(generator, 1)
    for version, wrong in ((2, digest), (1, weight_set(2).digest), (1, b"")):
        with pytest.raises(FailedPrecondition, match=f"this generator holds version 1 of digest {digest.hex()}"):
            generate(generator, version, wrong)
    assert stream.read(10, 0.01) == []


def test_requests_of_a_former_leader_are_refused(generator: Generator) -> None:
    digest = load(generator, 1, epoch=3)
    with pytest.raises(FailedPrecondition, match="leader_epoch 2: an orchestrator of epoch 3 has taken over"):
        load(generator, 2, epoch=2)
    with pytest.raises(FailedPrecondition, match="leader_epoch 2"):
        generate(generator, 1, digest, epoch=2)
    assert generate(generator, 1, digest, epoch=4) == (3, 6)
    with pytest.raises(FailedPrecondition, match="leader_epoch 3"):
        load(generator, 1, epoch=3)


@pytest.fixture(scope="module")
def client(session_services: Services, make_config: Callable[..., Config]) -> GenerationClient:
    """A client of a generator in a separate server."""
    config = make_config(rollout={"max_concurrent_sequences": 4, "generators": 1})
    server = session_services.serve(build_generator(config, ComputeThread(), 1, LOCAL))
    return GenerationClient(server.address, TIMEOUTS)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"run": ""}, "expected a run, and 1 to 64 sources"),
        ({"weights_digest": b""}, "weights_digest: expected 16 bytes, got 0"),
        ({"weights_digest": bytes(17)}, "weights_digest: expected 16 bytes, got 17"),
        ({"sources": []}, "expected a run, and 1 to 64 sources"),
        ({"sources": [generation_pb2.WeightPeer()]}, "expected a run, and 1 to 64 sources"),
        ({"sources": [generation_pb2.WeightPeer(address="unix:/tmp/s")]}, "1 to 64 sources HOST:PORT"),
        ({"sources": [generation_pb2.WeightPeer(address="h:1")] * 65}, "expected a run, and 1 to 64 sources"),
    ],
)
def test_a_malformed_request_for_weights_is_refused(
    change: dict[str, Any], expected: str, client: GenerationClient
) -> None:
    valid = {"run": RUN, "weights_digest": bytes(16), "sources": [generation_pb2.WeightPeer(address="127.0.0.1:1")]}
    stub = generation_pb2_grpc.GenerationServiceStub(client.channel.grpc_channel)
    with pytest.raises(grpc.RpcError) as refused:
        stub.UpdateWeights(generation_pb2.UpdateWeightsRequest(**{**valid, **change}), timeout=20)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value.details()
    assert expected in refused.value.details()


def test_the_status_of_a_generator_names_its_engine(client: GenerationClient) -> None:
    status = client.status()
    assert status.role is Role.GENERATOR
    assert status.engine is not None
    assert (status.engine.name, status.engine.seeded, status.engine.digest) == ("torch", True, "read back")
    assert status.last_transfer is None
