"""One rank of a group of processes that scores with frozen tiny models. For the arguments see ``processes``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from quartet.contract.arrays import FloatArray
from quartet.models.forward.scoring import response_log_probs, sequence_scores
from quartet.models.weights.loading import load_causal_lm, load_reward_model
from quartet.models.workers.group import WorkerGroup, join_group
from quartet.models.workers.workers import Workers, shard_frozen
from tests.unit.models import tiny

PROMPTS, RESPONSES = [3, 1, 5, 2, 4], [4, 9, 2, 12, 1]
SCORERS = {
    "llama": lambda: tiny.classifier("llama"),
    "encoder": lambda: tiny.classifier("bert"),
    "bfloat16": lambda: tiny.classifier("qwen2").bfloat16(),
}
REFERENCES = {"reference": lambda: tiny.causal("llama"), "reference-gpt2": lambda: tiny.causal("gpt2")}
LOADED_SCORERS = {"loaded": "llama", "loaded-encoder": "encoder", "loaded-bfloat16": "bfloat16"}
LOADED_REFERENCES = {"loaded-reference": "reference", "loaded-reference-bfloat16": "reference"}
"""Cases of models that are loaded from a folder, and the cases above with the same models."""
SLICED = ("sliced", "sliced-reference")
"""Cases of the loaded models "llama" and "reference", of which each rank computes slices."""
ONE_SEQUENCE = "one-sequence"


def outputs(workers: Workers, folder: Path) -> dict[str, FloatArray]:
    """Return the scores and log-probs of all models by case. The group holds all models at once.

    ``folder``: that of ``save_models``.
    """
    batch = tiny.batch(PROMPTS, RESPONSES)
    scorers: dict[str, Any] = {name: create() for name, create in SCORERS.items()}
    references: dict[str, Any] = {name: create() for name, create in REFERENCES.items()}
    loaded_scorers = {
        case: load_reward_model(folder / name, _dtype(case), "cpu", workers) for case, name in LOADED_SCORERS.items()
    }
    loaded_references = {
        case: load_causal_lm(folder / name, _dtype(case), "cpu", workers) for case, name in LOADED_REFERENCES.items()
    }
    read = [held_parameters(model) for model in (loaded_scorers | loaded_references).values()]
    scorers |= loaded_scorers
    references |= loaded_references
    groups = {name: shard_frozen(model, workers) for name, model in (scorers | references).items()}
    result = {name: sequence_scores(model, batch, 20, groups[name]) for name, model in scorers.items()}
    result |= {name: response_log_probs(model, batch, 0.8, 20, groups[name]) for name, model in references.items()}
    # One rank has nothing to score.
    result[ONE_SEQUENCE] = sequence_scores(scorers["llama"], tiny.batch([2], [3]), 20, groups["llama"])
    result |= _sliced(workers, folder)
    sizes = [held_parameters(model) for model in (scorers | references).values()]
    return result | {"held": np.array(sizes, np.float32), "read": np.array(read, np.float32)}


def save_models(folder: Path) -> None:
    """Write the models that ``outputs`` loads."""
    for name in {*LOADED_SCORERS.values(), *LOADED_REFERENCES.values()}:
        (SCORERS | REFERENCES)[name]().save_pretrained(folder / name)


def _sliced(workers: Workers, folder: Path) -> dict[str, FloatArray]:
    own = WorkerGroup(torch.device("cpu"), tensor=workers.size) if isinstance(workers, WorkerGroup) else workers
    batch, (scorer, reference) = tiny.batch(PROMPTS, RESPONSES), SLICED
    reward_model = load_reward_model(folder / "llama", workers=own)
    model = load_causal_lm(folder / "reference", workers=own)
    return {
        scorer: sequence_scores(reward_model, batch, 20, shard_frozen(reward_model, own)),
        reference: response_log_probs(model, batch, 0.8, 20, shard_frozen(model, own)),
    }


def _dtype(case: str) -> str:
    return "bfloat16" if case.endswith("bfloat16") else "float32"


def held_parameters(model: nn.Module) -> int:
    """Return the number of parameters in this process."""
    return sum((value.to_local() if isinstance(value, DTensor) else value).numel() for value in model.parameters())


def main(folder: Path, rank: int, size: int, port: int, descriptor: int | None) -> None:
    torch.set_num_threads(1)
    group = join_group(rank, size, ("127.0.0.1", port), descriptor)
    for number in range(2):
        np.savez(folder / f"{number}-{rank}.npz", **outputs(group, folder / "models"))  # type: ignore[arg-type]
    dist.destroy_process_group()


if __name__ == "__main__":
    own, count, address, listener = map(int, sys.argv[2:])
    main(Path(sys.argv[1]), own, count, address, None if own else listener)
