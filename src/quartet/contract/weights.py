"""Transfers and saves of weights."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ReferenceVersion:
    """A version of a synchronized reference: step of its newest policy, folder below the run's directory, and digest."""

    step: int
    directory: str
    digest: bytes


class SaveKind(enum.StrEnum):
    """Content of a save.

    A checkpoint is enough to continue training. A model is in Hugging Face format. An adapter is only the LoRA adapter.
    The EMA is a model with the moving average of the weights.
    """

    CHECKPOINT = "checkpoint"
    MODEL = "model"
    ADAPTER = "adapter"
    EMA = "ema"


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """Arguments of one Save call. ``step`` is the step that the model must have; None accepts any step.

    ``directory`` is relative to the run's directory and confined to it.
    """

    run: str
    directory: str
    kind: SaveKind
    leader_epoch: int
    step: int | None = None


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """Arguments of one Restore call. ``step`` 0 is the initial model, with an empty ``directory``."""

    run: str
    step: int
    directory: str
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One saved file: path relative to the run's directory, size in bytes, SHA-256 in hexadecimal."""

    path: str
    bytes: int
    sha256: str


TransferWay = Literal["CUDA IPC", "shared memory", "process group", "delta", "full", "held"]
"""How weights reach a generator. CUDA IPC: by shared memory and by memory of a GPU, from which the engine copies. delta: as the
differences to the version before. held: it had them already."""


@dataclass(frozen=True, slots=True)
class WeightTransfer:
    """Transfer of one policy version into a generator.

    ``weights_digest`` has 16 bytes. ``source``: role and HOST:PORT; empty if nothing was transferred. ``bytes`` were received,
    compressed. ``load_seconds`` include reading the weights back from the engine.
    """

    policy_version: int
    weights_digest: bytes
    source: str = ""
    bytes: int = 0
    way: TransferWay = "held"
    transfer_seconds: float = 0.0
    load_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """Publication of one policy version by a weight source.

    ``weights_digest`` has 16 bytes. ``changed_tensors`` differ from the version before. ``seconds`` include the copy
    of the weights.
    """

    policy_version: int
    weights_digest: bytes
    changed_tensors: int
    total_bytes: int
    seconds: float
