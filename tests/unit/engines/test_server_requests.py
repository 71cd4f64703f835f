"""Requests to vLLM and SGLang servers: min_p, stop strings and greedy requests, and the reasons for an end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quartet.contract.generation import GenerationRequest, Penalties, SamplingParameters, StructuredOutput
from quartet.contract.trajectory import TrajectoryId
from quartet.contrib.sglang.engine import SGLangServerEngine
from quartet.engines.engine import ServedModel
from quartet.engines.server_engine import Partial, ServerEngine
from quartet.engines.vllm_server import VLLMServerEngine
from quartet.errors import ServiceFailed

STRINGS = ("\nUser:", "END")


def engine_of(kind: type[ServerEngine]) -> Any:
    """Return an engine that is not connected to a server."""
    engine: Any = kind.__new__(kind)
    engine.server = SimpleNamespace(weights="folder")
    engine.model = ServedModel("m", "float32", frozenset({2}), 100, 0)
    engine.adapter, engine.salt, engine._name = None, "s", "m"
    engine._deterministic, engine._incremental = True, True
    return engine


def request(**fields: Any) -> GenerationRequest:
    return GenerationRequest(TrajectoryId("r", 1, 0, 0), np.array([5, 6], np.int32), **fields)


def parameters(kind: type[ServerEngine], sampling: SamplingParameters, **fields: Any) -> dict[str, Any]:
    asked = request(**fields)
    body = engine_of(kind).body("k", asked, asked.own_sampling(sampling), 0)
    return dict(body["sampling_params"])


def test_a_vllm_server_gets_min_p_and_keeps_the_tokens_of_stop_strings() -> None:
    sent = parameters(VLLMServerEngine, SamplingParameters(8, min_p=0.1, stop_strings=STRINGS))
    assert sent["min_p"] == 0.1
    assert (sent["stop"], sent["include_stop_str_in_output"], sent["detokenize"]) == (list(STRINGS), True, True)
    assert "logprobs" not in sent  # those of the truncated distribution
    plain = parameters(VLLMServerEngine, SamplingParameters(8))
    assert not plain.keys() & {"min_p", "stop"}
    assert plain["detokenize"] is False


def test_an_sglang_server_gets_min_p_and_keeps_the_tokens_of_stop_strings() -> None:
    sent = parameters(SGLangServerEngine, SamplingParameters(8, min_p=0.1, stop_strings=STRINGS))
    assert (sent["min_p"], sent["stop"], sent["no_stop_trim"]) == (0.1, list(STRINGS), True)
    assert not parameters(SGLangServerEngine, SamplingParameters(8)).keys() & {"min_p", "stop"}


@pytest.mark.parametrize("kind", [VLLMServerEngine, SGLangServerEngine])
def test_a_server_gets_the_penalties_and_its_log_probs_after_them_are_not_used(kind: type[ServerEngine]) -> None:
    sampling = SamplingParameters(8, penalties=Penalties(1.0, 0.5, -0.25))
    names = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
    for greedy in (False, True):
        sent = parameters(kind, sampling, greedy=greedy)
        assert {name: sent[name] for name in names} == sampling.penalties.arguments  # type: ignore[union-attr]
        assert not engine_of(kind).reports_log_probs(request(greedy=greedy).own_sampling(sampling))
    assert (sent["presence_penalty"], sent["frequency_penalty"]) == (0.5, -0.25)
    assert not parameters(kind, SamplingParameters(8)).keys() & names
    assert engine_of(kind).reports_log_probs(SamplingParameters(8))


@pytest.mark.parametrize(
    ("output", "for_vllm", "for_sglang"),
    [
        (StructuredOutput("json_schema", "{}"), {"json": "{}"}, {"json_schema": "{}"}),
        (StructuredOutput("regex", "a+"), {"regex": "a+"}, {"regex": "a+"}),
        (StructuredOutput("grammar", "root ::= 1"), {"grammar": "root ::= 1"}, {"ebnf": "root ::= 1"}),
    ],
)
def test_a_server_gets_the_form_and_its_log_probs_within_it_are_not_used(
    output: StructuredOutput, for_vllm: dict[str, str], for_sglang: dict[str, str]
) -> None:
    sampling = SamplingParameters(8, structured_output=output)
    for greedy in (False, True):
        sent = parameters(VLLMServerEngine, sampling, greedy=greedy)
        assert sent["structured_outputs"] == for_vllm
        assert parameters(SGLangServerEngine, sampling, greedy=greedy).items() >= for_sglang.items()
        for kind in (VLLMServerEngine, SGLangServerEngine):
            assert not engine_of(kind).reports_log_probs(request(greedy=greedy).own_sampling(sampling))
    assert "structured_outputs" not in parameters(VLLMServerEngine, SamplingParameters(8))
    assert not parameters(SGLangServerEngine, SamplingParameters(8)).keys() & {"json_schema", "regex", "ebnf"}


@pytest.mark.parametrize("kind", [VLLMServerEngine, SGLangServerEngine])
def test_a_greedy_request_has_temperature_0_and_no_truncation(kind: type[ServerEngine]) -> None:
    sent = parameters(kind, SamplingParameters(8, 0.7, top_p=0.9, top_k=5, min_p=0.1), greedy=True)
    assert (sent["temperature"], sent["top_p"], "min_p" in sent) == (0.0, 1.0, False)
    assert sent["top_k"] in (0, -1)


def test_a_stop_string_of_an_sglang_server_is_no_unknown_stop_token() -> None:
    engine = engine_of(SGLangServerEngine)
    engine.check_versions = lambda *_: None
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [(-1.0, 7, None)]}
    partial = Partial(request())
    engine.receive(partial, {"meta_info": meta}, SamplingParameters(8, stop_strings=STRINGS))
    assert (partial.finished, partial.stopped, partial.token_ids) == (True, True, [7])
    assert engine._finish(partial, SamplingParameters(8, stop_strings=STRINGS)).stopped
    with pytest.raises(ServiceFailed, match="which is a stop token of the served checkpoint"):
        engine.receive(Partial(request()), {"meta_info": meta}, SamplingParameters(8))
