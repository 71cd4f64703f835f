"""Run tests against one mutant in a child process that replaces a module in memory. No file changes."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

PACKAGE = "quartet.ppo"
ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "quartet" / "ppo"
MAX_SECONDS = 7200.0
"""Limit of the wall time. A mutant that computes reaches its limit of CPU time first, except beside much other work."""
TESTS = (ROOT / "tests" / "unit" / "ppo", ROOT / "tests" / "parity" / "losses")


class _Replacement(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loader of one module from a string."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source, f"<{self.name}>", "exec"), module.__dict__)  # noqa: S102


class Child:
    """Process that runs ``tests`` with the module replaced, until a test fails or it has used ``cpu_seconds``.

    ``failed``: the file of the test that failed, once there is an outcome; "" if none failed.
    """

    def __init__(self, module: str, source: str, tests: Sequence[str], cpu_seconds: int) -> None:
        self.failed = ""
        self._deadline = time.monotonic() + MAX_SECONDS
        self._report, report = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            status = 1
            try:
                # Seconds of the processor, so that other work on the machine does not change a result.
                resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
                status = _run(f"{PACKAGE}.{module}", source, tests, report)
            finally:
                os._exit(status)
        os.close(report)

    def outcome(self) -> str | None:
        """Return "killed" or "survived"; None while the tests run. Raises TimeoutError after ``MAX_SECONDS``."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            with open(self._report, encoding="utf-8") as file:
                self.failed = file.read()
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        if time.monotonic() < self._deadline:
            return None
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._report)
        raise TimeoutError(f"a mutant did not end in {MAX_SECONDS:g} s; repeat the command with less other work")


def preload() -> None:
    """Import what all tests need, except the package that changes, so that a child starts in a fraction of a second."""
    os.environ |= {"OMP_NUM_THREADS": "1", "GRPC_ENABLE_FORK_SUPPORT": "0"}
    import hypothesis
    import pytest  # noqa: F401
    import torch  # noqa: F401

    import tests.conftest  # noqa: F401

    # A failing example is enough. Making it smaller takes most of the time of a failing test. A slow machine is no failure.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    checks = list(hypothesis.HealthCheck)
    thorough = hypothesis.settings.get_profile("thorough")
    hypothesis.settings.register_profile("mutation", thorough, phases=phases, suppress_health_check=checks)
    hypothesis.settings.load_profile("mutation")
    for name in [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]:
        raise RuntimeError(f"{name} is imported before the mutant; remove the import from tests/conftest.py")


def tests_of(module: str) -> list[str]:
    """Return the test files that import a module of the package, directly or through another one: direct imports first."""
    imports = {path.stem: _imports(path) for path in SOURCES.glob("*.py")}
    closure = {module}
    while more := {name for name, targets in imports.items() if targets & closure} - closure:
        closure |= more
    files = [path for folder in TESTS for path in sorted(folder.glob("test_*.py"))]
    reached = {path: _imports(path) for path in files}
    direct = [path for path in files if module in reached[path]]
    through = [path for path in files if path not in direct and (reached[path] & closure or path.parent == TESTS[1])]
    return [str(path.relative_to(ROOT)) for path in (*direct, *through)]


def _imports(path: Path) -> set[str]:
    """Return the names of the package's modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}."):
            names.add(node.module.rsplit(".", 1)[1])  # type: ignore[union-attr]
    return names


class _Reporter:
    """Plugin of pytest that writes the file of the failed test to ``report``."""

    def __init__(self, report: int) -> None:
        self._report: int | None = report

    def pytest_exception_interact(self, node: pytest.Item | pytest.Collector) -> None:
        if self._report is not None:
            os.write(self._report, os.path.relpath(node.path, ROOT).encode())
            os.close(self._report)
            self._report = None


def _run(name: str, source: str, tests: Sequence[str], report: int) -> int:
    import pytest

    with open(os.devnull, "w") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    sys.dont_write_bytecode = True
    sys.meta_path.insert(0, _Replacement(name, source))
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=0", "--rootdir", str(ROOT)]
    return int(pytest.main([*options, *tests], plugins=[_Reporter(report)]))
