"""Conformance of services with the contract in proto/quartet/v1. A service may be written in any language.

The checks are a client that sees the messages themselves, also those that Quartet's own clients never send.
"""

from quartet.conformance.check import Check, CheckOutcome, CheckResult, Skipped, Violation
from quartet.conformance.report import as_json, as_text
from quartet.conformance.runner import ROLES, checks_of, run_checks
from quartet.conformance.target import Limits, Target

__all__ = [
    "ROLES",
    "Check",
    "CheckOutcome",
    "CheckResult",
    "Limits",
    "Skipped",
    "Target",
    "Violation",
    "as_json",
    "as_text",
    "checks_of",
    "run_checks",
]
