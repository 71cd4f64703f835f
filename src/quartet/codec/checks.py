"""Limits of the records in messages. A check gets each record that is read, and the path before its fields."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from quartet.config.policy_losses import MAX_PARAMETERS
from quartet.config.rollout import (
    MAX_ADDITIVE_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STRUCTURED_OUTPUT,
    MAX_TURNS,
    check_stop_strings,
)
from quartet.config.section import MAX_PARAMETER_NAME, MAX_SETTING
from quartet.contract.generation import (
    EpisodeSettings,
    GenerationBatch,
    Penalties,
    SamplingParameters,
    StructuredOutput,
)
from quartet.contract.trajectory import FinishReason, Outcome, Segment, SegmentRole, Trajectory
from quartet.contract.update import (
    OptimizationSettings,
    PolicyLossSettings,
    RejectionRule,
    RolloutCorrection,
    ValueLossSettings,
)
from quartet.contract.weights import PublishedWeights, ReferenceVersion, WeightTransfer
from quartet.errors import InvalidRequest
from quartet.weight_transfer.messages import MAX_WAIT_SECONDS, WeightsRequest
from quartet.weight_transfer.tensors import DIGEST_BYTES, AdapterSettings

MAX_EPOCHS = 1000
"""Maximum passes over one step's experience in a request. An update cannot be interrupted, so its length needs a limit."""
MAX_RESPONSE_TOKENS = 1_048_576
"""Maximum response tokens in a request."""
MAX_BRANCHES = 4096
"""Maximum number of branches of a trajectory."""
MAX_MACHINE = 200
"""Maximum length of the name of a machine."""
MAX_TARGET_MODULES = 4096
"""Maximum number of modules with an adapter."""


def within(record: Any, at: str, low: float, high: float, *names: str) -> None:
    """Raise InvalidRequest unless these fields are in ``low``..``high``."""
    for name in names:
        value = getattr(record, name)
        if not low <= value <= high:
            raise InvalidRequest(
                f"{at}{name} {value}: expected {low} to {high if isinstance(high, int) else f'{high:g}'}"
            )


def more_than_0(record: Any, at: str, high: float, *names: str) -> None:
    """Raise InvalidRequest unless these fields are more than 0 and at most ``high``."""
    for name in names:
        value = getattr(record, name)
        if not 0 < value <= high:
            raise InvalidRequest(f"{at}{name} {value}: expected more than 0 and at most {high:g}")


def checked_temperature(request: Any) -> float:
    """Return the temperature of a request for log-probs. Raises InvalidRequest."""
    more_than_0(request, "", MAX_SETTING, "temperature")
    return float(request.temperature)


def check_digest(digest: bytes, name: str, required: bool = False, size: int = DIGEST_BYTES) -> None:
    """Raise InvalidRequest unless a digest has ``size`` bytes. It may be empty unless it is ``required``."""
    if len(digest) != size and (digest or required):
        raise InvalidRequest(f"{name}: expected {size} bytes, got {len(digest)}")


def _sampling(sampling: SamplingParameters, at: str) -> None:
    within(sampling, at, 1, MAX_RESPONSE_TOKENS, "max_response_tokens")
    within(sampling, at, 0, MAX_SETTING, "temperature")
    more_than_0(sampling, at, 1, "top_p")
    within(sampling, at, 0, 1, "min_p")
    try:
        check_stop_strings(sampling.stop_strings)
    except ValueError as error:
        raise InvalidRequest(f"{at}stop_strings: {error}") from None


def _penalties(penalties: Penalties, at: str) -> None:
    more_than_0(penalties, at, MAX_REPETITION_PENALTY, "repetition")
    within(penalties, at, -MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY, "presence", "frequency")


def _structured_output(output: StructuredOutput, at: str) -> None:
    if not 1 <= len(output.value) <= MAX_STRUCTURED_OUTPUT:
        raise InvalidRequest(f"{at}value: has {len(output.value)} characters; expected 1 to {MAX_STRUCTURED_OUTPUT}")


def _optimization(settings: OptimizationSettings, at: str) -> None:
    within(settings, at, 1, 2**32 - 1, "num_mini_batches")
    within(settings, at, 0, MAX_EPOCHS, "num_epochs")
    within(settings, at, 0, MAX_SETTING, "learning_rate", "max_grad_norm")


