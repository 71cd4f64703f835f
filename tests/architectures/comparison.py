"""Quartet's loading, scoring, generation and training of one tiny model, compared with plain transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quartet.config.models import LoraConfig
from quartet.contract.arrays import FloatArray
from quartet.contract.generation import SamplingParameters
from quartet.contract.status import Role
from quartet.contract.update import Experience, OptimizationSettings, PolicyLossSettings, ValueLossSettings
from quartet.errors import ModelError
from quartet.models.forward.packing import supports_packing
from quartet.models.forward.scoring import response_log_probs, response_values, sequence_scores
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.hf_logging import suppress_hf_logging
from quartet.models.training.updates import update_policy, update_value
from quartet.models.weights.loading import load_causal_lm, load_critic, load_reward_model, snapshot_model
from quartet.models.weights.lora import add_adapter, matrices_without_adapter
from quartet.models.weights.snapshot import write_model
from quartet.preflight.models import check_model
from tests.architectures import models
from tests.unit.models import tiny
from tests.unit.models.adapters import optimizer_of

TOLERANCE = 1e-5
"""Largest difference: nats of log-probs, values and scores as they are, gradient norms relative to the norm."""
BATCH = tiny.batch([3, 1, 5, 3], [4, 6, 3, 2])
SETTINGS = OptimizationSettings(num_epochs=1, num_mini_batches=1, learning_rate=1e-2, max_grad_norm=1.0, seed=0)
MAX_TOKENS = 256


@dataclass(frozen=True)
class Result:
    """Largest difference of each comparison, by name.

    ``fixed``: parameters of the language model without a gradient. ``refused``: the reason, if the model is refused as a
    policy.
    """

    kind: str
    parameters: int = 0
    packed: bool = False
    without_adapter: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    differences: dict[str, float] | None = None
    refused: str = ""

    @property
    def largest(self) -> float:
        return max((self.differences or {}).values(), default=0.0)


def compare(kind: str, folder: Path) -> Result:
    """Compare a model of this type that works. ``folder`` is empty. Raises any error of Quartet or transformers."""
    plain = models.causal_lm(kind)
    directory = str(_saved(plain, folder / "policy"))
    list(check_model("actor.model", Role.ACTOR, directory, 8))
    policy = load_causal_lm(directory)
    differences = {
        "log-probs": _distance(response_log_probs(policy, BATCH, 1.0, MAX_TOKENS), _plain_log_probs(plain)),
        "generation": _compare_generation(policy, plain),
        "gradient": _compare_gradient(policy, plain),
    }
    names = {name for name, _ in policy.named_parameters() if _computes_text(name)}
    fixed = tuple(name for name, value in plain.named_parameters() if value.grad is None and name in names)
    untrained = {name for name, value in plain.named_parameters() if value.grad is None or not value.grad.any()}
    plain.zero_grad(set_to_none=True)
    left_out = _compare_adapter(kind, directory, folder, untrained, differences)
    _update_critic(load_critic(directory))
    classifier = models.classifier(kind)
    if classifier is not None:
        scorer = str(_saved(classifier, folder / "classifier"))
        hidden = [classifier.base_model(ids, use_cache=False).last_hidden_state[0] for ids in _sequences()]
        outputs = [classifier.score(states)[:, 0].detach().numpy() for states in hidden]
        values = [
            output[prompt - 1 : -1] for output, prompt in zip(outputs, BATCH.prompt_lengths.tolist(), strict=True)
        ]
        scores = np.array([output[-1] for output in outputs])
        differences["values"] = _distance(
            response_values(load_critic(scorer), BATCH, MAX_TOKENS), np.concatenate(values)
        )
        differences["scores"] = _distance(sequence_scores(load_reward_model(scorer), BATCH, MAX_TOKENS), scores)
    size = sum(parameter.numel() for parameter in plain.parameters())
    packed = supports_packing(load_causal_lm(directory))
    return Result(kind, size, packed, left_out, fixed, differences)


def refuse(kind: str, folder: Path) -> Result:
    """Check the config.json of a model type that is refused as a policy. Raises AssertionError if it is accepted."""
    (folder / "config.json").write_text(json.dumps(models.default_config(kind), default=str))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    try:
        list(check_model("actor.model", Role.ACTOR, str(folder), 8))
    except ModelError as error:
        return Result(kind, refused=str(error).removeprefix(f"actor.model {folder}: "))
    raise AssertionError(f"{kind}: accepted, but expected to be refused")


def _saved(model: Any, directory: Path) -> Path:
    with suppress_hf_logging():
        model.save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    return directory


def _computes_text(name: str) -> bool:
    return not any(part in name for part in ("image", "vision", "visual", "audio"))


def _sequences() -> Iterator[torch.Tensor]:
    """Yield the token ids of each sequence of the batch, int64 [1, tokens]."""
    for sequence in BATCH.sequences():
        yield torch.from_numpy(sequence.astype(np.int64))[None]


def _token_log_probs(model: Any, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return the log-probs of the response tokens from one forward pass over one sequence."""
    log_probs = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    return log_probs[prompt - 1 : -1].gather(1, ids[0, prompt:, None])[:, 0]


def _response_log_probs(model: Any) -> torch.Tensor:
    prompts = BATCH.prompt_lengths.tolist()
    return torch.cat([_token_log_probs(model, ids, prompt) for ids, prompt in zip(_sequences(), prompts, strict=True)])


