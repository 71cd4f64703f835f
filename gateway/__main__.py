"""The gateway's process: ``python -m quartet.gateway --runs DIR``, or with a run ``--config CONFIG``.

Checks who may come in and where it listens before it imports the app, serves until SIGTERM or SIGINT, and ends at once then:
it keeps nothing that could be lost.
"""

from __future__ import annotations

import quartet.import_path  # noqa: F401 - before the libraries whose names a file in the working directory may have

# isort: split
import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import structlog

from quartet.buffer.redis_url import buffer_url, settings_of_environment
from quartet.config import Config, GatewayConfig, load_config
from quartet.errors import ConfigError, QuartetError
from quartet.gateway.settings import GatewaySettings
from quartet.rpc.security.allow_list import GATEWAY
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.rpc.server import check_listen_address
from quartet.run_directory.run_files import RunFiles
from quartet.secret_files import check_certificate, check_token, read_token
from quartet.telemetry.logs import configure_logs
from quartet.topology import is_loopback

log = structlog.get_logger()

OPERATOR = "QUARTET_GATEWAY_TOKEN"
VIEWER = "QUARTET_GATEWAY_VIEWER_TOKEN"
"""Environment variables: what stands among a process's arguments, everyone on the machine can read."""
PUBLISHED = "QUARTET_GATEWAY_PUBLISHED"
"""Another: HOST:PORT at which a container's port is to be found from outside, for the link that is printed."""
MAX_HEADERS = 32 * 1024
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
        prog="python -m quartet.gateway",
        description="Serves the REST API and the dashboard of the runs in a folder.",
        epilog=f"Tokens are taken from {OPERATOR} and, for those who may only look, {VIEWER}; without the first, one is drawn.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--runs", type=Path, metavar="DIR", help="folder that holds the runs")
    what.add_argument(
        "--config",
        type=Path,
        action="append",
        help="a run's config instead: its gateway and security sections say the rest; may be repeated",
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="port 0 takes a free one, on 127.0.0.1 unless told otherwise"
    )
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="HOST", help="a further name by which it may be addressed"
    )
    parser.add_argument("--allow-plaintext", action="store_true", help="listen beyond loopback without TLS")
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    return parser


def _serve(options: argparse.Namespace, announce: Any) -> None:
    config = _config(options)
    section = GatewayConfig() if config is None else config.gateway
    token, viewer_token = _tokens(section)
    listen = options.listen or section.listen or "127.0.0.1:0"
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"listen {listen!r}: expected HOST:PORT")
    if section.certificate_file is None:
        _check_plaintext(listen, options.allow_plaintext or (config is not None and config.security.allow_plaintext))
    elif section.key_file is not None:
        check_certificate(section.certificate_file, section.key_file)
    credentials = LOCAL if config is None else Credentials(GATEWAY, config.security)
    with _listening(listen) as (bound, address):
        settings = GatewaySettings(
            runs=options.runs if config is None else config.run.directory,
            run=None if config is None else config.run.name,
            listen=address,
            operator_token=token or secrets.token_urlsafe(32),
            viewer_token=viewer_token,
            allowed_hosts=(*section.allowed_hosts, *options.allow_host),
            start_runs=is_loopback(address.rpartition(":")[0]) if section.start_runs is None else section.start_runs,
            requests_per_second=section.max_requests_per_second,
            buffer_url=None if config is None else buffer_url(config, credentials.folder),
            credentials=credentials,
            certificate=section.certificate_file,
            key=section.key_file,
        )
        place = os.environ.get(PUBLISHED) or _reachable(address)
        url = f"{'http' if settings.certificate is None else 'https'}://{place}"
        # Elsewhere than beside its run's files, whoever asks gives its URL and a token.
        with _told_to_the_run(settings, url) if options.ready_fd is not None else nullcontext():

            def ready() -> None:
                log.info("ready", address=address)
                announce(address=address)
                if options.ready_fd is None:
                    # One that was given is its giver's to tell: standard output may go anywhere.
                    print(url if token else f"{url}/#token={settings.operator_token}", flush=True)

            _run(settings, bound, ready)
    log.info("stopped")


def _run(settings: GatewaySettings, bound: socket.socket, ready: Any) -> None:
    # NumPy's threads would do nothing here but take memory.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    import uvicorn

    from quartet.gateway.app import create_app
    from quartet.gateway.connections import Connection
    from quartet.gateway.handshakes import encrypted

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

    protocol: Any = Connection
    if settings.certificate is not None and settings.key is not None:
        protocol = encrypted(settings.certificate, settings.key)
    server = Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            http=protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            # Whom a proxy names is not believed: anybody could name anybody.
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEADERS,
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


def _config(options: argparse.Namespace) -> Config | None:
    """The config of the run that it is started with, if any."""
    if options.config is None:
        return None
    first, *layers = options.config
    return load_config(first, settings_of_environment(), layers)


def _check_plaintext(listen: str, allowed: bool) -> None:
    try:
        check_listen_address(listen, allowed)
    except ConfigError:
        raise ConfigError(
            f"listen {listen}: not a loopback address, and requests are not encrypted; listen on 127.0.0.1, give "
            "gateway.certificate_file and gateway.key_file, or, inside a network that you trust or behind a proxy that encrypts, "
            "security.allow_plaintext true (--allow-plaintext)"
        ) from None


def _tokens(section: GatewayConfig) -> tuple[str | None, str | None]:
    """The operators' token and the viewers', if any; taken out of the environment, which processes started here inherit."""
    given = {name: os.environ.pop(name, None) for name in (OPERATOR, VIEWER)}
    files = {OPERATOR: section.token_file, VIEWER: section.viewer_token_file}
    for (name, token), key in zip(given.items(), ("token_file", "viewer_token_file"), strict=True):
        path = files[name]
        if path is not None:
            given[name] = read_token(path, f"gateway.{key}")
        elif token is not None:
            check_token(token, name)
    if given[OPERATOR] is not None and given[OPERATOR] == given[VIEWER]:
        raise ConfigError("the token of viewers is the same as that of operators; expected another one, or none")
    return given[OPERATOR], given[VIEWER]


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
    from quartet.gateway.runs.catalog import Runs

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
