"""A fake of tensorrt_llm, which needs a GPU, with the calls that the engine makes. It generates with transformers.

It behaves as the sources of the real package do, also where that is inconvenient. All requests share one random generator.
Log-probs are those before the temperature unless others are requested. Responses end in the order in which they finish. A prompt
over a limit raises ValueError. Adapters are cached by number, and key-value blocks outlive an adapter. Only the event loop of a
request can wait for its result. An abort after the shutdown fails. The fake tests the code of the engine, not TensorRT-LLM.
"""

from __future__ import annotations

import asyncio
import enum
import queue
import sys
import threading
import types
import weakref
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

OLD, NEW = "1.2.1", "1.3.0rc26"
"""Versions whose differences the fake has: the module of LoraConfig, log-probs after the temperature, and the samplers."""
FAULTS = {60: "death", 59: "error", 58: "hang", 57: "timeout"}
"""Faults by the first token of a prompt."""
DEFAULT_LIMIT = 16
"""Default of max_input_len and max_num_tokens: 1024 and 8192 in the real package."""


class RequestError(RuntimeError):
    """Error of one request."""


class LogprobMode(enum.StrEnum):
    """Distribution of the reported log-probs."""

    RAW = "raw"
    PROCESSED = "processed"


@dataclass
class _SamplingParams:
    max_tokens: int = 32
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    end_id: int | None = None
    pad_id: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    detokenize: bool = True
    add_special_tokens: bool = True


_NewSamplingParams = make_dataclass(
    "SamplingParams", [("logprobs_mode", LogprobMode, field(default=LogprobMode.RAW))], bases=(_SamplingParams,)
)


@dataclass
class LoRARequest:
    """An adapter on disk."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"id must be > 0, got {self.lora_int_id}")
        if not Path(self.lora_path).exists():
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")


@dataclass
class LoraConfig:
    """Settings of adapters."""

    lora_dir: list[str]
    max_lora_rank: int = 64
    max_loras: int = 4
    max_cpu_loras: int = 4


@dataclass
class KvCacheConfig:
    """Settings of the key-value cache."""

    free_gpu_memory_fraction: float = 0.9
    enable_block_reuse: bool = True


@dataclass
class CudaGraphConfig:
    """Settings of CUDA graphs."""

    max_batch_size: int = 0


@dataclass
class Arguments:
    """Arguments of LLM. An unknown name is a ValueError, as in the real package."""

    model: str
    dtype: str = "auto"
    skip_tokenizer_init: bool = False
    sampler_type: str = "auto"
    tensor_parallel_size: int = 1
    enable_chunked_prefill: bool = False
    cuda_graph_config: CudaGraphConfig | None = None
    max_batch_size: int = 2048
    max_input_len: int = DEFAULT_LIMIT
    max_seq_len: int | None = None
    max_num_tokens: int = DEFAULT_LIMIT
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_lora: bool = False
    lora_config: LoraConfig | None = None


class Executor:
    """The worker of an LLM: one thread that computes a token of every running request, round after round."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model).eval()
        self.generator = torch.Generator().manual_seed(42)
        self.adapters: dict[int, Any] = {}
        self.blocks: dict[tuple[int, ...], torch.Tensor] = {}
        self.arrived: queue.SimpleQueue[Result | None] = queue.SimpleQueue()
        self.running: list[Result] = []
        self.release = threading.Event()
        self.ignores_aborts = False
        self.stopping = False
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def abort_request(self, result: Result) -> None:
        """End a request, as soon as the worker sees it."""
        if not self.ignores_aborts:
            result.aborting = True

    def shutdown(self) -> None:
        """Stop the worker. Requests that run never end."""
        self.stopping = True
        self.arrived.put(None)
        self.thread.join()

    def _work(self) -> None:
        while not self.stopping:
            while not self.running or not self.arrived.empty():
                result = self.arrived.get()
                if result is None:
                    return
                self.running.append(result)
            for result in list(self.running):
                self._advance(result)
                if result.sent:
                    self.running.remove(result)

    def _advance(self, result: Result) -> None:
        fault = FAULTS.get(result.prompt[0])
        if result.aborting:
            return result.send("cancelled")
        if fault == "death":
            return result.send(RuntimeError("a worker process died"))
        if fault == "error":
            return result.send(RequestError("out of memory"))
        if fault == "timeout":
            return result.send("timeout")
        if fault == "hang" and not self.release.is_set():
            self.release.wait(0.001)
            return None
        parameters, stops = result.parameters, result.parameters.stop_token_ids or []
        token, log_probs = self._sample(result, self._logits(result))
        result.ids.append(token)
        if parameters.logprobs:
            top = int(log_probs.argmax())
            result.log_probs.append(
                {each: types.SimpleNamespace(logprob=float(log_probs[each]), rank=1) for each in (top, token)}
            )
        if token in stops:
            return result.send("stop")
        if len(result.ids) == parameters.max_tokens:
            return result.send("length")
        return None

    @torch.no_grad()
    def _logits(self, result: Result) -> torch.Tensor:
        ids = (*result.prompt, *result.ids)
        if ids in self.blocks and self.arguments.kv_cache_config.enable_block_reuse:
            return self.blocks[ids]
        model = self.model if result.lora is None else self._adapted(result.lora)
        logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0, -1].double()
        if self.arguments.kv_cache_config.enable_block_reuse:
            self.blocks[ids] = logits
        return logits

    def _adapted(self, lora: LoRARequest) -> Any:
        if lora.lora_int_id not in self.adapters:
            base = transformers.AutoModelForCausalLM.from_pretrained(self.arguments.model)
            self.adapters[lora.lora_int_id] = peft.PeftModel.from_pretrained(base, lora.lora_path).eval()
        return self.adapters[lora.lora_int_id]

    def _sample(self, result: Result, logits: torch.Tensor) -> tuple[int, torch.Tensor]:
        parameters = result.parameters
        raw = torch.log_softmax(logits, 0)
        scaled = logits / (parameters.temperature or 1.0)
        if parameters.top_k:
            scaled[scaled < scaled.topk(parameters.top_k).values[-1]] = -torch.inf
        processed = torch.log_softmax(scaled, 0)
        generator = result.generator if self.arguments.sampler_type == "TRTLLMSampler" else self.generator
        token = int(torch.multinomial(processed.exp(), 1, generator=generator))
        wanted = getattr(parameters, "logprobs_mode", LogprobMode.RAW)
        return token, processed if wanted is LogprobMode.PROCESSED else raw


