"""Formats of prompts files: JSON Lines, CSV and Parquet. Rows are read one after another, and the size of each is limited."""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import stat
import sys
import zlib
from collections.abc import Callable, Container, Iterator
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
"""Maximum number of rows of Parquet to decode at a time."""
MIN_VALUE_BYTES = 8
"""Size of a value of Parquet for the limits, if it has fewer bytes."""
JSON_COLUMNS = ("messages", "token_ids")
"""Columns of CSV whose values are JSON. All others are text."""
_COMPRESSIONS = (".gz", ".zst")


def location(path: Path, row: int) -> str:
    """Return where a prompt is, for messages: file and line, or file and row for Parquet. ``row`` counts from 1."""
    return f"prompts {path} row {row}" if _format(path) == ".parquet" else f"prompts {path}:{row}"


def iterate_rows(path: Path, json_columns: Container[str] = JSON_COLUMNS) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and fields of each row of a prompts file. The number is the line of a text file, or the row of Parquet.

    The name of the file determines the format. ``json_columns`` of CSV are JSON. Blank lines are skipped. Raises DataError with
    file and line, and ConfigError if the package for Parquet is not installed.
    """
    file_format = _format(path)
    try:
        if file_format == ".csv":
            yield from _csv_rows(path, json_columns)
        else:
            yield from (_parquet_rows if file_format == ".parquet" else _json_rows)(path)
    except OSError as error:
        # gzip and zstd raise an OSError without an errno for damaged content.
        reason = error.strerror or str(error) or type(error).__name__
        raise DataError(f"prompts {path}: cannot be read ({reason}); {remedy(error)}") from None


def remedy(error: OSError) -> str:
    """Return what a user does about a prompts file that cannot be read."""
    if isinstance(error, PermissionError):
        return "let the user of this process read it, and enter its folders (chmod a+r FILE, chmod a+x FOLDER)"
    return f"give a file in {FORMATS}"


def check_regular_file(path: Path, name: str = "prompts") -> None:
    """Check that a prompts file exists and is not a directory, a device or a pipe.

    ``name`` says in the message what the file is. Raises DataError.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise DataError(f"{name} {path}: cannot be read ({error.strerror}); {remedy(error)}") from None
    if stat.S_ISDIR(mode):
        raise DataError(f"{name} {path}: cannot be read (Is a directory); give a file in {FORMATS}")
    if not stat.S_ISREG(mode):
        raise DataError(
            f"{name} {path}: a device or a pipe, which cannot be read several times; give a regular file in {FORMATS}"
        )


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
        looks = ", it looks like UTF-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else ""
        raise DataError(f"{where}: not UTF-8 at byte {error.start + 1}{looks}; save the file as UTF-8") from None


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    first = True
    for number, raw in _lines(path):
        if not raw.strip():
            continue
        where = f"prompts {path}:{number}"
        text = _text(raw, where).strip()
        try:
            value = parse_json(text)
        except (ValueError, RecursionError) as error:
            if first and _format(path) not in ("", ".jsonl", ".json") and not text.startswith(("{", "[")):
                raise DataError(
                    f"{where}: not JSON, and files that end in {path.suffix} are read as JSON Lines; give a file in {FORMATS}"
                ) from None
            hint = _json_hint(text, first) or "expected a JSON object per line"
            raise DataError(f"{where}: not JSON ({error}); {hint}") from None
        if not isinstance(value, dict):
            kind = _JSON_KINDS.get(type(value), "a number")
            hint = _json_hint(text, first) or 'write it as an object, such as {"prompt": ...}'
            raise DataError(f"{where}: found {kind}, expected a JSON object per line; {hint}")
        first = False
        yield number, value


_JSON_KINDS = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}


