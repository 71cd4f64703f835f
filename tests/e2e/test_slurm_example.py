"""The scripts of examples/slurm, with stubs for the commands of Slurm, for Redis and for the processes of a run.

The overlay, the certificates and the handling of signals are real.
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
import yaml

from quartet.config.layout import service_roles
from quartet.config.loading import FIRST_CONFIG_LINE, load_config
from quartet.config.root import Config
from tests.e2e.commands import Command
from tests.waiting import LIMIT, wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/slurm/quartet.sbatch"
ONE_NODE = ROOT / "examples/slurm/one-node.sbatch"
CONFIGS = ROOT / "configs/reviews"
BASH = str(shutil.which("bash"))
TOOLS = ("bash", "cat", "cp", "flock", "grep", "mkdir", "mkfifo", "mv", "rm", "sed", "sort")
STUBS = {
    # Each stub records its arguments in $CALLS, and a stub that keeps running also its process id.
    "scontrol": 'case $1 in show) printf "%s.cluster\\n" $3 ;; *) echo "$@" >>"$CALLS/scontrol" ;; esac',
    "squeue": 'printf "RUNNING\\n${STATE:-RUNNING}\\n"',
    "srun": 'echo "$@" >>"$CALLS/srun"; echo $$ >>"$CALLS/pids"; echo $$ >>"$CALLS/steps"; eval "${STEP:-exec sleep 60}"',
    "scancel": 'echo "$@" >>"$CALLS/scancel"; kill $(cat "$CALLS/steps") 2>"$CALLS/nowhere"; exit 0',
    "redis-server": 'echo "$@" >"$CALLS/redis"; echo $$ >>"$CALLS/pids"; ${REDIS_FAILS:-:} || exit 1\n'
    'echo "* Ready to accept connections"; exec sleep 60',
    # The script polls every second; the stub polls faster.
    "sleep": f"[[ $1 == 60 ]] || set -- 0.05; exec {shutil.which('sleep')} $1",
    # Only tests that read the certificates issue real ones.
    "quartet": f"${{CERTIFICATES:-false}} || exec mkdir $2; exec {Path(sys.executable).with_name('quartet')} $*",
    "python": """
        if [[ $1 == - ]]; then
            cat >"$CALLS/plan.py" && mkfifo "$CALLS/planned.$$"
            printf "%s\\n" "$CALLS/planned.$$" "$CALLS/plan.py" "${@:2}" >"$CALLS/partial"
            mv "$CALLS/partial" "$CALLS/plan"
            read -r status <"$CALLS/planned.$$"
            cat "$CALLS/plan.out" && cat "$CALLS/plan.err" >&2 && exit "$status"
        fi
        [[ $2 == quartet.gateway ]] && { echo $$ >>"$CALLS/pids"; exec bash -c "${GATEWAY:-exec sleep 60}"; }
        cp "${@: -1}" "$CALLS/partial" && mv "$CALLS/partial" "$CALLS/deployment.yaml"
        echo $$ >>"$CALLS/pids"
        exec bash -c "${ORCHESTRATOR:-exit 0}"
    """,
}

pytestmark = pytest.mark.skipif(shutil.which("flock") is None, reason="the script is for Linux")


class Job:
    """The script as the batch step of a heterogeneous job with four groups."""

    job_id = 1234

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.script = folder, folder / "calls", SCRIPT
        self.calls.mkdir()
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
            "CALLS": str(self.calls),
            "SLURM_JOB_ID": str(self.job_id),
            "SLURM_HET_SIZE": "4",
            **{f"SLURM_JOB_NODELIST_HET_GROUP_{group}": f"node{group}" for group in range(4)},
        }
        self.process: subprocess.Popen[str] | None = None

    def start(self, config: Path | str, **environment: str) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            [BASH, self.script, str(config)],
            cwd=self.folder,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._plan(self.process, environment)
        return self.process

    def _plan(self, process: subprocess.Popen[str], environment: dict[str, str]) -> None:
        """Run the program that the script gives to Python, in a fork, which has imported Quartet already."""
        request = self.calls / "plan"
        wait_until(lambda: request.exists() or process.poll() is not None)
        if not request.exists():
            return
        reply, *program = request.read_text().splitlines()
        request.unlink()
        command = Command(sys.executable, *program, cwd=self.folder, environment={**self.environment, **environment})
        try:
            result = command.wait()
        finally:
            command.clean_up()
        (self.calls / "plan.out").write_text(result.out)
        (self.calls / "plan.err").write_text(result.err)
        Path(reply).write_text(f"{result.code}\n")

    def run(self, config: Path | str, **environment: str) -> tuple[int, str]:
        """Run the script; return its exit status and its standard error."""
        process = self.start(config, **environment)
        _, stderr = process.communicate(timeout=LIMIT)
        return process.returncode, stderr

    def calls_of(self, stub: str) -> list[str]:
        """Return the arguments of each call of a stub, without the path of the test's folder."""
        path = self.calls / stub
        return path.read_text().replace(str(self.folder), "").splitlines() if path.exists() else []

    def deployment(self, config: Path) -> Config:
        return load_config(config, layers=[self.calls / "deployment.yaml"])

    def leftovers(self) -> list[str]:
        """Return the processes that outlive the job, and its secret files."""
        pids = (self.calls / "pids").read_text().split()
        return [pid for pid in pids if _is_running(int(pid))] + [
            str(path) for path in self.folder.glob("runs/*/slurm-*")
        ]


