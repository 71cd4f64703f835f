"""Download models and data into a deployment: `python -m quartet.model_files.downloads [--wait] TARGET=SOURCE ...`.

A download is built beside its target, as `.NAME.partial`, and renamed when it is complete. A later start continues an interrupted
download, and skips a complete one. `.NAME.source` beside the target names the source. With --wait, the command only waits until
all targets exist. Imports neither torch nor transformers, and loads no file that it downloads.

Sources:
    hf://OWNER/NAME[@REVISION]                   config, tokenizer and safetensors files of a model on the Hugging Face Hub
    hf://datasets/OWNER/NAME[@REVISION][/FILE]   the data files of a data set on the hub, or one of them
    https://HOST/PATH[#sha256=DIGEST]            one file
    s3://BUCKET/KEY                              one file, or with a slash at the end a folder. Another program copies it to
                                                 `.NAME.partial` before, because the image contains no client for S3
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import httpx2

from quartet.errors import ConfigError, QuartetError, ServiceUnavailable, first_line
from quartet.model_files.hub_models import SMALL_FILES, WEIGHT_FILES, is_complete
from quartet.system.secret_files import read_secret

SECRETS = Path("/run/secrets/downloads")
"""Folder of optional secrets, each in a file: hf_token, and authorization, the header of requests to https:// sources."""
DATA_FILES = tuple(
    f"*.{name}{compression}"
    for name in ("jsonl", "json", "csv", "parquet", "arrow", "txt")
    for compression in ("", ".gz", ".zst")
)
"""Patterns of data files. Pickles and scripts are never downloaded."""
TIMEOUT_SECONDS = 30.0
"""Maximum seconds to connect to a server, and to wait for each part of its answer."""
POLL_SECONDS = 2.0
"""Seconds between looks at a target that does not exist yet."""
_MAX_REPORT_SECONDS = 60.0
_HUB = re.compile(r"hf://(datasets/)?([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?:/([\w./-]+))?")


@dataclass(frozen=True)
class Download:
    """A file or folder below the current folder, and where it comes from."""

    target: Path
    source: str

    @property
    def partial(self) -> Path:
        """The path of the incomplete download."""
        return self.target.with_name(f".{self.target.name}.partial")

    @property
    def record(self) -> Path:
        """The file that names the source of the target."""
        return self.target.with_name(f".{self.target.name}.source")

    def is_complete(self) -> bool:
        """Return whether the target exists. A target without a record is a copy of the user, and counts as complete.

        Raises ConfigError if the target comes from another source.
        """
        if not self.target.exists():
            return False
        recorded = self.record.read_text(encoding="utf-8") if self.record.exists() else self.source
        if recorded != self.source:
            raise ConfigError(
                f"{self.target}: comes from {recorded}, but the source is {self.source}; give another target, or delete "
                f"{self.target} and {self.record}"
            )
        return True


def parse(argument: str) -> Download:
    """Return the download of an argument TARGET=SOURCE. Raises ConfigError."""
    target, _, source = argument.partition("=")
    path = PurePosixPath(target)
    if path.is_absolute() or ".." in path.parts or len(path.parts) < 2:
        raise ConfigError(f"target {target!r}: expected a path below a folder, such as models/policy")
    if not source.startswith(("hf://", "https://", "s3://")):
        raise ConfigError(
            f"{target}: source {source!r}; expected hf://OWNER/NAME, https://HOST/PATH or s3://BUCKET/KEY"
        )
    return Download(Path(path), source)


def fetch(download: Download, secrets: Path = SECRETS) -> None:
    """Download a target, unless it is complete.

    Raises ConfigError if the source cannot be used, and ServiceUnavailable if a new attempt may succeed.
    """
    download.target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(download.target):
        if download.is_complete():
            print(f"{download.target}: is complete", flush=True)
            return
        print(f"{download.target}: downloads {download.source}", flush=True)
        if download.source.startswith("hf://"):
            result = _from_hub(download, _secret(secrets, "hf_token"))
        elif download.source.startswith("https://"):
            result = _from_url(download, _secret(secrets, "authorization"))
        else:
            result = _copied(download)
        # The record comes first, so that a target with a record is always complete.
        download.record.write_text(download.source, encoding="utf-8")
        os.rename(result, download.target)
        if download.partial.is_dir():
            shutil.rmtree(download.partial)
        print(f"{download.target}: is complete", flush=True)


def wait(downloads: Sequence[Download]) -> None:
    """Wait until all targets are complete. Raises ConfigError if a target comes from another source."""
    reported = -_MAX_REPORT_SECONDS
    while missing := [str(download.target) for download in downloads if not download.is_complete()]:
        if time.monotonic() - reported >= _MAX_REPORT_SECONDS:
            reported = time.monotonic()
            print(f"waiting for {', '.join(missing)}; see the log of the download", flush=True)
        time.sleep(POLL_SECONDS)


