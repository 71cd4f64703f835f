"""A run's directory: one run at a time, and nothing of anyone else's removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.errors import ConfigError
from quartet.telemetry.run_files import RunFiles, find_run, read_metrics


def leave_a_run(files: RunFiles) -> None:
    files.write_config("run: {}\n")
    files.append_metrics({"step": 1})
    files.write_trajectories(1, [{"id": "a"}])
    files.write_evaluation(0, {"eval_kl": 0.0}, [{"index": 0}])
    files.write_poison(1, [{"step": 1}])
    (files.root / "thesis.tex").write_text("mine")


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


RUN = [
    "config.yaml",
    "evaluations",
    "evaluations.jsonl",
    "logs",
    "metrics.jsonl",
    "poison.jsonl",
    "thesis.tex",
    "trajectories",
]


def test_a_directory_has_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        RunFiles(tmp_path / "run").claimed(),
        pytest.raises(ConfigError, match="a run is going on there"),
        RunFiles(tmp_path / "run").claimed(),
    ):
        pass
    with RunFiles(tmp_path / "run").claimed():
        pass


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"), RunFiles(tmp_path / "run").claimed():
        pass


def test_a_name_that_the_system_refuses_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"), RunFiles(tmp_path / ("x" * 300)).claimed():
        pass


def test_an_earlier_run_comes_back_unless_it_is_forgotten(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    leave_a_run(files)
    files.set_aside()
    assert names(tmp_path) == [".earlier", "thesis.tex"]
    files.write_config("run: {name: new}\n")
    files.restore()
    assert names(tmp_path) == RUN
    assert "new" not in files.config.read_text()
    files.set_aside()
    files.forget()
    files.restore()
    assert names(tmp_path) == ["thesis.tex"]


def test_what_is_not_a_runs_is_never_set_aside(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("foo: bar\n")
    (tmp_path / "policy").mkdir()
    with pytest.raises(ConfigError, match="is not of a run of Quartet's"):
        RunFiles(tmp_path).set_aside()
    assert names(tmp_path) == ["config.yaml", "policy"]


def test_a_used_directory_is_refused(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.check_unused()
    files.append_metrics({"step": 1, "reward_mean": 0.5})
    with pytest.raises(ConfigError, match="--overwrite"):
        files.check_unused()
    assert read_metrics(files.metrics) == [{"step": 1, "reward_mean": 0.5}]


def test_a_damaged_metrics_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: not JSON"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_an_evaluation_leaves_its_rows_and_a_line_of_its_means(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    first, second = [{"index": 0, "sampled": "a\u2028b\n"}, {"index": 3, "sampled": ""}], [{"index": 0, "sampled": "c"}]
    files.write_evaluation(0, {"eval_kl": 0.0}, first)
    files.write_evaluation(20, {"eval_kl": 1.5}, second)
    assert files.read_evaluation(0) == first
    assert files.read_evaluation(20) == second
    assert names(tmp_path / "evaluations") == ["step-000000.jsonl", "step-000020.jsonl"]
    assert read_metrics(tmp_path / "evaluations.jsonl") == [{"step": 0, "eval_kl": 0.0}, {"step": 20, "eval_kl": 1.5}]


def test_an_evaluation_that_is_repeated_replaces_what_an_earlier_attempt_left(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    for step in (0, 5, 10):
        files.write_evaluation(step, {"eval_kl": step / 10}, [])
    files.write_evaluation(5, {"eval_kl": 9.0}, [])
    assert read_metrics(tmp_path / "evaluations.jsonl") == [{"step": 0, "eval_kl": 0.0}, {"step": 5, "eval_kl": 9.0}]


def test_poison_of_a_step_that_is_taken_again_is_written_once(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.write_poison(1, [])
    assert not files.poison.exists(), "a run without any has no such file"
    files.write_poison(1, [{"step": 1, "id": "a", "response": "x\u2028y\n"}])
    files.write_poison(3, [{"step": 3, "id": "b"}, {"step": 3, "id": "c"}])
    files.write_poison(3, [{"step": 3, "id": "c"}])
    assert read_metrics(files.poison) == [
        {"step": 1, "id": "a", "response": "x\u2028y\n"},
        {"step": 3, "id": "c"},
    ]
    files.write_poison(3, [])
    assert [line["step"] for line in read_metrics(files.poison)] == [1]


def test_poison_of_forgotten_steps_is_forgotten(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    for step in (1, 2, 4):
        files.write_poison(step, [{"step": step, "id": str(step)}])
    files.forget_after(2)
    assert [line["step"] for line in read_metrics(files.poison)] == [1, 2]


@pytest.mark.parametrize(("contents", "reason"), [(None, "No such file or directory"), ("{\n", "not JSON Lines")])
def test_an_evaluation_that_cannot_be_read_back_is_an_error(contents: str | None, reason: str, tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    if contents is not None:
        files.write_evaluation(0, {}, [])
        (tmp_path / "evaluations/step-000000.jsonl").write_text(contents)
    with pytest.raises(ConfigError, match=rf"step-000000\.jsonl: cannot be read \({reason}\)"):
        files.read_evaluation(0)


def test_the_run_of_a_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RunFiles(tmp_path / "runs/a")
    files.write_config("run: {}\n")
    (tmp_path / "config.yaml").write_text("foo: bar\n")
    for inside in ("policy", "checkpoints/step-000020/actor"):
        found = find_run(tmp_path / "runs/a" / inside)
        assert found is not None
        assert found.root == files.root
    monkeypatch.chdir(files.root)
    found = find_run(Path("policy"))
    assert found is not None
    assert found.root == files.root
    assert find_run(tmp_path / "runs/b/policy") is None
