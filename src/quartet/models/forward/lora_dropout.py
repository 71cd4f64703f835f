"""Dropout of LoRA adapters whose masks depend on the tokens, and not on their place in a batch.

Whether an input of a layer is dropped follows from a key of the mini-batch, the layer, the feature, and the token with all tokens
before it in its sequence. So the masks are the same for any micro-batches, with and without packing, on every rank of a group, in
a layer that gradient checkpointing recomputes, and in a repeated update. Equal prompts have equal masks: packing stores a prompt
once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from quartet.errors import ModelError
from quartet.models.forward.batching import MicroBatch
from quartet.models.forward.packing import Packing

_FACTORS = (0x7FEB352D, 0x846CA68B - 2**32)
"""Odd factors of a hash of 32 bits (Wellons 2018, lowbias32), as signed numbers."""
_POSITIONS, _TOKENS = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64
"""Odd factors of a hash of 64 bits (Steele et al. 2014, SplitMix64), as signed numbers."""


class DropoutMasks:
    """The masks of all layers of one model: off, except inside ``of_update``."""

    def __init__(self) -> None:
        self.key: tuple[object, ...] | None = None
        """Key of the mini-batch; None while dropout is off."""
        self.prefixes = torch.empty(0, dtype=torch.int64)
        """A hash of each token of the micro-batch and those before it in its sequence, int64 [tokens]."""
        self.layers: list[nn.Module] = []
        """Layers of peft that use their dropout in training mode only: those with DoRA."""

    @contextmanager
    def of_update(self, key: tuple[object, ...], micro_batch: MicroBatch) -> Iterator[None]:
        """Drop inputs in the passes over a micro-batch inside the context. The backward pass must be inside, too.

        ``key`` identifies the mini-batch.
        """
        self.key, self.prefixes = key, prefix_hashes(micro_batch.input_ids, micro_batch.packing)
        for layer in self.layers:
            # Not of its submodules.
            layer.training = True
        try:
            yield
        finally:
            for layer in self.layers:
                layer.training = False
            self.key, self.prefixes = None, self.prefixes[:0]


class TokenDropout(nn.Module):
    """Dropout of the inputs of one adapter. Replaces torch's, whose masks depend on everything that was computed before."""

    def __init__(self, rate: float, layer: str, masks: DropoutMasks) -> None:
        """``rate``: fraction of the inputs that are dropped. The others are divided by 1 - rate. ``layer``: its name."""
        super().__init__()
        self.rate, self.layer, self.masks = rate, layer, masks
        self.first_feature = 0
        """Number of this rank's first feature among those of the layer, if the ranks of a group share them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inputs ``x`` [..., features], of which some are 0 inside ``DropoutMasks.of_update``."""
        if self.masks.key is None:
            return x
        prefixes = self.masks.prefixes
        if x.numel() != len(prefixes) * x.shape[-1]:
            raise ModelError(
                f"lora.dropout: {self.layer} gets {x.numel() // x.shape[-1]} rows for {len(prefixes)} tokens, so its rows are "
                "no tokens in their order; leave it out of lora.target_modules, or set lora.dropout 0"
            )
        dropped = dropped_inputs(
            prefixes, x.shape[-1], self.rate, (*self.masks.key, self.layer), self.first_feature
        ).view(x.shape)
        return (x / (1 - self.rate)).masked_fill(dropped, 0)

    def extra_repr(self) -> str:
        """Return the rate for the text form of the model."""
        return f"rate={self.rate}"


def masks_of(model: nn.Module) -> DropoutMasks | None:
    """Return the masks of the model's adapter, None if it has no dropout."""
    return next((module.masks for module in model.modules() if isinstance(module, TokenDropout)), None)


@contextmanager
def dropout(masks: DropoutMasks | None, key: tuple[object, ...], micro_batch: MicroBatch) -> Iterator[None]:
    """Drop inputs of the adapter inside the context, if ``masks`` says that it has dropout. See ``DropoutMasks.of_update``."""
    if masks is None:
        yield
        return
    with masks.of_update(key, micro_batch):
        yield


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """Drop no inputs inside the context, which may be inside ``dropout``: for a trial with other tokens."""
    masks = masks_of(model)
    if masks is None:
        yield
        return
    key, masks.key = masks.key, None
    try:
        yield
    finally:
        masks.key = key


def dropped_inputs(
    prefixes: torch.Tensor, features: int, rate: float, key: tuple[object, ...], first_feature: int = 0
) -> torch.Tensor:
    """Return which inputs are dropped, bool [tokens, features], each with probability ``rate``.

    ``prefixes`` int64 [tokens]: see ``prefix_hashes``. Other keys give independent masks. The result is the same on every device.
    """
    name = "/".join(["lora-dropout", *map(str, key)])
    numbers = hashlib.blake2b(name.encode(), digest_size=16).digest()
    first, second = (int.from_bytes(part, "little", signed=True) for part in (numbers[:8], numbers[8:]))
    tokens = _mixed(prefixes ^ first)
    columns = torch.arange(first_feature, first_feature + features, device=prefixes.device)
    hashes = (tokens >> 32).int()[:, None] ^ (_mixed(columns * _POSITIONS ^ second) >> 32).int()
    for factor, shift in zip(_FACTORS, (15, 0), strict=True):
        hashes.mul_(factor)
        if shift:
            hashes.bitwise_xor_(_shifted(hashes, shift, 32))
    return hashes < round(rate * 2**32) - 2**31


def prefix_hashes(input_ids: torch.Tensor, packing: Packing | None) -> torch.Tensor:
    """Return a hash of each token and those before it in its sequence, int64 [tokens], in the order of ``input_ids``."""
    if packing is None:
        return _row_hashes(input_ids).flatten()
    unpacked = input_ids.flatten()[packing.sources]
    blocks = torch.split(unpacked, [rows * longest for rows, longest in packing.blocks])
    hashes = [_row_hashes(block.view(shape)).flatten() for block, shape in zip(blocks, packing.blocks, strict=True)]
    return torch.cat(hashes)[packing.token_indices]


def _row_hashes(ids: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(ids.shape[1], device=ids.device) * _POSITIONS
    return _mixed(_mixed(positions + ids * _TOKENS).cumsum(1))


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """Return a hash of each int64 value (the last steps of SplitMix64)."""
    for shift, factor in ((30, _TOKENS), (27, 0x94D049BB133111EB - 2**64)):
        values = (values ^ _shifted(values, shift, 64)) * factor
    return values ^ _shifted(values, 31, 64)


def _shifted(values: torch.Tensor, shift: int, bits: int) -> torch.Tensor:
    """Return the values shifted to the right, with zeros from the left."""
    return (values >> shift) & ((1 << (bits - shift)) - 1)
