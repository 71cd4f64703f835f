"""Upload of an exported policy to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from quartet.errors import ConfigError, ServiceUnavailable

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
