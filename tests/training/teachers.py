"""A teacher for tests of distillation."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from quartet.models.weights.loading import load_causal_lm


def make_teacher(student: Path, folder: Path) -> Path:
    """Save the model of ``student`` with other weights and its tokenizer, and return ``folder``."""
    model, generator = load_causal_lm(str(student)), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    for path in student.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder
