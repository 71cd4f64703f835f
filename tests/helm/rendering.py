"""Rendering the chart, as Helm does it; and its manifests as they are kept in golden/, without what is drawn by lot."""

from __future__ import annotations

import atexit
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm/quartet"
GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = tuple(sorted(path.stem for path in (CHART / "examples").glob("*.yaml")))
RELEASE, NAMESPACE = "quartet", "rlhf"

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Ten times as fast where libyaml is there."""

Manifest = dict[str, Any]
Values = dict[str, Any]


@cache
def chart_folder() -> Path:
    """The chart's folder with files where links are. Helm follows links, too, but writes a line about each whenever it does."""
    folder = Path(tempfile.mkdtemp(prefix="quartet-chart-"))
    atexit.register(shutil.rmtree, folder)
    # The linter wants the folder to have the chart's name.
    return shutil.copytree(CHART, folder / CHART.name)


@cache
def chart() -> helm_python.Chart:
    """The chart, loaded once."""
    return helm_python.Chart.load(chart_folder())


def example(name: str) -> Values:
    """The values of an example."""
    values: Values = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text(encoding="utf-8"))
    return values


def changed(name: str, **changes: Any) -> Values:
    """An example's values with keys of dotted paths set; double underscores stand for the dots."""
    return with_keys(example(name), **changes)


def with_keys(values: Values, **changes: Any) -> Values:
    """The same of any values."""
    values = deepcopy(values)
    for path, value in changes.items():
        *above, last = path.split("__")
        place = values
        for key in above:
            place = place.setdefault(key, {})
        place[last] = value
    return values


def texts(values: Values, cluster: helm_python.Config | None = None) -> dict[str, str]:
    """Return what each template makes of the values; ``cluster``: where it may look things up. Raises helm_python.HelmError."""
    if cluster is None:
        return dict(_rendered(json.dumps(values)))
    return cluster.render(chart(), values, name=RELEASE, namespace=NAMESPACE)


@cache
def _rendered(values: str) -> dict[str, str]:
    return chart().render(json.loads(values), name=RELEASE, namespace=NAMESPACE)


def manifests(values: Values, cluster: helm_python.Config | None = None) -> list[Manifest]:
    """Every object that the chart makes of the values, those of `helm test` included."""
    return [
        document
        for name, text in sorted(texts(values, cluster).items())
        if name.endswith(".yaml")
        for document in yaml.load_all(text, Loader=_LOADER)
        if document
    ]


def of_kind(result: list[Manifest], kind: str) -> dict[str, Manifest]:
    """The objects of a kind, by name."""
    return {item["metadata"]["name"]: item for item in result if item["kind"] == kind}


def pod_templates(result: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Every pod that the objects make: what makes it, and its template (metadata and spec)."""
    for item in result:
        where, spec = f"{item['kind']}/{item['metadata']['name']}", item.get("spec", {})
        if item["kind"] == "Pod":
            yield where, item
        elif item["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield where, spec["template"]
        elif item["kind"] == "LeaderWorkerSet":
            for part in ("leaderTemplate", "workerTemplate"):
                yield f"{where} {part}", spec["leaderWorkerTemplate"][part]


def golden_text(name: str) -> str:
    """An example's manifests as they are kept: in the templates' order, secrets and certificates left out."""
    parts = []
    for path, text in sorted(texts(example(name)).items()):
        kept = "\n".join(_kept(line, path) for line in text.splitlines() if line.strip()).removeprefix("---\n")
        if kept:
            parts.append(f"--- # {path}\n{kept}\n" if path.endswith(".yaml") else _commented(path, kept))
    return "".join(parts)


def _kept(line: str, path: str) -> str:
    if path.endswith(("/secrets.yaml", "/certificates.yaml")):
        return re.sub(r"^(  [\w.-]+): [A-Za-z0-9+/=]{32,}$", r"\1: DRAWN", line)
    if len(line) > 2000:
        return f"{line[:60]}... # sha256 {hashlib.sha256(line.encode()).hexdigest()}"
    return line


def _commented(path: str, text: str) -> str:
    return f"# {path}\n" + "".join(f"#   {line}\n" for line in text.splitlines())
