"""Events from run files: none is lost or repeated when lines are appended, files replaced or steps rolled back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quartet.contract.control import Alert
from quartet.gateway.events.event_cursor import EventCursor
from quartet.gateway.events.event_history import MAX_BATCH, EventHistory, EventReader
from quartet.gateway.readers.jsonl_tail import JsonlTail
from quartet.run_directory.run_files import RunFiles


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path)


def commit(files: RunFiles, *steps: int, seconds: float = 1.0) -> None:
    for step in steps:
        files.append_metrics({"step": step, "reward_mean": 0.5 * step, "seconds": seconds})


def alert(step: int) -> Alert:
    return Alert(step, "kl_runaway", "warn", "kl_mean 30", "lower it")


def events(data: bytes) -> list[tuple[str, dict[str, Any], str]]:
    """Return kind, data and id of each event."""
    results = []
    for block in data.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        results.append((fields["event"], json.loads(fields["data"]), fields.get("id", "")))
    return results


def read_all(history: EventHistory, reader: EventReader) -> list[tuple[str, dict[str, Any], str]]:
    results = []
    while data := history.read(reader):
        results += events(data)
    return results


def outline(result: list[tuple[str, dict[str, Any], str]]) -> list[tuple[str, int]]:
    return [(kind, data["step"]) for kind, data, _ in result]


def test_events_are_ordered_by_step_and_carry_their_data(files: RunFiles) -> None:
    files.write_evaluation(0, {"win_rate": 0.5}, [])
    commit(files, 1)
    files.append_alert(alert(1))
    files.changes.write_text(
        json.dumps({"setting": "kl_coefficient", "before": 0.1, "after": 0.2, "step": 2, "user": "operator", "at": 1.5})
        + "\n"
    )
    commit(files, 2)
    files.write_evaluation(2, {"win_rate": float("nan")}, [])
    checkpoint = files.checkpoints / "step-000002"
    checkpoint.mkdir(parents=True)
    manifest = {
        "run": "r",
        "step": 2,
        "leader_epoch": 1,
        "state": {},
        "roles": ["actor"],
        "files": {"actor/x": {"bytes": 7, "sha256": ""}},
    }
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "format": 1}))
    (files.checkpoints / "best").symlink_to("step-000002")

    history = EventHistory(files)
    reader, first_data = history.start(EventCursor())
    result = read_all(history, reader)

    assert first_data == b""
    assert outline(result) == [
        ("evaluation", 0),
        ("step", 1),
        ("alert", 1),
        ("change", 2),
        ("step", 2),
        ("evaluation", 2),
        ("checkpoint", 2),
    ]
    by_kind = {kind: data for kind, data, _ in result}
    assert by_kind["step"]["metrics"]["reward_mean"] == 1.0
    assert by_kind["alert"]["remedy"] == "lower it"
    assert by_kind["change"]["after"] == 0.2
    assert by_kind["evaluation"]["metrics"]["win_rate"] is None
    assert by_kind["checkpoint"]["bytes"] == 7


def test_a_reader_continues_after_any_event_id_at_another_gateway(files: RunFiles) -> None:
    files.write_evaluation(0, {"win_rate": 0.5}, [])
    commit(files, 1, 2, 3)
    files.append_alert(alert(2))
    first = EventHistory(files)
    reader, _ = first.start(EventCursor())
    sent = read_all(first, reader)
    assert len(sent) == 5
    for number, (_, _, identity) in enumerate(sent, 1):
        other = EventHistory(files)
        reader, first_data = other.start(EventCursor.parse(identity))
        assert first_data == b""
        assert read_all(other, reader) == sent[number:]


def test_without_a_cursor_a_reader_gets_only_new_events(files: RunFiles) -> None:
    commit(files, 1, 2)
    history = EventHistory(files)
    reader, _ = history.start(None)
    assert history.read_cached(reader) == b""
    commit(files, 3)
    assert history.refresh()
    assert outline(read_all(history, reader)) == [("step", 3)]
    assert not history.refresh()


def test_an_incomplete_line_is_not_an_event(files: RunFiles) -> None:
    commit(files, 1)
    history = EventHistory(files)
    reader, _ = history.start(None)
    line = json.dumps({"step": 2, "reward_mean": 1.0})
    with files.metrics.open("a") as file:
        file.write(line[:10])
        file.flush()
        history.refresh()
        assert history.read(reader) == b""
        file.write(line[10:] + "\n")
    history.refresh()
    assert outline(read_all(history, reader)) == [("step", 2)]


def test_a_rollback_sends_a_rewind_and_then_the_repeated_steps(files: RunFiles) -> None:
    commit(files, 1, 2, 3, 4)
    files.append_alert(alert(2))
    files.append_alert(alert(4))
    history = EventHistory(files)
    reader, _ = history.start(None)
    first_id = events(history.read(history.start(EventCursor())[0]))[0][2]
    slow_reader, _ = history.start(EventCursor.parse(first_id))
    files.truncate_after(2)
    commit(files, 3, seconds=2.0)
    files.append_alert(alert(3))
    history.refresh()
    assert history.read_cached(reader) is None
    assert outline(read_all(history, reader)) == [("rewind", 2), ("step", 3), ("alert", 3)]
    # A reader that had not reached the discarded steps gets no rewind.
    assert outline(read_all(history, slow_reader)) == [("step", 2), ("alert", 2), ("step", 3), ("alert", 3)]


def test_an_id_of_discarded_steps_restarts_the_history(files: RunFiles) -> None:
    commit(files, 1, 2, 3)
    history = EventHistory(files)
    cursor = history.start(None)[0].cursor
    files.truncate_after(1)
    restarted = EventHistory(files)
    reader, first_data = restarted.start(cursor)
    assert outline(events(first_data) + read_all(restarted, reader)) == [("rewind", 0), ("step", 1)]
    # The same number of steps, but different ones.
    commit(files, 2, 3, seconds=2.0)
    reader, first_data = restarted.start(cursor)
    assert outline(events(first_data) + read_all(restarted, reader)) == [
        ("rewind", 0),
        ("step", 1),
        ("step", 2),
        ("step", 3),
    ]


def change(step: int, at: float) -> dict[str, Any]:
    return {"setting": "kl_coefficient", "before": 0.1, "after": 0.2, "step": step, "user": "operator", "at": at}


@pytest.mark.parametrize("committed", [0, 3])
def test_a_discarded_change_does_not_hide_its_replacement(files: RunFiles, committed: int) -> None:
    commit(files, *range(1, committed + 1))
    first = EventHistory(files)
    live, _ = first.start(None)
    files.append_changes([change(committed + 1, 1.0)])
    first.refresh()
    cursor = EventCursor.parse(read_all(first, live)[-1][2])

    files.truncate_changes_after(committed)
    first.refresh()
    files.append_changes([change(committed + 2, 2.0)])
    first.refresh()
    # A connected reader gets a rewind; a returning reader gets the whole history.
    assert outline(read_all(first, live)) == [("rewind", committed), ("change", committed + 2)]
    for history in (first, EventHistory(files)):
        reader, first_data = history.start(cursor)
        assert outline(events(first_data) + read_all(history, reader)) == [
            ("rewind", 0),
            *(("step", step) for step in range(1, committed + 1)),
            ("change", committed + 2),
        ]


def test_rewriting_a_file_with_the_same_lines_is_not_a_rollback(files: RunFiles) -> None:
    commit(files, 1, 2)
    files.write_evaluation(0, {"win_rate": 0.5}, [])
    history = EventHistory(files)
    reader, _ = history.start(None)
    files.truncate_after(2)
    files.write_evaluation(2, {"win_rate": 0.6}, [])
    history.refresh()
    assert outline(read_all(history, reader)) == [("evaluation", 2)]


def test_a_new_run_of_the_same_name_rewinds_to_step_0(files: RunFiles) -> None:
    commit(files, 1, 2)
    history = EventHistory(files)
    reader, _ = history.start(None)
    files.metrics.unlink()
    history.refresh()
    commit(files, 1, seconds=3.0)
    history.refresh()
    assert outline(read_all(history, reader)) == [("rewind", 0), ("step", 1)]


def test_a_damaged_line_is_skipped(files: RunFiles) -> None:
    commit(files, 1)
    with files.metrics.open("a") as file:
        file.write("{broken\n[]\n")
    commit(files, 2)
    history = EventHistory(files)
    reader, _ = history.start(EventCursor())
    assert outline(read_all(history, reader)) == [("step", 1), ("step", 2)]


def test_nan_and_infinity_become_null_at_any_depth(files: RunFiles) -> None:
    files.alerts.write_text('{"step": 1, "evidence": {"values": [1e999, NaN, 0.5]}}\n')
    history = EventHistory(files)
    reader, _ = history.start(EventCursor())
    (_, data, _) = read_all(history, reader)[0]
    assert data["evidence"] == {"values": [None, None, 0.5]}


def test_a_long_history_is_read_completely_in_batches(files: RunFiles) -> None:
    steps = 2 * MAX_BATCH + 7
    files.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, steps + 1)))
    files.alerts.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, steps + 1, 2)))
    history = EventHistory(files)
    reader, _ = history.start(EventCursor())
    first = events(history.read(reader))
    assert len(first) == MAX_BATCH
    results = [*first, *read_all(history, reader)]
    assert [data["step"] for kind, data, _ in results if kind == "step"] == list(range(1, steps + 1))
    assert outline(results) == sorted(outline(results), key=lambda event: (event[1], event[0] == "alert"))


def test_readers_with_the_same_cursor_share_a_batch(files: RunFiles) -> None:
    commit(files, 1)
    history = EventHistory(files)
    readers = [history.start(EventCursor())[0] for _ in range(3)]
    batches = [history.read(readers[0]), *(history.read_cached(reader) for reader in readers[1:])]
    assert batches[0]
    assert all(data is batches[0] for data in batches)


@pytest.mark.parametrize(
    "text", ["", "7", "g.s1.a0.e0.c0.k0", "g1.s-1.a0.e0.c0.k0", "g1.s1.a0.e0.c0.k0 ", "g1.s1.a0.e0.c0"]
)
def test_a_malformed_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected the id of an event"):
        EventCursor.parse(text)


def test_a_file_overwritten_in_place_is_recognised_as_changed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("one\ntwo\n")
    lines = JsonlTail(path)
    assert lines.refresh() is None
    with path.open("r+") as file:
        file.write("one\nTWO and more\nthree\n")
    assert lines.refresh() == 1
    assert lines.read(0, 9) == [b"one", b"TWO and more", b"three"]
    # Between the replacement and the next refresh, no lines of the new file are returned.
    path.write_text("one\nnine and more\nthree\n")
    assert lines.read(0, 9) == [b"one"]
