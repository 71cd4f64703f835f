"""`quartet evaluate` on tiny checkpoints, in this process: its output and its errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import yaml

from quartet.cli.inference.evaluate import evaluate
from quartet.errors import ConfigError, DataError, MismatchError, ModelError
from quartet.models.weights.loading import load_causal_lm, load_reward_model
from quartet.run_directory.run_files import RunFiles
from tests.training.conftest import _measured_once  # noqa: F401
from tests.unit.models import tiny

TEXTS = [f"w{30 + index} w{5 + index % 4}" for index in range(6)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create checkpoints, prompts, and a finished run in a folder."""
    result = tmp_path_factory.mktemp("evaluate")
    models = {"initial": tiny.causal("llama", seed=3), "trained": tiny.causal("llama", seed=11)}
    for name, model in {**models, "reward": tiny.classifier("llama", seed=4)}.items():
        tiny.saved(model, result / name)
        tiny.tokenizer().save_pretrained(result / name)
    (result / "validation.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tree = {
        "run": {"directory": str(result / "runs"), "name": "a", "seed": 3},
        "data": {"prompts": str(result / "validation.jsonl"), "validation": str(result / "validation.jsonl")},
        "actor": {"model": str(result / "initial")},
        "reward": {"model": str(result / "reward")},
        # Few, because the trial of an engine has so many.
        "rollout": {"max_response_tokens": 9, "max_concurrent_sequences": 8},
        "evaluation": {"max_prompts": 5},
    }
    RunFiles(result / "runs/a").write_config(yaml.safe_dump(tree))
    shutil.copytree(result / "trained", result / "runs/a/policy")
    return result


KNOWN: dict[tuple[str, ...], dict[str, float]] = {}
"""Results of ``means`` by overrides."""


def means(folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, float]:
    """Return what the command prints. The same overrides are evaluated once."""
    if overrides not in KNOWN:
        capsys.readouterr()
        evaluate(str(folder / "runs/a/policy"), None, list(overrides), "cpu", True, None)
        KNOWN[overrides] = json.loads(capsys.readouterr().out)
    return dict(KNOWN[overrides])


def greedy_response(policy: Path, prompt: str) -> list[int]:
    """Return the greedy response, computed with a full forward pass per token."""
    model, ids = load_causal_lm(policy), tiny.tokenizer()(prompt)["input_ids"]
    response: list[int] = []
    with torch.inference_mode():
        while len(response) < 9 and tiny.EOS not in response:
            response.append(int(model(input_ids=torch.tensor([ids + response])).logits[0, -1].argmax()))
    return response


def score(reward: Path, prompt: str, response: list[int]) -> float:
    """Return the score, read at the last token."""
    model, ids = load_reward_model(reward), tiny.tokenizer()(prompt)["input_ids"]
    with torch.inference_mode():
        return float(model.score(model.model(input_ids=torch.tensor([ids + response])).last_hidden_state[0, -1]))


