"""``examples/dialogue/prepare.py``: forms of rows, malformed rows, and the split."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from quartet.data.prompt_lines import read_prompt_lines
from tests.dialogue.preference_files import ROWS, conversation_row, dialogues, write_dialogues, write_rows

Programs = dict[str, ModuleType]


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def outputs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}


@pytest.mark.parametrize("form", ROWS)
def test_all_forms_of_a_data_set_become_the_same_files(programs: Programs, form: str, tmp_path: Path) -> None:
    results = []
    for name in ("transcripts", form):
        source = write_dialogues(tmp_path / f"{name}.jsonl", 60, name)
        out = tmp_path / f"out of {name}"
        assert programs["prepare"].main([str(source), str(out), "--validation-fraction", "0.2"]) == 0
        pairs = lines(out / "pairs.jsonl")
        assert {pair.pop("margin", None) for pair in pairs} == {2.5 if name.startswith("conversation") else None}
        results.append((pairs, lines(out / "prompts.jsonl"), lines(out / "validation_prompts.jsonl")))
    assert results[0] == results[1]
    pairs, prompts, validation = results[1]
    assert len(pairs) > 30
    for row in (*prompts, *validation):
        assert row["prompt"][-1]["role"] == "user"
    assert all(pair["chosen"][0]["role"] == "assistant" for pair in pairs)
    assert len(read_prompt_lines(tmp_path / f"out of {form}/prompts.jsonl")) == len(prompts)


def test_compressed_files_parquet_and_folders_are_read(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUARTET_CACHE", str(tmp_path / "cache"))
    rows = [conversation_row(*dialogue) for dialogue in dialogues(40)]
    plain = write_rows(tmp_path / "rows.jsonl", rows)
    with gzip.open(tmp_path / "rows.jsonl.gz", "wb") as file:
        file.write(plain.read_bytes())
    folder = tmp_path / "set"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    results = []
    for number, source in enumerate([plain, tmp_path / "rows.jsonl.gz", folder / "train.parquet", folder]):
        out = tmp_path / f"out{number}"
        assert programs["prepare"].main([str(source), str(out), "--validation-fraction", "0.2"]) == 0
        results.append(outputs(out))
    assert results == [results[0]] * 4


def test_a_second_run_replaces_the_result_with_identical_bytes(programs: Programs, tmp_path: Path) -> None:
    arguments = [
        str(write_dialogues(tmp_path / "rows.jsonl", 60)),
        str(tmp_path / "out"),
        "--validation-fraction",
        "0.2",
    ]
    assert programs["prepare"].main(arguments) == 0
    first = outputs(tmp_path / "out")
    assert programs["prepare"].main(arguments) == 0
    assert outputs(tmp_path / "out") == first
    assert programs["prepare"].main([*arguments, "--seed", "1"]) == 0
    assert outputs(tmp_path / "out") != first


def test_related_conversations_are_on_one_side_of_the_split(programs: Programs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = write_dialogues(tmp_path / "rows.jsonl", 400)
    assert programs["prepare"].main([str(source), str(out), "--validation-fraction", "0.3"]) == 0
    training, validation = (
        {pair["prompt"][0]["content"] for pair in lines(out / name)}
        for name in ("pairs.jsonl", "validation_pairs.jsonl")
    )
    assert len(training) > len(validation) > 10
    assert training.isdisjoint(validation)


def test_training_pairs_of_a_validation_set_are_removed(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [conversation_row(*dialogue) for dialogue in dialogues(50)]
    shared = conversation_row([("user", "  How DO i start with\nrice ")], "gladly", "no")
    source = write_rows(tmp_path / "train.jsonl", [*rows, shared])
    opening = [("user", "how do i start with rice"), ("assistant", "boil it"), ("user", "and then ?")]
    other = write_rows(tmp_path / "test.jsonl", [conversation_row(opening, "gladly", "no")])
    assert programs["prepare"].main([str(source), str(tmp_path / "out"), "--validation", str(other)]) == 0
    openings = {pair["prompt"][0]["content"] for pair in lines(tmp_path / "out/pairs.jsonl")}
    assert openings
    assert not any("start with rice" in opening.casefold().replace("\n", " ") for opening in openings)
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["counts"]["in_validation"] >= 1
    assert summary["counts"]["validation_prompts"] == 1
    assert f"{summary['counts']['in_validation']} whose conversation is in validation" in capsys.readouterr().out


def test_repeated_pairs_and_equal_answers_are_left_out(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [conversation_row([("user", f"question {number}")], "yes", "no") for number in range(40)]
    equal = conversation_row([("user", "question 3")], "same", "same ")
    source = write_rows(tmp_path / "rows.jsonl", [*rows, rows[5], rows[6], equal])
    assert programs["prepare"].main([str(source), str(tmp_path / "out"), "--validation-fraction", "0.2"]) == 0
    assert "43 rows; left out: 0 malformed, 1 with equal answers, 2 repeated" in capsys.readouterr().out
    counts = json.loads((tmp_path / "out/summary.json").read_text())["counts"]
    assert counts["pairs"] + counts["validation_pairs"] == 40


USER = {"role": "user", "content": "why ?"}
ANSWER = {"role": "assistant", "content": "because"}
MALFORMED: dict[str, tuple[Any, str]] = {
    "no chosen": ({"rejected": "x"}, "chosen is missing; expected"),
    "empty": ({"chosen": "", "rejected": "x"}, "chosen is empty; expected"),
    "number": ({"chosen": 3, "rejected": "x"}, "chosen is of type int; expected"),
    "no prompt": ({"chosen": "a", "rejected": "b"}, "prompt is missing, but chosen and rejected are only answers"),
    "no role": ({"chosen": [{"content": "a"}], "rejected": [ANSWER]}, 'chosen: message 1 is not an object with "role"'),
    "ends with user": ({"chosen": [USER], "rejected": [USER]}, "chosen: ends with a message of the user"),
    "role twice": (
        {"chosen": [USER, USER, ANSWER], "rejected": [USER, ANSWER]},
        "chosen: message 2 is of the role 'user'",
    ),
    "empty answer": (
        {"chosen": "\n\nHuman: a\n\nAssistant:", "rejected": "b"},
        "chosen: message 2 (assistant) is empty",
    ),
    "other prompt": (
        {"chosen": "\n\nHuman: a\n\nAssistant: c", "rejected": "\n\nHuman: b\n\nAssistant: c"},
        "chosen and rejected differ before the last message",
    ),
    "rating": (
        {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER], "score_chosen": "8", "score_rejected": 1.0},
        "score_chosen is '8'; expected a number",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_row_is_named_with_file_and_line(
    programs: Programs, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, message = MALFORMED[name]
    rows = [conversation_row(*dialogue) for dialogue in dialogues(60)]
    source = write_rows(tmp_path / "rows.jsonl", [*rows[:7], row, *rows[7:]])
    out = tmp_path / "out"
    arguments = [str(source), str(out), "--validation-fraction", "0.2"]
    assert programs["prepare"].main([*arguments, "--max-malformed", "0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {source}:8: {message}")
    assert error.count("\n") == 1
    assert not out.exists()
    assert programs["prepare"].main(arguments) == 0
    output = capsys.readouterr().out
    assert f"left out: {source}:8: {message}" in output
    assert "61 rows; left out: 1 malformed" in output


def test_unusable_sources_end_with_one_line_and_status_2(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, out = write_dialogues(tmp_path / "rows.jsonl", 20), str(tmp_path / "out")
    (tmp_path / "broken.jsonl").write_text('{"chosen": \n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/mine.txt").write_text("mine")
    for arguments, message in (
        ([str(tmp_path / "none.jsonl"), out], "none.jsonl: cannot be read (No such file or directory)"),
        ([str(tmp_path / "broken.jsonl"), out], "broken.jsonl:1: not JSON"),
        ([str(tmp_path / "empty.jsonl"), out], "empty.jsonl: empty; expected at least one row"),
        ([str(good), out, "--validation-fraction", "0"], "no pairs are left for validation"),
        (
            [str(good), out, "--validation-split", "test"],
            "is a file, which has no splits; give the validation pairs as",
        ),
        ([str(good), out, "--validation", str(good)], "SOURCE and --validation are the same"),
        ([str(good), str(tmp_path / "foreign")], "contains files, but no summary.json of an earlier result"),
        ([str(good), str(good)], "is a file; expected a directory to create"),
    ):
        assert programs["prepare"].main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert (tmp_path / "foreign/mine.txt").read_text() == "mine"
    assert not Path(out).exists()
