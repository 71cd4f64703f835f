"""Prompts from data sets of Hugging Face: folders on this machine, and a hub that a fake replaces."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quartet.config.loading import config_of
from quartet.data import prompt_datasets
from quartet.data.prompt_cache import set_contents
from quartet.data.prompt_datasets import cached_rows_file, rows_file
from quartet.data.prompt_lines import iterate_prompts
from quartet.data.prompt_settings import PromptSettings
from quartet.errors import ConfigError, DataError
from tests.waiting import LIMIT

COMMIT = "0123456789" * 4


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUARTET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    return tmp_path / "cache/datasets"


def settings_of(dataset: str | Path, **given: Any) -> PromptSettings:
    tree = {
        "data": {"sets": [{"name": "one", "dataset": str(dataset), **given}]},
        "actor": {"model": "a"},
        "reward": {"model": "b"},
    }
    return PromptSettings.for_training(config_of(tree))[0]


def texts(settings: PromptSettings) -> list[str | None]:
    return [line.text for line in iterate_prompts(settings, rows_file(settings).path)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a split of two Parquet files and one of JSON Lines."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "sums"
    folder.mkdir()
    for part in range(2):
        table = pyarrow.table({"question": [f"{part}+{n}" for n in range(3)], "answer": [part + n for n in range(3)]})
        parquet.write_table(table, folder / f"train-0000{part}-of-00002.parquet")
    return folder


def test_a_split_of_a_local_folder_is_read_in_order(folder: Path) -> None:
    settings = settings_of(folder, columns={"prompt": "question"})
    assert cached_rows_file(settings) is None
    assert texts(settings) == ["0+0", "0+1", "0+2", "1+0", "1+1", "1+2"]
    [first, *_] = iterate_prompts(settings, rows_file(settings).path)
    assert json.loads(first.fields) == {"prompt": "0+0", "answer": 0, "prompt_set": "one"}
    assert settings.location(3) == f"prompts {folder} (train) row 3"


def test_the_rows_are_read_once_and_again_after_a_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(folder)
    path = rows_file(settings).path
    assert cached_rows_file(settings) == path
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "datasets", None)
        assert rows_file(settings).path == path
        (folder / "train-00001-of-00002.parquet").unlink()
        assert cached_rows_file(settings) is None
        with pytest.raises(ConfigError, match=r"datasets is not installed; run pip install 'quartet-rlhf\[datasets\]'"):
            rows_file(settings)
    (folder / "train-00000-of-00002.parquet").rename(folder / "train.parquet")
    assert len(rows_file(settings).path.read_text().splitlines()) == 3


@pytest.mark.slow
def test_a_process_that_must_not_import_torch_reads_data_sets(folder: Path) -> None:
    settings = json.dumps(settings_of(folder, columns={"text": "question"}).to_json())
    program = (
        "import json, sys\nsys.modules['torch'] = None\nfrom quartet.data.prompt_settings import PromptSettings\n"
        "from quartet.data.prompt_datasets import rows_file\n"
        "print(rows_file(PromptSettings.from_json(json.loads(sys.argv[1]))).path)\n"
        "assert sys.modules['torch'] is None"
    )
    result = subprocess.run([sys.executable, "-c", program, settings], capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == 0, result.stderr
    assert len(Path(result.stdout.strip()).read_text().splitlines()) == 6


def test_take_bounds_the_rows_that_are_read(folder: Path) -> None:
    (folder / "train-00001-of-00002.parquet").write_bytes(b"this file is never opened")
    assert texts(settings_of(folder, columns={"text": "question"}, take=2)) == ["0+0", "0+1"]


def test_without_a_cache_rows_are_read_into_a_temporary_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARTET_CACHE", "")
    assert len(rows_file(settings_of(folder)).path.read_text().splitlines()) == 6


def test_a_data_set_that_was_saved_to_the_disk_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["a", "b"], "n": [1, None]})})
    saved.save_to_disk(str(tmp_path / "saved"))
    assert texts(settings_of(tmp_path / "saved", split="test")) == ["a", "b"]
    saved["test"].save_to_disk(str(tmp_path / "single"))
    assert texts(settings_of(tmp_path / "single")) == ["a", "b"]
    with pytest.raises(DataError, match=r"has no split train, but test"):
        rows_file(settings_of(tmp_path / "saved"))


def test_a_configuration_is_chosen_by_the_folder_s_card(tmp_path: Path) -> None:
    folder = tmp_path / "cards"
    for name in ("easy", "hard"):
        (folder / name).mkdir(parents=True)
        (folder / name / "data.jsonl").write_text(json.dumps({"text": name}) + "\n")
    configs = "\n".join(f"- config_name: {name}\n  data_files: {name}/*.jsonl" for name in ("easy", "hard"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}\n---\n")
    assert texts(settings_of(folder, config="hard")) == ["hard"]
    with pytest.raises(DataError, match=r"data\.sets\.one: .*cards \(train\): cannot be read \(Config name is missing"):
        rows_file(settings_of(folder))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.py", "raise SystemExit('executed')", r"cannot be read"),
        ("train.pkl", "pickled", r"cannot be read"),
        ("train/a.png", "image", r"its format is imagefolder; expected one of arrow, csv, json, parquet, text"),
    ],
)
def test_code_pickles_and_media_are_refused(name: str, content: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    path = tmp_path / "set" / name
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(DataError, match=rf"data\.sets\.one: .*set \(train\): {message}"):
        rows_file(settings_of(tmp_path / "set"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"text": "a", "bytes": b"1"},
            r"row 2: column bytes cannot be read as JSON \(bytes of length 1, which JSON lacks",
        ),
        ({"text": "a", "bytes": float("nan")}, r"row 2: column bytes cannot be read as JSON \(Out of range float"),
    ],
)
def test_a_value_that_json_lacks_is_named_by_row_and_column(
    row: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "set").mkdir()
    monkeypatch.setattr(prompt_datasets, "_rows", lambda *_: iter([{"text": "a"}, row]))
    with pytest.raises(DataError, match=message):
        rows_file(settings_of(tmp_path / "set"))
    assert texts(settings_of(tmp_path / "set", ignore_columns=["bytes"])) == ["a", "a"]


def test_rows_that_fail_half_way_leave_no_file(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield {"text": "a"}
        raise TimeoutError("the server went away")

    (tmp_path / "set").mkdir()
    monkeypatch.setattr(prompt_datasets, "_rows", lambda *_: rows())
    with pytest.raises(DataError, match=r"cannot be read \(the server went away\)"):
        rows_file(settings_of(tmp_path / "set"))
    assert list(cache.iterdir()) == []


def test_rows_beyond_the_limits_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    monkeypatch.setattr(prompt_datasets, "_rows", lambda *_: iter([{"text": "a" * 100}] * 100))
    monkeypatch.setattr(prompt_datasets, "MAX_LINE_BYTES", 64)
    with pytest.raises(DataError, match=r"row 1: has 112 bytes, expected at most 64"):
        rows_file(settings_of(tmp_path / "set"))
    monkeypatch.setattr(prompt_datasets, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(prompt_datasets, "MAX_ROWS_BYTES", 1000)
    with pytest.raises(DataError, match=r"its rows have more than 1000 bytes; set take"):
        rows_file(settings_of(tmp_path / "set"))


class Hub:
    """A hub whose branch main moves with every commit."""

    def __init__(self) -> None:
        self.commit, self.read = COMMIT, list[str | None]()

    def dataset_info(self, name: str, revision: str | None, timeout: float) -> SimpleNamespace:
        assert name == "owner/sums"
        return SimpleNamespace(sha=self.commit)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    hub = Hub()

    def rows(settings: PromptSettings, source: Any) -> Iterator[dict[str, Any]]:
        hub.read.append(source.revision)
        yield {"text": f"of {source.revision[:2]}"}

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(prompt_datasets, "_rows", rows)
    return hub


def test_a_resumed_run_reads_the_recorded_commit_although_the_branch_has_moved(hub: Hub) -> None:
    tree = {
        "data": {"sets": [{"name": "one", "dataset": "owner/sums"}]},
        "actor": {"model": "a"},
        "reward": {"model": "b"},
    }
    config = config_of(tree)
    started = set_contents(config)
    assert started["data.sets.one"].revision == COMMIT
    hub.commit = "ff" * 20
    assert set_contents(config)["data.sets.one"].revision == hub.commit
    resumed = set_contents(config, {"data.sets.one": COMMIT})
    assert resumed == started
    [settings] = PromptSettings.for_training(config, {"data.sets.one": COMMIT})
    assert texts(settings) == ["of 01"]
    assert hub.read == [COMMIT, hub.commit]


def test_a_commit_in_the_cache_needs_no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of("owner/sums", revision=COMMIT)
    path = rows_file(settings).path
    monkeypatch.setattr(hub, "dataset_info", None)
    assert cached_rows_file(settings) == rows_file(settings).path == path
    assert cached_rows_file(settings_of("owner/sums")) is None


def test_a_hub_that_cannot_be_reached_is_reported(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(hub, "dataset_info", refuse)
    with pytest.raises(DataError, match=r"no folder owner/sums, and the hub cannot be reached \(no route to host\)"):
        rows_file(settings_of("owner/sums"))


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.sets\.one: .*absent: no such folder"):
        rows_file(settings_of(tmp_path / "absent"))
