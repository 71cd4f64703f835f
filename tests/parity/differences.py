"""Differences between Quartet and TRL on purpose or by design, and how the comparison handles each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """One row of the page: a property of both sides, the reason for Quartet's, and how the comparison handles it."""

    what: str
    quartet: str
    trl: str
    reason: str
    handling: str


PPO = (
    Difference(
        "position of the score",
        "on the last response token, EOS included",
        "one position past EOS (trl#3750); the value there enters GAE and the value loss, too",
        "the policy decides nothing after EOS, so the state there never occurs",
        "TRL's index of that position is set to that of the last token",
    ),
    Difference(
        "variance when whitening",
        "population (divided by n)",
        "sample (n − 1)",
        "as in lm-human-preferences; defined for a single token, too",
        "TRL's variance function is called with `unbiased=False`",
    ),
    Difference(
        "optimizer steps of several mini-batches",
        "one per mini-batch",
        "one per `gradient_accumulation_steps` micro-batches, regardless of `num_mini_batches`: one per epoch",
        "a mini-batch is the data of one optimizer step",
        "the accelerator's number of accumulation steps is set to the micro-batches of a mini-batch",
    ),
    Difference(
        "last batch of the data set",
        "like every other batch",
        "accelerate stops accumulating gradients: one optimizer step per micro-batch",
        "an update does not depend on the end of the data set",
        "the data set has a second batch",
    ),
    Difference(
        "loss of a mini-batch",
        "divided by its tokens, for every micro-batch size",
        "mean over micro-batches of their means",
        "the micro-batch size affects memory, not the result",
        "one micro-batch if lengths differ; two if they are equal",
    ),
    Difference(
        "logged averages",
        "over all observations",
        "over slots; all but the first `1/num_mini_batches` of them stay 0",
        "empty slots are not observations",
        "only the filled slots are read; *as shipped* shows what TRL logs",
    ),
    Difference(
        "clip fractions, approximate KL",
        "means over the tokens of all epochs",
        "means over micro-batches of their means; the KL includes padding",
        "every token has the same weight",
        "TRL's are weighted by tokens, without padding",
    ),
    Difference(
        "approximate KL of the old and new policy",
        "k3, an unbiased estimate of the KL",
        "k2, ½(log ratio)²",
        "k2 is accurate for small steps only",
        "the row shows k2 of Quartet's log-probs; Quartet's metric `approx_kl` is k3",
    ),
    Difference(
        "entropy",
        "over response tokens, with the weights that generated them",
        "over all positions and epochs, including padding, with changing weights",
        "the entropy of a step belongs to one policy, and padding to none",
        "TRL's is taken over response tokens of the first epoch; compared if that epoch is one optimizer step",
    ),
    Difference(
        "gradient clipping",
        "to norm 1",
        "none: the PPO trainer ignores `max_grad_norm`",
        "one outlier should not ruin a run",
        "off in Quartet",
    ),
    Difference(
        "losses and optimizers",
        "one each for policy and value model, in two services",
        "one for both: `policy + vf_coef · value`",
        "actor and critic update in parallel, on different machines",
        "`vf_coef` is 1 (Adam cancels a constant factor)",
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
        "a function of (seed, step, epoch)",
        "NumPy's global generator",
        "a resumed run is bit-identical",
        "TRL uses Quartet's order",
    ),
    Difference(
        "old log-probs",
        "recomputed by the trainer, so the first ratio is 1; importance weights of at most 2 for the mismatch with the engine",
        "those of generation",
        "engine and trainer may compute different log-probs",
        "left on, without the importance weights; the first row shows the mismatch",
    ),
    Difference(
        "dropout",
        "off: the rates of modules and of attention set to 0",
        "the rates of modules set to 0; attention keeps the rates of its config and trains in `model.train()`",
        "under dropout a ratio differs from 1 before anything was learnt",
        "the checkpoints have none",
    ),
    Difference(
        "temperature",
        "T",
        "T + 10⁻⁷",
        "the config requires T > 0",
        "left on: the effect is about a rounding error of float32",
    ),
    Difference(
        "log-ratios",
        "clamped to ±20 before the exponential",
        "as they are",
        "an overflow would end the run",
        "left on: not reached",
    ),
    Difference(
        "padding",
        "known from lengths",
        "recognised by the pad id",
        "pad and EOS may share an id, and a policy may sample it",
        "left on: the pad token has a probability of about 10⁻¹¹, and the script refuses responses that contain it",
    ),
)

RLOO = (
    Difference(
        "ratio and mean",
        "one ratio per token and a mean over tokens by default",
        "one ratio per response and a mean over responses",
        "only the default differs; Quartet has both",
        "`ratio_level: sequence`, `loss_aggregation: sequence_mean`",
    ),
    Difference(
        "input of the reward model",
        "the token ids, EOS included",
        "the response decoded without EOS and tokenised again",
        "services exchange token ids, not text",
        "TRL scores with a reward function on token ids",
    ),
    Difference(
        "order of sequences",
        "shuffled again in every epoch",
        "shuffled once, the same in every iteration",
        "each epoch should combine other sequences in a mini-batch",
        "both sides use Quartet's first order",
    ),
    Difference(
        "old log-probs",
        "recomputed by the trainer; importance weights of at most 2 for the mismatch with the engine",
        "recomputed, too; no importance weights",
        "engine and trainer may compute different log-probs",
        "the importance weights are off",
    ),
    Difference(
        "dropout",
        "off: the rates of modules and of attention set to 0",
        "on, in `model.train()`; `disable_dropout` switches it off in modules only",
        "under dropout a ratio differs from 1 before anything was learnt",
        "`disable_dropout`; the checkpoints have none",
    ),
    Difference(
        "clip fraction",
        "of tokens",
        "of responses",
        "the metric has the same meaning for every estimator",
        "each response is weighted by its tokens",
    ),
    Difference(
        "entropy",
        "over response tokens, with the weights that generated them",
        "means of micro-batches over all iterations, with changing weights",
        "the entropy of a step belongs to one policy",
        "TRL's is taken from the first iteration, weighted by tokens; compared if that iteration is one optimizer step",
    ),
    Difference(
        "logged KL",
        "nats per response",
        "nats per token",
        "the penalty applies to responses",
        "TRL's is multiplied by the mean length",
    ),
    Difference(
        "reference",
        "any checkpoint",
        "the initial policy, or a synchronised copy of it",
        "if both are equal, the KL is 0 and compares nothing",
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
        "count the padding on the left",
        "absolute position embeddings would be wrong",
        "left on: rotary embeddings depend on distances only",
    ),
)

NOT_COMPARED = (
    "**KL estimators in the reward other than k1**: Quartet has |d|, TRL's PPO has k3.",
    "**`objective/entropy`**: TRL's sum of −log-prob over a response. Each pad token adds −1. Quartet has no such metric.",
    "**Sampling**: TRL uses torch's global generator, Quartet a random stream per trajectory. Both learn from TRL's samples.",
    "**RLOO's value loss and approximate KL**: RLOO has no critic, and TRL's RLOO trainer logs no approximate KL.",
    "**Features that TRL's PPO and RLOO trainers lack**: dual clip, adaptive β, KL in the loss, entropy bonus.",
)
