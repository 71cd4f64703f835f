"""Check of a running generator against the config of a run."""

from __future__ import annotations

from quartet import __version__
from quartet.config.root import Config
from quartet.contract.status import ProcessStatus, ServiceStatus


def generator_mismatch(
    config: Config, process: ProcessStatus, status: ServiceStatus, vocabulary_size: int | None = None
) -> str:
    """Return why a generator does not fit the config, or "".

    ``vocabulary_size`` is the actor's; None if it is not known.
    """
    # The name may be followed by settings in parentheses.
    name = status.engine.name.split(" ")[0] if status.engine is not None else "none"
    if name != config.rollout.engine:
        return f"runs engine {name}, rollout.engine is {config.rollout.engine}; start it with this run's config"
    if process.version != __version__:
        return f"runs Quartet {process.version}, this is {__version__}; install the same version"
    if status.dtype != config.actor.dtype:
        return f"has weights in {status.dtype}, actor.dtype is {config.actor.dtype}; start it with this run's config"
    if vocabulary_size not in (None, status.vocabulary_size):
        return f"has a vocabulary of {status.vocabulary_size} ids, the actor {vocabulary_size}; start it with this run's config"
    return ""
