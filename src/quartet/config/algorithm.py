"""Settings of the algorithm: advantages, rewards, KL and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StrictBool, WithJsonSchema, model_validator

from quartet.config.estimators import BUILT_IN_ESTIMATORS, EstimatorSpec
from quartet.config.policy_losses import (
    BUILT_IN_POLICY_LOSSES,
    MAX_PARAMETERS,
    Aggregation,
    PolicyLossSpec,
    RatioLevel,
    policy_loss_spec,
)
from quartet.config.rollout_correction import RolloutCorrectionConfig
from quartet.config.section import (
    IMPORT_PATH,
    MAX_SETTING,
    Count,
    Finite,
    Fraction,
    NonNegative,
    ParameterName,
    Positive,
    Section,
    WholeNumber,
)


def _built_in_or_path(known: Iterable[str]) -> Callable[[str], str]:
    names = tuple(known)

    def check(value: str) -> str:
        if value not in names and not IMPORT_PATH.fullmatch(value):
            labels = ("gae (PPO)" if name == "gae" else name for name in names)
            raise ValueError(f"expected {', '.join(labels)}, or the import path of your own: package.module:callable")
        return value

    return check


def _name_schema(known: Iterable[str]) -> WithJsonSchema:
    names = list(known)
    return WithJsonSchema(
        {"type": "string", "pattern": f"^({'|'.join(names)}|{IMPORT_PATH.pattern})$", "examples": names}
    )


EstimatorName = Annotated[
    str, AfterValidator(_built_in_or_path(BUILT_IN_ESTIMATORS)), _name_schema(BUILT_IN_ESTIMATORS)
]
PolicyLossName = Annotated[
    str, AfterValidator(_built_in_or_path(BUILT_IN_POLICY_LOSSES)), _name_schema(BUILT_IN_POLICY_LOSSES)
]


class CustomEstimatorConfig(Section):
    """Needs of a custom estimator. They are declared here so that reading a config never runs the estimator's code."""

    needs_critic: bool = False
    """True if it reads values. The run then has a critic, and the function returns advantages and value targets."""
    granularity: Literal["token", "sequence"] = "sequence"
    """token: one reward and one advantage per token. sequence: one reward and one advantage per response."""
    uses_groups: bool = False
    """True if it compares the samples of one prompt."""
    divides_by_group_std: bool = False
    """True if it divides by the standard deviation of a prompt's rewards. Then algorithm.kl_loss is k3 by default."""
    normalizes_advantages: bool = False
    """Default of algorithm.normalize_advantages."""
    min_samples: Count = 1
    """Minimum number of responses: per prompt if `uses_groups` is true, else per step."""
    needs_greedy_baseline: bool = False
    """True if it reads the reward of a greedy response to each prompt. Each step then generates and scores one more response per
    prompt, which is not trained on."""


class ScoreConfig(Section):
    """Transformation of scores: normalize, then scale, then clip."""

    normalize: Literal["none", "initial", "running"] = "none"
    """Shift and scale scores to mean 0 and standard deviation 1. initial: with the moments of the first step. running: with the
    moments of all steps so far."""
    scale: Positive = 1.0
    """Factor that scores are multiplied by."""
    clip: Positive | None = None
    """Clip scores to [−clip, clip]. Null disables it."""


class TruncationConfig(Section):
    """Treatment of truncated responses, which the token limit cuts off."""

    treatment: Literal["keep", "penalty", "mask", "scale"] | None = None
    """keep: no change. penalty: subtract `penalty` from the score. mask: leave the response out of the policy loss. scale:
    multiply the score by `scale`. Null: penalty, or keep in a run with an environment or without scores."""
    penalty: NonNegative = 1.0
    """Penalty for a missing end-of-sequence token, subtracted from the score, in units of reward."""
    scale: Fraction = 0.5
    """Factor on the score for treatment scale."""


class LengthPenaltyConfig(Section):
    """Penalty for long responses, subtracted from the score."""

    per_token: NonNegative = 0.0
    """Penalty for each response token beyond `free_tokens`, in units of reward. 0 disables it."""
    free_tokens: WholeNumber = 0
    """Number of response tokens without a penalty."""


