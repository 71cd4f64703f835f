"""Secrets and certificates of the chart: generated once, kept across upgrades, and valid for mutual TLS."""

from __future__ import annotations

import base64
import socket
import ssl
import threading
from pathlib import Path

import helm_python
import pytest

from tests.helm.cluster import ApiServer
from tests.helm.rendering import Manifest, changed, example, manifests, of_kind

CERTIFICATE = "quartet-certificate-"


def secrets(result: list[Manifest]) -> dict[str, dict[str, str]]:
    """Return the data of each Secret by name."""
    return {name: item["data"] for name, item in of_kind(result, "Secret").items()}


def test_each_release_has_new_secrets() -> None:
    first = secrets(manifests(example("cpu-kind")))
    second = secrets(manifests(changed("cpu-kind", config__run={"name": "other"})))
    for name in ("quartet-redis", "quartet-rpc-token", "quartet-gateway-tokens"):
        assert first[name].keys() == second[name].keys()
        for key, value in first[name].items():
            assert value != second[name][key]
            assert len(base64.b64decode(value)) == 48
    assert first["quartet-gateway-tokens"]["operator"] != first["quartet-gateway-tokens"]["viewer"]


def test_an_upgrade_keeps_the_secrets_of_the_cluster(api: ApiServer, cluster: helm_python.Config) -> None:
    installed = manifests(example("cpu-kind"), cluster)
    api.store(installed)
    upgraded = manifests(changed("cpu-kind", config__run={"name": "tiny", "steps": 9}), cluster)
    assert secrets(upgraded) == secrets(installed)
    assert len(secrets(installed)) == 11


def test_an_upgrade_issues_the_certificate_of_a_new_process_with_the_same_authority(
    api: ApiServer, cluster: helm_python.Config
) -> None:
    before = manifests(changed("cpu-kind", config__algorithm={"estimator": "reinforce"}), cluster)
    api.store(before)
    after = secrets(manifests(example("cpu-kind"), cluster))
    old = secrets(before)
    # Without the critic, its process had the certificate of the reward.
    assert set(after) - set(old) == {CERTIFICATE + "critic"}
    assert after["quartet-ca"] == old["quartet-ca"]
    assert after[CERTIFICATE + "actor"] == old[CERTIFICATE + "actor"]
    assert after[CERTIFICATE + "critic"]["ca.crt"] == old["quartet-ca"]["tls.crt"]


def test_changed_host_names_renew_the_certificate(api: ApiServer, cluster: helm_python.Config) -> None:
    api.store(manifests(example("cpu-kind"), cluster))
    values = changed("cpu-kind", gateway={"allowedHosts": ["quartet.example.com"]})
    after = secrets(manifests(values, cluster))
    for process in ("gateway", "actor"):
        unchanged = after[CERTIFICATE + process] == secrets(api.objects)[CERTIFICATE + process]
        assert unchanged == (process == "actor")


def test_a_lost_authority_renews_all_certificates(api: ApiServer, cluster: helm_python.Config) -> None:
    api.store(manifests(example("cpu-kind"), cluster))
    api.objects = [item for item in api.objects if item["metadata"]["name"] != "quartet-ca"]
    after = secrets(manifests(example("cpu-kind"), cluster))
    for process in ("gateway", "actor", "redis"):
        assert after[CERTIFICATE + process]["ca.crt"] == after["quartet-ca"]["tls.crt"]
        assert after[CERTIFICATE + process] != secrets(api.objects)[CERTIFICATE + process]


