"""The model card of an exported policy: README.md with metadata of the hub, and curves.svg."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from quartet import __version__
from quartet.config.loading import load_config
from quartet.config.rewards import RewardSourceConfig
from quartet.config.root import Config
from quartet.contract.trajectory import PromptSetContent
from quartet.run_directory.identity import Identity, fixed_settings
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.step_lines import read_step_lines
from quartet.telemetry.step_metrics import METRICS

CARD, CURVES = "README.md", "curves.svg"
WINDOW_STEPS = 10
"""Number of first and last steps whose means the card compares."""
_SHOWN = {name: METRICS[name].title for name in ("reward_mean", "kl_mean", "entropy", "response_tokens_mean")}
_WIDTH, _HEIGHT, _MARGIN = 360, 150, 24


def write_model_card(directory: Path, files: RunFiles, step: int, ema: bool = False) -> None:
    """Write the card and the curves of the policy after ``step``, or of its average.

    Raises ConfigError if the files of the run are damaged.
    """
    config = load_config(files.config)
    steps = [line for line in read_step_lines(files.metrics) if line["step"] <= step]
    evaluations = [line for line in read_step_lines(files.evaluation_summaries) if line["step"] <= step]
    (directory / CURVES).write_text(_curves(steps), encoding="utf-8")
    (directory / CARD).write_text(_card(config, files, step, ema, steps, evaluations), encoding="utf-8")


def _card(
    config: Config,
    files: RunFiles,
    step: int,
    ema: bool,
    steps: Sequence[Mapping[str, float]],
    evaluations: Sequence[Any],
) -> str:
    identity = Identity.read(files.identity)
    # The run has recorded them: in another working directory, a relative path looks like a hub id.
    hub_models = identity.hub_models if identity is not None else ()
    base, estimator = _public_name(config.actor.model, hub_models), config.algorithm.estimator
    algorithm = "PPO with GAE" if estimator == "gae" else estimator
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    # The hub refuses a card whose base model is not the id of a model there.
    if config.actor.model in hub_models:
        front["base_model"] = config.actor.model
    front["tags"] = ["quartet", "rlhf", "ppo" if estimator == "gae" else estimator]
    rollout = config.rollout
    facts = {
        "initial policy": f"`{base}`",
        "algorithm": f"{algorithm}, {rollout.prompts_per_step} x {rollout.samples_per_prompt} responses per step",
        **(
            {"teacher": f"`{_public_name(config.reference_model, hub_models)}`"}
            if config.algorithm.distillation is not None
            else {}
        ),
        "reward": _reward(config, hub_models),
        "prompts": _prompts(config, identity),
        "run": f"`{config.run.name}`, step {step} of {config.run.steps}, seed {config.run.seed}",
        **({"weights": "the moving average (EMA) of those of each step"} if ema else {}),
        "trained with": f"Quartet {__version__}",
        "exported on": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    settings = yaml.safe_dump(_settings(config, hub_models), sort_keys=True, allow_unicode=True)
    return f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---

# {config.run.name}

A policy trained with reinforcement learning from `{base}` by [Quartet](https://github.com/quartet-rlhf/quartet).

| | |
|---|---|
{table}

## Curves

{_ends(steps)}

![Curves of the run]({CURVES})
{_evaluation(evaluations)}
## Settings

The settings that decide what the run learned. Of local paths, only the last part is shown.

```yaml
{settings}```
"""


def _prompts(config: Config, identity: Identity | None) -> str:
    """Return the prompts file, or the sets with their weights, each with the checksum of its rows."""

    def with_digest(name: str, sha256: str) -> str:
        return f"`{name}`" + (f", SHA-256 `{sha256}`" if sha256 else "")

    if config.data.prompts is not None:
        return with_digest(config.data.prompts.name, identity.prompts_sha256 if identity is not None else "")
    contents = identity.prompt_sets if identity is not None else {}
    sets = []
    for each in config.data.sets:
        content = contents.get(f"data.sets.{each.name}", PromptSetContent(""))
        place = each.path.name if each.path is not None else each.dataset or ""
        # Only a data set on the hub has a commit. The path of a folder may name a user.
        name = f"{place}@{content.revision}" if content.revision else Path(place).name
        sets.append(f"{each.weight:g} x {with_digest(name, content.sha256)}")
    return " + ".join(sets)


