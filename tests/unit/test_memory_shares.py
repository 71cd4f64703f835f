"""Shares of the roles in the memory of one GPU: by what each needs, in any order of loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet import memory_shares
from quartet.config import Config, parse_config
from quartet.memory_shares import CONTEXT_BYTES, engine_cache_bytes, gpu_share, role_memory
from quartet.types import MODEL_ROLES, Role
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


def test_a_policy_of_1_5_billion_parameters_fits_one_gpu_with_its_critic(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_shares, "_directory_parameters", lambda directory: 1_500_000_000)
    share = gpu_share(make(checkpoints), Role.ACTOR)
    assert share is not None
    # A quarter of the memory would not hold the state of an update, 27 GB.
    assert 80 * GIB / 4 < 27e9 < share.bytes(80 * GIB) < 40 * GIB


def test_a_model_of_unknown_size_gives_no_shares(checkpoints: Path) -> None:
    assert gpu_share(make(checkpoints, reference={"model": "owner/name"}), Role.ACTOR) is None


def test_a_generator_on_the_same_gpu_has_a_share(checkpoints: Path) -> None:
    shared = make(checkpoints, rollout={"generators": 1}, services={"generator": {"devices": [0]}})
    before, after = gpu_share(make(checkpoints), Role.CRITIC), gpu_share(shared, Role.CRITIC)
    assert before is not None
    assert after is not None
    assert after.all_roles - before.all_roles == 2 * weights(tiny.causal("llama")) + CONTEXT_BYTES


@pytest.mark.parametrize(("kind", "heads"), [("llama", 2), ("gpt2", 4)])
def test_the_cache_is_keys_and_values_of_all_columns(checkpoints: Path, kind: str, heads: int) -> None:
    short, long = (
        engine_cache_bytes(make(checkpoints, kind, rollout={"max_response_tokens": tokens})) for tokens in (30, 94)
    )
    # 6 rows, 64 more columns, 2 layers, keys and values of 8 numbers per head, 2 bytes each; and a few more graphs.
    graphs = 2 * 2 * memory_shares.GRAPH_LAYER_BYTES
    assert long - short == 6 * 64 * 2 * 2 * heads * 8 * 2 + graphs
