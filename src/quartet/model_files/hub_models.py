"""Models on the Hugging Face Hub: distinguish hub ids from paths, and find or download their files. Does not import torch."""

from __future__ import annotations

import json
import os
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from quartet.errors import ModelError, first_line
from quartet.model_files.tokenizer_check import has_tokenizer

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TIMEOUT_SECONDS = 5.0
"""Maximum seconds to connect to the hub, and to wait for each of its answers."""
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Patterns of a repository's config and tokenizer files."""
WEIGHT_FILES = ("model.safetensors", "model-*.safetensors")
"""Patterns of the weight files that transformers loads. A repository may contain others, such as consolidated.safetensors."""
_SUBFOLDERS = ["*/*"]
"""Pattern of files in folders of a repository, such as weights in other formats."""


def looks_local(model: str | Path) -> bool:
    """Return whether a model name is a path rather than a hub id (NAME or OWNER/NAME)."""
    text, path = str(model), Path(model)
    # A mistyped path such as runs/nmae counts as a path if the folder runs exists.
    in_existing_folder = len(path.parts) > 1 and Path(path.parts[0]).is_dir()
    is_path = isinstance(model, Path) or path.exists() or in_existing_folder
    return is_path or text.startswith((".", "/", "~")) or text.count("/") > 1 or "//" in text


def model_directory(model: str | Path, weights: bool = True) -> Path:
    """Return the directory of a checkpoint's files, which for a hub id is one of the local cache.

    Without ``weights`` only config and tokenizer files are needed. Raises ModelError.
    """
    if not looks_local(model):
        try:
            return hub_directory(str(model), weights)
        except ModelError as error:
            raise ModelError(f"model {error}") from None
    directory = Path(model)
    if not directory.is_dir():
        raise ModelError(
            f"model {model}: no such directory (paths start at the current folder); expected a checkpoint directory or a hub id "
            "(NAME or OWNER/NAME)"
        )
    if not any(directory.iterdir()):
        raise ModelError(
            f"model {model}: the directory is empty; expected config.json, safetensors and tokenizer files"
        )
    return directory


def cached_snapshot(model: str | Path) -> Path | None:
    """Return the directory of a hub model's files in the local cache, or None. Some of its files may be missing.

    Does not import huggingface_hub, whose rules it follows for the location of the cache.
    """
    text = str(model)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text):
        return None
    home = os.getenv("HF_HOME", os.path.join(os.getenv("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    earlier_name = os.getenv("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub"))
    hub = os.path.expandvars(os.path.expanduser(os.getenv("HF_HUB_CACHE", earlier_name)))
    folder = Path(hub) / f"models--{text.replace('/', '--')}"
    try:
        commit = (folder / "refs/main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if re.fullmatch("[0-9a-f]{40}", commit) and snapshot.is_dir() else None


def hub_directory(model: str, weights: bool = True) -> Path:
    """Return the directory of a hub model's files in the local cache. Download those that are missing.

    A model that is in the cache is used as it is: the hub is not asked for a newer revision. Without ``weights`` only config and
    tokenizer files are needed. Raises ModelError if the hub has no such model, does not allow access, or cannot be reached.
    """
    from httpx2 import HTTPError
    from huggingface_hub import HfApi, errors

    hub = HfApi()
    patterns = [*SMALL_FILES, *(WEIGHT_FILES if weights else ())]
    if (cached := _cached(hub, model, patterns, weights)) is not None:
        return cached
    try:
        files = [file.rfilename for file in hub.model_info(model, timeout=TIMEOUT_SECONDS).siblings or ()]
        if not any(fnmatch(file, pattern) for file in files for pattern in WEIGHT_FILES):
            raise ModelError(
                f"{model}: the model on the hub has no safetensors files; convert it: load it with transformers, save it with "
                "save_pretrained, and give that directory"
            )
        return Path(
            hub.snapshot_download(
                model, etag_timeout=TIMEOUT_SECONDS, allow_patterns=patterns, ignore_patterns=_SUBFOLDERS
            )
        )
    except ModelError:
        raise
    except errors.GatedRepoError:
        raise ModelError(
            f"{model}: access to this model must be granted; accept its terms on its page, and log in with `hf auth login` "
            "or set HF_TOKEN"
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise ModelError(
            f"{model}: no such directory, and no such model on the hub; correct the name. For a private model, log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from None
    except (OSError, HTTPError) as error:
        reason = first_line(error)[:200]
        raise ModelError(
            f"{model}: no such directory, not in the local cache, and the hub cannot be reached ({reason}); correct the "
            f"path, or run `hf download {model} --local-dir DIRECTORY` on a machine with internet access, copy the "
            "directory here, and give its path"
        ) from None


def _cached(hub: HfApi, model: str, patterns: list[str], weights: bool) -> Path | None:
    """Return the directory of a model in the cache if it has these files."""
    from huggingface_hub import errors

    try:
        directory = Path(
            hub.snapshot_download(model, local_files_only=True, allow_patterns=patterns, ignore_patterns=_SUBFOLDERS)
        )
    except (errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError, errors.HFValidationError):
        return None
    # Other programs download single files, and leave no list of what is missing.
    return directory if is_complete(directory, weights) else None


def is_complete(directory: Path, weights: bool = True) -> bool:
    """Return whether a directory has config.json, a tokenizer and, if wanted, all weight files."""
    if not (directory / "config.json").is_file() or not has_tokenizer(directory):
        return False
    try:
        index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
        names = set(index["weight_map"].values())
    except FileNotFoundError:
        names = {"model.safetensors"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
    return not weights or all((directory / str(name)).is_file() for name in names)
