"""Plans of small and large runs: what fits, what is refused, and what is proposed."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from quartet.cli.main import app
from quartet.cli.plan import describe
from quartet.config.loading import config_of, load_config
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.errors import ConfigError
from quartet.planner.gpus import Cluster, parse_gpus
from quartet.planner.placement import USABLE_FRACTION
from quartet.planner.plan import Plan, make_plan
from quartet.planner.proposal import proposed_config, proposed_settings, requirements, service_settings

EXAMPLES = Path("examples/plan")
MODEL = {
    "model_type": "qwen2",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
"""A model of about a billion parameters."""


@pytest.fixture
def make_config(tmp_path: Path) -> Any:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text(json.dumps(MODEL))
    model = str(tmp_path / "m")

    def make(*overrides: str) -> Config:
        tree = {
            "data": {"prompts": "p.jsonl", "max_prompt_tokens": 128},
            "actor": {"model": model, "dtype": "bfloat16"},
            "critic": {"dtype": "bfloat16"},
            "reward": {"model": model, "dtype": "bfloat16"},
            "rollout": {"max_response_tokens": 256},
        }
        return config_of(tree, overrides)

    return make


@cache
def example(name: str, gpus: str, nodes: int = 1) -> tuple[Config, Plan]:
    config = load_config(EXAMPLES / f"{name}.yaml")
    return config, make_plan(config, parse_gpus(gpus, nodes))


def check_fits(plan: Plan) -> None:
    for device in range(plan.cluster.total):
        assert sum(plan.placed.memory(device).values()) <= USABLE_FRACTION * plan.cluster.device.memory


@pytest.mark.parametrize(
    ("name", "gpus", "nodes"),
    [
        ("qwen2.5-0.5b", "RTX4090-24GB", 1),
        ("qwen2.5-7b", "8xH100-80GB", 1),
        ("llama-3.1-70b", "8xH100-80GB", 2),
    ],
)
def test_the_examples_fit_and_give_a_valid_config(name: str, gpus: str, nodes: int) -> None:
    config, plan = example(name, gpus, nodes)
    check_fits(plan)
    assert plan.seconds > 0
    assert plan.bottleneck in plan.phases
    assert {each.role for each in plan.placed.placements} >= {Role.ACTOR, Role.REFERENCE}
    needed = requirements(plan)
    assert any("on other nodes" in line for line in needed) == (nodes > 1)
    text = proposed_config(config, plan, "quartet plan")
    proposed = config_of(yaml.safe_load(text))
    assert proposed.actor.micro_batch_tokens is not None
    assert proposed.actor.gradient_checkpointing is not None
    assert all(f"#   {line}" in text.splitlines() for line in needed)


def test_a_tensor_parallel_role_needs_host_memory_for_the_model_of_each_rank() -> None:
    _, plan = example("llama-3.1-70b", "8xH100-80GB", 2)
    [line] = [line for line in requirements(plan) if "host memory" in line]
    assert line.startswith(
        "1,051 GiB of host memory per node while the actor loads: it is tensor parallel, so each of its 8 ranks"
    )


def test_seventy_billion_parameters_do_not_fit_on_one_node() -> None:
    with pytest.raises(ConfigError, match=r"--gpus 8xH100-80GB: the run does not fit: .* of actor take 1051 GiB"):
        example("llama-3.1-70b", "8xH100-80GB")


def test_one_device_per_role_gives_one_device_to_each_service(make_config: Any) -> None:
    plan = make_plan(make_config(), parse_gpus("4xH100-80GB"), one_device_per_role=True)
    assert requirements(plan) == []
    services = proposed_settings(make_config(), plan)["services"]
    assert all(len(services[str(role)]["devices"]) == 1 for role in ("actor", "critic", "reward", "reference"))
    check_fits(plan)


def test_several_devices_of_a_role_are_settings_of_its_service(make_config: Any) -> None:
    config = make_config("rollout.prompts_per_step=4096", "algorithm.estimator=reinforce")
    plan = make_plan(config, parse_gpus("8xA100-40GB"))
    [actor, *_] = plan.placed.placements
    assert actor.group.size > 1
    keys = service_settings(plan)["actor"]
    assert keys["devices"] == list(actor.group.devices)
    assert math.prod(keys["parallel"].values()) == len(keys["devices"])
    assert not {"nodes", "offload"} & keys.keys()


def test_a_group_does_not_begin_in_the_middle_of_a_node_and_end_in_the_next(make_config: Any, tmp_path: Path) -> None:
    large = {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28}
    for name, sizes in (("actor", {}), ("reward", large)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**MODEL, "vocab_size": 151_936, **sizes}))
    models = [f"{role}.model={tmp_path / role}" for role in ("actor", "reward")]
    lengths = ["data.max_prompt_tokens=512", "rollout.max_response_tokens=1024", "rollout.prompts_per_step=64"]
    config = make_config("algorithm.estimator=gae", *models, *lengths)
    plan = make_plan(config, parse_gpus("4xL40S-48GB", 2))
    proposed = config_of(yaml.safe_load(proposed_config(config, plan, "quartet plan")))
    for each in plan.placed.placements:
        if each.role is not Role.GENERATOR:
            assert getattr(proposed.services, each.role).num_ranks == each.group.size


def test_a_trained_model_without_a_tensor_parallel_plan_is_sharded_only(make_config: Any, tmp_path: Path) -> None:
    sizes = {"vocab_size": 32_000, "n_embd": 8192, "n_layer": 40, "n_head": 64, "n_positions": 8192}
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2/config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    overrides = [f"{role}.model={tmp_path / 'gpt2'}" for role in ("actor", "reward")]
    generators = ["rollout.engine=vllm", "rollout.generators=1", "rollout.prompts_per_step=1024"]
    plan = make_plan(make_config(*overrides, *generators), parse_gpus("8xH100-80GB", 2))
    sizes = {each.role: each.parallel.tensor for each in plan.placed.placements}
    assert sizes[Role.ACTOR] == sizes[Role.CRITIC] == 1
    assert sizes[Role.GENERATOR] > 1


def test_a_group_over_nodes_has_the_devices_of_each(make_config: Any) -> None:
    _, plan = example("llama-3.1-70b", "8xH100-80GB", 2)
    keys = service_settings(plan)["actor"]
    assert (keys["devices"], keys["nodes"]) == (list(range(8)), 2)
    assert math.prod(keys["parallel"].values()) == 16
    assert keys["offload"] == {"optimizer": True}


@pytest.mark.parametrize(("name", "nodes"), [("qwen2.5-7b", 1), ("llama-3.1-70b", 2)])
def test_the_proposed_config_has_the_groups_of_the_plan(name: str, nodes: int) -> None:
    config, plan = example(name, "8xH100-80GB", nodes)
    proposed = config_of(yaml.safe_load(proposed_config(config, plan, "quartet plan")))
    for role, keys in service_settings(plan).items():
        service = getattr(proposed.services, role).model_dump(mode="json", exclude_unset=True)
        assert {key: service[key] for key in keys} == keys


@pytest.mark.parametrize(
    "placement",
    [
        {"processes": 2},
        {"devices": [0, 1], "parallel": {"shard": 2}},
        {"devices": [0, 1], "nodes": 2, "parallel": {"replicate": 2, "shard": 2}},
        {"devices": [0, 1], "offload": {"parameters": True}},
    ],
    ids=lambda placement: " ".join(placement),
)
def test_the_proposed_config_drops_the_placement_of_the_given_one(placement: Any, make_config: Any) -> None:
    settings = json.dumps({**placement, "listen": "127.0.0.1:5000"})
    config = make_config("algorithm.estimator=reinforce", f"services.actor={settings}")
    plan = make_plan(config, parse_gpus("H100-80GB"))
    proposed = yaml.safe_load(proposed_config(config, plan, "quartet plan"))
    assert proposed["services"]["actor"] == {"listen": "127.0.0.1:5000", "devices": [0]}


def test_the_proposed_config_keeps_the_settings_of_services_elsewhere(make_config: Any) -> None:
    reward = {"address": "host:1", "devices": [0, 1], "parallel": {"shard": 2}}
    config = make_config("buffer.url=redis://h", f"services.reward={json.dumps(reward)}")
    plan = make_plan(config, parse_gpus("H100-80GB"))
    proposed = yaml.safe_load(proposed_config(config, plan, "quartet plan"))
    assert proposed["services"]["reward"] == reward


def test_less_memory_gives_smaller_micro_batches_or_checkpointing(make_config: Any) -> None:
    lengths = ("data.max_prompt_tokens=1024", "rollout.max_response_tokens=3072")
    config = make_config("algorithm.estimator=reinforce", "actor.lora={rank: 8}", *lengths)
    ample, scarce = (make_plan(config, parse_gpus(name)).placed.placements[0] for name in ("H100-80GB", "L4-24GB"))
    assert (ample.tokens, ample.checkpointing) == (16_384, False)
    assert scarce.tokens < ample.tokens or scarce.checkpointing


def test_configured_micro_batches_are_kept(make_config: Any) -> None:
    config = make_config("actor.micro_batch_tokens=777", "actor.gradient_checkpointing=true")
    actor = make_plan(config, parse_gpus("2xH100-80GB")).placed.placements[0]
    assert (actor.role, actor.tokens, actor.checkpointing) == (Role.ACTOR, 777, True)


def test_more_devices_shorten_a_step(make_config: Any) -> None:
    config = make_config("rollout.prompts_per_step=1024")
    seconds = [make_plan(config, parse_gpus(f"{count}xH100-80GB")).seconds for count in (1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0] / 3


def test_state_is_sharded_over_the_devices_of_a_role(make_config: Any) -> None:
    config = make_config("algorithm.estimator=reinforce", "rollout.prompts_per_step=2048")
    plan = make_plan(config, parse_gpus("8xA100-80GB"))
    actor = plan.placed.placements[0]
    ranks = actor.parallel.shard * actor.parallel.tensor
    assert ranks > 1
    assert actor.memory["optimizer"] == 8 * actor.work.trained / ranks
    assert actor.memory["master weights"] == actor.memory["gradients"] == 4 * actor.work.trained / ranks


def test_an_adapter_scores_as_the_reference_and_trains_less(make_config: Any) -> None:
    config = make_config("algorithm.estimator=reinforce", "actor.lora={rank: 8}")
    plan = make_plan(config, parse_gpus("H100-80GB"))
    assert [phase.role for phase in plan.phases if phase.name == "scoring"] == ["actor", "reward"]
    actor = plan.placed.placements[0]
    assert actor.memory["master weights"] == 0
    assert actor.memory["optimizer"] == 8 * actor.work.trained < 0.1 * actor.memory["parameters"]


def test_a_moving_average_keeps_the_actor_on_one_device_and_needs_host_memory(make_config: Any) -> None:
    config = make_config("algorithm.estimator=reinforce", "actor.ema_decay=0.992")
    plan = make_plan(config, parse_gpus("4xH100-80GB"))
    actor = plan.placed.placements[0]
    assert (actor.role, actor.group.size) == (Role.ACTOR, 1)
    [line] = [line for line in requirements(plan) if "moving average" in line]
    assert line.startswith(f"{4 * actor.work.trained / 2**30:,.1f} GiB of host memory")


def test_a_copy_for_generators_on_the_gpu_is_counted(make_config: Any) -> None:
    settings = ("algorithm.estimator=reinforce", "rollout.generators=1")
    for shares, copies in ((), 0), (("rollout.share_gpu_memory=true",), 1):
        plan = make_plan(make_config(*settings, *shares), parse_gpus("2xH100-80GB"))
        actor = plan.placed.placements[0]
        assert (actor.role, actor.group.size) == (Role.ACTOR, 1)
        assert actor.memory.get("generation copy", 0) == copies * actor.memory["parameters"]


def test_shared_prompts_are_computed_once(make_config: Any) -> None:
    estimator = ("algorithm.estimator=rloo", "rollout.prompts_per_step=16")
    separate = make_plan(
        make_config("algorithm.estimator=reinforce", "rollout.prompts_per_step=64"), parse_gpus("H100-80GB")
    )
    shared = make_plan(make_config(*estimator, "rollout.samples_per_prompt=4"), parse_gpus("H100-80GB"))
    assert separate.load.responses == shared.load.responses
    assert shared.seconds < separate.seconds


def test_a_generator_that_shares_its_device_releases_its_memory(make_config: Any) -> None:
    config = make_config("rollout.engine=vllm", "rollout.generators=1", "algorithm.estimator=reinforce")
    plan = make_plan(config, parse_gpus("H100-80GB"))
    assert plan.placed.shared
    vllm = proposed_settings(config, plan)["rollout"]["vllm"]
    assert vllm["release_memory"]
    assert 0 < vllm["memory_fraction"] < 1
    check_fits(plan)


def test_shorter_responses_change_the_times_and_not_the_memory(make_config: Any) -> None:
    config, cluster = make_config("algorithm.estimator=reinforce"), parse_gpus("H100-80GB")
    longest, shorter = make_plan(config, cluster), make_plan(config, cluster, mean_response=64)
    assert shorter.seconds < longest.seconds
    assert shorter.placed.memory(0) == longest.placed.memory(0)


def test_external_engines_and_services_are_left_out(make_config: Any) -> None:
    overrides = ("services.reward.address=host:1", "rollout.engine=triton", "rollout.triton.url=grpcs://h:8001")
    config = make_config(*overrides, "rollout.triton.weights=static", "algorithm.estimator=reinforce")
    plan = make_plan(config, parse_gpus("H100-80GB"))
    assert plan.load.remote == ("reward",)
    assert {phase.name for phase in plan.phases} == {"scoring", "update"}
    assert "KV cache" not in {name for name, size in plan.placed.memory(0).items() if size}


def test_nothing_to_place_is_an_error(make_config: Any) -> None:
    roles = ("actor", "critic", "reward", "reference")
    addresses = [f"services.{role}.address=h:{index + 1}" for index, role in enumerate(roles)]
    with pytest.raises(ConfigError, match=r"every model has an address in services"):
        make_plan(make_config(*addresses, "buffer.url=redis://h:1"), parse_gpus("H100-80GB"))


@pytest.mark.parametrize("key", ["mean_prompt", "mean_response"])
@pytest.mark.parametrize("tokens", [0, 300])
def test_mean_lengths_are_between_one_and_the_limit(key: str, tokens: int, make_config: Any) -> None:
    lengths: dict[str, int] = {key: tokens}
    with pytest.raises(ConfigError, match=rf"--{key.replace('_', '-')}-tokens {tokens}: expected 1 to (128|256)"):
        make_plan(make_config(), parse_gpus("H100-80GB"), **lengths)  # type: ignore[arg-type]


def test_a_missing_config_json_is_an_error(make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for model, message in (
        ("org/model", "actor.model: org/model has no config.json in the local hub cache; the plan needs no weights"),
        (str(tmp_path / "none"), "actor.model: .*none/config.json does not exist; expected the directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_plan(make_config(f"actor.model={model}"), parse_gpus("H100-80GB"))


def test_a_model_in_the_hub_cache_is_read(make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    folder = tmp_path / "hub/models--org--model"
    (folder / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("a" * 40)
    (folder / "snapshots" / ("a" * 40) / "config.json").write_text(json.dumps(MODEL))
    plan = make_plan(make_config("actor.model=org/model"), parse_gpus("2xH100-80GB"))
    assert plan.placed.placements[0].work.parameters > 10**9


def run(*arguments: str) -> str:
    """Return what `quartet plan` prints. Raises ConfigError."""
    result = CliRunner().invoke(app, ["plan", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_the_command_prints_tables_and_writes_a_config_without_torch(tmp_path: Path) -> None:
    output = tmp_path / "planned.yaml"
    program = (
        "import sys; from quartet.cli import main; sys.argv[0] = 'quartet'\n"
        "try: main.main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    arguments = [str(EXAMPLES / "qwen2.5-7b.yaml"), "--gpus", "8xH100-80GB", "--output", str(output)]
    process = subprocess.run(
        [sys.executable, "-c", program, "plan", *arguments], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    for text in (
        "Bottleneck: ",
        "Placement",
        "Memory of each device",
        "Expected seconds of a step",
        "Proposed settings:",
    ):
        assert text in process.stdout
    assert load_config(output).rollout.engine == "vllm"


BAD_INPUT = [
    (("--gpus", "8xH100"), "--gpus '8xH100': unknown device or count; expected cpu, or COUNTxNAME"),
    (("--gpus", "L4-24GB", "--set", "actor.dtype=float32"), "--gpus 1xL4-24GB: the run does not fit: "),
    (("--gpus", "L4-24GB", "--output", "/none/x.yaml"), "--output /none/x.yaml: the folder /none does not exist"),
    (("--gpus", "L4-24GB", "--set", "actor.model=/none"), "actor.model: /none/config.json does not exist"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_bad_input_is_refused(arguments: tuple[str, ...], message: str) -> None:
    settings = ("--set", "rollout.engine=torch", "--set", "rollout.generators=0")
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        run(str(EXAMPLES / "qwen2.5-7b.yaml"), *settings, *arguments)


def test_bad_input_is_one_line_and_exit_status_2() -> None:
    arguments, message = BAD_INPUT[0]
    command = [sys.executable, "-m", "quartet.cli.main", "plan", str(EXAMPLES / "qwen2.5-7b.yaml"), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (2, "")
    [line] = process.stderr.splitlines()
    assert line.startswith(f"error: {message}")


def test_a_cpu_is_one_device_for_all_roles(make_config: Any) -> None:
    device = parse_gpus("cpu").device
    roomy = Cluster(type(device)(**{**{name: getattr(device, name) for name in device.__slots__}, "memory": 2**40}), 1)
    config = make_config()
    plan = make_plan(config, roomy)
    assert "devices" not in str(proposed_settings(config, plan))
    assert requirements(plan) == []


def test_the_plans_on_the_page_are_those_of_the_command() -> None:
    page = Path("docs/plan.md").read_text(encoding="utf-8")
    plans = re.findall(r"`quartet (plan [^`]+)`\n\n```text\n(.*?)```", page, flags=re.DOTALL)
    assert len(plans) == 3
    for command, expected in plans:
        printed = run(*command.split()[1:])
        assert [line.rstrip() for line in printed.splitlines()] == expected.splitlines(), command


@pytest.mark.parametrize(
    ("way", "seconds"),
    [("none", 141.1 / 19 + 141.1 / 1.1), ("nccl", 141.1 / 19 + 141.1 / 40 + 141.1 / 8.9)],
)
def test_weights_for_another_node_take_the_way_of_the_config(way: str, seconds: float) -> None:
    settings = (f"rollout.process_group={way}", "services.actor.devices=[0]", "services.generator.devices=[0]")
    overrides = [part for setting in settings for part in ("--set", setting)]
    printed = run(str(EXAMPLES / "llama-3.1-70b.yaml"), *overrides, "--gpus", "8xH100-80GB", "--nodes", "2")
    [line] = [line.split() for line in printed.splitlines() if line.startswith(" weights ")]
    assert line[3:] == ["gRPC" if way == "none" else way]
    assert float(line[2]) == pytest.approx(seconds, rel=2e-3)


def test_weights_that_are_not_shared_go_over_grpc_on_one_node() -> None:
    settings = ("--gpus", "8xH100-80GB", "--set", "rollout.share_weights=false")
    printed = run(str(EXAMPLES / "qwen2.5-7b.yaml"), *settings)
    [line] = [line.split() for line in printed.splitlines() if line.startswith(" weights ")]
    assert line[3:] == ["gRPC"]


def test_a_hybrid_model_has_a_plan_with_the_state_of_a_sequence(make_config: Any, tmp_path: Path) -> None:
    (tmp_path / "lfm2").mkdir()
    kinds = {
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "hidden_size": 1024,
        "num_attention_heads": 16,
    }
    sizes = {"vocab_size": 32_000, "intermediate_size": 2048, "num_key_value_heads": 4, "conv_L_cache": 3}
    (tmp_path / "lfm2/config.json").write_text(json.dumps({"model_type": "lfm2", **kinds, **sizes}))
    models = [f"{role}.model={tmp_path / 'lfm2'}" for role in ("actor", "reward")]
    result = make_plan(make_config(*models), parse_gpus("H100-80GB"))
    check_fits(result)
    actor = result.load.role(Role.ACTOR)
    assert actor is not None
    # One layer with keys and values of 4 heads of 64 per token, one with the last 3 inputs of its convolution.
    assert actor.shape.state.bytes(2, 100) == 2 * (100 * 2 * 4 * 64 + 3 * 1024)
    [line] = [item for item in describe(result) if isinstance(item, str) and item.startswith("State of each sequence")]
    assert line.endswith(
        "0.0 MiB of recurrent and convolution states, and up to 0.4 MiB that grow with its 384 tokens."
    )
