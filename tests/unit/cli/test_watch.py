"""Events of a remote run are shown once each, even over broken connections."""

from __future__ import annotations

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from quartet.cli.progress_view import make_view
from quartet.cli.remote import watch as module
from quartet.cli.remote.watch import RunDisplay, watch
from quartet.errors import ConfigError, ServiceFailed
from quartet.gateway.client import Event, Target

METRICS = {
    "reward_mean": 0.5,
    "kl_mean": 0.1,
    "entropy": None,
    "eos_rate": 1.0,
    "response_tokens": 64,
    "seconds": 2.0,
}


def progress(state: str = "training", step: int = 0, *notes: str, error: str = "") -> dict[str, Any]:
    return {
        "state": state,
        "step": step,
        "total_steps": 9,
        "phase": "generate",
        "num_scored": 0,
        "num_expected": 8,
        "error": error,
        "recoveries": 0,
        "notes": list(notes),
    }


def step(number: int) -> dict[str, Any]:
    return {"step": number, "metrics": {"step": number, **METRICS}}


def shown(*events: tuple[str, dict[str, Any]]) -> list[str]:
    """Return the lines that are printed for these events."""
    output = io.StringIO()
    with make_view(Console(file=output, width=200), "runs/tiny") as view:
        shown = RunDisplay("tiny", view)
        for kind, data in events:
            shown.update(Event(kind, data, ""))
    return output.getvalue().splitlines()


def test_each_step_and_each_note_is_printed_once_even_if_old_notes_are_dropped() -> None:
    lines = shown(
        ("progress", progress("training", 0, "a", "b")),
        ("step", step(1)),
        ("progress", progress("training", 1, "b", "c")),
        ("step", step(2)),
        ("progress", progress("training", 2, "c", "d")),
    )
    assert [line.split("  ")[0] for line in lines] == [
        "note: a",
        "note: b",
        "step 1/9",
        "note: c",
        "step 2/9",
        "note: d",
    ]


def test_alerts_changes_and_checkpoints_are_printed_as_lines() -> None:
    lines = shown(
        ("alert", {"step": 3, "guard": "kl", "action": "warn", "evidence": "it rises", "remedy": "lower it"}),
        (
            "change",
            {"setting": "kl_coefficient", "before": 0.05, "after": 0.2, "step": 4, "user": "operator x", "at": 1.0},
        ),
        ("evaluation", {"step": 3, "metrics": {"step": 3, "eval_reward_greedy": 1.25, "eval_kl": None}}),
        ("checkpoint", {"step": 3, "bytes": 1, "created": 1.0}),
        ("rewind", {"step": 2}),
        ("something-new", {}),
        ("progress", progress("paused", 3)),
    )
    assert lines == [
        "guard kl (warn) after step 3: it rises; lower it",
        "kl_coefficient 0.05 -> 0.2 from step 4 on, by operator x",
        "evaluation after step 3: reward_greedy 1.25",
        "checkpoint of step 3",
        "goes back to step 2",
        "paused after step 3: quartet resume runs/tiny continues, quartet stop runs/tiny saves the policy and ends the run",
    ]


def test_recomputed_steps_are_printed_again() -> None:
    lines = shown(("step", step(1)), ("step", step(2)), ("rewind", {"step": 1}), ("step", step(2)), ("step", step(3)))
    assert [line.split("  ")[0] for line in lines] == [
        "step 1/1",
        "step 2/2",
        "goes back to step 1",
        "step 2/2",
        "step 3/3",
    ]
    lines = shown(("step", step(1)), ("rewind", {"step": 0}), ("progress", progress("training", 1)), ("step", step(1)))
    assert [line.split("  ")[0] for line in lines] == ["step 1/1", "starts again from the first step", "step 1/9"]


class Stream:
    """A gateway whose stream of events breaks after each of the given pieces."""

    def __init__(self, *pieces: list[tuple[str, str, dict[str, Any]]], own_run: str | None = None) -> None:
        self.event_ids: list[str | None] = []
        remaining = list(pieces)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:  # noqa: N805 - the stream's own self is needed
                if handler.path.endswith("/session"):
                    handler.send_response(200)
                    handler.end_headers()
                    handler.wfile.write(json.dumps({"run": own_run}).encode())
                    return
                self.event_ids.append(handler.headers["Last-Event-ID"])
                events = remaining.pop(0)
                body = "".join(
                    (f"id: {id}\n" if id else "") + f"event: {kind}\ndata: {json.dumps(data)}\n\n"
                    for id, kind, data in events
                )
                handler.send_response(200)
                handler.send_header("Content-Type", "text/event-stream")
                handler.end_headers()
                handler.wfile.write(body.encode())

            def log_message(handler, *_: object) -> None:  # noqa: N805
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture(autouse=True)
def output(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    output = io.StringIO()
    monkeypatch.setattr(module, "console", Console(file=output, width=200))
    monkeypatch.setattr(module, "RECONNECT_SECONDS", 0.01)
    return output


def test_a_broken_stream_resumes_after_the_last_event_id(output: io.StringIO) -> None:
    stream = Stream(
        [("g0.s0", "progress", progress()), ("g1.s1", "step", step(1)), ("", "progress", progress("training", 1))],
        [("g2.s2", "step", step(2))],
        [("", "progress", progress("finished", 2))],
    )
    watch(Target("x", stream.url, "secret", "tiny"))
    stream.server.shutdown()
    assert stream.event_ids == [None, "g1.s1", "g2.s2"]
    assert [line.split("  ")[0] for line in output.getvalue().splitlines()] == [
        "step 1/9",
        "step 2/9",
        "tiny: finished",
    ]


@pytest.mark.parametrize(("own_run", "shown"), [(None, ["tiny: is not active"]), ("tiny", ["tiny: finished"])])
def test_an_idle_run_is_waited_for_if_its_gateway_belongs_to_it(
    own_run: str | None, shown: list[str], output: io.StringIO
) -> None:
    pieces = [[("g0.s0", "progress", progress("idle"))], [("", "progress", progress("finished"))]]
    stream = Stream(*pieces, own_run=own_run)
    watch(Target("x", stream.url, "secret", "tiny"))
    stream.server.shutdown()
    assert output.getvalue().splitlines() == shown


def test_a_missing_gateway_is_reported_immediately() -> None:
    with pytest.raises(ConfigError, match=r"the gateway at http://127\.0\.0\.1:1 does not respond"):
        watch(Target("x", "http://127.0.0.1:1", "secret", "tiny"))


def test_a_failed_run_raises_service_failed(output: io.StringIO) -> None:
    stream = Stream([("g0.s0", "progress", progress("failed", 3, error="the disk is full"))])
    with pytest.raises(ServiceFailed, match="the disk is full"):
        watch(Target("x", stream.url, "secret", "tiny"))
    stream.server.shutdown()
