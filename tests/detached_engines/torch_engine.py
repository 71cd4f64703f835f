"""Quartet's torch engine with its own weights, for the contract of detached engines."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

from quartet.models.generation.torch_engine import DetachedTorchEngine
from tests.detached_engines.tiny_checkpoint import served_model


def torch_engine(folder: Path) -> DetachedTorchEngine:
    """Create an engine with random weights for the model in ``folder``."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    return DetachedTorchEngine(model, None, served_model(folder).stop_ids, 16)
