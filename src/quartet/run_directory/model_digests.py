"""Digests of the files of a run's models, so that a run notices that one has changed. Does not import torch."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

import xxhash

from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.data.cache_directory import limit_size, user_cache
from quartet.errors import ModelError
from quartet.model_files.adapter_files import adapter_chain
from quartet.model_files.hub_models import cached_snapshot
from quartet.model_files.weight_files import VALUE_HEAD_FILE, weight_files
from quartet.system.durable_files import write_durably

_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    VALUE_HEAD_FILE,
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "tekken.json",
    "chat_template*",
    "*.jinja",
    "*.model",
    "*.tiktoken",
)
"""Patterns of the files of a model besides its weights. Others, such as a README, decide nothing."""
_BLOCK = 8 * 1024**2
_MAX_CACHE_BYTES = 16 * 1024**2
_RECENT_SECONDS = 2.0
"""A file that changed within this time may change again without another time, so its digest is not kept."""


def role_models(config: Config, role: Role) -> dict[str, str]:
    """Return the models and tokenizers that the service of a role reads, by config key."""
    models = {key: model for key, model in config.models.items() if key.partition(".")[0] == role}
    if role is Role.REWARD and config.reward.tokenizer is not None:
        models["reward.tokenizer"] = config.reward.tokenizer
    return models


def local_digests(config: Config) -> dict[str, str]:
    """Return the digests of all models of a run whose service this machine starts. See ``model_digests``."""
    # In the order of the config, so that a message names the reward model and not the critic that starts from it.
    roles = dict.fromkeys(Role(key.partition(".")[0]) for key in [*config.models, "reward"])
    local = [role for role in roles if getattr(config.services, role).address is None]
    return model_digests({key: model for role in local for key, model in role_models(config, role).items()})


def model_digests(models: Mapping[str, str]) -> dict[str, str]:
    """Return "SIZE XXH3" of every file of ``models``, by KEY/FILE; and of a hub model also its commit, by KEY/commit.

    The weights are read completely, unless the user's cache has the digest of the unchanged file. Models that are not on this
    machine have no digests.
    """
    digests: dict[str, str] = {}
    for key, model in models.items():
        try:
            base, adapters = adapter_chain(model)
        except ModelError:
            continue
        directory: Path | None = Path(base)
        if not Path(base).is_dir():
            directory = cached_snapshot(base)
            if directory is not None and re.fullmatch("[0-9a-f]{40}", directory.name):
                digests[f"{key}/commit"] = directory.name
        below = "base/" if adapters else ""
        for prefix, place in (
            (below, directory),
            *(("", adapter) for adapter in adapters[-1:]),
            *((f"adapter-{number}/", adapter) for number, adapter in enumerate(adapters[:-1])),
        ):
            if place is not None:
                for path in _files(place):
                    digests[f"{key}/{prefix}{path.relative_to(place).as_posix()}"] = _digest(path)
    return digests


def _files(directory: Path) -> list[Path]:
    try:
        weights = weight_files(directory)
    except ModelError:  # An adapter, a tokenizer, or a model whose loading reports what is wrong.
        weights = []
    paths = [*directory.glob("*"), *directory.glob("additional_chat_templates/*")]
    small = [path for path in paths if path.is_file() and any(fnmatch(path.name, name) for name in _SMALL_FILES)]
    return sorted({*weights, *small})


def _digest(path: Path) -> str:
    """Return the size and the digest of a file. Raises ModelError if it cannot be read."""
    try:
        status = path.stat()
        state = [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        name = hashlib.sha256(json.dumps(state).encode()).hexdigest()
        cache = user_cache("digests")
        kept = _kept(cache, name)
        if kept is not None:
            return kept
        digest = xxhash.xxh3_128()
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise ModelError(f"model {path}: cannot be read ({error.strerror}); give the service access to it") from None
    result = f"{status.st_size} {digest.hexdigest()}"
    if cache is not None and time.time() - max(status.st_mtime, status.st_ctime) > _RECENT_SECONDS:
        try:
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_durably(cache / f"{name}.txt", result)
            limit_size(cache, ".txt", _MAX_CACHE_BYTES)
        except OSError:
            pass
    return result


def _kept(cache: Path | None, name: str) -> str | None:
    try:
        text = (cache / f"{name}.txt").read_text(encoding="utf-8") if cache is not None else ""
    except OSError:
        return None
    return text if re.fullmatch("[0-9]+ [0-9a-f]{32}", text) else None
