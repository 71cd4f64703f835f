"""Descriptors that processes get through sockets in a directory."""

from __future__ import annotations

import mmap
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from quartet.errors import ServiceUnavailable
from quartet.weight_transfer import descriptors
from quartet.weight_transfer.descriptors import DescriptorServer, SharedDirectory, receive_descriptors
from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.shared_memory import Region, machine
from quartet.weight_transfer.source import WeightSource
from tests.unit.weight_transfer.samples import RUN, pull, weights


def dead_socket(path: Path) -> None:
    """Leave a socket as a killed process does."""
    name, listener = SharedDirectory(path.parent).listen()
    listener.close()
    path.with_name(name).rename(path)


def test_every_region_has_its_descriptor(tmp_path: Path) -> None:
    directory, regions = SharedDirectory(tmp_path), [Region(4096), Region(8192)]
    server = DescriptorServer(directory, lambda: regions)
    connection, received = receive_descriptors(directory, server.name)
    assert received.keys() == {region.fd for region in regions}
    for region in regions:
        own, other = os.fstat(region.fd), os.fstat(received[region.fd])
        assert (own.st_dev, own.st_ino) == (other.st_dev, other.st_ino)
        assert received[region.fd] != region.fd
        os.close(received[region.fd])
    connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        connection.recv(1)
    server.close()
    assert connection.recv(1) == b""
    connection.close()
    with pytest.raises(ServiceUnavailable, match=f"cannot get the shared memory behind socket {server.name}: "):
        receive_descriptors(directory, server.name)


def test_a_region_that_could_still_be_mapped_for_writing_is_not_given_away(tmp_path: Path) -> None:
    directory, region = SharedDirectory(tmp_path), Region(4096, seals=False)
    server = DescriptorServer(directory, lambda: [region])
    counts = []
    for _ in range(2):
        connection, received = receive_descriptors(directory, server.name)
        counts.append(len(received))
        for fd in received.values():
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 4096)
            os.close(fd)
        connection.close()
        region.seal()
    assert counts == [0, 1]
    server.close()


def test_only_its_user_can_open_a_socket(tmp_path: Path) -> None:
    server = DescriptorServer(SharedDirectory(tmp_path), list)
    assert stat.S_IMODE((tmp_path / server.name).stat().st_mode) == 0o600
    server.close()


def test_processes_of_other_users_get_nothing_and_are_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, region = SharedDirectory(tmp_path), Region(4096)
    server = DescriptorServer(directory, lambda: [region])
    user = os.geteuid()
    monkeypatch.setattr(descriptors.os, "geteuid", lambda: user + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(directory._address(server.name))
        assert socket.recv_fds(connection, 100, 10)[:2] == (b"", [])
    with pytest.raises(ServiceUnavailable, match=f"the other process belongs to user {user}, not {user + 1}"):
        receive_descriptors(directory, server.name)
    server.close()


def test_only_sockets_of_killed_processes_are_removed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    folder = tmp_path / "sockets"
    folder.mkdir()
    directory = SharedDirectory(folder)
    first = DescriptorServer(directory, list)
    dead_socket(outside)
    names = [f"weights-{digit * 32}" for digit in "0123"]
    dead_socket(folder / names[0])
    dead_socket(folder / f"{names[1]}.new")
    dead_socket(folder / "other")
    (folder / names[2]).write_text("text")
    (folder / names[3]).symlink_to(outside)
    second = DescriptorServer(directory, list)
    kept = {first.name, second.name, "other", names[2], names[3]}
    assert set(os.listdir(folder)) == kept
    assert outside.exists()
    for server in (first, second):
        server.close()
    assert set(os.listdir(folder)) == kept - {first.name, second.name}


def test_a_socket_that_is_removed_before_it_listens_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, removed = os.rename, list[str]()

    def remove_first(source: str, target: str, **folders: Any) -> None:
        if not removed:
            removed.append(source)
            os.unlink(tmp_path / source)
        rename(source, target, **folders)

    monkeypatch.setattr(descriptors.os, "rename", remove_first)
    directory = SharedDirectory(tmp_path)
    server = DescriptorServer(directory, list)
    assert (removed, os.listdir(tmp_path)) == ([f"{server.name}.new"], [server.name])
    receive_descriptors(directory, server.name)[0].close()
    server.close()


def test_the_longest_connection_ends_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "MAX_CONNECTIONS", 2)
    directory = SharedDirectory(tmp_path)
    server = DescriptorServer(directory, list)
    connections = [receive_descriptors(directory, server.name)[0] for _ in range(3)]
    assert connections[0].recv(1) == b""
    for connection in connections[1:]:
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            connection.recv(1)
    for each in (*connections, server):
        each.close()


def test_a_process_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "TIMEOUT", 0.05)
    directory = SharedDirectory(tmp_path)
    name, listener = directory.listen()
    with pytest.raises(ServiceUnavailable, match=r"timed out"):
        receive_descriptors(directory, name)
    listener.close()


@pytest.mark.parametrize("message", [b"", b"1", b"\1\0\0\0", b"\1\0\0\0\2\0\0\0"])
def test_a_malformed_message_is_refused(message: bytes, tmp_path: Path) -> None:
    directory = SharedDirectory(tmp_path)

    def connect(_: str) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.send(message)
        theirs.close()
        return ours

    directory.connect = connect  # type: ignore[method-assign]
    with pytest.raises(ServiceUnavailable, match="cannot get the shared memory"):
        receive_descriptors(directory, "name")


def test_the_path_of_the_directory_may_be_long(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 150)
    folder.mkdir()
    directory = SharedDirectory(folder)
    server = DescriptorServer(directory, list)
    receive_descriptors(directory, server.name)[0].close()
    server.close()


def test_a_directory_has_the_same_identity_under_every_path(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    assert machine(SharedDirectory(tmp_path / "link")) == machine(SharedDirectory(tmp_path / "folder"))
    assert machine(SharedDirectory(tmp_path)) != machine(SharedDirectory(tmp_path / "folder"))


def test_without_the_directory_one_line_says_why_and_proc_is_used(tmp_path: Path) -> None:
    with capture_logs() as logs:
        source = WeightSource(num_threads=1, directory=tmp_path / "missing")
    (line,) = [each for each in logs if each["log_level"] == "warning"]
    assert line["event"] == "weights are not shared between containers"
    assert "No such file" in line["reason"]
    assert f"user {os.geteuid()} may write to" in line["remedy"]
    assert source.machine == machine()
    mirror = WeightMirror(num_threads=1)
    source.publish(0, weights().items(), run=RUN)
    assert pull(mirror, source, 0, weights()).way == "shared memory"
    mirror.close()
    source.close()
