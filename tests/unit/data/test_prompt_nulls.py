"""Nulls of rows: those that a columnar format adds, and those that the row has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quartet.config.loading import config_of
from quartet.data.prompt_datasets import rows_file
from quartet.data.prompt_lines import iterate_prompts, read_prompt_lines
from quartet.data.prompt_settings import PromptSettings
from quartet.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TYPED = pyarrow.struct([("a", pyarrow.string()), ("b", pyarrow.list_(pyarrow.int64()))])


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def chat(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hi"}, *messages, {"role": "user", "content": "and now?"}]


CALLS = [
    {"messages": chat(call("weather", city="Bonn", days=[{"n": 1}])), "answer": None},
    {"messages": chat(call("clock", zone="CET"), call("now")), "answer": 2},
    {"messages": chat(call("weather", days=[{"hour": 1}, {"n": 3}])), "answer": 3},
]


def parquet(path: Path, table: Any) -> Path:
    pq.write_table(table, path)
    return path


def parquet_fields(path: Path, **columns: Any) -> list[dict[str, Any]]:
    """Return the fields of rows with these columns, after a prompt."""
    table = pyarrow.table({"prompt": ["x"] * len(next(iter(columns.values()))), **columns})
    return [
        {name: value for name, value in json.loads(line.fields).items() if name != "prompt"}
        for line in read_prompt_lines(parquet(path / "p.parquet", table))
    ]


def data_set_fields(folder: Path) -> list[dict[str, Any]]:
    tree = {
        "data": {"sets": [{"name": "one", "dataset": str(folder)}]},
        "actor": {"model": "a"},
        "reward": {"model": "b"},
    }
    [settings] = PromptSettings.for_training(config_of(tree))
    lines = [json.loads(line.fields) for line in iterate_prompts(settings, rows_file(settings).path)]
    return [{name: value for name, value in line.items() if name != "prompt_set"} for line in lines]


def test_nulls_that_parquet_adds_reach_neither_messages_nor_fields(tmp_path: Path) -> None:
    lines = read_prompt_lines(parquet(tmp_path / "p.parquet", pyarrow.Table.from_pylist(CALLS)))
    assert [list(line.messages or ()) for line in lines] == [row["messages"] for row in CALLS]
    assert [json.loads(line.fields) for line in lines] == CALLS


def test_nulls_that_a_json_line_has_remain_everywhere(tmp_path: Path) -> None:
    message = {"role": "user", "content": "hi", "tool_calls": None, "name": None}
    row = {"messages": [message], "answer": {"a": None}, "text": None}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    [line] = read_prompt_lines(tmp_path / "p.jsonl")
    assert line.messages == (message,)
    assert json.loads(line.fields) == row


def test_a_field_without_a_value_in_any_row_is_null_as_a_row_has_it(tmp_path: Path) -> None:
    infos = [{"index": 0, "split": None}, {"index": 1, "split": None}]
    assert parquet_fields(tmp_path, extra_info=infos) == [{"extra_info": each} for each in infos]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (pyarrow.array([None, {"a": None, "b": [1, None]}, {}], TYPED), [None, {"b": [1, None]}, {}]),
        (
            pyarrow.array([[None, {"a": "x"}], None, []], pyarrow.list_(TYPED)),
            [[None, {"a": "x"}], None, []],
        ),
        (pyarrow.array([[{"a": "x"}]], pyarrow.list_(TYPED, 1)), [[{"a": "x"}]]),
        (
            pyarrow.array([[("k", None), ("l", {"a": "x"})], None, []], pyarrow.map_(pyarrow.string(), TYPED)),
            [{"k": None, "l": {"a": "x"}}, None, {}],
        ),
        (
            pyarrow.array([{"m": [("k", None)]}], pyarrow.struct([("m", pyarrow.map_("string", "int64"))])),
            [{"m": {"k": None}}],
        ),
        (
            pyarrow.array(['{"a":null,"b":[{"c":null}]}', None], pyarrow.json_()),
            [{"a": None, "b": [{"c": None}]}, None],
        ),
    ],
    ids=["struct", "list of structs", "fixed list", "map of structs", "map in a struct", "json"],
)
def test_only_fields_of_structs_lose_their_nulls(column: Any, values: list[Any], tmp_path: Path) -> None:
    assert parquet_fields(tmp_path, answer=column) == [{"answer": value} for value in values]


def test_a_map_with_a_key_twice_is_refused_with_its_row(tmp_path: Path) -> None:
    column = pyarrow.array([[("k", 1)], [("k", 1), ("k", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    with pytest.raises(DataError, match=r"p\.parquet row 2: .*a map has a key twice"):
        parquet_fields(tmp_path, answer=column)


def test_a_null_prompt_is_refused_with_its_row(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["a", None], "answer": ["b", "c"]})
    with pytest.raises(DataError, match=r"p\.parquet row 2: prompt is null; expected .*; or remove the row"):
        read_prompt_lines(parquet(tmp_path / "p.parquet", table))


def test_data_sets_give_the_same_rows_as_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("QUARTET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    rows = [{**row, "extra_info": {"split": None}} for row in CALLS]
    for name in ("files", "lines"):
        (tmp_path / name).mkdir()
    parquet(tmp_path / "files/train.parquet", pyarrow.Table.from_pylist(rows))
    (tmp_path / "lines/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for name in ("files", "lines", "saved"):
        assert data_set_fields(tmp_path / name) == rows


def test_json_of_a_data_set_keeps_the_nulls_of_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    if not hasattr(datasets, "Json"):
        pytest.skip("this version of datasets has no type for JSON")
    monkeypatch.setenv("QUARTET_CACHE", str(tmp_path / "cache"))
    messages = [{"role": "user", "content": "a", "name": None}, {"role": "user", "content": "b"}]
    features = datasets.Features({"messages": datasets.List(datasets.Json())})
    datasets.Dataset.from_dict({"messages": [messages]}, features=features).save_to_disk(str(tmp_path / "saved"))
    assert data_set_fields(tmp_path / "saved") == [{"messages": messages}]
