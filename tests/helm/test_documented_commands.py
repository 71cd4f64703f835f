"""Every command of docs/kubernetes.md and docs/recover.md is executed here or in a named test, or listed as one for a cluster.

Commands of Helm are rendered with their options. Names in commands of kubectl are those of rendered objects.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from quartet.cli.main import app
from quartet.config.loading import merged_trees
from tests.documents import DOCS, blocks
from tests.helm.rendering import ROOT, Values, chart_folder, manifests

PLACES = {
    # On a cluster: created, watched, scaled and removed objects.
    "cluster": [
        "kubectl create namespace",
        "kubectl label namespace",
        "kubectl --namespace quartet (create|get|logs|scale|rollout|wait|delete)",
        "kubectl --namespace quartet exec .* quartet checkpoints verify",
        "kubectl --namespace quartet port-forward",
        "pkill",
        "kubectl (drain|uncordon|delete namespace)",
        "helm (rollback|uninstall|test)",
        "export",
        "quartet (watch|pause|checkpoint|resume) https",
    ],
    # A registry of images, or models of the internet.
    "registry": ["docker push", "docker build", "for variant", "done$", "curl", "aws s3"],
    "tests/helm/test_documented_commands.py": [
        "quartet plan",
        "quartet helm check",
        "helm (install|upgrade)",
        "kubectl --namespace quartet exec .* tar",
    ],
    "tests/compose/test_stack.py": ["docker compose"],
    "tests/e2e/test_resume.py": [
        "quartet (pause|checkpoint|resume) runs/my",
        "quartet train my.yaml --resume",
        "tar .*my",
        "mkdir",
        "quartet (checkpoints|rollback)",
    ],
}
"""Patterns of the commands by the file that executes them. No test executes those of "cluster" and "registry"."""


WORDS = ("pause", "checkpoint", "tar", "resume")
"""The order of a backup: the checkpoint has the last step of a paused run, and nothing is written while it is archived."""


def documented(*pages: str) -> Iterator[str]:
    """Yield the commands of pages."""
    for page in pages:
        for section in blocks(page).values():
            for block in section:
                yield from block


def yaml_of(section: str) -> Values:
    """Return the values in a section of the page."""
    text = (DOCS / "kubernetes.md").read_text(encoding="utf-8").partition(f"## {section}\n")[2]
    return yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])  # type: ignore[no-any-return]


@pytest.fixture
def folder(helm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory of the page's reader: a clone with my.yaml, my-config.yaml and the models' config.json."""
    (tmp_path / "helm").mkdir()
    (tmp_path / "helm/quartet").symlink_to(chart_folder())
    values = merged_trees(yaml_of("Plan"), yaml_of("Fill"))
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    (tmp_path / "my-config.yaml").write_text(yaml.safe_dump(values["config"]), encoding="utf-8")
    for role in ("policy", "reward"):
        shutil.copytree(ROOT / "examples/plan/models/qwen2.5-7b", tmp_path / "models" / role)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def quartet(line: str) -> None:
    """Run a command of ``quartet``."""
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert (result.exit_code, result.exception) == (0, None), f"{line}: {result.output}{result.exception}"


def test_every_command_has_a_place() -> None:
    pages = list(documented("kubernetes.md", "recover.md"))
    assert len(pages) > 60
    for line in pages:
        found = [
            place
            for place, patterns in PLACES.items()
            if any(re.match(rf"(?:{pattern})(?!\w)", line) for pattern in patterns)
        ]
        assert len(found) == 1, f"{line}: {found}"
    for place, patterns in PLACES.items():
        assert place in ("cluster", "registry") or (ROOT / place).is_file()
        unused = [pattern for pattern in patterns if not any(re.match(pattern, line) for line in pages)]
        assert not unused, f"{place}: no page has {unused}"


