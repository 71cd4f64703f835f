"""The algorithm's settings: advantages, KL, what becomes of scores, losses, and how responses are generated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from quartet.config.section import Count, Finite, Fraction, NonNegative, Positive, Section, WholeNumber

MAX_RESPONSES = 65_536
"""Most responses of one step."""
Responses = Annotated[int, Field(ge=1, le=MAX_RESPONSES)]

Estimator = Literal["gae", "reinforce", "rloo", "grpo", "reinforce_plus_plus"]
WITH_CRITIC: frozenset[str] = frozenset({"gae"})
"""Estimators that need values."""
BY_TOKEN: frozenset[str] = frozenset({"gae", "reinforce_plus_plus"})
"""Estimators that see a reward at every token; the others see one number a response."""
BY_GROUP: frozenset[str] = frozenset({"rloo", "grpo"})
"""Estimators that compare the samples of one prompt."""
NORMALIZED: frozenset[str] = frozenset({"gae", "reinforce_plus_plus"})
"""Estimators whose advantages are normalised unless told otherwise."""


class ScoreConfig(Section):
    """What is done to a score before anything else: normalised, scaled, clipped, in this order."""

    normalize: Literal["none", "initial", "running"] = "none"
    """Shift and scale scores to mean 0, standard deviation 1: initial, by the first step's; running, by all so far."""
    scale: Positive = 1.0
    """Factor on the score."""
    clip: Positive | None = None
    """Scores are cut to [−clip, clip]; null is off."""


class TruncationConfig(Section):
    """What becomes of responses that the token limit cut off."""

    treatment: Literal["keep", "penalty", "mask", "scale"] = "keep"
    """keep: as scored; penalty: subtract `penalty`; mask: out of the policy loss; scale: multiply the score by `scale`."""
    penalty: NonNegative = 1.0
    """Missing-EOS penalty, subtracted from the score, in units of reward."""
    scale: Fraction = 0.5
    """Factor on the score."""


class LengthPenaltyConfig(Section):
    """A price on long responses, subtracted from the score."""

    per_token: NonNegative = 0.0
    """Units of reward for each response token beyond `free_tokens`; 0 is off."""
    free_tokens: WholeNumber = 0
    """Tokens that cost nothing."""


class OverlongPenaltyConfig(Section):
    """Soft overlong punishment (DAPO): it rises linearly over the last tokens below the limit."""

    buffer_tokens: WholeNumber = 0
    """The last so many tokens below rollout.max_response_tokens; 0 is off."""
    penalty: NonNegative = 1.0
    """Subtracted from the score at the limit, in units of reward."""


class KLControllerConfig(Section):
    """How the KL coefficient moves."""

    kind: Literal["fixed", "adaptive", "simple"] = "fixed"
    """fixed; adaptive (Ziegler et al., clipped); simple (the same without the clip)."""
    target: Positive = 6.0
    """Wanted KL to the reference, nats per response."""
    horizon: Positive = 10_000.0
    """adaptive: responses over which the coefficient adapts; simple: steps."""


