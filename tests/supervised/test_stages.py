"""`quartet sft` and `quartet reward-model` in this process: numerics, files, resumption, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from quartet.config.loading import load_config
from quartet.config.supervised import load_stage
from quartet.errors import ConfigError, ModelError
from quartet.models.weights.tokenizer import load_tokenizer
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.step_lines import read_step_lines
from quartet.supervised import stage as stage_module
from quartet.supervised import trainers
from quartet.supervised.rows import EncodedRow, read_rows
from quartet.supervised.stage import check_stage, next_command, run_stage


@dataclass
class Stages:
    """Stages of a test, in a folder of their own."""

    toy: Path
    folder: Path
    printed: list[str] = field(default_factory=list)

    def config(self, stage: str, **sections: dict[str, Any]) -> Path:
        tree: dict[str, Any] = {
            "stage": stage,
            "run": {"name": stage, "directory": str(self.folder / "runs"), "steps": 4},
            "data": {
                "train": str(self.toy / "data/pairs.jsonl"),
                "validation": str(self.toy / "data/validation_pairs.jsonl"),
            },
            "model": {"path": str(self.toy / "base"), "device": "cpu"},
            "training": {"batch_size": 8, "micro_batch_size": 4, "learning_rate": 1e-3},
            "telemetry": {"tensorboard": False},
        }
        for name, section in sections.items():
            tree[name] = {**tree.get(name, {}), **section}
        path = self.folder / f"{stage}.yaml"
        path.write_text(json.dumps(tree))
        return path

    def run(self, stage: str, *, resume: bool = False, overwrite: bool = False, **sections: dict[str, Any]) -> RunFiles:
        path = self.config(stage, **sections)
        config = load_stage(stage, path)
        print(next_command(config, run_stage(config, overwrite, resume, print)))
        return RunFiles(config.run_directory)


@pytest.fixture
def stages(toy: Path, tmp_path: Path) -> Stages:
    return Stages(toy, tmp_path)


@pytest.fixture(scope="module")
def finished_sft(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    """Return a finished run of `quartet sft`, which is trained once. Tests must not change it."""
    return Stages(toy, tmp_path_factory.mktemp("finished")).run("sft")


@pytest.fixture
def finished(finished_sft: RunFiles, stages: Stages) -> RunFiles:
    """Return a copy of the finished run in the folder of the test."""
    root = stages.folder / "runs/sft"
    shutil.copytree(finished_sft.root, root)
    return RunFiles(root)


def batch_of(rows: list[EncodedRow], side: int) -> tuple[torch.Tensor, list[int]]:
    full = [row.prompt + row.answers[side] for row in rows]
    width = max(map(len, full))
    return torch.tensor([ids + [0] * (width - len(ids)) for ids in full]), [len(ids) for ids in full]


def first_rows(stages: Stages, stage: str, trainer: Any, count: int) -> list[EncodedRow]:
    """Return the rows of the first step, in the order of the trainer."""
    config = load_stage(stage, stages.config(stage))
    rows = read_rows(config, load_tokenizer(stages.toy / "base"), 384, lambda _: None).training
    order = list(trainer.get_train_dataloader().batch_sampler.sampler)
    return [rows[index] for index in order[:count]]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the trainers that are built, in their order."""
    kept: list[Any] = []
    build = trainers.build_trainer

    def keep(*arguments: Any) -> Any:
        kept.append(build(*arguments))
        return kept[-1]

    monkeypatch.setattr(trainers, "build_trainer", keep)
    return kept


def test_the_first_loss_of_sft_is_that_of_a_direct_computation(stages: Stages, built: list[Any]) -> None:
    files = stages.run("sft", run={"steps": 1})
    rows = first_rows(stages, "sft", built[0], 8)
    model = AutoModelForCausalLM.from_pretrained(stages.toy / "base", dtype=torch.float32)
    ids, lengths = batch_of(rows, 0)
    with torch.no_grad():
        logits = model(
            input_ids=ids, attention_mask=(torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None])
        ).logits
    total, count = 0.0, 0
    for row, line, logit in zip(rows, ids, logits, strict=True):
        begin, end = len(row.prompt), len(row.prompt) + len(row.answers[0])
        total += float(functional.cross_entropy(logit[begin - 1 : end - 1], line[begin:end], reduction="sum"))
        count += end - begin
    assert read_step_lines(files.metrics)[0]["loss"] == pytest.approx(total / count, abs=1e-5)


