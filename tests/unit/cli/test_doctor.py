"""The doctor's estimates."""

from __future__ import annotations

import importlib.util
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from quartet import __version__
from quartet.cli import doctor as module
from quartet.cli.doctor import _memory, _requirements, doctor
from quartet.config.loading import parse_config
from quartet.config.rollout import engine_names
from quartet.config.root import Config
from quartet.contract.generation import EngineProperties
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.weights import WeightTransfer
from quartet.engines.engine import find_engine
from quartet.models.generation.trial import processor
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy
from quartet.preflight import generator_check
from quartet.preflight.findings import Finding
from quartet.rpc.server import Server
from quartet.system import failpoints
from tests.unit.models import tiny, updates


def config(folder: Path, weights: torch.dtype, **actor: Any) -> Config:
    model = str(tiny.saved(tiny.causal("llama", vocab_size=4096).to(weights), folder / "m"))
    tree = {"data": {"prompts": "p.jsonl"}, "actor": {"model": model, **actor}, "reward": {"model": model}}
    return Config.model_validate({"run": {"name": "r", "steps": 1}, "critic": {"model": model}, **tree})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_models_are_estimated_with_gradients_and_optimizer_state(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny.causal("llama", vocab_size=4096).to(dtype)
    optimizer = create_optimizer(model, 0.1)
    update_policy(model, optimizer, updates.experience(model), updates.settings(), updates.LOSS, 1000)
    moments = [entry[name] for entry in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    # A gradient has the dtype of its parameter.
    tensors = [*model.parameters(), *model.parameters(), *optimizer.parameter_of_master_weight, *moments]
    total, count = sum(t.nbytes for t in tensors), sum(p.numel() for p in model.parameters())
    assert total == 16 * count
    name = str(dtype).removeprefix("torch.")
    for role in (Role.ACTOR, Role.CRITIC):
        # The critic has a value head instead of the vocabulary projection.
        own = total if role is Role.ACTOR else total - 16 * (4096 - 1) * 32
        text = _memory(config(tmp_path, dtype, dtype=name), role)
        assert text.startswith(f", about {own / 2**20:.1f} MiB for weights, gradients and optimizer, at least ")
        assert ("key-value cache of 64 sequences" in text) == (role is Role.ACTOR)


def test_a_group_is_estimated_by_process(tmp_path: Path) -> None:
    tree = config(tmp_path, torch.float32).model_dump()
    tree["services"]["actor"]["processes"] = 2
    count = sum(p.numel() for p in tiny.causal("llama", vocab_size=4096).parameters())
    text = _memory(Config.model_validate(tree), Role.ACTOR)
    assert text.startswith(
        f", about {8 * count / 2**20:.1f} MiB for weights, gradients and optimizer in each of 2 processes"
    )


def test_models_without_full_training_are_estimated_by_their_weights(tmp_path: Path) -> None:
    settings = config(tmp_path, torch.bfloat16, lora={"rank": 2}, dtype="bfloat16")
    weights = sum(p.numel() for p in tiny.causal("llama", vocab_size=4096).parameters())
    # float32 adapters with gradients and moments, of 16 bytes per parameter, on seven matrices in each of two layers.
    adapters = 16 * 2 * 2 * (4 * 32 + 2 * (32 + 16) + 3 * (32 + 48))
    assert _memory(settings, Role.ACTOR).startswith(f", about {(2 * weights + adapters) / 2**20:.1f} MiB for weights")
    scorer = 4 * (weights - 4095 * 32)
    assert _memory(settings, Role.REWARD).startswith(f", about {scorer / 2**20:.1f} MiB for weights and ")


def test_models_that_the_planner_cannot_count_are_estimated_by_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without transformers, the planner has formulas for some types only.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    settings = config(tmp_path, torch.bfloat16)
    tiny.saved(tiny.causal("bloom"), tmp_path / "m")
    count = sum(p.numel() for p in tiny.causal("bloom").parameters())
    trained = f", about {16 * count / 2**20:.1f} MiB for weights, gradients and optimizer"
    assert _memory(settings, Role.CRITIC) == trained
    assert _memory(settings, Role.ACTOR).startswith(f"{trained}, ")
    assert _memory(settings, Role.REWARD) == f", about {4 * count / 2**20:.1f} MiB for weights"


def test_unreadable_weights_are_not_counted(tmp_path: Path) -> None:
    settings = config(tmp_path, torch.bfloat16)
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"\x10")
    assert not _memory(settings, Role.ACTOR)


def test_a_machine_without_torch_fails_one_check_and_passes_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not doctor(None, [], [])
    lines = capsys.readouterr().out.splitlines()
    [failed] = [line for line in lines if "failed" in line]
    assert "torch" in failed
    assert "pip install" in " ".join(" ".join(lines).split())


def test_a_port_of_the_gateway_that_is_in_use_is_reported(tmp_path: Path) -> None:
    settings = config(tmp_path, torch.float32)
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        settings = parse_config({**settings.model_dump(mode="json"), "gateway": {"listen": listen}}, "test")
        [finding] = [finding for finding in _requirements(settings) if "gateway.listen" in finding.what]
    assert finding.level == "error"
    assert f"gateway.listen {listen}: cannot listen there" in finding.what


class StatusOnly:
    """A servicer with nothing but a status."""

    def __init__(self, status: ServiceStatus) -> None:
        self.role, self._status = status.role, status

    def status(self) -> ServiceStatus:
        return self._status

    def register(self, server: Any) -> None:
        pass

    def abandoned(self) -> tuple[str, float]:
        return "", 0.0

    def close(self) -> None:
        pass


ENGINE = EngineProperties("torch", True, True, "whole", "tensors", "read back", trial="passed on A, AVX2, 1 thread")
HELD = WeightTransfer(7, bytes.fromhex("ab" * 16), "host:1", 100, "delta", 0.5, 0.25)
GENERATOR = ServiceStatus(Role.GENERATOR, device="cpu", dtype="float32", engine=ENGINE, last_transfer=HELD)


def generator_findings(settings: Config, addresses: list[str], **rollout: Any) -> list[Finding]:
    tree = {**settings.model_dump(mode="json"), "buffer": {"url": "redis://127.0.0.1:1"}}
    tree["services"]["generators"] = addresses
    tree["rollout"] |= rollout
    return [each for each in _requirements(parse_config(tree, "test")) if each.where.startswith("generator")]


def test_a_fitting_generator_shows_engine_version_weights_and_guarantees(tmp_path: Path) -> None:
    server = Server([StatusOnly(GENERATOR)], "127.0.0.1:0")
    try:
        [finding] = generator_findings(config(tmp_path, torch.float32), [server.address])
    finally:
        server.stop(0.0)
    assert (finding.where, finding.level) == (f"generator {server.address}", "ok")
    assert finding.what == (
        f"torch, Quartet {__version__}, cpu, float32, weights of version 7, digest abababab, by delta in 0.75 s, "
        "seeded yes, batch-invariant yes, log-probs whole, weights tensors, "
        "digest read back, in-flight updates no, trial passed on A, AVX2, 1 thread"
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"engine": replace(ENGINE, name="vllm")}, "runs engine vllm, rollout.engine is torch"),
        ({"dtype": "bfloat16"}, "has weights in bfloat16, actor.dtype is float32"),
        ({"buffer_unreachable": True}, "cannot reach the rollout buffer"),
        ({"role": Role.ACTOR}, "expected a generator, got the actor service"),
    ],
)
def test_a_generator_that_does_not_fit_fails_with_the_reason(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    server = Server([StatusOnly(replace(GENERATOR, **change))], "127.0.0.1:0")
    try:
        [finding] = generator_findings(config(tmp_path, torch.float32), [server.address])
    finally:
        server.stop(0.0)
    assert finding.level == "error"
    assert finding.what.startswith(problem)


def test_a_generator_of_another_version_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_check, "__version__", "99.0")
    server = Server([StatusOnly(GENERATOR)], "127.0.0.1:0")
    try:
        [finding] = generator_findings(config(tmp_path, torch.float32), [server.address])
    finally:
        server.stop(0.0)
    assert finding.what.startswith(f"runs Quartet {__version__}, this is 99.0")


