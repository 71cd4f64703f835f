"""A stage from its config to the model that it leaves: `quartet sft` and `quartet reward-model`."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch

from quartet.config.rewards import RewardSourceConfig
from quartet.config.section import flattened
from quartet.config.supervised import RewardModelConfig, SftConfig, StageConfig
from quartet.contract.control import RunState
from quartet.contract.trajectory import TokenBatch
from quartet.errors import ConfigError, ModelError
from quartet.model_files.hub_models import model_directory
from quartet.model_files.model_support import positions_in
from quartet.models.hf_logging import suppress_hf_logging
from quartet.models.weights.loading import snapshot_model
from quartet.models.weights.tokenizer import load_tokenizer, tokenizer_fingerprint
from quartet.rewards.model import ModelReward
from quartet.run_directory.locking_and_removal import (
    check_unused,
    delete_earlier_run,
    is_used,
    lock_run_directory,
    move_earlier_run_aside,
    restore_earlier_run,
)
from quartet.run_directory.model_digests import model_digests
from quartet.run_directory.run_files import RunFiles, RunOutcome
from quartet.run_directory.step_lines import truncate_step_lines
from quartet.supervised.checkpoints import checkpoint_step, newest_checkpoint, remove_checkpoints, save_errors
from quartet.supervised.device import device_of
from quartet.supervised.rows import EncodedRow, StageRows, read_rows
from quartet.system.durable_files import replace_directory, sha256, storage_errors, write_durably
from quartet.system.missing_packages import require_package
from quartet.telemetry.sinks.configured import check_sinks, open_sinks

Report = Callable[[str], None]
_CHANGEABLE = ("telemetry.", "checkpoint.", "run.directory")
"""Prefixes of settings that may differ when a stage is resumed."""


def run_stage(config: StageConfig, overwrite: bool, resume: bool, report: Report) -> Path:
    """Train a stage, and return the folder of its model. Raises ConfigError for input that the user can correct.

    An earlier run that it replaces is restored unless this one completes a step.
    """
    if overwrite and resume:
        raise ConfigError("--overwrite and --resume: one replaces the earlier run, the other resumes it; give only one")
    files = RunFiles(config.run_directory)
    output = files.policy if isinstance(config, SftConfig) else files.reward
    if resume and not is_used(files):
        raise ConfigError(f"--resume: {files.root} has no run; start one without --resume")
    if not resume and not overwrite:
        check_unused(files)
    device_of(config)
    tokenizer, rows = check_stage(config, report)
    steps = config.run.steps or math.ceil(
        config.run.epochs * math.ceil(len(rows.training) / config.training.batch_size)
    )
    config = config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})
    with lock_run_directory(files):
        identity = {"id": secrets.token_hex(8), **_identity(config)}
        if resume:
            identity["id"] = _check_identity(identity, files)
            if _is_finished(files, steps):
                report(f"{files.root} is finished: {steps} of {steps} steps")
                return output
        elif overwrite:
            move_earlier_run_aside(files)
        else:
            check_unused(files)  # Again: another run may have used the directory before it was locked.
        with _earlier_run_kept(files):
            if not resume:
                remove_checkpoints(files)
            files.write_config(config.to_yaml())
            with storage_errors(files.identity):
                write_durably(files.identity, json.dumps(identity, indent=1) + "\n")
            with _outcome(files, steps):
                _train(config, files, identity["id"], tokenizer, rows, output, report)
    return output


@contextmanager
def _earlier_run_kept(files: RunFiles) -> Iterator[None]:
    """Restore the run that this one replaces at the end, or delete it if this one has completed a step."""
    try:
        yield
    finally:
        if files.metrics.exists() and files.metrics.stat().st_size:
            delete_earlier_run(files)
        else:
            restore_earlier_run(files)


def check_stage(config: StageConfig, report: Report) -> tuple[Any, StageRows]:
    """Check packages, tokenizer and rows, and return the last two. Raises ConfigError."""
    require_package("trl", "trl")
    check_sinks(config)
    tokenizer = load_checked_tokenizer(config)
    return tokenizer, read_rows(config, tokenizer, _positions(config.model.path), report)


def load_checked_tokenizer(config: StageConfig) -> Any:
    """Return the tokenizer of the model, with the pad token of the config. Raises ModelError if it does not suit the stage."""
    path = config.model.path
    tokenizer = load_tokenizer(path)
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(f"model.path {path}: its tokenizer has no chat template; start from a chat model, or add one")
    if tokenizer.eos_token_id is None:
        raise ModelError(f"model.path {path}: its tokenizer has no EOS token, so no answer would end; add one")
    if not isinstance(config, RewardModelConfig):
        return tokenizer
    if (pad := config.model.pad_token) is not None:
        if pad not in tokenizer.get_vocab():
            raise ModelError(
                f"model.pad_token {pad}: not in the vocabulary of {path}; a new token would change the tokenizer, which must be "
                "the policy's: name one that exists"
            )
        tokenizer.pad_token = pad
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise ModelError(
            f"model.path {path}: its tokenizer has no pad token besides EOS, so transformers would read scores before EOS; name "
            "a token that conversations do not contain as model.pad_token, such as '<|finetune_right_pad_id|>' for Llama 3"
        )
    return tokenizer


def _positions(model: str) -> int | None:
    path = model_directory(model, weights=False) / "config.json"
    try:
        return positions_in(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None  # Loading the model says what is wrong.


def _identity(config: StageConfig) -> dict[str, Any]:
    """Return what decides the result of a stage: settings, rows and model."""
    settings = flattened(config.model_dump(mode="json"))
    data = {"data.train": config.data.train, "data.validation": config.data.validation}
    return {
        "settings": {key: value for key, value in settings.items() if not key.startswith(_CHANGEABLE)},
        "rows": {key: sha256(path) for key, path in data.items() if path is not None},
        "model": model_digests({"model.path": config.model.path}),
    }


def _check_identity(now: dict[str, Any], files: RunFiles) -> str:
    """Return the id of the run. Raises ConfigError naming the first setting or file that differs from those of its start."""
    try:
        before = json.loads(files.identity.read_text(encoding="utf-8"))
        id = str(before["id"])
        changed = [
            (key, before[part].get(key), now[part].get(key))
            for part in ("settings", "rows", "model")
            for key in sorted(before[part].keys() | now[part].keys())
            if before[part].get(key) != now[part].get(key)
        ]
    except (OSError, ValueError, KeyError, AttributeError):
        raise ConfigError(f"--resume: {files.identity} cannot be read; start again with --overwrite") from None
    if changed:
        key, old, new = changed[0]
        raise ConfigError(
            f"--resume: {key} is {new!r}, the run in {files.root} started with {old!r}; restore it, or start again with "
            "--overwrite"
        )
    return id


def _is_finished(files: RunFiles, steps: int) -> bool:
    outcome = files.read_outcome()
    return outcome is not None and outcome.state is RunState.FINISHED and outcome.step == steps


@contextmanager
def _outcome(files: RunFiles, steps: int) -> Iterator[None]:
    """Record how the stage ends. An interrupted one has no outcome."""
    files.outcome.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        files.write_outcome(RunOutcome.of(error, files.last_step()))
        raise
    files.write_outcome(RunOutcome(RunState.FINISHED, steps))


def _train(
    config: StageConfig, files: RunFiles, id: str, tokenizer: Any, rows: StageRows, output: Path, report: Report
) -> None:
    # TRL takes seconds to import. Invalid input is refused before.
    from quartet.supervised.trainers import MetricsLog, build_trainer, load_model, merged

    torch.manual_seed(config.run.seed)
    checkpoint = newest_checkpoint(files)
    done = 0 if checkpoint is None else checkpoint_step(checkpoint)
    truncate_step_lines(files.metrics, done)
    steps = config.run.steps
    assert steps is not None, "steps were counted"
    with (
        suppress_hf_logging(),
        closing(open_sinks(config, files, id, report)) as sinks,
    ):
        sinks.continues_from(done)
        log = MetricsLog(files, sinks, config.evaluation.every_steps, report)
        trainer = build_trainer(config, files, load_model(config, tokenizer), tokenizer, rows, steps, log)
        report(
            f"{len(rows.training):,} rows, {len(rows.validation):,} held out; {steps:,} steps"
            + (f", continued after step {done:,}" if done else "")
        )
        if not done and rows.validation:
            trainer.evaluate()
        if checkpoint is not None and done >= steps:
            trainer.load_trained(checkpoint)
        else:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        log.flush()
        device = str(trainer.args.device)
        model = merged(trainer.model)

        def write(folder: Path) -> None:
            if isinstance(config, SftConfig):
                snapshot_model(model)(folder)
                load_tokenizer(config.model.path).save_pretrained(folder)
            else:
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                report(check_reward_model(folder, tokenizer, rows.validation or rows.training[:8], device))

        with save_errors(output):
            replace_directory(output, write)
    if isinstance(config, SftConfig):
        files.write_policy_step(steps)


@torch.no_grad()
def check_reward_model(folder: Path, tokenizer: Any, rows: list[EncodedRow], device: str) -> str:
    """Score pairs with the checkpoint as the reward service does, and return their accuracy. Raises ModelError."""
    with closing(ModelReward(RewardSourceConfig(source="model", model=str(folder)), device)) as service:
        if service.status().tokenizer_fingerprint != tokenizer_fingerprint(tokenizer):
            raise ModelError(f"{folder}: the saved tokenizer differs from that of the model; report this as a bug")
        chosen, rejected = (
            np.concatenate([service.score(_batch(rows[at : at + 64], side)).total for at in range(0, len(rows), 64)])
            for side in (0, 1)
        )
    longer = np.array([[len(answer) for answer in row.answers] for row in rows]).T
    return (
        f"as the reward service scores it: accuracy {_accuracy(chosen, rejected):.3f} on {len(rows):,} pairs, the longer answer: "
        f"{_accuracy(longer[0], longer[1]):.3f}; scores {np.concatenate([chosen, rejected]).mean():.2f} +- "
        f"{np.concatenate([chosen, rejected]).std():.2f}"
    )


def _batch(rows: list[EncodedRow], side: int) -> TokenBatch:
    return TokenBatch(
        np.concatenate([np.array(row.prompt + row.answers[side], np.int32) for row in rows]),
        np.array([len(row.prompt) for row in rows], np.int32),
        np.array([len(row.answers[side]) for row in rows], np.int32),
    )


def _accuracy(better: Any, worse: Any) -> float:
    """Return the share of pairs whose better answer is higher. Equal ones count half."""
    return float(((better > worse) + 0.5 * (better == worse)).mean())


def next_command(config: StageConfig, output: Path) -> str:
    """Return what to do with the model of a stage."""
    if isinstance(config, SftConfig):
        return f"policy: {output}\nnext: quartet reward-model, with model.path {quote(str(output))}"
    return f"reward model: {output}\nnext: quartet train, with reward.model {quote(str(output))}"
