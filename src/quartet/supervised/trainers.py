"""TRL's trainers with the settings of a stage. This module imports TRL, which takes seconds."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from datasets import Dataset
from torch import nn
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from quartet.config.supervised import RewardModelConfig, SftConfig, StageConfig, StageLoraConfig
from quartet.errors import ModelError
from quartet.model_files.hub_models import model_directory
from quartet.models.weights.loading import load_causal_lm
from quartet.models.weights.tokenizer import SAFE, explained
from quartet.run_directory.run_files import RunFiles
from quartet.supervised.checkpoints import CheckpointedTrainer
from quartet.supervised.device import device_of
from quartet.supervised.rows import StageRows
from quartet.telemetry.sinks.background import Sinks

_SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
_NAMES = {
    "loss": "loss",
    "accuracy": "accuracy",
    "mean_token_accuracy": "token_accuracy",
    "margin": "margin",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
}
"""Names of Quartet's metrics by those of TRL."""
_EVALUATED = ("loss", "accuracy", "mean_token_accuracy", "margin")
PROGRESS_LINES = 20
"""Lines of progress in a stage, besides those of evaluations."""


class MetricsLog(TrainerCallback):
    """Callback that writes a line of ``metrics.jsonl`` for each optimizer step, and evaluates when it is due."""

    def __init__(self, files: RunFiles, sinks: Sinks, evaluate_steps: int, report: Callable[[str], None]) -> None:
        """``evaluate_steps``: steps between evaluations; 0 only evaluates after the last step."""
        self._files, self._sinks, self._every, self._report = files, sinks, evaluate_steps, report
        self._line: dict[str, float] = {}
        self._tokens, self._begun = 0.0, time.monotonic()
        self.evaluates = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock of a step."""
        self._begun = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Evaluate after the last step, and after every N steps."""
        step = state.global_step
        due = step >= state.max_steps or (self._every and step % self._every == 0)
        control.should_evaluate = bool(self.evaluates and due)

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Take the metrics of a step, or of an evaluation after it. Raises ModelError for a loss that is not finite."""
        state.log_history.clear()  # metrics.jsonl has it, and each checkpoint would repeat it.
        step, logs = state.global_step, given["logs"]
        if "eval_loss" in logs:
            found = {
                f"validation_{_NAMES[name]}": logs[f"eval_{name}"] for name in _EVALUATED if f"eval_{name}" in logs
            }
            self._report(f"{f'after step {step}' if step else 'before training'}: {_shown(found)}")
            self._line |= found if step else {}
        elif "loss" in logs:
            self.flush()
            self._line = {"step": step} | {ours: logs[name] for name, ours in _NAMES.items() if name in logs}
            self._line |= {"tokens": logs["num_tokens"] - self._tokens, "seconds": time.monotonic() - self._begun}
            self._tokens = logs["num_tokens"]
            if not math.isfinite(self._line["loss"]):
                raise ModelError(
                    f"step {step}: the loss is {self._line['loss']}; lower training.learning_rate, or set model.dtype float32"
                )
            if step % max(1, state.max_steps // PROGRESS_LINES) == 0 or step == state.max_steps:
                self._report(f"step {step}/{state.max_steps}: {_shown(self._line, ('step', 'tokens', 'seconds'))}")

    def flush(self) -> None:
        """Write the line of the last step, before a later one or a checkpoint."""
        if self._line:
            self._files.append_metrics(self._line)
            self._sinks.step(int(self._line["step"]), self._line)
            self._line = {}


def _shown(metrics: dict[str, float], hidden: tuple[str, ...] = ()) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name not in hidden)


class _SftTrainer(CheckpointedTrainer, SFTTrainer):
    pass


class _RewardTrainer(CheckpointedTrainer, RewardTrainer):
    pass


def build_trainer(
    config: StageConfig, files: RunFiles, model: Any, tokenizer: Any, rows: StageRows, steps: int, log: MetricsLog
) -> Any:
    """Return the trainer of a stage. ``model`` is from ``load_model``."""
    training = config.training
    device = device_of(config)
    settings: dict[str, Any] = {
        "output_dir": str(files.stage),
        "seed": config.run.seed,
        "data_seed": config.run.seed,
        "max_steps": steps,
        "per_device_train_batch_size": training.micro_batch_size,
        "per_device_eval_batch_size": training.micro_batch_size,
        "gradient_accumulation_steps": training.batch_size // training.micro_batch_size,
        "optim": "adamw_torch",
        "learning_rate": training.learning_rate,
        "warmup_steps": training.warmup_steps,
        "lr_scheduler_type": _SCHEDULES[training.schedule],
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "bf16": config.model.dtype == "bfloat16",
        "use_cpu": device == "cpu",
        "dataloader_pin_memory": device != "cpu",
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps" if config.checkpoint.every_steps else "no",
        "save_steps": config.checkpoint.every_steps or 1,
        "disable_tqdm": True,
        "report_to": [],
        "max_length": None,  # The rows are short enough.
    }
    is_sft = isinstance(config, SftConfig)
    if isinstance(config, RewardModelConfig):
        coefficient = config.training.margin_coefficient
        settings["center_rewards_coefficient"] = config.training.center_rewards_coefficient or None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL itself sets the old name of activation checkpointing.
        arguments: Any = (SFTConfig if is_sft else RewardConfig)(**settings)
    arguments._n_gpu = min(1, arguments.n_gpu)  # Other GPUs are for other processes.
    training_set, validation_set = (
        Dataset.from_list([row.to_sft() if is_sft else row.to_pair(coefficient) for row in part]) if part else None
        for part in (rows.training, rows.validation)
    )
    trainer = (_SftTrainer if is_sft else _RewardTrainer)(
        model=model,
        args=arguments,
        train_dataset=training_set,
        eval_dataset=validation_set,
        processing_class=tokenizer,
        callbacks=[log],
        peft_config=_adapter(config.model.lora, is_sft),
    )
    log.evaluates = validation_set is not None
    trainer.run_files, trainer.before_checkpoint = files, log.flush
    trainer.remove_callback(PrinterCallback)
    return trainer


def _adapter(lora: StageLoraConfig | None, is_sft: bool) -> Any:
    if lora is None:
        return None
    return peft.LoraConfig(
        task_type="CAUSAL_LM" if is_sft else "SEQ_CLS",
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft multiplies by it.
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules) or "all-linear",
        modules_to_save=None if is_sft else ["score"],
    )


def load_model(config: StageConfig, tokenizer: Any) -> Any:
    """Return the model to train, on the CPU: that of the config, or a sequence classifier with its weights and a new head.

    Raises ModelError.
    """
    path = config.model.path
    if isinstance(config, SftConfig):
        return load_causal_lm(path)
    with explained(path, "model"):
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            str(model_directory(path)), num_labels=1, dtype=torch.float32, use_safetensors=True, **SAFE
        )
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ModelError(f"{path}: not a decoder with a score per token; start from a causal language model")
    model.config.pad_token_id = tokenizer.pad_token_id
    return model


def merged(model: Any) -> Any:
    """Return a trained model on the CPU, with its adapters merged into the weights."""
    return (model.merge_and_unload() if isinstance(model, peft.PeftModel) else model).cpu()
