"""The gateway's process: ``python -m gateway --runs DIR``.

Checks who may come in and where it listens before it imports the app, serves until SIGTERM or SIGINT, and ends at once then:
it keeps nothing that could be lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import structlog

from gateway.settings import SHORTEST_TOKEN, GatewaySettings
from quartet.errors import ConfigError, QuartetError
from quartet.rpc.server import check_listen_address
from quartet.telemetry.logs import configure_logs
from quartet.telemetry.run_files import RunFiles

log = structlog.get_logger()

OPERATOR = "QUARTET_GATEWAY_TOKEN"
VIEWER = "QUARTET_GATEWAY_VIEWER_TOKEN"
"""Environment variables: what stands among a process's arguments, everyone on the machine can read."""
LARGEST_HEADERS = 32 * 1024
"""Bytes."""
KEEP_ALIVE = 30
"""Seconds for which a connection is kept between requests."""
GRACE = 1
"""Seconds that answers in hand have when it ends."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a signal, 2 for input that the user can mend, 1 for anything else."""
    options = _parser().parse_args(arguments)
    configure_logs("gateway")
    pipe = None if options.ready_fd is None else os.fdopen(options.ready_fd, "w", buffering=1)

    def announce(**message: Any) -> None:
        if pipe is not None:
            with suppress(OSError):  # Nobody listening is no error.
                pipe.write(json.dumps(message) + "\n")

    try:
        _serve(options, announce)
        return 0
    except Exception as error:
        code = 2 if isinstance(error, ConfigError) else 1
        log.error("ended", error=str(error), exc_info=None if isinstance(error, QuartetError) else error)
        announce(error=str(error) or type(error).__name__, exit_code=code)
        print(f"error: {error}", file=sys.stderr)
        return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gateway",
        description="Serves the REST API and the dashboard of the runs in a folder.",
        epilog=f"Tokens are taken from {OPERATOR} and, for those who may only look, {VIEWER}; without the first, one is drawn.",
    )
    parser.add_argument("--runs", required=True, type=Path, metavar="DIR", help="folder that holds the runs")
    parser.add_argument("--run", metavar="NAME", help="the run that it is started with")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="port 0 takes a free one")
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="HOST", help="a further name by which it may be addressed"
    )
    parser.add_argument(
        "--start-runs",
        action=argparse.BooleanOptionalAction,
        help="whether operators may start runs; by default only where it listens on loopback",
    )
    parser.add_argument("--requests-per-second", type=float, default=100.0, help="of one client, on average, at most")
    parser.add_argument("--allow-plaintext", action="store_true", help="listen beyond loopback without TLS")
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    return parser


def _serve(options: argparse.Namespace, announce: Any) -> None:
    drawn = OPERATOR not in os.environ
    token, viewer_token = _tokens()
    host, _, port = options.listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"listen {options.listen!r}: expected HOST:PORT")
    check_listen_address(options.listen, options.allow_plaintext)
    if not options.requests_per_second > 0:
        raise ConfigError(f"requests per second {options.requests_per_second}: expected more than 0")
    with _listening(options.listen) as (bound, address):
        settings = GatewaySettings(
            runs=options.runs,
            run=options.run,
            listen=address,
            operator_token=token,
            viewer_token=viewer_token,
            allowed_hosts=tuple(options.allow_host),
            start_runs=_is_loopback(address) if options.start_runs is None else options.start_runs,
            requests_per_second=options.requests_per_second,
            allow_plaintext=options.allow_plaintext,
        )
        url = f"http://{_reachable(address)}"
        with _told_to_the_run(settings, url):

            def ready() -> None:
                log.info("ready", address=address)
                announce(address=address)
                if options.ready_fd is None:
                    # One that was given is its giver's to tell: standard output may go anywhere.
                    print(f"{url}/#token={token}" if drawn else url, flush=True)

            _run(settings, bound, ready)
    log.info("stopped")


def _run(settings: GatewaySettings, bound: socket.socket, ready: Any) -> None:
    # NumPy's threads would do nothing here but take memory.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    import uvicorn

    from gateway.app import create_app
    from gateway.connections import Connection

    app = create_app(settings)

    class Server(uvicorn.Server):
        """Says when it is ready, and leaves signals to this process."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                ready()

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    server = Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            http=Connection,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            # Whom a proxy names is not believed: anybody could name anybody.
            proxy_headers=False,
            h11_max_incomplete_event_size=LARGEST_HEADERS,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=GRACE,
        )
    )

    def end() -> None:
        server.should_exit = True
        # Streams end by themselves then; otherwise the server would wait for them.
        if (stopping := getattr(app.state, "stopping", None)) is not None:
            stopping.set()

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end)
        await server.serve(sockets=[bound])

    asyncio.run(serve())
    if not server.started:
        raise RuntimeError("the server did not start; its log says why")


def _tokens() -> tuple[str, str | None]:
    """The operator's token and the viewer's, if any; taken out of the environment, which processes started here inherit."""
    given = {name: os.environ.pop(name, None) for name in (OPERATOR, VIEWER)}
    for name, token in given.items():
        if token is None:
            continue
        if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(
                f"{name}: has {len(token)} characters; expected at least {SHORTEST_TOKEN}, letters, digits and signs "
                "without spaces; unset it to have a token drawn"
            )
    if given[OPERATOR] is not None and given[OPERATOR] == given[VIEWER]:
        raise ConfigError(f"{VIEWER}: is the same as {OPERATOR}; expected another one, or none")
    return given[OPERATOR] or secrets.token_urlsafe(32), given[VIEWER]


@contextmanager
def _listening(listen: str) -> Iterator[tuple[socket.socket, str]]:
    """A socket that listens, and its HOST:PORT. Raises ConfigError."""
    host, _, port = listen.rpartition(":")
    name = host.strip("[]")
    try:
        family = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)[0][0]
        # Named TCP, connections are not held back by Nagle's algorithm: asyncio asks by this whether they may be.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((name, int(port)))
    except OSError as error:
        raise ConfigError(
            f"listen {listen}: the port is taken or the address is not this machine's ({error.strerror}); "
            "stop what listens there or choose another port"
        ) from None
    with bound:
        bound.set_inheritable(False)
        yield bound, f"{host}:{bound.getsockname()[1]}"


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _reachable(address: str) -> str:
    """Where a browser of this machine finds it: an address that means all of them is none to go to."""
    host, _, port = address.rpartition(":")
    try:
        return f"127.0.0.1:{port}" if ip_address(host.strip("[]")).is_unspecified else address
    except ValueError:
        return address


@contextmanager
def _told_to_the_run(settings: GatewaySettings, url: str) -> Iterator[None]:
    """Keeps ``gateway.json`` in the directory of the run that it was started with, for the command line, while it serves."""
    if settings.run is None:
        yield
        return
    from gateway.runs import Runs

    if settings.run not in Runs(settings.runs).names():
        raise ConfigError(f"run {settings.run!r}: there is none in {settings.runs}; give one that is")
    path = RunFiles(settings.runs / settings.run).gateway
    content = json.dumps({"url": url, "token": settings.operator_token}) + "\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)
        # For its owner alone from the first moment on.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        partial.rename(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); let the gateway's user write there") from None
    try:
        yield
    finally:
        with suppress(OSError):
            # Another one may have taken its place.
            if path.read_text(encoding="utf-8") == content:
                path.unlink()


if __name__ == "__main__":
    code = main()
    # Nothing is left to be written: waiting for threads that still ask somebody would only take time.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
