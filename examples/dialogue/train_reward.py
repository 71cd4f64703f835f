"""Train a reward model on preference pairs, with transformers and a plain loop of PyTorch.

    python examples/dialogue/train_reward.py MODEL DATA OUT

MODEL is the policy, or another model with its tokenizer: a path or a hub id. DATA is the directory that prepare.py has written.
OUT becomes a checkpoint for ``reward.model``: a sequence classifier with one output, in safetensors, with the tokenizer.

The loss of a pair is that of Bradley and Terry (1952), -log sigmoid(r_chosen - r_rejected - MARGIN * margin), with the margin of
Llama 2 (arXiv:2307.09288, equation 2), plus CENTRING * (r_chosen + r_rejected)^2, which determines the zero point of the scores
(arXiv:2312.09244, section 2.1).

A score is read at the last token, as in Quartet: at the EOS of a complete response. A conversation is tokenized as in a run: the
prompt by the chat template with its generation prompt, the answer as text, and EOS. What a template writes after EOS is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from preferences import Pair, messages_of, positive, read_pairs
from prepare import check_out
from torch import Tensor, nn
from torch.nn import functional

from quartet.config.rewards import RewardSourceConfig
from quartet.contract.trajectory import TokenBatch
from quartet.demo.pretraining import save_checkpoint
from quartet.errors import DataError, ModelError, QuartetError
from quartet.model_files.hub_models import model_directory
from quartet.models.forward.model_capabilities import max_positions
from quartet.models.hf_logging import suppress_hf_logging
from quartet.models.weights.tokenizer import SAFE, explained, load_tokenizer, tokenizer_fingerprint
from quartet.rewards.model import ModelReward
from quartet.system.durable_files import staged_directory

SUMMARY = "training.json"
CHECKED_PAIRS = 8
"""Number of validation pairs that Quartet's reward service scores to check the checkpoint."""
MAX_DIFFERENCE = 1e-3
"""Maximum difference of its scores from those of the trained model, relative to the largest score, or 1."""


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """Token ids of the prompt and of both answers, which end in EOS."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    margin: float

    @property
    def length(self) -> int:
        """Tokens of the longer conversation."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


def main(arguments: list[str] | None = None) -> int:
    """Run the program. The exit status is 0, or 2 for invalid input, with one line on stderr."""
    options = parse(arguments)
    try:
        check_out(options.out, SUMMARY)
        with staged_directory(options.out) as folder, suppress_hf_logging():
            train(options, folder)
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="the model to start from, with the policy's tokenizer")
    parser.add_argument("data", type=Path, metavar="DATA", help="the directory that prepare.py has written")
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to create")
    numbers: dict[str, tuple[float, str]] = {
        "epochs": (1, "passes over the pairs"),
        "batch-pairs": (64, "pairs of an optimizer step"),
        "micro-batch-pairs": (8, "pairs of a forward pass; changes no result, up to rounding"),
        "max-tokens": (1024, "pairs with a longer conversation are left out"),
        "max-validation-pairs": (1000, "number of validation pairs to use"),
        "learning-rate": (1e-5, "peak of a schedule with linear warm-up and linear decay to 0"),
        "warmup": (0.03, "fraction of the steps with a rising learning rate"),
        "weight-decay": (0.0, "of AdamW"),
        "max-grad-norm": (1.0, "clips the norm of the gradient"),
        "margin": (0.0, "coefficient of the pairs' margins, for data with ratings"),
        "centring": (0.01, "coefficient of the squared sum of both scores"),
    }
    for name, (default, text) in numbers.items():
        kind = positive if isinstance(default, int) else _number
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default {default})")
    parser.add_argument(
        "--seed", type=_count, default=0, help="the same seed gives the same bits on the same CPU (default 0)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16, with float32 weights")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="less memory, a third more time")
    parser.add_argument(
        "--pad-token", metavar="TOKEN", help="a token of the vocabulary, if the tokenizer has no pad token"
    )
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value}: expected 0 or more")
    return value


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected 0 or more")
    return value


