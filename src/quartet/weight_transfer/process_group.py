"""Weights through process groups of torch: gloo between CPUs, and NCCL between GPUs. NCCL has not run yet.

For each transfer, the receiver listens, and each rank of the trainer that holds something connects and joins a group of two. The
groups end with the transfer, so a process that joins, leaves or dies touches no other one. Each transfer has another port and a
random name: a member that is late cannot join the next one.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from itertools import count
from secrets import token_hex
from typing import Any, Protocol, cast

import structlog

from quartet.config.root import Config
from quartet.errors import ServiceUnavailable
from quartet.weight_transfer.arrivals import HELLO, NAME_BYTES, arrivals
from quartet.weight_transfer.messages import GroupBackend, RankSlices, WeightGroup
from quartet.weight_transfer.tensors import Bytes

PIECE_BYTES = 2**24
"""Maximum bytes of one message. Both sides cut slices at multiples of this number of bytes from their start."""
DEPTH = 4
"""Messages in progress between two members. More would need more memory on GPUs, and are not faster."""
TRAINER, RECEIVER = 0, 1
"""Ranks in a group of two."""
MAX_SENDS = 64
"""Transfers of one rank at a time. Beyond it, receivers get chunks."""
MAX_VALUE_BYTES = 2**16
"""Maximum size of what two members tell each other to connect."""
_LENGTHS, _DONE = struct.Struct("<II"), b"\1"

Place = tuple[int, int, int]
"""Memory of a rank: number of the region, offset and size in bytes."""

log = structlog.get_logger()


class Store(Protocol):
    """A connection to torch's store that one thread uses."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def delete_key(self, key: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How this process takes part in groups.

    ``device`` of torch, for NCCL. ``timeout``: seconds that one message may take, after which the group ends.
    """

    backend: GroupBackend = "gloo"
    timeout: float = 60.0
    device: str = "cpu"

    def before(self, deadline: float) -> GroupSettings:
        """Return the same with at most the time until a deadline."""
        return replace(self, timeout=max(0.001, min(self.timeout, deadline - time.monotonic())))


def group_settings(config: Config, device: int | None) -> GroupSettings | None:
    """Return how a process on a CUDA device, or on the CPU, takes part in groups; None if it does not."""
    backend = config.rollout.process_group
    if backend == "none":
        return None
    timeout = config.recovery.hang_timeout_seconds
    return GroupSettings(backend, timeout, "cpu" if device is None else f"cuda:{device}")


class GroupFailed(Exception):
    """A transfer through a group has failed. The weights can come another way."""


class _Member:
    """This process in a group of two, over a connection by which both know when the other one has ended."""

    def __init__(
        self, settings: GroupSettings, connection: socket.socket, rank: int, deadline: float = math.inf
    ) -> None:
        """Join the group. Closes the connection with it. Raises RuntimeError or OSError if the other member does not come.

        ``deadline``: time of ``time.monotonic`` after which no message is awaited.
        """
        import torch
        from torch._C._distributed_c10d import ProcessGroupGloo

        self._connection, self._timeout, self._other = connection, timedelta(seconds=settings.timeout), 1 - rank
        self._deadline = deadline
        self._device = torch.device(settings.device) if settings.backend == "nccl" else None
        self._store = _store_class()(connection)
        if self._device is None:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            own = connection.getsockname()[0]
            options._devices, options._threads = [ProcessGroupGloo.create_device(hostname=own)], 1
            options._timeout = self._timeout
            self._group: Any = ProcessGroupGloo(self._store, rank, 2, options)
        else:
            from torch.distributed import ProcessGroupNCCL

            torch.cuda.set_device(self._device)
            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = self._timeout
            self._group = ProcessGroupNCCL(self._store, rank, 2, nccl)

    def send(self, data: Bytes, tag: int) -> Callable[[], None]:
        """Start to send bytes. Return the function that waits until they are sent."""
        import torch

        values = torch.from_numpy(data)
        if self._device is not None:
            values = values.to(self._device)
        work = self._group.send([values], self._other, tag)
        # The tensor lives as long as the work.
        return lambda: self._wait(work, values)

    def receive(self, data: Bytes, tag: int) -> Callable[[], None]:
        """Start to receive bytes. Return the function that waits until they are there."""
        import torch

        target = torch.from_numpy(data)
        values = target if self._device is None else torch.empty_like(target, device=self._device)
        work = self._group.recv([values], self._other, tag)

        def wait() -> None:
            self._wait(work, values)
            if values is not target:
                target.copy_(values)

        return wait

    def _wait(self, work: Any, _: Any) -> None:
        remaining = max(0.001, self._deadline - time.monotonic())
        work.wait(min(self._timeout, timedelta(seconds=remaining)) if remaining < math.inf else self._timeout)

    def confirm(self) -> None:
        """Tell the sender that everything has arrived."""
        self._connection.sendall(_DONE)

    def wait_until_confirmed(self) -> None:
        """Wait for ``confirm``. Raises OSError."""
        if self._connection.recv(1) != _DONE:
            raise ConnectionResetError("the receiver has ended")

    def close(self) -> None:
        """End the group, its thread and its connections."""
        if self._device is not None:
            self._group.abort()
        del self._group
        self._connection.close()


@cache
def _store_class() -> Any:
    from torch._C._distributed_c10d import Store as TorchStore

    class ConnectionStore(TorchStore):
        """A store of torch for two members, over their connection. So no third process has a server, or a name to look up."""

        def __init__(self, connection: socket.socket) -> None:
            super().__init__()
            self._connection, self._values = connection, dict[str, bytes]()

        def set(self, key: str, value: str | bytes) -> None:
            data, name = value if isinstance(value, bytes) else value.encode(), key.encode()
            self._values[key] = data
            self._connection.sendall(_LENGTHS.pack(len(name), len(data)) + name + data)

        def get(self, key: str) -> bytes:
            while key not in self._values:
                lengths = _LENGTHS.unpack(_read(self._connection, _LENGTHS.size))
                if max(lengths) > MAX_VALUE_BYTES:
                    raise ConnectionError(f"expected values of at most {MAX_VALUE_BYTES} bytes, got {max(lengths)}")
                name, data = (_read(self._connection, length) for length in lengths)
                self._values[name.decode(errors="replace")] = data
            return self._values[key]

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            for key in keys:
                self.get(key)

        def check(self, keys: list[str]) -> bool:
            return all(key in self._values for key in keys)

        def set_timeout(self, timeout: timedelta) -> None:
            """Keep the timeout of the connection."""

    return ConnectionStore


def _read(connection: socket.socket, size: int) -> bytes:
    """Return ``size`` bytes of a connection. Raises OSError."""
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other side has ended")
        data += part
    return bytes(data)


def _pieces(parts: Iterator[Bytes]) -> Iterator[tuple[Bytes, bool]]:
    """Yield the messages of slices, and whether each is the last one of its slice."""
    for part in parts:
        for begin in range(0, len(part), PIECE_BYTES):
            yield part[begin : begin + PIECE_BYTES], begin + PIECE_BYTES >= len(part)


def send_slices(settings: GroupSettings, group: WeightGroup, rank: int, parts: Sequence[Bytes]) -> None:
    """Send slices to the receiver that has opened ``group``, as ``rank`` of the trainer.

    Raises OSError or RuntimeError if the receiver is not there, does not take a message in time, or ends.
    """
    connection = socket.create_connection((group.host, group.port), settings.timeout)
    try:
        connection.sendall(HELLO.pack(group.name.encode(), rank))
        member = _Member(settings, connection, TRAINER)
    except BaseException:
        connection.close()
        raise
    try:
        waiting = deque[Callable[[], None]]()
        for tag, (piece, _) in enumerate(_pieces(iter(parts)), 1):
            waiting.append(member.send(piece, tag))
            if len(waiting) >= DEPTH:
                waiting.popleft()()
        while waiting:
            waiting.popleft()()
        # The group stays until the receiver has everything.
        member.wait_until_confirmed()
    finally:
        member.close()


class Meeting:
    """A port of this process, at which the ranks of a trainer meet it for one transfer."""

    def __init__(self, settings: GroupSettings, host: str) -> None:
        """Listen on a free port of the interface towards ``host``, that of the trainer. Raises OSError, ServiceUnavailable."""
        self._settings = settings
        # The import of torch takes longer than the ranks may wait.
        _store_class()
        own = address_towards(host)
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        self._listener = socket.create_server((own, 0), family=family, backlog=128)
        self.group = WeightGroup(settings.backend, self._listener.getsockname()[1], token_hex(NAME_BYTES // 2), host)

    def receive(
        self,
        ranks: Sequence[RankSlices],
        targets: Sequence[Bytes],
        on_tensor: Callable[[int], object],
        deadline: float,
    ) -> int:
        """Receive the slices of all ranks into ``targets``, the bytes of each tensor. Return the bytes received.

        ``on_tensor`` is called on any thread with each tensor that is complete. Raises GroupFailed, when all threads have ended:
        at the latest when half of the time until ``deadline`` is left, so that another way has it.
        """
        deadline -= (deadline - time.monotonic()) / 2
        transfer = _Transfer(self._settings, ranks, targets, on_tensor, deadline)
        missing, threads = {number for number, slices in enumerate(ranks) if slices.tensors}, []
        limit = time.monotonic() + self._settings.before(deadline).timeout
        try:
            for rank, connection in arrivals(
                self._listener, self.group.name, missing, limit, lambda: bool(transfer.errors)
            ):
                threads.append(threading.Thread(target=transfer.run, args=(rank, connection), name="weight receiver"))
                threads[-1].start()
        except OSError as error:
            transfer.errors.append(f"rank {', '.join(map(str, sorted(missing)))} did not come: {first_line(error)}")
        for thread in threads:
            thread.join()
        if transfer.errors:
            raise GroupFailed("; ".join(transfer.errors))
        return transfer.received

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()


class _Transfer:
    """The work of a receiver. ``errors``: texts of the ranks that have failed, after which the others end soon."""

    def __init__(
        self,
        settings: GroupSettings,
        ranks: Sequence[RankSlices],
        targets: Sequence[Bytes],
        on_tensor: Callable[[int], object],
        deadline: float,
    ) -> None:
        self._settings, self._ranks, self._targets, self._deadline = settings, ranks, targets, deadline
        self._on_tensor = on_tensor
        self._missing = Counter(tensor for rank in ranks for tensor in rank.tensors)
        self._lock = threading.Lock()
        self.errors: list[str] = []
        self.received = 0

    def run(self, rank: int, connection: socket.socket) -> None:
        """Receive what a rank sends."""
        try:
            with closing(connection):
                self._receive(self._ranks[rank], connection)
        except Exception as error:  # torch raises several classes, and a thread must not end silently.
            self.errors.append(f"rank {rank}: {first_line(error)}")

    def _receive(self, slices: RankSlices, connection: socket.socket) -> None:
        settings = self._settings.before(self._deadline)
        connection.settimeout(settings.timeout)
        member = _Member(settings, connection, RECEIVER, self._deadline)
        try:
            waiting = deque[tuple[Callable[[], None], int, int | None]]()
            tensors = iter(slices.tensors)
            parts = (
                self._targets[tensor][begin : begin + size]
                for tensor, begin, size in zip(slices.tensors, slices.begins, slices.sizes, strict=True)
            )
            for tag, (piece, is_last) in enumerate(_pieces(parts), 1):
                if self.errors or time.monotonic() > self._deadline:
                    raise TimeoutError("ended with the transfer" if self.errors else "no time left")
                waiting.append((member.receive(piece, tag), len(piece), next(tensors) if is_last else None))
                if len(waiting) >= DEPTH:
                    self._finish(*waiting.popleft())
            while waiting:
                self._finish(*waiting.popleft())
            member.confirm()
        finally:
            member.close()

    def _finish(self, wait: Callable[[], None], num_bytes: int, tensor: int | None) -> None:
        wait()
        with self._lock:
            self.received += num_bytes
            if tensor is not None:
                self._missing[tensor] -= 1
            complete = tensor is not None and not self._missing[tensor]
        if complete and tensor is not None:
            self._on_tensor(tensor)


class GroupSenders:
    """The sends of one rank of a trainer. Each has a thread of its own, so the trainer never waits for a receiver."""

    def __init__(self, settings: GroupSettings, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        """``store``: a connection to the store of the ``size`` ranks, over which rank 0 tells the others what to send."""
        self.settings, self._rank, self._size, self._store = settings, rank, size, store
        # Commands to each rank so far.
        self._counts = Counter[int]()
        self._lock = threading.Lock()
        self._free = threading.Semaphore(MAX_SENDS)

    def start(self, group: WeightGroup, own: Sequence[Bytes], others: Sequence[Sequence[Place]]) -> bool:
        """Let all ranks send: rank 0 its ``own`` slices, the ``others`` theirs.

        Return False if rank 0 has too many transfers. Then no rank sends.
        """
        if own and not self._send(group, own):
            return False
        self._command_sends(group, dict(enumerate(others, 1)))
        return True

    def fetch(self, host: str, places: Mapping[int, Sequence[Place]], targets: Mapping[int, Sequence[Bytes]]) -> None:
        """Receive memory of other ranks into ``targets``, by rank. Rank 0 calls it, on any thread, and listens at ``host``.

        Raises ServiceUnavailable.
        """
        settings = replace(self.settings, backend="gloo")
        ranks: list[RankSlices] = []
        parts: list[Bytes] = []
        for rank in range(self._size):
            own = targets.get(rank, ())
            tensors = tuple(range(len(parts), len(parts) + len(own)))
            ranks.append(RankSlices(tensors, (0,) * len(own), tuple(map(len, own))))
            parts += own
        try:
            with closing(Meeting(settings, host)) as meeting:
                self._command_sends(meeting.group, places, limited=False)
                meeting.receive(ranks, parts, lambda _: None, time.monotonic() + 2 * settings.timeout)
        except (GroupFailed, OSError, ImportError) as error:
            raise ServiceUnavailable(f"weights: no slices from other machines of the trainer: {error}") from None

    def _command_sends(self, group: WeightGroup, places: Mapping[int, Sequence[Place]], limited: bool = True) -> None:
        target = [group.backend, group.port, group.name, group.host]
        with self._lock:
            for rank, own in places.items():
                if own:
                    self._command(rank, {"group": target, "places": own, "limited": limited})

    def _command(self, rank: int, command: dict[str, Any]) -> None:
        assert self._store is not None
        self._store.set(_key(rank, self._counts[rank]), json.dumps(command))
        self._counts[rank] += 1

    def close(self) -> None:
        """End ``follow`` on the other ranks. Rank 0 calls it."""
        with self._lock:
            for rank in range(1, self._size):
                self._command(rank, {})

    def follow(self, memory: Callable[[int, int, int], Bytes]) -> None:
        """Send what rank 0 asks for, on other threads, until the store ends. ``memory`` returns the bytes of a ``Place``."""
        threading.Thread(target=self._follow, args=(memory,), name="weight senders", daemon=True).start()

    def _follow(self, memory: Callable[[int, int, int], Bytes]) -> None:
        assert self._store is not None
        for number in count():
            key = _key(self._rank, number)
            try:
                self._store.wait([key], timedelta(days=365))
                command = json.loads(self._store.get(key))
                self._store.delete_key(key)
            except RuntimeError:  # Rank 0 has ended, or this rank ends.
                return
            if not command:
                return
            # Without the memory, the receiver takes another way when this rank does not come.
            with suppress(KeyError):
                parts = [memory(*place) for place in command["places"]]
                self._send(WeightGroup(*command["group"]), parts, command["limited"])

    def _send(self, group: WeightGroup, parts: Sequence[Bytes], limited: bool = True) -> bool:
        """Send on another thread. Return False if there are too many. Those to rank 0 are not ``limited``: its streams are."""
        if limited and not self._free.acquire(blocking=False):
            log.info(
                "weights not sent through a process group", rank=self._rank, reason=f"it has {MAX_SENDS} transfers"
            )
            return False

        def run() -> None:
            try:
                send_slices(replace(self.settings, backend=group.backend), group, self._rank, parts)
            except Exception as error:  # torch raises several classes. The receiver says what it does then.
                log.info("weights not sent through a process group", rank=self._rank, reason=first_line(error))
            finally:
                if limited:
                    self._free.release()

        threading.Thread(target=run, name="weight sender", daemon=True).start()
        return True


def _key(rank: int, number: int) -> str:
    return f"weights/{rank}/{number}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text. torch adds stacks."""
    return (str(error) or type(error).__name__).partition("\n")[0]


def address_towards(host: str) -> str:
    """Return the address of this machine on the way to ``host``. Raises ServiceUnavailable."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            # Connecting a datagram socket selects the route and sends nothing.
            probe.connect(address)
            return cast(str, probe.getsockname()[0])
    except OSError as error:
        raise ServiceUnavailable(f"weights: no way to {host}: {error}") from None
