"""New weights for the detached torch engine in the middle of its responses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quartet.contract.generation import SamplingParameters
from quartet.contract.trajectory import VersionSpan
from quartet.engines.engine import EngineResponse
from quartet.models.generation.torch_engine import DetachedTorchEngine
from quartet.weight_transfer.tensors import WeightSet
from tests.unit.models import tiny
from tests.unit.models.adapters import adapted, learn, weight_set
from tests.waiting import LIMIT, wait_until

TOKENS = 12
SAMPLING = SamplingParameters(TOKENS, temperature=0.0, ignore_eos=True)


class Poll:
    """A caller that loads weights before some steps."""

    def __init__(self, engine: DetachedTorchEngine, loads: dict[int, WeightSet]) -> None:
        self._engine, self._loads, self._steps = engine, loads, 0

    def __call__(self) -> bool:
        if self._steps in self._loads:
            weights = self._loads[self._steps]
            self._engine.load_weights(weights, list(weights.tensors))
        self._steps += 1
        return False


def check_parts(responses: list[EngineResponse], models: dict[int, Any]) -> None:
    """Check that greedy responses follow the model of each part's version, on the keys and values of those before."""
    for response in responses:
        prompt = response.request.prompt_ids.tolist()
        ids, cache, done, position = torch.tensor([prompt + list(response.token_ids)]), None, 0, 0
        assert sum(span.tokens for span in response.spans) == len(response.token_ids)
        for span in response.spans:
            # The first token of a part is computed from the token before it.
            end = len(prompt) + done + span.tokens - 1
            with torch.no_grad():
                output = models[span.policy_version](ids[:, position:end], past_key_values=cache, use_cache=True)
            expected = output.logits[0].argmax(-1).tolist()[-span.tokens :]
            assert list(response.token_ids)[done : done + span.tokens] == expected
            cache, position, done = output.past_key_values, end, done + span.tokens


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_each_part_of_a_response_is_by_the_weights_that_it_names(kind: str) -> None:
    models = {version: tiny.causal(kind, seed=version) for version in (1, 2, 3)}
    sets = {version: weight_set(model, version=version) for version, model in models.items()}
    engine = DetachedTorchEngine(tiny.causal(kind), None, frozenset(), 3)
    assert engine.properties.in_flight_updates
    engine.load_weights(sets[1], list(sets[1].tensors))
    # Two of five requests wait for a row.
    poll = Poll(engine, {5: sets[2], 9: sets[3]})
    responses = list(engine.generate(tiny.requests(5), SAMPLING, 0, poll))
    check_parts(responses, models)
    digests = {version: weights.digest for version, weights in sets.items()}
    assert [response.spans for response in responses] == [
        *[(VersionSpan(1, digests[1], 5), VersionSpan(2, digests[2], 4), VersionSpan(3, digests[3], 3))] * 3,
        *[(VersionSpan(3, digests[3], TOKENS),)] * 2,
    ]
    # The next generation is by the newest weights only.
    assert all(response.spans == () for response in engine.generate(tiny.requests(2), SAMPLING, 0, lambda: False))


@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_changes_in_the_middle_of_a_response(merge: bool) -> None:
    sets, models = {}, {}
    for version in (1, 2):
        model, adapter = adapted("llama")
        for _ in range(version):
            learn(model)
        models[version], sets[version] = model, weight_set(model, adapter, version)
    changed = [name for name in sets[2].tensors if "lora" in name]
    engine = DetachedTorchEngine(*adapted("llama", seed=5), frozenset(), 4, merge_adapter=merge)
    engine.load_weights(sets[1], list(sets[1].tensors))
    base = {name: tensor.data_ptr() for name, tensor in engine._weights.items()}

    def poll() -> Callable[[], bool]:
        steps = 0

        def load() -> bool:
            nonlocal steps
            if steps == 4:
                engine.load_weights(sets[2], changed)
            steps += 1
            return False

        return load

    responses = list(engine.generate(tiny.requests(3), SAMPLING, 0, poll()))
    assert {tuple(span.tokens for span in response.spans) for response in responses} == {(4, TOKENS - 4)}
    check_parts(responses, models)
    assert base == {name: tensor.data_ptr() for name, tensor in engine._weights.items()}


def test_an_update_of_another_thread_waits_for_a_step_and_no_longer() -> None:
    sets = [weight_set(tiny.causal("llama", seed=seed), version=seed) for seed in (1, 2)]
    engine = DetachedTorchEngine(tiny.causal("llama"), None, frozenset(), 4)
    engine.load_weights(sets[0], list(sets[0].tensors))
    thread = threading.Thread(target=engine.load_weights, args=(sets[1], list(sets[1].tensors)))
    with engine._step():
        thread.start()
        wait_until(lambda: not engine._may_step.is_set())
        assert engine._changes == [(0, 1, sets[0].digest)]
    # The next step begins after the update, however soon it asks.
    with engine._step():
        assert engine._changes[-1][1:] == (2, sets[1].digest)
    thread.join(LIMIT)