def _public_name(model: str, hub_models: Collection[str]) -> str:
    """Return a hub id as it is, and only the last part of a local path, which may name a user."""
    return model if model in hub_models else Path(model).name


def _reward(config: Config, hub_models: Collection[str]) -> str:
    def source(given: RewardSourceConfig) -> str:
        if given.model is not None:
            return f"model `{_public_name(given.model, hub_models)}`"
        if given.function is not None:
            return f"function `{given.function}`"
        if given.http is not None:
            return f"scorer over HTTP, dialect {given.http.dialect}"
        if given.triton is not None:
            return f"model `{given.triton.model}` on a Triton server"
        # Addresses are not public.
        return f"judge `{given.judge.model}`" if given.judge is not None else "reward service"

    if config.reward.source == "none":
        return "none"
    if config.reward.source != "ensemble":
        return source(config.reward)
    return " + ".join(f"{part.weight:g} x {part.name} ({source(part)})" for part in config.reward.parts)


def _settings(config: Config, hub_models: Collection[str]) -> dict[str, Any]:
    """Return the settings by key, without local paths."""

    def public(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: public(item) for name, item in value.items()}
        if isinstance(value, list):
            return [public(item) for item in value]
        return _public_name(value, hub_models) if isinstance(value, str) and "/" in value else value

    return {key: public(value) for key, value in fixed_settings(config).items() if value is not None}


def _ends(steps: Sequence[Mapping[str, float]]) -> str:
    """Return a table of the means over the first and the last steps."""
    window = min(WINDOW_STEPS, max(1, len(steps) // 2))
    rows = [
        f"| {title} | {fmean(line[name] for line in first):.4g} | {fmean(line[name] for line in last):.4g} |"
        for name, title in _SHOWN.items()
        if (first := [line for line in steps[:window] if name in line])
        and (last := [line for line in steps[-window:] if name in line])
    ]
    count = f"{window} steps" if window > 1 else "step"
    return "\n".join([f"| | first {count} | last {count} |", "|---|---|---|", *rows])


def _evaluation(evaluations: Sequence[Mapping[str, float]]) -> str:
    if not evaluations:
        return ""
    first, last = evaluations[0], evaluations[-1]
    rows = [
        f"| {name.removeprefix('eval_').replace('_', ' ')} | {first[name]:.4g} | {last[name]:.4g} |"
        for name in last
        if name not in ("step", "policy_version") and name in first
    ]
    head = f"| | step {int(first['step'])} | step {int(last['step'])} |"
    return "\n".join(["", "## Evaluation", "", head, "|---|---|---|", *rows, ""])


def _curves(steps: Sequence[Mapping[str, float]]) -> str:
    """Return one chart per metric as SVG, one below the other."""
    charts = [(title, [(line["step"], line[name]) for line in steps if name in line]) for name, title in _SHOWN.items()]
    shown = [(title, points) for title, points in charts if points]
    body = "".join(_chart(title, points, index * _HEIGHT) for index, (title, points) in enumerate(shown))
    height = _HEIGHT * max(1, len(shown))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{2 * _WIDTH}" '
        f'font-family="sans-serif" font-size="10"><rect width="{_WIDTH}" height="{height}" fill="#fff"/>{body}</svg>\n'
    )


def _chart(title: str, points: Sequence[tuple[float, float]], top: int) -> str:
    low, high = min(y for _, y in points), max(y for _, y in points)
    (start, _), (end, _) = points[0], points[-1]

    def places() -> Iterator[str]:
        for x, y in points:
            across = (x - start) / ((end - start) or 1)
            up = (y - low) / ((high - low) or 1)
            left = _MARGIN + across * (_WIDTH - 2 * _MARGIN)
            yield f"{left:.1f},{top + _HEIGHT - _MARGIN - up * (_HEIGHT - 3 * _MARGIN):.1f}"

    return (
        f'<text x="{_MARGIN}" y="{top + 14}">{escape(title)}: from {low:.4g} to {high:.4g}, '
        f"steps {int(start)} to {int(end)}</text>"
        f'<polyline fill="none" stroke="#1f5fd0" stroke-width="1.5" points="{" ".join(places())}"/>'
    )
