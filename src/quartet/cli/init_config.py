"""`quartet init`: write a commented config, by flags or by questions in a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import typer
import yaml

from quartet.config.estimators import BUILT_IN_ESTIMATORS
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.config.section import IMPORT_PATH
from quartet.data.prompt_files import FORMATS
from quartet.errors import ConfigError, QuartetError
from quartet.model_files.model_support import positions_in
from quartet.preflight import problems
from quartet.preflight.findings import raise_errors
from quartet.preflight.prompts import count_prompts
from quartet.system.durable_files import write_durably

DEFAULT_STEPS = 200
DEFAULT_ESTIMATOR = "gae"
DEFAULT_FUNCTION = "my_rewards:score"
MAX_PROMPT_TOKENS = 512
MAX_RESPONSE_TOKENS = 128
RESPONSES_PER_STEP = 64
SAMPLES_PER_PROMPT = 4
"""Responses to each prompt for estimators that compare them."""

_REWARD_FILE = '''"""A reward function: rewards.md in Quartet's documentation says more."""


def {name}(prompt, response, fields):
    """Return the score of a response, a finite number. Higher is better.

    ``fields`` has the fields of the prompt's row, such as an answer. This example prefers responses of 30 words.
    """
    return -abs(len(response.split()) - 30) / 30
