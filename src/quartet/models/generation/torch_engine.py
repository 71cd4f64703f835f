"""Generation in torch with continuous batching: waiting requests replace finished rows in the batch.

Equal prompts are computed once. Each row draws from its own random stream, so the composition of a batch does not affect the
draws. The rounding of a matmul depends on its shape, so it may affect the last bits of the logits. On a CPU, the sizes of static
decoding avoid that for most models (docs/adr/0025-the-same-bits-in-any-batch.md); ``TorchEngine.properties`` has the result of
a trial.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import structlog
import torch

from quartet.contract.generation import EngineProperties, GenerationRequest, SamplingParameters
from quartet.contract.trajectory import Trajectory, TrajectoryId, VersionSpan
from quartet.engines.engine import EngineResponse, ServedModel, TokenDecoder, TurnSource
from quartet.engines.request_checks import check_requests, check_response
from quartet.engines.stop_strings import StopStringCache
from quartet.errors import (
    Cancelled,
    ConfigError,
    InvalidRequest,
    MismatchError,
    ModelError,
    ServiceFailed,
    ServiceUnavailable,
)
from quartet.models.forward.model_capabilities import (
    device_of,
    max_positions,
    vocabulary_size,
)
from quartet.models.forward.router_replay import routers_of
from quartet.models.generation import decode_cache
from quartet.models.generation.decode_slots import DecodeSlots
from quartet.models.generation.static_decoding import StaticDecoder, is_recordable, unsupported_reason
from quartet.models.generation.torch_properties import DETACHED, SHARED
from quartet.models.generation.trial import LogitDigests, trial_requests, trial_result, untried_reason
from quartet.models.weights.host_tensors import host_tensor, load_tensors, named_weights
from quartet.models.weights.lora import Adapter, MergedWeights
from quartet.weight_transfer.tensors import WeightSet, combined_digest, tensor_digest

log = structlog.get_logger()

TRIAL_LENGTHS, TRIAL_TOKENS = (1, 4, 2), 3
"""Prompt lengths and response tokens of the trial of a new engine."""
INVARIANCE_LENGTHS, INVARIANCE_TOKENS = (1, 5, 18, 70), 3
"""Prompt lengths and response tokens of the trial of batch invariance."""
INVARIANCE_PARTS, INVARIANCE_ROWS, INVARIANCE_FLOPS = (6, 11, 20, 40), 256, 5e10
"""Smaller batches and the largest batch of this trial, and the operations that it may cost for a large model."""
TRIAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.2}
"""Maximum difference of log-probs between the trial and whole sequences, in nats."""


def served_model(model: Any, stop_ids: frozenset[int] = frozenset(), decode: TokenDecoder | None = None) -> ServedModel:
    """Return the description of a loaded model. ``decode`` as in ``ServedModel``."""
    dtype = str(model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    return ServedModel(
        str(model.config.name_or_path), dtype, stop_ids, vocabulary_size(model), max_positions(model) or 0, decode
    )


class TorchEngine:
    """Engine that generates with a transformers causal LM in this process, whose weights another object updates in place.

    ``stop_ids`` end a response. ``max_concurrent_sequences`` limits the rows decoded at once, and so the memory of the cache.
    ``static``: decode in buffers that are allocated once, if the model supports it, with CUDA graphs on a GPU.
    ``decode`` is needed for stop strings. ``merged``: an adapter on ``model`` whose layers are decoded as one matmul instead of
    three. In half precision, merged weights are rounded, so the engine samples from a slightly different distribution than the
    one that is trained. A model whose cache does not fit sequences of different lengths decodes without it, with a forward pass
    over whole sequences for every token. ``routed_experts``: responses have the experts of their tokens; this needs a cache, and
    decodes without static buffers. Not thread-safe. Raises ModelError if a trial shows that the model fits neither way, and
    ConfigError for a model whose experts cannot be recorded.
    """

    kind = SHARED
    """Guarantees before the trial."""

    def __init__(
        self,
        model: Any,
        stop_ids: frozenset[int],
        max_concurrent_sequences: int,
        static: bool = True,
        decode: TokenDecoder | None = None,
        merged: Adapter | None = None,
        routed_experts: bool = False,
    ) -> None:
        # Shares the policy's weights, except for copies of the matrices of adapted layers.
        self._merged = None if merged is None else MergedWeights(merged)
        self._is_current = True
        if self._merged is not None:
            model = self._merged.model
        if max_concurrent_sequences < 1:
            raise InvalidRequest(f"max_concurrent_sequences {max_concurrent_sequences}: expected at least 1")
        self._model = model
        self._served = served_model(model, stop_ids)
        self._stop_strings = StopStringCache(decode, vocabulary_size(model))
        self._max_concurrent = max_concurrent_sequences
        self._graphs = device_of(model).type == "cuda"
        self._static: StaticDecoder | None = None
        # The capture of CUDA graphs needs memory that the engine may never use, so it is tried at the first generation.
        static = static and not routed_experts
        self._static_untried, self._not_static = static, "" if static else "static decoding is off"
        self._generations = 0
        self._uncached = decode_cache.unsupported_reason(model)
        self._try_decoding()
        self._routers = routers_of(model) if routed_experts else None
        if routed_experts and self._uncached:
            raise ConfigError(
                f"rollout.router_replay: {type(model).__name__} decodes without a cache ({self._uncached}), and its experts are "
                "not recorded; set it to false, or give another rollout.engine"
            )
        self._declared = self._declare()
        # The trial's buffers may be larger than those of any generation.
        self._free(everything=not self._graphs)

    @property
    def batch_invariant(self) -> bool:
        """Return whether the other requests in a batch change no bit of a response. A trial at the engine's creation decides."""
        return self._declared.batch_invariant

    @property
    def properties(self) -> EngineProperties:
        """Guarantees of this engine, as its trial measured them."""
        return self._declared

    @property
    def decoding(self) -> str:
        """How tokens are decoded: "recorded", "static buffers", "cache" or "no cache"."""
        if self._static is None:
            return "no cache" if self._uncached else "cache"
        return "recorded" if self._static.recorded else "static buffers"

    def _declare(self) -> EngineProperties:
        result = trial_result(
            untried_reason(self._model, self._not_static),
            self._is_batch_invariant,
            lambda: self._trial_bits(self._trial_requests(), len(INVARIANCE_LENGTHS)),
        )
        return replace(self.kind, batch_invariant=result.passed, trial=result.text, trial_digest=result.digest)

    def load_weights(self, weights: WeightSet, changed: Collection[str]) -> Mapping[str, bytes]:
        """Take note that the weights of the model are those of another version. Return no digests."""
        self._is_current = False
        return {}

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[EngineResponse]:
        """Yield each response as soon as it is finished; responses that finish at the same token are ordered by id.

        ``log_probs`` are of the sampled tokens at the sampling temperature (1 when greedy). They refer to the whole distribution
        even if it is truncated by top_k and the like, because the trainer computes the same. Raises InvalidRequest at the call.
        While iterating, raises Cancelled (``cancelled`` is checked before every token), or ComputationFailed if logits are not
        finite.
        """
        return self._generate(check_requests(self._served, requests, sampling), sampling, seed, cancelled)

    def generate_turns(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        cancelled: Callable[[], bool],
        turns: TurnSource,
    ) -> Iterator[EngineResponse]:
        """Generate the requests that ``turns`` provides. See ``TurnEngine.generate_turns``, and ``generate`` for the rest."""
        return self._generate(check_requests(self._served, requests, sampling), sampling, seed, cancelled, turns)

    def trajectories(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParameters, seed: int
    ) -> list[Trajectory]:
        """Return the responses as trajectories of policy version 0, ordered by id. For errors see ``generate``."""
        results = [
            check_response(response, self._served, sampling, 0, self.kind.name)
            for response in self.generate(requests, sampling, seed)
        ]
        return sorted(results, key=lambda trajectory: trajectory.id)

    def stream(self, request: GenerationRequest, sampling: SamplingParameters, seed: int) -> Iterator[int]:
        """Yield the token ids of one response as they are sampled, the same as ``generate`` does. For errors see ``generate``."""
        requests = check_requests(self._served, [request], sampling)
        with self._decoding():
            static = None if self._graphs else self._static
            options = 1, static, self._stop_strings.of(sampling)
            slots = DecodeSlots(
                self._model, self._served.stop_ids, requests, sampling, seed, *options, cached=not self._uncached
            )
            self._generations += 1
            number = self._generations
            while slots.active:
                self._check_current(static, number)
                with self._step():
                    finished = slots.step()
                yield int(finished[0].token_ids[-1]) if finished else slots.last_token

    def _generate(
        self,
        requests: list[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        cancelled: Callable[[], bool],
        turns: TurnSource | None = None,
    ) -> Iterator[EngineResponse]:
        stop_ids = frozenset[int]() if sampling.ignore_eos else self._served.stop_ids
        with self._decoding():
            options = self._max_concurrent, self._static, self._stop_strings.of(sampling), turns
            slots = DecodeSlots(
                self._model,
                stop_ids,
                requests,
                sampling,
                seed,
                *options,
                cached=not self._uncached,
                routers=self._routers,
            )
            self._generations += 1
            number, steps = self._generations, 0
            while slots.active:
                if cancelled():
                    raise Cancelled("generation was cancelled by its caller")
                self._check_current(self._static, number)
                if not slots.receive():
                    continue
                with self._step():
                    finished = slots.step()
                steps += 1
                yield from (self._with_spans(response, steps) for response in finished)

    def _decoding(self) -> AbstractContextManager[None]:
        """Prepare a generation. Return a context around its steps."""
        self._prepare()
        return nullcontext()

    def _prepare(self) -> None:
        self._merge()
        self._try_static()

    def _step(self) -> AbstractContextManager[None]:
        """Return a context around one step, in which the weights do not change."""
        return nullcontext()

    def _with_spans(self, response: EngineResponse, steps: int) -> EngineResponse:
        """Return a response that the last of ``steps`` has finished, with the weights of its parts if they may change."""
        return response

    def _merge(self) -> None:
        """Compute the merged weights again if they are not current."""
        if self._merged is not None and not self._is_current:
            self._merged.update()
        self._is_current = True

    def _check_current(self, static: StaticDecoder | None, number: int) -> None:
        if static and number != self._generations:
            raise Cancelled("generation was cancelled: a later generation uses its cache")

    def _try_decoding(self) -> None:
        """Choose decoding with a cache if a trial succeeds, or without. Raises ModelError if both differ from whole sequences."""
        if not self._uncached:
            try:
                if not self._graphs:
                    self._try_static()
                self._uncached = self._difference()
            except torch.OutOfMemoryError:
                raise
            except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
                self._uncached = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            if not self._uncached:
                return
        log.warning("decodes without a cache", model=type(self._model).__name__, reason=self._uncached)
        self._static, self._static_untried, self._not_static = None, False, f"no cache: {self._uncached}"
        if (reason := self._difference()) is not None:
            raise ModelError(f"{type(self._model).__name__}: {reason}; give another model or rollout.engine")

    @torch.inference_mode()
    def _difference(self) -> str | None:
        """Return how a trial with prompts of different lengths differs from forward passes over each whole sequence, or None.

        A model that ignores padding or positions would generate from another distribution than the one that is trained.
        """
        requests = trial_requests(self._model, TRIAL_LENGTHS)
        sampling = SamplingParameters(TRIAL_TOKENS, temperature=0.0)
        tolerance = TRIAL_TOLERANCE[self._model.get_input_embeddings().weight.dtype]
        options = len(requests), self._static
        slots = DecodeSlots(self._model, frozenset(), requests, sampling, 0, *options, cached=not self._uncached)
        while slots.active:
            for response in slots.step():
                sequence = np.concatenate([response.request.prompt_ids, response.token_ids]).astype(np.int64)
                input_ids = torch.from_numpy(sequence)[None].to(device_of(self._model))
                logits = self._model(input_ids=input_ids, use_cache=False).logits[0, -1 - TRIAL_TOKENS : -1].float()
                expected = logits.log_softmax(-1).gather(1, input_ids[0, -TRIAL_TOKENS:, None])[:, 0].cpu().numpy()
                # In half precision the median, because a token may get other experts.
                typical = np.max if tolerance == TRIAL_TOLERANCE[torch.float32] else np.median
                difference = float(typical(np.abs(expected - response.log_probs)))
                # This also refuses a difference of NaN.
                if not difference <= tolerance:
                    return (
                        "generation with prompts of different lengths differs from a forward pass over the whole sequence by "
                        f"{difference:.2g} nats, {tolerance:g} are allowed"
                    )
        return None

    def _is_batch_invariant(self) -> bool:
        """Return whether requests get the same bits by themselves, in batches, and after waiting for a slot."""
        size = sum(parameter.numel() for parameter in self._model.parameters())
        few = len(INVARIANCE_LENGTHS)
        rows = max(few, min(INVARIANCE_ROWS, self._max_concurrent, int(INVARIANCE_FLOPS / (2 * size))))
        prompts = [request.prompt_ids for request in self._trial_requests(2)]
        ids = (TrajectoryId("trial", 0, index, 0) for index in range(rows))
        requests = [GenerationRequest(id, prompts[id.prompt % len(prompts)]) for id in ids]
        expected = self._trial_bits(requests, rows)
        parts = [([request], 1) for request in requests[:few]] + [(requests[:few], 2)]
        parts += [(requests[-part:], part) for part in INVARIANCE_PARTS if part < rows]
        return all(
            expected[key] == bits for part, slots in parts for key, bits in self._trial_bits(part, slots).items()
        )

    def _trial_requests(self, repeats: int = 1) -> list[GenerationRequest]:
        """Return requests of INVARIANCE_LENGTHS, as far as the model's positions allow."""
        limit = max_positions(self._model)
        lengths = [length if limit is None else min(length, limit - INVARIANCE_TOKENS) for length in INVARIANCE_LENGTHS]
        return trial_requests(self._model, lengths * repeats)

    def _trial_bits(self, requests: list[GenerationRequest], slots: int) -> dict[TrajectoryId, bytes]:
        """Return a digest of all logits of each of a few short responses."""
        sampling = SamplingParameters(INVARIANCE_TOKENS)
        state = DecodeSlots(
            self._model, frozenset(), requests, sampling, 0, slots, self._static, cached=not self._uncached
        )
        recorder = state.on_logits = LogitDigests()
        while state.active:
            state.step()
        return recorder.digests()

    def _try_static(self) -> None:
        """Use static decoding if the model supports it; otherwise log the reason."""
        if not self._static_untried:
            return
        reason = unsupported_reason(self._model, self._graphs)
        # After an error there is no result, so the next generation tries again.
        self._static_untried = False
        self._not_static = reason or ""
        if not reason:
            self._static = StaticDecoder(self._model, self._graphs, not self._graphs and is_recordable(self._model))
        else:
            log.info("decodes without static buffers", model=type(self._model).__name__, reason=reason)

    def _free(self, everything: bool) -> None:
        """Free a large cache. One of captured CUDA graphs is kept unless ``everything``: capturing them again is slow."""
        if self._static is not None:
            self._static.release(everything)

    def sleep(self, everything: bool = True) -> None:
        """Free a large cache before an update of the model. ``everything``: also captured CUDA graphs and merged weights."""
        self._free(everything)
        if everything and self._merged is not None:
            self._merged.release()
            self._is_current = False

    def close(self) -> None:
        """Release the cache and the captured graphs."""
        self._static = None


class DetachedTorchEngine(TorchEngine):
    """Engine that decodes with a separate model, whose weights come by ``load_weights``."""

    kind = DETACHED

    def __init__(
        self,
        model: Any,
        adapter: Adapter | None,
        stop_ids: frozenset[int],
        max_concurrent_sequences: int,
        merge_adapter: bool = False,
        decode: TokenDecoder | None = None,
        routed_experts: bool = False,
    ) -> None:
        """Own ``model`` from now on, with its ``adapter`` if it has one. ``merge_adapter``: decode with it merged."""
        model.requires_grad_(False)
        merged = adapter if merge_adapter else None
        # An update waits for the end of a step, and the next step for the end of the update.
        self._stepping, self._may_step = threading.Lock(), threading.Event()
        self._may_step.set()
        self._active, self._steps = False, 0
        # The weights of a generation: the first step that they have computed, their version and digest.
        self._changes: list[tuple[int, int, bytes]] = []
        # False during an update, and after one that has failed: the weights are then those of no version.
        self._is_whole = True
        super().__init__(
            model, stop_ids, max_concurrent_sequences, decode=decode, merged=merged, routed_experts=routed_experts
        )
        self._weights = named_weights(model, adapter)

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        try:
            with self._stepping:
                self._active, self._steps = True, 0
                self._changes = [(0, version, digest) for _, version, digest in self._changes[-1:]]
                # From here on, an update merges the weights itself.
                self._prepare()
            yield
        finally:
            with self._stepping:
                self._active = False

    @contextmanager
    def _step(self) -> Iterator[None]:
        self._may_step.wait()
        with self._stepping:
            if not self._is_whole:
                raise ServiceFailed("the last update of the weights has failed; responses by parts of it are discarded")
            yield
            self._steps += 1

    def _with_spans(self, response: EngineResponse, steps: int) -> EngineResponse:
        if not self._changes:
            return response
        # Each step draws one token of each row.
        begin, spans = steps - len(response.token_ids), []
        for (first, version, digest), (end, *_) in pairwise([*self._changes, (steps, 0, b"")]):
            if (tokens := min(end, steps) - max(first, begin)) > 0:
                spans.append(VersionSpan(version, digest, tokens))
        return replace(response, spans=tuple(spans))

    @torch.no_grad()
    def load_weights(self, weights: WeightSet, changed: Collection[str]) -> Mapping[str, bytes]:
        """Copy the changed tensors into the model. Return the digest of each of the model's weights.

        A generation on another thread waits between two tokens, and continues with its keys and values. After a failure it raises
        ServiceFailed instead. Raises MismatchError if the weights are those of another architecture.
        """
        different = weights.tensors.keys() ^ self._weights.keys()
        if different:
            raise MismatchError(
                f"weights: {len(different)} names differ from those of this engine's model, the first {min(different)!r}; "
                "start actor and generator with the same actor.model and actor.lora"
            )
        self._may_step.clear()
        try:
            with self._stepping:
                self._is_current = self._is_whole = False
                digests = self._load(weights, changed)
                before = self._changes if self._active else []
                # The digest of what the model holds: it is another one if part of an update is lost.
                self._changes = [*before, (self._steps, weights.version, combined_digest(digests))]
                if self._active:
                    self._merge()
                self._is_whole = True
                return digests
        except ValueError as error:
            raise MismatchError(f"weights: {error}; start actor and generator with the same model") from None
        finally:
            self._may_step.set()

    def _load(self, weights: WeightSet, changed: Collection[str]) -> dict[str, bytes]:
        """Copy the changed tensors: from memory of a GPU if they are there, and from the host if that fails."""
        if weights.on_device is not None:
            try:
                digests = load_tensors(self._weights, weights.tensors, changed, weights.on_device)
                if combined_digest(digests) == weights.digest:
                    return digests
                reason = "it has other bytes than the digest of the version"
            except ServiceUnavailable as error:
                reason = str(error)
            log.warning("weights are read from the host, not from the GPU", version=weights.version, reason=reason)
        return load_tensors(self._weights, weights.tensors, changed)

    @torch.no_grad()
    def held_digests(self, names: Collection[str]) -> Mapping[str, bytes]:
        """Return the digest of these tensors as the model holds them."""
        return load_tensors({name: self._weights[name] for name in names}, {}, ())

    @torch.no_grad()
    def copy_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, bytes]:
        """Copy every weight into the model, one after the other. Return the digest of each as the model holds it.

        Raises MismatchError if the weights are those of another architecture. All of ``tensors`` are consumed in any case.
        """
        self._is_current = self._is_whole = False
        digests, unknown = {}, list[str]()
        for name, value in tensors:
            target = self._weights.get(name)
            if target is None or (target.dtype, target.shape) != (value.dtype, value.shape):
                unknown.append(name)
                continue
            target.copy_(value)
            digests[name] = tensor_digest(host_tensor(target))
        different = [*unknown, *(self._weights.keys() - digests.keys())]
        if different:
            raise MismatchError(
                f"weights: {len(different)} differ from those of this engine's model, the first {min(different)!r}; restart the "
                "actor"
            )
        self._changes, self._is_whole = [], True
        return digests

    def sleep(self, everything: bool = True) -> None:
        """Do nothing: no training waits for the memory of the cache."""
