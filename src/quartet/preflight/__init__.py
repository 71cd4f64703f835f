"""Checks of a config and the files that it names, before any process is started. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from shlex import quote

from quartet.config.deployment import EnvironmentServiceConfig, ServiceConfig
from quartet.config.layout import listen_address, service_roles
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.data.prompt_cache import set_contents
from quartet.errors import ConfigError
from quartet.preflight.agents import check_agent
from quartet.preflight.best_metric import check_best_metric
from quartet.preflight.contents import check_contents
from quartet.preflight.findings import Finding, collect, has_error
from quartet.preflight.functions import check_function, named_functions, prompt_columns
from quartet.preflight.generators import check_generators
from quartet.preflight.ineffective_settings import check_settings
from quartet.preflight.models import check_experts, check_model, check_same_tokenizer, check_stop_tokens
from quartet.preflight.prompts import check_prompts
from quartet.preflight.security_checks import check_access, check_port
from quartet.run_directory.identity import Identity
from quartet.run_directory.locking_and_removal import check_unused, lock_run_directory
from quartet.run_directory.model_digests import local_digests
from quartet.run_directory.run_files import RunFiles
from quartet.telemetry.sinks.configured import check_sinks


def problems(
    config: Config,
    files: RunFiles | None = None,
    overwrite: bool = False,
    resume: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> list[Finding]:
    """Return the findings of all checks: errors, warnings and, to show what was checked, what is well.

    With ``files`` also those of an earlier run there, which the run is to ``overwrite`` or to ``resume``. ``report`` gets a line
    of progress every few seconds while prompts are tokenized.
    """
    found = collect(check_access, config)
    starts_gateway = config.gateway.enabled and config.services.orchestrator.address is None
    if starts_gateway and config.gateway.listen is not None:
        found += collect(check_port, "gateway.listen", config.gateway.listen)
    if files is not None:
        found += collect(_check_directory, config, files, overwrite, resume)
    return check_inputs(config, report, found)


def check_inputs(
    config: Config, report: Callable[[str], None] = lambda _: None, earlier: Sequence[Finding] = ()
) -> list[Finding]:
    """Return the findings of prompts, local models, functions, ports and settings, after ``earlier`` ones. See ``problems``.

    Prompts are only read, and not tokenized, if there are other errors.
    """
    found = [*earlier, *collect(_check_path, config)]
    found += collect(check_separate_orchestrator, config) if config.services.orchestrator.address is not None else []
    local: dict[str, tuple[Role, str]] = {}
    compared = {config.actor.model} if config.services.actor.address is None else set(config.models.values())
    for key, model in config.models.items():
        role = Role(key.partition(".")[0])
        if getattr(config.services, role).address is not None:
            continue
        tensor = getattr(config.services, role).parallel.tensor
        limit = config.rollout.max_response_tokens
        result = collect(check_model, key, role, model, limit, tensor)
        found += result
        if not has_error(result):
            local[key] = role, model
            if model not in compared and "actor.model" in local:
                compared.add(model)
                found += collect(check_same_tokenizer, key, model, config.actor.model)
    if "actor.model" in local or config.services.actor.address is not None:
        found += collect(check_stop_tokens, "actor.model", config.actor.model, config.rollout.stop_strings)
        if config.rollout.router_replay:
            found += collect(check_experts, "actor.model", config.actor.model)
    found += collect(_check_triton, config)
    found += collect(check_sinks, config) if config.services.orchestrator.address is None else []
    functions = named_functions(config)
    columns = prompt_columns(config) if any(function.takes_columns for function in functions.values()) else None
    for key, function in functions.items():
        found += collect(check_function, key, function, columns)
    for role in service_roles(config):
        service: ServiceConfig | EnvironmentServiceConfig = getattr(config.services, role)
        if service.address is None:
            found += collect(_check_nodes, role, service)
            addresses = {
                "listen": listen_address(service),
                "metrics_listen": service.metrics_listen,
                "health_listen": service.health_listen,
            }
            for name, address in addresses.items():
                if address is not None:
                    found += collect(check_port, f"services.{role}.{name}", address)
    found += collect(check_agent, config)
    found += collect(check_generators, config)
    found += collect(check_best_metric, config)
    # Processes that import libraries come last, because they take seconds, and prompts minutes.
    found += collect(check_contents, local)
    # Roles share models: the same problem is shown for the first of them.
    firsts = {
        (each.where.partition(".model ")[2], each.what): each for each in reversed(found) if ".model " in each.where
    }
    found = [each for each in found if each.level != "error" or ".model " not in each.where or each in firsts.values()]
    return collect(check_prompts, config, report, not has_error(found)) + found + collect(check_settings, config)


def _check_path(config: Config) -> None:
    path = str(config.run_directory.absolute())
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"run.directory {path!a}: the path is not valid UTF-8, so models cannot be written there; give another "
            "run.directory, or start in another folder"
        ) from None


def _check_nodes(role: Role, service: ServiceConfig | EnvironmentServiceConfig) -> None:
    if isinstance(service, ServiceConfig) and service.nodes > 1:
        raise ConfigError(
            f"services.{role}.nodes {service.nodes}: services.{role}.address is null, and this command starts processes "
            "on this machine only; start the ranks with torchrun on every machine, and set "
            f"services.{role}.address to HOST:PORT of rank 0"
        )


def check_separate_orchestrator(config: Config) -> Iterator[Finding]:
    """Check that an orchestrator that is started separately knows the addresses of all services."""
    for role in service_roles(config):
        if getattr(config.services, role).address is None:
            yield Finding(
                "error",
                f"services.{role}.address",
                "null, but a separately started orchestrator needs it; set it (in Docker Compose: QUARTET_ROLES in .env)",
            )
    if config.rollout.generators:
        yield Finding(
            "error",
            f"rollout.generators {config.rollout.generators}",
            "a separately started orchestrator starts no generators; set it to 0, and name the generators that you start in "
            "services.generators (in Docker Compose: QUARTET_GENERATION in .env)",
        )


def _check_triton(config: Config) -> Iterator[Finding]:
    """Check that the package of an engine in the actor's process, and those of scorers, are installed."""
    needed = []
    triton = "run pip install 'quartet-rlhf[triton]'"
    if config.services.actor.address is None and config.rollout.engine == "triton":
        needed.append(("rollout.engine triton", f"{triton}, or set rollout.engine torch"))
    if config.services.reward.address is None:
        sources = config.reward.sources.items()
        needed += [(f"{key}.source triton", triton) for key, source in sources if source.triton is not None]
    for where, remedy in needed if find_spec("tritonclient") is None else ():
        yield Finding("error", where, f"the package tritonclient is not installed; {remedy}")


def _check_directory(config: Config, files: RunFiles, overwrite: bool, resume: bool) -> None:
    """Check that the run can start in its directory now. Raises ConfigError."""
    with lock_run_directory(files) if files.root.is_dir() else nullcontext():
        if not overwrite:
            check_earlier_run(config, files, resume)


def check_earlier_run(config: Config, files: RunFiles, resume: bool) -> None:
    """Check that there is a run to resume and that the config fits it, or that there is none. Raises ConfigError."""
    if not resume:
        check_unused(files)
        return
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
    check_earlier_run(config, files, resume=True)
    return True
