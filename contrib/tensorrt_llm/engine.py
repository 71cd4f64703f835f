"""Generation with the LLM API of TensorRT-LLM 1.x, from token ids, in a generator process in TensorRT-LLM's own environment.

New weights reach the engine through the disk, without pickles. With an adapter, each policy version is one LoRA request. Without
one, the engine is restarted with a new checkpoint. ``AsyncLLM.update_weights`` is not used: it needs Ray and sends pickles.

TensorRT-LLM itself starts one worker process per GPU and exchanges pickles with it on this machine. The workers inherit the
environment, so ``CUDA_VISIBLE_DEVICES`` of the generator process selects their GPUs.

Never run with the real package so far: it needs an NVIDIA GPU. The calls follow the sources of 1.1 to 1.3.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import shutil
import tempfile
import threading
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import structlog

from quartet.config.rollout import TensorRTLLMConfig
from quartet.config.root import Config
from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.random_streams import engine_seed
from quartet.engines.checkpoint_files import (
    adapter_tensors,
    base_tensors,
    read_safetensors,
    write_adapter,
    write_checkpoint,
)
from quartet.engines.engine import Cancelled as IsCancelled
from quartet.engines.engine import Engine, EngineKind, EngineProperties, EngineResponse, Guarantees, ServedModel
from quartet.engines.request_checks import check_requests
from quartet.engines.served_model import read_served_model
from quartet.engines.weight_folders import OwnedFolder
from quartet.errors import Cancelled, ConfigError, InvalidRequest, QuartetError, ServiceFailed
from quartet.weight_transfer.tensors import WeightSet, tensor_digest

log = structlog.get_logger()

NAME = "tensorrt-llm"
Sampler = Literal["TorchSampler", "TRTLLMSampler"]
"""Samplers by their names in TensorRT-LLM. Only TRTLLMSampler reads the seed of a request; version 1.3.0rc26 removed it."""
POLL_SECONDS = 0.1
"""Seconds between checks whether the caller still waits."""
ABORT_SECONDS = 10.0
"""Seconds for aborted requests to end. If they do not, the engine is restarted."""
DEFAULT_MAX_NUM_TOKENS = 8192
"""TensorRT-LLM's own default for the tokens of one forward pass. Without chunked prefill, a prompt must fit."""
ENDED = ("stop", "length")
"""Finish reasons of complete responses. Others, such as "timeout" and "cancelled", are errors."""
_LORA_CONFIG_MODULES = ("tensorrt_llm.lora_helper", "tensorrt_llm._torch.peft.lora.config")
"""Modules of LoraConfig: that of versions 1.1 and 1.2, and that of later ones."""


@dataclass(frozen=True, slots=True)
class TensorRTLLMSettings:
    """Settings of the engine. ``folder``: parent of the folders with weights; None for the system's temporary folder.

    ``memory_fraction``: share of the free GPU memory for the key-value cache. ``release_memory``: whether ``sleep`` shuts the
    engine down.
    """

    max_in_flight: int
    memory_fraction: float = 0.8
    release_memory: bool = False
    sampler: Sampler = "TorchSampler"
    tensor_parallel_size: int = 1
    chunked_prefill: bool = False
    cuda_graphs: bool = True
    folder: Path | None = None


def tensorrt_llm_properties(sampler: Sampler, adapter: bool, reports_at_temperature: bool) -> EngineProperties:
    """Return the guarantees. ``reports_at_temperature``: whether the version can report log-probs after the temperature."""
    return EngineProperties(
        name=f"{NAME} ({sampler}{', adapter' if adapter else ''})",
        seeded=sampler == "TRTLLMSampler",
        batch_invariant=False,
        log_probs="whole" if reports_at_temperature and sampler == "TorchSampler" else "none",
        weights="adapter" if adapter else "restart",
        digest="none",
    )