class AlgorithmConfig(Section):
    """Advantages, KL and losses."""

    estimator: Estimator = "gae"
    """How advantages are estimated; only gae has a critic."""
    grpo_normalize_std: bool = True
    """grpo: divide by the standard deviation of the prompt's samples; false is Dr. GRPO."""
    gamma: Fraction = 1.0
    """Discount factor."""
    gae_lambda: Fraction = 0.95
    """λ of generalized advantage estimation."""
    normalize_advantages: bool | None = None
    """Shift and scale advantages to mean 0, standard deviation 1 over the step's response tokens; null: as the estimator does."""
    whiten_rewards: bool = False
    """Scale token rewards to standard deviation 1 over the step, keeping their mean."""
    kl_coefficient: NonNegative = 0.05
    """β: weight of the KL penalty in the token rewards."""
    kl_estimator: Literal["k1", "absolute"] = "k1"
    """KL of one token in the reward: log π − log π_ref, or its absolute value."""
    kl_controller: KLControllerConfig = KLControllerConfig()
    """How β moves."""
    kl_loss: Literal["none", "k2", "k3"] = "none"
    """KL term in the policy loss."""
    kl_loss_coefficient: NonNegative = 0.0
    """Its weight."""
    score: ScoreConfig = ScoreConfig()
    """Normalisation, scale and clip of scores."""
    truncation: TruncationConfig = TruncationConfig()
    """What becomes of truncated responses."""
    length_penalty: LengthPenaltyConfig = LengthPenaltyConfig()
    """A price per token."""
    overlong_penalty: OverlongPenaltyConfig = OverlongPenaltyConfig()
    """A price near the limit."""
    clip_ratio: Positive = 0.2
    """ε: ratios count within [1 − ε, 1 + clip_ratio_high]."""
    clip_ratio_high: Positive | None = None
    """Upper ε; null is clip_ratio."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """With negative advantage A the policy loss is at most −dual_clip·A; null is off."""
    ratio_level: Literal["token", "sequence"] = "token"
    """token: each token has its own ratio; sequence: one ratio a response, of the products of its tokens' probabilities."""
    loss_aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """token_mean: every token of a mini-batch weighs the same; sequence_mean: every response does."""
    importance_sampling_cap: Positive | None = 2.0
    """Truncated importance sampling: tokens weigh min(π_trainer/π_engine, cap) in the policy loss; null is off."""
    value_clip: NonNegative = 0.2
    """Values count within this distance of those at generation; 0 is off."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy in the policy loss."""
    num_epochs: Annotated[int, Field(ge=1, le=1000)] = 4
    """Passes over a step's experience."""
    num_mini_batches: Count = 1
    """Optimizer steps per pass."""
    target_kl: Positive | None = None
    """A step's policy update ends early when KL(old ‖ new), nats per token, exceeds this; null is off."""
    critic_warmup_steps: WholeNumber = 0
    """Steps at the start in which the critic learns and the policy does not."""
    non_finite: Literal["stop", "skip"] = "stop"
    """A NaN or infinite loss or gradient: stop the run, or skip the optimizer step; it never reaches the weights."""

    @property
    def has_critic(self) -> bool:
        """Whether values are needed."""
        return self.estimator in WITH_CRITIC

    @property
    def normalizes_advantages(self) -> bool:
        """Whether advantages are normalised, the estimator's custom included."""
        chosen = self.normalize_advantages
        return self.estimator in NORMALIZED if chosen is None else chosen


def _triton_url(value: str) -> str:
    scheme, separator, address = value.partition("://")
    host, _, port = address.rpartition(":")
    if (
        scheme not in ("grpc", "grpcs")
        or not separator
        or not host
        or set("/@?") & set(address)
        or not port.isdecimal()
        or not 0 < int(port) < 65536
    ):
        raise ValueError(
            "expected grpc://HOST:PORT, or grpcs://HOST:PORT for TLS; PORT, from 1 to 65535, is that of Triton's gRPC, often 8001"
        )
    return value


class TritonConfig(Section):
    """A Triton Inference Server that generates, with the tensors of the TensorRT-LLM backend; needs quartet-rlhf[triton]."""

    url: Annotated[str, AfterValidator(_triton_url)]
    """grpc://HOST:PORT, or grpcs://HOST:PORT for TLS, without which only a loopback address is taken."""
    model: str = "tensorrt_llm"
    """Name of the model on the server."""
    weights: Literal["lora", "static"] = "lora"
    """lora: each policy version's adapter is sent along; static: the server's weights stay, and importance sampling corrects."""
    timeout_seconds: Positive = 60.0
    """Seconds for which the server may say nothing while it owes an answer."""
    certificate_authority_file: Path | None = None
    """PEM file of who signed the server's certificate; null: as security.certificates says, or the system's authorities."""

    @property
    def encrypted(self) -> bool:
        """Whether it is TLS."""
        return self.url.startswith("grpcs://")

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self.url.partition("://")[2]


class TensorRTLLMConfig(Section):
    """TensorRT-LLM in the actor's process, beside the model that learns."""

    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """Part of the GPU's free memory that its key-value cache takes."""
    release_memory: bool = True
    """Shut it down while the policy learns, and load it anew for the next step. Without actor.lora that is done in any case."""


