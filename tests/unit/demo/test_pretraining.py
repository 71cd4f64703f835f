"""The training loops of small models: they learn, and read scores at the documented positions."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from quartet.demo import pretraining
from quartet.demo.pretraining import Schedule, Shape
from quartet.errors import InvalidRequest

SHAPE = Shape(hidden=32, layers=1, heads=2, positions=32)
TEXTS = [f"{noun} is {word}" for noun in ("food", "wine", "room") for word in ("good", "fine", "bad", "poor")]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return pretraining.train_tokenizer(TEXTS * 5, 300)


def test_a_vocabulary_without_room_for_every_byte_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least 259"):
        pretraining.train_tokenizer(TEXTS, 200)


def test_a_language_model_learns_its_texts_and_when_to_stop(tokenizer: PreTrainedTokenizerFast) -> None:
    model = pretraining.train_causal_lm(
        TEXTS, tokenizer, SHAPE, Schedule(steps=120, batch_sequences=12, learning_rate=1e-2, warmup_steps=5)
    )
    prompts = pretraining.encode(tokenizer, ["food", "wine", "room"] * 10, eos=False)
    responses = pretraining.sample(model, prompts, 12)
    texts = [tokenizer.decode(p + r[:-1]) for p, r in zip(prompts, responses, strict=True)]
    assert sum(r[-1] == tokenizer.eos_token_id for r in responses) >= 28
    assert sum(text in TEXTS for text in texts) >= 27
    assert pretraining.sample(model, prompts, 12) == responses


def test_the_shape_of_a_policy_may_name_another_model_type(tokenizer: PreTrainedTokenizerFast) -> None:
    hybrid = {"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    losses: list[float] = []
    model = pretraining.train_causal_lm(
        TEXTS,
        tokenizer,
        Shape(hidden=32, layers=1, heads=2, positions=32, config=hybrid),
        Schedule(steps=20, batch_sequences=12, learning_rate=1e-2, warmup_steps=5),
        progress=lambda progress: losses.append(progress.loss),
    )
    assert {name: model.config.to_dict()[name] for name in hybrid} == hybrid
    assert losses[-1] < losses[0] / 2


def test_a_reward_classifier_separates_its_labels(tokenizer: PreTrainedTokenizerFast) -> None:
    labels = [float(text.endswith(("good", "fine"))) for text in TEXTS]
    model = pretraining.train_reward_classifier(
        TEXTS, labels, tokenizer, SHAPE, Schedule(steps=80, batch_sequences=12, learning_rate=1e-2, warmup_steps=5)
    )
    logits = pretraining.score_all(model, pretraining.encode(tokenizer, TEXTS, eos=True))
    assert torch.equal(logits > 0, torch.tensor(labels) > 0.5)


@pytest.mark.parametrize(("certainty", "bound"), [(0.0, 0.0), (0.6, 1.386)], ids=["none", "some"])
def test_the_score_of_an_unfinished_row_is_limited_by_its_certainty(
    tokenizer: PreTrainedTokenizerFast, certainty: float, bound: float
) -> None:
    # The first token determines the label, so a truncated row has the same label. log(0.8 / 0.2) is 1.386.
    rows = pretraining.encode(tokenizer, ["good food here", "bad food here"], eos=True)
    model = pretraining.train_reward_classifier(
        rows * 16,
        [1.0, 0.0] * 16,
        tokenizer,
        SHAPE,
        Schedule(steps=150, batch_sequences=32, learning_rate=1e-2, warmup_steps=5),
        truncated_share=0.8,
        truncated_certainty=certainty,
    )
    finished = pretraining.score_all(model, rows).tolist()
    unfinished = pretraining.score_all(model, [row[:-1] for row in rows]).tolist()
    assert unfinished == pytest.approx([bound, -bound], abs=0.35)
    assert finished[0] > 2.5
    assert finished[1] < -2.5


def test_a_preference_model_ranks_pairs_and_centres_scores_at_zero(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = dict(zip(TEXTS, pretraining.encode(tokenizer, TEXTS, eos=True), strict=True))
    pairs = [(ids[f"{noun} is good"], ids[f"{noun} is bad"]) for noun in ("food", "wine", "room")]
    model = pretraining.train_preference_model(
        pairs, tokenizer, SHAPE, Schedule(steps=60, learning_rate=1e-2, warmup_steps=5), centring=0.1
    )
    chosen, rejected = (pretraining.score_all(model, [pair[side] for pair in pairs]) for side in (0, 1))
    assert (chosen > rejected + 1).all()
    assert abs(float((chosen + rejected).mean())) < 0.5


def test_padding_does_not_change_the_score_at_the_last_token(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rows = pretraining.encode(tokenizer, ["food", "the room is good"], eos=True)
    model = pretraining.train_reward_classifier(rows, [0.0, 1.0], tokenizer, SHAPE, Schedule(steps=2))
    together = pretraining.score_all(model, rows)
    separate = [model(input_ids=torch.tensor([row])).logits.item() for row in rows]
    assert together.tolist() == pytest.approx(separate, abs=1e-5)


def test_the_learning_rate_warms_up_then_falls() -> None:
    schedule = Schedule(steps=100, warmup_steps=10)
    factors = [schedule.factor(step) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[9] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] < 0.05


def test_batches_cover_every_row_once_per_epoch() -> None:
    lengths = [random.Random(0).randint(2, 30) for _ in range(50)]
    batches = pretraining._batches(lengths, 8, random.Random(0))
    rows = [row for batch in [next(batches) for _ in range(7)] for row in batch]
    assert sorted(rows) == list(range(50))


@pytest.mark.parametrize(
    ("sequences", "message"),
    [([], "nothing to train on"), ([[5] * 33], "33 tokens; expected 2 to 32"), (["food", [5, 6]], "found both")],
    ids=["none", "too long", "mixed"],
)
def test_unusable_sequences_are_refused(
    tokenizer: PreTrainedTokenizerFast, sequences: list[list[int]], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        pretraining.train_causal_lm(sequences, tokenizer, SHAPE, Schedule(steps=1))
