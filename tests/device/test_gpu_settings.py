"""Determinism on a GPU: off while decoding, strict in updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quartet.contract.generation import SamplingParameters
from quartet.errors import ModelError
from quartet.models.generation.sampling import BLOCK, sample_tokens
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.torch_settings import deterministic_update
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy
from tests.device.conftest import on_gpu
from tests.device.pretended_gpu import PretendedGpu
from tests.unit.models import tiny
from tests.unit.models.updates import LOSS, experience, settings


@pytest.mark.parametrize("static", [True, False])
def test_decoding_writes_the_cache_without_sorting_indices(gpu: PretendedGpu, static: bool) -> None:
    tiny.generated(TorchEngine(on_gpu(tiny.causal("llama")), frozenset(), 7, static=static), tiny.requests(20))
    assert gpu.sorting_kernels == 0
    torch.set_deterministic_debug_mode("warn")
    tiny.generated(TorchEngine(on_gpu(tiny.causal("llama")), frozenset(), 7, static=static), tiny.requests(20))
    assert gpu.sorting_kernels > 0


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_an_update_has_a_deterministic_kernel_for_every_operation(gpu: PretendedGpu, kind: str) -> None:
    model = tiny.causal(kind)
    data, there = experience(model), on_gpu(model)
    optimizer = create_optimizer(there, 0.01)
    gpu.modes.clear()
    with deterministic_update("cuda:0", "actor"):
        update_policy(there, optimizer, data, settings(), LOSS, 16)
    assert gpu.modes == {2}
    assert torch.get_deterministic_debug_mode() == 0


def test_a_model_without_deterministic_kernels_is_named_with_the_setting_that_helps(gpu: PretendedGpu) -> None:
    values = torch.ones(3, device="cuda:0")
    message = r"^critic: .*cumsum.*; set critic.deterministic_updates false"
    with pytest.raises(ModelError, match=message), deterministic_update("cuda:0", "critic"):
        values.cumsum(0)
    assert torch.get_deterministic_debug_mode() == 0
    with deterministic_update("cuda:0", "critic", on=False):
        values.cumsum(0)


def test_other_errors_of_an_update_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="another"), deterministic_update("cuda:0", "critic"):
        raise RuntimeError("another")


def test_an_update_on_a_cpu_keeps_the_mode_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[Any] = []
    monkeypatch.setattr(torch, "set_deterministic_debug_mode", changes.append)
    with deterministic_update("cpu", "actor"):
        pass
    assert not changes


def test_a_process_with_a_gpu_does_not_use_the_attention_of_cudnn(gpu: PretendedGpu) -> None:
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 50, "top_p": 0.9}, {"min_p": 0.001}])
def test_sampling_from_a_large_vocabulary_adds_up_short_rows(gpu: PretendedGpu, options: dict[str, Any]) -> None:
    vocabulary = 151_936
    logits = 3 * torch.randn((4, vocabulary), generator=torch.Generator().manual_seed(0))
    numbers = torch.rand((4, 1), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sampling = SamplingParameters(1, **options)
    tokens, log_probs = sample_tokens(logits.to("cuda:0"), numbers.to("cuda:0"), sampling)
    expected, expected_log_probs = sample_tokens(logits, numbers, sampling)
    assert tokens.tolist() == expected.tolist()
    assert log_probs.tolist() == pytest.approx(expected_log_probs.tolist(), abs=1e-6)
    if "top_p" not in options:  # Which sorts all of them anyway.
        assert gpu.longest_scan <= vocabulary / BLOCK
