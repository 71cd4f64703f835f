"""Attention on a GPU: one kernel for sequences of different lengths, and packed rows gathered without indices.

The indices of a gather are sorted in its backward pass in deterministic mode. That would happen in every layer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

log = structlog.get_logger()

HALF_PRECISION = (torch.bfloat16, torch.float16)
MAX_HEAD_SIZE, HEAD_SIZE_MULTIPLE = 256, 8
"""Head sizes of the kernel for sequences of different lengths."""
TRIAL_TOLERANCE = 0.05
"""Maximum difference of its outputs and gradients from those of separate sequences, relative to the largest."""
TRIAL = ([0, 1, 2, 3, 4], [0, 1, 5, 6], [7, 8])
"""Tokens of the sequences in its trial. The first two share two tokens."""


@dataclass(frozen=True, slots=True)
class Runs:
    """The tokens of a packed row as runs, of which sequences consist.

    ``sizes``: tokens of each run; together they are the row. ``padded``: the runs of all sequences, one after the other, by
    number; -n stands for n pads. ``keys``: those of the sequences with tokens that no earlier sequence has, without pads.
    ``bounds``: int32 [sequences + 1] each, where these new tokens and the ``keys`` of a sequence start and end. ``longest``: the
    most new tokens and the most keys of a sequence.
    """

    sizes: tuple[int, ...]
    padded: tuple[int, ...]
    keys: tuple[int, ...]
    bounds: tuple[torch.Tensor, torch.Tensor]
    longest: tuple[int, int]

    @classmethod
    def of(
        cls, sequences: Sequence[NDArray[np.int64]], padded_lengths: Sequence[int], device: torch.device | str
    ) -> Runs:
        """Create the runs of sequences, see ``Packing.of``. ``padded_lengths``: the length of each with its pads."""
        edges = [_edges(sequence) for sequence in sequences]
        limits = np.unique(np.concatenate([np.zeros(1, np.int64), *(each.ravel() for each in edges)]))
        padded, keys, lengths = list[int](), list[int](), [(0, 0)]
        seen = 0
        for sequence, (starts, ends), longest in zip(sequences, edges, padded_lengths, strict=True):
            numbers = [
                number
                for first, last in zip(np.searchsorted(limits, starts), np.searchsorted(limits, ends), strict=True)
                for number in range(first, last)
            ]
            pads = longest - len(sequence)
            padded += numbers + [-pads] * (pads > 0)
            if sequence[-1] >= seen:
                lengths.append((int(np.count_nonzero(sequence >= seen)), len(sequence)))
                keys += numbers
                seen = int(sequence[-1]) + 1
        bounds = np.cumsum(lengths, axis=0, dtype=np.int32)
        new, all_keys = (torch.from_numpy(column.copy()).to(device) for column in bounds.T)
        most_new, most = np.max(lengths, axis=0).tolist()
        return cls(tuple(np.diff(limits).tolist()), tuple(padded), tuple(keys), (new, all_keys), (most_new, most))

    def gather(self, states: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        """Return the runs ``order`` (``padded`` or ``keys``) of ``states`` [tokens, ...], one after the other. Pads are 0."""
        if order == tuple(range(len(self.sizes))):
            return states
        result: torch.Tensor = _Gather.apply(states, self, order)  # type: ignore[no-untyped-call]
        return result

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """Return the row of ``states`` [padded tokens, ...]: each token from the first sequence that contains it."""
        if self.padded == tuple(range(len(self.sizes))):
            return states
        result: torch.Tensor = _Pack.apply(states, self)  # type: ignore[no-untyped-call]
        return result

    def parts(self, states: torch.Tensor, order: tuple[int, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number and the part of each run in ``states``, which were gathered in this order."""
        lengths = [self.sizes[run] if run >= 0 else -run for run in order]
        return zip(order, torch.split(states, lengths), strict=True)


