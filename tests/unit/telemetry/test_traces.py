"""Traces: spans of steps, context of calls, and an unreachable collector."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from quartet.telemetry.traces import NoTraces, Traces
from tests.training.observed_runs import Collector
from tests.waiting import LIMIT

ROOT = Path(__file__).parents[3]


def test_opentelemetry_is_not_imported_if_traces_are_off() -> None:
    code = (
        "import sys\n"
        "from quartet.config.loading import parse_config\n"
        "from quartet.services.observability import Observability\n"
        "from quartet.contract.status import Role\n"
        "tree = {'data': {'prompts': 'p'}, 'actor': {'model': 'a'}, 'reward': {'model': 'r'}}\n"
        "observation = Observability([Role.ACTOR], parse_config(tree, 'test'))\n"
        "assert observation.traces is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_without_an_endpoint_there_are_no_spans() -> None:
    with NoTraces().step(1), NoTraces().span("actor", "update"):
        pass


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_calls_of_a_step_have_a_trace_context_and_other_calls_have_none(path: str) -> None:
    with Collector().listening() as collector:
        client, server = Traces(collector.url + path, "orchestrator", "run"), Traces(collector.url, "actor", "run")
        assert client.outgoing("actor", "GetStatus", {}) is None
        with client.span("actor", "checkpoint"):
            pass
        with client.step(7):
            call = client.outgoing("actor", "Update", {})
            assert call is not None
            assert [key for key, _ in call.metadata] == ["traceparent"]
            with server.incoming("quartet.v1.ActorService", "Update", call.metadata, lambda: "UNAVAILABLE"):
                pass
            call.end("OK", {})
        for traces in (client, server):
            traces.close()
        spans = {span.name: (service, span) for service, span in collector.spans}
    assert set(spans) == {"step 7", "actor Update", "quartet.v1.ActorService/Update"}
    handled = spans["quartet.v1.ActorService/Update"]
    assert handled[0] == "actor"
    assert handled[1].parent_span_id == spans["actor Update"][1].span_id
    assert handled[1].status.message == "UNAVAILABLE"
    assert len({span.trace_id for _, span in spans.values()}) == 1


def test_lost_spans_and_the_recovery_are_logged_once() -> None:
    with Collector(status=400).listening() as collector, capture_logs() as logs:
        traces = Traces(collector.url, "orchestrator", "run")
        for step in (1, 2):
            with traces.step(step):
                pass
            traces._provider.force_flush()
        collector.status = 200
        with traces.step(3):
            pass
        traces._provider.force_flush()
        traces.close()
    assert [line["event"] for line in logs] == ["trace export failed", "trace export recovered"]
    assert logs[0]["endpoint"] == collector.url
    assert [span.name for _, span in collector.spans] == ["step 3"]


def test_an_unreachable_collector_does_not_delay_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet.telemetry.traces.CLOSING_SECONDS", 0.2)
    monkeypatch.setattr("quartet.telemetry.traces.EXPORT_SECONDS", 0.5)
    traces = Traces("http://127.0.0.1:9", "orchestrator", "run")
    start = time.monotonic()
    for step in range(100):
        with traces.step(step), traces.span("actor", "update"):
            pass
    assert time.monotonic() - start < 1.0
    traces.close()
    assert time.monotonic() - start < 4.0
    # Its error must not appear in the output of the next test.
    for thread in threading.enumerate():
        if thread.name == "last spans":
            thread.join(LIMIT)
            assert not thread.is_alive()
