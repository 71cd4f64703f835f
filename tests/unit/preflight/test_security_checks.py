"""Checks of certificates, tokens, passwords and listen addresses before any process starts."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.errors import ConfigError
from quartet.preflight.security_checks import check_access
from quartet.rpc.security.certificates import Authority
from tests.unit.preflight.files import lines

LOCAL_PROCESSES = ("operator", "actor", "critic", "reward", "reference", "orchestrator", "gateway")
GENERATORS = {"rollout": {"generators": 2}}
SECRET = "this-is-secret-enough"  # pragma: allowlist secret - the test's own


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with the certificates of a run, and files with a valid token, a token that is too short, and a password."""
    authority = Authority(timedelta(days=1))
    for process in LOCAL_PROCESSES:
        authority.issue(tmp_path / "certificates" / process, [f"{process}.quartet"])
    authority.issue(tmp_path / "expired", ["actor.quartet"], timedelta(minutes=-1))
    authority.issue(tmp_path / "misnamed", ["critic.quartet"])
    Authority(timedelta(days=1)).issue(tmp_path / "foreign", ["actor.quartet"])
    (tmp_path / "token").write_text(SECRET)
    (tmp_path / "short").write_text("seekret")
    return tmp_path


def config(folder: Path, orchestrator: str | None = None, **sections: Any) -> Config:
    tree = {
        "data": {"prompts": "p"},
        "actor": {"model": "a"},
        "reward": {"model": "r"},
        "security": {"certificates": str(folder / "certificates")},
        "services": {"orchestrator": {"address": orchestrator}},
        **sections,
    }
    return parse_config(tree, "test")