def test_an_address_without_a_generator_fails(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
    [finding] = generator_findings(config(tmp_path, torch.float32), [address])
    assert (finding.where, finding.level) == (f"generator {address}", "error")
    assert "start it, or correct services.generators" in finding.what


@pytest.mark.slow
def test_the_interpreter_of_local_generators_must_import_their_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, torch.float32)
    findings = {finding.where: finding for finding in generator_findings(settings, [], generators=2)}
    assert findings["generator.python"].level == "ok"
    assert findings["generator.python"].what.endswith(f"torch {torch.__version__}")
    assert findings["generators"].what.startswith("2 of engine torch, CPU, ")
    assert findings["generators"].level == "ok"
    assert "threads" not in findings, "each generator needs a thread"
    assert module._environment(tmp_path / "python", "torch") == (
        False,
        f"{tmp_path / 'python'}: not an executable file; correct services.generator.python",
    )
    # The import of a generator takes seconds.
    monkeypatch.setattr(
        module, "IMPORTS", module.IMPORTS.replace("quartet.services.generator.factory", "quartet.errors")
    )
    ok, detail = module._environment(Path(sys.executable), "not_installed_engine")
    assert not ok
    assert "No module named 'not_installed_engine'" in detail
    # The interpreter is that of the first findings.
    monkeypatch.setattr(module, "_environment", lambda *_: (True, ""))
    [many] = [each for each in generator_findings(settings, [], generators=300) if each.where == "generators"]
    assert many.level == "error"
    assert many.what.endswith("cores, lower rollout.generators")