def train(options: argparse.Namespace, folder: Path) -> None:
    """Train, measure, and save the checkpoint to ``folder``. Raises DataError and ModelError."""
    tokenizer = load_tokenizer(options.model)
    _check_tokenizer(tokenizer, options)
    torch.manual_seed(options.seed)
    model = load(options, tokenizer)
    positions = max_positions(model) or options.max_tokens
    encode = encoder(tokenizer, min(options.max_tokens, positions))
    training = encode(options.data / "pairs.jsonl")
    validation = encode(options.data / "validation_pairs.jsonl")[: options.max_validation_pairs]
    if not validation:
        raise DataError("--max-validation-pairs 0: expected at least 1")
    before = evaluate(model, validation, options)
    print(f"before: {before}", flush=True)
    optimize(model, training, options)
    after = evaluate(model, validation, options)
    print(f"after: {after}")
    save_checkpoint(model.cpu(), tokenizer, folder)
    print(check(folder, model, tokenizer, validation))
    summary = {
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "pairs": len(training),
        "before": before.to_json(),
        "after": after.to_json(),
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def _check_tokenizer(tokenizer: Any, options: argparse.Namespace) -> None:
    """Check template, EOS and pad token, and set --pad-token. Raises ModelError."""
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(f"{options.model}: its tokenizer has no chat template; start from a chat model")
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{options.model}: its tokenizer has no EOS token; start from a chat model")
    if options.pad_token is not None:
        if options.pad_token not in tokenizer.get_vocab():
            raise ModelError(
                f"--pad-token {options.pad_token}: not in the vocabulary of {options.model}; a new token would change the "
                "tokenizer, which must be the policy's: name one that exists"
            )
        tokenizer.pad_token = options.pad_token
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise ModelError(
            f"{options.model}: its tokenizer has no pad token besides EOS, so transformers would read scores before EOS; name a "
            "token that conversations do not contain with --pad-token, such as '<|finetune_right_pad_id|>' for Llama 3"
        )


def load(options: argparse.Namespace, tokenizer: Any) -> Any:
    """Return the model with a new head of one output. Raises ModelError."""
    with explained(options.model, "model"):
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            str(model_directory(options.model)), num_labels=1, dtype=torch.float32, use_safetensors=True, **SAFE
        )
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ModelError(f"{options.model}: not a decoder with a score per token; start from a causal language model")
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.use_cache = False
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model.to(options.device)


def encoder(tokenizer: Any, max_tokens: int) -> Callable[[Path], list[EncodedPair]]:
    """Return the function that reads and tokenizes a file of pairs. It raises DataError."""

    def ids(text: str) -> list[int]:
        result: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return result

    def encoded(pair: Pair) -> EncodedPair:
        text = tokenizer.apply_chat_template(messages_of(pair.prompt), tokenize=False, add_generation_prompt=True)
        chosen, rejected = ([*ids(answer), tokenizer.eos_token_id] for answer in (pair.chosen, pair.rejected))
        return EncodedPair(ids(text), chosen, rejected, pair.margin or 0.0)

    def read(path: Path) -> list[EncodedPair]:
        pairs = [encoded(pair) for pair in read_pairs(path)]
        short = [pair for pair in pairs if pair.length <= max_tokens]
        if not short:
            raise DataError(f"{path}: none of {len(pairs)} pairs has at most {max_tokens} tokens; raise --max-tokens")
        print(f"{path.name}: {len(short):,} of {len(pairs):,} pairs have at most {max_tokens} tokens", flush=True)
        return short

    return read


def scores(model: Any, pairs: Sequence[EncodedPair], bfloat16: bool) -> tuple[Tensor, Tensor]:
    """Return the scores of the chosen and of the rejected answers, float32 [pairs] each, read at the last token."""
    rows = [pair.prompt + pair.chosen for pair in pairs] + [pair.prompt + pair.rejected for pair in pairs]
    device = model.score.weight.device
    lengths = torch.tensor([len(row) for row in rows], device=device)
    ids = torch.full((len(rows), int(lengths.max())), model.config.pad_token_id)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    ids = ids.to(device)
    mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
    with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
        hidden = model.base_model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        last = hidden[torch.arange(len(rows), device=device), lengths - 1]
    values: Tensor = functional.linear(last.float(), model.score.weight)[:, 0]
    return values[: len(pairs)], values[len(pairs) :]


