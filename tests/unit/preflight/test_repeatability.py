"""Warnings that the bits of a run depend on the number or timing of its generators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.generation import EngineProperties
from quartet.preflight.repeatability import moved_note, repeatability_notes

PASSED = EngineProperties(
    "torch", True, True, "whole", "tensors", "read back", trial="passed on A, AVX512, 1 thread", trial_digest="01"
)
FAILED = replace(PASSED, batch_invariant=False, trial="failed on A, AVX512, 1 thread")
SERVER = EngineProperties("sglang-server", False, False, "whole", "folder", "reported")


def config(**rollout: Any) -> Config:
    tree = {"data": {"prompts": "p"}, "actor": {"model": "a"}, "reward": {"model": "r"}, "rollout": rollout}
    if rollout.get("max_turns"):
        tree["environment"] = {"class_name": "package.module:Class"}
    return parse_config(tree, "test")


@pytest.mark.parametrize("rollout", [{}, {"generators": 2}, {"max_turns": 3}, {"max_off_policy_steps": 1}])
def test_a_run_with_a_batch_invariant_engine_has_no_warning(rollout: dict[str, Any]) -> None:
    assert repeatability_notes(config(**rollout), [PASSED, PASSED]) == []


@pytest.mark.parametrize(
    ("rollout", "effect"),
    [
        ({}, "this run repeats with the actor's own engine, but with generators"),
        ({"generators": 1}, "the number of generators, the times at which they become free, and the loss of one"),
        ({"max_turns": 3}, "the times at which the environment answers change the last bits"),
        ({"max_turns": 3, "generators": 1}, "the number of generators, the times"),
    ],
)
def test_an_engine_whose_trial_failed_is_warned_of_with_effect_and_remedy(rollout: dict[str, Any], effect: str) -> None:
    [note] = repeatability_notes(config(**rollout), [FAILED, FAILED])
    assert note.startswith("engine torch is not batch-invariant (trial failed on A, AVX512, 1 thread): ")
    assert effect in note
    assert "set MKL_CBWR=AVX2,STRICT in the environment of all services" in note
    # With several turns, the actor's own engine depends on timing, too.
    assert ("or set rollout.generators: 0" in note) == (rollout == {"generators": 1})


@pytest.mark.parametrize(
    ("trial", "remedy"),
    [
        ("not run: on a GPU", "; generate on a CPU"),
        ("not run: the model is a mixture of experts", "; use a dense model"),
    ],
)
def test_an_engine_without_a_trial_has_its_own_remedy(trial: str, remedy: str) -> None:
    [note] = repeatability_notes(config(), [replace(FAILED, trial=trial)])
    assert note.endswith(remedy) or remedy in note


def test_one_generator_that_is_not_batch_invariant_is_enough() -> None:
    assert len(repeatability_notes(config(generators=2), [PASSED, FAILED])) == 1


def test_an_engine_of_a_server_names_the_settings_of_the_server() -> None:
    notes = repeatability_notes(config(generators=1), [SERVER])
    assert len(notes) == 2
    assert "no seed decides" in notes[0]
    assert all("start the server with --enable-deterministic-inference" in note for note in notes)


def test_a_triton_server_that_has_not_named_its_model_is_not_called_unseeded() -> None:
    triton = EngineProperties("triton", False, False, "none", "static", "none")
    assert len(repeatability_notes(config(), [triton])) == 1
    assert len(repeatability_notes(config(), [replace(triton, name="triton (llmapi, static)")])) == 2


def test_in_flight_updates_are_warned_of_whatever_the_engine() -> None:
    settings = config(generators=1)
    rollout = settings.rollout.model_copy(update={"in_flight_updates": True})
    [note] = repeatability_notes(settings.model_copy(update={"rollout": rollout}), [PASSED])
    assert note.startswith("rollout.in_flight_updates: ")


def test_muon_is_warned_of_for_each_model_that_it_trains() -> None:
    tree = {"data": {"prompts": "p"}, "actor": {"model": "a"}, "reward": {"model": "r"}}
    for key in ("actor", "critic"):
        section = {**tree.get(key, {}), "optimizer": {"kind": "muon"}}
        [note] = repeatability_notes(parse_config({**tree, key: section}, "test"), [PASSED])
        assert note.startswith(f"{key}.optimizer.kind muon: torch's Muon computes in bfloat16")
        assert "set ONEDNN_MAX_CPU_ISA=AVX2" in note
    without = {**tree, "critic": {"optimizer": {"kind": "muon"}}, "algorithm": {"estimator": "reinforce_plus_plus"}}
    assert repeatability_notes(parse_config(without, "test"), [PASSED]) == []


def test_generators_that_round_differently_are_warned_of() -> None:
    other = replace(PASSED, trial="passed on B, AVX2, 1 thread", trial_digest="02")
    [note] = repeatability_notes(config(generators=2), [PASSED, other])
    assert "trials passed on A, AVX512, 1 thread; passed on B, AVX2, 1 thread" in note
    assert "use machines of one kind" in note
    # Another number of threads that gives the same bits is none.
    assert repeatability_notes(config(generators=2), [PASSED, replace(PASSED, trial="passed on A, 2 threads")]) == []


def test_a_resume_on_a_machine_that_rounds_differently_is_told() -> None:
    moved = replace(PASSED, trial="passed on B, AVX2, 1 thread", trial_digest="02")
    note = moved_note([PASSED], [moved])
    assert "started with engines that round differently" in note
    assert "passed on A" in note
    assert "passed on B" in note
    assert moved_note([PASSED], [replace(PASSED, trial="passed on A, 2 threads")]) == ""
    assert moved_note([], [PASSED]) == ""
    assert moved_note([PASSED], [SERVER]) == ""
