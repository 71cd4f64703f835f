"""Observation of a run with generators behind separate servers: metrics, timeline, Prometheus metrics and services."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from quartet.contract.status import MODEL_ROLES, GeneratorState, Role, ServiceStatus
from quartet.contract.weights import WeightTransfer
from quartet.gateway.monitors.buffer_monitor import BufferMonitor
from quartet.gateway.monitors.service_monitor import ServiceMonitor
from quartet.gateway.readers.run_catalog import RunCatalog
from quartet.gateway.schemas import ServiceInfo
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.telemetry.run_metrics import RunMetrics
from quartet.telemetry.prometheus import ServiceMetrics
from tests.gateway.serving import serve_orchestrator
from tests.training.conftest import MakeConfig
from tests.training.generator_runs import Generators, generator_run
from tests.training.runs import ActiveRun, json_lines, run_to_completion, wait_for

STEPS = 3
NAMES = (
    "generators",
    "weight_update_bytes",
    "weight_update_seconds",
    "weights_exposed_seconds",
    "weight_transfers_shared_memory",
)


@pytest.fixture(scope="module")
def run(make: MakeConfig) -> Iterator[tuple[ActiveRun, Generators]]:
    config = make(run={"steps": 500}, rollout={"generators": 2, "prompts_per_step": 8})
    with generator_run(config, 2, STEPS) as result:
        yield result


def test_steps_report_the_weights_that_generators_took_over(run: tuple[ActiveRun, Generators]) -> None:
    steps = json_lines(RunFiles(run[0].config.run_directory).metrics)
    assert [step["generators"] for step in steps] == [2] * len(steps)
    assert all(step["weight_update_seconds"] > 0 for step in steps)
    # The generators read the memory of the actor.
    assert not any(step["weight_update_bytes"] for step in steps)
    assert all(step["weight_transfers_shared_memory"] > 0 for step in steps)
    # It is 0 if the critic trains for longer than the weights are on their way.
    assert all(0 <= step["weights_exposed_seconds"] < step["seconds"] for step in steps)


def test_the_timeline_has_a_lane_for_each_generator(run: tuple[ActiveRun, Generators]) -> None:
    running, generators = run
    lines = json_lines(RunFiles(running.config.run_directory).root / "timeline.jsonl")
    # One generator may have all the work of a step if the other is late.
    phases = {(span["service"], span["phase"]) for line in lines for span in line["spans"]}
    assert ("actor", "publish") in phases
    for address in generators.addresses:
        assert (f"generator {address}", "update_weights") in phases
        assert (f"generator {address}", "generate") in phases


def test_services_show_each_generator_and_the_publications_of_the_actor(run: tuple[ActiveRun, Generators]) -> None:
    running, generators = run
    addresses = {role: getattr(running.config.services, role).address for role in MODEL_ROLES}
    catalog = RunCatalog(running.config.run.directory)
    monitor = ServiceMonitor(catalog, BufferMonitor(catalog, None))
    name = running.config.run.name

    def infos(role: Role) -> list[ServiceInfo]:
        return [info for info in monitor.services(name) if info.role == role]

    with serve_orchestrator(running, addresses), closing(monitor):
        shown = infos(Role.GENERATOR)
        assert {info.address for info in shown} == set(generators.addresses)
        [actor] = infos(Role.ACTOR)
        assert actor.last_publication is not None
        assert actor.published_versions[-1] == actor.last_publication.policy_version
        assert actor.last_publication.total_bytes > 0
        for info in shown:
            assert (info.health, info.detail, info.device) == ("serving", "", "cpu")
            # The generation of the next step may be in progress.
            assert info.work_pending in (0, 1)
            assert info.engine is not None
            assert (info.engine.name, info.engine.weights, info.engine.digest) == ("torch", "tensors", "read back")
            assert info.last_transfer is not None
            assert info.policy_version == info.last_transfer.policy_version >= STEPS - 1
            assert len(info.last_transfer.digest) == 32
            assert info.last_transfer.way == "shared memory"
            assert info.tokens_per_second is not None
            assert info.tokens_generated is not None
            assert info.tokens_per_second > 0 < info.tokens_generated
            assert info.busy_seconds.keys() == {"generate", "update_weights"}


def test_prometheus_shows_generators_by_state_and_their_transfers(run: tuple[ActiveRun, Generators]) -> None:
    running, _ = run
    metrics = RunMetrics(running.config, running.board, lambda: 0, running.generators)
    [states] = [family for family in metrics.collect() if family.name == "quartet_generator_state"]
    assert {sample.labels["state"]: sample.value for sample in states.samples} == {"ready": 2, "lost": 0, "refused": 0}
    assert {item.state for item in running.generators()} == {GeneratorState.READY}


def test_prometheus_shows_the_last_transfer_of_a_generator() -> None:
    transfer = WeightTransfer(3, bytes(16), "a:1", bytes=100, way="delta", transfer_seconds=0.5, load_seconds=0.25)
    status = ServiceStatus(Role.GENERATOR, policy_version=3, last_transfer=transfer)
    samples = {
        sample.name: sample.value for family in ServiceMetrics(lambda: [status]).collect() for sample in family.samples
    }
    shown = [samples.get(f"quartet_weight_{name}") for name in ("transfer_bytes", "transfer_seconds", "load_seconds")]
    assert shown == [100, 0.5, 0.25]
    assert "quartet_weight_publication_bytes" not in samples


def test_a_lost_generator_is_listed_as_lost(run: tuple[ActiveRun, Generators]) -> None:
    running, generators = run
    kept, lost = generators.addresses
    generators.lose(lost)
    running.control.resume()
    step = running.board.current().step
    wait_for(running, lambda: running.board.current().step >= step + 2)
    states = {item.address: item.state for item in running.generators()}
    assert states == {kept: GeneratorState.READY, lost: GeneratorState.LOST}


def test_a_run_without_generators_has_none_of_their_metrics(make: MakeConfig) -> None:
    finished = run_to_completion(make(run={"steps": 1}))
    assert not set(NAMES) & finished.metrics[0].keys()
