"""`quartet demo`: train on a toy task with PPO, and compare completions before and after."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from rich.table import Table

from quartet.cli.console import make_console, plain
from quartet.cli.start_run import run
from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.step_lines import read_step_lines

console = make_console()
SHOWN_COMPLETIONS = 5
"""Number of completions in the table."""
SCORED_COMPLETIONS = 64
"""Number of completions that the mean scores are computed from."""
WINDOW_STEPS = 10
"""Number of first and last steps to compare."""


def demo(directory: Path, overrides: list[str]) -> None:
    """Create the toy task on first use, train on it, and print completions before and after."""
    start = time.monotonic()
    toy_task = directory.absolute() / "toy-task"
    _make_toy_task(toy_task)
    settings = [
        f"run.directory={directory.absolute()}",
        f"data.prompts={toy_task / 'prompts.jsonl'}",
        f"actor.model={toy_task / 'policy'}",
        f"reward.model={toy_task / 'reward'}",
    ]
    with resources.as_file(resources.files("quartet.demo") / "demo.yaml") as path:
        config = load_config(path, [*settings, *overrides])
    console.print(
        f"training: {config.run.steps} steps of {config.rollout.prompts_per_step} responses, "
        "four model services, Redis and an orchestrator",
    )
    run(config, overwrite=True)
    files = RunFiles(config.run_directory)
    _print_completions(config, files)
    print_verdict(read_step_lines(files.metrics))
    command = Path(sys.executable).with_name("quartet")
    console.print(
        f"policy: {files.policy}\ntry it: {command} generate {files.policy} 'a quick lunch with friends :'\n"
        f"whole demo: {time.monotonic() - start:.0f} s",
        soft_wrap=True,
    )


def _make_toy_task(toy_task: Path) -> None:
    from quartet.demo.toy_task import make_toy_task

    title = "creating the toy task: corpus, tokenizer, policy, reward model (first use only, about a minute)"
    if not console.is_terminal and not toy_task.exists():
        console.print(title)
    with console.status(plain(title)):
        start = time.monotonic()
        make_toy_task(toy_task)
        if time.monotonic() - start > 1:
            console.print(f"toy task: {toy_task}, created in {time.monotonic() - start:.0f} s", soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Scored:
    """A completion and its score."""

    prompt: str
    text: str
    score: float


def _scored_completions(config: Config, policy: str) -> list[Scored]:
    from quartet.api.completions import complete
    from quartet.contract.generation import SamplingParameters
    from quartet.contract.trajectory import TokenBatch
    from quartet.data.prompt_lines import read_prompt_lines
    from quartet.rewards.factory import build_reward

    prompts = config.data.prompts
    assert prompts is not None, "the demo's config names a file of prompts"
    lines = read_prompt_lines(prompts)[:SCORED_COMPLETIONS]
    sampling = SamplingParameters(config.rollout.max_response_tokens, config.rollout.temperature)
    completions = complete(policy, prompts, lines, sampling, seed=config.run.seed)
    with closing(build_reward(config, "cpu")) as reward:
        scores = reward.score(TokenBatch.of([item.trajectory for item in completions])).total
    return [Scored(item.prompt, item.text, float(score)) for item, score in zip(completions, scores, strict=True)]


def _print_completions(config: Config, files: RunFiles) -> None:
    title = f"completing {SCORED_COMPLETIONS} prompts with the policy before and after training"
    if not console.is_terminal:
        console.print(title)
    with console.status(plain(title)):
        before = _scored_completions(config, config.actor.model)
        after = _scored_completions(config, str(files.policy))
    table = Table(title="the same prompts, before and after", show_lines=True)
    for title, style in (("prompt", ""), ("before", ""), ("score", "red"), ("after", ""), ("score", "green")):
        table.add_column(title, style=style, overflow="fold", justify="right" if title == "score" else "left")
    for old, new in zip(before[:SHOWN_COMPLETIONS], after[:SHOWN_COMPLETIONS], strict=True):
        table.add_row(old.prompt, old.text.strip(), f"{old.score:+.2f}", new.text.strip(), f"{new.score:+.2f}")
    table.add_section()
    table.add_row(f"mean of {len(before)}", "", f"{_mean(before):+.2f}", "", f"{_mean(after):+.2f}", style="bold")
    console.print(table)


def _mean(completions: Sequence[Scored]) -> float:
    return statistics.fmean(item.score for item in completions)


def print_verdict(steps: Sequence[dict[str, float]]) -> None:
    """Print the gain in mean reward from the first to the last steps, in standard deviations between responses."""
    window = min(WINDOW_STEPS, len(steps) // 2)
    if not window:
        return
    first, last = steps[:window], steps[-window:]
    gain = _mean_of(last, "reward_mean") - _mean_of(first, "reward_mean")
    spread = math.sqrt(statistics.fmean(step["reward_std"] ** 2 for step in first))
    console.print(
        f"reward: {_mean_of(first, 'reward_mean'):+.2f} over the first {window} steps, "
        f"{_mean_of(last, 'reward_mean'):+.2f} over the last: a gain of {gain:+.2f}, "
        f"{gain / max(spread, 1e-9):.1f} standard deviations between responses; "
        f"KL {_mean_of(last, 'kl_mean'):.1f} nats per response",
        soft_wrap=True,
    )


def _mean_of(steps: Sequence[dict[str, float]], name: str) -> float:
    return statistics.fmean(step[name] for step in steps)
