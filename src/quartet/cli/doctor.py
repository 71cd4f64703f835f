"""`quartet doctor`: check this machine, and the requirements of a config."""

from __future__ import annotations

import importlib
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from rich.console import Console
from rich.table import Table

from quartet import __version__
from quartet.buffer.connection import connect
from quartet.buffer.embedded_redis import find_server
from quartet.buffer.redis_url import buffer_url
from quartet.config import Config, load_config, redact_url
from quartet.errors import ConfigError, QuartetError
from quartet.hub_models import looks_local
from quartet.launcher.security_checks import check_access
from quartet.preflight import check_gateway, check_inputs
from quartet.rpc.security.allow_list import OPERATOR
from quartet.rpc.service_channel import accepts_connections
from quartet.topology import (
    available_cores,
    free_memory_bytes,
    listen_address,
    model_roles,
    num_memory_sharers,
    num_threads,
    num_update_threads,
)
from quartet.types import TRAINED_ROLES, Role

console = Console()

TRAINED_BYTES = 16
"""Memory per trained parameter. float32: weight, gradient and the two moments of AdamW, 4 bytes each. Half precision: weight and
gradient, 2 bytes each, and a float32 master weight and the moments, 4 bytes each."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    subject: str
    ok: bool
    detail: str


def doctor(config_path: Path | None, overrides: list[str], overlays: list[Path]) -> bool:
    """Print the results of all checks, and return whether all passed. Raises ConfigError if the config is invalid."""
    if config_path is None and (overrides or overlays):
        raise ConfigError("--set and --overlay: need CONFIG; give it, or remove them")
    config = None if config_path is None else load_config(config_path, overrides, overlays)
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError:
        torch = None
    findings = list(_machine(torch))
    if config is not None and torch is not None:
        findings += _requirements(config)
    table = Table(show_header=False, box=None, padding=(0, 2))
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]failed[/]"
        table.add_row(mark, finding.subject, finding.detail)
    console.print(table)
    return all(finding.ok for finding in findings)


def _machine(torch: Any) -> Iterator[Finding]:
    """Check this machine. ``torch`` is the module, or None if it is not installed."""
    yield Finding("quartet", True, f"{__version__}, Python {platform.python_version()}")
    yield (
        Finding("torch", True, torch.__version__)
        if torch is not None
        else Finding("torch", False, "not installed; model services need it: pip install 'quartet-rlhf[train]'")
    )
    yield Finding("cores", True, f"{available_cores()} usable")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("memory", True, f"{total / 2**30:.1f} GiB")
    if torch is not None:
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        seen = ", ".join(f"{device.name} ({device.total_memory / 2**30:.0f} GiB)" for device in devices)
        yield Finding("GPUs", True, seen or "none; every service uses the CPU")
        yield Finding("bf16", True, _bf16(torch))
    yield _redis_server()


def _bf16(torch: Any) -> str:
    """Compare the speed of matrix multiplication in bfloat16 and float32: torch also accepts bfloat16 on slow hardware."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 4096 if device == "cuda" else 768

    def seconds(dtype: Any) -> float:
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            torch.nn.functional.linear(matrix, matrix)
            if device == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best

    ratio = seconds(torch.float32) / seconds(torch.bfloat16)
    verdict = "use it" if ratio > 1.2 else "use float32"
    return f"matrix multiplication is {ratio:.1f} times as fast as in float32 on this {device}; {verdict}"


def _redis_server() -> Finding:
    try:
        server = find_server()
        version = subprocess.run([str(server), "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (QuartetError, OSError, subprocess.SubprocessError) as error:
        return Finding("embedded Redis", False, str(error))
    return Finding("embedded Redis", True, f"{server} ({version.stdout.strip().split(' sha')[0]})")


def _requirements(config: Config) -> Iterator[Finding]:
    import torch

    for what, check in (("input", check_inputs), ("access", check_access), ("gateway", check_gateway)):
        try:
            for note in check(config) or ():
                yield Finding(what, True, note)
        except QuartetError as error:
            yield Finding(what, False, str(error))
    threads = 0
    roles = model_roles(config)
    for role in roles:
        service = getattr(config.services, role)
        if service.address is not None:
            responds = accepts_connections(service.address)
            seen = f"{service.address} responds" if responds else f"no service responds at {service.address}; start it"
            yield Finding(role, responds, seen)
            continue
        missing = [index for index in service.devices if index >= torch.cuda.device_count()]
        place = f"CUDA {list(service.devices)}" if service.devices else f"CPU, {_threads(config, role)}"
        threads += 0 if service.devices else num_threads(config, role)
        listen = listen_address(service).removesuffix(":0")
        port = listen if ":" in listen else f"a free port of {listen}"
        detail = f"{place}, listens on {port}{_memory(config, role)}{_update_memory(config, role)}"
        yield Finding(role, not missing, f"{detail}; CUDA devices {missing} do not exist" if missing else detail)
    if threads > max(available_cores(), len(roles)):
        yield Finding(
            "threads",
            False,
            f"{threads} threads for {available_cores()} cores slow every service down; lower services.*.num_threads",
        )
    if config.buffer.url is not None:
        yield _buffer(config)


def _threads(config: Config, role: Role) -> str:
    usual = num_threads(config, role)
    updating = (num_update_threads(config, role) if role in TRAINED_ROLES else None) or usual
    counted = f"{usual} thread{'s' * (usual > 1)}"
    return counted if updating == usual else f"{counted}, {updating} in updates"


def _memory(config: Config, role: Role) -> str:
    models = [model for key, model in config.models.items() if key.partition(".")[0] == role and looks_local(model)]
    files = [path for model in models for path in Path(model).glob("*.safetensors")]
    if role in TRAINED_ROLES and not getattr(config, role).lora:
        needed, what = TRAINED_BYTES * sum(map(_parameters, files)), "weights, gradients and optimizer"
    else:
        needed, what = sum(path.stat().st_size for path in files), "weights"
    return f", about {needed / 2**20:.1f} MiB for {what}" if needed else ""


def _parameters(path: Path) -> int:
    """Return the number of parameters in a file, by its header. 0 for a damaged file, which loading reports."""
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except (OSError, safetensors.SafetensorError):
        return 0


def _update_memory(config: Config, role: Role) -> str:
    """Return the free memory by which the service will choose its micro-batch size, if the config leaves it open."""
    if role not in TRAINED_ROLES or getattr(config, role).micro_batch_tokens is not None:
        return ""
    import torch

    from quartet.models.training.update_memory import free_gpu_bytes

    devices = getattr(config.services, role).devices
    if any(index >= torch.cuda.device_count() for index in devices):
        return ""
    free = (free_gpu_bytes(torch.device("cuda", devices[0])) if devices else free_memory_bytes()) // num_memory_sharers(
        config, role
    )
    return f", micro_batch_tokens is chosen at its start; {free / 2**30:.1f} GiB are free for it now, including its weights"


def _buffer(config: Config) -> Finding:
    url, certificates = str(config.buffer.url), config.security.certificates
    folder = certificates / OPERATOR if certificates is not None and url.startswith("rediss:") else None
    missing = [path for path in (config.buffer.password_file, folder) if path is not None and not path.exists()]
    if missing and config.services.orchestrator.address is not None:
        return Finding("buffer", True, f"{redact_url(url)} was not checked: {missing[0]} is not on this machine")
    try:
        connect(buffer_url(config, folder) or "").close()
    except QuartetError as error:
        return Finding("buffer", False, str(error))
    return Finding("buffer", True, f"{redact_url(url)} responds")
