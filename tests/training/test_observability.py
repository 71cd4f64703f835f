"""Prometheus metrics and OpenTelemetry traces of a run, compared with its files."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from typing import Any

import pytest

from quartet.contract.status import MODEL_ROLES
from quartet.errors import ComputationFailed
from quartet.services.orchestrator.step import StepTransaction
from quartet.services.orchestrator.telemetry.run_metrics import GUARDS
from tests.training.conftest import MakeConfig
from tests.training.observed_runs import Collector, Observed, run_observed, value
from tests.training.runs import run_to_completion, step_metrics
from tests.unit.test_monitoring import names_in_expressions

STEPS = 3
CONFIG: dict[str, Any] = {
    "run": {"steps": STEPS},
    "algorithm": {"kl_controller": {"kind": "adaptive", "target": 2.5}},
    "checkpoint": {"every_steps": 2},
    "guards": {"window_steps": 2, "critic_lost": {"below": 1.0}},
}


@pytest.fixture(scope="module")
def collector() -> Any:
    with Collector().listening() as listening:
        yield listening


@pytest.fixture(scope="module")
def observed(make: MakeConfig, collector: Collector) -> Observed:
    return run_observed(make(**CONFIG, telemetry={"otlp_endpoint": collector.url}))


@pytest.fixture(scope="module")
def collector_of_generators() -> Any:
    with Collector().listening() as listening:
        yield listening


@pytest.fixture(scope="module")
def with_generators(make: MakeConfig, collector_of_generators: Collector) -> Observed:
    telemetry = {"otlp_endpoint": collector_of_generators.url}
    return run_observed(
        make(run={"steps": STEPS}, rollout={"generators": 2, "share_weights": False}, telemetry=telemetry)
    )


def test_an_observed_run_is_bit_identical(observed: Observed, make: MakeConfig) -> None:
    assert observed.run.code == 0, observed.run.progress.error
    assert step_metrics(observed.run) == step_metrics(run_to_completion(make(**CONFIG)))


def test_every_metric_of_the_last_step_is_a_gauge(observed: Observed) -> None:
    result, run = observed.samples["orchestrator"], observed.run.progress.run
    last = observed.run.metrics[-1]
    for name, number in last.items():
        assert value(result, f"quartet_{name}", run=run) == pytest.approx(number, nan_ok=True), name
    assert value(result, "quartet_kl_target", run=run) == 2.5


def test_the_orchestrator_exports_progress_and_totals(observed: Observed) -> None:
    result, run = observed.samples["orchestrator"], observed.run.progress.run
    assert value(result, "quartet_step", run=run) == value(result, "quartet_total_steps", run=run) == STEPS
    states = {dict(labels)["state"]: number for (name, labels), number in result.items() if name == "quartet_run_state"}
    assert [state for state, number in states.items() if number] == ["finished"]
    assert len(states) == 7
    assert value(result, "quartet_steps_total", run=run) == STEPS
    assert value(result, "quartet_trajectories_total", run=run) == STEPS * 4
    assert value(result, "quartet_trajectory_failures_total", run=run) == 0
    assert value(result, "quartet_recoveries_total", run=run) == 0
    assert value(result, "quartet_buffer_depth", run=run) == 0
    for phase in ("generate", "score", "update"):
        seconds = sum(metrics[f"{phase}_seconds"] for metrics in observed.run.metrics)
        assert value(result, "quartet_phase_seconds_total", run=run, phase=phase) == pytest.approx(seconds)
    alerts = Counter(alert.guard for alert in observed.run.progress.alerts)
    assert alerts["critic_lost"] > 0
    for guard in GUARDS:
        assert value(result, "quartet_alerts_total", run=run, guard=guard) == alerts[guard], guard


def test_services_export_their_work(observed: Observed) -> None:
    tokens = sum(metrics["response_tokens"] for metrics in observed.run.metrics)
    kinds = {"actor": {"generate", "update", "save"}, "critic": {"values", "update", "save"}}
    kinds |= {"reward": {"score"}, "reference": {"log_probs"}}
    for role in MODEL_ROLES:
        result = observed.samples[role]
        busy = {
            dict(labels)["kind"]: number
            for (name, labels), number in result.items()
            if name == "quartet_busy_seconds_total"
        }
        assert set(busy) == kinds[role]
        assert min(busy.values()) > 0
        assert value(result, "quartet_work_pending") == 0
        assert value(result, "quartet_model_parameters", role=role) > 0
        assert value(result, "quartet_build_info", role=role, version=_version()) == 1
        assert value(result, "process_resident_memory_bytes") > 1e7
    for role in ("actor", "critic"):
        assert value(observed.samples[role], "quartet_policy_version", role=role) == STEPS
        assert value(observed.samples[role], "quartet_tokens_total", role=role, kind="trained") == tokens
    assert value(observed.samples["actor"], "quartet_tokens_total", role="actor", kind="generated") == tokens


def test_services_count_their_calls(observed: Observed) -> None:
    result = observed.samples["actor"]
    for name, method in (("Generation", "Generate"), ("Actor", "Update")):
        service = f"quartet.v1.{name}Service"
        assert value(result, "quartet_rpc_requests_total", service=service, method=method, code="OK") == STEPS
        assert value(result, "quartet_rpc_seconds_count", service=service, method=method) == STEPS
    assert value(result, "quartet_rpc_in_flight") == 0


def test_every_metric_of_dashboard_and_alert_rules_exists(observed: Observed, with_generators: Observed) -> None:
    exported = {
        name for each in (observed, with_generators) for samples in each.samples.values() for name, _ in samples
    }
    # A run that has ended has no generators, see test_generator_observability.py.
    assert names_in_expressions() - exported == {"up", "quartet_gpu_memory_bytes", "quartet_generator_state"}


def traces(spans: list[tuple[str, Any]]) -> dict[bytes, list[tuple[str, Any]]]:
    result: dict[bytes, list[tuple[str, Any]]] = defaultdict(list)
    for service, span in spans:
        result[span.trace_id].append((service, span))
    return dict(result)


def test_each_step_is_one_trace_across_all_services(observed: Observed, collector: Collector) -> None:
    result = traces(collector.spans)
    roots = {
        service_span[1].name
        for spans in result.values()
        for service_span in spans
        if not service_span[1].parent_span_id
    }
    assert roots == {f"step {step}" for step in range(1, STEPS + 1)}
    assert len(result) == STEPS
    # Step 1 also starts the generation of step 2. Step 3 starts its own, because a checkpoint precedes it.
    generations = Counter(
        len([span for _, span in spans if span.name == "actor Generate"]) for spans in result.values()
    )
    assert generations == {2: 1, 0: 1, 1: 1}
    for spans in result.values():
        by_id = {span.span_id: (service, span) for service, span in spans}
        assert {service for service, _ in spans} == {"orchestrator", *MODEL_ROLES}
        names = {span.name for _, span in spans}
        assert {"collect", "prepare", "update", "seal", "commit", "acknowledge", "critic Values"} <= names
        for service, span in spans:
            assert span.end_time_unix_nano >= span.start_time_unix_nano > 0
            assert span.status.code == 0, span
            if service != "orchestrator":
                caller, parent = by_id[span.parent_span_id]
                assert caller == "orchestrator"
                assert parent.name == f"{service} {span.name.rpartition('/')[2]}"
                assert by_id[parent.parent_span_id][1].name in ("collect", "update")


def attributes(span: Any) -> dict[str, str | int]:
    return {item.key: item.value.string_value or item.value.int_value for item in span.attributes}


def test_calls_to_generators_belong_to_the_trace_of_the_step_that_started_them(
    with_generators: Observed, collector_of_generators: Collector
) -> None:
    run, collector = with_generators.run, collector_of_generators
    assert run.code == 0, run.progress.error
    steps = {
        attributes(span)["quartet.step"]: trace
        for trace, spans in traces(collector.spans).items()
        for _, span in spans
        if not span.parent_span_id
    }
    assert sorted(map(int, steps)) == list(range(1, STEPS + 1))
    calls = {"Generate": Counter[Any](), "UpdateWeights": Counter[Any]()}
    by_id = {span.span_id: span for _, span in collector.spans}
    handled = {span.parent_span_id: span for service, span in collector.spans if service == "generator"}
    for _, span in collector.spans:
        kind = span.name.removeprefix("generator ")
        if kind not in calls:
            continue
        shown = attributes(span)
        version = int(shown["quartet.policy_version"])
        # A step that starts after the commit before it starts its own generation. The others start during the step before, and
        # after the last step generators still get its policy.
        assert span.trace_id in (steps.get(version + 1), steps[max(version, 1)])
        assert by_id[span.parent_span_id].name in ("collect", "update")
        assert handled[span.span_id].trace_id == span.trace_id
        amount = shown["quartet.trajectories" if kind == "Generate" else "quartet.weight_bytes"]
        calls[kind][version, shown["server.address"]] += int(amount)
        if kind == "Generate":
            assert shown["quartet.step"] == version + 1
    addresses = {address for _, address in calls["Generate"]}
    assert len(addresses) == 2
    assert calls["Generate"] == {(version, address): 2 for version in range(STEPS) for address in addresses}
    updates = {key: size for key, size in calls["UpdateWeights"].items() if key[0] < STEPS}
    assert updates.keys() == calls["Generate"].keys()
    assert sum(updates.values()) == sum(step["weight_update_bytes"] for step in run.metrics) > 0


def test_a_failed_step_marks_its_trace_as_failed(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    update, remaining = StepTransaction._update, ["a secret text"]

    def broken(self: StepTransaction, step: int, *arguments: Any) -> Any:
        if step == 2 and remaining:
            raise ComputationFailed(remaining.pop())
        return update(self, step, *arguments)

    monkeypatch.setattr(StepTransaction, "_update", broken)
    with Collector().listening() as collector:
        result = run_observed(make(run={"steps": 2}, telemetry={"otlp_endpoint": collector.url}))
    assert result.run.code == 1
    failed = {span.name: span.status for _, span in collector.spans if span.status.code}
    assert set(failed) == {"step 2", "update"}
    assert {status.message for status in failed.values()} == {"ComputationFailed"}
    assert "secret" not in str(collector.spans), "an error may quote a response"


@pytest.mark.parametrize("status", [500, None], ids=["error", "unreachable"])
def test_a_failing_trace_collector_does_not_affect_the_run(make: MakeConfig, status: int | None) -> None:
    with Collector(status=status or 200).listening() as collector:
        url = collector.url
        if status:
            result = run_observed(make(run={"steps": 2}, telemetry={"otlp_endpoint": url}))
    if status is None:
        result = run_observed(make(run={"steps": 2}, telemetry={"otlp_endpoint": url}))
    assert result.run.code == 0, result.run.progress.error
    assert not collector.spans
    assert collector.requests >= (1 if status else 0)


def test_without_traces_no_tracer_is_installed(make: MakeConfig) -> None:
    from quartet.services.observability import Observability

    config = make()
    observation = Observability([MODEL_ROLES[0]], config)
    assert observation.traces is None
    assert len(observation.interceptors) == 1


def _version() -> str:
    return str(sys.modules["quartet"].__version__)
