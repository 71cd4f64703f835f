"""A run with a proxy in every network link, and faults at a moment of a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.contract.status import MODEL_ROLES
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.step import StepTransaction
from tests.faults.proxy import Proxy
from tests.training.runs import Fleet, fleet

STEPS = 4
FAULT_STEP = 3
"""Step in which faults happen. It comes after a checkpoint, so the run has steps to replay and steps to lose."""
SETTINGS: dict[str, Any] = {
    "run": {"steps": STEPS},
    "checkpoint": {"every_steps": 2},
    "algorithm": {"score": {"normalize": "running"}},
}
SERVICES_TO_BUFFER = "services-to-buffer"
MOMENTS = {"generate": "_prepare", "update": "_update", "commit": "_commit"}
"""Methods of StepTransaction, by the name of the moment."""


@dataclass(frozen=True)
class Network:
    """The services of a run, the orchestrator's config, and the links between them by name."""

    services: Fleet
    config: Config
    links: dict[str, Proxy]


@contextmanager
def network(config: Config) -> Iterator[Network]:
    """Start the services of ``config``, with a proxy in every link."""
    assert config.buffer.url is not None
    socket = config.buffer.url.removeprefix("unix://")
    with ExitStack() as stack:
        links = {name: stack.enter_context(Proxy(socket)) for name in ("buffer", SERVICES_TO_BUFFER)}
        services_config = config.model_copy(update={"buffer": _at(config, links[SERVICES_TO_BUFFER])})
        services = stack.enter_context(fleet(services_config))
        for role in MODEL_ROLES:
            links[str(role)] = stack.enter_context(Proxy(getattr(services.config.services, role).address))
        overrides = [f"services.{role}.address={links[str(role)].address}" for role in MODEL_ROLES]
        orchestrator_config = load_config(RunFiles(config.run_directory).config, overrides)
        yield Network(services, orchestrator_config.model_copy(update={"buffer": _at(config, links["buffer"])}), links)


def _at(config: Config, proxy: Proxy) -> Any:
    return config.buffer.model_copy(update={"url": f"redis://{proxy.address}/0"})


@contextmanager
def fault_at(moment: str, inject: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Call ``inject`` once, right before a moment of step FAULT_STEP."""
    method = MOMENTS[moment]
    original, pending = getattr(StepTransaction, method), [inject]

    def before(self: Any, step: int, *arguments: Any) -> Any:
        if step == FAULT_STEP and pending:
            pending.pop()()
        return original(self, step, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(StepTransaction, method, before)
        yield
    assert not pending, "no fault was injected"


def heal_after(seconds: float, proxy: Proxy) -> None:
    """End the faults of a proxy after some seconds, in a separate thread."""
    timer = threading.Timer(seconds, proxy.heal)
    timer.daemon = True
    timer.start()
