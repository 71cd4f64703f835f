"""`quartet checkpoints export`: the policy of a checkpoint as a Hugging Face model."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from quartet.cli.checkpoint.list_and_tag import console
from quartet.cli.checkpoint.model_card import write_model_card
from quartet.config.loading import load_config
from quartet.contract.status import Role
from quartet.errors import ConfigError, ServiceUnavailable
from quartet.model_files.adapter_files import is_adapter
from quartet.model_files.sharded_files import is_sharded
from quartet.models.training.optimizer import OPTIMIZER_FILE
from quartet.models.training.weight_average import EMA_FILE, apply_average
from quartet.models.weights.loading import load_causal_lm, snapshot_model, write_consolidated
from quartet.models.weights.lora import add_adapter
from quartet.models.weights.snapshot import Writer, write_model
from quartet.models.weights.tokenizer import load_tokenizer
from quartet.run_directory.checkpoints import Checkpoint
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.selection import checkpoint_at, run_files


def export(
    run: Path,
    which: str,
    directory: Path | None,
    hub_id: str | None = None,
    private: bool = True,
    ema: bool = False,
) -> None:
    """Write the policy of a checkpoint in Hugging Face format, with a model card. Upload it if ``hub_id`` is given.

    ``ema``: the moving average of its weights instead. The model's files are the same as those that a run saves at its end.
    Without a directory they are only uploaded. Raises ConfigError, also if the directory is not empty or the hub refuses the
    upload, StorageFailed if it cannot be written, and ServiceUnavailable if the hub cannot be reached.
    """
    files = run_files(run)
    if hub_id is not None:
        check_push(hub_id)
    if directory is not None:
        step = _write(files, which, directory, ema)
        what = "the moving average of the policy" if ema else "the policy"
        console.print(f"{directory}: {what} of {run} after step {step}", soft_wrap=True)
        if hub_id is not None:
            _upload(files, directory, hub_id, private, step)
    elif hub_id is not None:
        with TemporaryDirectory(prefix="quartet-export-") as folder:
            step = _write(files, which, Path(folder) / "policy", ema)
            _upload(files, Path(folder) / "policy", hub_id, private, step)
    else:
        raise ConfigError("export: expected a DIRECTORY to write to, or --push OWNER/NAME")


def _upload(files: RunFiles, directory: Path, hub_id: str, private: bool, step: int) -> None:
    message = f"Policy of the run {load_config(files.config).run.name} after step {step}"
    console.print(f"{push(directory, hub_id, private, message)}: uploaded", soft_wrap=True)


def _write(files: RunFiles, which: str, directory: Path, ema: bool) -> int:
    """Write the policy of a checkpoint, or its average, and the model card. Returns its step."""
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ConfigError(f"export to {directory}: not an empty directory; choose a new or empty one")
    checkpoint = checkpoint_at(files, which)
    policy = checkpoint.path / Role.ACTOR
    if ema and not (policy / EMA_FILE).is_file():
        raise ConfigError(f"--ema: checkpoint {checkpoint.path} has no average; it is kept with actor.ema_decay")
    if ema or is_adapter(policy):
        writers = _loaded(files, checkpoint, ema)
    else:
        writers = [_copy_of(policy)]
        if is_sharded(policy):
            writers.append(lambda target: write_consolidated(policy, target))
    write_model(directory, *writers, lambda target: write_model_card(target, files, checkpoint.step, ema))
    return checkpoint.step


def _copy_of(policy: Path) -> Writer:
    def write(target: Path) -> None:
        for file in sorted(policy.iterdir()):
            if file.is_file() and file.name not in (OPTIMIZER_FILE, EMA_FILE):
                shutil.copyfile(file, target / file.name)

    return write


def _loaded(files: RunFiles, checkpoint: Checkpoint, ema: bool) -> list[Writer]:
    """Merge the adapter, and round the average, in the same way as the actor does. So the same weights give the same bytes."""
    actor, policy = load_config(files.config, []).actor, checkpoint.path / Role.ACTOR
    lora = actor.lora
    if not is_adapter(policy):
        model = load_causal_lm(policy, actor.dtype)
        apply_average(model, policy)
        return [snapshot_model(model), load_tokenizer(actor.model).save_pretrained]
    if lora is None:
        raise ConfigError(
            f"{files.config}: actor.lora is null, but checkpoint {checkpoint.path} holds an adapter; restore actor.lora"
        )
    model = load_causal_lm(actor.model, actor.dtype)
    adapter = add_adapter(model, actor.model, lora)
    adapter.read(policy)
    if ema:
        apply_average(model, policy)
    return [snapshot_model(model, adapter), load_tokenizer(actor.model).save_pretrained]


OLD_WEIGHTS = ("model.safetensors*", "model-*.safetensors", "pytorch_model*.bin*", "adapter_*")
"""Patterns of weight files that transformers prefers to new ones, or loads with them."""


def check_push(hub_id: str) -> None:
    """Check the id and that there is a token, before anything is exported. Raises ConfigError."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(hub_id)
    except HFValidationError as error:
        raise ConfigError(f"--push {hub_id}: {error}; expected OWNER/NAME") from None
    if constants.is_offline_mode():
        raise ConfigError(f"--push {hub_id}: HF_HUB_OFFLINE is set; unset it, or leave --push out")
    if get_token() is None:
        raise ConfigError(f"--push {hub_id}: no token for the hub; log in with `hf auth login`, or set HF_TOKEN")


def push(directory: Path, hub_id: str, private: bool, message: str) -> str:
    """Create the repository if it does not exist, upload the directory in one commit, and return the address.

    The commit deletes other weights there. The token comes from the environment or the login of ``hf``. An existing
    repository keeps its visibility and its history.
    Raises ConfigError if the hub refuses the upload, and ServiceUnavailable if it cannot be reached.
    """
    from httpx2 import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    hub = HfApi()
    try:
        url = hub.create_repo(hub_id, private=private, exist_ok=True)
        hub.upload_folder(
            repo_id=url.repo_id, folder_path=directory, commit_message=message, delete_patterns=list(OLD_WEIGHTS)
        )
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = error.server_message or f"status {status}"
        if status >= 500:
            raise ServiceUnavailable(f"--push {hub_id}: the hub failed ({reason}); try again") from None
        raise ConfigError(
            f"--push {hub_id}: the hub refuses it ({reason}); give a token with write access to that name"
        ) from None
    except (OSError, HTTPError) as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        raise ServiceUnavailable(f"--push {hub_id}: the hub cannot be reached ({reason}); try again") from None
    return str(url)
