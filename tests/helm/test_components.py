"""The pods of a run: roles, mounts, probes, updates, scaling and images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from quartet.config.loading import load_config
from quartet.config.root import Config
from tests.helm.rendering import (
    Manifest,
    Values,
    changed,
    example,
    manifests,
    of_kind,
    pod_templates,
)

JUDGE = {"url": "https://judge.example/v1", "model": "m", "rubric": "r"}
TURNS: dict[str, Any] = {
    "config__rollout__max_turns": 3,
    "config__environment": {"class_name": "my_game:Game"},
}

TRAFFIC: dict[str, Any] = {
    "config__data": {},
    "config__algorithm": {"estimator": "reinforce_plus_plus"},
    "config__rollout": {
        "prompts_per_step": 8,
        "max_turns": 3,
        "max_off_policy_steps": 4,
        "in_flight_updates": True,
    },
    "config__environment": {"kind": "traffic"},
    "config__reward": {"source": "none"},
    "components__generator": {"enabled": True, "replicas": 2},
    "networkPolicy__traffic": {"namespace": {"kubernetes.io/metadata.name": "apps"}, "pods": {"app": "chat"}},
}
"""Users send requests to the policy, whose pods have the label app: chat in the namespace apps."""


def files(values: Values) -> dict[str, str]:
    """Return the files of the ConfigMap."""
    result: dict[str, str] = of_kind(manifests(values), "ConfigMap")["quartet-config"]["data"]
    return result


def pods(values: Values) -> dict[str, Manifest]:
    """Return the pod specs by the name of their container."""
    specs = [template["spec"] for _, template in pod_templates(manifests(values))]
    return {spec["containers"][0]["name"]: spec for spec in specs}


def containers(values: Values) -> dict[str, Manifest]:
    """Return the containers by name."""
    return {name: spec["containers"][0] for name, spec in pods(values).items()}


def roles_of(container: Manifest) -> list[str]:
    """Return the roles in the arguments of a container."""
    if container["command"][-1] != "quartet.services":
        return []
    arguments: list[str] = container["args"]
    return arguments[: arguments.index("--config")]


def test_roles_of_one_pod_share_its_certificate() -> None:
    result = containers(example("cpu-kind"))
    assert roles_of(result["critic"]) == ["critic", "reward"]
    assert "reward" not in result
    mounts = {mount["mountPath"] for mount in result["critic"]["volumeMounts"]}
    assert "/certificates/critic" in mounts


def test_a_pod_without_its_first_role_uses_the_certificate_of_the_next() -> None:
    values = changed("cpu-kind", config__algorithm={"estimator": "reinforce"})
    result = containers(values)
    assert roles_of(result["critic"]) == ["reward"]
    mounts = {mount["mountPath"] for mount in result["critic"]["volumeMounts"]}
    assert "/certificates/reward" in mounts
    services = yaml.safe_load(files(values)["deployment.yaml"])["services"]
    assert services["reward"]["address"] == "quartet-critic:50051"
    assert "critic" not in services


def test_only_pods_that_need_a_volume_mount_it() -> None:
    volumes = {
        template["spec"]["containers"][0]["name"]: _volumes(template)
        for _, template in pod_templates(manifests(example("vllm-generators")))
    }
    assert {name for name, result in volumes.items() if "claim quartet-runs" in result} == {
        "actor",
        "critic",
        "orchestrator",
        "gateway",
    }
    assert {name for name, result in volumes.items() if "secret quartet-redis" in result} == {
        "actor",
        "critic",
        "generator",
        "orchestrator",
        "gateway",
        "redis",
    }
    assert {name for name, result in volumes.items() if "secret quartet-gateway-tokens" in result} == {"gateway"}
    assert {name for name, result in volumes.items() if "secret quartet-ca" in result} == set()
    for name, result in volumes.items():
        certificates = {item for item in result if item.startswith("secret quartet-certificate-")}
        assert certificates == {f"secret quartet-certificate-{'gateway' if name == 'test' else name}"}


@pytest.mark.parametrize(
    ("reward", "mounted"),
    [
        ({"source": "model", "model": "models/reward"}, False),
        ({"source": "judge", "judge": JUDGE}, True),
        ({"source": "ensemble", "parts": [{"name": "j", "source": "judge", "judge": JUDGE}]}, True),
        ({"source": "ensemble", "parts": [{"name": "m", "model": "models/reward"}]}, False),
    ],
)
def test_the_reward_mounts_the_runs_for_the_cache_of_a_judge(reward: dict[str, Any], mounted: bool) -> None:
    values = changed("vllm-generators", config__reward=None)
    values["config"]["reward"] = reward
    volumes = {
        template["spec"]["containers"][0]["name"]: _volumes(template)
        for _, template in pod_templates(manifests(values))
    }
    assert ("claim quartet-runs" in volumes["reward"]) is mounted
    assert "claim quartet-runs" not in volumes["reference"]


def test_probes_use_grpc_and_allow_for_the_load_time() -> None:
    result = containers(changed("single-node-4-gpus", config__timeouts={"load_seconds": 1234}))
    for name in ("actor", "critic", "reward", "reference", "orchestrator"):
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert result[name][kind]["grpc"] == {"port": 9101}
    assert (
        result["actor"]["startupProbe"]["failureThreshold"] * result["actor"]["startupProbe"]["periodSeconds"] == 1240
    )
    probe = result["gateway"]["readinessProbe"]["httpGet"]
    assert probe == {
        "path": "/healthz",
        "port": 8080,
        "scheme": "HTTPS",
        "httpHeaders": [{"name": "Host", "value": "localhost"}],
    }
    assert result["gateway"]["livenessProbe"]["tcpSocket"] == {"port": 8080}, "the connection limit must not restart it"


def test_the_termination_grace_period_covers_the_longest_call() -> None:
    values = changed(
        "single-node-4-gpus",
        config__timeouts={"generate_seconds": 100, "update_seconds": 110, "score_seconds": 50},
        components__reference={"drainSeconds": 7, "terminationGracePeriodSeconds": 9},
    )
    results = {
        template["spec"]["containers"][0]["name"]: template["spec"] for _, template in pod_templates(manifests(values))
    }
    seconds = {
        "actor": (110, 140),
        "critic": (110, 140),
        "reward": (50, 80),
        "reference": (7, 9),
        "orchestrator": (10, 40),
    }
    for name, (drain, grace) in seconds.items():
        assert results[name]["containers"][0]["args"][-2:] == ["--set", f"timeouts.drain_seconds={drain}"]
        assert results[name]["terminationGracePeriodSeconds"] == grace


def test_a_changed_config_replaces_the_job_of_the_orchestrator() -> None:
    (job,) = of_kind(manifests(example("cpu-kind")), "Job").values()
    (same,) = of_kind(manifests(example("cpu-kind")), "Job").values()
    (other,) = of_kind(manifests(changed("cpu-kind", config__run={"name": "tiny", "steps": 7})), "Job").values()
    assert job["spec"]["backoffLimit"] == 20
    assert job["metadata"]["name"] == same["metadata"]["name"] != other["metadata"]["name"]


def test_trained_models_are_recreated_and_other_pods_roll() -> None:
    result = of_kind(manifests(example("single-node-4-gpus")), "Deployment")
    strategies = {name.removeprefix("quartet-"): item["spec"]["strategy"]["type"] for name, item in result.items()}
    assert strategies == {
        "actor": "Recreate",
        "critic": "Recreate",
        "reward": "RollingUpdate",
        "reference": "RollingUpdate",
        "gateway": "RollingUpdate",
    }


def test_scoring_services_are_headless() -> None:
    result = of_kind(manifests(example("single-node-4-gpus")), "Service")
    headless = {name for name, item in result.items() if item["spec"].get("clusterIP") == "None"}
    assert headless == {"quartet-reward", "quartet-reference"}


def test_generators_are_replicas_with_their_own_image_behind_a_headless_service() -> None:
    values = example("vllm-generators")
    result = manifests(values)
    deployment = of_kind(result, "Deployment")["quartet-generator"]["spec"]
    (container,) = deployment["template"]["spec"]["containers"]
    assert deployment["replicas"] == 4
    assert deployment["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}
    assert container["image"] == "quartet:0.1.0-vllm"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert of_kind(result, "Service")["quartet-generator"]["spec"]["clusterIP"] == "None"
    assert of_kind(result, "PodDisruptionBudget")["quartet-generator"]["spec"]["maxUnavailable"] == 1
    # It writes only to Redis.
    mounted = _volumes(deployment["template"])
    assert {name for name in mounted if "quartet-runs" in name} == set()
    assert "secret quartet-redis" in mounted
    assert "secret quartet-certificate-generator" in mounted
    # Another generator does the work of one that leaves, so it does not hold its GPU for the rest of a step.
    assert container["args"][-2:] == ["--set", "timeouts.drain_seconds=10"]
    seconds = container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"]
    assert seconds == Config.model_fields["timeouts"].default.load_seconds


def test_the_config_names_the_generators_and_starts_none(tmp_path: Path) -> None:
    for name, text in files(changed("vllm-generators", config__rollout__generators=3)).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    config = load_config(tmp_path / "config.yaml", [], [tmp_path / "deployment.yaml"])
    assert config.services.generators == ("quartet-generator:50051",)
    assert config.rollout.generators == 0
    assert config.services.generator.listen == "0.0.0.0:50051"
    assert config.services.generator.devices == (0,)


@pytest.mark.parametrize(
    ("example", "component", "settings"),
    [
        ("single-node-4-gpus", "reference", {"config__reference": {"sync_steps": 8}}),
        ("single-node-4-gpus", "reference", {"config__actor__model": "runs/earlier/policy"}),
        ("single-node-4-gpus", "reward", {"config__reward__model": "/quartet/runs/earlier/reward"}),
        ("vllm-generators", "generator", {"config__actor__model": "runs/earlier/policy"}),
    ],
)
def test_a_component_that_reads_a_model_of_a_run_mounts_the_folder_of_runs(
    example: str, component: str, settings: dict[str, Any]
) -> None:
    for given, expected in (({}, []), (settings, [True])):
        spec = pods(changed(example, **given))[component]
        mounts = [mount for mount in spec["containers"][0]["volumeMounts"] if mount["mountPath"] == "/quartet/runs"]
        assert [mount.get("readOnly") for mount in mounts] == expected


def test_other_components_do_not_mount_the_folder_of_runs() -> None:
    result = pods(changed("vllm-generators", config__critic__model="runs/earlier/critic"))
    for name in ("generator", "reward", "reference"):
        assert "/quartet/runs" not in [each["mountPath"] for each in result[name]["containers"][0]["volumeMounts"]]


def test_a_component_may_mount_the_model_of_a_run_itself() -> None:
    own = [{"name": "earlier", "mountPath": "/quartet/runs/earlier"}]
    volumes = [{"name": "earlier", "persistentVolumeClaim": {"claimName": "earlier"}}]
    values = changed("vllm-generators", config__actor__model="runs/earlier/policy")
    values["components"]["generator"] |= {"extraVolumeMounts": own, "extraVolumes": volumes}
    mounts = [each["mountPath"] for each in pods(values)["generator"]["containers"][0]["volumeMounts"]]
    assert "/quartet/runs/earlier" in mounts
    assert "/quartet/runs" not in mounts


def test_the_environment_has_the_models_but_neither_gpu_nor_buffer(tmp_path: Path) -> None:
    values = changed("single-node-4-gpus", **TURNS)
    result = manifests(values)
    deployment = of_kind(result, "Deployment")["quartet-environment"]["spec"]
    (container,) = deployment["template"]["spec"]["containers"]
    assert (deployment["replicas"], container["args"][0]) == (1, "environment")
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert not [name for name in _volumes(deployment["template"]) if "redis" in name]
    folders = {mount["mountPath"] for mount in container["volumeMounts"] if mount["mountPath"].startswith("/quartet/")}
    assert folders == {"/quartet/models"}
    for name, text in files(values).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    config = load_config(tmp_path / "config.yaml", [], [tmp_path / "deployment.yaml"])
    assert config.services.environment.address == "quartet-environment:50051"


def test_turns_without_the_component_of_the_environment_are_refused() -> None:
    with pytest.raises(helm_python.HelmError, match="no enabled component has the role environment"):
        manifests(changed("cpu-kind", components__environment={"enabled": False}, **TURNS))


@pytest.mark.parametrize(
    ("rollout", "text"),
    [
        ({"generators": 2}, r"config\.rollout\.generators: .*components\.generator\.enabled"),
        ({"engine": "vllm"}, r"config\.rollout\.engine vllm: .*components\.generator\.enabled"),
    ],
)
def test_generators_without_their_component_are_refused(rollout: dict[str, Any], text: str) -> None:
    with pytest.raises(helm_python.HelmError, match=text):
        manifests(changed("single-node-4-gpus", config__rollout=rollout))


def test_autoscaled_deployments_have_no_replicas() -> None:
    result = manifests(example("node-8-gpus"))
    deployments = of_kind(result, "Deployment")
    scaled = of_kind(result, "ScaledObject")["quartet-reward"]["spec"]
    by_hpa = of_kind(result, "HorizontalPodAutoscaler")["quartet-reference"]["spec"]
    assert scaled["scaleTargetRef"]["name"] in deployments
    assert by_hpa["scaleTargetRef"]["name"] in deployments
    assert "replicas" not in deployments["quartet-reward"]["spec"]
    assert "replicas" not in deployments["quartet-reference"]["spec"]
    assert deployments["quartet-gateway"]["spec"]["replicas"] == 2
    (trigger,) = scaled["triggers"]
    assert trigger["metadata"]["threshold"] == "32"
    assert by_hpa["metrics"][0]["pods"]["metric"]["name"] == "quartet_work_pending"


def test_autoscaling_uses_documented_metrics() -> None:
    names = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text(encoding="utf-8")
    scaled = of_kind(manifests(example("node-8-gpus")), "ScaledObject")["quartet-reward"]["spec"]
    query = scaled["triggers"][0]["metadata"]["query"]
    assert query == (
        'clamp_min(max(quartet_buffer_depth{run="helpful-8"}) - max(quartet_trajectories_scored{run="helpful-8"}), 0)'
    )
    for name in (
        "quartet_buffer_depth",
        "quartet_trajectories_expected",
        "quartet_trajectories_scored",
        "quartet_work_pending",
    ):
        assert f"`{name}{{run}}`" in names or f"`{name}`" in names


def test_generators_scale_by_the_responses_that_the_step_still_needs() -> None:
    scaling = {"kind": "keda", "maxReplicas": 6, "keda": {"serverAddress": "http://prometheus:9090"}}
    result = manifests(
        changed("vllm-generators", components__generator__autoscaling=scaling, components__generator__replicas=1)
    )
    assert "replicas" not in of_kind(result, "Deployment")["quartet-generator"]["spec"]
    spec = of_kind(result, "ScaledObject")["quartet-generator"]["spec"]
    assert (spec["scaleTargetRef"]["name"], spec["minReplicaCount"], spec["maxReplicaCount"]) == (
        "quartet-generator",
        1,
        6,
    )
    metadata = spec["triggers"][0]["metadata"]
    assert metadata["query"] == (
        'clamp_min(max(quartet_trajectories_expected{run="helpful"}) - max(quartet_buffer_depth{run="helpful"}), 0)'
    )
    # A generator decodes rollout.max_concurrent_sequences at a time.
    assert metadata["threshold"] == str(Config.model_fields["rollout"].default.max_concurrent_sequences)


@pytest.mark.parametrize(("component", "seconds"), [("reward", 600), ("reference", 600)])
def test_pods_are_not_removed_while_the_run_updates_its_models(component: str, seconds: int) -> None:
    result = manifests(example("node-8-gpus"))
    name = f"quartet-{component}"
    scaler = (of_kind(result, "ScaledObject") | of_kind(result, "HorizontalPodAutoscaler"))[name]["spec"]
    # cooldownPeriod of KEDA concerns the last pod only.
    scaler = scaler.get("advanced", {}).get("horizontalPodAutoscalerConfig", scaler)
    assert scaler["behavior"]["scaleDown"] == {"stabilizationWindowSeconds": seconds}


def test_keda_requires_the_address_of_prometheus() -> None:
    values = changed("node-8-gpus", components__reward__autoscaling__keda__serverAddress="")
    with pytest.raises(helm_python.HelmError, match=r"components\.reward\.autoscaling\.keda\.serverAddress: needed"):
        manifests(values)


def test_defaults_apply_to_all_components_and_a_node_selector_replaces_them() -> None:
    results = {
        template["spec"]["containers"][0]["name"]: template["spec"]
        for _, template in pod_templates(manifests(example("node-8-gpus")))
    }
    assert results["actor"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert results["gateway"]["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
    assert "tolerations" not in results["gateway"]
    assert results["orchestrator"]["priorityClassName"] == "training"


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ({}, "quartet:0.1.0-cpu"),
        ({"tag": "7", "variant": ""}, "quartet:7"),
        (
            {"registry": "registry.example.com/", "repository": "ml/quartet", "variant": "cuda"},
            "registry.example.com/ml/quartet:0.1.0-cuda",
        ),
        ({"digest": "sha256:" + "a" * 64}, "quartet@sha256:" + "a" * 64),
    ],
)
def test_an_image_reference_consists_of_registry_repository_and_tag_or_digest(
    image: dict[str, Any], expected: str
) -> None:
    assert containers(changed("cpu-kind", components__actor__image=image))["actor"]["image"] == expected


def _volumes(template: Manifest) -> set[str]:
    results = set()
    for volume in template["spec"]["volumes"]:
        if "persistentVolumeClaim" in volume:
            results.add(f"claim {volume['persistentVolumeClaim']['claimName']}")
        if "secret" in volume:
            results.add(f"secret {volume['secret']['secretName']}")
        for source in volume.get("projected", {}).get("sources", []):
            results.add(f"secret {source['secret']['name']}")
    return results


def test_users_reach_every_generator_by_one_service_with_keys_from_a_secret() -> None:
    result = manifests(changed("single-node-4-gpus", **TRAFFIC))
    (port,) = of_kind(result, "Service")["quartet-traffic"]["spec"]["ports"]
    assert (port["port"], port["targetPort"], port["appProtocol"]) == (8090, "policy", "https")
    selector = of_kind(result, "Service")["quartet-traffic"]["spec"]["selector"]
    pods = {name for name, item in pod_templates(result) if selector.items() <= item["metadata"]["labels"].items()}
    assert pods == {"Deployment/quartet-generator"}
    assert "quartet-environment" not in of_kind(result, "Deployment")
    secret = of_kind(result, "Secret")["quartet-traffic-keys"]["data"]
    assert secret["operators"] != secret["viewers"]
    overlay = yaml.safe_load(of_kind(result, "ConfigMap")["quartet-config"]["data"]["deployment.yaml"])
    assert overlay["environment"] == {
        "agent": {"listen": "0.0.0.0:8090"},
        "traffic": {
            "viewer_keys_file": "/run/secrets/quartet/traffic_viewers",
            "operator_keys_file": "/run/secrets/quartet/traffic_operators",
        },
    }
    for name, template in pod_templates(result):
        sources = [
            source["secret"]
            for volume in template["spec"]["volumes"]
            for source in volume.get("projected", {}).get("sources", ())
        ]
        items = [item for source in sources if source["name"] == "quartet-traffic-keys" for item in source["items"]]
        paths = {item["key"]: item["path"] for item in items}
        expected = {"operators": "traffic_operators", "viewers": "traffic_viewers"}
        assert paths == (expected if name == "Deployment/quartet-generator" else {})
    names = of_kind(result, "Secret")["quartet-certificate-generator"]["metadata"]["annotations"]["quartet/names"]
    assert {"generator.quartet", "quartet-traffic", "quartet-traffic.rlhf.svc", "localhost"} <= set(names.split(","))


def test_keys_of_users_may_come_from_an_existing_secret() -> None:
    values = changed("single-node-4-gpus", **TRAFFIC, traffic={"keys": {"existingSecret": "chat", "viewerKey": "apps"}})
    result = manifests(values)
    assert "quartet-traffic-keys" not in of_kind(result, "Secret")
    template = of_kind(result, "Deployment")["quartet-generator"]["spec"]["template"]
    (source,) = [
        source["secret"]
        for volume in template["spec"]["volumes"]
        for source in volume.get("projected", {}).get("sources", ())
        if source["secret"]["name"] == "chat"
    ]
    assert {item["key"] for item in source["items"]} == {"operators", "apps"}
