"""The Python API, which `import quartet` offers. Does not import torch, except in ``generate``."""

from quartet.api.configs import load_config
from quartet.api.generation import Completion, generate
from quartet.api.run import Run, RunTrajectory
from quartet.api.training import train
from quartet.config.root import Config

__all__ = ["Completion", "Config", "Run", "RunTrajectory", "generate", "load_config", "train"]
