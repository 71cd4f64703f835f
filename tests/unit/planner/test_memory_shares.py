"""Shares of the roles in the memory of one GPU: by what each needs, in any order of loading."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.status import MODEL_ROLES, Role
from quartet.planner.device_memory import CONTEXT_BYTES, GRAPH_LAYER_BYTES, actor_generation_memory, trained_memory
from quartet.planner.gpus import GPUS
from quartet.planner.memory_shares import RoleMemory, gpu_share, role_memory, torch_cache_bytes
from quartet.planner.roofline import Parallel
from quartet.planner.workload import read_workload
from tests.unit.models import tiny

GIB = 2**30


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for kind in ("llama", "gpt2"):
        tiny.causal(kind).save_pretrained(folder / kind)
    tiny.classifier("llama").save_pretrained(folder / "reward")
    return folder


def make(checkpoints: Path, kind: str = "llama", **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": "shares"},
        "data": {"prompts": "prompts.jsonl", "max_prompt_tokens": 20},
        "rollout": {"prompts_per_step": 6, "max_response_tokens": 30},
        "actor": {"model": str(checkpoints / kind), "dtype": "bfloat16"},
        "critic": {"dtype": "bfloat16"},
        "reward": {"model": str(checkpoints / "reward"), "dtype": "bfloat16"},
        "services": {role: {"devices": [0]} for role in MODEL_ROLES},
    }
    return parse_config({name: {**tree.get(name, {}), **sections.get(name, {})} for name in tree | sections}, "test")


def weights(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_role_needs_its_weights_and_if_trained_gradients_and_optimizer(checkpoints: Path) -> None:
    config = make(checkpoints)
    critic, reference = role_memory(config, Role.CRITIC), role_memory(config, Role.REFERENCE)
    assert critic is not None
    assert reference is not None
    assert critic.bytes == 18 * weights(tiny.classifier("llama"))
    assert reference.bytes == 2 * weights(tiny.causal("llama"))
    in_float32 = role_memory(make(checkpoints, critic={"dtype": "float32"}), Role.CRITIC)
    assert in_float32 is not None
    assert in_float32.bytes == 16 * weights(tiny.classifier("llama"))


@pytest.mark.parametrize(("kind", "saved"), [("muon", 3.5), ("adamw8bit", 5.9)])
def test_smaller_moments_need_less_memory(checkpoints: Path, kind: str, saved: float) -> None:
    """The embedding of a tiny model is a large part of it, and has AdamW's moments with Muon."""
    adamw, other = (
        role_memory(make(checkpoints, critic={"dtype": "bfloat16", "optimizer": {"kind": each}}), Role.CRITIC)
        for each in ("adamw", kind)
    )
    assert adamw is not None
    assert other is not None
    model = tiny.classifier("llama")
    part = sum(map(weights, model.model.layers)) / weights(model) if kind == "muon" else 1
    assert saved * part <= (adamw.bytes - other.bytes) / weights(model) <= math.ceil(saved) * part


def test_ranks_need_equal_parts_and_those_of_an_actor_also_a_copy_to_generate_with(checkpoints: Path) -> None:
    whole, group = (
        make(checkpoints, services={role: {"devices": devices} for role in ("actor", "critic")})
        for devices in ([0], [0, 1, 2, 3])
    )
    counts = {Role.ACTOR: weights(tiny.causal("llama")), Role.CRITIC: weights(tiny.classifier("llama"))}
    for role, count in counts.items():
        single, rank = role_memory(whole, role), role_memory(group, role)
        assert single is not None
        assert rank is not None
        # A rank has master weights of the type of the optimizer, and gathers a layer in the type of the model.
        assert (single.weights + single.state, rank.weights, rank.state) == (18 * count, 0, 16 * count // 4)
        assert (single.copy, rank.copy) == (0, 2 * count if role is Role.ACTOR else 0)
        assert rank.cache == single.cache


def test_a_rank_shares_its_gpu_with_those_of_other_groups_there(checkpoints: Path) -> None:
    group = make(
        checkpoints, services={"actor": {"devices": [0, 1]}, "critic": {"devices": [1, 2]}, "reward": {"devices": [1]}}
    )
    share, memories = (
        gpu_share(group, Role.ACTOR, 1),
        [role_memory(group, Role.ACTOR), role_memory(group, Role.CRITIC)],
    )
    reward = role_memory(group, Role.REWARD)
    assert share is not None
    assert reward is not None
    assert share.all_roles == sum(each.bytes for each in memories if each) + reward.bytes + 3 * CONTEXT_BYTES


def test_the_shares_are_the_whole_gpu_and_at_least_what_each_role_needs(checkpoints: Path) -> None:
    config = make(checkpoints)
    shares = {role: gpu_share(config, role) for role in MODEL_ROLES}
    total = 80 * GIB
    assert sum(share.bytes(total) for share in shares.values() if share) == pytest.approx(
        total - 4 * CONTEXT_BYTES, abs=8
    )
    for role, share in shares.items():
        memory = role_memory(config, role)
        assert share is not None
        assert memory is not None
        assert share.bytes(total) > share.bytes(0) == memory.bytes


def test_a_policy_of_1_5_billion_parameters_fits_one_gpu_with_its_critic(checkpoints: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes, **heads}))
    models = {"actor": {"model": str(tmp_path), "dtype": "bfloat16"}, "reward": {"model": str(tmp_path)}}
    share = gpu_share(make(checkpoints, **models), Role.ACTOR)
    assert share is not None
    # A quarter of the memory would not hold the state of an update, 27 GB.
    assert 80 * GIB / 4 < 27e9 < share.bytes(80 * GIB) < 40 * GIB


