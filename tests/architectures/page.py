"""The page with the table of tested architectures."""

from __future__ import annotations

from collections.abc import Sequence

from tests.architectures.comparison import TOLERANCE, Result

_TEXT = """# Tested architectures

Will your model work? Look up `model_type` of its `config.json` here. Every row is a tiny model with random weights, written by
`make architectures` with {versions}. Other decoder-only language models of transformers should
work, too: the actor compares generation with whole forward passes when it starts, and refuses a model that differs.

## Models that work

In Quartet, each model is loaded, scored, generates greedily in a changing batch, and takes one full update, one update of a
LoRA adapter and one update of a critic. Plain transformers computes the same, one sequence at a time without padding. The
difference is the largest of: log-probs of ragged batches, log-probs of generated tokens (the tokens are equal), the gradient norm
(relative), the same with an adapter and after merging it, and, for types with a classifier, values and scores. All are below
{tolerance:g}.

- **Critic and reward:** every model can start a critic. Reward models are tested for types with a decoder classifier in
  transformers.
- **LoRA:** matrices without an adapter by default, other than embeddings and the vocabulary projection.
- **Packing:** whether sequences share a row without padding. Padded models give the same result with more computation.

| model type | policy | critic | reward | LoRA | packing | largest difference |
|---|---|---|---|---|---|---|
{working}

`gemma3` with images is trained on text only. `granitemoehybrid` works if all its layers are attention layers.

## Models that are refused

`quartet config check` and `quartet train` refuse these as the policy, before they load anything. The same rule refuses quantised
checkpoints and models that need code from their repository, for any role. Engines other than `torch` may support models without
keys and values per token.

| model type | reason and remedy |
|---|---|
{refused}
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
    return _TEXT.format(versions=versions, tolerance=TOLERANCE, working="\n".join(working), refused="\n".join(refused))


def _reward(result: Result) -> str:
    return "yes" if "scores" in (result.differences or {}) else "not tested"


def _adapter(result: Result) -> str:
    if not result.without_adapter:
        return "all"
    if len(result.without_adapter) > 1:
        return "all but the vision tower's embeddings"
    return f"all but the router (`{result.without_adapter[0].removesuffix('.weight').rpartition('.')[2]}`)"


def _reason(text: str) -> str:
    return text.partition(", or see")[0].replace("|", "\\|")
