"""`python -m tests.helm.golden`: lint the chart and compare the rendered manifests with golden/. --write updates golden/."""

from __future__ import annotations

import difflib
import sys

import helm_python

from tests.helm.rendering import EXAMPLES, GOLDEN, chart_folder, example, golden_text

WARNING = 2
"""Of the linter; what is below are its recommendations."""


def main(arguments: list[str]) -> int:
    """Exit status: 0 where all is as it was, 1 where something differs or the linter finds fault."""
    if arguments not in ([], ["--write"]):
        print("usage: python -m tests.helm.golden [--write]", file=sys.stderr)
        return 2
    fine = True
    for name in EXAMPLES:
        fine &= _lint(name)
        path, now = GOLDEN / f"{name}.yaml", golden_text(name)
        if arguments:
            path.write_text(now, encoding="utf-8")
            continue
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if before != now:
            fine = False
            lines = difflib.unified_diff(before.splitlines(True), now.splitlines(True), f"{path.name}, kept", "now")
            sys.stdout.writelines(lines)
    if arguments:
        for path in GOLDEN.glob("*.yaml"):
            if path.stem not in EXAMPLES:
                path.unlink()
    if not fine:
        print(
            "error: helm/quartet renders otherwise, see above; if so meant, run make helm-golden and commit",
            file=sys.stderr,
        )
    return 0 if fine else 1


def _lint(name: str) -> bool:
    report = helm_python.lint(chart_folder(), example(name), strict=True, kube_version="v1.29.0")
    results = [message for message in report["messages"] if message["severity"] >= WARNING]
    for message in results:
        print(f"helm lint, {name}: {message['path']}: {message['error']}", file=sys.stderr)
    return not report["errors"] and not results


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
