"""Checks of the directories of models: config.json, weight files and tokenizer files. Loads no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quartet.errors import ModelError
from quartet.tokenizer_check import check_tokenizer
from quartet.types import Role

_GENERATOR_ENDINGS = ("ForCausalLM", "LMHeadModel")
_CLASSIFIER_ENDINGS = ("ForSequenceClassification",)
_WRONG_ARCHITECTURES = {
    Role.ACTOR: (_CLASSIFIER_ENDINGS, "a causal language model"),
    Role.REFERENCE: (_CLASSIFIER_ENDINGS, "a causal language model"),
    Role.REWARD: (_GENERATOR_ENDINGS, "a sequence classifier with one output"),
}
"""Name endings of unsuitable architectures and the expected kind of model, by role. A critic may start from either kind."""


def looks_local(model: str) -> bool:
    """Return whether a model name is a path rather than a hub id (NAME or OWNER/NAME)."""
    path = Path(model)
    # A mistyped path such as runs/nmae counts as a path if the folder runs exists.
    in_existing_folder = len(path.parts) > 1 and Path(path.parts[0]).is_dir()
    return path.exists() or in_existing_folder or model.startswith((".", "/", "~")) or model.count("/") > 1


def check_model(key: str, role: Role, model: str, max_response_tokens: int) -> str:
    """Check the model of a role, and return a line that reports it. Raises ModelError."""
    if not looks_local(model):
        return f"{key} {model}: hub id, which is loaded when the {role} starts"
    directory = Path(model)
    if not directory.is_dir():
        raise ModelError(
            f"{key} {model}: no such directory; expected the directory of a Hugging Face model, or a hub id (NAME or OWNER/NAME)"
        )
    if (directory / "adapter_config.json").is_file():
        base = _read_json(key, directory / "adapter_config.json").get("base_model_name_or_path")
        if role is Role.REWARD:
            raise ModelError(
                f"{key} {model}: a LoRA adapter on {base}; expected {_WRONG_ARCHITECTURES[role][1]}: "
                "merge the adapter into its base model, and save that with save_pretrained"
            )
        return f"{key} {model}: LoRA adapter on {base}, which is loaded when the {role} starts"
    description = _read_json(key, directory / "config.json")
    if not list(directory.glob("*.safetensors")):
        raise ModelError(f"{key} {model}: contains no safetensors files; save the model with save_pretrained")
    architectures = [str(name) for name in description.get("architectures") or ["unknown architecture"]]
    endings, wanted = _WRONG_ARCHITECTURES.get(role, ((), ""))
    if any(name.endswith(endings) for name in architectures):
        raise ModelError(f"{key} {model}: {', '.join(architectures)}; expected {wanted}")
    if role is Role.REWARD and (outputs := _num_outputs(description)) != 1:
        raise ModelError(
            f"{key} {model}: a classifier with {outputs} outputs; a reward model has exactly one: train it with num_labels=1"
        )
    positions = description.get("max_position_embeddings")
    if isinstance(positions, int) and positions <= max_response_tokens:
        raise ModelError(
            f"{key} {model}: supports {positions} positions, and rollout.max_response_tokens {max_response_tokens} leaves none "
            "for a prompt; lower rollout.max_response_tokens"
        )
    check_tokenizer(key, directory)
    return f"{key} {model}: {', '.join(architectures)}"


def _num_outputs(description: dict[str, Any]) -> int:
    """Return the number of outputs of a classifier from its config.json, by the rule of transformers."""
    labels = description.get("id2label")
    return len(labels) if isinstance(labels, dict) else int(description.get("num_labels") or 2)


def may_have_chat_template(model: str) -> bool:
    """Return whether the files of a tokenizer contain a chat template. True for hub ids, which are only checked on loading."""
    description = Path(model) / "tokenizer_config.json"
    if not description.is_file() or list(Path(model).glob("*chat_template*")):
        return True
    return "chat_template" in _read_json("actor.model", description)


def _read_json(key: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"{key} {path.parent}: {path.name} cannot be read ({error.strerror}); expected the directory of a Hugging Face model"
        ) from None
    except ValueError as error:
        raise ModelError(f"{key} {path}: not JSON ({error}); save the model again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{key} {path}: expected a JSON object; save the model again")
    return value
