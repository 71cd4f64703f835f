"""Micro-batches of ragged sequences: which sequences share a forward pass, and the positions of their response tokens.

If the model supports packing, sequences are concatenated in one row without pads, and a prompt that they share is stored once.
Otherwise they are padded on the right. Under causal attention a token never attends to later pads. So no attention mask is
needed, position ids are 0, 1, 2... in every row, and attention can use its fast causal path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quartet.contract.arrays import ExpertArray, IntArray
from quartet.contract.trajectory import TokenBatch
from quartet.errors import InvalidRequest
from quartet.models.forward.packing import Packing, TokenIndices

MAX_ATTENTION_EXPANSION = 4
"""Maximum of rows x longest in attention, as a multiple of ``max_tokens`` of a packed micro-batch."""


def micro_batches(
    lengths: Sequence[int] | IntArray, max_tokens: int, packed: bool = False, prompts: Sequence[int] | None = None
) -> list[list[int]]:
    """Partition the sequence indices into micro-batches whose rows x longest is at most ``max_tokens``, pads included.

    With ``packed`` there are no pads, so the limit is on the sum of the lengths. Attention still pads the rows, to at most
    ``MAX_ATTENTION_EXPANSION`` times as many tokens. Sequences of similar length share a micro-batch. The longest come first, so
    that a lack of memory shows early. Equal lengths keep their order. ``prompts`` is a number for the prompt of each sequence;
    sequences of one prompt stay together. A sequence longer than ``max_tokens`` gets a separate micro-batch. The result depends
    on the arguments only. Raises InvalidRequest.
    """
    if max_tokens < 1:
        raise InvalidRequest(f"max_tokens {max_tokens}: expected at least 1")
    sizes = np.asarray(lengths, np.int64)
    groups: list[list[int]] = []
    tokens = longest = 0
    for index in _in_order(sizes, prompts):
        size = int(sizes[index])
        tokens, longest = tokens + size, max(longest, size)
        rows = len(groups[-1]) + 1 if groups else 0
        if (
            not groups
            or rows * longest > max_tokens * (MAX_ATTENTION_EXPANSION if packed else 1)
            or (packed and tokens > max_tokens)
        ):
            groups.append([])
            tokens = longest = size
        groups[-1].append(index)
    return groups if prompts is None else [sorted(group, key=lambda index: -sizes[index]) for group in groups]


def _in_order(sizes: NDArray[np.int64], prompts: Sequence[int] | None) -> list[int]:
    """Return the indices by descending size; with ``prompts`` by the longest sequence of each prompt, then by size."""
    if prompts is None:
        order: list[int] = np.argsort(-sizes, kind="stable").tolist()
        return order
    most: dict[int, int] = {}
    for prompt, size in zip(prompts, sizes.tolist(), strict=True):
        most[prompt] = max(size, most.get(prompt, 0))
    return sorted(range(len(sizes)), key=lambda index: (-most[prompts[index]], prompts[index], -sizes[index]))


def right_pad(sequences: Sequence[IntArray], device: torch.device | str, columns: int | None = None) -> torch.Tensor:
    """Return token ids int64 [rows, columns], padded on the right with 0. ``columns`` defaults to the longest sequence.

    Id 0 is an ordinary token. The end of a sequence follows from its length; the pad value is never compared.
    """
    padded = np.zeros((len(sequences), columns or max(len(sequence) for sequence in sequences)), np.int64)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)] = sequence
    return torch.from_numpy(padded).to(device)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences in the format of one forward pass, and the positions of their n response tokens.

    ``rows``: the sequences, by index in the batch. ``input_ids`` int64 [rows, longest], or [1, tokens] with a ``packing``.
    ``predicts``: the positions [p-1, p+r-1) of a sequence with p prompt and r response tokens, whose outputs predict the response
    tokens (the logits at t-1 score token t): bool of the same shape, or int64 [n] in the packed row. ``targets`` int64 [n]: ids
    of the response tokens. ``token_indices`` int64 [n]: their indices into flat [response tokens] arrays. ``lengths`` int64
    [rows]: response tokens per sequence. ``last`` int64 [rows]: index of each sequence's last token in the flat ``input_ids``.
    ``routed_experts`` uint8 or int16 [tokens of the flat input_ids, layers, experts per token]: those of ``TokenBatch``,
    arbitrary for pads; None to let the model choose.
    """

    rows: list[int]
    input_ids: torch.Tensor
    packing: Packing | None
    predicts: torch.Tensor
    targets: torch.Tensor
    token_indices: torch.Tensor
    lengths: torch.Tensor
    last: torch.Tensor
    routed_experts: torch.Tensor | None = None

    def __len__(self) -> int:
        """The number of response tokens, n."""
        return self.targets.shape[0]


def plan_micro_batches(
    batch: TokenBatch,
    max_tokens: int,
    packed: bool,
    rows: IntArray | NDArray[np.int64] | None = None,
    include_last_token: bool = False,
) -> list[list[int]]:
    """Return the sequences of ``batch``, or only ``rows``, of each micro-batch of at most ``max_tokens``, by index.

    The last token of a sequence predicts no token, so it is left out unless ``include_last_token``.
    """
    chosen = np.arange(len(batch)) if rows is None else rows
    prompts = _prompts(batch, chosen) if packed else None
    groups = micro_batches(batch.lengths[chosen] - (not include_last_token), max_tokens, packed, prompts)
    return [chosen[group].tolist() for group in groups]


