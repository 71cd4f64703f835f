"""Packed sequences, compared with separate ones: the same outputs and gradients, without pads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quartet.contract.trajectory import TokenBatch
from quartet.errors import ModelError
from quartet.models.forward import packing as packing_module
from quartet.models.forward.batching import build_micro_batch, micro_batches
from quartet.models.forward.log_probs import forward_log_probs
from quartet.models.forward.packing import ATTENTION_NAME, Packing, hidden_states, supports_packing
from quartet.models.forward.scoring import response_log_probs
from quartet.models.value_head import ValueModel
from quartet.models.workers.shares import share_of
from quartet.models.workers.workers import SINGLE
from tests.unit.models import tiny

PROMPTS, RESPONSES = [3, 9, 1, 5], [7, 2, 11, 1]


@pytest.fixture(scope="module", autouse=True)
def _measured_once() -> None:
    """Let each engine and each model have its own trials."""


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_packed_log_probs_equal_those_of_separate_sequences(kind: str) -> None:
    model, batch = tiny.causal(kind), tiny.batch(PROMPTS, RESPONSES)
    assert supports_packing(model)
    assert model.config._attn_implementation == "sdpa", "the attention must be restored"
    [together] = share_of(SINGLE, model, batch, 1000).micro_batches
    assert tuple(together.input_ids.shape) == (1, sum(PROMPTS) + sum(RESPONSES) - 4)
    expected = np.concatenate(
        [response_log_probs(model, one, 0.7, 1000) for one in separate_batches(PROMPTS, RESPONSES, batch)]
    )
    result = torch.empty(sum(RESPONSES))
    with torch.no_grad():
        result[together.token_indices] = forward_log_probs(model, together, 0.7)[0]
    assert np.allclose(result.numpy(), expected, atol=1e-5)


def separate_batches(prompts: list[int], responses: list[int], batch: Any) -> list[Any]:
    """Return each sequence as a separate batch."""
    ids = batch.sequences()
    return [
        type(batch)(sequence, np.array([prompt], np.int32), np.array([response], np.int32))
        for sequence, prompt, response in zip(ids, prompts, responses, strict=True)
    ]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gradients_equal_those_of_padded_sequences(kind: str) -> None:
    batch, result = tiny.batch(PROMPTS, RESPONSES), {}
    for packed in (False, True):
        model = tiny.causal(kind)
        micro_batch = build_micro_batch(batch, range(len(batch)), "cpu", packed)
        log_probs, _ = forward_log_probs(model, micro_batch, 1.0)
        (log_probs * torch.arange(len(log_probs))).sum().backward()
        result[packed] = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in result[False].items():
        assert torch.allclose(result[True][name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max())), name


def test_a_value_model_supports_packing_if_its_backbone_does() -> None:
    critic = ValueModel.of_causal_lm(tiny.causal("llama"))
    torch.nn.init.normal_(critic.head.weight)
    batch = tiny.batch(PROMPTS, RESPONSES)
    assert supports_packing(critic)
    values = {}
    for packed in (False, True):
        micro_batch = build_micro_batch(batch, range(len(batch)), "cpu", packed)
        values[packed] = critic(micro_batch.input_ids, micro_batch.predicts, micro_batch.packing)
    assert torch.allclose(values[True], values[False], atol=1e-5)


@pytest.mark.parametrize("kind", ["mistral", "bloom"])
def test_models_with_sliding_windows_or_alibi_are_padded(kind: str) -> None:
    model = tiny.causal(kind)
    assert not supports_packing(model)
    [micro_batch] = share_of(SINGLE, model, tiny.batch(PROMPTS, RESPONSES), 1000).micro_batches
    assert micro_batch.packing is None
    assert tuple(micro_batch.input_ids.shape) == (4, 11)


def test_a_model_with_different_packed_outputs_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.causal("llama")
    forward = packing_module._attention

    def rolled(*arguments: Any, packing: Any, **more: Any) -> Any:
        output, weights = forward(*arguments, packing=packing, **more)
        return output.roll(1, 1), weights

    monkeypatch.setitem(packing_module.AttentionInterface._global_mapping, ATTENTION_NAME, rolled)
    assert not supports_packing(model)


def test_the_attention_of_a_model_is_restored_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.causal("llama")

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setitem(packing_module.AttentionInterface._global_mapping, ATTENTION_NAME, fail)
    batch = build_micro_batch(tiny.batch(PROMPTS, RESPONSES), range(4), "cpu", packed=True)
    with pytest.raises(RuntimeError, match="no memory"):
        hidden_states(model.base_model, batch.input_ids, batch.packing)
    assert model.config._attn_implementation == "sdpa"


def test_sequences_of_similar_length_share_an_attention_block() -> None:
    ends = np.cumsum([10, 6, 5, 3, 1])
    packing = Packing.of([np.arange(end - size, end) for end, size in zip(ends, [10, 6, 5, 3, 1], strict=True)], "cpu")
    assert packing.blocks == ((2, 10), (2, 5), (1, 1))
    assert packing.token_indices.tolist() == [*range(16), *range(20, 28), 30]
    assert packing.sources.tolist()[20:28] == [16, 17, 18, 19, 20, 21, 22, 23]
    assert packing.position_ids[0, 14:18].tolist() == [4, 5, 0, 1]


def samples_of(prompts: list[int], lengths: list[list[int]]) -> TokenBatch:
    """Return a batch with several responses per prompt. ``prompts`` are prompt lengths, ``lengths`` the responses' lengths."""
    generator, sequences, sizes = np.random.default_rng(0), [], []
    for prompt, responses in zip(prompts, lengths, strict=True):
        prompt_ids = generator.integers(3, 30, prompt)
        for response in responses:
            sequences += [prompt_ids, generator.integers(3, 30, response)]
            sizes.append((prompt, response))
    flat = np.concatenate(sequences).astype(np.int32)
    return TokenBatch(flat, *(np.array(column, np.int32) for column in zip(*sizes, strict=True)))


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize(
    ("prompts", "responses"),
    # The second batch predicts as many tokens as it has. The third has responses of one token.
    [([7, 4], [[3, 9, 1], [6, 2]]), ([3], [[2, 5, 4]]), ([5], [[1, 1]])],
)
def test_a_shared_prompt_is_computed_once_with_equal_outputs_and_gradients(
    kind: str, prompts: list[int], responses: list[list[int]]
) -> None:
    model, batch = tiny.causal(kind), samples_of(prompts, responses)
    [together] = share_of(SINGLE, model, batch, 1000).micro_batches
    assert together.input_ids.numel() == sum(prompts) + sum(map(sum, responses)) - len(batch)
    result, gradients = {}, {}
    for packed in (False, True):
        model.zero_grad()
        micro_batch = together if packed else build_micro_batch(batch, together.rows, "cpu")
        log_probs, _ = forward_log_probs(model, micro_batch, 0.7)
        (log_probs * torch.arange(len(log_probs))).sum().backward()
        result[packed] = log_probs.detach()
        gradients[packed] = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert torch.allclose(result[True], result[False], atol=1e-5)
    for name, gradient in gradients[False].items():
        assert torch.allclose(gradients[True][name], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max())), name