def test_existing_secrets_are_not_generated() -> None:
    assert of_kind(manifests(example("two-node-actor")), "Secret") == {}
    generated = of_kind(manifests(example("node-8-gpus")), "Secret")
    assert set(generated) == {"quartet-redis", "quartet-rpc-token", "quartet-gateway-tokens"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificates as pods mount them: FOLDER/PROCESS/{tls.crt,tls.key,ca.crt}."""
    folder: Path = tmp_path_factory.mktemp("certificates")
    for name, data in secrets(manifests(example("cpu-kind"))).items():
        if name.startswith(CERTIFICATE):
            process = folder / name.removeprefix(CERTIFICATE)
            process.mkdir()
            for file, content in data.items():
                (process / file).write_bytes(base64.b64decode(content))
    return folder


@pytest.mark.parametrize(
    ("server", "name"),
    [
        ("actor", "actor.quartet"),
        ("critic", "critic.quartet"),
        ("critic", "reward.quartet"),
        ("reference", "reference.quartet"),
        ("orchestrator", "orchestrator.quartet"),
        ("gateway", "gateway.quartet"),
        ("gateway", "localhost"),
        ("gateway", "127.0.0.1"),
        ("gateway", "quartet-gateway.rlhf.svc"),
        ("redis", "redis.quartet"),
        ("redis", "quartet-redis"),
        ("redis", "redis"),
    ],
)
def test_each_certificate_is_valid_for_its_names(folder: Path, server: str, name: str) -> None:
    assert _handshake(folder, server, "operator", name) == ("operator.quartet",)


def test_a_certificate_is_invalid_for_other_names(folder: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for 'actor\.quartet'"):
        _handshake(folder, "critic", "operator", "actor.quartet")


def test_the_certificates_of_cert_manager_have_the_same_names() -> None:
    certificates = of_kind(manifests(example("node-8-gpus")), "Certificate")
    names = {name.removeprefix("quartet-"): item["spec"].get("dnsNames") for name, item in certificates.items()}
    for process in ("actor", "critic", "reward", "reference", "orchestrator", "operator", "prometheus"):
        assert names[process] == [f"{process}.quartet"]
    assert names["redis"][:3] == ["redis.quartet", "redis", "localhost"]
    assert {"gateway.quartet", "quartet.example.com", "localhost", "quartet-gateway"} <= set(names["gateway"])
    assert certificates["quartet-ca"]["spec"]["isCA"] is True
    for name, item in certificates.items():
        if name != "quartet-ca":
            assert {"server auth", "client auth"} <= set(item["spec"]["usages"])
            assert item["spec"]["secretName"] == CERTIFICATE + name.removeprefix("quartet-")


def test_a_configured_issuer_is_used() -> None:
    issuer = {"name": "company", "kind": "ClusterIssuer"}
    result = manifests(changed("node-8-gpus", security__tls__certManager={"issuerRef": issuer}))
    assert of_kind(result, "Issuer") == {}
    for item in of_kind(result, "Certificate").values():
        assert item["spec"]["issuerRef"] == {**issuer, "group": "cert-manager.io"}
        assert "isCA" not in item["spec"]


def test_prometheus_uses_mutual_tls_and_verifies_each_name() -> None:
    result = of_kind(manifests(example("node-8-gpus")), "ServiceMonitor")
    secret = CERTIFICATE + "prometheus"
    for name, item in result.items():
        (endpoint,) = item["spec"]["endpoints"]
        assert endpoint["scheme"] == "https"
        assert endpoint["tlsConfig"] == {
            "serverName": f"{name.removeprefix('quartet-')}.quartet",
            "ca": {"secret": {"name": secret, "key": "ca.crt"}},
            "cert": {"secret": {"name": secret, "key": "tls.crt"}},
            "keySecret": {"name": secret, "key": "tls.key"},
        }
        replaced = {item["targetLabel"]: item["replacement"] for item in endpoint["relabelings"]}
        # Labels that the alerts and the dashboard query.
        assert replaced["job"].startswith("quartet")
        assert replaced["role"] == name.removeprefix("quartet-")
    gateway = result["quartet-gateway"]["spec"]["endpoints"][0]
    assert gateway["authorization"]["credentials"] == {"name": "quartet-gateway-tokens", "key": "viewer"}


def _handshake(folder: Path, server: str, client: str, name: str) -> tuple[str, ...]:
    """Perform mutual TLS over a socket pair; return the DNS names in the certificate of the client."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context, process in ((server_context, server), (client_context, client)):
        context.load_cert_chain(folder / process / "tls.crt", folder / process / "tls.key")
        context.load_verify_locations(folder / process / "ca.crt")
    server_context.verify_mode = ssl.CERT_REQUIRED
    server_socket, client_socket = socket.socketpair()
    client_names: list[tuple[str, ...]] = []

    def serve() -> None:
        try:
            with server_context.wrap_socket(server_socket, server_side=True) as connection:
                peer = connection.getpeercert() or {}
                client_names.append(tuple(value for kind, value in peer.get("subjectAltName", ()) if kind == "DNS"))
                connection.sendall(b".")
        except OSError:
            server_socket.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client_context.wrap_socket(client_socket, server_hostname=name) as connection:
            connection.recv(1)
    finally:
        client_socket.close()
        thread.join()
    return client_names[0]
