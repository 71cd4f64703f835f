"""Micro-batch sizes are measured once, stored with the run, and used until its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.status import TRAINED_ROLES
from quartet.run_directory.run_files import RunFiles
from quartet.services import trainable_model as trained
from quartet.services.orchestrator.algorithm import update_request
from quartet.services.orchestrator.checkpointing import recovery
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, active_run, assert_same, fleet, merged, orchestrator, run_to_completion
from tests.training.test_resume import crash_run

COMMON: dict[str, Any] = {"run": {"steps": 4}, "checkpoint": {"every_steps": 2}, "recovery": {"backoff_seconds": 0.01}}
SMALL = 2.5 * 2**20
"""Free bytes at which the updates of the tiny models use smaller micro-batches than with ample memory."""


def changed(config: Config, **changes: Any) -> Config:
    return parse_config(merged(config.model_dump(mode="json"), changes), "test")


@pytest.fixture
def set_free_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the bytes of free memory of services that start later."""
    return lambda size: monkeypatch.setattr(trained, "free_bytes", lambda model, limits: int(size))


@pytest.fixture(scope="module")
def low_memory_run(make: MakeConfig) -> Run:
    """A finished run with little memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained, "free_bytes", lambda model, limits: int(SMALL))
        return run_to_completion(make(**COMMON))


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Role, step and micro-batch tokens of every requested update."""
    result: list[tuple[str, int, int]] = []
    real = update_request.start_update

    def recorded_start(client: Any, config: Any, step: int, epoch: int, rate: Any, tokens: int, *others: Any) -> Any:
        result.append((client.role.value, step, tokens))
        return real(client, config, step, epoch, rate, tokens, *others)

    for module in (update_request, recovery):
        monkeypatch.setattr(module, "start_update", recorded_start)
    return result


def recorded(files: RunFiles) -> dict[str, int]:
    result: dict[str, int] = json.loads(files.identity.read_text())["micro_batch_tokens"]
    return result


def test_measured_micro_batches_are_stored_and_noted(low_memory_run: Run) -> None:
    result = recorded(low_memory_run.files)
    assert result.keys() == {"actor", "critic"}
    assert all(tokens < 4096 and tokens & (tokens - 1) == 0 for tokens in result.values())
    assert any(
        note.startswith(f"actor: updates use micro-batches of {result['actor']} tokens")
        for note in low_memory_run.progress.notes
    )


@pytest.mark.parametrize("free", [2**40, SMALL * 0.5])
def test_a_resume_with_other_free_memory_is_bit_identical(
    free: float,
    make: MakeConfig,
    low_memory_run: Run,
    set_free_memory: Any,
    monkeypatch: pytest.MonkeyPatch,
    updates: Any,
) -> None:
    config = make(**COMMON)
    set_free_memory(SMALL)
    crash_run(config, "generate", 4, monkeypatch)
    before = recorded(RunFiles(config.run_directory))
    set_free_memory(free)
    run = run_to_completion(config)
    assert_same(run, low_memory_run)
    assert recorded(run.files) == before == recorded(low_memory_run.files)
    assert {(role, tokens) for role, _, tokens in updates} == set(before.items())
    short = [note for note in run.progress.notes if "it may run out" in note]
    assert bool(short) == (free < SMALL)


def test_a_service_restart_with_other_free_memory_is_bit_identical(
    make: MakeConfig, low_memory_run: Run, set_free_memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(**COMMON)
    set_free_memory(SMALL)
    with fleet(config) as running_fleet:
        real, lost = update_request.start_update, []

        def recorded_start(client: Any, *arguments: Any) -> Any:
            if arguments[1] == 3 and not lost:
                lost.append(client.role)
                set_free_memory(2**40)
                for role in TRAINED_ROLES:
                    running_fleet.restart(role)
            return real(client, *arguments)

        monkeypatch.setattr(update_request, "start_update", recorded_start)
        with orchestrator(running_fleet.config) as running:
            run = running.finish()
    assert lost
    assert_same(run, low_memory_run)


def test_a_configured_micro_batch_size_is_used_by_every_update(make: MakeConfig, updates: Any) -> None:
    run = run_to_completion(make(**COMMON, actor={"micro_batch_tokens": 48}))
    assert recorded(run.files) == {"actor": 48, "critic": 4096}
    assert {(role, tokens) for role, _, tokens in updates} == {("actor", 48), ("critic", 4096)}


def test_a_changed_micro_batch_size_is_refused(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(**COMMON, actor={"micro_batch_tokens": 48})
    crash_run(config, "generate", 3, monkeypatch)
    with active_run(changed(config, actor={"micro_batch_tokens": None})) as running:
        run = running.finish()
    assert run.code == 2
    assert "actor.micro_batch_tokens" in run.progress.error


def test_gradient_checkpointing_may_change_on_resume(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(**COMMON)
    uninterrupted = run_to_completion(make(**COMMON))
    # Ample memory is not noted.
    assert recorded(uninterrupted.files) == {"actor": 4096, "critic": 4096}
    assert not any("micro-batches of" in note for note in uninterrupted.progress.notes)
    crash_run(config, "generate", 3, monkeypatch)
    enabled = {"gradient_checkpointing": True}
    assert_same(run_to_completion(changed(config, actor=enabled, critic=enabled)), uninterrupted)
