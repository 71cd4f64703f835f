"""Policies of 0.5B, 0.6B and 8B on one GPU, beside TRL and vLLM, and one table at the end.

Makes the models with random weights, runs generation, update and end_to_end on them, and writes everything below build/gpu.
Makes TRL's environment if it is missing; vLLM takes part if `make engines` has made its environment. With --table, only prints
the table of the results that are there. A part that has not run is a dash.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import parser_of

MISSING = "–"
SHAPES = ("qwen2-0.5b", "qwen3-0.6b", "qwen3-8b")
"""Shapes of `benchmarks.random_models`. The first is that of configs/gpu; folders of results have the names of the others."""
CONFIG = "configs/gpu/ppo.yaml"
ROOT = Path("build/gpu")
"""Where configs/gpu expects its models."""
VLLM = Path("build/vllm-venv/bin/python")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("gpu", __doc__)
    parser.add_argument("--table", action="store_true", help="only print the table of the results")
    parser.add_argument("--folder", type=Path, default=ROOT, help="folder of the results")
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    try:
        if not options.table:
            measure(folder)
    except subprocess.CalledProcessError as error:
        return error.returncode
    if not folder.is_dir():
        print(f"error: {folder}: no such folder; run python -m benchmarks gpu without --table", file=sys.stderr)
        return 2
    print(table(folder))
    return 0


def measure(folder: Path) -> None:
    """Run all parts. Raises CalledProcessError if one fails."""
    run("random_models", ROOT, "--for", CONFIG)
    run("generation", "--config", CONFIG, "--prompts", 128, "--tokens", 512, "--folder", folder / "generation")
    run("update", "--config", CONFIG, "--full", "--folder", folder / "update")
    for shape in SHAPES[1:]:
        # The model of 8B fits with all layers for decoding, and with a few for an update.
        large = shape == SHAPES[2]
        models = ROOT / shape
        settings = "--set", f"actor.model={models}/policy"
        run("random_models", models, "--shape", shape, "--device", "cuda:0", *(["--policy-only"] if large else []))
        sizes = "--prompts", 64, "--tokens", 256, "--rounds", 2
        run("generation", "--config", CONFIG, *sizes, *settings, "--folder", folder / f"generation-{shape}")
        if large:
            shutil.rmtree(models)
            run("random_models", models, "--shape", shape, "--layers", 4, "--device", "cuda:0")
        both = *settings, "--set", f"reward.model={models}/reward"
        run("update", "--config", CONFIG, "--full", "--rounds", 2, *both, "--folder", folder / f"update-{shape}")
    subprocess.run(["make", "build/parity-venv/.installed"], check=True)  # noqa: S607 - the make of the PATH
    configs = "--config", CONFIG, "--config", "configs/gpu/rloo.yaml"
    run("end_to_end", *configs, "--steps", 6, "--pairs", 2, "--folder", folder / "end-to-end")
    if VLLM.exists():
        subprocess.run(
            [VLLM, "-m", "benchmarks.vllm_decoding", ROOT / "policy", "128", "128", "512", folder / "vllm"], check=True
        )


def run(name: str, *arguments: object) -> None:
    """Run a benchmark in a separate process, so that each has the memory of the GPU to itself."""
    subprocess.run([sys.executable, "-m", "benchmarks", name, *map(str, arguments)], check=True)


def table(folder: Path) -> str:
    """Return the table of the results below ``folder``."""
    generation, update, end_to_end = (_results(folder / name) for name in ("generation", "update", "end-to-end"))
    lines = ["| what | Quartet | TRL | vLLM | transformers |", "|---|---|---|---|---|"]
    for shape in SHAPES:
        own = "" if shape == SHAPES[0] else f"-{shape}"
        lines += _rows_of_shape(
            shape, *(_results(folder / f"{name}{own}") for name in ("generation", "update", "vllm"))
        )
    for config, pairs in end_to_end.items():
        if config != "machine":
            ours, theirs = (statistics.median(pair[side]["seconds"] for pair in pairs) for side in ("quartet", "trl"))
            lines.append(_row(f"seconds per step, `{config}`", ours, theirs, None, None))
    machine = generation.get("machine") or update.get("machine") or end_to_end.get("machine") or "no results"
    return "\n".join([f"{machine}. Medians.", "", *lines])


def _rows_of_shape(shape: str, generation: dict[str, Any], update: dict[str, Any], vllm: dict[str, Any]) -> list[str]:
    lines = []
    for result in generation.get("results", []):
        rates = {name: statistics.median(values) for name, values in result["rates"].items()}
        others = vllm.get("rates", {}).get(str(result["prompts"]))
        best = max(rate for name, rate in rates.items() if name != "quartet")
        what = f"{shape}: decode, {result['prompts']} prompts, tokens/s"
        lines.append(_row(what, rates["quartet"], None, others, best))
        limit = result["memory_limit"] / 100
        shares = [rate / limit if rate else None for rate in (rates["quartet"], None, others, best)]
        lines.append(_row("share of the bandwidth limit, %", *shares))
    for result in update.get("results", []):
        rate = result["flops"] / statistics.median(result["packed"])
        what = f"{shape}: MFU of the {result['name']} update, %"
        lines.append(_row(what, 100 * rate / update["peak"], None, None, None))
    return lines


def _row(what: str, *values: float | None) -> str:
    cells = [MISSING if value is None else f"{value:.0f}" if value >= 100 else f"{value:.2f}" for value in values]
    return f"| {what} | {' | '.join(cells)} |"


def _results(folder: Path) -> dict[str, Any]:
    path = folder / "results.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return results


if __name__ == "__main__":
    sys.exit(main())
