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
from quartet.errors import ServiceFailed
from quartet.models.generation import torch_engine
from quartet.models.generation.torch_engine import DetachedTorchEngine
from quartet.weight_transfer.tensors import WeightSet, combined_digest
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


def adapted_versions() -> tuple[dict[int, WeightSet], dict[int, Any]]:
    """Return versions 1 and 2 of an adapted model, and their weights."""
    sets, models = {}, {}
    for version in (1, 2):
        model, adapter = adapted("llama")
        for _ in range(version):
            learn(model)
        models[version], sets[version] = model, weight_set(model, adapter, version)
    return sets, models


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
    newest = (VersionSpan(3, digests[3], TOKENS),)
    assert all(response.spans == newest for response in engine.generate(tiny.requests(2), SAMPLING, 0, lambda: False))


def test_an_update_before_the_first_token_is_named() -> None:
    models = {version: tiny.causal("llama", seed=version) for version in (1, 2)}
    sets = {version: weight_set(model, version=version) for version, model in models.items()}
    engine = DetachedTorchEngine(tiny.causal("llama"), None, frozenset(), 4)
    engine.load_weights(sets[1], list(sets[1].tensors))
    responses = engine.generate(tiny.requests(2), SAMPLING, 0, lambda: False)
    engine.load_weights(sets[2], list(sets[2].tensors))
    made = list(responses)
    assert {response.spans for response in made} == {(VersionSpan(2, sets[2].digest, TOKENS),)}
    check_parts(made, models)


def test_half_an_update_is_not_named_as_its_version() -> None:
    sets = {version: weight_set(tiny.causal("llama", seed=version), version=version) for version in (1, 2)}
    engine = DetachedTorchEngine(tiny.causal("llama"), None, frozenset(), 4)
    engine.load_weights(sets[1], list(sets[1].tensors))
    half = sorted(sets[2].tensors)[::2]
    responses = engine.generate(tiny.requests(1), SAMPLING, 0, lambda: False)
    held = combined_digest(engine.load_weights(sets[2], half))
    assert held != sets[2].digest
    assert [response.spans for response in responses] == [(VersionSpan(2, held, TOKENS),)]


@pytest.mark.parametrize("moment", ["before a generation", "before its first token", "in a later response"])
@pytest.mark.parametrize("part", ["load", "merge"])
def test_an_update_that_fails_ends_the_generation_and_keeps_what_was_made_before(
    part: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets, models = adapted_versions()
    # The second request waits for the row of the first.
    engine = DetachedTorchEngine(*adapted("llama", seed=5), frozenset(), 1, merge_adapter=True)
    engine.load_weights(sets[1], list(sets[1].tensors))
    real = torch_engine.load_tensors

    def half(targets: Any, tensors: Any, changed: Any) -> Any:
        names = sorted(changed)[::2]
        real({name: targets[name] for name in names}, tensors, names)
        raise RuntimeError("out of memory")

    def fail() -> bool:
        with monkeypatch.context() as patch:
            if part == "load" or moment == "before a generation":
                patch.setattr(torch_engine, "load_tensors", half)
            else:
                patch.setattr(engine._merged, "update", lambda: half({}, {}, ()))
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.load_weights(sets[2], list(sets[2].tensors))
        return False

    failures = iter([fail])
    steps = iter(range(100))
    at = {"before a generation": -1, "before its first token": 0, "in a later response": TOKENS + 3}[moment]
    responses = engine.generate(tiny.requests(2), SAMPLING, 0, lambda: next(failures)() if next(steps) == at else False)
    if at < 0:
        fail()
    made: list[EngineResponse] = []
    with pytest.raises(ServiceFailed, match="the last update of the weights has failed"):
        made.extend(responses)
    assert [response.spans for response in made] == [(VersionSpan(1, sets[1].digest, TOKENS),)] * (at > TOKENS)
    check_parts(made, models)
    engine.load_weights(sets[2], list(sets[2].tensors))
    check_parts(list(engine.generate(tiny.requests(2), SAMPLING, 0, lambda: False)), models)


def test_an_update_that_fails_ends_a_streamed_response(monkeypatch: pytest.MonkeyPatch) -> None:
    sets, _ = adapted_versions()
    engine = DetachedTorchEngine(*adapted("llama", seed=5), frozenset(), 1, merge_adapter=True)
    tokens = engine.stream(tiny.requests(1)[0], SAMPLING, 0)
    next(tokens)
    with monkeypatch.context() as patch:
        patch.setattr(torch_engine, "load_tensors", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.load_weights(sets[2], list(sets[2].tensors))
    with pytest.raises(ServiceFailed, match="the last update of the weights has failed"):
        next(tokens)


def test_an_adapter_that_changes_between_the_start_of_a_generation_and_its_first_token_is_merged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sets, models = adapted_versions()
    engine = DetachedTorchEngine(*adapted("llama", seed=5), frozenset(), 4, merge_adapter=True)
    engine.load_weights(sets[1], list(sets[1].tensors))
    stop_strings = engine._stop_strings.of

    def load(sampling: SamplingParameters) -> Any:
        # A generation asks for them after its preparation.
        engine.load_weights(sets[2], list(sets[2].tensors))
        return stop_strings(sampling)

    monkeypatch.setattr(engine._stop_strings, "of", load)
    responses = list(engine.generate(tiny.requests(2), SAMPLING, 0, lambda: False))
    assert {response.spans for response in responses} == {(VersionSpan(2, sets[2].digest, TOKENS),)}
    check_parts(responses, models)


@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_changes_in_the_middle_of_a_response(merge: bool) -> None:
    sets, models = adapted_versions()
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