class RolloutConfig(Section):
    """How responses are generated."""

    prompts_per_step: Responses = 64
    """Prompts of one step."""
    samples_per_prompt: Responses = 1
    """Responses for each prompt."""
    max_response_tokens: Count = 64
    """Token limit of a response."""
    temperature: Annotated[float, Field(ge=0.001, le=1000)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: WholeNumber = 0
    """Keep this many tokens; 0 is off."""
    engine: Literal["torch", "triton", "tensorrt-llm"] = "torch"
    """What generates: torch, in the actor; triton, a server at `triton`; tensorrt-llm, in the actor's process."""
    triton: TritonConfig | None = None
    """The server of engine triton."""
    tensorrt_llm: TensorRTLLMConfig | None = None
    """Settings of engine tensorrt-llm; null: their defaults."""
    max_concurrent_sequences: Responses = 256
    """Sequences decoded at once."""
    max_off_policy_steps: Annotated[int, Field(ge=0, le=1)] = 0
    """Updates that the policy which generates may be behind: 1 generates each step while the one before is learned from."""
    score_batch_size: Count = 16
    """Finished responses are scored in batches of this many, in the order in which they finish."""


class GuardConfig(Section):
    """One rule over the metrics."""

    action: Literal["off", "warn", "pause", "stop"] = "warn"
    """off; warn: say so and go on; pause: wait for `quartet resume` or `quartet stop`; stop: end the run, its policy saved."""


class RewardHackingGuardConfig(GuardConfig):
    """Reward, KL and length rise together, within the window or since the run's first steps."""

    min_reward_rise: NonNegative = 0.25
    """At least this rise of the reward, in standard deviations between responses."""
    min_kl_rise: NonNegative = 0.25
    """At least this relative rise of the KL."""
    min_length_rise: NonNegative = 0.2
    """At least this relative rise of the response length, from the first to the second half of the window."""
    min_length_rise_since_start: NonNegative = 0.5
    """Or at least this one since the run's first steps."""
    min_kl: NonNegative = 1.0
    """And a KL above this, nats per response: at a run's start it always rises."""


class EntropyGuardConfig(GuardConfig):
    """The policy has settled on a few responses."""

    below: NonNegative = 0.2
    """Entropy below this part of the first steps' entropy."""


class KLGuardConfig(GuardConfig):
    """The policy has left the reference."""

    above: NonNegative = 50.0
    """KL to the reference above this, nats per response."""


class MismatchGuardConfig(GuardConfig):
    """The engine samples from another distribution than the trainer updates."""

    above: NonNegative = 0.05
    """KL between engine and trainer above this, nats per token."""


class RepetitionGuardConfig(GuardConfig):
    """Responses repeat themselves."""

    above: Fraction = 0.5
    """Share of repeated 3-grams above this."""


class MissingEosGuardConfig(GuardConfig):
    """Responses do not end."""

    below: Fraction = 0.2
    """Share of finished responses below this."""


class LengthRewardGuardConfig(GuardConfig):
    """Long responses are paid for being long."""

    above: Fraction = 0.8
    """Correlation of length and score within a step above this."""


class CriticGuardConfig(GuardConfig):
    """The critic is worse than a constant."""

    below: Finite = -0.5
    """Explained variance below this."""


class GuardsConfig(Section):
    """Rules that watch the metrics and warn, pause or stop, each with its evidence and the usual remedy."""

    window_steps: Annotated[int, Field(ge=2, le=10_000)] = 20
    """Steps over which the rules look; bounds are held against means over its second half."""
    not_finite: GuardConfig = GuardConfig()
    """An optimizer step was skipped because of a NaN or an infinity (algorithm.non_finite skip)."""
    reward_hacking: RewardHackingGuardConfig = RewardHackingGuardConfig()
    """Reward, KL and length rise together."""
    entropy_collapse: EntropyGuardConfig = EntropyGuardConfig()
    """Entropy."""
    kl_runaway: KLGuardConfig = KLGuardConfig()
    """KL to the reference."""
    mismatch: MismatchGuardConfig = MismatchGuardConfig()
    """KL between engine and trainer."""
    repetition: RepetitionGuardConfig = RepetitionGuardConfig()
    """Repeated 3-grams."""
    missing_eos: MissingEosGuardConfig = MissingEosGuardConfig()
    """Share of finished responses."""
    length_reward: LengthRewardGuardConfig = LengthRewardGuardConfig()
    """Correlation of length and score."""
    critic_lost: CriticGuardConfig = CriticGuardConfig()
    """Explained variance."""
