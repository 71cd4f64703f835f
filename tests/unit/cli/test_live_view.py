"""Printed messages of a run, also if a second orchestrator continues it."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from quartet.cli.progress_view import make_view
from quartet.contract.control import ENDLESS_STEPS, Alert, Progress
from quartet.launcher.progress_text import Messages

METRICS = {
    "reward_mean": 0.5,
    "kl_mean": 0.1,
    "entropy": 2.0,
    "eos_rate": 1.0,
    "response_tokens": 64.0,
    "response_tokens_mean": 8.0,
    "seconds": 2.0,
}


def progress(step: int, *notes: str, **metrics: float) -> Progress:
    return Progress(run="tiny", step=step, total_steps=9, notes=list(notes), metrics=metrics)


def alert(step: int, guard: str) -> Alert:
    return Alert(step=step, guard=guard, action="warn", evidence="it rises", remedy="lower it")


def test_a_step_without_scores_is_shown_without_a_reward() -> None:
    output = io.StringIO()
    with make_view(Console(file=output, width=200), "runs/tiny") as view:
        view.show(progress(1, **{name: value for name, value in METRICS.items() if name != "reward_mean"}))
    assert "step 1/9  kl 0.100  entropy 2.00" in output.getvalue()


def test_each_note_is_printed_once_per_orchestrator() -> None:
    messages = Messages(Path("runs/tiny"))
    assert messages.new_lines(progress(1, "a", "b")) == ["note: a", "note: b"]
    assert messages.new_lines(progress(1, "a", "b", "b")) == ["note: b"]
    assert messages.new_lines(progress(1, "a", "b", "b", "warning: w")) == ["warning: w"]
    assert messages.new_lines(progress(2, "a", "b", "b", "warning: w")) == []
    assert messages.new_lines(progress(2, "a", "resumed", "c", "d")) == [
        "note: a",
        "note: resumed",
        "note: c",
        "note: d",
    ]
    assert messages.new_lines(progress(2)) == []


def test_each_alert_is_printed_once_per_orchestrator() -> None:
    messages = Messages(Path("runs/tiny"))
    first = Progress("toy", 9, alerts=[alert(1, "collapse"), alert(2, "collapse")])
    assert len(messages.new_lines(first)) == 2
    assert messages.new_lines(first) == []
    second = Progress("toy", 9, alerts=[alert(4, "kl"), alert(5, "kl"), alert(6, "kl")])
    assert [line[:25] for line in messages.new_lines(second)] == ["guard kl (warn) after ste" for _ in range(3)]


def test_each_entry_is_printed_once_if_the_start_of_the_list_is_dropped() -> None:
    messages = Messages(Path("runs/tiny"))

    def new_entries(before: int, notes: str) -> str:
        """Return the new entries of a list of single letters."""
        alerts = [alert(ord(letter), "kl") for letter in notes]
        lines = messages.new_lines(
            Progress("toy", 9, notes=list(notes), notes_before=before, alerts=alerts, alerts_before=before)
        )
        new = [line.removeprefix("note: ") for line in lines if line.startswith("note: ")]
        assert [line.split(":")[0] for line in lines[len(new) :]] == [
            f"guard kl (warn) after step {ord(letter)}" for letter in new
        ]
        return "".join(new)

    assert new_entries(0, "abc") == "abc"
    assert new_entries(1, "bcd") == "d"
    assert new_entries(1, "bcd") == ""
    assert new_entries(3, "def") == "ef"
    assert new_entries(4, "efe") == "e"
    assert new_entries(9, "eee") == "eee"
    # A second orchestrator starts a new list, which is shorter or different.
    assert new_entries(0, "eee") == "eee"
    assert new_entries(1, "zee") == "zee"


@pytest.mark.parametrize("terminal", [False, True])
def test_messages_about_processes_are_printed_between_steps(terminal: bool) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120)
    with make_view(console, Path("runs/tiny")) as view:
        view.show(progress(1, **METRICS))
        view.print_line("critic: killed by SIGKILL; restarted (1 of 5 in a row)")
        view.show(progress(2, **METRICS))
    assert "critic: killed by SIGKILL; restarted (1 of 5 in a row)" in output.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_without_an_end_has_neither_a_total_nor_time_left(terminal: bool) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120)
    with make_view(console, Path("runs/tiny")) as view:
        for step in (4, 5):
            view.show(replace(progress(step, **METRICS), total_steps=ENDLESS_STEPS))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    assert "5" in text
    assert "left" not in text
    assert "5/" not in text
    assert "1000" not in text


def test_a_step_without_metrics_is_not_printed() -> None:
    output = io.StringIO()
    with make_view(Console(file=output, width=120), Path("runs/tiny")) as view:
        view.show(progress(3))
        assert output.getvalue() == ""
        view.show(progress(3, **METRICS))
        view.show(progress(2, **METRICS))
    assert output.getvalue().startswith("step 3/9  reward +0.500")
    assert output.getvalue().count("step") == 1


def test_recomputed_steps_are_printed_again_after_a_rewind() -> None:
    output = io.StringIO()
    with make_view(Console(file=output, width=200), Path("runs/tiny")) as view:
        for step in (1, 2, 3):
            view.show(progress(step, **METRICS))
        # A late message about an earlier step is not a rewind.
        view.show(progress(2, **METRICS))
        view.show(progress(3, **METRICS))
        view.rewind(1)
        view.show(progress(2, **METRICS))
    assert [line.split()[1] for line in output.getvalue().splitlines()] == ["1/9", "2/9", "3/9", "2/9"]
