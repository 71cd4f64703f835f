"""examples/slurm/quartet.sbatch, run as Slurm's batch step runs it, with stubs for Slurm, Redis and the processes of a run.

Its deployment, its certificates and its handling of signals are the real ones.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet.config import Config, load_config
from quartet.topology import model_roles
from tests.e2e.commands import wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/slurm/quartet.sbatch"
CONFIGS = ROOT / "configs/reviews"
BASH = str(shutil.which("bash"))
TOOLS = ("bash", "cat", "cp", "flock", "grep", "mkdir", "mv", "rm", "sed", "sort")
STUBS = {
    # Every one writes down what it is called with; what runs until it is ended is known by its process id.
    "scontrol": 'case $1 in show) echo "${3}.cluster" ;; *) echo "$@" >>"$TOLD/scontrol" ;; esac',
    "squeue": 'printf "RUNNING\\n${STATE:-RUNNING}\\n"',
    "srun": 'echo "$@" >>"$TOLD/srun"; echo $$ >>"$TOLD/pids"; echo $$ >>"$TOLD/steps"; eval "${STEP:-exec sleep 60}"',
    "scancel": 'echo "$@" >>"$TOLD/scancel"; kill $(cat "$TOLD/steps") 2>"$TOLD/nowhere"; exit 0',
    "redis-server": 'echo "$@" >"$TOLD/redis"; echo $$ >>"$TOLD/pids"; ${REDIS_FAILS:-:} || exit 1\n'
    'echo "* Ready to accept connections"; exec sleep 60',
    # The script looks every second whether all is well.
    "sleep": f"[[ $1 == 60 ]] || set -- 0.05; exec {shutil.which('sleep')} $1",
    # Certificates are made where a test looks at them.
    "quartet": f"${{CERTIFICATES:-false}} || exec mkdir $2; exec {Path(sys.executable).with_name('quartet')} $*",
    "python": f"""
        [[ $1 == - ]] && exec {sys.executable} "$@"
        [[ $2 == quartet.gateway ]] && {{ echo $$ >>"$TOLD/pids"; exec bash -c "${{GATEWAY:-exec sleep 60}}"; }}
        cp "${{@: -1}}" "$TOLD/partial" && mv "$TOLD/partial" "$TOLD/deployment.yaml"
        echo $$ >>"$TOLD/pids"
        exec bash -c "${{ORCHESTRATOR:-exit 0}}"
    """,
}

pytestmark = pytest.mark.skipif(shutil.which("flock") is None, reason="the script is for Linux")


class Job:
    """The script in the batch step of a job with four groups."""

    number = 1234

    def __init__(self, folder: Path) -> None:
        self.folder, self.told = folder, folder / "told"
        self.told.mkdir()
        bins = folder / "bin"
        bins.mkdir()
        for name, body in STUBS.items():
            (bins / name).write_text(f"#!{BASH}\n{body}\n")
            (bins / name).chmod(stat.S_IRWXU)
        for name in TOOLS:
            (bins / name).symlink_to(str(shutil.which(name)))
        self.environment = {
            "PATH": str(bins),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "TOLD": str(self.told),
            "SLURM_JOB_ID": str(self.number),
            "SLURM_HET_SIZE": "4",
            **{f"SLURM_JOB_NODELIST_HET_GROUP_{group}": f"node{group}" for group in range(4)},
        }
        self.process: subprocess.Popen[str] | None = None

    def begin(self, config: Path | str, **environment: str) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            [BASH, SCRIPT, str(config)],
            cwd=self.folder,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process

    def ended(self, config: Path | str, **environment: str) -> tuple[int, str]:
        """Its exit status and what it said on standard error."""
        process = self.begin(config, **environment)
        _, said = process.communicate(timeout=40)
        return process.returncode, said

    def heard(self, stub: str) -> list[str]:
        """The calls of a stub, without the paths that the test decides."""
        path = self.told / stub
        return path.read_text().replace(str(self.folder), "").splitlines() if path.exists() else []

    def deployment(self, config: Path) -> Config:
        return load_config(config, layers=[self.told / "deployment.yaml"])

    def left(self) -> list[str]:
        """Processes that outlive the job, and its secrets."""
        pids = (self.told / "pids").read_text().split()
        return [pid for pid in pids if _lives(int(pid))] + [str(path) for path in self.folder.glob("runs/*/slurm-*")]


def _lives(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.communicate()
    pids = made.told / "pids"
    for pid in pids.read_text().split() if pids.exists() else []:
        if _lives(int(pid)):
            os.kill(int(pid), signal.SIGKILL)


def test_it_is_a_script_that_bash_and_shellcheck_have_nothing_to_say_of() -> None:
    subprocess.run([BASH, "-n", SCRIPT], check=True)
    if (shellcheck := shutil.which("shellcheck")) is None:
        pytest.skip("no shellcheck")
    said = subprocess.run([shellcheck, SCRIPT], capture_output=True, text=True)
    assert said.returncode == 0, said.stdout


PLACES = {
    "ppo": {"actor": "node1", "critic": "node2", "reward": "node2", "reference": "node3"},
    "grpo": {"actor": "node1", "reward": "node2", "reference": "node3"},
    "lora": {"actor": "node1", "critic": "node2", "reward": "node2"},
}


@pytest.mark.parametrize("name", PLACES)
def test_its_deployment_puts_every_role_of_the_config_where_its_process_runs(job: Job, name: str) -> None:
    path = CONFIGS / f"{name}.yaml"
    status, said = job.ended(path, ORCHESTRATOR="exit 7")
    assert (status, said) == (7, ""), "the job's status is the orchestrator's"
    config = job.deployment(path)
    assert set(PLACES[name]) == set(model_roles(config))

    steps: dict[str, list[str]] = {}
    for call in job.heard("srun"):
        match = re.fullmatch(r"--het-group=(\d) .* python -m quartet.services ((?:\w+ )+)--config .*", call)
        assert match is not None, call
        steps[f"node{match[1]}"] = match[2].split()
    assert {role: node for node, roles in steps.items() for role in roles} == PLACES[name]
    for node, roles in steps.items():
        places = [getattr(config.services, role) for role in roles]
        assert len({place.address for place in places}) == 1, "roles that share a process share its address"
        host, _, port = str(places[0].address).rpartition(":")
        assert (host, places[0].listen) == (f"{node}.cluster", f"0.0.0.0:{port}")

    assert str(config.buffer.url).startswith("rediss://quartet@node0.cluster:")
    assert config.security.certificates is not None
    assert config.security.token_file is not None
    assert str(config.gateway.listen).startswith("127.0.0.1:")
    assert config.gateway.start_runs is False
    ports = [place.rpartition(":")[2] for place in _listened(config)]
    ports.append(re.search(r"--tls-port (\d+)", job.heard("redis")[0])[1])  # type: ignore[index]
    assert len(set(ports)) == len(ports)
    assert all(1024 < int(port) < 32768 for port in ports)
    assert job.left() == []
    assert job.heard("scontrol") == []


def _listened(config: Config) -> list[str]:
    services = {
        str(getattr(config.services, role).listen): getattr(config.services, role) for role in model_roles(config)
    }
    every = [*services.values(), config.services.orchestrator]
    return [
        str(config.gateway.listen),
        *(str(place.listen) for place in every),
        *(str(place.metrics_listen) for place in every),
    ]


SECRETS = {"token", "gateway-token", "redis-password"}
CERTIFIED = {"actor", "critic", "reference", "orchestrator", "gateway", "redis", "prometheus", "operator"}
"""The reward is in the critic's process."""


