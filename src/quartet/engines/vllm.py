"""vLLM in the generator's process: its AsyncLLM, from prompt token ids, with the policy's weights and log-probs.

vLLM runs in separate processes, one for each GPU. They map the memory that new weights are in, through a backend of vLLM's own
weight transfer; an adapter replaces the one before. Nothing is pickled by Quartet, and vLLM's insecure
serialization stays off. ``vllm_weights`` has the weights, ``vllm_process`` the calls, and ``vllm_transfer`` and ``vllm_worker``
the part that runs in vLLM's processes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import queue
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.random_streams import engine_seed
from quartet.contract.trajectory import VersionSpan
from quartet.engines.checkpoint_files import base_tensors
from quartet.engines.engine import Cancelled as IsCancelled
from quartet.engines.engine import Engine, EngineKind, EngineProperties, EngineResponse, Guarantees, ServedModel
from quartet.engines.request_checks import check_requests
from quartet.engines.served_model import read_served_model
from quartet.engines.vllm_library import (
    BACKEND,
    NAME,
    check_arguments,
    check_speculation,
    import_vllm,
    lora_rank,
    on_cpu,
)
from quartet.engines.vllm_process import VLLMProcess, error_text
from quartet.engines.vllm_weights import VLLMWeights
from quartet.engines.weight_folders import OwnedFolder
from quartet.errors import Cancelled, ConfigError, EngineFailed, ServiceFailed
from quartet.weight_transfer.tensors import AdapterSettings, WeightSet, combined_digest

if TYPE_CHECKING:
    from quartet.config.rollout import SpeculativeDecodingConfig
    from quartet.config.root import Config

POLL_SECONDS = 0.05
"""Time between checks whether the caller still waits."""
ENDED = ("stop", "length")
"""Finish reasons of complete responses."""
CPU_CACHE_BYTES = 4 << 30
"""Default size of the key-value cache on a CPU. A fraction of the memory of a machine that also trains would be too much."""
TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
PROPERTIES = EngineProperties(
    "vllm",
    seeded=True,
    batch_invariant=False,
    log_probs="whole",
    weights="tensors",
    digest="read back",
    in_flight_updates=True,
)
"""Guarantees with default settings."""


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """Settings of the engine.

    ``tensor_parallel_size`` GPUs share the model. ``memory_fraction`` of each GPU's memory is for weights and cache. On a CPU the
    cache has CPU_CACHE_BYTES, or the engine argument kv_cache_memory_bytes. ``release_memory`` frees the GPU's memory between
    generations. vLLM counts as stuck if a generation makes no step for ``stall_seconds``. ``engine_arguments`` are further
    arguments of vLLM's ``EngineArgs``, by name; ``speculative`` is its ``speculative_config``, or empty. ``routed_experts``:
    responses have the experts of their tokens.
    """

    max_concurrent_sequences: int
    tensor_parallel_size: int = 1
    memory_fraction: float = 0.85
    release_memory: bool = False
    prefix_caching: bool = True
    enforce_eager: bool = False
    stall_seconds: float = 600.0
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    speculative: Mapping[str, Any] = field(default_factory=dict)
    routed_experts: bool = False


class VLLMEngine:
    """Engine that generates with vllm.AsyncLLM.

    vLLM starts at the first ``load_weights``, because only the weights tell whether there is an adapter. Raises ConfigError if
    vLLM is not installed, or refuses the model or an argument.
    """

    worker_extension = "quartet.engines.vllm_worker.WeightsExtension"
    """Class that vLLM adds to its workers."""

    def __init__(self, settings: VLLMSettings, served_model: ServedModel) -> None:
        self._settings, self._served = settings, served_model
        self._vllm = import_vllm()
        check_arguments(settings.engine_arguments, self._vllm.AsyncEngineArgs)
        self._owned_folder = OwnedFolder(_memory_folder(), "quartet-vllm-", 0o700)
        self._folder = self._owned_folder.path
        self._process = VLLMProcess(self._vllm)
        self._weights = VLLMWeights(self._process, served_model.model, self._folder)
        self._adapter: AdapterSettings | None = None
        # Held during an update, and while a generation begins.
        self._updating = threading.Lock()
        self._salt = ""
        self._versions: dict[str, tuple[int, bytes]] = {}
        self._loads = 0
        self._generations = 0
        self._paused = False
        self._failed_update = ""
        self._count = 0

    @property
    def properties(self) -> EngineProperties:
        """Guarantees of this engine.

        Responses depend on their company in general: kernels for batches of other sizes may sum in another order. vLLM's setting
        VLLM_BATCH_INVARIANT changes that on some GPUs.
        """
        invariant = os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0") and not on_cpu()
        return dataclasses.replace(PROPERTIES, batch_invariant=invariant)

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
                self._pause()
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
                    self._process.call(self._process.llm.resume_generation(), "resume_generation")
                    self._paused = False
            except BaseException as error:
                self._failed_update = (
                    f"version {weights.version} failed in the middle of a generation: {error_text(error)}"
                )
                self._salt = ""
                raise
            return digests

    def _pause(self) -> None:
        """Stop vLLM between two tokens."""
        # It returns when the output of the last step has left vLLM's engine core.
        self._process.call(self._process.llm.pause_generation(mode="keep", clear_cache=False), "pause_generation")
        self._paused = True

    def _name_version(self, weights: WeightSet) -> None:
        """Name the loaded weights for the prefix cache, and for the tokens that vLLM makes from now on.

        The name is new at each load, even for equal weights: running requests leave blocks of several versions under theirs.
        """
        self._loads += 1
        name = f"{weights.digest.hex()}-{self._loads}"
        self._process.call(self._process.llm.update_weight_version(name), "update_weight_version")
        self._versions[name] = (weights.version, weights.digest)
        self._salt = name

    def _load_version(self, weights: WeightSet, changed: Collection[str]) -> dict[str, bytes]:
        """Load a policy version, and return the digests of what vLLM holds afterwards."""
        self._check_types(weights)
        if self._process.llm is None:
            self._start(weights.adapter)
            changed = weights.tensors.keys()
        if weights.adapter != self._adapter:
            raise ConfigError(f"{NAME}: the settings of the adapter changed; restart the generator")
        self._process.wake()
        return self._weights.load(weights, changed)

    def held_digests(self, names: Collection[str]) -> Mapping[str, bytes]:
        """Return the digest of every weight that vLLM's processes hold now, whatever ``names``. See ``load_weights``."""
        with self._updating:
            return self._weights.read_back()

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParameters, seed: int, cancelled: IsCancelled
    ) -> Iterator[EngineResponse]:
        """Yield each response as soon as it is finished. See ``Engine.generate``.

        The log-probs are those of the whole distribution at the temperature. With penalties, top_k, top_p or min_p vLLM only
        has those of the distribution after them, so the responses have none.
        """
        check_requests(self._served, requests, sampling)
        if self._settings.speculative:
            check_speculation(max((request.own_sampling(sampling).temperature for request in requests), default=0.0))
        if not self._salt:
            raise ServiceFailed(f"{NAME}: no weights are loaded; load a policy version first")
        return self._generate(requests, sampling, seed, cancelled)

    def sleep(self, everything: bool = True) -> None:
        """Free the GPU's memory if ``release_memory`` is set: weights move to host memory, the cache is discarded."""
        if self._settings.release_memory:
            self._process.sleep()

    def close(self) -> None:
        """End vLLM's processes and delete its files."""
        self._salt = ""
        self._process.close()
        self._owned_folder.close()

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
            "weight_transfer_config": {"backend": BACKEND},
        }
        if settings.routed_experts:
            arguments["enable_return_routed_experts"] = True
        if settings.speculative:
            arguments["speculative_config"] = dict(settings.speculative)
        if on_cpu():
            arguments.setdefault("kv_cache_memory_bytes", CPU_CACHE_BYTES)
        if served.max_sequence_tokens:
            arguments["max_model_len"] = served.max_sequence_tokens
        if adapter is not None:
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora_rank(adapter.rank)}
        self._process.start(arguments)
        self._adapter = adapter

    def _check_types(self, weights: WeightSet) -> None:
        expected = TYPES[self._served.dtype]
        for name, tensor in base_tensors(weights).items():
            if tensor.dtype != expected:
                raise ConfigError(
                    f"{NAME}: the weight {name} has the type {tensor.dtype}, the engine {expected}; vLLM would round it; "
                    "use the same dtype for the policy and the engine"
                )

    def _reset_prefix_cache(self) -> None:
        if not self._process.call(self._process.llm.reset_prefix_cache(), "reset_prefix_cache"):
            raise ServiceFailed(f"{NAME}: the prefix cache is still in use; cancel all generations before an update")

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
            self._process.wake()
            self._failed_update = ""
            self._versions = {self._salt: self._versions[self._salt]}
            self._process.mark_active()
            work = self._process.run(self._run_requests(requests, sampling, seed, self._cache_salt(), results))
            self._generations += 1
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
                        self._check_progress()
                yield self._response(request, result, request.own_sampling(sampling).reshapes)
        finally:
            # vLLM aborts the rest: no request of this call runs after it.
            work.cancel()
            with self._updating:
                self._generations -= 1

    def _check_progress(self) -> None:
        """Raise EngineFailed if vLLM makes no steps any more. During an update it makes none."""
        if self._updating.locked():
            self._process.mark_active()
        elif self._process.idle_seconds() > self._settings.stall_seconds:
            raise EngineFailed(f"{NAME}: is stuck: it has made no step for {self._settings.stall_seconds:g} s")

    def _response(self, request: GenerationRequest, result: Any, truncated: bool) -> EngineResponse:
        """Return a checked response with the versions of its parts."""
        try:
            response = _response(request, result, truncated)
        except ServiceFailed as error:
            raise self._process.failure(str(error)) from error
        if self._settings.routed_experts:
            experts = result.outputs[0].routed_experts
            if experts is None or len(experts) < len(request.prompt_ids) + len(response.token_ids) - 1:
                have = "none" if experts is None else f"those of {len(experts)} tokens"
                raise ServiceFailed(
                    f"{NAME}: response to {request.id}: expected the experts of each of its tokens, got {have}; "
                    "set rollout.router_replay false, and report the version of vLLM"
                )
            response = dataclasses.replace(response, routed_experts=experts)
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
            async for output in self._process.llm.generate(
                prompt, parameters, f"{self._count}-{request.id}", lora_request=self._weights.lora
            ):
                result = output
        except Exception as error:
            result = error
        results.put((request, result))

    def _parameters(self, request: GenerationRequest, sampling: SamplingParameters, seed: int) -> Any:
        sampling = request.own_sampling(sampling)
        greedy = sampling.temperature == 0
        from vllm.sampling_params import RequestOutputKind

        return self._vllm.SamplingParams(
            max_tokens=sampling.max_response_tokens,
            temperature=sampling.temperature,
            top_k=0 if greedy else sampling.top_k,
            top_p=1.0 if greedy else sampling.top_p,
            min_p=0.0 if greedy else sampling.min_p,
            seed=engine_seed(seed, request.id, request.turn),
            # Stop tokens end a response and stay in it. The EOS of the model's own config is not among them by itself.
            ignore_eos=True,
            stop_token_ids=None if sampling.ignore_eos else sorted(self._served.stop_ids),
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **({} if sampling.penalties is None else sampling.penalties.arguments),
        )


