"""Rows of data sets of Hugging Face. They are read once, one after another, into a JSON Lines file of the user's cache.

From then on the file is used like any other prompts file. It is named by everything that decides its content: the commit on the
hub or the content of a folder, configuration, split and number of rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from quartet.data.cache_directory import delete, limit_size, user_cache
from quartet.data.prompt_files import MAX_LINE_BYTES
from quartet.data.prompt_lines import as_json
from quartet.data.prompt_settings import DatasetSource, PromptSettings
from quartet.errors import ConfigError, DataError, first_line
from quartet.model_files.hub_models import TIMEOUT_SECONDS, looks_local

FORMATS = ("arrow", "csv", "json", "parquet", "text")
"""Formats of data sets that are read. Others may hold pickled objects or media."""
MAX_ROWS_BYTES = 16 * 1024**3
"""Maximum size of the rows of a data set, and of all of them in the cache."""
FORMAT = 2
"""Version of the files in the cache. Raise it if their content changes."""
PROGRESS_SECONDS = 2.0
"""Seconds between two lines of progress."""
_COMMIT = re.compile("[0-9a-f]{40}")

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RowsFile:
    """File with the rows of a set, and the commit on the hub that they are from. The commit is empty for local files."""

    path: Path
    revision: str = ""


def rows_file(settings: PromptSettings, report: Report = lambda _: None) -> RowsFile:
    """Return the file with the rows of a set. Read a data set into the cache if it is not there.

    ``report`` gets a line of progress every few seconds. Raises DataError, and ConfigError without the package ``datasets``.
    """
    if settings.dataset is None:
        return RowsFile(settings.path)
    source = _resolved(settings, settings.dataset)
    path = _cache() / f"{_key(settings, source)}.jsonl"
    if not _is_cached(path):
        _import_datasets(settings)
        with _without_blocked_torch():
            _write(path, _rows(settings, source), settings, report)
    return RowsFile(path, source.revision or "")


def cached_rows_file(settings: PromptSettings) -> Path | None:
    """Return the file with the rows of a set if it is on this machine. Needs neither the network nor ``datasets``.

    Raises DataError.
    """
    if settings.dataset is None:
        return settings.path
    if not _is_folder(settings.dataset) and not _COMMIT.fullmatch(settings.dataset.revision or ""):
        return None
    path = _cache() / f"{_key(settings, settings.dataset)}.jsonl"
    return path if _is_cached(path) else None


def on_the_hub(settings: PromptSettings) -> bool:
    """Return whether the prompts are a data set on the hub."""
    return settings.dataset is not None and not _is_folder(settings.dataset)


def _is_folder(source: DatasetSource) -> bool:
    return looks_local(source.name)


_temporary: list[tempfile.TemporaryDirectory[str]] = []


def _cache() -> Path:
    """Return the directory of the cache, or a temporary one of this process without a cache."""
    cache = user_cache("datasets")
    if cache is not None:
        with contextlib.suppress(OSError):
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(cache, os.R_OK | os.W_OK):
            return cache
    if not _temporary:
        _temporary.append(tempfile.TemporaryDirectory(prefix="quartet-datasets-"))
    return Path(_temporary[0].name)


def _is_cached(path: Path) -> bool:
    try:
        os.utime(path)
    except OSError:
        return False
    return True


def _resolved(settings: PromptSettings, source: DatasetSource) -> DatasetSource:
    """Return a data set on the hub with the commit of its revision. Raises DataError."""
    if _is_folder(source):
        if source.revision is not None:
            raise DataError(
                f"{settings.key}: revision {source.revision}: {source.name} is a folder; remove the revision"
            )
        return source
    if _COMMIT.fullmatch(source.revision or ""):
        return source
    from httpx2 import HTTPError
    from huggingface_hub import HfApi, errors

    try:
        commit = HfApi().dataset_info(source.name, revision=source.revision, timeout=TIMEOUT_SECONDS).sha
    except errors.GatedRepoError:
        raise DataError(
            f"{settings.key}: access to the data set {source.name} must be granted; accept its terms on its page, and log in "
            "with `hf auth login` or set HF_TOKEN"
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        what = (
            f"revision {source.revision} of" if isinstance(error, errors.RevisionNotFoundError) else "such data set as"
        )
        raise DataError(
            f"{settings.key}: no folder {source.name}, and no {what} {source.name} on the hub; correct the name. For a private "
            "data set, log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except (OSError, HTTPError) as error:
        reason = first_line(error)[:300]
        raise DataError(
            f"{settings.key}: no folder {source.name}, and the hub cannot be reached ({reason}); correct the path, or "
            "set revision to a commit whose rows are in the cache"
        ) from None
    return replace(source, revision=commit)


def _key(settings: PromptSettings, source: DatasetSource) -> str:
    """Return the name of the rows' file. Raises DataError if a folder cannot be read."""
    content = {
        "format": FORMAT,
        **asdict(source),
        "take": settings.mapping.take,
        "ignored": sorted(settings.mapping.ignored),
    }
    if _is_folder(source):
        content["name"] = _folder_digest(settings, Path(source.name))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _folder_digest(settings: PromptSettings, folder: Path) -> str:
    """Return the SHA-256 of the names and contents of all files of a folder, hidden ones excepted."""
    digest = hashlib.sha256()
    if not folder.is_dir():
        raise DataError(
            f"{settings.key}: {folder}: no such folder (paths start at the current folder); give a folder with Parquet, JSON, "
            "CSV or Arrow files, an id on the hub (OWNER/NAME), or the path of a single file as path"
        )
    try:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.is_file() and not any(part.startswith(".") for part in name.parts):
                with path.open("rb") as file:
                    digest.update(f"{name.as_posix()}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    except OSError as error:
        raise DataError(f"{settings.key}: {folder}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()


def _import_datasets(settings: PromptSettings) -> None:
    """Import the package. Raises ConfigError if it is not installed."""
    try:
        import datasets  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"{settings.key}: the package datasets is not installed; run pip install 'quartet-rlhf[datasets]', or give a file "
            "of prompts as path"
        ) from None


@contextlib.contextmanager
def _without_blocked_torch() -> Iterator[None]:
    """Remove the mark of a process that must not import torch, which ``datasets`` takes for the module.

    In such a process it has been imported without torch, and does not import it later.
    """
    blocked = "torch" in sys.modules and sys.modules["torch"] is None
    if blocked:
        del sys.modules["torch"]
    try:
        yield
    finally:
        if blocked:
            sys.modules["torch"] = None  # type: ignore[assignment]


def _rows(settings: PromptSettings, source: DatasetSource) -> Iterable[dict[str, Any]]:
    """Return the rows of a data set, which are read while they are iterated. Raises DataError."""
    import datasets

    datasets.disable_progress_bars()
    try:
        rows = _opened(datasets, settings, source)
    except DataError:
        raise
    except Exception as error:  # The library raises exceptions of many types.
        raise DataError(f"{settings.key}: {source}: cannot be read ({first_line(error)[:300]})") from None
    features = getattr(rows, "features", None) or {}
    return ({name: _own_value(value, features.get(name)) for name, value in row.items()} for row in rows)


def _own_value(value: Any, feature: Any) -> Any:
    """Return a value without the nulls that Arrow adds, see ``quartet.data.prompt_files``.

    ``feature`` is its type: an object by names of fields, a list with one type or ``List``, ``Json``, ``Value``, or None.
    """
    if isinstance(value, dict) and (feature is None or isinstance(feature, dict)):
        types = feature or {}
        return {
            name: _own_value(item, types.get(name))
            for name, item in value.items()
            if item is not None or getattr(types.get(name), "dtype", "") == "null"
        }
    of_items = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if isinstance(value, list) and (feature is None or of_items is not None):
        return [_own_value(item, of_items) for item in value]
    return value


def _opened(datasets: Any, settings: PromptSettings, source: DatasetSource) -> Iterable[dict[str, Any]]:
    folder = Path(source.name)
    if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return _saved_rows(datasets.load_from_disk(str(folder)), settings, source)
    builder = datasets.load_dataset_builder(source.name, source.config, revision=source.revision)
    module = type(builder).__module__
    if module.rpartition(".")[2] not in FORMATS or not module.startswith("datasets.packaged_modules."):
        raise DataError(
            f"{settings.key}: {source}: its format is {module.rpartition('.')[2]}; expected one of {', '.join(FORMATS)}"
        )
    # Streaming: nothing is downloaded beyond the rows that are taken, and nothing is copied into another cache.
    rows: Iterable[dict[str, Any]] = builder.as_streaming_dataset(split=source.split)
    return rows


def _saved_rows(saved: Any, settings: PromptSettings, source: DatasetSource) -> Iterable[dict[str, Any]]:
    """Return the rows of a data set that save_to_disk has written: of a split, or of a data set without splits."""
    if not isinstance(saved, dict):
        return saved  # type: ignore[no-any-return]
    if source.split not in saved:
        raise DataError(f"{settings.key}: {source}: has no split {source.split}, but {', '.join(sorted(saved))}")
    return saved[source.split]  # type: ignore[no-any-return]


def _write(path: Path, rows: Iterable[dict[str, Any]], settings: PromptSettings, report: Report) -> None:
    """Write rows to ``path``. Readers see only complete files, and each writer has its own partial file. Raises DataError."""
    partial = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False) as file:
            partial = Path(file.name)
            for line in _lines(rows, settings, report):
                file.write(line)
                if file.tell() > MAX_ROWS_BYTES:
                    raise DataError(
                        f"{settings.key}: {settings}: its rows have more than {MAX_ROWS_BYTES} bytes; set take to the number of "
                        "rows to read, or list columns that are not needed in ignore_columns"
                    )
        partial.replace(path)
        limit_size(path.parent, ".jsonl", MAX_ROWS_BYTES)
    except OSError as error:
        raise DataError(f"{settings.key}: {path.parent}: cannot be written ({error.strerror or error})") from None
    finally:
        if partial is not None:
            delete(partial)