def test_the_documented_run_is_planned_checked_installed_and_upgraded(folder: Path) -> None:
    for line in documented("kubernetes.md"):
        if line.startswith(("quartet plan", "quartet helm")):
            quartet(line)
    files: dict[str, Values] = {
        name: yaml.safe_load((folder / name).read_text()) for name in ("my.yaml", "planned.yaml")
    }
    kinds: dict[str, set[str]] = {}
    commands = [line for line in documented("kubernetes.md") if line.startswith(("helm install", "helm upgrade"))]
    assert len(commands) > 4
    for line in commands:
        for item in manifests(with_options(line, files)):
            kinds.setdefault(item["kind"], set()).add(item["metadata"]["name"])
    traffic = {**yaml_of("Live traffic"), "defaults": {"resourcesPreset": "7b"}}
    for item in manifests(merged_trees({**files["my.yaml"], "downloads": {}}, traffic)):
        kinds.setdefault(item["kind"], set()).add(item["metadata"]["name"])
    kinds["PersistentVolumeClaim"].add("data-quartet-redis-0")  # Of the claim template of its StatefulSet.
    for line in documented("kubernetes.md"):
        for kind, name in re.findall(
            r"\b(service|deployment|job|secret|persistentvolumeclaim)[ /](quartet-[\w-]+)", line
        ):
            names = next(names for own, names in kinds.items() if own.lower() == kind)
            known = {re.sub(r"-[0-9a-f]{6,}$|-helpful.*$", "-NAME", each) for each in names} | names
            assert name in known, f"{line}: no {kind} among {sorted(known)}"


def with_options(line: str, files: dict[str, Values]) -> Values:
    """Return the values that a command of Helm gives."""
    values: Values = {}
    action, release, chart, *options = shlex.split(line)[1:]
    assert (action in ("install", "upgrade"), release, chart) == (True, "quartet", "helm/quartet"), line
    for option, value in zip(options[::2], options[1::2], strict=True):
        if option == "--values":
            values = merged_trees(values, files[value])
        elif option in ("--set", "--set-json"):
            path, _, text = value.partition("=")
            layer: Any = yaml.safe_load(text)
            for key in reversed(path.split(".")):
                layer = {key: layer}
            values = merged_trees(values, layer)
        else:
            assert (option, value) == ("--namespace", "quartet"), line
    return values


def test_the_documented_archive_of_a_volume_moves_the_run_to_an_empty_one(tmp_path: Path) -> None:
    back_up, restore, _ = blocks("kubernetes.md")["Back up"]
    extract = next(line for line in restore if "tar --extract" in line)
    create = next(line for line in back_up if "tar --create" in line)
    # As on the page on recovery, whose commands are executed. The restored run is paused.
    words = [next((word for word in WORDS if f" {word} " in line), "") for line in back_up]
    assert [word for word in words if word] == list(WORDS)
    assert [line.split()[1] for line in blocks("kubernetes.md")["Back up"][2]] == ["resume"]
    policy = next(line for line in blocks("kubernetes.md")["Finish and uninstall"][0] if "tar --create" in line)
    for file in (
        "helpful/metrics.jsonl",
        "helpful/policy/model.safetensors",
        "helpful/gateway.json",
        "other/metrics.jsonl",
    ):
        (tmp_path / "quartet/runs" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "quartet/runs" / file).write_text(file)
    for line in (create, policy):
        execute(line, tmp_path)
    assert [path.name for path in (tmp_path / "policy").iterdir()] == ["model.safetensors"]
    shutil.rmtree(tmp_path / "quartet/runs")
    (tmp_path / "quartet/runs").mkdir()
    execute(extract, tmp_path)
    assert sorted(path.relative_to(tmp_path / "quartet").as_posix() for path in tmp_path.glob("quartet/**/*.*")) == [
        "runs/helpful/metrics.jsonl",
        "runs/helpful/policy/model.safetensors",
    ]


def execute(line: str, folder: Path) -> None:
    """Run the command inside the pod, and its pipe outside of it, with a volume in a folder of this machine."""
    pod = r"kubectl --namespace quartet exec (--stdin )?deployment/quartet-loader -- "
    command = re.sub(pod, "", line).replace("/quartet/runs", str(folder / "quartet/runs"))
    result = subprocess.run(["/bin/sh", "-ec", command], cwd=folder, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, ""), line
