"""`quartet doctor`: check this machine, and the requirements of a config."""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.table import Table
from rich.text import Text

from quartet import __version__
from quartet.buffer.connection import connect
from quartet.buffer.embedded_redis import find_server
from quartet.buffer.redis_url import buffer_url
from quartet.cli.console import make_console
from quartet.config.layout import (
    devices_of_generator,
    listen_address,
    model_roles,
    num_memory_sharers,
    num_threads,
    num_update_threads,
)
from quartet.config.loading import load_config
from quartet.config.rollout import engine_names
from quartet.config.root import Config
from quartet.config.url_redaction import redact_url
from quartet.contract.status import TRAINED_ROLES, ProcessStatus, Role, ServiceStatus
from quartet.engines.engine import COLUMNS, described, find_engine
from quartet.errors import ConfigError, QuartetError
from quartet.model_files.hub_models import cached_snapshot, looks_local
from quartet.planner.device_memory import add_parts, frozen_memory, trained_memory
from quartet.planner.gpus import CPU, GPUS
from quartet.planner.memory_shares import gpu_share, role_memory
from quartet.planner.roofline import Parallel
from quartet.planner.workload import configured_parallel, read_workload
from quartet.preflight import problems
from quartet.preflight.findings import Finding, has_error
from quartet.preflight.generator_check import generator_mismatch
from quartet.preflight.repeatability import repeatability_notes, torch_remedy
from quartet.rpc.security.allow_list import OPERATOR
from quartet.rpc.security.credentials import Credentials
from quartet.rpc.service_channel import ServiceChannel, accepts_connections, endpoints_at
from quartet.system.child_processes import package_path
from quartet.system.failpoints import arm
from quartet.system.machine import available_cores, free_memory_bytes
from quartet.system.missing_packages import installed_version

console = make_console()

STATUS_SECONDS = 5.0
"""Time that a generator has to respond."""
MAX_PARALLEL_CHECKS = 16
"""Maximum number of generators that are asked at the same time."""
MAX_TRIAL_BYTES = 2**30
"""Size of the weights up to which the model of a config is loaded, for the trial of its engine."""
IMPORT_SECONDS = 180.0
"""Time to import an engine. vLLM takes half a minute on a slow machine."""
IMPORTS = """
import importlib, json, platform, sys
importlib.import_module("quartet.services.generator.factory")
versions = {"Python": platform.python_version()}
for name in sys.argv[1:]:
    versions[name] = getattr(importlib.import_module(name), "__version__", "of unknown version")
print("\\n" + json.dumps(versions))
"""
"""Program that imports the generator and the packages in its arguments, and prints versions in its last line."""


_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("failed", "red")}
"""Word and style of each level."""


def _finding(subject: str, passed: object, detail: str) -> Finding:
    return Finding("ok" if passed else "error", subject, detail)


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
    if torch is not None:
        findings += _trial(config)
    if config is not None and torch is not None:
        findings += _requirements(config)
    table = Table(show_header=False, box=None, padding=(0, 2))
    for finding in findings:
        word, style = _MARKS[finding.level]
        table.add_row(Text(word, style), finding.where, finding.what)
    console.print(_engines(config))
    console.print()
    console.print(table)
    return not has_error(findings)


def _engines(config: Config | None) -> Table:
    """Return the guarantees of the config's engine, or of all engines."""
    table = Table(
        title="What the engines can guarantee", title_justify="left", show_header=False, box=None, padding=(0, 2)
    )
    for engine in engine_names() if config is None else [config.rollout.engine]:
        for place in find_engine(engine).guarantees:
            name, *cells = place.cells()
            table.add_row(name, f"{place.runs_in}: {_guarantees(cells)}")
    return table


