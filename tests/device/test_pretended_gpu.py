"""The GPU path on the pretended GPU: decoding, updates and scoring of four families give the results of the CPU.

In half precision a GPU has another kernel of attention, so here it is turned off: ``test_gpu_attention.py`` compares the two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quartet.contract.trajectory import Trajectory
from quartet.contract.update import ValueLossSettings
from quartet.models.forward import gpu_attention
from quartet.models.forward.scoring import response_log_probs, response_values, sequence_scores
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy, update_value
from quartet.models.value_head import ValueModel
from quartet.system.compute_environment import is_intel
from tests.device.conftest import on_gpu
from tests.device.pretended_gpu import DeviceError, Graph, PretendedGpu, to_host
from tests.unit.models import tiny
from tests.unit.models.updates import LOSS, experience, settings

STOPS = frozenset({tiny.EOS, 7, 9})
DTYPES = [torch.float32, torch.bfloat16]


def tokens(result: list[Trajectory]) -> list[list[int]]:
    return [trajectory.response_ids.tolist() for trajectory in result]


def log_probs(result: list[Trajectory]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.concatenate([trajectory.log_probs for trajectory in result])


@pytest.mark.parametrize(
    ("kind", "static"), [("gpt2", True), ("llama", False), pytest.param("qwen2", True, marks=pytest.mark.slow)]
)
def test_decoding_draws_the_tokens_of_the_cpu(gpu: PretendedGpu, kind: str, static: bool) -> None:
    model, requests = tiny.causal(kind), tiny.requests(12)
    expected = tiny.generated(TorchEngine(model, STOPS, 7, static=static), requests, temperature=0.8)
    engine = TorchEngine(on_gpu(model), STOPS, 7, static=static)
    for _ in range(2):
        result = tiny.generated(engine, requests, temperature=0.8)
        assert tokens(result) == tokens(expected)
        assert np.allclose(log_probs(result), log_probs(expected), atol=1e-5)
    assert bool(sum(graph.replays for graph in gpu.captures)) == static


# The slow kinds differ from the others in their layers, and not in what an update or a score does with a device.
QUICK = ("llama", "gpt2")
EVERY_KIND = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in tiny.KINDS]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_policy_updates_end_with_the_weights_of_the_cpu(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(gpu_attention, "HALF_PRECISION", ())
    model = tiny.causal(kind).to(dtype)
    data, there = experience(model), on_gpu(model)
    expected = update_policy(model, create_optimizer(model, 0.01), data, settings(), LOSS, 1000)
    result = update_policy(there, create_optimizer(there, 0.01), data, settings(), LOSS, 1000)
    # Equal on Intel. Elsewhere a float32 matmul rounds by the place of its tensors, which large steps of the optimizer amplify.
    assert result == pytest.approx(expected, rel=1e-6 if is_intel() else 1e-4)
    assert_same_weights(there, model)


@pytest.mark.parametrize(("kind", "dtype"), [*zip(("gpt2", "llama"), DTYPES, strict=True)])
def test_value_updates_end_with_the_weights_of_the_cpu(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(gpu_attention, "HALF_PRECISION", ())
    model = ValueModel.of_causal_lm(tiny.causal(kind).to(dtype))
    data, there = experience(None), on_gpu(model)
    loss = ValueLossSettings(value_clip=0.2)
    expected = update_value(model, create_optimizer(model, 0.01), data, settings(), loss, 1000)
    result = update_value(there, create_optimizer(there, 0.01), data, settings(), loss, 1000)
    assert result == pytest.approx(expected, rel=1e-6)
    assert_same_weights(there, model)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_scores_are_those_of_the_cpu(gpu: PretendedGpu, kind: str) -> None:
    batch = tiny.batch([3, 1, 6, 4], [5, 8, 1, 6])
    policy, reward = tiny.causal(kind), tiny.classifier(kind)
    value = ValueModel.of_classifier(tiny.classifier(kind, seed=1))
    assert np.array_equal(
        response_log_probs(on_gpu(policy), batch, 0.8, 16), response_log_probs(policy, batch, 0.8, 16)
    )
    assert np.array_equal(response_values(on_gpu(value), batch, 16), response_values(value, batch, 16))
    assert np.array_equal(sequence_scores(on_gpu(reward), batch, 16), sequence_scores(reward, batch, 16))


def assert_same_weights(there: Any, here: Any) -> None:
    weights = to_host(there)
    for name, value in here.state_dict().items():
        # Equal on Intel. Elsewhere a float32 matmul rounds by the place of its tensors.
        tolerance = 0.0 if is_intel() or value.dtype != torch.float32 else 1e-4
        torch.testing.assert_close(weights[name], value, rtol=0, atol=tolerance)


def test_tensors_of_two_devices_are_refused(gpu: PretendedGpu) -> None:
    with pytest.raises(DeviceError, match="same device"):
        torch.ones(3, device="cuda:0") + torch.ones(3)
    with pytest.raises(DeviceError, match="numpy"):
        torch.ones(3, device="cuda:0").numpy()
    assert (torch.ones(3, device="cuda:0") + torch.tensor(1.0)).tolist() == [2, 2, 2]


def test_a_capture_refuses_reads_by_the_host_and_replays_on_the_same_memory(gpu: PretendedGpu) -> None:
    data, graph = torch.ones(3, device="cuda:0"), Graph()
    with gpu.capture(graph):
        doubled = 2 * data[1:]
    data += 4
    graph.replay()
    assert doubled.tolist() == [10, 10]
    with pytest.raises(DeviceError, match="not permitted when stream is capturing"), gpu.capture(graph):
        float(data.sum())
