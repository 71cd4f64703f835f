"""`python -m helm.release VERSION REGISTRY REPOSITORY FOLDER VARIANT=DIGEST...`: the chart of a release, in a new folder.

Its values name the published images by digest. The workflow release.yml packages and publishes the folder.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

CHART = Path(__file__).parent / "quartet"
VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?")
DIGEST = re.compile(r"([a-z0-9][a-z0-9.-]*)=(sha256:[0-9a-f]{64})")
USAGE = "usage: python -m helm.release VERSION REGISTRY REPOSITORY FOLDER VARIANT=sha256:... [VARIANT=sha256:...]"


def main(arguments: list[str]) -> int:
    """Write the folder. Exit status: 2 for invalid arguments."""
    if len(arguments) < 5:
        print(USAGE, file=sys.stderr)
        return 2
    version, registry, repository, folder, *digests = arguments
    matches = [DIGEST.fullmatch(digest) for digest in digests]
    if not VERSION.fullmatch(version) or None in matches or Path(folder).exists():
        problem = f"{folder} exists already" if Path(folder).exists() else f"{version} {' '.join(digests)}"
        print(
            f"error: {problem}: expected a version such as 1.2.3, VARIANT=sha256:..., and a new folder", file=sys.stderr
        )
        return 2
    # With files instead of links.
    target = shutil.copytree(CHART, Path(folder))
    images = {match[1]: match[2] for match in matches if match}
    values = (target / "values.yaml").read_text(encoding="utf-8")
    pinned = ", ".join(f'{variant}: "{digest}"' for variant, digest in images.items())
    values = _replaced(values, '\n  registry: "" ', f"\n  registry: {registry} ")
    values = _replaced(values, "\n  repository: quartet ", f"\n  repository: {repository} ")
    values = _replaced(values, "  digests: {} ", f"  digests: {{{repository}: {{{pinned}}}}} ")
    (target / "values.yaml").write_text(values, encoding="utf-8")
    chart = (target / "Chart.yaml").read_text(encoding="utf-8")
    chart = re.sub(r"(?m)^(version|appVersion): .*$", rf"\1: {version}", chart)
    chart = re.sub(r"(?m)^(  artifacthub.io/prerelease): .*$", rf'\1: "{str("-" in version).lower()}"', chart)
    (target / "Chart.yaml").write_text(chart, encoding="utf-8")
    return 0


def _replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"values.yaml: expected one {old!r}"
    return text.replace(old, new)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
