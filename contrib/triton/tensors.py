"""Tensors of requests and responses for models on Triton's TensorRT-LLM and vLLM backends.

The metadata of the model decides. A model with ``input_ids`` gets token ids (and ``seed``, or ``random_seed`` in older versions):
TensorRT-LLM up to 1.2. A model with ``text_input`` gets text: with ``sampling_parameters`` it is vLLM's, otherwise the ``llmapi``
model of TensorRT-LLM.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.random_streams import engine_seed
from quartet.contrib.triton.kind import TritonDialect
from quartet.engines.engine import EngineResponse, Policy
from quartet.errors import ComputationFailed, InvalidRequest, MismatchError

Tensors = dict[str, NDArray[Any]]


EXPECTED = (
    "expected the tensors of the TensorRT-LLM backend or of vLLM's; rollout.triton.model names the model: tensorrt_llm rather "
    "than ensemble or tensorrt_llm_bls"
)


@dataclass(frozen=True, slots=True)
class Served:
    """The server's description of a model: types of its inputs by name, its outputs, and how it accepts requests."""

    where: str
    inputs: Mapping[str, str]
    outputs: frozenset[str]
    decoupled: bool
    batched: bool

    def need(self, *names: str) -> None:
        """Raise MismatchError if the model lacks an input or output."""
        missing = [name for name in names if name not in self.inputs and name not in self.outputs]
        if missing:
            raise MismatchError(f"{self.where}: the model has no {' and no '.join(missing)}; {EXPECTED}")


@dataclass(slots=True)
class Partial:
    """The received part of a response. ``text``, ``finish_reason`` and ``stop_reason`` are set by servers that return text.

    ``num_prompt_tokens`` is the server's count of the prompt's tokens; None if it reports none.
    """

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    text: str | None = None
    finish_reason: str = ""
    stop_reason: str = ""
    num_prompt_tokens: int | None = None


class Dialect(ABC):
    """Format of one model's requests and responses. ``outputs`` are the requested outputs."""

    name: ClassVar[TritonDialect]
    outputs: tuple[str, ...]

    def __init__(self, served: Served, policy: Policy) -> None:
        self._served, self._policy = served, policy

    @abstractmethod
    def request(self, request: GenerationRequest, sampling: SamplingParameters, seed: int) -> Tensors:
        """Return the inputs that request one trajectory. Raises InvalidRequest, ComputationFailed."""

    @abstractmethod
    def reports_log_probs(self, sampling: SamplingParameters) -> bool:
        """Return whether the model reports log-probs of the whole distribution at the temperature of ``sampling``."""

    @abstractmethod
    def receive(self, partial: Partial, outputs: Tensors) -> None:
        """Add one message of the server to the response. Raises ComputationFailed."""

    @abstractmethod
    def finish(self, partial: Partial) -> EngineResponse:
        """Return the complete response after the last message. Raises ComputationFailed."""

    def _prompt_text(self, request: GenerationRequest) -> str:
        """Return a text that tokenizes to the prompt. Raises ComputationFailed if there is none."""
        tokenizer, ids = self._policy.tokenizer, request.prompt_ids.tolist()
        # The server's tokenizer may add a token at the start of every text.
        for first in (0, 1):
            text: str = tokenizer.decode(ids[first:])
            if list(tokenizer.encode(text)) == ids:
                return text
        raise ComputationFailed(
            f"{self._served.where}: prompt of {request.id}: its text tokenizes to different token ids; "
            "serve a model that takes token ids"
        )

    def _failed(self, request: GenerationRequest, text: str) -> ComputationFailed:
        return ComputationFailed(f"{self._served.where}: response to {request.id}: {text}")