def refusal(*arguments: Any, **sections: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        lines(check_access(config(*arguments, **sections)))
    assert "seekret" not in str(refused.value)
    return str(refused.value)


def test_each_usable_file_gets_one_line(folder: Path) -> None:
    certificates = folder / "certificates"
    notes = lines(
        check_access(
            config(
                folder,
                security={"certificates": str(certificates), "token_file": str(folder / "token")},
                buffer={"url": "redis://me@far/0", "password_file": str(folder / "token")},
                gateway={
                    "token_file": str(folder / "token"),
                    "viewer_token_file": str(folder / "token"),
                    "certificate_file": str(certificates / "gateway/tls.crt"),
                    "key_file": str(certificates / "gateway/tls.key"),
                },
            )
        )
    )
    assert [note.split()[0] for note in notes] == [
        "security.certificates", "security.token_file", "buffer.password_file", "gateway.token_file",
        "gateway.viewer_token_file", "gateway.certificate_file",
    ]  # fmt: skip
    assert all("usable" in note for note in notes)
    assert ", ".join(LOCAL_PROCESSES) in notes[0]
    assert SECRET not in "".join(notes)


def test_a_config_without_secrets_needs_no_files(folder: Path) -> None:
    assert lines(check_access(config(folder, security={}))) == []


@pytest.mark.parametrize("process", LOCAL_PROCESSES)
def test_every_local_process_needs_its_certificate(folder: Path, process: str) -> None:
    (folder / "certificates" / process / "tls.key").unlink()
    assert f"certificates/{process}/tls.key cannot be read (No such file" in refusal(folder)


def test_a_process_on_another_machine_needs_no_certificate_here(folder: Path) -> None:
    shutil.rmtree(folder / "certificates/reward")
    shutil.rmtree(folder / "certificates/gateway")
    services = {"reward": {"address": "far:7001"}}
    assert len(lines(check_access(config(folder, services=services, gateway={"enabled": False})))) == 1


def test_local_generators_share_a_certificate(folder: Path) -> None:
    assert "certificates/generator/tls.crt cannot be read (No such file" in refusal(folder, **GENERATORS)
    lines(check_access(config(folder, services={"generators": ["far:1"]}, buffer={"url": "redis://far"})))
    for process in (*LOCAL_PROCESSES, "generator"):
        shutil.rmtree(folder / "certificates" / process, ignore_errors=True)
    authority = Authority(timedelta(days=1))
    for process in (*LOCAL_PROCESSES, "generator"):
        authority.issue(folder / "certificates" / process, [f"{process}.quartet"])
    assert "reference, generator, orchestrator" in lines(check_access(config(folder, **GENERATORS)))[0]


@pytest.mark.parametrize(
    ("other", "files", "text"),
    [
        ("expired", "tls.*", "actor/tls.crt has expired"),
        ("misnamed", "tls.*", "actor/tls.crt names critic.quartet; expected actor.quartet"),
        ("foreign", "*", "actor has another authority than"),
        ("foreign", "tls.*", "actor/tls.crt was not signed by the authority in ca.crt beside it"),
        ("foreign", "tls.key", "cannot be used (KEY_VALUES_MISMATCH)"),
    ],
)
def test_an_unusable_certificate_is_refused(folder: Path, other: str, files: str, text: str) -> None:
    for path in (folder / other).glob(files):
        shutil.copy(path, folder / "certificates/actor" / path.name)
    assert text in refusal(folder)


@pytest.mark.parametrize("key", ["security.token_file", "gateway.token_file", "gateway.viewer_token_file"])
@pytest.mark.parametrize(("file", "text"), [("absent", "cannot be read (No such file"), ("short", "has 7 characters")])
def test_a_missing_or_short_token_is_refused(folder: Path, key: str, file: str, text: str) -> None:
    section, _, name = key.partition(".")
    assert refusal(folder, **{"security": {}, section: {name: str(folder / file)}}).startswith(
        f"{key} {folder / file}: "
    )
    assert text in refusal(folder, **{"security": {}, section: {name: str(folder / file)}})


def test_a_password_file_is_read_and_needs_a_url(folder: Path) -> None:
    absent, existing = str(folder / "absent"), str(folder / "token")
    assert "buffer.password_file" in refusal(folder, buffer={"url": "redis://me@far/0", "password_file": absent})
    assert "is for a Redis at buffer.url" in refusal(folder, buffer={"password_file": existing})


ENGINE_SERVERS = pytest.mark.parametrize("engine", ["vllm-server", "sglang-server"])


def engine_server(engine: str, key: Path, generators: int = 1) -> dict[str, Any]:
    """Return the sections of a config whose generators call an HTTP server with an API key."""
    server = {"url": "http://127.0.0.1:8000", "weights_directory": "/dev/shm/w", "api_key_file": str(key)}
    sections: dict[str, Any] = {
        "security": {},
        "rollout": {"engine": engine, "generators": generators, engine.replace("-", "_"): server},
    }
    if not generators:
        sections |= {"services": {"generators": ["far:1"]}, "buffer": {"url": "redis://far"}}
    return sections


@ENGINE_SERVERS
def test_the_key_of_an_engine_server_is_checked(folder: Path, engine: str) -> None:
    key = f"rollout.{engine.replace('-', '_')}.api_key_file"
    assert lines(check_access(config(folder, **engine_server(engine, folder / "token")))) == [
        f"{key} {folder}/token: usable"
    ]
    (folder / "empty").touch()
    for file, text in (
        ("absent", "No such file"),
        ("empty", "one line with the secret"),
        ("short", "has 7 characters"),
    ):
        message = refusal(folder, **engine_server(engine, folder / file))
        assert message.startswith(f"{key} {folder / file}: ")
        assert text in message


@ENGINE_SERVERS
def test_the_key_of_generators_elsewhere_is_only_reported(folder: Path, engine: str) -> None:
    notes = lines(check_access(config(folder, **engine_server(engine, folder / "absent", generators=0))))
    assert len(notes) == 1
    assert "api_key_file" in notes[0]
    assert "not on this machine" in notes[0]


def test_the_gateways_certificate_must_be_valid_and_match_its_key(folder: Path) -> None:
    def certificate_and_key(certificate: str, key: str) -> dict[str, str]:
        return {"certificate_file": str(folder / certificate / "tls.crt"), "key_file": str(folder / key / "tls.key")}

    assert "give two PEM files that belong together" in refusal(
        folder, gateway=certificate_and_key("foreign", "misnamed")
    )
    assert "cannot be used (No such file" in refusal(folder, gateway=certificate_and_key("absent", "absent"))
    assert "has expired" in refusal(folder, gateway=certificate_and_key("expired", "expired"))


def test_files_of_processes_on_other_machines_are_only_reported(folder: Path) -> None:
    for process in LOCAL_PROCESSES:
        if process != "orchestrator":
            shutil.rmtree(folder / "certificates" / process)
    secrets = {"certificates": str(folder / "certificates"), "token_file": "/nowhere/token"}
    notes = lines(check_access(config(folder, "far:1", security=secrets)))
    assert notes == [
        f"security.certificates {folder}/certificates: usable for orchestrator",
        "security.token_file /nowhere/token: not on this machine; processes on other machines read their own",
    ]
    assert (
        "not on this machine" in lines(check_access(config(folder, "far:1", security={"certificates": "/nowhere"})))[0]
    )
    assert "has 7 characters" in refusal(folder, "far:1", security={"token_file": str(folder / "short")})


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"services": {"actor": {"listen": "0.0.0.0:5551"}}}, "services.actor: listen 0.0.0.0:5551: not a loopback"),
        (
            {"services": {"reward": {"metrics_listen": "[::]:9100"}}},
            "services.reward.metrics_listen: listen [::]:9100: not a loopback",
        ),
        (
            {**GENERATORS, "services": {"generator": {"listen": "0.0.0.0:0"}}},
            "services.generator: listen 0.0.0.0:0: not a loopback",
        ),
        ({"gateway": {"listen": "0.0.0.0:80"}}, "gateway: listen 0.0.0.0:80: not a loopback"),
    ],
)
def test_a_plaintext_address_beyond_loopback_is_refused(folder: Path, sections: dict[str, Any], text: str) -> None:
    assert refusal(folder, **{"security": {}, **sections}).startswith(text)
    lines(check_access(config(folder, **{**sections, "security": {"allow_plaintext": True}})))
    actor = {"address": "far:1", "listen": "0.0.0.0:5551"}
    remote = {"services": {"actor": actor, "generators": ["far:2"]}, "buffer": {"url": "redis://far"}}
    lines(check_access(config(folder, **{"security": {}, **remote})))


def test_a_certificate_chain_is_verified_up_to_its_authority(folder: Path) -> None:
    certificate, foreign = folder / "certificates" / "actor" / "tls.crt", folder / "foreign" / "tls.crt"
    good = certificate.read_bytes()
    certificate.write_bytes(good + foreign.read_bytes())
    lines(check_access(config(folder)))
    shutil.copy(folder / "foreign" / "tls.key", folder / "certificates" / "actor" / "tls.key")
    certificate.write_bytes(foreign.read_bytes() + good)
    assert "was not signed by the authority" in refusal(folder)
