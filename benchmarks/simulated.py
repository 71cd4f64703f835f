"""Model services that only sleep: the real servicers around cores that take a stated time for each token.

python -m benchmarks.simulated ROLE --replicas N ... listens on free ports of 127.0.0.1, says where on one line, and serves until
its parent ends. The actor writes real trajectories to the real buffer; actor and critic read the experience that they are to
learn from, and sleep instead of learning. What a trajectory is made of follows from its name.
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
from typing import Any

import numpy as np

from benchmarks.options import positive
from quartet.buffer.connection import connect
from quartet.buffer.experience_store import ExperienceStore
from quartet.buffer.rollout_stream import RolloutStream
from quartet.child_processes import tied_to_parent
from quartet.errors import Cancelled
from quartet.models.training.update_idempotency import UpdateLog
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.server import HostedRole, Server
from quartet.services.actor.actor import FLUSH
from quartet.services.actor.servicer import ActorServicer
from quartet.services.critic.servicer import CriticServicer
from quartet.services.reference.servicer import ReferenceServicer
from quartet.services.reward.servicer import RewardServicer
from quartet.telemetry.logs import configure_logs
from quartet.types import (
    FinishReason,
    FloatArray,
    GenerationRequest,
    Role,
    SamplingParameters,
    SavedFile,
    Scores,
    ServiceStatus,
    TokenBatch,
    Trajectory,
    UpdateResult,
)

VOCABULARY = 32_000
"""Token ids that are drawn."""


@dataclass(frozen=True)
class Times:
    """Seconds that each service takes for a token.

    ``generate``: of a response, all that are under way together; ``score`` of prompt and response, of one replica of reward or
    reference; ``values`` the same of the critic; ``update``: of a response, in all passes over it.
    """

    generate: float = 0.0
    score: float = 0.0
    values: float = 0.0
    update: float = 0.0


def response_lengths(prompts: Sequence[int], longest: int) -> list[int]:
    """Return how long the response to each prompt is: a quarter of ``longest`` up to all of it, by the prompt's index."""
    spread = longest - longest // 4
    # A multiplicative hash: neighbours are far apart, and the mean is that of the range.
    return [longest // 4 + 1 + (int(prompt) * 2_654_435_761 % 2**32) * spread // 2**32 for prompt in prompts]


class Core:
    """What the sleeping cores share."""

    role: Role

    def __init__(self, times: Times, url: str) -> None:
        self.times = times
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
            leader_epoch=log.leader_epoch,
        )

    def close(self) -> None:
        """Do nothing."""


class Trained(Core):
    """Actor or critic."""

    def update(self, run: str, step: int, leader_epoch: int, settings: Any, loss: Any) -> UpdateResult:
        def apply() -> dict[str, float]:
            experience = ExperienceStore(self._client, self._url, run).load(step)
            time.sleep(self.times.update * len(experience.advantages))
            return {"optimizer_steps": 1.0, "skipped_steps": 0.0}

        return self._updates.once(run, step, leader_epoch, apply)

    def snapshot(self, run: str, leader_epoch: int, *_: Any) -> Callable[[], list[SavedFile]]:
        self._updates.check_save(run, leader_epoch)
        return list

    def restore(self, run: str, step: int, leader_epoch: int, directory: str) -> None:
        self._updates.restore(run, step, leader_epoch, lambda: None)


class SleepingActor(Trained):
    role = Role.ACTOR

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        leader_epoch: int,
        policy_version: int,
        cancelled: Callable[[], bool],
        begun: Callable[[], None],
    ) -> tuple[int, int]:
        """Each response is finished when its tokens and those of all before it have had their time."""
        begun()
        start = time.perf_counter()
        stream = RolloutStream(self._client, self._url, requests[0].id.run)
        lengths = response_lengths([request.id.prompt for request in requests], sampling.max_response_tokens)
        ids = np.random.default_rng(seed).integers(0, VOCABULARY, max(lengths)).astype(np.int32)
        log_probs = np.full(max(lengths), -1.0, np.float32)
        tokens = 0
        for first in range(0, len(requests), FLUSH):
            these = range(first, min(first + FLUSH, len(requests)))
            finished = [
                Trajectory(
                    requests[index].id,
                    policy_version,
                    requests[index].prompt_ids,
                    ids[: lengths[index]],
                    log_probs[: lengths[index]],
                    FinishReason.LENGTH,
                )
                for index in these
            ]
            tokens += sum(lengths[index] for index in these)
            time.sleep(max(0.0, start + tokens * self.times.generate - time.perf_counter()))
            if cancelled():
                raise Cancelled("generate: the caller went away")
            stream.append(finished, leader_epoch)
        return len(requests), tokens


class SleepingCritic(Trained):
    role = Role.CRITIC

    def values(self, batch: TokenBatch) -> FloatArray:
        time.sleep(self.times.values * len(batch.token_ids))
        return np.zeros(int(batch.response_lengths.sum()), np.float32)


class SleepingReference(Core):
    role = Role.REFERENCE

    def log_probs(self, batch: TokenBatch, temperature: float) -> FloatArray:
        time.sleep(self.times.score * len(batch.token_ids))
        return np.full(int(batch.response_lengths.sum()), -1.0, np.float32)


class SleepingReward(Core):
    role = Role.REWARD

    def score(self, batch: TokenBatch, fields: Sequence[str], cancelled: Callable[[], bool]) -> Scores:
        time.sleep(self.times.score * len(batch.token_ids))
        return Scores((batch.response_lengths % 7).astype(np.float32))


def hosted(role: Role, times: Times, url: str) -> HostedRole:
    """One replica of a role."""
    compute = ComputeThread()
    if role is Role.ACTOR:
        return ActorServicer(SleepingActor(times, url), compute, 1, lambda: False)  # type: ignore[arg-type]
    if role is Role.CRITIC:
        return CriticServicer(SleepingCritic(times, url), compute, 1, lambda: False)  # type: ignore[arg-type]
    if role is Role.REFERENCE:
        return ReferenceServicer(SleepingReference(times, url), compute, 1)  # type: ignore[arg-type]
    return RewardServicer(SleepingReward(times, url), compute, 1)


@contextmanager
def replicas(role: Role, count: int = 1, times: Times | None = None, url: str = "") -> Iterator[list[str]]:
    """So many replicas in a separate process; gives the address of each."""
    command = [sys.executable, "-m", "benchmarks.simulated", role, "--replicas", str(count), "--url", url]
    for name, seconds in asdict(times or Times()).items():
        command += [f"--{name}", str(seconds)]
    with subprocess.Popen(tied_to_parent(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if not said:
                raise RuntimeError(f"the simulated {role} ended with status {process.wait()}; its error stands above")
            yield json.loads(said)
        finally:
            process.terminate()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated", description=__doc__)
    parser.add_argument("role", type=Role)
    parser.add_argument("--replicas", type=positive, default=1)
    parser.add_argument("--url", default="", help="of the buffer")
    for name in asdict(Times()):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    options = parser.parse_args(arguments)
    # Standard output is for the addresses.
    configure_logs(options.role)
    times = replace(Times(), **{name: getattr(options, name) for name in asdict(Times())})
    servers = [Server([hosted(options.role, times, options.url)], "127.0.0.1:0") for _ in range(options.replicas)]
    print(json.dumps([server.address for server in servers]), flush=True)
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