@torch.no_grad()
def _plain_log_probs(model: Any) -> FloatArray:
    return _response_log_probs(model).numpy()


def _distance(one: Any, other: Any) -> float:
    assert one.shape == other.shape
    return float(np.abs(one - other).max())


@torch.no_grad()
def _compare_generation(policy: Any, plain: Any) -> float:
    """Generate greedily with rows that are replaced. Return the largest difference of log-probs.

    Raises AssertionError if a token differs from transformers' generate.
    """
    engine = TorchEngine(policy, frozenset([tiny.EOS]), 3)
    sampling = SamplingParameters(12, temperature=0.0)
    result = 0.0
    for trajectory in engine.trajectories(tiny.requests(6), sampling, 0):
        prompt = torch.from_numpy(trajectory.prompt_ids.astype(np.int64))[None]
        ids = plain.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=tiny.EOS,
            pad_token_id=tiny.EOS,
        )
        expected, tokens = ids[0, prompt.shape[1] :].tolist(), trajectory.response_ids.tolist()
        assert tokens == expected, f"greedy generation gives {tokens}, transformers gives {expected}"
        result = max(result, _distance(trajectory.log_probs, _token_log_probs(plain, ids, prompt.shape[1]).numpy()))
    return result


def _experience() -> Experience:
    generator, tokens = np.random.default_rng(1), int(BATCH.response_lengths.sum())
    noise = {
        name: generator.standard_normal(tokens).astype(np.float32)
        for name in ("log_probs", "reference_log_probs", "values", "advantages", "returns")
    }
    mask, scores = np.ones(tokens, np.float32), np.zeros(len(BATCH), np.float32)
    ids = tuple(f"r/1/{index}/0" for index in range(len(BATCH)))
    return Experience(run="r", step=1, policy_version=0, ids=ids, batch=BATCH, scores=scores, actor_mask=mask, **noise)


def _update(policy: Any) -> dict[str, float]:
    return update_policy(policy, optimizer_of(policy), _experience(), SETTINGS, PolicyLossSettings(), MAX_TOKENS)


def _compare_gradient(policy: Any, plain: Any) -> float:
    """Train the policy for one update. Return the relative difference of its gradient norm. ``plain`` keeps its gradients.

    At a ratio of 1, the gradient of the PPO loss is that of the mean over tokens of -advantage x log-prob.
    """
    log_probs = _response_log_probs(plain)
    loss = -(torch.from_numpy(_experience().advantages) * log_probs).mean()
    loss.backward()
    gradients = [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
    expected = float(torch.stack([gradient.double().norm() for gradient in gradients]).norm())
    before = response_log_probs(policy, BATCH, 1.0, MAX_TOKENS)
    norm = _update(policy)["grad_norm"]
    assert _distance(response_log_probs(policy, BATCH, 1.0, MAX_TOKENS), before) > 1e-3, "the update changes nothing"
    return abs(norm - expected) / expected


def _compare_adapter(
    kind: str, directory: str, folder: Path, untrained: set[str], differences: dict[str, float]
) -> tuple[str, ...]:
    """Train an adapter for one update, and compare the merged export. Return the matrices without an adapter.

    ``untrained``: names of the parameters whose gradient in plain training is 0 or None.
    """
    # torch may multiply with a frozen matrix in another order.
    before = response_log_probs(load_causal_lm(directory).requires_grad_(False), BATCH, 1.0, MAX_TOKENS)
    policy = load_causal_lm(directory)
    adapter = add_adapter(policy, directory, LoraConfig(rank=4, alpha=8.0))
    assert np.array_equal(response_log_probs(policy, BATCH, 1.0, MAX_TOKENS), before), "a new adapter changes outputs"
    _update(policy)
    trained = response_log_probs(policy, BATCH, 1.0, MAX_TOKENS)
    assert _distance(trained, before) > 1e-4, "the update of the adapter changes nothing"
    idle = {
        name.partition(".lora_B.")[0] + ".weight"
        for name, value in policy.named_parameters()
        if ".lora_B." in name and not value.any()
    }
    assert not idle - untrained, f"adapters without an effect: {sorted(idle - untrained)}"
    with adapter.off():
        off = response_log_probs(policy, BATCH, 1.0, MAX_TOKENS)
    assert np.array_equal(off, before), "with its adapter off the policy differs from the reference"
    differences["generation with LoRA"] = _compare_generation(policy, _merged(kind, policy, adapter, folder / "merged"))
    differences["merged LoRA"] = _distance(_plain_log_probs(_merged(kind, policy, adapter, folder / "again")), trained)
    return tuple(name for name in matrices_without_adapter(policy) if _computes_text(name))


def _merged(kind: str, policy: Any, adapter: Any, directory: Path) -> Any:
    """Write the model with its adapter merged, and load it in plain transformers."""
    write_model(directory, snapshot_model(policy, adapter))
    with suppress_hf_logging():
        return models.auto_class(kind).from_pretrained(directory).eval()


def _update_critic(critic: Any) -> None:
    """Train the critic for one update, from values of 0."""
    assert not response_values(critic, BATCH, MAX_TOKENS).any()
    update_value(critic, optimizer_of(critic), _experience(), SETTINGS, ValueLossSettings(value_clip=0.0), MAX_TOKENS)
    assert response_values(critic, BATCH, MAX_TOKENS).any(), "the update of the critic changes nothing"