def _from_hub(download: Download, token: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download

    match = _HUB.fullmatch(download.source)
    if match is None or (match[4] and not match[1]):
        raise ConfigError(
            f"{download.target}: source {download.source}; expected hf://OWNER/NAME[@REVISION] for a model, or "
            "hf://datasets/OWNER/NAME[@REVISION][/FILE]"
        )
    is_data, repository, revision, file = bool(match[1]), match[2], match[3], match[4]
    patterns = [file] if file else list(DATA_FILES if is_data else (*SMALL_FILES, *WEIGHT_FILES))
    if file and not any(PurePosixPath(file).match(pattern) for pattern in DATA_FILES):
        raise ConfigError(f"{download.target}: file {file}; expected one of {', '.join(DATA_FILES)}")
    try:
        snapshot_download(
            repository,
            repo_type="dataset" if is_data else "model",
            revision=revision,
            local_dir=download.partial,
            allow_patterns=patterns,
            ignore_patterns=None if is_data else ["*/*"],
            token=token,
        )
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise ConfigError(
            f"{download.target}: {download.source} does not exist, or this token may not read it; correct the name or revision, "
            "or give a token (key hf_token of the Secret) whose account has accepted the terms of the repository"
        ) from None
    except (OSError, httpx2.HTTPError, errors.LocalEntryNotFoundError) as error:
        raise ServiceUnavailable(f"{download.target}: {download.source} failed: {first_line(error)[:200]}") from None
    shutil.rmtree(download.partial / ".cache", ignore_errors=True)
    result = download.partial / file if file else download.partial
    if not result.exists() or (is_data and not file and not any(path.is_file() for path in result.rglob("*"))):
        raise ConfigError(f"{download.target}: {download.source} has no such data; expected {', '.join(patterns)}")
    if not is_data and not is_complete(result):
        raise ConfigError(
            f"{download.target}: {download.source} has no complete model; expected config.json, a tokenizer and safetensors files"
        )
    return result


def _from_url(download: Download, authorization: str | None) -> Path:
    """Download one file. An interrupted download continues if the server says that the file is the same one."""
    address, _, fragment = download.source.partition("#")
    name = PurePosixPath(urlsplit(address).path)
    patterns = (*DATA_FILES, *SMALL_FILES, "*.safetensors")
    if not any(name.match(pattern) for pattern in patterns):
        raise ConfigError(f"{download.target}: file {name.name}; expected one of {', '.join(patterns)}")
    tag = download.partial.with_name(f"{download.partial.name}.etag")
    headers = {"authorization": authorization} if authorization else {}
    size = download.partial.stat().st_size if download.partial.exists() else 0
    if size and tag.exists():
        headers |= {"range": f"bytes={size}-", "if-range": tag.read_text(encoding="utf-8")}
    # An answer that is compressed for the transport cannot be continued.
    headers["accept-encoding"] = "identity"
    try:
        with (
            httpx2.Client(timeout=TIMEOUT_SECONDS, follow_redirects=True) as client,
            client.stream("GET", address, headers=headers) as response,
        ):
            if any(step.url.scheme != "https" for step in (*response.history, response)):
                raise ConfigError(f"{download.target}: {address} redirects to an address without TLS; give another one")
            # 416: nothing is missing.
            if response.status_code != 416:
                response.raise_for_status()
                _write(download.partial, tag, response)
    except httpx2.HTTPStatusError as error:
        message = f"{download.target}: {address} answered {error.response.status_code}"
        if error.response.status_code in (401, 403, 404, 410):
            raise ConfigError(f"{message}; correct the address, or the key authorization of the Secret") from None
        raise ServiceUnavailable(message) from None
    except httpx2.HTTPError as error:
        raise ServiceUnavailable(f"{download.target}: {address} failed: {first_line(error)[:200]}") from None
    _check_digest(download, fragment)
    tag.unlink(missing_ok=True)
    return download.partial


def _write(partial: Path, tag: Path, response: httpx2.Response) -> None:
    resumed = response.status_code == 206
    if not resumed:
        partial.unlink(missing_ok=True)
    etag = response.headers.get("etag", "")
    if etag and not etag.startswith("W/"):
        tag.write_text(etag, encoding="utf-8")
    else:
        tag.unlink(missing_ok=True)
    with partial.open("ab") as file:
        for chunk in response.iter_raw():
            file.write(chunk)


def _check_digest(download: Download, fragment: str) -> None:
    if not fragment:
        return
    with download.partial.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if fragment != f"sha256={digest}":
        download.partial.unlink()
        raise ConfigError(f"{download.target}: has sha256={digest}; expected {fragment}; correct it, or the address")


def _copied(download: Download) -> Path:
    """Check what the client for S3 has copied."""
    is_folder = download.source.endswith("/")
    if is_folder != download.partial.is_dir() or not download.partial.exists():
        raise ConfigError(
            f"{download.target}: {download.source} has no files of the expected types; correct the address. The address of a "
            "folder ends with a slash"
        )
    return download.partial


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Exclude other processes that download this target."""
    with target.with_name(f".{target.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _secret(folder: Path, name: str) -> str | None:
    path = folder / name
    return read_secret(path, f"downloads.existingSecret, key {name}:") if path.exists() else None


def main(arguments: Sequence[str]) -> int:
    """Run the command. Exit status: 1 after an error, 2 for wrong arguments."""
    waits = "--wait" in arguments
    try:
        downloads = [parse(argument) for argument in arguments if argument != "--wait"]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        if waits:
            wait(downloads)
        else:
            for download in downloads:
                fetch(download)
    except (QuartetError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
