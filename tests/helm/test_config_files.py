"""The two config files of a run: the config of the user, unchanged, and the overlay of the chart."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from quartet.config.estimators import BUILT_IN_ESTIMATORS
from quartet.config.layout import model_roles, service_roles
from quartet.config.loading import load_config
from tests.helm.rendering import EXAMPLES, Values, changed, example, manifests, of_kind, pod_templates
from tests.helm.test_components import TRAFFIC, TURNS, containers, files, roles_of

LORA = {"model": "models/policy", "lora": {"rank": 8}}
RUNS: dict[str, Values] = {
    **{name: example(name) for name in EXAMPLES},
    **{
        estimator: changed(
            "single-node-4-gpus",
            config__algorithm={"estimator": estimator},
            config__rollout={"prompts_per_step": 8, "samples_per_prompt": 4},
        )
        for estimator in BUILT_IN_ESTIMATORS
    },
    "custom estimator": changed(
        "single-node-4-gpus",
        config__algorithm={"estimator": "my_package.advantages:mine", "custom_estimator": {}},
    ),
    "custom estimator with critic": changed(
        "single-node-4-gpus",
        config__algorithm={"estimator": "my_package.advantages:mine", "custom_estimator": {"needs_critic": True}},
    ),
    "adapter": changed("single-node-4-gpus", config__actor=LORA),
    "adapter and reference": changed(
        "single-node-4-gpus", config__actor=LORA, config__reference={"model": "models/reference"}
    ),
    "environment": changed("cpu-kind", **TURNS),
    "agents": changed(
        "cpu-kind",
        config__rollout__max_turns=3,
        config__environment={"kind": "agent", "agent": {"url": "https://agents/run"}},
    ),
    "traffic": changed("single-node-4-gpus", **TRAFFIC),
    "distillation": changed(
        "single-node-4-gpus",
        config__algorithm={"estimator": "reinforce", "kl_coefficient": 0, "distillation": {}},
        config__reference={"model": "models/teacher"},
        config__reward={"source": "none"},
    ),
    "adapter is null": changed("single-node-4-gpus", config__actor={"model": "models/policy", "lora": None}),
}


@pytest.mark.parametrize("name", RUNS)
def test_config_and_overlay_load_as_one_config_whose_roles_the_pods_run(name: str, tmp_path: Path) -> None:
    for file, text in files(RUNS[name]).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    overlay, own = tmp_path / "deployment.yaml", tmp_path / "own.yaml"
    config = load_config(tmp_path / "config.yaml", layers=[overlay])
    assert config.run.name == RUNS[name]["config"]["run"]["name"]
    assert all(getattr(config.services, role).address for role in model_roles(config))
    # The chart changes nothing of the config of the user.
    own.write_text(yaml.safe_dump(RUNS[name]["config"]), encoding="utf-8")
    assert config == load_config(own, layers=[overlay])
    result = sorted(role for container in containers(RUNS[name]).values() for role in roles_of(container))
    generators = ["generator"] if name in ("vllm-generators", "leader-worker-set", "traffic") else []
    assert result == sorted([*(role.value for role in service_roles(config)), *generators, "orchestrator"])


def test_a_run_without_a_reward_has_no_reward_pod() -> None:
    result = containers(RUNS["distillation"])
    assert "reference" in result
    assert "reward" not in result
    assert "reward" not in yaml.safe_load(files(RUNS["distillation"])["deployment.yaml"])["services"]


def test_the_overlay_contains_addresses_secrets_and_certificates() -> None:
    result = yaml.safe_load(files(example("cpu-kind"))["deployment.yaml"])
    listen = {"listen": "0.0.0.0:50051", "metrics_listen": "0.0.0.0:9100", "health_listen": "0.0.0.0:9101"}
    components = {"actor": "actor", "critic": "critic", "reward": "critic", "reference": "reference"}
    assert result == {
        "run": {"directory": "runs"},
        "services": {
            **{
                role: {"address": f"quartet-{component}:50051", "devices": [], **listen}
                for role, component in components.items()
            },
            "orchestrator": {"address": "quartet-orchestrator:50051", **listen},
        },
        "buffer": {
            "url": "rediss://quartet@quartet-redis:6379/0",
            "password_file": "/run/secrets/quartet/redis_password",
        },
        "security": {
            "certificates": "/certificates",
            "token_file": "/run/secrets/quartet/rpc_token",
            "allow_plaintext": False,
        },
        "gateway": {
            "listen": "0.0.0.0:8080",
            "start_runs": False,
            "allowed_hosts": [
                "quartet-gateway",
                "quartet-gateway.rlhf",
                "quartet-gateway.rlhf.svc",
                "quartet-gateway.rlhf.svc.cluster.local",
            ],
            "token_file": "/run/secrets/quartet/gateway_token",
            "viewer_token_file": "/run/secrets/quartet/gateway_viewer_token",
            "certificate_file": "/certificates/gateway/tls.crt",
            "key_file": "/certificates/gateway/tls.key",
        },
    }


def test_every_address_is_a_kubernetes_service_that_selects_pods() -> None:
    for name in EXAMPLES:
        result = manifests(example(name))
        services = of_kind(result, "Service")
        labels = [template["metadata"]["labels"] for _, template in pod_templates(result)]
        addresses = yaml.safe_load(files(example(name))["deployment.yaml"])["services"]
        generators = addresses.pop("generators", [])
        for address in [*generators, *(entry["address"] for entry in addresses.values() if "address" in entry)]:
            host, _, port = address.partition(":")
            service = services[host]["spec"]
            assert int(port) in [item["port"] for item in service["ports"]]
            # The controllers of LeaderWorkerSets and StatefulSets add the index to the labels of the pods.
            selector = {key: value for key, value in service["selector"].items() if not key.endswith("-index")}
            assert any(selector.items() <= item.items() for item in labels)


def test_gpus_set_limits_and_devices() -> None:
    values = example("two-node-actor")
    result = containers(values)
    services = yaml.safe_load(files(values)["deployment.yaml"])["services"]
    assert result["actor"]["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert services["actor"]["devices"] == list(range(8))
    assert services["reward"]["devices"] == []
    assert "nvidia.com/gpu" not in result["reward"]["resources"]["limits"]
    assert services["actor"]["nodes"] == 2
    assert "nodes" not in services["reference"]
