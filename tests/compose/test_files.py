"""The files of Docker, held against one another, the config and the code. No Docker is needed here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet.config import Config, load_config
from quartet.gateway.__main__ import PUBLISHED_ADDRESS_VARIABLE
from quartet.rpc.security.allow_list import PROCESSES
from quartet.rpc.security.credentials import DOMAIN
from quartet.topology import model_roles
from quartet.types import MODEL_ROLES, Role
from tests.compose.stack import SECRETS

ROOT = Path(__file__).parents[2]
DEPLOYMENT = ROOT / "docker/deployment"
OURS = ("setup", *Role, "gateway")
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
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


PLACE = r"(?:\$\{[^}]*\}|[^:$])*"
"""A path, of which a part may be the user's to set."""


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return the mounts of a service by their path in the container."""
    results = {}
    for mount in service.get("volumes", ()):
        if isinstance(mount, str):
            source, target = re.fullmatch(rf"({PLACE}):({PLACE})(?::ro)?", mount).groups()
        else:
            source, target = mount["source"], mount["target"]
        results[target] = source
    return results


def writable(service: dict[str, Any]) -> set[str]:
    """Places in the container that may be written."""
    return {
        mount.split(":")[1] if isinstance(mount, str) else mount["target"]
        for mount in service.get("volumes", ())
        if not (mount.endswith(":ro") if isinstance(mount, str) else mount.get("read_only"))
    }


def deployment(tmp_path: Path, run: str, *layers: str) -> Config:
    """A run's config with what containers lay over it."""
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
    images = [service["image"] for service in (*SERVICES.values(), *CPU["services"].values())]
    images += [
        name
        for path in ("docker/Dockerfile", "docker/Dockerfile.tensorrt-llm", "docker/redis/Dockerfile")
        for name in re.findall(r"^ARG \w+_IMAGE=(\S+)$", (ROOT / path).read_text(), re.M)
    ]
    assert len(images) > 15
    for image in images:
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", image), image
    chart = yaml.safe_load((ROOT / "helm/quartet/values.yaml").read_text())
    assert f"redis:{chart['redis']['image']['tag']}" in images
    version = yaml.safe_load((ROOT / "helm/quartet/Chart.yaml").read_text())["appVersion"]
    assert {SERVICES[name]["image"] for name in OURS} == {f"quartet:{version}-cuda"}
    assert {CPU["services"][name]["image"] for name in OURS} == {f"quartet:{version}-cpu"}


