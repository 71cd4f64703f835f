"""The rules of the config are applied."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module

from quartet.config import rules
from quartet.config.root import RULES


def test_every_rule_is_applied_to_configs() -> None:
    modules = [import_module(f"{rules.__name__}.{module.name}") for module in pkgutil.iter_modules(rules.__path__)]
    functions = {value for module in modules for value in vars(module).values() if inspect.isfunction(value)}
    public = {function for function in functions if function.__name__.startswith("check_")}
    assert {function for function in public if function.__module__.startswith(rules.__name__)} == set(RULES)
