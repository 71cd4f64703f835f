"""What durability costs a run to which nothing happens: seconds of a step, part by part, measured where they are spent.

`make durability-cost`, or python -m benchmarks.durability. Writes its figures below build/, its table into docs/durability.md.
Exits 1 when all parts together take 3 % of a step or more.
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
from quartet.child_processes import tied_to_parent
from quartet.config import Config, TimeoutsConfig, load_config
from quartet.errors import ConfigError, QuartetError
from quartet.rpc.clients import ActorClient, CriticClient
from quartet.run_directory.run_files import RunFiles
from quartet.types import Role

RUN = "durability-cost"
CHECKPOINTS = 3
"""Of a measured run, whatever its config says: so many are enough to know what one costs."""
WARM_UP = 3
"""First steps left out: caches fill, pages are touched for the first time."""
LIMIT = 0.03
"""Of a step, for all parts together."""
POLL = 0.2
"""Seconds between questions to actor and critic."""
IN_EACH_STEP = {
    "seal": "sealing the experience in Redis",
    "lease": "renewing the lease",
    "commit": "trajectories and metrics to the disk (fsync)",
    "acknowledge": "freeing the step's trajectories in Redis",
}
"""Parts of every step, by their name in the orchestrator's log."""


@dataclass(frozen=True)
class Cost:
    """What durability costs. Seconds; ``parts`` are medians over the steps, the others are of one checkpoint.

    ``copies``: for which a model's compute thread is held, the longer of actor and critic. ``waits``: for which the orchestrator
    waits until they are written. ``slower``: by which the step during which they are written is longer than the others.
    """

    step: float
    parts: dict[str, float]
    copies: float
    waits: float
    slower: float
    every: int

    @property
    def checkpoint(self) -> float:
        """Of one checkpoint, all in all: the step that is longer has waited and was held back in it."""
        return max(self.copies + self.waits, self.slower)

    @property
    def share(self) -> float:
        """Of a step's time, the checkpoint spread over the steps from one to the next."""
        return (sum(self.parts.values()) + self.checkpoint / self.every) / self.step


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("durability", __doc__)
    parser.add_argument("--config", type=Path, default=Path("configs/reviews/ppo.yaml"))
    parser.add_argument("--steps", type=positive, default=33)
    add_shared(parser, "build/durability", Path("docs/durability.md"), kept="the run is")
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
    page.write(page_of(parser, options), "durability-cost", text)
    return 0 if cost.share < LIMIT else 1


def _check_models(config: Config) -> None:
    model = Path(config.actor.model)
    if str(config.actor.model).startswith("build/") and not model.exists():
        raise ConfigError(
            f"actor.model {model}: is not there; make it with python examples/reviews/prepare.py POSITIVE NEGATIVE "
            f"{model.parent}, which make acceptance does, too, or give another --config"
        )


def measure(config: Config, path: Path, steps: int, folder: Path) -> Cost:
    """Run ``steps`` of the config at ``path`` with CHECKPOINTS checkpoints. Raises ConfigError when the run fails."""
    every = steps // CHECKPOINTS
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = (f"run.name={RUN}", f"run.directory={folder}", f"run.steps={steps}", f"checkpoint.every_steps={every}")
    command = [str(Path(sys.executable).with_name("quartet")), "train", str(path)]
    command += [part for setting in settings for part in ("--set", setting)]
    files = RunFiles(folder / RUN)
    held = _held_by_saves(command, files, every, steps, folder / "train.log")
    seconds = logged_seconds((files.logs / "orchestrator.log").read_text())
    return cost_of(seconds, held, every, config.checkpoint.every_steps or every)


def _held_by_saves(command: list[str], files: RunFiles, every: int, steps: int, log: Path) -> dict[Role, float]:
    """Run the command. Gives the seconds for which the copies of the checkpoint of step ``every`` held actor and critic."""
    held: dict[Role, float] = {}
    with log.open("wb") as output:
        run = subprocess.Popen(
            tied_to_parent(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while run.poll() is None:
                time.sleep(POLL)
                done = len(files.metrics.read_text().splitlines()) if files.metrics.exists() else 0
                if every < done < 2 * every:
                    held = _busy_with_saves(files) or held
        finally:
            if run.poll() is None:
                run.terminate()
            run.wait(60)
    if run.returncode or len(held) == 0:
        raise ConfigError(f"the measured run ended with status {run.returncode}; see {log}")
    return held


def _busy_with_saves(files: RunFiles) -> dict[Role, float]:
    """Return what actor and critic say of their time, as long as they are there."""
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
    """Return what the orchestrator says of each step that it has committed, by name."""
    lines = [line for line in log.splitlines() if "event='step committed'" in line]
    return [
        {name: float(value) for name, value in re.findall(r"\b(step|\w*seconds)=([-+.e\d]+)", line)} for line in lines
    ]


def cost_of(steps: Sequence[dict[str, float]], held: dict[Role, float], measured_every: int, every: int) -> Cost:
    """``steps`` as logged, of a run with a checkpoint after every ``measured_every``; ``every`` is the config's own."""
    warm = [step for step in steps if step["step"] > WARM_UP]
    # The step after a checkpoint is the one during which it is written.
    after = [step for step in warm if step["step"] % measured_every == 1]
    others = [step for step in warm if step["step"] % measured_every != 1]
    typical = statistics.median(step["seconds"] for step in others)
    return Cost(
        step=typical,
        parts={name: statistics.median(step.get(f"{name}_seconds", 0.0) for step in warm) for name in IN_EACH_STEP},
        copies=max(held.values()),
        waits=statistics.fmean(step.get("checkpoint_seconds", 0.0) for step in after),
        slower=max(0.0, statistics.fmean(step["seconds"] for step in after) - typical),
        every=every,
    )


def table(cost: Cost, config: Path, steps: int) -> str:
    """Return what the page says."""

    def row(what: str, seconds: float) -> str:
        return f"| {what} | {1000 * seconds:.2f} | {100 * seconds / cost.step:.3f} % |"

    each = cost.checkpoint / cost.every
    lines = [
        f"`{config}`, {steps} steps on {os.cpu_count()} CPU cores; a step takes {cost.step:.2f} s (median). "
        f"All in all durability costs **{100 * cost.share:.2f} %** of it.",
        "",
        "| part | ms per step | of a step |",
        "|---|---|---|",
        *(row(what, cost.parts[name]) for name, what in IN_EACH_STEP.items()),
        row(f"a checkpoint every {cost.every} steps", each),
        row("together", sum(cost.parts.values()) + each),
        "",
        f"One checkpoint: the copies hold a model's compute thread for {1000 * cost.copies:.0f} ms, the orchestrator waits for "
        f"{1000 * cost.waits:.0f} ms, and the step during which it is written is {1000 * cost.slower:.0f} ms longer than the "
        f"others; the larger of these counts: {1000 * cost.checkpoint:.0f} ms.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
