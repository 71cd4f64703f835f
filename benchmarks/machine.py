"""The machine that a benchmark runs on, in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from quartet.config import Config
from quartet.errors import ConfigError
from quartet.topology import available_cores


def describe(device: str = "cpu") -> str:
    """Processor, cores that this process may use, memory, and how busy the machine is with other work; the GPU, if it is one."""
    kind = _value(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    host = f"{kind}, {available_cores()} cores, {memory:.0f} GiB of memory, load {os.getloadavg()[0]:.1f} before"
    if device == "cpu":
        return host
    import torch

    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, torch {torch.__version__}; {host}"


def device_of(config: Config, path: Path) -> str:
    """Return where the config has its policy compute: cpu, or cuda:N. Raises ConfigError where there is no such GPU."""
    devices = config.services.actor.devices
    if not devices:
        return "cpu"
    import torch

    if devices[0] >= torch.cuda.device_count():
        rollout, count = config.rollout, config.rollout.prompts_per_step * config.rollout.samples_per_prompt
        raise ConfigError(
            f"no GPU here: {path} asks for CUDA device {devices[0]}, and there are {torch.cuda.device_count()}; run it on a "
            f"machine that has it. What would be run: {config.actor.model} in {config.actor.dtype}, {count} responses of at most "
            f"{rollout.max_response_tokens} tokens a step to prompts of at most {config.data.max_prompt_tokens}"
        )
    return f"cuda:{devices[0]}"


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def _value(path: Path, name: str) -> str:
    """Return what stands behind the first ``name :`` of a file; empty where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
