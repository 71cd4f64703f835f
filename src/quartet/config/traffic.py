"""Settings of traffic: requests of users that the policy answers, whose sessions become trajectories once they have a reward."""

from __future__ import annotations

from pathlib import Path

from quartet.config.section import Count, Positive, Section


class TrafficConfig(Section):
    """Requests of users with environment.kind traffic. The endpoint listens at environment.agent.listen. See docs/traffic.md."""

    viewer_keys_file: Path | None = None
    """File of the keys of users, one on each line. A user sends requests to the policy. Null: only operators do."""
    operator_keys_file: Path | None = None
    """File of the keys of operators, one on each line. An operator also gives rewards, and looks at sessions and deletes them."""
    requests_per_minute: Count = 600
    """Maximum number of requests of one key in a minute. A further one gets a 429."""
    max_sessions: Count = 10_000
    """Maximum number of sessions that wait, for a reward or for a step. A request that would open another one gets a 429."""
    session_seconds: Positive = 86400.0
    """Time after the last request, in seconds, until a session without a reward is deleted."""
