"""A stand-in for tensorrt_llm, which needs a GPU: the calls that the engine makes, over a plain transformers loop.

It shows that the engine's own code runs, and nothing of how TensorRT-LLM itself behaves.
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
    """The parameters that the engine gives; any other is an error."""

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
    """A response that is computed when it is asked for."""

    def __init__(self, llm: LLM, prompt: list[int], parameters: SamplingParams, lora: LoRARequest | None) -> None:
        self._llm, self._prompt, self._parameters, self._lora = llm, prompt, parameters, lora
        self.finished = False
        self.outputs: list[Any] = []

    def result(self, timeout: float | None = None) -> Future:
        """Itself, with its outputs."""
        if not self._llm.running:
            raise RuntimeError("the engine was shut down")
        parameters, ids, log_probs = self._parameters, list[int](), []
        generator, model = torch.Generator().manual_seed(parameters.seed), self._llm.adapted(self._lora)
        stops = parameters.stop_token_ids or []
        while len(ids) < parameters.max_tokens and not (ids and ids[-1] in stops):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*self._prompt, *ids]])).logits[0, -1].double()
            values = torch.log_softmax(logits / parameters.temperature, 0)
            drawn = (
                values.argmax() if parameters.top_k == 1 else torch.multinomial(values.exp(), 1, generator=generator)
            )
            ids.append(int(drawn))
            log_probs.append({ids[-1]: types.SimpleNamespace(logprob=float(values[ids[-1]]))})
        reason = "stop" if ids[-1] in stops else "length"
        self.outputs = [types.SimpleNamespace(token_ids=ids, logprobs=log_probs, finish_reason=reason)]
        self.finished = True
        return self

    def abort(self) -> None:
        """Nothing: it has not begun."""


class LLM:
    """Load a checkpoint, and adapters on request."""

    def __init__(self, model: str, lora_config: Any = None, **_: Any) -> None:
        self._path = model
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
        self._adapted: dict[int, Any] = {}
        self._takes_adapters = lora_config is not None
        self.running = True

    def adapted(self, lora: LoRARequest | None) -> Any:
        """The model with an adapter, kept by its number as the library does."""
        if lora is None:
            return self._model
        assert self._takes_adapters
        if lora.number not in self._adapted:
            base = transformers.AutoModelForCausalLM.from_pretrained(self._path)
            self._adapted[lora.number] = peft.PeftModel.from_pretrained(base, lora.path).eval()
        return self._adapted[lora.number]

    def generate_async(
        self, inputs: dict[str, list[int]], parameters: SamplingParams, lora_request: LoRARequest | None = None
    ) -> Future:
        """One request."""
        return Future(self, inputs["prompt_token_ids"], parameters, lora_request)

    def shutdown(self) -> None:
        """The end."""
        self.running = False


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put it where the engine imports the library from."""
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