def _response(request: GenerationRequest, result: Any, truncated: bool) -> EngineResponse:
    where = f"{NAME}: response to {request.id}"
    if isinstance(result, Exception):
        raise ServiceFailed(f"{where}: {error_text(result)}") from result
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


def _memory_folder() -> Path:
    """Return the folder of a file system in memory, or else the default folder of temporary files."""
    folder = Path("/dev/shm")  # noqa: S108 - OwnedFolder creates a private folder in it.
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else Path(tempfile.gettempdir())


def create(config: Config) -> tuple[Engine, ServedModel]:
    """Return the engine of ``rollout.vllm``, without starting vLLM. Raises ConfigError, ModelError."""
    from quartet.config.rollout import VLLMConfig

    vllm, model = config.rollout.vllm or VLLMConfig(), read_served_model(config.actor.model, config.actor.dtype)
    import_vllm()
    if vllm.speculative is not None:
        check_speculation(config.rollout.temperature)
    settings = VLLMSettings(
        max_concurrent_sequences=config.rollout.max_concurrent_sequences,
        tensor_parallel_size=vllm.tensor_parallel_size,
        memory_fraction=vllm.memory_fraction,
        release_memory=vllm.release_memory,
        prefix_caching=vllm.prefix_caching,
        enforce_eager=vllm.enforce_eager,
        stall_seconds=config.timeouts.score_seconds,
        engine_arguments=vllm.engine_arguments,
        speculative={} if vllm.speculative is None else _speculative_config(vllm.speculative),
        routed_experts=config.rollout.router_replay,
    )
    return VLLMEngine(settings, model), model


def _speculative_config(speculative: SpeculativeDecodingConfig) -> dict[str, Any]:
    """Return vLLM's ``speculative_config``."""
    if speculative.draft_model is None:
        method: dict[str, Any] = {
            "method": "ngram",
            "prompt_lookup_max": speculative.prompt_lookup_max,
            "prompt_lookup_min": speculative.prompt_lookup_min or speculative.prompt_lookup_max,
        }
    else:
        # The load format of the policy, whose weights arrive later, would leave the draft model with random weights.
        method = {
            "method": "draft_model",
            "model": speculative.draft_model,
            "draft_load_config": {"load_format": "safetensors"},
        }
    return {"num_speculative_tokens": speculative.num_speculative_tokens, **method}


KIND = EngineKind(
    "vllm",
    "vllm",
    (
        Guarantees(
            PROPERTIES,
            "a generator in vLLM's environment",
            "CPU",
            batch_invariant="on GPUs, with VLLM_BATCH_INVARIANT=1",
        ),
    ),
    create,
    batch_remedy="set VLLM_BATCH_INVARIANT=1 in the environment of the generators, on GPUs that vLLM supports it on",
)