class Result:
    """The response to one request."""

    def __init__(self, executor: Executor, prompt: list[int], parameters: Any, lora: LoRARequest | None) -> None:
        self._executor = weakref.ref(executor)
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self.prompt, self.parameters, self.lora = prompt, parameters, lora
        self.generator = torch.Generator().manual_seed(parameters.seed or 0)
        self.ids: list[int] = []
        self.log_probs: list[Any] = []
        self.aborting = self.sent = self.finished = False
        self.outputs: list[Any] = []

    def send(self, reason: str | Exception) -> None:
        """Deliver the end of the request to the event loop. A closed loop would end the worker's thread."""
        self.sent = True
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._queue.put_nowait, reason)

    async def aresult(self) -> Result:
        """Wait for the end and return this object."""
        assert self._loop is asyncio.get_running_loop(), "the event loop was not present during initialization"
        if not self.finished:
            reason = await self._queue.get()
            self.finished = True
            if isinstance(reason, Exception):
                raise reason
            self.outputs = [types.SimpleNamespace(token_ids=self.ids, logprobs=self.log_probs, finish_reason=reason)]
        return self

    def abort(self) -> None:
        """End the request. Fails after the shutdown, because there is no executor then."""
        executor: Any = self._executor()
        executor.abort_request(self)


class LLM:
    """Model of a checkpoint, with an adapter per request."""

    version = NEW
    started: list[LLM] = []  # noqa: RUF012

    def __init__(self, **arguments: Any) -> None:
        try:
            self.args = Arguments(**arguments)
        except TypeError as error:
            raise ValueError(f"invalid argument: {error}") from None
        if self.version == NEW and self.args.sampler_type == "TRTLLMSampler":
            raise ValueError("sampler_type: TRTLLMSampler was removed")
        self._executor: Executor | None = Executor(self.args)
        LLM.started.append(self)

    @property
    def executor(self) -> Executor:
        """The worker."""
        assert self._executor is not None
        return self._executor

    @property
    def is_running(self) -> bool:
        """Return whether the engine was not shut down."""
        return self._executor is not None

    def generate_async(self, inputs: dict[str, list[int]], parameters: Any, lora_request: Any = None) -> Result:
        """Return the response to one request."""
        prompt = inputs["prompt_token_ids"]
        if parameters.end_id is None and self.args.skip_tokenizer_init:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        limit = min(self.args.max_input_len, self.args.max_num_tokens)
        if len(prompt) > limit:
            raise ValueError(f"The prompt length ({len(prompt)}) exceeds {limit}")
        if lora_request is not None and not self.args.enable_lora:
            raise ValueError("LoRA is not enabled")
        if not parameters.ignore_eos and parameters.end_id != -1:
            raise NotImplementedError("the fake has no end token")
        if not parameters.include_stop_str_in_output:
            raise NotImplementedError("the fake does not remove stop tokens")
        result = Result(self.executor, prompt, parameters, lora_request)
        self.executor.arrived.put(result)
        return result

    def shutdown(self) -> None:
        """Stop the worker."""
        if self._executor is not None:
            self._executor.shutdown()
        self._executor = None


def install(monkeypatch: pytest.MonkeyPatch, version: str = NEW) -> type[LLM]:
    """Replace the modules that the engine imports. Return the class of engines, whose ``started`` lists the instances."""
    lora = "tensorrt_llm.lora_helper" if version == OLD else "tensorrt_llm._torch.peft.lora.config"
    parameters = _SamplingParams if version == OLD else _NewSamplingParams
    packages = (
        "tensorrt_llm._torch",
        "tensorrt_llm._torch.peft",
        "tensorrt_llm._torch.peft.lora",
        "tensorrt_llm.executor",
    )
    for name, content in {
        "tensorrt_llm": {"LLM": LLM, "SamplingParams": parameters, "__version__": version},
        "tensorrt_llm.llmapi": {"KvCacheConfig": KvCacheConfig, "CudaGraphConfig": CudaGraphConfig},
        "tensorrt_llm.sampling_params": {} if version == OLD else {"LogprobMode": LogprobMode},
        **{package: {} for package in packages},
        lora: {"LoraConfig": LoraConfig},
        "tensorrt_llm.executor.request": {"LoRARequest": LoRARequest},
    }.items():
        module = types.ModuleType(name)
        module.__path__ = []  # A package, so that missing modules below it are import errors.
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    LLM.version, LLM.started = version, []
    return LLM
