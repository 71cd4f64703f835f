"""vLLM in the generator's process: its AsyncLLM, from prompt token ids, with the policy's weights and log-probs.

vLLM runs in separate processes, one for each GPU. New weights reach them as a file in memory that vLLM's own loaders read
(``reload_weights``), and an adapter as one LoRA request per policy version. Nothing is pickled by Quartet, and vLLM's insecure
serialization stays off. ``quartet.engines.vllm_worker`` has the part that runs in vLLM's processes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import multiprocessing
import os
import queue
import shutil
import struct
import tempfile
import threading
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from quartet.engines.engine import Cancelled as IsCancelled
from quartet.engines.engine import EngineProperties, EngineResponse, ServedModel
from quartet.engines.validation import check_requests
from quartet.errors import Cancelled, ConfigError, ServiceFailed
from quartet.random_streams import engine_seed
from quartet.types import GenerationRequest, SamplingParameters, VersionSpan
from quartet.weight_transfer.digests import combined_digest, tensor_digest
from quartet.weight_transfer.tensors import ITEM_BYTES, AdapterSettings, HostTensor, WeightSet

NAME = "vLLM"
POLL_SECONDS = 0.05
"""Time between checks whether the caller still waits."""
EXIT_SECONDS = 20.0
"""Time that vLLM's processes get to end."""
ENDED = ("stop", "length")
"""Finish reasons of complete responses."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM allocates memory for."""
CPU_CACHE_BYTES = 4 << 30
"""Default size of the key-value cache on a CPU. A fraction of the memory of a machine that also trains would be too much."""
TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_OWN_ARGUMENTS = frozenset(
    {
        "model", "tokenizer", "hf_config_path", "skip_tokenizer_init", "trust_remote_code", "load_format", "dtype",
        "max_model_len", "tensor_parallel_size", "gpu_memory_utilization", "max_num_seqs", "enforce_eager",
        "enable_prefix_caching", "logprobs_mode", "generation_config", "enable_lora", "max_loras", "max_lora_rank",
        "lora_target_modules", "enable_sleep_mode", "worker_cls", "worker_extension_cls", "quantization",
        "quantization_config", "speculative_config", "pipeline_parallel_size", "data_parallel_size",
        "logits_processors", "scheduler_cls", "runner", "convert", "weight_transfer_config", "io_processor_plugin",
        "reasoning_parser_plugin", "model_class_overrides", "hf_token", "offload_backend", "cpu_offload_gb",
        "cpu_offload_params", "max_logprobs", "override_generation_config",
    }
)  # fmt: skip
"""Arguments that Quartet sets, and those that would run other code, load other weights or change their values."""


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """Settings of the engine.

    ``tensor_parallel_size`` GPUs share the model. ``memory_fraction`` of each GPU's memory is for weights and cache. On a CPU the
    cache has CPU_CACHE_BYTES, or the engine argument kv_cache_memory_bytes. ``release_memory`` frees the GPU's memory between
    generations. ``engine_arguments`` are further arguments of vLLM's ``EngineArgs``, by name.
    """

    max_concurrent_sequences: int
    tensor_parallel_size: int = 1
    memory_fraction: float = 0.85
    release_memory: bool = False
    prefix_caching: bool = True
    enforce_eager: bool = False
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)


