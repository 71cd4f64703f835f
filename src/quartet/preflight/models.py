"""Checks of the directories of models: config.json, weight files and tokenizer files. Loads no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quartet.errors import ModelError
from quartet.hub_models import hub_directory, looks_local
from quartet.model_support import not_causal_reason, uncacheable_reason, unreadable_reason
from quartet.tokenizer_check import check_tokenizer, first_difference
from quartet.types import Role

_GENERATOR_ENDINGS = ("ForCausalLM", "LMHeadModel")
_CLASSIFIER_ENDINGS = ("ForSequenceClassification",)
_WRONG_ARCHITECTURES = {
    Role.ACTOR: (_CLASSIFIER_ENDINGS, "a causal language model"),
    Role.REFERENCE: (_CLASSIFIER_ENDINGS, "a causal language model"),
    Role.REWARD: (_GENERATOR_ENDINGS, "a sequence classifier with one output"),
}
"""Name endings of unsuitable architectures and the expected kind of model, by role. A critic may start from either kind."""


def check_model(key: str, role: Role, model: str, max_response_tokens: int, engine: str = "torch") -> str:
    """Check the model of a role, and return a line that reports it. ``engine`` is the actor's. Raises ModelError."""
    is_local = looks_local(model)
    directory = Path(model) if is_local else _hub_directory(key, model)
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
    reason = _unsupported_reason(role, description, engine)
    if reason is not None:
        raise ModelError(f"{key} {model}: {reason}")
    if is_local and not list(directory.glob("*.safetensors")):
        raise ModelError(f"{key} {model}: contains no safetensors files; save the model with save_pretrained")
    architectures = [str(name) for name in description.get("architectures") or ["unknown architecture"]]
    endings, wanted = _WRONG_ARCHITECTURES.get(role, ((), ""))
    if any(name.endswith(endings) for name in architectures):
        raise ModelError(f"{key} {model}: {', '.join(architectures)}; expected {wanted}")
    if role is Role.REWARD and (outputs := _num_outputs(description)) != 1:
        raise ModelError(
            f"{key} {model}: a classifier with {outputs} outputs; a reward model has exactly one: train it with num_labels=1"
        )
    positions = _positions(description)
    if isinstance(positions, int) and positions <= max_response_tokens:
        raise ModelError(
            f"{key} {model}: supports {positions} positions, and rollout.max_response_tokens {max_response_tokens} leaves none "
            "for a prompt; lower rollout.max_response_tokens"
        )
    check_tokenizer(key, directory)
    return f"{key} {model}: {', '.join(architectures)}"


def check_same_tokenizer(key: str, model: str, actor_model: str) -> None:
    """Check that a model has the actor's tokenizer, if both have a tokenizer.json. Raises ModelError."""
    directories = [Path(name) if looks_local(name) else _hub_directory(key, name) for name in (actor_model, model)]
    if difference := first_difference(directories[0], directories[1]):
        raise ModelError(
            f"{key} {model}: its tokenizer is not that of actor.model {actor_model}: {difference}; "
            "give a model that was trained with the actor's tokenizer"
        )


def _hub_directory(key: str, model: str) -> Path:
    """Return the directory of a hub model's config and tokenizer files in the local cache."""
    try:
        return hub_directory(model, weights=False)
    except ModelError as error:
        raise ModelError(f"{key} {error}") from None


def _unsupported_reason(role: Role, description: dict[str, Any], engine: str) -> str | None:
    """Return why a service of this role cannot use a model with this config.json and what to do, or None."""
    reason = unreadable_reason(description)
    if reason is None and role in (Role.ACTOR, Role.REFERENCE):
        reason = not_causal_reason(description)
    if reason is None and role is Role.ACTOR and engine == "torch":
        reason = uncacheable_reason(description)
    return reason


def _positions(description: dict[str, Any]) -> Any:
    """Return the number of positions in config.json, or None. Older model types call it n_positions."""
    text = description.get("text_config")
    for part in (description, text if isinstance(text, dict) else {}):
        for name in ("max_position_embeddings", "n_positions"):
            if name in part:
                return part[name]
    return None


def _num_outputs(description: dict[str, Any]) -> int:
    """Return the number of outputs of a classifier from its config.json, by the rule of transformers."""
    labels = description.get("id2label")
    return len(labels) if isinstance(labels, dict) else int(description.get("num_labels") or 2)


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
