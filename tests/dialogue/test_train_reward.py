"""``examples/dialogue/train_reward.py``, ``tiny_policy.py`` and ``public_reward.py`` on a small preference file."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from quartet.config.rewards import RewardSourceConfig
from quartet.contract.status import Role
from quartet.contract.trajectory import TokenBatch
from quartet.models.weights.tokenizer import load_tokenizer
from quartet.preflight.findings import has_error
from quartet.preflight.models import check_model, check_same_tokenizer
from quartet.rewards.model import ModelReward
from tests.dialogue.preference_files import write_dialogues

Programs = dict[str, ModuleType]
TINY = ["--steps", "30", "--vocabulary", "300", "--hidden", "16", "--layers", "1", "--max-tokens", "160"]
REWARD = ["--learning-rate", "2e-2", "--batch-pairs", "16", "--micro-batch-pairs", "16", "--epochs", "2"]


@pytest.fixture(scope="module")
def prepared(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the data, the policy and the reward model of the example."""
    folder = tmp_path_factory.mktemp("dialogue")
    source = write_dialogues(folder / "rows.jsonl", 400)
    for name, arguments in (
        ("prepare", [str(source), f"{folder}/data", "--validation-fraction", "0.2"]),
        ("tiny_policy", [f"{folder}/data", f"{folder}/policy", *TINY]),
        ("train_reward", [f"{folder}/policy", f"{folder}/data", f"{folder}/reward", *REWARD]),
    ):
        assert programs[name].main(arguments) == 0, name
    return folder


def test_the_reward_model_prefers_the_better_answers_of_unseen_prompts(prepared: Path) -> None:
    summary = json.loads((prepared / "reward/training.json").read_text())
    assert summary["before"]["accuracy"] < 0.75
    assert summary["after"]["accuracy"] > 0.95
    assert summary["after"]["accuracy"] > summary["after"]["longer"] + 0.1
    assert summary["after"]["loss"] < 0.3


def test_the_reward_service_scores_the_checkpoint(prepared: Path) -> None:
    policy, reward = str(prepared / "policy"), str(prepared / "reward")
    [found] = check_model("reward.model", Role.REWARD, reward, 64)
    assert "SequenceClassification" in found.what
    check_same_tokenizer("reward.model", reward, policy)
    assert not has_error(check_model("critic.model", Role.CRITIC, reward, 64))
    tokenizer = load_tokenizer(policy)
    question = [{"role": "user", "content": "how do i start with rice"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    answers = [
        [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for text in ("gladly , rice is easy", "stop asking about rice")
    ]
    batch = TokenBatch(
        np.concatenate([np.array(prompt + answer, np.int32) for answer in answers]),
        np.array([len(prompt)] * 2, np.int32),
        np.array([len(answer) for answer in answers], np.int32),
    )
    polite, rude = ModelReward(RewardSourceConfig(source="model", model=reward), "cpu").score(batch).total
    assert polite > rude + 1


def test_training_repeats_and_does_not_depend_on_the_micro_batch(
    programs: Programs, prepared: Path, tmp_path: Path
) -> None:
    options = ["--learning-rate", "2e-2", "--batch-pairs", "64"]
    weights, losses = [], []
    for number, size in enumerate(("64", "64", "20")):
        out = tmp_path / f"reward{number}"
        arguments = [f"{prepared}/policy", f"{prepared}/data", str(out), *options, "--micro-batch-pairs", size]
        assert programs["train_reward"].main(arguments) == 0
        weights.append((out / "model.safetensors").read_bytes())
        losses.append(json.loads((out / "training.json").read_text())["after"]["loss"])
    assert weights[0] == weights[1] != weights[2]
    assert losses[2] == pytest.approx(losses[0], rel=1e-3)


def test_the_loss_of_a_pair_by_hand(programs: Programs) -> None:
    chosen, rejected, margins = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 1.0]), torch.tensor([3.0, 0.0])
    values = programs["train_reward"].losses(chosen, rejected, margins, margin=0.5, centring=0.1)
    # Pair 1: 2 - 0.5 - 0.5 * 3 = 0, sum of scores 2.5. Pair 2: -1 - 1 - 0 = -2, sum 0.
    expected = [math.log(2) + 0.1 * 2.5**2, math.log(1 + math.exp(2))]
    assert values.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_tokenizer_without_a_pad_token_needs_one_of_its_vocabulary(
    programs: Programs, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = shutil.copytree(prepared / "policy", tmp_path / "policy")
    settings: dict[str, Any] = json.loads((policy / "tokenizer_config.json").read_text())
    settings["pad_token"] = None
    (policy / "tokenizer_config.json").write_text(json.dumps(settings))
    (policy / "special_tokens_map.json").unlink(missing_ok=True)
    arguments = [str(policy), f"{prepared}/data", str(tmp_path / "out"), *REWARD[:4], "--epochs", "1"]
    assert programs["train_reward"].main(arguments) == 2
    assert "its tokenizer has no pad token besides EOS" in capsys.readouterr().err
    assert programs["train_reward"].main([*arguments, "--pad-token", "<new>"]) == 2
    assert "--pad-token <new>: not in the vocabulary" in capsys.readouterr().err
    assert programs["train_reward"].main([*arguments, "--pad-token", "<pad>"]) == 0
    check_same_tokenizer("reward.model", str(tmp_path / "out"), str(prepared / "policy"))


def test_unusable_inputs_end_with_one_line_and_status_2(
    programs: Programs, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, policy, out = str(prepared / "data"), str(prepared / "policy"), str(tmp_path / "out")
    for arguments, message in (
        ([policy, str(tmp_path), out], "pairs.jsonl: cannot be read (No such file or directory)"),
        ([str(tmp_path / "none"), data, out], "none: no such directory"),
        ([policy, data, out, "--max-tokens", "3"], "pairs.jsonl: none of"),
        ([policy, data, data], "contains files, but no training.json of an earlier result"),
    ):
        assert programs["train_reward"].main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not Path(out).exists()


def test_a_reward_model_with_another_tokenizer_scores_text(prepared: Path, programs: Programs, tmp_path: Path) -> None:
    from examples.dialogue.public_reward import TooLong, score

    options = ["--steps", "1", *TINY[2:]]
    options[options.index("300")] = "280"
    assert programs["tiny_policy"].main([f"{prepared}/data", f"{tmp_path}/other", *options]) == 0
    assert programs["train_reward"].main([f"{tmp_path}/other", f"{prepared}/data", f"{tmp_path}/reward", *REWARD]) == 0
    model = str(tmp_path / "reward")
    line = {"prompt": [{"role": "user", "content": "tell me about tea"}]}
    polite, rude = (score("unused", text, line, model) for text in ("of course , tea is fun", "no idea about tea"))
    assert polite > rude
    assert score("unused", "of course , tea is fun", {"prompt": "tell me about tea"}, model) == polite
    with pytest.raises(TooLong, match=r"tokens, expected at most 4$"):
        score("unused", "of course", line, model, max_tokens=4)


def test_training_without_an_epoch_is_refused(
    programs: Programs, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        programs["train_reward"].main(
            [str(prepared / "policy"), str(prepared / "data"), str(tmp_path / "out"), "--epochs", "0"]
        )
    assert end.value.code == 2
    assert "--epochs: 0: expected at least 1" in capsys.readouterr().err
