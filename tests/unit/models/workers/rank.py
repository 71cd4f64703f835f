"""One rank of a group of processes that updates tiny models.

``python -m tests.unit.models.workers.rank FOLDER RANK SIZE PORT SOCKET REPLICATE TENSOR CASES``.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist

from quartet.config.models import LoraConfig
from quartet.contract.update import ValueLossSettings
from quartet.model_files.sharded_files import FOLDER, GROUPS_FILE, rank_file
from quartet.models.forward.router_replay import routers_of
from quartet.models.forward.scoring import response_log_probs, response_values
from quartet.models.training import compiled_layers as compilation
from quartet.models.training.activation_checkpointing import activation_checkpointing
from quartet.models.training.compiled_layers import compiled_layers
from quartet.models.training.optimizer import create_optimizer, load_optimizer_state, optimizer_parts, parameter_groups
from quartet.models.training.updates import update_policy, update_value
from quartet.models.value_head import ValueModel
from quartet.models.weights.host_tensors import complete_tensors, host_tensor, named_weights
from quartet.models.weights.loading import count_parameters, freeze_parameters
from quartet.models.weights.lora import add_adapter
from quartet.models.workers.group import WorkerGroup, join_group
from quartet.models.workers.sharded_checkpoint import OPTIMIZER, ShardedState, write_parts
from quartet.models.workers.sharding import ShardedAdamW, complete_weights, shard_model
from quartet.models.workers.weight_slices import weight_slices
from quartet.models.workers.workers import Workers, local_tensor
from quartet.weight_transfer.slices import SliceWriter
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.tensors import tensor_digest
from tests.unit.models import tiny, updates

STEPS = 2
SHORT = (
    "dropout-lora",
    "gpt2",
    "few-tokens",
    "correction-",
    "clip_cov",
    "kl_cov",
    "qwen3_5_text",
    "zamba2",
    "qwen3_moe",
)
"""Beginnings of cases with one update of one epoch. The others differ in the state that updates leave to the next."""
RATE, EPS = 1e-3, 1e-5
RLOO = {"aggregation": "sequence_mean", "ratio_level": "sequence", "kl_loss": "none", "entropy_coefficient": 0.0}
OFFLOADED = ("ppo-offload", "ppo")
"""A case with offload, and the one without, which has the same bits on CPUs."""
SELECTIONS = ("clip_cov", "kl_cov")
"""Cases whose loss selects tokens of each mini-batch, from the log-probs of all ranks."""
CASES = (
    "ppo",
    "ppo-offload",
    "rloo",
    "ppo-lora",
    "rloo-lora",
    "dropout-lora",
    "value",
    "gpt2",
    "tied",
    "bfloat16",
    "few-tokens",
    "not-finite",
    "correction-all",
    "correction-of_engine_with_masks",
    *SELECTIONS,
    "qwen3_5_text",
    "zamba2",
    "qwen3_moe",
)
REPEATED = ("ppo", "rloo-lora", "value")
SAVED_AGAIN = ("ppo", "ppo-offload", "ppo-lora", "rloo-lora", "qwen2-lora", "value", "value-lora", "bfloat16", "frozen")
"""Cases whose optimizers hold different kinds of state. It is saved again after it has been restored."""
ARCHITECTURES = ("gpt2", "gpt_neox", "qwen3", "phi3", "phi", "qwen3_5_text", "zamba2", "qwen3_moe")
KINDS = {"tied": "qwen2", "qwen2-lora": "qwen2"}
"""Kinds of the models of cases, if they are neither the first word of the case nor llama."""


def again(case: str) -> str:
    """Return the name of the results of a second run of a case."""
    return f"{case}-again"


def run(case: str, workers: Workers, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the weights, the optimizer's state and the metrics after the updates of a case. ``folder``: for files.

    The first of two updates has two epochs. The optimizer's state is saved again only in the first run of a case.
    """
    saves = 2 if case in SAVED_AGAIN else 1
    case = case.removesuffix("-again")
    first = case.partition("-")[0]
    model: Any = tiny.causal(KINDS.get(case, first if first in ARCHITECTURES else "llama"))
    data = updates.experience(model)
    if case == "qwen3_moe":
        data = dataclasses.replace(data, batch=tiny.routed(data.batch))
    replicated: list[Any] = []
    if case.startswith("value"):
        model = ValueModel.of_causal_lm(model)
        replicated = list(model.head.parameters())
    if case.endswith("lora"):
        lora = LoraConfig(rank=4, alpha=8.0, dropout=0.3 if case.startswith("dropout") else 0.0)
        adapter = add_adapter(model.backbone if case.startswith("value") else model, "base", lora)
        replicated += adapter.parameters()
    if case == "bfloat16":
        model = model.bfloat16()
    if case == "frozen":
        freeze_parameters(model, ["*embed_tokens*", "*.layers.0.*"])
    loss = updates.with_options(**RLOO) if case.startswith("rloo") else updates.with_options(target_kl=0.5)
    if case.startswith("correction-"):
        loss = updates.with_options(**updates.CORRECTIONS[case.removeprefix("correction-")])
    options: dict[str, Any] = {}
    if case in SELECTIONS:
        loss, options = updates.built_in_loss(case)
    if case.startswith("rloo") or case in SELECTIONS:
        data = updates.with_outcome_advantages(data)
    if case == "not-finite":
        advantages = data.advantages.copy()
        advantages[2] = np.inf
        data = dataclasses.replace(data, advantages=advantages, actor_mask=np.ones_like(data.actor_mask))
    optimizer: Any
    if isinstance(workers, WorkerGroup):
        total, whole = count_parameters(model), sum(parameter.numel() for parameter in replicated)
        offload = case in OFFLOADED[:1]
        shard_model(model, workers, replicated, offload)
        parts = workers.mesh.size(-1) * (workers.tensor.size if workers.tensor else 1)
        held = sum(local_tensor(parameter).numel() for parameter in model.parameters())
        # Norms are not sliced, and not every dimension can be split evenly.
        assert held < 1.25 * (total - whole) / parts + whole
        kind = partial(ShardedAdamW, workers=workers)
        optimizer = create_optimizer(model, RATE, eps=EPS, kind=kind, offload=offload)
    else:
        optimizer = create_optimizer(model, RATE, eps=EPS)
    if data.batch.routed_experts is not None:
        workers.evaluate(lambda: routers_of(model))
    metrics: dict[str, Any] = {}
    steps = 1 if case.startswith(SHORT) else STEPS
    for step in range(steps):
        changes = {"learning_rate": RATE, "skip_non_finite": case == "not-finite", "num_epochs": steps - step}
        settings = updates.settings(**changes)
        compiles = case.startswith("compiled") and workers.size > 1
        with (
            activation_checkpointing(model, case in ("rloo", "compiled-lora", "dropout-lora")),
            compiled_layers(model, compiles),
        ):
            if case.startswith("value"):
                result = update_value(model, optimizer, data, settings, ValueLossSettings(0.2), 12, workers)
            else:
                tokens = 4 if case == "few-tokens" else 20
                result = update_policy(model, optimizer, data, settings, loss, tokens, workers=workers, **options)
        metrics |= {f"{step}/{name}": value for name, value in result.items()}
    if case.startswith("value"):
        scores = response_values(model, data.batch, 20, workers)
    else:
        scores = response_log_probs(model, data.batch, 0.8, 20, workers)
    state = restored_state(optimizer, workers, folder, saves)
    weights = dict(complete_weights(model, workers))
    if case != "bfloat16":
        check_copies(model, weights, workers)
    if isinstance(workers, WorkerGroup):
        check_slices(model, workers)
    return {**weights, **state, "scores": torch.from_numpy(scores)}, metrics


