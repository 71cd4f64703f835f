"""Settings of the correction for the difference between engine and trainer, and their conditions."""

from __future__ import annotations

from pydantic import model_validator

from quartet.config.section import Positive, Section
from quartet.contract.update import CorrectionLevel, CorrectionTreatment, RejectionStatistic

_UPPER = 2.0


def _check_contains_one(lower: float | None, upper: float | None) -> None:
    """Raise ValueError if ratio 1, that of equal policies, is outside the bounds: no token would then have its full weight."""
    if upper is not None and upper < 1:
        raise ValueError(f"upper {upper:g}: equal policies have ratio 1; expected at least 1")
    if lower is not None and lower > 1:
        raise ValueError(f"lower {lower:g}: equal policies have ratio 1; expected at most 1")


class RejectionConfig(Section):
    """One condition that tokens or responses must meet, or else they are left out of the update of the policy."""

    statistic: RejectionStatistic
    """KL estimate between engine and trainer, as verl's rollout_rs: of each token, or its sum, mean or maximum over the response.
    With r = log π_trainer − log π_engine: k1 is −r, k2 is r²/2, k3 is exp(r) − 1 − r."""
    upper: Positive
    """Maximum of k2 and k3, in nats. For k1 the maximum of exp(k1), a ratio, at least 1."""
    lower: Positive | None = None
    """For k1: minimum of exp(k1), at most 1. Null: 1/upper."""

    @model_validator(mode="after")
    def _check_bounds(self) -> RejectionConfig:
        if not self.statistic.endswith("k1"):
            if self.lower is not None:
                raise ValueError(f"lower {self.lower:g}: {self.statistic} has an upper bound only; remove lower")
        else:
            _check_contains_one(self.lower, self.upper)
        return self


class RolloutCorrectionConfig(Section):
    """Correction for the difference between the policy that sampled the responses and the trainer's old policy."""

    level: CorrectionLevel = "token"
    """Importance weights in the policy loss. token: π_trainer/π_engine of each token. sequence: their product over the response.
    geometric_mean: their geometric mean over the response. none: no weights."""
    treatment: CorrectionTreatment = "truncate"
    """Treatment of weights outside the bounds. truncate: move them to the bound. mask: set them to 0 (IcePop; at level sequence
    TRL's sequence_mask). seq_mask: set the token weights of a response to 0 if their geometric mean is outside (seq-mask-tis)."""
    upper: Positive | None = _UPPER
    """Upper bound of the weights, at least 1. Null disables it."""
    lower: Positive | None = None
    """Lower bound of the weights, at most 1. Null disables it."""
    normalize: bool = False
    """Divide the weights by their mean over the step, as verl's rollout_is_batch_normalize. Needs a forward pass more, for the
    old log-probs of the whole step."""
    rejection: tuple[RejectionConfig, ...] = ()
    """Conditions that tokens and responses must meet, all of them. Others are left out of the policy loss, of the mean over its
    tokens or responses, and of the KL and entropy terms. Needs a forward pass more."""
    off_policy_mask: Positive | None = None
    """Off-policy sequence masking: responses with a negative advantage have no policy loss if KL(engine ‖ current policy) exceeds
    this, in nats per token. Null disables it."""

    @model_validator(mode="after")
    def _check_weights(self) -> RolloutCorrectionConfig:
        if self.level == "none":
            self._check_no_weights()
            return self
        if self.upper is None and self.lower is None:
            raise ValueError(f"upper null: level {self.level} needs a bound; set upper or lower, or level none")
        _check_contains_one(self.lower, self.upper)
        if self.treatment == "seq_mask" and self.level != "token":
            raise ValueError(
                f"treatment seq_mask: masks the token weights of whole responses; set level token, not {self.level}, or "
                "treatment mask"
            )
        return self

    def _check_no_weights(self) -> None:
        for key, given in (
            (f"treatment {self.treatment}", self.treatment != "truncate"),
            (f"upper {self.upper}", self.upper not in (None, _UPPER)),
            (f"lower {self.lower}", self.lower is not None),
            ("normalize", self.normalize),
        ):
            if given:
                raise ValueError(f"{key}: level none has no weights; remove it, or set level to token or sequence")

    @model_validator(mode="after")
    def _check_rejection(self) -> RolloutCorrectionConfig:
        names = [rule.statistic for rule in self.rejection]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rejection: {repeated[0]} is there twice; expected each statistic once")
        return self
