"""Quartet: RLHF training as microservices.

The Python API is imported when it is first used: ``import quartet`` loads neither torch nor any other library.
``__init__.pyi`` has its types, docs/python.md describes it.
"""

import importlib

__version__ = "0.1.0"

_API = ("Completion", "Config", "Run", "RunTrajectory", "generate", "load_config", "train")

__all__ = ["__version__", "errors", *_API]


def __getattr__(name: str) -> object:
    if name in _API:
        return getattr(importlib.import_module("quartet.api"), name)
    if name == "errors":
        return importlib.import_module("quartet.errors")
    raise AttributeError(f"module 'quartet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
