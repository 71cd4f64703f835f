"""Runs of hybrid, recurrent and indexed policies on the review task: rewards, a kill of any process, generators and LoRA."""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.evidence.runs import run_program
from quartet.errors import ConfigError
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.step_lines import read_step_lines
from quartet.system.child_processes import tied_to_parent
from quartet.system.durable_files import staged_directory

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_d_state": 16, "mamba_chunk_size": 16, "head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "deepseek_v32": {
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "index_n_heads": 32,
        "index_head_dim": 16,
        "index_topk": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
"""Model types with their settings of config.json: linear attention, Mamba, convolutions, and an index of fewer tokens than the
sequences have. The sizes that all models have are 64 wide, 2 layers and 4 heads."""
OF_GENERATORS = frozenset({"generator", "weights_digest"})
"""Entries of a trajectory that only runs with generators have."""
STEPS = 60
PART = 10
"""Steps at the start and at the end of which the table has means."""
POLICY_STEPS = 500
SIZES = ("--vocabulary", "1024", "--hidden", "64", "--policy-steps", "500", "--reward-steps", "500", "--samples", "500")
"""Options of examples/reviews/prepare.py: the reward model is a Llama, because few of these types have a classifier."""
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "PPO": ("ppo", ("rollout.prompts_per_step=32",)),
    "GRPO": ("grpo", ("rollout.prompts_per_step=8",)),
    "PPO, two kills": ("ppo", ("rollout.prompts_per_step=32",)),
    "PPO, two generators": (
        "ppo",
        ("rollout.prompts_per_step=32", "rollout.generators=2", "services.generator.num_threads=1"),
    ),
    "PPO, LoRA": ("lora", ("rollout.prompts_per_step=32",)),
}
"""Config in configs/reviews and settings of each run. The states of those with ppo.yaml are compared."""


def prepare(positive: Path, negative: Path, folder: Path) -> None:
    """Create the reward model, the prompts and a policy of each family in ``folder``, unless they are there."""
    from transformers import PreTrainedTokenizerFast

    from quartet.demo import pretraining

    task = folder / "task"
    if not task.exists():
        program = ["examples/reviews/prepare.py", str(positive), str(negative), str(task), *SIZES]
        run_program([sys.executable, *program], folder / "logs" / "task.log")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(task / "policy")
    sentences = [line.strip() for file in (positive, negative) for line in file.read_text("utf-8").split("\n")]
    rows = pretraining.encode(tokenizer, [sentence for sentence in sentences if sentence], eos=True)
    short = [row for row in rows if len(row) <= 48]
    for kind, config in FAMILIES.items():
        if (policy := folder / "models" / kind / "policy").exists():
            continue
        print(f"policy: {kind}", flush=True)
        shape = pretraining.Shape(64, 2, 4, 128, {"model_type": kind, **config})
        model = pretraining.train_causal_lm(short, tokenizer, shape, pretraining.Schedule(POLICY_STEPS))
        with staged_directory(policy) as staging:
            pretraining.save_checkpoint(model, tokenizer, staging)


def train_all(folder: Path) -> None:
    """Train each run of each family, unless it has been completed. Raises ConfigError if a run fails."""
    for name in RUNS:
        for kind in FAMILIES:
            run = run_of(folder, kind, name)
            if not _is_finished(run):
                print(f"{kind}: {name}", flush=True)
                command, log = command_of(folder, kind, name), folder / "logs" / f"{run.root.name}.log"
                if "kills" in name:
                    train_with_kills([*command, "--overwrite"], run, log.with_suffix(".killed.log"))
                    command.append("--resume")
                else:
                    command.append("--overwrite")
                run_program(command, log)


def _is_finished(run: RunFiles) -> bool:
    return run.outcome.exists() and json.loads(run.outcome.read_text(encoding="utf-8"))["state"] == "finished"


def run_of(folder: Path, kind: str, name: str) -> RunFiles:
    """Return the files of a run of a family."""
    return RunFiles(folder / "runs" / f"{kind} {name.lower()}".replace(",", "").replace("_", "-").replace(" ", "-"))


def command_of(folder: Path, kind: str, name: str) -> list[str]:
    """Return the command line that trains a run of a family. The critic starts from the policy."""
    config, settings = RUNS[name]
    policy, run = folder / "models" / kind / "policy", run_of(folder, kind, name).root
    command = [str(Path(sys.executable).with_name("quartet")), "train", f"configs/reviews/{config}.yaml"]
    for setting in (
        f"run.name={run.name}",
        f"run.directory={run.parent}",
        f"run.steps={STEPS}",
        f"data.prompts={folder / 'task' / 'prompts.jsonl'}",
        f"actor.model={policy}",
        f"reward.model={folder / 'task' / 'reward'}",
        "rollout.score_batch_size=32",
        "gateway.enabled=false",
        *(() if config == "grpo" else (f"critic.model={policy}",)),
        *settings,
    ):
        command += ["--set", setting]
    return command


