"""Generation of trajectories as the orchestrator sees it: by the actor, or by a pool of generators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import Any, Protocol

import structlog

from quartet.config.root import Config
from quartet.contract.generation import EngineProperties, GenerationBatch
from quartet.contract.status import GeneratorInfo, Role
from quartet.contract.trajectory import Trajectory
from quartet.contract.weights import PublishedWeights
from quartet.errors import BufferFailed, QuartetError, WeightsChanged
from quartet.preflight.repeatability import repeatability_notes
from quartet.rpc.clients import ActorClient, GenerationClient
from quartet.services.orchestrator.telemetry.step_profiler import CallObserver

log = structlog.get_logger()


class PendingTrajectories(Protocol):
    """Trajectories that are being generated into the rollout stream."""

    def done(self) -> bool:
        """Return whether the generation has ended, with all trajectories in the stream or with a failure."""

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback`` on another thread when the generation ends, or now if it has ended."""

    def result(self) -> object:
        """Wait for the end. Raises the error of the generation."""

    def cancel(self) -> object:
        """Cancel the generation."""

    def abandoned(self, trajectory: Trajectory) -> bool:
        """Return whether a trajectory is of an earlier Generate call whose work was cancelled or issued again."""

    def wrong_origin(self, trajectory: Trajectory) -> str:
        """Return why no call of this generation can have written a trajectory that is not ``abandoned``, or ""."""

    def arrived(self, trajectory: Trajectory) -> bool:
        """Record that a requested trajectory has arrived, so that it is not generated again.

        Return False if it is ``abandoned`` by now, and must not be used.
        """

    def newer_weights(self) -> Mapping[int, bytes]:
        """Return the digests of the newer policy versions that trajectories may have, too. Empty without in-flight updates."""

    def refuse(self, trajectory: Trajectory, reason: str) -> None:
        """Reject a trajectory that was generated with other weights. Another generator generates it, or the run fails."""


class Generation(Protocol):
    """Generators of a run."""

    def start(
        self, batch: GenerationBatch, beside_training: bool = False
    ) -> tuple[GenerationBatch, PendingTrajectories]:
        """Start to generate. Return the batch with the digest that its trajectories must carry, and the pending result.

        ``beside_training``: an evaluation for which training does not wait, by the generators of ``evaluation.generators``.
        """

    def policy_updated(self, leader_epoch: int, publication: PublishedWeights | None) -> None:
        """Take note that the actor has published a policy version, if it publishes any.

        Idle generators get it at once, with in-flight updates also those that generate.
        """

    def wait_until_ready(self, timeout: float, check_alive: Callable[[], None]) -> None:
        """Wait until there is a generator. ``check_alive`` may raise to end the wait. Raises ServiceUnavailable."""

    def generators(self) -> list[GeneratorInfo]:
        """Return the generators in separate processes that have been found. Thread-safe."""

    def engines(self) -> list[EngineProperties]:
        """Return what the engines that generate for the run declare, each declaration once."""

    def peak_flops(self) -> float:
        """Return the FLOP/s of large matmuls on a device of a generator in a separate process; 0 if it is not known."""

    def take_metrics(self, policy_version: int) -> dict[str, float]:
        """Return metrics of the generators in separate processes, named as in metrics.jsonl.

        They cover the transfers of weights up to ``policy_version`` that no earlier call has covered.
        """

    def leader_epochs(self) -> list[int]:
        """Return the highest leader epoch that each generator has seen, as far as known."""

    def close(self) -> None:
        """End all work."""


class RepeatabilityNotes:
    """Warnings that the bits of a run depend on the number or timing of its generators. Each is given once."""

    def __init__(self, config: Config, note: Callable[[str], None]) -> None:
        """``note`` shows a line to the user."""
        self._config, self._note = config, note
        self._given: set[str] = set()

    def give(self, engines: Collection[EngineProperties]) -> None:
        """Log and show the warnings for these engines, except those that were given."""
        for line in repeatability_notes(self._config, engines):
            if line not in self._given:
                self._given.add(line)
                log.warning("bits depend on the generators", reason=line)
                self._note(line)


