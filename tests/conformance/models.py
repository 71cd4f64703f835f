"""Services of the roles with models of a few numbers, in this process: correct, fast, and easy to make wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quartet.buffer.connection import connect
from quartet.buffer.experience_store import ExperienceStore
from quartet.buffer.rollout_stream import RolloutStream
from quartet.conformance.runner import AGENT
from quartet.conformance.target import Limits, Target
from quartet.contract.arrays import FloatArray
from quartet.contract.generation import EngineProperties
from quartet.contract.random_streams import uniforms
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import FinishReason, Outcome, Scores, TokenBatch, Trajectory
from quartet.contract.update import UpdateResult
from quartet.contract.weights import SavedFile
from quartet.errors import FailedPrecondition, InvalidRequest
from quartet.rpc.base_servicers import ModelServicer
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.rpc.server import Server
from quartet.services.actor.servicer import ActorServicer
from quartet.services.critic.servicer import CriticServicer
from quartet.services.environment.agents.servicer import AgentServicer
from quartet.services.environment.servicer import EnvironmentServicer
from quartet.services.reference.servicer import ReferenceServicer
from quartet.services.reward.servicer import RewardServicer
from quartet.services.update_log import UpdateLog
from quartet.system.durable_files import checkpoint_path, confine_path, describe_files
from tests.conformance.agents import TinyAgents
from tests.conformance.environments import TinyEnvironment

VOCABULARY, MAX_TOKENS = 24, 40
FAILING = '{"fail": true}'
"""Fields with which rewards and environments of the tests fail."""


class TinyModel:
    """A model whose next token depends on the last two tokens, and its update log."""

    role = Role.REWARD

    def __init__(self, root: Path, url: str) -> None:
        self.root, self.url = root, url
        self.updates = UpdateLog()
        self.random = np.random.default_rng(1)
        self.weights = self.random.normal(size=(2, VOCABULARY, VOCABULARY))
        self.calls = 0

    def check(self, batch: TokenBatch) -> None:
        batch.check_vocabulary(VOCABULARY)
        if batch.lengths.max() > MAX_TOKENS:
            raise InvalidRequest(f"a sequence has {batch.lengths.max()} tokens; expected at most {MAX_TOKENS}")

    def scale(self) -> float:
        """Return what an update changes."""
        return 1 + 0.1 * self.updates.step

    def logits(self, tokens: Any) -> Any:
        """Return the logits after each token, float64 [tokens, vocabulary]."""
        before = np.concatenate([[0], tokens[:-1]])
        return (self.weights[0][tokens] + self.weights[1][before]) * self.scale()

    def distribution(self, tokens: Any, temperature: float = 1.0) -> Any:
        """Return the log-probs of every token after each token, float64 [tokens, vocabulary]."""
        logits = self.logits(tokens) / temperature
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def status(self) -> ServiceStatus:
        return ServiceStatus(
            role=self.role,
            model="tiny",
            tokenizer_fingerprint="ab" * 32,
            vocabulary_size=VOCABULARY,
            max_sequence_tokens=MAX_TOKENS,
            policy_version=self.updates.policy_version,
            run=self.updates.run,
            step=self.updates.step,
            leader_epoch=self.updates.fence.epoch,
            engine=self.engine(),
        )

    def engine(self) -> EngineProperties | None:
        return None

    def close(self) -> None:
        """Do nothing: a reward source may have processes."""

    def score(self, batch: TokenBatch, fields: Any, cancelled: Callable[[], bool]) -> Scores:
        self.check(batch)
        if len(fields) not in (0, len(batch)):
            raise InvalidRequest(f"fields: expected {len(batch)}, got {len(fields)}")
        totals = [self.logits(ids)[:, 3].mean() for ids in batch.sequences()]
        total = np.array(totals, np.float32)
        parts = {"half": total / 2, "rest": total / 2}
        failed = [each == FAILING for each in fields]
        if not any(failed):
            return Scores(total, parts)
        outcomes = tuple(Outcome.SCORER_ERROR if each else Outcome.OK for each in failed)
        return Scores(np.where(failed, np.float32(np.nan), total), outcomes=outcomes)

    def log_probs(self, batch: TokenBatch, temperature: float, reference: bool = False) -> FloatArray:
        self.check(batch)
        if reference:
            raise FailedPrecondition("reference: no adapter")
        parts = [
            self.distribution(ids, temperature)[np.arange(prompt - 1, len(ids) - 1), ids[prompt:]]
            for ids, prompt in zip(batch.sequences(), batch.prompt_lengths, strict=True)
        ]
        return np.concatenate(parts).astype(np.float32)

    def values(self, batch: TokenBatch) -> FloatArray:
        self.check(batch)
        parts = [
            self.logits(ids)[prompt - 1 : -1, 5]
            for ids, prompt in zip(batch.sequences(), batch.prompt_lengths, strict=True)
        ]
        return np.concatenate(parts).astype(np.float32)

    @property
    def policy_version(self) -> int:
        return self.updates.policy_version

    def load(self, run: str, step: int) -> None:
        ExperienceStore(connect(self.url), self.url, run).load(step)

    def update(self, run: str, step: int, leader_epoch: int, settings: Any, loss: Any) -> UpdateResult:
        if self.role is Role.ACTOR and loss.parameters:
            raise InvalidRequest(f"policy_loss_parameters {', '.join(loss.parameters)}: the clipped loss has none")

        def apply() -> dict[str, float]:
            self.load(run, step)
            name = "policy_loss" if self.role is Role.ACTOR else "value_loss"
            rate = settings.learning_rate
            return {"optimizer_steps": 1, "skipped_steps": 0, "grad_norm": 1, "learning_rate": rate, name: 0.5}

        return self.updates.once(run, step, leader_epoch, apply)

    def snapshot(
        self, run: str, leader_epoch: int, directory: str, kind: Any, step: int | None = None
    ) -> Callable[[], list[SavedFile]]:
        self.updates.check_save(run, leader_epoch, step)
        target = confine_path(self.root, directory)

        def write() -> list[SavedFile]:
            target.mkdir(parents=True, exist_ok=True)
            (target / "model.bin").write_bytes(self.weights.tobytes())
            return describe_files(self.root, target)

        return write

    def restore(self, run: str, step: int, leader_epoch: int, directory: str) -> None:
        checkpoint_path(self.root, step, directory)
        self.updates.restore(run, step, leader_epoch, lambda: None)


class TinyEngine(TinyModel):
    """A model that generates."""

    role = Role.ACTOR

    def engine(self) -> EngineProperties | None:
        return EngineProperties("tiny", True, True, "whole", "shared", "none", False)

    def sample(self, request: Any, batch: Any) -> Trajectory:
        ids, log_probs = list(request.prompt_ids), []
        draws = uniforms(batch.seed, request.id, batch.sampling.max_response_tokens)
        for draw in draws:
            temperature = request.own_sampling(batch.sampling).temperature
            row = self.distribution(np.array(ids), temperature or 1.0)[-1]
            greedy = temperature == 0
            token = int(row.argmax()) if greedy else int(np.searchsorted(np.exp(row).cumsum(), draw))
            ids.append(min(token, VOCABULARY - 1))
            log_probs.append(row[ids[-1]])
        response = np.array(ids[len(request.prompt_ids) :], np.int32)
        return Trajectory.of_response(
            request.id,
            batch.policy_version,
            request.prompt_ids,
            response,
            np.array(log_probs, np.float32),
            FinishReason.LENGTH,
            generator=batch.generator,
            attempt=batch.attempt,
        )

    def fence(self, batch: Any) -> None:
        self.updates.fence.check(batch.leader_epoch)

    def admit(self, batch: Any) -> None:
        if batch.policy_version != self.updates.policy_version or batch.weights_digest:
            raise FailedPrecondition("generate: other weights")

    def trajectories(self, batch: Any) -> list[Trajectory]:
        return [self.sample(request, batch) for request in batch.requests]

    def generate(self, batch: Any, cancelled: Any, on_start: Any, on_progress: Any) -> tuple[int, int]:
        self.fence(batch)
        self.admit(batch)
        for request in batch.requests:
            if request.prompt_ids.max() >= VOCABULARY:
                raise InvalidRequest("prompt_ids: expected ids in the vocabulary")
        on_start()
        done = self.trajectories(batch)
        RolloutStream(connect(self.url), self.url, batch.run).append(done, batch.leader_epoch)
        tokens = sum(len(each.response_ids) for each in done)
        on_progress(len(done), tokens)
        return len(done), tokens


_SERVICERS: dict[Role, type[ModelServicer[Any]]] = {
    Role.REWARD: RewardServicer,
    Role.REFERENCE: ReferenceServicer,
    Role.CRITIC: CriticServicer,
    Role.ACTOR: ActorServicer,
}


@dataclass
class Service:
    """A service before it is served: a mutant changes its model, its servicer, or what is done ``after_start``."""

    role: Role
    model: Any
    servicer: Any
    after_start: list[Callable[[Server], None]] = field(default_factory=list)


def _service(role: str, folder: Path, url: str) -> Service:
    if role == AGENT:
        agents: Any = TinyAgents()
        return Service(Role.ENVIRONMENT, agents, AgentServicer(agents, 1))
    role = Role(role)
    if role is Role.ENVIRONMENT:
        host: Any = TinyEnvironment()
        return Service(role, host, EnvironmentServicer(host, 1))
    model = TinyEngine(folder, url) if role is Role.ACTOR else TinyModel(folder, url)
    model.role = role
    trained = (lambda: False,) if role in (Role.ACTOR, Role.CRITIC) else ()
    hosted: dict[str, Any] = {"generator": model} if role is Role.ACTOR else {}
    return Service(role, model, _SERVICERS[role](model, ComputeThread(), 1, *trained, **hosted))


@contextmanager
def serving(
    role: str,
    folder: Path,
    url: str,
    mutate: Callable[[Service], None] = lambda _: None,
    credentials: Credentials = LOCAL,
    seconds: float = 3.0,
) -> Iterator[Target]:
    """Serve a tiny model, changed by ``mutate``, and yield a target without credentials. ``credentials``: the server's.
    ``seconds``: limit of a call.
    """
    service = _service(role, folder, url)
    mutate(service)
    server = Server([service.servicer], "127.0.0.1:0", credentials)
    for change in service.after_start:
        change(server)
    limits = Limits(
        seconds=seconds, allow_changes=True, buffer_url=url, failing_fields=FAILING, distinct_response=(1, 2)
    )
    target = Target(service.role, server.address, limits)
    try:
        yield target
    finally:
        target.close()
        server.stop(0.0)
