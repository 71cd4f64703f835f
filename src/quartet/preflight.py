"""Checks of a config and the files that it names, before any process is started. Does not import torch."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from quartet.child_processes import module_command, tied_to_parent
from quartet.config import Config, Section, ServiceConfig
from quartet.config.estimators import BUILT_IN_POLICY_LOSSES
from quartet.data import iterate_prompt_lines
from quartet.errors import ConfigError, DataError, ModelError
from quartet.run_directory.identity import Identity
from quartet.run_directory.run_files import RunFiles
from quartet.secret_files import SECRET_VARIABLES
from quartet.telemetry.sinks.configured import check_sinks
from quartet.tokenizer_check import check_tokenizer
from quartet.topology import check_devices, listen_address, model_roles
from quartet.types import Role
from quartet.user_code import CHECKED

REWARD_ARGUMENTS = 3
"""Arguments of a reward function: prompt, response and the fields of the prompt's line, or lists of them."""
IMPORT_SECONDS = 60.0
"""Maximum seconds to import the module of a function."""
JUDGE_ARGUMENTS = 4
"""Arguments of a judge: prompt, response, the initial policy's response, and the fields of the prompt's line."""


def check_inputs(config: Config) -> list[str]:
    """Check prompts, local models, modules of functions, and ports. Return one line per check, and those of ``unused_settings``.

    Raises ConfigError for the first problem.
    """
    prompts, note = _check_prompts("data.prompts", config.data.prompts, config.actor.model)
    if prompts < config.rollout.prompts_per_step:
        raise ConfigError(
            f"rollout.prompts_per_step {config.rollout.prompts_per_step}: data.prompts {config.data.prompts} has only "
            f"{prompts} prompts; lower it, or give more prompts"
        )
    if config.services.orchestrator.address is not None:
        check_separate_orchestrator(config)
    notes = [note]
    if config.data.validation is not None:
        notes.append(_check_prompts("data.validation", config.data.validation, config.actor.model)[1])
    for key, model in config.models.items():
        role = Role(key.partition(".")[0])
        if getattr(config.services, role).address is None:
            notes.append(_check_model(key, role, model, config.rollout.max_response_tokens))
    if config.services.actor.address is None:
        _check_engine(config)
    if config.services.orchestrator.address is None:
        check_sinks(config)
    for key, function in _functions(config).items():
        notes.append(_check_function(key, function))
    for role in model_roles(config):
        service: ServiceConfig = getattr(config.services, role)
        if service.address is None:
            two = role is Role.ACTOR and config.rollout.max_off_policy_steps > 0
            check_devices(service, 2 if two else 1, f"services.{role}.devices")
            addresses = {
                "listen": listen_address(service),
                "metrics_listen": service.metrics_listen,
                "health_listen": service.health_listen,
            }
            for name, address in addresses.items():
                if address is not None:
                    _check_port(f"services.{role}.{name}", address)
    return notes + unused_settings(config)


def check_separate_orchestrator(config: Config) -> None:
    """Check that an orchestrator that is started separately knows the addresses of all services. Raises ConfigError."""
    for role in model_roles(config):
        if getattr(config.services, role).address is None:
            raise ConfigError(
                f"services.{role}.address: null, but a separately started orchestrator needs it; set it "
                "(in Docker Compose: QUARTET_ROLES in .env)"
            )


def check_gateway(config: Config) -> None:
    """Check that the gateway of a run can listen at its address. Raises ConfigError."""
    if config.gateway.enabled and config.gateway.listen is not None:
        _check_port("gateway.listen", config.gateway.listen)


def _check_engine(config: Config) -> None:
    """Check that the package of the engine is installed, and that it has a GPU. Raises ConfigError."""
    engine = config.rollout.engine
    if engine == "triton" and importlib.util.find_spec("tritonclient") is None:
        raise ConfigError(
            "rollout.engine triton: the package tritonclient is not installed; run pip install 'quartet-rlhf[triton]', or "
            "set rollout.engine torch"
        )
    if engine == "tensorrt-llm" and importlib.util.find_spec("tensorrt_llm") is None:
        raise ConfigError(
            "rollout.engine tensorrt-llm: the package tensorrt_llm is not installed; run the actor in an image built from "
            "docker/Dockerfile.tensorrt-llm, or set rollout.engine torch"
        )
    if engine == "tensorrt-llm" and not config.services.actor.devices:
        raise ConfigError("rollout.engine tensorrt-llm: needs a GPU; set services.actor.devices, such as [0]")


def check_resumable(config: Config, files: RunFiles) -> None:
    """Check that there is a run to resume, and that the config fits it. Raises ConfigError."""
    if not files.is_run():
        raise ConfigError(f"--resume: {files.root} does not contain a run; remove --resume to start a new one")
    identity = Identity.read(files.identity)
    if identity is not None:
        identity.check(config, files.root)


def _check_prompts(key: str, path: Path, model: str) -> tuple[int, str]:
    """Return the number of prompts in a file, and a line that reports it. Raises DataError."""
    prompts = chats = 0
    for line in iterate_prompt_lines(path):
        prompts += 1
        if line.messages is None:
            continue
        chats += 1
        if chats == 1 and not _may_have_chat_template(model):
            raise DataError(
                f"prompts {path}:{line.line}: messages, but the tokenizer of actor.model {model} has no chat template; "
                "give prompts as text, or add a chat template to the tokenizer (chat_template.jinja)"
            )
    of_chats = f", {chats} of them messages" if chats else ""
    return prompts, f"{key} {path}: {prompts} prompts{of_chats}"


