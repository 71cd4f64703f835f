"""The trial of batch invariance: what the torch engine declares, and what the declaration says about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config.models import LoraConfig
from quartet.models.generation import trial as module
from quartet.models.generation.machine_trial import try_model, try_small_model
from quartet.models.generation.static_decoding import StaticDecoder
from quartet.models.generation.torch_engine import DetachedTorchEngine, TorchEngine
from quartet.models.torch_settings import torch_threads
from quartet.system.failpoints import FOLDER_VARIABLE, VARIABLE, arm
from tests.unit.models import tiny

STOPS = frozenset({tiny.EOS})


@pytest.fixture(scope="module", autouse=True)
def _measured_once() -> None:
    """Let each engine and each model have its own trials."""


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[None]:
    """Make the next trial fail."""
    arm({VARIABLE: "engine.trial=fail", FOLDER_VARIABLE: str(tmp_path)})
    yield
    arm({})


def test_a_trial_that_fails_is_declared_with_the_processor(failing: None) -> None:
    model = tiny.causal("llama")
    with torch_threads(1):
        declared = DetachedTorchEngine(model, None, STOPS, 8).properties
        assert declared.trial == f"failed on {module.processor()}"
    assert torch.backends.cpu.get_cpu_capability() in declared.trial
    assert not declared.batch_invariant
    # The failpoint fires once.
    assert TorchEngine(model, STOPS, 8).properties.trial_digest == declared.trial_digest


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mixtral", "not run: the model is a mixture of experts"),
        ("lfm2", "not run: the model keeps states"),
        ("bloom", "not run: decodes without static buffers: attention with a window or an index, positions"),
    ],
)
def test_a_model_that_cannot_be_batch_invariant_is_declared_with_the_reason(kind: str, reason: str) -> None:
    declared = TorchEngine(tiny.causal(kind), STOPS, 8).properties
    assert not declared.batch_invariant
    assert declared.trial.startswith(reason)
    assert declared.trial_digest == ""


def test_the_digest_is_that_of_the_weights_and_not_of_the_limit_of_sequences() -> None:
    digests = [TorchEngine(tiny.causal("llama"), STOPS, limit).properties.trial_digest for limit in (4, 64)]
    assert digests[0] == digests[1] != ""
    assert TorchEngine(tiny.causal("llama", seed=1), STOPS, 4).properties.trial_digest != digests[0]


def test_a_difference_that_log_probs_round_away_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    # The log-probs of small logits are near -log(vocabulary), whose last bit is larger than those of the logits.
    logits = StaticDecoder.logits

    def depends_on_the_batch(decoder: Any, chosen: torch.Tensor) -> torch.Tensor:
        result = logits(decoder, chosen)
        return result * (1 + 2.0**-22) if len(result) > 8 else result

    monkeypatch.setattr(StaticDecoder, "logits", depends_on_the_batch)
    assert not TorchEngine(tiny.causal("llama", initializer_range=1e-4), STOPS, 64).batch_invariant


def test_limits_of_the_instruction_set_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in module.LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MKL_CBWR", "AVX2,STRICT")
    with torch_threads(1):
        assert module.processor().endswith(", 1 thread, MKL_CBWR=AVX2,STRICT")


def test_a_machine_without_a_list_of_processors_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "CPU_INFO", tmp_path / "absent")
    assert not module.processor().startswith(",")


def test_the_trial_of_a_checkpoint_is_that_of_its_engine(tmp_path: Path) -> None:
    model = tiny.causal("llama")
    folder = str(tiny.saved(model, tmp_path / "m"))
    threads = torch.get_num_threads()
    tried = try_model(folder, "float32", None, False, 8, threads)
    assert tried == TorchEngine(model, frozenset(), 8).properties
    assert try_model(folder, "float32", LoraConfig(rank=2, alpha=4.0), True, 8, threads).trial_digest != ""


def test_the_small_model_of_the_doctor_has_a_result() -> None:
    assert try_small_model(1).trial.split(" ")[0] in ("passed", "failed")