def _guarantees(cells: Iterable[str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(COLUMNS[1:], cells, strict=True))


def _machine(torch: Any) -> Iterator[Finding]:
    """Check this machine. ``torch`` is the module, or None if it is not installed."""
    yield Finding("ok", "quartet", f"{__version__}, Python {platform.python_version()}")
    yield (
        Finding("ok", "torch", torch.__version__)
        if torch is not None
        else Finding("error", "torch", "not installed; model services need it: pip install 'quartet-rlhf[train]'")
    )
    trl = installed_version("trl")
    missing = "not installed; quartet sft and quartet reward-model need it: pip install 'quartet-rlhf[trl]'"
    yield Finding("ok", "trl", trl or missing)
    yield Finding("ok", "cores", f"{available_cores()} usable")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("ok", "memory", f"{total / 2**30:.1f} GiB")
    if torch is not None:
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        seen = ", ".join(f"{device.name} ({device.total_memory / 2**30:.0f} GiB)" for device in devices)
        yield Finding("ok", "GPUs", seen or "none; every service uses the CPU")
        yield Finding("ok", "bf16", _bf16(torch))
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


def _trial(config: Config | None) -> Iterator[Finding]:
    """Run the trial of the torch engine on this machine: with the config's model if that is cheap, else with a small one."""
    if config is not None and config.rollout.engine != "torch":
        return
    from quartet.models.generation.machine_trial import SMALL_MODEL, try_model, try_small_model

    arm(os.environ)
    more, threads, tried = "", 1, SMALL_MODEL
    try:
        if config is None:
            engine = try_small_model(threads)
        else:
            role = Role.GENERATOR if config.has_generators else Role.ACTOR
            actor, threads = config.actor, num_threads(config, role)
            if getattr(config.services, role).devices:
                more = "; on the devices of this config it is not batch-invariant"
            if _weight_file_bytes(actor.model) <= MAX_TRIAL_BYTES:
                tried = f"actor.model {actor.model}"
                rollout = config.rollout
                engine = try_model(
                    actor.model,
                    actor.dtype,
                    actor.lora,
                    rollout.merge_adapter,
                    rollout.max_concurrent_sequences,
                    threads,
                )
            else:
                engine, more = (
                    try_small_model(threads),
                    more or "; actor.model is large, its own trial is at the run's start",
                )
    except QuartetError as error:
        yield Finding("error", "torch engine", str(error))
        return
    yield Finding(
        "ok" if engine.batch_invariant else "warning",
        "torch engine",
        f"batch-invariant {'yes' if engine.batch_invariant else 'no'}: trial {engine.trial}, with {tried}{more}",
    )
    if config is not None:
        for note in repeatability_notes(config, [engine]):
            yield Finding("warning", "bits", note)
    elif not engine.batch_invariant:
        yield Finding("warning", "bits", f"the number of generators changes the bits of a run; {torch_remedy(engine)}")


def _weight_file_bytes(model: str) -> float:
    """Return the size of a checkpoint's weight files on this machine; infinity if it has none here."""
    folder = Path(model) if looks_local(model) else cached_snapshot(model)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")] if folder is not None else []
    return sum(sizes) or float("inf")


def _redis_server() -> Finding:
    try:
        server = find_server()
        version = subprocess.run([str(server), "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (QuartetError, OSError, subprocess.SubprocessError) as error:
        return Finding("error", "embedded Redis", str(error))
    return Finding("ok", "embedded Redis", f"{server} ({version.stdout.strip().split(' sha')[0]})")


def _requirements(config: Config) -> Iterator[Finding]:
    import torch

    for finding in problems(config):
        yield Finding(finding.level, "input", f"{finding.where}: {finding.what}")
    threads = 0
    roles = model_roles(config)
    for role in roles:
        service = getattr(config.services, role)
        if service.address is not None:
            for address in service.addresses:
                # A name that does not resolve is tried, too.
                for endpoint in endpoints_at(address) or [address]:
                    responds = accepts_connections(endpoint)
                    seen = f"{endpoint} responds" if responds else f"no service responds at {endpoint}; start it"
                    yield _finding(role, responds, seen)
            continue
        missing = [index for index in service.devices if index >= torch.cuda.device_count()]
        place = f"CUDA {list(service.devices)}" if service.devices else f"CPU, {_threads(config, role)}"
        threads += 0 if service.devices else num_threads(config, role)
        listen = listen_address(service).removesuffix(":0")
        port = listen if ":" in listen else f"a free port of {listen}"
        detail = f"{place}, listens on {port}{_memory(config, role)}{_update_memory(config, role)}"
        yield _finding(role, not missing, f"{detail}; CUDA devices {missing} do not exist" if missing else detail)
    yield from _environment_service(config)
    yield from _running_generators(config)
    if config.rollout.generators:
        yield from _local_generators(config)
        threads += (
            0 if config.services.generator.devices else config.rollout.generators * num_threads(config, Role.GENERATOR)
        )
    yield from _engine_server(config)
    # Every process needs a thread.
    if threads > max(available_cores(), len(roles) + config.rollout.generators):
        yield Finding(
            "error",
            "threads",
            f"{threads} threads for {available_cores()} cores slow every service down; lower services.*.num_threads",
        )
    if config.buffer.url is not None:
        yield _buffer(config)


def _environment_service(config: Config) -> Iterator[Finding]:
    """Check the address of the environment service, or name its class."""
    if not config.has_environment_service:
        return
    address, environment = config.services.environment.address, config.environment
    if address is None:
        name = environment.agent.name if config.has_agents else environment.class_name
        yield Finding("ok", "environment", f"{name} in {environment.num_workers} worker processes")
    else:
        responds = accepts_connections(address)
        seen = f"{address} responds" if responds else f"no service responds at {address}; start it"
        yield _finding("environment", responds, seen)


def _running_generators(config: Config) -> Iterator[Finding]:
    """Check every endpoint of services.generators."""
    if not config.services.generators:
        return
    try:
        credentials = Credentials(OPERATOR, config.security)
    except QuartetError as error:
        yield Finding("error", "generators", f"not checked: {error}")
        return
    resolved = {address: endpoints_at(address) for address in config.services.generators}
    for address in (address for address, endpoints in resolved.items() if not endpoints):
        yield Finding("error", f"generator {address}", "the host name does not resolve; correct services.generators")
    endpoints = sorted({each for endpoints in resolved.values() for each in endpoints})
    with ThreadPoolExecutor(MAX_PARALLEL_CHECKS) as workers:
        yield from workers.map(lambda address: _running_generator(config, credentials, address), endpoints)


def _running_generator(config: Config, credentials: Credentials, address: str) -> Finding:
    subject, channel = f"generator {address}", ServiceChannel(Role.GENERATOR, address, credentials)
    try:
        process = channel.status(STATUS_SECONDS)
    except QuartetError as error:
        return Finding("error", subject, f"{error}; start it, or correct services.generators")
    finally:
        channel.close()
    status = next((each for each in process.roles if each.role is Role.GENERATOR), None)
    if status is None:
        roles = ", ".join(each.role for each in process.roles)
        return Finding("error", subject, f"expected a generator, got the {roles} service; correct services.generators")
    problem = generator_mismatch(config, process, status)
    if not problem and status.buffer_unreachable:
        problem = "cannot reach the rollout buffer; check buffer.url from its machine"
    return _finding(subject, not problem, "; ".join(filter(None, (problem, _described_generator(process, status)))))


def _described_generator(process: ProcessStatus, status: ServiceStatus) -> str:
    held = status.last_transfer
    weights = (
        f"weights of version {held.policy_version}, digest {held.weights_digest.hex()[:8]}, by {held.way} in "
        f"{held.transfer_seconds + held.load_seconds:.2f} s"
        if held
        else "no weights yet"
    )
    engine = status.engine
    guarantees = [_guarantees(described(engine))] if engine else []
    if engine and engine.trial:
        guarantees.append(f"trial {engine.trial}")
    parts = (engine.name if engine else "no engine", f"Quartet {process.version}", status.device, status.dtype, weights)
    return ", ".join([*parts, *guarantees])


def _local_generators(config: Config) -> Iterator[Finding]:
    """Check the environment and the devices of the generators that a run starts on this machine."""
    import torch

    engine, service = config.rollout.engine, config.services.generator
    python = service.python or Path(sys.executable)
    yield _finding("generator.python", *_environment(python, find_engine(engine).package))
    available = torch.cuda.device_count()
    shares = [devices_of_generator(config, index) for index in range(config.rollout.generators)]
    missing = sorted({device for share in shares for device in share if device >= available})
    place = (
        f"CUDA {[list(share) for share in shares]}"
        if service.devices
        else f"CPU, {_threads(config, Role.GENERATOR)} each"
    )
    count, cores = config.rollout.generators, available_cores()
    detail, problem = f"{count} of engine {engine}, {place}", ""
    if missing:
        problem = f"; CUDA devices {missing} do not exist"
    elif not service.devices and count > cores:
        problem = f"; they share {cores} cores, lower rollout.generators"
    yield _finding("generators", not problem, detail + problem)


def _engine_server(config: Config) -> Iterator[Finding]:
    """Check that the server of the engine accepts connections."""
    rollout = config.rollout
    servers = {"triton": rollout.triton, "vllm-server": rollout.vllm_server, "sglang-server": rollout.sglang_server}
    if (server := servers.get(rollout.engine)) is not None:
        parts = urlsplit(server.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        responds = accepts_connections(f"{parts.hostname}:{port}")
        detail = f"{server.url} accepts connections" if responds else f"no server listens at {server.url}; start it"
        yield _finding(rollout.engine, responds, detail)


def _environment(python: Path, package: str) -> tuple[bool, str]:
    """Import the generator and its engine in another interpreter. Return whether that works, and the versions or the error."""
    if not python.is_file() or not os.access(python, os.X_OK):
        return False, f"{python}: not an executable file; correct services.generator.python"
    try:
        # As the launcher does: the other environment need not have Quartet installed, only its base dependencies.
        with package_path() as folder:
            process = subprocess.run(
                [str(python), "-P", "-c", IMPORTS, *filter(None, [package])],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=IMPORT_SECONDS,
            )
    except (OSError, subprocess.SubprocessError) as error:
        return False, f"{python}: {error}"
    if process.returncode:
        reason = (process.stderr.strip() or "no output").splitlines()[-1]
        return False, f"{python}: cannot start a generator: {reason}; install what is missing there"
    versions = json.loads(process.stdout.splitlines()[-1])
    return True, ", ".join([str(python), *(f"{name} {version}" for name, version in versions.items())])


def _threads(config: Config, role: Role) -> str:
    usual = num_threads(config, role)
    updating = (num_update_threads(config, role) if role in TRAINED_ROLES else None) or usual
    counted = f"{usual} thread{'s' * (usual > 1)}"
    return counted if updating == usual else f"{counted}, {updating} in updates"


def _memory(config: Config, role: Role) -> str:
    """Return the estimated memory of a role, by the arithmetic of `quartet plan`, or by its files if the plan cannot count it."""
    memory = role_memory(config, role)
    if memory is None:
        return ""
    load, device = read_workload(config, skip_uncounted=True), next(iter(GPUS.values()))
    if not getattr(config.services, role).devices:
        device = CPU
    works = [work for work in load.roles if work.role is role]
    if role not in TRAINED_ROLES:
        text = f", about {_mib(memory.weights)} for weights"
        parts = add_parts(*(frozen_memory(work, load, device, Parallel()) for work in works))
        return text + (f" and {_mib(parts['activations'] + parts['logits'])} for scoring" if works else "")
    parallel = configured_parallel(config, role)
    each = f" in each of {parallel.devices} processes" if parallel.devices > 1 else ""
    text = f", about {_mib(memory.weights + memory.state)} for weights, gradients and optimizer{each}"
    for work in works:
        checkpointing = getattr(config, role).gradient_checkpointing is not False
        parts = add_parts(trained_memory(work, load, device, parallel, load.longest, checkpointing, offload=False))
        needed = _mib(parts["activations"] + parts["logits"])
        text += f", at least {needed} for an update with a sequence of {load.longest} tokens"
    if memory.cache:
        text += f", {_mib(memory.cache)} for the key-value cache of {load.concurrent} sequences"
    return text


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


def _update_memory(config: Config, role: Role) -> str:
    """Return the free memory by which the service will choose its micro-batch size, if the config leaves it open."""
    if role not in TRAINED_ROLES or getattr(config, role).micro_batch_tokens is not None:
        return ""
    import torch

    from quartet.models.training.update_memory import free_gpu_bytes, total_gpu_bytes

    devices = getattr(config.services, role).devices
    if any(index >= torch.cuda.device_count() for index in devices):
        return ""
    share = gpu_share(config, role) if devices else None
    if share is not None:
        device = torch.device("cuda", devices[0])
        free = min(free_gpu_bytes(device), share.bytes(total_gpu_bytes(device)))
    else:
        free = free_gpu_bytes(torch.device("cuda", devices[0])) if devices else free_memory_bytes()
        free //= num_memory_sharers(config, role)
    return f", micro_batch_tokens is chosen at its start; {free / 2**30:.1f} GiB are free for it now, including its weights"


def _buffer(config: Config) -> Finding:
    url, certificates = str(config.buffer.url), config.security.certificates
    folder = certificates / OPERATOR if certificates is not None and url.startswith("rediss:") else None
    missing = [path for path in (config.buffer.password_file, folder) if path is not None and not path.exists()]
    if missing and config.services.orchestrator.address is not None:
        return Finding("ok", "buffer", f"{redact_url(url)} was not checked: {missing[0]} is not on this machine")
    try:
        connect(buffer_url(config, folder) or "").close()
    except QuartetError as error:
        return Finding("error", "buffer", str(error))
    return Finding("ok", "buffer", f"{redact_url(url)} responds")
