"""Settings of guards: rules that watch the metrics of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quartet.config.section import Finite, Fraction, NonNegative, Section


class GuardConfig(Section):
    """One rule over the metrics."""

    action: Literal["off", "warn", "pause", "stop"] = "warn"
    """Action when the rule fires. warn: record an alert and continue. pause: wait for `quartet resume` or `quartet stop`.
    stop: save the policy and end the run. off: disable the rule."""


class RewardHackingGuardConfig(GuardConfig):
    """Reward hacking: reward, KL and response length rise together, within the window or since the first steps of the run."""

    min_reward_rise: NonNegative = 0.25
    """Minimum rise of the reward, in standard deviations between responses."""
    min_kl_rise: NonNegative = 0.25
    """Minimum relative rise of the KL. 0.25 is 25%."""
    min_length_rise: NonNegative = 0.2
    """Minimum relative rise of the response length from the first to the second half of the window."""
    min_length_rise_since_start: NonNegative = 0.5
    """Minimum relative rise of the response length since the first steps. Reaching either length threshold is enough."""
    min_kl: NonNegative = 1.0
    """Minimum KL in nats per response. Below it the rule does not fire, because KL always rises when a run starts."""


class EntropyGuardConfig(GuardConfig):
    """Entropy collapse: the policy produces only a few responses."""

    below: NonNegative = 0.2
    """Fires if the entropy falls below this fraction of the entropy in the first steps."""


class KLGuardConfig(GuardConfig):
    """KL runaway: the policy has moved far from the reference."""

    above: NonNegative = 50.0
    """Fires if the KL to the reference exceeds this, in nats per response."""


class MismatchGuardConfig(GuardConfig):
    """Rollout mismatch: the engine samples from another distribution than the trainer computes."""

    above: NonNegative = 0.05
    """Fires if the KL between engine and trainer exceeds this, in nats per token."""


class RepetitionGuardConfig(GuardConfig):
    """Repetition within responses."""

    above: Fraction = 0.5
    """Fires if the fraction of repeated 3-grams exceeds this."""


class MissingEosGuardConfig(GuardConfig):
    """Responses that the token limit cuts off."""

    below: Fraction = 0.2
    """Fires if the fraction of responses that end by themselves falls below this."""
    min_fall: Fraction = 0.1
    """Fires if this fraction has fallen by so much since the first steps, because the policy learns not to end its responses. 1
    disables it."""


class LengthRewardGuardConfig(GuardConfig):
    """Length bias: the reward favours long responses."""

    above: Fraction = 0.8
    """Fires if the correlation of length and score within a step exceeds this."""


class CriticGuardConfig(GuardConfig):
    """A critic that predicts returns worse than a constant does."""

    below: Finite = -0.5
    """Fires if the explained variance falls below this."""


class GuardsConfig(Section):
    """Rules that watch the metrics. Each alert names the evidence and a usual remedy."""

    window_steps: Annotated[int, Field(ge=2, le=10_000)] = 20
    """Number of latest steps that the rules examine. Thresholds are compared with means over the second half of this window."""
    not_finite: GuardConfig = GuardConfig()
    """Fires if an optimizer step was skipped because of a NaN or infinity, see algorithm.non_finite."""
    weights_changed: GuardConfig = GuardConfig()
    """Fires if an engine's weights changed after they were loaded, see docs/engines.md. Its trajectories are discarded in any
    case."""
    reward_hacking: RewardHackingGuardConfig = RewardHackingGuardConfig()
    """Reward, KL and length rise together."""
    entropy_collapse: EntropyGuardConfig = EntropyGuardConfig()
    """Entropy collapse."""
    kl_runaway: KLGuardConfig = KLGuardConfig()
    """KL to the reference."""
    mismatch: MismatchGuardConfig = MismatchGuardConfig()
    """KL between engine and trainer."""
    repetition: RepetitionGuardConfig = RepetitionGuardConfig()
    """Repeated 3-grams."""
    missing_eos: MissingEosGuardConfig = MissingEosGuardConfig()
    """Fraction of responses that end by themselves."""
    length_reward: LengthRewardGuardConfig = LengthRewardGuardConfig()
    """Correlation of length and score."""
    critic_lost: CriticGuardConfig = CriticGuardConfig()
    """Explained variance of the critic."""
