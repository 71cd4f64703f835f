"""Log-probs computed in chunks of tokens, compared with one chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quartet.model_files import memory
from quartet.models.forward.batching import build_micro_batch
from quartet.models.forward.log_probs import EntropyUse, forward_log_probs, head_is_separate
from quartet.models.forward.model_capabilities import backbone
from quartet.models.forward.packing import hidden_states
from tests.unit.models import tiny

PROMPTS, RESPONSES = [3, 9, 1, 5], [7, 2, 11, 1]
CHUNK_TOKENS = 4


def outputs_and_gradients(
    model: Any, entropy_use: EntropyUse
) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
    """Return log-probs, entropies, and the gradients of a weighted sum of both."""
    micro_batch = build_micro_batch(tiny.batch(PROMPTS, RESPONSES), range(4), "cpu", packed=True)
    model.zero_grad()
    result, entropies = forward_log_probs(model, micro_batch, 0.7, entropy_use)
    weights = torch.arange(len(result), dtype=torch.float32)
    total = (result * weights).sum()
    if entropy_use == "train":
        assert entropies is not None
        total = total + (entropies * weights.flip(0)).sum()
    total.backward()
    return result, entropies, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("entropy_use", ["none", "report", "train"])
def test_chunked_log_probs_and_gradients_equal_those_of_one_chunk(
    entropy_use: EntropyUse, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.causal(kind)
    expected = outputs_and_gradients(model, entropy_use)
    chunk_sizes: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda _, states, __: chunk_sizes.append(states[0].shape[0]))
    monkeypatch.setattr(memory, "MAX_LOGITS", CHUNK_TOKENS * tiny.VOCABULARY)
    result = outputs_and_gradients(model, entropy_use)
    assert max(chunk_sizes[2:]) == CHUNK_TOKENS, "the first two calls are the trial"
    assert sum(chunk_sizes[2:]) == 2 * sum(RESPONSES), "once in the forward pass and once in the backward pass"
    assert torch.allclose(result[0], expected[0], atol=1e-5)
    assert (result[1] is None) == (expected[1] is None) == (entropy_use == "none")
    if result[1] is not None and expected[1] is not None:
        assert torch.allclose(result[1], expected[1], atol=1e-5)
    assert result[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        assert torch.allclose(result[2][name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max())), name


def test_hidden_states_of_another_type_than_the_head_are_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.causal("mamba2", chunk_size=4).bfloat16()
    batch = build_micro_batch(tiny.batch(PROMPTS, RESPONSES), range(4), "cpu", packed=False)
    assert hidden_states(backbone(model), batch.input_ids).dtype == torch.float32
    assert head_is_separate(model)
    expected, _ = forward_log_probs(model, batch, 0.7)
    monkeypatch.setattr(memory, "MAX_LOGITS", CHUNK_TOKENS * tiny.VOCABULARY)
    result, _ = forward_log_probs(model, batch, 0.7)
    result.sum().backward()
    torch.testing.assert_close(result, expected, rtol=0.01, atol=0.01)


def test_a_model_that_changes_the_logits_after_its_head_is_not_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.causal("llama")
    forward = type(model).forward

    def scaled(self: Any, *arguments: Any, **more: Any) -> Any:
        output = forward(self, *arguments, **more)
        output.logits = output.logits * 2
        return output

    monkeypatch.setattr(type(model), "forward", scaled)
    expected = outputs_and_gradients(model, "none")
    monkeypatch.setattr(memory, "MAX_LOGITS", CHUNK_TOKENS * tiny.VOCABULARY)
    assert torch.equal(outputs_and_gradients(model, "none")[0], expected[0])