class OverlongPenaltyConfig(Section):
    """Soft overlong punishment (DAPO): a penalty that rises linearly over the last tokens before the token limit."""

    buffer_tokens: WholeNumber = 0
    """Number of tokens below rollout.max_response_tokens over which the penalty rises. 0 disables it."""
    penalty: NonNegative = 1.0
    """Penalty at the token limit, subtracted from the score, in units of reward."""


class KLControllerConfig(Section):
    """Controller of the KL coefficient."""

    kind: Literal["fixed", "adaptive", "simple"] = "fixed"
    """fixed: constant. adaptive: proportional controller with clipped error (Ziegler et al. 2019). simple: the same without the
    clip."""
    target: Positive = 6.0
    """Target KL to the reference, in nats per response."""
    horizon: Positive = 10_000.0
    """Time scale of the adaptation: responses for adaptive, steps for simple."""


class EntropyControllerConfig(Section):
    """Controller of the entropy coefficient."""

    kind: Literal["fixed", "adaptive"] = "fixed"
    """fixed: constant. adaptive: raise the coefficient while the entropy is at or below `target`, else lower it and leave the
    entropy out of the loss (Skywork-OR1)."""
    target: Positive = 0.2
    """Target entropy of the policy, in nats per token."""
    step_size: Positive = 0.005
    """Change of the coefficient after each step."""
    min_coefficient: NonNegative = 0.0
    """Minimum of the coefficient."""
    max_coefficient: Positive = 1.0
    """Maximum of the coefficient."""


class DistillationConfig(Section):
    """On-policy distillation: the reference is a teacher, whose log-probs are a reward at each of the policy's own tokens."""

    coefficient: Positive = 1.0
    """Weight of log π_teacher − log π at each token. The term is added to the advantages after their normalization."""
    discount: Fraction = 0.0
    """Discount factor of the term at later tokens of the response. 0: each token gets its own term only."""


