"""Results of the services, compared with a plain forward pass of transformers in padded batches of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quartet.config import Config
from quartet.types import Role, TokenBatch
from tests.services.model_services import Services
from tests.unit.models import tiny

BATCH = tiny.batch([3, 1, 9, 2, 5], [4, 7, 1, 12, 6], seed=5)


def plain_log_probs(directory: Path, batch: TokenBatch, temperature: float) -> np.ndarray:
    """One sequence at a time: the log-softmax of the logits before each response token, in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    results = []
    for sequence, prompt in zip(batch.sequences(), batch.prompt_lengths, strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(sequence.astype(np.int64))[None]).logits[0].double()
        log_probs = torch.log_softmax(logits / temperature, -1)
        results += [float(log_probs[place - 1, sequence[place]]) for place in range(prompt, len(sequence))]
    return np.array(results)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_actors_log_probs_are_those_of_a_plain_forward(
    kind: str, temperature: float, services: Services, make_config: Callable[..., Config], checkpoints: dict[str, Path]
) -> None:
    actor = services.start(Role.ACTOR, make_config(actor=kind))
    result = actor.log_probs(BATCH, temperature)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, plain_log_probs(checkpoints[kind], BATCH, temperature), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_the_references_log_probs_are_those_of_a_plain_forward(
    kind: str, services: Services, make_config: Callable[..., Config], checkpoints: dict[str, Path]
) -> None:
    reference = services.start(Role.REFERENCE, make_config(reference={"model": str(checkpoints[kind])}))
    result = reference.log_probs(BATCH, 1.3).result()
    np.testing.assert_allclose(result, plain_log_probs(checkpoints[kind], BATCH, 1.3), atol=1e-5, rtol=0)


def test_scores_are_the_classifiers_output_at_the_last_token(
    clients: dict[Role, Any], checkpoints: dict[str, Path]
) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoints["reward"]).eval()
    expected = []
    for sequence in BATCH.sequences():
        with torch.no_grad():
            hidden = model.model(torch.from_numpy(sequence.astype(np.int64))[None]).last_hidden_state
            expected.append(float(model.score(hidden[0, -1])))
    result = clients[Role.REWARD].score(BATCH).result().total
    np.testing.assert_allclose(result, expected, atol=1e-5, rtol=0)


def test_values_are_the_heads_output_before_each_response_token(
    clients: dict[Role, Any], checkpoints: dict[str, Path]
) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoints["reward"]).eval()
    expected = []
    for sequence, prompt in zip(BATCH.sequences(), BATCH.prompt_lengths, strict=True):
        with torch.no_grad():
            hidden = model.model(torch.from_numpy(sequence.astype(np.int64))[None]).last_hidden_state[0]
            expected += model.score(hidden[prompt - 1 : len(sequence) - 1]).squeeze(1).tolist()
    result = clients[Role.CRITIC].values(BATCH).result()
    np.testing.assert_allclose(result, expected, atol=1e-5, rtol=0)


def test_a_critic_from_a_causal_lm_values_everything_at_0(
    services: Services, make_config: Callable[..., Config]
) -> None:
    critic = services.start(Role.CRITIC, make_config(critic="llama"))
    assert critic.values(BATCH).result().tolist() == [0.0] * 30


@pytest.mark.parametrize("role", [Role.ACTOR, Role.REFERENCE])
def test_an_answer_does_not_depend_on_its_neighbours(role: Role, clients: dict[Role, Any]) -> None:
    def log_probs(batch: TokenBatch) -> np.ndarray:
        result = clients[role].log_probs(batch, 1.0)
        return result if role is Role.ACTOR else result.result()

    together = np.split(log_probs(BATCH), np.cumsum(BATCH.response_lengths)[:-1])
    columns = zip(BATCH.sequences(), BATCH.prompt_lengths, BATCH.response_lengths, strict=True)
    for expected, (sequence, prompt, response) in zip(together, columns, strict=True):
        single = TokenBatch(sequence, np.array([prompt], np.int32), np.array([response], np.int32))
        np.testing.assert_allclose(log_probs(single), expected, atol=2e-6, rtol=0)
