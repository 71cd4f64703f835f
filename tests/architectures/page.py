"""The page with the table of tested architectures."""

from __future__ import annotations

from collections.abc import Sequence

from tests.architectures.comparison import TOLERANCE, Result
from tests.architectures.models import NOT_TESTED, TOLERANCES

_WITHOUT_GRADIENT = ("indexer", "patcher")
"""Parts of models that transformers computes without a gradient."""
_TEXT = """# Tested architectures

Will your model work? Look up `model_type` of its `config.json` here. This page has every type of causal language model of
transformers, written by `make architectures` with {versions}.

Every row of the first table is a tiny model with random weights. It has layers of every kind of its type: attention and recurrent
layers, a window smaller than a sequence, an index that selects fewer tokens than there are. Types of later versions of
transformers should work, too: the actor compares generation with whole forward passes when it starts, and refuses a model that
differs.

## Models that work

In Quartet, each model is loaded, scored, generates greedily in a changing batch, and takes one full update, one update of a
LoRA adapter and one update of a critic. Plain transformers computes the same, one sequence at a time without padding. The
difference is the largest of: log-probs of ragged batches, log-probs of generated tokens (the tokens are equal), the gradient norm
(relative), the same with an adapter and after merging it, and, for types with a classifier, values and scores. All are below
{tolerance:g}, with the exceptions below. Prompts have at most 11 tokens and responses 12; in longer ones
the differences below grow.

- **Critic and reward:** every model can start a critic. Reward models are tested for types with a decoder classifier in
  transformers.
- **LoRA:** matrices without an adapter by default, other than embeddings and the vocabulary projection: routers, convolutions,
  matrices that several layers share, and those that a layer reads without calling them as a layer, such as `dt_proj` of Mamba.
  peft alone refuses to read an adapter of `out_proj` for `falcon_h1`, `falcon_mamba`, `mamba`, `mamba2` and `nemotron_h`, because
  fused kernels in training mode would bypass it; the merged export is a plain model.
- **No gradient:** layers that transformers computes without a gradient, such as an index. They keep their values in any training.
- **Packing:** whether sequences share a row without padding. Padded models give the same result with more computation.
{exceptions}

| model type | policy | critic | reward | LoRA | packing | largest difference |
|---|---|---|---|---|---|---|
{working}

Models that read images or audio, too, are trained on text only. Types that are not in this table, such as `llava` and `qwen3_vl`,
are loaded as the language models that they contain.

## Models that are refused

`quartet config check` and `quartet train` refuse these as the policy, before they load anything. The same rule refuses quantised
checkpoints and models that need code from their repository, for any role.

| model type | reason and remedy |
|---|---|
{refused}

## Types that are not tested

| model type | reason |
|---|---|
{untested}
"""


def write(results: Sequence[Result], versions: str) -> str:
    """Return the page."""
    working = [
        f"| `{result.kind}` | yes | yes | {_reward(result)} | {_adapter(result)} | {'yes' if result.packed else 'padded'} | "
        f"{result.largest:.1e} |"
        for result in results
        if not result.refused
    ]
    refused = [f"| `{result.kind}` | {_reason(result.refused)} |" for result in results if result.refused]
    untested = [f"| `{kind}` | {reason} |" for kind, reason in NOT_TESTED.items()]
    reasons = dict[tuple[float, str], list[str]]()
    for kind, reason in TOLERANCES.items():
        reasons.setdefault(reason, []).append(f"`{kind}`")
    exceptions = "\n".join(
        f"- **Below {limit:g}** for {', '.join(kinds)}:\n  {reason}." for (limit, reason), kinds in reasons.items()
    )
    return _TEXT.format(
        versions=versions,
        tolerance=TOLERANCE,
        exceptions=exceptions,
        working="\n".join(working),
        refused="\n".join(refused),
        untested="\n".join(untested),
    )


def _reward(result: Result) -> str:
    return "yes" if "scores" in (result.differences or {}) else "not tested"


def _adapter(result: Result) -> str:
    left_out = {name.removesuffix(".weight").rpartition(".")[2] for name in result.without_adapter}
    text = f"all but {_names(left_out)}" if left_out else "all"
    parts = [name.split(".") for name in result.fixed if name.endswith(".weight")]
    fixed = {next((part for part in path if part in _WITHOUT_GRADIENT), path[-2]) for path in parts}
    return f"{text}; no gradient: {_names(fixed)}" if fixed else text


def _names(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _reason(text: str) -> str:
    return text.replace("|", "\\|")