def test_the_first_loss_of_a_reward_model_is_that_of_a_direct_computation(stages: Stages, built: list[Any]) -> None:
    torch.manual_seed(0)
    loss = {"margin_coefficient": 0.5, "center_rewards_coefficient": 0.02}
    pairs = [json.loads(line) for line in (stages.toy / "data/pairs.jsonl").read_text().splitlines()]
    train = stages.folder / "rated.jsonl"
    train.write_text("".join(json.dumps({**pair, "margin": index % 3}) + "\n" for index, pair in enumerate(pairs)))
    files = stages.run(
        "reward-model", run={"steps": 1}, training={**loss, "learning_rate": 1e-9}, data={"train": str(train)}
    )
    config = load_stage("reward-model", stages.config("reward-model", data={"train": str(train)}))
    every = read_rows(config, load_tokenizer(stages.toy / "base"), 384, lambda _: None).training
    order = list(built[0].get_train_dataloader().batch_sampler.sampler)[:8]
    rows = [every[index] for index in order]
    # One step of a tiny learning rate leaves the weights nearly as they were.
    model = AutoModelForSequenceClassification.from_pretrained(files.reward, dtype=torch.float32)
    assert model.config.num_labels == 1
    scores = []
    for side in (0, 1):
        ids, lengths = batch_of(rows, side)
        with torch.no_grad():
            hidden = model.model(input_ids=ids).last_hidden_state
        scores.append(model.score(hidden[torch.arange(len(rows)), torch.tensor(lengths) - 1])[:, 0])
    margins = torch.tensor([row.margin for row in rows])
    assert margins.max() == 2
    expected = (
        (-functional.logsigmoid(scores[0] - scores[1] - 0.5 * margins) + 0.02 * (scores[0] + scores[1]) ** 2)
        .mean()
        .detach()
    )
    (line,) = read_step_lines(files.metrics)
    assert line["loss"] == pytest.approx(float(expected), abs=1e-5)
    assert line["accuracy"] == pytest.approx(float((scores[0] > scores[1]).float().mean()))


def test_forward_passes_of_unequal_size_change_the_loss_of_a_reward_model(stages: Stages) -> None:
    pairs = (stages.toy / "data/pairs.jsonl").read_text().splitlines(keepends=True)[:5]
    train = stages.folder / "five.jsonl"
    train.write_text("".join(pairs))
    losses = []
    for size in (4, 8):
        training = {"batch_size": 8, "micro_batch_size": size, "learning_rate": 1e-9}
        files = stages.run(
            "reward-model", overwrite=size == 8, run={"steps": 1}, training=training, data={"train": str(train)}
        )
        losses.append(read_step_lines(files.metrics)[0]["loss"])
    assert losses[0] != pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("stage", ["sft", "reward-model"])
def test_trl_and_peft_get_the_settings_of_the_config(stages: Stages, built: list[Any], stage: str) -> None:
    recomputes = stage == "sft"  # TRL's default is True for both.
    training = {
        "batch_size": 6,
        "micro_batch_size": 3,
        "learning_rate": 2e-4,
        "warmup_steps": 5,
        "schedule": "cosine",
        "weight_decay": 0.125,
        "max_grad_norm": 0.25,
    }
    if stage == "reward-model":
        training["center_rewards_coefficient"] = 0.375
    lora = {"rank": 3, "alpha": 5.0, "dropout": 0.0625, "target_modules": ["q_proj", "v_proj"]}
    stages.run(
        stage,
        run={"steps": 2, "seed": 7},
        training=training,
        model={"gradient_checkpointing": recomputes, "lora": lora},
        checkpoint={"every_steps": 9},
    )
    arguments = built[0].args
    expected = {
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2e-4,
        "warmup_steps": 5,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.125,
        "max_grad_norm": 0.25,
        "max_steps": 2,
        "seed": 7,
        "data_seed": 7,
        "gradient_checkpointing": recomputes,
        "save_steps": 9,
        "bf16": False,
        "use_cpu": True,
    } | ({"center_rewards_coefficient": 0.375} if stage == "reward-model" else {})
    assert {name: getattr(arguments, name) for name in expected} == expected
    adapter = built[0].model.peft_config["default"]
    assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout) == (3, 5.0, 0.0625)
    assert adapter.target_modules == {"q_proj", "v_proj"}


