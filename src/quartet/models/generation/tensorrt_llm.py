"""Generation by TensorRT-LLM in this process (its LLM API, 1.x), from prompt token ids, with log-probs.

New weights reach it without pickles: an adapter as a LoRA request of its own for each policy version, whole weights by loading
them anew from disk. The engine is shut down while the policy learns where it is to leave the GPU's memory. Not run so far: the
package needs an NVIDIA GPU and its own torch; the contract's tests run it wherever it can be imported.
"""

from __future__ import annotations

import gc
import queue
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.errors import Cancelled, ConfigError, ServiceFailed
from quartet.models.forward.model_capabilities import max_positions
from quartet.models.generation.engine import Policy
from quartet.models.generation.validation import Answer, trajectories, validate_requests
from quartet.models.weights.loading import snapshot_model
from quartet.random_streams import engine_seed
from quartet.types import GenerationRequest, SamplingParameters, Trajectory

NAME = "TensorRT-LLM"
POLL = 0.1
"""Seconds between checks whether the caller still waits."""
ENDED = ("stop", "length")
"""How a response ends that is whole; "timeout" and "cancelled" are not."""


@dataclass(frozen=True, slots=True)
class TensorRTLLM:
    """How it is run. ``base`` is the checkpoint below an adapter; ``weights`` a folder for what it reads from disk."""

    base: str
    weights: Path
    max_in_flight: int
    memory_fraction: float
    release_memory: bool
    lora_rank: int = 0


class TensorRTLLMEngine:
    """Generates with tensorrt_llm.LLM. Raises ConfigError where the package cannot be imported."""

    def __init__(self, settings: TensorRTLLM, policy: Policy) -> None:
        try:
            import tensorrt_llm
        except ImportError as error:
            raise ConfigError(
                f"rollout.engine tensorrt-llm: {error}; run the actor from the image of docker/Dockerfile.tensorrt-llm, which "
                "has the package, or set rollout.engine torch"
            ) from None
        self._library: Any = tensorrt_llm
        self._settings, self._policy = settings, policy
        self._llm: Any = None
        self._version = 0
        """Counts the weights: a cache that knows an adapter by its number is never asked for another under the same."""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        policy_version: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[Trajectory]:
        """The trajectories, by id.

        Raises InvalidRequest at the call; while iterating Cancelled, ServiceFailed, ComputationFailed.
        """
        ordered = validate_requests(self._policy.model, requests, sampling)
        return self._generate(ordered, sampling, seed, policy_version, cancelled)

    def release(self) -> None:
        """Leave the GPU's memory to the update."""
        if self._settings.release_memory:
            self._shut_down()

    def weights_changed(self) -> None:
        """Without an adapter the engine's weights are those of before: it is loaded anew."""
        self._version += 1
        if self._policy.adapter is None:
            self._shut_down()

    def close(self) -> None:
        """End it, and leaves no weights behind."""
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
                answer = _answer(request, _result(future, cancelled))
                yield from trajectories([answer], self._policy, sampling, policy_version, NAME)
        except RuntimeError as error:
            # Its workers' own words: out of memory, a kernel that failed, a process that died.
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
            # Every stop token as a stop word, which stays in the response; of EOS itself versions differ in that.
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
                # Else 1024 tokens of a prompt are all that it takes.
                arguments |= {"max_input_len": positions, "max_seq_len": positions}
            from tensorrt_llm.llmapi import KvCacheConfig

            # Blocks that were computed with former weights must not be found again.
            cache = KvCacheConfig(free_gpu_memory_fraction=settings.memory_fraction, enable_block_reuse=False)
            self._llm = self._library.LLM(
                dtype="auto", kv_cache_config=cache, max_batch_size=settings.max_in_flight, **arguments
            )
        return self._llm

    def _lora_request(self) -> Any:
        if self._policy.adapter is None:
            return None
        from tensorrt_llm.executor.request import LoRARequest

        # Its numbers begin at 1.
        return LoRARequest(f"policy-{self._version}", self._version + 1, str(self._written_adapter()))

    def _written_adapter(self) -> Path:
        assert self._policy.adapter is not None
        return self._written(f"adapter-{self._version}", self._policy.adapter.snapshot())

    def _written(self, name: str, write: Callable[[Path], None]) -> Path:
        """A folder with these weights and the tokenizer. Those of former versions go."""
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


def _answer(request: GenerationRequest, result: Any) -> Answer:
    output = result.outputs[0]
    if output.finish_reason not in ENDED:
        raise ServiceFailed(f"{NAME}: response to {request.id}: ended by {output.finish_reason}")
    ids = list(output.token_ids)
    return Answer(
        request, ids, [_log_prob(token, entry) for token, entry in zip(ids, output.logprobs or [], strict=False)]
    )


def _log_prob(token: int, entry: Any) -> float:
    """One token's, of a number or of what it is by token."""
    return float(entry[token].logprob) if isinstance(entry, dict) else float(entry)
