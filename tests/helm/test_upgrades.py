"""Upgrades to another run, the Jobs of earlier ones, and releases beside each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import helm_python
import kubernetes_validate
import pytest

from tests.helm.cluster import ApiServer
from tests.helm.rendering import (
    NAMESPACE,
    Manifest,
    Values,
    changed,
    chart_for,
    example,
    manifests,
    objects,
    of_kind,
    pod_templates,
)


def run(name: str) -> Values:
    """Return values of a run."""
    return changed("cpu-kind", config__run={"name": name, "steps": 6})


def live(job: Manifest, condition: str | None, created: str = "2026-01-01T00:00:00Z") -> Manifest:
    """Return a Job as a cluster has it: with defaults, a selector and the labels of its pods."""
    result = deepcopy(job)
    result["metadata"] |= {"uid": "u", "namespace": NAMESPACE, "creationTimestamp": created}
    spec = result["spec"]
    spec |= {
        "completions": 1,
        "parallelism": 1,
        "suspend": False,
        "selector": {"matchLabels": {"batch.kubernetes.io/controller-uid": "u"}},
    }
    spec["template"]["metadata"] |= {"creationTimestamp": None}
    for key in ("controller-uid", "batch.kubernetes.io/controller-uid"):
        spec["template"]["metadata"]["labels"][key] = "u"
    for key in ("job-name", "batch.kubernetes.io/job-name"):
        spec["template"]["metadata"]["labels"][key] = job["metadata"]["name"]
    result["status"] = {"conditions": [{"type": condition, "status": "True"}] if condition else [], "active": 1}
    return result


def job_of(values: Values, cluster: helm_python.Config | None = None) -> Manifest:
    """Return the Job of the current config: the only one without a cluster."""
    (job,) = of_kind(manifests(values, cluster), "Job").values()
    return job


@pytest.mark.parametrize("condition", ["Complete", "Failed"])
def test_an_upgrade_keeps_a_finished_job_with_its_logs(
    api: ApiServer, cluster: helm_python.Config, condition: str
) -> None:
    before = job_of(run("first"))
    api.store([live(before, condition)])
    result = of_kind(manifests(run("second"), cluster), "Job")
    assert set(result) == {before["metadata"]["name"], job_of(run("second"))["metadata"]["name"]}
    kept = result[before["metadata"]["name"]]
    # Helm applies it again. It must change nothing of a finished Job, and a rollback must be able to create it.
    assert kept["metadata"]["labels"] == before["metadata"]["labels"]
    assert kept["spec"]["template"] == before["spec"]["template"]
    assert kept["spec"].items() >= before["spec"].items()
    # If it was deleted, a rollback creates it again, with the config of the second run. It must not start then.
    assert kept["spec"]["suspend"] is True
    assert "selector" not in kept["spec"]
    assert "status" not in kept
    kubernetes_validate.validate(kept, "1.29", strict=True)


def test_an_upgrade_replaces_a_job_that_runs(api: ApiServer, cluster: helm_python.Config) -> None:
    """The next one resumes its run, and waits until it is gone."""
    before = job_of(run("first"))
    api.store([live(before, None)])
    assert set(of_kind(manifests(run("second"), cluster), "Job")) == {job_of(run("second"))["metadata"]["name"]}


def test_an_upgrade_without_a_change_of_the_run_keeps_its_job(api: ApiServer, cluster: helm_python.Config) -> None:
    current = job_of(run("first"))
    api.store([live(current, "Complete")])
    assert job_of(run("first"), cluster) == current
    assert "suspend" not in current["spec"]


def test_jobs_of_others_are_not_adopted(api: ApiServer, cluster: helm_python.Config) -> None:
    job = live(job_of(run("first")), "Complete")
    others = []
    for key, value in (("instance", "other"), ("component", "download"), ("part-of", "other")):
        other = deepcopy(job)
        other["metadata"]["labels"][f"app.kubernetes.io/{key}"] = value
        other["metadata"]["name"] += f"-{key}"
        others.append(other)
    del job["metadata"]["labels"]
    api.store([*others, job])
    assert len(of_kind(manifests(run("second"), cluster), "Job")) == 1


@pytest.mark.parametrize("limit", [0, 2])
def test_only_the_newest_finished_jobs_are_kept(api: ApiServer, cluster: helm_python.Config, limit: int) -> None:
    days = {f"run{day}": f"2026-01-0{day}T00:00:00Z" for day in (3, 1, 2)}
    jobs = {name: job_of(run(name)) for name in days}
    api.store([live(jobs[name], "Complete", created) for name, created in days.items()])
    values = run("next")
    values["components"]["orchestrator"]["jobsHistoryLimit"] = limit
    result = of_kind(manifests(values, cluster), "Job")
    kept = {name for name, job in jobs.items() if job["metadata"]["name"] in result}
    assert kept == set(["run3", "run2"][:limit])


def release(name: str, values: Values) -> list[Manifest]:
    """Return the objects of another release in the same namespace."""
    return objects(chart_for(values).render(json.loads(json.dumps(values)), name=name, namespace=NAMESPACE))


SECOND: dict[str, Any] = {"storage": {"claim": {"existingClaim": "quartet-storage"}}, "loader": {"enabled": False}}
"""The values of the README for a second release beside the first one."""


@pytest.mark.parametrize("name", ["second", "quartet-2", "quartet-actor", "quartet-storage"])
def test_a_second_release_beside_the_first_shares_only_the_volume(name: str) -> None:
    first = manifests(run("first"))
    second = release(name, {**run("second"), **SECOND})
    keys = [{(item["kind"], item["metadata"]["name"]) for item in result} for result in (first, second)]
    assert not keys[0] & keys[1]
    assert of_kind(second, "PersistentVolumeClaim") == {}
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for _, template in pod_templates(second)
        for volume in template["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {"quartet-storage"}


def test_no_object_of_a_release_selects_pods_of_another_one() -> None:
    releases = {"quartet": manifests(run("first")), "second": release("second", {**run("second"), **SECOND})}
    labels = {
        name: [template["metadata"]["labels"] for _, template in pod_templates(result)]
        for name, result in releases.items()
    }
    checked = 0
    for name, result in releases.items():
        (other,) = set(releases) - {name}
        for item in result:
            for selector in _selectors(item):
                checked += 1
                assert any(selector.items() <= pod.items() for pod in labels[name]), item["metadata"]["name"]
                assert not any(selector.items() <= pod.items() for pod in labels[other]), item["metadata"]["name"]
    assert checked > 60


def _selectors(item: Manifest) -> Iterator[dict[str, str]]:
    """Yield the selectors of pods of this namespace."""
    spec = item.get("spec", {})
    if item["kind"] == "Service":
        yield spec["selector"]
    if item["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
        yield spec["selector"]["matchLabels"]
    if item["kind"] == "NetworkPolicy":
        yield spec["podSelector"]["matchLabels"]
        for rule in (*(spec.get("ingress") or []), *(spec.get("egress") or [])):
            for peer in (*rule.get("from", []), *rule.get("to", [])):
                if "namespaceSelector" not in peer and "podSelector" in peer:
                    yield peer["podSelector"]["matchLabels"]


def test_another_run_name_replaces_the_pods_of_the_run_only() -> None:
    before, after = manifests(run("first")), manifests(run("second"))
    changed_pods = {
        name
        for (name, template), (_, other) in zip(pod_templates(before), pod_templates(after), strict=True)
        if template != other
    }
    assert not any("redis" in name or "loader" in name for name in changed_pods)
    assert example("cpu-kind")["components"]
