"""Descriptors of memory for processes in other containers of this machine, over Unix sockets in a directory that all of them see.

A process gives the descriptors of its regions to every process of its user that connects, and reads nothing from it. The
connection ends with the process.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import socket
import stat
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from quartet.errors import ServiceUnavailable

if TYPE_CHECKING:
    from quartet.weight_transfer.shared_memory import Region

log = structlog.get_logger()

SOCKET_NAME = re.compile(r"weights-[0-9a-f]{32}")
"""Names of sockets. A socket that does not listen yet has the suffix ".new"."""
MAX_DESCRIPTORS = 64
"""Maximum number of descriptors of a process."""
MAX_CONNECTIONS = 256
"""Maximum connections of a server. A further one ends the oldest."""
TIMEOUT = 5.0
"""Seconds until a server must have accepted a connection and sent its descriptors."""
PAUSE = 1.0
"""Seconds until a connection that cannot be accepted is tried again."""
BIND_ATTEMPTS = 10
_KIND = socket.SOCK_SEQPACKET if hasattr(socket, "SOCK_SEQPACKET") else socket.SOCK_STREAM
# Process, user and group of the other side of a connection.
_CREDENTIALS = struct.Struct("3i")


class SharedDirectory:
    """A directory that the processes of several containers see. It is kept open, so it stays the same one."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if there is no such directory."""
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        status = os.fstat(self._fd)
        self.identity = f"dir:[{status.st_dev}:{status.st_ino}]"
        """The same for all processes that see this directory, under any path."""

    def connect(self, name: str) -> socket.socket:
        """Connect to a socket of a process of this user. Raises OSError."""
        connection = socket.socket(socket.AF_UNIX, _KIND)
        try:
            connection.settimeout(TIMEOUT)
            connection.connect(self._address(name))
            _check_user(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def listen(self) -> tuple[str, socket.socket]:
        """Return the name of a new socket for processes of this user, and the socket. Raises OSError."""
        name = f"weights-{secrets.token_hex(16)}"
        for _ in range(BIND_ATTEMPTS):
            listener = socket.socket(socket.AF_UNIX, _KIND)
            try:
                os.fchmod(listener.fileno(), 0o600)
                listener.bind(self._address(f"{name}.new"))
                listener.listen(MAX_CONNECTIONS)
                listener.setblocking(False)
                os.rename(f"{name}.new", name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
                return name, listener
            except FileNotFoundError:
                # Another process has removed it, because it did not listen yet.
                listener.close()
            except BaseException:
                listener.close()
                self.remove(f"{name}.new")
                raise
        raise OSError(f"the socket {name} was removed {BIND_ATTEMPTS} times")

    def remove(self, name: str) -> None:
        """Remove a socket if it is there."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._fd)

    def remove_stale(self) -> None:
        """Remove the sockets of processes of this user that were killed. Raises OSError if the directory cannot be read."""
        for name in os.listdir(self._fd):
            if not SOCKET_NAME.fullmatch(name.removesuffix(".new")):
                continue
            try:
                status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                if stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid():
                    self.connect(name).close()
            except ConnectionRefusedError:
                self.remove(name)
            except OSError:
                continue

    def _address(self, name: str) -> str:
        # The path of the directory may be longer than an address may be.
        return f"/proc/self/fd/{self._fd}/{name}"

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class DescriptorServer:
    """Gives the descriptors of the regions of this process to other processes. Runs on its own thread."""

    def __init__(self, directory: SharedDirectory, regions: Callable[[], Sequence[Region]]) -> None:
        """Raises OSError if there can be no socket. Removes what killed processes have left in the directory."""
        self._directory, self._regions = directory, regions
        directory.remove_stale()
        self.name, self._listener = directory.listen()
        self._connections: list[socket.socket] = []
        self._stopped, self._stop = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="weight descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the socket and end all connections."""
        if self._stop >= 0:
            os.close(self._stop)
            self._stop = -1
            self._thread.join()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._stopped, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._stopped in ready:
                break
            # The other side sends nothing, so it has ended.
            for connection in [each for each in self._connections if each.fileno() in ready]:
                self._end(connection, poll)
            if self._listener.fileno() in ready:
                self._accept(poll)
        self._directory.remove(self.name)
        for connection in (self._listener, *self._connections):
            connection.close()
        self._connections.clear()
        os.close(self._stopped)

    def _accept(self, poll: select.poll) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            # Too many open files, for example. The connection stays, so the next attempt is not at once.
            log.warning("descriptors of weights are not sent", reason=str(error))
            select.select([self._stopped], [], [], PAUSE)
            return
        try:
            connection.setblocking(False)
            _check_user(connection)
            # They keep their descriptors open. One that is not sealed yet could be mapped for writing.
            regions = [region for region in self._regions() if region.is_sealed][-MAX_DESCRIPTORS:]
            descriptors = [region.fd for region in regions]
            message = struct.pack(f"{1 + len(descriptors)}I", len(descriptors), *descriptors)
            socket.send_fds(connection, [message], descriptors)
        except (OSError, struct.error) as error:
            log.debug("descriptors of weights are not sent", reason=str(error))
            connection.close()
            return
        self._connections.append(connection)
        poll.register(connection, select.POLLIN | select.POLLHUP)
        if len(self._connections) > MAX_CONNECTIONS:
            self._end(self._connections[0], poll)

    def _end(self, connection: socket.socket, poll: select.poll) -> None:
        poll.unregister(connection)
        connection.close()
        self._connections.remove(connection)


def receive_descriptors(directory: SharedDirectory, name: str) -> tuple[socket.socket, dict[int, int]]:
    """Return a connection that ends when the process does, and its descriptors by their numbers there. The caller closes all.

    Raises ServiceUnavailable.
    """
    connection, received = None, list[int]()
    try:
        connection = directory.connect(name)
        size = struct.calcsize(f"{1 + MAX_DESCRIPTORS}I")
        data, received, flags, _ = socket.recv_fds(connection, size, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        (count,) = struct.unpack_from("I", data)
        if count != len(received) or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise OSError(f"got {len(received)} of {count} descriptors")
        numbers = struct.unpack(f"{1 + count}I", data)[1:]
        return connection, dict(zip(numbers, received, strict=True))
    except (OSError, struct.error) as error:
        for fd in received:
            os.close(fd)
        if connection is not None:
            connection.close()
        raise ServiceUnavailable(f"weights: cannot get the shared memory behind socket {name}: {error}") from None


def _check_user(connection: socket.socket) -> None:
    """Raise OSError unless the other side is a process of this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise PermissionError(f"the other process belongs to user {user}, not {os.geteuid()}")
