"""The config tree: the shipped files, derived defaults, and inconsistent settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet.cli.config_reference import reference
from quartet.config import policy_losses
from quartet.config.algorithm import AlgorithmConfig
from quartet.config.layout import model_roles
from quartet.config.loading import load_config, parse_config
from quartet.config.root import Config
from quartet.contract import update
from quartet.errors import ConfigError
from tests.every_case import every_case
from tests.unit.config_files import MINIMAL, REQUIRED, write

ROOT = Path(__file__).parents[3]
SHIPPED = [*sorted((ROOT / "configs").rglob("*.yaml")), ROOT / "src/quartet/demo/demo.yaml"]


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return write(tmp_path, MINIMAL)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_config_parses(path: Path) -> None:
    config = load_config(path)
    assert config.run.steps >= 1


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_the_resolved_yaml_parses_to_the_same_tree(path: Path) -> None:
    config = load_config(
        path, ["algorithm.clip_ratio_high=0.3", "services.actor.devices=[0, 1]", "actor.model='a: b #é'"]
    )
    assert parse_config(yaml.safe_load(config.to_yaml()), "again") == config


def test_the_resolved_yaml_shows_characters_of_every_plane(minimal: Path) -> None:
    assert "model: a 😀 é\n" in load_config(minimal, ["actor.model='a 😀 é'"]).to_yaml()


def test_the_resolved_yaml_contains_every_key(minimal: Path) -> None:
    def keys(tree: dict[str, Any]) -> set[str]:
        inner = {f"{key}.{below}" for key, value in tree.items() if isinstance(value, dict) for below in keys(value)}
        return inner | set(tree)

    tree = yaml.safe_load(load_config(minimal).to_yaml())
    assert {"run.seed", "algorithm.kl_controller.horizon", "services.orchestrator.listen"} <= keys(tree)


def test_every_key_is_documented() -> None:
    def undocumented(section: Any, name: str) -> list[str]:
        results = []
        for key, field in section.model_fields.items():
            below = field.annotation
            if isinstance(below, type) and hasattr(below, "model_fields"):
                results += undocumented(below, f"{name}{key}.")
            elif not field.description:
                results.append(name + key)
        return results

    assert undocumented(Config, "") == []


def test_a_critic_without_model_starts_from_the_reward_model_and_a_reference_from_the_actor(minimal: Path) -> None:
    config = load_config(minimal)
    assert (config.critic_model, config.reference_model) == ("reward", "policy")
    config = load_config(minimal, ["critic.model=c", "reference.model=r"])
    assert (config.critic_model, config.reference_model) == ("c", "r")


def test_the_tree_is_immutable(minimal: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(minimal).run.steps = 3


@every_case(
    ("changes", "message"),
    [
        ({"services": {"actor": {"address": "far:1"}}}, "buffer.url: an actor or critic at an address needs a Redis"),
        ({"actor": {"model": "a", "optimizer": {"betas": [0.9, 1.0]}}}, "expected less than 1"),
        ({"algorithm": {"kl_coefficient": 0, "kl_controller": {"kind": "adaptive"}}}, "kl_coefficient, which is 0"),
        ({"algorithm": {"kl_controller": {"kind": "adaptive", "horizon": 12.8}}}, "expected more than 12.8"),
        ({"algorithm": {"kl_controller": {"kind": "simple", "horizon": 1}}}, "expected more than 1 step"),
        ({"services": {"orchestrator": {"devices": [0]}}}, "unknown key; known keys: address"),
        (
            {
                "reward": {
                    "source": "ensemble",
                    "parts": [
                        {"name": "a", "source": "function", "function": "m:f"},
                        {"name": "b", "source": "model", "model": "r"},
                    ],
                },
                "services": {"reward": {"processes": 2}},
            },
            "services.reward.processes 2: several processes hold a model together, and the reward has another source",
        ),
        (
            {"services": {"critic": {"processes": 2, "devices": [0, 1]}}},
            "services.critic.processes 2: counts processes on CPUs, and services.critic.devices \\[0, 1\\] starts one",
        ),
        (
            {"services": {"critic": {"devices": [1, 2, 1]}}},
            "services.critic.devices \\[1, 2, 1\\]: \\[1\\] given more than once",
        ),
        (
            {"services": {"reward": {"offload": {"optimizer": True}}}},
            "services.reward.offload: only actor and critic are trained",
        ),
        (
            {"services": {"actor": {"devices": [0], "offload": {"parameters": True}}}},
            "services.actor.offload.parameters: a model on one device keeps its parameters there; give several devices",
        ),
        (
            {
                "services": {"actor": {"devices": [3, 5]}},
                "rollout": {"max_off_policy_steps": 1},
                "algorithm": {"rollout_correction": {"upper": 2}},
            },
            "on device 5, set services.actor.devices \\[3\\], rollout.generators 1 and services.generator.devices \\[5\\]",
        ),
        (
            {
                "actor": {"model": "a", "lora": {}},
                "services": {"actor": {"processes": 2}},
                "rollout": {"engine": "triton", "triton": {"url": "grpc://localhost:1", "model": "m"}},
            },
            "services.actor.processes 2: engine triton needs an actor with all of its weights in one process",
        ),
        (
            {"rollout": {"dynamic_sampling": True}},
            "rollout.dynamic_sampling: compares the scores of a prompt's responses; set rollout.samples_per_prompt to 2 or more, "
            "not 1",
        ),
        (
            {
                "algorithm": {"distillation": {}},
                "reward": {"source": "none", "model": None},
                "rollout": {"dynamic_sampling": True, "samples_per_prompt": 2},
            },
            "rollout.dynamic_sampling: compares scores, and with reward.source none there are none",
        ),
        (
            {"services": {"actor": {"processes": 4, "parallel": {"shard": 1, "tensor": 2}}}},
            "services.actor.parallel: replicate 1 x shard 1 x tensor 2 must be the number of ranks, which is 4; change the "
            "sizes, or set services.actor.processes 2",
        ),
        (
            {"services": {"critic": {"processes": 4, "parallel": {"replicate": 3}}}},
            "services.critic.parallel: replicate 3 x shard null x tensor 1 must be the number of ranks, which is 4",
        ),
        (
            {"services": {"actor": {"devices": [0, 1], "parallel": {"tensor": 4}}}},
            "which is 2; change the sizes, or give services.actor.devices 4 devices$",
        ),
        (
            {"services": {"actor": {"devices": [0, 1], "parallel": {"shard": 1}}}},
            "which is 2; change the sizes, or give services.actor.devices 1 device$",
        ),
        (
            {"services": {"actor": {"nodes": 2, "devices": [0, 1], "parallel": {"tensor": 8}}}},
            "which is 4; change the sizes, or give services.actor.devices 4 devices on each of 2 nodes$",
        ),
        (
            {"services": {"actor": {"nodes": 2, "processes": 2, "parallel": {"shard": 1, "tensor": 2}}}},
            "which is 4; change the sizes, or set services.actor.processes 1 on each of 2 nodes$",
        ),
        (
            {"services": {"actor": {"nodes": 2, "processes": 2, "parallel": {"replicate": 3}}}},
            "which is 4; change the sizes$",
        ),
        (
            {"critic": {"compile": True}, "services": {"critic": {"processes": 2, "parallel": {"tensor": 2}}}},
            "critic.compile: layers of which each rank computes slices cannot be compiled; set critic.compile false, or "
            "services.critic.parallel.tensor 1",
        ),
        ({"services": {"actor": {"parallel": {"tensor": 2}}}}, "must be the number of ranks, which is 1"),
        ({"services": {"reference": {"parallel": {"replicate": 2}}}}, "must be the number of ranks, which is 1"),
        (
            {"services": {"actor": {"address": ["a:1", "b:1"]}}, "buffer": {"url": "redis://r"}},
            "services.actor.address: one process has the trained model; give one HOST:PORT",
        ),
        (
            {"services": {"reward": {"address": []}}},
            "services.reward.address: expected at least one HOST:PORT, or null",
        ),
        ({"services": {"reward": {"address": ["a:1", "a:1"]}}}, "a:1: given more than once"),
        ({"services": {"reference": {"address": ["a:1", "b:0"]}}}, "'b:0': expected HOST:PORT with the port"),
        ({"algorithm": {"estimator": "ppo"}}, "expected gae \\(PPO\\), reinforce, .*, or the import path of your own"),
        ({"algorithm": {"estimator": "my.module:f"}}, "declare what it needs under custom_estimator"),
        ({"algorithm": {"custom_estimator": {}}}, "estimator gae is built in; leave it out"),
        ({"algorithm": {"policy_loss": "my.module"}}, "expected clipped, .*, or the import path of your own"),
        ({"algorithm": {"estimator": "rloo"}}, "compares the samples of a prompt; set rollout.samples_per_prompt to 2"),
        ({"algorithm": {"estimator": "grpo"}}, "compares the samples of a prompt"),
        ({"algorithm": {"estimator": "reinforce"}, "rollout": {"prompts_per_step": 1}}, "needs at least 2 responses"),
        ({"algorithm": {"estimator": "reinforce", "gamma": 0.9}}, "algorithm.gamma 0.9: .* leave gamma at 1"),
        ({"algorithm": {"estimator": "reinforce", "whiten_rewards": True}}, "has no token rewards"),
        ({"algorithm": {"ratio_level": "sequence"}}, "gives each token its own advantage"),
        ({"algorithm": {"policy_loss": "gspo"}}, r"algorithm\.policy_loss gspo: .* or a loss with one ratio per token"),
        ({"algorithm": {"policy_loss": "sapo", "clip_ratio": 0.2}}, "policy loss sapo does not clip ratios"),
        ({"algorithm": {"policy_loss": "cispo", "dual_clip": 3.0}}, "policy loss cispo has no dual clip"),
        (
            {"algorithm": {"policy_loss": "cispo", "ratio_level": "sequence"}},
            "policy loss cispo has its own ratio; leave ratio_level at token",
        ),
        (
            {"algorithm": {"policy_loss": "sapo", "policy_loss_parameters": {"tau": 1.0}}},
            r"policy_loss_parameters\.tau: .* its parameters are tau_positive, tau_negative",
        ),
        ({"algorithm": {"policy_loss_parameters": {"tau": 1.0}}}, "policy loss clipped has no such parameter"),
        (
            {"algorithm": {"policy_loss": "clip_cov", "policy_loss_parameters": {"clip_cov_lb": 6.0}}},
            "clip_cov_lb 6: expected less than clip_cov_ub 5",
        ),
        (
            {"algorithm": {"policy_loss": "m:f", "policy_loss_parameters": {f"p{n}": 1.0 for n in range(33)}}},
            "at most 32 items",
        ),
        ({"algorithm": {"loss_divisor": 24.0}}, "loss_aggregation token_mean has no constant divisor"),
        ({"algorithm": {"estimator": "reinforce", "value_pretraining_steps": 2}}, "has no critic"),
        (
            {
                "algorithm": {"estimator": "reinforce"},
                "services": {"critic": {"address": "h:1"}},
                "buffer": {"url": "redis://h"},
            },
            "services.critic.address: .* has no critic",
        ),
        (
            {"algorithm": {"value_pretraining_steps": 100}},
            "the policy would never be trained; expected less than run.steps 100",
        ),
        (
            {"reward": {"source": "ensemble", "timeout_seconds": 1, "parts": [{"name": "a", "model": "m"}]}},
            "timeout_seconds: not used with source ensemble; set it in the parts",
        ),
        ({"algorithm": {"overlong_penalty": {"buffer_tokens": 65}}}, "expected at most rollout.max_response_tokens 64"),
        ({"actor": {"model": "a", "warmup_steps": 101}}, "actor.warmup_steps 101: expected at most run.steps 100"),
        (
            {"actor": {"model": "a", "warmup_steps": 51}, "algorithm": {"value_pretraining_steps": 50}},
            "actor.warmup_steps 51: expected at most run.steps 100 less algorithm.value_pretraining_steps 50",
        ),
        ({"critic": {"warmup_steps": 101}}, "critic.warmup_steps 101: expected at most run.steps 100"),
        ({"actor": {"model": "a", "final_learning_rate": 1}}, "final_learning_rate 1: expected at most learning_rate"),
        ({"actor": {"model": "a", "lora": {}, "freeze": ["x"]}}, "freeze: not used with lora"),
        (
            {"actor": {"model": "a", "lora": {"dropout": 0.1}, "compile": True}},
            "lora.dropout 0.1: compiled layers do not have the masks of each token; set compile false",
        ),
        (
            {"actor": {"model": "a", "lora": {"dora": True}, "compile": True}},
            "lora.dora: compiled layers with magnitudes are not supported; set compile false",
        ),
        (
            {"actor": {"model": "a", "lora": {"dora": True}}, "rollout": {"engine": "vllm"}},
            "actor.lora.dora: engine vllm takes adapters without magnitudes only; set rollout.engine torch",
        ),
        (
            {"actor": {"model": "a", "lora": {"dora": True}}, "services": {"actor": {"processes": 2}}},
            "actor.lora.dora: needs whole weights for their norms, and services.actor divides them over 2 ranks",
        ),
        (
            {"actor": {"model": "a", "optimizer": {"kind": "muon"}}, "services": {"actor": {"processes": 2}}},
            "actor.optimizer.kind muon: needs whole weights, and services.actor divides them over 2 ranks",
        ),
        (
            {"critic": {"optimizer": {"kind": "muon"}}, "services": {"critic": {"offload": {"optimizer": True}}}},
            "services.critic.offload.optimizer: moves the moments of AdamW only; set it false",
        ),
        ({"evaluation": {"every_steps": 5}}, "evaluation.every_steps 5: data.validation is null"),
        (
            {"actor": {"model": "a", "lora": {}}, "services": {"reference": {"address": "h:1"}}},
            "services.reference.address: the actor serves the reference",
        ),
        ({"reward": {}}, "model: missing; source model needs it"),
        ({"reward": {"source": "function"}}, "function: missing; source function needs it"),
        ({"reward": {"model": "r", "function": "a.b:c"}}, "function: not used with source model"),
        ({"reward": {"source": "function", "function": "a.b"}}, "function: expected package.module:callable"),
        ({"reward": {"source": "ensemble"}}, "parts: source ensemble needs at least one"),
        ({"reward": {"model": "r", "parts": [{"name": "a", "model": "m"}]}}, "parts: not used with source model"),
        (
            {"reward": {"source": "ensemble", "parts": [{"name": "a", "model": "m"}, {"name": "a", "model": "n"}]}},
            "the name a is used twice",
        ),
        ({"reward": {"source": "ensemble", "parts": [{"name": "a"}]}}, "parts.0: model: missing"),
        (
            {"reward": {"source": "ensemble", "parts": [{"name": "a", "model": "m", "wait": 1}]}},
            "unknown key; did you mean .weight.",
        ),
        ({"guards": {"kl_runaway": {"below": 3}}}, "guards.kl_runaway.below: unknown key; known keys: action, above"),
    ],
)
def test_inconsistent_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**REQUIRED, **changes}, "test")


def test_every_setting_has_one_line_in_the_reference() -> None:
    lines = [line for line in reference().splitlines() if line.startswith("| `reward.judge.template`")]
    assert len(lines) == 1
    assert lines[0].count("|") == 5


def test_the_reference_of_settings_in_the_docs_is_current() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"
    assert page.read_text(encoding="utf-8") == reference(), "run: make generate"


def test_an_estimator_without_critic_needs_no_critic_and_lora_no_reference() -> None:
    config = parse_config(REQUIRED, "test")
    assert (config.has_critic, config.has_reference) == (True, True)
    assert list(config.models) == ["actor.model", "reward.model", "critic.model", "reference.model"]
    assert [str(role) for role in model_roles(config)] == ["actor", "critic", "reward", "reference"]
    bare = {**REQUIRED, "actor": {"model": "a", "lora": {}}, "algorithm": {"estimator": "reinforce"}}
    config = parse_config(bare, "test")
    assert list(config.models) == ["actor.model", "reward.model"]
    assert [str(role) for role in model_roles(config)] == ["actor", "reward"]
    config = parse_config({**bare, "reference": {"model": "other"}}, "test")
    assert [str(role) for role in model_roles(config)] == ["actor", "reward", "reference"]


def test_the_models_of_an_ensemble_have_the_names_of_their_parts() -> None:
    parts = [
        {"name": "tone", "model": "t"},
        {"name": "length", "source": "function", "function": "a:b", "weight": -0.5},
    ]
    config = parse_config({**REQUIRED, "reward": {"source": "ensemble", "parts": parts}}, "test")
    assert config.models["reward.parts.tone.model"] == "t"
    assert [key for key in config.models if key.startswith("reward")] == ["reward.parts.tone.model"]
    assert (config.critic_model, config.reward_tokenizer) == ("a", "a"), (
        "without a reward model, the actor provides both"
    )
    assert config.reward.needs_fields


def test_setting_the_action_of_a_guard_keeps_its_bound() -> None:
    guards = parse_config({**REQUIRED, "guards": {"kl_runaway": {"action": "stop"}}}, "test").guards
    assert (guards.kl_runaway.action, guards.kl_runaway.above) == ("stop", 50.0)


@pytest.mark.parametrize(
    ("estimator", "chosen", "normalized"),
    [
        ("gae", None, True),
        ("reinforce_plus_plus", None, True),
        ("reinforce_plus_plus_baseline", None, True),
        ("opo", None, False),
        ("rloo", None, False),
        ("grpo", True, True),
        ("gae", False, False),
    ],
)
def test_normalization_of_advantages_defaults_to_that_of_the_estimator(
    estimator: str, chosen: bool | None, normalized: bool
) -> None:
    tree = {**REQUIRED, "algorithm": {"estimator": estimator, "normalize_advantages": chosen}}
    config = parse_config({**tree, "rollout": {"samples_per_prompt": 2}}, "test")
    assert config.algorithm.normalizes_advantages is normalized


@pytest.mark.parametrize("gateway_settings", [{"certificate_file": "c.pem"}, {"key_file": "k.pem"}])
def test_the_gateway_needs_certificate_and_key_together(gateway_settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="certificate_file and key_file: only one of them is given"):
        parse_config({**REQUIRED, "gateway": gateway_settings}, "test")


def algorithm_of(**changes: Any) -> AlgorithmConfig:
    return parse_config({**REQUIRED, "algorithm": changes}, "test").algorithm


@pytest.mark.parametrize(
    ("algorithm", "clip_range", "aggregation"),
    [
        ({}, (0.2, 0.2), "token_mean"),
        ({"clip_ratio": 0.1}, (0.1, 0.1), "token_mean"),
        ({"clip_ratio_high": 0.28}, (0.2, 0.28), "token_mean"),
        ({"policy_loss": "gspo_token"}, (3e-4, 4e-4), "sequence_mean"),
        (
            {"policy_loss": "gspo_token", "clip_ratio": 1e-3, "loss_aggregation": "token_mean"},
            (1e-3, 1e-3),
            "token_mean",
        ),
        ({"policy_loss": "cispo"}, (1.0, 4.0), "token_mean"),
        ({"policy_loss": "sapo"}, (0.0, 0.0), "sequence_mean"),
        ({"policy_loss": "package.module:loss"}, (0.2, 0.2), "token_mean"),
    ],
)
def test_clip_range_and_aggregation_have_the_defaults_of_the_loss(
    algorithm: dict[str, Any], clip_range: tuple[float, float], aggregation: str
) -> None:
    parsed = algorithm_of(**algorithm)
    assert parsed.clip_range == clip_range
    assert parsed.aggregation == aggregation


def test_parameters_of_a_loss_that_are_not_given_have_its_defaults() -> None:
    parsed = algorithm_of(policy_loss="sapo", policy_loss_parameters={"tau_negative": 2.0})
    assert parsed.loss_parameters == {"tau_positive": 1.0, "tau_negative": 2.0}


def test_the_literals_of_the_config_and_of_the_messages_agree() -> None:
    assert policy_losses.Aggregation == update.LossAggregation
    assert policy_losses.RatioLevel == update.RatioLevel


def test_all_contradictions_between_sections_are_shown_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(
            write(tmp_path, MINIMAL),
            ["algorithm.num_mini_batches=4000", "rollout.max_turn_tokens=5", "evaluation.every_steps=1"],
        )
    lines = str(raised.value).splitlines()
    assert lines[0].endswith("3 problems:")
    assert [line.split(": ")[1].split()[0] for line in lines[1:]] == [
        "algorithm.num_mini_batches",
        "rollout.max_turn_tokens",
        "evaluation.every_steps",
    ]