class AlgorithmConfig(Section):
    """Advantages, KL and losses."""

    estimator: EstimatorName = "gae"
    """Advantage estimator: gae (the only one with a critic), reinforce, rloo, grpo, opo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, remax, or the import path of a custom one (package.module:callable)."""
    custom_estimator: CustomEstimatorConfig | None = None
    """Needs of the custom estimator. Required if `estimator` is an import path, else null."""
    estimator_parameters: Annotated[dict[ParameterName, StrictBool | Finite], Field(max_length=MAX_PARAMETERS)] = Field(
        default_factory=dict
    )
    """Parameters of the estimator, by name. A custom estimator takes any. grpo takes normalize_std (true), which divides by the
    standard deviation of the prompt's rewards, false is Dr. GRPO; leave_one_out (false), which takes mean and standard deviation
    from the other responses of the prompt; and std_epsilon (0.0001), which is added to the standard deviation."""
    gamma: Fraction = 1.0
    """Discount factor."""
    gae_lambda: Fraction = 0.95
    """λ of generalized advantage estimation."""
    value_lambda: Fraction | None = None
    """λ of the critic's value targets (decoupled GAE of VAPO, where it is 1). Null: gae_lambda."""
    length_adaptive_alpha: Positive | None = None
    """α of VAPO's length-adaptive λ: the advantages of a response of l tokens use 1 − 1/(α·l), at least 0, instead of gae_lambda.
    Null disables it."""
    normalize_advantages: bool | None = None
    """Shift and scale advantages to mean 0 and standard deviation 1 over the response tokens of a step. Null: the default of the
    estimator."""
    branch_credit: Literal["every", "last"] = "every"
    """Branches of an episode that get its score, if it has several. every: each of them, at its end. last: the last one only, at
    its end; an estimator with one advantage per response then leaves the others out of the policy loss. Not with estimators that
    have an advantage per token and no critic, such as remax and reinforce_plus_plus. The rewards of turns are at the ends of
    their turns in both cases. Episodes count once in baselines of groups."""
    whiten_rewards: bool = False
    """Scale token rewards to standard deviation 1 over the step, and keep their mean."""
    kl_coefficient: NonNegative = 0.05
    """β, the weight of the KL penalty: in the token rewards, or in the policy loss, see `kl_loss`."""
    kl_estimator: Literal["k1", "absolute"] = "k1"
    """KL estimate per token in the reward. k1: log π − log π_ref. absolute: its absolute value. It needs float32,
    because rounding errors bias it."""
    kl_log_probs: Literal["rollout", "trainer"] = "rollout"
    """Source of log π in the KL of rewards, metrics and records. rollout: the engine, as it sampled. trainer: the actor, with one
    more forward pass. Use it if engine and actor round differently. Evaluations always use the engine's."""
    kl_controller: KLControllerConfig = KLControllerConfig()
    """Controller of β."""
    kl_loss: Literal["none", "k2", "k3"] | None = None
    """Place of the KL penalty. none: the token rewards. k2 and k3: a term of the policy loss, with this estimator of Schulman
    (2020); loss_aggregation reduces the KL of the tokens as it does their losses. Null: k3 if the estimator divides by the
    standard deviation of a prompt's rewards (grpo with normalize_std), which would scale up the noise of the KL, else none."""
    distillation: DistillationConfig | None = None
    """On-policy distillation from reference.model, the teacher. Null disables it."""
    score: ScoreConfig = ScoreConfig()
    """Transformation of scores."""
    truncation: TruncationConfig = TruncationConfig()
    """Treatment of truncated responses."""
    length_penalty: LengthPenaltyConfig = LengthPenaltyConfig()
    """Penalty per response token."""
    overlong_penalty: OverlongPenaltyConfig = OverlongPenaltyConfig()
    """Penalty close to the token limit."""
    policy_loss: PolicyLossName = "clipped"
    """Policy loss. clipped: the clipped surrogate loss of PPO. gspo, gspo_token, cispo, sapo, gmpo, clip_cov, kl_cov, dppo_tv,
    dppo_kl: see docs/losses.md. Or the import path of a custom one (package.module:callable)."""
    policy_loss_parameters: Annotated[dict[ParameterName, Finite], Field(max_length=MAX_PARAMETERS)] = Field(
        default_factory=dict
    )
    """Parameters of the policy loss, by name. Those not given have the default of the loss. A custom loss takes any names."""
    clip_ratio: Positive | None = None
    """ε: the policy loss clips ratios to [1 − ε, 1 + clip_ratio_high]. In gmpo, dppo_tv and dppo_kl it limits log-ratios,
    probability differences and KL. Null: the default of the loss, 0.2 for clipped."""
    clip_ratio_high: Positive | None = None
    """Upper ε. Null: clip_ratio, or if that is null too, the default of the loss. In gspo, gspo_token and cispo it is larger than
    the lower one by default, so set both."""
    dual_clip: Annotated[float, Field(gt=1, le=MAX_SETTING, allow_inf_nan=False)] | None = None
    """Dual-clip PPO: for a negative advantage A the policy loss is at most −dual_clip·A. Null disables it."""
    ratio_level: RatioLevel = "token"
    """For policy_loss clipped. token: one importance ratio per token. sequence: one ratio per response, the product of the token
    ratios. For their geometric mean, the length-normalized ratio of GSPO, set policy_loss gspo."""
    loss_aggregation: Aggregation | None = None
    """Reduction of the token losses of a mini-batch. token_mean: mean over its tokens. sequence_mean: mean over its responses of
    each response's token mean. token_sum: sum over its tokens. sequence_mean_token_sum: mean over its responses of each
    response's token sum. sequence_mean_token_sum_norm: the same, divided by loss_divisor (Dr. GRPO). Null: the default of the
    loss, token_mean for clipped."""
    loss_divisor: Positive | None = None
    """Constant divisor of loss_aggregation sequence_mean_token_sum_norm. Null: rollout.max_response_tokens."""
    old_log_probs: Literal["trainer", "rollout"] = "trainer"
    """Old policy in the ratio of the policy loss. trainer: the policy at the start of the update, whose log-probs the trainer
    computes (AReaL's proximal policy and decoupled loss). rollout: the policy that sampled, with the engine's log-probs (verl's
    bypass_mode)."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Correction for the difference between engine and trainer."""
    value_clip: NonNegative = 0.2
    """Maximum distance of new values from the values at generation time in the value loss. 0 disables it."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy in the policy loss. loss_aggregation reduces the entropies of the tokens as it does their losses.
    With an adaptive controller, its initial value."""
    entropy_controller: EntropyControllerConfig = EntropyControllerConfig()
    """Controller of the entropy coefficient."""
    num_epochs: Annotated[int, Field(ge=1, le=1000)] = 4
    """Number of passes over the experience of a step."""
    num_mini_batches: Count = 1
    """Number of optimizer steps per pass."""
    target_kl: Positive | None = None
    """Early stopping: the policy update of a step ends when KL(old ‖ new) exceeds this, in nats per token. Null disables it."""
    value_pretraining_steps: WholeNumber = 0
    """Number of first steps that update only the critic, with the returns of the responses as value targets (λ 1). The actor's
    warm-up and schedule begin after them and end at run.steps. A fork counts from the original run's first step."""
    non_finite: Literal["stop", "skip"] = "stop"
    """Reaction to a NaN or infinite loss or gradient, which never reaches the weights. stop: end the run. skip: skip the
    optimizer step."""

    @model_validator(mode="after")
    def _check_custom_estimator(self) -> AlgorithmConfig:
        is_custom = self.estimator not in BUILT_IN_ESTIMATORS
        if is_custom and self.custom_estimator is None:
            raise ValueError(
                f"estimator {self.estimator}: declare what it needs under custom_estimator (needs_critic, granularity, "
                "uses_groups, divides_by_group_std, normalizes_advantages, min_samples, needs_greedy_baseline; {} for the "
                "defaults)"
            )
        if not is_custom and self.custom_estimator is not None:
            raise ValueError(f"custom_estimator: estimator {self.estimator} is built in; leave it out")
        return self

    @model_validator(mode="after")
    def _check_branch_credit(self) -> AlgorithmConfig:
        spec = self.estimator_spec
        if self.branch_credit == "last" and spec.granularity == "token" and not spec.needs_critic:
            raise ValueError(
                f"branch_credit last: estimator {self.estimator} has an advantage per token and no critic, so it would compare "
                "tokens of branches without the score with those that have it; leave branch_credit at every, or use an estimator "
                "with one advantage per response, such as rloo or grpo, or with a critic, such as gae"
            )
        return self

    @model_validator(mode="after")
    def _place_kl(self) -> AlgorithmConfig:
        # The resolved value is shown and stored, so that a run says where its KL is.
        if self.kl_loss is None:
            # Not setattr, which would add it to the given keys.
            self.__dict__["kl_loss"] = self.default_kl_loss
        return self

    @model_validator(mode="after")
    def _check_policy_loss(self) -> AlgorithmConfig:
        spec, name = self.policy_loss_spec, f"policy loss {self.policy_loss}"
        if self.policy_loss in BUILT_IN_POLICY_LOSSES:
            spec.resolve(self.policy_loss_parameters)
        if spec.clip_low is None and (self.clip_ratio is not None or self.clip_ratio_high is not None):
            raise ValueError(f"clip_ratio: {name} does not clip ratios; leave clip_ratio and clip_ratio_high null")
        if self.dual_clip is not None and not spec.reads_dual_clip:
            raise ValueError(f"dual_clip: {name} has no dual clip; leave it null")
        if self.ratio_level != "token" and not spec.reads_ratio_level:
            raise ValueError(f"ratio_level {self.ratio_level}: {name} has its own ratio; leave ratio_level at token")
        if self.loss_divisor is not None and self.aggregation != "sequence_mean_token_sum_norm":
            raise ValueError(
                f"loss_divisor: loss_aggregation {self.aggregation} has no constant divisor; set loss_aggregation "
                "sequence_mean_token_sum_norm, or leave loss_divisor null"
            )
        return self

    @property
    def policy_loss_spec(self) -> PolicyLossSpec:
        """Return the needs and defaults of the policy loss, and the import path of its function."""
        return policy_loss_spec(self.policy_loss)

    @property
    def loss_parameters(self) -> dict[str, float]:
        """Return all parameters of the policy loss: policy_loss_parameters, and the defaults of the others."""
        given = self.policy_loss_parameters
        return self.policy_loss_spec.resolve(given) if self.policy_loss in BUILT_IN_POLICY_LOSSES else dict(given)

    @property
    def clip_range(self) -> tuple[float, float]:
        """Return the lower and the upper ε of the policy loss. Both are 0 if it has none."""
        spec, low, high = self.policy_loss_spec, self.clip_ratio, self.clip_ratio_high
        default_high = spec.clip_high if low is None else low
        return (spec.clip_low if low is None else low) or 0.0, (default_high if high is None else high) or 0.0

    @property
    def aggregation(self) -> Aggregation:
        """Return loss_aggregation, or else the default of the policy loss."""
        return self.loss_aggregation or self.policy_loss_spec.aggregation

    @property
    def response_ratio(self) -> str:
        """Return the setting that gives a response one ratio, which needs one advantage per response; "" if there is none."""
        if self.policy_loss_spec.one_advantage_per_response:
            return f"policy_loss {self.policy_loss}"
        return f"ratio_level {self.ratio_level}" if self.ratio_level == "sequence" else ""

    @model_validator(mode="after")
    def _check_estimator_parameters(self) -> AlgorithmConfig:
        if self.estimator not in BUILT_IN_ESTIMATORS:
            return self
        known = BUILT_IN_ESTIMATORS[self.estimator].parameters
        for name, value in self.estimator_parameters.items():
            where = f"estimator_parameters.{name}"
            if name not in known:
                expected = f"expected {', '.join(known)}" if known else "it has no parameters"
                raise ValueError(f"{where}: estimator {self.estimator} has no such parameter; {expected}")
            if isinstance(known[name], bool) != isinstance(value, bool):
                raise ValueError(
                    f"{where}: expected {'true or false' if isinstance(known[name], bool) else 'a number'}"
                )
            if not isinstance(value, bool) and value <= 0:
                raise ValueError(f"{where} {value:g}: expected more than 0")
        return self

    @property
    def estimator_spec(self) -> EstimatorSpec:
        """Return the needs and the parameters of the estimator, and the import path of its function."""
        given = self.estimator_parameters
        if self.custom_estimator is None:
            spec = BUILT_IN_ESTIMATORS[self.estimator]
            return replace(spec, parameters={**spec.parameters, **given})
        return EstimatorSpec(self.estimator, self.estimator, **self.custom_estimator.model_dump(), parameters=given)

    @property
    def divides_by_group_std(self) -> bool:
        """Return whether the estimator divides by the standard deviation of a prompt's rewards."""
        spec = self.estimator_spec
        return spec.divides_by_group_std and spec.parameters.get("normalize_std", True) is True

    @property
    def default_kl_loss(self) -> Literal["none", "k3"]:
        """Return the value of kl_loss if it is null."""
        return "k3" if self.divides_by_group_std else "none"

    @property
    def has_kl_loss(self) -> bool:
        """Return whether the KL penalty is a term of the policy loss, and not part of the rewards."""
        return self.kl_loss != "none"

    @property
    def has_critic(self) -> bool:
        """Return whether the estimator needs values."""
        return self.estimator_spec.needs_critic

    def pretrains_values(self, step: int) -> bool:
        """Return whether ``step``, counted from 1, updates only the critic."""
        return step <= self.value_pretraining_steps

    @property
    def normalizes_advantages(self) -> bool:
        """Return whether advantages are normalized, by normalize_advantages or else by the default of the estimator."""
        chosen = self.normalize_advantages
        return self.estimator_spec.normalizes_advantages if chosen is None else chosen

    @property
    def trains_entropy(self) -> bool:
        """Return whether the entropy may be part of the policy loss in any step."""
        return self.entropy_coefficient > 0 or self.entropy_controller.kind == "adaptive"
