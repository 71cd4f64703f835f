"""The chart of a release: images by digest, versions, and the reference of its values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from helm import release, values_schema
from helm.values_reference import values_page
from tests.helm.rendering import CHART, ROOT, chart, example, objects, pod_templates
from tests.helm.test_null import defaults

CPU, CUDA = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def test_a_released_chart_names_its_images_by_digest(tmp_path: Path) -> None:
    folder = tmp_path / "quartet"
    assert release.main(["1.2.3", "registry.example", "o/quartet", str(folder), f"cpu={CPU}", f"cuda={CUDA}"]) == 0
    archive = helm_python.package(str(folder), destination=str(tmp_path))
    assert Path(archive).name == "quartet-1.2.3.tgz"
    with helm_python.Chart.load(archive) as released:
        texts = released.render(example("single-node-4-gpus"), name="quartet", namespace="rlhf")
    images = {
        template["spec"]["containers"][0]["name"]: template["spec"]["containers"][0]["image"]
        for _, template in pod_templates(objects(texts))
    }
    assert images["actor"] == f"registry.example/o/quartet@{CUDA}"
    assert images["orchestrator"] == f"registry.example/o/quartet@{CPU}"
    assert images["redis"].startswith("redis:")


@pytest.mark.parametrize(
    ("given", "image"),
    [
        ({"imageRegistry": "mirror.example"}, f"mirror.example/o/quartet@{CUDA}"),
        ({"image": {"registry": "mirror.example"}}, f"mirror.example/o/quartet@{CUDA}"),
        # The digests are those of the published images.
        ({"image": {"repository": "own/quartet"}}, "registry.example/own/quartet:1.2.3-cuda"),
        ({"image": {"tag": "1.2.4"}}, "registry.example/o/quartet:1.2.4-cuda"),
    ],
)
def test_a_released_chart_takes_its_images_from_another_registry_or_repository(
    given: dict[str, Any], image: str, tmp_path: Path
) -> None:
    folder = tmp_path / "quartet"
    assert release.main(["1.2.3", "registry.example", "o/quartet", str(folder), f"cpu={CPU}", f"cuda={CUDA}"]) == 0
    with helm_python.Chart.load(folder) as released:
        texts = released.render({**example("single-node-4-gpus"), **given}, name="quartet", namespace="rlhf")
    images = {
        container["name"]: container["image"]
        for _, template in pod_templates(objects(texts))
        for container in (*template["spec"]["containers"], *template["spec"].get("initContainers", []))
    }
    assert images["actor"] == image
    if "imageRegistry" in given:
        assert {name for name in images if not images[name].startswith("mirror.example/")} == set()


@pytest.mark.parametrize(
    "arguments",
    [["1.2", "r", "q", "new", f"cpu={CPU}"], ["1.2.3", "r", "q", "new", "cpu=latest"], ["1.2.3", "r", "q", "new"]],
)
def test_an_invalid_release_is_refused(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert release.main(arguments) == 2
    assert capsys.readouterr().err.startswith(("error: 1.2", "usage: "))
    assert not Path("new").exists()


def test_the_workflow_runs_the_script_and_pins_what_it_builds() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    build = next(step for step in workflow["jobs"]["images"]["steps"] if step.get("id") == "build")["with"]
    assert build["sbom"] is True
    assert build["provenance"] == "mode=max"
    assert "python3 -m helm.release" in text
    # The images of all variants that the examples use.
    assert set(workflow["jobs"]["images"]["strategy"]["matrix"]["variant"]) == {"cpu", "cuda", "vllm"}


def test_the_reference_has_every_default_of_the_chart() -> None:
    page = values_schema.PAGE.read_text(encoding="utf-8")
    assert page == values_page((CHART / "values.yaml").read_text(encoding="utf-8")), "run make generate and commit"
    for path, value in defaults(chart().values):
        parents = [path.rsplit("__", count)[0] for count in range(1, path.count("__") + 1)]
        names = [name.replace("__", ".") for name in (path, *parents)]
        assert isinstance(value, dict) or any(f"| `{name}` |" in page for name in names), path


def test_every_value_has_a_meaning() -> None:
    assert [line for line in values_schema.PAGE.read_text(encoding="utf-8").splitlines() if line.endswith("|  |")] == []


def test_the_metadata_for_artifact_hub_is_pushed_beside_the_chart() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    (push,) = (step["run"] for step in workflow["jobs"]["chart"]["steps"] if "oras push" in step.get("run", ""))
    assert "charts/quartet:artifacthub.io" in push
    assert "helm/quartet/artifacthub-repo.yml:" in push
    assert yaml.safe_load((CHART / "artifacthub-repo.yml").read_text(encoding="utf-8")).keys() == {
        "repositoryID",
        "owners",
    }


def test_a_comment_describes_the_key_below_or_before_it() -> None:
    text = '# About a.\na:\n  # Above\n  # in two lines.\n  b: 1\n  c: {d: x}   # behind | it\ne: ""\n'
    page = values_page(text)
    assert "## a\n\nAbout a.\n" in page
    assert "| `a.b` | `1` | Above in two lines. |" in page
    assert "| `a.c` | `{d: x}` | behind \\| it |" in page
    assert "| `e` | `''` |  |" in page
