"""The servicers that roles share: status, commands, updates, saves, and the stream of weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar
from urllib.parse import unquote

import grpc

from quartet.codec.generation import generation_batch_from_proto
from quartet.codec.messages import from_message, to_message
from quartet.codec.updates import update_request_from_proto
from quartet.codec.weights import WEIGHT_SERVICE, weights_to_bytes
from quartet.contract.generation import GenerationBatch
from quartet.contract.status import ServiceStatus
from quartet.contract.update import OptimizationSettings, UpdateResult
from quartet.contract.weights import RestoreRequest, SavedFile, SaveKind, SaveRequest
from quartet.errors import Cancelled, DeadlinePassed, InvalidRequest, ServiceBusy
from quartet.rpc.compute_thread import ComputeThread, remaining_time
from quartet.rpc.limits import MAX_PENDING_SAVES, MAX_WEIGHT_STREAMS
from quartet.v1 import generation_pb2, update_pb2, weights_pb2
from quartet.weight_transfer.messages import Manifest, WeightsRequest
from quartet.weight_transfer.store import WeightStore


class Core(Protocol):
    """The logic of a service, without gRPC."""

    def status(self) -> ServiceStatus:
        """Return the role's status without waiting for model work."""


class TrainableCore(Core, Protocol):
    """The logic of a service with a trainable model."""

    @property
    def policy_version(self) -> int:
        """Number of updates that the model has taken."""

    def update(self, run: str, step: int, leader_epoch: int, settings: OptimizationSettings, loss: Any) -> UpdateResult:
        """Apply the update of one step. Idempotent by (run, step)."""

    def snapshot(
        self, run: str, leader_epoch: int, directory: str, kind: SaveKind, step: int | None = None
    ) -> Callable[[], list[SavedFile]]:
        """Copy the model to host memory and return the function that writes the copy."""

    def restore(self, run: str, step: int, leader_epoch: int, directory: str) -> None:
        """Restore a checkpoint, or the initial model for step 0."""


AnyCore = TypeVar("AnyCore", bound=Core)
AnyTrainableCore = TypeVar("AnyTrainableCore", bound=TrainableCore)


class ModelServicer(Generic[AnyCore]):
    """Base class of the four model servicers. Roles of one process may share a compute thread."""

    def __init__(self, core: AnyCore, compute: ComputeThread, threads: int, commands: Commands | None = None) -> None:
        """``commands``: those of the service's processes. Defaults to one process."""
        self.core = core
        self.compute = compute
        self._threads = threads
        self._commands = commands or Commands()
        self.model_files: dict[str, str] = {}
        """See ``RoleStatus.model_files`` in proto/quartet/v1/status.proto."""

    def status(self) -> ServiceStatus:
        """Return the core's status with the measurements of the compute thread."""
        return replace(
            self.core.status(),
            threads=self._threads,
            busy_seconds=self.compute.busy_seconds(),
            work_pending=self.compute.pending(),
            model_files=self.model_files,
        )

    def abandoned(self) -> tuple[str, float]:
        return self.compute.abandoned()

    def failure(self) -> str:
        """Return the error after which only a restart of this process helps, or ""."""
        return self.compute.failure or self._commands.failure

    def close(self) -> None:
        """Close the compute thread, and end the other processes of the group."""
        busy = self.compute.pending()
        self.compute.close()
        if not busy:
            self._commands.stop()

    def handlers(self) -> dict[str, CommandHandler]:
        """Return the functions that run the commands of rank 0 in another process of the group, by their kind."""
        return {}

    def run_command(self, kind: str, request: Any, context: grpc.ServicerContext, work: Callable[[], Result]) -> Result:
        """Return the result of ``work`` on the compute thread, which all processes of the group do for ``request``."""
        return self.compute.run(kind, context, lambda _: self._commands.run(kind, request, work))


class GenerationCore(Protocol):
    """Logic that generates: a generator, or those of all ranks of a group."""

    def status(self) -> ServiceStatus:
        """Return the status with the engine and the number of tokens."""

    def generate(
        self,
        batch: GenerationBatch,
        cancelled: Callable[[], bool],
        on_start: Callable[[], None],
        on_progress: Callable[[int, int], None],
    ) -> tuple[int, int]:
        """Generate trajectories into the rollout stream. Return the numbers of trajectories and response tokens."""


def stream_generation(
    core: GenerationCore, compute: ComputeThread, request: Any, context: grpc.ServicerContext
) -> Iterator[Any]:
    """Run a Generate call on ``compute``. Yield its events: the start, the progress, the end."""
    batch, start = generation_batch_from_proto(request), time.perf_counter()
    done = [0, 0]

    def progress() -> Any:
        now = generation_pb2.GenerationProgress(trajectories=done[0], response_tokens=done[1])
        return generation_pb2.GenerateResponse(progress=now)

    def work(cancelled: Callable[[], bool], emit: Callable[[Any], None]) -> Any:
        def on_start() -> None:
            emit(generation_pb2.GenerateResponse(started=generation_pb2.GenerationStarted()))

        def on_progress(trajectories: int, response_tokens: int) -> None:
            done[:] = trajectories, response_tokens
            emit(progress())

        trajectories, tokens = core.generate(batch, cancelled, on_start, on_progress)
        finished = generation_pb2.GenerationFinished(
            trajectories=trajectories, response_tokens=tokens, seconds=time.perf_counter() - start
        )
        return generation_pb2.GenerateResponse(finished=finished)

    return compute.stream("generate", context, work, progress)