def _is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    if job.process is not None and job.process.poll() is None:
        job.process.kill()
        job.process.communicate()
    pids = job.calls / "pids"
    for pid in pids.read_text().split() if pids.exists() else []:
        if _is_running(int(pid)):
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize("script", [SCRIPT, ONE_NODE], ids=lambda path: path.name)
def test_bash_and_shellcheck_accept_the_script(script: Path) -> None:
    subprocess.run([BASH, "-n", script], check=True)
    if (shellcheck := shutil.which("shellcheck")) is None:
        pytest.skip("no shellcheck")
    result = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


ROLE_NODES = {
    "ppo": {"actor": "node1", "critic": "node2", "reward": "node2", "reference": "node3"},
    "grpo": {"actor": "node1", "reward": "node2", "reference": "node3"},
    "lora": {"actor": "node1", "critic": "node2", "reward": "node2"},
}


def test_generators_get_a_group_each_and_the_run_their_addresses(job: Job) -> None:
    job.script = job.folder / "quartet.sbatch"
    text = SCRIPT.read_text().replace("critic+reward reference)", "critic+reward reference generator generator)")
    job.script.write_text(text)
    job.environment |= {f"SLURM_JOB_NODELIST_HET_GROUP_{group}": f"node{group}" for group in (4, 5)}
    path = CONFIGS / "ppo.yaml"
    status, stderr = job.run(path, SLURM_HET_SIZE="6", ORCHESTRATOR="exit 7", QUARTET_GENERATOR_PYTHON="vllm-python")
    assert status == 7, stderr
    generators = job.deployment(path).services.generators
    assert [address.partition(":")[0] for address in generators] == ["node4.cluster", "node5.cluster"]
    calls = [line for line in job.calls_of("srun") if " generator " in line]
    assert len(calls) == 2
    for group, address, line in zip((4, 5), generators, sorted(calls), strict=True):
        assert f"--het-group={group} " in line
        assert f"vllm-python -m quartet.services generator --listen 0.0.0.0:{address.partition(':')[2]} " in line


def with_ranks(job: Job, roles: str = "actor critic+reward reference", **services: object) -> Path:
    """Write a PPO config with these services, and a script with these processes. Return the path of the config."""
    tree = yaml.safe_load((CONFIGS / "ppo.yaml").read_text()) | {"services": services}
    path = job.folder / "groups.yaml"
    path.write_text(yaml.safe_dump(tree))
    job.script = job.folder / "quartet.sbatch"
    job.script.write_text(SCRIPT.read_text().replace("(actor critic+reward reference)", f"({roles})"))
    return path


GROUP = {"devices": [0, 1, 2, 3], "nodes": 2}


