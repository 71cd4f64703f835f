"""A fake of tensorrt_llm, which needs a GPU, with the calls that the engine makes. It generates with transformers.

It tests the code of the engine, not the behaviour of TensorRT-LLM.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers


@dataclass
class SamplingParams:
    """The parameters that the engine passes. Any other parameter is an error."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float | None
    seed: int
    ignore_eos: bool
    stop_token_ids: list[int] | None
    include_stop_str_in_output: bool
    logprobs: int
    detokenize: bool
    add_special_tokens: bool


@dataclass
class LoRARequest:
    """An adapter on disk."""

    name: str
    number: int
    path: str

    def __post_init__(self) -> None:
        assert self.number >= 1
        assert Path(self.path).is_dir()


class Future:
    """A response that ``result`` computes."""

    def __init__(self, llm: LLM, prompt: list[int], parameters: SamplingParams, lora: LoRARequest | None) -> None:
        self._llm, self._prompt, self._parameters, self._lora = llm, prompt, parameters, lora
        self.finished = False
        self.outputs: list[Any] = []

    def result(self, timeout: float | None = None) -> Future:
        """Compute the outputs and return this object."""
        if not self._llm.running:
            raise RuntimeError("the engine was shut down")
        parameters, ids, log_probs = self._parameters, list[int](), []
        generator, model = torch.Generator().manual_seed(parameters.seed), self._llm.adapted(self._lora)
        stops = parameters.stop_token_ids or []
        while len(ids) < parameters.max_tokens and not (ids and ids[-1] in stops):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*self._prompt, *ids]])).logits[0, -1].double()
            values = torch.log_softmax(logits / parameters.temperature, 0)
            token = (
                values.argmax() if parameters.top_k == 1 else torch.multinomial(values.exp(), 1, generator=generator)
            )
            ids.append(int(token))
            log_probs.append({ids[-1]: types.SimpleNamespace(logprob=float(values[ids[-1]]))})
        reason = "stop" if ids[-1] in stops else "length"
        self.outputs = [types.SimpleNamespace(token_ids=ids, logprobs=log_probs, finish_reason=reason)]
        self.finished = True
        return self

    def abort(self) -> None:
        """Do nothing, because the computation has not started."""


class LLM:
    """Model of a checkpoint, with an adapter per request."""

    def __init__(self, model: str, lora_config: Any = None, **_: Any) -> None:
        self._path = model
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
        self._adapted: dict[int, Any] = {}
        self._supports_adapters = lora_config is not None
        self.running = True

    def adapted(self, lora: LoRARequest | None) -> Any:
        """Return the model with an adapter, cached by its number as in the library."""
        if lora is None:
            return self._model
        assert self._supports_adapters
        if lora.number not in self._adapted:
            base = transformers.AutoModelForCausalLM.from_pretrained(self._path)
            self._adapted[lora.number] = peft.PeftModel.from_pretrained(base, lora.path).eval()
        return self._adapted[lora.number]

    def generate_async(
        self, inputs: dict[str, list[int]], parameters: SamplingParams, lora_request: LoRARequest | None = None
    ) -> Future:
        """Return the response to one request."""
        return Future(self, inputs["prompt_token_ids"], parameters, lora_request)

    def shutdown(self) -> None:
        """Mark the engine as stopped."""
        self.running = False


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the modules that the engine imports."""
    for name, content in {
        "tensorrt_llm": {"LLM": LLM, "SamplingParams": SamplingParams},
        "tensorrt_llm.llmapi": {"KvCacheConfig": types.SimpleNamespace},
        "tensorrt_llm.lora_helper": {"LoraConfig": types.SimpleNamespace},
        "tensorrt_llm.executor": {},
        "tensorrt_llm.executor.request": {"LoRARequest": LoRARequest},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