@pytest.mark.parametrize(
    ("number", "state", "requeued"),
    [
        (signal.SIGTERM, "RUNNING", ["requeue 1234"]),
        (signal.SIGUSR1, "RUNNING", ["requeue 1234"]),
        (15, "CANCELLED", []),
    ],
)
def test_a_signal_ends_it_in_order_and_it_is_queued_again_unless_cancelled(
    job: Job, number: int, state: str, requeued: list[str]
) -> None:
    process = job.begin(CONFIGS / "ppo.yaml", ORCHESTRATOR="exec sleep 60", CERTIFICATES="true", STATE=state)
    assert wait_until((job.told / "deployment.yaml").exists, 30)
    secrets = job.folder / f"runs/reviews-ppo/slurm-{job.number}"
    files = [secrets, *secrets.rglob("*")]
    assert {path.name for path in secrets.iterdir()} == {*SECRETS, "users.acl", "deployment.yaml", "certificates"}
    assert {path.parent.name for path in files if path.name == "tls.key"} == CERTIFIED
    assert [path for path in files if path.stat().st_mode & 0o077] == []
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert job.heard("scontrol") == requeued
    assert job.heard("scancel") == ["--quiet --signal=TERM 1234"]
    assert job.left() == []


def test_a_part_that_ends_before_the_run_ends_the_job(job: Job) -> None:
    status, said = job.ended(CONFIGS / "ppo.yaml", ORCHESTRATOR="exec sleep 60", GATEWAY="exit 3")
    assert status == 1
    assert re.search(
        r"gateway ended with status 3, see .*/logs/gateway.log; submit the job again to resume the run", said
    )
    assert job.left() == []


