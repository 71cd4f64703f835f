"""Training with a chat template that changes earlier turns: every branch is trained once, with the engine's own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quartet.config.environment import EnvironmentConfig
from quartet.contract.status import Role
from quartet.contract.trajectory import Trajectory
from quartet.demo.toy_task import ToyTask
from quartet.environments.host import EnvironmentHost
from quartet.run_directory.token_files import TrajectoryTokens
from quartet.services import roles
from quartet.services.generator import factory as generator_factory
from quartet.services.generator.episodes import EnvironmentAccess, Episodes
from quartet.services.orchestrator import step_preparation
from quartet.services.orchestrator.algorithm.experience import PreparedStep
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, assert_same, json_lines, run_to_completion
from tests.training.test_recovery import run_with_lost_services

STEPS = 3
FORGETS = """{% for message in messages %}{{ message.role[0] }}:{% if message.role == 'assistant' and not loop.last %}{{
message.content[-9:] }}{% else %}{{ message.content }}{% endif %}
{% endfor %}{% if add_generation_prompt %}a:{% endif %}"""
"""A template that keeps the end of earlier turns only, as others drop their reasoning. It changes no short turn."""
CHATS: dict[str, Any] = {
    "run": {"steps": STEPS},
    "rollout": {"max_turns": 4, "max_turn_tokens": 8, "max_response_tokens": 100},
    "environment": {"class_name": "quartet.environments.examples:WordPuzzle"},
    "checkpoint": {"every_steps": 1},
    "telemetry": {"tokens_every_steps": 1},
    "recovery": {"backoff_seconds": 0.01},
}


@contextmanager
def chats(toy_task: ToyTask, folder: Path) -> Iterator[list[Trajectory]]:
    """Give an environment with that template to the actors inside the context. Yield the turns of the engine, as it made them."""
    template = folder / "forgets.jinja"
    template.write_text(FORGETS)
    settings = EnvironmentConfig(
        class_name="quartet.environments.examples:WordPuzzle",
        arguments={"turns": 4},
        observations="chat",
        chat_template=template,
    )
    host, turns, add = EnvironmentHost(settings, str(toy_task.policy)), list[Trajectory](), Episodes.add

    def record(self: Episodes, turn: Trajectory) -> None:
        turns.append(turn)
        add(self, turn)

    access = EnvironmentAccess(Local(host), 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Episodes, "add", record)
        for module in (roles, generator_factory):
            patch.setattr(module, "environment_access", lambda config, credentials, records: access)
        yield turns
    host.close()


class Local:
    """An environment host in this process, as the client of the service is called."""

    def __init__(self, host: EnvironmentHost) -> None:
        self.reset, self.step, self.restore, self.end = host.reset, host.step, host.restore, host.close_session


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chats")


@pytest.fixture(scope="module")
def finished(make: MakeConfig, toy_task: ToyTask, folder: Path) -> tuple[Run, list[Trajectory], list[PreparedStep]]:
    """A finished run, the turns of its engine, and its experience."""
    prepared, prepare = list[PreparedStep](), step_preparation.prepare_step

    def record(*arguments: Any, **options: Any) -> PreparedStep:
        prepared.append(prepare(*arguments, **options))
        return prepared[-1]

    with chats(toy_task, folder) as turns, pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_preparation, "prepare_step", record)
        return run_to_completion(make(**CHATS)), turns, prepared


def branches_of(run: Run, step: int, index: int) -> list[TrajectoryTokens]:
    tokens = run.files.read_tokens(step, index)
    assert tokens is not None
    return [tokens, *tokens.further_branches]


def test_the_records_have_the_tree_of_each_episode(finished: tuple[Run, list[Trajectory], list[PreparedStep]]) -> None:
    run, _, _ = finished
    numbers, kept = [], 0
    for step, metrics in enumerate(run.metrics, 1):
        rows = run.trajectories(step)
        for index, row in enumerate(rows):
            further, tokens = row.get("further_branches", []), branches_of(run, step, index)
            segments = [segment for part in (row, *further) for segment in part["segments"]]
            numbers.append(len(tokens))
            kept += any(len(part["segments"]) > 1 for part in (row, *further))
            assert len(tokens) == 1 + len(further)
            assert sum(int(part.response_mask.sum()) for part in tokens) == row["response_tokens"]
            rewards = [segment["reward"] for segment in segments if segment["role"] == "policy"]
            assert row["parts"]["environment"] == pytest.approx(sum(rewards))
            for number, (part, own) in enumerate(zip(further, tokens[1:], strict=True), 1):
                before = tokens[part["parent"]]
                shared = np.concatenate([before.prompt_ids, before.response_ids])[: part["shared_tokens"]]
                assert part["parent"] == number - 1
                assert own.prompt_ids[: len(shared)].tolist() == shared.tolist()
                assert len(own.prompt_ids) == part["prompt_tokens"] > len(shared) >= len(tokens[0].prompt_ids)
        assert metrics["branches_mean"] == pytest.approx(np.mean(numbers[-len(rows) :]))
    assert set(numbers) == {1, 2, 3, 4}
    assert kept, "the template changes every turn"


def test_every_turn_of_the_engine_is_trained_once_after_the_tokens_that_it_saw(
    finished: tuple[Run, list[Trajectory], list[PreparedStep]],
) -> None:
    run, turns, prepared = finished
    assert len(prepared) == STEPS
    trained = []
    for step in prepared:
        experience = step.experience
        mask = np.split(experience.response_mask, np.cumsum(experience.batch.response_lengths)[:-1])
        for id, ids, size, own in zip(
            experience.ids, experience.batch.sequences(), experience.batch.prompt_lengths, mask, strict=True
        ):
            whole = np.concatenate([np.zeros(size, np.bool_), own])
            # Runs of the policy's tokens. An observation of at least one token is between two turns.
            edges = np.flatnonzero(np.diff(np.concatenate([[False], whole, [False]]).astype(int)))
            trained += [
                (id.partition("#")[0], tuple(ids[:start].tolist()), tuple(ids[start:end].tolist()))
                for start, end in zip(edges[::2], edges[1::2], strict=True)
            ]
    made = [(str(turn.id), tuple(turn.prompt_ids.tolist()), tuple(turn.response_ids.tolist())) for turn in turns]
    assert sorted(trained) == sorted(made)
    assert sum(int(step.experience.actor_mask.sum()) for step in prepared) == sum(len(ids) for _, _, ids in made)
    assert run.code == 0


def test_plain_transformers_computes_the_log_probs_of_every_branch(
    finished: tuple[Run, list[Trajectory], list[PreparedStep]], toy_task: ToyTask
) -> None:
    run, _, _ = finished
    model = AutoModelForCausalLM.from_pretrained(toy_task.policy, dtype=torch.float32).eval()
    differences = []
    for index in range(len(run.trajectories(1))):
        for branch in branches_of(run, 1, index):
            ids = torch.from_numpy(np.concatenate([branch.prompt_ids, branch.response_ids])).long()
            with torch.no_grad():
                logits = model(ids[None]).logits[0].double()
            expected = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[len(branch.prompt_ids) - 1 :, 0]
            own = branch.response_mask
            assert own.any()
            for values in (branch.log_probs, branch.reference_log_probs):
                differences.append(np.abs(values[own] - expected.numpy()[own]).max())
    assert max(differences) < 1e-5


def test_a_run_of_branches_that_loses_the_actor_is_bit_identical(
    make: MakeConfig,
    finished: tuple[Run, list[Trajectory], list[PreparedStep]],
    toy_task: ToyTask,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with chats(toy_task, folder):
        losses = {(2, "generate"): Role.ACTOR, (3, "update"): Role.ACTOR}
        assert_same(run_with_lost_services(make(**CHATS), losses, monkeypatch), finished[0])


# tests/services/orchestrator/algorithm/test_branches.py has both rules.
@pytest.mark.parametrize("credit", [pytest.param("every", marks=pytest.mark.slow), "last"])
def test_group_estimators_and_evaluations_take_episodes_of_branches(
    make: MakeConfig, toy_task: ToyTask, folder: Path, credit: str
) -> None:
    config = make(
        **{**CHATS, "rollout": {**CHATS["rollout"], "samples_per_prompt": 2}},
        algorithm={"estimator": "grpo", "branch_credit": credit},
        data={"validation": str(toy_task.prompts)},
        evaluation={"every_steps": STEPS, "max_prompts": 3},
    )
    with chats(toy_task, folder):
        run = run_to_completion(config)
    for step in range(1, STEPS + 1):
        for index in range(len(run.trajectories(step))):
            *before, last = branches_of(run, step, index)
            advantages = {float(value) for part in (*before, last) for value in part.advantages[part.response_mask]}
            assert len(advantages) == 1, "an episode has one advantage"
            assert last.response_mask[-1]
    rows = json_lines(run.files.evaluations / "step-000000.jsonl")
    assert any(row.get("branches_sampled", 1) > 1 for row in rows)
