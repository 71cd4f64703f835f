"""Formats of prompts files."""

from __future__ import annotations

import datetime
import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from quartet.data.prompt_cache import FileDigest
from quartet.data.prompt_files import MAX_LINE_BYTES, remedy
from quartet.data.prompt_lines import read_prompt_lines
from quartet.errors import ConfigError, DataError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

USER = {"role": "user", "content": "hi"}
ROWS: list[dict[str, Any]] = [{"prompt": "a", "answer": 1}, {"prompt": [USER], "answer": 2}]


def as_json_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def test_a_prompt_is_a_string_or_a_list_of_messages(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(as_json_lines(ROWS))
    text, chat = read_prompt_lines(path)
    assert (text.line, text.text, text.fields) == (1, "a", '{"answer":1,"prompt":"a"}')
    assert (chat.line, chat.messages, chat.text) == (2, (USER,), None)
    assert json.loads(chat.fields) == ROWS[1]


@pytest.mark.parametrize(("ending", "compress"), [(".jsonl.gz", gzip.compress), (".jsonl.ZST", zstd.compress)])
def test_compressed_lines_give_the_same_prompts_and_line_numbers(ending: str, compress: Any, tmp_path: Path) -> None:
    plain, compressed = tmp_path / "p.jsonl", tmp_path / f"p{ending}"
    plain.write_bytes(as_json_lines(ROWS))
    compressed.write_bytes(compress(plain.read_bytes()))
    assert read_prompt_lines(compressed) == read_prompt_lines(plain)
    compressed.write_bytes(compress(b'{"prompt": "a"}\n\nnonsense\n'))
    with pytest.raises(DataError, match=rf"p{ending}:3: not JSON"):
        read_prompt_lines(compressed)


@pytest.mark.parametrize(("ending", "compress"), [(".gz", gzip.compress), (".zst", zstd.compress)])
def test_damaged_compressed_files_are_refused(ending: str, compress: Any, tmp_path: Path) -> None:
    path = tmp_path / f"p.jsonl{ending}"
    content = compress(as_json_lines([{"prompt": str(number) * 50} for number in range(5000)]))
    for damaged in (b"no such format", content[:-9], content[:200] + bytes(100) + content[300:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"^prompts .*p\.jsonl"):
            read_prompt_lines(path)


@pytest.mark.parametrize(("ending", "compress"), [(".gz", gzip.compress), (".zst", zstd.compress)])
def test_a_small_file_that_decompresses_to_an_endless_line_is_refused(
    ending: str, compress: Any, tmp_path: Path
) -> None:
    path = tmp_path / f"p.jsonl{ending}"
    path.write_bytes(compress(b'{"prompt": "' + b"a" * (4 * MAX_LINE_BYTES)))
    assert path.stat().st_size < MAX_LINE_BYTES / 50
    with pytest.raises(DataError, match=":1: longer than 16777216 bytes"):
        read_prompt_lines(path)


def test_a_device_or_a_pipe_is_refused_without_reading_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (Path("/dev/zero"), tmp_path / "pipe.jsonl"):
        with pytest.raises(DataError, match=rf"^prompts {path}: a device or a pipe, .*; give a regular file in JSON"):
            FileDigest.of(path)
    for read in (read_prompt_lines, FileDigest.of):
        with pytest.raises(DataError, match=r"cannot be read \(Is a directory\)"):
            read(tmp_path)


def test_prompts_that_are_read_once_may_come_from_a_pipe() -> None:
    reader, writer = os.pipe()
    os.write(writer, as_json_lines(ROWS))
    os.close(writer)
    try:
        assert len(read_prompt_lines(Path(f"/dev/fd/{reader}"))) == len(ROWS)
    finally:
        os.close(reader)


def test_a_file_that_is_one_json_array_is_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('[\n  {"prompt": "a"}\n]\n')
    with pytest.raises(
        DataError, match=r"p\.json:1: not JSON .* the file is one JSON array; write one object per line"
    ):
        read_prompt_lines(path)


def csv_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "p.csv"
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_csv_has_a_header_and_rows_are_named_by_their_first_line(tmp_path: Path) -> None:
    path = csv_file(tmp_path, '\ufeffprompt,answer\r\n"a ""b"",\nc",7\r\n\r\nd,\r\n')
    first, second = read_prompt_lines(path)
    assert (first.line, first.text, first.fields) == (
        2,
        'a "b",\nc',
        json.dumps({"answer": "7", "prompt": 'a "b",\nc'}, separators=(",", ":")),
    )
    assert (second.line, second.text, second.fields) == (5, "d", '{"answer":"","prompt":"d"}')


def test_messages_and_token_ids_of_csv_are_json(tmp_path: Path) -> None:
    messages = json.dumps([USER]).replace('"', '""')
    chat, ids = read_prompt_lines(csv_file(tmp_path, f'messages,token_ids\n"{messages}",\n,"[3, 4]"\n'))
    assert (chat.messages, chat.token_ids) == ((USER,), None)
    assert (ids.messages, ids.token_ids) == (None, (3, 4))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("question\na\n", ":2: found none of prompt, text, messages and token_ids, but question"),
        ("prompt\na\n\nb,c\n", ":4: 2 values, but the header has 1 columns"),
        ("prompt,answer\na\n", ":2: 1 values, but the header has 2 columns"),
        ("prompt,prompt\na,b\n", ":1: the header has the column 'prompt' twice"),
        ('prompt\n"a\n', ":2: not CSV"),
        ("messages\n[oh\n", ":2: messages is not JSON"),
        ("prompt,answer\n,1\n", ":2: prompt is empty"),
        ("prompt\n", ": empty; expected at least one prompt"),
        ("", ": empty; expected at least one prompt"),
        ("prompt\na\n" + '"' + "b\n" * 4096, "its row is longer than"),
    ],
)
def test_malformed_csv_is_refused_with_its_line(
    text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quartet.data.prompt_files.MAX_LINE_BYTES", 4096)
    with pytest.raises(DataError) as refused:
        read_prompt_lines(csv_file(tmp_path, text))
    assert str(refused.value).startswith(f"prompts {tmp_path}/p.csv")
    assert problem in str(refused.value)


def test_parquet_rows_are_prompts_with_their_columns_as_fields(tmp_path: Path) -> None:
    day = datetime.date(2026, 1, 2)
    rows = [{"prompt": [USER], "answer": None, "day": day}, {"prompt": [USER, USER], "answer": 2.5, "day": None}]
    first, second = read_prompt_lines(parquet(tmp_path / "p.parquet", rows, row_group_size=1))
    assert (first.line, first.messages) == (1, (USER,))
    assert json.loads(first.fields) == {"prompt": [USER], "answer": None, "day": "2026-01-02"}
    assert (second.line, second.messages) == (2, (USER, USER))


def test_errors_in_parquet_name_the_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"p\.parquet row 2: prompt is empty"):
        read_prompt_lines(parquet(tmp_path / "p.parquet", [{"prompt": "a"}, {"prompt": ""}]))
    with pytest.raises(
        DataError, match=r"p\.parquet row 1: column image holds bytes of length 3, which JSON lacks; convert them"
    ):
        read_prompt_lines(parquet(tmp_path / "p.parquet", [{"prompt": "a", "image": b"123"}]))
    (tmp_path / "p.parquet").write_bytes(b"PAR1 and more")
    with pytest.raises(DataError, match=r"p\.parquet: cannot be read after row 0"):
        read_prompt_lines(tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"absent\.parquet: cannot be read"):
        read_prompt_lines(tmp_path / "absent.parquet")


