"""Quotas of a reward service that several runs share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from quartet.config.section import Count, Positive, Section

MAX_SHARED_CALLS = 512
"""Maximum number of calls of all runs together. Each of them holds a thread while it waits."""


class SharingConfig(Section):
    """Quotas of each run at a reward service that several runs share. A call beyond them is refused with the time after which to
    try again, and the run waits."""

    max_runs: Annotated[int, Field(ge=1, le=64)] = 8
    """Maximum number of runs with calls at the same time."""
    max_pending_calls: Annotated[int, Field(ge=1, le=64)] = 8
    """Maximum number of pending calls of a run. A run has at most four batches in flight at a reward service with one replica."""
    max_pending_sequences: Count = 1024
    """Maximum number of responses in the pending calls of a run. A single call with more of them is an error."""
    sequences_per_second: Positive | None = None
    """Maximum average number of responses per second of a run, with bursts of max_pending_sequences. Null: no limit."""
    over_quota_share: Annotated[float, Field(gt=0, le=0.5, allow_inf_nan=False)] = 0.1
    """Share of the time of all runs together that have exceeded a quota in the last seconds, while another run waits. If no other
    run waits, they have all of it."""

    @model_validator(mode="after")
    def _fits_threads(self) -> SharingConfig:
        if self.max_runs * self.max_pending_calls > MAX_SHARED_CALLS:
            raise ValueError(
                f"max_runs {self.max_runs} x max_pending_calls {self.max_pending_calls}: expected at most {MAX_SHARED_CALLS}; "
                "lower one of them"
            )
        return self
