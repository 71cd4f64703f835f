"""``quartet fork`` and ``quartet rollback``: each changed setting of a fork takes effect or is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.cli.checkpoint import list_and_tag as cli
from quartet.cli.checkpoint.fork import fork
from quartet.cli.start_run import train
from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.contract.update import OptimizationSettings
from quartet.demo.toy_task import ToyTask
from quartet.errors import ConfigError
from quartet.models.training import updates as training_of_models
from quartet.run_directory.checkpoints import read_checkpoint
from quartet.run_directory.identity import Identity
from quartet.run_directory.run_files import RunFiles
from quartet.services.actor import actor as actor_core
from quartet.services.critic import critic as critic_core
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, json_lines, run_to_completion, step_metrics, weights

STEPS = 4
FORK_STEP = 2
SOURCES: dict[str, dict[str, Any]] = {
    "ppo": {
        "algorithm": {
            "kl_coefficient": 0.3,
            "kl_controller": {"kind": "adaptive", "target": 0.05, "horizon": 5.0},
            "score": {"normalize": "running"},
        },
        "actor": {"learning_rate": 0.02},
    },
    "lora": {"actor": {"lora": {"rank": 2}}, "critic": {"lora": {"rank": 2}}},
    "rloo": {"algorithm": {"estimator": "rloo"}, "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2}},
}
TO_RLOO = ["algorithm.estimator=rloo", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"]


@pytest.fixture(scope="module")
def source(make: MakeConfig) -> Callable[[str], Run]:
    """A finished run of each kind, with a checkpoint after every second step."""
    runs: dict[str, Run] = {}

    def run(kind: str) -> Run:
        if kind not in runs:
            tree = {"run": {"steps": STEPS}, "checkpoint": {"every_steps": 2, "keep_last": 5}, **SOURCES[kind]}
            runs[kind] = run_to_completion(make(**tree))
        return runs[kind]

    return run


MakeFork = Callable[..., Config]


@pytest.fixture
def forked(source: Callable[[str], Run], tmp_path: Path) -> MakeFork:
    """Fork a run of this kind after its second step; return the new config."""

    def make_fork(kind: str, *overrides: str) -> Config:
        all_overrides = ["run.directory=" + str(tmp_path), *overrides]
        fork(source(kind).files.root, str(FORK_STEP), "new", all_overrides)
        return load_config(tmp_path / "new" / "config.yaml")

    return make_fork


@dataclass
class FirstUpdate:
    """Settings of the first update of a run and the optimizer state before it, by role."""

    settings: dict[str, OptimizationSettings] = field(default_factory=dict)
    groups: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    steps_before: dict[str, set[float]] = field(default_factory=dict)


@pytest.fixture
def first_update(source: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch) -> FirstUpdate:
    source("ppo")  # Train the source first, so that its updates are not recorded.
    result = FirstUpdate()

    def spy(role: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def update(model: Any, optimizer: torch.optim.Optimizer, experience: Any, settings: Any, *rest: Any) -> Any:
            if role not in result.settings:
                result.settings[role] = settings
                result.groups[role] = [dict(group) for group in optimizer.param_groups]
                result.steps_before[role] = {float(entry["step"]) for entry in optimizer.state.values()}
            return real(model, optimizer, experience, settings, *rest)

        return update

    monkeypatch.setattr(actor_core, "update_policy", spy("actor", training_of_models.update_policy))
    monkeypatch.setattr(critic_core, "update_value", spy("critic", training_of_models.update_value))
    return result


@pytest.mark.parametrize("kind", ["ppo", pytest.param("lora", marks=pytest.mark.slow)])
def test_a_fork_with_the_same_settings_is_bit_identical(
    kind: str, forked: MakeFork, source: Callable[[str], Run]
) -> None:
    run = run_to_completion(forked(kind, "guards.window_steps=7"))
    assert step_metrics(run) == step_metrics(source(kind))
    assert weights(run) == weights(source(kind))


OPTIMIZER = {
    "actor": {"betas": [0.5, 0.75], "eps": 1e-3, "weight_decay": 0.5, "max_grad_norm": 0.125},
    "critic": {"betas": [0.25, 0.5], "eps": 1e-4, "weight_decay": 0.25, "max_grad_norm": 0.375},
}


def test_changed_settings_take_effect_and_the_moments_of_the_optimizers_are_kept(
    forked: MakeFork, first_update: FirstUpdate, source: Callable[[str], Run]
) -> None:
    before = source("ppo")
    settings = [
        f"{role}.optimizer.{name}={json.dumps(value)}" for role in OPTIMIZER for name, value in OPTIMIZER[role].items()
    ]
    run = run_to_completion(
        forked(
            "ppo",
            *settings,
            "run.steps=5",
            "run.seed=9",
            "actor.schedule=linear",
            "actor.learning_rate=0.06",
            "critic.learning_rate=0.5",
            "algorithm.num_epochs=3",
            "algorithm.num_mini_batches=2",
            "algorithm.kl_coefficient=0.77",
            "rollout.max_response_tokens=3",
            "rollout.prompts_per_step=5",
        )
    )
    for role, changed in OPTIMIZER.items():
        # Weights decay, and biases and norms do not.
        for group, decay in zip(first_update.groups[role], (changed["weight_decay"], 0.0), strict=True):
            assert (list(group["betas"]), group["eps"]) == (changed["betas"], changed["eps"])
            assert group["weight_decay"] == decay
        optimizer_steps = sum(step[f"optimizer_steps_{role}"] for step in before.metrics[:FORK_STEP])
        assert first_update.steps_before[role] == {optimizer_steps}
        update = first_update.settings[role]
        assert (update.num_epochs, update.num_mini_batches, update.max_grad_norm) == (3, 2, changed["max_grad_norm"])
    assert first_update.settings["critic"].learning_rate == 0.5
    # The schedule counts from the first step of the original run.
    rates = [step["learning_rate_actor"] for step in run.metrics]
    assert rates == pytest.approx([0.02, 0.02, 0.036, 0.024, 0.012])
    coefficients = [step["kl_coefficient"] for step in run.metrics]
    assert coefficients[:FORK_STEP] == [step["kl_coefficient"] for step in before.metrics[:FORK_STEP]]
    assert coefficients[FORK_STEP] == 0.77
    assert coefficients[FORK_STEP + 1] != 0.77, "the adaptive controller must continue from the new coefficient"
    assert step_metrics(run)[:FORK_STEP] == step_metrics(before)[:FORK_STEP]
    assert run.trajectories(FORK_STEP) == before.trajectories(FORK_STEP)
    items, old = (each.trajectories(FORK_STEP + 1) for each in (run, before))
    assert (len(items), max(item["response_tokens"] for item in items)) == (5, 3)
    assert [item["prompt"] for item in items[:4]] != [item["prompt"] for item in old]


CONTROLLER, MOMENTS, NEITHER = {"kl_controller"}, {"score_moments"}, set[str]()


@pytest.mark.parametrize(
    ("overrides", "dropped"),
    [
        (["guards.window_steps=7"], NEITHER),
        (["algorithm.kl_coefficient=0.77"], CONTROLLER),
        (["algorithm.kl_controller.kind=fixed"], CONTROLLER),
        (["algorithm.kl_controller.kind=simple"], CONTROLLER),
        (["algorithm.kl_controller.target=0.5"], CONTROLLER),
        (["algorithm.kl_controller.horizon=9"], CONTROLLER),
        (["algorithm.score.normalize=initial"], MOMENTS),
        (["algorithm.score.normalize=none"], MOMENTS),
        (
            ["reward={source: ensemble, parts: [{name: less, model: REWARD, weight: -1}]}", "critic.model=REWARD"],
            MOMENTS,
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_fork_drops_the_state_whose_settings_it_changes(
    overrides: list[str],
    dropped: set[str],
    forked: MakeFork,
    source: Callable[[str], Run],
    toy_task: ToyTask,
) -> None:
    """What is dropped starts from its initial value, see tests/services/orchestrator/algorithm/test_state.py."""
    config = forked("ppo", *(override.replace("REWARD", str(toy_task.reward)) for override in overrides))
    name = f"checkpoints/step-{FORK_STEP:06d}"
    before, state = (read_checkpoint(root / name).state for root in (source("ppo").files.root, config.run_directory))
    assert before["kl_controller"]
    assert before["score_moments"]
    assert state == {**before, **dict.fromkeys(dropped)}


def test_a_fork_without_a_critic_ignores_the_critic_of_the_checkpoint(forked: MakeFork) -> None:
    run = run_to_completion(forked("ppo", *TO_RLOO, "critic.freeze=['*norm*']"))
    assert len(run.metrics) == STEPS
    assert [("value_loss" in step) for step in run.metrics] == [True, True, False, False]
    assert read_checkpoint(run.files.checkpoints / f"step-{STEPS:06d}").roles == ("actor",)


def refused(forked: MakeFork, kind: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        forked(kind, *overrides)
    return str(error.value)


def test_a_fork_with_a_critic_is_refused_if_the_checkpoint_has_none(forked: MakeFork, tmp_path: Path) -> None:
    message = refused(forked, "rloo", "algorithm.estimator=gae")
    assert "algorithm.estimator gae: needs a critic, and the checkpoint of step 2 has none" in message
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("ppo", "actor.model", "elsewhere"),
        ("ppo", "critic.model", "elsewhere"),
        ("ppo", "actor.freeze", "['*norm*']"),
        ("ppo", "critic.freeze", "['*norm*']"),
        ("ppo", "actor.lora", "{rank: 2}"),
        ("lora", "actor.lora.rank", "4"),
        ("lora", "critic.lora", "null"),
    ],
)
def test_a_setting_incompatible_with_the_weights_is_refused(
    kind: str, key: str, value: str, forked: MakeFork, tmp_path: Path
) -> None:
    message = refused(forked, kind, f"{key}={value}")
    assert message.startswith(key.removesuffix(".rank"))
    assert "use that value, or start a new run" in message
    assert not (tmp_path / "new").exists()


def test_value_pretraining_before_the_fork_is_refused(forked: MakeFork, tmp_path: Path) -> None:
    message = refused(forked, "ppo", "algorithm.value_pretraining_steps=2")
    assert message.startswith("algorithm.value_pretraining_steps 2: counts from step 1 of the original run")
    assert "after step 2; for N steps in the fork set 2 + N" in message
    assert not (tmp_path / "new").exists()
    assert forked("ppo", "algorithm.value_pretraining_steps=3").algorithm.value_pretraining_steps == 3


@pytest.fixture(scope="module")
def evaluated(make: MakeConfig, toy_task: ToyTask) -> Run:
    evaluation = {"data": {"validation": str(toy_task.prompts)}, "evaluation": {"every_steps": 2, "max_prompts": 3}}
    return run_to_completion(make(run={"steps": STEPS}, checkpoint={"every_steps": 2, "keep_last": 5}, **evaluation))


def test_the_evaluation_interval_may_change(evaluated: Run, tmp_path: Path) -> None:
    fork(evaluated.files.root, str(FORK_STEP), "new", [f"run.directory={tmp_path}", "evaluation.every_steps=1"])
    run = run_to_completion(load_config(tmp_path / "new" / "config.yaml"))
    assert [line["step"] for line in json_lines(run.files.evaluation_summaries)] == [0, 2, 3, 4]


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        (
            "ppo",
            ["evaluation.every_steps=2", "data.validation=PROMPTS"],
            "evaluation.every_steps 2: evaluations are compared with",
        ),
        ("evaluated", ["evaluation.max_prompts=4"], "evaluation.max_prompts 4: "),
        ("evaluated", ["data.validation=elsewhere.jsonl"], "data.validation elsewhere.jsonl: "),
    ],
)
def test_evaluations_without_a_baseline_are_refused(
    kind: str,
    overrides: list[str],
    message: str,
    evaluated: Run,
    source: Callable[[str], Run],
    toy_task: ToyTask,
    tmp_path: Path,
) -> None:
    run = evaluated if kind == "evaluated" else source(kind)
    all_overrides = [override.replace("PROMPTS", str(toy_task.prompts)) for override in overrides]
    with pytest.raises(ConfigError) as error:
        fork(run.files.root, str(FORK_STEP), "new", [f"run.directory={tmp_path}", *all_overrides])
    assert str(error.value).startswith(message)
    assert not (tmp_path / "new").exists()


def test_another_set_of_evaluation_prompts_is_refused(evaluated: Run, toy_task: ToyTask, tmp_path: Path) -> None:
    original = tmp_path / evaluated.files.root.name
    shutil.copytree(evaluated.files.root, original)
    prompt_set = f"{{name: v, path: {toy_task.prompts}}}"
    config = load_config(original / "config.yaml", ["data.validation=null", f"data.validation_set={prompt_set}"])
    RunFiles(original).write_config(config.to_yaml())
    with pytest.raises(
        ConfigError, match=r'^data\.validation_set \{"name":"v",.*"take":3\}: .*, which used \{"name":"v",'
    ):
        fork(original, str(FORK_STEP), "new", ["data.validation_set.take=3"])
    assert not (tmp_path / "new").exists()


def test_a_fork_is_a_separate_run(forked: MakeFork, tmp_path: Path) -> None:
    config = forked("ppo", "actor.learning_rate=0.5")
    first = Identity.read(RunFiles(config.run_directory).identity)
    assert first is not None
    first.check(config, config.run_directory)
    (tmp_path / "new").rename(tmp_path / "old")
    forked("ppo", "actor.learning_rate=0.5")
    second = Identity.read(RunFiles(config.run_directory).identity)
    assert second is not None
    assert second.id != first.id


def output_of(action: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> str:
    action()
    return capsys.readouterr().out


def test_the_resume_command_shows_a_url_whose_password_is_not_stored(
    source: Callable[[str], Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, secret = source("ppo").files.root, "redis://user:s3cret@localhost:6379/0"

    def fork_of(run: Path, name: str, *overrides: str) -> Callable[[], None]:
        return lambda: fork(run, str(FORK_STEP), name, [f"run.directory={tmp_path}", *overrides])

    message = output_of(fork_of(run, "plain"), capsys)
    assert f"quartet train {tmp_path}/plain/config.yaml --resume resumes it\n" in message
    hint = "--resume --set buffer.url=URL resumes it; URL is redis://user:***@localhost:6379/0 with its password"
    for action in (
        fork_of(run, "secret", f"buffer.url={secret}"),
        fork_of(tmp_path / "secret", "second"),
        lambda: cli.rollback(tmp_path / "secret", str(FORK_STEP)),
    ):
        message = output_of(action, capsys)
        assert hint in message
        assert "s3cret" not in message
    with pytest.raises(ConfigError, match=r"stars replace a password.*--set buffer\.url=URL"):
        train(tmp_path / "secret" / "config.yaml", [], overwrite=False, resume=True)


def test_a_fork_keeps_earlier_setting_changes_unless_it_sets_them(source: Callable[[str], Run], tmp_path: Path) -> None:
    original = tmp_path / source("ppo").files.root.name
    shutil.copytree(source("ppo").files.root, original)
    line = {"before": 1e-3, "after": 5e-4, "user": "operator", "at": 0.0}
    unchanged = {**line, "setting": "critic.learning_rate", "step": FORK_STEP}
    RunFiles(original).append_changes(
        [
            {**line, "setting": "actor.learning_rate", "step": FORK_STEP},
            unchanged,
            {**unchanged, "step": FORK_STEP + 1, "after": 1e-4},
        ]
    )
    fork(original, str(FORK_STEP), "new", [f"run.directory={tmp_path}", "actor.learning_rate=0.002"])
    assert RunFiles(tmp_path / "new").read_changes() == [unchanged]
