"""Checks of the directories of models: config.json, weight files and tokenizer files. Loads no weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quartet.contract.status import Role
from quartet.errors import ConfigError, ModelError
from quartet.model_files.adapter_files import adapter_chain, is_adapter
from quartet.model_files.hub_models import cached_snapshot, hub_directory, looks_local
from quartet.model_files.model_support import (
    causal_names,
    classifier_names,
    encoder_reason,
    not_causal_reason,
    positions_in,
    unreadable_reason,
)
from quartet.model_files.sharded_files import is_sharded
from quartet.model_files.stop_tokens import NO_STOP_TOKEN, read_stop_ids
from quartet.model_files.tokenizer_check import check_tokenizer, first_difference, has_tokenizer, tokenizer_location
from quartet.model_files.weight_files import VALUE_HEAD_FILE, read_header, read_headers, weight_files
from quartet.preflight.findings import Finding

_WANTED = {
    Role.ACTOR: "a causal language model",
    Role.REFERENCE: "a causal language model",
    Role.REWARD: "a sequence classifier with one output",
    Role.CRITIC: "a causal language model, or a sequence classifier with one output",
}
"""The expected kind of model, by role."""


def check_model(key: str, role: Role, model: str, max_response_tokens: int, tensor: int = 1) -> Iterator[Finding]:
    """Check the model of a role, and yield what it is. Raises ModelError.

    ``tensor``: number of ranks that compute each layer together.
    """
    directory = _directory(key, model)
    if not is_adapter(directory):
        names = _check_checkpoint(f"{key} {model}", role, directory, looks_local(model), max_response_tokens)
        _check_slices(f"{key} {model}", role, directory, tensor)
        check_tokenizer(key, directory)
        yield Finding("ok", f"{key} {model}", names)
        return
    try:
        base, adapters = adapter_chain(directory)
    except ModelError as error:
        raise ModelError(f"{key} {model}: {error}") from None
    if role is Role.REWARD:
        raise ModelError(
            f"{key} {model}: a LoRA adapter on {base}; expected {_WANTED[role]}: "
            "merge the adapter into its base model, and save that with save_pretrained"
        )
    what = f"{key} {model}: its base model"
    base_directory = _directory(what, str(base))
    names = _check_checkpoint(f"{what} {base}", role, base_directory, looks_local(base), max_response_tokens)
    _check_slices(f"{what} {base}", role, base_directory, tensor)
    if not any(has_tokenizer(adapter) for adapter in adapters):
        check_tokenizer(what, base_directory)
    yield Finding("ok", f"{key} {model}", f"LoRA adapter on {base}, {names}")


def check_stop_tokens(key: str, model: str, stop_strings: Sequence[str]) -> Iterator[Finding]:
    """Yield warnings about the stop tokens of the policy, if its files are on this machine.

    Raises ModelError for values that are no token ids.
    """
    try:
        base, location = (Path(place) for place in (adapter_chain(model)[0], tokenizer_location(model)))
        directories = [place if place.is_dir() else cached_snapshot(str(place)) for place in (base, location)]
        if directories[0] is None or directories[1] is None:
            return
        stops, ignored = read_stop_ids(directories[0], directories[1])
    except ModelError as error:
        raise ModelError(f"{key} {model}: {error}") from None
    if not stops and not stop_strings:
        ignored.append(NO_STOP_TOKEN)
    for line in ignored:
        yield Finding("warning", f"{key} {model}", line)


def check_experts(key: str, model: str) -> None:
    """Raise ConfigError if the policy is a dense model, which has no routers to replay, and its files are on this machine."""
    base = Path(str(adapter_chain(model)[0]))
    directory = base if base.is_dir() else cached_snapshot(str(base))
    if directory is None:
        return
    description = _read_json(f"{key} {model}", directory / "config.json")
    sections = [description, *(value for value in description.values() if isinstance(value, dict))]
    if not any(value for section in sections for name, value in section.items() if "expert" in name):
        raise ConfigError(
            f"rollout.router_replay: {key} {model} has no experts, so it has no routers to replay; set router_replay false, or "
            "give a mixture of experts"
        )


def _check_slices(what: str, role: Role, directory: Path, tensor: int) -> None:
    description = _read_json(what, directory / "config.json")
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = description.get(name)
        if isinstance(heads, int) and heads % tensor:
            raise ModelError(
                f"services.{role}.parallel.tensor {tensor}: does not divide {name} {heads} of {what}; set a divisor of {heads}"
            )


def _check_checkpoint(what: str, role: Role, directory: Path, is_local: bool, max_response_tokens: int) -> str:
    """Check config.json and the weight files, and return the architectures. Messages start with ``what``."""
    description = _read_json(what, directory / "config.json")
    reason = _unsupported_reason(role, description)
    if reason is not None:
        raise ModelError(f"{what}: {reason}")
    if is_local:
        try:
            if is_sharded(directory):
                for file in weight_files(directory):
                    read_header(file)
            else:
                read_headers(directory)
        except ModelError as error:
            raise ModelError(f"{what}: {error}") from None
    names = description.get("architectures") or []
    if not isinstance(names, list):
        raise ModelError(f"{what}: config.json has architectures {names!r}; expected a list of names")
    is_saved_critic = role is Role.CRITIC and (directory / VALUE_HEAD_FILE).is_file()
    if not is_saved_critic and not _fits(role, names):
        raise ModelError(
            f"{what}: {', '.join(map(str, names)) or 'no architectures in config.json'}; expected {_WANTED[role]}"
        )
    if role is Role.REWARD and (outputs := _num_outputs(what, description)) != 1:
        hint = "train it with num_labels=1"
        if not isinstance(description.get("id2label"), dict):
            # OpenRLHF among others saves models with one output so. transformers then takes two.
            hint = (
                'if it was trained with one, config.json does not say so: add "id2label": {"0": "LABEL_0"} to it; else '
                + hint
            )
        raise ModelError(f"{what}: a classifier with {outputs} outputs; a reward model has exactly one: {hint}")
    positions = positions_in(description)
    if positions is not None and positions <= max_response_tokens:
        raise ModelError(
            f"{what}: supports {positions} positions, and rollout.max_response_tokens {max_response_tokens} leaves none "
            "for a prompt; lower rollout.max_response_tokens"
        )
    return ", ".join(map(str, names))


def _fits(role: Role, names: list[Any]) -> bool:
    """Return whether a model of these architectures can have the role, by the tables of transformers."""
    known = causal_names() if role is not Role.REWARD else frozenset()
    known |= classifier_names() if role in (Role.REWARD, Role.CRITIC) else frozenset()
    return not known or any(name in known for name in names)


def check_same_tokenizer(key: str, model: str, actor_model: str) -> None:
    """Check that a model has the actor's tokenizer, if both have a tokenizer.json. Raises ModelError."""
    directories = [Path(tokenizer_location(_directory(key, name))) for name in (actor_model, model)]
    if difference := first_difference(directories[0], directories[1]):
        raise ModelError(
            f"{key} {model}: its tokenizer is not that of actor.model {actor_model}: {difference}; "
            "give a model that was trained with the actor's tokenizer. If a token such as [PAD] was added to one of them, save "
            "that tokenizer with both models"
        )


