"""Rules over the metrics of a run: each names what it saw and what usually helps, and says whether to go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from quartet.config import GuardConfig, GuardsConfig
from quartet.ppo.statistics import slope
from quartet.types import Alert

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Bound:
    """A metric held against a bound, on average over half a window."""

    metric: str
    unit: str
    remedy: str


BOUNDS = {
    "kl_runaway": Bound(
        "kl_mean",
        "nats per response",
        "the policy has left the reference: lower actor.learning_rate, raise algorithm.kl_coefficient, "
        "or let kl_controller steer it",
    ),
    "mismatch": Bound(
        "rollout_mismatch_kl",
        "nats per token",
        "engine and trainer disagree: use float32 or bfloat16 rather than float16 (actor.dtype), "
        "or lower algorithm.importance_sampling_cap",
    ),
    "repetition": Bound(
        "repetition",
        "of the 3-grams",
        "responses repeat themselves: raise algorithm.kl_coefficient, add an entropy_coefficient, and look at what the reward pays for",
    ),
    "missing_eos": Bound(
        "eos_rate",
        "of the responses",
        "responses do not end: set algorithm.truncation.treatment penalty, or raise rollout.max_response_tokens",
    ),
    "length_reward": Bound(
        "length_reward_correlation",
        "Pearson",
        "the reward pays for length: mend the reward, or set algorithm.length_penalty.per_token",
    ),
    "critic_lost": Bound(
        "explained_variance",
        "explained variance",
        "the critic is worse than a constant: raise critic.learning_rate, set algorithm.critic_warmup_steps, "
        "or start it from the reward model",
    ),
}


BEGINNING = 2
"""First steps of a run that later ones are held against: a jump comes soon after."""


class Guards:
    """Looks at every step's metrics. A rule that still holds is silent for a window after it has spoken."""

    def __init__(self, config: GuardsConfig) -> None:
        self._config = config
        self._half = config.window_steps // 2
        self._recent: deque[Metrics] = deque(maxlen=2 * self._half)
        self._first: list[Metrics] = []
        self._spoke_at: dict[str, int] = {}

    def entropy_slope(self, entropy: float) -> float:
        """Nats per token and step by which the entropy moves, over the window that ends with this step's ``entropy``."""
        seen = [metrics["entropy"] for metrics in self._recent if "entropy" in metrics]
        return slope([*seen, entropy][-2 * self._half :])

    def look(self, metrics: Metrics) -> list[Alert]:
        """What is wrong after the step of these metrics."""
        self._recent.append(metrics)
        if len(self._first) < self._half:
            self._first.append(metrics)
        step = int(metrics["step"])
        found = []
        for name, evidence, remedy in self._findings():
            rule: GuardConfig = getattr(self._config, name)
            spoke = self._spoke_at.get(name)
            if rule.action == "off" or (spoke is not None and step - spoke < self._config.window_steps):
                continue
            self._spoke_at[name] = step
            found.append(Alert(step, name, rule.action, evidence, remedy))
        return found

    def _findings(self) -> Iterator[tuple[str, str, str]]:
        """Name, evidence and remedy of every rule that holds."""
        yield from self._not_finite()
        yield from self._reward_hacking()
        yield from self._entropy_collapse()
        for name, bound in BOUNDS.items():
            yield from self._beyond(name, bound)

    def _not_finite(self) -> Iterator[tuple[str, str, str]]:
        now = self._recent[-1]
        skipped = int(now.get("skipped_steps_actor", 0) + now.get("skipped_steps_critic", 0))
        if skipped:
            yield (
                "not_finite",
                f"{skipped} optimizer steps of step {int(now['step'])} had a NaN or infinite loss or gradient and were skipped",
                "lower the learning rate, look for outliers among the scores (algorithm.score.clip), or use float32",
            )

    def _reward_hacking(self) -> Iterator[tuple[str, str, str]]:
        """Looks for a spike within the window, and for a creep or an early jump since the run's first steps."""
        if len(self._recent) < 2 * self._half:
            return
        rule, (before, after) = self._config.reward_hacking, self._halves()
        since_start = self._first[:BEGINNING]
        for part, length_rise, when in (
            (before, rule.min_length_rise, f"within {2 * self._half} steps"),
            (since_start, rule.min_length_rise_since_start, "since the first steps"),
        ):
            reward = [_mean(steps, "reward_mean") for steps in (part, after)]
            kl = [_mean(steps, "kl_mean") for steps in (part, after)]
            length = [_mean(steps, "response_tokens_mean") for steps in (part, after)]
            if (
                reward[1] - reward[0] >= rule.min_reward_rise * _mean(part, "reward_std")
                and kl[1] >= (1 + rule.min_kl_rise) * kl[0]
                and length[1] >= (1 + length_rise) * length[0]
                and kl[1] > rule.min_kl
                and reward[1] > reward[0]
            ):
                yield (
                    "reward_hacking",
                    f"{when} reward rose from {reward[0]:.2f} to {reward[1]:.2f}, KL from {kl[0]:.1f} to {kl[1]:.1f} nats, and "
                    f"response length from {length[0]:.1f} to {length[1]:.1f} tokens",
                    "the reward may be exploited through length: read the longest responses, mend the reward or set "
                    "algorithm.length_penalty, and raise algorithm.kl_coefficient",
                )
                return

    def _entropy_collapse(self) -> Iterator[tuple[str, str, str]]:
        seen = [[metrics for metrics in part if "entropy" in metrics] for part in (self._first, self._halves()[1])]
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

    def _beyond(self, name: str, bound: Bound) -> Iterator[tuple[str, str, str]]:
        seen = [metrics for metrics in self._halves()[1] if bound.metric in metrics]
        if len(self._recent) < 2 * self._half or not seen:
            return
        rule, found = getattr(self._config, name), _mean(seen, bound.metric)
        above: float | None = getattr(rule, "above", None)
        beyond = found > above if above is not None else found < rule.below
        if beyond:
            limit = f"above {above:g}" if above is not None else f"below {rule.below:g}"
            yield (
                name,
                f"{bound.metric} {found:.3g} {bound.unit} over the last {self._half} steps, {limit}",
                bound.remedy,
            )

    def _halves(self) -> tuple[list[Metrics], list[Metrics]]:
        recent = list(self._recent)
        return recent[: self._half], recent[self._half :]


def _mean(steps: Sequence[Metrics], name: str) -> float:
    return fmean(metrics[name] for metrics in steps)