class TokenDialect(Dialect):
    """Requests and responses with token ids, and with log-probs if the model returns them."""

    name = "tokens"

    def __init__(self, served: Served, policy: Policy) -> None:
        super().__init__(served, policy)
        served.need(
            "input_lengths", "request_output_len", "temperature", "stop_words_list", "output_ids", "sequence_length"
        )
        self._seed = "seed" if "seed" in served.inputs else "random_seed"
        served.need(self._seed)
        self._returns_log_probs = {"return_log_probs", "output_log_probs"} <= served.inputs.keys() | served.outputs
        self.outputs = ("output_ids", "sequence_length", *(["output_log_probs"] if self._returns_log_probs else []))
        self._echoes_prompt = not served.decoupled and "exclude_input_in_output" not in served.inputs

    def request(self, request: GenerationRequest, sampling: SamplingParameters, seed: int) -> Tensors:
        """Return the inputs. Stop tokens are stop words, not end_id, so that the response contains them with their log-probs."""
        greedy, prompt = sampling.temperature == 0, request.prompt_ids
        stops = [] if sampling.ignore_eos else sorted(self._policy.served.stop_ids)
        result: Tensors = {
            "input_ids": prompt.astype(np.int32),
            "input_lengths": np.array([len(prompt)], np.int32),
            "request_output_len": np.array([sampling.max_response_tokens], np.int32),
            "end_id": np.array([-1], np.int32),
            "pad_id": np.array([stops[0] if stops else 0], np.int32),
            "temperature": np.array([1.0 if greedy else sampling.temperature], np.float32),
            "runtime_top_k": np.array([1 if greedy else sampling.top_k], np.int32),
            "runtime_top_p": np.array([sampling.top_p], np.float32),
            self._seed: np.array([engine_seed(seed, request.id)], np.uint64),
            "return_log_probs": np.array([self._returns_log_probs]),
            "streaming": np.array([self._served.decoupled]),
            "exclude_input_in_output": np.array([True]),
        }
        if stops:
            # The concatenated words, and the end offset of each word.
            result["stop_words_list"] = np.array([stops, range(1, len(stops) + 1)], np.int32)
        return result

    def reports_log_probs(self, sampling: SamplingParameters) -> bool:
        """Return whether the model reports them and nothing is truncated, which ``normalize_log_probs`` would change."""
        return self._returns_log_probs and sampling.temperature > 0 and not sampling.reshapes

    def receive(self, partial: Partial, outputs: Tensors) -> None:
        """Add new tokens, and log-probs, which a server sends for the new tokens or for all tokens so far."""
        if not {"output_ids", "sequence_length"} <= outputs.keys():
            raise self._failed(partial.request, "a message without output_ids and sequence_length")
        count = int(outputs["sequence_length"].reshape(-1)[0])
        if not 0 <= count <= outputs["output_ids"].size:
            raise self._failed(partial.request, f"sequence_length {count} of {outputs['output_ids'].size} output_ids")
        ids = outputs["output_ids"].reshape(-1)[:count].tolist()
        prompt = partial.request.prompt_ids.tolist()
        if self._echoes_prompt and not partial.token_ids:
            if ids[: len(prompt)] != prompt:
                raise self._failed(
                    partial.request, "does not begin with the prompt; this server version repeats the prompt"
                )
            ids = ids[len(prompt) :]
        partial.token_ids += ids
        if self._returns_log_probs and "output_log_probs" in outputs:
            log_probs = outputs["output_log_probs"].reshape(-1).tolist()
            if len(log_probs) >= len(partial.token_ids):
                partial.log_probs = log_probs[: len(partial.token_ids)]
            else:
                partial.log_probs += log_probs

    def finish(self, partial: Partial) -> EngineResponse:
        """Return the response. ``log_probs`` is None if the server reports none."""
        return EngineResponse(partial.request, partial.token_ids, partial.log_probs or None)


class TextDialect(Dialect):
    """Requests and responses with text. Text with ambiguous tokens is an error. The model reports no log-probs."""

    name = "llmapi"

    def __init__(self, served: Served, policy: Policy) -> None:
        super().__init__(served, policy)
        served.need(*(f"sampling_param_{name}" for name in ("max_tokens", "temperature", "top_k", "top_p", "seed")))
        self.outputs = ("text_output", "finish_reason", *(["stop_reason"] if "stop_reason" in served.outputs else []))
        served.need("return_finish_reason", *self.outputs)

    def request(self, request: GenerationRequest, sampling: SamplingParameters, seed: int) -> Tensors:
        """Return the inputs. Raises ComputationFailed if the prompt's text does not tokenize to the same ids."""
        if sampling.ignore_eos:
            raise InvalidRequest(f"{self._served.where}: ignore_eos is not supported by a server that takes text")
        greedy = sampling.temperature == 0
        return {
            "text_input": _text(self._prompt_text(request)),
            "sampling_param_max_tokens": np.array([sampling.max_response_tokens], np.int32),
            "sampling_param_temperature": np.array([1.0 if greedy else sampling.temperature], np.float32),
            "sampling_param_top_k": np.array([1 if greedy else sampling.top_k], np.int32),
            "sampling_param_top_p": np.array([sampling.top_p], np.float32),
            "sampling_param_seed": np.array([engine_seed(seed, request.id)], np.uint64),
            "sampling_param_exclude_input_from_output": np.array([True]),
            "return_finish_reason": np.array([True]),
            "return_stop_reason": np.array([True]),
            "streaming": np.array([False]),
        }

    def reports_log_probs(self, sampling: SamplingParameters) -> bool:
        """Return False."""
        del sampling
        return False

    def receive(self, partial: Partial, outputs: Tensors) -> None:
        """Add the text, the finish reason and the stop reason."""
        if not {"text_output", "finish_reason"} <= outputs.keys():
            raise self._failed(partial.request, "a message without text_output and finish_reason")
        partial.text = (partial.text or "") + _string(outputs["text_output"])
        partial.finish_reason = _string(outputs["finish_reason"])
        partial.stop_reason = _string(outputs["stop_reason"]) if "stop_reason" in outputs else ""

    def finish(self, partial: Partial) -> EngineResponse:
        """Return the tokens of the text, plus the stop token, which the text does not contain.

        Raises ComputationFailed if the tokens do not decode to the same text.
        """
        if partial.text is None:
            return EngineResponse(partial.request, [], None)
        tokenizer = self._policy.tokenizer
        ids = list(tokenizer.encode(partial.text, add_special_tokens=False))
        if tokenizer.decode(ids, skip_special_tokens=True) != partial.text:
            raise self._failed(partial.request, "its tokenized text does not decode to the same text")
        if partial.finish_reason == "stop":
            ids.append(self._stop_id(partial))
        elif partial.finish_reason != "length":
            raise self._failed(partial.request, f"finish_reason {partial.finish_reason!r}; expected stop or length")
        return EngineResponse(partial.request, ids, None)

    def _stop_id(self, partial: Partial) -> int:
        if partial.stop_reason.isdecimal() and int(partial.stop_reason) in self._policy.served.stop_ids:
            return int(partial.stop_reason)
        end: int | None = self._policy.tokenizer.eos_token_id
        if end is None:
            raise self._failed(
                partial.request, "the server does not report its stop token, and the tokenizer has no EOS"
            )
        return end


