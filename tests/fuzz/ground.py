"""Targets of the fuzzer: every service as a separate process with a tiny model, and the orchestrator of an active run."""

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

import yaml

from quartet.buffer.connection import connect
from quartet.buffer.embedded_redis import EmbeddedRedis
from quartet.buffer.experience_store import ExperienceStore
from quartet.child_processes import tied_to_parent
from quartet.run_directory.run_files import RunFiles
from quartet.types import MODEL_ROLES, Role
from tests.buffer.samples import experience
from tests.e2e.commands import QUARTET, Command
from tests.fuzz.mutations import ESCAPE
from tests.fuzz.seeds import CHECKPOINT_EVERY, RUN
from tests.unit.models import tiny

LIVE = "live"
SEALED = 40
"""Steps whose experience is in the buffer; from there on models go back to their beginning."""
WHERE = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))
"""Import path of the reward function."""
STATUS, HEALTH = "quartet.v1.StatusService", "grpc.health.v1.Health"


@dataclass(frozen=True)
class Target:
    """A process, or a server within this one, that is fuzzed. ``root`` is where it may write; None: nowhere."""

    role: Role
    address: str
    root: Path | None = None
    pid: int | None = None

    @property
    def services(self) -> tuple[str, ...]:
        return (f"quartet.v1.{self.role.capitalize()}Service", STATUS, HEALTH)


@dataclass
class Ground:
    """All targets, the buffer that they share, and the folder in which everything lies."""

    folder: Path
    redis_url: str
    targets: list[Target] = field(default_factory=list)

    def clean_buffer(self) -> None:
        """Delete unread trajectories from the buffer. In a real run the orchestrator does that."""
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

    def strayed(self) -> list[str]:
        """Files that lie where no service may write."""
        roots = [target.root.resolve() for target in self.targets if target.root is not None]
        outside = list((self.folder / "outside").rglob("*"))
        named = [path for path in (Path("/tmp") / ESCAPE, Path.cwd() / ESCAPE, Path.home() / ESCAPE) if path.exists()]
        for path in self.folder.rglob(f"*{ESCAPE}*"):
            if not any(root in path.resolve().parents for root in roots):
                named.append(path)
        return [str(path) for path in (*outside, *named)]


def tree(folder: Path, redis_url: str, **changes: Any) -> dict[str, Any]:
    """A config over tiny models with random weights, which it writes where they are not there yet."""
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


REWARD = {
    "source": "ensemble",
    "parts": [
        {"name": "model", "model": ""},
        {"name": "function", "source": "function", "function": "tests.fuzz.scoring:score"},
    ],
}


def scored_by_both(config: dict[str, Any]) -> dict[str, Any]:
    """The config with a reward of a model and a function: what fields hold matters then."""
    parts = [{**part, **({"model": config["reward"]["model"]} if "model" in part else {})} for part in REWARD["parts"]]
    return {**config, "reward": {**REWARD, "parts": parts}}


def root_of(config: dict[str, Any], folder: Path) -> Path:
    """The run's directory, with a link in it that leads out."""
    root = Path(config["run"]["directory"]) / config["run"]["name"]
    root.mkdir(parents=True)
    (root / "out").symlink_to(folder / "outside")
    return root


@contextmanager
def processes(folder: Path) -> Iterator[Ground]:
    """Five processes to fuzz, and one with all models for the run of the fifth, the orchestrator."""
    folder = folder.absolute()
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis(folder / "redis", folder / "redis.log"))
        ground = Ground(folder, redis.url)
        started = {}
        for role in MODEL_ROLES:
            config = tree(folder, redis.url)
            config["run"]["directory"] = str(folder / f"runs-{role}")
            started[role] = config, stack.enter_context(_service(folder, scored_by_both(config), [role]))
        live = tree(folder, redis.url)
        live["run"] = {**live["run"], "name": LIVE}
        _, read = stack.enter_context(_service(folder, live, list(MODEL_ROLES)))
        for role, (config, (pid, ready)) in started.items():
            ground.targets.append(Target(role, ready()["address"], root_of(config, folder), pid))
        beside = read()["address"]
        live["services"] = {role: {"num_threads": 1, "address": beside} for role in MODEL_ROLES}
        ground.targets.append(stack.enter_context(_orchestrator(folder, live)))
        ground.seal()
        yield ground


@contextmanager
def _service(folder: Path, config: dict[str, Any], roles: list[Role]) -> Iterator[tuple[int, Any]]:
    """Its process id, and what waits until it is ready and tells what it said then."""
    name = "-".join(roles)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(config))))
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "quartet.services", *roles, "--config", str(path), "--listen", "127.0.0.1:0"]
    # As deep as the paths climb: what gets out of the run's directory is still in the folder.
    place = folder / "work" / "a" / "b" / "c"
    place.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            tied_to_parent([*command, "--ready-fd", str(writer)]),
            cwd=place,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            pass_fds=(writer,),
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, WHERE))},
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
                process.wait(30)
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
        # Until there is a checkpoint to go back to.
        command.wait_for(lambda: any(files.checkpoints.glob("step-*/manifest.json")))
        address = json.loads(files.services.read_text())[Role.ORCHESTRATOR]
        yield Target(Role.ORCHESTRATOR, address, files.root, command.child(Role.ORCHESTRATOR))
    finally:
        command.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            command.process.wait(60)
        (folder / "train.log").write_text(command.out + command.err)
        command.clean_up()
