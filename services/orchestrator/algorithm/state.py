"""What the algorithm itself remembers from step to step: β, the moments of the scores, and what the guards have seen."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch

from quartet.config import Config
from quartet.ppo import kl
from quartet.ppo.rewards import RunningMoments
from quartet.services.orchestrator.control.guards import Guards
from quartet.types import Alert

Metrics = dict[str, float]


class AlgorithmState:
    """The state after a committed step. A step looks at it; only a commit changes it, so a step may be taken again."""

    def __init__(self, config: Config) -> None:
        """Before the first step."""
        algorithm, controller = config.algorithm, config.algorithm.kl_controller
        self.step = 0
        self.found: list[Alert] = []
        """What the guards found after that step."""
        self._kl = kl.make_kl_controller(
            controller.kind, algorithm.kl_coefficient, controller.target, controller.horizon
        )
        self._normalize = algorithm.score.normalize
        self._moments = RunningMoments()
        self._guards = Guards(config.guards)

    @property
    def kl_coefficient(self) -> float:
        """β of the next step."""
        return self._kl.value

    def set_kl_coefficient(self, value: float) -> None:
        """Sets β of the next step; the controller goes on from there."""
        self._kl.load({"value": value})

    def moments(self, scores: Sequence[float]) -> RunningMoments | None:
        """What normalises the next step's ``scores``: the moments of all so far, these included, or of the first that were."""
        if self._normalize == "none":
            return None
        found = deepcopy(self._moments)
        if found.count == 0 or self._normalize == "running":
            found.update(torch.tensor(scores))
        return found

    def entropy_slope(self, entropy: float) -> float:
        """Nats per token and step, over the guards' window that ends with the next step's ``entropy``."""
        return self._guards.entropy_slope(entropy)

    def commit(self, metrics: Metrics, scores: Sequence[float]) -> list[Alert]:
        """Goes on by the step of these ``metrics`` and raw ``scores`` [sequences]; gives what the guards find."""
        self._moments = self.moments(scores) or self._moments
        # Another than the controller's where a user has changed it.
        self.set_kl_coefficient(metrics["kl_coefficient"])
        self._kl.update(metrics["kl_mean"], len(scores))
        self.step = int(metrics["step"])
        self.found = self._guards.look(metrics)
        return self.found

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps. The guards' memory is in the metrics."""
        moments = None if self._normalize == "none" else self._moments.state()
        return {"kl_controller": self._kl.state(), "score_moments": moments}

    def restore(self, step: int, state: dict[str, Any] | None, history: Sequence[Metrics]) -> None:
        """Goes to ``step``, whose checkpoint kept ``state`` (None for step 0); ``history`` are the metrics up to there.

        What is None in it begins anew. Raises InvalidRequest for a state that is none.
        """
        if state is not None:
            if state["kl_controller"] is not None:
                self._kl.load(state["kl_controller"])
            if state["score_moments"] is not None:
                self._moments.load(state["score_moments"])
        for metrics in history:
            self.found = self._guards.look(metrics)
        self.step = step