def _json_hint(text: str, first: bool) -> str:
    """Return what to do about a line that is not a JSON object, or "". ``first``: it is the first line of the file."""
    if text.startswith("[") and first:
        return "the file is one JSON array; write one object per line, such as jq -c '.[]' does"
    if text.startswith("{'"):
        return "its texts are in single quotes, as Python prints them; expected a JSON object per line, as json.dumps writes it"
    if first and text.startswith("{") and not text.rstrip(",").endswith("}"):
        return (
            "expected a JSON object per line, but the first one spans several; write each on one line, as jq -c . does"
        )
    if text.endswith("},"):
        return "expected a JSON object per line; remove the comma after it"
    has_constant = "NaN" in text or "Infinity" in text
    return "expected a JSON object per line, with null for a value that is no number" if has_constant else ""


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError, also for NaN and infinity, and RecursionError."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


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


def _csv_rows(path: Path, json_columns: Container[str]) -> Iterator[tuple[int, dict[str, Any]]]:
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
            if len(header) == 1 and any(mark in header[0] for mark in ";\t|"):
                raise DataError(f"{where}: the header is one column {header[0]!r}; separate the columns with commas")
            continue
        if len(row) != len(header):
            raise DataError(
                f"{where}: {len(row)} values, but the header has {len(header)} columns; quote values that contain commas"
            )
        yield (
            start,
            {
                name: _json_value(name, value, where) if name in json_columns else value
                for name, value in zip(header, row, strict=True)
            },
        )


def _json_value(name: str, value: str, where: str) -> Any:
    """Return the JSON value in a cell."""
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
        # Repeated text stays in memory once: a small file can repeat a long text many times.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, read_dictionary=_texts(path)) as file:
            names = file.schema_arrow.names
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(f"prompts {path}: has the column {repeated[0]!r} twice; rename one")
            for group in range(file.num_row_groups):
                num_rows = _batch_rows(path, file, group)
                for batch in file.iter_batches(num_rows, row_groups=[group]):
                    for row in _converted(batch, path, number):
                        number += 1
                        yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0][:200]
        raise DataError(
            f"prompts {path}: cannot be read after row {number} ({reason}); give a file in {FORMATS}"
        ) from None


def _texts(path: Path) -> list[str]:
    """Return the names of the columns of a Parquet file that can be read as a dictionary of texts or bytes."""
    import pyarrow.parquet

    description = pyarrow.parquet.read_metadata(path)
    groups = [description.row_group(number) for number in range(description.num_row_groups)]
    names = []
    for place in range(description.num_columns):
        column = description.schema.column(place)
        is_text = column.physical_type == "BYTE_ARRAY" and column.logical_type.type in (
            "STRING",
            "NONE",
            "JSON",
            "ENUM",
        )
        # pyarrow cannot read these encodings as a dictionary.
        encodings = {encoding for group in groups for encoding in group.column(place).encodings}
        if is_text and not encodings & {"DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"}:
            names.append(column.path)
    return names