def test_samples_of_a_prompt_share_a_micro_batch_if_they_fit() -> None:
    lengths, prompts = [9, 3, 8, 2, 7, 1], [0, 0, 1, 1, 2, 2]
    assert micro_batches(lengths, 12, packed=True, prompts=prompts) == [[0, 1], [2, 3], [4, 5]]
    assert micro_batches(lengths, 12, packed=True) == [[0], [2], [4, 1, 3], [5]]
    assert micro_batches(lengths, 20, packed=True, prompts=prompts) == [[0, 2, 1], [4, 3, 5]]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "mamba2", "minimax"])
def test_models_that_keep_states_are_padded(kind: str) -> None:
    assert not supports_packing(tiny.causal(kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_attends_to_later_tokens_is_refused(dtype: torch.dtype) -> None:
    model = tiny.causal("bert", initializer_range=0.5).to(dtype)
    with pytest.raises(
        ModelError, match=r"^BertModel: the hidden states of a sequence differ by .* pads after it; give"
    ):
        supports_packing(model)


def test_other_experts_for_one_token_in_half_precision_are_no_attention_to_later_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_another_expert(base: Any, input_ids: torch.Tensor, packing: Packing | None = None) -> torch.Tensor:
        states = hidden_states(base, input_ids, packing)
        if len(input_ids) > 1:
            states[1, 2] += states.abs().max()
        return states

    monkeypatch.setattr(packing_module, "hidden_states", with_another_expert)
    supports_packing(tiny.causal("mixtral").to(torch.bfloat16))