def _lines(rows: Iterable[dict[str, Any]], settings: PromptSettings, report: Report) -> Iterator[bytes]:
    next_report = time.monotonic() + PROGRESS_SECONDS
    for number, row in enumerate(_taken(rows, settings), 1):
        kept = {name: value for name, value in row.items() if name not in settings.mapping.ignored}
        line = b"{" + b",".join(_member(name, value, settings, number) for name, value in kept.items()) + b"}\n"
        if len(line) > MAX_LINE_BYTES:
            raise DataError(
                f"{settings.location(number)}: has {len(line)} bytes, expected at most {MAX_LINE_BYTES}; shorten its values, or "
                "list columns that are not needed in ignore_columns"
            )
        yield line
        if time.monotonic() >= next_report:
            next_report = time.monotonic() + PROGRESS_SECONDS
            report(f"reading {settings}: {number:,} rows")


def _taken(rows: Iterable[dict[str, Any]], settings: PromptSettings) -> Iterator[dict[str, Any]]:
    """Yield the rows to take. Raises DataError for everything that ``datasets`` raises."""
    try:
        yield from islice(rows, settings.mapping.take)
    except Exception as error:  # Readers, decoders and the network raise exceptions of many types.
        raise DataError(f"{settings.key}: {settings}: cannot be read ({first_line(error)[:300]})") from None


def _member(name: str, value: Any, settings: PromptSettings, number: int) -> bytes:
    """Return a column of a row as JSON. Raises DataError that names both."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=as_json)
        return f"{json.dumps(name)}:{text}".encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{settings.location(number)}: column {name} cannot be read as JSON ({error}); expected text, numbers, lists and "
            "objects; add it to ignore_columns if it is not needed"
        ) from None
