"""Roles of several ranks: the pods of a worker group, their rendezvous, their probes, and what restarts as one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet.config.loading import load_config
from tests.helm.rendering import Manifest, Values, changed, example, manifests, of_kind
from tests.helm.test_components import containers, files, pods

PARTS = ("leaderTemplate", "workerTemplate")


def stateful_set(values: Values, component: str = "actor") -> Manifest:
    """Return the spec of the StatefulSet of a component."""
    spec: Manifest = of_kind(manifests(values), "StatefulSet")[f"quartet-{component}"]["spec"]
    return spec


def options_of(command: list[str]) -> dict[str, str]:
    """Return the options of torchrun in a command."""
    assert command[:3] == ["tini", "--", "torchrun"]
    assert command[-2:] == ["--module", "quartet.services"]
    return dict(option.removeprefix("--").split("=", 1) for option in command[3:-2])


def test_the_pods_of_a_stateful_set_meet_at_the_first_one() -> None:
    values = example("two-node-actor")
    spec, services = stateful_set(values), of_kind(manifests(values), "Service")
    (container,) = spec["template"]["spec"]["containers"]
    assert (spec["replicas"], spec["podManagementPolicy"]) == (2, "Parallel")
    assert options_of(container["command"]) == {
        "nnodes": "2",
        "nproc-per-node": "8",
        "node-rank": "$(NODE_RANK)",
        "master-addr": f"quartet-actor-0.{spec['serviceName']}",
        "master-port": "29500",
        "max-restarts": "3",
    }
    (rank,) = (item for item in container["env"] if item["name"] == "NODE_RANK")
    assert rank["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    rendezvous = services[spec["serviceName"]]["spec"]
    assert (rendezvous["clusterIP"], rendezvous["publishNotReadyAddresses"]) == ("None", True)
    assert rendezvous["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    (port,) = rendezvous["ports"]
    ports = {item["name"]: item["containerPort"] for item in container["ports"]}
    assert (port["port"], ports[port["targetPort"]]) == (29500, 29500)


def test_the_service_of_a_group_points_at_its_first_pod() -> None:
    service = of_kind(manifests(example("two-node-actor")), "Service")["quartet-actor"]["spec"]
    assert service["selector"]["apps.kubernetes.io/pod-index"] == "0"
    service = of_kind(manifests(example("leader-worker-set")), "Service")["quartet-actor"]["spec"]
    assert service["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"


@pytest.mark.parametrize("kind", ["startupProbe", "readinessProbe", "livenessProbe"])
@pytest.mark.parametrize(("node", "status"), [("0", 3), ("1", 0)])
def test_only_the_first_pod_of_a_stateful_set_is_probed(kind: str, node: str, status: int, tmp_path: Path) -> None:
    (container,) = stateful_set(example("two-node-actor"))["template"]["spec"]["containers"]
    command = container[kind]["exec"]["command"]
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    (tmp_path / "python").chmod(0o700)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NODE_RANK": node}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == status
    assert result.stdout == ("-m quartet.rpc.health 127.0.0.1:9101\n" if node == "0" else "")


def test_a_leader_worker_set_restarts_as_one_and_only_its_leader_is_probed() -> None:
    result = manifests(example("leader-worker-set"))
    assert sorted(of_kind(result, "LeaderWorkerSet")) == ["quartet-actor-nodes", "quartet-critic-nodes"]
    spec = of_kind(result, "LeaderWorkerSet")["quartet-actor-nodes"]["spec"]
    template = spec["leaderWorkerTemplate"]
    leader, worker = (template[part]["spec"]["containers"][0] for part in PARTS)
    assert (spec["replicas"], template["size"]) == (1, 2)
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert leader["command"] == worker["command"]
    options = options_of(leader["command"])
    assert (options["nnodes"], options["nproc-per-node"]) == ("2", "8")
    assert (options["node-rank"], options["master-addr"]) == ("$(LWS_WORKER_INDEX)", "$(LWS_LEADER_ADDRESS)")
    assert leader["readinessProbe"]["grpc"] == {"port": 9101}
    assert not [key for key in worker if key.endswith("Probe")]
    # The controller creates a Service with the name of the LeaderWorkerSet.
    assert not set(of_kind(result, "LeaderWorkerSet")) & set(of_kind(result, "Service"))


def test_the_settings_of_groups_reach_torchrun() -> None:
    values = changed("two-node-actor", workerGroups={"maxRestarts": 0, "port": 30000})
    (container,) = stateful_set(values)["template"]["spec"]["containers"]
    options = options_of(container["command"])
    assert (options["max-restarts"], options["master-port"]) == ("0", "30000")
    assert {"name": "rendezvous", "containerPort": 30000} in container["ports"]


@pytest.mark.parametrize("set_of_leaders", [False, True])
def test_a_group_ends_within_the_time_that_torchrun_gives_its_ranks(set_of_leaders: bool) -> None:
    values = changed("two-node-actor", workerGroups={"leaderWorkerSet": set_of_leaders})
    pod = pods(values)["actor"]
    assert pod["terminationGracePeriodSeconds"] == 50
    assert pod["containers"][0]["args"][-2:] == ["--set", "timeouts.drain_seconds=20"]


def test_one_pod_of_a_group_is_evicted_at_a_time() -> None:
    budgets = of_kind(manifests(changed("two-node-actor", components__reference={"nodes": 3})), "PodDisruptionBudget")
    assert budgets["quartet-actor"]["spec"]["maxUnavailable"] == 1
    assert budgets["quartet-reference"]["spec"]["maxUnavailable"] == 1


def test_several_gpus_of_one_pod_need_no_torchrun() -> None:
    values = example("node-8-gpus")
    container = containers(values)["actor"]
    assert container["command"] == ["tini", "--", "python", "-m", "quartet.services"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert yaml.safe_load(files(values)["deployment.yaml"])["services"]["actor"]["devices"] == [0, 1]
    assert of_kind(manifests(values), "StatefulSet").keys() == {"quartet-redis"}


@pytest.mark.parametrize(
    ("name", "component", "size"),
    [
        ("node-8-gpus", "actor", "16Gi"),  # The component's.
        ("node-8-gpus", "critic", "8Gi"),
        ("node-8-gpus", "reward", None),
        ("leader-worker-set", "critic", "64Gi"),
    ],
)
def test_ranks_have_shared_memory_with_a_limit(name: str, component: str, size: str | None) -> None:
    pod = pods(example(name))[component]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    if size is None:
        assert "/dev/shm" not in mounts
    else:
        assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": size}


def test_a_frozen_role_of_several_nodes_has_a_service_with_an_address() -> None:
    result = manifests(changed("two-node-actor", components__reference={"nodes": 2, "gpus": 8}))
    service = of_kind(result, "Service")["quartet-reference"]["spec"]
    assert "clusterIP" not in service
    assert service["selector"]["apps.kubernetes.io/pod-index"] == "0"


def test_processes_on_cpus_are_ranks(tmp_path: Path) -> None:
    groups: dict[str, Any] = {
        "config__services": {"actor": {"processes": 2}},
        "components__actor": {"gpus": 0, "nodes": 2},
    }
    values = changed("cpu-kind", **groups)
    (container,) = stateful_set(values)["template"]["spec"]["containers"]
    assert options_of(container["command"])["nproc-per-node"] == "2"
    for name, text in files(values).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    service = load_config(tmp_path / "config.yaml", [], [tmp_path / "deployment.yaml"]).services.actor
    assert (service.processes, service.devices) == (2, ())


def test_parallel_sizes_and_offload_of_the_config_are_kept(tmp_path: Path) -> None:
    keys = {"parallel": {"tensor": 2, "shard": 8}, "offload": {"optimizer": True}, "num_threads": 4}
    for name, text in files(changed("two-node-actor", config__services={"actor": keys})).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    service = load_config(tmp_path / "config.yaml", [], [tmp_path / "deployment.yaml"]).services.actor
    assert (service.parallel.tensor, service.parallel.shard, service.offload.optimizer) == (2, 8, True)
    assert service.devices == tuple(range(8))


@pytest.mark.slow
def test_torchrun_of_this_environment_accepts_the_command() -> None:
    (container,) = stateful_set(example("two-node-actor"))["template"]["spec"]["containers"]
    program = (
        "import sys; from torch.distributed.run import parse_args; options = parse_args(sys.argv[1:]);"
        "print(options.module, options.training_script, options.max_restarts, options.nproc_per_node)"
    )
    arguments = [argument.replace("$(NODE_RANK)", "1") for argument in container["command"][3:]] + container["args"]
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "quartet.services", "3", "8"]
