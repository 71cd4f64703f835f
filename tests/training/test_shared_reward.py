"""Two runs that share a reward service with small quotas: each ends with the bits of a run with a service of one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.limits import shared_limits
from quartet.rpc.server import Server
from quartet.run_directory.run_files import RunFiles
from quartet.services.reward.servicer import RewardServicer
from quartet.services.reward.sharing import RunUsage
from quartet.services.roles import build_model_role
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, active_run, assert_same, fleet, orchestrator, run_to_completion

ROLLOUT = {"prompts_per_step": 8, "score_batch_size": 1}
SEEDS = (1, 2)
OTHERS = (Role.ACTOR, Role.CRITIC, Role.REFERENCE)


@contextmanager
def reward_service(config: Config) -> Iterator[tuple[str, RewardServicer]]:
    """Serve the reward of a config. Yield the address and the servicer."""
    servicer = build_model_role(Role.REWARD, config, ComputeThread(), threads=1)
    assert isinstance(servicer, RewardServicer)
    server = Server([servicer], "127.0.0.1:0", limits=shared_limits(2, 1))
    try:
        yield server.address, servicer
    finally:
        server.stop(5.0)


def finish_both(configs: list[Config]) -> list[Run]:
    """Run two runs at the same time."""
    with active_run(configs[0]) as first, active_run(configs[1]) as second:
        return [first.finish(), second.finish()]


def check(runs: list[Run], undisturbed: list[Run], usage: list[RunUsage]) -> None:
    assert len(usage) == 2
    for run, expected, counted in zip(runs, undisturbed, sorted(usage, key=lambda each: each.run), strict=True):
        assert_same(run, expected)
        assert run.progress.recoveries == 0
        assert counted.scored_sequences >= 2 * ROLLOUT["prompts_per_step"]
    # The orchestrator has several batches in flight, and each run may have one call.
    assert sum(each.refused_calls for each in usage) > 0


def test_runs_that_call_a_shared_service_end_with_the_same_bits(make: MakeConfig) -> None:
    settings: dict[str, Any] = {"rollout": ROLLOUT}
    undisturbed = [run_to_completion(make(**settings, run={"seed": seed})) for seed in SEEDS]
    shared = make(**settings, services={"reward": {"sharing": {"max_runs": 2, "max_pending_calls": 1}}})
    with reward_service(shared) as (address, servicer):
        configs = [make(**settings, run={"seed": seed}) for seed in SEEDS]
        with fleet(configs[0]) as first, fleet(configs[1]) as second:
            overrides = [f"services.reward.address={address}"]
            addressed = [
                load_config(
                    RunFiles(config.run_directory).config,
                    [f"services.{role}.address={getattr(each.config.services, role).address}" for role in OTHERS]
                    + overrides,
                )
                for config, each in zip(configs, (first, second), strict=True)
            ]
            with orchestrator(addressed[0]) as one, orchestrator(addressed[1]) as two:
                runs = [one.finish(), two.finish()]
        assert servicer.shared is not None
        check(runs, undisturbed, servicer.shared.usage())


@pytest.mark.slow
def test_runs_whose_own_reward_service_calls_a_shared_one_end_with_the_same_bits(make: MakeConfig) -> None:
    def with_source(address: str, seed: int) -> Config:
        service = {"address": address, "max_attempts": 1, "circuit_breaker_failures": 1, "batch_size": 1}
        reward = {"source": "service", "service": service, "model": None}
        algorithm = {"estimator": "reinforce"}
        return make(rollout={**ROLLOUT, "score_batch_size": 4}, run={"seed": seed}, reward=reward, algorithm=algorithm)

    with reward_service(make()) as (address, _):
        undisturbed = [run_to_completion(with_source(address, seed)) for seed in SEEDS]
    sharing = {"reward": {"sharing": {"max_runs": 2, "max_pending_calls": 1}}}
    with reward_service(make(services=sharing)) as (address, servicer):
        runs = finish_both([with_source(address, seed) for seed in SEEDS])
        assert servicer.shared is not None
        usage = servicer.shared.usage()
    for run, expected in zip(runs, undisturbed, strict=True):
        assert_same(run, expected)
        assert run.progress.recoveries == 0
    assert sum(each.refused_calls for each in usage) > 0
