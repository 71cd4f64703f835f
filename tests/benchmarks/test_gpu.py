"""The last table of the benchmark gpu, and the flags of its benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, machine, random_models
from quartet.models import torch_settings


def write(folder: Path, name: str, report: dict[str, Any]) -> None:
    (folder / name).mkdir()
    (folder / name / "results.json").write_text(json.dumps(report))


def test_the_table_has_rates_shares_and_step_times_of_all_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"quartet": [900, 1000, 1100], "generate()": [100] * 3, "continuous batching": [400] * 3}
    results = [{"prompts": 128, "rates": rates, "memory_limit": 4000.0}]
    write(tmp_path, "generation", {"machine": "a GPU", "results": results})
    write(tmp_path, "update", {"peak": 1e12, "results": [{"name": "policy", "flops": 8e11, "packed": [2.0]}]})
    pairs = [{"quartet": {"seconds": 2.0}, "trl": {"seconds": 9.0}}]
    write(tmp_path, "end-to-end", {"machine": "a GPU", "configs/gpu/ppo.yaml": pairs})
    write(tmp_path, "vllm", {"rates": {"128": 3000.0}})
    write(tmp_path, "generation-qwen3-8b", {"machine": "a GPU", "results": [{**results[0], "prompts": 64}]})
    assert gpu.main(["--table", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a GPU. Medians.",
        "",
        "| what | Quartet | TRL | vLLM | transformers |",
        "|---|---|---|---|---|",
        "| qwen2-0.5b: decode, 128 prompts, tokens/s | 1000 | – | 3000 | 400 |",
        "| share of the bandwidth limit, % | 25.00 | – | 75.00 | 10.00 |",
        "| qwen2-0.5b: MFU of the policy update, % | 40.00 | – | – | – |",
        "| qwen3-8b: decode, 64 prompts, tokens/s | 1000 | – | – | 400 |",
        "| share of the bandwidth limit, % | 25.00 | – | – | 10.00 |",
        "| seconds per step, `configs/gpu/ppo.yaml` | 2.00 | 9.00 | – | – |",
    ]


def test_parts_that_have_not_run_are_left_out_and_a_missing_folder_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no results" in gpu.table(tmp_path)
    assert gpu.main(["--table", "--folder", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.endswith("none: no such folder; run python -m benchmarks gpu without --table\n")


def test_benchmarks_on_a_gpu_set_the_flags_of_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(machine, "set_gpu_environment", lambda environment: calls.append("environment"))
    monkeypatch.setattr(torch_settings, "set_up_torch", lambda threads: calls.append(f"{threads} threads"))
    monkeypatch.setattr(torch_settings, "set_up_gpu", lambda: calls.append("gpu"))
    machine.set_up("cuda:0", 1)
    assert calls == ["environment", "1 threads", "gpu"]
    machine.set_up("cpu", 1)
    assert len(calls) == 3


@pytest.mark.parametrize(("name", "millions"), [("qwen2-0.5b", 494), ("qwen3-0.6b", 596), ("qwen3-8b", 8191)])
def test_random_models_have_the_sizes_of_their_names(name: str, millions: int) -> None:
    assert round(random_models.model_of(name, "meta").num_parameters() / 1e6) == millions
    assert tuple(random_models.SHAPES) == gpu.SHAPES


def test_random_models_are_written_with_fewer_layers_and_without_a_reward_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--shape", "qwen3-0.6b", "--layers", "1", "--vocabulary", "20", "--policy-only"]
    assert random_models.main([str(tmp_path), *arguments]) == 0
    assert json.loads((tmp_path / "policy" / "config.json").read_text())["num_hidden_layers"] == 1
    assert not (tmp_path / "reward").exists()
    assert "policy with 16M weights" in capsys.readouterr().out
