"""The Compose stack on the CPU: complete runs, killed services, and a clean shutdown.

``make e2e-compose``. Needs Docker with Compose and access to the base images. Builds the images of Quartet.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from quartet.demo.toy_task import make_toy_task
from tests.compose.stack import SECRETS, Stack, compose_command, docker, wait_for
from tests.documents import blocks, commands
from tests.e2e.conftest import MAX_PROMPT, MINIATURE, without_measurements
from tests.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 200
FILES = ["docker-compose.yml", "docker/compose.cpu.yaml"]
IMAGES = ("quartet:0.1.0-cpu", "quartet-redis:0.1.0")
SERVICES = ("redis", "actor", "critic", "reward", "reference", "orchestrator", "gateway")

# Clients without a certificate in the network of the services. Prints the outcome of each call.
UNAUTHENTICATED_CALLS = """
import json, ssl, sys, urllib.request
import grpc, redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
trust = open('/run/certificates/gateway/ca.crt').read()
outcomes = {}
with grpc.secure_channel('actor:50051', grpc.ssl_channel_credentials(trust.encode()),
                         options=[('grpc.ssl_target_name_override', 'actor.quartet')]) as channel:
    try:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        outcomes['actor'] = 'accepted'
    except grpc.RpcError as error:
        outcomes['actor'] = error.code().name
def attempt(name, call):
    try:
        call()
        outcomes[name] = 'accepted'
    except Exception as error:
        outcomes[name] = type(error).__name__
password = open('/run/secrets/redis/redis_password').read().strip()
attempt('redis', redis.Redis('redis', username='quartet', password=password, ssl=True, ssl_ca_data=trust).ping)
attempt('plain redis', redis.Redis('redis', username='quartet', password=password).ping)
context = ssl.create_default_context(cadata=trust)
context.check_hostname = False
attempt('metrics', lambda: urllib.request.urlopen('https://actor:9100/metrics', timeout=10, context=context).read())
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    """Fail early with the reason if Docker or Compose is missing."""
    problem = ""
    try:
        compose_command()
    except RuntimeError as error:
        problem = str(error)
    if problem:
        pytest.fail(problem, pytrace=False)


