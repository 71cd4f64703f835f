"""State of the algorithm between steps: KL and entropy coefficients, score statistics and guard history."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import torch

from quartet.config.algorithm import AlgorithmConfig
from quartet.config.root import Config
from quartet.contract.control import Alert
from quartet.ppo import kl
from quartet.ppo.entropy import AdaptiveEntropyController
from quartet.ppo.rewards import RunningMoments
from quartet.services.orchestrator.control.guards import Guards, weights_in

Metrics = dict[str, float]
NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})


class AlgorithmState:
    """State after a committed step. Preparing a step only reads it, so a step can be taken again with the same result."""

    def __init__(self, config: Config) -> None:
        """State before the first step."""
        algorithm, controller = config.algorithm, config.algorithm.kl_controller
        self.step = 0
        self.alerts: list[Alert] = []
        """Alerts that the guards raised after that step."""
        self._kl = kl.make_kl_controller(
            controller.kind, algorithm.kl_coefficient, controller.target, controller.horizon
        )
        self._entropy = _entropy_controller(algorithm)
        self._pretrains_values = algorithm.pretrains_values
        self._normalize = algorithm.score.normalize
        self._moments = RunningMoments()
        self._weights: Mapping[str, float] | None = None
        """Weights of the parts of an ensemble in the last step, by name. Empty for a single source."""
        # The student of a distillation starts far from its teacher.
        self._guards = Guards(config.guards, ignored=() if algorithm.distillation is None else ("kl_runaway",))
        self._prompts_per_step = config.rollout.prompts_per_step
        # Number of prompts that the steps so far have consumed, used or not, of each sequence. The committed metrics record it.
        self._prompts_consumed = [0] * (config.rollout.max_off_policy_steps + 1)
        self.prompts_skipped = 0
        """Number of prompts that the steps so far have skipped, because no response to them could be scored."""

    @property
    def coefficients(self) -> dict[str, float]:
        """Live settings of the next step that a controller holds, by name."""
        adapted = {} if self._entropy is None else {"entropy_coefficient": self._entropy.value}
        return {"kl_coefficient": self._kl.value, **adapted}

    def prompts_consumed_before(self, step: int) -> int:
        """Return the number of prompts that the steps so far have consumed of the ``PromptSequence`` of ``step``."""
        return self._prompts_consumed[(step - 1) % len(self._prompts_consumed)]

    def set_coefficients(self, values: Mapping[str, float]) -> None:
        """Set those of ``values`` for the next step that a controller holds. It continues from them."""
        if "kl_coefficient" in values:
            self._kl.load({"value": values["kl_coefficient"]})

    def moments(
        self, scores: Sequence[float | None], weights: Mapping[str, float] = NO_WEIGHTS
    ) -> RunningMoments | None:
        """Return the moments that normalise the next step's ``scores``, or None without normalisation.

        These are the running moments over all scores so far, or the moments of the first batch. They reset if the ``weights`` of
        an ensemble's parts differ from those of the step before: the scores may have another scale.
        """
        if self._normalize == "none":
            return None
        has_switched = self._weights is not None and weights != self._weights
        moments = RunningMoments() if has_switched else deepcopy(self._moments)
        if moments.count == 0 or self._normalize == "running":
            moments.update(torch.tensor(scores))
        return moments

    def entropy_slope(self, entropy: float) -> float:
        """Return the slope of the entropy, in nats per token and step, over the guard window that ends with ``entropy``."""
        return self._guards.entropy_slope(entropy)

    def commit(self, metrics: Metrics, scores: Sequence[float | None]) -> list[Alert]:
        """Advance by the step with these ``metrics`` and raw ``scores`` [sequences], None without scores. Returns the alerts of
        the guards."""
        weights = weights_in(metrics)
        self._moments, self._weights = self.moments(scores, weights) or self._moments, weights
        self.step = int(metrics["step"])
        # The policy does not react to a coefficient while it is not updated.
        if not self._pretrains_values(self.step):
            self._kl.update(metrics["kl_mean"], len(scores))
            # A skipped update may have no finite entropy.
            if self._entropy is not None and math.isfinite(metrics.get("entropy", math.nan)):
                self._entropy.update(metrics["entropy"])
        self._consume(metrics)
        self.alerts = self._guards.check(metrics)
        return self.alerts

    def replay(self, metrics: Metrics, scores: Sequence[float | None]) -> None:
        """Advance by a step of an earlier process, as ``commit``, with the β that the step was taken with."""
        self.set_coefficients({"kl_coefficient": metrics["kl_coefficient"]})
        self.commit(metrics, scores)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. The guards restore their history from the metrics."""
        moments = None if self._normalize == "none" else self._moments.state()
        entropy = None if self._entropy is None else self._entropy.state()
        return {"kl_controller": self._kl.state(), "entropy_controller": entropy, "score_moments": moments}

    def restore(self, step: int, state: dict[str, Any] | None, history: Sequence[Metrics]) -> None:
        """Go to ``step``, whose checkpoint stored ``state`` (None for step 0). ``history`` holds the metrics up to that step.

        An entry of ``state`` that is None starts from its initial value, because a fork changed its settings. Raises
        InvalidRequest for a malformed state.
        """
        if state is not None:
            if state["kl_controller"] is not None:
                self._kl.load(state["kl_controller"])
            if self._entropy is not None and state["entropy_controller"] is not None:
                self._entropy.load(state["entropy_controller"])
            if state["score_moments"] is not None:
                self._moments.load(state["score_moments"])
        for metrics in history:
            self._consume(metrics)
            self.alerts = self._guards.check(metrics)
            self._weights = weights_in(metrics)
        self.step = step

    def _consume(self, metrics: Metrics) -> None:
        # Other steps record no number.
        index = (int(metrics["step"]) - 1) % len(self._prompts_consumed)
        self._prompts_consumed[index] += int(metrics.get("prompts_consumed", self._prompts_per_step))
        self.prompts_skipped += int(metrics.get("skipped_prompts", 0))


def _entropy_controller(algorithm: AlgorithmConfig) -> AdaptiveEntropyController | None:
    """Return the adaptive controller of the entropy coefficient, or None if the coefficient is fixed."""
    settings = algorithm.entropy_controller
    if settings.kind == "fixed":
        return None
    return AdaptiveEntropyController(
        algorithm.entropy_coefficient,
        settings.target,
        settings.step_size,
        settings.min_coefficient,
        settings.max_coefficient,
    )
