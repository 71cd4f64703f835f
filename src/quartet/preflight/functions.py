"""Checks of the functions that a config names. Each is imported in a separate process."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from quartet.config.policy_losses import BUILT_IN_POLICY_LOSSES
from quartet.config.rewards import TRL_ARGUMENTS, TRL_NO_COLUMNS, RewardSourceConfig
from quartet.config.root import Config
from quartet.data.prompt_datasets import cached_rows_file
from quartet.data.prompt_lines import iterate_prompts
from quartet.data.prompt_settings import PromptSettings
from quartet.environments.agent_child import PARAMETERS
from quartet.errors import ConfigError, QuartetError
from quartet.preflight.checking_process import checking_process
from quartet.preflight.findings import Finding
from quartet.system.user_code import CHECKED, counted_arguments

REWARD_ARGUMENTS = {
    "quartet": ("prompt", "response", "fields"),
    "openrlhf": ("queries", "prompts", "labels"),
    "slime": ("args", "sample"),
    "trl": TRL_ARGUMENTS,
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""Arguments of a reward function by reward.signature. The first three are given by position, the others by name."""
MAX_COLUMN_ROWS = 10_000
"""Maximum number of rows of a set of prompts that are read for the names of columns. Columns of larger sets are not known."""
JUDGE_ARGUMENTS = ("prompt", "response", "initial_response", "fields")
"""Arguments of a judge: prompt, response, the initial policy's response, and the fields of the prompt's line."""
ANSWER_ARGUMENTS = ("prompt", "response", "fields")
"""Arguments of a function that finds the answer in a response of an evaluation set."""
ALGORITHM_ARGUMENTS = ("inputs",)
"""Arguments of an estimator and of a policy loss."""
ENVIRONMENT_CHECK = "quartet.environments.host_child:unusable_reason"
"""Callable that says why a class has no environments, as it does in the service."""
AGENT_CHECK = "quartet.environments.agent_child:unusable_reason"
"""The same for a function that is an agent."""
IMPORT_SECONDS = 60.0
"""Maximum seconds to import the module of a function."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """Call of a function that a config names as package.module:callable: names of its arguments, and those given by name.

    ``takes_columns``: it gets the columns of the prompts by name, too. ``check``: see ``quartet.system.user_code``.
    """

    function: str
    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    takes_columns: bool = False
    check: str = ""


def named_functions(config: Config) -> dict[str, FunctionCall]:
    """Return the functions that processes on this machine call, by config key."""
    functions = {}
    if config.evaluation.judge is not None:
        functions["evaluation.judge"] = FunctionCall(config.evaluation.judge, JUDGE_ARGUMENTS)
    for each in config.evaluation.sets:
        if each.answer is not None:
            functions[f"evaluation.sets.{each.name}.answer"] = FunctionCall(each.answer, ANSWER_ARGUMENTS)
    if config.algorithm.custom_estimator is not None:
        functions["algorithm.estimator"] = FunctionCall(config.algorithm.estimator, ALGORITHM_ARGUMENTS)
    if config.services.actor.address is None and config.algorithm.policy_loss not in BUILT_IN_POLICY_LOSSES:
        functions["algorithm.policy_loss"] = FunctionCall(config.algorithm.policy_loss, ALGORITHM_ARGUMENTS)
    if config.services.reward.address is None:
        functions |= {
            f"{key}.function": _reward_call(source, source.function)
            for key, source in config.reward.sources.items()
            if source.function is not None
        }
    if config.environment.class_name is not None and config.services.environment.address is None:
        functions["environment.class_name"] = FunctionCall(
            config.environment.class_name, keywords=tuple(config.environment.arguments), check=ENVIRONMENT_CHECK
        )
    if config.environment.agent.function is not None and config.services.environment.address is None:
        functions["environment.agent.function"] = FunctionCall(
            config.environment.agent.function, keywords=PARAMETERS, check=AGENT_CHECK
        )
    return functions


def _reward_call(source: RewardSourceConfig, function: str) -> FunctionCall:
    names, arguments = REWARD_ARGUMENTS[source.signature], tuple(source.arguments)
    if source.signature in ("trl", "verl"):
        return FunctionCall(function, (), (*names, *arguments), takes_columns=source.signature == "trl")
    return FunctionCall(function, names, () if source.signature == "slime" else arguments)


def check_function(key: str, call: FunctionCall, columns: Sequence[str] | None = None) -> Iterator[Finding]:
    """Check that a function exists and accepts its arguments. Raises ConfigError.

    ``columns`` of the prompts; None if they are not known.
    """
    function = call.function
    module = function.partition(":")[0]
    if not _may_be_importable(module):
        raise ConfigError(
            f"{key} {function}: no module {module} in {Path.cwd()} or among the installed packages; "
            "correct the name, run the command in the directory of the module, or add that directory to PYTHONPATH"
            f"{_shadowing(module)}"
        )
    if problem := _import_problem(call, columns):
        called = call.positional and problem.endswith((" argument", " arguments"))
        names = f": {', '.join(call.positional)}" if called else ""
        raise ConfigError(f"{key} {function}: {problem}{names}")
    named = f"{', '.join(call.keywords)} by name" if call.keywords else ""
    given = counted_arguments(len(call.positional)) if call.positional or not named else ""
    accepted = " and ".join(filter(None, (given, named)))
    if call.takes_columns:
        own = [name for name in columns or () if name not in call.keywords]
        accepted = f"{', '.join(call.keywords)} and the columns {', '.join(own) if own else 'of the prompts'} by name"
    yield Finding("ok", f"{key} {function}", f"can be imported and accepts {accepted}")


def prompt_columns(config: Config) -> list[str] | None:
    """Return the columns of the prompts that functions get, or None if they are not here or have too many rows."""
    columns: dict[str, None] = {}
    try:
        for settings in PromptSettings.for_training(config):
            path = cached_rows_file(settings)
            if path is None:
                return None
            for row, line in enumerate(iterate_prompts(settings, path)):
                if row == MAX_COLUMN_ROWS:
                    return None  # Further rows may have further columns.
                columns |= dict.fromkeys(json.loads(line.fields))
    except (QuartetError, OSError):
        return None  # The check of the prompts reports it.
    return [name for name in columns if name not in TRL_NO_COLUMNS]


def _import_problem(call: FunctionCall, columns: Sequence[str] | None) -> str:
    """Return why a function cannot be called, or "" if it can.

    Imports it in a separate process, because an import may print, hang or end its process.
    """
    passed: dict[str, Any] = {"count": len(call.positional), "keywords": call.keywords, "check": call.check}
    if call.takes_columns:
        passed["columns"] = columns
    with checking_process("quartet.system.user_code", call.function, json.dumps(passed)) as (pipe, _):
        answered = bool(wait([pipe.fileno()], IMPORT_SECONDS))
        result = pipe.read1().decode() if answered else ""  # type: ignore[attr-defined]
    if not answered:
        return f"its module is not imported after {IMPORT_SECONDS:g} s"
    return result.removeprefix(CHECKED) if result.startswith(CHECKED) else "its import ends the process"


def _shadowing(module: str) -> str:
    """Return a note if another module hides the one of the same name in the working directory."""
    top = module.partition(".")[0]
    local, imported = PathFinder.find_spec(top, [str(Path.cwd())]), PathFinder.find_spec(top, sys.path)
    if local is None or imported is None or local.origin == imported.origin:
        return ""
    return f"; {imported.origin or top} hides the module {top} in this directory: rename that module"


def _may_be_importable(module: str) -> bool:
    """Return whether Python would find a module, by its files. A package may still create modules while it is imported."""
    top, *inner = module.split(".")
    # The process of the function searches the working directory last.
    spec = PathFinder.find_spec(top, [*sys.path, str(Path.cwd())]) or _installed(top)
    if spec is None:
        return False
    for name in inner:
        if spec.submodule_search_locations is None:
            return True
        # Only the last part of the name: for the full name Python would need the parent, which is not imported.
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
        if spec is None:
            return False
    return True


def _installed(top: str) -> ModuleSpec | None:
    """Return the spec of a module that is built into Python or found by a custom finder."""
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # A module without a spec, such as __main__.
        return None