@pytest.mark.parametrize(
    ("stage", "lora"),
    [("sft", None), ("reward-model", None), ("sft", {"rank": 2, "dropout": 0.1}), ("reward-model", {"rank": 2})],
)
def test_a_resumed_stage_ends_with_the_same_bits(
    stages: Stages, monkeypatch: pytest.MonkeyPatch, stage: str, lora: dict[str, Any] | None
) -> None:
    # An epoch has 3 steps, so the checkpoint at step 4 is in the second.
    train = stages.folder / "24.jsonl"
    train.write_text("".join((stages.toy / "data/pairs.jsonl").read_text().splitlines(keepends=True)[:24]))
    options = {"checkpoint": {"every_steps": 2}, "model": {"lora": lora}, "data": {"train": str(train)}}
    steps = {"steps": 7}
    whole = stages.run(stage, run={"name": "whole", **steps}, **options)
    append = RunFiles.append_metrics

    def killed(files: RunFiles, metrics: dict[str, float]) -> None:
        append(files, metrics)
        if metrics["step"] == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFiles, "append_metrics", killed)
        with pytest.raises(KeyboardInterrupt):
            stages.run(stage, run={"name": "cut", **steps}, **options)
    cut = RunFiles(stages.folder / "runs/cut")
    assert not cut.policy.exists()
    assert not cut.reward.exists()
    assert [path.name for path in cut.stage.iterdir()] == ["step-000004"]
    stages.run(stage, run={"name": "cut", **steps}, resume=True, **options)
    first, second = ((each.policy if stage == "sft" else each.reward) for each in (whole, cut))
    weights, others = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    lines = [[{**line, "seconds": 0} for line in read_step_lines(each.metrics)] for each in (whole, cut)]
    assert lines[0] == lines[1]
    assert [line["step"] for line in lines[0]] == list(range(1, 8))


def test_trackers_get_an_id_of_the_run_that_a_resumed_run_keeps(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[str] = []
    opened = stage_module.open_sinks

    def open_sinks(config: Any, files: RunFiles, identity: str, note: Callable[[str], None]) -> Any:
        ids.append(identity)
        return opened(config, files, identity, note)

    monkeypatch.setattr(stage_module, "open_sinks", open_sinks)
    files = stages.run("sft", run={"steps": 1})
    assert json.loads(files.identity.read_text())["id"] == ids[0] != "sft"
    files.outcome.unlink()
    stages.run("sft", resume=True, run={"steps": 1})
    stages.run("sft", overwrite=True, run={"steps": 1})
    assert ids[0] == ids[1] != ids[2]


def test_no_file_of_a_stage_is_pickled(finished_sft: RunFiles) -> None:
    names = {path.name: path for path in finished_sft.root.rglob("*") if path.is_file()}
    assert {"model.safetensors", "state.safetensors", "state.json", "trainer_state.json"} <= names.keys()
    for path in names.values():
        assert path.suffix not in (".bin", ".pt", ".pth", ".pkl")
        assert not path.read_bytes().startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")), path


def test_a_damaged_checkpoint_is_not_read_as_a_pickle(stages: Stages, finished: RunFiles) -> None:
    finished.outcome.unlink()
    shutil.rmtree(finished.policy)
    (checkpoint,) = finished.stage.iterdir()
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"is damaged \(no weights as safetensors\); start again with --overwrite"):
        stages.run("sft", resume=True)


def test_a_policy_is_written_for_the_actor_and_read_as_a_run(
    stages: Stages, capsys: pytest.CaptureFixture[str]
) -> None:
    from quartet.models.weights.loading import load_causal_lm, stop_token_ids

    files = stages.run("sft", model={"lora": {"rank": 2}}, evaluation={"every_steps": 2})
    tokenizer = load_tokenizer(files.policy)
    assert tokenizer.chat_template == load_tokenizer(stages.toy / "base").chat_template
    assert tokenizer.eos_token_id in stop_token_ids(load_causal_lm(files.policy), tokenizer)
    assert files.policy_step() == 4
    assert files.is_finished(4)
    lines = read_step_lines(files.metrics)
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4]
    assert all(
        {"loss", "grad_norm", "learning_rate", "token_accuracy", "entropy", "tokens"} <= line.keys() for line in lines
    )
    output = capsys.readouterr().out
    assert "before training: validation_loss" in output
    assert f"policy: {files.policy}\nnext: quartet reward-model" in output


