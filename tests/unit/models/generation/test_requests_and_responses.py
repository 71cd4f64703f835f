"""Requests to engines and their responses, without a server: checks, adapters as tensors, dialects, missing packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quartet.config.models import LoraConfig
from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.random_streams import engine_seed
from quartet.contract.trajectory import FinishReason, TrajectoryId
from quartet.contrib.triton.engine import TritonEngine, TritonServer
from quartet.contrib.triton.lora_tensors import lora_tensors
from quartet.contrib.triton.tensors import Dialect, Partial, Served, dialect_of
from quartet.engines.engine import EngineResponse, Policy
from quartet.engines.request_checks import check_response
from quartet.errors import ComputationFailed, ConfigError, InvalidRequest, MismatchError, ModelError
from quartet.models.generation.torch_engine import served_model
from quartet.models.weights.lora import add_adapter
from tests.unit.models import tiny

SAMPLING = SamplingParameters(4, temperature=0.7, top_k=5, top_p=0.9)


def policy(kind: str = "llama", adapter: bool = False) -> Policy:
    model = tiny.causal(kind)
    added = add_adapter(model, "base", LoraConfig(rank=2, alpha=3.0)) if adapter else None
    stops = frozenset({tiny.EOS, 7})
    return Policy(model, tiny.tokenizer(), added, served_model(model, stops))


def to_trajectory(ids: list[int], log_probs: list[float] | None, sampling: SamplingParameters = SAMPLING) -> Any:
    return check_response(EngineResponse(tiny.requests(1)[0], ids, log_probs), policy().served, sampling, 3, "engine")


def test_a_valid_answer_becomes_a_trajectory() -> None:
    result = to_trajectory([5, 6, 7], [-1.0, -2.0, -3.0])
    assert (result.policy_version, result.finish_reason) == (3, FinishReason.EOS)
    assert result.log_probs.tolist() == [-1.0, -2.0, -3.0]
    assert to_trajectory([5, 6, 8, 9], [-1.0] * 4).finish_reason is FinishReason.LENGTH
    unstopped = to_trajectory([5, 7, 8, 9], [-1.0] * 4, SamplingParameters(4, ignore_eos=True))
    assert unstopped.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("ids", "log_probs", "message"),
    [
        ([], [], "0 tokens; expected 1 to 4"),
        ([5] * 5, [-1.0] * 5, "5 tokens; expected 1 to 4"),
        ([5, tiny.VOCABULARY, 7], [-1.0] * 3, "outside the vocabulary"),
        ([5, -1, 7], [-1.0] * 3, "outside the vocabulary"),
        ([5, 7, 8, 9], [-1.0] * 4, "continues after the stop token 7"),
        ([5, 6], [-1.0] * 2, "ends after 2 of 4 tokens without a stop token"),
        ([5, 6, 7], [-1.0] * 2, "2 log-probs for 3 tokens"),
        ([5, 6, 7], [-1.0, float("nan"), -1.0], "log-probs that are not finite, too low"),
        ([5, 6, 7], [-1.0, float("-inf"), -1.0], "log-probs that are not finite, too low"),
        ([5, 6, 7], [-1.0, 2.0, -1.0], "log-probs that are not finite, too low"),
    ],
)
def test_an_invalid_answer_is_an_error(ids: list[int], log_probs: list[float], message: str) -> None:
    with pytest.raises(ComputationFailed, match=message) as failed:
        to_trajectory(ids, log_probs)
    assert "engine: response to run/0/0/0" in str(failed.value)


def test_the_rows_of_an_adapter_reproduce_its_weight_change() -> None:
    subject = policy(adapter=True)
    assert subject.adapter is not None
    with torch.no_grad():
        for name, parameter in subject.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    lora = lora_tensors(subject.adapter)
    layer = subject.model.model.layers[1].mlp.down_proj
    row = next(i for i, (module, index, _) in enumerate(lora.config.tolist()) if (module, index) == (6, 1))
    outputs, inputs = layer.get_base_layer().weight.shape
    a = lora.weights[row, : 2 * inputs].reshape(2, inputs)
    b = lora.weights[row, 2 * inputs : 2 * (inputs + outputs)].reshape(outputs, 2)
    assert np.allclose(b @ a, layer.get_delta_weight("default").detach().numpy(), atol=1e-6)
    assert (lora.weights[row, 2 * (inputs + outputs) :] == 0).all()
    assert sorted(map(tuple, lora.config.tolist())) == [(m, i, 2) for m in range(1, 8) for i in range(2)]


def test_adapter_weights_determine_the_task_number() -> None:
    subject = policy(adapter=True)
    assert subject.adapter is not None
    before = lora_tensors(subject.adapter)
    assert lora_tensors(subject.adapter).task == before.task
    with torch.no_grad():
        subject.model.model.layers[0].mlp.up_proj.lora_B["default"].weight[0, 0] = 1.0
    assert lora_tensors(subject.adapter).task != before.task
    assert 0 <= before.task < 2**63


def test_an_adapter_of_unsupported_layers_is_refused() -> None:
    subject = policy("gpt2", adapter=True)
    assert subject.adapter is not None
    with pytest.raises(
        ModelError, match=r"does not support an adapter of .*c_attn; supported in actor\.lora\.target_modules: q_proj"
    ):
        lora_tensors(subject.adapter)


def test_adapters_of_query_key_and_value_must_come_together() -> None:
    for targets in (["q_proj", "v_proj"], ["model.layers.0.self_attn.k_proj", "o_proj"]):
        with pytest.raises(ModelError, match="supports adapters of q_proj, k_proj, v_proj only together"):
            lora_tensors(
                add_adapter(tiny.causal("llama"), "base", LoraConfig(rank=2, alpha=3.0, target_modules=targets))
            )
    for targets in (["q_proj", "k_proj", "v_proj"], ["o_proj", "up_proj"]):
        lora_tensors(add_adapter(tiny.causal("llama"), "base", LoraConfig(rank=2, alpha=3.0, target_modules=targets)))


def test_the_engine_seed_depends_on_the_trajectory_id() -> None:
    ids = [TrajectoryId("r", step, prompt, sample) for step in (0, 1) for prompt in (0, 1) for sample in (0, 1)]
    seeds = {engine_seed(seed, id) for seed in (0, 1) for id in ids}
    assert len(seeds) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert engine_seed(0, ids[0]) == engine_seed(0, TrajectoryId("other", 0, 0, 0))


TOKENS = ("input_ids", "input_lengths", "request_output_len", "temperature", "stop_words_list")
TEXT = ("text_input", *(f"sampling_param_{name}" for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")))


def make_dialect(
    *inputs: str, outputs: tuple[str, ...] = ("output_ids", "sequence_length"), decoupled: bool = True
) -> Dialect:
    kinds: Mapping[str, str] = dict.fromkeys(inputs, "INT32")
    return dialect_of(Served("server", kinds, frozenset(outputs), decoupled, True), policy())


def token_outputs(ids: list[int], log_probs: list[float] | None = None) -> dict[str, Any]:
    results: dict[str, Any] = {"output_ids": np.array([[ids]]), "sequence_length": np.array([[len(ids)]])}
    return results if log_probs is None else results | {"output_log_probs": np.array([[log_probs]])}


def test_a_token_request_has_every_stop_token_as_a_stop_word() -> None:
    request = tiny.requests(1)[0]
    result = make_dialect(*TOKENS, "random_seed").request(request, SAMPLING, seed=5)
    assert result["input_ids"].tolist() == request.prompt_ids.tolist()
    assert result["stop_words_list"].tolist() == [[1, 7], [1, 2]]
    assert result["end_id"].tolist() == [-1]
    assert result["random_seed"].tolist() == [engine_seed(5, request.id)]
    assert (result["runtime_top_k"].item(), result["request_output_len"].item()) == (5, 4)
    greedy = make_dialect(*TOKENS, "seed").request(
        request, SamplingParameters(4, temperature=0.0, ignore_eos=True), seed=5
    )
    assert (greedy["runtime_top_k"].item(), greedy["temperature"].item()) == (1, 1.0)
    assert "stop_words_list" not in greedy


@pytest.mark.parametrize("so_far", [False, True], ids=["of new tokens", "of all so far"])
def test_log_probs_may_cover_new_tokens_or_all_tokens_so_far(so_far: bool) -> None:
    dialect = make_dialect(
        *TOKENS, "seed", "return_log_probs", outputs=("output_ids", "sequence_length", "output_log_probs")
    )
    partial = Partial(tiny.requests(1)[0])
    values = [-0.5, -1.5, -2.5]
    for index, token in enumerate([5, 6, 7]):
        dialect.receive(partial, token_outputs([token], values[: index + 1] if so_far else [values[index]]))
    answer = dialect.finish(partial)
    assert (answer.token_ids, answer.log_probs) == ([5, 6, 7], values)


def test_tokens_after_the_sequence_length_are_padding() -> None:
    dialect, partial = make_dialect(*TOKENS, "seed"), Partial(tiny.requests(1)[0])
    dialect.receive(partial, {"output_ids": np.array([[[5, 7, -1, -1]]]), "sequence_length": np.array([[2]])})
    assert dialect.finish(partial).token_ids == [5, 7]
    assert dialect.finish(partial).log_probs is None


def test_an_echoed_prompt_is_removed_and_must_match_the_request() -> None:
    request = tiny.requests(1)[0]
    dialect, prompt = make_dialect(*TOKENS, "seed", decoupled=False), request.prompt_ids.tolist()
    partial = Partial(request)
    dialect.receive(partial, token_outputs([*prompt, 5, 7]))
    assert dialect.finish(partial).token_ids == [5, 7]
    with pytest.raises(ComputationFailed, match="does not begin with the prompt"):
        dialect.receive(Partial(request), token_outputs([5, 7]))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (("image",), "neither input_ids nor text_input"),
        (TOKENS, "no random_seed"),
        (("input_ids", "seed"), "no input_lengths and no request_output_len"),
        (TEXT[:-1], "no sampling_param_seed"),
        (("text_input", "max_tokens", "temperature"), "no sampling_param_max_tokens"),
        (("text_input", "sampling_parameters"), "no stream and no exclude_input_in_output"),
    ],
)
def test_a_model_with_other_tensors_is_a_mismatch_error(inputs: tuple[str, ...], message: str) -> None:
    with pytest.raises(
        MismatchError, match=f"{message}.*expected the tensors of the TensorRT-LLM backend or of vLLM's"
    ):
        make_dialect(*inputs)


def decode_text(text: str, reason: str, stop: str = "") -> Any:
    dialect = make_dialect(*TEXT, "return_finish_reason", outputs=("text_output", "finish_reason", "stop_reason"))
    partial = Partial(tiny.requests(1)[0])
    outputs = {"text_output": text, "finish_reason": reason, "stop_reason": stop}
    dialect.receive(partial, {name: np.array([[value.encode()]], np.object_) for name, value in outputs.items()})
    return dialect.finish(partial).token_ids


def test_response_text_is_tokenised_and_its_stop_token_is_appended() -> None:
    assert decode_text("w5 w6", "stop") == [5, 6, 1]
    assert decode_text("w5 w6", "stop", "7") == [5, 6, 7]
    assert decode_text("w5 w6 w8 w9", "length") == [5, 6, 8, 9]


@pytest.mark.parametrize(
    ("text", "reason", "message"),
    [
        ("w5  w6", "stop", "does not decode to the same text"),
        ("w5 unheard", "stop", "does not decode to the same text"),
        ("w5", "timeout", "finish_reason 'timeout'"),
    ],
)
def test_ambiguous_or_incomplete_text_is_an_error(text: str, reason: str, message: str) -> None:
    with pytest.raises(ComputationFailed, match=message):
        decode_text(text, reason)


def test_a_prompt_whose_text_gives_other_token_ids_is_an_error() -> None:
    dialect = make_dialect(*TEXT, "return_finish_reason", outputs=("text_output", "finish_reason"))
    good, bad = (GenerationRequest(TrajectoryId("r", 0, 0, 0), np.array(ids, np.int32)) for ids in ([5, 6], [5, 20]))
    assert dialect.request(good, SAMPLING, 0)["text_input"].tolist() == [b"w5 w6"]
    # The tokenizer treats w2 as a special token, and splits w20 at it.
    with pytest.raises(ComputationFailed, match="its text tokenizes to different token ids"):
        dialect.request(bad, SAMPLING, 0)
    with pytest.raises(InvalidRequest, match="ignore_eos is not supported"):
        dialect.request(good, SamplingParameters(4, ignore_eos=True), 0)


@pytest.mark.skipif(importlib.util.find_spec("tritonclient") is not None, reason="the package is here")
def test_a_missing_tritonclient_is_reported_with_installation_advice(tmp_path: Path) -> None:
    server = TritonServer("127.0.0.1:1", "m", 1.0, "static", 1, tmp_path)
    with pytest.raises(ConfigError, match=r"pip install 'quartet-rlhf\[triton\]'"):
        TritonEngine(server, policy())