def check_copies(model: Any, weights: dict[str, torch.Tensor], workers: Workers) -> None:
    """Compare the complete tensors for generators with ``weights``."""
    published = dict(complete_tensors(named_weights(model), workers))
    assert published.keys() == weights.keys()
    assert all(torch.equal(published[name], value) for name, value in weights.items())


def check_slices(model: Any, workers: WorkerGroup) -> None:
    """Publish what each rank holds, and compare it with the complete tensors."""
    complete = dict(complete_tensors(named_weights(model), workers))
    writer = SliceWriter(workers, 1)
    if workers.rank:
        assert writer.follow(weight_slices(named_weights(model), workers))
    else:
        source = WeightSource(num_threads=1, writer=writer)
        assert source.publish_slices(0, weight_slices(named_weights(model), workers))
        published = source.weight_set()
        assert published is not None
        assert published.tensors.keys() == complete.keys()
        for name, value in complete.items():
            expected, held = host_tensor(value), published.tensors[name]
            assert (held.dtype, held.shape) == (expected.dtype, expected.shape)
            assert np.array_equal(held.data, expected.data), name
            assert source.tensor_digests()[name] == tensor_digest(expected)
        source.close()
    writer.close()


def restored_state(optimizer: Any, workers: Workers, folder: Path, saves: int) -> dict[str, torch.Tensor]:
    """Save the state of the optimizer below ``folder`` and restore it, ``saves`` times. Return it complete, as saved last."""
    saved: list[dict[str, torch.Tensor]] = []
    for number in range(saves):
        target = folder / str(number)
        (target / FOLDER).mkdir(parents=True, exist_ok=True)
        parts = {f"{OPTIMIZER}{name}": part for name, part in optimizer_parts(optimizer).items()}
        write_parts(rank_file(target, workers.rank, workers.size), parts)
        (target / FOLDER / GROUPS_FILE).write_text(parameter_groups(optimizer))
        workers.sum(torch.zeros(1))
        state = ShardedState(target, OPTIMIZER)
        load_optimizer_state(optimizer, state)
        saved.append({f"optimizer.{name}": state.tensor(name) for name in state.shapes})
    assert saved[0].keys() == saved[-1].keys()
    assert all(torch.equal(saved[0][name], value) for name, value in saved[-1].items())
    return saved[-1]


def main(
    folder: Path, rank: int, size: int, port: int, descriptor: int | None, replicate: int, tensor: int, cases: list[str]
) -> None:
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("warn")
    # Without a C++ compiler.
    compilation.COMPILER = {"backend": "aot_eager"}
    join_group(rank, size, ("127.0.0.1", port), descriptor)
    for case in cases:
        (folder / f"state-{case}").mkdir(exist_ok=True)
        workers = WorkerGroup(torch.device("cpu"), replicate, tensor)
        weights, metrics = run(case, workers, folder / f"state-{case}")
        sharded = weakref.ref(workers.root)
        workers.release()
        gc.collect()
        assert sharded() is None
        safetensors.torch.save_file(
            {name: value.contiguous() for name, value in weights.items()}, folder / f"{case}-{rank}.safetensors"
        )
        (folder / f"{case}-{rank}.json").write_text(json.dumps(metrics))
    dist.destroy_process_group()


if __name__ == "__main__":
    number, count, address, listener, copies, slices = map(int, sys.argv[2:8])
    main(Path(sys.argv[1]), number, count, address, None if number else listener, copies, slices, sys.argv[8:])