def test_nothing_is_published_beyond_this_machine() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published.keys() == {"gateway", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert COMPOSE["networks"] == {"services": {"internal": True}, "monitoring": {"internal": True}, "outside": {}}
    outside = [name for name, service in SERVICES.items() if "outside" in service.get("networks", ())]
    assert outside == ["gateway", "grafana"]
    assert SERVICES["setup"]["network_mode"] == "none"


def test_a_service_sees_the_secrets_that_it_needs_and_no_others() -> None:
    seen = {
        name: {place.rpartition("/")[2] for place in mounts(service) if place.startswith("/run/secrets/")}
        for name, service in SERVICES.items()
    }
    assert seen == SECRETS
    for service in SERVICES.values():
        assert not re.search("(?i)(token|password|secret)(?!.*__FILE)", " ".join(service.get("environment", {})))


def test_a_service_writes_its_run_or_its_own_volume_and_nothing_else() -> None:
    assert {name: writable(service) for name, service in SERVICES.items() if name != "setup"} == {
        **{name: {"/quartet/runs"} for name in ("actor", "critic", "orchestrator", "gateway")},
        "reward": set(),
        "reference": set(),
        "redis": {"/data"},
        "prometheus": {"/prometheus"},
        "grafana": {"/var/lib/grafana"},
    }


def test_a_service_holds_its_own_certificate_and_no_other() -> None:
    for name, service in TLS["services"].items():
        places = {place: source for place, source in mounts(service).items() if "/certificates/" in place}
        if name == "setup":
            assert places == {
                f"/setup/certificates/{one}": f"certificates-{one}" for one in set(PROCESSES) - {"operator"}
            }
        else:
            assert places == {f"/run/certificates/{name}": f"certificates-{name}"}
    assert TLS["services"].keys() == SERVICES.keys() - {"grafana"}
    assert {f"certificates-{one}" for one in set(PROCESSES) - {"operator"}} == TLS["volumes"].keys()


def test_overlays_take_the_place_of_what_they_are_laid_over() -> None:
    for overlay in (CPU, TLS):
        for name, service in overlay["services"].items():
            base = mounts(SERVICES[name])
            for place, source in mounts(service).items():
                if source.startswith("./"):
                    assert place in base, f"{name}: {place} takes nothing's place"
                    assert (ROOT / source).is_file()


@pytest.mark.parametrize("run", CONFIGS)
@pytest.mark.parametrize("devices", ["gpu", "cpu"])
@pytest.mark.parametrize("security", ["plaintext", "tls"])
def test_deployments_fit_every_kind_of_run(tmp_path: Path, run: str, devices: str, security: str) -> None:
    config = deployment(tmp_path, run, devices, security)
    used = model_roles(config)
    for role in (*used, Role.ORCHESTRATOR):
        place = getattr(config.services, role)
        assert (place.address, place.listen) == (f"{role}:50051", "0.0.0.0:50051")
        assert (place.metrics_listen, place.health_listen) == ("0.0.0.0:9100", "0.0.0.0:9101")
    for role in used:
        assert getattr(config.services, role).devices == ((0,) if devices == "gpu" else ())
    assert (config.security.certificates is None) == (security == "plaintext") == config.security.allow_plaintext
    assert str(config.buffer.url).startswith("redis://" if security == "plaintext" else "rediss://")
    header = (DEPLOYMENT / f"{run}.yaml").read_text().splitlines()[0]
    optional = [role for role in ("critic", "reference") if role in used]
    assert header.endswith(f"COMPOSE_PROFILES={','.join(optional)}")
    assert [name for name in ("critic", "reference") if SERVICES[name].get("profiles") == [name]] == [
        "critic",
        "reference",
    ]
    assert run in (ROOT / ".env.example").read_text()


def test_a_deployment_that_is_not_the_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIGS["critic-free"])
    with pytest.raises(Exception, match=r"ppo.yaml.*services.critic.address"):
        load_config(tmp_path / "config.yaml", [], [DEPLOYMENT / "services.yaml", DEPLOYMENT / "ppo.yaml"])


