"""Event streams: every listener gets all events in the run files, also after a reconnect and if it is slow."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from quartet.run_directory.run_files import RunFiles
from tests.gateway.serving import Event, Gateway, Stream, commit, create_run, serving
from tests.waiting import LIMIT

LISTENERS = 20


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return create_run(tmp_path, steps=3)


def steps(events: list[Event]) -> list[int]:
    return [event.data["step"] for event in events if event.kind == "step"]


def test_a_stream_starts_with_the_progress_and_sends_each_new_step(tmp_path: Path, files: RunFiles) -> None:
    with serving(tmp_path) as gateway, gateway.stream("some") as stream:
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        first = next(iter(stream))
        assert first.kind == "progress"
        assert (first.data["state"], first.data["step"], first.data["total_steps"]) == ("idle", 3, 4)
        commit(files, 4)
        events = stream.until("step", step=4)
        assert steps(events) == [4]
        assert events[-1].data["metrics"]["reward_mean"] == 2.0


def test_a_stream_resumes_at_another_gateway_without_a_gap(tmp_path: Path, files: RunFiles) -> None:
    with serving(tmp_path) as gateway, gateway.stream("some") as stream:
        first = next(iter(stream))
        commit(files, 4)
        last = stream.until("step", step=4)[-1]
    commit(files, 5, 6)
    with serving(tmp_path) as gateway:
        for identity, expected in ((first.identity, [4, 5, 6]), (last.identity, [5, 6])):
            with gateway.stream("some", identity) as stream:
                events = stream.until("step", step=6)
                assert steps(events) == expected
                assert not [event for event in events if event.kind == "rewind"]
            with gateway.stream("some", query=f"?after={identity}") as stream:
                assert steps(stream.until("step", step=6)) == expected


def test_a_rollback_is_sent_to_connected_and_to_returning_listeners(tmp_path: Path, files: RunFiles) -> None:
    with serving(tmp_path) as gateway:
        with gateway.stream("some") as stream:
            last_id = next(iter(stream)).identity
            files.truncate_after(1)
            commit(files, 2, seconds=9.0)
            events = stream.until("step", step=2)
            assert [(event.kind, event.data["step"]) for event in events if event.identity] == [
                ("rewind", 1),
                ("step", 2),
            ]
        with gateway.stream("some", last_id) as stream:
            events = stream.until("step", step=2)
            assert [(event.kind, event.data["step"]) for event in events if event.kind != "progress"] == [
                ("rewind", 0),
                ("step", 1),
                ("step", 2),
            ]


def test_every_listener_gets_every_step_even_a_slow_one(tmp_path: Path, files: RunFiles) -> None:
    last, padding = 63, "x" * 100_000
    received: dict[int, list[int]] = {}
    ready = threading.Barrier(LISTENERS + 1)

    def listen(gateway: Gateway, number: int, proceed: threading.Event) -> None:
        with Stream(gateway.address, "some", receive_buffer=None if proceed.is_set() else 1 << 16) as stream:
            next(iter(stream))
            ready.wait(LIMIT)
            assert proceed.wait(LIMIT)
            received[number] = steps(stream.until("step", step=last))

    with serving(tmp_path) as gateway:
        now, later = threading.Event(), threading.Event()
        now.set()
        threads = [
            threading.Thread(target=listen, args=(gateway, number, later if number == 0 else now))
            for number in range(LISTENERS)
        ]
        for thread in threads:
            thread.start()
        ready.wait(LIMIT)
        # More data than all buffers can hold, so that the slow listener falls behind.
        with files.metrics.open("a") as file:
            for step in range(4, last + 1):
                file.write(json.dumps({"step": step, "padding": padding}) + "\n")
                file.flush()
        for thread in threads[1:]:
            thread.join(LIMIT)
        assert set(received) == set(range(1, LISTENERS))
        later.set()
        threads[0].join(LIMIT)
    assert received == {number: list(range(4, last + 1)) for number in range(LISTENERS)}


def test_streams_end_with_the_gateway(tmp_path: Path, files: RunFiles) -> None:
    with serving(tmp_path) as gateway:
        stream = gateway.stream("some")
        next(iter(stream))
        started = time.monotonic()
    assert time.monotonic() - started < 2.0
    assert [event.kind for event in stream if event.kind != "services"] == []


def test_a_malformed_id_and_an_unknown_run_are_refused(tmp_path: Path, files: RunFiles) -> None:
    with serving(tmp_path) as gateway:
        response = gateway.client.get("/runs/some/events", headers={"Last-Event-ID": "7"})
        assert (response.status_code, response.json()["fields"][0]["field"]) == (422, "header.last-event-id")
        response = gateway.client.get("/runs/some/events", params={"after": "7"})
        assert (response.status_code, response.json()["fields"][0]["field"]) == (422, "query.after")
        assert gateway.client.get("/runs/other/events").status_code == 404


def test_damaged_files_are_reported_in_the_progress(tmp_path: Path, files: RunFiles) -> None:
    with files.metrics.open("a") as file:
        file.write("broken\n")
    with serving(tmp_path) as gateway, gateway.stream("some") as stream:
        first = next(iter(stream))
        assert "repair the file" in first.data["error"]
