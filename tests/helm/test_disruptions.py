"""Drains, evictions and preemptions: which pods a node's drain may evict, how long they take, and what counts as a failure."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.rendering import EXAMPLES, Manifest, Values, changed, example, manifests, of_kind, pod_templates
from tests.helm.test_components import pods


def replicas_of(values: Values) -> dict[str, tuple[str, int]]:
    """Return the kind and the number of the pods of each component, as the disruption controller counts them."""
    result = {}
    for item in manifests(values):
        spec = item.get("spec", {})
        if item["kind"] in ("Deployment", "StatefulSet", "Job"):
            name = spec["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
            result[name] = (item["kind"], spec.get("replicas", 1))
        elif item["kind"] == "LeaderWorkerSet":
            labels = spec["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["labels"]
            result[labels["app.kubernetes.io/component"]] = (item["kind"], spec["leaderWorkerTemplate"]["size"])
    return result


def blocks_evictions(budget: Manifest | None, kind: str, replicas: int) -> bool:
    """Return whether a budget refuses to evict a pod while all pods are healthy."""
    if budget is None:
        return False
    if "minAvailable" in budget:
        return bool(budget["minAvailable"] >= replicas)
    # A Job has no scale subresource: the controller cannot compute maxUnavailable and allows no disruption.
    return kind == "Job" or budget["maxUnavailable"] < 1


def budgets_of(values: Values) -> dict[str, Manifest]:
    """Return the spec of each budget by component."""
    result = of_kind(manifests(values), "PodDisruptionBudget").values()
    return {item["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]: item["spec"] for item in result}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_node_with_any_pod_can_be_drained(name: str) -> None:
    values = changed(name)
    values.get("defaults", {}).pop("podDisruptionBudget", None)
    budgets = budgets_of(values)
    for component, (kind, replicas) in replicas_of(values).items():
        assert not blocks_evictions(budgets.get(component), kind, replicas), component


def test_pods_that_are_not_ready_do_not_block_a_drain() -> None:
    for component, budget in budgets_of(example("single-node-4-gpus")).items():
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow", component


def test_evictions_are_refused_by_value() -> None:
    none: dict[str, Any] = {"enabled": True, "maxUnavailable": 0}
    values = changed("single-node-4-gpus", defaults__podDisruptionBudget=none, redis={"podDisruptionBudget": none})
    budgets = budgets_of(values)
    for component, (kind, replicas) in replicas_of(values).items():
        # Downloads continue where they were evicted.
        if component not in ("download", "loader"):
            assert blocks_evictions(budgets[component], kind, replicas), component


def test_no_budgets_are_created_if_they_are_disabled() -> None:
    assert budgets_of(example("cpu-kind")) == {}


def test_disruptions_do_not_count_as_failures_of_the_run_or_of_the_downloads() -> None:
    jobs = of_kind(manifests(example("single-node-4-gpus")), "Job")
    assert {name.rsplit("-", 1)[0] for name in jobs} == {"quartet-orchestrator", "quartet-download"}
    for job in jobs.values():
        assert_ignores_disruptions(job)


def assert_ignores_disruptions(job: Manifest) -> None:
    """Assert that evicted and terminated pods of a Job do not count. A failed pod stays with its log."""
    # Kubernetes accepts a podFailurePolicy only with this restart policy.
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    evicted, terminated = job["spec"]["podFailurePolicy"]["rules"]
    assert evicted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    # tests/e2e/test_drains.py: the status of an orchestrator that SIGTERM has stopped. Other failures count.
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert terminated == {
        "action": "Ignore",
        "onExitCodes": {"containerName": container["name"], "operator": "In", "values": [143]},
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_pod_holds_its_gpu_for_more_than_three_minutes_after_sigterm(name: str) -> None:
    for pod, template in pod_templates(manifests(example(name))):
        assert template["spec"].get("terminationGracePeriodSeconds", 30) <= 150, pod


def test_the_time_to_end_is_a_value() -> None:
    values = changed("single-node-4-gpus", components__actor={"drainSeconds": 1800})
    assert pods(values)["actor"]["terminationGracePeriodSeconds"] == 1830