'''


@dataclass(slots=True)
class Answers:
    """The choices of the user. None: not chosen yet."""

    policy: str | None = None
    prompts: Path | None = None
    reward: str | None = None
    reward_function: str | None = None
    estimator: str | None = None
    steps: int | None = None


def init(target: Path, answers: Answers, overwrite: bool, yes: bool) -> None:
    """Write a config to the file ``target``, or into the folder ``target``. Raises ConfigError; then nothing is written.

    Asks for what ``answers`` lacks, unless ``yes`` is set or standard input is not a terminal.
    """
    path = target if target.suffix in (".yaml", ".yml") else target / f"{target.resolve().name}.yaml"
    if path.exists() and not overwrite:
        raise ConfigError(f"{path}: exists; choose another file, or replace it with --overwrite")
    if answers.reward and answers.reward_function:
        raise ConfigError("--reward and --reward-function: give only one of them")
    if sys.stdin.isatty() and not yes:
        _ask(answers)
    missing = [
        flag
        for flag, value in (
            ("--policy MODEL", answers.policy),
            ("--prompts FILE", answers.prompts),
            ("--reward MODEL or --reward-function MODULE:NAME", answers.reward or answers.reward_function),
        )
        if not value
    ]
    if missing:
        raise ConfigError(f"init: give {', '.join(missing)}, or run quartet init in a terminal, which asks for them")
    _write(path, answers)


def _ask(answers: Answers) -> None:
    """Ask for the answers that are missing."""
    answers.policy = answers.policy or _question("Policy to train: directory of a causal LM, or hub id")
    answers.prompts = answers.prompts or Path(_question("Prompts: file in JSON Lines, CSV or Parquet"))
    if not answers.reward and not answers.reward_function:
        answers.reward = _question("Reward model: directory or hub id; empty for a Python function", "") or None
        if answers.reward is None:
            answers.reward_function = _question("Reward function", DEFAULT_FUNCTION)
    if answers.estimator is None:
        answers.estimator = _question(f"Estimator: ppo, {', '.join(list(BUILT_IN_ESTIMATORS)[1:])}", "ppo")
    if answers.steps is None:
        answers.steps = typer.prompt("Steps", default=DEFAULT_STEPS, type=int)


def _question(text: str, default: str | None = None) -> str:
    return str(typer.prompt(text, default=default, show_default=bool(default))).strip()


def _start_at(folder: Path, answers: Answers) -> None:
    """Let the paths of files in the working directory start at ``folder``, where the commands run."""

    answers.prompts = None if answers.prompts is None else Path(moved_path(folder, answers.prompts))
    answers.policy = None if answers.policy is None else moved_path(folder, answers.policy)
    answers.reward = None if answers.reward is None else moved_path(folder, answers.reward)


def moved_path(folder: Path, path: str | Path) -> str:
    """Return a path of the working directory as it is from ``folder``. Other texts, such as hub ids, stay the same."""
    exists = not Path(path).is_absolute() and Path(path).exists()
    return os.path.relpath(path, folder) if exists else str(path)


def _write(path: Path, answers: Answers) -> None:
    folder = path.parent
    _start_at(folder, answers)
    created = [parent for parent in (folder, *folder.parents) if not parent.exists()][::-1]
    before = path.read_text(encoding="utf-8") if path.exists() else None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        function_file = _function_file(folder, answers.reward_function)
        if function_file is not None and answers.reward_function is not None:
            created.append(function_file)
            write_durably(function_file, _REWARD_FILE.format(name=answers.reward_function.partition(":")[2]))
        # The commands run in the folder of the config, so that its paths and functions are found from there.
        with contextlib.chdir(folder):
            config = _parse(path, config_text(path, answers, RESPONSES_PER_STEP))
            # The check of the prompts tells how many are usable, and so how many a step can have.
            rollout = config.rollout.model_copy(update={"prompts_per_step": 1})
            found = problems(config.model_copy(update={"rollout": rollout}))
            raise_errors(found)
            text = config_text(path, answers, count_prompts(config))
            _parse(path, text)
        write_durably(path, text)
    except (QuartetError, OSError):
        if before is None:
            path.unlink(missing_ok=True)
        for item in reversed(created):
            with contextlib.suppress(OSError):
                item.rmdir() if item.is_dir() else item.unlink()
        raise
    for finding in found:
        typer.echo(finding)
    if function_file is not None:
        typer.echo(f"{function_file}: an example; replace its score with yours")
    change = f"cd {quote(str(folder))} && " if folder.resolve() != Path.cwd() else ""
    typer.echo(f"{path}: written and valid; to train: {change}quartet train {quote(path.name)}")


def _function_file(folder: Path, function: str | None) -> Path | None:
    """Return the file to create for a reward function, or None if there is one, or if it is in a package."""
    if function is None:
        return None
    if not IMPORT_PATH.fullmatch(function):
        raise ConfigError(f"--reward-function {function}: expected MODULE:NAME, such as {DEFAULT_FUNCTION}")
    module = function.partition(":")[0]
    path = folder / f"{module}.py"
    if "." in module or path.exists() or (folder / module).is_dir() or _is_installed(module):
        return None
    return path


def _is_installed(module: str) -> bool:
    from importlib.machinery import PathFinder

    here = Path.cwd().resolve()
    spec = PathFinder.find_spec(module, [entry for entry in sys.path if Path(entry or ".").resolve() != here])
    return spec is not None or module in sys.builtin_module_names


def _parse(path: Path, text: str) -> Config:
    return parse_config(yaml.safe_load(text), source=str(path))


def config_text(path: Path, answers: Answers, num_prompts: int, shape_of: str | None = None) -> str:
    """Return the config with comments, for ``num_prompts`` usable prompts. Its paths start at the folder of ``path``.

    ``shape_of``: model whose positions limit the lengths. Defaults to the policy.
    """
    assert answers.policy is not None
    assert answers.prompts is not None
    estimator = answers.estimator or DEFAULT_ESTIMATOR
    estimator = "gae" if estimator == "ppo" else estimator
    spec = BUILT_IN_ESTIMATORS.get(estimator)
    prompts = min(RESPONSES_PER_STEP, num_prompts)
    samples = SAMPLES_PER_PROMPT if spec is not None and spec.uses_groups else 1
    if samples > 1:
        prompts = min(prompts, RESPONSES_PER_STEP // samples)
    prompt_tokens, response_tokens = _lengths(shape_of or answers.policy)
    if answers.reward is not None:
        reward = f"""\
  # A sequence classifier with one output and the policy's tokenizer.
  model: {scalar(answers.reward)}
"""
    else:
        reward = f"""\
  # Called as f(prompt, response, fields); returns a number. The module is in this folder, or installed.
  source: function
  function: {scalar(answers.reward_function)}
"""
    critic = """
critic:
  # The value model. It starts from the reward model, or from the policy if the reward is a function.
  learning_rate: 1.0e-5
"""
    return f"""\
# A run of Quartet. In this folder:
#   quartet config check {path.name}    checks it without starting anything
#   quartet train {path.name}           trains; --resume continues an interrupted run
# Settings that are left out have a default: quartet config show {path.name} prints all of them.
run:
  # The run is stored in runs/{_name(path)}.
  name: {scalar(_name(path))}
  steps: {answers.steps or DEFAULT_STEPS}

data:
  # {FORMATS}.
  # Each row has prompt, text, messages or token_ids. A reward function gets all fields of its row.
  prompts: {scalar(str(answers.prompts))}
  # Longer prompts are dropped; truncation: left or right shortens them.
  max_prompt_tokens: {prompt_tokens}
  # Prompts for evaluations, in the same format:
  # validation: validation.jsonl

actor:
  # The policy to train. Its initial weights are the reference for the KL penalty.
  model: {scalar(answers.policy)}
  # Change this first: raise it if the reward does not rise, lower it if the KL divergence runs away. LoRA needs about 1.0e-4.
  learning_rate: 1.0e-5
  # Train adapters instead of all weights:
  # lora: {{rank: 16}}
{critic if spec is None or spec.needs_critic else ""}
reward:
{reward}
algorithm:
  # gae is PPO, with a critic. Without: reinforce, reinforce_plus_plus, remax. With several samples per prompt: rloo, grpo, opo,
  # reinforce_plus_plus_baseline.
  estimator: {scalar(estimator)}
  # The weight of the KL penalty. Raise it if the policy exploits the reward, or its responses degenerate.
  kl_coefficient: 0.05

rollout:
  # A step learns from prompts_per_step x samples_per_prompt responses. More make it slower and less noisy.
  prompts_per_step: {prompts}
  samples_per_prompt: {samples}
  # Longer responses are cut off and lose 1 in reward, see algorithm.truncation.
  max_response_tokens: {response_tokens}

checkpoint:
  # An interrupted run continues from the last checkpoint or later.
  every_steps: 50

# Compare the policy with the initial one on other prompts. It needs data.validation.
# evaluation: {{every_steps: 20}}

# Give each model a GPU. All start on the CPU without this:
# services:
#   actor: {{devices: [0]}}
#   reward: {{devices: [1]}}
"""


def _lengths(policy: str) -> tuple[int, int]:
    """Return the maximum lengths of a prompt and a response in tokens that the model has positions for."""
    try:
        positions = positions_in(json.loads((Path(policy) / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError):
        positions = None
    if positions is None:
        return MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS
    response = max(1, min(MAX_RESPONSE_TOKENS, positions // 2))
    return max(1, min(MAX_PROMPT_TOKENS, positions - response)), response


def _name(path: Path) -> str:
    """Return the name of the run: that of the file, without characters that a name cannot have."""
    return re.sub(r"^[^A-Za-z0-9]+", "", re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem))[:64] or "run"


def scalar(value: Any) -> str:
    """Return a value as YAML in one line."""
    return yaml.safe_dump(value, width=10_000, allow_unicode=True).removesuffix("...\n").strip()