def test_a_large_row_group_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet.data.prompt_files.MAX_ROW_GROUP_BYTES", 10)
    with pytest.raises(DataError, match=r"row group 1 has \d+ bytes, expected at most 10; .* smaller row_group_size"):
        read_prompt_lines(parquet(tmp_path / "p.parquet", [{"prompt": "a"}]))


def repeated(values: list[Any], count: int) -> pyarrow.Array:
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), pyarrow.array(values))


@pytest.mark.parametrize("in_lists", [False, True])
def test_a_small_parquet_file_that_repeats_a_long_text_is_refused(in_lists: bool, tmp_path: Path) -> None:
    column = repeated(["x" * (16 * 1024 * 1024)], 1024)
    if in_lists:
        column = pyarrow.ListArray.from_arrays(pyarrow.array(range(1025), pyarrow.int32()), column)
    path = tmp_path / "p.parquet"
    table = pyarrow.table({"prompt": ["a"] * 1024, "long": column})
    pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 10_000
    before = pyarrow.total_allocated_bytes()
    with pytest.raises(DataError, match=r"p\.parquet row 1: has \d+ bytes, expected at most 16777216; shorten its"):
        read_prompt_lines(path)
    assert pyarrow.total_allocated_bytes() - before < 200 * 1024 * 1024


def test_a_small_parquet_file_with_many_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet.data.prompt_files.MAX_ROW_GROUP_BYTES", 1_000_000)
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"token_ids": [[1] * 200_000]}), path)
    assert path.stat().st_size < 5_000
    with pytest.raises(DataError, match="row group 1 has 1600000 bytes, expected at most 1000000"):
        read_prompt_lines(path)


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "DICTIONARY"])
def test_rows_of_parquet_in_every_encoding_are_equal(encoding: str, tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [USER, {"role": "assistant", "content": str(number)}],
            "tags": ["a", None],
            "answer": {"b": [number]},
        }
        for number in range(3000)
    ]
    options = {"use_dictionary": True} if encoding == "DICTIONARY" else {"use_dictionary": False}
    if encoding.startswith("DELTA"):
        options["column_encoding"] = {"tags.list.element": encoding}
    lines = read_prompt_lines(parquet(tmp_path / "p.parquet", rows, row_group_size=1100, **options))
    assert [json.loads(line.fields) for line in lines] == rows
    assert [line.line for line in lines] == list(range(1, 3001))


def test_rows_of_parquet_that_are_large_together_are_read(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * 900_000} for _ in range(40)]
    assert len(read_prompt_lines(parquet(tmp_path / "p.parquet", rows))) == 40


def test_a_column_of_parquet_that_appears_twice_is_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"]), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"p\.parquet: has the column 'prompt' twice; rename one"):
        read_prompt_lines(tmp_path / "p.parquet")


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"ok", b"\xff"], pyarrow.binary()).buffers()),
        pyarrow.array([1000, 1], pyarrow.timestamp("ns")),
        pyarrow.array([0, 2**62], pyarrow.timestamp("us")),
        pyarrow.array([0, 2**30], pyarrow.date32()),
    ],
    ids=["not UTF-8", "nanoseconds", "far time", "far date"],
)
def test_a_value_of_parquet_without_an_equivalent_is_refused_with_its_row(
    column: pyarrow.Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "value": column}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"p\.parquet row 2: a value has no equivalent in Python \(.*dates as text"):
        read_prompt_lines(tmp_path / "p.parquet")


def test_parquet_without_its_package_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(tmp_path / "p.parquet", ROWS[:1])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'quartet-rlhf\[parquet\]'"):
        read_prompt_lines(path)


def test_a_file_without_permission_is_not_called_a_wrong_format() -> None:
    assert "chmod a+r FILE" in remedy(PermissionError())
    assert "JSON Lines" in remedy(FileNotFoundError())
