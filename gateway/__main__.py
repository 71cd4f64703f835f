"""The gateway process: ``python -m quartet.gateway --runs DIR``, or ``--config CONFIG`` for one run.

It validates tokens and the listen address before it imports the app, and serves until SIGTERM or SIGINT. It has no state, so it
exits without further cleanup.
"""

from __future__ import annotations

import quartet.system.sys_path  # noqa: F401 - first: it keeps the working directory from shadowing libraries

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

from quartet.buffer.redis_url import buffer_url, environment_overrides
from quartet.config.deployment import GatewayConfig
from quartet.config.layout import check_listen_address
from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.config.section import is_loopback
from quartet.errors import ConfigError, QuartetError
from quartet.gateway.settings import GatewaySettings
from quartet.rpc.security.allow_list import GATEWAY
from quartet.rpc.security.credentials import Credentials
from quartet.run_directory.run_files import RunFiles
from quartet.system.secret_files import check_certificate, check_token, read_token
from quartet.telemetry.logs import configure_logs

log = structlog.get_logger()

OPERATOR_TOKEN_VARIABLE = "QUARTET_GATEWAY_TOKEN"
VIEWER_TOKEN_VARIABLE = "QUARTET_GATEWAY_VIEWER_TOKEN"
"""Tokens come from environment variables: every user of a machine can read the arguments of a process."""
PUBLISHED_ADDRESS_VARIABLE = "QUARTET_GATEWAY_PUBLISHED"
"""HOST:PORT at which a container's port is published, for the printed link."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gateway. Return the exit status: 0 after a signal, 2 for invalid input, 1 for any other error."""
    options = _parser().parse_args(arguments)
    configure_logs("gateway")
    pipe = None if options.ready_fd is None else os.fdopen(options.ready_fd, "w", buffering=1)

    def announce(**message: Any) -> None:
        if pipe is not None:
            with suppress(OSError):  # The launcher may have closed its end.
                pipe.write(json.dumps(message) + "\n")

    try:
        _serve(options, announce)
        return 0
    except Exception as error:
        code = 2 if isinstance(error, ConfigError) else 1
        log.error("gateway failed", error=str(error), exc_info=None if isinstance(error, QuartetError) else error)
        announce(error=str(error) or type(error).__name__, exit_code=code)
        print(f"error: {error}", file=sys.stderr)
        return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quartet.gateway",
        description="Serve the REST API and the dashboard of the runs in a folder.",
        epilog=f"The operator's token comes from {OPERATOR_TOKEN_VARIABLE}, a read-only token from {VIEWER_TOKEN_VARIABLE}. "
        "Without an operator's token, a random one is generated and printed.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--runs", type=Path, metavar="DIR", help="folder that contains the runs")
    source.add_argument(
        "--config",
        type=Path,
        action="append",
        help="config of one run, with gateway and security settings; repeat to overlay several files",
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="address to listen on; port 0 selects a free port (default: 127.0.0.1:0)"
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="HOST",
        help="additional host name that clients may use; may be repeated",
    )
    parser.add_argument("--allow-plaintext", action="store_true", help="listen on a non-loopback address without TLS")
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
    credentials = None if config is None else Credentials(GATEWAY, config.security)
    with _bound_socket(listen) as (bound, address):
        settings = GatewaySettings(
            runs=options.runs if config is None else config.run.directory,
            run=None if config is None else config.run.name,
            listen=address,
            operator_token=token or secrets.token_urlsafe(32),
            viewer_token=viewer_token,
            allowed_hosts=(*section.allowed_hosts, *options.allow_host),
            start_runs=is_loopback(address.rpartition(":")[0]) if section.start_runs is None else section.start_runs,
            requests_per_second=section.max_requests_per_second,
            buffer_url=None if config is None or credentials is None else buffer_url(config, credentials.folder),
            credentials=credentials,
            certificate=section.certificate_file,
            key=section.key_file,
        )
        public_address = os.environ.get(PUBLISHED_ADDRESS_VARIABLE) or _reachable(address)
        url = f"{'http' if settings.certificate is None else 'https'}://{public_address}"
        # Without a launcher, the command line gets the URL and the token from its user instead of from gateway.json.
        with _gateway_file(settings, url) if options.ready_fd is not None else nullcontext():

            def ready() -> None:
                log.info("ready", address=address)
                announce(address=address)
                if options.ready_fd is None:
                    # Only a generated token is printed: standard output may end up anywhere.
                    print(url if token else f"{url}/#token={settings.operator_token}", flush=True)

            _run(settings, bound, ready)
    log.info("stopped")


