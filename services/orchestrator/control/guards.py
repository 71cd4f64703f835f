"""Guards: rules over the metrics of a run. Each alert has its evidence, a remedy and an action."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from quartet.config.guards import GuardConfig, GuardsConfig
from quartet.contract.control import Alert
from quartet.ppo.statistics import slope

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Bound:
    """A metric whose mean over half a window is compared with a bound. ``of_reward``: it depends on the reward source."""

    metric: str
    unit: str
    remedy: str
    of_reward: bool = False


NO_END = (
    "responses do not end: set algorithm.truncation.treatment penalty, with algorithm.truncation.penalty so large that a "
    "truncated response scores as low as a bad one, or raise rollout.max_response_tokens"
)
BOUNDS = {
    "kl_runaway": Bound(
        "kl_mean",
        "nats per response",
        "the policy has left the reference: lower actor.learning_rate, raise algorithm.kl_coefficient, "
        "or use an adaptive kl_controller",
    ),
    "mismatch": Bound(
        "rollout_mismatch_kl",
        "nats per token",
        "engine and trainer disagree: use float32 or bfloat16 rather than float16 (actor.dtype), "
        "or lower algorithm.rollout_correction.upper",
    ),
    "repetition": Bound(
        "repetition",
        "of the 3-grams",
        "responses repeat themselves: raise algorithm.kl_coefficient, set algorithm.entropy_coefficient, and check what the "
        "reward favours",
    ),
    "missing_eos": Bound(
        "eos_rate",
        "of the responses",
        NO_END,
    ),
    "length_reward": Bound(
        "length_reward_correlation",
        "Pearson",
        "the reward favours length: fix the reward, or set algorithm.length_penalty.per_token",
        of_reward=True,
    ),
    "critic_lost": Bound(
        "explained_variance",
        "explained variance",
        "the critic is worse than a constant: raise critic.learning_rate, set algorithm.value_pretraining_steps, "
        "or initialise it from the reward model",
        of_reward=True,
    ),
}


BASELINE_STEPS = 2
"""First steps of a run that later steps are compared with. A jump in the reward comes soon after them."""


def weights_in(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of an ensemble's parts in the ``metrics`` of a step, by name; empty for a single source."""
    return {
        name.removeprefix("reward_").removesuffix("_weight"): value
        for name, value in metrics.items()
        if name.startswith("reward_") and name.endswith("_weight")
    }


