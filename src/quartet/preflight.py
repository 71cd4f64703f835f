"""What can be found wrong with a config and its files before anything is started. No torch here."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from quartet.config import Config, Section, ServiceConfig
from quartet.config.estimators import BUILT_IN_POLICY_LOSSES
from quartet.data import iterate_prompt_lines
from quartet.errors import ConfigError, DataError, ModelError
from quartet.run_directory.identity import Identity
from quartet.run_directory.run_files import RunFiles
from quartet.tokenizer_files import check_tokenizer
from quartet.topology import listen_address, roles_of
from quartet.types import Role


def check_inputs(config: Config) -> list[str]:
    """Reads the prompts, looks at every local checkpoint and for the modules of functions; says what it found, one line each.

    The last lines are those of ``unused``. Raises ConfigError.
    """
    prompts, note = _check_prompts("data.prompts", config.data.prompts, config.actor.model)
    if prompts < config.rollout.prompts_per_step:
        raise ConfigError(
            f"rollout.prompts_per_step {config.rollout.prompts_per_step}: data.prompts {config.data.prompts} has only "
            f"{prompts} prompts; lower it or give more prompts"
        )
    if config.services.orchestrator.address is not None:
        check_apart(config)
    notes = [note]
    if config.data.validation is not None:
        notes.append(_check_prompts("data.validation", config.data.validation, config.actor.model)[1])
    for key, model in config.models.items():
        role = Role(key.partition(".")[0])
        if getattr(config.services, role).address is None:
            notes.append(_check_model(key, role, model, config.rollout.max_response_tokens))
    if config.services.actor.address is None:
        _check_engine(config)
    for key, function in _functions(config).items():
        notes.append(_check_function(key, function))
    for role in roles_of(config):
        service: ServiceConfig = getattr(config.services, role)
        if service.address is None:
            places = {
                "listen": listen_address(service),
                "metrics_listen": service.metrics_listen,
                "health_listen": service.health_listen,
            }
            for name, place in places.items():
                if place is not None:
                    _check_port(f"services.{role}.{name}", place)
    return notes + unused(config)


def check_apart(config: Config) -> None:
    """Raises ConfigError unless an orchestrator that is started by itself can find the others and the buffer."""
    for role in roles_of(config):
        if getattr(config.services, role).address is None:
            raise ConfigError(
                f"services.{role}.address: null; the orchestrator needs to know where the {role} is: "
                "give it (in docker compose, by QUARTET_ROLES in .env)"
            )


def check_gateway(config: Config) -> None:
    """Raises ConfigError unless the gateway that goes with a run can listen where it is to."""
    if config.gateway.enabled and config.gateway.listen is not None:
        _check_port("gateway.listen", config.gateway.listen)


def _check_engine(config: Config) -> None:
    """Raises ConfigError where the engine's package is missing, or has no GPU."""
    engine = config.rollout.engine
    if engine == "triton" and importlib.util.find_spec("tritonclient") is None:
        raise ConfigError(
            "rollout.engine triton: the package tritonclient is not installed; pip install 'quartet-rlhf[triton]', or set "
            "rollout.engine torch"
        )
    if engine == "tensorrt-llm" and importlib.util.find_spec("tensorrt_llm") is None:
        raise ConfigError(
            "rollout.engine tensorrt-llm: the package tensorrt_llm is not installed; run the actor from the image of "
            "docker/Dockerfile.tensorrt-llm, which has it, or set rollout.engine torch"
        )
    if engine == "tensorrt-llm" and not config.services.actor.devices:
        raise ConfigError("rollout.engine tensorrt-llm: needs a GPU; name it in services.actor.devices, such as [0]")


def check_resumable(config: Config, files: RunFiles) -> None:
    """Raises ConfigError unless there is a run to go on with, and the config is the one that it had."""
    if not files.is_a_run():
        raise ConfigError(f"--resume: {files.root} holds no run; leave --resume out to start one")
    identity = Identity.read(files.identity)
    if identity is not None:
        identity.check(config, files.root)


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
    path = Path(model)
    # runs/mistyped is a path, too, where there is a folder runs.
    inside = len(path.parts) > 1 and Path(path.parts[0]).is_dir()
    return path.exists() or inside or model.startswith((".", "/", "~")) or model.count("/") > 1


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
        if role is Role.REWARD:
            raise ModelError(
                f"{key} {model}: a LoRA adapter on {base}; expected {_WRONG_KIND[role][1]}: "
                "merge the adapter into its base and save that with save_pretrained"
            )
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
    check_tokenizer(key, directory)
    return f"{key} {model}: {', '.join(architectures)}"


