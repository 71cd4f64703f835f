"""``quartet init``: the configs it writes, its questions, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quartet.config.estimators import BUILT_IN_ESTIMATORS
from quartet.config.loading import load_config
from quartet.config.supervised import load_stage
from quartet.data.prompt_encoding import PromptEncoder
from quartet.demo.toy_task import ToyTask
from quartet.models.weights.tokenizer import load_tokenizer
from quartet.supervised.rows import read_rows
from tests.dialogue.conftest import programs as programs
from tests.e2e.conftest import Call, Start
from tests.supervised.conftest import toy as toy


@pytest.fixture
def given(toy_task: ToyTask) -> list[str | Path]:
    """The flags for policy and prompts."""
    return ["--policy", toy_task.policy, "--prompts", toy_task.prompts]


@pytest.mark.parametrize("estimator", ["ppo", *BUILT_IN_ESTIMATORS])
def test_the_config_is_valid_and_explains_itself(
    estimator: str, given: list[str | Path], toy_task: ToyTask, call: Call, tmp_path: Path
) -> None:
    result = call("init", *given, "--reward", toy_task.reward, "--estimator", estimator, "--steps", 7)
    assert result.code == 0, result.err
    assert result.out.endswith("my.yaml: written and valid; to train: quartet train my.yaml\n")
    assert call("config", "check", "my.yaml").code == 0
    config = load_config(tmp_path / "my.yaml")
    assert (config.run.name, config.run.steps, config.reward.model) == ("my", 7, str(toy_task.reward))
    assert config.algorithm.estimator == ("gae" if estimator == "ppo" else estimator)
    assert config.rollout.prompts_per_step * config.rollout.samples_per_prompt == 64
    text = (tmp_path / "my.yaml").read_text()
    assert ("critic:" in text) == config.has_critic
    for key in ("learning_rate", "kl_coefficient", "prompts_per_step", "max_response_tokens", "estimator"):
        [line] = [number for number, line in enumerate(text.splitlines()) if line.startswith(f"  {key}:")][:1]
        assert text.splitlines()[line - 1].lstrip().startswith(("#", "model:", "prompts_per_step:")), key


def test_prompts_per_step_is_at_most_the_number_of_usable_prompts(
    toy_task: ToyTask, call: Call, tmp_path: Path
) -> None:
    word = "lunch "
    (tmp_path / "prompts.csv").write_text("text\n" + f"{word}\n" * 4 + f"{word * 600}\n" * 3)
    result = call("init", "--policy", toy_task.policy, "--prompts", "prompts.csv", "--reward", toy_task.reward)
    assert result.code == 0, result.err
    assert load_config(tmp_path / "my.yaml").rollout.prompts_per_step == 4


def test_relative_paths_are_those_of_the_working_directory(toy_task: ToyTask, call: Call, tmp_path: Path) -> None:
    (tmp_path / "prompts.csv").write_text("text\nlunch\nrain\n")
    (tmp_path / "models").symlink_to(toy_task.policy.parent)
    models = ["--policy", "models/policy", "--reward", "models/reward"]
    assert call("init", "other/my.yaml", "--prompts", "prompts.csv", *models).code == 0
    config = load_config(tmp_path / "other" / "my.yaml")
    assert config.data.prompts == Path("../prompts.csv")
    assert (config.actor.model, config.reward.model) == ("../models/policy", "../models/reward")


def test_an_example_reward_function_is_written_in_another_folder(
    given: list[str | Path], call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call("init", "runs of mine/second", *given, "--reward-function", "second_rewards:score")
    assert result.code == 0, result.err
    folder = tmp_path / "runs of mine" / "second"
    assert "cd 'runs of mine/second' && quartet train second.yaml" in result.out
    assert load_config(folder / "second.yaml").reward.function == "second_rewards:score"
    monkeypatch.chdir(folder)
    namespace: dict[str, object] = {}
    exec((folder / "second_rewards.py").read_text(), namespace)  # noqa: S102 - the file that the command has written
    score = namespace["score"]
    assert callable(score)
    assert score("", "word " * 30, {}) == 0 > score("", "short", {})


def test_an_existing_reward_function_is_kept(given: list[str | Path], call: Call, tmp_path: Path) -> None:
    (tmp_path / "kept_rewards.py").write_text("def judge(prompt, response, fields):\n    return 1.0\n")
    assert call("init", *given, "--reward-function", "kept_rewards:judge").code == 0
    assert "return 1.0" in (tmp_path / "kept_rewards.py").read_text()
    result = call("init", "other.yaml", *given, "--reward-function", "kept_rewards:score")
    assert result.code == 2
    assert "module kept_rewards has no score" in result.err
    assert not (tmp_path / "other.yaml").exists()


def test_missing_flags_are_named_without_a_terminal(given: list[str | Path], call: Call, tmp_path: Path) -> None:
    result = call("init", *given[:2])
    assert result.code == 2
    assert "--prompts FILE, --reward MODEL or --reward-function MODULE:NAME" in result.err
    assert "--policy" not in result.err
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_replaced_only_on_request(
    given: list[str | Path], toy_task: ToyTask, call: Call, tmp_path: Path
) -> None:
    (tmp_path / "my.yaml").write_text("mine")
    result = call("init", *given, "--reward", toy_task.reward)
    assert (result.code, (tmp_path / "my.yaml").read_text()) == (2, "mine")
    assert "--overwrite" in result.err
    result = call("init", *given, "--reward", "models/absent/reward", "--overwrite")
    assert (result.code, (tmp_path / "my.yaml").read_text()) == (2, "mine")
    assert call("init", *given, "--reward", toy_task.reward, "--overwrite").code == 0


def test_nothing_is_left_of_an_invalid_config(
    given: list[str | Path], toy_task: ToyTask, call: Call, tmp_path: Path
) -> None:
    result = call("init", "a/b/c.yaml", *given, "--reward-function", "r:score", "--estimator", "gea")
    assert result.code == 2
    assert "gea" in result.err
    result = call("init", *given, "--reward", toy_task.reward, "--reward-function", "r:score")
    assert "give only one" in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_is_asked_for_what_is_missing(start: Start, toy_task: ToyTask, tmp_path: Path) -> None:
    command = start("init", "--policy", toy_task.policy, "--steps", "5", terminal=True)
    for question, answer in (
        ("Prompts: file in JSON Lines, CSV or Parquet", str(toy_task.prompts)),
        ("Reward model", ""),
        ("Reward function", ""),
        ("Estimator", "rloo"),
    ):
        command.wait_for(lambda question=question: question in command.out)
        command.type(f"{answer}\n")
    result = command.wait()
    assert result.code == 0, result
    config = load_config(tmp_path / "my.yaml")
    assert (config.run.steps, config.algorithm.estimator, config.reward.function) == (5, "rloo", "my_rewards:score")
    assert (tmp_path / "my_rewards.py").is_file()
    assert "Policy to train" not in result.out


def test_three_configs_are_written_from_pairs(toy: Path, call: Call, tmp_path: Path) -> None:
    pairs, base = toy / "data/pairs.jsonl", toy / "base"
    (tmp_path / "models").symlink_to(toy)
    result = call("init", "mine", "--from-pairs", pairs, "--policy", "models/base", "--steps", 7)
    assert result.code == 0, result.err
    commands = "cd mine && quartet sft sft.yaml && quartet reward-model reward-model.yaml && quartet train train.yaml"
    assert result.out.endswith(f"to train: {commands}\n")
    folder = tmp_path / "mine"
    sft = load_stage("sft", folder / "sft.yaml")
    reward_model, train = load_stage("reward-model", folder / "reward-model.yaml"), load_config(folder / "train.yaml")
    assert sft.model.path == "../models/base"
    assert reward_model.model.path == train.actor.model == "runs/sft/policy" == f"{sft.run_directory}/policy"
    assert train.reward.model == f"{reward_model.run_directory}/reward"
    assert sft.data.train == reward_model.data.train == pairs
    assert train.run.steps == 7
    assert train.rollout.max_response_tokens + train.data.max_prompt_tokens <= 384
    # The stages hold out the conversations that are not among the prompts of RLHF.
    rows = read_rows(sft, load_tokenizer(base), None, lambda _: None)
    prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    encoded = {
        tuple(PromptEncoder.of(load_tokenizer(base), "").chats([_rendered(base, prompt)])[0]) for prompt in prompts
    }
    assert encoded == {tuple(row.prompt) for row in rows.training}
    assert encoded.isdisjoint({tuple(row.prompt) for row in rows.validation})
    assert rows.validation
    few = {"prompt": "question 0", "chosen": "yes", "rejected": "no"}
    (tmp_path / "few.jsonl").write_text(json.dumps(few) + "\n")
    warned = call("init", "few", "--from-pairs", "few.jsonl", "--policy", base)
    assert warned.code == 0, warned.err
    assert "warning: few.jsonl: none of 1 pairs is held out, so nothing is evaluated" in warned.err
    again = call("init", "mine", "--from-pairs", pairs, "--policy", base)
    assert (again.code, again.err) == (
        2,
        "error: mine/sft.yaml: exists; choose another folder, or replace it with --overwrite\n",
    )


def test_configs_from_pairs_are_not_written_to_a_folder_with_the_name_of_a_config(
    toy: Path, call: Call, tmp_path: Path
) -> None:
    result = call("init", "my.yaml", "--from-pairs", toy / "data/pairs.jsonl", "--policy", toy / "base")
    message = "error: init --from-pairs my.yaml: writes several files; give a folder, such as my\n"
    assert (result.code, result.err) == (2, message)
    assert list(tmp_path.iterdir()) == []


def _rendered(base: Path, prompt: list[dict[str, str]]) -> str:
    text: str = load_tokenizer(base).apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return text


def test_pairs_need_a_base_model_and_are_checked(toy: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"chosen": "x"}\n')
    for arguments, message in (
        (["--from-pairs", toy / "data/pairs.jsonl"], "give the model to start from with --policy MODEL"),
        (["--from-pairs", "bad.jsonl", "--policy", toy / "base"], "error: bad.jsonl:1: rejected is missing; expected"),
        (["--from-pairs", "none.jsonl", "--policy", toy / "base"], "none.jsonl: cannot be read (No such file"),
        (
            ["--from-pairs", "bad.jsonl", "--policy", "x", "--reward", "y"],
            "takes no --prompts, --reward and --reward-f",
        ),
    ):
        result = call("init", "mine", *arguments)
        assert result.code == 2
        assert message in result.err
        assert not (tmp_path / "mine").exists()