def test_a_service_that_is_told_to_end_has_lost_its_nodes(job: Job) -> None:
    """Pre-emption of one group: Slurm signals only its steps."""
    process = job.begin(CONFIGS / "ppo.yaml", ORCHESTRATOR="exec sleep 60", STEP="trap 'exit 0' TERM; sleep 60 & wait")
    assert wait_until(lambda: (job.told / "deployment.yaml").exists() and len(job.heard("steps")) == 3, 30)
    os.kill(int(job.heard("steps")[1]), signal.SIGTERM)
    process.communicate(timeout=30)
    assert (process.returncode, job.heard("scontrol")) == (143, ["requeue 1234"])


def test_a_redis_elsewhere_is_taken_instead(job: Job) -> None:
    status, _ = job.ended(CONFIGS / "ppo.yaml", QUARTET_BUFFER_URL="rediss://elsewhere:6379/0")
    assert status == 0
    assert job.heard("redis") == []
    assert job.deployment(CONFIGS / "ppo.yaml").buffer.url == "rediss://elsewhere:6379/0"


def test_what_is_missing_is_said_before_anything_starts(job: Job) -> None:
    config = CONFIGS / "ppo.yaml"
    assert job.ended("nowhere.yaml")[1].startswith("error: config 'nowhere.yaml': no such file in ")
    assert "not a heterogeneous job" in job.ended(config, SLURM_HET_SIZE="")[1]
    status, said = job.ended(config, SLURM_HET_SIZE="3")
    assert (status, said.count("\n")) == (2, 1)
    assert "3 groups needed besides the first, the job has 2; add them to the script" in said
    (job.folder / "wrong.yaml").write_text("run: {nam: x}\n")
    status, said = job.ended("wrong.yaml")
    assert (status, "did you mean 'name'?" in said) == (2, True)
    assert job.heard("srun") == []


def test_a_redis_that_cannot_be_had_is_said(job: Job) -> None:
    config = CONFIGS / "ppo.yaml"
    status, said = job.ended(config, REDIS_FAILS="false")
    assert status == 2
    assert "redis ended" in said
    assert "with TLS" in said
    assert "QUARTET_BUFFER_URL" in said
    (job.folder / "bin/redis-server").unlink()
    status, said = job.ended(config)
    assert (status, "no redis-server on the PATH" in said, "QUARTET_BUFFER_URL" in said) == (2, True, True)
    assert job.heard("srun") == []
    assert job.left() == []


def test_two_jobs_do_not_work_on_one_run(job: Job) -> None:
    first = job.begin(CONFIGS / "ppo.yaml", ORCHESTRATOR="exec sleep 60")
    assert wait_until((job.told / "deployment.yaml").exists, 30)
    began = time.monotonic()
    status, said = job.ended(CONFIGS / "ppo.yaml", SLURM_JOB_ID="1235")
    assert (status, "another job uses this run" in said) == (2, True), time.monotonic() - began
    assert [path.name for path in job.folder.glob("runs/*/slurm-*")] == ["slurm-1234"]
    first.terminate()
    first.communicate(timeout=30)
    assert job.left() == []
