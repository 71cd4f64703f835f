"""`helm template` with a wrong value gives one message: the value, what is expected and, if that is not obvious, what to do."""

from __future__ import annotations

import re
from typing import Any

from tests.every_case import every_case
from tests.helm.rendering import Values, changed, manifests
from tests.helm.test_values import refusal

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
    "two actors": ("cpu-kind", {"components__actor__replicas": 2}, "'/components/actor/replicas'", "got 2, want 1"),
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
        '"500GB"; expected a number with a unit of Kubernetes',
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
    # Values that contradict each other.
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
    "a download without a scheme": (
        "cpu-kind",
        {"downloads__sources": {"models/policy": "owner/name"}},
        'downloads.sources: models/policy: "owner/name"',
        "expected hf://OWNER/NAME",
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
    ],
)
def test_values_at_the_limit_are_accepted(values: dict[str, Any]) -> None:
    assert manifests(changed("cpu-kind", **values))