def _run(settings: GatewaySettings, bound: socket.socket, ready: Any) -> None:
    # NumPy's thread pool would only use memory here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    import uvicorn

    from quartet.gateway.app import create_app
    from quartet.gateway.server import server_config

    app = create_app(settings)

    class Server(uvicorn.Server):
        """A uvicorn server that reports when it is ready, and does not install signal handlers."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                ready()

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    server = Server(server_config(app, settings))

    def stop() -> None:
        server.should_exit = True
        # Event streams must end, otherwise the server would wait for them.
        if (stopping := getattr(app.state, "stopping", None)) is not None:
            stopping.set()

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        await server.serve(sockets=[bound])

    asyncio.run(serve())
    if not server.started:
        raise RuntimeError("the server did not start; see the log above")


def _config(options: argparse.Namespace) -> Config | None:
    """Return the run's config, or None if the gateway serves a folder of runs."""
    if options.config is None:
        return None
    first, *overlays = options.config
    return load_config(first, environment_overrides(), overlays)


def _check_plaintext(listen: str, allowed: bool) -> None:
    try:
        check_listen_address(listen, allowed)
    except ConfigError:
        raise ConfigError(
            f"listen {listen}: not a loopback address, and requests are not encrypted; listen on 127.0.0.1, set "
            "gateway.certificate_file and gateway.key_file, or, in a trusted network or behind a TLS proxy, set "
            "security.allow_plaintext: true (--allow-plaintext)"
        ) from None


def _tokens(section: GatewayConfig) -> tuple[str | None, str | None]:
    """Return the operator's and the viewer's token, if any. Removes them from the environment, which child processes inherit."""
    given = {name: os.environ.pop(name, None) for name in (OPERATOR_TOKEN_VARIABLE, VIEWER_TOKEN_VARIABLE)}
    files = {OPERATOR_TOKEN_VARIABLE: section.token_file, VIEWER_TOKEN_VARIABLE: section.viewer_token_file}
    for (name, token), key in zip(given.items(), ("token_file", "viewer_token_file"), strict=True):
        path = files[name]
        if path is not None:
            given[name] = read_token(path, f"gateway.{key}")
        elif token is not None:
            check_token(token, name)
    if given[OPERATOR_TOKEN_VARIABLE] is not None and given[OPERATOR_TOKEN_VARIABLE] == given[VIEWER_TOKEN_VARIABLE]:
        raise ConfigError("the viewer's token is the same as the operator's; set a different viewer's token, or none")
    return given[OPERATOR_TOKEN_VARIABLE], given[VIEWER_TOKEN_VARIABLE]


@contextmanager
def _bound_socket(listen: str) -> Iterator[tuple[socket.socket, str]]:
    """Bind a socket. Yields it with its HOST:PORT. Raises ConfigError."""
    host, _, port = listen.rpartition(":")
    name = host.strip("[]")
    try:
        family = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)[0][0]
        # asyncio disables Nagle's algorithm only for sockets with an explicit TCP protocol.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((name, int(port)))
    except OSError as error:
        raise ConfigError(
            f"listen {listen}: the port is in use, or the address does not belong to this machine ({error.strerror}); "
            "stop the process that listens there, or choose another port"
        ) from None
    with bound:
        bound.set_inheritable(False)
        yield bound, f"{host}:{bound.getsockname()[1]}"


def _reachable(address: str) -> str:
    """Return the address for a browser on this machine: an unspecified address such as 0.0.0.0 cannot be opened."""
    host, _, port = address.rpartition(":")
    try:
        return f"127.0.0.1:{port}" if ip_address(host.strip("[]")).is_unspecified else address
    except ValueError:
        return address


@contextmanager
def _gateway_file(settings: GatewaySettings, url: str) -> Iterator[None]:
    """Keep ``gateway.json`` in the run's directory while the gateway serves. The command line reads URL and token from it."""
    if settings.run is None:
        yield
        return
    from quartet.gateway.readers.run_catalog import RunCatalog

    if settings.run not in RunCatalog(settings.runs).names():
        raise ConfigError(
            f"run {settings.run!r}: does not exist in {settings.runs}; start the run first, or correct run.name"
        )
    path = RunFiles(settings.runs / settings.run).gateway
    content = json.dumps({"url": url, "token": settings.operator_token}) + "\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)
        # Created with these permissions, so that only its owner can read it at any time.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        partial.rename(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}); give the gateway's user write permission"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):
            # Another gateway may have replaced the file.
            if path.read_text(encoding="utf-8") == content:
                path.unlink()


if __name__ == "__main__":
    code = main()
    # Exit at once: threads that still wait for a process must not delay the exit.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
