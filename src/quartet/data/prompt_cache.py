"""Cache of tokenized prompts on the disk. A file of the cache is named by the hash of everything that decides its content.

The cache only saves time: a file that is missing, damaged or cannot be written changes no result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from quartet.config.root import Config
from quartet.contract.trajectory import PromptSetContent
from quartet.data.cache_directory import delete, limit_size, user_cache
from quartet.data.chat_template import NO_INPUTS
from quartet.data.prompt_datasets import Report, cached_rows_file, rows_file
from quartet.data.prompt_encoding import EncodedPrompts, PromptEncoder, encode_lines
from quartet.data.prompt_files import check_regular_file, remedy
from quartet.data.prompt_lines import iterate_prompts
from quartet.data.prompt_settings import NO_REVISIONS, PromptSettings, RowMapping
from quartet.errors import DataError
from quartet.model_files.hub_models import cached_snapshot
from quartet.model_files.tokenizer_check import tokenizer_location
from quartet.system.missing_packages import installed_version

MAX_CACHE_BYTES = 4 * 1024**3
"""Maximum size of the cache. The files that were not used for the longest time are deleted first."""
FORMAT = 4
"""Version of the encoding and of the cache's files. Raise it if either changes."""
PROGRESS_SECONDS = 2.0
"""Seconds between two lines of progress."""
_PACKAGES = ("transformers", "tokenizers", "sentencepiece", "tiktoken", "jinja2")
"""Packages that decide the ids of a prompt."""
_MAX_TOKENIZER_BYTES = 256 * 1024**2
"""Maximum size of a file of a tokenizer. With a larger file in its directory, prompts are not cached."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")


@dataclass(frozen=True, slots=True)
class FileDigest:
    """SHA-256 and size of a prompts file, and the number of its line breaks."""

    sha256: str
    line_breaks: int

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """Read the file. Raises DataError."""
        check_regular_file(path)
        digest, line_breaks = hashlib.sha256(), 0
        try:
            with path.open("rb") as file:
                while chunk := file.read(1024 * 1024):
                    digest.update(chunk)
                    line_breaks += chunk.count(b"\n")
        except OSError as error:
            raise DataError(f"prompts {path}: cannot be read ({error.strerror}); {remedy(error)}") from None
        return cls(digest.hexdigest(), line_breaks)

    def lines(self, path: Path) -> int | None:
        """Return the number of lines for progress, or None if the line breaks do not tell it."""
        return self.line_breaks if path.suffix.lower() in (".jsonl", ".json", ".csv") else None


class PromptCache:
    """Files of tokenized prompts. Several processes may use it at once."""

    def __init__(self, directory: Path | None) -> None:
        """``directory`` is created when it is needed. None: the cache stays empty."""
        self._directory = directory

    @classmethod
    def of_user(cls) -> PromptCache:
        """Return the cache in $QUARTET_CACHE, $XDG_CACHE_HOME/quartet or ~/.cache/quartet."""
        return cls(user_cache("prompts"))

    def load(self, key: str | None) -> EncodedPrompts | None:
        """Return the prompts with this key, or None. A damaged file is deleted."""
        if key is None or self._directory is None:
            return None
        path = self._directory / f"{key}.npz"
        try:
            with np.load(path, allow_pickle=False) as arrays:
                loaded = EncodedPrompts(**{item.name: arrays[item.name] for item in fields(EncodedPrompts)})
            with contextlib.suppress(OSError):  # The directory may be read-only.
                os.utime(path)
        except OSError:
            return None
        except Exception:  # For damaged content numpy and zipfile raise exceptions of many types.
            delete(path)
            return None
        return loaded

    def store(self, key: str | None, encoded: EncodedPrompts) -> None:
        """Write prompts under this key, and delete old files if the cache is too large. Ignores a disk that refuses it."""
        if key is None or self._directory is None:
            return
        arrays: dict[str, Any] = {item.name: getattr(encoded, item.name) for item in fields(encoded)}
        if sum(array.nbytes for array in arrays.values()) > MAX_CACHE_BYTES // 2:
            return
        partial = None
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Readers see only complete files, and each writer has its own partial file.
            with tempfile.NamedTemporaryFile(dir=self._directory, suffix=".partial", delete=False) as file:
                partial = Path(file.name)
                np.savez(file, **arrays)
            partial.replace(self._directory / f"{key}.npz")
            limit_size(self._directory, ".npz", MAX_CACHE_BYTES)
        except OSError:
            if partial is not None:
                delete(partial)


def cache_key(settings: PromptSettings, path: Path, digest: FileDigest) -> str | None:
    """Return the key of the prompts of a set whose rows are in ``path``, or None if their tokenizer's files are not known."""
    tokenizer = _tokenizer_files(settings.model)
    if tokenizer is None:
        return None
    content: dict[str, Any] = {
        "format": FORMAT,
        "packages": {name: installed_version(name) for name in _PACKAGES},
        "prompts": digest.sha256,
        # The name determines how the file is read.
        "endings": [suffix.lower() for suffix in path.suffixes[-2:]],
        "tokenizer": tokenizer,
        "continue_final_message": settings.continue_final_message,
        "opens_response": settings.opens_response,
    }
    if settings.mapping != RowMapping():
        content["mapping"] = asdict(settings.mapping)
    if settings.inputs != NO_INPUTS:
        content["inputs"] = settings.inputs.key
    if settings.limit is not None:
        content["limit"] = [settings.limit, settings.max_prompt_tokens, settings.truncation is not None]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _tokenizer_files(model: str) -> dict[str, str] | None:
    """Return the hashes of all files that may belong to a model's tokenizer, by name. None if they are not on this machine."""
    location = tokenizer_location(model)
    directory = Path(location)
    if not directory.is_dir():
        snapshot = cached_snapshot(str(location))
        if snapshot is None:
            return None
        # Its commit does not determine which of its files were downloaded.
        directory = snapshot
    try:
        paths = [path for pattern in ("*", "additional_chat_templates/*") for path in sorted(directory.glob(pattern))]
        paths = [path for path in paths if path.is_file() and path.suffix not in _WEIGHTS]
        if any(path.stat().st_size > _MAX_TOKENIZER_BYTES for path in paths):
            return None
        contents = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
    except OSError:
        return None
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    if any(b"strftime_now" in content for content in contents.values()):
        hashes["date"] = time.strftime("%Y-%m-%d")  # The chat template writes the date.
    return hashes


