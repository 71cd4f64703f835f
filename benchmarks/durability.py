"""Cost of durability in a run without faults: its share of each step, by part.

Reads the durations that the orchestrator logs. Writes the results below build/ and a table into docs/evidence/durability.md.
The exit status is 1 if all parts together take 3 % of a step or more.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import page
from benchmarks.options import add_shared, page_of, parser_of, positive
from quartet.config.deployment import TimeoutsConfig
from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.errors import ConfigError, QuartetError
from quartet.rpc.clients import ActorClient, CriticClient
from quartet.run_directory.run_files import RunFiles
from quartet.system.child_processes import tied_to_parent

RUN = "durability-cost"
CHECKPOINTS = 3
"""Checkpoints of the measured run, regardless of its config: enough to measure the cost of one."""
WARM_UP = 3
"""First steps to leave out: they fill caches and allocate memory."""
LIMIT = 0.03
"""Maximum share of a step for all parts together."""
POLL = 0.2
"""Seconds between two status requests to actor and critic."""
IN_EACH_STEP = {
    "seal": "sealing the experience in Redis",
    "lease": "renewing the lease",
    "commit": "writing trajectories and metrics to disk (fsync)",
    "acknowledge": "acknowledging the step's trajectories in Redis",
}
"""Parts of every step, by the name of the duration in the orchestrator's log."""


@dataclass(frozen=True)
class Cost:
    """Cost of durability in seconds. ``parts`` are medians over the steps; the others describe one checkpoint.

    ``copies``: the time for which a model's compute thread copies its weights, the longer of actor and critic. ``waits``: the
    time for which the orchestrator waits until the copies are written. ``slower``: the extra time of the step that writes them.
    ``every``: steps between two checkpoints.
    """

    step: float
    parts: dict[str, float]
    copies: float
    waits: float
    slower: float
    every: int

    @property
    def checkpoint(self) -> float:
        """Return the cost of one checkpoint. ``slower`` includes ``copies`` and ``waits``, so the larger value counts."""
        return max(self.copies + self.waits, self.slower)

    @property
    def share(self) -> float:
        """Return the share of a step, with the cost of a checkpoint spread over the steps between two checkpoints."""
        return (sum(self.parts.values()) + self.checkpoint / self.every) / self.step


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("durability", __doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/reviews/ppo.yaml"))
    parser.add_argument("--steps", type=positive, default=33)
    add_shared(parser, "build/durability", Path("docs/evidence/durability.md"), contents="run")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, [])
        _check_models(config)
        cost = measure(config, options.config, options.steps, options.folder)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "cost.json").write_text(json.dumps({**asdict(cost), "share": cost.share}, indent=1) + "\n")
    text = table(cost, options.config, options.steps)
    print(text)
    page.write(page_of(parser, options), "durability", text)
    return 0 if cost.share < LIMIT else 1


def _check_models(config: Config) -> None:
    model = Path(config.actor.model)
    if str(config.actor.model).startswith("build/") and not model.exists():
        raise ConfigError(
            f"actor.model {model}: not found; create it with python examples/reviews/prepare.py POSITIVE NEGATIVE "
            f"{model.parent}, or pass another --config"
        )


def measure(config: Config, path: Path, steps: int, folder: Path) -> Cost:
    """Run ``steps`` steps of the config at ``path`` with CHECKPOINTS checkpoints. Raises ConfigError if the run fails."""
    every = steps // CHECKPOINTS
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = (f"run.name={RUN}", f"run.directory={folder}", f"run.steps={steps}", f"checkpoint.every_steps={every}")
    command = [str(Path(sys.executable).with_name("quartet")), "train", str(path)]
    command += [part for setting in settings for part in ("--set", setting)]
    files = RunFiles(folder / RUN)
    save_seconds = _run_and_measure_saves(command, files, every, steps, folder / "train.log")
    seconds = logged_seconds((files.logs / "orchestrator.log").read_text())
    return cost_of(seconds, save_seconds, every, config.checkpoint.every_steps or every)


