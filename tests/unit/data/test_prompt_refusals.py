"""Refusals of prompts files that people have: each names the value, and what to do."""

from __future__ import annotations

import decimal
from pathlib import Path
from typing import Any

import pytest

from quartet.data.prompt_lines import read_prompt_lines
from quartet.errors import DataError
from tests.unit.data.test_prompt_files import parquet

IGNORE = ", or leave the column out with ignore_columns in data.sets"


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as refused:
        read_prompt_lines(path)
    return str(refused.value).removeprefix(f"prompts {path}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            '[{"prompt": "a"}, {"prompt": "b"}]',
            ":1: found a list, expected a JSON object per line; the file is one JSON array; write one object per line, such as "
            "jq -c '.[]' does",
        ),
        ('[\n{"prompt": "a"}\n]', "; the file is one JSON array; write one object per line, such as jq -c '.[]' does"),
        (
            '{\n "prompt": "a"\n}',
            "; expected a JSON object per line, but the first one spans several; write each on one line, as jq -c . does",
        ),
        ('{"prompt": "a"},\n{"prompt": "b"}', "; expected a JSON object per line; remove the comma after it"),
        (
            "{'prompt': 'a'}",
            "; its texts are in single quotes, as Python prints them; expected a JSON object per line, as json.dumps writes it",
        ),
        (
            '{"prompt": "a", "x": NaN}',
            ": not JSON (NaN is not a number in JSON); expected a JSON object per line, with null for a value that is no number",
        ),
        (
            '"a prompt"',
            ': found a text, expected a JSON object per line; write it as an object, such as {"prompt": ...}',
        ),
        ('{"prompt": 3}', "prompt is not a string or a list of messages, but the number 3; expected"),
        ('{"prompt": {"user": 1}}', "prompt is not a string or a list of messages, but an object with user; expected"),
        ('{"token_ids": [1, "2"]}', 'entry 2 is the text "2"; expected whole numbers from 0 to 2147483647'),
        (
            '{"messages": [{"from": "human", "value": "a"}]}',
            "messages: message 1 has from and value, as in ShareGPT; rename them to role (user, assistant, system) and content",
        ),
    ],
)
def test_lines_of_json(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    message = refusal(tmp_path / "p.jsonl")
    assert problem in message
    assert message.startswith(":1: ")


def test_a_file_in_utf_16(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}', encoding="utf-16")
    assert refusal(tmp_path / "p.jsonl") == ":1: not UTF-8 at byte 1, it looks like UTF-16; save the file as UTF-8"


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_a_csv_file_with_another_separator(mark: str, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(f"prompt{mark}answer\na{mark}b\n")
    header = f"prompt{mark}answer"
    assert refusal(tmp_path / "p.csv") == f":1: the header is one column {header!r}; separate the columns with commas"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (decimal.Decimal("1.50"), "holds the decimal number 1.50, which JSON lacks; convert it to a float or a text"),
        (b"\x89PNG", "holds bytes of length 4, which JSON lacks; convert them to a text"),
        ({"bytes": b"\x89PNG", "path": "x.png"}, "holds bytes of length 4, which JSON lacks; convert them to a text"),
        (float("nan"), ": nan is not a number in JSON; write null instead"),
        ([1.0, float("inf")], ": has NaN or infinity, which are not a number in JSON; write null instead"),
    ],
)
def test_values_that_json_lacks(value: Any, problem: str, tmp_path: Path) -> None:
    path = parquet(tmp_path / "p.parquet", [{"prompt": "a", "answer": value}])
    joint = "" if problem.startswith(":") else " "
    assert refusal(path) == f" row 1: column answer{joint}{problem}{IGNORE}"


@pytest.mark.parametrize("name", ["prompts.tsv", "prompts.txt", "prompts.xlsx"])
def test_a_file_of_another_format_is_told_which_formats_are_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("text\tanswer\nOnce upon a time\t1\n")
    assert refusal(path) == (
        f":1: not JSON, and files that end in {path.suffix} are read as JSON Lines; give a file in JSON Lines (.jsonl, .json), "
        "CSV (.csv), each also as .gz or .zst, or Parquet (.parquet)"
    )
