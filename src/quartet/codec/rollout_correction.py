"""The message of the correction for the difference between engine and trainer."""

from __future__ import annotations

from typing import get_args

from quartet.codec.checks import positive, require_non_negative
from quartet.config.section import MAX_SETTING
from quartet.contract.update import (
    CorrectionLevel,
    CorrectionTreatment,
    RejectionRule,
    RejectionStatistic,
    RolloutCorrection,
)
from quartet.errors import InvalidRequest
from quartet.v1 import update_pb2

_LEVELS = {name: getattr(update_pb2, f"CORRECTION_LEVEL_{name.upper()}") for name in get_args(CorrectionLevel)}
_LEVEL_NAMES = {number: name for name, number in _LEVELS.items()}
_TREATMENTS = {
    name: getattr(update_pb2, f"CORRECTION_TREATMENT_{name.upper()}") for name in get_args(CorrectionTreatment)
}
_TREATMENT_NAMES = {number: name for name, number in _TREATMENTS.items()}
_STATISTICS = {
    name: getattr(update_pb2, f"REJECTION_STATISTIC_{name.upper()}") for name in get_args(RejectionStatistic)
}
_STATISTIC_NAMES = {number: name for name, number in _STATISTICS.items()}


def rollout_correction_to_proto(correction: RolloutCorrection) -> update_pb2.RolloutCorrection:
    """Convert the correction."""
    return update_pb2.RolloutCorrection(
        level=_LEVELS[correction.level],
        treatment=_TREATMENTS[correction.treatment],
        lower=correction.lower,
        upper=correction.upper,
        normalize=correction.normalize,
        rejection=[
            update_pb2.RejectionRule(statistic=_STATISTICS[rule.statistic], upper=rule.upper, lower=rule.lower)
            for rule in correction.rejection
        ],
        off_policy_mask=correction.off_policy_mask,
    )


def rollout_correction_from_proto(message: update_pb2.RolloutCorrection) -> RolloutCorrection:
    """Convert and validate the correction. Raises InvalidRequest."""
    section = "policy_loss.rollout_correction"
    require_non_negative(message, "lower", "upper", "off_policy_mask")
    level, treatment = _LEVEL_NAMES.get(message.level), _TREATMENT_NAMES.get(message.treatment)
    if level is None:
        raise InvalidRequest(f"{section}.level {message.level}: unknown")
    if treatment is None:
        raise InvalidRequest(f"{section}.treatment {message.treatment}: unknown")
    if treatment == "seq_mask" and level != "token":
        raise InvalidRequest(f"{section}.treatment seq_mask: expected level token, not {level}")
    if message.upper and message.lower > message.upper:
        raise InvalidRequest(f"{section}.lower {message.lower}: expected at most upper {message.upper}")
    rules = tuple(map(_rule_from_proto, message.rejection[: len(_STATISTICS) + 1]))
    if len({rule.statistic for rule in rules}) < len(rules):
        raise InvalidRequest(f"{section}.rejection: a statistic is there twice, expected each once")
    return RolloutCorrection(
        level=level,
        treatment=treatment,
        lower=message.lower,
        upper=message.upper,
        normalize=message.normalize,
        rejection=rules,
        off_policy_mask=message.off_policy_mask,
    )


def _rule_from_proto(message: update_pb2.RejectionRule) -> RejectionRule:
    section = "policy_loss.rollout_correction.rejection"
    if not 0 <= message.lower <= MAX_SETTING:
        raise InvalidRequest(f"{section}.lower {message.lower}: expected 0 to {MAX_SETTING:g}")
    statistic = _STATISTIC_NAMES.get(message.statistic)
    if statistic is None:
        raise InvalidRequest(f"{section}.statistic {message.statistic}: unknown")
    upper = positive(message.upper, f"{section}.upper")
    if not statistic.endswith("k1"):
        if message.lower:
            raise InvalidRequest(f"{section}.lower {message.lower}: {statistic} has an upper bound only")
    elif (message.lower or 1 / upper) > upper:
        raise InvalidRequest(f"{section}.upper {upper}: expected at least lower, or 1 if lower is 0")
    return RejectionRule(statistic, upper, message.lower)
