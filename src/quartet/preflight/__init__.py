"""Checks of a config and the files that it names, before any process is started. Does not import torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from shlex import quote

from quartet.config.deployment import EnvironmentServiceConfig, ServiceConfig
from quartet.config.layout import listen_address, service_roles
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.data.prompt_contents import set_contents
from quartet.errors import ConfigError
from quartet.preflight.addresses import check_gateway, check_port
from quartet.preflight.best_metric import check_best_metric
from quartet.preflight.contents import check_contents
from quartet.preflight.functions import check_function, named_functions, prompt_columns
from quartet.preflight.generators import check_generators
from quartet.preflight.ineffective_settings import setting_notes
from quartet.preflight.models import check_model, check_same_tokenizer, check_stop_tokens
from quartet.preflight.prompts import check_prompts, count_prompts
from quartet.run_directory.identity import Identity
from quartet.run_directory.model_digests import local_digests
from quartet.run_directory.run_files import RunFiles
from quartet.telemetry.sinks.configured import check_sinks

__all__ = [
    "check_gateway",
    "check_inputs",
    "check_resumable",
    "check_separate_orchestrator",
    "count_prompts",
    "nothing_to_resume",
    "setting_notes",
]


def check_inputs(config: Config, report: Callable[[str], None] = lambda _: None) -> list[str]:
    """Check prompts, local models, modules of functions, and ports. Return one line per check, and those of ``setting_notes``.

    ``report`` gets a line of progress every few seconds while prompts are tokenized. Raises ConfigError for the first problem.
    """
    if config.services.orchestrator.address is not None:
        check_separate_orchestrator(config)
    _check_run_directory(config)
    notes = []
    local: dict[str, tuple[Role, str]] = {}
    compared = {config.actor.model} if config.services.actor.address is None else set(config.models.values())
    for key, model in config.models.items():
        role = Role(key.partition(".")[0])
        if getattr(config.services, role).address is None:
            tensor = getattr(config.services, role).parallel.tensor
            notes.append(
                check_model(key, role, model, config.rollout.max_response_tokens, config.rollout.engine, tensor)
            )
            local[key] = role, model
            if model not in compared:
                compared.add(model)
                check_same_tokenizer(key, model, config.actor.model)
    if config.services.actor.address is None:
        _check_engine(config)
    notes += check_stop_tokens("actor.model", config.actor.model, config.rollout.stop_strings)
    if config.services.reward.address is None:
        _check_reward(config)
    if config.services.orchestrator.address is None:
        check_sinks(config)
    functions = named_functions(config)
    columns = prompt_columns(config) if any(function.takes_columns for function in functions.values()) else None
    for key, function in functions.items():
        notes.append(check_function(key, function, columns))
    for role in service_roles(config):
        service: ServiceConfig | EnvironmentServiceConfig = getattr(config.services, role)
        if service.address is None:
            if isinstance(service, ServiceConfig):
                _check_nodes(role, service)
            addresses = {
                "listen": listen_address(service),
                "metrics_listen": service.metrics_listen,
                "health_listen": service.health_listen,
            }
            for name, address in addresses.items():
                if address is not None:
                    check_port(f"services.{role}.{name}", address)
    notes += check_generators(config)
    check_best_metric(config)
    # Processes that import libraries come last, because they take seconds.
    notes += check_contents(local)
    return check_prompts(config, report) + notes + setting_notes(config)


def _check_run_directory(config: Config) -> None:
    path = str(config.run_directory.absolute())
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"run.directory {path!a}: the path is not valid UTF-8, so models cannot be written there; give another "
            "run.directory, or start in another folder"
        ) from None


def _check_nodes(role: Role, service: ServiceConfig) -> None:
    if service.nodes > 1:
        raise ConfigError(
            f"services.{role}.nodes {service.nodes}: services.{role}.address is null, and this command starts processes "
            "on this machine only; start the ranks with torchrun on every machine, and set "
            f"services.{role}.address to HOST:PORT of rank 0"
        )


def check_separate_orchestrator(config: Config) -> None:
    """Check that an orchestrator that is started separately knows the addresses of all services. Raises ConfigError."""
    for role in service_roles(config):
        if getattr(config.services, role).address is None:
            raise ConfigError(
                f"services.{role}.address: null, but a separately started orchestrator needs it; set it "
                "(in Docker Compose: QUARTET_ROLES in .env)"
            )
    if config.rollout.generators:
        raise ConfigError(
            f"rollout.generators {config.rollout.generators}: a separately started orchestrator starts no generators; set it to "
            "0, and name the generators that you start in services.generators (in Docker Compose: QUARTET_GENERATION in .env)"
        )


def _check_engine(config: Config) -> None:
    """Check that the package of an engine in the actor's process is installed. Raises ConfigError."""
    if config.rollout.engine == "triton" and importlib.util.find_spec("tritonclient") is None:
        raise ConfigError(
            "rollout.engine triton: the package tritonclient is not installed; run pip install 'quartet-rlhf[triton]', or "
            "set rollout.engine torch"
        )


def _check_reward(config: Config) -> None:
    """Check that the package of a scorer is installed. Raises ConfigError."""
    for key, source in config.reward.sources.items():
        if source.triton is not None and importlib.util.find_spec("tritonclient") is None:
            raise ConfigError(
                f"{key}.source triton: the package tritonclient is not installed; run pip install 'quartet-rlhf[triton]'"
            )


def check_resumable(config: Config, files: RunFiles) -> None:
    """Check that there is a run to resume, and that the config fits it. Raises ConfigError."""
    if not files.is_run():
        raise ConfigError(f"--resume: {files.root} does not contain a run; remove --resume to start a new one")
    identity = Identity.read(files.identity)
    if identity is not None:
        identity.check(config, files.root, set_contents(config, identity.revisions))
        if identity.model_files:
            identity.check_models(local_digests(config), files.root)
    steps = files.last_step()
    if steps > config.run.steps:
        raise ConfigError(
            f"run.steps {config.run.steps}: the run in {files.root} has taken {steps} steps; raise run.steps, or remove steps "
            f"with quartet rollback {quote(str(files.root))} STEP"
        )


def nothing_to_resume(config: Config, files: RunFiles) -> bool:
    """Return whether the run has taken all its steps and has saved the policy of the last one.

    Raises ConfigError if it has, but the config does not fit the run.
    """
    if files.last_step() != config.run.steps or files.policy_step() != config.run.steps or files.rolling_back.exists():
        return False
    check_resumable(config, files)
    return True
