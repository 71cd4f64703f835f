"""`quartet serve`: answer users with the policy of a run, and train it on the sessions that get a reward."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from shlex import quote
from typing import Any, get_args

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from quartet.buffer.redis_url import environment_overrides
from quartet.cli.console import make_console
from quartet.cli.start_run import run
from quartet.config.deployment import HostPort
from quartet.config.loading import load_config, section_of
from quartet.config.root import Config
from quartet.contract.control import ENDLESS_STEPS
from quartet.errors import ConfigError
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.selection import run_files
from quartet.system.durable_files import storage_errors, write_durably

console = make_console()

FOLDER, CONFIG = "serve", "config.yaml"
VIEWERS, OPERATORS = "viewers.keys", "operators.keys"
LISTEN = "127.0.0.1:8000"
"""Address of the endpoint if the first command gives none."""
MAX_TURNS, MAX_OFF_POLICY_STEPS = 16, 4
"""Settings of a config for traffic, if the run has no others."""
KEPT = (
    "actor",
    "critic",
    "reference",
    "checkpoint",
    "services",
    "buffer",
    "security",
    "gateway",
    "timeouts",
    "recovery",
)
"""Sections that traffic takes from the run."""


def serve(given: Path, listen: str | None, overrides: list[str]) -> None:
    """Serve the policy of a run until Ctrl-C. Its folder `serve` has the config and the keys, written once.

    ``listen`` and ``overrides`` replace settings of that config for this time; the first ``listen`` is written into it. Raises
    ConfigError if the run has no policy, and as ``run``.
    """
    _check_listen(listen)
    files = run_files(given)
    folder = files.root / FOLDER
    path = folder / CONFIG
    if not path.exists():
        before = load_config(files.config)
        if files.policy_step() is None:
            raise ConfigError(
                f"run {files.root}: has no policy yet; wait for its end, or let it save one (checkpoint.every_steps)"
            )
        with storage_errors(folder):
            folder.mkdir(exist_ok=True)
            for name in (VIEWERS, OPERATORS):
                (folder / name).touch(mode=0o600)
                (folder / name).write_text(f"{secrets.token_urlsafe(32)}\n", encoding="utf-8")
            tree = traffic_tree(before, files, listen or LISTEN)
            write_durably(path, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
        console.print(f"config: {path}", soft_wrap=True)
    address = [] if listen is None else [f"environment.agent.listen={listen}"]
    config = load_config(path, [*address, *overrides, *environment_overrides()])
    scheme = "http" if config.security.certificates is None else "https"
    console.print(
        f"endpoint, once the services are ready: {scheme}://{config.environment.agent.listen}/v1, model {config.run.name}\n"
        f"keys: {config.environment.traffic.viewer_keys_file} for users, "
        f"{config.environment.traffic.operator_keys_file} for rewards",
        soft_wrap=True,
    )
    served = RunFiles(config.run_directory)
    resumes = served.is_run()
    if resumes:
        console.print(f"continues {served.root} after step {served.last_step()}", soft_wrap=True)
    command = f"quartet serve {quote(str(given))}"
    run(config, overwrite=False, resume=resumes, continue_with=command)
    console.print(f"to continue: {command}", soft_wrap=True)


def _check_listen(listen: str | None) -> None:
    try:
        TypeAdapter(HostPort).validate_python(listen)
    except ValidationError:
        raise ConfigError(f"--listen {listen}: expected HOST:PORT, such as {LISTEN}") from None


def traffic_tree(config: Config, files: RunFiles, listen: str) -> dict[str, Any]:
    """Return the config that serves the policy of a run, and trains it: that of the run, as far as traffic can have it."""
    old: dict[str, Any] = config.model_dump(mode="json", exclude_defaults=True)
    tree: dict[str, Any] = {name: old[name] for name in KEPT if name in old}
    spec, rollout, data = config.algorithm.estimator_spec, old.get("rollout", {}), old.get("data", {})
    fits = not (spec.uses_groups or spec.needs_greedy_baseline) and not config.algorithm.distillation
    ungrouped = ("samples_per_prompt", "extra_samples", "dynamic_sampling", "max_sampling_rounds", "max_turn_tokens")
    tree["run"] = {
        **old.get("run", {}),
        "name": f"{config.run.name}-{FOLDER}",
        "directory": str(_root(files).parent),
        "steps": ENDLESS_STEPS,
    }
    tree["data"] = {
        name: data[name] for name in ("max_prompt_tokens", "tools", "documents", "chat_template_kwargs") if name in data
    }
    tree["algorithm"] = old.get("algorithm", {}) if fits else {"estimator": "reinforce_plus_plus"}
    tree["rollout"] = {
        **{name: value for name, value in rollout.items() if name not in ungrouped},
        "samples_per_prompt": 1,
        "max_turns": config.rollout.max_turns or MAX_TURNS,
        # One on this machine, because the endpoint has one port.
        "generators": 0 if config.services.generators else 1,
        "max_off_policy_steps": config.rollout.max_off_policy_steps or MAX_OFF_POLICY_STEPS,
        "in_flight_updates": True,
    }
    tree["actor"] = {**tree.get("actor", {}), "model": str(_root(files) / files.policy.name)}
    tree["reward"] = {"source": "none", "model": None}
    tree["environment"] = {
        "kind": "traffic",
        "agent": {"listen": listen},
        "traffic": {
            "viewer_keys_file": str(_root(files) / FOLDER / VIEWERS),
            "operator_keys_file": str(_root(files) / FOLDER / OPERATORS),
        },
    }
    if config.environment.chat_template is not None:
        tree["environment"]["chat_template"] = str(config.environment.chat_template)
    tree["checkpoint"] = {**tree.get("checkpoint", {}), "best_metric": None}
    tree["checkpoint"]["every_steps"] = tree["checkpoint"].get("every_steps") or 10
    if not config.has_critic or not fits:
        tree.pop("critic", None)
    tree.get("services", {}).pop("environment", None)
    tree.get("services", {}).pop("reward", None)
    _make_absolute(tree, Config, _working_directory(config, files))
    return tree


def _root(files: RunFiles) -> Path:
    return Path(os.path.abspath(files.root))


def _working_directory(config: Config, files: RunFiles) -> Path:
    """Return the folder in which a run was started, as far as its own folder tells: paths in its config are relative to it."""
    name, root = config.run_directory, _root(files)
    parts = len(name.parts)
    if name.is_absolute() or ".." in name.parts or root.parts[-parts:] != name.parts:
        return Path.cwd()
    return Path(*root.parts[:-parts])


def _make_absolute(tree: dict[str, Any], section: type[BaseModel], folder: Path) -> None:
    """Make the paths in a section absolute. Names of models are paths if ``folder`` has them."""
    for name, value in tree.items():
        kind = section.model_fields[name].annotation
        below = section_of(kind)
        if below is not None:
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, dict):
                    _make_absolute(each, below, folder)
        elif isinstance(value, str) and (
            Path in (kind, *get_args(kind)) or (name == "model" and (folder / value).exists())
        ):
            tree[name] = str(folder / value)
