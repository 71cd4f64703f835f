"""Simulated model services: the real servicers with models that sleep for a stated time per token.

python -m benchmarks.simulated ROLE --replicas N ... listens on free ports of 127.0.0.1, prints the addresses on one line, and
serves until its parent ends. The actor writes real trajectories to the real buffer. Actor and critic read the experience of an
update, and sleep instead of training. The content of a trajectory depends only on its id. With --activity FILE, generators and
trained models append a line for each call with its start and end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import positive
from quartet.buffer.connection import connect
from quartet.buffer.experience_store import ExperienceStore
from quartet.buffer.rollout_stream import RolloutStream
from quartet.contract.arrays import FloatArray
from quartet.contract.generation import EngineProperties, GenerationBatch
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import FinishReason, Scores, TokenBatch, Trajectory
from quartet.contract.update import UpdateResult
from quartet.contract.weights import ReferenceVersion, SavedFile, WeightTransfer
from quartet.errors import Cancelled
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.server import HostedRole, Server
from quartet.services.actor.servicer import ActorServicer
from quartet.services.critic.servicer import CriticServicer
from quartet.services.generator.generator import FLUSH, Progress
from quartet.services.generator.servicer import GeneratorServicer
from quartet.services.reference.servicer import ReferenceServicer
from quartet.services.reward.servicer import RewardServicer
from quartet.services.update_log import UpdateLog
from quartet.system.child_processes import tied_to_parent
from quartet.telemetry.logs import configure_logs
from quartet.weight_transfer.receiver import WeightMirror

VOCABULARY = 32_000
"""Number of token ids."""


@dataclass(frozen=True)
class Times:
    """Seconds per token of each service.

    ``generate``: per response token of all active responses together. ``score``: per token of prompt and response, for one
    replica of reward or reference. ``values``: the same for the critic. ``update``: per response token, for all passes together.
    """

    generate: float = 0.0
    score: float = 0.0
    values: float = 0.0
    update: float = 0.0


def response_lengths(prompts: Sequence[int], longest: int) -> list[int]:
    """Return the length of the response to each prompt index, from a quarter of ``longest`` to ``longest``."""
    spread = longest - longest // 4
    # A multiplicative hash: neighbours get very different lengths, and the mean is that of the range.
    return [longest // 4 + 1 + (int(prompt) * 2_654_435_761 % 2**32) * spread // 2**32 for prompt in prompts]


class SimulatedModel:
    """Base of the simulated models."""

    role: Role

    def __init__(self, times: Times, url: str, activity: Path | None = None) -> None:
        """``activity``: file for the start and end of each generation and update."""
        self.times, self._activity = times, activity
        self._updates = UpdateLog()
        self._url = url
        self._client = connect(url) if url else None

    @property
    def policy_version(self) -> int:
        return self._updates.policy_version

    def status(self) -> ServiceStatus:
        log = self._updates
        return ServiceStatus(
            self.role,
            model="simulated",
            device="none",
            dtype="float32",
            parameters=1,
            policy_version=log.policy_version,
            tokenizer_fingerprint="simulated",
            vocabulary_size=VOCABULARY,
            run=log.run,
            step=log.step,
            leader_epoch=log.fence.epoch,
        )

    def close(self) -> None:
        """Do nothing."""

    @contextmanager
    def working(self, step: int) -> Iterator[None]:
        """Record the block inside as work for ``step``, in seconds of the monotonic clock, which all processes share."""
        start = time.monotonic()
        yield
        if self._activity is not None:
            line = {"role": self.role, "step": step, "start": start, "end": time.monotonic()}
            with self._activity.open("a") as file:
                file.write(json.dumps(line) + "\n")


class TrainedModel(SimulatedModel):
    """Actor or critic, which also updates, saves and restores."""

    def update(self, run: str, step: int, leader_epoch: int, settings: Any, loss: Any) -> UpdateResult:
        def apply() -> dict[str, float]:
            with self.working(step):
                experience = ExperienceStore(self._client, self._url, run).load(step)
                time.sleep(self.times.update * len(experience.advantages))
            return {"optimizer_steps": 1.0, "skipped_steps": 0.0}

        return self._updates.once(run, step, leader_epoch, apply)

    def snapshot(self, run: str, leader_epoch: int, *_: Any) -> Callable[[], list[SavedFile]]:
        self._updates.check_save(run, leader_epoch)
        return list

    def restore(self, run: str, step: int, leader_epoch: int, directory: str) -> None:
        self._updates.restore(run, step, leader_epoch, lambda: None)


class GeneratingModel(SimulatedModel):
    """Actor or generator."""

    def generate(
        self,
        batch: GenerationBatch,
        cancelled: Callable[[], bool],
        on_start: Callable[[], None],
        on_progress: Progress,
    ) -> tuple[int, int]:
        """Write the responses in the order of their ids, each after the time for its tokens and all earlier ones."""
        on_start()
        with self.working(batch.step):
            return self._generate(batch, cancelled, on_progress)

    def _generate(
        self, batch: GenerationBatch, cancelled: Callable[[], bool], on_progress: Progress
    ) -> tuple[int, int]:
        start = time.perf_counter()
        requests, limit = sorted(batch.requests, key=lambda item: item.id), batch.sampling.max_response_tokens
        stream = RolloutStream(self._client, self._url, batch.run)
        lengths = response_lengths([request.id.prompt for request in requests], limit)
        ids = np.random.default_rng(batch.seed).integers(0, VOCABULARY, max(lengths)).astype(np.int32)
        log_probs = np.full(max(lengths), -1.0, np.float32)
        tokens = 0
        for first in range(0, len(requests), FLUSH):
            indices = range(first, min(first + FLUSH, len(requests)))
            finished = [
                Trajectory.of_response(
                    requests[index].id,
                    batch.policy_version,
                    requests[index].prompt_ids,
                    ids[: lengths[index]],
                    log_probs[: lengths[index]],
                    FinishReason.LENGTH,
                    batch.weights_digest,
                    batch.generator,
                    attempt=batch.attempt,
                )
                for index in indices
            ]
            tokens += sum(lengths[index] for index in indices)
            time.sleep(max(0.0, start + tokens * self.times.generate - time.perf_counter()))
            if cancelled():
                raise Cancelled("generate: the caller disconnected")
            stream.append(finished, batch.leader_epoch)
            on_progress(indices.stop, tokens)
        return len(requests), tokens


class SimulatedActor(TrainedModel, GeneratingModel):
    role = Role.ACTOR

    def status(self) -> ServiceStatus:
        # The window of a weight source has at least two versions.
        versions = range(max(0, self.policy_version - 1), self.policy_version + 1)
        return replace(super().status(), published_weights={version: digest_of(version) for version in versions})

    def log_probs(self, batch: TokenBatch, temperature: float, reference: bool) -> FloatArray:
        return np.full(int(batch.response_lengths.sum()), -1.0, np.float32)


class SimulatedGenerator(GeneratingModel):
    """A generator whose weights arrive at once."""

    role = Role.GENERATOR
    traffic = None

    def status(self) -> ServiceStatus:
        return replace(super().status(), engine=EngineProperties("torch", True, True, "whole", "tensors", "read back"))

    def load(self, run: str, leader_epoch: int, policy_version: int, digest: bytes, pull: Any) -> WeightTransfer:
        return WeightTransfer(policy_version, digest)


def digest_of(version: int) -> bytes:
    """Return the digest of a policy version."""
    return version.to_bytes(16, "little")


class SimulatedCritic(TrainedModel):
    role = Role.CRITIC

    def values(self, batch: TokenBatch) -> FloatArray:
        time.sleep(self.times.values * len(batch.token_ids))
        return np.zeros(int(batch.response_lengths.sum()), np.float32)


class SimulatedReference(SimulatedModel):
    role = Role.REFERENCE

    def log_probs(self, batch: TokenBatch, temperature: float, version: ReferenceVersion | None = None) -> FloatArray:
        time.sleep(self.times.score * len(batch.token_ids))
        return np.full(int(batch.response_lengths.sum()), -1.0, np.float32)


class SimulatedReward(SimulatedModel):
    role = Role.REWARD

    def score(self, batch: TokenBatch, fields: Sequence[str], cancelled: Callable[[], bool]) -> Scores:
        time.sleep(self.times.score * len(batch.token_ids))
        return Scores((batch.response_lengths % 7).astype(np.float32))


def hosted(role: Role, times: Times, url: str, activity: Path | None = None) -> HostedRole:
    """Return one replica of a role. ``activity``: see ``SimulatedModel``."""
    compute = ComputeThread()
    if role is Role.ACTOR:
        actor: Any = SimulatedActor(times, url, activity)
        return ActorServicer(actor, compute, 1, lambda: False, generator=actor)
    if role is Role.GENERATOR:
        core: Any = SimulatedGenerator(times, url, activity)
        return GeneratorServicer(core, compute, 1, lambda: False, WeightMirror(num_threads=1), lambda sources: [])
    if role is Role.CRITIC:
        return CriticServicer(SimulatedCritic(times, url, activity), compute, 1, lambda: False)  # type: ignore[arg-type]
    if role is Role.REFERENCE:
        return ReferenceServicer(SimulatedReference(times, url), compute, 1)  # type: ignore[arg-type]
    return RewardServicer(SimulatedReward(times, url), compute, 1)


@contextmanager
def replicas(
    role: Role, count: int = 1, times: Times | None = None, url: str = "", activity: Path | None = None
) -> Iterator[list[str]]:
    """Run ``count`` replicas in a separate process. Yield their addresses. ``activity``: see ``SimulatedModel``."""
    command = [sys.executable, "-m", "benchmarks.simulated", role, "--replicas", str(count), "--url", url]
    command += ["--activity", str(activity)] if activity is not None else []
    for name, seconds in asdict(times or Times()).items():
        command += [f"--{name}", str(seconds)]
    with subprocess.Popen(tied_to_parent(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            addresses = process.stdout.readline()
            if not addresses:
                raise RuntimeError(f"the simulated {role} ended with status {process.wait()}; its error is above")
            yield json.loads(addresses)
        finally:
            process.terminate()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated", description=__doc__)
    parser.add_argument("role", type=Role)
    parser.add_argument("--replicas", type=positive, default=1)
    parser.add_argument("--url", default="", help="URL of the buffer")
    parser.add_argument("--activity", type=Path, help="file for the start and end of each generation and update")
    for name in asdict(Times()):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    options = parser.parse_args(arguments)
    # Standard output is for the addresses.
    configure_logs(options.role)
    times = replace(Times(), **{name: getattr(options, name) for name in asdict(Times())})
    replica = (options.role, times, options.url, options.activity)
    servers = [Server([hosted(*replica)], "127.0.0.1:0") for _ in range(options.replicas)]
    print(json.dumps([server.address for server in servers]), flush=True)
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
