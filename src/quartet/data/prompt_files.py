"""Formats of prompts files: JSON Lines, CSV and Parquet. Rows are read one after another, and the size of each is limited."""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

from quartet.errors import ConfigError, DataError

FORMATS = "JSON Lines (.jsonl, .json), CSV (.csv), each also as .gz or .zst, or Parquet (.parquet)"
MAX_LINE_BYTES = 16 * 1024 * 1024
"""Maximum length of a line of JSON, and of a row of CSV."""
MAX_ROW_GROUP_BYTES = 4 * 1024**3
"""Maximum size of a row group of Parquet in memory. Each is decompressed at once."""
PARQUET_ROWS = 1024
"""Rows of Parquet to convert at a time."""
_COMPRESSIONS = (".gz", ".zst")


def location(path: Path, row: int) -> str:
    """Return where a prompt is, for messages: file and line, or file and row for Parquet. ``row`` counts from 1."""
    return f"prompts {path} row {row}" if _format(path) == ".parquet" else f"prompts {path}:{row}"


def iterate_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and fields of each row of a prompts file. The number is the line of a text file, or the row of Parquet.

    The name of the file determines the format. Blank lines are skipped. Raises DataError with file and line, and ConfigError if
    the package for Parquet is not installed.
    """
    readers = {".parquet": _parquet_rows, ".csv": _csv_rows}
    reader = readers.get(_format(path), _json_rows)
    try:
        yield from reader(path)
    except OSError as error:
        # gzip and zstd raise an OSError without an errno for damaged content.
        reason = error.strerror or str(error) or type(error).__name__
        raise DataError(f"prompts {path}: cannot be read ({reason}); give a file in {FORMATS}") from None


def _format(path: Path) -> str:
    """Return the ending of the name that determines the format, without that of a compression."""
    inner = path.with_suffix("") if path.suffix.lower() in _COMPRESSIONS else path
    return inner.suffix.lower()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a text file, and decompress it while it is read."""
    kind = path.suffix.lower()
    if kind == ".gz":
        with gzip.open(path, "rb") as file:
            yield file  # type: ignore[misc]
    elif kind == ".zst":
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
        try:
            with zstd.open(path, "rb") as file:
                yield file  # type: ignore[misc]
        except zstd.ZstdError as error:
            raise DataError(f"prompts {path}: not Zstandard, or damaged ({error}); write the file again") from None
    else:
        with path.open("rb") as file:
            yield file


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each line of a text file. Raises DataError for a line that is too long, and a damaged file."""
    number = 0
    with _opened(path) as file:
        while True:
            try:
                raw = file.readline(MAX_LINE_BYTES + 1)
            except (EOFError, zlib.error) as error:
                raise DataError(
                    f"prompts {path}: its compressed data is damaged after line {number} ({error}); write the file again"
                ) from None
            if not raw:
                return
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                raise DataError(
                    f"prompts {path}:{number}: longer than {MAX_LINE_BYTES} bytes; write one prompt per line"
                )
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)  # Some editors begin a file with it.
            yield number, raw


def _text(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start + 1}; save the file as UTF-8") from None


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    first = True
    for number, raw in _lines(path):
        if not raw.strip():
            continue
        where = f"prompts {path}:{number}"
        try:
            value = parse_json(_text(raw, where))
        except (ValueError, RecursionError) as error:
            is_array = first and raw.lstrip().startswith(b"[")
            hint = "the file is one JSON array; write one object per line, such as jq -c '.[]' does" if is_array else ""
            raise DataError(f"{where}: not JSON ({error}); {hint or 'expected a JSON object per line'}") from None
        first = False
        if not isinstance(value, dict):
            raise DataError(f"{where}: found {type(value).__name__}, expected a JSON object per line")
        yield number, value


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError, also for NaN and infinity, and RecursionError."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


class _RowLines:
    """The lines of a CSV file as text, for ``csv.reader``, which reads several for a row with line breaks inside quotes."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, _lines(path)
        self.number = self.row_bytes = 0

    def __iter__(self) -> _RowLines:
        return self

    def __next__(self) -> str:
        self.number, raw = next(self._lines)
        self.row_bytes += len(raw)
        if self.row_bytes > MAX_LINE_BYTES:
            raise DataError(
                f"prompts {self._path}:{self.number}: its row is longer than {MAX_LINE_BYTES} bytes; look for a quote that "
                "is not closed"
            )
        return _text(raw, f"prompts {self._path}:{self.number}")


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    lines = _RowLines(path)
    csv.field_size_limit(MAX_LINE_BYTES)
    rows = csv.reader(lines, strict=True)
    header: list[str] = []
    while True:
        start, lines.row_bytes = lines.number + 1, 0
        where = f"prompts {path}:{start}"
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(
                f"{where}: not CSV ({error}); quote values that contain commas, quotes or line breaks"
            ) from None
        if not row:
            continue
        if not header:
            header = row
            if repeated := sorted({name for name in header if header.count(name) > 1}):
                raise DataError(f"{where}: the header has the column {repeated[0]!r} twice; rename one")
            continue
        if len(row) != len(header):
            raise DataError(
                f"{where}: {len(row)} values, but the header has {len(header)} columns; quote values that contain commas"
            )
        yield start, {name: _csv_value(name, value, where) for name, value in zip(header, row, strict=True)}


def _csv_value(name: str, value: str, where: str) -> Any:
    """Return the value of a cell: messages and token_ids are JSON, everything else is text."""
    if name not in ("messages", "token_ids"):
        return value
    try:
        return parse_json(value) if value else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {name} is not JSON ({error}); write the list as JSON, or use JSON Lines") from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"prompts {path}: the package pyarrow is not installed; run pip install 'quartet-rlhf[parquet]', or give the "
            "prompts as JSON Lines or CSV"
        ) from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            for group in range(file.num_row_groups):
                if (size := file.metadata.row_group(group).total_byte_size) > MAX_ROW_GROUP_BYTES:
                    raise DataError(
                        f"prompts {path}: row group {group + 1} has {size} bytes, expected at most {MAX_ROW_GROUP_BYTES}; "
                        "write the file with a smaller row_group_size"
                    )
            for batch in file.iter_batches(PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0][:200]
        raise DataError(
            f"prompts {path}: cannot be read after row {number} ({reason}); give a file in {FORMATS}"
        ) from None
