"""Pretraining of small checkpoints on a CPU, for demos, examples and tests: a tokenizer, a policy, a reward model.

Every function is a pure function of its arguments. Training runs on one thread, so a seed gives the same bits for any number of
cores of one machine. Sequences are token lists without BOS. Complete sequences end in EOS: the policy learns to stop, and the
reward model scores a finished response at its EOS. Models are Llamas without dropout, with separate pad and EOS tokens; the
shape of a policy may name another type. They are saved with ``save_pretrained`` as safetensors, next to their tokenizer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    LlamaForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from quartet.errors import InvalidRequest
from quartet.models.torch_settings import torch_threads

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
"""Special tokens, ids 0, 1 and 2. The tokenizer does not add them. BOS is available but unused."""

TokenIds = Sequence[int]
MIN_VOCABULARY = 3 + 256
"""The special tokens and all bytes, so that any text can be encoded."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a Llama. The feed-forward layer is ``8 / 3 * hidden`` wide, rounded up to a multiple of 16.

    ``config`` has further settings of config.json, which take precedence. A ``model_type`` in it gives a policy of another type,
    whose logits have to be the product of its last hidden state and its output embeddings.
    """

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    positions: int = 256
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Training schedule: AdamW, a linear warm-up, then a cosine decay to 2 % of ``learning_rate``."""

    steps: int
    batch_sequences: int = 64
    learning_rate: float = 2e-3
    warmup_steps: int = 40
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0

    def factor(self, step: int) -> float:
        """Return the factor on ``learning_rate`` at ``step``, counted from 0."""
        warmup = min(self.warmup_steps, max(1, self.steps // 5))
        if step < warmup:
            return (step + 1) / warmup
        through = (step - warmup) / max(1, self.steps - warmup)
        return 0.02 + 0.49 * (1.0 + math.cos(math.pi * through))


@dataclass(frozen=True, slots=True)
class PretrainingProgress:
    """One finished training step: ``step`` of ``steps`` (from 1) of the stage, and that batch's loss."""

    stage: str
    step: int
    steps: int
    loss: float


ProgressCallback = Callable[[PretrainingProgress], None]


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """Use one thread and a seeded global generator of torch inside the context. Both are restored afterwards."""
    with torch_threads(1), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def train_tokenizer(
    texts: Iterable[str], vocabulary_size: int, directory: Path | None = None
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most ``vocabulary_size`` tokens, and save it if ``directory`` is given.

    Raises InvalidRequest if the vocabulary is too small for the special tokens and all bytes.
    """
    if vocabulary_size < MIN_VOCABULARY:
        raise InvalidRequest(f"vocabulary_size {vocabulary_size}: expected at least {MIN_VOCABULARY}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )
    if directory is not None:
        tokenizer.save_pretrained(directory)
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], *, eos: bool) -> list[list[int]]:
    """Return the token ids of each text, with EOS at the end if ``eos``."""
    end = [tokenizer.eos_token_id] if eos else []
    return [list(ids) + end for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


def train_causal_lm(
    sequences: Sequence[str] | Sequence[TokenIds],
    tokenizer: PreTrainedTokenizerFast,
    shape: Shape,
    schedule: Schedule,
    *,
    seed: int = 0,
    progress: ProgressCallback | None = None,
    stage: str = "policy",
) -> PreTrainedModel:
    """Train a language model on ``sequences``: texts, which are encoded and end in EOS, or unchanged token lists.

    The loss is the mean cross-entropy per token. Raises InvalidRequest without sequences.
    """
    rows = _token_lists(sequences, tokenizer)
    _check_rows(rows, shape, min_tokens=2)

    with deterministic(seed):
        config = _config(tokenizer, shape)
        model = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])(config)
        body, head, pad = model.base_model, model.get_output_embeddings(), _pad_id(model)

        def loss(batch: Sequence[int]) -> Tensor:
            ids, _ = _pad([rows[i] for i in batch], pad)
            hidden = body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            targets = ids[:, 1:]
            is_token = targets != pad
            return functional.cross_entropy(head(hidden[is_token]), targets[is_token])

        _train(model, loss, [len(row) for row in rows], schedule, seed, progress, stage)
    return cast(PreTrainedModel, model)


def train_reward_classifier(
    sequences: Sequence[str] | Sequence[TokenIds],
    labels: Sequence[float],
    tokenizer: PreTrainedTokenizerFast,
    shape: Shape,
    schedule: Schedule,
    *,
    body: PreTrainedModel | None = None,
    truncated_share: float = 1 / 3,
    truncated_certainty: float = 0.6,
    seed: int = 0,
    progress: ProgressCallback | None = None,
    stage: str = "reward",
) -> LlamaForSequenceClassification:
    """Train a scorer with one logit by binary cross-entropy on ``labels`` (1 favourable, 0 not).

    The logit is read at the last token. A share ``truncated_share`` of the rows is cut at a random length, without EOS, so that
    unfinished responses get sensible scores, too. The label of a cut row moves towards 0.5, to ``truncated_certainty`` of its
    distance. So unfinished responses score between the extremes of finished ones, and a policy gains by finishing. ``body``
    provides the initial weights of the transformer. Raises InvalidRequest without sequences.
    """
    rows = _token_lists(sequences, tokenizer)
    _check_rows(rows, shape, min_tokens=2)
    if len(labels) != len(rows):
        raise InvalidRequest(f"{len(labels)} labels for {len(rows)} sequences: expected one each")
    draw = random.Random(f"{seed}/cuts")

    with deterministic(seed):
        model = _scorer(tokenizer, shape, body)

        def loss(batch: Sequence[int]) -> Tensor:
            seen, targets = [], []
            for i in batch:
                cut = draw.random() < truncated_share
                seen.append(_cut(rows[i], draw) if cut else rows[i])
                targets.append(0.5 + (truncated_certainty if cut else 1.0) * (labels[i] - 0.5))
            return functional.binary_cross_entropy_with_logits(scores(model, seen), torch.tensor(targets))

        _train(model, loss, [len(row) for row in rows], schedule, seed, progress, stage)
    return model


def train_preference_model(
    pairs: Sequence[tuple[TokenIds, TokenIds]],
    tokenizer: PreTrainedTokenizerFast,
    shape: Shape,
    schedule: Schedule,
    *,
    body: PreTrainedModel | None = None,
    centring: float = 0.01,
    seed: int = 0,
    progress: ProgressCallback | None = None,
    stage: str = "reward",
) -> LlamaForSequenceClassification:
    """Train a scorer with one logit on ``pairs`` (chosen, rejected) of token lists.

    The loss is Bradley and Terry's (1952), ``-log sigmoid(chosen - rejected)``, plus ``centring`` times the squared mean
    score of the batch, because pairs do not determine the zero point. Raises InvalidRequest without pairs.
    """
    _check_rows([row for pair in pairs for row in pair], shape, min_tokens=1)

    with deterministic(seed):
        model = _scorer(tokenizer, shape, body)

        def loss(batch: Sequence[int]) -> Tensor:
            chosen, rejected = scores(model, [pairs[i][side] for side in (0, 1) for i in batch]).chunk(2)
            centre = 0.5 * (chosen + rejected).mean()
            return -functional.logsigmoid(chosen - rejected).mean() + centring * centre.square()

        _train(model, loss, [max(map(len, pair)) for pair in pairs], schedule, seed, progress, stage)
    return model


def scores(model: LlamaForSequenceClassification, rows: Sequence[TokenIds]) -> Tensor:
    """Return the logit at each row's last token, float32 [sequences]. Causal attention ignores the right padding."""
    ids, lengths = _pad(rows, _pad_id(model))
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    last: Tensor = model.score(hidden[torch.arange(len(rows)), lengths - 1])[:, 0]
    return last


@torch.no_grad()
def score_all(model: LlamaForSequenceClassification, rows: Sequence[TokenIds], batch_sequences: int = 256) -> Tensor:
    """Return the ``scores`` of many rows, float32 [sequences], computed in batches without gradients."""
    parts = [scores(model, rows[at : at + batch_sequences]) for at in range(0, len(rows), batch_sequences)]
    return torch.cat(parts) if parts else torch.zeros(0)


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[TokenIds],
    max_response_tokens: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    batch_sequences: int = 256,
) -> list[list[int]]:
    """Sample one response to each prompt, with its EOS if it has one. For evaluating checkpoints, not for training."""
    eos, pad = model.config.eos_token_id, _pad_id(model)
    generate: Callable[..., Tensor] = cast(Any, model).generate
    responses: list[list[int]] = []
    with deterministic(seed):
        for at in range(0, len(prompts), batch_sequences):
            batch = prompts[at : at + batch_sequences]
            width = max(map(len, batch))
            ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in batch])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
            output = generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max_response_tokens,
                do_sample=True,
                temperature=temperature,
                top_k=0,
                top_p=1.0,
            )
            for row in output[:, width:].tolist():
                responses.append(row[: row.index(eos) + 1] if eos in row else row)
    return responses