def test_torchrun_starts_the_ranks_of_a_role_of_several_nodes(job: Job) -> None:
    path = with_ranks(job, actor=GROUP, reference={"devices": [0, 1]})
    job.environment["SLURM_JOB_NODELIST_HET_GROUP_1"] = "node1 node7"
    assert job.run(path, ORCHESTRATOR="exit 7")[0] == 7
    config = job.deployment(path)
    steps = {
        match[1]: call
        for call in job.calls_of("srun")
        if (match := re.search(r"quartet.services (\w+) ", call)) is not None
    }
    start, _, command = steps["actor"].partition(" bash -c ")
    assert "--het-group=1 --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 " in start
    host, _, port = str(config.services.actor.address).rpartition(":")
    assert host == "node1.cluster", "the first node has rank 0, which serves the calls"
    assert '--node-rank="$SLURM_PROCID"' in command
    for option in ("--nnodes=2", "--nproc-per-node=4", f"--master-addr={host}", "--max-restarts=3"):
        assert f" {option} " in command
    rendezvous = re.search(r"--master-port=(\d+) ", command)
    assert rendezvous is not None
    assert rendezvous[1] not in {address.rpartition(":")[2] for address in _listen_addresses(config)}
    assert int(port) < int(rendezvous[1])
    # Several GPUs of one node need no torchrun.
    assert " python -m quartet.services reference " in steps["reference"]
    assert "--nodes=1 --ntasks=1 " in steps["reference"]
    assert config.services.actor.nodes == 2


def test_torchrun_gets_the_number_of_its_task(job: Job) -> None:
    (job.folder / "bin/torchrun").write_text(f'#!{BASH}\necho "$@" >>"$CALLS/torchrun"; exec sleep 60\n')
    (job.folder / "bin/torchrun").chmod(stat.S_IRWXU)
    path = with_ranks(job, actor=GROUP)
    job.environment["SLURM_JOB_NODELIST_HET_GROUP_1"] = "node1 node7"
    # As srun does, run the command of the step for each task; here, that of the second node.
    step = '[[ $* == *torchrun* ]] || exec sleep 60; while [[ $1 == --* ]]; do shift; done; SLURM_PROCID=1 exec "$@"'
    process = job.start(path, ORCHESTRATOR="exec sleep 60", STEP=step)
    wait_until(lambda: job.calls_of("torchrun") != [])
    (arguments,) = job.calls_of("torchrun")
    assert arguments.startswith("--node-rank=1 --nnodes=2 --nproc-per-node=4 ")
    assert " -m quartet.services actor --config " in arguments
    process.terminate()
    process.communicate(timeout=LIMIT)


@pytest.mark.parametrize(
    ("roles", "services", "message"),
    [
        (
            "actor critic+reward reference",
            {"actor": GROUP},
            "services.actor.nodes is 2, and group 1 has 1 nodes; change",
        ),
        (
            "actor critic+reward reference",
            {"critic": {"devices": [0, 1]}},
            "critic+reward share a process, and one has several ranks; separate them",
        ),
    ],
)
def test_ranks_that_do_not_fit_the_groups_are_reported(
    job: Job, roles: str, services: dict[str, object], message: str
) -> None:
    status, stderr = job.run(with_ranks(job, roles, **services))
    assert (status, stderr.count("\n")) == (2, 1), stderr
    assert message in stderr
    assert job.calls_of("srun") == []


def one_node(job: Job, train: str) -> Path:
    """Select the script for one node, with this body of ``quartet train``. Return the path of its config."""
    job.script = ONE_NODE
    (job.folder / "bin/quartet").write_text(f'#!{BASH}\necho "$@" >>"$CALLS/train"; echo $$ >>"$CALLS/pids"\n{train}\n')
    return CONFIGS / "ppo.yaml"


def test_the_script_for_one_node_starts_or_resumes_the_run(job: Job) -> None:
    path = one_node(job, "exit 3")
    assert job.run(path) == (3, "")
    run = job.folder / "runs/reviews-ppo"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(f"{FIRST_CONFIG_LINE}\n")
    assert job.run(path) == (3, "")
    assert job.calls_of("train") == [f"train {path}", f"train {path} --resume"]
    assert job.calls_of("scontrol") == []
    assert job.run("nowhere.yaml")[1].startswith("error: config 'nowhere.yaml': no such file in ")
    (job.folder / "wrong.yaml").write_text("run: {nam: x}\n")
    status, stderr = job.run("wrong.yaml")
    assert (status, "did you mean 'name'?" in stderr) == (2, True)


