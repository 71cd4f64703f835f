"""Metric sinks: order, failures and delays. The run continues in every case."""

from __future__ import annotations

import json
import math
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from quartet.config.telemetry import MLflowConfig, SwanLabConfig, TrackioConfig, WandbConfig
from quartet.contract.control import Alert
from quartet.telemetry.sinks.background import Sinks
from quartet.telemetry.sinks.sink import Sink
from quartet.telemetry.sinks.tensorboard import TensorBoard
from tests.waiting import LIMIT

ALERT = Alert(step=3, guard="entropy", action="note", evidence="entropy is 0.01", remedy="Raise the temperature")


class Recorder:
    """Sink that records its calls, and fails at the call that the test names."""

    def __init__(self, fails_at: str = "", gate: threading.Event | None = None) -> None:
        self.calls: list[Any] = []
        self._fails_at, self._gate = fails_at, gate

    def _record(self, what: str, *rest: Any) -> None:
        if self._gate is not None:
            assert self._gate.wait(LIMIT)
        if what == self._fails_at:
            raise RuntimeError(f"{what} is refused")
        self.calls.append((what, *rest))

    def continues_from(self, step: int) -> None:
        self._record("continues_from", step)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._record("step", step, dict(metrics))

    def evaluation(self, step: int, summary: Mapping[str, float]) -> None:
        self._record("evaluation", step, dict(summary))

    def alert(self, alert: Alert) -> None:
        self._record("alert", alert)

    def close(self) -> None:
        self._record("close")


def send_all(sinks: Sinks) -> None:
    sinks.continues_from(2)
    sinks.step(3, {"reward_mean": 0.5})
    sinks.alert(ALERT)
    sinks.evaluation(3, {"eval_kl": 0.1})
    sinks.close()


CALLS = [
    ("continues_from", 2),
    ("step", 3, {"reward_mean": 0.5}),
    ("alert", ALERT),
    ("evaluation", 3, {"eval_kl": 0.1}),
    ("close",),
]


def test_every_sink_gets_every_metric_in_order() -> None:
    first, second, notes = Recorder(), Recorder(), list[str]()
    sinks = Sinks({"first": lambda: first, "second": lambda: second}, notes.append)
    send_all(sinks)
    sinks.close()
    sinks.step(4, {})
    assert first.calls == second.calls == CALLS
    assert notes == []


@pytest.mark.parametrize("fails_at", ["continues_from", "step", "alert", "evaluation", "close"])
def test_a_failing_sink_is_reported_once_and_dropped(fails_at: str) -> None:
    broken, intact, notes = Recorder(fails_at), Recorder(), list[str]()
    send_all(Sinks({"broken": lambda: broken, "intact": lambda: intact}, notes.append))
    names = [call[0] for call in CALLS]
    assert [call[0] for call in broken.calls] == names[: names.index(fails_at)]
    assert intact.calls == CALLS
    assert notes == [f"broken: RuntimeError: {fails_at} is refused; the run continues and sends it nothing more"]


def test_an_unreachable_sink_is_reported_and_dropped() -> None:
    intact, notes = Recorder(), list[str]()

    def unreachable() -> Sink:
        raise ConnectionError("no such host")

    send_all(Sinks({"away": unreachable, "intact": lambda: intact}, notes.append))
    assert intact.calls == CALLS
    assert notes == ["away: ConnectionError: no such host; the run continues and sends it nothing more"]


def test_a_slow_sink_loses_metrics_and_never_delays_the_run() -> None:
    gate, notes = threading.Event(), list[str]()
    slow = Recorder(gate=gate)
    sinks = Sinks({"slow": lambda: slow}, notes.append, max_queued=4)
    for step in range(1, 51):
        sinks.step(step, {})
    assert notes == ["slow: slower than the run; some metrics are missing there"]
    sinks.close(0.05)
    assert notes[1:] == ["slow: not finished after 0.05 s; the last metrics may be missing there"]
    gate.set()
    sinks._thread.join(LIMIT)
    assert not sinks._thread.is_alive()
    assert slow.calls[0] == ("step", 1, {})
    assert slow.calls[-1] == ("close",)