def _may_have_chat_template(model: str) -> bool:
    """Return whether the files of a tokenizer contain a chat template. True for hub ids, which are only checked on loading."""
    description = Path(model) / "tokenizer_config.json"
    if not description.is_file() or list(Path(model).glob("*chat_template*")):
        return True
    return "chat_template" in _read_json("actor.model", description)


def looks_local(model: str) -> bool:
    """Return whether a model name is a path rather than a hub id (NAME or OWNER/NAME)."""
    path = Path(model)
    # A mistyped path such as runs/nmae counts as a path if the folder runs exists.
    in_existing_folder = len(path.parts) > 1 and Path(path.parts[0]).is_dir()
    return path.exists() or in_existing_folder or model.startswith((".", "/", "~")) or model.count("/") > 1


_GENERATOR_ENDINGS = ("ForCausalLM", "LMHeadModel")
_CLASSIFIER_ENDINGS = ("ForSequenceClassification",)
_WRONG_ARCHITECTURES = {
    Role.ACTOR: (_CLASSIFIER_ENDINGS, "a causal language model"),
    Role.REFERENCE: (_CLASSIFIER_ENDINGS, "a causal language model"),
    Role.REWARD: (_GENERATOR_ENDINGS, "a sequence classifier with one output"),
}
"""Name endings of unsuitable architectures and the expected kind of model, by role. A critic may start from either kind."""


def _check_model(key: str, role: Role, model: str, max_response_tokens: int) -> str:
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


def _functions(config: Config) -> dict[str, str]:
    """Return the functions that processes on this machine call, by config key."""
    functions = {"evaluation.judge": config.evaluation.judge}
    if config.algorithm.custom_estimator is not None:
        functions["algorithm.estimator"] = config.algorithm.estimator
    if config.services.actor.address is None and config.algorithm.policy_loss not in BUILT_IN_POLICY_LOSSES:
        functions["algorithm.policy_loss"] = config.algorithm.policy_loss
    if config.services.reward.address is None:
        functions["reward.function"] = config.reward.function
        functions |= {f"reward.parts.{part.name}.function": part.function for part in config.reward.parts}
    return {key: function for key, function in functions.items() if function is not None}


def _check_function(key: str, function: str) -> str:
    """Check that a function exists and accepts its arguments. Raises ConfigError."""
    module = function.partition(":")[0]
    if not _may_be_importable(module):
        raise ConfigError(
            f"{key} {function}: no module {module} in {Path.cwd()} or among the installed packages; "
            "correct the name, run the command in the directory of the module, or add that directory to PYTHONPATH"
            f"{_shadowing(module)}"
        )
    count = JUDGE_ARGUMENTS if key == "evaluation.judge" else REWARD_ARGUMENTS
    if key.startswith("algorithm."):
        # It needs torch, whose import takes seconds.
        return f"{key} {function}: module exists, and is imported when its process starts"
    if problem := _import_problem(function, count):
        raise ConfigError(f"{key} {function}: {problem}")
    return f"{key} {function}: can be imported and accepts {count} arguments"


def _import_problem(function: str, count: int) -> str:
    """Return why a function cannot be called with ``count`` arguments, or "" if it can.

    Imports it in a separate process, because an import may print, hang or end its process.
    """
    environment = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as pipe:
        process = subprocess.Popen(
            tied_to_parent(module_command("quartet.user_code", function, str(count), str(writer))),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(writer,),
            start_new_session=True,
        )
        os.close(writer)
        try:
            answered = bool(wait([reader], IMPORT_SECONDS))
            result = pipe.read1().decode() if answered else ""
        finally:
            # The module may have started threads or processes that still run.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not answered:
        return f"its module is not imported after {IMPORT_SECONDS:g} s"
    return result.removeprefix(CHECKED) if result.startswith(CHECKED) else "its import ends the process"


def _shadowing(module: str) -> str:
    """Return a note if another module hides the one of the same name in the working directory."""
    top = module.partition(".")[0]
    local, imported = PathFinder.find_spec(top, [str(Path.cwd())]), PathFinder.find_spec(top, sys.path)
    if local is None or imported is None or local.origin == imported.origin:
        return ""
    return f"; {imported.origin or top} hides the module {top} in this directory: rename that module"


def _may_be_importable(module: str) -> bool:
    """Return whether Python would find a module, by its files. A package may still create modules while it is imported."""
    top, *inner = module.split(".")
    # The process of the function searches the working directory last.
    spec = PathFinder.find_spec(top, [*sys.path, str(Path.cwd())]) or _installed(top)
    if spec is None:
        return False
    for name in inner:
        if spec.submodule_search_locations is None:
            return True
        # Only the last part of the name: for the full name Python would need the parent, which is not imported.
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
        if spec is None:
            return False
    return True


def _installed(top: str) -> ModuleSpec | None:
    """Return the spec of a module that is built into Python or found by a custom finder."""
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # A module without a spec, such as __main__.
        return None


def unused_settings(config: Config) -> list[str]:
    """Return one line for each group of given settings that have no effect in this config, with the reason.

    In a section where all keys are given, as in the config that a run writes, only values other than the default count.
    """
    return [
        f"not used: {', '.join(keys)}: {reason}"
        for section, names, reason in _ineffective(config)
        if (keys := _given(config, section, names))
    ]


def _ineffective(config: Config) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield a section, its keys without effect (empty: all keys), and the reason."""
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
        reason = "the actor serves the reference, with its adapter disabled"
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
    """Return the given keys of the section at ``path``, limited to ``names`` unless that is empty."""
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
            f"{key} {path.parent}: {path.name} cannot be read ({error.strerror}); expected the directory of a Hugging Face model"
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
        # As the server does, so that a port with lingering connections counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            raise ConfigError(
                f"{key} {listen}: cannot listen there ({error.strerror}); "
                "stop the process that uses the port, choose another port, or null for a free one"
            ) from None