def save_checkpoint(model: Any, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Save the model as safetensors with its config and tokenizer."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # safetensors creates private files, but a service in a container runs as another user.
    for weights in directory.glob("*.safetensors"):
        weights.chmod((directory / "config.json").stat().st_mode)


def _config(tokenizer: PreTrainedTokenizerFast, shape: Shape, **more: Any) -> PreTrainedConfig:
    settings = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden,
        "intermediate_size": -(-8 * shape.hidden // 48) * 16,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "max_position_embeddings": shape.positions,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **shape.config,
        **more,
    }
    return AutoConfig.for_model(**settings)


def _scorer(
    tokenizer: PreTrainedTokenizerFast, shape: Shape, body: PreTrainedModel | None
) -> LlamaForSequenceClassification:
    model = LlamaForSequenceClassification(  # type: ignore[no-untyped-call]
        _config(tokenizer, shape, num_labels=1)
    )
    if body is not None:
        model.model.load_state_dict(body.model.state_dict())
    return model


def _train(
    model: Any,
    loss: Callable[[Sequence[int]], Tensor],
    lengths: Sequence[int],
    schedule: Schedule,
    seed: int,
    progress: ProgressCallback | None,
    stage: str,
) -> None:
    """Train ``model`` for ``schedule.steps`` steps of AdamW on ``loss``, then set eval mode. Only matrices get weight decay."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": schedule.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=schedule.learning_rate,
        betas=(0.9, 0.98),
    )
    batches = _batches(lengths, schedule.batch_sequences, random.Random(f"{seed}/batches"))
    model.train()
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate * schedule.factor(step)
        value = loss(next(batches))
        optimizer.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.max_grad_norm)
        optimizer.step()
        if progress is not None:
            progress(PretrainingProgress(stage, step + 1, schedule.steps, float(value.detach())))
    model.eval()


def _batches(lengths: Sequence[int], size: int, order: random.Random, window: int = 50) -> Iterator[list[int]]:
    """Yield batches of row indices endlessly, epoch after epoch. Rows of similar length share a batch to reduce padding."""
    while True:
        rows = list(range(len(lengths)))
        order.shuffle(rows)
        batches: list[list[int]] = []
        for at in range(0, len(rows), size * window):
            near = sorted(rows[at : at + size * window], key=lambda row: lengths[row])
            batches += [near[first : first + size] for first in range(0, len(near), size)]
        order.shuffle(batches)
        yield from batches


def _pad(rows: Sequence[TokenIds], pad: int) -> tuple[Tensor, Tensor]:
    """Pad ``rows`` on the right. Return int64 [sequences, longest] and the lengths, int64 [sequences]."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), pad)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    return ids, lengths


def _pad_id(model: Any) -> int:
    return int(model.config.pad_token_id)


def _cut(row: TokenIds, draw: random.Random) -> TokenIds:
    """Return a random prefix of ``row``: at least one token, at most all but the last (its EOS)."""
    return row[: draw.randint(1, max(1, len(row) - 1))]


def _token_lists(
    sequences: Sequence[str] | Sequence[TokenIds], tokenizer: PreTrainedTokenizerFast
) -> Sequence[TokenIds]:
    texts = [row for row in sequences if isinstance(row, str)]
    if not texts:
        return [row for row in sequences if not isinstance(row, str)]
    if len(texts) != len(sequences):
        raise InvalidRequest("sequences: expected all texts or all token lists, found both")
    return encode(tokenizer, texts, eos=True)


def _check_rows(rows: Sequence[TokenIds], shape: Shape, min_tokens: int) -> None:
    if not rows:
        raise InvalidRequest("nothing to train on: expected at least one sequence")
    for index, row in enumerate(rows):
        if not min_tokens <= len(row) <= shape.positions:
            raise InvalidRequest(f"sequence {index}: {len(row)} tokens; expected {min_tokens} to {shape.positions}")
