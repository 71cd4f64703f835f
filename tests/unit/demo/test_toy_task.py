"""A miniature of the demo's toy task: it loads, is reproducible byte by byte, and is recreated if incomplete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from quartet.demo.pretraining import PretrainingProgress, Schedule, Shape
from quartet.demo.toy_task import Recipe, ToyTask, make_toy_task
from quartet.errors import ConfigError

MINIATURE = Recipe(
    vocabulary=300,
    shape=Shape(hidden=16, layers=1, heads=2, positions=256),
    reviews=64,
    preferences=32,
    policy=Schedule(steps=4, batch_sequences=8),
    reward=Schedule(steps=3, batch_sequences=8),
)


def make_miniature(directory: Path, seed: int = 0) -> tuple[ToyTask, list[PretrainingProgress]]:
    """Return the toy task and the progress of its creation. The progress is empty if the task was reused."""
    progress: list[PretrainingProgress] = []
    return make_toy_task(directory, seed=seed, progress=progress.append, recipe=MINIATURE), progress


@pytest.fixture(scope="module")
def toy_task(tmp_path_factory: pytest.TempPathFactory) -> ToyTask:
    return make_miniature(tmp_path_factory.mktemp("made") / "toy-task")[0]


def test_checkpoints_load_with_the_auto_classes(toy_task: ToyTask) -> None:
    tokenizer = AutoTokenizer.from_pretrained(toy_task.policy)
    policy = AutoModelForCausalLM.from_pretrained(toy_task.policy)
    reward = AutoModelForSequenceClassification.from_pretrained(toy_task.reward)
    assert policy.config.vocab_size == reward.config.vocab_size == len(tokenizer)
    assert reward.config.num_labels == 1
    for config in (policy.config, reward.config):
        assert config.pad_token_id == tokenizer.pad_token_id
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id != config.eos_token_id
    ids = tokenizer("a quick lunch with friends :", return_tensors="pt").input_ids
    assert torch.isfinite(policy(ids).logits).all()
    assert reward(ids).logits.shape == (1, 1)


def test_both_checkpoints_have_the_same_tokenizer_without_added_special_tokens(toy_task: ToyTask) -> None:
    assert (toy_task.policy / "tokenizer.json").read_bytes() == (toy_task.reward / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(toy_task.policy)
    text = "a quick lunch, naïve – 日本 :"
    ids = tokenizer(text).input_ids
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(ids) == text


def test_prompts_are_json_lines_of_text(toy_task: ToyTask) -> None:
    lines = [json.loads(line) for line in toy_task.prompts.read_text().splitlines()]
    assert len(lines) >= 200
    assert all(set(line) == {"text"} and line["text"].strip() for line in lines)


def test_progress_counts_every_step_of_both_stages(tmp_path: Path) -> None:
    _, progress = make_miniature(tmp_path / "toy-task")
    assert [(p.stage, p.step, p.steps) for p in progress] == [
        *(("policy", step, 4) for step in (1, 2, 3, 4)),
        *(("reward", step, 3) for step in (1, 2, 3)),
    ]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_different_ones(toy_task: ToyTask, tmp_path: Path) -> None:
    torch.manual_seed(12345)  # Neither the random state of the caller
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # nor the number of threads has an effect.
    try:
        again, _ = make_miniature(tmp_path / "again")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    other, _ = make_miniature(tmp_path / "other", seed=1)
    for name in ("policy", "reward"):
        weights = [(getattr(w, name) / "model.safetensors").read_bytes() for w in (toy_task, again, other)]
        assert weights[0] == weights[1]
        assert weights[0] != weights[2]


def test_creating_a_toy_task_does_not_change_the_callers_random_state(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    make_miniature(tmp_path / "toy-task")
    assert torch.equal(torch.rand(3), expected)


def test_a_complete_toy_task_is_reused(tmp_path: Path) -> None:
    first, _ = make_miniature(tmp_path / "toy-task")
    stamp = (first.policy / "model.safetensors").stat().st_mtime_ns
    again, progress = make_miniature(tmp_path / "toy-task")
    assert again == first
    assert progress == []
    assert (first.policy / "model.safetensors").stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    "missing", ["toy_task.json", "prompts.jsonl", "reward/model.safetensors", "policy/config.json"]
)
def test_a_toy_task_with_a_missing_file_is_recreated(tmp_path: Path, missing: str) -> None:
    toy_task, _ = make_miniature(tmp_path / "toy-task")
    expected = (toy_task.reward / "model.safetensors").read_bytes()
    (tmp_path / "toy-task" / missing).unlink()
    _, progress = make_miniature(tmp_path / "toy-task")
    assert progress
    assert (tmp_path / "toy-task" / missing).exists()
    assert (toy_task.reward / "model.safetensors").read_bytes() == expected


def test_a_toy_task_with_a_truncated_checkpoint_is_recreated(tmp_path: Path) -> None:
    toy_task, _ = make_miniature(tmp_path / "toy-task")
    weights = toy_task.policy / "model.safetensors"
    expected = weights.read_bytes()
    weights.write_bytes(expected[:100])
    assert make_miniature(tmp_path / "toy-task")[1]
    assert weights.read_bytes() == expected


def test_a_toy_task_of_another_seed_is_replaced(tmp_path: Path) -> None:
    make_miniature(tmp_path / "toy-task")
    assert make_miniature(tmp_path / "toy-task", seed=1)[1]
    assert not make_miniature(tmp_path / "toy-task", seed=1)[1]


def test_an_interrupted_creation_leaves_no_files(tmp_path: Path) -> None:
    def interrupt(progress: PretrainingProgress) -> None:
        if progress.stage == "reward":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_toy_task(tmp_path / "toy-task", progress=interrupt, recipe=MINIATURE)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"thesis\.txt"):
        make_miniature(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "precious"
