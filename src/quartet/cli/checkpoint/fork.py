"""`quartet fork`: a new run that starts from a checkpoint of another run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from quartet.cli.checkpoint.list_and_tag import console, how_to_resume
from quartet.config.live_settings import live_settings
from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.contract.status import TRAINED_ROLES, Role
from quartet.data.prompt_cache import set_contents
from quartet.errors import ConfigError
from quartet.preflight import check_inputs
from quartet.preflight.findings import raise_errors
from quartet.run_directory.checkpoints import MANIFEST, Checkpoint
from quartet.run_directory.identity import Identity
from quartet.run_directory.locking_and_removal import is_used, lock_run_directory, remove_run
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.selection import check_no_stage, checkpoint_at, run_files
from quartet.system.durable_files import write_durably


def fork(run: Path, which: str, name: str, overrides: list[str]) -> None:
    """Create a run from a checkpoint of another run, in the same folder of runs, with other settings. Raises ConfigError.

    The KL coefficient and the running moments of the scores are reset if their settings change.
    """
    files = run_files(run)
    check_no_stage(files, "fork")
    with lock_run_directory(files):
        checkpoint, before = checkpoint_at(files, which), load_config(files.config)
        config = load_config(files.config, [f"run.directory={files.root.parent}", *overrides, f"run.name={name}"])
        _check_models(before, config, checkpoint)
        _check_evaluations(before, config)
        _check_run(before, config, checkpoint)
        original = Identity.read(files.identity)
        if original is None:
            raise ConfigError(f"run {files.identity}: is missing; restore the file, or start a new run")
        identity = Identity.new(config, _micro_batch_tokens(original), set_contents(config, original.revisions))
        new = RunFiles(config.run_directory)
        with lock_run_directory(new):
            if is_used(new):
                raise ConfigError(f"--name {name}: {new.root} holds an earlier run; choose another name")
            remove_run(new)
            new.write_config(config.to_yaml())
            identity.write(new.identity)
            _copy_until(files, new, checkpoint.step)
            _copy_changes(before, config, files, new, checkpoint.step)
            target = new.checkpoints / checkpoint.path.name
            shutil.copytree(checkpoint.path, target)
            manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
            manifest |= {"run": config.run.name, "state": _algorithm_state(before, config, checkpoint.state)}
            write_durably(target / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    console.print(
        f"{new.root}: forked from step {checkpoint.step} of {run}; {how_to_resume(new, config)}",
        soft_wrap=True,
    )


def _micro_batch_tokens(original: Identity) -> dict[Role, int]:
    """Return the micro-batch sizes of the original run. The fork uses them unless its config sets others."""
    return {role: original.micro_batch_tokens_of(role) for role in TRAINED_ROLES}


def _check_run(before: Config, config: Config, checkpoint: Checkpoint) -> None:
    """Check that the fork is a separate run, has steps left, and that its data and models exist. Raises ConfigError."""
    if config.run.name == before.run.name and config.run_directory.resolve() == before.run_directory.resolve():
        raise ConfigError(f"--name {config.run.name}: is the name of the original run; choose another name")
    if config.run.steps <= checkpoint.step:
        raise ConfigError(
            f"run.steps {config.run.steps}: the fork starts after step {checkpoint.step}; add --set run.steps=N, with N over "
            f"{checkpoint.step}"
        )
    pretraining = config.algorithm.value_pretraining_steps
    if 0 < pretraining <= checkpoint.step and pretraining != before.algorithm.value_pretraining_steps:
        raise ConfigError(
            f"algorithm.value_pretraining_steps {pretraining}: counts from step 1 of the original run, so it has no effect after "
            f"step {checkpoint.step}; for N steps in the fork set {checkpoint.step} + N, or leave it out"
        )
    raise_errors(check_inputs(config))


def _check_models(before: Config, config: Config, checkpoint: Checkpoint) -> None:
    """Check that the config fits the weights and optimizer states of the checkpoint. Raises ConfigError."""
    if config.has_critic and not checkpoint.holds(Role.CRITIC):
        raise ConfigError(
            f"algorithm.estimator {config.algorithm.estimator}: needs a critic, and the checkpoint of step {checkpoint.step} has "
            "none; choose an estimator without a critic, or start a new run"
        )
    old, new = _trained_parts(before), _trained_parts(config)
    for key in new:
        if new[key] != old[key] and (config.has_critic or not key.startswith(Role.CRITIC)):
            raise ConfigError(
                f"{key} {new[key]}: does not fit the weights and optimizer states of the checkpoint, which were trained with "
                f"{old[key]}; use that value, or start a new run"
            )


def _check_evaluations(before: Config, config: Config) -> None:
    """Check that evaluations of the fork compare with the copied baseline. Raises ConfigError."""
    if not config.evaluation.every_steps:
        return
    if not before.evaluation.every_steps:
        raise ConfigError(
            f"evaluation.every_steps {config.evaluation.every_steps}: evaluations are compared with one before the first step, "
            "and the original run has none; leave it at 0, or start a new run"
        )
    old, new = _evaluation_settings(before), _evaluation_settings(config)
    for key in new:
        if new[key] != old[key]:
            raise ConfigError(
                f"{key} {new[key]}: evaluations are compared with the one before the first step, which used {old[key]}; "
                "use that value, or start a new run"
            )


def _evaluation_settings(config: Config) -> dict[str, Any]:
    """Return the settings that select the evaluation prompts, by key."""
    prompts = config.data.validation_set
    return {
        "evaluation.max_prompts": config.evaluation.max_prompts,
        "data.validation": config.data.validation,
        "data.validation_set": None if prompts is None else prompts.model_dump_json(exclude_defaults=True),
    }


def _trained_parts(config: Config) -> dict[str, Any]:
    """Return the settings that decide which weights are trained, by key."""
    reference = config.reference
    settings: dict[str, Any] = {"actor.model": config.actor.model, "critic.model": config.critic_model}
    for role, trained in ((Role.ACTOR, config.actor), (Role.CRITIC, config.critic)):
        settings |= {f"{role}.freeze": trained.freeze, f"{role}.lora": trained.lora}
        settings[f"{role}.optimizer.kind"] = trained.optimizer.kind
    # The versions of the reference follow each other.
    return settings | {"reference.sync_steps": reference.sync_steps, "reference.sync_alpha": reference.sync_alpha}


def _algorithm_state(before: Config, config: Config, state: dict[str, Any]) -> dict[str, Any]:
    """Return the algorithm state for the fork. Values that depend on a changed setting are None, which resets them."""
    old, new = before.algorithm, config.algorithm
    forked = dict(state)
    if (old.kl_coefficient, old.kl_controller) != (new.kl_coefficient, new.kl_controller):
        forked["kl_controller"] = None
    if (old.entropy_coefficient, old.entropy_controller) != (new.entropy_coefficient, new.entropy_controller):
        forked["entropy_controller"] = None
    # Score moments belong to one reward.
    if (old.score.normalize, before.reward) != (new.score.normalize, config.reward):
        forked["score_moments"] = None
    return forked


def _copy_until(old: RunFiles, new: RunFiles, step: int) -> None:
    """Copy the records of the original run up to and including ``step``."""
    for source, target in (
        (old.metrics, new.metrics),
        (old.evaluation_summaries, new.evaluation_summaries),
        (old.alerts, new.alerts),
        (old.failed_trajectories, new.failed_trajectories),
        (old.timeline, new.timeline),
    ):
        if source.exists():
            shutil.copyfile(source, target)
    for source, target in (
        (old.trajectories, new.trajectories),
        (old.evaluations, new.evaluations),
        (old.references, new.references),
    ):
        if source.exists():
            shutil.copytree(source, target)
    new.truncate_after(step)


def _copy_changes(before: Config, config: Config, old: RunFiles, new: RunFiles, step: int) -> None:
    """Copy the live setting changes up to ``step``, except changes of a setting that the config of the fork overrides."""
    now = {name: row.value(config) for name, row in live_settings(config).items()}
    overridden = {
        name
        for name, row in live_settings(before).items()
        # The weights of the parts belong together.
        if now.get(name) != row.value(before) or (row.key[0] == "reward" and before.reward != config.reward)
    }
    for change in old.read_changes():
        if change["step"] <= step and change["setting"] not in overridden:
            new.append_changes([change])