def optimize(model: Any, pairs: list[EncodedPair], options: argparse.Namespace) -> None:
    """Train ``model`` for the epochs of the options. Prints a line every 20 steps."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.learning_rate)
    size = max(1, options.batch_pairs)
    steps = options.epochs * math.ceil(len(pairs) / size)
    warmup = max(1, round(options.warmup * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    begun = time.monotonic()
    model.train()
    for step, batch in enumerate(batches(pairs, size, options.epochs, options.seed), 1):
        loss = right = 0.0
        for at in range(0, len(batch), max(1, options.micro_batch_pairs)):
            part = batch[at : at + max(1, options.micro_batch_pairs)]
            chosen, rejected = scores(model, part, options.bfloat16)
            margins = torch.tensor([pair.margin for pair in part], device=chosen.device)
            value = losses(chosen, rejected, margins, options.margin, options.centring).sum() / len(batch)
            value.backward()
            loss, right = loss + float(value.detach()), right + int((chosen > rejected).sum())
        nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == steps:
            seconds = time.monotonic() - begun
            print(
                f"step {step}/{steps}: loss {loss:.4f}, accuracy {right / len(batch):.3f}, {seconds:.0f} s", flush=True
            )
    model.eval()


def losses(chosen: Tensor, rejected: Tensor, margins: Tensor, margin: float, centring: float) -> Tensor:
    """Return the loss of each pair, see the module. Scores and margins are float32 [pairs]."""
    return -functional.logsigmoid(chosen - rejected - margin * margins) + centring * (chosen + rejected).square()


def batches(pairs: list[EncodedPair], size: int, epochs: int, seed: int) -> Iterator[list[EncodedPair]]:
    """Yield the pairs of each step, in an order that the seed determines."""
    order = random.Random(f"{seed}/batches")
    for _ in range(epochs):
        shuffled = order.sample(pairs, len(pairs))
        yield from (shuffled[at : at + size] for at in range(0, len(shuffled), size))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out results. ``longer``: accuracy of the rule that the longer answer is better, for comparison."""

    accuracy: float
    loss: float
    longer: float
    mean: float
    deviation: float

    def __str__(self) -> str:
        return (
            f"accuracy {self.accuracy:.3f} on held-out pairs (the longer answer: {self.longer:.3f}), loss {self.loss:.4f}, "
            f"scores {self.mean:.2f} +- {self.deviation:.2f}"
        )

    def to_json(self) -> dict[str, float]:
        return {name: round(getattr(self, name), 6) for name in self.__slots__}


@torch.no_grad()
def evaluate(model: Any, pairs: list[EncodedPair], options: argparse.Namespace) -> Evaluation:
    """Return the results on pairs. Equal scores count half, and equal lengths as well."""
    model.eval()
    size = max(1, options.micro_batch_pairs)
    parts = [scores(model, pairs[at : at + size], options.bfloat16) for at in range(0, len(pairs), size)]
    chosen, rejected = (torch.cat(side).cpu() for side in zip(*parts, strict=True))
    lengths = torch.tensor([[len(pair.chosen), len(pair.rejected)] for pair in pairs]).T
    every = torch.cat([chosen, rejected])
    return Evaluation(
        accuracy=_accuracy(chosen, rejected),
        loss=float(-functional.logsigmoid(chosen - rejected).mean()),
        longer=_accuracy(lengths[0], lengths[1]),
        mean=float(every.mean()),
        deviation=float(every.std(correction=0)),
    )


def _accuracy(chosen: Tensor, rejected: Tensor) -> float:
    return float(((chosen > rejected).float() + 0.5 * (chosen == rejected).float()).mean())


@torch.no_grad()
def check(folder: Path, model: Any, tokenizer: Any, pairs: list[EncodedPair]) -> str:
    """Load the checkpoint as the reward service does, and compare its scores. Return a report. Raises ModelError."""
    service = ModelReward(RewardSourceConfig(source="model", model=str(folder)), "cpu")
    status = service.status()
    if status.tokenizer_fingerprint != tokenizer_fingerprint(tokenizer):
        raise ModelError(f"{folder}: the saved tokenizer differs from that of the model; report this as a bug")
    checked = pairs[:CHECKED_PAIRS]
    expected = torch.cat(scores(model, checked, bfloat16=False)).numpy()
    answers = [pair.chosen for pair in checked] + [pair.rejected for pair in checked]
    prompts = [pair.prompt for pair in checked] * 2
    batch = TokenBatch(
        np.concatenate([np.array(p + a, np.int32) for p, a in zip(prompts, answers, strict=True)]),
        np.array([len(p) for p in prompts], np.int32),
        np.array([len(a) for a in answers], np.int32),
    )
    difference = float(np.abs(service.score(batch).total - expected).max())
    if not difference <= MAX_DIFFERENCE * max(1.0, float(np.abs(expected).max())):
        raise ModelError(
            f"{folder}: the reward service scores it differently, by {difference:.2g}; report this as a bug"
        )
    return (
        f"the reward service accepts it: one output, pad token {tokenizer.pad_token!r}, the tokenizer of the model "
        f"({status.vocabulary_size:,} ids in its embedding, {status.max_sequence_tokens:,} positions); scores agree within "
        f"{difference:.1g}"
    )


if __name__ == "__main__":
    sys.exit(main())
