"""`helm template` with a wrong value gives one message: the value, what is expected and, if that is not obvious, what to do."""

from __future__ import annotations

import re
from typing import Any

import helm_python
import pytest
import yaml

from tests.every_case import every_case
from tests.helm.rendering import NAMESPACE, Values, changed, chart, manifests, of_kind
from tests.helm.test_values import refusal

DIGEST = f"sha256:{'0' * 64}"
SPREAD = {"topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1}

WRONG: dict[str, tuple[str, Values, str, str]] = {
    # Keys and types, from the schema.
    "an unknown component": ("cpu-kind", {"components__acter": {}}, "'/components'", "'acter' not allowed"),
    "an unknown setting": ("cpu-kind", {"config__run__stesp": 3}, "'/config/run'", "'stesp' not allowed"),
    "a text for a number": ("cpu-kind", {"components__actor__gpus": "2"}, "'/components/actor/gpus'", "want integer"),
    "a text for a decimal": (
        "cpu-kind",
        {"config__algorithm__kl_coefficient": "0.1"},
        "'/config/algorithm/kl_coefficient'",
        "got string, want number",
    ),
    "a text for a switch": ("cpu-kind", {"loader__enabled": "true"}, "'/loader/enabled'", "got string, want boolean"),
    "a negative rate": (
        "cpu-kind",
        {"config__actor__learning_rate": -1},
        "'/config/actor/learning_rate'",
        "exclusiveMinimum: got -1, want 0",
    ),
    "a map for a list": (
        "cpu-kind",
        {"components__actor__env": {"A": "b"}},
        "'/components/actor/env'",
        "got object, want array",
    ),
    "a name for an object": ("cpu-kind", {"imagePullSecrets": ["a"]}, "'/imagePullSecrets/0'", "want object"),
    "another word": (
        "cpu-kind",
        {"image__pullPolicy": "always"},
        "'/image/pullPolicy'",
        "one of 'Always', 'IfNotPresent', 'Never'",
    ),
    "a short access mode": (
        "cpu-kind",
        {"storage__claim__accessModes": ["RWX"]},
        "'/storage/claim/accessModes/0'",
        "one of 'ReadWriteOnce', 'ReadOnlyMany', 'ReadWriteMany'",
    ),
    "two actors": ("cpu-kind", {"components__actor__replicas": 2}, "components.actor.replicas: 2", "expected 1: only"),
    "a number for a label": (
        "cpu-kind",
        {"components__actor__labels": {"a": 1}},
        "labels/a'",
        "got number, want string",
    ),
    "a folder of the host": (
        "cpu-kind",
        {"components__actor__extraVolumes": [{"name": "h", "hostPath": {"path": "/"}}]},
        "'/components/actor/extraVolumes/0'",
        "'hostPath' not allowed",
    ),
    "no reward": ("cpu-kind", {"config__reward": None}, "'/config/reward'", "got null, want object"),
    # Texts.
    "memory in gigabytes": (
        "cpu-kind",
        {"components__actor__resources": {"limits": {"memory": "8 GB"}}},
        "components.actor.resources.limits.memory: ",
        '"8 GB"; expected a number with a unit of Kubernetes, such as 500m, 2Gi',
    ),
    "GPUs as a resource": (
        "cpu-kind",
        {"components__actor__resources": {"limits": {"gpu": 1}}},
        "components.actor.resources.limits: ",
        "for GPUs, set gpus of the component",
    ),
    "a size in gigabytes": (
        "cpu-kind",
        {"storage__claim__size": "500GB"},
        "storage.claim.size: ",
        '"500GB"; expected a positive number with a unit of Kubernetes',
    ),
    "the size of a folder": ("cpu-kind", {"storage__runs__size": "1T B"}, "storage.runs.size: ", "1.5Ti; correct it"),
    "the size of Redis": (
        "cpu-kind",
        {"redis__persistence__size": "big"},
        "redis.persistence.size: ",
        '"big"; expected',
    ),
    "a size of /dev/shm": (
        "cpu-kind",
        {"components__critic__sharedMemory": "8gb"},
        "components.critic.sharedMemory: ",
        '"8gb"; expected',
    ),
    "the unit of Redis": ("cpu-kind", {"redis__maxmemory": "6Gi"}, "redis.maxmemory: ", "such as 512mb or 6gb"),
    "a short digest": ("cpu-kind", {"image__digest": "abc"}, "image.digest: ", "sha256: and 64 hexadecimal digits"),
    "a name in capitals": ("cpu-kind", {"fullnameOverride": "My_Run"}, "fullnameOverride: ", "lower case letters"),
    "an address without prefix": (
        "two-node-actor",
        {"redis__external__cidrs": ["10.0.0.1"]},
        "redis.external.cidrs: ",
        '"10.0.0.1"; expected an address and the length of its prefix',
    ),
    "an interval without unit": (
        "cpu-kind",
        {"monitoring__serviceMonitor__interval": "10"},
        "monitoring.serviceMonitor.interval: ",
        "such as 10s",
    ),
    "a URL for a host": (
        "cpu-kind",
        {"ingress": {"enabled": True, "host": "https://a.example"}},
        "ingress.host: ",
        "without scheme, port and wildcard",
    ),
    "a name with a space": ("cpu-kind", {"config__run__name": "my run"}, "config.run.name: ", "such as my-run-1"),
    "an empty size": (
        "cpu-kind",
        {"storage__claim__size": ""},
        "storage.claim.size: ",
        '""; expected a positive number',
    ),
    "an empty size of Redis": (
        "cpu-kind",
        {"redis__persistence__size": ""},
        "redis.persistence.size: ",
        '""; expected',
    ),
    "an empty size of /tmp": (
        "cpu-kind",
        {"defaults__temporarySpace": ""},
        "defaults.temporarySpace: ",
        '""; expected',
    ),
    "no memory for Redis": ("cpu-kind", {"redis__maxmemory": "0"}, "redis.maxmemory: ", "expected a positive number"),
    "a size of zero": ("cpu-kind", {"storage__claim__size": "0"}, "storage.claim.size: ", "expected a positive number"),
    "a folder above the volume": (
        "cpu-kind",
        {"storage__models": {"existingClaim": "a", "subPath": "../x"}},
        "storage.models.subPath: ",
        "without ..",
    ),
    "a class with a space": (
        "cpu-kind",
        {"storage__claim__storageClassName": "My Class"},
        "storage.claim.storageClassName: ",
        "kubectl get storageclass",
    ),
    "a URL for a registry": (
        "cpu-kind",
        {"imageRegistry": "https://mirror.example"},
        "imageRegistry: ",
        "a host without a scheme, such as registry.example.com",
    ),
    "a registry with a space": (
        "cpu-kind",
        {"image__registry": "Mirror Example"},
        "image.registry: ",
        "a host without",
    ),
    "a tag with a space": ("cpu-kind", {"image__tag": "a b"}, "image.tag: ", "such as 0.1.0"),
    "a repository in capitals": ("cpu-kind", {"image__repository": "ML/Quartet"}, "image.repository: ", "lower case"),
    "an empty repository": (
        "cpu-kind",
        {"redis__image": {"repository": ""}},
        "redis.image.repository: ",
        '""; expected',
    ),
    "a host in the repository": (
        "cpu-kind",
        {"imageRegistry": "mirror.example", "image__repository": "registry.example/ml/quartet"},
        'image.repository: "registry.example/ml/quartet", and the registry mirror.example',
        "set image.registry to the host",
    ),
    "a queue with a space": (
        "cpu-kind",
        {"scheduling": {"gang": {"kind": "kueue", "queue": "a b"}}},
        "scheduling.gang.queue: ",
        "at most 63 lower case letters",
    ),
    "a class of priority with a space": (
        "cpu-kind",
        {"components__actor__priorityClassName": "Not Valid"},
        "components.actor.priorityClassName: ",
        "the name of an object of Kubernetes",
    ),
    "a device without a domain": (
        "cpu-kind",
        {"components__actor__gpuResource": "gpu"},
        "components.actor.gpuResource: ",
        "such as nvidia.com/gpu",
    ),
    "an address that does not exist": (
        "two-node-actor",
        {"redis__external__cidrs": ["999.1.1.1/99"]},
        "redis.external.cidrs: ",
        "expected an address and the length of its prefix",
    ),
    "an address of DNS that does not exist": (
        "cpu-kind",
        {"networkPolicy": {"dns": {"cidrs": ["10.0.0.1/33"]}}},
        "networkPolicy.dns.cidrs: ",
        "expected an address",
    ),
    # Values that contradict each other.
    "a class without a size": (
        "cpu-kind",
        {"storage__runs": {"storageClassName": "nfs"}},
        "storage.runs.storageClassName: given without size",
        "set storage.runs.size for a separate claim, or storage.claim.storageClassName",
    ),
    "a volume without a size": (
        "cpu-kind",
        {"storage__models": {"volumeName": "filled"}},
        "storage.models.volumeName: given without size",
        "set storage.models.size",
    ),
    "an existing claim with a size": (
        "cpu-kind",
        {"storage__data": {"existingClaim": "data", "size": "1Gi"}},
        "storage.data.size: given beside existingClaim data",
        "remove the other",
    ),
    "a claim that the run cannot write": (
        "cpu-kind",
        {"storage__claim__accessModes": ["ReadOnlyMany"]},
        "storage.claim.accessModes: ReadOnlyMany, but the run writes",
        "expected ReadWriteOnce or ReadWriteMany",
    ),
    "a volume of an unknown class": (
        "cpu-kind",
        {"storage__claim__volumeName": "filled"},
        "storage.claim.volumeName: filled, without storageClassName",
        "or to - if it has none",
    ),
    "GPUs by two keys": (
        "single-node-4-gpus",
        {"components__actor__resources": {"limits": {"nvidia.com/gpu": 4}}},
        "components.actor.resources.limits.nvidia.com/gpu: 4, and gpus: 1",
        "set components.actor.gpus",
    ),
    "requested GPUs by two keys": (
        "single-node-4-gpus",
        {"components__actor__resources": {"requests": {"nvidia.com/gpu": 4}}},
        "components.actor.resources.requests.nvidia.com/gpu: 4, and gpus: 1",
        "set components.actor.gpus",
    ),
    "a device without a limit": (
        "cpu-kind",
        {"components__actor__resources": {"requests": {"rdma/hca": 4}}},
        "components.actor.resources.requests.rdma/hca: 4, and limits.rdma/hca: none",
        "expected both to be equal",
    ),
    "less memory than maxmemory": (
        "cpu-kind",
        {"redis__resources": {"limits": {"memory": "128Mi"}}},
        "redis.resources.limits.memory: 128Mi, and redis.maxmemory: 256mb",
        "raise it, or lower maxmemory",
    ),
    "less memory than /dev/shm": (
        "cpu-kind",
        {"components__actor__resources": {"limits": {"memory": "4Gi"}}, "components__actor__sharedMemory": "8Gi"},
        "components.actor.resources.limits.memory: 4Gi, and sharedMemory: 8Gi",
        "raise it, or lower sharedMemory",
    ),
    "less ephemeral storage than /tmp": (
        "cpu-kind",
        {"components__actor__resources": {"limits": {"ephemeral-storage": "512Mi"}}},
        "components.actor.resources.limits.ephemeral-storage: 512Mi, and temporarySpace: 1Gi",
        "raise it, or lower temporarySpace",
    ),
    "two volumes of one name": (
        "cpu-kind",
        {"components__actor__extraVolumes": [{"name": "tmp", "emptyDir": {}}]},
        "components.actor.extraVolumes: two entries with name tmp",
        "remove or rename the other",
    ),
    "a label of the chart": (
        "cpu-kind",
        {"components__actor__labels": {"app.kubernetes.io/component": "critic"}},
        "components.actor.labels: app.kubernetes.io/component",
        "Services and NetworkPolicies select pods by this one",
    ),
    "less time to end than to drain": (
        "cpu-kind",
        {"components__actor__terminationGracePeriodSeconds": 30, "components__actor__drainSeconds": 600},
        "components.actor.terminationGracePeriodSeconds: 30, and drainSeconds: 600",
        "raise it, or lower drainSeconds",
    ),
    "a port that no policy allows": (
        "cpu-kind",
        {"downloads__sources": {"data/a.json": "https://files.example:8443/a.json"}},
        "downloads.sources: data/a.json: port 8443",
        "add a rule to downloads.egress",
    ),
    "a queue without a kind": (
        "cpu-kind",
        {"scheduling": {"gang": {"queue": "training"}}},
        "scheduling.gang.queue: training, but scheduling.gang.kind is none",
        "set kind to kueue or volcano",
    ),
    "Kueue with Volcano": (
        "cpu-kind",
        {"scheduling": {"schedulerName": "volcano", "gang": {"kind": "kueue", "queue": "training"}}},
        "scheduling.schedulerName: volcano, but scheduling.gang.kind is kueue",
        "remove one of them",
    ),
    "Volcano without its scheduler": (
        "cpu-kind",
        {"scheduling": {"schedulerName": "default-scheduler", "gang": {"kind": "volcano"}}},
        "scheduling.schedulerName: default-scheduler, but scheduling.gang.kind is volcano",
        "remove one of them",
    ),
    "replicas with KEDA": (
        "node-8-gpus",
        {"components__reward__replicas": 3},
        "components.reward.replicas: 3, and autoscaling.kind: keda",
        "set autoscaling.minReplicas",
    ),
    "KEDA without metrics": (
        "node-8-gpus",
        {"monitoring__serviceMonitor": {"enabled": False}},
        "autoscaling.kind: ",
        "but monitoring.serviceMonitor.enabled is false, so Prometheus may not read its metrics; set it to true",
    ),
    "an ingress without host": ("cpu-kind", {"ingress": {"enabled": True}}, "ingress.host: needed", "browsers find"),
    "a request above its limit": (
        "cpu-kind",
        {"components__actor__resources": {"requests": {"memory": "4Gi"}, "limits": {"memory": "2Gi"}}},
        "components.actor.resources.requests.memory: 4Gi, and limits.memory: 2Gi",
        "lower it, or raise the limit",
    ),
    "no external Redis": ("cpu-kind", {"redis__enabled": False}, "redis.external.url: required", "such as rediss://"),
    "no certificates": (
        "cpu-kind",
        {"security__tls__source": "existing"},
        "security.tls.existingSecrets.",
        "set it to a Secret with tls.crt, tls.key and ca.crt",
    ),
    "plaintext": (
        "cpu-kind",
        {"security__tls__enabled": False},
        "security.tls.enabled: ",
        "security.allowPlaintext true",
    ),
    "a setting of the chart": (
        "cpu-kind",
        {"config__buffer": {"url": "redis://a"}},
        "config.buffer.url: the chart sets it",
        "see redis of the values",
    ),
    "a disabled role": (
        "cpu-kind",
        {"components__reference__enabled": False},
        "no enabled component has the role reference",
        "enable components.reference",
    ),
    "an engine without generators": (
        "cpu-kind",
        {"config__rollout__engine": "vllm"},
        "config.rollout.engine vllm: ",
        "set components.generator.enabled true",
    ),
    "a list of downloads": ("cpu-kind", {"downloads__sources": ["hf://a/b"]}, "'/downloads/sources'", "want object"),
    "a download to another folder": (
        "cpu-kind",
        {"downloads__sources": {"policy": "hf://a/b"}},
        'downloads.sources: target "policy"',
        "such as models/policy",
    ),
    "a variable that the chart sets": (
        "cpu-kind",
        {"defaults__env": [{"name": "HOME", "value": "/a"}]},
        "components.actor.env: ",
        "two entries with name HOME, or the chart has one",
    ),
    "a variable twice": (
        "cpu-kind",
        {"components__actor__env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
        "components.actor.env: ",
        "two entries with name A",
    ),
    "a variable of downloads": (
        "cpu-kind",
        {"downloads__env": [{"name": "HOME", "value": "/a"}]},
        "downloads.env: ",
        "two entries with name HOME",
    ),
    "a pull secret twice": (
        "cpu-kind",
        {"imagePullSecrets": [{"name": "a"}, {"name": "a"}]},
        "imagePullSecrets: ",
        "two entries with name a",
    ),
    "a mount over that of the chart": (
        "cpu-kind",
        {
            "components__actor": {
                "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
                "extraVolumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
            }
        },
        "components.actor.extraVolumeMounts: ",
        "two entries with mountPath /tmp, or the chart has one",
    ),
    "a mount without its volume": (
        "cpu-kind",
        {"components__actor__extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]},
        "components.actor.extraVolumeMounts: ",
        "the pod has no volume scratch; expected one of",
    ),
    "a spread twice": (
        "cpu-kind",
        {"components__actor__topologySpreadConstraints": [SPREAD, SPREAD]},
        "components.actor.topologySpreadConstraints: ",
        "two entries with topologyKey, whenUnsatisfiable kubernetes.io/hostname, DoNotSchedule",
    ),
    "the port of another server": (
        "two-node-actor",
        {"workerGroups__port": 9100},
        "workerGroups.port: 9100, which ",
        "expected another port",
    ),
    "a digest for two variants": (
        "cpu-kind",
        {"image": {"digest": DIGEST}, "components__generator": {"enabled": True, "image": {"variant": "vllm"}}},
        "components.generator.image.variant: vllm, and image.digest",
        "expected its own digest",
    ),
    "a digest beside a tag": (
        "cpu-kind",
        {"image": {"digest": DIGEST}, "components__actor__image": {"tag": "patched"}},
        "components.actor.image.tag: patched, and image.digest",
        "expected its own digest",
    ),
    "a label with a space": (
        "cpu-kind",
        {"defaults__labels": {"team": "a b"}},
        "defaults.labels.team: ",
        '"a b"; expected at most 63 letters',
    ),
    "a long queue": (
        "cpu-kind",
        {"scheduling__gang": {"kind": "kueue", "queue": "q" * 64}},
        "scheduling.gang.queue: ",
        "at most 63",
    ),
    "a Secret in capitals": (
        "cpu-kind",
        {"gateway__tokens": {"existingSecret": "My_Secret"}},  # pragma: allowlist secret - a name
        "gateway.tokens.existingSecret: ",
        "the name of an object of Kubernetes",
    ),
    "no metric to scale by": (
        "two-node-actor",
        {
            "components__reward__autoscaling": {"kind": "hpa", "hpa": {"metric": ""}},
            "monitoring__serviceMonitor__enabled": True,
        },
        "components.reward.autoscaling.hpa.metric: ",
        "expected the name of a metric",
    ),
    "a download without a scheme": (
        "cpu-kind",
        {"downloads__sources": {"models/policy": "owner/name"}},
        'downloads.sources: models/policy: "owner/name"',
        "expected hf://OWNER/NAME",
    ),
    "no memory of the gateway": (
        "cpu-kind",
        {"components__gateway": {"resources": None}},
        "components.gateway.resources: no memory",
        "set components.gateway.resources.limits.memory",
    ),
    "a claim that Redis cannot write": (
        "cpu-kind",
        {"redis__persistence": {"accessModes": ["ReadOnlyMany"]}},
        "redis.persistence.accessModes: ReadOnlyMany, but Redis writes",
        "expected ReadWriteOnce",
    ),
    "a claim smaller than maxmemory": (
        "cpu-kind",
        {"redis__maxmemory": "2gb"},
        "redis.persistence.size: 1Gi, and redis.maxmemory: 2gb",
        "raise it, or lower maxmemory",
    ),
    "one key for two tokens": (
        "cpu-kind",
        {"gateway": {"tokens": {"viewerKey": "operator"}}},
        "gateway.tokens.viewerKey: operator, which is also operatorKey",
        "change one of them",
    ),
    "an issuer without a name": (
        "cpu-kind",
        {"security__tls": {"source": "cert-manager", "certManager": {"issuerRef": {"kind": "ClusterIssuer"}}}},
        "security.tls.certManager.issuerRef.name: missing",
        "set it to the name of the issuer",
    ),
    # Generators that cannot start.
    "an engine that the image lacks": (
        "vllm-generators",
        {"components__generator": {"enabled": True}},
        "components.generator.image.variant: cuda, but config.rollout.engine is vllm",
        "set components.generator.image.variant to vllm",
    ),
    "fewer GPUs than the engine needs": (
        "leader-worker-set",
        {"config__rollout__vllm": {"tensor_parallel_size": 4}},
        "components.generator.gpus: 2, and config.rollout.vllm.tensor_parallel_size: 4",
        "expected the same number",
    ),
    "more GPUs than the engine uses": (
        "vllm-generators",
        {"components__generator__gpus": 2},
        "components.generator.gpus: 2, and config.rollout.vllm.tensor_parallel_size: 1",
        "expected the same number",
    ),
    "GPUs that torch does not use": (
        "vllm-generators",
        {"config__rollout__engine": "torch", "components__generator__gpus": 2},
        "components.generator.gpus: 2, but config.rollout.engine is torch, which uses at most one GPU",
        "set gpus to 1, and replicas",
    ),
    # Models and data that no volume has.
    "a model of the Hub": (
        "cpu-kind",
        {"config__actor__model": "Qwen/Qwen2.5-7B-Instruct"},
        'config.actor.model: "Qwen/Qwen2.5-7B-Instruct"; expected a path on a volume of the chart, such as '
        "models/Qwen2.5-7B-Instruct",
        "downloads.sources to {models/Qwen2.5-7B-Instruct: hf://Qwen/Qwen2.5-7B-Instruct}",
    ),
    "a reward of the Hub": (
        "cpu-kind",
        {"config__reward__model": "a/b"},
        'config.reward.model: "a/b"',
        "by extraEgress, set checks.paths false",
    ),
    "a file of the own machine": (
        "cpu-kind",
        {"config__data__prompts": "prompts.jsonl"},
        'config.data.prompts: "prompts.jsonl"',
        "such as data/prompts.jsonl",
    ),
    "a path out of the volume": (
        "cpu-kind",
        {"config__data__validation": "data/../other/a.jsonl"},
        "config.data.validation: ",
        "or copy the files with the loader",
    ),
    "a folder of another machine": (
        "cpu-kind",
        {"config__actor__model": "/scratch/models/policy"},
        "config.actor.model: ",
        "such as models/policy",
    ),
    "a model among the data": (
        "cpu-kind",
        {"config__actor__model": "data/policy"},
        'config.actor.model: "data/policy"',
        "such as models/policy",
    ),
    "a data set of the Hub": (
        "cpu-kind",
        {"config__data": {"sets": [{"name": "a", "path": "data/a.jsonl"}, {"name": "b", "dataset": "owner/name"}]}},
        'config.data.sets[1].dataset: "owner/name"',
        "{data/name: hf://datasets/owner/name}",
    ),
    "a part of the reward of the Hub": (
        "cpu-kind",
        {"config__reward": {"source": "ensemble", "parts": [{"name": "a", "model": "a/b"}]}},
        'config.reward.parts[0].model: "a/b"',
        "{models/b: hf://a/b}",
    ),
}


@every_case("name", WRONG)
def test_a_wrong_value_gives_one_message_with_its_path_and_what_is_expected(name: str) -> None:
    base, changes, where, expected = WRONG[name]
    message = refusal(changed(base, **changes))
    assert where in message
    assert expected in message
    problems = re.findall(r"^\s*- at '", message, re.MULTILINE) or message.strip().splitlines()
    assert len(problems) == 1, message


@pytest.mark.parametrize("release", ["my.run", "7b", "1e3", "123"])
def test_a_release_name_that_services_cannot_have_is_refused(release: str) -> None:
    with pytest.raises(helm_python.HelmError, match=f'release name "{release}": .* or set fullnameOverride'):
        chart().render(changed("cpu-kind"), name=release, namespace=NAMESPACE)
    rendered = chart().render(changed("cpu-kind", fullnameOverride="my-run"), name=release, namespace=NAMESPACE)
    objects = [each for name, text in rendered.items() if name.endswith(".yaml") for each in yaml.safe_load_all(text)]
    labels = {each["metadata"]["labels"]["app.kubernetes.io/instance"] for each in objects if each}
    assert labels == {release}, "a text, even if it looks like a number"


def test_texts_that_look_like_numbers_stay_texts() -> None:
    values = changed(
        "cpu-kind",
        storage__models={"existingClaim": "123", "subPath": "2024"},
        serviceAccount={"name": "123"},
        scheduling={"schedulerName": "123", "gang": {"kind": "kueue", "queue": "true"}},
        components__actor={"priorityClassName": "1000", "runtimeClassName": "true"},
        nameOverride="true",
        fullnameOverride="true",
    )
    actor = of_kind(manifests(values), "Deployment")["true-actor"]["spec"]["template"]
    pod = actor["spec"]
    assert (pod["priorityClassName"], pod["runtimeClassName"]) == ("1000", "true")
    assert (pod["schedulerName"], pod["serviceAccountName"]) == ("123", "123")
    assert actor["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "true"
    assert actor["metadata"]["labels"]["app.kubernetes.io/name"] == "true"
    claims = {
        volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume
    }
    assert "123" in claims
    mounts = {mount["mountPath"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["/quartet/models"]["subPath"] == "2024"


def test_a_long_name_of_a_leader_worker_set_is_refused() -> None:
    message = refusal(changed("two-node-actor", fullnameOverride="a" * 39, workerGroups__leaderWorkerSet=True))
    assert "expected at most 50; set fullnameOverride to a shorter name" in message
    assert manifests(changed("two-node-actor", fullnameOverride="a" * 39, workerGroups__leaderWorkerSet=False))


def test_there_are_thirty_of_them() -> None:
    assert len(WRONG) >= 30


@every_case(
    "values",
    [
        {
            "components__actor__resources": {
                "requests": {"cpu": 1, "memory": "1G"},
                "limits": {"cpu": "1", "memory": "1Gi"},
            }
        },
        {"components__actor__resources": {"requests": {"cpu": "1500m"}, "limits": {"cpu": 2, "rdma/hca": 8}}},
        {"storage__claim__size": 8589934592},
        {"redis__maxmemory": "1000"},
        {"fullnameOverride": "a-1"},
        {"components__actor": {"gpus": 4, "resources": {"requests": {"nvidia.com/gpu": 4}}}},
        {"storage__claim": {"size": "0.5Ti", "volumeName": "filled", "storageClassName": "-"}},
        # Values of the first release stay when a second one shares its claim.
        {"storage__claim": {"existingClaim": "quartet-storage", "size": "700Gi", "storageClassName": "shared"}},
        {"image": {"repository": "registry.example:5000/ml/quartet", "variant": "cpu"}},
        {"imageRegistry": "registry.example.com:5000/mirror/"},
        {"networkPolicy": {"dns": {"cidrs": ["169.254.20.10/32", "fd00::a/128", "0.0.0.0/0"]}}},
        {"redis__resources": {"limits": {"memory": "256Mi"}}},
        {"image": {"digest": DIGEST}},
        {"config__actor__model": "Qwen/Qwen2.5-7B-Instruct", "checks": {"paths": False}},
        {"config__actor__model": "runs/before/policy", "config__data__prompts": "/quartet/data/a.jsonl"},
        {
            "config__reward__model": "/shared/reward",
            "defaults__extraVolumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}],
            "defaults__extraVolumeMounts": [{"name": "shared", "mountPath": "/shared"}],
        },
        {"storage__claim__size": "1Ei"},
        {"components__actor__resources": {"requests": {"cpu": 0.5}, "limits": {"cpu": 1.5}}},
        # An image with another name may have the engine.
        {
            "config__rollout__engine": "vllm",
            "components__generator": {"enabled": True, "gpus": 0, "image": {"repository": "ml/with-vllm"}},
        },
        # The run needs no critic, so its model is not read.
        {"config__algorithm": {"estimator": "rloo"}, "config__critic__model": "a/b"},
    ],
)
def test_values_at_the_limit_are_accepted(values: dict[str, Any]) -> None:
    assert manifests(changed("cpu-kind", **values))
