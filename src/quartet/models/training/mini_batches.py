"""Mini-batches of one step's experience, and the metrics that an update collects over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quartet.contract.arrays import FloatArray
from quartet.contract.random_streams import permutation
from quartet.contract.trajectory import TokenBatch
from quartet.contract.update import Experience, OptimizationSettings
from quartet.errors import ComputationFailed, InvalidRequest
from quartet.models.forward.batching import response_token_indices
from quartet.models.forward.model_capabilities import check_batch, device_of
from quartet.models.training.optimizer import apply_gradients
from quartet.models.workers.shares import Share, share_of
from quartet.models.workers.workers import SINGLE, Workers


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The sequences of one optimizer step, and this rank's share of them.

    ``token_indices`` int64 [n]: indices of the response tokens of all sequences into flat [response tokens] arrays. ``lengths``
    int64 [rows]: response tokens per sequence. Both are in host memory. ``policy_tokens``: number of the response tokens that
    are the policy's own, in all shares.
    """

    token_indices: np.ndarray[Any, np.dtype[np.int64]]
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    share: Share
    policy_tokens: int


class OwnTokens:
    """Selection of the policy's own tokens among response tokens. Observations of an environment are not."""

    def __init__(self, mask: torch.Tensor | None) -> None:
        """``mask`` bool [response tokens]; None if all of them are."""
        self._mask = mask

    def select(self, token_indices: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return ``token_indices`` int64 [n] and the ``values`` [n] there without the tokens of observations."""
        if self._mask is None:
            return token_indices, *values
        own = self._mask[token_indices]
        return tuple(value[own] for value in (token_indices, *values))


class MiniBatchIterator:
    """Mini-batches of a step's experience, in an order that depends on (seed, step, epoch) only.

    The constructor checks the experience, before anything is computed. Raises InvalidRequest.
    """

    def __init__(
        self,
        model: Any,
        experience: Experience,
        settings: OptimizationSettings,
        max_tokens: int,
        workers: Workers = SINGLE,
    ) -> None:
        """``max_tokens`` limits a micro-batch. Each of the ``workers`` gets the same mini-batches with its own share of each."""
        sequences = len(experience.batch)
        if settings.num_epochs < 0:
            raise InvalidRequest(f"num_epochs {settings.num_epochs}: expected at least 0")
        if not 1 <= settings.num_mini_batches <= sequences:
            raise InvalidRequest(
                f"num_mini_batches {settings.num_mini_batches}: expected 1 to {sequences}, the number of sequences in the step"
            )
        check_batch(model, experience.batch)
        _check_flat(experience)
        self._batch: TokenBatch = experience.batch
        self._response_mask = experience.response_mask
        self._step, self._settings, self._workers = experience.step, settings, workers
        self._model, self._max_tokens, self._device = model, max_tokens, device_of(model)
        # With one mini-batch the order has no effect: every epoch is the same and is built once.
        self._only = [self._mini_batch(np.arange(sequences))] if settings.num_mini_batches == 1 else None

    @property
    def step(self) -> int:
        """Return the training step of the experience."""
        return self._step

    def mini_batches(self, epoch: int) -> list[MiniBatch]:
        """Return the epoch's mini-batches, of nearly equal numbers of sequences."""
        if self._only is not None:
            return self._only
        order = permutation(self._settings.seed, self._step, epoch, len(self._batch))
        return [self._mini_batch(part) for part in np.array_split(order, self._settings.num_mini_batches)]

    def tensor(self, values: FloatArray) -> torch.Tensor:
        """Copy a flat array of the experience to the model's device, float32 [response tokens]."""
        return torch.from_numpy(np.array(values, np.float32)).to(self._device)

    def _mini_batch(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> MiniBatch:
        share = share_of(self._workers, self._model, self._batch, self._max_tokens, rows)
        lengths = self._batch.response_lengths[rows].astype(np.int64)
        indices, mask = response_token_indices(self._batch, rows), self._response_mask
        return MiniBatch(indices, lengths, share, int(np.count_nonzero(mask[indices])) if len(mask) else len(indices))

    def own_tokens(self) -> OwnTokens:
        """Return which response tokens are the policy's own, on the model's device."""
        mask = self._response_mask
        return OwnTokens(torch.from_numpy(np.array(mask)).to(self._device) if len(mask) else None)


class MetricSums:
    """Named sums, which stay on the device until they are read. A name without values is 0."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, **values: torch.Tensor) -> None:
        """Add ``values`` [] in float64."""
        for name, value in values.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def over(self, workers: Workers, *names: str) -> MetricSums:
        """Return the sums of ``names`` over all ranks. A group of one returns the same object."""
        if workers.size == 1 or not names:
            return self
        zero = torch.zeros((), dtype=torch.float64)
        values = workers.sum(torch.stack([self._sums.get(name, zero).cpu() for name in names]))
        result = MetricSums()
        result.add(**dict(zip(names, values, strict=True)))
        return result

    def merge(self, other: MetricSums) -> None:
        """Add the sums of ``other``."""
        self.add(**other._sums)

    def __getitem__(self, name: str) -> float:
        return float(self._sums[name]) if name in self._sums else 0.0


@dataclass(slots=True)
class UpdateStats:
    """Numbers of taken and skipped optimizer steps of an update, and metrics of the taken steps."""

    steps: int = 0
    skipped: int = 0
    tokens: int = 0
    sums: MetricSums = field(default_factory=MetricSums)
    _norms: float = 0.0

    def take_step(
        self,
        optimizer: torch.optim.Optimizer,
        losses: Sequence[torch.Tensor],
        settings: OptimizationSettings,
        model_name: str,
        tokens: int,
        metrics: MetricSums,
        workers: Workers = SINGLE,
    ) -> None:
        """Take the optimizer step of a mini-batch of ``tokens`` from its gradients, and add the ``metrics`` observed in it.

        ``losses`` are this rank's, one for each micro-batch; ``metrics`` are those of all ranks.

        If a loss [] or gradient is not finite, weights and optimizer stay unchanged. With ``settings.skip_non_finite`` the step
        is then counted as skipped and its metrics are dropped. Otherwise raises ComputationFailed.
        """
        try:
            norm = apply_gradients(optimizer, losses, settings.max_grad_norm, model_name, workers)
        except ComputationFailed:
            if not settings.skip_non_finite:
                raise
            self.skipped += 1
            return
        self.steps += 1
        self.tokens += tokens
        self._norms += norm
        self.sums.merge(metrics)

    def means(self, per_step: Mapping[str, str], per_token: Mapping[str, str]) -> dict[str, float]:
        """Return sums, by metric name, as means over the taken steps or over their tokens. Empty if no step was taken."""
        if not self.steps:
            return {}
        results = {metric: self.sums[name] / self.steps for metric, name in per_step.items()}
        return results | {metric: self.sums[name] / self.tokens for metric, name in per_token.items()}

    def metrics(self, settings: OptimizationSettings) -> dict[str, float]:
        """Return ``optimizer_steps`` and ``skipped_steps``; if a step was taken also ``grad_norm`` and ``learning_rate``."""
        results = {"optimizer_steps": float(self.steps), "skipped_steps": float(self.skipped)}
        if self.steps:
            results |= {"grad_norm": self._norms / self.steps, "learning_rate": settings.learning_rate}
        return results


def _check_flat(experience: Experience) -> None:
    expected = (int(experience.batch.response_lengths.sum()),)
    for name in ("log_probs", "reference_log_probs", "values", "advantages", "returns", "actor_mask"):
        shape = getattr(experience, name).shape
        if shape != expected:
            raise InvalidRequest(f"experience {name} {shape}: expected {expected}, one number per response token")
    mask = experience.response_mask
    if len(mask) and mask.shape != expected:
        raise InvalidRequest(f"experience response_mask {mask.shape}: expected {expected}, or no element")
    if len(mask) and np.any(experience.actor_mask[~mask]):
        raise InvalidRequest("experience actor_mask: expected 0 at the tokens of observations, see response_mask")