def test_a_policy_of_a_run_is_compared_with_its_initial_policy(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.jsonl"
    evaluate(str(folder / "runs/a/policy"), None, [], "cpu", True, output)
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [item["prompt"] for item in rows] == TEXTS[:5]
    for item in rows:
        for policy, prefix in (("trained", ""), ("initial", "initial_")):
            response = greedy_response(folder / policy, item["prompt"])
            assert item[f"{prefix}greedy"] == tiny.tokenizer().decode(response, skip_special_tokens=True)
            expected = score(folder / "reward", item["prompt"], response)
            assert item[f"{prefix}score_greedy"] == pytest.approx(expected, abs=1e-5)
    result = json.loads(printed.out)
    assert printed.err == ""
    for name in ("score", "tokens"):
        metric = {"score": "eval_reward", "tokens": "eval_tokens"}[name]
        for kind in ("greedy", "sampled"):
            assert result[f"{metric}_{kind}"] == pytest.approx(np.mean([item[f"{name}_{kind}"] for item in rows]))
    assert result["eval_kl"] > 0.1


def test_settings_can_be_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = means(folder, capsys)
    KNOWN.clear()
    assert means(folder, capsys) == expected
    for change in (
        "run.seed=4",
        "rollout.temperature=0.4",
        "rollout.max_response_tokens=3",
        "evaluation.max_prompts=2",
    ):
        assert means(folder, capsys, change) != expected, change


def test_win_rates_use_the_initial_policy_and_the_kl_uses_the_reference(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = means(folder, capsys)
    other = means(folder, capsys, f"reference.model={folder}/trained")
    assert other.pop("eval_kl") == pytest.approx(0, abs=1e-5)
    assert other.items() <= expected.items()
    itself = means(folder, capsys, f"actor.model={folder}/trained")
    assert (itself["eval_win_rate_greedy"], itself["eval_win_rate_sampled"]) == (0.5, 0.5)


def test_a_reference_served_by_the_actor_has_the_dtype_of_the_actor(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def divergence(*overrides: str) -> float:
        return means(folder, capsys, *overrides)["eval_kl"]

    expected, coarse = divergence(), divergence("reference.dtype=bfloat16")
    assert coarse != expected
    lora = "actor.lora={rank: 2}"
    assert divergence(lora) == divergence(lora, "reference.dtype=bfloat16") == expected
    assert divergence(lora, "reference.dtype=bfloat16", f"reference.model={folder}/initial") == coarse


def test_a_config_can_be_given_for_a_policy_outside_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = means(folder, capsys)
    evaluate(str(folder / "trained"), folder / "runs/a/config.yaml", [], "cpu", True, None)
    assert json.loads(capsys.readouterr().out) == expected


def test_without_json_tables_of_means_and_responses_are_printed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = means(folder, capsys)
    evaluate(str(folder / "initial"), folder / "runs/a/config.yaml", [], "cpu", True, None)
    initial = json.loads(capsys.readouterr().out)
    evaluate(str(folder / "runs/a/policy"), None, [], "cpu", False, None)
    shown = capsys.readouterr().out
    for name, value in result.items():
        row = next(line for line in shown.splitlines() if name in line)
        numbers = [word for word in row.split() if word[-1].isdecimal()]
        assert numbers == [f"{value:.4f}"] + ([] if "win_rate" in name else [f"{initial[name]:.4f}"])
    for title in ("5 validation prompts", "initial policy", "sampled responses", *TEXTS[:3]):
        assert title in shown
    assert TEXTS[3] not in shown


def test_dropped_prompts_are_reported(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some.jsonl").write_text('{"text": "w3 w4 w5"}\n{"text": "w3"}\n')
    changes = [f"data.validation={tmp_path}/some.jsonl", "data.max_prompt_tokens=2"]
    evaluate(str(folder / "trained"), folder / "runs/a/config.yaml", changes, "cpu", True, None)
    printed = capsys.readouterr()
    assert printed.err == (
        "warning: 1 of 2 prompts are over data.max_prompt_tokens 2 and dropped; raise it, or set data.truncation\n"
    )
    assert "eval_kl" in json.loads(printed.out)


def test_an_adapter_is_evaluated_like_its_merged_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = load_causal_lm(folder / "initial")
    base.name_or_path = str(folder / "initial")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "initial")
    adapted.save_pretrained(tmp_path / "adapter")
    tiny.saved(adapted.merge_and_unload(), tmp_path / "merged")
    tiny.tokenizer().save_pretrained(tmp_path / "merged")
    results = []
    for name in ("adapter", "merged"):
        evaluate(str(tmp_path / name), folder / "runs/a/config.yaml", [], "cpu", True, None)
        results.append(json.loads(capsys.readouterr().out))
    assert results[0] == pytest.approx(results[1], abs=1e-5)
    assert abs(results[0]["eval_kl"]) > 1e-3


def another_tokenizer(folder: Path, tmp_path: Path) -> str:
    other = shutil.copytree(folder / "trained", tmp_path / "other")
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"]["other"] = vocabulary["model"]["vocab"].pop("w60")
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    return str(other)


def empty(folder: Path, tmp_path: Path) -> str:
    (tmp_path / "empty").mkdir()
    return str(tmp_path / "empty")


@pytest.mark.parametrize(
    ("checkpoint", "overrides", "kind", "message"),
    [
        (lambda folder, _: str(folder / "absent"), [], ModelError, "absent: no such directory; expected a saved policy"),
        (lambda folder, _: str(folder / "validation.jsonl"), [], ModelError, "no such directory"),
        (empty, [], ModelError, "the directory is empty"),
        (lambda folder, _: str(folder / "reward"), [], ModelError, "expected a causal language model"),
        (another_tokenizer, [], MismatchError, "its vocabulary differs from that of actor.model"),
        (None, ["data.validation=null"], ConfigError, "data.validation: null, so there are no prompts"),
        (None, ["data.validation=absent.jsonl"], DataError, "absent.jsonl: cannot be read"),
        (None, ["rollout.max_response_tokens=63"], ConfigError, "the model has positions for 64"),
        (None, ["evaluation.prompt=3"], ConfigError, "did you mean 'max_prompts'"),
        (None, ["reward.model=absent/absent/absent"], ModelError, "absent: no such directory"),
    ],
    ids=[
        "absent", "a file", "empty", "a classifier", "another tokenizer", "no validation", "no prompts", "too long",
        "a typo", "no reward",
    ],
)  # fmt: skip
def test_invalid_input_is_refused_in_one_line(
    checkpoint: Any, overrides: list[str], kind: type[ConfigError], message: str, folder: Path, tmp_path: Path
) -> None:
    policy = checkpoint(folder, tmp_path) if checkpoint else str(folder / "runs/a/policy")
    with pytest.raises(kind) as refused:
        evaluate(policy, folder / "runs/a/config.yaml", overrides, "cpu", True, None)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_policy_outside_a_run_needs_a_config(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"trained: is not in the directory of a run; give the config with --config"):
        evaluate(str(folder / "trained"), None, [], "cpu", True, None)


def test_an_unwritable_output_is_refused_before_the_evaluation(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--output .*rows\.jsonl: its directory does not exist"):
        evaluate(str(folder / "runs/a/policy"), None, [], "cpu", True, tmp_path / "absent/rows.jsonl")
