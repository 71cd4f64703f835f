"""Checks of the generators that this machine starts, before any process is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.errors import ConfigError
from quartet.preflight import check_separate_orchestrator
from quartet.preflight.generators import check_generators
from quartet.preflight.ineffective_settings import check_settings
from quartet.system.child_processes import package_path
from tests.unit.preflight.files import lines


def config(generators: int = 1, rollout: dict[str, Any] | None = None, /, **services: Any) -> Config:
    tree = {
        "data": {"prompts": "p"},
        "actor": {"model": "a"},
        "reward": {"model": "r"},
        "buffer": {"url": "redis://far"},
        "rollout": {"generators": generators, **(rollout or {})},
        "services": services,
    }
    return parse_config(tree, "test")


def refusal(*arguments: Any, **services: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        lines(check_generators(config(*arguments, **services)))
    return str(refused.value)


def environment(folder: Path, *packages: str) -> Path:
    """Return an interpreter that finds only these packages, besides the standard library and Quartet."""
    for package in packages:
        *parents, name = package.split(".")
        path = folder.joinpath("packages", *parents, name)
        path.mkdir(parents=True, exist_ok=True)
        for above in [path, *path.parents]:
            if above.name == "packages":
                break
            (above / "__init__.py").touch()
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{folder}/packages" exec {sys.executable} -S "$@"\n')
    python.chmod(0o700)
    return python


BASE = (
    "cryptography", "google.protobuf", "grpc", "grpc_health", "grpc_status", "numpy", "opentelemetry.sdk", "prometheus_client",
    "pydantic", "redis", "safetensors", "structlog", "xxhash", "yaml", "backports.zstd",
)  # fmt: skip


def test_a_run_without_local_generators_needs_no_environment() -> None:
    assert lines(check_generators(config(0))) == []
    assert lines(check_generators(config(0, generators=["127.0.0.1:7100"], generator={"python": "/absent"}))) == []


def test_generators_of_the_torch_engine_use_the_environment_of_this_command() -> None:
    assert lines(check_generators(config(2))) == [f"rollout.generators 2: engine torch of {sys.executable}"]


def test_the_environment_of_an_engine_is_checked_without_importing_it(tmp_path: Path) -> None:
    python = environment(tmp_path, *BASE, "vllm")
    (tmp_path / "packages/vllm/__init__.py").write_text("raise SystemError('a minute has passed')")
    notes = lines(check_generators(config(1, {"engine": "vllm"}, generator={"python": str(python)})))
    assert notes == [f"rollout.generators 1: engine vllm of {python}"]


@pytest.mark.parametrize("section", ["vllm_server", "sglang_server"])
def test_the_directory_that_a_server_shares_must_exist_and_be_writable(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "weights"
    server = {"url": "http://127.0.0.1:8000", "weights_directory": str(folder)}
    rollout = {"engine": section.replace("_", "-"), section: server}
    key = f"rollout.{section}.weights_directory {folder}: "
    assert refusal(1, rollout).startswith(f"{key}not a directory on this machine; create it")
    folder.touch()
    assert refusal(1, rollout).startswith(f"{key}not a directory on this machine; create it")
    folder.unlink()
    folder.mkdir()
    lines(check_generators(config(1, rollout)))
    # The tests may run as root, who can write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder)
    assert refusal(1, rollout).startswith(f"{key}the generator cannot write there; give this user the permission")
    elsewhere = config(0, rollout, generators=["127.0.0.1:7100"])
    assert lines(check_generators(elsewhere)) == []


@pytest.mark.parametrize(("engine", "package"), [("vllm", "vllm"), ("tensorrt-llm", "tensorrt_llm")])
def test_an_engine_that_its_environment_lacks_is_refused(engine: str, package: str, tmp_path: Path) -> None:
    python = environment(tmp_path, *BASE)
    message = refusal(1, {"engine": engine}, generator={"python": str(python), "devices": [0]})
    assert message.startswith(
        f"rollout.engine {engine}: {python} does not find the package {package}; install it there"
    )


def test_packages_beside_quartet_do_not_reach_the_environment_of_the_engine() -> None:
    with package_path() as folder:
        assert {path.name.partition("-")[0] for path in Path(folder).iterdir()} == {"quartet", "quartet_rlhf"}
        program = "import sys; sys.path[:] = [path for path in sys.path if 'site-packages' not in path]; "
        program += "import quartet; print(quartet.__file__)"
        output = subprocess.run(
            [sys.executable, "-S", "-P", "-c", program],
            env={"PYTHONPATH": folder},
            capture_output=True,
            text=True,
            check=True,
        )
    assert output.stdout.startswith(folder)
    assert not Path(folder).exists()


def test_an_engine_without_an_environment_of_its_own_is_refused() -> None:
    message = refusal(1, {"engine": "vllm"})
    assert message.startswith(f"rollout.engine vllm: {sys.executable} does not find the package vllm; ")
    assert "set services.generator.python to the Python of an environment with it" in message


def test_packages_that_every_generator_needs_are_named(tmp_path: Path) -> None:
    present = [name for name in BASE if name not in ("redis", "google.protobuf")]
    message = refusal(1, {"engine": "vllm"}, generator={"python": str(environment(tmp_path, *present, "vllm"))})
    assert "the environment lacks google.protobuf, redis, which every generator needs; install them there" in message


@pytest.mark.parametrize("contents", [None, "text", "#!/bin/sh\necho 'Unknown option: -P' >&2; exit 2\n"])
def test_an_interpreter_that_does_not_run_is_refused(contents: str | None, tmp_path: Path) -> None:
    python = tmp_path / "python"
    if contents is not None:
        python.write_text(contents)
        python.chmod(0o700 if contents.startswith("#!") else 0o600)
    message = refusal(1, {"engine": "vllm"}, generator={"python": str(python)})
    assert message.startswith(f"services.generator.python {python}: ")
    assert ("does not run (Unknown option: -P)" if contents and contents.startswith("#!") else "not an exec") in message


@pytest.mark.parametrize("name", ["listen", "metrics_listen", "health_listen"])
def test_several_generators_cannot_share_a_port(name: str) -> None:
    message = refusal(2, generator={name: "127.0.0.1:7100"})
    assert message.startswith(f"services.generator.{name} 127.0.0.1:7100: 2 generators of rollout.generators cannot")
    lines(check_generators(config(2, generator={name: "127.0.0.1:0"})))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert refusal(1, generator={name: address}).startswith(f"services.generator.{name} {address}: cannot listen")


def test_devices_must_fit_the_engine(tmp_path: Path) -> None:
    assert "engine torch uses one device per generator; expected 2" in refusal(2, generator={"devices": [0, 1, 2, 3]})
    python = str(environment(tmp_path, *BASE, "vllm", "tensorrt_llm"))
    parallel = {"engine": "vllm", "vllm": {"tensor_parallel_size": 2}}
    message = refusal(2, parallel, generator={"python": python, "devices": [0, 1]})
    assert "1 for each of 2 generators; expected 2 for each, as rollout.vllm.tensor_parallel_size" in message
    assert lines(check_generators(config(2, parallel, generator={"python": python, "devices": [0, 1, 2, 3]})))
    assert "needs a GPU" in refusal(1, {"engine": "tensorrt-llm"}, generator={"python": python})


@pytest.mark.parametrize("listen", [None, "127.0.0.1:7001", "0.0.0.0:7001", "[::]:7001"])
def test_the_actor_must_listen_where_generators_of_other_machines_reach_it(listen: str | None) -> None:
    message = refusal(0, generators=["node1:7100"], actor={"listen": listen})
    assert message.startswith(
        f"services.actor.listen {listen or 'null'}: the generator node1:7100 pulls the weights from"
    )
    lines(check_generators(config(0, generators=["node1:7100"], actor={"listen": "node0:7001"})))
    lines(check_generators(config(0, generators=["node1:7100"], actor={"address": "node0:7001"})))
    lines(check_generators(config(0, generators=["localhost:7100"], actor={"listen": listen})))


def test_a_separately_started_orchestrator_starts_no_generators() -> None:
    services: dict[str, Any] = {role: {"address": f"{role}:1"} for role in ("actor", "critic", "reward", "reference")}
    with pytest.raises(ConfigError, match=r"^rollout\.generators 2: .*services\.generators"):
        lines(check_separate_orchestrator(config(2, **services)))
    lines(check_separate_orchestrator(config(0, generators=["generator:1"], **services)))


def test_settings_of_generators_without_an_effect_are_reported() -> None:
    generator = {"python": os.devnull, "num_threads": 2}
    assert lines(check_settings(config(0, generator=generator))) == [
        "warning: services.generator.python, services.generator.num_threads: not used: the actor generates; set "
        "rollout.generators or services.generators for generators"
    ]
    assert lines(check_settings(config(0, generator=generator, generators=["far:1"]))) == [
        "warning: services.generator.python: not used: rollout.generators is 0, so no generator is started on this machine"
    ]
    assert lines(check_settings(config(1, generator=generator))) == []
