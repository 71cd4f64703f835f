"""Generation with TensorRT-LLM in this process (its LLM API, 1.x), from prompt token ids, with log-probs.

New weights reach the engine without pickles: an adapter as one LoRA request per policy version, full weights by a reload from
disk. The engine is shut down during an update if it must free the GPU's memory. Not run so far: the package needs an NVIDIA GPU
and its own version of torch. The contract tests run the engine if the package can be imported.
"""

from __future__ import annotations

import gc
import queue
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.engines.engine import EngineResponse
from quartet.errors import Cancelled, ConfigError, ServiceFailed
from quartet.models.forward.model_capabilities import max_positions
from quartet.models.generation.engine import Policy
from quartet.models.generation.validation import trajectories, validate_requests
from quartet.models.weights.loading import snapshot_model
from quartet.random_streams import engine_seed
from quartet.types import GenerationRequest, SamplingParameters, Trajectory

NAME = "TensorRT-LLM"
POLL = 0.1
"""Seconds between checks whether the caller still waits."""
ENDED = ("stop", "length")
"""Finish reasons of complete responses. Others, such as "timeout" and "cancelled", are errors."""


@dataclass(frozen=True, slots=True)
class TensorRTLLM:
    """Settings of the engine. ``base`` is the base model of an adapter, ``weights`` a folder for weights to read from disk."""

    base: str
    weights: Path
    max_in_flight: int
    memory_fraction: float
    release_memory: bool
    lora_rank: int = 0


