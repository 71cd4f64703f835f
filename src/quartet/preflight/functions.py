"""Checks of the functions that a config names. Each is imported in a separate process."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing.connection import wait
from pathlib import Path

from quartet.config import Config
from quartet.config.estimators import BUILT_IN_POLICY_LOSSES
from quartet.errors import ConfigError
from quartet.preflight.checking_process import checking_process
from quartet.user_code import CHECKED

REWARD_ARGUMENTS = ("prompt", "response", "fields")
"""Arguments of a reward function: prompt, response and the fields of the prompt's line, or lists of them."""
JUDGE_ARGUMENTS = ("prompt", "response", "initial_response", "fields")
"""Arguments of a judge: prompt, response, the initial policy's response, and the fields of the prompt's line."""
IMPORT_SECONDS = 60.0
"""Maximum seconds to import the module of a function."""


def named_functions(config: Config) -> dict[str, str]:
    """Return the functions that processes on this machine call, by config key."""
    functions = {"evaluation.judge": config.evaluation.judge}
    if config.algorithm.custom_estimator is not None:
        functions["algorithm.estimator"] = config.algorithm.estimator
    if config.services.actor.address is None and config.algorithm.policy_loss not in BUILT_IN_POLICY_LOSSES:
        functions["algorithm.policy_loss"] = config.algorithm.policy_loss
    if config.services.reward.address is None:
        functions["reward.function"] = config.reward.function
        functions |= {f"reward.parts.{part.name}.function": part.function for part in config.reward.parts}
    return {key: function for key, function in functions.items() if function is not None}


def check_function(key: str, function: str) -> str:
    """Check that a function exists and accepts its arguments. Raises ConfigError."""
    module = function.partition(":")[0]
    if not _may_be_importable(module):
        raise ConfigError(
            f"{key} {function}: no module {module} in {Path.cwd()} or among the installed packages; "
            "correct the name, run the command in the directory of the module, or add that directory to PYTHONPATH"
            f"{_shadowing(module)}"
        )
    arguments = JUDGE_ARGUMENTS if key == "evaluation.judge" else REWARD_ARGUMENTS
    if key.startswith("algorithm."):
        # It needs torch, whose import takes seconds.
        return f"{key} {function}: module exists, and is imported when its process starts"
    if problem := _import_problem(function, len(arguments)):
        names = f": {', '.join(arguments)}" if problem.endswith(" arguments") else ""
        raise ConfigError(f"{key} {function}: {problem}{names}")
    return f"{key} {function}: can be imported and accepts {len(arguments)} arguments"


def _import_problem(function: str, count: int) -> str:
    """Return why a function cannot be called with ``count`` arguments, or "" if it can.

    Imports it in a separate process, because an import may print, hang or end its process.
    """
    with checking_process("quartet.user_code", function, str(count)) as (pipe, _):
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