def test_a_finished_stage_is_neither_repeated_nor_overwritten(
    stages: Stages, finished: RunFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    files = finished
    before = (files.policy / "model.safetensors").stat().st_mtime_ns
    stages.run("sft", resume=True)
    assert "is finished: 4 of 4 steps" in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match="holds an earlier run; use --resume to continue it, --overwrite to replace it"
    ):
        stages.run("sft")
    assert (files.policy / "model.safetensors").stat().st_mtime_ns == before
    stages.run("sft", overwrite=True, run={"steps": 2})
    assert len(read_step_lines(files.metrics)) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"training": {"learning_rate": 0.5}},
            r"--resume: training\.learning_rate is 0\.5, the run in .* started with 0\.001",
        ),
        ({"data": {"train": "validation_pairs.jsonl"}}, r"--resume: data\.train is"),
        ({"run": {"steps": 9}}, r"--resume: run\.steps is 9, the run in .* started with 4"),
    ],
)
@pytest.mark.usefixtures("finished")
def test_a_stage_is_not_resumed_with_another_config(stages: Stages, changed: dict[str, Any], message: str) -> None:
    if "data" in changed:
        changed = {"data": {"train": str(stages.toy / "data" / changed["data"]["train"])}}
    with pytest.raises(ConfigError, match=message):
        stages.run("sft", resume=True, **changed)


def test_a_loss_that_is_not_finite_ends_the_stage(stages: Stages) -> None:
    with pytest.raises(ModelError, match=r"step \d: the loss is nan; lower training.learning_rate"):
        stages.run("sft", training={"learning_rate": 1e30, "max_grad_norm": 0})
    files = RunFiles(stages.folder / "runs/sft")
    assert not files.policy.exists()
    outcome = files.read_outcome()
    assert outcome is not None
    assert outcome.exit_status == 2


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def without_pad(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["pad_token"] = settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("stage", "spoil", "message"),
    [
        ("sft", without_template, "its tokenizer has no chat template"),
        ("reward-model", without_pad, "has no pad token besides EOS, .* as model.pad_token"),
    ],
)
def test_an_unsuitable_tokenizer_is_refused_before_anything_is_written(
    stages: Stages, stage: str, spoil: Callable[[Path], None], message: str
) -> None:
    model = stages.folder / "model"
    shutil.copytree(stages.toy / "base", model)
    spoil(model)
    with pytest.raises(ModelError, match=message):
        stages.run(stage, model={"path": str(model)})
    assert not (stages.folder / "runs").exists()


def test_a_pad_token_of_the_vocabulary_is_used(stages: Stages) -> None:
    model = stages.folder / "model"
    shutil.copytree(stages.toy / "base", model)
    without_pad(model)
    files = stages.run("reward-model", model={"path": str(model), "pad_token": "<pad>"}, run={"steps": 1})
    assert json.loads((files.reward / "config.json").read_text())["pad_token_id"] == 0
    with pytest.raises(ModelError, match=r"model\.pad_token <none>: not in the vocabulary"):
        stages.run("reward-model", overwrite=True, model={"path": str(model), "pad_token": "<none>"})


def test_a_gpu_that_is_missing_is_refused_before_anything_is_written(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"model\.device cuda: torch sees no GPU here; .* or remove model\.device"):
        stages.run("sft", model={"device": "cuda"})
    assert not (stages.folder / "runs").exists()


def test_a_config_of_another_command_is_refused(stages: Stages) -> None:
    path = stages.config("sft")
    with pytest.raises(ConfigError, match="stage is sft, expected reward-model; run quartet sft"):
        load_stage("reward-model", path)
    with pytest.raises(ConfigError, match="is of quartet sft, not of quartet train; run quartet sft"):
        load_config(path)
    for keys, message in (
        ({"training": {"learning_rat": 1}}, "training.learning_rat: unknown key; did you mean 'learning_rate'?"),
        ({"training": {"batch_size": 6}}, "training: batch_size 6: expected a multiple of micro_batch_size 4"),
        ({"training": {"center_rewards_coefficient": 1}}, "training.center_rewards_coefficient: unknown key"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_stage("sft", stages.config("sft", **keys))
        assert message in str(caught.value)


def test_a_missing_package_is_named_with_its_extra(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the package trl is not installed; .* pip install 'quartet-rlhf\[trl\]'"):
        check_stage(load_stage("sft", stages.config("sft")), print)