def test_the_guarantees_of_every_engine_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "console", Console(width=80))
    doctor(None, [], [])
    output = " ".join(capsys.readouterr().out.split())
    for name in engine_names():
        assert all(place.properties.name in output for place in find_engine(name).guarantees)
    assert "a vLLM server, called by a generator: seeded yes, batch-invariant if the server has VLLM_BATCH" in output
    assert "the actor's process: seeded yes, batch-invariant if its trial at the start passes" in output


def test_the_guarantees_of_a_configs_engine_are_printed_before_the_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config(tmp_path, torch.float32).model_dump_json())
    doctor(path, [], [])
    guarantees, findings = capsys.readouterr().out.split("embedded Redis")
    assert "torch" in guarantees
    assert "vllm" not in guarantees
    assert "can guarantee" not in findings


@pytest.fixture
def trial_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "failpoints").mkdir()
    monkeypatch.setenv(failpoints.VARIABLE, "engine.trial=fail")
    monkeypatch.setenv(failpoints.FOLDER_VARIABLE, str(tmp_path / "failpoints"))
    yield
    failpoints.arm({})


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_the_trial_of_this_machine_is_run_and_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "console", Console(width=400))
    assert doctor(None, [], [])
    output = printed(capsys)
    result = re.search(
        "batch-invariant (yes|no): trial (passed|failed) on ([^:]+), 1 thread.*, with a random Llama", output
    )
    assert result is not None
    assert result.groups()[:2] in (("yes", "passed"), ("no", "failed"))
    assert torch.backends.cpu.get_cpu_capability() in result[3]


def test_a_trial_that_fails_is_a_warning_with_what_to_set(
    trial_fails: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "console", Console(width=400))
    assert doctor(None, [], []), "the machine can be used"
    output = printed(capsys)
    assert "warning torch engine batch-invariant no: trial failed on " in output
    assert "warning bits the number of generators changes the bits of a run; set MKL_CBWR=AVX2,STRICT" in output


def test_a_small_model_of_a_config_is_tried_itself(
    trial_fails: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "console", Console(width=400))
    monkeypatch.setattr(module, "_environment", lambda *_: (True, ""))
    settings = config(tmp_path, torch.float32)
    path = tmp_path / "config.yaml"
    path.write_text(settings.model_dump_json())
    doctor(path, ["rollout.generators=2"], [])
    output = printed(capsys)
    assert f"batch-invariant no: trial failed on {processor()}, with actor.model {settings.actor.model}" in output
    assert "warning bits engine torch is not batch-invariant (trial failed on " in output
    assert "or set rollout.generators: 0" in output


def test_a_large_model_is_left_to_the_runs_own_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "MAX_TRIAL_BYTES", 1)
    monkeypatch.setattr(module, "console", Console(width=400))
    path = tmp_path / "config.yaml"
    path.write_text(config(tmp_path, torch.float32).model_dump_json())
    doctor(path, [], [])
    assert "with a random Llama, 128 wide; actor.model is large, its own trial is at the run's start" in printed(capsys)


def test_an_engine_that_is_not_torch_has_no_trial_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "console", Console(width=400))
    path = tmp_path / "config.yaml"
    path.write_text(config(tmp_path, torch.float32).model_dump_json())
    monkeypatch.setattr(module, "_environment", lambda *_: (False, "no vllm"))
    doctor(path, ["rollout.engine=vllm", "rollout.generators=1"], [])
    assert "torch engine" not in printed(capsys)


def test_a_name_of_generators_that_does_not_resolve_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "endpoints_at", lambda address: [])
    [finding] = generator_findings(config(tmp_path, torch.float32), ["generators.example:50070"])
    assert (finding.where, finding.level) == ("generator generators.example:50070", "error")
    assert "does not resolve" in finding.what


def test_every_replica_of_a_frozen_model_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = config(tmp_path, torch.float32).model_dump()
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (one, other)]
        # The first name has one address, the second one has two, of which one does not respond.
        tree["services"]["reward"]["address"] = [addresses[0], "rewards:1"]
        monkeypatch.setattr(
            module, "endpoints_at", lambda name: [addresses[1], "127.0.0.1:1"] if name == "rewards:1" else [name]
        )
        findings = [each for each in _requirements(Config.model_validate(tree)) if each.where == Role.REWARD]
    assert [(each.level, each.what) for each in findings] == [
        ("ok", f"{addresses[0]} responds"),
        ("ok", f"{addresses[1]} responds"),
        ("error", "no service responds at 127.0.0.1:1; start it"),
    ]