class TensorRTLLMEngine:
    """Engine that generates with tensorrt_llm.LLM. Raises ConfigError if the package cannot be imported."""

    def __init__(self, settings: TensorRTLLMSettings, served_model: ServedModel) -> None:
        _check_visible_devices(settings.tensor_parallel_size)
        try:
            self._library: Any = importlib.import_module("tensorrt_llm")
        except ImportError as error:
            raise ConfigError(
                f"rollout.engine {NAME}: {error}; run the generator in TensorRT-LLM's environment, such as the image of "
                "docker/Dockerfile.generator on its release image, or set rollout.engine torch"
            ) from None
        self._settings, self._served_model = settings, served_model
        self._log_prob_modes: Any = _optional_attribute("tensorrt_llm.sampling_params", "LogprobMode")
        self._owned_folder = OwnedFolder(settings.folder or Path(tempfile.gettempdir()), "quartet-tensorrt-llm-", 0o700)
        self._folder = self._owned_folder.path
        self._llm: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._weights: WeightSet | None = None
        self._adapter_folder: Path | None = None
        self._base_digests: dict[str, bytes] = {}

    @property
    def properties(self) -> EngineProperties:
        """Guarantees of this engine with its present settings and weights."""
        adapter = self._weights is not None and self._weights.adapter is not None
        return tensorrt_llm_properties(self._settings.sampler, adapter, self._log_prob_modes is not None)

    def load_weights(self, weights: WeightSet, changed: Collection[str]) -> Mapping[str, bytes]:
        """Write the weights to disk and load them: a new adapter, or a restart of the engine with the new checkpoint.

        Return digests of the files, which the engine reads. TensorRT-LLM cannot report what it holds in GPU memory, so
        ``properties.digest`` is "none". Raises ServiceFailed or ConfigError.
        """
        model, base = self._folder / "model", base_tensors(weights)
        if not model.exists() or not set(changed).isdisjoint(base):
            self._shut_down()
            shutil.rmtree(model, ignore_errors=True)
            write_checkpoint(model, self._served_model, base)
            self._base_digests = _digests(model / "model.safetensors")
        previous, self._adapter_folder = self._adapter_folder, None
        if weights.adapter is not None:
            self._adapter_folder = self._folder / f"adapter-{weights.version}"
            shutil.rmtree(self._adapter_folder, ignore_errors=True)
            write_adapter(self._adapter_folder, str(model), weights.adapter, adapter_tensors(weights))
        # The tensors are not used any more, and may be gone.
        self._weights = replace(weights, tensors={})
        self._start()
        if previous is not None and previous != self._adapter_folder:
            shutil.rmtree(previous, ignore_errors=True)
        if self._adapter_folder is None:
            return self._base_digests
        return self._base_digests | _digests(self._adapter_folder / "adapter_model.safetensors")

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParameters, seed: int, cancelled: IsCancelled
    ) -> Iterator[EngineResponse]:
        """Yield each response as soon as it is finished.

        Raises InvalidRequest at the call. While iterating, raises Cancelled, InvalidRequest for a request that TensorRT-LLM
        refuses, or ServiceFailed. After a failure the engine restarts at the next call.
        """
        check_requests(self._served_model, requests, sampling)
        if self._weights is None:
            raise ServiceFailed(f"{NAME}: no weights are loaded")
        return self._generate(requests, sampling, seed, cancelled)

    def sleep(self, everything: bool = True) -> None:
        """Shut the engine down if ``release_memory`` is set. The next call loads it from disk again."""
        if self._settings.release_memory:
            self._shut_down()

    def close(self) -> None:
        """Shut the engine down and delete the weights that were written for it."""
        self._shut_down()
        self._owned_folder.close()

    def _generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParameters, seed: int, cancelled: IsCancelled
    ) -> Iterator[EngineResponse]:
        if not requests:
            return
        with _polling(cancelled):
            self._start()
        running: dict[asyncio.Task[Any], tuple[GenerationRequest, Any]] = {}
        try:
            self._run(self._submit(requests, sampling, seed, running))
            while running:
                if cancelled():
                    raise Cancelled("generation was cancelled by its caller")
                for task in self._run(_first_finished(running)):
                    request, _ = running.pop(task)
                    yield self._response(request, task.result(), sampling)
        except QuartetError:
            raise
        except Exception as error:
            # An error of a request or of a worker: out of memory, a failed kernel, a dead process. It is not documented which of
            # them leave the engine in a usable state.
            self._shut_down()
            raise ServiceFailed(f"{NAME}: {type(error).__name__}: {error}") from error
        finally:
            self._abort(running)

    async def _submit(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        running: dict[asyncio.Task[Any], tuple[GenerationRequest, Any]],
    ) -> None:
        # A future can be awaited only if it was created while the event loop runs.
        lora = self._lora_request()
        for request in requests:
            try:
                future = self._llm.generate_async(
                    {"prompt_token_ids": request.prompt_ids.tolist()},
                    self._parameters(request, sampling, seed),
                    lora_request=lora,
                )
            except ValueError as error:
                raise InvalidRequest(f"{NAME}: request {request.id}: {error}") from None
            running[asyncio.create_task(future.aresult())] = request, future

    def _parameters(self, request: GenerationRequest, sampling: SamplingParameters, seed: int) -> Any:
        sampling = request.own_sampling(sampling)
        greedy = sampling.temperature == 0
        stops = sorted(self._served_model.stop_ids)
        arguments: dict[str, Any] = {
            "max_tokens": sampling.max_response_tokens,
            "temperature": 1.0 if greedy else sampling.temperature,
            "top_k": 1 if greedy else sampling.top_k,
            "top_p": None if greedy else sampling.top_p,
            # Every stop token is a stop word, which stays in the response. Versions differ in whether the end token itself stays.
            "end_id": -1,
            "pad_id": stops[0] if stops else 0,
            "ignore_eos": True,
            "stop_token_ids": None if sampling.ignore_eos else stops,
            "include_stop_str_in_output": True,
            "detokenize": False,
            "add_special_tokens": False,
        }
        if sampling.min_p and not greedy:
            arguments["min_p"] = sampling.min_p
        if self._settings.sampler == "TRTLLMSampler":
            arguments["seed"] = engine_seed(seed, request.id, request.turn)
        mode = self._log_prob_mode(sampling)
        if mode is not None:
            # 0 would be enough in later versions; in 1.2 it reports nothing.
            arguments["logprobs"] = 1
        if mode == "PROCESSED":
            arguments["logprobs_mode"] = self._log_prob_modes.PROCESSED
        return self._library.SamplingParams(**arguments)

    def _log_prob_mode(self, sampling: SamplingParameters) -> Literal["RAW", "PROCESSED"] | None:
        """Return which log-probs are those of the whole distribution at the sampling temperature, or None for neither.

        RAW ones are before the temperature, PROCESSED ones after temperature, top_k, top_p and min_p.
        """
        if sampling.temperature == 0:
            # The C++ sampler counts greedy sampling as top_k 1, whose distribution has one token.
            return "RAW" if self._settings.sampler == "TorchSampler" else None
        if sampling.reshapes:
            return None
        if sampling.temperature == 1:
            return "RAW"
        return "PROCESSED" if self._settings.sampler == "TorchSampler" and self._log_prob_modes is not None else None

    def _response(self, request: GenerationRequest, result: Any, sampling: SamplingParameters) -> EngineResponse:
        output = result.outputs[0]
        if output.finish_reason not in ENDED:
            raise ServiceFailed(f"{NAME}: response to {request.id}: ended by {output.finish_reason}")
        ids = list(output.token_ids)
        if self._log_prob_mode(request.own_sampling(sampling)) is None:
            return EngineResponse(request, ids, None)
        if len(output.logprobs or ()) != len(ids):
            raise ServiceFailed(
                f"{NAME}: response to {request.id}: {len(output.logprobs or ())} log-probs, {len(ids)} tokens"
            )
        values = [_log_prob(token, entry) for token, entry in zip(ids, output.logprobs, strict=True)]
        return EngineResponse(request, ids, values)

    def _start(self) -> None:
        """Start the engine if it does not run. Raises ConfigError for settings that this version refuses, or ServiceFailed."""
        if self._llm is not None:
            return
        assert self._weights is not None
        log.info("engine starts", engine=NAME, version=getattr(self._library, "__version__", "unknown"))
        try:
            self._llm = self._library.LLM(**self._arguments())
        except ValueError as error:
            # pydantic's ValidationError is one, too.
            raise ConfigError(f"rollout.tensorrt_llm: TensorRT-LLM refuses the settings: {error}") from error
        except QuartetError:
            raise
        except Exception as error:
            raise ServiceFailed(f"{NAME}: the engine does not start: {type(error).__name__}: {error}") from error
        self._loop = asyncio.new_event_loop()
        self._check_sampler()

    def _arguments(self) -> dict[str, Any]:
        assert self._weights is not None
        settings, adapter = self._settings, self._weights.adapter
        longest = self._served_model.max_sequence_tokens
        api = importlib.import_module("tensorrt_llm.llmapi")
        result: dict[str, Any] = {
            "model": str(self._folder / "model"),
            "dtype": self._served_model.dtype,
            "skip_tokenizer_init": True,
            "sampler_type": settings.sampler,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "enable_chunked_prefill": settings.chunked_prefill,
            "cuda_graph_config": api.CudaGraphConfig() if settings.cuda_graphs else None,
            "max_batch_size": settings.max_in_flight,
            # A restart empties the cache of key-value blocks. With an adapter the engine keeps running, and blocks that were
            # computed with the previous version must not be used again.
            "kv_cache_config": api.KvCacheConfig(
                free_gpu_memory_fraction=settings.memory_fraction, enable_block_reuse=adapter is None
            ),
        }
        if longest:
            # The default limits prompts to 1024 tokens.
            result |= {"max_input_len": longest, "max_seq_len": longest}
            if not settings.chunked_prefill:
                result["max_num_tokens"] = max(DEFAULT_MAX_NUM_TOKENS, longest)
        if adapter is not None:
            result |= {
                "enable_lora": True,
                "lora_config": _lora_config_class()(
                    lora_dir=[str(self._adapter_folder)], max_lora_rank=adapter.rank, max_loras=1, max_cpu_loras=1
                ),
            }
        return result

    def _check_sampler(self) -> None:
        """Raise ConfigError if the running engine ignores the seeds of requests although the settings ask for them."""
        if self._settings.sampler != "TRTLLMSampler":
            return
        chosen = getattr(getattr(self._llm, "args", None), "sampler_type", None)
        name = str(getattr(chosen, "value", chosen))
        if name != self._settings.sampler:
            self._shut_down()
            raise ConfigError(
                f"rollout.tensorrt_llm.sampler {self._settings.sampler}: this version of TensorRT-LLM uses {name}; set sampler "
                "TorchSampler, or use a version that has it"
            )

    def _lora_request(self) -> Any:
        if self._adapter_folder is None:
            return None
        assert self._weights is not None
        kind = importlib.import_module("tensorrt_llm.executor.request").LoRARequest
        # The engine caches adapters by this number, which starts at 1.
        return kind(self._adapter_folder.name, self._weights.version + 1, str(self._adapter_folder))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None
        return self._loop.run_until_complete(coroutine)

    def _abort(self, running: dict[asyncio.Task[Any], tuple[GenerationRequest, Any]]) -> None:
        """Abort requests and wait for their end, so that none runs during the next call. If they do not end, shut down."""
        # A stopped engine has no executor, and abort would fail.
        if not running or self._llm is None:
            return
        try:
            for _, future in running.values():
                if not future.finished:
                    future.abort()
            done, left = self._run(asyncio.wait(running, timeout=ABORT_SECONDS))
            for task in done:
                task.exception()  # Of an aborted request. asyncio reports exceptions that are never read.
            if left:
                raise TimeoutError(f"{len(left)} requests still run after {ABORT_SECONDS:g} s")
        except Exception as error:
            log.warning("engine does not abort its requests, and is restarted", engine=NAME, error=str(error))
            self._shut_down()

    def _shut_down(self) -> None:
        llm, self._llm = self._llm, None
        if llm is None:
            return
        try:
            llm.shutdown()
        except Exception as error:
            log.warning("engine does not shut down cleanly", engine=NAME, error=str(error))
        finally:
            del llm
            gc.collect()
            # After the shutdown: until then a thread of the engine delivers results to the loop.
            loop, self._loop = self._loop, None
            if loop is not None:
                for task in asyncio.all_tasks(loop):
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        loop.run_until_complete(task)
                loop.close()