def _edges(sequence: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where the runs of ascending tokens start and end, int64 [2, runs]."""
    last = np.flatnonzero(np.diff(sequence) > 1)
    return np.stack([sequence[np.concatenate([[0], last + 1])], sequence[np.concatenate([last, [-1]])] + 1])


class _Gather(torch.autograd.Function):
    """Gather of runs. The gradients of a run that is used several times are added in float32, in their order."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, runs: Runs, order: tuple[int, ...]) -> torch.Tensor:
        ctx.runs, ctx.order = runs, order
        parts = torch.split(states, list(runs.sizes))
        return torch.cat([parts[run] if run >= 0 else states.new_zeros(-run, *states.shape[1:]) for run in order])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        [gradient], runs = gradients, ctx.runs
        uses: list[list[torch.Tensor]] = [[] for _ in runs.sizes]
        for run, part in runs.parts(gradient, ctx.order):
            if run >= 0:
                uses[run].append(part)
        shape = gradient.shape[1:]
        sums = [
            _sum(parts) if parts else gradient.new_zeros(size, *shape)
            for size, parts in zip(runs.sizes, uses, strict=True)
        ]
        return torch.cat(sums), None, None


class _Pack(torch.autograd.Function):
    """Selection of the first use of each run."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, runs: Runs) -> torch.Tensor:
        ctx.runs = runs
        first: dict[int, torch.Tensor] = {}
        for run, part in runs.parts(states, runs.padded):
            first.setdefault(run, part)
        return torch.cat([first[run] for run in range(len(runs.sizes))])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        [gradient], runs = gradients, ctx.runs
        left = dict(enumerate(torch.split(gradient, list(runs.sizes))))
        rest = [runs.sizes[run] if run >= 0 else -run for run in runs.padded]
        parts = [
            left.pop(run) if run in left else gradient.new_zeros(size, *gradient.shape[1:])
            for run, size in zip(runs.padded, rest, strict=True)
        ]
        return torch.cat(parts), None


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    # A sum of half precision is computed in float32 and rounded once.
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers does with "sdpa". In float32 on a GPU, keys and values are repeated for the heads of a group.

    Of the kernels whose memory does not grow with the square of the length, one needs half precision, and the other as many heads
    of keys as of queries.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and attention_mask is None and query.is_cuda and query.dtype == torch.float32:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    return output, None


def attend_to_runs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: Runs, scaling: float | None = None
) -> torch.Tensor:
    """Attend causally within the sequences of a packed row in one kernel: [1, heads, tokens, size] -> [1, tokens, heads, size].

    Only the new tokens of a sequence are queries. The kernel's causal mask ends at the last token of both.
    """
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 has no such argument, and accepts groups.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    key, value = (runs.gather(states, runs.keys) for states in (key, value))
    output = varlen_attn(query, key, value, *runs.bounds, *runs.longest, scale=scaling, window_size=(-1, 0), **grouped)
    assert isinstance(output, torch.Tensor)
    return output[None]


def can_attend_to_runs(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]
) -> bool:
    """Return whether ``attend_to_runs`` computes what ``sdpa`` with these arguments does for each sequence."""
    causal = arguments.get("is_causal")
    is_plain = not arguments.get("dropout") and (getattr(module, "is_causal", True) if causal is None else causal)
    size = query.shape[3]
    return bool(
        is_plain
        and all(arguments.get(name) is None for name in ("position_bias", "softcap"))
        and query.dtype in HALF_PRECISION
        and key.shape[3] == value.shape[3] == size <= MAX_HEAD_SIZE
        and size % HEAD_SIZE_MULTIPLE == 0
        and _works(query.device, query.dtype, query.shape[1], key.shape[1], size)
    )


@functools.cache
def _works(device: torch.device, dtype: torch.dtype, heads: int, groups: int, size: int) -> bool:
    """Return whether the kernel computes what attention to each sequence does, its gradients included. Logs the reason if not.

    It needs a GPU of 2020 or later. Tried once in a process.
    """
    try:
        # The trial of a model runs without gradients.
        with torch.inference_mode(False), torch.enable_grad():
            difference = _difference(device, dtype, heads, groups, size)
    except torch.OutOfMemoryError:
        raise
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    else:
        # This also refuses a difference of NaN.
        if difference <= TRIAL_TOLERANCE:
            return True
        reason = f"results differ by {difference:.2g} of the largest, {TRIAL_TOLERANCE:g} allowed"
    log.info("attends to sequences of different lengths in several kernels", heads=heads, head_size=size, reason=reason)
    return False


def _difference(device: torch.device, dtype: torch.dtype, heads: int, groups: int, size: int) -> float:
    """Return the largest difference of outputs and gradients in a trial, relative to the largest value of each."""
    sequences = [np.array(tokens) for tokens in TRIAL]
    runs = Runs.of(sequences, list(map(len, TRIAL)), device)
    tokens = sum(runs.sizes)

    def values(count: int, seed: int) -> torch.Tensor:
        numbers = torch.arange(count * tokens * size, device=device, dtype=torch.float32)
        return (numbers * (0.7 + 0.1 * seed)).sin().view(1, tokens, count, size).transpose(1, 2).to(dtype)

    states = [values(count, seed).detach().requires_grad_() for seed, count in enumerate((heads, groups, groups))]
    weights = values(heads, 3).transpose(1, 2)
    query, key, value = states
    output = attend_to_runs(query, key, value, runs)
    expected, seen = [], 0
    for sequence in sequences:
        q, k, v = (each.float()[:, :, sequence.tolist()] for each in states)
        k, v = (repeat_kv(each, heads // groups) for each in (k, v))
        whole = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        expected.append(whole[:, np.flatnonzero(sequence >= seen).tolist()])
        seen = int(sequence[-1]) + 1
    reference = torch.cat(expected, 1)
    gradients = torch.autograd.grad((output * weights).sum(), states)
    wanted = torch.autograd.grad((reference * weights).sum(), states)
    pairs = zip((output.detach(), *gradients), (reference.detach(), *wanted), strict=True)
    return max(float((one.float() - two.float()).abs().max() / two.float().abs().max()) for one, two in pairs)
