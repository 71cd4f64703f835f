"""Micro-batch sizes are measured once, stored with the run, and used for all of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from quartet.config import Config, parse_config
from quartet.run_directory.run_files import RunFiles
from quartet.services import trainable_model as trained
from quartet.services.orchestrator.algorithm import update_request
from quartet.services.orchestrator.checkpointing import recovery
from quartet.types import TRAINED_ROLES
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, active_run, assert_same, fleet, merged, orchestrator, run_to_the_end
from tests.training.test_resume import break_off

COMMON: dict[str, Any] = {"run": {"steps": 4}, "checkpoint": {"every_steps": 2}, "recovery": {"backoff_seconds": 0.01}}
SMALL = 2.5 * 2**20
"""Free bytes at which the tiny models' updates are split, as ample memory would not."""


def changed(config: Config, **changes: Any) -> Config:
    return parse_config(merged(config.model_dump(mode="json"), changes), "test")


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Leave services that start from now on so many bytes of free memory."""
    return lambda size: monkeypatch.setattr(trained, "free_bytes", lambda model, limits: int(size))


@pytest.fixture(scope="module")
def small(make: MakeConfig) -> Run:
    """A run to its end in little memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained, "free_bytes", lambda model, limits: int(SMALL))
        return run_to_the_end(make(**COMMON))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Role, step and tokens of every update that is asked for."""
    result: list[tuple[str, int, int]] = []
    real = update_request.start_update

    def begin(client: Any, config: Any, step: int, epoch: int, rate: Any, tokens: int) -> Any:
        result.append((client.role.value, step, tokens))
        return real(client, config, step, epoch, rate, tokens)

    for module in (update_request, recovery):
        monkeypatch.setattr(module, "start_update", begin)
    return result


def recorded(files: RunFiles) -> dict[str, int]:
    result: dict[str, int] = json.loads(files.identity.read_text())["micro_batch_tokens"]
    return result


def test_measured_micro_batches_are_stored_and_noted(small: Run) -> None:
    result = recorded(small.files)
    assert result.keys() == {"actor", "critic"}
    assert all(tokens < 4096 and tokens & (tokens - 1) == 0 for tokens in result.values())
    assert any(
        note.startswith(f"actor: updates use micro-batches of {result['actor']} tokens")
        for note in small.progress.notes
    )


def test_ample_memory_is_not_noted(make: MakeConfig) -> None:
    run = run_to_the_end(make(**COMMON))
    assert recorded(run.files) == {"actor": 4096, "critic": 4096}
    assert not any("micro-batches of" in note for note in run.progress.notes)


@pytest.mark.parametrize("free", [2**40, SMALL * 0.5])
def test_a_resume_with_other_free_memory_is_bit_identical(
    free: float, make: MakeConfig, small: Run, leave: Any, monkeypatch: pytest.MonkeyPatch, asked: Any
) -> None:
    config = make(**COMMON)
    leave(SMALL)
    break_off(config, "generate", 4, monkeypatch)
    before = recorded(RunFiles(config.run_directory))
    leave(free)
    run = run_to_the_end(config)
    assert_same(run, small)
    assert recorded(run.files) == before == recorded(small.files)
    assert {(role, tokens) for role, _, tokens in asked} == set(before.items())
    short = [note for note in run.progress.notes if "it may run out" in note]
    assert bool(short) == (free < SMALL)


def test_a_service_restart_with_other_free_memory_is_bit_identical(
    make: MakeConfig, small: Run, leave: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(**COMMON)
    leave(SMALL)
    with fleet(config) as started:
        real, lost = update_request.start_update, []

        def begin(client: Any, *arguments: Any) -> Any:
            if arguments[1] == 3 and not lost:
                lost.append(client.role)
                leave(2**40)
                for role in TRAINED_ROLES:
                    started.restart(role)
            return real(client, *arguments)

        monkeypatch.setattr(update_request, "start_update", begin)
        with orchestrator(started.config) as running:
            run = running.finish()
    assert lost
    assert_same(run, small)


def test_a_configured_micro_batch_size_is_used_by_every_update(make: MakeConfig, asked: Any) -> None:
    run = run_to_the_end(make(**COMMON, actor={"micro_batch_tokens": 48}))
    assert recorded(run.files) == {"actor": 48, "critic": 4096}
    assert {(role, tokens) for role, _, tokens in asked} == {("actor", 48), ("critic", 4096)}


@pytest.mark.parametrize(("before", "now"), [(48, None), (None, 48), (4096, 48)])
@pytest.mark.sampled(2)
def test_a_changed_micro_batch_size_is_refused(
    before: int | None, now: int | None, make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(**COMMON, actor={"micro_batch_tokens": before})
    break_off(config, "generate", 3, monkeypatch)
    with active_run(changed(config, actor={"micro_batch_tokens": now})) as running:
        run = running.finish()
    assert run.code == 2
    assert "actor.micro_batch_tokens" in run.progress.error


def test_gradient_checkpointing_may_change_on_resume(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(**COMMON)
    undisturbed = run_to_the_end(make(**COMMON))
    break_off(config, "generate", 3, monkeypatch)
    on = {"gradient_checkpointing": True}
    assert_same(run_to_the_end(changed(config, actor=on, critic=on)), undisturbed)
