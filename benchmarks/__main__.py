"""List the benchmarks, or run one: python -m benchmarks [NAME [OPTION...]]. `--help` after a name shows its options."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

HELPERS = {"machine", "options", "page", "plan_cases", "sharding_rank", "simulated", "vllm_decoding"}
"""Modules that benchmarks use, beside trl_*."""
FOLDER = Path(__file__).parent
NAMES = sorted(
    path.stem
    for path in FOLDER.iterdir()
    if path.suffix in (".py", "") and not path.stem.startswith(("_", "trl_")) and path.stem not in HELPERS
)


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m benchmarks NAME [OPTION...]\n")
        for name in NAMES:
            print(f"  {name:<16} {summary(name)}")
        return 0
    name = arguments[0]
    if name not in NAMES:
        print(f"error: no benchmark {name!r}; python -m benchmarks lists them", file=sys.stderr)
        return 2
    sys.argv[1:] = arguments[1:]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    return 0


def summary(name: str) -> str:
    """Return the first sentence of a benchmark's docstring. The module is not imported, because torch takes seconds."""
    path = FOLDER / name
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
