"""A description of the machine that a benchmark runs on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from quartet.config.root import Config
from quartet.errors import ConfigError
from quartet.system.compute_environment import set_cpu_environment, set_gpu_environment
from quartet.system.machine import available_cores


def describe(device: str = "cpu") -> str:
    """Return the processor, the cores that this process may use, memory, load average, and the GPU if ``device`` is one."""
    kind = _value(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    host = f"{kind}, {available_cores()} cores, {memory:.0f} GiB of memory, load {os.getloadavg()[0]:.1f} before"
    if device == "cpu":
        return host
    import torch

    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, torch {torch.__version__}; {host}"


def device_of(config: Config, path: Path) -> str:
    """Return the actor's device in the config: cpu or cuda:N. Raises ConfigError if the machine has no such GPU."""
    devices = config.services.actor.devices
    if not devices:
        return "cpu"
    import torch

    if devices[0] >= torch.cuda.device_count():
        rollout, count = config.rollout, config.rollout.prompts_per_step * config.rollout.samples_per_prompt
        raise ConfigError(
            f"no GPU here: {path} needs CUDA device {devices[0]}, but this machine has {torch.cuda.device_count()} CUDA devices; "
            f"use a machine with that device. The benchmark uses {config.actor.model} in {config.actor.dtype}, {count} "
            f"responses of at most {rollout.max_response_tokens} tokens per step, and prompts of at most "
            f"{config.data.max_prompt_tokens} tokens"
        )
    return f"cuda:{devices[0]}"


def set_up(device: str, threads: int) -> None:
    """Set the CPU threads of torch and the flags of a service."""
    import torch

    set_cpu_environment(os.environ)
    if device == "cpu":
        torch.set_num_threads(threads)
        return
    from quartet.models.torch_settings import set_up_gpu, set_up_torch

    set_gpu_environment(os.environ)
    set_up_torch(threads)
    set_up_gpu()


def synchronize(device: str) -> None:
    """Wait until the device has finished all queued work."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def _value(path: Path, name: str) -> str:
    """Return the value after the first ``name :`` in a file, or an empty string."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