class VLLMEngine:
    """Engine that generates with vllm.AsyncLLM.

    vLLM starts at the first ``load_weights``, because only the weights tell whether there is an adapter. Raises ConfigError if
    vLLM is not installed, or refuses the model or an argument.
    """

    worker_extension = "quartet.engines.vllm_worker.WeightsExtension"
    """Class that vLLM adds to its workers."""

    def __init__(self, settings: VLLMSettings, served_model: ServedModel) -> None:
        self._settings, self._served = settings, served_model
        self._vllm = _import_vllm()
        _check_arguments(settings.engine_arguments, self._vllm.AsyncEngineArgs)
        self._folder = Path(tempfile.mkdtemp(prefix="quartet-vllm-", dir=_memory_folder()))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._llm: Any = None
        self._adapter: AdapterSettings | None = None
        self._lora: Any = None
        self._lora_count = 0
        self._modules: dict[str, list[str]] = {}
        # Held during an update, and while a generation begins.
        self._updating = threading.Lock()
        self._salt = ""
        self._versions: dict[str, tuple[int, bytes]] = {}
        self._loads = 0
        self._generations = 0
        self._paused = False
        self._failed_update = ""
        self._asleep = False
        self._count = 0
        self._processes: set[Any] = set()

    @property
    def properties(self) -> EngineProperties:
        """Guarantees of this engine.

        Responses depend on their company in general: kernels for batches of other sizes may sum in another order. vLLM's setting
        VLLM_BATCH_INVARIANT changes that on some GPUs.
        """
        invariant = os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0") and not _on_cpu()
        return EngineProperties(
            name="vllm",
            seeded=True,
            batch_invariant=invariant,
            log_probs="whole",
            weights="tensors",
            digest="read back",
            in_flight_updates=True,
        )

    def load_weights(self, weights: WeightSet, changed: Collection[str]) -> Mapping[str, bytes]:
        """Load a policy version and reset the prefix cache. See ``Engine.load_weights``.

        The digests are those of the parameters that vLLM computes with, read in its processes after loading. Where vLLM keeps a
        weight only inside a packed CPU kernel, they are of the product of the kernel with the identity matrix, so the sign of a
        weight of zero is not seen. With an adapter, they are those of the matrices in the slot of the adapter, see
        ``WeightsExtension.quartet_adapter_digests``. With tensor parallelism every rank reads its own part.

        During a generation vLLM is paused between two tokens. Running requests keep their key-value cache; no later request finds
        it. If the update fails, or the digest differs, vLLM stays paused and the generation raises ServiceFailed.
        """
        with self._updating:
            self._salt = ""  # A failure below must not leave a mixture that generates.
            in_flight = self._generations > 0
            if in_flight:
                self._pause(weights)
            try:
                digests = self._load_version(weights, changed)
                if in_flight and combined_digest(digests) != weights.digest:
                    self._failed_update = (
                        f"version {weights.version} did not arrive whole in the middle of a generation"
                    )
                    return digests
                if not in_flight:
                    self._reset_prefix_cache()
                self._name_version(weights)
                if self._paused:
                    self._call(self._llm.resume_generation(), "resume_generation")
                    self._paused = False
            except BaseException as error:
                self._failed_update = f"version {weights.version} failed in the middle of a generation: {_text(error)}"
                self._salt = ""
                raise
            return digests

    def _pause(self, weights: WeightSet) -> None:
        """Stop vLLM between two tokens. Raises ConfigError with an adapter."""
        if weights.adapter is not None:
            raise ConfigError(f"{NAME}: an adapter cannot change in the middle of a response")
        # It returns when the output of the last step has left vLLM's engine core.
        self._call(self._llm.pause_generation(mode="keep", clear_cache=False), "pause_generation")
        self._paused = True

    def _name_version(self, weights: WeightSet) -> None:
        """Name the loaded weights for the prefix cache, and for the tokens that vLLM makes from now on.

        The name is new at each load, even for equal weights: running requests leave blocks of several versions under theirs.
        """
        self._loads += 1
        name = f"{weights.digest.hex()}-{self._loads}"
        self._call(self._llm.update_weight_version(name), "update_weight_version")
        self._versions[name] = (weights.version, weights.digest)
        self._salt = name

    def _load_version(self, weights: WeightSet, changed: Collection[str]) -> dict[str, bytes]:
        """Load a policy version, and return the digests of what vLLM holds afterwards."""
        adapter_names = {name for name in weights.tensors if _is_adapter(name)} if weights.adapter else set()
        base = {name: tensor for name, tensor in weights.tensors.items() if name not in adapter_names}
        self._check_types(base)
        if self._llm is None:
            self._start(weights.adapter)
            changed = weights.tensors.keys()
        if weights.adapter != self._adapter:
            raise ConfigError(f"{NAME}: the settings of the adapter changed; restart the generator")
        self._wake()
        loaded = self._closure(set(changed) & base.keys())
        if loaded:
            self._load({name: base[name] for name in base if name in loaded})
        digests = self._read_back(base)
        if weights.adapter is not None:
            digests |= self._load_adapter(weights, adapter_names, weights.adapter)
        return digests

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParameters, seed: int, cancelled: IsCancelled
    ) -> Iterator[EngineResponse]:
        """Yield each response as soon as it is finished. See ``Engine.generate``.

        The log-probs are those of the whole distribution at the temperature. With top_k or top_p vLLM only has those of the
        truncated distribution, so the responses have none.
        """
        check_requests(self._served, requests, sampling)
        if not self._salt:
            raise ServiceFailed(f"{NAME}: no weights are loaded; load a policy version first")
        return self._generate(requests, sampling, seed, cancelled)

    def sleep(self) -> None:
        """Free the GPU's memory if ``release_memory`` is set: weights move to host memory, the cache is discarded."""
        if self._settings.release_memory and self._llm is not None and not self._asleep:
            self._call(self._llm.sleep(level=1), "sleep")
            self._asleep = True

    def close(self) -> None:
        """End vLLM's processes and delete its files."""
        llm, self._llm = self._llm, None
        self._salt = ""
        if self._thread.is_alive():
            # Before vLLM's processes end: its task that reads their output would report their end as an error.
            asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()
            if llm is not None:
                llm.shutdown()
            for process in self._processes:
                process.join(EXIT_SECONDS)
                if process.is_alive():
                    process.kill()
                    process.join()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, adapter: AdapterSettings | None) -> None:
        """Start vLLM with random weights. Raises ConfigError."""
        settings, served = self._settings, self._served
        arguments: dict[str, Any] = {
            **settings.engine_arguments,
            "model": served.model,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": served.dtype,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "gpu_memory_utilization": settings.memory_fraction,
            "max_num_seqs": settings.max_concurrent_sequences,
            "enforce_eager": settings.enforce_eager,
            "enable_prefix_caching": settings.prefix_caching,
            "enable_sleep_mode": settings.release_memory,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "worker_extension_cls": self.worker_extension,
        }
        if _on_cpu():
            arguments.setdefault("kv_cache_memory_bytes", CPU_CACHE_BYTES)
        if served.max_sequence_tokens:
            arguments["max_model_len"] = served.max_sequence_tokens
        if adapter is not None:
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _lora_rank(adapter.rank)}

        before = set(multiprocessing.active_children())
        try:
            config = self._vllm.AsyncEngineArgs(**arguments).create_engine_config()
            _check_head_size(config.model_config.get_head_size(), served.model)
            self._llm = asyncio.run_coroutine_threadsafe(_start_async(self._vllm.AsyncLLM, config), self._loop).result()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{NAME} does not start with the model {served.model}: {_text(error)}; the log above has the cause if it is in "
                "one of vLLM's processes"
            ) from error
        self._processes = set(multiprocessing.active_children()) - before
        self._adapter = adapter

    def _load(self, tensors: Mapping[str, HostTensor]) -> None:
        path = self._folder / "weights.safetensors"
        try:
            _write(path, tensors)
            # Every rank has the same modules.
            self._modules = json.loads(self._rpc("quartet_load", str(path))[0])
        finally:
            path.unlink(missing_ok=True)

    def _closure(self, changed: set[str]) -> set[str]:
        """Return the tensors to load so that every module with a changed tensor is loaded as a whole.

        vLLM fuses q, k and v into one parameter, and gate and up into another. It allocates a module's parameters again when it
        loads one of its tensors.
        """
        if not changed <= self._modules.keys():
            return changed | self._modules.keys()
        touched = {module for name in changed for module in self._modules[name]}
        return {name for name, modules in self._modules.items() if touched.intersection(modules)}

    def _read_back(self, tensors: Mapping[str, HostTensor]) -> dict[str, bytes]:
        """Return the digest of each tensor from the regions that the ranks hold.

        A region that is a part of a tensor is compared with the same part of the tensor that was sent. Equal regions that cover
        the tensor prove its content.
        """
        ranks = [json.loads(reply) for reply in self._rpc("quartet_digests")]
        digests = {}
        for name, tensor in tensors.items():
            entries = [entry for rank in ranks for entry in rank.get(name, ())]
            digests[name] = _combine(name, tensor, entries)
        return digests

    def _load_adapter(self, weights: WeightSet, names: set[str], adapter: AdapterSettings) -> dict[str, bytes]:
        """Load the adapter under a new id, and return the digests of its matrices."""
        folder = self._folder / "adapter"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        path = folder / "adapter_model.safetensors"
        _write(path, {name: weights.tensors[name] for name in weights.tensors if name in names})
        config = {
            "peft_type": "LORA",
            "r": adapter.rank,
            "lora_alpha": adapter.alpha,
            "target_modules": list(adapter.target_modules),
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        from vllm.lora.request import LoRARequest

        if self._lora is not None:
            self._call(self._llm.remove_lora(self._lora.lora_int_id), "remove_lora")
        self._lora_count += 1
        # A new id for each version: vLLM keeps an adapter by its id.
        self._lora = LoRARequest(f"policy-{self._lora_count}", self._lora_count, str(folder))
        if not self._call(self._llm.add_lora(self._lora), "add_lora"):
            raise ServiceFailed(f"{NAME}: did not load the adapter of policy version {weights.version}")
        return self._read_back_adapter(path, adapter)

    def _read_back_adapter(self, path: Path, adapter: AdapterSettings) -> dict[str, bytes]:
        """Return the digest of each matrix of the active adapter, whose file is ``path``."""
        scaling = adapter.alpha / adapter.rank
        replies = self._rpc("quartet_adapter_digests", str(path), self._lora.lora_int_id, scaling)
        ranks = [json.loads(reply) for reply in replies]
        return {name: _agreed([bytes.fromhex(rank[name]) for rank in ranks]) for name in ranks[0]}

    def _reset_prefix_cache(self) -> None:
        if not self._call(self._llm.reset_prefix_cache(), "reset_prefix_cache"):
            raise ServiceFailed(f"{NAME}: the prefix cache is still in use; cancel all generations before an update")

    def _wake(self) -> None:
        if self._asleep:
            self._call(self._llm.wake_up(), "wake_up")
            self._asleep = False

    def _cache_salt(self) -> str | None:
        """Return a key of the prefix cache. Another policy version never finds the blocks of this one."""
        return self._salt

    def _generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParameters, seed: int, cancelled: IsCancelled
    ) -> Iterator[EngineResponse]:
        results: queue.SimpleQueue[tuple[GenerationRequest, Any]] = queue.SimpleQueue()
        with self._updating:
            if not self._salt:
                raise ServiceFailed(f"{NAME}: no weights are loaded; load a policy version first")
            self._wake()
            self._failed_update = ""
            self._versions = {self._salt: self._versions[self._salt]}
            work = _Task(self._run_requests(requests, sampling, seed, self._cache_salt(), results), self._loop)
            self._generations += 1
        truncated = sampling.temperature != 0 and (sampling.top_k > 0 or sampling.top_p < 1)
        try:
            for _ in requests:
                while True:
                    if cancelled():
                        raise Cancelled("generation was cancelled by its caller")
                    if self._failed_update:
                        raise ServiceFailed(f"{NAME}: {self._failed_update}; its responses are discarded")
                    try:
                        request, result = results.get(timeout=POLL_SECONDS)
                        break
                    except queue.Empty:
                        continue
                yield self._response(request, result, truncated)
        finally:
            # vLLM aborts the rest: no request of this call runs after it.
            work.cancel()
            with self._updating:
                self._generations -= 1

    def _response(self, request: GenerationRequest, result: Any, truncated: bool) -> EngineResponse:
        """Return a checked response with the versions of its parts."""
        response = _response(request, result, truncated)
        parts = result.outputs[0].weight_versions
        if not parts or parts[-1].end != len(response.token_ids):
            raise ServiceFailed(f"{NAME}: response to {request.id}: names no version of the weights for each token")
        if unknown := [part.version for part in parts if part.version not in self._versions]:
            raise ServiceFailed(f"{NAME}: response to {request.id}: of the weights {unknown[0]}, which were not loaded")
        spans = (VersionSpan(*self._versions[part.version], part.end - part.start) for part in parts)
        return dataclasses.replace(response, spans=tuple(span for span in spans if span.tokens))

    async def _run_requests(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        salt: str | None,
        results: queue.SimpleQueue[tuple[GenerationRequest, Any]],
    ) -> None:
        tasks = [asyncio.create_task(self._run_request(request, sampling, seed, salt, results)) for request in requests]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_request(
        self,
        request: GenerationRequest,
        sampling: SamplingParameters,
        seed: int,
        salt: str | None,
        results: queue.SimpleQueue[tuple[GenerationRequest, Any]],
    ) -> None:
        """Put the result of a request, or its error, into ``results``."""
        self._count += 1
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids.tolist()}
        if salt:
            prompt["cache_salt"] = salt
        result: Any = None
        try:
            parameters = self._parameters(request, sampling, seed)
            async for output in self._llm.generate(
                prompt, parameters, f"{self._count}-{request.id}", lora_request=self._lora
            ):
                result = output
        except Exception as error:
            result = error
        results.put((request, result))

    def _parameters(self, request: GenerationRequest, sampling: SamplingParameters, seed: int) -> Any:
        greedy = sampling.temperature == 0
        from vllm.sampling_params import RequestOutputKind

        return self._vllm.SamplingParams(
            max_tokens=sampling.max_response_tokens,
            temperature=sampling.temperature,
            top_k=0 if greedy else sampling.top_k,
            top_p=1.0 if greedy else sampling.top_p,
            seed=engine_seed(seed, request.id),
            # Stop tokens end a response and stay in it. The EOS of the model's own config is not among them by itself.
            ignore_eos=True,
            stop_token_ids=None if sampling.ignore_eos else sorted(self._served.stop_ids),
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _check_types(self, tensors: Mapping[str, HostTensor]) -> None:
        expected = TYPES[self._served.dtype]
        for name, tensor in tensors.items():
            if tensor.dtype != expected:
                raise ConfigError(
                    f"{NAME}: the weight {name} has the type {tensor.dtype}, the engine {expected}; vLLM would round it; "
                    "use the same dtype for the policy and the engine"
                )

    def _rpc(self, method: str, *arguments: Any) -> list[str]:
        """Call a method in every worker and return the result of each rank."""
        replies: list[str] = self._call(self._llm.collective_rpc(method, args=arguments), method)
        return replies

    def _call(self, coroutine: Coroutine[Any, Any, Any], what: str) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except Exception as error:
            raise ServiceFailed(f"{NAME}: {what} failed: {_text(error)}") from error


class _Task:
    """A task of an event loop in another thread."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._ended = loop, threading.Event()
        self._task: asyncio.Task[None]
        loop.call_soon_threadsafe(self._start, coroutine)

    def cancel(self) -> None:
        """Cancel the task, and wait until it has ended."""
        self._loop.call_soon_threadsafe(lambda: self._task.cancel())
        self._ended.wait()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(lambda _: self._ended.set())


def _import_vllm() -> Any:
    # vLLM's processes must not be forked from a process with threads of gRPC. No reports of usage leave the machine.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # By default each engine on a CPU binds its threads to all cores but one, and training uses the same cores.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    try:
        import vllm
        from vllm.v1.engine.async_llm import AsyncLLM
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"the engine vllm: {error}; run the generator in an environment with vLLM 0.32 or newer, for example the image of "
            "docker/Dockerfile.generator"
        ) from error

    @dataclass(frozen=True, slots=True)
    class Library:
        AsyncLLM: Any
        AsyncEngineArgs: Any
        SamplingParams: Any

    return Library(AsyncLLM, vllm.AsyncEngineArgs, vllm.SamplingParams)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


async def _start_async(engine: Any, config: Any) -> Any:
    """Create vLLM's engine in the event loop that its tasks run in."""
    return engine.from_vllm_config(config)


def _check_head_size(size: int, model: str) -> None:
    """Raise ConfigError for a head size that CPU attention refuses. vLLM only finds out in the middle of a generation."""
    if not _on_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if not CPUAttentionBackend.supports_head_size(size):
        raise ConfigError(
            f"{NAME}: the model {model} has heads of size {size}; on a CPU vLLM takes "
            f"{', '.join(map(str, CPUAttentionBackend.get_supported_head_sizes()))}; use a GPU or engine torch"
        )


def _check_arguments(arguments: Mapping[str, Any], engine_args: Any) -> None:
    known = {item.name for item in dataclasses.fields(engine_args)}
    for name in arguments:
        if name in _OWN_ARGUMENTS:
            raise ConfigError(f"{NAME} argument {name}: Quartet sets it or excludes it; remove it from the arguments")
        if name not in known:
            raise ConfigError(f"{NAME} argument {name}: not an argument of this version's EngineArgs; check its name")


def _response(request: GenerationRequest, result: Any, truncated: bool) -> EngineResponse:
    where = f"{NAME}: response to {request.id}"
    if isinstance(result, Exception):
        raise ServiceFailed(f"{where}: {_text(result)}") from result
    output = result.outputs[0] if result is not None else None
    if output is None or output.finish_reason not in ENDED:
        raise ServiceFailed(f"{where}: ended by {output.finish_reason if output else 'nothing'}")
    ids = list(output.token_ids)
    if truncated:
        return EngineResponse(request, ids, None)
    entries = output.logprobs or []
    if len(entries) != len(ids):
        raise ServiceFailed(f"{where}: {len(entries)} log-probs for {len(ids)} tokens")
    return EngineResponse(request, ids, [entry[token].logprob for token, entry in zip(ids, entries, strict=True)])


def _text(error: BaseException) -> str:
    """Return the message of an error and of its causes: vLLM's own errors are often empty."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None:
        text = str(current) or type(current).__name__
        if text not in parts:
            parts.append(text)
        current = current.__cause__
    return ": ".join(parts)


def _combine(name: str, tensor: HostTensor, entries: Sequence[Any]) -> bytes:
    """Return the tensor's digest if all regions hold its content; otherwise another one. Raises ServiceFailed."""
    if not entries:
        raise ServiceFailed(f"{NAME}: holds no copy of the weight {name} that can be read back; use another engine")
    whole, partial, differs = [], [], False
    covered = None
    for offset, size, stride, text in entries:
        digest = bytes.fromhex(text)
        if _is_whole(tensor, offset, size, stride):
            whole.append(digest)
            continue
        if covered is None:
            covered = np.zeros(int(np.prod(tensor.shape)), bool)
        _region(covered, offset, size, stride)[...] = True
        expected = xxhash.xxh3_128_digest(np.ascontiguousarray(_region(_elements(tensor), offset, size, stride)).data)
        differs |= digest != expected
        partial.append(digest)
    if partial and not whole and covered is not None and not covered.all():
        raise ServiceFailed(f"{NAME}: only a part of the weight {name} can be read back; use another engine")
    if differs:
        return xxhash.xxh3_128_digest(b"".join(partial))
    return _agreed([*whole, *([tensor_digest(tensor)] if partial else [])])


def _agreed(digests: Sequence[bytes]) -> bytes:
    """Return the digest that all copies have. If they differ, return one that no copy has."""
    return digests[0] if len(set(digests)) == 1 else xxhash.xxh3_128_digest(b"".join(digests))


def _is_whole(tensor: HostTensor, offset: int, size: Sequence[int], stride: Sequence[int]) -> bool:
    row_major = _row_major(size)
    return (
        offset == 0
        and tuple(size) == tensor.shape
        and all(n == 1 or s == r for n, s, r in zip(size, stride, row_major, strict=True))
    )


def _row_major(size: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= n
    return strides[::-1]


def _elements(tensor: HostTensor) -> NDArray[Any]:
    return tensor.data.reshape(-1).view(np.uint32 if ITEM_BYTES[tensor.dtype] == 4 else np.uint16)


def _region(elements: NDArray[Any], offset: int, size: Sequence[int], stride: Sequence[int]) -> NDArray[Any]:
    """Return a view of a region of a tensor's elements. Offset and strides are in elements. Raises ServiceFailed."""
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if offset < 0 or min(stride, default=0) < 0 or last >= elements.size:
        raise ServiceFailed(f"{NAME}: reported a region outside its weight")
    item = elements.itemsize
    return np.lib.stride_tricks.as_strided(elements[offset:], tuple(size), tuple(s * item for s in stride))


def _write(path: Path, tensors: Mapping[str, HostTensor]) -> None:
    """Write tensors in the safetensors format without copying them."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.data).data)


def _memory_folder() -> str | None:
    """Return the folder of a file system in memory, or None for the default folder of temporary files."""
    folder = Path("/dev/shm")  # noqa: S108 - mkdtemp creates a private folder in it.
    return str(folder) if folder.is_dir() and os.access(folder, os.W_OK) else None


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _lora_rank(rank: int) -> int:
    for allowed in LORA_RANKS:
        if rank <= allowed:
            return allowed
    raise ConfigError(f"{NAME}: an adapter of rank {rank}; vLLM takes up to {LORA_RANKS[-1]}")


async def _end_tasks() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