def test_without_sinks_there_is_no_thread() -> None:
    sinks = Sinks({}, lambda text: None)
    send_all(sinks)
    assert not sinks._thread.is_alive()


def events(folder: Path) -> Iterator[Any]:
    """Yield every event below a folder, with an implementation of the format that is independent of the writer."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            record, data = data[: length + 16], data[length + 16 :]
            assert struct.unpack("<I", record[8:12]) == (masked_crc(record[:8]),)
            assert struct.unpack("<I", record[-4:]) == (masked_crc(record[12:-4]),)
            yield Event.FromString(record[12:-4])


def masked_crc(data: bytes) -> int:
    """Return CRC-32C (Castagnoli), computed bit by bit, masked as in TFRecord files."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    return [
        (event.step, value.tag, value.simple_value)
        for event in events(folder)
        for value in event.summary.value
        if value.HasField("simple_value")
    ]


def test_tensorboard_files_contain_the_metrics(tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    send_all(Sinks({"TensorBoard": lambda: TensorBoard(folder)}, pytest.fail))
    assert scalars(folder) == [
        (3, "train/reward_mean", 0.5),
        (3, "evaluation/eval_kl", pytest.approx(0.1)),
    ]
    first, second, _, alert, _ = events(folder)
    assert first.file_version == "brain.Event:2"
    assert (second.step, second.session_log.status) == (3, second.session_log.START)
    assert alert.summary.value[0].tag.startswith("alerts/entropy")
    assert alert.summary.value[0].tensor.string_val == [b"entropy is 0.01. Raise the temperature (note)"]


def test_a_resumed_run_writes_a_new_tensorboard_file(tmp_path: Path) -> None:
    for step in (1, 2):
        board = TensorBoard(tmp_path)
        board.continues_from(step - 1)
        board.step(step, {"loss": float(step), "nothing": math.nan})
        board.close()
    assert len(list(tmp_path.iterdir())) == 2
    result = scalars(tmp_path)
    assert [(step, tag) for step, tag, _ in result] == [
        (step, f"train/{name}") for step in (1, 2) for name in ("loss", "nothing")
    ]
    assert math.isnan(result[1][2])


CONFIG = {"run": {"name": "name", "steps": 3}, "actor": {"model": "m"}}


def resume_run(open_sink: Callable[[], Sink]) -> None:
    """Send the messages of a run that stopped after step 2, repeated it and continued to step 3."""
    for steps in ((1, 2), (2, 3)):
        sink = open_sink()
        sink.continues_from(steps[0] - 1)
        for step in steps:
            sink.step(step, {"step": step, "reward_mean": step / 2, "approx_kl": math.nan})
        sink.alert(ALERT)
        sink.evaluation(steps[1], {"eval_kl": 0.25})
        sink.close()


def test_a_resumed_run_continues_its_mlflow_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    from quartet.telemetry.sinks.mlflow_tracking import MLflow

    settings = MLflowConfig(tracking_uri=str(tmp_path / "mlruns"), experiment="tests")
    resume_run(lambda: MLflow(settings, "name", "0123abc", CONFIG))
    client = mlflow.MlflowClient(tracking_uri=settings.uri)
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "name"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"run.name": "name", "run.steps": "3", "actor.model": "m"}
    assert run.data.tags["alert.3.entropy"] == "entropy is 0.01. Raise the temperature"
    rewards = client.get_metric_history(run.info.run_id, "train/reward_mean")
    assert {(metric.step, metric.value) for metric in rewards} == {(1, 0.5), (2, 1.0), (3, 1.5)}
    (evaluation, _) = client.get_metric_history(run.info.run_id, "evaluation/eval_kl")
    assert evaluation.value == 0.25


