"""Arguments that the engine vllm gives to vLLM for speculative decoding and penalties, without vLLM."""

from __future__ import annotations

import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quartet.config.rollout import SpeculativeDecodingConfig
from quartet.contract.generation import GenerationRequest, Penalties, SamplingParameters
from quartet.contract.trajectory import TrajectoryId
from quartet.engines import vllm as engine_module
from quartet.engines import vllm_library
from quartet.engines.engine import ServedModel
from quartet.engines.vllm import VLLMEngine, create
from quartet.engines.vllm_library import Library
from quartet.errors import ConfigError
from tests.unit.config.test_engines import config
from tests.unit.models import tiny

SPECULATIVE: dict[str, Any] = {"num_speculative_tokens": 4}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace vLLM by classes that keep their arguments. Return those of the engine's start."""
    arguments: dict[str, Any] = {}
    library = Library(None, make_dataclass("EngineArgs", []), lambda **given: given, None)
    monkeypatch.setattr(engine_module, "import_vllm", lambda: library)
    for module in (engine_module, vllm_library):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    process = SimpleNamespace(start=arguments.update, close=lambda: None)
    monkeypatch.setattr(engine_module, "VLLMProcess", lambda library: process)
    sampling_params = ModuleType("vllm.sampling_params")
    sampling_params.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling_params)
    return arguments


def engine_of(folder: Path, speculative: dict[str, Any] | None) -> VLLMEngine:
    tiny.causal("llama").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    settings = config("vllm", rollout={"generators": 1, "vllm": {"speculative": speculative}})
    actor = settings.actor.model_copy(update={"model": str(folder)})
    engine, model = create(settings.model_copy(update={"actor": actor}))
    assert isinstance(engine, VLLMEngine)
    assert isinstance(model, ServedModel)
    return engine


@pytest.mark.parametrize(
    ("speculative", "expected"),
    [
        (None, None),
        (SPECULATIVE, {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 5}),
        (
            {**SPECULATIVE, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
            {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        ),
        (
            {**SPECULATIVE, "draft_model": "small"},
            {"method": "draft_model", "model": "small", "draft_load_config": {"load_format": "safetensors"}},
        ),
    ],
)
def test_vllm_starts_with_the_speculative_config(
    speculative: dict[str, Any] | None, expected: dict[str, Any] | None, started: dict[str, Any], tmp_path: Path
) -> None:
    engine = engine_of(tmp_path, speculative)
    engine._start(None)
    engine.close()
    wanted = None if expected is None else {**SPECULATIVE, **expected}
    assert started.get("speculative_config") == wanted
    # The policy's weights arrive later in any case.
    assert (started["model"], started["load_format"]) == (str(tmp_path), "dummy")


def test_a_cpu_speculates_for_greedy_responses_only(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = engine_of(tmp_path, SPECULATIVE)
    monkeypatch.setattr(vllm_library, "on_cpu", lambda: True)
    engine._salt = "loaded"
    greedy, sampled = (
        GenerationRequest(TrajectoryId("r", 1, 0, i), np.array([5], np.int32), greedy=i == 0) for i in range(2)
    )
    engine.generate([greedy], SamplingParameters(8), 0, lambda: False)
    message = (
        r"rollout\.vllm\.speculative: at temperature 1, vLLM on a CPU draws drafted tokens from another distribution"
    )
    with pytest.raises(ConfigError, match=message):
        engine.generate([greedy, sampled], SamplingParameters(8), 0, lambda: False)
    engine.close()
    with pytest.raises(ConfigError, match=message):
        engine_of(tmp_path, SPECULATIVE)
    engine_of(tmp_path, None).close()


def test_vllm_gets_the_penalties(started: dict[str, Any], tmp_path: Path) -> None:
    engine = engine_of(tmp_path, None)
    request = GenerationRequest(TrajectoryId("r", 1, 0, 0), np.array([5, 6], np.int32), greedy=True)
    penalties = Penalties(1.1, 0.5, -0.25)
    sent = engine._parameters(request, SamplingParameters(8, penalties=penalties), 0)
    assert {name: value for name, value in sent.items() if name.endswith("penalty")} == {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
    }
    assert not any(name.endswith("penalty") for name in engine._parameters(request, SamplingParameters(8), 0))
    engine.close()


def test_the_config_refuses_unknown_methods() -> None:
    with pytest.raises(ValueError, match="method"):
        SpeculativeDecodingConfig(num_speculative_tokens=2, method="eagle")  # type: ignore[call-arg]
