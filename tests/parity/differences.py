"""Where Quartet and TRL differ on purpose or by design, and what the comparison does about each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """One line of the page: what each side does, why Quartet does it its way, and how it is switched off here."""

    what: str
    quartet: str
    trl: str
    why: str
    here: str


PPO = (
    Difference(
        "where the score goes",
        "on the last response token, EOS included",
        "one position past EOS (trl#3750), whose value enters GAE and the value loss too",
        "nothing is decided after EOS; a value there is of a state that never occurs",
        "TRL's index of that position is set to the last token's",
    ),
    Difference(
        "variance when whitening",
        "population (divided by n)",
        "sample (n − 1)",
        "as in lm-human-preferences; defined for one token, too",
        "TRL's variance is called with its own `unbiased=False`",
    ),
    Difference(
        "optimizer steps of several mini-batches",
        "one a mini-batch",
        "one every `gradient_accumulation_steps` micro-batches, whatever `num_mini_batches` says: one an epoch",
        "that is what a mini-batch is",
        "the accelerator's number is set to the micro-batches of a mini-batch",
    ),
    Difference(
        "the data set's last batch",
        "like any other",
        "accelerate ends accumulation there: an optimizer step after every micro-batch",
        "an update does not depend on where the data set ends",
        "the data set has a second batch",
    ),
    Difference(
        "a mini-batch's loss",
        "divided by its tokens, however it is split",
        "mean of its micro-batches' means",
        "the micro-batch size is about memory, not about the result",
        "one micro-batch where lengths differ; two where they are equal",
    ),
    Difference(
        "averages in the log",
        "over what there was",
        "over slots of which all but the first `1/num_mini_batches` stay 0",
        "a mean is of observations",
        "the filled slots are read; `as shipped` shows what is logged",
    ),
    Difference(
        "clip fractions, approximate KL",
        "means over the tokens of all epochs",
        "means of the micro-batches' means; the KL's over pads, too",
        "a token is a token",
        "TRL's are weighed by tokens, without pads",
    ),
    Difference(
        "approximate KL, old to new",
        "k3, whose expectation is the KL at any distance",
        "k2, ½(log ratio)²",
        "k2 is right for small steps only",
        "the row is k2 of Quartet's own log-probs; its `approx_kl` is k3",
    ),
    Difference(
        "entropy",
        "over response tokens, at the weights that generated",
        "over all positions, pads too, and all epochs, at weights that move",
        "pads say nothing about the policy; a step's entropy is that of one policy",
        "TRL's over response tokens, first epoch; compared where that is one optimizer step",
    ),
    Difference(
        "gradient clipping",
        "to norm 1",
        "none: the PPO trainer does not look at `max_grad_norm`",
        "one outlier should not undo a run",
        "off in Quartet",
    ),
    Difference(
        "losses and optimizers",
        "one each for policy and value model, in two services",
        "one of `policy + vf_coef · value` for both",
        "actor and critic update in parallel, on other machines",
        "`vf_coef` 1 (Adam takes any factor out again)",
    ),
    Difference(
        "Adam's β₂, learning rate",
        "0.95, constant",
        "0.999, falling linearly",
        "settings, not code",
        "0.999 and constant on both sides",
    ),
    Difference(
        "order of sequences",
        "a rule of (seed, step, epoch)",
        "NumPy's global generator",
        "a resumed run ends with the same bits",
        "TRL is given Quartet's order",
    ),
    Difference(
        "old log-probs",
        "recomputed by the trainer, so that the first ratio is exactly 1; weights of engine mismatch, at most 2",
        "those of generation",
        "an engine may compute otherwise than the trainer",
        "left on, the weights off: the first row shows by how much they differ",
    ),
    Difference(
        "dropout",
        "off: the rates of modules and of attention set to 0",
        "modules' rates set to 0; those that attention takes from its config stay, and it trains in `model.train()`",
        "under dropout a ratio differs from 1 before anything was learnt",
        "the checkpoints have none",
    ),
    Difference(
        "temperature",
        "T",
        "T + 10⁻⁷",
        "T above 0 is checked",
        "left on: about float32's rounding",
    ),
    Difference(
        "log-ratios",
        "clamped to ±20 before the exponential",
        "as they are",
        "an overflow would end the run",
        "left on: not reached",
    ),
    Difference(
        "pads",
        "told by lengths",
        "told by comparing with the pad id",
        "pad and EOS may share an id, and a policy may sample it",
        "left on: the policy gives the pad token a probability of about 10⁻¹¹, and no response may have one",
    ),
)

RLOO = (
    Difference(
        "ratio and mean",
        "a ratio a token, mean over tokens, unless told otherwise",
        "a ratio a response, mean over responses",
        "a default; both are offered",
        "`ratio_level: sequence`, `loss_aggregation: sequence_mean`",
    ),
    Difference(
        "what the reward model reads",
        "the token ids, EOS included",
        "the ids decoded without EOS and tokenised again",
        "token ids travel, never text",
        "TRL scores through a reward function on the ids",
    ),
    Difference(
        "order of sequences",
        "another in every epoch",
        "shuffled once, the same in every iteration",
        "mini-batches should not always share the same companions",
        "one order, Quartet's first, on both sides",
    ),
    Difference(
        "old log-probs",
        "recomputed by the trainer; weights of engine mismatch, at most 2",
        "recomputed, too; no weights",
        "an engine may sample from another distribution than the trainer updates",
        "the weights off",
    ),
    Difference(
        "dropout",
        "off: the rates of modules and of attention set to 0",
        "on, in `model.train()`, unless told otherwise (`disable_dropout`, modules only)",
        "under dropout a ratio differs from 1 before anything was learnt",
        "`disable_dropout`; the checkpoints have none",
    ),
    Difference(
        "clip fraction",
        "by tokens",
        "by responses",
        "one meaning for every estimator",
        "each response weighs as many as it has tokens",
    ),
    Difference(
        "entropy",
        "over response tokens, at the weights that generated",
        "means of micro-batches, all iterations, at weights that move",
        "a step's entropy is that of one policy",
        "TRL's first iteration, weighed by tokens; compared where that is one optimizer step",
    ),
    Difference(
        "KL in the log",
        "nats a response",
        "nats a token",
        "the penalty is on responses",
        "TRL's times the mean length",
    ),
    Difference(
        "reference",
        "any checkpoint",
        "the initial policy, or a copy of it that is synchronised",
        "a KL of 0 would compare nothing",
        "set on the trainer after construction",
    ),
    Difference(
        "Adam's β₂, learning rate",
        "0.95, constant",
        "0.999, falling linearly",
        "settings, not code",
        "0.999 and constant on both sides",
    ),
    Difference(
        "log-ratios",
        "clamped to ±20 before the exponential",
        "as they are",
        "an overflow would end the run",
        "left on: not reached",
    ),
    Difference(
        "positions",
        "start at 0 in each sequence",
        "start at the padding on the left",
        "absolute position embeddings would be wrong",
        "left on: rotary embeddings see distances only",
    ),
)

NOT_COMPARED = (
    "**KL estimators in the reward other than k1**: Quartet offers |d|, TRL's PPO k3. Neither side has the other's.",
    "**`objective/entropy`**: TRL's sum of −log-prob over a response, in which every pad counts −1. Quartet does not report it.",
    "**Sampling**: TRL draws from torch's global generator, Quartet from a stream for each trajectory. Both learn from TRL's.",
    "**RLOO's value loss and approximate KL**: it has no critic, and TRL's trainer does not log the KL from old to new.",
    "**Whatever TRL's PPO and RLOO trainers do not have**: dual clip, adaptive β, KL in the loss, entropy bonus.",
)
