"""Fixtures for the engines that hold their own weights: those whose package this environment has."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quartet.engines.engine import Engine
from tests.detached_engines.tiny_checkpoint import write_config

if TYPE_CHECKING:
    from tests.detached_engines.vllm_engine import BreakableVLLM

ENGINES = ("torch", "vllm")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the model's config.json."""
    return write_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def vllm(folder: Path) -> Iterator[BreakableVLLM]:
    """Start vLLM once for all tests: it takes half a minute."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM: make engines")
    from tests.detached_engines.vllm_engine import vllm_engine

    engine = vllm_engine(folder)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def torch(folder: Path) -> Iterator[Engine]:
    """Create Quartet's own engine with its own weights."""
    pytest.importorskip("peft", reason="needs quartet-rlhf[train]: make test")
    from tests.detached_engines.torch_engine import torch_engine

    engine = torch_engine(folder)
    yield engine
    engine.close()


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Return each engine in turn."""
    result: Engine = request.getfixturevalue(request.param)
    return result
