"""The choice of a sandbox: the one that is asked for, or the first that works on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache, partial

from quartet.errors import ConfigError
from quartet.verifiers.errors import SandboxFailed
from quartet.verifiers.sandbox.bubblewrap import Bubblewrap, candidate_interpreters
from quartet.verifiers.sandbox.container import Container
from quartet.verifiers.sandbox.process import START_SECONDS, Limits, Sandbox, request

KINDS = ("auto", "bubblewrap", "docker", "podman")
DEFAULT_IMAGE = "python:3-slim"
_TRIAL = "print(6 * 7)"


@cache
def open_sandbox(kind: str = "auto", python: str = "", image: str = DEFAULT_IMAGE) -> Sandbox:
    """Return a sandbox that has run a program on this machine.

    ``kind`` is one of ``KINDS``; auto takes the first that works. ``python`` is the interpreter for bubblewrap, "" to choose
    one that the sandbox may read. ``image`` is the image of containers. Raises SandboxFailed with a reason for each that was
    tried, and ConfigError for another ``kind``.
    """
    if kind not in KINDS:
        raise ConfigError(f"sandbox {kind!r}: expected one of {', '.join(KINDS)}")
    reasons = []
    for create in _choices(kind, python, image):
        try:
            sandbox = create()
            _try(sandbox)
        except SandboxFailed as error:
            reasons.append(str(error))
            continue
        return sandbox
    raise SandboxFailed(
        f"no sandbox works here: {'; '.join(reasons)}. Install bubblewrap and allow user namespaces, or start Docker or Podman "
        f"and pull {image}; see docs/verifiers.md"
    )


def _choices(kind: str, python: str, image: str) -> Iterator[Callable[[], Sandbox]]:
    if kind in ("auto", "bubblewrap"):
        for path in [python] if python else candidate_interpreters():
            yield partial(Bubblewrap, path)
    for engine in ("docker", "podman"):
        if kind in ("auto", engine):
            yield partial(Container, engine, image)


def _try(sandbox: Sandbox) -> None:
    """Run a program. Raises SandboxFailed if that does not work."""
    limits = Limits()
    with sandbox.launch(limits) as process:
        process.begin(request(limits, _TRIAL), closes_input=True)
        status = process.wait(time.monotonic() + START_SECONDS)
        if status != 0 or process.output != b"42\n":
            raise SandboxFailed(
                f"{sandbox.name}: a trial program failed with exit status {status}: {process.errors[-300:]}"
            )
