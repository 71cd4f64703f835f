"""The command `quartet conformance`: its report, its exit codes, and its options."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quartet import __version__
from quartet.cli.main import app
from quartet.config.deployment import SecurityConfig
from quartet.conformance.report import contract_digest
from quartet.conformance.runner import ROLES, checks_of
from quartet.contract.status import Role
from quartet.errors import ConfigError
from quartet.rpc.security.certificates import Authority
from quartet.rpc.security.credentials import Credentials
from tests.conformance.models import serving
from tests.conformance.mutants import MUTANTS
from tests.waiting import LIMIT

DOCS = Path(__file__).parents[2]
JSON_KEYS = {"format", "contract", "contract_digest", "quartet", "started", "seconds", "role", "address"}
JSON_KEYS |= {"service_version", "conforms", "counts", "not_shown", "checks"}
CHECK_KEYS = {"id", "requirement", "source", "outcome", "detail", "seconds"}


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["conformance", *arguments])
    if isinstance(result.exception, ConfigError):
        return 2, str(result.exception)
    return result.exit_code, result.output


def test_a_conforming_service_exits_with_0(tmp_path: Path, redis_url: str) -> None:
    with serving(Role.REFERENCE, tmp_path, redis_url) as target:
        code, output = invoke("reference", target.address, "--only", "log_probs.s", "--only", "health")
    assert code == 0, output
    assert "ok      log_probs.shape" in output
    assert f"reference at {target.address} conforms: 7 passed" in output


def test_a_violation_exits_with_1_and_says_what_was_expected_and_where(tmp_path: Path, redis_url: str) -> None:
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == "scores padded with zeros"]
    with serving(Role.REWARD, tmp_path, redis_url, mutant.mutate) as target:
        code, output = invoke("reward", target.address, "--only", "score.shape")
        json_code, report = invoke("reward", target.address, "--only", "score.shape", "--json")
    assert (code, json_code) == (1, 1)
    assert "FAILED  score.shape" in output
    assert "scores: shape is [8]; expected [5]" in output
    assert "see proto/quartet/v1/reward.proto: ScoreResponse" in output
    tree = json.loads(report)
    assert (tree["conforms"], tree["counts"]["failed"], tree["checks"][0]["outcome"]) == (False, 1, "failed")


def test_checks_that_change_the_service_need_a_flag(tmp_path: Path, redis_url: str) -> None:
    with serving(Role.CRITIC, tmp_path, redis_url) as target:
        arguments = ("critic", target.address, "--only", "update.applies")
        assert "changes the state of the service; give --allow-changes" in invoke(*arguments)[1]
        assert "needs the service's buffer; give --buffer" in invoke(*arguments, "--allow-changes")[1]
        assert "1 passed" in invoke(*arguments, "--allow-changes", "--buffer", redis_url)[1]
        assert target.status().policy_version == 0
        code, output = invoke(*arguments, "--allow-changes", "--buffer", "redis://127.0.0.1:1")
        assert (code, "--buffer: rollout buffer at redis://127.0.0.1:1: unreachable" in output) == (2, True), output


def test_the_report_ends_with_what_was_not_shown(tmp_path: Path, redis_url: str) -> None:
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == "a constant score"]
    constant = (
        "64 random responses have the same score, 0, so a constant would pass as well; give --fields with which they differ, or "
        "--distinct-response"
    )
    failure = "needs fields with which the reward fails; give --failing-fields"
    with serving(Role.REWARD, tmp_path, redis_url, mutant.mutate) as target:
        arguments = ("reward", target.address, "--only", "score.not_constant", "--only", "score.failure")
        code, output = invoke(*arguments)
        report = json.loads(invoke(*arguments, "--json")[1])
        failed, told = invoke(*arguments, "--distinct-response", "[1, 2]")
    assert code == 0
    assert output.splitlines()[-4:] == [
        "not shown: 2 of 2 checks",
        f"        score.not_constant: {constant}",
        f"        score.failure: {failure}",
        f"reward at {target.address} conforms: 2 skipped",
    ]
    assert report["not_shown"] == [
        {"reason": constant, "checks": ["score.not_constant"]},
        {"reason": failure, "checks": ["score.failure"]},
    ]
    assert failed == 1
    assert "have the same score, 0, and so has that of --distinct-response; expected another one" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("judge", "127.0.0.1:1"), "role judge: expected one of "),
        (("reward", "nowhere"), "address nowhere: expected HOST:PORT"),
        (
            ("reward", "http://127.0.0.1:1"),
            "address http://127.0.0.1:1: expected HOST:PORT, such as 127.0.0.1:50061, without ",
        ),
        (("reward", "127.0.0.1"), "address 127.0.0.1: expected HOST:PORT"),
        (("reward", "127.0.0.1:0"), "with a port from 1 to 65535"),
        (("reward", "127.0.0.1:99999"), "with a port from 1 to 65535"),
        (("reward", "::1:50061"), "address ::1:50061: expected HOST:PORT"),
        (("reward", "127.0.0.1:1"), "address 127.0.0.1:1: cannot connect (Connection refused); start the service"),
        (("reward", "nowhere.invalid:50061"), "address nowhere.invalid:50061: cannot connect ("),
        (("reward", "127.0.0.1:1", "--certificates", "absent"), "absent"),
        (("reward", "127.0.0.1:1", "--only", "x"), "--only x: the reward has no such check"),
        (("reward", "127.0.0.1:1", "--token-file", "absent"), "absent"),
        (("reward", "127.0.0.1:1", "--fields", "[1]"), "--fields [1]: expected a JSON object"),
        (("reward", "127.0.0.1:1", "--failing-fields", "{"), "--failing-fields {: expected a JSON object"),
        (("reward", "127.0.0.1:1", "--distinct-response", "[-1]"), "--distinct-response [-1]: expected token ids as a"),
        (("reward", "127.0.0.1:1", "--distinct-response", "1,2"), "--distinct-response 1,2: expected token ids as a"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments: tuple[str, ...], message: str) -> None:
    code, output = invoke(*arguments)
    assert code == 2
    assert message in output


@pytest.mark.parametrize("role", ROLES)
def test_every_check_has_an_id_of_its_own_and_names_where_the_contract_says_it(role: Role) -> None:
    checks = checks_of(role)
    assert len({check.id for check in checks}) == len(checks)
    for check in checks:
        assert check.requirement.endswith(".")
        path = check.source.partition(":")[0]
        assert path in ("grpc.health.v1", "gRPC") or (DOCS / path).is_file(), check.source


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of the processes, as `quartet certificates` writes them, and a token."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority(timedelta(days=1))
    for process in ("orchestrator", "actor", "reward", "environment"):
        authority.issue(folder / process, [f"{process}.quartet"])
    (folder / "token").write_text("a" * 40)
    return folder


@pytest.mark.parametrize("role", [Role.REWARD, Role.ENVIRONMENT])
def test_a_service_with_certificates_and_a_token_conforms(
    role: Role, certificates: Path, tmp_path: Path, redis_url: str
) -> None:
    security = SecurityConfig(certificates=certificates, token_file=certificates / "token")
    area = "session.i" if role is Role.ENVIRONMENT else "score.shape"
    with serving(role, tmp_path, redis_url, credentials=Credentials(role, security)) as target:
        access = ("--certificates", str(certificates), "--token-file", str(certificates / "token"))
        only = ("--only", "tls", "--only", "status", "--only", "health", "--only", area)
        code, output = invoke(role, target.address, *access, *only)
        assert code == 0, output
        assert "skipped" not in output
        assert "the server uses TLS; give --certificates" in invoke(role, target.address)[1]
        other = Role.REWARD if role is Role.ENVIRONMENT else Role.ENVIRONMENT
        assert f"expected one for {other}.quartet" in invoke(other, target.address, *access)[1]


class PlainServer:
    """A server of something else than gRPC, which answers every connection with a line."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"220 ready\r\n")

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(LIMIT)