class TensorRTLLMEngine:
    """Engine that generates with tensorrt_llm.LLM. Raises ConfigError if the package cannot be imported."""

    def __init__(self, settings: TensorRTLLM, policy: Policy) -> None:
        try:
            import tensorrt_llm
        except ImportError as error:
            raise ConfigError(
                f"rollout.engine tensorrt-llm: {error}; run the actor from the image of docker/Dockerfile.tensorrt-llm, which "
                "has the package, or set rollout.engine torch"
            ) from None
        if policy.adapter is not None:
            policy.adapter.check_linear()
        self._library: Any = tensorrt_llm
        self._settings, self._policy = settings, policy
        self._llm: Any = None
        self._version = 0
        """Version of the weights. Each version gets a new adapter id, so the engine's cache never returns an old adapter."""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        policy_version: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[Trajectory]:
        """Yield the trajectories, ordered by id.

        Raises InvalidRequest at the call. While iterating, raises Cancelled, ServiceFailed or ComputationFailed.
        """
        ordered = validate_requests(self._policy.model, requests, sampling)
        return self._generate(ordered, sampling, seed, policy_version, cancelled)

    def release(self) -> None:
        """Free the GPU's memory for the update if ``release_memory`` is set."""
        if self._settings.release_memory:
            self._shut_down()

    def weights_changed(self) -> None:
        """Use the new weights from the next generation on. Without an adapter the engine is reloaded."""
        self._version += 1
        if self._policy.adapter is None:
            self._shut_down()

    def close(self) -> None:
        """Shut the engine down and delete the weights that were written for it."""
        self._shut_down()
        shutil.rmtree(self._settings.weights, ignore_errors=True)

    def _generate(
        self,
        requests: list[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        policy_version: int,
        cancelled: Callable[[], bool],
    ) -> Iterator[Trajectory]:
        pending: list[tuple[GenerationRequest, Any]] = []
        try:
            llm, lora = self._loaded(), self._lora_request()
            for request in requests:
                inputs = {"prompt_token_ids": request.prompt_ids.tolist()}
                parameters = self._parameters(request, sampling, seed)
                pending.append((request, llm.generate_async(inputs, parameters, lora_request=lora)))
            for request, future in pending:
                answer = _response_of(request, _result(future, cancelled))
                yield from trajectories([answer], self._policy, sampling, policy_version, NAME)
        except RuntimeError as error:
            # Errors of its workers: out of memory, a failed kernel, a dead process.
            self._shut_down()
            raise ServiceFailed(f"{NAME}: {error}") from error
        finally:
            for _, future in pending:
                if not future.finished:
                    future.abort()

    def _parameters(self, request: GenerationRequest, sampling: SamplingParameters, seed: int) -> Any:
        greedy = sampling.temperature == 0
        return self._library.SamplingParams(
            max_tokens=sampling.max_response_tokens,
            temperature=1.0 if greedy else sampling.temperature,
            top_k=1 if greedy else sampling.top_k,
            top_p=None if greedy else sampling.top_p,
            seed=engine_seed(seed, request.id),
            # Every stop token is a stop word, which stays in the response. Versions differ in whether EOS itself stays.
            ignore_eos=True,
            stop_token_ids=None if sampling.ignore_eos else sorted(self._policy.stop_ids),
            include_stop_str_in_output=True,
            logprobs=1,
            detokenize=False,
            add_special_tokens=False,
        )

    def _loaded(self) -> Any:
        if self._llm is None:
            settings, adapter = self._settings, self._policy.adapter
            arguments: dict[str, Any] = {"model": settings.base}
            if adapter is None:
                arguments["model"] = str(self._written("model", snapshot_model(self._policy.model)))
            else:
                from tensorrt_llm.lora_helper import LoraConfig

                folder = str(self._written_adapter())
                arguments |= {
                    "enable_lora": True,
                    "lora_config": LoraConfig(lora_dir=[folder], max_lora_rank=settings.lora_rank, max_loras=1),
                }
            positions = max_positions(self._policy.model)
            if positions is not None:
                # The default limits prompts to 1024 tokens.
                arguments |= {"max_input_len": positions, "max_seq_len": positions}
            from tensorrt_llm.llmapi import KvCacheConfig

            # No reuse: blocks that were computed with previous weights would be wrong.
            cache = KvCacheConfig(free_gpu_memory_fraction=settings.memory_fraction, enable_block_reuse=False)
            self._llm = self._library.LLM(
                dtype="auto", kv_cache_config=cache, max_batch_size=settings.max_in_flight, **arguments
            )
        return self._llm

    def _lora_request(self) -> Any:
        if self._policy.adapter is None:
            return None
        from tensorrt_llm.executor.request import LoRARequest

        # Adapter ids start at 1.
        return LoRARequest(f"policy-{self._version}", self._version + 1, str(self._written_adapter()))

    def _written_adapter(self) -> Path:
        assert self._policy.adapter is not None
        return self._written(f"adapter-{self._version}", self._policy.adapter.snapshot())

    def _written(self, name: str, write: Callable[[Path], None]) -> Path:
        """Return a folder with these weights and the tokenizer. Deletes the folders of previous versions."""
        target = self._settings.weights / name
        if name == "model" or not target.exists():
            shutil.rmtree(self._settings.weights, ignore_errors=True)
            target.mkdir(parents=True)
            write(target)
            self._policy.tokenizer.save_pretrained(target)
        return target

    def _shut_down(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()
            del llm
            gc.collect()


def _result(future: Any, cancelled: Callable[[], bool]) -> Any:
    while True:
        if cancelled():
            raise Cancelled("generation was cancelled by its caller")
        try:
            return future.result(timeout=POLL)
        except (TimeoutError, queue.Empty):
            continue


def _response_of(request: GenerationRequest, result: Any) -> EngineResponse:
    output = result.outputs[0]
    if output.finish_reason not in ENDED:
        raise ServiceFailed(f"{NAME}: response to {request.id}: ended by {output.finish_reason}")
    ids = list(output.token_ids)
    return EngineResponse(
        request, ids, [_log_prob(token, entry) for token, entry in zip(ids, output.logprobs or [], strict=False)]
    )


def _log_prob(token: int, entry: Any) -> float:
    """Return the log-prob of a token from an entry, which is a number or a mapping of token to log-prob."""
    return float(entry[token].logprob) if isinstance(entry, dict) else float(entry)
