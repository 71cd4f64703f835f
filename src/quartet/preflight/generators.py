"""Checks of the generators of a run: their environment, devices and addresses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from quartet.config.layout import listen_address
from quartet.config.root import Config
from quartet.config.section import is_loopback
from quartet.engines.engine import find_engine
from quartet.errors import ConfigError
from quartet.preflight.findings import Finding, collect
from quartet.preflight.security_checks import check_port
from quartet.system.child_processes import package_path

IMPORT_SECONDS = 60.0
"""Time limit for looking up packages in another environment."""
_FIND = """
import importlib.util, sys
def found(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
zstd = ["backports.zstd"] if sys.version_info < (3, 14) else []
print(*[name for name in [*sys.argv[1:], *zstd] if not found(name)])
"""
"""Program that prints which of its arguments cannot be imported. It imports none of them: an engine takes a minute."""
_BASE_PACKAGES = (
    "cryptography", "google.protobuf", "grpc", "grpc_health", "grpc_status", "numpy", "opentelemetry.sdk", "prometheus_client",
    "pydantic", "redis", "safetensors", "structlog", "xxhash", "yaml",
)  # fmt: skip
"""Packages that every generator needs besides its engine."""
_WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104 - compared, not bound


def check_generators(config: Config) -> Iterator[Finding]:
    """Check the generators that this machine starts, that remote ones reach the actor, and that the engine needs none else."""
    yield from collect(_check_place, config)
    if config.services.actor.address is None and config.services.orchestrator.address is None:
        yield from collect(_check_reaches_actor, config)
    if config.services.actor.address is None or config.rollout.generators:
        yield from collect(_check_share_directory, config)
    if config.rollout.generators:
        for check in (_check_devices, _check_addresses, _check_weights_directory, _check_environment):
            yield from collect(check, config)


def _check_place(config: Config) -> None:
    """An engine that cannot share the weights of the actor's policy runs in generators."""
    engine = config.rollout.engine
    if find_engine(engine).share is None and not config.has_generators:
        raise ConfigError(
            f"rollout.engine {engine}: runs in generators; set rollout.generators to 1 or more and services.generator.python "
            "to the Python of the engine's environment, or name running generators in services.generators"
        )


def _check_share_directory(config: Config) -> Iterator[Finding]:
    """Check the directory through which actor and generators share weights. Without it, they are sent."""
    directory = config.rollout.share_directory
    if directory is None or not config.has_generators or not config.rollout.share_weights:
        return
    if not directory.is_dir():
        what = "not a directory" if directory.exists() else "there is no such directory"
    elif not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        what = f"user {os.geteuid()} may not write there"
    else:
        yield Finding("ok", f"rollout.share_directory {directory}", "can be used")
        return
    yield Finding(
        "warning",
        f"rollout.share_directory {directory}",
        f"{what}, so weights are not shared between containers; mount one directory there in all of them, which user "
        f"{os.geteuid()} may write to, or set it to null",
    )


def _check_reaches_actor(config: Config) -> None:
    """Generators of other machines pull the weights from the actor."""
    remote = [address for address in config.services.generators if not is_loopback(address.rpartition(":")[0])]
    host = listen_address(config.services.actor).rpartition(":")[0].strip("[]")
    if remote and (is_loopback(host) or host in _WILDCARDS):
        raise ConfigError(
            f"services.actor.listen {config.services.actor.listen or 'null'}: the generator {remote[0]} pulls the weights from "
            "the actor; set it to HOST:PORT with a name or address of this machine that the generator can reach"
        )


def _check_devices(config: Config) -> None:
    rollout, devices = config.rollout, config.services.generator.devices
    each = len(devices) // rollout.generators
    if rollout.engine == "torch" and each > 1:
        raise ConfigError(
            f"services.generator.devices {list(devices)}: engine torch uses one device per generator; expected "
            f"{rollout.generators} for rollout.generators {rollout.generators}"
        )
    section = rollout.engine.replace("-", "_")
    size: int = getattr(getattr(rollout, section, None), "tensor_parallel_size", 1)
    if rollout.engine != "torch" and section in type(rollout).model_fields and devices and each != size:
        raise ConfigError(
            f"services.generator.devices {list(devices)}: {each} for each of {rollout.generators} generators; expected "
            f"{size} for each, as rollout.{section}.tensor_parallel_size"
        )
    if rollout.engine == "tensorrt-llm" and not devices:
        raise ConfigError("rollout.engine tensorrt-llm: needs a GPU; set services.generator.devices, such as [0]")


def _check_addresses(config: Config) -> None:
    service, count = config.services.generator, config.rollout.generators
    for name in ("listen", "metrics_listen", "health_listen"):
        address: str | None = getattr(service, name)
        if address is None:
            continue
        if count > 1 and address.rpartition(":")[2] != "0":
            raise ConfigError(
                f"services.generator.{name} {address}: {count} generators of rollout.generators cannot listen at one address; "
                "set port 0, or null"
            )
        check_port(f"services.generator.{name}", address)


def _check_weights_directory(config: Config) -> None:
    """Check the directory through which an HTTP server gets the weights."""
    for section in ("vllm_server", "sglang_server"):
        server = getattr(config.rollout, section)
        if server is None:
            continue
        key = f"rollout.{section}.weights_directory {server.weights_directory}"
        if not server.weights_directory.is_dir():
            raise ConfigError(
                f"{key}: not a directory on this machine; create it, or mount the volume that the server shares with it"
            )
        if not os.access(server.weights_directory, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(
                f"{key}: the generator cannot write there; give this user the permission, or choose another directory"
            )


def _check_environment(config: Config) -> Iterator[Finding]:
    """Check that the interpreter of the generators runs, and that it finds the engine. Raises ConfigError."""
    engine, python = config.rollout.engine, config.services.generator.python
    package = find_engine(engine).package
    if python is not None and not (python.is_file() and os.access(python, os.X_OK)):
        raise ConfigError(
            f"services.generator.python {python}: not an executable file; expected the Python of the engine's environment, such "
            "as ENVIRONMENT/bin/python"
        )
    used = python or Path(sys.executable)
    missing = _missing(used, [*_BASE_PACKAGES, package])
    if package in missing:
        advice = (
            "set services.generator.python to the Python of an environment with it, because it cannot share one with Quartet's "
            "torch"
            if python is None and engine != "torch"
            else "install it there, or give the Python of another environment in services.generator.python"
        )
        raise ConfigError(f"rollout.engine {engine}: {used} does not find the package {package}; {advice}")
    if missing:
        raise ConfigError(
            f"services.generator.python {used}: the environment lacks {', '.join(missing)}, which every generator needs; "
            f"install them there: {used} -m pip install --requirement docker/generator-requirements.txt"
        )
    yield Finding("ok", f"rollout.generators {config.rollout.generators}", f"engine {engine} of {used}")


def _missing(python: Path, packages: list[str]) -> list[str]:
    """Return the packages that an interpreter does not find. Raises ConfigError if it does not run."""
    try:
        with package_path() as folder:
            result = subprocess.run(
                [str(python), "-P", "-c", _FIND, "quartet", *packages],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=IMPORT_SECONDS,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"services.generator.python {python}: does not run ({error})") from None
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"status {result.returncode}"]
        raise ConfigError(
            f"services.generator.python {python}: does not run ({lines[-1]}); expected Python 3.11 or newer"
        )
    return result.stdout.split()