def test_certificates_for_a_server_without_tls_exit_with_2(certificates: Path, tmp_path: Path, redis_url: str) -> None:
    with serving(Role.REWARD, tmp_path, redis_url) as target:
        code, output = invoke("reward", target.address, "--certificates", str(certificates))
    assert (code, "the server does not use TLS; leave out --certificates" in output) == (2, True), output


def test_a_server_that_is_no_grpc_server_exits_with_2() -> None:
    with closing(PlainServer()) as server:
        code, output = invoke("reward", server.address)
    assert (code, "what listens there is no gRPC server" in output) == (2, True), output


def test_the_report_has_the_contract_the_versions_and_the_time(tmp_path: Path, redis_url: str) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    with serving(Role.REWARD, tmp_path, redis_url) as target:
        report = json.loads(invoke("reward", target.address, "--only", "score.shape", "--json")[1])
        header = invoke("reward", target.address, "--only", "score.shape")[1].splitlines()[0]
    assert report.keys() == JSON_KEYS
    assert report["checks"][0].keys() == CHECK_KEYS
    assert (report["contract"], report["contract_digest"]) == ("quartet.v1", contract_digest())
    assert report["quartet"] == report["service_version"] == __version__
    assert before <= datetime.fromisoformat(report["started"]) <= datetime.now(UTC)
    assert header.startswith(f"contract quartet.v1 {contract_digest()}, quartet {__version__}, 20")


def test_the_documentation_names_every_key_of_the_report() -> None:
    text = (DOCS / "docs/conformance.md").read_text(encoding="utf-8")
    missing = [key for key in JSON_KEYS | CHECK_KEYS if f"`{key}`" not in text]
    assert missing == []
