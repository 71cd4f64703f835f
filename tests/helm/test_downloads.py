"""The Job that downloads models and data, the pods that wait for it, and the loader."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import helm_python
import pytest

from quartet.model_files.downloads import DATA_FILES, Download, fetch, parse
from quartet.model_files.hub_models import SMALL_FILES
from tests.every_case import every_case
from tests.helm.rendering import Manifest, Values, changed, chart, example, manifests, of_kind, pod_templates, texts
from tests.helm.test_components import pods
from tests.helm.test_storage import mounts
from tests.waiting import LIMIT

SOURCES = {
    "models/policy": "hf://owner/policy@v1.0",
    "models/reward": "s3://bucket/models/reward/",
    "data/prompts.jsonl": "s3://bucket/prompts.jsonl",
    "data/other": "hf://datasets/owner/data@main/part.parquet",
    "data/third.json": "https://files.example.com/a/b.json#sha256=" + "0" * 64,
}


def with_sources(sources: dict[str, str], **downloads: object) -> Values:
    """Return values with downloads."""
    return changed("cpu-kind", loader={"enabled": False}, downloads={"sources": sources, **downloads})


def job_of(values: Values) -> Manifest:
    """Return the Job of the downloads."""
    (job,) = (item for name, item in of_kind(manifests(values), "Job").items() if "-download-" in name)
    return job


def test_the_job_passes_every_source_to_the_command() -> None:
    spec = job_of(with_sources(SOURCES))["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["command"][-2:] == ["-m", "quartet.model_files.downloads"]
    assert {str(item.target): item.source for item in map(parse, container["args"])} == SOURCES
    assert container["workingDir"] == "/quartet"
    assert mounts(spec) == {
        "/quartet/models": ("quartet-storage", "models", False),
        "/quartet/data": ("quartet-storage", "data", False),
    }


def test_other_sources_create_another_job() -> None:
    names = {
        job_of(with_sources(sources))["metadata"]["name"] for sources in (SOURCES, SOURCES, {"models/a": "hf://a/b"})
    }
    assert len(names) == 2


def test_without_sources_nothing_waits_and_no_job_exists() -> None:
    result = manifests(example("cpu-kind"))
    assert [name for name in of_kind(result, "Job") if "download" in name] == []
    names = {
        container["name"]
        for _, template in pod_templates(result)
        for container in template["spec"].get("initContainers", [])
    }
    assert names == {"wait-for-files"}


def test_pods_wait_for_the_folders_that_they_mount() -> None:
    specs = pods(with_sources(SOURCES))
    waits = {}
    for name, spec in specs.items():
        for container in spec.get("initContainers", []):
            if container["name"] == "wait-for-downloads":
                waits[name] = [argument.partition("=")[0] for argument in container["args"]]
                assert container["command"][-2:] == ["quartet.model_files.downloads", "--wait"]
                assert container["image"] == spec["containers"][0]["image"]
                # A quota counts the larger of both, and no GPU is held twice.
                assert container["resources"] == chart().values["loader"]["resources"]
    models = ["models/policy", "models/reward"]
    assert waits == {
        **dict.fromkeys(("actor", "critic", "reference"), models),
        "orchestrator": ["data/other", "data/prompts.jsonl", "data/third.json", *models],
    }


def waiting(values: Values) -> Manifest:
    """Return the init container of the orchestrator that waits for the files of the config."""
    waits: list[Manifest] = pods(values)["orchestrator"]["initContainers"]
    (container,) = (item for item in waits if item["name"] == "wait-for-files")
    return container


def test_the_orchestrator_waits_for_the_files_of_the_config_so_that_its_attempts_do_not_count(tmp_path: Path) -> None:
    parts = [{"name": "a", "model": "models/a"}, {"name": "b", "model": "hub/b"}]
    values = changed("cpu-kind", config__reward={"source": "ensemble", "parts": parts}, checks={"paths": False})
    values["config"]["critic"]["model"] = "/quartet/models/critic"
    values["config"]["data"] |= {
        "prompts": None,
        "sets": [{"name": "a", "path": "data/a.jsonl"}, {"name": "b", "dataset": "owner/name"}],
    }
    container = waiting(values)
    assert container["args"][2:] == ["models/policy", "/quartet/models/critic", "models/a", "data/a.jsonl"]
    assert container["resources"] == chart().values["loader"]["resources"]
    container = waiting(
        changed("cpu-kind", config__critic={"model": "models/critic"}, config__algorithm__estimator="rloo")
    )
    assert container["args"][2:] == ["models/policy", "models/reward", "data/prompts.jsonl"]
    command = [*container["command"][2:], *container["args"]]
    assert container["command"][:2] == ["tini", "--"]
    for path in ("models/policy", "models/reward"):
        (tmp_path / path).mkdir(parents=True)
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting for data/prompts.jsonl\n"
    # With the command that it waits with, which keeps the output open.
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/prompts.jsonl").touch()
    assert subprocess.run(command, cwd=tmp_path, check=True, timeout=LIMIT, capture_output=True).stdout == b""


@pytest.mark.parametrize(
    "page", ["helm/quartet/README.md", "helm/quartet/templates/_storage.tpl", "helm/quartet/values.yaml"]
)
def test_the_documented_copy_has_no_folder_that_belongs_to_root(page: str, tmp_path: Path) -> None:
    """Its extraction would change the mode of such a folder, which fails in the pod."""
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    (create,) = re.findall(r"(tar --create .*?) \|", text)
    text = text.replace("\n# ", "")
    assert re.findall(r"tar --extract.*? --directory \S+", text) == ["tar --extract --directory /quartet"]
    for file in ("models/policy/config.json", "data/prompts.jsonl"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}", encoding="utf-8")
    listed = subprocess.run(["/bin/sh", "-c", f"{create} | tar --list"], cwd=tmp_path, capture_output=True, text=True)
    assert listed.stdout.split() == ["models/policy/", "models/policy/config.json", "data/prompts.jsonl"]


def test_the_loader_changes_no_pod_of_the_run() -> None:
    with_loader, without = (pods(changed("cpu-kind", loader={"enabled": enabled})) for enabled in (True, False))
    assert with_loader.keys() - without.keys() == {"loader"}
    assert {name: with_loader[name] for name in without} == without


def test_waiting_needs_no_gpu() -> None:
    spec = pods(changed("single-node-4-gpus"))["actor"]
    assert "nvidia.com/gpu" in spec["containers"][0]["resources"]["limits"]
    assert "nvidia.com/gpu" not in spec["initContainers"][0]["resources"]["limits"]


def test_only_the_job_may_connect_outside_and_not_to_private_addresses() -> None:
    result = manifests(with_sources(SOURCES))
    blocks = {}
    for name, policy in of_kind(result, "NetworkPolicy").items():
        for rule in policy["spec"].get("egress") or []:
            for peer in rule["to"]:
                if "ipBlock" in peer:
                    blocks.setdefault(name, []).append((peer["ipBlock"], rule["ports"]))
    assert set(blocks) == {"quartet-download"}
    https = [{"protocol": "TCP", "port": 443}]
    (v4, v4_ports), (v6, v6_ports) = blocks["quartet-download"]
    assert v4_ports == v6_ports == https
    assert {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"} <= set(v4["except"])
    assert "fc00::/7" in v6["except"]
    policy = of_kind(result, "NetworkPolicy")["quartet-download"]["spec"]
    labels = job_of(with_sources(SOURCES))["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in policy
    own = [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}]
    custom = of_kind(manifests(with_sources(SOURCES, egress=own)), "NetworkPolicy")["quartet-download"]
    assert custom["spec"]["egress"] == own


def test_secrets_of_a_download_are_files_of_its_pod_only() -> None:
    result = manifests(with_sources(SOURCES, existingSecret="tokens"))
    users = {
        name
        for name, template in pod_templates(result)
        if "tokens" in {volume.get("secret", {}).get("secretName") for volume in template["spec"]["volumes"]}
    }
    job = job_of(with_sources(SOURCES, existingSecret="tokens"))
    assert users == {f"Job/{job['metadata']['name']}"}
    spec = job["spec"]["template"]["spec"]
    for container in (*spec["containers"], *spec["initContainers"]):
        assert {"name": "secrets", "mountPath": "/run/secrets/downloads", "readOnly": True} in container["volumeMounts"]
    (copy,) = spec["initContainers"]
    file = {"name": "AWS_SHARED_CREDENTIALS_FILE", "value": "/run/secrets/downloads/aws_credentials"}
    assert file in copy["env"]


def test_the_job_is_scheduled_like_the_actor_without_its_runtime() -> None:
    """A volume may be bound to the node of its first pod."""
    term = {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}
    nodes = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": term}]}
    spec = job_of(
        changed(
            "single-node-4-gpus",
            components__actor__nodeSelector={"gpu": "yes"},
            components__actor__affinity={"nodeAffinity": nodes, "podAntiAffinity": {}},
        )
    )["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"gpu": "yes"}
    assert spec["tolerations"] == example("single-node-4-gpus")["defaults"]["tolerations"]
    assert spec["affinity"] == {"nodeAffinity": nodes}
    assert "runtimeClassName" not in spec


AWS = """#!/bin/sh
# Stands in for the AWS CLI: `aws s3 sync|cp --no-progress [filters] SOURCE TARGET`.
set -eu
echo "$@" >> "$LOG"
for target; do :; done
if [ "$2" = sync ]; then mkdir -p "$target"; echo {} > "$target/config.json"; else echo {} > "$target"; fi
"""


def test_objects_of_s3_are_copied_once_and_then_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy,) = job_of(with_sources(SOURCES))["spec"]["template"]["spec"]["initContainers"]
    binaries, volume = tmp_path / "bin", tmp_path / "quartet"
    binaries.mkdir()
    (volume / "models").mkdir(parents=True)
    (binaries / "aws").write_text(AWS, encoding="utf-8")
    (binaries / "aws").chmod(0o755)
    log = tmp_path / "log"
    environment = {"PATH": f"{binaries}:{os.environ['PATH']}", "LOG": str(log)}

    def run() -> list[str]:
        log.write_text("", encoding="utf-8")
        subprocess.run([*copy["command"], *copy["args"]], cwd=volume, env=environment, check=True, timeout=LIMIT)
        return log.read_text(encoding="utf-8").splitlines()

    file, folder = run()
    assert file == "s3 cp --no-progress s3://bucket/prompts.jsonl data/.prompts.jsonl.partial"
    assert folder.startswith("s3 sync --no-progress --exclude * --include ")
    assert folder.endswith(" s3://bucket/models/reward/ models/.reward.partial")
    # The same files as from the hub: no pickles and no scripts.
    patterns = {word for word in folder.split() if word.startswith("*.")}
    assert patterns == {"*.safetensors", *SMALL_FILES, *DATA_FILES}
    monkeypatch.chdir(volume)
    for target in ("models/reward", "data/prompts.jsonl"):
        fetch(Download(Path(target), SOURCES[target]))
    assert (volume / "models/reward/config.json").is_file()
    assert (volume / "data/prompts.jsonl").is_file()
    assert run() == []


def test_without_s3_its_image_is_not_needed() -> None:
    spec = job_of(with_sources({"models/policy": "hf://owner/policy"}))["spec"]["template"]["spec"]
    assert "initContainers" not in spec


def test_a_port_that_a_rule_of_the_policy_allows_is_accepted() -> None:
    source = {"data/a.json": "https://files.example.com:8443/a.json"}
    assert job_of(with_sources(source, egress=[{"ports": [{"protocol": "TCP", "port": 8443}]}]))
    assert job_of(with_sources(source, egress=[{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]}]))


@every_case(
    "target, source, text",
    [
        ("policy", "hf://a/b", 'target "policy"; expected a path below models or data'),
        ("models", "hf://a/b", 'target "models"; expected'),
        ("runs/a", "hf://a/b", 'target "runs/a"; expected'),
        ("models/../data", "hf://a/b", 'target "models/../data"; expected'),
        ("models/a'b", "hf://a/b", "expected a path below"),
        ("models/a", "hf://b", 'models/a: "hf://b"; expected hf://OWNER/NAME'),
        ("models/a", "hf://a/b/c.json", "expected hf://OWNER/NAME"),
        ("models/a", "a/b", "expected hf://OWNER/NAME"),
        ("models/a", "http://example.com/a.json", "expected hf://OWNER/NAME"),
        ("models/a", "https://example.com/a.json#md5=0", "expected hf://OWNER/NAME"),
        ("models/a", "s3://b/$(id)", "expected hf://OWNER/NAME"),
        ("models/a", "s3://b/a'; id; '", "expected hf://OWNER/NAME"),
    ],
)
def test_a_malformed_download_is_refused(target: str, source: str, text: str) -> None:
    with pytest.raises(helm_python.HelmError) as error:
        manifests(with_sources({target: source}))
    assert text in str(error.value)


@every_case(
    "source",
    [
        "https://me:sesame@example.com/a.json",  # pragma: allowlist secret - an example
        "https://example.com/a.json?X-Amz-Signature=sesame",
        "s3://sesame@b/c",
    ],
)
def test_a_source_with_a_credential_is_refused_and_not_quoted(source: str) -> None:
    with pytest.raises(helm_python.HelmError) as error:
        manifests(with_sources({"models/a": source}))
    assert "downloads.sources: the source of models/a contains a user or a query" in str(error.value)
    assert "downloads.existingSecret" in str(error.value)
    assert "sesame" not in str(error.value)


def test_a_target_inside_another_one_is_refused() -> None:
    with pytest.raises(helm_python.HelmError, match="models/a/b is inside models/a"):
        manifests(with_sources({"models/a": "hf://a/b", "models/a/b": "hf://a/c"}))


def test_a_download_into_a_volume_that_is_only_read_is_refused() -> None:
    values = changed("cpu-kind", downloads={"sources": {"models/a": "hf://a/b"}})
    values["storage"]["models"] = {"size": "1Gi", "accessModes": ["ReadOnlyMany"]}
    with pytest.raises(helm_python.HelmError, match=r"storage\.models\.accessModes: ReadOnlyMany, but"):
        manifests(values)


def test_the_loader_writes_all_folders_and_reaches_nothing() -> None:
    result = manifests(example("cpu-kind"))
    spec = pods(example("cpu-kind"))["loader"]
    assert mounts(spec) == {f"/quartet/{name}": ("quartet-storage", name, False) for name in ("models", "data", "runs")}
    labels = of_kind(result, "Deployment")["quartet-loader"]["spec"]["template"]["metadata"]["labels"]
    selecting = {
        name
        for name, policy in of_kind(result, "NetworkPolicy").items()
        if policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    }
    assert selecting == {"quartet-default-deny", "quartet-dns"}
    notes = texts(example("cpu-kind"))["quartet/templates/NOTES.txt"]
    assert "exec --stdin deployment/quartet-loader" in notes
    assert "loader" not in pods(example("single-node-4-gpus"))
