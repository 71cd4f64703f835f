"""The two files that a run's processes read: the user's config as it was written, and what the chart lays over it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from quartet.config import Config, load_config
from quartet.topology import model_roles
from tests.helm.rendering import EXAMPLES, example, manifests, of_kind, pod_templates
from tests.helm.test_components import RUNS, containers, files


@pytest.mark.parametrize("name", RUNS)
def test_the_config_comes_through_as_it_was_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(files(RUNS[name])["config.yaml"], encoding="utf-8")
    assert load_config(path) == Config.model_validate(RUNS[name]["config"])


@pytest.mark.parametrize("name", RUNS)
def test_both_files_are_one_config(name: str, tmp_path: Path) -> None:
    for file, text in files(RUNS[name]).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    config = load_config(tmp_path / "config.yaml", layers=[tmp_path / "deployment.yaml"])
    assert config.run.name == RUNS[name]["config"]["run"]["name"]
    assert all(getattr(config.services, role).address for role in model_roles(config))


def test_the_second_file_says_where_everything_is() -> None:
    result = yaml.safe_load(files(example("cpu-kind"))["deployment.yaml"])
    everywhere = {"listen": "0.0.0.0:50051", "metrics_listen": "0.0.0.0:9100", "health_listen": "0.0.0.0:9101"}
    homes = {"actor": "actor", "critic": "critic", "reward": "critic", "reference": "reference"}
    assert result == {
        "run": {"directory": "runs"},
        "services": {
            **{role: {"address": f"quartet-{home}:50051", "devices": [], **everywhere} for role, home in homes.items()},
            "orchestrator": {"address": "quartet-orchestrator:50051", **everywhere},
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


def test_every_address_is_a_service_that_leads_to_its_pods() -> None:
    for name in EXAMPLES:
        result = manifests(example(name))
        services = of_kind(result, "Service")
        labels = [template["metadata"]["labels"] for _, template in pod_templates(result)]
        places = yaml.safe_load(files(example(name))["deployment.yaml"])["services"]
        for place in places.values():
            host, _, port = place["address"].partition(":")
            service = services[host]["spec"]
            assert int(port) in [item["port"] for item in service["ports"]]
            # The last is put on by the LeaderWorkerSet's controller.
            selector = {key: value for key, value in service["selector"].items() if "leaderworkerset" not in key}
            assert any(selector.items() <= item.items() for item in labels)


def test_gpus_are_limits_and_devices() -> None:
    values = example("two-node-actor")
    result = containers(values)
    places = yaml.safe_load(files(values)["deployment.yaml"])["services"]
    assert result["actor"]["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert places["actor"]["devices"] == list(range(8))
    assert places["reward"]["devices"] == []
    assert "nvidia.com/gpu" not in result["reward"]["resources"]["limits"]