def test_a_model_that_the_planner_cannot_count_is_counted_by_its_files(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.saved(tiny.causal("bloom"), tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    models = {"actor": {"model": str(tmp_path), "dtype": "bfloat16"}, "critic": {"model": str(tmp_path)}}
    actor, critic = (role_memory(make(checkpoints, **models), role) for role in (Role.ACTOR, Role.CRITIC))
    assert actor is not None
    assert critic is not None
    count = weights(tiny.causal("bloom"))
    assert (actor.bytes - actor.cache, critic.bytes) == (18 * count, 18 * count)
    assert actor.cache > 0


def test_a_merged_adapter_needs_copies_of_the_weights(checkpoints: Path) -> None:
    lora = {"model": str(checkpoints / "llama"), "dtype": "bfloat16", "lora": {"rank": 4}}
    separate, merged = (
        role_memory(make(checkpoints, actor=lora, rollout={"merge_adapter": merge}), Role.ACTOR)
        for merge in (False, True)
    )
    assert separate is not None
    assert merged is not None
    assert merged.bytes - separate.bytes == merged.weights


def test_the_shares_the_doctor_and_the_plan_compute_the_same_state(checkpoints: Path) -> None:
    config = make(checkpoints, actor={"model": str(checkpoints / "llama"), "dtype": "bfloat16", "lora": {"rank": 4}})
    memory, load = role_memory(config, Role.ACTOR), read_workload(config)
    work = load.role(Role.ACTOR)
    assert memory is not None
    assert work is not None
    planned = trained_memory(work, load, GPUS["H100-80GB"], Parallel(), 512, False, offload=False)
    kept = sum(planned[name] for name in ("parameters", "master weights", "gradients", "optimizer"))
    generation = actor_generation_memory(work, load, GPUS["H100-80GB"], Parallel(), load.concurrent)
    assert memory.bytes == kept + generation["KV cache"]


def test_a_model_of_unknown_size_gives_no_shares(checkpoints: Path) -> None:
    assert gpu_share(make(checkpoints, reference={"model": "owner/name"}), Role.ACTOR) is None


def test_a_generator_on_the_same_gpu_has_a_share(checkpoints: Path) -> None:
    shared = make(checkpoints, rollout={"generators": 1}, services={"generator": {"devices": [0]}})
    before, after = gpu_share(make(checkpoints), Role.CRITIC), gpu_share(shared, Role.CRITIC)
    assert before is not None
    assert after is not None
    assert after.all_roles - before.all_roles == 2 * weights(tiny.causal("llama")) + CONTEXT_BYTES


def test_a_copy_for_generators_on_the_gpu_is_part_of_the_actors_memory(checkpoints: Path) -> None:
    def actor(**rollout: Any) -> RoleMemory:
        memory = role_memory(make(checkpoints, rollout={"generators": 1, **rollout}), Role.ACTOR)
        assert memory is not None
        return memory

    without = actor()
    assert without.copy == actor(share_gpu_memory=True, share_weights=False).copy == 0
    assert actor(share_gpu_memory=True).bytes - without.bytes == 2 * weights(tiny.causal("llama"))


@pytest.mark.parametrize(("kind", "heads"), [("llama", 2), ("gpt2", 4)])
def test_the_cache_is_keys_and_values_of_all_columns(checkpoints: Path, kind: str, heads: int) -> None:
    short, long = (
        torch_cache_bytes(make(checkpoints, kind, rollout={"max_response_tokens": tokens})) for tokens in (30, 94)
    )
    # 6 rows, 64 more columns, 2 layers, keys and values of 8 numbers per head, 2 bytes each; and a few more graphs.
    graphs = 2 * 2 * GRAPH_LAYER_BYTES
    assert long - short == 6 * 64 * 2 * 2 * heads * 8 * 2 + graphs