def _policy_loss(loss: PolicyLossSettings, at: str) -> None:
    more_than_0(loss, at, MAX_SETTING, "temperature")
    coefficients = ("entropy_coefficient", "kl_loss_coefficient", "target_kl", "loss_divisor")
    within(loss, at, 0, MAX_SETTING, "clip_low", "clip_high", "dual_clip", *coefficients)
    if 0 < loss.dual_clip <= 1:
        raise InvalidRequest(f"{at}dual_clip {loss.dual_clip}: expected 0 (off) or more than 1")
    if not loss.policy_loss:
        raise InvalidRequest(f"{at}policy_loss: empty, expected the name or import path of a policy loss")
    if loss.aggregation == "sequence_mean_token_sum_norm" and loss.loss_divisor == 0:
        raise InvalidRequest(f"{at}loss_divisor 0: expected more than 0 with aggregation {loss.aggregation}")
    if loss.old_log_probs == "rollout" and loss.rollout_correction.level != "none":
        raise InvalidRequest(
            f"{at}old_log_probs rollout: the ratio compares with the engine; expected rollout_correction.level none"
        )
    if len(loss.parameters) > MAX_PARAMETERS:
        raise InvalidRequest(f"{at}parameters: {len(loss.parameters)}, expected at most {MAX_PARAMETERS}")
    for name, value in loss.parameters.items():
        if not math.isfinite(value):
            raise InvalidRequest(f"{at}parameters {name[:MAX_PARAMETER_NAME]} {value}: expected a finite number")
        if not 0 < len(name) <= MAX_PARAMETER_NAME:
            raise InvalidRequest(
                f"{at}parameters: a name of {len(name)} characters, expected 1 to {MAX_PARAMETER_NAME}"
            )


def _rollout_correction(correction: RolloutCorrection, at: str) -> None:
    within(correction, at, 0, MAX_SETTING, "lower", "upper", "off_policy_mask")
    if correction.treatment == "seq_mask" and correction.level != "token":
        raise InvalidRequest(f"{at}treatment seq_mask: expected level token, not {correction.level}")
    if correction.upper and correction.lower > correction.upper:
        raise InvalidRequest(f"{at}lower {correction.lower}: expected at most upper {correction.upper}")
    if len({rule.statistic for rule in correction.rejection}) < len(correction.rejection):
        raise InvalidRequest(f"{at}rejection: a statistic is there twice, expected each once")


def _rejection_rule(rule: RejectionRule, at: str) -> None:
    within(rule, at, 0, MAX_SETTING, "lower")
    more_than_0(rule, at, MAX_SETTING, "upper")
    if not rule.statistic.endswith("k1"):
        if rule.lower:
            raise InvalidRequest(f"{at}lower {rule.lower}: {rule.statistic} has an upper bound only")
    elif (rule.lower or 1 / rule.upper) > rule.upper:
        raise InvalidRequest(f"{at}upper {rule.upper}: expected at least lower, or 1 if lower is 0")


def _episode(episode: EpisodeSettings, at: str) -> None:
    within(episode, at, 1, MAX_TURNS, "max_turns")
    within(episode, at, 0, MAX_RESPONSE_TOKENS, "max_turn_tokens")


def _segment(segment: Segment, at: str) -> None:
    if not len(segment.token_ids):
        raise InvalidRequest(f"{at}token_ids: expected at least one token")
    if segment.role is not SegmentRole.POLICY and len(segment.log_probs):
        raise InvalidRequest(f"{at}log_probs: expected none for the role {segment.role}")


def _trajectory(trajectory: Trajectory, at: str) -> None:
    """In each branch, the prompt comes first, and only there, and a turn comes last."""
    outcome, reason, turns = trajectory.outcome, trajectory.finish_reason, trajectory.turns
    if not trajectory.id.run:
        raise InvalidRequest(f"{at}id.run: empty, expected the name of the run")
    if (reason is FinishReason.FAILED) != (outcome is not Outcome.OK):
        raise InvalidRequest(f"{at}outcome {outcome} with finish_reason {reason}; expected ok, or failed")
    if len(trajectory.further_branches) >= MAX_BRANCHES:
        raise InvalidRequest(
            f"{at}further_branches: {len(trajectory.further_branches)}, expected less than {MAX_BRANCHES}"
        )
    for index, branch in enumerate(trajectory.branches):
        path = f"{at}further_branches[{index - 1}]." if index else at
        roles = [segment.role for segment in branch.segments]
        if roles[:1] != [SegmentRole.PROMPT] or SegmentRole.PROMPT in roles[1:]:
            raise InvalidRequest(f"{path}segments: expected one prompt, as the first segment")
        if outcome is Outcome.OK and roles[-1] is not SegmentRole.POLICY:
            raise InvalidRequest(f"{path}segments: expected a segment of the policy at the end")
    if trajectory.further_branches:
        _check_forks(trajectory, at)
    if len({len(turn.log_probs) > 0 for turn in turns}) > 1:
        raise InvalidRequest(f"{at}segments: expected log-probs in all segments of the policy, or in none")
    spans, rewards, tokens = (
        trajectory.version_spans,
        trajectory.turn_rewards,
        sum(len(turn.token_ids) for turn in turns),
    )
    if spans and (sum(span.tokens for span in spans) != tokens or not all(span.tokens for span in spans)):
        raise InvalidRequest(f"{at}version_spans: expected spans that cover the {tokens} tokens of the policy")
    for digest in (trajectory.weights_digest, *(span.weights_digest for span in spans)):
        check_digest(digest, f"{at}weights_digest")
    experts, inputs = trajectory.routed_experts, len(trajectory.prompt_ids) + tokens - 1
    if experts is not None and (len(trajectory.segments) != 2 or trajectory.further_branches or len(experts) != inputs):
        raise InvalidRequest(
            f"{at}routed_experts: expected [{inputs}, layers, experts per token] of one prompt and one response, got "
            f"{list(experts.shape)}"
        )
    if rewards and (len(rewards) != len(turns) or outcome is not Outcome.OK):
        raise InvalidRequest(f"{at}turn_rewards: expected {len(turns)}, one per turn, or none; none for a failure")
    if not all(map(math.isfinite, rewards)):
        raise InvalidRequest(f"{at}turn_rewards: contains NaN or infinity, expected finite numbers")


