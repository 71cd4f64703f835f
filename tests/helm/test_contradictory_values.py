"""Values that are right by themselves and wrong together, or for the cluster, are refused with one message."""

from __future__ import annotations

from tests.every_case import every_case
from tests.helm.rendering import Values
from tests.helm.test_components import TRAFFIC
from tests.helm.test_wrong_values import DIGEST, check_message

SPREAD = {"topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1}

CONTRADICTORY: dict[str, tuple[str, Values, str, str]] = {
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
    "one key for users and operators": (
        "cpu-kind",
        {"traffic": {"keys": {"viewerKey": "operators"}}},
        "traffic.keys.viewerKey: operators, which is also operatorKey",
        "change one of them",
    ),
    "users without generators": (
        "cpu-kind",
        {**TRAFFIC, "components__generator": {"enabled": False}},
        "config.environment.kind traffic: generators answer the users",
        "set components.generator.enabled true",
    ),
    "generators of users that follow the needs of a step": (
        "single-node-4-gpus",
        {
            **TRAFFIC,
            "components__generator": {
                "enabled": True,
                "autoscaling": {"kind": "keda", "keda": {"serverAddress": "http://p"}},
            },
            "monitoring__serviceMonitor__enabled": True,
        },
        "components.generator.autoscaling.keda.query: empty",
        "set a query of your own",
    ),
    "a file of keys that the chart mounts": (
        "single-node-4-gpus",
        {**TRAFFIC, "config__environment": {"kind": "traffic", "traffic": {"viewer_keys_file": "data/keys"}}},
        "config.environment.traffic.viewer_keys_file: the chart sets it",
        "see traffic.keys of the values",
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


@every_case("name", CONTRADICTORY)
def test_contradictory_values_give_one_message_with_a_path_and_what_is_expected(name: str) -> None:
    check_message(*CONTRADICTORY[name])
