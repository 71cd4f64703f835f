"""Targets of the fuzzer: every service as a separate process with a tiny model, and the orchestrator of an active run.

The generator pulls its weights from a source in this process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from quartet.buffer.connection import connect
from quartet.buffer.embedded_redis import EmbeddedRedis
from quartet.buffer.experience_store import ExperienceStore
from quartet.contract.status import MODEL_ROLES, Role, ServiceStatus
from quartet.engines.checkpoint_files import read_safetensors
from quartet.rpc.base_servicers import WeightServicer
from quartet.rpc.server import Server
from quartet.run_directory.run_files import RunFiles
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.tensors import HostTensor
from tests.buffer.samples import experience
from tests.e2e.commands import QUARTET, Command
from tests.e2e.forked_program import start as start_fork
from tests.fuzz.mutations import ESCAPE
from tests.fuzz.seeds import CHECKPOINT_EVERY, NO_POLICIES, RUN, PublishedPolicies
from tests.unit.models import tiny
from tests.waiting import LIMIT

LIVE = "live"
SEALED = 40
"""Steps with experience in the buffer. After the last of them, the fuzzer restores the initial models."""
IMPORT_PATH = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))
"""Import path of the reward function."""
STATUS, HEALTH = "quartet.v1.StatusService", "grpc.health.v1.Health"
WEIGHTS, GENERATION = "quartet.v1.WeightService", "quartet.v1.GenerationService"


@dataclass(frozen=True)
class Target:
    """A fuzzed process, or server in this process.

    ``root``: the directory that it may write to, or None. ``policies``: the weights that a generator may load.
    """

    role: Role
    address: str
    root: Path | None = None
    pid: int | None = None
    policies: PublishedPolicies = NO_POLICIES

    @property
    def services(self) -> tuple[str, ...]:
        if self.role is Role.GENERATOR:
            return (GENERATION, WEIGHTS, STATUS, HEALTH)
        others: tuple[str, ...] = (GENERATION,) if self.role is Role.ACTOR else ()
        if self.role in (Role.ACTOR, Role.CRITIC):
            others += ("quartet.v1.ProfileService",)
        return (f"quartet.v1.{self.role.capitalize()}Service", *others, STATUS, HEALTH)


@dataclass
class FuzzEnvironment:
    """All targets, their common buffer, and the folder of all files."""

    folder: Path
    redis_url: str
    targets: list[Target] = field(default_factory=list)

    def clean_buffer(self) -> None:
        """Delete unread trajectories from the buffer. In a real run the orchestrator does this."""
        client = connect(self.redis_url)
        for key in client.scan_iter(match="quartet:*", count=1000):
            if not key.startswith((f"quartet:{RUN}:experience:".encode(), f"quartet:{LIVE}:".encode())):
                client.delete(key)
        client.close()

    def seal(self) -> None:
        """Put experience into the buffer for the updates of the fuzzed run."""
        client = connect(self.redis_url)
        store = ExperienceStore(client, self.redis_url, RUN)
        for step in range(1, SEALED + 1):
            store.seal(experience(RUN, step))
        client.close()

    def misplaced_files(self) -> list[str]:
        """Return the files at paths to which no service may write."""
        roots = [target.root.resolve() for target in self.targets if target.root is not None]
        outside = list((self.folder / "outside").rglob("*"))
        files = [path for path in (Path("/tmp") / ESCAPE, Path.cwd() / ESCAPE, Path.home() / ESCAPE) if path.exists()]
        for path in self.folder.rglob(f"*{ESCAPE}*"):
            if not any(root in path.resolve().parents for root in roots):
                files.append(path)
        return [str(path) for path in (*outside, *files)]


def config_tree(folder: Path, redis_url: str, **changes: Any) -> dict[str, Any]:
    """Return a config with tiny models of random weights, and write the models if they do not exist."""
    models = {kind: folder / "models" / kind for kind in ("policy", "scorer")}
    if not models["scorer"].exists():
        tiny.saved(tiny.causal("llama", seed=3), models["policy"])
        tiny.saved(tiny.classifier("llama", seed=4), models["scorer"])
        for model in models.values():
            tiny.tokenizer().save_pretrained(model)
        lines = [json.dumps({"token_ids": [5 + number % 50, 7, 9]}) for number in range(16)]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "outside").mkdir()
    return {
        "run": {"name": RUN, "directory": str(folder / "runs"), "steps": 100_000},
        "data": {"prompts": str(folder / "prompts.jsonl"), "max_prompt_tokens": 8},
        "rollout": {"prompts_per_step": 4, "max_response_tokens": 6, "score_batch_size": 4},
        "actor": {"model": str(models["policy"]), "learning_rate": 1e-4},
        "critic": {"model": str(models["scorer"])},
        "reward": {"model": str(models["scorer"])},
        "checkpoint": {"every_steps": CHECKPOINT_EVERY, "keep_last": 3},
        "buffer": {"url": redis_url},
        "services": {role: {"num_threads": 1} for role in MODEL_ROLES},
        "gateway": {"enabled": False},
        "telemetry": {"tensorboard": False},
        **changes,
    }


def generator_config_tree(folder: Path, redis_url: str) -> dict[str, Any]:
    """Return the config of a generator with the torch engine."""
    config = config_tree(folder, redis_url)
    config["rollout"]["generators"] = 1
    # A generator that reads the memory of the actor has nothing to send.
    config["rollout"]["share_weights"] = False
    config["services"]["generator"] = {"num_threads": 1}
    return config


def environment_config_tree(folder: Path, redis_url: str) -> dict[str, Any]:
    """Return the config of a service with a small environment."""
    config = config_tree(folder, redis_url)
    config["rollout"]["max_turns"] = 2
    config["environment"] = {"class_name": "quartet.environments.examples:GuessingGame", "num_workers": 1}
    return config


class WeightSourceRole(WeightServicer):
    """A server role with nothing but a weight source, in the place of an actor."""

    role = Role.ACTOR

    def status(self) -> ServiceStatus:
        return ServiceStatus(self.role)

    def abandoned(self) -> tuple[str, float]:
        return "", 0.0

    def close(self) -> None:
        pass


@contextmanager
def published_policies(folder: Path) -> Iterator[PublishedPolicies]:
    """Serve two versions of the tiny policy in ``folder``, as an actor does."""
    source = WeightSource(num_threads=1)
    server = Server([WeightSourceRole(source)], "127.0.0.1:0")
    try:
        tensors = read_safetensors(folder / "models" / "policy" / "model.safetensors")
        halved = {
            name: HostTensor(tensor.dtype, tensor.shape, (tensor.data.view(np.float32) / 2).view(np.uint8))
            for name, tensor in tensors.items()
        }
        digests = [source.publish(version, each.items(), run=RUN) for version, each in enumerate((tensors, halved))]
        yield PublishedPolicies(server.address, tuple(digests))
    finally:
        server.stop(0.0)
        source.close()


REWARD = {
    "source": "ensemble",
    "parts": [
        {"name": "model", "model": ""},
        {"name": "function", "source": "function", "function": "tests.fuzz.scoring:score"},
    ],
}


def with_combined_reward(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with a reward from a model and a function. The function reads the fields of the prompt."""
    parts = [{**part, **({"model": config["reward"]["model"]} if "model" in part else {})} for part in REWARD["parts"]]
    return {**config, "reward": {**REWARD, "parts": parts}}