def _functions(config: Config) -> dict[str, str]:
    """The functions that processes of this machine call, by their keys."""
    found = {"evaluation.judge": config.evaluation.judge}
    if config.algorithm.custom_estimator is not None:
        found["algorithm.estimator"] = config.algorithm.estimator
    if config.services.actor.address is None and config.algorithm.policy_loss not in BUILT_IN_POLICY_LOSSES:
        found["algorithm.policy_loss"] = config.algorithm.policy_loss
    if config.services.reward.address is None:
        found["reward.function"] = config.reward.function
        found |= {f"reward.parts.{part.name}.function": part.function for part in config.reward.parts}
    return {key: function for key, function in found.items() if function is not None}


def _check_function(key: str, function: str) -> str:
    """Where the module of a function lies. Nothing of the user's is imported here. Raises ConfigError."""
    module = function.partition(":")[0]
    if not _may_be_importable(module):
        raise ConfigError(
            f"{key} {function}: there is no module {module} in {Path.cwd()} or among the installed ones; "
            "correct the name, start the command in the directory where it lies, or add that to PYTHONPATH"
            f"{_elsewhere(module)}"
        )
    return f"{key} {function}: its module is there; it is imported when its process starts"


def _elsewhere(module: str) -> str:
    """Which module is taken in the place of one of the working directory that is called alike."""
    top = module.partition(".")[0]
    here, taken = PathFinder.find_spec(top, [str(Path.cwd())]), PathFinder.find_spec(top, sys.path)
    if here is None or taken is None or here.origin == taken.origin:
        return ""
    return f"; {taken.origin or top} comes before the {top} that lies here: call that otherwise"


def _may_be_importable(module: str) -> bool:
    """Whether Python would find a module, as far as files say: a package may make up modules while it is imported."""
    top, *inner = module.split(".")
    # The function's process looks in the working directory last.
    spec = PathFinder.find_spec(top, [*sys.path, str(Path.cwd())]) or _installed(top)
    if spec is None:
        return False
    for name in inner:
        if spec.submodule_search_locations is None:
            return True
        # By the last part of its name: with the whole name, Python would ask its parent, which is not imported.
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
        if spec is None:
            return False
    return True


def _installed(top: str) -> ModuleSpec | None:
    """What is built into Python, or found by whatever else it was told to find modules with."""
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # of a module such as __main__, which came from nowhere
        return None


def unused(config: Config) -> list[str]:
    """One line for each group of settings that were given and do nothing in this config, and why.

    In a section of which every key was given, as in the config that a run writes, those count that are not the default.
    """
    return [
        f"not used: {', '.join(keys)}: {reason}"
        for section, names, reason in _idle(config)
        if (keys := _given(config, section, names))
    ]


def _idle(config: Config) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """A section, its keys that do nothing (none: all of them do nothing), and why."""
    algorithm = config.algorithm
    if not config.has_critic:
        reason = f"algorithm.estimator {algorithm.estimator} has no critic"
        yield "critic", (), reason
        yield "algorithm", ("gae_lambda", "value_clip", "critic_warmup_steps"), reason
        yield "services.critic", (), reason
        yield "guards.critic_lost", (), reason
    if algorithm.estimator != "grpo" and algorithm.custom_estimator is None:
        yield "algorithm", ("grpo_normalize_std",), f"algorithm.estimator is {algorithm.estimator}"
    if not config.has_reference:
        reason = "the actor answers as reference with its adapter off"
        yield "reference", (), reason
        yield "services.reference", (), reason
    if algorithm.kl_controller.kind == "fixed":
        yield "algorithm.kl_controller", ("target", "horizon"), "algorithm.kl_controller.kind is fixed"
    treatment = algorithm.truncation.treatment
    for name in ("penalty", "scale"):
        if treatment != name:
            yield "algorithm.truncation", (name,), f"algorithm.truncation.treatment is {treatment}"
    for name, trained in (("actor", config.actor), ("critic", config.critic)):
        if trained.schedule == "constant" and (name == "actor" or config.has_critic):
            yield name, ("final_learning_rate",), f"{name}.schedule is constant"


def _given(config: Config, path: str, names: tuple[str, ...]) -> list[str]:
    """Those keys of the section at ``path`` that were given, of ``names`` or of all."""
    section: Any = config
    for name in path.split("."):
        section = getattr(section, name)
    return [key for key in _given_keys(section, path) if not names or key.removeprefix(f"{path}.") in names]


def _given_keys(section: Section, path: str) -> Iterator[str]:
    fields = type(section).model_fields
    written = section.model_fields_set == fields.keys()
    for name, field in fields.items():
        value, default = getattr(section, name), field.get_default(call_default_factory=True)
        if name not in section.model_fields_set or (written and value == default):
            continue
        if isinstance(value, Section) and isinstance(default, Section):
            yield from _given_keys(value, f"{path}.{name}")
        else:
            yield f"{path}.{name}"


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


def _check_port(key: str, listen: str) -> None:
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
                f"{key} {listen}: cannot listen there ({error.strerror}); "
                "stop what does, choose another port, or leave it null for a free one"
            ) from None