def train_with_kills(command: Sequence[str], run: RunFiles, log: Path) -> None:
    """Start a run, kill its actor and later all its processes, each at a drawn moment of a drawn step.

    Raises ConfigError if the run ends before.
    """
    draw = random.Random(run.root.name)
    with log.open("wb") as output:
        process = subprocess.Popen(tied_to_parent(command), stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    launcher = psutil.Process(process.pid)
    for first, last, everything in ((5, 20, False), (30, 50, True)):
        step, seconds = draw.randint(first, last), draw.uniform(0, 1.0)
        while len(read_step_lines(run.metrics)) < step:
            if process.poll() is not None:
                raise ConfigError(f"the run {run.root.name} ended with status {process.returncode}; see {log}")
            time.sleep(0.01)
        time.sleep(seconds)
        processes = [launcher, *launcher.children(recursive=True)]
        killed = processes if everything else [each for each in processes if _is_actor(each)]
        if not killed:
            raise ConfigError(f"the run {run.root.name} has no actor process at step {step}")
        print(f"{run.root.name}: SIGKILL to {len(killed)} processes {seconds:.2f} s after step {step}", flush=True)
        for each in killed:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        if everything:
            process.wait()
            psutil.wait_procs(processes[1:], timeout=30)


def _is_actor(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return "quartet.services actor " in " ".join(process.cmdline())
    return False


def states(run: RunFiles) -> str:
    """Return the SHA-256 of the final policy, of all checkpoints and of all trajectories, without run and generator."""
    result = hashlib.sha256()
    for file in sorted([*run.policy.glob("*.safetensors"), *run.checkpoints.glob("step-*/**/*.safetensors")]):
        result.update(f"{file.relative_to(run.root)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    for file in sorted(run.trajectories.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            trajectory = {name: value for name, value in json.loads(line).items() if name not in OF_GENERATORS}
            trajectory["id"] = trajectory["id"].partition("/")[2]
            result.update(json.dumps(trajectory, sort_keys=True).encode())
    return result.hexdigest()


def is_batch_invariant(run: RunFiles) -> bool:
    """Return whether all engines of a run have declared that they are batch-invariant."""
    engines = json.loads(run.identity.read_text(encoding="utf-8"))["engines"]
    return all(engine["batch_invariant"] for engine in engines)


def table(folder: Path) -> str:
    """Return the tables of the finished runs for the page."""
    return "\n".join(_lines(folder))


def _lines(folder: Path) -> Iterator[str]:
    yield f"Mean of the first and of the last {PART} of {STEPS} steps, KL of the last {PART}; median seconds per step."
    yield ""
    yield "| model type | run | first reward | last reward | KL, nats per response | seconds per step |"
    yield "|---|---|---|---|---|---|"
    for kind in FAMILIES:
        for name, run in _finished_runs(folder, kind).items():
            steps = read_step_lines(run.metrics)
            first, last = (statistics.fmean(s["reward_mean"] for s in part) for part in (steps[:PART], steps[-PART:]))
            kl = statistics.fmean(step["kl_mean"] for step in steps[-PART:])
            seconds = statistics.median(step["seconds"] for step in steps)
            yield f"| {kind} | {name} | {first:.2f} | {last:.2f} | {kl:.2f} | {seconds:.2f} |"
    yield ""
    yield "SHA-256 of all states of the PPO run, and whether the runs with kills and with two generators have equal states:"
    yield ""
    yield "| model type | declared batch-invariant | states | equal after two kills | equal with two generators |"
    yield "|---|---|---|---|---|"
    for kind in FAMILIES:
        runs = _finished_runs(folder, kind)
        if (one := runs.get("PPO")) is None:
            continue
        expected, invariant = states(one), "yes" if is_batch_invariant(one) else "no"
        others = [runs.get(name) for name in ("PPO, two kills", "PPO, two generators")]
        answers = ["" if run is None else "yes" if states(run) == expected else "no" for run in others]
        yield f"| {kind} | {invariant} | `{expected[:16]}` | {' | '.join(answers)} |"


def _finished_runs(folder: Path, kind: str) -> dict[str, RunFiles]:
    runs = {name: run_of(folder, kind, name) for name in RUNS}
    return {name: run for name, run in runs.items() if _is_finished(run)}
