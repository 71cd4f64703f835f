"""Errors of verifiers. Each is a failure to score, never a score."""

from __future__ import annotations

from quartet.errors import QuartetError


class VerifierError(QuartetError):
    """A response could not be scored. ``outcome`` is the name of the outcome that the score gets."""

    outcome = "scorer_error"


class InvalidField(VerifierError):
    """A field of the prompt's line is missing, or the verifier cannot use it. A retry fails again."""


class VerifierTimeout(VerifierError):
    """A comparison took too long."""

    outcome = "timeout"


class SandboxFailed(VerifierError):
    """The sandbox itself failed: it is missing, forbidden by the system, or did not start. Says nothing about the program."""

    outcome = "sandbox_error"