class Guards:
    """Rules over the metrics of every step. A rule that keeps firing raises at most one alert per window."""

    def __init__(self, config: GuardsConfig, ignored: Collection[str] = ()) -> None:
        """``ignored``: names of rules that do not apply to the run."""
        self._config, self._ignored = config, ignored
        self._half = config.window_steps // 2
        self._recent: deque[Metrics] = deque(maxlen=2 * self._half)
        self._first: list[Metrics] = []
        # Steps with the same weights of reward sources: scores under others cannot be compared.
        self._recent_same: deque[Metrics] = deque(maxlen=2 * self._half)
        self._first_same: list[Metrics] = []
        self._weights: Mapping[str, float] = {}
        self._last_alert: dict[str, int] = {}

    def entropy_slope(self, entropy: float) -> float:
        """Return the slope of the entropy, in nats per token and step, over the window that ends with this step's ``entropy``."""
        seen = [metrics["entropy"] for metrics in self._recent if "entropy" in metrics]
        return slope([*seen, entropy][-2 * self._half :])

    def check(self, metrics: Metrics) -> list[Alert]:
        """Return the alerts that the metrics of one more step raise."""
        self._recent.append(metrics)
        if len(self._first) < self._half:
            self._first.append(metrics)
        if (weights := weights_in(metrics)) != self._weights:
            self._recent_same.clear()
            self._first_same.clear()
        self._weights = weights
        self._recent_same.append(metrics)
        if len(self._first_same) < min(BASELINE_STEPS, self._half):
            self._first_same.append(metrics)
        step = int(metrics["step"])
        alerts = []
        for name, evidence, remedy in self._findings():
            rule: GuardConfig = getattr(self._config, name)
            last = self._last_alert.get(name)
            if (
                rule.action == "off"
                or name in self._ignored
                or (last is not None and step - last < self._config.window_steps)
            ):
                continue
            self._last_alert[name] = step
            alerts.append(Alert(step, name, rule.action, evidence, remedy))
        return alerts

    def _findings(self) -> Iterator[tuple[str, str, str]]:
        """Yield name, evidence and remedy of every rule that fires."""
        yield from self._not_finite()
        yield from self._weights_changed()
        yield from self._reward_hacking()
        yield from self._entropy_collapse()
        yield from self._eos_fall()
        for name, bound in BOUNDS.items():
            yield from self._out_of_bound(name, bound)

    def _not_finite(self) -> Iterator[tuple[str, str, str]]:
        now = self._recent[-1]
        skipped = int(now.get("skipped_steps_actor", 0) + now.get("skipped_steps_critic", 0))
        if skipped:
            yield (
                "not_finite",
                f"{skipped} optimizer steps of step {int(now['step'])} had a NaN or infinite loss or gradient and were skipped",
                "lower the learning rate, clip outliers among the scores (algorithm.score.clip), or use float32",
            )

    def _weights_changed(self) -> Iterator[tuple[str, str, str]]:
        now = self._recent[-1]
        if changed := int(now.get("weights_changed", 0)):
            yield (
                "weights_changed",
                f"{changed} Generate calls of step {int(now['step'])} ended with other weights than were loaded; what they "
                "generated was discarded and generated again",
                "check the memory of the machine whose generator the run's notes name, and report the engine's version if it "
                "happens again",
            )

    def _reward_hacking(self) -> Iterator[tuple[str, str, str]]:
        """Detect a spike within the window, and a slow rise or an early jump since the first steps of the run.

        A switch of the reward source resets both.
        """
        if len(self._recent_same) < 2 * self._half:
            return
        rule, (before, after) = self._config.reward_hacking, self._halves(self._recent_same)
        since_start = self._first_same
        for baseline, min_length_rise, period in (
            (before, rule.min_length_rise, f"within {2 * self._half} steps"),
            (since_start, rule.min_length_rise_since_start, "since the first steps"),
        ):
            if not all("reward_mean" in metrics for metrics in (*baseline, *after)):
                return
            reward = [_mean(steps, "reward_mean") for steps in (baseline, after)]
            kl = [_mean(steps, "kl_mean") for steps in (baseline, after)]
            length = [_mean(steps, "response_tokens_mean") for steps in (baseline, after)]
            if (
                reward[1] - reward[0] >= rule.min_reward_rise * _mean(baseline, "reward_std")
                and kl[1] >= (1 + rule.min_kl_rise) * kl[0]
                and length[1] >= (1 + min_length_rise) * length[0]
                and kl[1] > rule.min_kl
                and reward[1] > reward[0]
            ):
                yield (
                    "reward_hacking",
                    f"{period} reward rose from {reward[0]:.2f} to {reward[1]:.2f}, KL from {kl[0]:.1f} to {kl[1]:.1f} nats, and "
                    f"response length from {length[0]:.1f} to {length[1]:.1f} tokens",
                    "the reward may be exploited through length: read the longest responses, fix the reward or set "
                    "algorithm.length_penalty, and raise algorithm.kl_coefficient",
                )
                return

    def _entropy_collapse(self) -> Iterator[tuple[str, str, str]]:
        halves = self._halves(self._recent)
        seen = [[metrics for metrics in part if "entropy" in metrics] for part in (self._first, halves[1])]
        if len(self._recent) < 2 * self._half or not all(seen):
            return
        first, now = (_mean(part, "entropy") for part in seen)
        if now < self._config.entropy_collapse.below * first:
            yield (
                "entropy_collapse",
                f"entropy {now:.3f} nats per token over the last {self._half} steps, {first:.3f} at the start",
                "the policy repeats a few responses: lower actor.learning_rate or algorithm.num_epochs, raise "
                "algorithm.kl_coefficient, or set an entropy_coefficient",
            )

    def _eos_fall(self) -> Iterator[tuple[str, str, str]]:
        """Detect a policy that learns not to end its responses, before most of them are cut off."""
        if len(self._recent) < 2 * self._half:
            return
        first, last = self._first, self._halves(self._recent)[1]
        # Medians, because a rate near 1 has a small spread, which a single step would exceed.
        before, now = (median(metrics["eos_rate"] for metrics in steps) for steps in (first, last))
        if before - now >= self._config.missing_eos.min_fall:
            lengths = [_mean(steps, "response_tokens_mean") for steps in (first, last)]
            yield (
                "missing_eos",
                f"eos_rate fell from {before:.2f} to {now:.2f} since the first steps, and response length went from "
                f"{lengths[0]:.1f} to {lengths[1]:.1f} tokens",
                NO_END,
            )

    def _out_of_bound(self, name: str, bound: Bound) -> Iterator[tuple[str, str, str]]:
        recent = self._recent_same if bound.of_reward else self._recent
        seen = [metrics for metrics in self._halves(recent)[1] if bound.metric in metrics]
        if len(recent) < 2 * self._half or not seen:
            return
        rule, value = getattr(self._config, name), _mean(seen, bound.metric)
        above: float | None = getattr(rule, "above", None)
        if (value > above) if above is not None else (value < rule.below):
            limit = f"above {above:g}" if above is not None else f"below {rule.below:g}"
            yield (
                name,
                f"{bound.metric} {value:.3g} {bound.unit} over the last {self._half} steps, {limit}",
                bound.remedy,
            )

    def _halves(self, recent: Iterable[Metrics]) -> tuple[list[Metrics], list[Metrics]]:
        steps = list(recent)
        return steps[: self._half], steps[self._half :]


def _mean(steps: Sequence[Metrics], name: str) -> float:
    return fmean(metrics[name] for metrics in steps)