def _run_and_measure_saves(command: list[str], files: RunFiles, every: int, steps: int, log: Path) -> dict[Role, float]:
    """Run the command, and return the seconds for which actor and critic copied the checkpoint of step ``every``."""
    save_seconds: dict[Role, float] = {}
    with log.open("wb") as output:
        run = subprocess.Popen(
            tied_to_parent(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while run.poll() is None:
                time.sleep(POLL)
                done = len(files.metrics.read_text().splitlines()) if files.metrics.exists() else 0
                if every < done < 2 * every:
                    save_seconds = _save_seconds(files) or save_seconds
        finally:
            if run.poll() is None:
                run.terminate()
            run.wait(60)
    if run.returncode or len(save_seconds) == 0:
        raise ConfigError(f"the measured run ended with status {run.returncode}; see {log}")
    return save_seconds


def _save_seconds(files: RunFiles) -> dict[Role, float]:
    """Return the seconds that actor and critic spent on saves, or nothing if a service does not respond."""
    try:
        addresses = json.loads(files.services.read_text())
    except (OSError, ValueError):
        return {}
    result: dict[Role, float] = {}
    for kind in (ActorClient, CriticClient):
        if kind.role in addresses:
            client = kind(addresses[kind.role], TimeoutsConfig(load_seconds=2.0))
            try:
                result[kind.role] = client.wait_until_ready().busy_seconds.get("save", 0.0)
            except QuartetError:
                return {}
            finally:
                client.close()
    return result


def logged_seconds(log: str) -> list[dict[str, float]]:
    """Return the durations that the orchestrator logged for each committed step, by name."""
    lines = [line for line in log.splitlines() if "event='step committed'" in line]
    return [
        {name: float(value) for name, value in re.findall(r"\b(step|\w*seconds)=([-+.e\d]+)", line)} for line in lines
    ]


def cost_of(
    steps: Sequence[dict[str, float]], save_seconds: dict[Role, float], measured_every: int, every: int
) -> Cost:
    """Compute the cost from the logged ``steps`` of a run with a checkpoint every ``measured_every`` steps.

    ``every``: steps between two checkpoints in the config.
    """
    warm = [step for step in steps if step["step"] > WARM_UP]
    # The step after a checkpoint is the one during which it is written.
    after = [step for step in warm if step["step"] % measured_every == 1]
    others = [step for step in warm if step["step"] % measured_every != 1]
    typical = statistics.median(step["seconds"] for step in others)
    return Cost(
        step=typical,
        parts={name: statistics.median(step.get(f"{name}_seconds", 0.0) for step in warm) for name in IN_EACH_STEP},
        copies=max(save_seconds.values()),
        waits=statistics.fmean(step.get("checkpoint_seconds", 0.0) for step in after),
        slower=max(0.0, statistics.fmean(step["seconds"] for step in after) - typical),
        every=every,
    )


def table(cost: Cost, config: Path, steps: int) -> str:
    """Return the table for the page."""

    def row(what: str, seconds: float) -> str:
        return f"| {what} | {1000 * seconds:.2f} | {100 * seconds / cost.step:.3f} % |"

    each = cost.checkpoint / cost.every
    lines = [
        f"`{config}`, {steps} steps on {os.cpu_count()} CPU cores. A step takes {cost.step:.2f} s (median). "
        f"Durability takes **{100 * cost.share:.2f} %** of it.",
        "",
        "| part | ms per step | share of a step |",
        "|---|---|---|",
        *(row(what, cost.parts[name]) for name, what in IN_EACH_STEP.items()),
        row(f"a checkpoint every {cost.every} steps", each),
        row("together", sum(cost.parts.values()) + each),
        "",
        f"One checkpoint costs {1000 * cost.checkpoint:.0f} ms: copies keep a model's compute thread busy for "
        f"{1000 * cost.copies:.0f} ms, and the orchestrator waits for {1000 * cost.waits:.0f} ms. The step that writes it takes "
        f"{1000 * cost.slower:.0f} ms longer than the others, which counts instead if it is more than both together.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