def create_run_directory(config: dict[str, Any], folder: Path) -> Path:
    """Create the run directory, with a symbolic link that leads out of it."""
    root = Path(config["run"]["directory"]) / config["run"]["name"]
    root.mkdir(parents=True)
    (root / "out").symlink_to(folder / "outside")
    return root


@contextmanager
def processes(folder: Path) -> Iterator[FuzzEnvironment]:
    """Start the fuzzed processes: four model services, a generator, an environment, and an orchestrator with its services."""
    folder = folder.absolute()
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis(folder / "redis", folder / "redis.log"))
        environment = FuzzEnvironment(folder, redis.url)
        started = {}
        for role in MODEL_ROLES:
            config = config_tree(folder, redis.url)
            config["run"]["directory"] = str(folder / f"runs-{role}")
            started[role] = config, stack.enter_context(service_process(folder, with_combined_reward(config), [role]))
        generator = stack.enter_context(
            service_process(folder, generator_config_tree(folder, redis.url), [Role.GENERATOR])
        )
        played = stack.enter_context(
            service_process(folder, environment_config_tree(folder, redis.url), [Role.ENVIRONMENT])
        )
        policies = stack.enter_context(published_policies(folder))
        live = config_tree(folder, redis.url)
        live["run"] = {**live["run"], "name": LIVE}
        _, ready = stack.enter_context(service_process(folder, live, list(MODEL_ROLES)))
        for role, (config, (pid, wait_until_ready)) in started.items():
            environment.targets.append(
                Target(role, wait_until_ready()["address"], create_run_directory(config, folder), pid)
            )
        pid, wait_until_ready = generator
        environment.targets.append(Target(Role.GENERATOR, wait_until_ready()["address"], None, pid, policies))
        model_services = ready()["address"]
        pid, wait_until_ready = played
        environment.targets.append(Target(Role.ENVIRONMENT, wait_until_ready()["address"], None, pid))
        live["services"] = {role: {"num_threads": 1, "address": model_services} for role in MODEL_ROLES}
        environment.targets.append(stack.enter_context(_orchestrator(folder, live)))
        environment.seal()
        yield environment


@contextmanager
def service_process(folder: Path, config: dict[str, Any], roles: list[Role]) -> Iterator[tuple[int, Any]]:
    """Start a service process. Yield its id, and a function that waits for its ready message and returns it."""
    name = "-".join(roles)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(config))))
    reader, writer = os.pipe()
    module = ["-m", "quartet.services", *roles, "--config", str(path), "--listen", "127.0.0.1:0", "--ready-fd"]
    # As deep as the fuzzed paths climb, so that files outside the run directory stay in the folder.
    directory = folder / "work" / "a" / "b" / "c"
    directory.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, IMPORT_PATH))}
    with (folder / f"{name}.log").open("wb") as log:
        process = start_fork(
            [sys.executable, *module], directory, environment, folder, log.fileno(), log.fileno(), pipe=writer
        )
    os.close(writer)
    with os.fdopen(reader) as pipe:

        def ready() -> dict[str, Any]:
            result: dict[str, Any] = json.loads(pipe.readline() or '{"error": "ended before it was ready"}')
            assert "address" in result, (result, (folder / f"{name}.log").read_text()[-2000:])
            return result

        try:
            yield process.pid, ready
        finally:
            process.terminate()
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _orchestrator(folder: Path, config: dict[str, Any]) -> Iterator[Target]:
    path = folder / "live.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(config))))
    files = RunFiles(folder / "runs" / LIVE)
    command = Command(QUARTET, "train", path, cwd=folder / "work")
    try:
        # RollBack needs a checkpoint.
        command.wait_for(lambda: any(files.checkpoints.glob("step-*/manifest.json")))
        address = json.loads(files.services.read_text())[Role.ORCHESTRATOR]
        yield Target(Role.ORCHESTRATOR, address, files.root, command.child(Role.ORCHESTRATOR))
    finally:
        command.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            command.process.wait(LIMIT)
        (folder / "train.log").write_text(command.out + command.err)
        command.clean_up()
