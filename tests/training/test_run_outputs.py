"""Optional outputs of a run: token files, timeline, tokenizer and metric sinks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from quartet.cli.checkpoint.fork import fork
from quartet.demo.toy_task import ToyTask
from quartet.errors import ConfigError
from quartet.run_directory.checkpoints import roll_back
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.control.run_control import RunControl
from quartet.services.orchestrator.telemetry.run_outputs import RunTelemetry
from quartet.services.orchestrator.telemetry.step_profiler import StepProfiler
from quartet.services.orchestrator.training_run import TrainingRun
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, active_run, json_lines, orchestrator, run_to_completion, services, step_metrics
from tests.unit.telemetry.test_sinks import events, scalars, swanlab_history, wandb_history

STEPS = 3
SEQUENCES = 8
FULL = Path("/dev/full")


@pytest.fixture(scope="module")
def run(make: MakeConfig, toy_task: ToyTask) -> Run:
    """A run with a critic, a checkpoint after each step, and evaluations."""
    return run_to_completion(
        make(
            run={"steps": STEPS},
            rollout={"samples_per_prompt": 2},
            checkpoint={"every_steps": 1},
            data={"validation": str(toy_task.prompts)},
            evaluation={"every_steps": 2, "max_prompts": 2},
        )
    )


def tokens(files: RunFiles) -> dict[str, bytes]:
    result = files.tokens.iterdir() if files.tokens.exists() else []
    return {path.name: path.read_bytes() for path in sorted(result)}


def test_token_files_match_the_trajectories_of_their_step(run: Run) -> None:
    tokenizer = Tokenizer.from_file(str(run.files.tokenizer / "tokenizer.json"))
    for step in range(1, STEPS + 1):
        lines = run.trajectories(step)
        assert len(lines) == SEQUENCES
        for index, line in enumerate(lines):
            result = run.files.read_tokens(step, index)
            assert result is not None
            assert len(result.response_ids) == line["response_tokens"]
            assert tokenizer.decode(result.response_ids.tolist(), skip_special_tokens=True) == line["response"]
            assert tokenizer.decode(result.prompt_ids.tolist(), skip_special_tokens=False) == line["prompt"]
            np.testing.assert_array_equal(result.kl, result.log_probs - result.reference_log_probs)
            assert result.kl.sum() == pytest.approx(line["kl"], abs=1e-5)
            assert (result.log_probs <= 0).all()
            assert result.values is not None
            assert len(result.values) == len(result.advantages) == len(result.returns) == line["response_tokens"]
        step_tokens = load_file(run.files.tokens / f"step-{step:06d}.safetensors")
        metrics = run.metrics[step - 1]
        assert len(step_tokens["response_ids"]) == metrics["response_tokens"]
        assert len(step_tokens["prompt_ids"]) == metrics["prompt_tokens"]
        # The advantages are whitened. The variance of the value errors is the part that the critic does not explain.
        assert step_tokens["advantages"].mean() == pytest.approx(0, abs=1e-5)
        errors = np.var(step_tokens["returns"] - step_tokens["values"]) / np.var(step_tokens["returns"])
        assert 1 - errors == pytest.approx(metrics["explained_variance"], abs=1e-3)
        assert {str(array.dtype) for array in step_tokens.values()} == {"int32", "float32"}


def test_the_timeline_has_every_service_of_every_step(run: Run) -> None:
    lines = json_lines(run.files.timeline)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        spans = line["spans"]
        assert {(span["service"], span["phase"]) for span in spans} - {
            ("actor", "checkpoint"),
            ("critic", "checkpoint"),
            ("orchestrator", "checkpoint"),
            ("redis", "discard"),
        } == {
            ("orchestrator", "wait"),
            ("redis", "lease"),
            ("actor", "generate"),
            ("reward", "score"),
            ("reference", "log_probs"),
            ("critic", "values"),
            ("orchestrator", "prepare"),
            ("redis", "seal"),
            ("actor", "update"),
            ("critic", "update"),
            ("orchestrator", "commit"),
            ("redis", "acknowledge"),
        }
        assert all(0 <= span["start"] <= span["end"] <= line["seconds"] + 1e-3 for span in spans)
        # Batches of 4, without those of evaluations.
        for service in ("reward", "reference"):
            assert sum(span["count"] for span in spans if span["service"] == service) == SEQUENCES // 4
        by_kind = {(span["service"], span["phase"]): span for span in spans}
        order = [
            ("actor", "generate"),
            ("orchestrator", "prepare"),
            ("redis", "seal"),
            ("actor", "update"),
            ("orchestrator", "commit"),
            ("redis", "acknowledge"),
        ]
        starts = [by_kind[kind]["start"] for kind in order]
        assert starts == sorted(starts)
        assert by_kind["actor", "generate"]["end"] <= by_kind["orchestrator", "prepare"]["start"]
        assert list(spans) == sorted(spans, key=lambda span: (span["service"], span["start"]))
    # The checkpoint of a step is written during the next one.
    for line in lines[1:]:
        assert {"wait", "checkpoint"} & {span["phase"] for span in line["spans"] if span["service"] == "orchestrator"}
    assert lines[0]["started"] < lines[1]["started"] < lines[2]["started"] < run.files.timeline.stat().st_mtime


def test_tensorboard_has_every_metric_of_every_step(run: Run) -> None:
    result = {(step, name): value for step, name, value in scalars(run.files.tensorboard)}
    expected = {
        (int(metrics["step"]), f"train/{name}"): value
        for metrics in run.metrics
        for name, value in metrics.items()
        if name != "step"
    } | {
        (int(summary["step"]), f"evaluation/{name}"): value
        for summary in json_lines(run.files.evaluation_summaries)
        for name, value in summary.items()
        if name not in ("step", "policy_version")
    }
    assert result.keys() == expected.keys()
    assert result == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert not [note for note in run.progress.notes if "TensorBoard" in note]


def test_rolled_back_outputs_are_dropped_and_written_again(make: MakeConfig) -> None:
    config = make(run={"steps": 4}, checkpoint={"every_steps": 2})
    first = run_to_completion(config)
    files, before = first.files, tokens(first.files)
    assert len(before) == 4
    roll_back(files, 2)
    assert list(tokens(files)) == ["step-000001.safetensors", "step-000002.safetensors"]
    assert [line["step"] for line in json_lines(files.timeline)] == [1, 2]
    second = run_to_completion(config)
    assert step_metrics(second) == step_metrics(first)
    assert tokens(files) == before
    assert [line["step"] for line in json_lines(files.timeline)] == [1, 2, 3, 4]
    # Markers that tell TensorBoard to discard later steps.
    marks = [event.step for event in events(files.tensorboard) if event.session_log.status]
    assert marks == [1, 3]


def test_a_fork_keeps_the_timeline_and_no_tokens(run: Run) -> None:
    fork(run.files.root, "2", f"{run.files.root.name}-fork", [])
    new = RunFiles(run.files.root.with_name(f"{run.files.root.name}-fork"))
    assert json_lines(new.timeline) == json_lines(run.files.timeline)[:2]
    assert tokens(new) == {}


def test_tokens_are_kept_for_the_configured_steps(make: MakeConfig) -> None:
    telemetry = {"tokens_every_steps": 2, "tokens_keep_steps": 1}
    assert list(tokens(run_to_completion(make(run={"steps": 5}, telemetry=telemetry)).files)) == [
        "step-000004.safetensors"
    ]


def test_a_run_with_an_adapter_and_without_a_critic_has_no_values(make: MakeConfig) -> None:
    run = run_to_completion(
        make(
            run={"steps": 1},
            algorithm={"estimator": "rloo"},
            rollout={"samples_per_prompt": 2},
            actor={"lora": {"rank": 2}},
        )
    )
    result = run.files.read_tokens(1, 0)
    assert result is not None
    assert result.values is None
    (line,) = json_lines(run.files.timeline)
    kinds = {(span["service"], span["phase"]) for span in line["spans"]}
    assert ("actor", "log_probs") in kinds
    assert not {service for service, _ in kinds} & {"critic", "reference"}


def test_disabled_outputs_leave_no_files(make: MakeConfig) -> None:
    telemetry = {"tokens_every_steps": 0, "timeline": False, "tensorboard": False}
    files = run_to_completion(make(run={"steps": 1}, telemetry=telemetry)).files
    assert not files.tokens.exists()
    assert not files.timeline.exists()
    assert not files.tensorboard.exists()


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_a_full_disk_loses_tokens_and_timeline_but_not_the_run(make: MakeConfig) -> None:
    config = make(run={"steps": 2})
    with services(config) as addressed:
        files = RunFiles(config.run_directory)
        files.tokens.mkdir()
        for step in (1, 2):
            (files.tokens / f".step-{step:06d}.safetensors.partial").symlink_to(FULL)
        files.timeline.symlink_to(FULL)
        files.tensorboard.write_text("a file instead of the folder")
        (files.root / ".tokenizer.writing").write_text("a file instead of the folder")
        with orchestrator(addressed) as running:
            run = running.finish()
    assert run.code == 0, run.progress.error
    assert len(run.metrics) == 2
    assert tokens(files) == {}
    for prefix in (
        "tokens: cannot be written",
        "timeline: cannot be written",
        "tokenizer: cannot be written",
        "TensorBoard: ",
    ):
        assert len([note for note in run.progress.notes if note.startswith(prefix)]) == 1, run.progress.notes


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_a_full_disk_loses_the_tokenizer_but_not_the_run(run: Run, make: MakeConfig) -> None:
    tokenizer = Tokenizer.from_file(str(run.files.tokenizer / "tokenizer.json"))

    class FullDiskTokenizer:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "tokenizer.json").symlink_to(FULL)
            # Raises an exception of the Rust library, which is not an OSError.
            tokenizer.save(str(folder / "tokenizer.json"))

    config = make()
    files, board = RunFiles(config.run_directory), ProgressBoard("run", 2)
    files.root.mkdir(parents=True)
    telemetry = RunTelemetry(config, files, board, StepProfiler())
    for _ in range(2):
        telemetry.start(FullDiskTokenizer(), "an-id")
    telemetry.close()
    notes = [note for note in board.current().notes if note.startswith("tokenizer: cannot be written (")]
    assert len(notes) == 1
    assert "No space left on device" in notes[0]
    assert not files.tokenizer.exists()


@pytest.mark.parametrize(
    ("package", "settings"),
    [
        ("wandb", {"project": "p"}),
        ("mlflow", {"tracking_uri": "u"}),
        ("trackio", {"project": "p"}),
        ("swanlab", {"project": "p"}),
    ],
)
def test_a_sink_whose_package_is_missing_ends_the_run_before_its_first_step(
    make: MakeConfig, package: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    config = make(telemetry={package: settings})
    control = RunControl(RunFiles(config.run_directory), persist=False)
    with services(config) as addressed, pytest.raises(ConfigError, match=rf"pip install 'quartet-rlhf\[{package}\]'"):
        TrainingRun(addressed, addressed.buffer.url or "", ProgressBoard("run", 2), control)
    assert not RunFiles(config.run_directory).metrics.exists()


def test_the_tokenizer_of_the_run_is_not_overwritten(make: MakeConfig) -> None:
    config = make(run={"steps": 1})
    files = RunFiles(config.run_directory)
    with active_run(config) as running:
        running.finish()
    path = files.tokenizer / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": "1.0"}))
    before = path.stat().st_mtime_ns
    run_to_completion(config)
    assert path.stat().st_mtime_ns == before


def test_a_run_reports_to_wandb_and_mlflow(make: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("WANDB_MODE", "offline")
    uri = str(tmp_path / "mlruns")
    run = run_to_completion(make(telemetry={"wandb": {"project": "tests"}, "mlflow": {"tracking_uri": uri}}))
    assert not [note for note in run.progress.notes if "sends it nothing more" in note]
    (history,) = (run.files.logs / "wandb").glob("offline-run-*/*.wandb")
    assert [row["step"] for row in wandb_history(history)] == ["1", "2"]
    client = mlflow.MlflowClient(tracking_uri=uri)
    (mlflow_run,) = client.search_runs([client.get_experiment_by_name("quartet").experiment_id])
    assert mlflow_run.data.params["run.name"] == run.files.root.name
    result = client.get_metric_history(mlflow_run.info.run_id, "train/reward_mean")
    assert [(metric.step, metric.value) for metric in result] == [
        (metrics["step"], metrics["reward_mean"]) for metrics in run.metrics
    ]


def test_a_run_reports_to_trackio(make: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The library reads the folder at its first import, which another test may have done.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    project = tmp_path.name.replace("_", "-")
    run = run_to_completion(make(telemetry={"trackio": {"project": project}}))
    assert not [note for note in run.progress.notes if "sends it nothing more" in note]
    (tracked,) = trackio.Api().runs(project)
    assert tracked.config["run"]["name"] == run.files.root.name
    rows = SQLiteStorage.get_logs(project, tracked.name)
    assert [(row["step"], row["train/reward_mean"]) for row in rows if "train/reward_mean" in row] == [
        (metrics["step"], metrics["reward_mean"]) for metrics in run.metrics
    ]


def test_a_run_reports_to_swanlab(make: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path))
    run = run_to_completion(make(telemetry={"swanlab": {"project": "tests"}}))
    assert not [note for note in run.progress.notes if "sends it nothing more" in note]
    (folder,) = (run.files.logs / "swanlog").glob("run-*")
    history = swanlab_history(folder)
    assert [row[1:] for row in history if row[0] == "train/reward_mean"] == [
        (metrics["step"], pytest.approx(metrics["reward_mean"])) for metrics in run.metrics
    ]
