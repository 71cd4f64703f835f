"""Every manifest of every example: as it was, and valid for Kubernetes 1.29 and the newest version that is known here."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import helm_python
import kubernetes_validate
import kubernetes_validate.utils
import pytest

from tests.helm import golden
from tests.helm.rendering import CHART, EXAMPLES, Manifest, changed, chart_folder, example, manifests, of_kind, texts

VERSIONS = ("1.29", kubernetes_validate.latest_version())
CUSTOM = {
    # No schema of these is at hand: what their controllers require of them, by hand.
    "Certificate": ("cert-manager.io/v1", ["secretName", "issuerRef.name", "issuerRef.kind"]),
    "Issuer": ("cert-manager.io/v1", []),
    "ServiceMonitor": ("monitoring.coreos.com/v1", ["selector.matchLabels", "endpoints"]),
    "PrometheusRule": ("monitoring.coreos.com/v1", ["groups"]),
    "LeaderWorkerSet": (
        "leaderworkerset.x-k8s.io/v1",
        [
            "replicas",
            "leaderWorkerTemplate.size",
            "leaderWorkerTemplate.restartPolicy",
            "leaderWorkerTemplate.leaderTemplate.spec.containers",
            "leaderWorkerTemplate.workerTemplate.spec.containers",
        ],
    ),
    "ScaledObject": ("keda.sh/v1alpha1", ["scaleTargetRef.name", "triggers"]),
}


@pytest.fixture(autouse=True)
def _schemas_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", _schema)


@cache
def _schema(filename: str, version: str) -> object:
    return _read_schema(filename, version)


_read_schema = kubernetes_validate.utils.schema_contents


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_rendered_is_what_is_kept(name: str) -> None:
    result = golden.golden_text(name)
    kept = (golden.GOLDEN / f"{name}.yaml").read_text(encoding="utf-8")
    assert result == kept, "if so meant, run make helm-golden and commit"


def test_a_chart_without_fault_is_checked_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    assert golden.main([]) == 0
    assert capfd.readouterr() == ("", "")


def test_a_fault_is_told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(golden, "EXAMPLES", ("cpu-kind",))
    monkeypatch.setattr(golden, "example", lambda name: changed(name, redis__persistance={}))
    assert golden.main([]) == 1
    assert "additional properties 'persistance' not allowed" in capfd.readouterr().err


def test_nothing_is_kept_of_what_is_no_example() -> None:
    assert sorted(path.stem for path in golden.GOLDEN.glob("*.yaml")) == list(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_linter_finds_no_fault(name: str) -> None:
    report = helm_python.lint(chart_folder(), example(name), strict=True, kube_version="v1.29.0")
    assert [message for message in report["messages"] if message["severity"] >= golden.WARNING] == []
    assert report["errors"] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_kubernetes_takes_every_manifest(name: str, version: str) -> None:
    result = manifests(example(name))
    checked = 0
    for item in result:
        if item["kind"] not in CUSTOM:
            kubernetes_validate.validate(item, version, strict=True)
            checked += 1
    assert checked > 20


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_pods_that_another_makes(version: str) -> None:
    sets = of_kind(manifests(example("two-node-actor")), "LeaderWorkerSet")
    template = sets["quartet-actor-nodes"]["spec"]["leaderWorkerTemplate"]
    for part in ("leaderTemplate", "workerTemplate"):
        pod = {"apiVersion": "v1", "kind": "Pod", **template[part]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_a_wrong_manifest_is_found() -> None:
    deployment = of_kind(manifests(example("cpu-kind")), "Deployment")["quartet-actor"]
    deployment["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(deployment, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", EXAMPLES)
def test_custom_resources_have_what_their_controllers_require(name: str) -> None:
    for item in manifests(example(name)):
        if item["kind"] in CUSTOM:
            version, keys = CUSTOM[item["kind"]]
            assert item["apiVersion"] == version
            assert item["spec"]
            for key in keys:
                assert _at(item["spec"], key), f"{item['kind']} {item['metadata']['name']}: {key}"


def test_every_custom_resource_is_in_some_example() -> None:
    kinds = {item["kind"] for name in EXAMPLES for item in manifests(example(name))}
    assert kinds >= {
        *CUSTOM,
        "HorizontalPodAutoscaler",
        "Ingress",
        "Job",
        "StatefulSet",
        "Deployment",
        "PodDisruptionBudget",
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_names_are_unique_and_of_this_release(name: str) -> None:
    result = manifests(example(name))
    names = [(item["kind"], item["metadata"]["name"]) for item in result]
    assert len(set(names)) == len(names)
    for item in result:
        assert item["metadata"]["labels"]["app.kubernetes.io/instance"] == "quartet"


def test_a_package_holds_what_the_links_lead_to(tmp_path: Path) -> None:
    archive = helm_python.package(CHART, destination=str(tmp_path))
    with helm_python.Chart.load(archive) as chart:
        result = chart.render(example("node-8-gpus"), name="quartet", namespace="rlhf")
    assert (
        result["quartet/templates/monitoring.yaml"]
        == texts(example("node-8-gpus"))["quartet/templates/monitoring.yaml"]
    )


@pytest.mark.parametrize("plain", [True, False])
def test_the_notes_say_how_to_open_the_dashboard(plain: bool) -> None:
    changes = {"security": {"allowPlaintext": True, "tls": {"enabled": False}}} if plain else {}
    notes = texts(changed("cpu-kind", **changes))["quartet/templates/NOTES.txt"]
    assert "kubectl --namespace rlhf port-forward service/quartet-gateway 8080:8080" in notes
    assert f"{'http' if plain else 'https'}://localhost:8080/#token=" in notes
    assert "get secret quartet-gateway-tokens" in notes
    assert ("TLS is off" in notes) == plain


def _at(spec: Manifest, key: str) -> object:
    value: object = spec
    for part in key.split("."):
        assert isinstance(value, dict), key
        value = value.get(part)
    return value