def load_prompts(
    settings: PromptSettings,
    make_encoder: Callable[[], tuple[PromptEncoder, frozenset[int]]],
    report: Callable[[str], None] = lambda _: None,
) -> EncodedPrompts:
    """Return the tokenized prompts of a set, from the user's cache or by tokenizing them.

    ``make_encoder`` loads the tokenizer and returns the encoder and the stop token ids. It is not called if the cache has the
    prompts. ``report`` gets a line of progress every few seconds. Raises DataError.
    """
    path = rows_file(settings, report).path
    cache, digest = PromptCache.of_user(), FileDigest.of(path)
    key = cache_key(settings, path, digest)
    if (cached := cache.load(key)) is not None:
        return cached
    encoder, stop_ids = make_encoder()
    progress = _Progress(report, digest.lines(path) if settings.limit is None else None)
    encoded = encode_lines(settings, iterate_prompts(settings, path), encoder, stop_ids, progress.show)
    # Prompts or tokenizer files that changed while they were read would be stored under the key of other contents.
    if key is not None and cache_key(settings, path, FileDigest.of(path)) == key:
        cache.store(key, encoded)
    return encoded


def cached_prompts(settings: PromptSettings) -> EncodedPrompts | None:
    """Return the tokenized prompts of a set if the user's cache has them. Needs no tokenizer. Raises DataError."""
    path = cached_rows_file(settings)
    return None if path is None else PromptCache.of_user().load(cache_key(settings, path, FileDigest.of(path)))


class _Progress:
    """Report of the number of tokenized prompts, at most every PROGRESS_SECONDS."""

    def __init__(self, report: Callable[[str], None], total: int | None) -> None:
        self._report, self._total = report, total
        self._next = time.monotonic() + PROGRESS_SECONDS

    def show(self, count: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_SECONDS
            of_all = "" if self._total is None else f" of {max(self._total, count):,}"
            self._report(f"tokenizing prompts: {count:,}{of_all}")


def set_contents(
    config: Config, revisions: Mapping[str, str] = NO_REVISIONS, report: Report = lambda _: None
) -> dict[str, PromptSetContent]:
    """Return the content of every set, by key of the config. Empty without sets.

    ``revisions`` of data sets on the hub, by key. Data sets are read if they are not in the user's cache. Raises DataError.
    """
    sets = PromptSettings.for_training(config, revisions) if config.data.sets else []
    validation = PromptSettings.for_validation(config, revisions)
    if config.data.validation_set is not None and validation is not None:
        sets.append(validation)
    sets += PromptSettings.for_evaluation_sets(config, revisions)
    contents = {}
    for settings in sets:
        rows = rows_file(settings, report)
        contents[settings.key] = PromptSetContent(FileDigest.of(rows.path).sha256, rows.revision)
    return contents