class TrainableServicer(ModelServicer[AnyTrainableCore]):
    """Base class of the actor's and the critic's servicers: Update, Save and Restore.

    A save stops model work only while the model is copied; the copy is written on the thread of the call.
    """

    loss: ClassVar[type]
    """Class of the loss settings that this role accepts."""

    def __init__(
        self,
        core: AnyTrainableCore,
        compute: ComputeThread,
        threads: int,
        buffer_unreachable: Callable[[], bool],
        commands: Commands | None = None,
    ) -> None:
        """``buffer_unreachable`` returns at once whether the core's last access to the rollout buffer failed.

        See ModelServicer for the rest.
        """
        super().__init__(core, compute, threads, commands)
        self._buffer_unreachable = buffer_unreachable
        self._save_slots = threading.BoundedSemaphore(MAX_PENDING_SAVES)
        # One save at a time: there is memory for one copy, and two saves must not write the same directory.
        self._save_lock = threading.Lock()

    def status(self) -> ServiceStatus:
        """Return the status of a model servicer, and whether the buffer is unreachable."""
        return replace(super().status(), buffer_unreachable=self._buffer_unreachable())

    def handlers(self) -> dict[str, CommandHandler]:
        return {
            "update": lambda request: self._update(request)(),
            "save": lambda request: self._snapshot(request)(),
            "restore": lambda request: self._restore(request)(),
        }

    def _update(self, request: Any) -> Callable[[], UpdateResult]:
        update = update_request_from_proto(request)
        if not isinstance(update.loss, self.loss):
            raise InvalidRequest(f"loss: expected {self.loss.__name__}, got {type(update.loss).__name__}")
        return lambda: self.core.update(update.run, update.step, update.leader_epoch, update.optimization, update.loss)

    def _snapshot(self, request: Any) -> Callable[[], tuple[Callable[[], list[SavedFile]], int]]:
        save = from_message(SaveRequest, request)
        return lambda: (
            self.core.snapshot(save.run, save.leader_epoch, save.directory, save.kind, save.step),
            self.core.policy_version,
        )

    def _restore(self, request: Any) -> Callable[[], int]:
        restore = from_message(RestoreRequest, request)

        def work() -> int:
            self.core.restore(restore.run, restore.step, restore.leader_epoch, restore.directory)
            return self.core.policy_version

        return work

    def Update(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Apply the update of one step."""
        result = self.run_command("update", request, context, self._update(request))
        return to_message(update_pb2.UpdateResponse, result)

    def Save(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Save the model below the run's directory."""
        snapshot = self._snapshot(request)
        if not self._save_slots.acquire(blocking=False):
            raise ServiceBusy(f"save: {MAX_PENDING_SAVES} saves are pending already; send fewer at once")
        try:
            if not self._save_lock.acquire(timeout=max(remaining_time(context), 0.0)):
                raise DeadlinePassed("save: the deadline passed during an earlier save")
            try:
                write, version = self.run_command("save", request, context, snapshot)
                files = write()
            finally:
                self._save_lock.release()
        finally:
            self._save_slots.release()
        return to_message(update_pb2.SaveResponse, files=files, policy_version=version)

    def Restore(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Restore the model of a checkpoint."""
        version = self.run_command("restore", request, context, self._restore(request))
        return update_pb2.RestoreResponse(policy_version=version)


Result = TypeVar("Result")
CommandHandler = Callable[[Any], Any]
"""Function that runs a command from its request, a protobuf message."""


class Commands:
    """The commands of a service of one process. The base class of those of a group.

    Call the methods on the compute thread, or before and after it.
    """

    size = 1
    """Number of processes."""
    failure = ""
    """Error after which the processes may no longer be at the same place, so that only a restart helps."""

    def run(self, kind: str, request: Any, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``, which all processes do for the protobuf message ``request``."""
        return work()

    def stop(self) -> None:
        """End the other processes. Call it when no command runs."""


def peer_host(peer: str) -> str:
    """Return the address of the host of a gRPC peer, such as "ipv4:10.0.0.1:5000"; empty for another kind of connection."""
    kind, _, place = unquote(peer).partition(":")
    return place.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""


class WeightServicer:
    """WeightService for a WeightStore. Streams run on the thread of their call, beside model work."""

    def __init__(self, store: WeightStore, max_streams: int = MAX_WEIGHT_STREAMS) -> None:
        """``max_streams``: streams at once, including those that wait for a version. More fail with ServiceBusy."""
        self._store = store
        self._max_streams = max_streams
        self._slots = threading.BoundedSemaphore(max_streams)

    def register(self, server: grpc.Server) -> None:
        """Add this servicer to a server. Its responses are serialised already."""
        handler = grpc.unary_stream_rpc_method_handler(self.GetWeights, weights_pb2.GetWeightsRequest.FromString)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(WEIGHT_SERVICE, {"GetWeights": handler}),)
        )

    def end_streams(self) -> None:
        """End the streams that wait for a version or lend memory."""
        self._store.end_streams()

    def GetWeights(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """Yield the manifest, then the chunks of the wanted version."""
        wanted = from_message(WeightsRequest, request)
        if wanted.group is not None:
            # The ranks connect to nobody but the caller.
            host = peer_host(context.peer())
            wanted = replace(wanted, group=replace(wanted.group, host=host) if host else None)
        if not self._slots.acquire(blocking=False):
            raise ServiceBusy(f"weights: {self._max_streams} streams are open already; try another source, or later")
        with ExitStack() as slot:
            slot.callback(self._slots.release)
            if not context.add_callback(self._store.wake):
                raise Cancelled("weights: the caller is gone")
            with closing(self._store.stream(wanted, lambda: not context.is_active())) as messages:
                for message in messages:
                    if isinstance(message, Manifest) and message.regions:
                        # Nothing more is sent: the stream is the lease of the caller.
                        slot.close()
                    yield weights_to_bytes(message)