def _batch_rows(path: Path, file: Any, group: int) -> int:
    """Return the number of rows of a row group to read at a time. Raises DataError if the group is too large."""
    description = file.metadata.row_group(group)
    columns = [description.column(place) for place in range(description.num_columns)]
    # A run of equal values takes a few bytes in the file.
    lengths = [max(MIN_VALUE_BYTES, file.schema.column(place).length or 0) for place in range(len(columns))]
    decoded = sum(column.num_values * length for column, length in zip(columns, lengths, strict=True))
    if (size := max(description.total_byte_size, decoded)) > MAX_ROW_GROUP_BYTES:
        raise DataError(
            f"prompts {path}: row group {group + 1} has {size} bytes, expected at most {MAX_ROW_GROUP_BYTES}; "
            "write the file with a smaller row_group_size"
        )
    # In this encoding, values share their beginnings. Each may be as long as the column, and all of a batch are decoded at once.
    shared: list[int] = [column.total_uncompressed_size for column in columns if "DELTA_BYTE_ARRAY" in column.encodings]
    return max(1, min(PARQUET_ROWS, MAX_ROW_GROUP_BYTES // max([1, *shared])))


def _converted(batch: Any, path: Path, before: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch of Parquet, which follows ``before`` rows. Raises DataError with the row."""
    where = location(path, before + 1)
    size = sum(_decoded_bytes(column) for column in batch.columns)
    if batch.num_rows == 1 and size > MAX_LINE_BYTES:
        raise DataError(f"{where}: has {size} bytes, expected at most {MAX_LINE_BYTES}; shorten its values")
    try:
        rows = _row_objects(_without_nanoseconds(batch)) if size <= MAX_LINE_BYTES else None
    except (ValueError, OverflowError, RecursionError) as error:
        if batch.num_rows == 1:
            reason = str(error).partition("\n")[0][:200]
            raise DataError(
                f"{where}: a value has no equivalent in Python ({reason}); write text as UTF-8, and dates as text"
            ) from None
        rows = None
    if rows is not None:
        yield from rows
        return
    half = batch.num_rows // 2
    yield from _converted(batch.slice(0, half), path, before)
    yield from _converted(batch.slice(half), path, before + half)


def _row_objects(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a batch as objects, see ``_reader``. Raises ValueError, OverflowError and RecursionError."""
    rows: list[dict[str, Any]] = batch.to_pylist()
    for field in batch.schema:
        if (read := _reader(field.type)) is not None:
            for row in rows:
                row[field.name] = read(row[field.name])
    return rows


def _reader(kind: Any) -> Callable[[Any], Any] | None:
    """Return the function that makes a row's own value of a value of an Arrow type. None if they are the same.

    Every struct of a column has the fields of all rows, filled up with nulls. They are removed, unless no row has a value there:
    a row has written such a field as null. Lists and maps have only what the row has, so their nulls remain. A map becomes an
    object, and JSON is parsed.
    """
    from pyarrow import types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda value: None if value is None else parse_json(value)
    if types.is_struct(kind):
        readers = {field.name: _reader(field.type) for field in kind}
        written = {field.name for field in kind if types.is_null(field.type)}

        def read_struct(value: Any) -> Any:
            return value and {
                name: item if item is None or (read := readers[name]) is None else read(item)
                for name, item in value.items()
                if item is not None or name in written
            }

        return read_struct
    if types.is_map(kind):
        read_item = _reader(kind.item_type) or (lambda item: item)

        def read_map(value: Any) -> Any:
            if value is None:
                return None
            items = {key: read_item(item) for key, item in value}
            if len(items) < len(value):
                raise ValueError("a map has a key twice")
            return items

        return read_map
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        read = _reader(kind.value_type)
        return read and (lambda value: value and [read(item) for item in value])
    return None


def _without_nanoseconds(batch: Any) -> Any:
    """Return a batch whose times have microseconds, as in Python. Raises ValueError for a time between two microseconds.

    With pandas installed, pyarrow would return times of pandas instead.
    """
    import pyarrow

    for number, field in enumerate(batch.schema):
        if pyarrow.types.is_timestamp(field.type) and field.type.unit == "ns":
            micros = batch.column(number).cast(pyarrow.timestamp("us", field.type.tz))
            batch = batch.set_column(number, field.name, micros)
    return batch


def _decoded_bytes(array: Any) -> int:
    """Return the size of an array's values if each had its own memory."""
    import pyarrow
    from pyarrow import compute

    kind: Any = array.type
    size = MIN_VALUE_BYTES * len(array)
    if isinstance(array, pyarrow.ExtensionArray):
        return size + _decoded_bytes(array.storage)
    if pyarrow.types.is_dictionary(kind):
        lengths = compute.binary_length(array.dictionary) if _has_length(array.dictionary.type) else None
        if lengths is None:
            return max(size, int(array.dictionary.nbytes // max(1, len(array.dictionary)) * len(array)))
        return size + (compute.sum(compute.cast(lengths.take(array.indices), pyarrow.int64())).as_py() or 0)
    if pyarrow.types.is_struct(kind):
        return size + sum(map(_decoded_bytes, array.flatten()))
    if pyarrow.types.is_map(kind):
        first, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return size + sum(_decoded_bytes(part.slice(first, end - first)) for part in (array.keys, array.items))
    if pyarrow.types.is_nested(kind):
        return size + _decoded_bytes(array.flatten())
    num_bytes: int = array.nbytes
    return max(size, num_bytes)


def _has_length(kind: Any) -> bool:
    from pyarrow import types

    return bool(
        types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind)
    )
