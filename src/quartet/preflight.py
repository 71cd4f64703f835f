"""What can be found wrong with a config's files before anything is started. No torch here."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from quartet.config import Config, ServiceConfig
from quartet.data import iterate_prompt_lines
from quartet.errors import ConfigError, DataError, ModelError
from quartet.topology import listen_address, roles_of
from quartet.types import Role


def check_inputs(config: Config) -> list[str]:
    """Reads the prompts and looks at every local checkpoint; says what it found, one line each. Raises ConfigError."""
    prompts, note = _check_prompts("data.prompts", config.data.prompts, config.actor.model)
    if prompts < config.rollout.prompts_per_step:
        raise ConfigError(
            f"rollout.prompts_per_step {config.rollout.prompts_per_step}: data.prompts {config.data.prompts} has only "
            f"{prompts} prompts; lower it or give more prompts"
        )
    notes = [note]
    if config.data.validation is not None:
        notes.append(_check_prompts("data.validation", config.data.validation, config.actor.model)[1])
    for key, model in config.models.items():
        role = Role(key.partition(".")[0])
        if getattr(config.services, role).address is None:
            notes.append(_check_model(key, role, model, config.rollout.max_response_tokens))
    for role in roles_of(config):
        service: ServiceConfig = getattr(config.services, role)
        if service.address is None:
            _check_port(role, listen_address(service))
    return notes


def _check_prompts(key: str, path: Path, model: str) -> tuple[int, str]:
    """How many prompts a file holds, and a line that says so. Raises DataError."""
    prompts = chats = 0
    for line in iterate_prompt_lines(path):
        prompts += 1
        if line.messages is None:
            continue
        chats += 1
        if chats == 1 and not _may_have_chat_template(model):
            raise DataError(
                f"prompts {path}:{line.line}: messages, but the tokenizer of actor.model {model} has no chat template; "
                "give prompts as text, or save the checkpoint with a tokenizer that has one (chat_template.jinja)"
            )
    of_chats = f", {chats} of them messages" if chats else ""
    return prompts, f"{key} {path}: {prompts} prompts{of_chats}"


def _may_have_chat_template(model: str) -> bool:
    """Whether a tokenizer has one, as far as its files say; a hub id's is seen when the tokenizer is loaded."""
    description = Path(model) / "tokenizer_config.json"
    if not description.is_file() or list(Path(model).glob("*chat_template*")):
        return True
    return "chat_template" in _read_json("actor.model", description)


def looks_local(model: str) -> bool:
    """Whether a model name is a path rather than a hub id such as NAME or OWNER/NAME."""
    return Path(model).exists() or model.startswith((".", "/", "~")) or model.count("/") > 1


_GENERATES = ("ForCausalLM", "LMHeadModel")
_CLASSIFIES = ("ForSequenceClassification",)
_WRONG_KIND = {
    Role.ACTOR: (_CLASSIFIES, "a causal language model"),
    Role.REFERENCE: (_CLASSIFIES, "a causal language model"),
    Role.REWARD: (_GENERATES, "a sequence classifier with one output"),
}
"""How the architectures of the wrong kind of checkpoint end, and what is expected. A critic may start from either."""


def _check_model(key: str, role: Role, model: str, max_response_tokens: int) -> str:
    if not looks_local(model):
        return f"{key} {model}: a hub id; it is looked up when the {role} starts"
    directory = Path(model)
    if not directory.is_dir():
        raise ModelError(
            f"{key} {model}: no such directory; expected a Hugging Face checkpoint, or a hub id (NAME or OWNER/NAME)"
        )
    if (directory / "adapter_config.json").is_file():
        base = _read_json(key, directory / "adapter_config.json").get("base_model_name_or_path")
        return f"{key} {model}: a LoRA adapter on {base}; it is read when the {role} starts"
    description = _read_json(key, directory / "config.json")
    if not list(directory.glob("*.safetensors")):
        raise ModelError(f"{key} {model}: no safetensors weights in it; save the model with save_pretrained")
    architectures = [str(name) for name in description.get("architectures") or ["unknown architecture"]]
    endings, wanted = _WRONG_KIND.get(role, ((), ""))
    if any(name.endswith(endings) for name in architectures):
        raise ModelError(f"{key} {model}: {', '.join(architectures)}; expected {wanted}")
    positions = description.get("max_position_embeddings")
    if isinstance(positions, int) and positions <= max_response_tokens:
        raise ModelError(
            f"{key} {model}: has {positions} positions, rollout.max_response_tokens {max_response_tokens} leaves none "
            "for a prompt; lower it"
        )
    return f"{key} {model}: {', '.join(architectures)}"


def _read_json(key: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"{key} {path.parent}: {path.name} cannot be read ({error.strerror}); expected a Hugging Face checkpoint"
        ) from None
    except ValueError as error:
        raise ModelError(f"{key} {path}: not JSON ({error}); save the model again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{key} {path}: expected a JSON object; save the model again")
    return value


def _check_port(role: Role, listen: str) -> None:
    host, _, port = listen.rpartition(":")
    if port == "0":
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the server will: a port whose last connections still linger is not taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            raise ConfigError(
                f"services.{role}.listen {listen}: cannot listen there ({error.strerror}); "
                "stop what does, choose another port, or leave it null for a free one"
            ) from None
