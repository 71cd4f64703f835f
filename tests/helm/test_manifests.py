"""Manifests of the examples: equal to golden/, and valid for Kubernetes 1.29 and the newest version with schemas."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import helm_python
import kubernetes_validate
import kubernetes_validate.utils
import pytest

from tests.helm import golden
from tests.helm.rendering import CHART, EXAMPLES, Manifest, changed, example, manifests, of_kind, texts

ALL_VERSIONS = kubernetes_validate.utils.all_versions()
VERSIONS = ("1.29", ALL_VERSIONS[-1])
CUSTOM_RESOURCES = {
    # Without schemas: the fields that the controllers require.
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
    monkeypatch.setattr(kubernetes_validate.utils, "all_versions", lambda: ALL_VERSIONS)


@cache
def _schema(filename: str, version: str) -> object:
    return _read_schema(filename, version)


_read_schema = kubernetes_validate.utils.schema_contents


def test_a_valid_chart_gives_no_output(capfd: pytest.CaptureFixture[str]) -> None:
    assert golden.main([]) == 0
    assert capfd.readouterr() == ("", "")


def test_a_problem_of_the_chart_is_reported(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(golden, "EXAMPLES", ("cpu-kind",))
    monkeypatch.setattr(golden, "COMPARED", ())
    monkeypatch.setattr(golden, "example", lambda name: changed(name, redis__persistance={}))
    assert golden.main([]) == 1
    assert "additional properties 'persistance' not allowed" in capfd.readouterr().err


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_manifest_is_valid_for_kubernetes(name: str, version: str) -> None:
    result = manifests(example(name))
    checked = 0
    for item in result:
        if item["kind"] not in CUSTOM_RESOURCES:
            kubernetes_validate.validate(item, version, strict=True)
            checked += 1
    assert checked > 20


@pytest.mark.parametrize("version", VERSIONS)
def test_pod_templates_of_a_leader_worker_set_are_valid(version: str) -> None:
    sets = of_kind(manifests(example("leader-worker-set")), "LeaderWorkerSet")
    template = sets["quartet-actor-nodes"]["spec"]["leaderWorkerTemplate"]
    for part in ("leaderTemplate", "workerTemplate"):
        pod = {"apiVersion": "v1", "kind": "Pod", **template[part]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_an_invalid_manifest_is_detected() -> None:
    deployment = of_kind(manifests(example("cpu-kind")), "Deployment")["quartet-actor"]
    deployment["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(deployment, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", EXAMPLES)
def test_custom_resources_have_their_required_fields(name: str) -> None:
    for item in manifests(example(name)):
        if item["kind"] in CUSTOM_RESOURCES:
            version, keys = CUSTOM_RESOURCES[item["kind"]]
            assert item["apiVersion"] == version
            assert item["spec"]
            for key in keys:
                assert _at(item["spec"], key), f"{item['kind']} {item['metadata']['name']}: {key}"


def test_the_examples_contain_every_kind() -> None:
    kinds = {item["kind"] for name in EXAMPLES for item in manifests(example(name))}
    assert kinds >= {
        *CUSTOM_RESOURCES,
        "HorizontalPodAutoscaler",
        "Ingress",
        "Job",
        "StatefulSet",
        "Deployment",
        "PodDisruptionBudget",
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_names_are_unique_and_objects_have_the_release_label(name: str) -> None:
    result = manifests(example(name))
    names = [(item["kind"], item["metadata"]["name"]) for item in result]
    assert len(set(names)) == len(names)
    for item in result:
        assert item["metadata"]["labels"]["app.kubernetes.io/instance"] == "quartet"


def test_a_package_contains_the_targets_of_links(tmp_path: Path) -> None:
    archive = helm_python.package(CHART, destination=str(tmp_path))
    with helm_python.Chart.load(archive) as chart:
        result = chart.render(example("node-8-gpus"), name="quartet", namespace="rlhf")
    assert (
        result["quartet/templates/monitoring.yaml"]
        == texts(example("node-8-gpus"))["quartet/templates/monitoring.yaml"]
    )


@pytest.mark.parametrize("plain", [True, False])
def test_the_notes_explain_how_to_open_the_dashboard(plain: bool) -> None:
    changes = {"security": {"allowPlaintext": True, "tls": {"enabled": False}}} if plain else {}
    notes = texts(changed("cpu-kind", **changes))["quartet/templates/NOTES.txt"]
    assert "kubectl --namespace rlhf port-forward service/quartet-gateway 8080:8080" in notes
    assert f"{'http' if plain else 'https'}://localhost:8080/#token=" in notes
    assert "get secret quartet-gateway-tokens" in notes
    assert ("TLS is off" in notes) == plain


@pytest.mark.parametrize(
    ("changes", "address"),
    [
        ({"tlsSecret": "certificate"}, "https://quartet.example.com"),  # pragma: allowlist secret - a name
        ({"annotations": {"route.openshift.io/termination": "reencrypt"}}, "https://quartet.example.com"),
        ({}, "http://quartet.example.com, or https:// if the Ingress controller has a certificate"),
    ],
)
def test_the_notes_give_the_scheme_of_the_ingress(changes: dict[str, object], address: str) -> None:
    values = changed("cpu-kind", ingress={"enabled": True, "host": "quartet.example.com", **changes})
    notes = texts(values)["quartet/templates/NOTES.txt"]
    assert f"From outside the cluster: {address}\n" in notes or f"From outside the cluster: {address}." in notes


def _at(spec: Manifest, key: str) -> object:
    value: object = spec
    for part in key.split("."):
        assert isinstance(value, dict), key
        value = value.get(part)
    return value
