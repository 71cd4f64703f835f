"""Errors of verifiers. Each is a failure to score, never a score."""

from __future__ import annotations

from quartet.errors import QuartetError


class VerifierError(QuartetError):
    """A response could not be scored. ``outcome`` is the name of the outcome that the score gets.

    ``quotes_texts`` is False if the text of the error never contains a prompt or response. It is then logged.
    """

    outcome = "scorer_error"
    quotes_texts = True


class InvalidField(VerifierError):
    """A field of the prompt's line is missing, or the verifier cannot use it. A retry fails again."""

    quotes_texts = False


class VerifierTimeout(VerifierError):
    """A comparison took too long."""

    outcome = "timeout"


class ComputationTooLarge(VerifierTimeout):
    """A comparison took too much CPU time, or ended its process. Says that the input is at fault, not a busy machine."""


class SandboxFailed(VerifierError):
    """The sandbox itself failed: it is missing, forbidden by the system, or did not start. Says nothing about the program."""

    outcome = "sandbox_error"
    quotes_texts = False