class VllmDialect(Dialect):
    """Prompts as text, and responses with token ids: the log-probs of vLLM's backend carry the ids of the sampled tokens.

    The log-probs are before the temperature by default, and after it if the server sets ``logprobs_mode``, which no call reports.
    So they count only at temperature 1, where both are the same, and for greedy sampling.
    """

    name = "vllm"

    def __init__(self, served: Served, policy: Policy) -> None:
        super().__init__(served, policy)
        self.outputs = ("text_output", "finish_reason", "logprobs")
        served.need("stream", "exclude_input_in_output", "return_finish_reason", "return_logprobs", *self.outputs)
        if not served.decoupled:
            raise MismatchError(f"{served.where}: the model is not decoupled; vLLM's backend always is")
        if {"return_num_input_tokens", "num_input_tokens"} <= served.inputs.keys() | served.outputs:
            self.outputs += ("num_input_tokens",)

    def request(self, request: GenerationRequest, sampling: SamplingParameters, seed: int) -> Tensors:
        """Return the inputs. Raises ComputationFailed if the prompt's text does not tokenize to the same ids."""
        parameters = {
            "max_tokens": sampling.max_response_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **({"top_k": sampling.top_k} if sampling.top_k else {}),
            "seed": engine_seed(seed, request.id),
            "logprobs": 0,
            # The stop tokens of the policy, and not those of the server's generation_config.json.
            "ignore_eos": True,
            "stop_token_ids": [] if sampling.ignore_eos else sorted(self._policy.served.stop_ids),
            "detokenize": False,
        }
        return {
            "text_input": _text(self._prompt_text(request)),
            "sampling_parameters": _text(json.dumps(parameters)),
            "stream": np.array([True]),
            "exclude_input_in_output": np.array([True]),
            "return_finish_reason": np.array([True]),
            "return_logprobs": np.array([True]),
            "return_num_input_tokens": np.array([True]),
        }

    def reports_log_probs(self, sampling: SamplingParameters) -> bool:
        """Return whether the log-probs are the same before and after temperature and truncation."""
        return sampling.temperature in (0, 1) and not sampling.reshapes

    def receive(self, partial: Partial, outputs: Tensors) -> None:
        """Add the new tokens, which are the keys of the log-probs, and the finish reason."""
        if not {"logprobs", "finish_reason"} <= outputs.keys():
            raise self._failed(partial.request, "a message without logprobs and finish_reason")
        try:
            for entry in json.loads(_string(outputs["logprobs"])):
                ((token, value),) = entry.items()
                partial.token_ids.append(int(token))
                partial.log_probs.append(float(value["logprob"]))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self._failed(
                partial.request,
                "logprobs that are not a JSON list with one token id each; expected those of logprobs 0",
            ) from None
        partial.finish_reason = _string(outputs["finish_reason"])
        if "num_input_tokens" in outputs:
            partial.num_prompt_tokens = int(outputs["num_input_tokens"].reshape(-1)[0])

    def finish(self, partial: Partial) -> EngineResponse:
        """Return the response. Raises ComputationFailed if the server counted other tokens in the prompt."""
        expected = len(partial.request.prompt_ids)
        if partial.num_prompt_tokens not in (None, expected):
            raise self._failed(
                partial.request,
                f"the server tokenized the prompt to {partial.num_prompt_tokens} tokens instead of {expected}; it must have the "
                "tokenizer of actor.model",
            )
        if partial.token_ids and partial.finish_reason not in ("stop", "length"):
            raise self._failed(partial.request, f"finish_reason {partial.finish_reason!r}; expected stop or length")
        return EngineResponse(partial.request, partial.token_ids, partial.log_probs or None)


def dialect_of(served: Served, policy: Policy) -> Dialect:
    """Return the dialect of a model. Raises MismatchError for a model with other tensors."""
    if "input_ids" in served.inputs:
        return TokenDialect(served, policy)
    if "text_input" in served.inputs:
        return (VllmDialect if "sampling_parameters" in served.inputs else TextDialect)(served, policy)
    raise MismatchError(f"{served.where}: the model has neither input_ids nor text_input; {EXPECTED}")


def _text(value: str) -> NDArray[Any]:
    return np.array([value.encode()], np.object_)


def _string(value: NDArray[Any]) -> str:
    first = value.reshape(-1)[0]
    return first.decode() if isinstance(first, bytes) else str(first)
