"""The command `quartet conformance`: its report, its exit codes, and its options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quartet.cli.main import app
from quartet.conformance import ROLES, checks_of
from quartet.errors import ConfigError
from quartet.types import Role
from tests.conformance.models import serving
from tests.conformance.mutants import MUTANTS

DOCS = Path(__file__).parents[2]


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("judge", "127.0.0.1:1"), "role judge: expected one of "),
        (("reward", "nowhere"), "address nowhere: expected HOST:PORT"),
        (("reward", "127.0.0.1:1", "--only", "x"), "--only x: the reward has no such check"),
        (("reward", "127.0.0.1:1", "--token-file", "absent"), "absent"),
        (("reward", "127.0.0.1:1", "--fields", "[1]"), "--fields [1]: expected a JSON object"),
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
