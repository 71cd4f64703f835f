"""Wait policy of OpenMP's threads. torch's thread pool reads this from the environment at its import."""

from __future__ import annotations

from collections.abc import MutableMapping

SPIN_COUNT = 1000
"""Number of checks for work before a waiting thread sleeps."""


def set_wait_policy(environment: MutableMapping[str, str]) -> None:
    """Make waiting threads of this process sleep after a short spin, unless ``environment`` has a policy already.

    By default they spin for long, which takes the cores from the other services. Without a spin, each small matmul
    waits until they are awake.
    """
    if not environment.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        # Runtimes other than GNU's do not know the second name.
        environment.update({"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": str(SPIN_COUNT)})
