"""An API server for the chart's checks, a connection of Helm to it, and the command ``helm``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import helm_python
import pytest

from tests.helm.cluster import ApiServer, api_server, connected


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with api_server() as server:
        yield server


@pytest.fixture
def cluster(api: ApiServer) -> Iterator[helm_python.Config]:
    with connected(api) as config:
        yield config


HELM = f"""#!{sys.executable}
import sys, yaml, helm_python
from quartet.config.loading import merged_trees
command, name, chart, *options = sys.argv[1:]
assert command == "template" and set(options[::2]) == {{"--values"}}, sys.argv
values = {{}}
for path in options[1::2]:
    values = merged_trees(values, yaml.safe_load(open(path)) or {{}})
try:
    texts = helm_python.Chart.load(chart).render(values, name=name, namespace="default")
except helm_python.HelmError as error:
    print("2026/01/01 00:00:00 INFO found symbolic link in path", file=sys.stderr)
    sys.exit(f"Error: {{error}}\\n\\nUse --debug flag to render out invalid YAML")
print("".join(f"---\\n{{text}}\\n" for path, text in texts.items() if not path.endswith(".txt")))
"""


@pytest.fixture
def helm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a script over Helm's own library on PATH: the program itself is in no package registry of the tests."""
    program = tmp_path / "bin" / "helm"
    program.parent.mkdir()
    program.write_text(HELM, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program
