"""Comparison of what the checkpoints of a run say with what they hold, in a separate process that imports torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quartet.contract.status import Role
from quartet.data.cache_directory import limit_size, user_cache
from quartet.errors import ModelError
from quartet.model_files.adapter_files import adapter_chain
from quartet.model_files.hub_models import cached_snapshot, is_complete
from quartet.preflight.checking_process import checking_process
from quartet.preflight.findings import Finding
from quartet.system.durable_files import write_durably
from quartet.system.missing_packages import installed_version

_FORMAT = 2
"""Version of the comparison. Raise it if its result changes."""
_MAX_CACHE_BYTES = 16 * 1024**2


def check_contents(models: Mapping[str, tuple[Role, str]]) -> Iterator[Finding]:
    """Compare the files of models, by config key, with their config.json, and their vocabularies with the actor's.

    A model of the hub whose weights are not on this machine is compared when its service loads it. A result is kept in the
    user's cache.
    """
    results: dict[str, dict[str, Any]] = {}
    open_models = {}
    cache = user_cache("checkpoints")
    for key, (role, model) in models.items():
        directories = _directories(model)
        if directories is None:
            continue
        name = _name(role, directories)
        try:
            results[key] = json.loads((cache / f"{name}.json").read_text(encoding="utf-8")) if cache else {}
        except (OSError, ValueError):
            results[key] = {}
        if not results[key]:
            open_models[key] = role, model, name
    if open_models:
        request = json.dumps([(role, model) for role, model, _ in open_models.values()])
        with checking_process("quartet.preflight.checkpoint_worker", request) as (pipe, _):
            for (key, (_, _, name)), line in zip(open_models.items(), pipe, strict=False):
                results[key] = json.loads(line)
                if cache is not None and "notes" in results[key]:
                    _store(cache, name, results[key])
    actor = results.get("actor.model", {}).get("vocabulary_size")
    for key, result in results.items():
        role, model = models[key]
        where = f"{key} {model}"
        if "error" in result:
            yield Finding("error", *_located(key, model, result["error"]), ModelError)
        if "missing" in result:
            yield Finding(
                "ok", where, f"its tensors are compared when the service starts: no module {result['missing']}"
            )
        if not result:
            yield Finding("warning", where, "the process that compares its tensors died; memory may be short")
        size = result.get("vocabulary_size")
        if actor is not None and size is not None and size < actor:
            yield Finding(
                "error",
                where,
                f"embeds {size} token ids, actor.model can generate {actor}; resize the {role} model's embeddings to at least "
                "as many",
                ModelError,
            )
        for note in result.get("notes", ()):
            yield Finding("warning", *_located(key, model, note))


def _located(key: str, model: str, text: str) -> tuple[str, str]:
    """Return where a message of the worker is and what it says. It may name another directory, such as a base model."""
    path, _, what = text.removeprefix("model ").partition(": ") if text.startswith("model ") else (model, "", text)
    return f"{key} {path}", what


def _directories(model: str) -> list[Path] | None:
    """Return the directories of a model and of the models below its adapters, or None if its weights are not here."""
    try:
        base, adapters = adapter_chain(model)
    except ModelError:
        return None
    directory = Path(base)
    if not directory.is_dir():
        snapshot = cached_snapshot(str(base))
        if snapshot is None or not is_complete(snapshot):
            return None
        directory = snapshot
    return [directory, *adapters]


def _name(role: Role, directories: list[Path]) -> str:
    """Return the hash of everything that decides the result: configs, headers and sizes of the files, and packages.

    Weights that are tied and stored twice are compared by value, so the times of the files count.
    """
    digest = hashlib.sha256(
        json.dumps([_FORMAT, role, *map(installed_version, ("transformers", "torch", "peft"))]).encode()
    )
    for directory in directories:
        for path in sorted((*directory.glob("*.json"), *directory.glob("**/*.safetensors"))):
            status = path.stat()
            head = path.read_bytes() if path.suffix == ".json" else _header(path)
            entry = [path.relative_to(directory).as_posix(), status.st_size]
            entry += [status.st_mtime_ns] if path.suffix != ".json" else []
            digest.update(json.dumps(entry).encode() + hashlib.sha256(head).digest())
    return digest.hexdigest()


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(8 + min(int.from_bytes(file.read(8), "little"), 100 * 1024**2))


def _store(cache: Path, name: str, result: Mapping[str, Any]) -> None:
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(cache / f"{name}.json", json.dumps(result))
        limit_size(cache, ".json", _MAX_CACHE_BYTES)
    except OSError:
        return