@pytest.mark.parametrize(("state", "requeued"), [("RUNNING", ["requeue 1234"]), ("CANCELLED", [])])
def test_the_script_for_one_node_ends_the_run_at_the_time_limit(job: Job, state: str, requeued: list[str]) -> None:
    path = one_node(job, "trap 'sleep 0.2; exit 130' TERM; echo >>\"$CALLS/ready\"; while :; do sleep 0.05; done")
    process = job.start(path, STATE=state)
    wait_until((job.calls / "ready").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT)
    assert (process.returncode, job.calls_of("scontrol")) == (130, requeued)
    assert job.leftovers() == []


@pytest.mark.parametrize("name", ROLE_NODES)
def test_the_overlay_has_the_address_of_each_role(job: Job, name: str) -> None:
    path = CONFIGS / f"{name}.yaml"
    status, stderr = job.run(path, ORCHESTRATOR="exit 7")
    assert (status, stderr) == (7, ""), "the job's status is the orchestrator's"
    config = job.deployment(path)
    assert set(ROLE_NODES[name]) == set(service_roles(config))

    steps: dict[str, list[str]] = {}
    for call in job.calls_of("srun"):
        match = re.fullmatch(r"--het-group=(\d) .* python -m quartet.services ((?:\w+ )+)--config .*", call)
        assert match is not None, call
        steps[f"node{match[1]}"] = match[2].split()
    assert {role: node for node, roles in steps.items() for role in roles} == ROLE_NODES[name]
    for node, roles in steps.items():
        services = [getattr(config.services, role) for role in roles]
        assert len({service.address for service in services}) == 1, "roles of one process have one address"
        host, _, port = str(services[0].address).rpartition(":")
        assert (host, services[0].listen) == (f"{node}.cluster", f"0.0.0.0:{port}")

    assert str(config.buffer.url).startswith("rediss://quartet@node0.cluster:")
    assert config.security.certificates is not None
    assert config.security.token_file is not None
    assert str(config.gateway.listen).startswith("127.0.0.1:")
    assert config.gateway.start_runs is False
    ports = [address.rpartition(":")[2] for address in _listen_addresses(config)]
    ports.append(re.search(r"--tls-port (\d+)", job.calls_of("redis")[0])[1])  # type: ignore[index]
    assert len(set(ports)) == len(ports)
    assert all(1024 < int(port) < 32768 for port in ports)
    assert job.leftovers() == []
    assert job.calls_of("scontrol") == []


def _listen_addresses(config: Config) -> list[str]:
    services = {
        str(getattr(config.services, role).listen): getattr(config.services, role) for role in service_roles(config)
    }
    processes = [*services.values(), config.services.orchestrator]
    return [
        str(config.gateway.listen),
        *(str(service.listen) for service in processes),
        *(str(service.metrics_listen) for service in processes),
    ]


SECRETS = {"token", "gateway-token", "redis-password"}
CERTIFICATE_OWNERS = {
    "actor",
    "critic",
    "environment",
    "reference",
    "generator",
    "orchestrator",
    "gateway",
    "redis",
    "prometheus",
    "operator",
}
"""The reward service uses the certificate of the critic, because both run in one process."""


@pytest.mark.parametrize(
    ("number", "state", "requeued"),
    [
        (signal.SIGTERM, "RUNNING", ["requeue 1234"]),
        (signal.SIGUSR1, "RUNNING", ["requeue 1234"]),
        (signal.SIGTERM, "CANCELLED", []),
    ],
)
def test_a_signal_shuts_the_job_down_and_requeues_it_unless_cancelled(
    job: Job, number: int, state: str, requeued: list[str]
) -> None:
    issued = number == signal.SIGUSR1
    certificates = "true" if issued else "false"
    process = job.start(CONFIGS / "ppo.yaml", ORCHESTRATOR="exec sleep 60", CERTIFICATES=certificates, STATE=state)
    wait_until((job.calls / "deployment.yaml").exists)
    secrets = job.folder / f"runs/reviews-ppo/slurm-{job.job_id}"
    files = [secrets, *secrets.rglob("*")]
    assert {path.name for path in secrets.iterdir()} == {*SECRETS, "users.acl", "deployment.yaml", "certificates"}
    owners = {path.parent.name for path in files if path.name == "tls.key"}
    assert owners == (CERTIFICATE_OWNERS if issued else set())
    assert [path for path in files if path.stat().st_mode & 0o077] == []
    process.send_signal(number)
    process.communicate(timeout=LIMIT)
    assert process.returncode == 143
    assert job.calls_of("scontrol") == requeued
    assert job.calls_of("scancel") == ["--quiet --signal=TERM 1234"]
    assert job.leftovers() == []


