"""Results of the services against a forward pass of transformers over one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.contract.trajectory import TokenBatch
from quartet.errors import FailedPrecondition
from tests.services.model_services import Services
from tests.unit.models import tiny

BATCH = tiny.batch([3, 1, 9, 2, 5], [4, 7, 1, 12, 6], seed=5)


def plain_log_probs(directory: Path, batch: TokenBatch, temperature: float) -> np.ndarray:
    """Return the log-softmax at each response token in float64, from one sequence at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    results = []
    for sequence, prompt in zip(batch.sequences(), batch.prompt_lengths, strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(sequence.astype(np.int64))[None]).logits[0].double()
        log_probs = torch.log_softmax(logits / temperature, -1)
        results += [float(log_probs[index - 1, sequence[index]]) for index in range(prompt, len(sequence))]
    return np.array(results)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_actor_log_probs_match_a_plain_forward_pass(
    kind: str, services: Services, make_config: Callable[..., Config], checkpoints: dict[str, Path]
) -> None:
    actor = services.start(Role.ACTOR, make_config(actor=kind))
    for temperature in (1.0, 0.7):
        result = actor.log_probs(BATCH, temperature)
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, plain_log_probs(checkpoints[kind], BATCH, temperature), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_reference_log_probs_match_a_plain_forward_pass(
    kind: str, services: Services, make_config: Callable[..., Config], checkpoints: dict[str, Path]
) -> None:
    reference = services.start(Role.REFERENCE, make_config(reference={"model": str(checkpoints[kind])}))
    result = reference.log_probs(BATCH, 1.3).result()
    np.testing.assert_allclose(result, plain_log_probs(checkpoints[kind], BATCH, 1.3), atol=1e-5, rtol=0)


def test_log_probs_of_another_policy_version_than_the_expected_are_refused(clients: dict[Role, Any]) -> None:
    actor = clients[Role.ACTOR]
    np.testing.assert_array_equal(actor.log_probs_of_version(BATCH, 1.0, 0).result(), actor.log_probs(BATCH, 1.0))
    with pytest.raises(FailedPrecondition, match="LogProbs: the policy is version 0, expected 3"):
        actor.log_probs_of_version(BATCH, 1.0, 3).result()


def test_scores_match_the_classifier_output_at_the_last_token(
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


def test_values_match_the_head_output_before_each_response_token(
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


def test_a_new_critic_from_a_causal_lm_returns_0_for_all_values(
    services: Services, make_config: Callable[..., Config]
) -> None:
    critic = services.start(Role.CRITIC, make_config(critic="llama"))
    assert critic.values(BATCH).result().tolist() == [0.0] * 30


@pytest.mark.parametrize("role", [Role.ACTOR, Role.REFERENCE])
def test_log_probs_do_not_depend_on_other_sequences_of_the_batch(role: Role, clients: dict[Role, Any]) -> None:
    def log_probs(batch: TokenBatch) -> np.ndarray:
        result = clients[role].log_probs(batch, 1.0)
        return result if role is Role.ACTOR else result.result()

    batched = np.split(log_probs(BATCH), np.cumsum(BATCH.response_lengths)[:-1])
    columns = zip(BATCH.sequences(), BATCH.prompt_lengths, BATCH.response_lengths, strict=True)
    for expected, (sequence, prompt, response) in zip(batched, columns, strict=True):
        single = TokenBatch(sequence, np.array([prompt], np.int32), np.array([response], np.int32))
        np.testing.assert_allclose(log_probs(single), expected, atol=2e-6, rtol=0)
