"""The groups of cases, in the order of the page."""

from __future__ import annotations

from tests.parity.losses.cases import aggregations, corrections, estimators, kl, policy_losses, values

GROUPS = (policy_losses.GROUP, corrections.GROUP, aggregations.GROUP, kl.GROUP, values.GROUP, estimators.GROUP)
