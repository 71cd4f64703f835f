"""A run of which every part talks to every other through a network that can fail, and what must be true of it afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from quartet.config import Config, load_config
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.step import StepTransaction
from quartet.types import MODEL_ROLES
from tests.faults.proxy import Proxy
from tests.training.runs import Fleet, fleet

STEPS = 4
STRUCK = 3
"""The step in which faults strike: after a checkpoint, so that there is something to replay and something to lose."""
SHORT: dict[str, Any] = {
    "run": {"steps": STEPS},
    "checkpoint": {"every_steps": 2},
    "algorithm": {"score": {"normalize": "running"}},
}
BUFFER_OF_THE_SERVICES = "buffer-of-the-services"
LINKS = (*map(str, MODEL_ROLES), "buffer", BUFFER_OF_THE_SERVICES)
"""From the orchestrator to each service and to Redis; from actor and critic to Redis."""
MOMENTS = {"generate": "_prepare", "update": "_update", "commit": "_commit"}


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
        links = {name: stack.enter_context(Proxy(socket)) for name in ("buffer", BUFFER_OF_THE_SERVICES)}
        theirs = config.model_copy(update={"buffer": _at(config, links[BUFFER_OF_THE_SERVICES])})
        services = stack.enter_context(fleet(theirs))
        for role in MODEL_ROLES:
            links[str(role)] = stack.enter_context(Proxy(getattr(services.config.services, role).address))
        overrides = [f"services.{role}.address={links[str(role)].address}" for role in MODEL_ROLES]
        ours = load_config(RunFiles(config.run_directory).config, overrides)
        yield Network(services, ours.model_copy(update={"buffer": _at(config, links["buffer"])}), links)


def _at(config: Config, proxy: Proxy) -> Any:
    return config.buffer.model_copy(update={"url": f"redis://{proxy.address}/0"})


@contextmanager
def struck(moment: str, strike: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ``strike`` happen once, right before a moment of step STRUCK."""
    method = MOMENTS[moment]
    real, left = getattr(StepTransaction, method), [strike]

    def before(self: Any, step: int, *arguments: Any) -> Any:
        if step == STRUCK and left:
            left.pop()()
        return real(self, step, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(StepTransaction, method, before)
        yield
    assert not left, "the fault did not strike"


def heal_after(seconds: float, proxy: Proxy) -> None:
    """Restore the network after so many seconds."""
    timer = threading.Timer(seconds, proxy.heal)
    timer.daemon = True
    timer.start()
