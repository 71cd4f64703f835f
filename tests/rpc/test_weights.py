"""Weights over real connections: everything and deltas, lost sources, malformed messages, limits and deadlines."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import grpc
import pytest

from quartet.codec.weights import weights_from_bytes, weights_to_bytes
from quartet.contract.status import Role, ServiceStatus
from quartet.errors import FailedPrecondition, InvalidRequest, NoResponse, QuartetError, ServiceBusy, ServiceUnavailable
from quartet.rpc.base_servicers import WeightServicer
from quartet.rpc.clients import WeightClient
from quartet.rpc.server import Server
from quartet.v1 import weights_pb2, weights_pb2_grpc
from quartet.weight_transfer.messages import (
    MAX_ENCODED_BYTES,
    MAX_TENSORS,
    Chunk,
    DeviceRegion,
    Encoding,
    Manifest,
    WeightGroup,
    WeightsRequest,
)
from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.store import WeightStore
from tests.every_case import every_case
from tests.unit.weight_transfer.samples import Tensors, assert_equal, changed, digest, tensor, weights
from tests.waiting import LIMIT, wait_until

RUN = "run"


class WeightRole:
    """A process that only serves weights."""

    role = Role.ACTOR

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    def register(self, server: grpc.Server) -> None:
        if isinstance(self._servicer, WeightServicer):
            self._servicer.register(server)
        else:
            weights_pb2_grpc.add_WeightServiceServicer_to_server(self._servicer, server)

    def status(self) -> ServiceStatus:
        return ServiceStatus(Role.ACTOR)

    def abandoned(self) -> tuple[str, float]:
        return "", 0.0

    def end_streams(self) -> None:
        if isinstance(self._servicer, WeightServicer):
            self._servicer.end_streams()

    def close(self) -> None:
        pass


class Network:
    """Servers and clients of weights."""

    def __init__(self) -> None:
        self.opened: list[Any] = []

    def serve(self, store: WeightStore, max_streams: int = 4) -> tuple[WeightClient, Server]:
        return self.host(WeightServicer(store, max_streams))

    def host(self, servicer: Any) -> tuple[WeightClient, Server]:
        server = Server([WeightRole(servicer)], "127.0.0.1:0")
        client = WeightClient(Role.ACTOR, server.address)
        self.opened += [client, server]
        return client, server

    def source(self, *versions: Tensors) -> WeightSource:
        source = WeightSource(num_threads=2)
        for number, tensors in enumerate(versions):
            source.publish(number, tensors.items(), run=RUN)
        self.opened.append(source)
        return source

    def mirror(self) -> WeightMirror:
        mirror = WeightMirror(num_threads=2, shares=False)
        self.opened.append(mirror)
        return mirror

    def close(self) -> None:
        for each in self.opened:
            if isinstance(each, Server):
                each.stop(0)
            else:
                each.close()


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.close()


def test_everything_and_deltas_arrive_through_a_generator(network: Network) -> None:
    before = weights()
    after = changed(before, 1)
    source, generator, child = network.source(before, after), network.mirror(), network.mirror()
    actor, _ = network.serve(source)
    parent, _ = network.serve(generator)
    for number, tensors in enumerate((before, after)):
        for mirror, client in ((generator, actor), (child, parent)):
            result = mirror.pull([client], RUN, number, digest(tensors), timeout=20)
            assert result.way == ("full", "delta")[number]
            assert result.source == client.address
            assert_equal(result.weight_set, tensors)


def test_processes_of_one_machine_share_memory_as_long_as_they_read_it(network: Network) -> None:
    versions = [weights()]
    versions += [changed(versions[0], number) for number in range(1, 4)]
    source = network.source()
    client, _ = network.serve(source)
    mirrors = [WeightMirror(num_threads=1) for _ in range(2)]
    for number, tensors in enumerate(versions):
        source.publish(number, tensors.items(), run=RUN)
        for mirror in mirrors:
            result = mirror.pull([client], RUN, number, digest(tensors), timeout=20)
            assert (result.way, result.source) == ("shared memory", client.address)
            assert_equal(result.weight_set, tensors)
        assert all(memory.readers == 2 for memory in source._memories)
        mirrors[0].release()
        mirrors[1].close()
        mirrors[1] = WeightMirror(num_threads=1)
        wait_until(lambda: not any(memory.readers for memory in source._memories))
    for mirror in mirrors:
        mirror.close()


def test_leases_do_not_take_the_places_of_streams(network: Network) -> None:
    tensors = weights()
    client, _ = network.serve(network.source(tensors), max_streams=2)
    mirrors = [WeightMirror(num_threads=1) for _ in range(5)]
    for mirror in mirrors:
        assert mirror.pull([client], RUN, 0, digest(tensors), timeout=20).way == "shared memory"
    assert network.mirror().pull([client], RUN, 0, digest(tensors), timeout=20).way == "full"
    for mirror in mirrors:
        mirror.close()


def test_a_source_that_stops_waits_for_no_reader_and_writes_nowhere_that_one_reads(network: Network) -> None:
    versions = [weights()]
    versions += [changed(versions[0], number) for number in range(1, 4)]
    source, mirror = network.source(versions[0]), WeightMirror(num_threads=1)
    client, server = network.serve(source)
    result = mirror.pull([client], RUN, 0, digest(versions[0]), timeout=20)
    assert result.way == "shared memory"
    waiting: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def wait() -> None:
        try:
            list(client.get_weights(WeightsRequest(RUN, 9, wait_seconds=LIMIT), LIMIT))
        except QuartetError as error:
            waiting.put(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: len(source._state._waiters) == 2)  # type: ignore[attr-defined]
    network.opened.remove(server)
    start = time.monotonic()
    server.stop(LIMIT)
    assert time.monotonic() - start < LIMIT / 4
    thread.join()
    assert isinstance(waiting.get(), ServiceUnavailable)
    # A running update may still publish.
    for number in range(1, 4):
        source.publish(number, versions[number].items(), run=RUN)
        assert_equal(result.weight_set, versions[0])
    mirror.close()


def test_an_unknown_version_is_a_failed_precondition(network: Network) -> None:
    client, _ = network.serve(network.source(weights()))
    with pytest.raises(FailedPrecondition, match=r"actor at 127.* no version 7 .*newest versions of run 'run': 0 \("):
        list(client.get_weights(WeightsRequest(RUN, 7), timeout=20))


def test_a_source_that_dies_during_a_stream_is_replaced(network: Network) -> None:
    # More than the connection buffers, so that the stream is still open when the server stops.
    tensors = {f"t{index}": tensor((2**23,), index, "F16") for index in range(4)}
    dying, server = network.serve(network.source(tensors))
    other, _ = network.serve(network.source(tensors))

    class Dying:
        address = dying.address

        def get_weights(self, request: WeightsRequest, timeout: float) -> Iterator[Any]:
            stream = dying.get_weights(request, timeout)
            yield next(stream)
            yield next(stream)
            server._server.stop(None).wait()
            yield from stream

    mirror = network.mirror()
    result = mirror.pull([Dying(), other], RUN, 0, digest(tensors), timeout=20)
    assert result.source == other.address
    assert_equal(result.weight_set, tensors)
    with pytest.raises(ServiceUnavailable, match=dying.address):
        network.mirror().pull([dying], RUN, 0, digest(tensors), timeout=20)


def test_a_caller_that_leaves_frees_its_place_and_its_memory(network: Network) -> None:
    tensors = {"large": tensor((2**24,))}
    source = network.source(tensors)
    client, _ = network.serve(source, max_streams=1)
    stream = client.get_weights(WeightsRequest(RUN, 0), timeout=20)
    next(stream)
    with pytest.raises(ServiceBusy, match="1 streams are open"):
        next(client.get_weights(WeightsRequest(RUN, 0), timeout=20))
    stream.close()  # type: ignore[attr-defined]
    wait_until(lambda: source._memories[0].readers == 0)
    mirror = network.mirror()
    assert_equal(mirror.pull([client], RUN, 0, digest(tensors), timeout=20).weight_set, tensors)


def test_a_waiting_stream_ends_with_its_caller(network: Network) -> None:
    client, _ = network.serve(network.source(), max_streams=1)
    waiting = client.get_weights(WeightsRequest(RUN, 0, wait_seconds=60), timeout=0.3)
    with pytest.raises(NoResponse, match=r"no response within 0\.3 s"):
        next(waiting)

    def freed() -> bool:
        try:
            next(client.get_weights(WeightsRequest(RUN, 0), timeout=20))
        except ServiceBusy:
            return False
        except FailedPrecondition:
            return True
        raise AssertionError("a version that does not exist was sent")

    wait_until(freed)


def test_eight_generators_pull_at_once_from_a_source_with_two_places(network: Network) -> None:
    before = weights()
    after = changed(before, 1)
    source = network.source(before, after)
    client, _ = network.serve(source, max_streams=2)
    mirrors = [network.mirror() for _ in range(8)]
    barrier = threading.Barrier(8)

    def pull(mirror: WeightMirror) -> None:
        barrier.wait()
        for number, tensors in enumerate((before, after)):
            assert_equal(mirror.pull([client], RUN, number, digest(tensors), timeout=60).weight_set, tensors)

    with ThreadPoolExecutor(8) as executor:
        list(executor.map(pull, mirrors))


REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "no run": ({"run": ""}, "run: expected the name"),
    "a short digest": ({"digest": b"x"}, "digest: expected 16 bytes, got 1"),
    "a held version without digest": ({"have_version": 0}, "have_digest: expected 16 bytes, got 0"),
    "a long digest of the held version": ({"have_version": 0, "have_digest": bytes(17)}, "have_digest: expected 16"),
    "a negative wait": ({"wait_seconds": -1.0}, "wait_seconds -1.0: expected 0 to 3600"),
    "a wait of NaN": ({"wait_seconds": float("nan")}, "wait_seconds nan"),
    "a wait without end": ({"wait_seconds": 1e300}, "wait_seconds"),
}


@every_case("case", REQUESTS)
def test_a_malformed_request_is_refused_and_a_valid_one_succeeds(case: str, network: Network) -> None:
    fields, expected = REQUESTS[case]
    client, server = network.serve(network.source(weights()))
    with grpc.insecure_channel(server.address) as channel:
        stub = weights_pb2_grpc.WeightServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.GetWeights(weights_pb2.GetWeightsRequest(**{"run": RUN, "version": 0, **fields}), timeout=20))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert expected in refused.value.details()
    assert len(list(client.get_weights(WeightsRequest(RUN, 0), timeout=20))) > 1


REGIONS = [weights_pb2.SharedRegion(pid=1, fd=2, num_bytes=8)]


def manifest_with(**fields: Any) -> weights_pb2.GetWeightsResponse:
    """Return a valid manifest of one tensor, with other fields."""
    tensors = [weights_pb2.WeightTensor(name="w", dtype=weights_pb2.WEIGHT_TYPE_F32, shape=[2], digest=bytes(16))]
    message = weights_pb2.WeightManifest(
        **{"run": RUN, "digest": bytes(16), "tensors": tensors, "num_links": 1, "digest_version": 2, **fields}
    )
    return weights_pb2.GetWeightsResponse(manifest=message)


def tensor_with(**fields: Any) -> weights_pb2.GetWeightsResponse:
    valid = {"name": "w", "dtype": weights_pb2.WEIGHT_TYPE_F32, "shape": [2], "digest": bytes(16)}
    return manifest_with(tensors=[weights_pb2.WeightTensor(**{**valid, **fields})])


def chunk_with(count: int = 1, **fields: Any) -> weights_pb2.GetWeightsResponse:
    chunk = weights_pb2.WeightChunk(**{"encoding": weights_pb2.CHUNK_ENCODING_RAW, "data": b"x" * 8, **fields})
    return weights_pb2.GetWeightsResponse(chunks=weights_pb2.WeightChunks(chunks=[chunk] * count))


RESPONSES: dict[str, tuple[weights_pb2.GetWeightsResponse, str]] = {
    "nothing": (weights_pb2.GetWeightsResponse(), "expected a manifest or chunks"),
    "a short digest": (manifest_with(digest=b"x"), "digest: expected 16 bytes, got 1"),
    "no links": (manifest_with(num_links=0), "num_links 0"),
    "digests of another version": (manifest_with(digest_version=1), "digest_version 1: expected 2"),
    "too many links": (manifest_with(num_links=65), "num_links 65: expected 1 to 64"),
    "too many tensors": (
        manifest_with(tensors=[weights_pb2.WeightTensor()] * (MAX_TENSORS + 1)),
        f"tensors: expected at most {MAX_TENSORS}",
    ),
    "an adapter without rank": (manifest_with(adapter=weights_pb2.WeightAdapter(alpha=1)), "expected a rank of 1"),
    "an adapter of NaN": (manifest_with(adapter=weights_pb2.WeightAdapter(rank=1, alpha=float("nan"))), "finite alpha"),
    "no name": (tensor_with(name=""), "expected 1 to 512 bytes"),
    "a long name": (tensor_with(name="é" * 257), "expected 1 to 512 bytes"),
    "no type": (tensor_with(dtype=0), "dtype 0: unknown"),
    "an unknown type": (tensor_with(dtype=9), "dtype 9: unknown"),
    "too many dimensions": (tensor_with(shape=[1] * 9), "at most 8 dimensions, got 9"),
    "a shape beyond memory": (tensor_with(shape=[2**63, 2**63]), "expected at most 4398046511104 bytes"),
    "a tensor without digest": (tensor_with(digest=b""), "tensor w: digest: expected 16 bytes"),
    "a socket outside the directory": (
        manifest_with(regions=[weights_pb2.SharedRegion(socket=f"../weights-{'0' * 32}")]),
        "regions.socket '../weights-0000",
    ),
    "a handle of another size": (
        manifest_with(regions=REGIONS, device=weights_pb2.DeviceRegion(handle=bytes(63))),
        "device: expected a handle of 64 bytes, with regions, got 63 bytes and 1 regions",
    ),
    "a handle without regions": (manifest_with(device=weights_pb2.DeviceRegion(handle=bytes(64))), "and 0 regions"),
    "no chunks": (chunk_with(0), "expected at least one"),
    "an unknown encoding": (chunk_with(encoding=9), "encoding 9: unknown"),
    "an empty chunk": (chunk_with(data=b""), "expected 1 to"),
    "a large chunk": (chunk_with(data=bytes(MAX_ENCODED_BYTES + 1)), f"expected 1 to {MAX_ENCODED_BYTES} bytes"),
    "a large message": (chunk_with(5, data=bytes(2**20)), "4194304 together"),
}


@every_case("case", RESPONSES)
def test_a_malformed_response_is_refused(case: str, network: Network) -> None:
    response, expected = RESPONSES[case]

    class Servicer(weights_pb2_grpc.WeightServiceServicer):
        def GetWeights(self, request: Any, context: Any) -> Iterator[Any]:
            yield response

    client, _ = network.host(Servicer())
    with pytest.raises(InvalidRequest, match=expected.replace("(", r"\(")):
        list(client.get_weights(WeightsRequest(RUN, 0), timeout=20))
    # For the generator it is an error of the source.
    with pytest.raises(QuartetError, match=r"actor at 127.*: GetWeights"):
        network.mirror().pull([client], RUN, 0, bytes(16), timeout=20)


def test_the_samples_of_malformed_responses_are_otherwise_valid() -> None:
    assert isinstance(weights_from_bytes(manifest_with().SerializeToString()), Manifest)
    assert isinstance(weights_from_bytes(tensor_with().SerializeToString()), Manifest)
    assert weights_from_bytes(chunk_with().SerializeToString())
    device = DeviceRegion(bytes(range(64)), 2**21)
    message = manifest_with(regions=REGIONS, device=weights_pb2.DeviceRegion(handle=device.handle, num_bytes=2**21))
    manifest = weights_from_bytes(message.SerializeToString())
    assert isinstance(manifest, Manifest)
    assert manifest.device == device
    assert weights_from_bytes(weights_to_bytes(manifest)) == manifest


def test_chunks_are_written_and_read_in_the_format_of_protobuf() -> None:
    chunks = (Chunk(0, 0, Encoding.RAW, b"a" * 300), Chunk(2**18, 300, Encoding.XOR_SPARSE, b"b"))
    data = weights_to_bytes(chunks)
    message = weights_pb2.GetWeightsResponse.FromString(data)
    assert [(each.tensor, each.index, bytes(each.data)) for each in message.chunks.chunks] == [
        (each.tensor, each.index, each.data) for each in chunks
    ]
    for form in (data, message.SerializeToString()):  # Protobuf leaves out a tensor and an index of 0.
        read = weights_from_bytes(form)
        assert isinstance(read, tuple)
        assert [replace(each, data=bytes(each.data)) for each in read] == list(chunks)
    for index in range(len(data)):
        with pytest.raises(InvalidRequest):
            weights_from_bytes(data[:index])
    # The length of a chunk contradicts that of its data.
    wrong = bytearray(data)
    wrong[wrong.index(b"\x0a", 1) + 1] ^= 1
    with pytest.raises(InvalidRequest):
        weights_from_bytes(bytes(wrong))


@pytest.mark.parametrize(
    ("peer", "host"),
    [("ipv4:10.1.2.3:4567", "10.1.2.3"), ("ipv6:%5B2001:db8::1%5D:4567", "2001:db8::1"), ("unix:/run/weights", "")],
)
def test_ranks_connect_to_the_host_of_the_caller_only(peer: str, host: str) -> None:
    seen: list[WeightsRequest] = []

    class Store:
        def wake(self) -> None: ...

        def stream(self, request: WeightsRequest, cancelled: Any) -> Iterator[Any]:
            seen.append(request)
            yield from ()

    message = weights_pb2.GetWeightsRequest(
        run=RUN, group=weights_pb2.WeightGroup(backend="gloo", port=7, name="a" * 32)
    )
    context = MagicMock(peer=lambda: peer)
    assert list(WeightServicer(Store()).GetWeights(message, context)) == []  # type: ignore[arg-type]
    (request,) = seen
    assert request.group == (WeightGroup("gloo", 7, "a" * 32, host) if host else None)
