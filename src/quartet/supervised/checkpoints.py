"""Checkpoints of a stage: model, optimizer, schedule and random numbers, as safetensors and JSON.

transformers' Trainer would pickle all but the model. A checkpoint is complete or absent.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from quartet.errors import ConfigError, StorageFailed
from quartet.run_directory.locking_and_removal import delete_earlier_run
from quartet.run_directory.run_files import RunFiles
from quartet.system.durable_files import fsync_path, replace_directory, storage_errors

TENSORS, STATE = "state.safetensors", "state.json"
TRAINER_STATE = "trainer_state.json"
"""Name that transformers' Trainer reads."""
_PICKLED = (".bin", ".pt", ".pth", ".pkl")
"""Suffixes of files that transformers or PEFT may unpickle."""
_FOLDER = re.compile(r"step-\d{6,}", re.ASCII)


def newest_checkpoint(files: RunFiles) -> Path | None:
    """Return the folder of the newest checkpoint, or None."""
    return max(_checkpoints(files), key=checkpoint_step, default=None)


def remove_checkpoints(files: RunFiles) -> None:
    """Remove every checkpoint, before a stage starts from its first step."""
    for folder in _checkpoints(files):
        shutil.rmtree(folder)


def _checkpoints(files: RunFiles) -> list[Path]:
    return [path for path in files.stage.glob("step-*") if _FOLDER.fullmatch(path.name)]


def checkpoint_step(folder: Path) -> int:
    """Return the step of a checkpoint, by its folder."""
    return int(folder.name.removeprefix("step-"))


@contextmanager
def save_errors(folder: Path) -> Iterator[None]:
    """Translate the errors of safetensors and of the system, such as a full disk, to StorageFailed."""
    with storage_errors(folder):
        try:
            yield
        except SafetensorError as error:
            raise StorageFailed(
                f"{folder}: cannot be written ({error}); fix that, then continue with --resume"
            ) from None


class CheckpointedTrainer:
    """Mixin before a trainer of transformers: its checkpoints are files that run no code, below ``run_files.stage``."""

    run_files: RunFiles
    before_checkpoint: Callable[[], None]
    """Called before a checkpoint is written, to write the metrics of its step."""
    model: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any
    state: Any

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.before_checkpoint()
        delete_earlier_run(self.run_files)
        target = self.run_files.stage / f"step-{self.state.global_step:06d}"
        with save_errors(target):
            self.run_files.stage.mkdir(exist_ok=True)
            replace_directory(target, self._write)
        for path in self.run_files.stage.iterdir():
            if path != target:
                shutil.rmtree(path)
        fsync_path(self.run_files.stage)

    def _write(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        optimizer = self.optimizer.state_dict()
        tensors = {
            f"optimizer.{index}.{name}": value
            for index, values in optimizer["state"].items()
            for name, value in values.items()
        }
        tensors["random.torch"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors["random.cuda"] = torch.cuda.get_rng_state()
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / TENSORS)
        name, keys, *rest = np.random.get_state()
        state = {
            "param_groups": optimizer["param_groups"],
            "scheduler": self.lr_scheduler.state_dict(),
            "random.python": random.getstate(),
            "random.numpy": [name, np.asarray(keys).tolist(), *rest],
        }
        (folder / STATE).write_text(json.dumps(state), encoding="utf-8")
        self.state.save_to_json(str(folder / TRAINER_STATE))

    def load_trained(self, checkpoint: Path) -> None:
        """Load the weights of a checkpoint after the last step. ``train`` would train another step."""
        from transformers.trainer_utils import align_special_tokens

        # As ``train`` does before its first step.
        align_special_tokens(self.model, self.processing_class)  # type: ignore[no-untyped-call]
        self._load_from_checkpoint(str(checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        with _damage_explained(folder):
            # Without safetensors, transformers would look for pickled weights.
            if not any(folder.glob("model*.safetensors")) and not (folder / "adapter_model.safetensors").is_file():
                raise ValueError("no weights as safetensors")
            if pickled := sorted(path.name for path in folder.rglob("*") if path.suffix in _PICKLED):
                raise ValueError(f"{pickled[0]} is not of a stage")
            _read_json(folder / STATE)
            if _read_json(folder / TRAINER_STATE).get("global_step") != checkpoint_step(folder):
                raise ValueError(f"{TRAINER_STATE} is of another step")
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with _damage_explained(Path(checkpoint)):
            given, state = load_file(Path(checkpoint) / TENSORS), _read_json(Path(checkpoint) / STATE)
            values: dict[int, dict[str, torch.Tensor]] = {}
            for name, value in given.items():
                kind, index, key = (*name.split(".", 2), "")[:3]
                if kind == "optimizer":
                    values.setdefault(int(index), {})[key] = value
            self.optimizer.load_state_dict({"state": values, "param_groups": state["param_groups"]})
            self.lr_scheduler.load_state_dict(state["scheduler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with _damage_explained(Path(checkpoint)):
            given, state = load_file(Path(checkpoint) / TENSORS), _read_json(Path(checkpoint) / STATE)
            version, keys, gauss = state["random.python"]
            random.setstate((version, tuple(keys), gauss))
            name, words, *rest = state["random.numpy"]
            np.random.set_state((name, np.array(words, np.uint32), *rest))
            torch.set_rng_state(given["random.torch"])
            if "random.cuda" in given and torch.cuda.is_available():
                torch.cuda.set_rng_state(given["random.cuda"])

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: neither float32 nor bfloat16 has a scaler."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing: neither float32 nor bfloat16 has a scaler."""


def _read_json(path: Path) -> dict[str, Any]:
    given: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return given


@contextmanager
def _damage_explained(folder: Path) -> Iterator[None]:
    """Turn the errors of missing, truncated and foreign files of a checkpoint into a ConfigError of one line."""
    try:
        yield
    except (FileNotFoundError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"checkpoint {folder}: is damaged ({str(error).partition(chr(10))[0]}); start again with --overwrite"
        ) from error
