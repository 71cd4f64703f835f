"""Check of the first trajectory of each generator against the trainer's own log-probs.

The digest of a generator's weights does not cover what its engine derives from them, such as a prefix cache that was computed
with former weights. The log-probs do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np

from quartet.contract.arrays import FloatArray
from quartet.contract.trajectory import TokenBatch, Trajectory
from quartet.rpc.clients import ActorClient

TOLERANCE = {"float32": 0.01, "bfloat16": 0.25, "float16": 0.1}
"""Maximum mean difference between the log-probs of engine and trainer, in nats per token, by parameter type."""


class FirstTrajectories:
    """Trajectories of one step whose generator is not verified yet.

    A generator is verified by its first trajectory. Until then its trajectories are held. If the policy has taken another update
    since, there is nothing to compare with, and the generator counts as verified.
    """

    def __init__(
        self, actor: ActorClient | None, temperature: float, dtype: str, on_response: Callable[[], None]
    ) -> None:
        """``on_response`` is called on another thread when a response of the ``actor`` arrives. ``dtype`` is the actor's.

        Without an actor every generator counts as verified.
        """
        self._actor, self._temperature, self._on_response = actor, temperature, on_response
        self._tolerance = TOLERANCE[dtype]
        self._verified: set[str] = set()
        self._held: dict[str, list[Trajectory]] = {}
        self._calls: dict[str, Future[tuple[FloatArray, int]]] = {}

    def admit(self, trajectory: Trajectory, greedy: bool = False) -> bool:
        """Return whether a trajectory can be used now. Otherwise hold it. ``greedy``: its log-probs are at temperature 1."""
        generator = trajectory.generator
        if self._actor is None or not generator or generator in self._verified or not len(trajectory.log_probs):
            return True
        held = self._held.setdefault(generator, [])
        # A delivery may be read twice.
        if all((item.id, item.attempt) != (trajectory.id, trajectory.attempt) for item in held):
            held.append(trajectory)
        if generator not in self._calls:
            call = self._actor.versioned_log_probs(
                TokenBatch.of_policy([trajectory]), 1.0 if greedy else self._temperature
            )
            self._calls[generator] = call
            call.add_done_callback(lambda _: self._on_response())
        return False

    def decided(self) -> Iterator[tuple[Trajectory, str]]:
        """Yield each held trajectory whose generator is now known, with the reason to refuse it, or "".

        Raises the error of a call.
        """
        for generator in [name for name, call in self._calls.items() if call.done()]:
            log_probs, version = self._calls.pop(generator).result()
            held = self._held.pop(generator)
            own = held[0].response_mask
            difference, reason = float(np.abs(held[0].log_probs[own] - log_probs[own]).mean()), ""
            # A difference of NaN is refused, too.
            if version != held[0].policy_version or difference <= self._tolerance:
                self._verified.add(generator)
            else:
                reason = (
                    f"generator {generator}: the log-probs of {held[0].id} differ from those of policy version {version} by "
                    f"{difference:.2g} nats per token, {self._tolerance:g} allowed; its engine uses other weights or caches than "
                    "it was given"
                )
            for trajectory in held:
                yield trajectory, reason

    def cancel(self) -> None:
        """Cancel the calls."""
        for call in self._calls.values():
            call.cancel()
