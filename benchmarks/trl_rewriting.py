"""Replacement of expressions inside a function of TRL, to switch off a difference that is in the middle of a long method."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def rewritten(function: Callable[..., Any], replacements: dict[str, str]) -> Callable[..., Any]:
    """Return ``function``, compiled again after each key of ``replacements`` (an expression) is replaced by its value.

    Raises LookupError if an expression is missing, because another version of the function may not have the difference.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    replacer = _Replacer(replacements)
    tree = ast.fix_missing_locations(replacer.visit(tree))
    missing = replacements.keys() - replacer.replaced
    if missing:
        raise LookupError(f"{function.__qualname__}: {sorted(missing)} not found; written for another version of it")
    namespace: dict[str, Any] = {}
    exec(compile(tree, f"<{function.__qualname__} rewritten>", "exec"), function.__globals__, namespace)  # noqa: S102 - TRL's own source
    return namespace[function.__name__]


class _Replacer(ast.NodeTransformer):
    def __init__(self, replacements: dict[str, str]) -> None:
        self._replacements, self.replaced = replacements, set[str]()

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr):
            text = ast.unparse(node)
            if text in self._replacements:
                self.replaced.add(text)
                return ast.parse(self._replacements[text], mode="eval").body
        return self.generic_visit(node)
