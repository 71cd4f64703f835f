"""`python -m tests.helm.golden`: lint the chart, and compare two examples with golden/. --write updates golden/."""

from __future__ import annotations

import difflib
import sys

import helm_python

from tests.helm.rendering import EXAMPLES, GOLDEN, chart_folder, example, golden_text

COMPARED = ("cpu-kind", "node-8-gpus")
"""Examples that together use all templates."""
WARNING = 2
"""Severity of the linter. Lower severities are recommendations."""


def main(arguments: list[str]) -> int:
    """Return 0 if all manifests are unchanged, and 1 if one differs or the linter reports a problem."""
    if arguments not in ([], ["--write"]):
        print("usage: python -m tests.helm.golden [--write]", file=sys.stderr)
        return 2
    ok = True
    for name in EXAMPLES:
        ok &= _lint(name)
    for name in COMPARED:
        path, rendered = GOLDEN / f"{name}.yaml", golden_text(name)
        if arguments:
            path.write_text(rendered, encoding="utf-8")
            continue
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if before != rendered:
            ok = False
            lines = difflib.unified_diff(
                before.splitlines(True), rendered.splitlines(True), f"{path.name}, committed", "rendered"
            )
            sys.stdout.writelines(lines)
    if not ok:
        print(
            "error: helm/quartet renders other manifests, see above; if intended, run make generate and commit",
            file=sys.stderr,
        )
    return 0 if ok else 1


def _lint(name: str) -> bool:
    report = helm_python.lint(chart_folder(), example(name), strict=True, kube_version="v1.29.0")
    results = [message for message in report["messages"] if message["severity"] >= WARNING]
    for message in results:
        print(f"helm lint, {name}: {message['path']}: {message['error']}", file=sys.stderr)
    return not report["errors"] and not results


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