def _directory(what: str, model: str) -> Path:
    """Return the directory of a model, or that of a hub model's config and tokenizer files in the local cache."""
    if not looks_local(model):
        try:
            return hub_directory(model, weights=False)
        except ModelError as error:
            raise ModelError(f"{what} {error}") from None
    if not Path(model).is_dir():
        problem = "a file" if Path(model).is_file() else "no such directory"
        raise ModelError(
            f"{what} {model}: {problem}; expected the directory of a Hugging Face model, or a hub id (NAME or OWNER/NAME)"
        )
    return Path(model)


def _unsupported_reason(role: Role, description: dict[str, Any]) -> str | None:
    """Return why a service of this role cannot use a model with this config.json and what to do, or None."""
    reason = unreadable_reason(description)
    if reason is None and role in (Role.ACTOR, Role.REFERENCE):
        reason = not_causal_reason(description)
    if reason is None and role is Role.CRITIC and (reason := encoder_reason(description)) is not None:
        reason += "; without critic.model the critic starts from the reward model: set critic.model to a causal one"
    return reason


def _num_outputs(what: str, description: dict[str, Any]) -> int:
    """Return the number of outputs of a classifier from its config.json, by the rule of transformers."""
    labels, count = description.get("id2label"), description.get("num_labels") or 2
    if isinstance(labels, dict):
        return len(labels)
    if not isinstance(count, int):
        raise ModelError(f"{what}: config.json has num_labels {count!r}; expected a whole number")
    return count


def _read_json(key: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"{key}: {path.name} cannot be read ({error.strerror}); expected the directory of a Hugging Face model"
        ) from None
    except ValueError as error:
        raise ModelError(f"{key}: {path.name} is not JSON ({error}); save the model again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{key}: {path.name} is not a JSON object; save the model again")
    return value