def test_the_job_fails_if_a_process_ends_before_the_run(job: Job) -> None:
    status, stderr = job.run(CONFIGS / "ppo.yaml", ORCHESTRATOR="exec sleep 60", GATEWAY="exit 3")
    assert status == 1
    assert re.search(
        r"gateway ended with status 3, see .*/logs/gateway.log; submit the job again to resume the run", stderr
    )
    assert job.leftovers() == []


def test_the_preemption_of_one_group_requeues_the_job(job: Job) -> None:
    """Slurm signals only the steps of the pre-empted group."""
    process = job.start(CONFIGS / "ppo.yaml", ORCHESTRATOR="exec sleep 60", STEP="trap 'exit 0' TERM; sleep 60 & wait")
    wait_until(lambda: (job.calls / "deployment.yaml").exists() and len(job.calls_of("steps")) == 3)
    os.kill(int(job.calls_of("steps")[1]), signal.SIGTERM)
    process.communicate(timeout=LIMIT)
    assert (process.returncode, job.calls_of("scontrol")) == (143, ["requeue 1234"])


def test_an_external_redis_is_used_instead_of_a_new_one(job: Job) -> None:
    status, _ = job.run(CONFIGS / "ppo.yaml", QUARTET_BUFFER_URL="rediss://elsewhere:6379/0")
    assert status == 0
    assert job.calls_of("redis") == []
    assert job.deployment(CONFIGS / "ppo.yaml").buffer.url == "rediss://elsewhere:6379/0"


def test_missing_requirements_are_reported_before_any_process_starts(job: Job) -> None:
    config = CONFIGS / "ppo.yaml"
    assert job.run("nowhere.yaml")[1].startswith("error: config 'nowhere.yaml': no such file in ")
    assert "not a heterogeneous job" in job.run(config, SLURM_HET_SIZE="")[1]
    status, stderr = job.run(config, SLURM_HET_SIZE="3")
    assert (status, stderr.count("\n")) == (2, 1)
    assert "3 groups needed besides the first, the job has 2; add them to the script" in stderr
    (job.folder / "wrong.yaml").write_text("run: {nam: x}\n")
    status, stderr = job.run("wrong.yaml")
    assert (status, "did you mean 'name'?" in stderr) == (2, True)
    assert job.calls_of("srun") == []


def test_a_redis_that_cannot_start_is_reported(job: Job) -> None:
    config = CONFIGS / "ppo.yaml"
    status, stderr = job.run(config, REDIS_FAILS="false")
    assert status == 2
    assert "redis ended" in stderr
    assert "with TLS" in stderr
    assert "QUARTET_BUFFER_URL" in stderr
    (job.folder / "bin/redis-server").unlink()
    status, stderr = job.run(config)
    assert (status, "no redis-server on the PATH" in stderr, "QUARTET_BUFFER_URL" in stderr) == (2, True, True)
    assert job.calls_of("srun") == []
    assert job.leftovers() == []


def test_a_second_job_for_the_same_run_is_refused(job: Job) -> None:
    first = job.start(CONFIGS / "ppo.yaml", ORCHESTRATOR="exec sleep 60")
    wait_until((job.calls / "deployment.yaml").exists)
    start_time = time.monotonic()
    status, stderr = job.run(CONFIGS / "ppo.yaml", SLURM_JOB_ID="1235")
    assert (status, "another job uses this run" in stderr) == (2, True), time.monotonic() - start_time
    assert [path.name for path in job.folder.glob("runs/*/slurm-*")] == ["slurm-1234"]
    first.terminate()
    first.communicate(timeout=LIMIT)
    assert job.leftovers() == []