@contextlib.contextmanager
def _polling(cancelled: IsCancelled) -> Iterator[None]:
    """Poll ``cancelled`` on another thread inside this block, because a start takes minutes and is no stuck generation.

    A start that never ends is bounded by the deadline of the call.
    """
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(POLL_SECONDS):
            cancelled()

    thread = threading.Thread(target=poll, name="start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def _first_finished(tasks: Collection[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """Return the tasks that finish first; none after POLL_SECONDS."""
    done, _ = await asyncio.wait(tasks, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    return done


def _digests(file: Path) -> dict[str, bytes]:
    return {name: tensor_digest(tensor) for name, tensor in read_safetensors(file).items()}


def _check_visible_devices(tensor_parallel_size: int) -> None:
    """Raise ConfigError if the process sees fewer GPUs than the engine needs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return
    number = len([device for device in visible.split(",") if device.strip()])
    if number < tensor_parallel_size:
        raise ConfigError(
            f"rollout.tensorrt_llm.tensor_parallel_size {tensor_parallel_size}: CUDA_VISIBLE_DEVICES {visible!r} shows {number} "
            "GPUs to the generator; set it to the GPUs of this generator"
        )


def _lora_config_class() -> Any:
    for module in _LORA_CONFIG_MODULES:
        optional = _optional_attribute(module, "LoraConfig")
        if optional is not None:
            return optional
    raise ConfigError(
        f"rollout.engine {NAME}: this version has LoraConfig neither in {' nor in '.join(_LORA_CONFIG_MODULES)}; use 1.1 to 1.3"
    )


def _optional_attribute(module: str, name: str) -> Any:
    """Return a name of a module, or None if one of the two does not exist in this version."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _log_prob(token: int, entry: Any) -> float:
    """Return the log-prob of a token from an entry, which is a number or a mapping of token to log-prob."""
    return float(entry[token].logprob) if isinstance(entry, dict) else float(entry)


def create(config: Config) -> tuple[Engine, ServedModel]:
    """Return the engine of ``rollout.tensorrt_llm``, without starting it.

    Raises ConfigError if the package or a GPU is missing, and ModelError.
    """
    chosen, model = (
        config.rollout.tensorrt_llm or TensorRTLLMConfig(),
        read_served_model(config.actor.model, config.actor.dtype),
    )
    settings = TensorRTLLMSettings(
        max_in_flight=config.rollout.max_concurrent_sequences,
        memory_fraction=chosen.memory_fraction,
        release_memory=chosen.release_memory,
        sampler=chosen.sampler,
        tensor_parallel_size=chosen.tensor_parallel_size,
        chunked_prefill=chosen.chunked_prefill,
        cuda_graphs=chosen.cuda_graphs,
    )
    return TensorRTLLMEngine(settings, model), model


KIND = EngineKind(
    NAME,
    "tensorrt_llm",
    (
        Guarantees(
            tensorrt_llm_properties("TorchSampler", adapter=False, reports_at_temperature=True),
            "a generator in TensorRT-LLM's image",
            "not run: it needs an NVIDIA GPU; a fake with the behaviour of its sources stands in",
            "Seeded with sampler TRTLLMSampler. With actor.lora: adapter. No log-probs where the version cannot report them "
            "after the temperature.",
        ),
    ),
    create,
    seed_remedy=("set rollout.tensorrt_llm.sampler: TRTLLMSampler, if the version has it, or rollout.engine: torch"),
)