class ActorGeneration:
    """Generation by the engine in the actor's process."""

    def __init__(
        self,
        client: GenerationClient,
        actor: ActorClient,
        separate_weights: bool,
        observe: CallObserver,
        notes: RepeatabilityNotes,
    ) -> None:
        """``separate_weights``: the engine has its own weights, which are named by their digest."""
        self._client, self._actor, self._separate, self._observe = client, actor, separate_weights, observe
        self._notes = notes
        self._calls: list[Future[int]] = []
        self._changed = 0
        self._attempts = count(1)

    def start(
        self, batch: GenerationBatch, beside_training: bool = False
    ) -> tuple[GenerationBatch, PendingTrajectories]:
        if self._separate:
            batch = replace(batch, weights_digest=published_digest(self._actor, batch.policy_version))
        batch = replace(batch, attempt=next(self._attempts))
        # The actor generates one step after the other.
        self._calls = [call for call in self._calls if not call.done()]
        call = self._client.generate(batch, waits_for=len(self._calls))
        self._calls.append(call)
        call.add_done_callback(self._ended)
        self._observe(Role.ACTOR, "generate", call)
        return batch, _ActorTrajectories(call, batch.attempt)

    def policy_updated(self, leader_epoch: int, publication: PublishedWeights | None) -> None:
        """Do nothing: the engine takes the version of a request when it begins with it."""

    def wait_until_ready(self, timeout: float, check_alive: Callable[[], None]) -> None:
        """Return at once, after warnings about the engine: the actor is ready before."""
        self._notes.give(self.engines())

    def engines(self) -> list[EngineProperties]:
        """Return the declaration of the actor's engine."""
        # An actor that is lost at this moment comes back.
        engine = self._actor.wait_until_ready(known=True).engine
        return [] if engine is None else [engine]

    def generators(self) -> list[GeneratorInfo]:
        """Return none."""
        return []

    def peak_flops(self) -> float:
        """Return 0: no generator runs in a separate process."""
        return 0.0

    def _ended(self, call: Future[int]) -> None:
        try:
            call.result()
        except WeightsChanged:
            self._changed += 1
        except QuartetError:
            pass

    def take_metrics(self, policy_version: int) -> dict[str, float]:
        """Return metrics since the last call. An engine that shares the weights of the actor has none."""
        changed, self._changed = self._changed, 0
        return {"weights_changed": changed} if self._separate else {}

    def leader_epochs(self) -> list[int]:
        """Return none: the actor's status has it."""
        return []

    def close(self) -> None:
        """Do nothing: the caller cancels its calls."""


class _ActorTrajectories:
    """A pending Generate call of the actor."""

    def __init__(self, call: Future[int], attempt: int) -> None:
        self._attempt = attempt
        self.done, self.result, self.cancel = call.done, call.result, call.cancel
        self.add_done_callback = call.add_done_callback

    def abandoned(self, trajectory: Trajectory) -> bool:
        """Return whether an earlier call generated a trajectory. The earlier calls for its step were cancelled, or have ended."""
        return 0 < trajectory.attempt < self._attempt

    def wrong_origin(self, trajectory: Trajectory) -> str:
        """Return a reason unless this call generated a trajectory."""
        if trajectory.attempt == self._attempt and not trajectory.generator:
            return ""
        return (
            f"{trajectory.id} is of generator {trajectory.generator or 'none'} and attempt {trajectory.attempt}; expected no "
            f"generator and attempt {self._attempt}; start the actor with the same version of Quartet"
        )

    def arrived(self, trajectory: Trajectory) -> bool:
        """Return True: no other generator could generate it."""
        return True

    def newer_weights(self) -> Mapping[int, bytes]:
        """Return none."""
        return {}

    def refuse(self, trajectory: Trajectory, reason: str) -> None:
        """Raise BufferFailed."""
        raise BufferFailed(f"rollout stream: {reason}")


def published_digest(actor: ActorClient, policy_version: int) -> bytes:
    """Return the digest of a policy version, from the actor's weight source. Raises BufferFailed if it has it no longer."""
    published = actor.status().published_weights
    if policy_version not in published:
        versions = ", ".join(map(str, sorted(published))) or "none"
        raise BufferFailed(f"weights of policy version {policy_version}: the actor has versions {versions}")
    return published[policy_version]
