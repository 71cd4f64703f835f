"""The last table of `make gpu`: decode rate, share of the bandwidth limit, MFU and step time, beside TRL and vLLM.

python -m benchmarks.gpu_table FOLDER reads the results that the benchmarks before it wrote below FOLDER. A part that has not run
is a dash. Those of other shapes than the first are in folders with their names, such as generation-qwen3-8b.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MISSING = "–"
SHAPES = ("qwen2-0.5b", "qwen3-0.6b", "qwen3-8b")
"""Shapes of `benchmarks.random_models`. The first is that of configs/gpu."""


def main(arguments: Sequence[str] | None = None) -> int:
    paths = sys.argv[1:] if arguments is None else list(arguments)
    if len(paths) != 1 or not Path(paths[0]).is_dir():
        print("error: expected one folder with the results of make gpu, such as build/gpu", file=sys.stderr)
        return 2
    print(table(Path(paths[0])))
    return 0


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
