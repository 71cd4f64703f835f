"""Write the mutants of modules as JSON lines: python tests/mutation/generate.py MODULE_FILE...

It runs in the environment of Cosmic Ray, which makes the changes, and imports nothing else of the repository. A mutant that
differs from its module only in annotations, texts, or the options ``frozen`` and ``slots`` of data classes is left out.
"""

from __future__ import annotations

import ast
import difflib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

# Of the replacements of an operator by each other one, those that most resemble a mistake. Most others raise TypeError.
OPERATORS = (
    *(
        f"ReplaceBinaryOperator_{pair}"
        for pair in ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "Mod_Mul", "FloorDiv_Mul")
    ),
    *(f"ReplaceBinaryOperator_{pair}" for pair in ("Pow_Mul", "BitAnd_BitOr", "BitOr_BitAnd")),
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Lt_GtE", "Gt_LtE")),
    *(
        f"ReplaceComparisonOperator_{pair}"
        for pair in ("LtE_Gt", "GtE_Lt", "Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")
    ),
    *(f"ReplaceUnaryOperator_{name}" for name in ("Delete_USub", "Delete_Invert", "Delete_Not")),
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "AddNot",
    "NumberReplacer",
    "ZeroIterationForLoop",
    "RemoveDecorator",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
)


def mutants(path: Path) -> Iterator[dict[str, str]]:
    """Return each mutant of a module: its operator, the function around it, the changed lines, and the new source."""
    source = path.read_text(encoding="utf-8")
    nodes = list(ast_nodes(get_ast(source)))
    seen = {_behaviour(source)}
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        places = [node for node in nodes for _ in operator.mutation_positions(node)]
        for occurrence, node in enumerate(places):
            mutated = mutate_code(source, operator, occurrence)
            if mutated is None or _behaviour(mutated) in seen:
                continue
            seen.add(_behaviour(mutated))
            before, after = _changed_lines(source, mutated)
            function = ASTQuery(node).get_definition_name() or ""
            yield {
                "module": path.stem,
                "operator": name,
                "function": function,
                "before": before,
                "after": after,
                "source": mutated,
            }


def _behaviour(source: str) -> str:
    """Return the syntax tree without annotations, texts, and options of data classes that change no number."""
    tree = _Texts().visit(ast.parse(source))
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef():
                node.returns = None
                arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                for argument in (*arguments, node.args.vararg, node.args.kwarg):
                    if argument is not None:
                        argument.annotation = None
            case ast.AnnAssign():
                node.annotation = ast.Name("object", ast.Load())
            case ast.Call(func=ast.Name(id="dataclass")):
                node.keywords = []
    return ast.dump(tree)


class _Texts(ast.NodeTransformer):
    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("")


def _changed_lines(source: str, mutated: str) -> tuple[str, str]:
    """Return the first changed line before and after, without indentation. A removed line becomes an empty one.

    Empty lines do not count: with a decorator, the lines above it are removed.
    """
    lines = difflib.ndiff(source.splitlines(), mutated.splitlines())
    changes = [line for line in lines if line[:2] in ("- ", "+ ") and line[2:].strip()]
    before = next((line for line in changes if line.startswith("-")), "- ")
    after = next((line for line in changes if line.startswith("+")), "+ ")
    return before[2:].strip(), after[2:].strip()


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for mutant in mutants(Path(argument)):
            print(json.dumps(mutant))
