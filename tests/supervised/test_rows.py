"""Rows of the stages: their forms, their tokens, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from quartet.config.supervised import RewardModelConfig, SftConfig
from quartet.data.preference_pairs import is_held_out, read_demonstrations, read_pairs
from quartet.errors import DataError
from quartet.models.weights.tokenizer import load_tokenizer
from quartet.supervised.rows import StageRows, read_rows

QUESTION, ANSWER = {"role": "user", "content": "why ?"}, {"role": "assistant", "content": "because"}
FORMS: dict[str, dict[str, Any]] = {
    "pair": {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "no"}]},
    "messages": {"messages": [QUESTION, ANSWER]},
    "prompt and completion": {"prompt": "why ?", "completion": "because"},
    "message and completion": {"prompt": [QUESTION], "completion": [ANSWER]},
    "transcripts": {
        "chosen": "\n\nHuman: why ?\n\nAssistant: because",
        "rejected": "\n\nHuman: why ?\n\nAssistant: no",
    },
}


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(
    toy: Path, train: Path, stage: str = "sft", seed: int = 0, printed: list[str] | None = None, **data: Any
) -> StageRows:
    kind = {"sft": SftConfig, "reward-model": RewardModelConfig}[stage]
    tree = {
        "stage": stage,
        "run": {"name": "x", "seed": seed},
        "data": {"train": str(train), "validation_fraction": 0, **data},
        "model": {"path": str(toy / "base")},
    }
    report = [].append if printed is None else printed.append
    return read_rows(kind.model_validate(tree), load_tokenizer(toy / "base"), 384, report)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_demonstration_has_the_tokens_of_a_run(toy: Path, tmp_path: Path, form: str) -> None:
    (row,) = rows_of(toy, written(tmp_path / "rows.jsonl", FORMS[form])).training
    tokenizer = load_tokenizer(toy / "base")
    prompt = tokenizer("<bos>user\nwhy ?<eos><bos>assistant\n", add_special_tokens=False)["input_ids"]
    answer = [*tokenizer("because", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert row.to_sft() == {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


def test_a_pair_has_both_answers_and_its_margin(toy: Path, tmp_path: Path) -> None:
    train = written(tmp_path / "rows.jsonl", {**FORMS["pair"], "score_chosen": 7, "score_rejected": 4})
    (row,) = rows_of(toy, train, "reward-model").training
    pair = row.to_pair(0.5)
    assert pair["margin"] == 1.5
    assert pair["chosen_ids"] == row.to_pair(0)["chosen_ids"] == row.prompt + row.answers[0]
    assert pair["rejected_ids"] == row.prompt + row.answers[1]
    assert "margin" not in row.to_pair(0)


def test_a_template_gets_the_variables_of_the_config(toy: Path, tmp_path: Path) -> None:
    shutil.copytree(toy / "base", tmp_path / "base")
    template = tmp_path / "base/chat_template.jinja"
    template.write_text(template.read_text() + "{{ mood | default('') }}")
    train = written(tmp_path / "rows.jsonl", FORMS["messages"])
    plain, given = (
        rows_of(tmp_path, train, chat_template_kwargs=variables).training[0] for variables in ({}, {"mood": "gladly"})
    )
    tokenizer = load_tokenizer(toy / "base")
    assert given.prompt == plain.prompt + tokenizer("gladly", add_special_tokens=False)["input_ids"]
    assert given.answers == plain.answers


def test_conversations_that_begin_alike_are_on_one_side(toy: Path) -> None:
    rows = rows_of(toy, toy / "data/pairs.jsonl", validation_fraction=0.3)
    training, validation = ({tuple(row.prompt) for row in part} for part in (rows.training, rows.validation))
    assert len(training) > len(validation) > 5
    assert training.isdisjoint(validation)


def test_all_stages_hold_out_the_same_rows_of_any_seed(toy: Path) -> None:
    sides = [
        [
            tuple(row.prompt)
            for row in rows_of(toy, toy / "data/pairs.jsonl", stage, seed, validation_fraction=0.3).validation
        ]
        for stage, seed in (("sft", 0), ("sft", 1), ("reward-model", 2))
    ]
    assert sides[0] == sides[1] == sides[2] != []


def test_rows_are_held_out_of_what_a_split_by_seed_has_left(toy: Path, tmp_path: Path) -> None:
    questions = [question for question in map("question {}".format, range(400)) if not is_held_out(question, 0.1, 0)]
    train = written(tmp_path / "rows.jsonl", *({"prompt": each, "completion": "because"} for each in questions))
    printed: list[str] = []
    rows = rows_of(toy, train, printed=printed, validation_fraction=0.05)
    assert 5 < len(rows.validation) < 40
    assert not any("warning" in line for line in printed)


def test_a_warning_says_that_no_row_is_held_out(toy: Path, tmp_path: Path) -> None:
    train = written(tmp_path / "rows.jsonl", FORMS["messages"])
    printed: list[str] = []
    assert rows_of(toy, train, printed=printed, validation_fraction=1e-9).validation == []
    assert f"warning: {train}: data.validation_fraction 1e-09 holds out none of 1 rows; raise it, or name" in printed[0]
    printed.clear()
    rows_of(toy, train, printed=printed)
    assert not any("warning" in line for line in printed)


def test_long_rows_are_left_out_up_to_a_fraction(toy: Path, tmp_path: Path) -> None:
    long = {"prompt": "why ?", "completion": "because " * 50}
    train = written(tmp_path / "rows.jsonl", FORMS["messages"], long)
    assert len(rows_of(toy, train, max_tokens=60).training) == 1
    with pytest.raises(
        DataError, match=r"data\.train: 1 of 2 rows are longer than 60 tokens, more than data\.max_dropped_frac"
    ):
        rows_of(toy, train, max_tokens=60, max_dropped_fraction=0.2)


def test_unusable_rows_are_named_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    equal = {"prompt": "why ?", "chosen": "because", "rejected": "because "}
    for read, row, message in (
        (read_pairs, equal, "chosen and rejected are equal; expected two different answers"),
        (read_pairs, FORMS["messages"], "chosen is missing; expected"),
        (
            read_pairs,
            {"prompt": "why ?", "chosen": "because", "rejected": "no \ud800"},
            r"rejected: message 2 (assistant) contains half of a character (the lone surrogate '\ud800'); expected a text",
        ),
        (
            read_demonstrations,
            {"prompt": "\udfff", "completion": "because"},
            "completion: message 1 (user) contains half of a character",
        ),
        (read_demonstrations, {"prompt": "why ?"}, 'has no answer; expected "messages"'),
        (read_demonstrations, {"messages": [QUESTION]}, "messages: ends with a message of the user"),
    ):
        written(path, FORMS["pair"], row)
        with pytest.raises(DataError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}:2: {message}")
    written(path)
    with pytest.raises(DataError, match="empty; expected at least one row"):
        read_pairs(path)