def test_wandb_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from quartet.telemetry.sinks.weights_and_biases import WeightsAndBiases

    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WeightsAndBiases(WandbConfig(project="tests"), "name", "0123abc", CONFIG, tmp_path)
    sink.continues_from(0)
    for step in (1, 2, 3):
        sink.step(step, {"step": step, "reward_mean": step / 2, "approx_kl": math.nan})
    sink.alert(ALERT)
    sink.evaluation(3, {"eval_kl": 0.25})
    sink.close()
    (file,) = (tmp_path / "wandb").glob("offline-run-*-0123abc/*.wandb")
    rows = wandb_history(file)
    assert [(row["step"], row["train/reward_mean"]) for row in rows[:3]] == [("1", "0.5"), ("2", "1"), ("3", "1.5")]
    assert (rows[3]["step"], rows[3]["evaluation/eval_kl"]) == ("3", "0.25")


def wandb_history(path: Path) -> list[dict[str, str]]:
    """Read the logged values, as JSON by name, from the library's file, which has the format of a LevelDB log."""
    from wandb.proto import wandb_internal_pb2

    data, offset, record, rows = path.read_bytes(), 7, b"", []
    while offset < len(data):
        if 32768 - offset % 32768 < 7:  # The rest of the block is too small for a header.
            offset += 32768 - offset % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[offset : offset + 7])
        record += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # A complete record, or its last part.
            history = wandb_internal_pb2.Record.FromString(record).history
            rows.append({item.key or item.nested_key[0]: item.value_json for item in history.item})
            record = b""
    return [row for row in rows if row]


def test_a_resumed_run_continues_its_trackio_run_without_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library reads the folder at its first import, which another test may have done.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    from quartet.telemetry.sinks.trackio_tracking import Trackio

    project = tmp_path.name.replace("_", "-")
    resume_run(lambda: Trackio(TrackioConfig(project=project), "name", "0123abc", CONFIG))
    (run,) = trackio.Api().runs(project)
    assert run.name == "name-0123abc"
    assert run.config["actor"] == {"model": "m"}
    assert run.config["_Group"] == "name"
    assert run.alerts()[0]["text"] == "entropy is 0.01. Raise the temperature"
    rows = SQLiteStorage.get_logs(project, run.name)
    rewards = [(row["step"], row["train/reward_mean"]) for row in rows if "train/reward_mean" in row]
    assert rewards == [(1, 0.5), (2, 1.0), (3, 1.5)]
    evaluations = [(row["step"], row["evaluation/eval_kl"]) for row in rows if "evaluation/eval_kl" in row]
    assert evaluations == [(2, 0.25), (3, 0.25)]


def test_a_resumed_run_keeps_its_swanlab_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    from quartet.telemetry.sinks.swanlab_tracking import SwanLab

    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "root"))
    resume_run(lambda: SwanLab(SwanLabConfig(project="tests"), "name", "0123abc", CONFIG, tmp_path))
    first, second = sorted((tmp_path / "swanlog").glob("run-*-0123abc"))
    rewards = [row[1:] for row in (*swanlab_history(first), *swanlab_history(second)) if row[0] == "train/reward_mean"]
    assert rewards == [(1, 0.5), (2, 1.0), (2, 1.0), (3, 1.5)]
    assert ("evaluation/eval_kl", 3, 0.25) in swanlab_history(second)
    (alert,) = (second / "media" / "text").iterdir()
    assert alert.read_text() == "entropy is 0.01. Raise the temperature"
    assert json.loads((first / "files" / "swanlab-metadata.json").read_text())["hardware"] is None


def swanlab_history(folder: Path) -> list[tuple[str, int, float]]:
    """Read name, step and value of the logged metrics from the library's file, as `swanlab sync` does."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (path,) = folder.glob("*.swanlab")
    reader = DataStoreReader()
    reader.open(path)
    records = [Record.FromString(data) for data in reader]
    reader.close()
    return [(r.scalar.key, r.scalar.step, r.scalar.value.number) for r in records if r.HasField("scalar")]
