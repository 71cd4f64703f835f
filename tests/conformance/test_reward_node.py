"""The reward service in JavaScript of examples/reward-node: its conformance, and a run that it scores."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from quartet.config.deployment import SecurityConfig
from quartet.config.loading import load_config
from quartet.conformance.check import CheckOutcome
from quartet.conformance.report import line_of, summary_of
from quartet.conformance.runner import checks_of, run_checks
from quartet.conformance.target import Limits, Target
from quartet.contract.status import Role
from quartet.models.weights.tokenizer import load_tokenizer, tokenizer_fingerprint
from quartet.rpc.security.certificates import Authority
from quartet.rpc.security.credentials import Credentials
from quartet.run_directory.run_files import RunFiles
from quartet.system.child_processes import tied_to_parent
from tests.compose.stack import docker
from tests.ports import free_port
from tests.training.conftest import _one_thread, make, toy_task, toy_task_tree  # noqa: F401
from tests.training.runs import Run, orchestrator, services
from tests.waiting import LIMIT

EXAMPLE = Path(__file__).parents[2] / "examples/reward-node"
RLOO = {"algorithm": {"estimator": "rloo"}, "rollout": {"samples_per_prompt": 2}, "run": {"steps": 3}}
LIMITS = Limits(fields='{"words": "a,e,i,o,s,t"}', failing_fields='{"words": ""}')
"""Fields with which random responses get different scores, and those of a response without a score, as in the README."""
pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (EXAMPLE / "node_modules").is_dir(),
    reason="needs Node and its packages; run npm ci and npm run build in examples/reward-node",
)


@contextmanager
def started(command: list[str]) -> Iterator[str]:
    """Start the service with a command, and yield its address."""
    process = subprocess.Popen(
        tied_to_parent(command), cwd=EXAMPLE, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "listening on" in line, line
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait(LIMIT)
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def reward_node(tokenizer: Path) -> Iterator[str]:
    """Start the service on Node, and yield its address."""
    with started(["node", "server.js", "--tokenizer", str(tokenizer), "--listen", "127.0.0.1:0"]) as address:
        yield address


@pytest.fixture(scope="module")
def image() -> str:
    """Build the container of the example, and return the name of its image."""
    if shutil.which("docker") is None or docker("info", check=False).returncode:
        pytest.skip("no Docker engine responds")
    (base,) = re.findall(r"^FROM (\S+)$", (EXAMPLE / "Dockerfile").read_text(), re.M)
    if all(docker(get, base, check=False).returncode for get in ("inspect", "pull")):
        pytest.skip(f"{base} is not here, and no registry has it")
    name = "quartet-reward-node:test"
    built = docker("build", "--file", f"{EXAMPLE}/Dockerfile", "--tag", name, str(EXAMPLE.parents[1]), check=False)
    assert built.returncode == 0, (built.stdout + built.stderr)[-3000:]
    return name


@contextmanager
def container(image: str, policy: Path, options: list[str], arguments: list[str]) -> Iterator[str]:
    """Start the container as the README does, and yield the address that it prints."""
    name = f"quartet-reward-node-{secrets.token_hex(4)}"
    command = [
        "docker", "run", "--rm", "--name", name, "--user", f"{os.getuid()}:{os.getgid()}", "--read-only", "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges", "--volume", f"{policy}:/models/policy:ro", *options, image, *arguments,
    ]  # fmt: skip
    try:
        with started(command) as address:
            yield address
    finally:
        docker("rm", "--force", name, check=False)


@pytest.mark.slow
def test_the_container_conforms_over_tls(image: str, toy_task: Any, tmp_path: Path) -> None:  # noqa: F811
    authority = Authority(timedelta(days=1))
    for process in (Role.REWARD, Role.ORCHESTRATOR):
        authority.issue(tmp_path / process, [f"{process}.quartet"])
    port = free_port()
    options = ["--publish", f"127.0.0.1:{port}:50061", "--volume", f"{tmp_path}/reward:/certificates/reward:ro"]
    credentials = Credentials(Role.ORCHESTRATOR, SecurityConfig(certificates=tmp_path))
    with (
        container(image, toy_task.policy, options, []),
        closing(Target(Role.REWARD, f"127.0.0.1:{port}", LIMITS, credentials)) as target,
    ):
        results = run_checks(target, checks_of(Role.REWARD))
        report = "\n".join([*map(line_of, results), summary_of(target, results)])
    assert not [result for result in results if result.outcome is CheckOutcome.FAILED], report
    skipped = {result.check.id for result in results if result.outcome is CheckOutcome.SKIPPED}
    assert skipped == {"tls.token", "score.error_class"}


@pytest.mark.slow
def test_the_container_scores_a_run_as_a_reward_source(image: str, make: Any) -> None:  # noqa: F811
    arguments = ["--tokenizer", "/models/policy/tokenizer.json", "--listen", "127.0.0.1:0"]
    plain = make(**RLOO)
    with container(image, Path(plain.actor.model), ["--network", "host"], arguments) as address:
        config = make(**RLOO, reward={"source": "service", "service": {"address": address}, "model": None})
        with services(config) as addressed, orchestrator(addressed) as running:
            run = running.finish()
    require_word_scores(run)


def test_the_service_conforms_and_its_report_is_the_one_in_the_example(toy_task: Any) -> None:  # noqa: F811
    with (
        reward_node(toy_task.policy / "tokenizer.json") as address,
        closing(Target(Role.REWARD, address, LIMITS)) as target,
    ):
        results = run_checks(target, checks_of(Role.REWARD))
        report = "\n".join([*map(line_of, results), summary_of(target, results)])
        status = target.status()
    assert not [result for result in results if result.outcome is CheckOutcome.FAILED], report
    assert status.tokenizer_fingerprint == tokenizer_fingerprint(load_tokenizer(toy_task.policy))
    stored = (EXAMPLE / "conformance.txt").read_text(encoding="utf-8").splitlines()
    assert "ok      score.not_constant " in report
    assert "ok      score.failure " in report
    # The first line of the file has the time, and the last one the address.
    assert [line[:120] for line in report.splitlines()[:-1]] == [line[:120] for line in stored[1:-1]]


def require_word_scores(run: Run) -> None:
    """Require that the scores of a run are those of the example's words."""
    assert run.code == 0, run.progress.error
    rows = [row for step in (1, 2, 3) for row in run.trajectories(step)]
    assert len(rows) == 24
    for row in rows:
        assert 0 <= row["score"] <= 1, row
        if not any(word in row["response"].lower() for word in ("superb", "lovely", "great", "perfect")):
            assert row["score"] == 0


def test_the_service_scores_a_run(make: Any) -> None:  # noqa: F811
    plain = make(**RLOO)
    with reward_node(Path(plain.actor.model) / "tokenizer.json") as address, services(plain) as addressed:
        overrides = [
            f"services.{role}.address={getattr(addressed.services, role).addresses[0]}"
            for role in (Role.ACTOR, Role.REFERENCE)
        ]
        files = RunFiles(plain.run_directory)
        with orchestrator(load_config(files.config, [*overrides, f"services.reward.address={address}"])) as running:
            run = running.finish()
    require_word_scores(run)
