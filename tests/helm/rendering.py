"""Render the chart with Helm, and normalize the manifests of two examples for golden/."""

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
import jsonschema
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm/quartet"
GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = tuple(sorted(path.stem for path in (CHART / "examples").glob("*.yaml")))
RELEASE, NAMESPACE = "quartet", "rlhf"

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Ten times as fast with libyaml."""

Manifest = dict[str, Any]
Values = dict[str, Any]


@cache
def chart_folder() -> Path:
    """Return a copy of the chart with files instead of links. Helm follows links, too, but logs a line for each."""
    folder = Path(tempfile.mkdtemp(prefix="quartet-chart-"))
    atexit.register(shutil.rmtree, folder)
    # The linter requires the folder to have the name of the chart.
    return shutil.copytree(CHART, folder / CHART.name)


@cache
def chart() -> helm_python.Chart:
    """Return the chart, loaded once."""
    return helm_python.Chart.load(chart_folder())


def chart_for(values: Values) -> helm_python.Chart:
    """Return the chart, without its schema if the values match it: Helm would compile it again, for half of a short render."""
    return _without_schema(checks_only=False) if _match_schema(values) else chart()


def checks_for(values: Values) -> helm_python.Chart:
    """Return the chart with its checks alone, which takes a fifth of the time. It has no schema if the values match it."""
    return checks_only() if _match_schema(values) else chart()


def checks_only() -> helm_python.Chart:
    """Return the checks of the chart, without its schema and its manifests."""
    return _without_schema(checks_only=True)


@cache
def _without_schema(checks_only: bool) -> helm_python.Chart:
    folder = shutil.copytree(chart_folder(), chart_folder().parent / ("checks" if checks_only else "without-schema"))
    (folder / "values.schema.json").unlink()
    for path in (folder / "templates").rglob("*.*"):
        if checks_only and path.suffix != ".tpl" and path.name != "checks.yaml":
            path.unlink()
    return helm_python.Chart.load(folder)


@cache
def _schema() -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text(encoding="utf-8")))


def _match_schema(values: Values) -> bool:
    # Helm decides about values with null, which removes defaults.
    text = json.dumps(values)
    return "null" not in text and _schema().is_valid(_merged(chart().values, json.loads(text)))


def _merged(defaults: Values, values: Values) -> Values:
    nested = {key: value for key, value in values.items() if isinstance(value, dict) and defaults.get(key)}
    return {**defaults, **values, **{key: _merged(defaults[key], value) for key, value in nested.items()}}


def example(name: str) -> Values:
    """Return the values of an example."""
    values: Values = json.loads(_parsed((CHART / "examples" / f"{name}.yaml").read_text(encoding="utf-8")))[0]
    return values


def changed(name: str, **changes: Any) -> Values:
    """Return the values of an example with changed keys. A double underscore in a path stands for a dot."""
    return with_keys(example(name), **changes)


def with_keys(values: Values, **changes: Any) -> Values:
    """Return a copy of values with changed keys, like ``changed``."""
    values = deepcopy(values)
    for path, value in changes.items():
        *above, last = path.split("__")
        parent = values
        for key in above:
            parent = parent.setdefault(key, {})
        parent[last] = value
    return values


def texts(values: Values, cluster: helm_python.Config | None = None) -> dict[str, str]:
    """Return the text of each rendered template. ``cluster`` serves lookups. Raises helm_python.HelmError."""
    if cluster is None:
        return dict(_rendered(json.dumps(values)))
    return cluster.render(chart_for(values), values, name=RELEASE, namespace=NAMESPACE)


@cache
def _rendered(values: str) -> dict[str, str]:
    given = json.loads(values)
    return chart_for(given).render(given, name=RELEASE, namespace=NAMESPACE)


def manifests(values: Values, cluster: helm_python.Config | None = None) -> list[Manifest]:
    """Return every rendered object, including those of ``helm test``."""
    return objects(texts(values, cluster))


def objects(rendered: dict[str, str]) -> list[Manifest]:
    """Return the objects in the texts of templates."""
    return [
        document
        for name, text in sorted(rendered.items())
        if name.endswith(".yaml")
        for part in text.split("\n---\n")
        for document in json.loads(_parsed(part))
        if document
    ]


@cache
def _parsed(text: str) -> str:
    """Return the documents in a text as JSON. Most releases of the tests share most objects."""
    return json.dumps(list(yaml.load_all(text, Loader=_LOADER)))


def refusal(values: Values) -> str:
    """Return the error of Helm for values that it must refuse. Templates are rendered only if the checks accept them."""
    for part in (checks_for(values), chart_for(values)):
        try:
            part.render(values, name=RELEASE, namespace=NAMESPACE)
        except helm_python.HelmError as error:
            return str(error)
    raise AssertionError("Helm accepts these values")


def schema_problems(values: Values) -> dict[str, str]:
    """Return all problems that the schema finds in values, by path. Helm reports them at once, and renders nothing."""
    found = re.findall(r"^ *- at '(.*?)': (.*)$", refusal(values), re.MULTILINE)
    assert found
    return {path: problem for path, problem in found if problem != "validation failed"}


def of_kind(result: list[Manifest], kind: str) -> dict[str, Manifest]:
    """Return the objects of a kind by name."""
    return {item["metadata"]["name"]: item for item in result if item["kind"] == kind}


def pod_templates(result: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield each pod template (metadata and spec) with the name of its object."""
    for item in result:
        name, spec = f"{item['kind']}/{item['metadata']['name']}", item.get("spec", {})
        if item["kind"] == "Pod":
            yield name, item
        elif item["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield name, spec["template"]
        elif item["kind"] == "LeaderWorkerSet":
            for part in ("leaderTemplate", "workerTemplate"):
                yield f"{name} {part}", spec["leaderWorkerTemplate"][part]


def golden_text(name: str) -> str:
    """Return the manifests of an example in the order of the templates, with placeholders for generated secrets."""
    parts = []
    for path, text in sorted(texts(example(name)).items()):
        normalized = "\n".join(_normalized(line, path) for line in text.splitlines() if line.strip()).removeprefix(
            "---\n"
        )
        if normalized:
            parts.append(f"--- # {path}\n{normalized}\n" if path.endswith(".yaml") else _commented(path, normalized))
    return "".join(parts)


def _normalized(line: str, path: str) -> str:
    if path.endswith(("/secrets.yaml", "/certificates.yaml")):
        return re.sub(r"^(  [\w.-]+): [A-Za-z0-9+/=]{32,}$", r"\1: GENERATED", line)
    if len(line) > 2000:
        return f"{line[:60]}... # sha256 {hashlib.sha256(line.encode()).hexdigest()}"
    return line


def _commented(path: str, text: str) -> str:
    return f"# {path}\n" + "".join(f"#   {line}\n" for line in text.splitlines())
