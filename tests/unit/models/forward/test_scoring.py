"""Log-probs, values and scores, compared with plain forward passes of single sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quartet.contract.trajectory import TokenBatch
from quartet.errors import ComputationFailed, InvalidRequest
from quartet.models.forward.batching import build_micro_batch
from quartet.models.forward.scoring import (
    forward_log_probs,
    response_log_probs,
    response_values,
    sequence_scores,
)
from quartet.models.value_head import ValueModel
from tests.unit.models import tiny

PROMPTS, RESPONSES = [3, 1, 7, 4, 2, 9], [5, 8, 1, 6, 2, 11]


@pytest.mark.parametrize("max_tokens", [1, 30, 10_000])
@pytest.mark.parametrize("kind", [*tiny.KINDS, "mistral", "bloom"])
def test_log_probs_agree_with_a_plain_forward_pass(kind: str, max_tokens: int) -> None:
    model, batch = tiny.causal(kind), tiny.batch(PROMPTS, RESPONSES)
    result = response_log_probs(model, batch, 0.7, max_tokens)
    expected = []
    for sequence, prompt in zip(batch.sequences(), PROMPTS, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(sequence[None].astype(np.int64))).logits[0].double() / 0.7
        log_probs = torch.log_softmax(logits, -1)
        expected += [float(log_probs[position - 1, sequence[position]]) for position in range(prompt, len(sequence))]
    assert result.dtype == np.float32
    assert np.allclose(result, expected, atol=1e-5)


def test_vocabulary_logits_are_computed_for_response_tokens_only() -> None:
    model, batch = tiny.causal("llama"), tiny.batch(PROMPTS, RESPONSES)
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda _, __, output: rows.append(output.flatten(0, -2).shape[0]))
    response_log_probs(model, batch, 1.0, 10_000)
    assert rows == [sum(RESPONSES)]


def test_entropy_agrees_with_its_definition_and_has_gradients_only_for_training() -> None:
    model, batch = tiny.causal("llama"), tiny.batch([2], [3])
    micro_batch = build_micro_batch(batch, [0], "cpu")
    log_probs, reported = forward_log_probs(model, micro_batch, 1.3, "report")
    _, trained = forward_log_probs(model, micro_batch, 1.3, "train")
    with torch.no_grad():
        logits = model(input_ids=micro_batch.input_ids).logits[0, 1:4].double() / 1.3
    probabilities = torch.softmax(logits, -1)
    assert reported is not None
    assert trained is not None
    assert torch.allclose(reported.double(), -(probabilities * probabilities.log()).sum(-1), atol=1e-5)
    assert (log_probs.requires_grad, reported.requires_grad, trained.requires_grad) == (True, False, True)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_values_equal_the_classifiers_scores_of_the_prefixes(
    kind: str,
) -> None:
    model, batch = tiny.classifier(kind), tiny.batch(PROMPTS, RESPONSES)
    result = response_values(ValueModel.of_classifier(model), batch, 40)
    expected = []
    for sequence, prompt in zip(batch.sequences(), PROMPTS, strict=True):
        for position in range(prompt, len(sequence)):
            one = (
                TokenBatch(sequence[:position], np.array([position - 1 or 1], np.int32), np.array([1], np.int32))
                if position > 1
                else None
            )
            expected.append(sequence_scores(model, one, 100)[0] if one is not None else np.nan)
    has_value = ~np.isnan(expected)
    assert has_value.sum() >= len(expected) - 1
    assert np.allclose(result[has_value], np.array(expected)[has_value], atol=1e-5)


@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_batched_scores_equal_those_of_separate_sequences(kind: str, max_tokens: int) -> None:
    model, batch = tiny.classifier(kind), tiny.batch(PROMPTS, RESPONSES)
    result = sequence_scores(model, batch, max_tokens)
    expected = []
    for sequence in batch.sequences():
        with torch.no_grad():
            hidden = model.base_model(input_ids=torch.from_numpy(sequence[None].astype(np.int64))).last_hidden_state
            expected.append(float(model.score(hidden)[0, -1, 0]))
    assert np.allclose(result, expected, atol=1e-5)


def test_a_score_is_read_at_the_eos_even_if_it_is_the_pad_token() -> None:
    # The forward method of transformers reads the last token that is not the pad id, which is the token before the EOS.
    model = tiny.classifier("llama", pad_token_id=tiny.EOS)
    ids = np.array([5, 6, 7, tiny.EOS, 5, 6, 7, 8, 9, 10], np.int32)
    batch = TokenBatch(ids, np.array([2, 2], np.int32), np.array([2, 4], np.int32))
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([[5, 6, 7, tiny.EOS]])).last_hidden_state
        at_eos, before = model.score(hidden)[0, 3, 0], model.score(hidden)[0, 2, 0]
        transformers_score = model(input_ids=torch.tensor([[5, 6, 7, tiny.EOS]])).logits[0, 0]
    assert torch.isclose(transformers_score, before)
    assert not torch.isclose(at_eos, before)
    assert sequence_scores(model, batch, 100)[0] == pytest.approx(float(at_eos), abs=1e-5)


def test_scores_need_no_pad_token() -> None:
    model = tiny.classifier("gpt2", pad_token_id=None)
    assert sequence_scores(model, tiny.batch([2, 3], [4, 1]), 100).shape == (2,)


def test_an_encoder_classifier_reads_whole_sequences_without_padding() -> None:
    model, batch = tiny.classifier("bert", pad_token_id=0), tiny.batch(PROMPTS, RESPONSES)
    with torch.no_grad():
        expected = [
            float(model(input_ids=torch.from_numpy(sequence[None].astype(np.int64))).logits)
            for sequence in batch.sequences()
        ]
    assert np.allclose(sequence_scores(model, batch, 40), expected, atol=1e-5)


def test_non_finite_results_are_an_error() -> None:
    batch = tiny.batch([2], [3])
    model, classifier = tiny.causal("llama"), tiny.classifier("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
        classifier.score.weight[0, 0] = torch.nan
    with pytest.raises(ComputationFailed, match="3 of 3 log-probs"):
        response_log_probs(model, batch, 1.0, 100)
    with pytest.raises(ComputationFailed, match="1 of 1 scores"):
        sequence_scores(classifier, batch, 100)
    with pytest.raises(ComputationFailed, match="3 of 3 values"):
        response_values(ValueModel.of_classifier(classifier), batch, 100)


def test_tokens_and_lengths_outside_the_model_are_refused() -> None:
    invalid = TokenBatch(np.array([3, tiny.VOCABULARY], np.int32), np.array([1], np.int32), np.array([1], np.int32))
    for model in (tiny.causal("gpt2"), tiny.classifier("gpt2")):
        compute = sequence_scores if model.config.num_labels == 1 else lambda m, b, n: response_log_probs(m, b, 1.0, n)
        with pytest.raises(InvalidRequest, match="expected ids in"):
            compute(model, invalid, 100)
        with pytest.raises(InvalidRequest, match="65 tokens: the model has positions for 64"):
            compute(model, tiny.batch([60], [5]), 100)
        compute(model, tiny.batch([60], [4]), 100)
    with pytest.raises(InvalidRequest, match="expected ids in"):
        response_values(ValueModel.of_causal_lm(tiny.causal("gpt2")), invalid, 100)