def run_script(name: str, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """One of the image's scripts, on this machine; ``python`` only says what it was asked for."""
    (cwd / "bin").mkdir()
    (cwd / "bin/python").write_text('#!/bin/sh\necho "$@"\n')
    (cwd / "bin/python").chmod(0o700)
    command = ["/bin/sh", str(ROOT / "docker" / name), *arguments]
    paths = {"PATH": f"{cwd / 'bin'}:/usr/bin:/bin", **environment}
    return subprocess.run(command, cwd=cwd, env=paths, capture_output=True, text=True, check=False)


def test_every_layer_is_laid_over_the_config(tmp_path: Path) -> None:
    (tmp_path / "deployment").mkdir()
    for name in ("2-roles-ppo.yaml", "1-services.yaml"):
        (tmp_path / "deployment" / name).touch()
    ended = run_script("entrypoint.sh", "services", "actor", cwd=tmp_path)
    layers = "--config config.yaml --config deployment/1-services.yaml --config deployment/2-roles-ppo.yaml"
    assert ended.stdout == f"-m quartet.services actor {layers}\n"


def test_a_layer_that_is_not_there_is_named(tmp_path: Path) -> None:
    # Docker makes a folder in the place of a file that it is to mount and does not find.
    (tmp_path / "deployment/2-roles-pro.yaml").mkdir(parents=True)
    ended = run_script("entrypoint.sh", "services", "actor", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: deployment/2-roles-pro.yaml: is a folder")
    assert "correct QUARTET_ROLES in .env" in ended.stderr
    assert "/quartet/deployment/2-roles-${QUARTET_ROLES:-ppo}.yaml" in mounts(SERVICES["actor"])


def test_certificates_are_not_renewed_where_there_are_none(tmp_path: Path) -> None:
    ended = run_script("setup.sh", "renew-certificates", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "add docker/compose.tls.yaml to COMPOSE_FILE" in ended.stderr


def test_on_the_cpu_model_services_share_the_cores() -> None:
    limited = {name for name, service in CPU["services"].items() if "cpus" in service}
    assert limited == {role.value for role in MODEL_ROLES}


def test_ports_and_paths_agree(tmp_path: Path) -> None:
    config = deployment(tmp_path, "ppo", "cpu", "tls")
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    assert "EXPOSE 50051 9100 9101 8080" in dockerfile
    assert '"quartet.rpc.health", "127.0.0.1:9101"' in dockerfile
    published = SERVICES["gateway"]["environment"][PUBLISHED_ADDRESS_VARIABLE]
    assert SERVICES["gateway"]["ports"] == [f"{published}:8080"] == ["127.0.0.1:${QUARTET_PORT:-8080}:8080"]
    assert config.gateway.listen == "0.0.0.0:8080"
    setup = (ROOT / "docker/setup.sh").read_text()
    files = (config.buffer.password_file, config.security.token_file)
    for file in (*files, config.gateway.token_file, config.gateway.viewer_token_file):
        assert str(file).removeprefix("/run/secrets/") in setup
    made = set(re.search(r"for volume in ([\w ]+);", dockerfile)[1].split())
    assert {f"/setup/secrets/{one}" for one in made} == writable(SERVICES["setup"])
    made = set(re.search(r"for process in ([\w ]+);", dockerfile)[1].split())
    assert {f"/setup/certificates/{one}" for one in made} == writable(TLS["services"]["setup"])
    for name, service in SERVICES.items():
        for place, source in mounts(service).items():
            if source.startswith("./") and "$" not in source:
                assert (ROOT / source).exists(), f"{name}: {place}"
            elif not source.startswith(("./", "${")):
                assert source in COMPOSE["volumes"], f"{name}: {place}"


def test_prometheus_finds_what_containers_serve() -> None:
    plain, tls = (
        read(f"docker/monitoring/{name}")["scrape_configs"] for name in ("prometheus.yml", "prometheus.tls.yml")
    )

    def targets(jobs: list[dict[str, Any]]) -> set[tuple[str, str]]:
        return {
            (group["labels"]["role"], target)
            for job in jobs
            for group in job["static_configs"]
            for target in group["targets"]
        }

    expected = {*((role.value, f"{role}:9100") for role in Role), ("gateway", "gateway:8080")}
    assert targets(plain) == targets(tls) == expected
    for job in tls:
        (role,) = (group["labels"]["role"] for group in job["static_configs"])
        assert (job["scheme"], job["tls_config"]["server_name"]) == ("https", f"{role}.{DOMAIN}")
        if role != "gateway":
            assert {"target_label": "job", "replacement": "quartet"} in job["relabel_configs"]
    mounted = mounts(SERVICES["prometheus"])["/run/secrets/viewer"]
    assert mounted == "secret-viewer"
    for jobs in (plain, tls):
        assert jobs[-1]["authorization"]["credentials_file"] == "/run/secrets/viewer/gateway_viewer_token"


def test_what_users_set_is_in_the_example_and_nothing_else() -> None:
    names = ("docker-compose.yml", "docker/compose.cpu.yaml", "docker/compose.tls.yaml")
    text = "".join((ROOT / name).read_text() for name in names)
    asked = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    shown = dict(re.findall(r"^(?:# )?(QUARTET_\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.M))
    assert shown == asked
    assert "$QUARTET" not in text


def test_the_build_is_given_what_it_copies_and_no_more() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored, "all is left out but what is named"
    named = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        source
        for path in ("docker/Dockerfile", "docker/Dockerfile.tensorrt-llm", "docker/redis/Dockerfile")
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / path).read_text(), re.M)
        for source in line.split()
    }
    assert {one for one in copied if not one.startswith("docker/redis/")} | {"docker/redis"} == named
    assert all((ROOT / one).exists() for one in copied)