@pytest.fixture(scope="module")
def settings(engine: None) -> Iterator[tuple[Path, int]]:
    """Create .env and a minimal toy task that the user of the containers can read. Return .env and the port of the gateway."""
    folder = Path(tempfile.mkdtemp(prefix="quartet-compose-"))
    try:
        toy_task = make_toy_task(folder / "toy-task", recipe=MINIATURE)
        models, data = folder / "models", folder / "data"
        shutil.copytree(toy_task.policy, models / "policy")
        shutil.copytree(toy_task.reward, models / "reward")
        data.mkdir()
        shutil.copy(toy_task.prompts, data / "prompts.jsonl")
        tree = {
            "run": {"name": "tiny", "steps": STEPS},
            "data": {"prompts": "data/prompts.jsonl", "max_prompt_tokens": MAX_PROMPT},
            "rollout": {"prompts_per_step": 8, "max_response_tokens": 12, "score_batch_size": 4},
            "actor": {"model": "models/policy", "learning_rate": 1e-3},
            "critic": {"learning_rate": 1e-3},
            "reward": {"model": "models/reward"},
            "checkpoint": {"every_steps": 5},
            "services": {role: {"num_threads": 1} for role in ("actor", "critic", "reward", "reference")},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(tree))
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (port,) = free_ports(1)
        lines = {
            "QUARTET_CONFIG": folder / "config.yaml",
            "QUARTET_MODELS": models,
            "QUARTET_DATA": data,
            "QUARTET_PORT": port,
            "QUARTET_TORCH_INDEX": os.environ.get("QUARTET_TORCH_INDEX", ""),
            "COMPOSE_PROFILES": "critic,reward,reference",
        }
        (folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
        yield folder / ".env", port
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def critic_free_lora(settings: Path) -> Path:
    """Write another .env, for a run without critic and reference."""
    config = yaml.safe_load((settings.parent / "config.yaml").read_text())
    config["run"]["steps"] = 3
    config["algorithm"] = {"estimator": "reinforce"}
    config["actor"]["lora"] = {"rank": 2}
    del config["critic"]
    other = settings.parent / "other.yaml"
    other.write_text(yaml.safe_dump(config))
    text = settings.read_text().replace(str(settings.parent / "config.yaml"), str(other))
    text = text.replace(
        "COMPOSE_PROFILES=critic,reward,reference", "COMPOSE_PROFILES=reward\nQUARTET_ROLES=critic-free-lora"
    )
    changed = settings.with_name(".env.other")
    changed.write_text(text)
    return changed


def generators(settings: Path) -> Path:
    """Write another .env, for a run whose weights go to generators."""
    text = settings.read_text().replace(
        "COMPOSE_PROFILES=critic,reward,reference",
        "COMPOSE_PROFILES=critic,reward,reference,generators\nQUARTET_GENERATION=generators",
    )
    changed = settings.with_name(".env.generators")
    changed.write_text(text)
    return changed


@pytest.fixture(scope="module")
def images(settings: tuple[Path, int]) -> None:
    """Build the images and print their sizes."""
    started = time.monotonic()
    Stack("quartet-e2e-build", FILES, *settings).compose("build")
    print(f"\nimages built in {time.monotonic() - started:.0f} s")
    for image in IMAGES:
        size = docker("image", "inspect", "--format", "{{.Size}}", image)
        print(f"{image}: {int(size.stdout) / 1e9:.2f} GB")


@pytest.fixture
def stack(request: pytest.FixtureRequest, settings: tuple[Path, int], images: None) -> Iterator[Stack]:
    files = [*FILES, *(["docker/compose.tls.yaml"] if request.param == "tls" else [])]
    file, port = settings
    if request.param == "critic-free-lora":
        file = critic_free_lora(file)
    if request.param == "generators":
        file = generators(file)
    stack = Stack(f"quartet-e2e-{secrets.token_hex(4)}", files, file, port)
    try:
        yield stack
    finally:
        if request.session.testsfailed:
            print(stack.compose("logs", "--tail=60"))
        stack.compose("down", "--volumes", "--timeout", "20")


@pytest.mark.parametrize(
    ("stack", "victims"), [("plaintext", ["actor", "orchestrator"]), ("tls", ["critic", "redis"])], indirect=["stack"]
)
def test_a_run_survives_killed_services_and_its_data_survive_a_restart(
    stack: Stack, victims: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    started = time.monotonic()

    def log(event: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {event}", flush=True)

    stack.compose("up", "--detach")
    log("up")
    token = stack.token()
    wait_for(lambda: stack.inspect("gateway")["State"]["Health"]["Status"] == "healthy", "the gateway's health")
    assert stack.get("/api/v1/runs", None)[0] == 401
    assert "<html" in stack.get("/", None)[1]
    wait_for(lambda: steps(stack, token) >= 7, "seven steps")
    log(f"{steps(stack, token)} steps; {' and '.join(victims)} are killed")

    check_permissions(stack)
    for victim in victims:
        # Docker does not restart a container after `docker kill`.
        stack.run_in(victim, "sh", "-c", "kill -KILL -1")
    wait_for(lambda: all(stack.inspect(victim)["RestartCount"] >= 1 for victim in victims), f"restarts of {victims}")
    assert steps(stack, token) < STEPS, "the run ended before the restart: use more steps"
    if "tls" in request.node.callspec.id:
        check_authentication(stack)
        (_, checkpoint, *_), _ = commands("recover.md", "With Compose", run="tiny")
        trust = "exec --env SSL_CERT_FILE=/run/certificates/gateway/ca.crt"
        stack.shell(checkpoint.replace("http:", "https:").replace("exec", trust), tmp_path)

    wait_for(lambda: stack.inspect("orchestrator")["State"]["Status"] == "exited", "the end of the run")
    log("the run has ended")
    assert stack.inspect("orchestrator")["State"]["ExitCode"] == 0, stack.logs("orchestrator")
    log_text = stack.logs("orchestrator")
    assert ("run resumed" if "orchestrator" in victims else "recovery started") in log_text
    assert steps(stack, token) == STEPS
    _, (link,), (copy, down, down_with_volumes) = blocks("scale-out.md")["With Compose"]
    assert stack.shell(link, tmp_path).strip().endswith(f"#token={token}")
    stack.shell(copy.replace("NAME", "tiny"), tmp_path)
    assert (tmp_path / "policy/model.safetensors").stat().st_size > 0
    running = [service for service in SERVICES if stack.inspect(service)["State"]["Status"] == "running"]
    assert running == [service for service in SERVICES if service != "orchestrator"]

    if "tls" in request.node.callspec.id:
        before = stack.run_in("gateway", "cat", "/run/certificates/gateway/ca.crt").stdout
        for line in blocks("scale-out.md")["TLS"][0]:
            stack.shell(line, tmp_path)
        wait_for(lambda: stack.inspect("gateway")["State"]["Health"]["Status"] == "healthy", "the gateway's health")
        assert stack.run_in("gateway", "cat", "/run/certificates/gateway/ca.crt").stdout != before
        assert steps(stack, token) == STEPS
        log("certificates renewed")
    stack.shell(down, tmp_path)
    assert not [name for name in stack.resources() if not name.startswith("volume")]
    stack.compose("up", "--detach")
    log("down, and up again")
    wait_for(lambda: stack.inspect("gateway")["State"]["Health"]["Status"] == "healthy", "the gateway's health")
    assert stack.token() == token
    assert [run["name"] for run in stack.get("/api/v1/runs", token)[1]["items"]] == ["tiny"]
    assert steps(stack, token) == STEPS
    wait_for(lambda: stack.inspect("orchestrator")["State"]["Status"] == "exited", "the end of a completed run")
    assert stack.inspect("orchestrator")["State"]["ExitCode"] == 0, stack.logs("orchestrator")

    stack.shell(down_with_volumes, tmp_path)
    assert stack.resources() == []
    log("down, with its volumes")


@pytest.mark.parametrize("stack", ["plaintext"], indirect=True)
def test_a_run_is_archived_and_restored_by_the_documented_commands(stack: Stack, tmp_path: Path) -> None:
    archive, restore = commands("recover.md", "With Compose", run="tiny")
    stack.compose("up", "--detach")
    token = stack.token()
    wait_for(lambda: steps(stack, token) >= 2, "two steps")
    for line in archive:
        stack.shell(line, tmp_path)
    archived = archived_metrics(tmp_path / "tiny.tar")
    assert len(archived) >= 2
    wait_for(lambda: steps(stack, token) >= len(archived) + 3, "three steps after the archive")
    expected = metrics(stack)
    stack.compose("down", "--volumes", "--timeout", "20")
    assert stack.resources() == []

    for line in restore[:-1]:
        stack.shell(line, tmp_path)
    wait_for(lambda: "run paused" in stack.logs("orchestrator"), "the restored run")
    assert metrics(stack) == archived
    stack.shell(restore[-1], tmp_path)
    token = stack.token()
    wait_for(lambda: steps(stack, token) >= len(expected), "the steps that the archive does not have")
    assert metrics(stack)[: len(expected)] == expected
    assert "sealed experience lost" not in stack.logs("orchestrator")


def metrics(stack: Stack) -> list[dict[str, float]]:
    """Return the metrics of each step, except measurements."""
    text = stack.run_in("gateway", "cat", "runs/tiny/metrics.jsonl").stdout
    return without_measurements(map(json.loads, text.splitlines()))


def archived_metrics(archive: Path) -> list[dict[str, float]]:
    """Return the metrics of each step in an archive, except measurements."""
    with tarfile.open(archive) as files:
        member = files.extractfile("tiny/metrics.jsonl")
        assert member is not None
        return without_measurements(map(json.loads, member.read().splitlines()))


@pytest.mark.parametrize("stack", ["critic-free-lora"], indirect=True)
def test_a_run_without_critic_and_reference_starts_neither(stack: Stack) -> None:
    stack.compose("up", "--detach")
    wait_for(lambda: stack.inspect("orchestrator")["State"]["Status"] == "exited", "the end of the run")
    assert stack.inspect("orchestrator")["State"]["ExitCode"] == 0, stack.logs("orchestrator")
    assert steps(stack, stack.token()) == 3
    assert stack.run_in("gateway", "ls", "runs/tiny/adapter").returncode == 0
    for absent in ("critic", "reference"):
        with pytest.raises(ValueError, match="not enough values"):
            stack.container(absent)


@pytest.mark.parametrize("stack", ["generators"], indirect=True)
def test_generators_read_the_weights_from_the_memory_of_the_actor(stack: Stack) -> None:
    stack.compose("up", "--detach", "--scale", "generator=2")
    token = stack.token()
    wait_for(lambda: steps(stack, token) >= 7, "seven steps")
    sockets = socket_names(stack)
    assert len(sockets) == 3, "one for each process"
    for service in ("actor", "generator"):
        killed = stack.containers(service)
        for container in killed:
            docker("exec", container, "sh", "-c", "kill -KILL -1", check=False)
        wait_for(lambda service=service: restarts(stack, service) >= 1, f"restarts of {service}")  # type: ignore[misc]
        # What a killed process leaves, the next one removes.
        expected, before = len(sockets) - len(killed), sockets
        wait_for(  # type: ignore[misc]
            lambda before=before, expected=expected: len(before & socket_names(stack)) == expected, "stale sockets"
        )
        wait_for(lambda: len(socket_names(stack)) == 3, "new sockets")
        sockets, loads = socket_names(stack), len(ways(stack))
        wait_for(lambda loads=loads: len(ways(stack)) >= loads + 4, "four loads")  # type: ignore[misc]
        print(f"{service} killed: {len(before - sockets)} sockets replaced; {len(ways(stack))} loads until now")
    assert set(ways(stack)) == {"shared memory"}
    assert "weights are sent" not in stack.compose("logs", "generator")
    wait_for(lambda: stack.inspect("orchestrator")["State"]["Status"] == "exited", "the end of the run")
    assert stack.inspect("orchestrator")["State"]["ExitCode"] == 0, stack.logs("orchestrator")
    print(f"{len(ways(stack))} loads, all by {set(ways(stack))}")


def ways(stack: Stack) -> list[str]:
    """Return the way of each version that the generators have loaded, also before they were killed."""
    return re.findall(r"weights loaded.*way=\W*'([\w ]+)'", stack.compose("logs", "--no-color", "generator"))


def socket_names(stack: Stack) -> set[str]:
    return set(stack.run_in("actor", "ls", "-A", "sockets").stdout.split())


def restarts(stack: Stack, service: str) -> int:
    """Return how often the container that was restarted least was."""
    counts = docker("inspect", "--format", "{{.RestartCount}}", *stack.containers(service)).stdout.split()
    return min(map(int, counts))


def steps(stack: Stack, token: str) -> int:
    """Return the last committed step in the API."""
    status, run = stack.get("/api/v1/runs/tiny", token)
    return int(run["step"]) if status == 200 else 0


def check_permissions(stack: Stack) -> None:
    """Check that processes have no capabilities, a read-only file system, and only their own secrets."""
    for service in SERVICES:
        assert stack.run_in(service, "touch", "/etc/there").returncode != 0, f"{service} may write to /etc"
        assert stack.run_in(service, "id", "-u").stdout.strip() == "10001"
        capabilities = stack.run_in(service, "grep", "CapEff", "/proc/self/status").stdout
        assert capabilities.split()[1].strip("0") == "", f"{service} has capabilities"
    visible = {service: set(stack.run_in(service, "ls", "/run/secrets").stdout.split()) for service in SERVICES}
    assert visible == {service: SECRETS[service] for service in SERVICES}
    assert stack.run_in("redis", "redis-cli", "ping").stdout.strip() != "PONG"


def check_authentication(stack: Stack) -> None:
    """Check that a caller without a certificate is refused by services, Redis and metrics, even if it has the password."""
    for service in SERVICES:
        assert stack.run_in(service, "ls", "/run/certificates").stdout.split() == [service]
    result = stack.run_in("gateway", "python", "-c", UNAUTHENTICATED_CALLS)
    assert result.returncode == 0, result.stderr
    outcomes = yaml.safe_load(result.stdout)
    assert outcomes.keys() == {"actor", "redis", "plain redis", "metrics"}
    assert "accepted" not in outcomes.values(), outcomes