def _check_forks(trajectory: Trajectory, at: str) -> None:
    """Raise InvalidRequest unless each branch begins with the tokens that it shares with its parent, an earlier branch."""
    sequences = [np.concatenate([part.token_ids for part in branch.segments]) for branch in trajectory.branches]
    for index, branch in enumerate(trajectory.further_branches):
        path, parent, shared = f"{at}further_branches[{index}].", branch.parent, branch.shared_tokens
        if not -1 <= parent <= index:
            raise InvalidRequest(f"{path}parent {parent}: expected -1, or the index of an earlier branch, 0 to {index}")
        if parent < 0:
            if shared:
                raise InvalidRequest(f"{path}shared_tokens {shared}: expected 0 without a parent")
            continue
        prompt, of_parent = branch.prompt_ids[:shared], sequences[parent][:shared]
        if not len(prompt) == len(of_parent) == shared or not np.array_equal(prompt, of_parent):
            raise InvalidRequest(
                f"{path}shared_tokens {shared}: its prompt and branch {parent} do not begin with as many equal tokens"
            )


def _weights_request(request: WeightsRequest, at: str) -> None:
    if not request.run:
        raise InvalidRequest(f"{at}run: expected the name of the run")
    check_digest(request.digest, f"{at}digest")
    check_digest(request.have_digest, f"{at}have_digest", required=request.have_version is not None)
    within(request, at, 0, MAX_WAIT_SECONDS, "wait_seconds")
    if len(request.machine) > MAX_MACHINE:
        raise InvalidRequest(f"{at}machine: expected at most {MAX_MACHINE} characters, got {len(request.machine)}")


def _adapter(adapter: AdapterSettings, at: str) -> None:
    if adapter.rank < 1 or not math.isfinite(adapter.alpha):
        raise InvalidRequest(
            f"{at.rstrip('.')}: expected a rank of 1 or more and a finite alpha, got {adapter.rank}, {adapter.alpha}"
        )
    if len(adapter.target_modules) > MAX_TARGET_MODULES:
        raise InvalidRequest(
            f"{at}target_modules: expected at most {MAX_TARGET_MODULES}, got {len(adapter.target_modules)}"
        )


def _weights_digest(record: GenerationBatch | WeightTransfer | PublishedWeights, at: str) -> None:
    check_digest(record.weights_digest, f"{at}weights_digest")


CHECKS: dict[type, Callable[[Any, str], None]] = {
    SamplingParameters: _sampling,
    Penalties: _penalties,
    StructuredOutput: _structured_output,
    OptimizationSettings: _optimization,
    PolicyLossSettings: _policy_loss,
    ValueLossSettings: lambda loss, at: within(loss, at, 0, MAX_SETTING, "value_clip"),
    RolloutCorrection: _rollout_correction,
    RejectionRule: _rejection_rule,
    EpisodeSettings: _episode,
    GenerationBatch: _weights_digest,
    Segment: _segment,
    Trajectory: _trajectory,
    ReferenceVersion: lambda version, at: check_digest(version.digest, f"{at}digest", required=True, size=32),
    WeightsRequest: _weights_request,
    AdapterSettings: _adapter,
    WeightTransfer: _weights_digest,
    PublishedWeights: _weights_digest,
}