def build_micro_batch(
    batch: TokenBatch,
    rows: Sequence[int],
    device: torch.device | str,
    packed: bool = False,
    include_last_token: bool = False,
) -> MicroBatch:
    """Build one micro-batch on ``device`` from the sequences ``rows`` of ``batch``, in this order.

    ``include_last_token``: see ``plan_micro_batches``.
    """
    starts = _starts(batch.lengths)
    response_starts = _starts(batch.response_lengths)
    sequences, targets, token_indices, predicts, experts = [], [], [], [], list[ExpertArray]()
    for row in rows:
        prompt, response = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        sequence = batch.token_ids[starts[row] : starts[row] + prompt + response]
        sequences.append(sequence if include_last_token else sequence[:-1])
        targets.append(sequence[prompt:])
        token_indices.append(np.arange(response_starts[row], response_starts[row] + response))
        predicts.append(slice(prompt - 1, prompt + response - 1))
        if batch.routed_experts is not None and not include_last_token:
            # The sequences before it have no experts for their last tokens.
            experts.append(batch.routed_experts[starts[row] - row :][: prompt + response - 1])
    if packed:
        input_ids, where = _in_one_row(sequences, batch.prompt_lengths[list(rows)].tolist(), device, experts)
    else:
        input_ids = right_pad(sequences, device)
        where = [row * input_ids.shape[1] + np.arange(len(sequence)) for row, sequence in enumerate(sequences)]
    positions = torch.from_numpy(np.concatenate([at[part] for at, part in zip(where, predicts, strict=True)])).to(
        device
    )
    return MicroBatch(
        rows=list(rows),
        input_ids=input_ids,
        packing=Packing.of(where, device) if packed else None,
        predicts=positions if packed else _marked(positions, input_ids),
        targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)).to(device),
        token_indices=torch.from_numpy(np.concatenate(token_indices).astype(np.int64)).to(device),
        lengths=torch.tensor([len(target) for target in targets]).to(device),
        last=torch.tensor([int(at[-1]) for at in where]).to(device),
        routed_experts=_routed(experts, where, input_ids) if experts else None,
    )


def response_token_indices(batch: TokenBatch, rows: IntArray | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of the response tokens of the sequences ``rows`` into flat [response tokens] arrays, int64 [n]."""
    starts = _starts(batch.response_lengths)
    return np.concatenate([starts[row] + np.arange(batch.response_lengths[row]) for row in rows.tolist()])


def _in_one_row(
    sequences: Sequence[IntArray],
    prompt_lengths: Sequence[int],
    device: torch.device | str,
    experts: Sequence[ExpertArray] = (),
) -> tuple[torch.Tensor, list[TokenIndices]]:
    """Return token ids int64 [1, tokens] with each prompt once, and the indices of each sequence's tokens.

    A prompt with other ``experts`` is another prompt.
    """
    prompts: dict[bytes, TokenIndices] = {}
    own, where, tokens = [], list[TokenIndices](), 0
    for index, (sequence, length) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        key = sequence[:length].tobytes() + (experts[index][:length].tobytes() if experts else b"")
        prompt = prompts.get(key, np.zeros(0, np.int64))
        own.append(sequence[len(prompt) :])
        where.append(np.concatenate([prompt, tokens + np.arange(len(own[-1]))]))
        prompts[key] = where[-1][:length]
        tokens += len(own[-1])
    return torch.from_numpy(np.concatenate(own).astype(np.int64)[None]).to(device), where


def _routed(experts: Sequence[ExpertArray], where: Sequence[TokenIndices], input_ids: torch.Tensor) -> torch.Tensor:
    """Return the experts of each token of the flat ``input_ids``: the first ones for pads."""
    shape = experts[0].shape[1:]
    # torch computes little with uint16.
    dtype = np.uint8 if experts[0].dtype == np.uint8 else np.int16
    result = np.broadcast_to(np.arange(shape[1], dtype=dtype), (input_ids.numel(), *shape)).copy()
    for values, at in zip(experts, where, strict=True):
        result[at] = values
    return torch.from_numpy(result).to(input_ids.device)


def _marked(positions: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor of the shape of ``input_ids`` that is True at the flat ``positions``."""
    return (
        torch.zeros(input_ids.numel(), dtype=torch.bool, device=input_ids.device)
        .index_fill_(0, positions, True)
        .view_as(input_ids)
    )


def _prompts(batch: TokenBatch, rows: IntArray | NDArray[np.int64]) -> list[int]:
    """Number the prompts of the sequences ``rows`` by first appearance."""
    starts, numbers = _starts(batch.lengths), dict[bytes, int]()
    return [
        numbers.setdefault(
            batch.token_ids[starts[row] : starts[row] + batch.prompt_lengths[row]].tobytes(), len(numbers)
        )
        for row in rows
    ]


def _starts(lengths: IntArray | NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[:-1]])
