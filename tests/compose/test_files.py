"""Consistency of the Docker files with each other, the config and the code. These tests need no Docker."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet.config.layout import model_roles
from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.contract.status import MODEL_ROLES, Role
from quartet.errors import ConfigError
from quartet.gateway.__main__ import PUBLISHED_ADDRESS_VARIABLE
from quartet.preflight import check_separate_orchestrator
from quartet.preflight.findings import raise_errors
from quartet.rpc.security.allow_list import PROCESSES
from quartet.rpc.security.credentials import DOMAIN
from tests.compose.stack import SECRETS

ROOT = Path(__file__).parents[2]
DEPLOYMENT = ROOT / "docker/deployment"
QUARTET_SERVICES = ("setup", *Role, "gateway")
"""Services that run Quartet's image."""

POLICY = "{data: {prompts: data/p.jsonl}, actor: {model: models/policy%s}, reward: {model: models/reward}%s}"
CONFIGS = {
    "ppo": POLICY % ("", ""),
    "ppo-lora": POLICY % (", lora: {rank: 4}", ""),
    "critic-free": POLICY % ("", ", algorithm: {estimator: reinforce}"),
    "critic-free-lora": POLICY % (", lora: {rank: 4}", ", algorithm: {estimator: reinforce}"),
}


def read(path: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
    return content


COMPOSE = read("docker-compose.yml")
CPU = read("docker/compose.cpu.yaml")
TLS = read("docker/compose.tls.yaml")
TRAFFIC = read("docker/compose.traffic.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


PATH = r"(?:\$\{[^}]*\}|[^:$])*"
"""Pattern of a path, which may contain variables."""


def default(value: str, variable: str) -> str:
    """Return the value of a setting whose variable is not set."""
    return re.sub(rf"\$\{{{variable}:-([^}}]*)\}}", r"\1", value)


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return the mounts of a service by their path in the container."""
    results = {}
    for mount in service.get("volumes", ()):
        if isinstance(mount, str):
            source, target = re.fullmatch(rf"({PATH}):({PATH})(?::ro)?", mount).groups()
        else:
            source, target = mount["source"], mount["target"]
        results[target] = source
    return results


def writable(service: dict[str, Any]) -> set[str]:
    """Return the writable paths in the container."""
    return {
        mount.split(":")[1] if isinstance(mount, str) else mount["target"]
        for mount in service.get("volumes", ())
        if not (mount.endswith(":ro") if isinstance(mount, str) else mount.get("read_only"))
    }


def deployment(tmp_path: Path, run: str, *layers: str) -> Config:
    """Return the config of a run with the layers that the containers add."""
    (tmp_path / "config.yaml").write_text(CONFIGS[run])
    return load_config(
        tmp_path / "config.yaml", [], [DEPLOYMENT / f"{layer}.yaml" for layer in ("services", run, *layers)]
    )


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_hardened(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    user, _, _ = service["user"].partition(":")
    assert int(user) >= 100
    assert (service["pids_limit"], service["mem_limit"]) == (4096, "${QUARTET_MEMORY:-0}")
    assert service["tmpfs"] == ["/tmp:size=1g,mode=1777"]


def test_images_are_pinned() -> None:
    images = [
        default(service["image"], "QUARTET_GENERATOR_IMAGE")
        for service in (*SERVICES.values(), *CPU["services"].values())
    ]
    images += [
        name
        for path in ("docker/Dockerfile", "docker/Dockerfile.generator", "docker/redis/Dockerfile")
        for name in re.findall(r"^ARG \w+_IMAGE=(\S+)$", (ROOT / path).read_text(), re.M)
    ]
    assert len(images) > 15
    for image in images:
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", image), image
    chart = yaml.safe_load((ROOT / "helm/quartet/values.yaml").read_text())
    assert f"redis:{chart['redis']['image']['tag']}" in images
    version = yaml.safe_load((ROOT / "helm/quartet/Chart.yaml").read_text())["appVersion"]
    for services, variant in ((SERVICES, "cuda"), (CPU["services"], "cpu")):
        used = {default(services[name]["image"], "QUARTET_GENERATOR_IMAGE") for name in QUARTET_SERVICES}
        assert used == {f"quartet:{version}-{variant}"}


def test_ports_are_published_on_loopback_only() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published.keys() == {"gateway", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert COMPOSE["networks"] == {"services": {"internal": True}, "monitoring": {"internal": True}, "outside": {}}
    outside = [name for name, service in SERVICES.items() if "outside" in service.get("networks", ())]
    assert outside == ["gateway", "grafana"]
    assert SERVICES["setup"]["network_mode"] == "none"


def test_a_service_has_only_the_secrets_that_it_needs() -> None:
    visible = {
        name: {path.rpartition("/")[2] for path in mounts(service) if path.startswith("/run/secrets/")}
        for name, service in SERVICES.items()
    }
    assert visible == SECRETS
    for service in SERVICES.values():
        assert not re.search("(?i)(token|password|secret)(?!.*__FILE)", " ".join(service.get("environment", {})))


def test_a_service_may_write_only_the_runs_or_its_volume() -> None:
    assert {name: writable(service) for name, service in SERVICES.items() if name != "setup"} == {
        **{name: {"/quartet/runs"} for name in ("critic", "reward", "orchestrator", "gateway")},
        "actor": {"/quartet/runs", "/quartet/sockets"},
        "reference": set(),
        "generator": {"/quartet/sockets"},
        "environment": set(),
        "redis": {"/data"},
        "prometheus": {"/prometheus"},
        "grafana": {"/var/lib/grafana"},
    }


def test_actor_and_generators_share_a_directory_in_memory_for_sockets() -> None:
    layer = read("docker/deployment/generation-generators.yaml")
    directory = layer["rollout"]["share_directory"]
    sharing = {name for name, service in SERVICES.items() if mounts(service).get(directory) == "sockets"}
    assert sharing == {"actor", "generator"}
    assert all("pid" not in service for service in SERVICES.values()), "one would end with the other"
    user, _, group = SERVICES["actor"]["user"].partition(":")
    assert SERVICES["generator"]["user"] == SERVICES["actor"]["user"]
    options = COMPOSE["volumes"]["sockets"]["driver_opts"]
    assert (options["type"], options["device"]) == ("tmpfs", "tmpfs")
    assert {f"uid={user}", f"gid={group}", "mode=0700"} <= set(options["o"].split(","))


def test_the_image_imports_modules_that_exist() -> None:
    (imports,) = re.findall(
        r"RUN /opt/venv/bin/python -c 'import ([\w., ]+)'", (ROOT / "docker/Dockerfile").read_text()
    )
    for name in imports.split(", "):
        assert importlib.util.find_spec(name) is not None, name


def test_the_reference_reads_the_runs_for_the_versions_that_follow_the_policy() -> None:
    assert "runs:/quartet/runs:ro" in SERVICES["reference"]["volumes"]


def test_a_service_has_only_its_own_certificate() -> None:
    for name, service in TLS["services"].items():
        paths = {path: source for path, source in mounts(service).items() if "/certificates/" in path}
        if name == "setup":
            assert paths == {
                f"/setup/certificates/{name}": f"certificates-{name}" for name in set(PROCESSES) - {"operator"}
            }
        else:
            assert paths == {f"/run/certificates/{name}": f"certificates-{name}"}
    assert TLS["services"].keys() == SERVICES.keys() - {"grafana"}
    assert {f"certificates-{name}" for name in set(PROCESSES) - {"operator"}} == TLS["volumes"].keys()


def test_the_mounts_of_overlays_replace_mounts_of_the_base() -> None:
    for overlay in (CPU, TLS):
        for name, service in overlay["services"].items():
            base = mounts(SERVICES[name])
            for path, source in mounts(service).items():
                if source.startswith("./"):
                    assert path in base, f"{name}: {path} replaces no mount"
                    assert (ROOT / source).is_file()


@pytest.mark.parametrize("run", CONFIGS)
@pytest.mark.parametrize("devices", ["gpu", "cpu"])
@pytest.mark.parametrize("security", ["plaintext", "tls"])
def test_deployments_fit_every_kind_of_run(tmp_path: Path, run: str, devices: str, security: str) -> None:
    config = deployment(tmp_path, run, devices, security)
    used = model_roles(config)
    for role in (*used, Role.ORCHESTRATOR):
        service = getattr(config.services, role)
        assert (service.address, service.listen) == (f"{role}:50051", "0.0.0.0:50051")
        assert (service.metrics_listen, service.health_listen) == ("0.0.0.0:9100", "0.0.0.0:9101")
    for role in used:
        assert getattr(config.services, role).devices == ((0,) if devices == "gpu" else ())
    assert (config.security.certificates is None) == (security == "plaintext") == config.security.allow_plaintext
    assert str(config.buffer.url).startswith("redis://" if security == "plaintext" else "rediss://")
    header = (DEPLOYMENT / f"{run}.yaml").read_text().splitlines()[0]
    optional = [role for role in ("critic", "reward", "reference") if role in used]
    assert header.endswith(f"COMPOSE_PROFILES={','.join(optional)}")
    assert all(SERVICES[name].get("profiles") == [name] for name in ("critic", "reward", "reference"))
    assert run in (ROOT / ".env.example").read_text()


def test_a_run_without_a_reward_needs_the_profile_of_the_reference_only(tmp_path: Path) -> None:
    distillation = (
        ", algorithm: {estimator: reinforce, kl_coefficient: 0, distillation: {}}, reference: {model: models/t}"
    )
    config = POLICY % ("", distillation)
    (tmp_path / "config.yaml").write_text(config.replace("{model: models/reward}", "{source: none}"))
    layers = [DEPLOYMENT / f"{layer}.yaml" for layer in ("services", "critic-free", "generation-actor", "plaintext")]
    loaded = load_config(tmp_path / "config.yaml", layers=layers)
    assert model_roles(loaded) == (Role.ACTOR, Role.REFERENCE)
    check_separate_orchestrator(loaded)
    assert "reward" not in SERVICES["orchestrator"]["depends_on"]
    assert "remove reward from COMPOSE_PROFILES" in (ROOT / ".env.example").read_text()


@pytest.mark.parametrize("devices", ["gpu", "cpu"])
def test_generators_replace_the_actor_if_env_selects_them(tmp_path: Path, devices: str) -> None:
    assert deployment(tmp_path, "ppo", "generation-actor", devices, "plaintext").has_generators is False
    config = deployment(tmp_path, "ppo", "generation-generators", devices, "plaintext")
    assert (config.services.generators, config.rollout.generators) == (("generator:50051",), 0)
    service = config.services.generator
    assert (service.listen, service.metrics_listen, service.health_listen) == (
        "0.0.0.0:50051", "0.0.0.0:9100", "0.0.0.0:9101",
    )  # fmt: skip
    assert service.devices == ((0,) if devices == "gpu" else ())
    check_separate_orchestrator(config)
    header = (DEPLOYMENT / "generation-generators.yaml").read_text().splitlines()[0]
    assert header.endswith(f"COMPOSE_PROFILES={','.join(SERVICES['generator']['profiles'])}")
    selected = "/quartet/deployment/2-generation-${QUARTET_GENERATION:-actor}.yaml"
    assert {name for name, service in SERVICES.items() if selected in mounts(service)} == {*Role, "gateway"}


def test_local_generators_of_the_config_are_refused_unless_containers_replace_them(tmp_path: Path) -> None:
    layers = [DEPLOYMENT / f"{layer}.yaml" for layer in ("services", "ppo", "generation-actor", "plaintext")]
    (tmp_path / "config.yaml").write_text(CONFIGS["ppo"])
    config = load_config(tmp_path / "config.yaml", ["rollout.generators=2"], layers)
    with pytest.raises(ConfigError, match=r"^rollout\.generators 2: .*QUARTET_GENERATION in \.env"):
        raise_errors(check_separate_orchestrator(config))


def test_a_deployment_for_other_roles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIGS["critic-free"])
    with pytest.raises(Exception, match=r"ppo.yaml.*services.critic.address"):
        load_config(tmp_path / "config.yaml", [], [DEPLOYMENT / "services.yaml", DEPLOYMENT / "ppo.yaml"])


def run_script(name: str, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the image on this machine, with a ``python`` that only prints its arguments."""
    (cwd / "bin").mkdir(exist_ok=True)
    (cwd / "bin/python").write_text('#!/bin/sh\necho "$@"\n')
    (cwd / "bin/python").chmod(0o700)
    command = ["/bin/sh", str(ROOT / "docker" / name), *arguments]
    paths = {"PATH": f"{cwd / 'bin'}:/usr/bin:/bin", **environment}
    return subprocess.run(command, cwd=cwd, env=paths, capture_output=True, text=True, check=False)


def test_every_layer_is_passed_to_quartet(tmp_path: Path) -> None:
    (tmp_path / "deployment").mkdir()
    for name in ("2-roles-ppo.yaml", "1-services.yaml"):
        (tmp_path / "deployment" / name).touch()
    result = run_script("entrypoint.sh", "services", "actor", cwd=tmp_path)
    layers = "--config config.yaml --config deployment/1-services.yaml --config deployment/2-roles-ppo.yaml"
    assert result.stdout == f"-m quartet.services actor {layers}\n"


@pytest.mark.parametrize(
    ("visible", "devices"),
    [("0,1,2,3", "[0,1,2,3]"), ("GPU-a1,GPU-b2", "[0,1]"), ("5", None), ("all", None), ("", None)],
)
def test_a_service_uses_all_gpus_that_it_sees(visible: str, devices: str | None, tmp_path: Path) -> None:
    result = run_script("entrypoint.sh", "services", "critic", cwd=tmp_path, NVIDIA_VISIBLE_DEVICES=visible)
    setting = "" if devices is None else f" --set services.critic.devices={devices}"
    assert result.stdout == f"-m quartet.services critic --config config.yaml{setting}\n", result.stderr
    gateway = run_script("entrypoint.sh", "gateway", cwd=tmp_path, NVIDIA_VISIBLE_DEVICES=visible)
    assert gateway.stdout == "-m quartet.gateway --config config.yaml\n"


def test_several_gpus_of_env_are_ranks_of_the_service(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIGS["ppo"])
    layers = [DEPLOYMENT / f"{layer}.yaml" for layer in ("services", "ppo", "gpu", "plaintext")]
    service = load_config(tmp_path / "config.yaml", ["services.actor.devices=[0,1,2,3]"], layers).services.actor
    assert service.devices == (0, 1, 2, 3)


def test_model_services_have_shared_memory_and_no_gpus_on_the_cpu() -> None:
    for role in MODEL_ROLES:
        assert SERVICES[role]["shm_size"] == "${QUARTET_SHARED_MEMORY:-8g}"
    for role in (*MODEL_ROLES, "generator"):
        assert "NVIDIA_VISIBLE_DEVICES" in SERVICES[role]["environment"]
        assert CPU["services"][role]["environment"] == {"NVIDIA_VISIBLE_DEVICES": "void"}


def test_the_error_names_a_missing_layer(tmp_path: Path) -> None:
    # Docker creates a folder if a file to mount does not exist.
    (tmp_path / "deployment/2-roles-pro.yaml").mkdir(parents=True)
    result = run_script("entrypoint.sh", "services", "actor", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: deployment/2-roles-pro.yaml: is a folder")
    assert "correct QUARTET_ROLES in .env" in result.stderr
    assert "/quartet/deployment/2-roles-${QUARTET_ROLES:-ppo}.yaml" in mounts(SERVICES["actor"])


def test_renewing_certificates_without_tls_is_an_error(tmp_path: Path) -> None:
    result = run_script("setup.sh", "renew-certificates", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert "add docker/compose.tls.yaml to COMPOSE_FILE" in result.stderr


@pytest.mark.parametrize(
    ("argument", "days", "problem"),
    [
        (
            "renew-certificate",
            "365",
            "setup.sh: unknown argument renew-certificate; expected none, or renew-certificates",
        ),
        (
            "renew-certificates",
            "abc",
            "QUARTET_CERTIFICATE_DAYS in .env: abc; expected a number of days from 1 to 3650",
        ),
        ("renew-certificates", "0", "QUARTET_CERTIFICATE_DAYS in .env: 0; expected"),
    ],
)
def test_a_renewal_with_wrong_input_changes_nothing(argument: str, days: str, problem: str, tmp_path: Path) -> None:
    result = run_script("setup.sh", argument, cwd=tmp_path, QUARTET_CERTIFICATE_DAYS=days, QUARTET_TLS="1")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {problem}")


def test_earlier_certificates_stay_until_there_are_new_ones() -> None:
    script = (ROOT / "docker/setup.sh").read_text(encoding="utf-8")
    assert script.index("\nquartet certificates ") < script.index("\nrm -f ./*/ca.crt")


def test_model_services_on_the_cpu_have_a_core_limit() -> None:
    limited = {name for name, service in CPU["services"].items() if "cpus" in service}
    assert limited == {*(role.value for role in MODEL_ROLES), "generator"}


def test_ports_and_paths_agree(tmp_path: Path) -> None:
    config = deployment(tmp_path, "ppo", "cpu", "tls")
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    assert "EXPOSE 50051 8090 9100 9101 8080" in dockerfile
    assert config.environment.agent.listen == "0.0.0.0:8090"
    assert '"quartet.rpc.health", "127.0.0.1:9101"' in dockerfile
    published = SERVICES["gateway"]["environment"][PUBLISHED_ADDRESS_VARIABLE]
    assert SERVICES["gateway"]["ports"] == [f"{published}:8080"] == ["127.0.0.1:${QUARTET_PORT:-8080}:8080"]
    assert config.gateway.listen == "0.0.0.0:8080"
    setup = (ROOT / "docker/setup.sh").read_text()
    files = (config.buffer.password_file, config.security.token_file)
    for file in (*files, config.gateway.token_file, config.gateway.viewer_token_file):
        assert str(file).removeprefix("/run/secrets/") in setup
    created = set(re.search(r"for volume in ([\w ]+);", dockerfile)[1].split())
    assert {f"/setup/secrets/{name}" for name in created} == writable(SERVICES["setup"])
    created = set(re.search(r"for process in ([\w ]+);", dockerfile)[1].split())
    assert {f"/setup/certificates/{name}" for name in created} == writable(TLS["services"]["setup"])
    for name, service in SERVICES.items():
        for path, source in mounts(service).items():
            if source.startswith("./") and "$" not in source:
                assert (ROOT / source).exists(), f"{name}: {path}"
            elif not source.startswith(("./", "${")):
                assert source in COMPOSE["volumes"], f"{name}: {path}"


def test_prometheus_scrapes_every_container() -> None:
    plain, tls = (
        read(f"docker/monitoring/{name}")["scrape_configs"] for name in ("prometheus.yml", "prometheus.tls.yml")
    )

    def targets(jobs: list[dict[str, Any]]) -> set[tuple[str, str]]:
        return {
            (group["labels"]["role"], target)
            for job in jobs
            for group in job.get("static_configs", ())
            for target in group["targets"]
        }

    # The name of a service that may be scaled or absent resolves to an address for each container.
    resolved = {"generator", "environment"}
    single = {role.value for role in Role} - resolved
    expected = {*((role, f"{role}:9100") for role in single), ("gateway", "gateway:8080")}
    assert targets(plain) == targets(tls) == expected
    for jobs in (plain, tls):
        by_name = {job["dns_sd_configs"][0]["names"][0]: job for job in jobs if "dns_sd_configs" in job}
        assert by_name.keys() == resolved
        for role, job in by_name.items():
            assert job["dns_sd_configs"] == [{"names": [role], "type": "A", "port": 9100, "refresh_interval": "15s"}]
            assert {"target_label": "role", "replacement": role} in job["relabel_configs"]
    for job in tls:
        roles = [group["labels"]["role"] for group in job.get("static_configs", ())]
        (role,) = roles or job["dns_sd_configs"][0]["names"]
        assert (job["scheme"], job["tls_config"]["server_name"]) == ("https", f"{role}.{DOMAIN}")
        if role != "gateway":
            assert {"target_label": "job", "replacement": "quartet"} in job["relabel_configs"]
    mounted = mounts(SERVICES["prometheus"])["/run/secrets/viewer"]
    assert mounted == "secret-viewer"
    for jobs in (plain, tls):
        assert jobs[-1]["authorization"]["credentials_file"] == "/run/secrets/viewer/gateway_viewer_token"


def test_the_example_has_exactly_the_variables_of_the_compose_files() -> None:
    # The example shows the default of the base if an overlay has another.
    names = ("docker/compose.tls.yaml", "docker/compose.cpu.yaml", "docker/compose.traffic.yaml", "docker-compose.yml")
    text = "".join((ROOT / name).read_text() for name in names)
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    shown = dict(re.findall(r"^(?:# )?(QUARTET_\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.M))
    assert shown == used
    assert "$QUARTET" not in text


def test_the_build_context_has_only_the_files_that_images_copy() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored, "the file must exclude everything and then include single paths"
    included = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        source
        for path in (
            "docker/Dockerfile",
            "docker/Dockerfile.generator",
            "docker/redis/Dockerfile",
            "examples/reward-node/Dockerfile",
        )
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / path).read_text(), re.M)
        for source in line.split()
    }
    assert {name for name in copied if not name.startswith("docker/redis/")} | {"docker/redis"} == included
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize("devices", ["gpu", "cpu"])
@pytest.mark.parametrize("security", ["plaintext", "tls"])
def test_users_reach_the_generators_on_loopback_only_and_no_environment_runs(
    tmp_path: Path, devices: str, security: str
) -> None:
    settings = (
        "{data: {}, actor: {model: models/policy}, algorithm: {estimator: reinforce_plus_plus}, reward: {source: none}, "
        "rollout: {prompts_per_step: 8, max_turns: 4, max_off_policy_steps: 4, in_flight_updates: true}, "
        "environment: {kind: traffic}}"
    )
    (tmp_path / "config.yaml").write_text(settings)
    names = ("services", "critic-free", "generation-traffic", devices, security)
    config = load_config(tmp_path / "config.yaml", layers=[DEPLOYMENT / f"{name}.yaml" for name in names])
    check_separate_orchestrator(config)
    assert config.services.environment.address is None
    assert config.environment.agent.listen == "0.0.0.0:8090"
    # Besides the keys, only what generators always have.
    layer, generators = (read(f"docker/deployment/generation-{name}.yaml") for name in ("traffic", "generators"))
    keys = layer.pop("environment")["traffic"]
    assert layer.pop("services") == {**generators.pop("services"), "environment": {"address": None}}
    assert layer == generators
    setup = (ROOT / "docker/setup.sh").read_text()
    assert all(path.removeprefix("/run/secrets/") in setup for path in keys.values())
    (name,) = TRAFFIC["services"]
    assert TRAFFIC["services"][name] == {
        "networks": ["services", "outside"],
        "ports": ["127.0.0.1:${QUARTET_TRAFFIC_PORT:-8090}:8090"],
    }
    assert name == "generator"
    header = (DEPLOYMENT / "generation-traffic.yaml").read_text().splitlines()[0]
    assert header.endswith(f"COMPOSE_PROFILES={','.join(SERVICES['generator']['profiles'])}")


@pytest.mark.parametrize("devices", ["gpu", "cpu"])
@pytest.mark.parametrize("security", ["plaintext", "tls"])
def test_turns_use_the_environment_and_other_runs_do_not(tmp_path: Path, devices: str, security: str) -> None:
    config = deployment(tmp_path, "ppo", devices, security)
    assert not config.has_environment
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_turns": 3})})
    check_separate_orchestrator(config)
    service = config.services.environment
    assert (service.address, service.listen) == ("environment:50051", "0.0.0.0:50051")
    assert (service.metrics_listen, service.health_listen) == ("0.0.0.0:9100", "0.0.0.0:9101")
    assert SERVICES["environment"]["profiles"] == ["environment"]
    assert "add environment to COMPOSE_PROFILES" in (ROOT / ".env.example").read_text()
