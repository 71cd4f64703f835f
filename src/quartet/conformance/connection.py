"""Connect to the service under test, and explain why that fails."""

from __future__ import annotations

import queue
import socket
import ssl
from pathlib import Path

import grpc

from quartet.conformance.target import Target
from quartet.errors import ConfigError
from quartet.rpc.security.credentials import DOMAIN
from quartet.system.secret_files import AUTHORITY, CERTIFICATE, KEY

CONNECT_SECONDS = 10.0
"""Time to connect."""
PROBE_SECONDS = 2.0
"""Time for a TLS handshake that explains a failure."""


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of HOST:PORT, or of [IPV6]:PORT. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    example = "expected HOST:PORT, such as 127.0.0.1:50061"
    if "://" in address:
        raise ConfigError(
            f"address {address}: {example}, without {address.partition('://')[0]}://; TLS: --certificates"
        )
    if not host or "/" in host or (":" in host and not host.startswith("[")):
        raise ConfigError(f"address {address}: {example}")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"address {address}: {example}, with a port from 1 to 65535")
    return host.strip("[]"), int(port)


def connect(target: Target) -> None:
    """Wait until the channel to a service is ready. Raises ConfigError with the reason if it is not."""
    host, port = host_and_port(target.address)
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise ConfigError(
            f"address {target.address}: cannot connect ({reason}); start the service, or correct the address"
        ) from None
    if not _is_ready(target.channel):
        raise ConfigError(f"address {target.address}: {_explain(target, host, port)}")


def _is_ready(channel: grpc.Channel) -> bool:
    """Return whether a channel connects. A first failure is final: the port is open, so another attempt fails likewise."""
    states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
    channel.subscribe(states.put, try_to_connect=True)
    try:
        while (state := states.get(timeout=CONNECT_SECONDS)) is not grpc.ChannelConnectivity.READY:
            if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                return False
    except queue.Empty:
        return False
    finally:
        channel.unsubscribe(states.put)
    return True


def _explain(target: Target, host: str, port: int) -> str:
    folder, expected = target.credentials.folder, f"{target.role}.{DOMAIN}"
    if folder is None:
        if isinstance(_handshake(host, port, _unverified(), expected), ssl.SSLError | OSError):
            return "what listens there is no gRPC server; correct the address"
        return "the server uses TLS; give --certificates"
    error = _handshake(host, port, _unverified(folder), expected)
    if error is not None:
        return "the server does not use TLS; leave out --certificates, or correct the address"
    error = _handshake(host, port, _verified(folder), expected)
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the certificate of the server is refused ({error.verify_message}); expected one for {expected} from the authority "
            f"of {folder}"
        )
    return f"the server refuses the certificate of {folder}, or is no gRPC server"


def _handshake(host: str, port: int, context: ssl.SSLContext, name: str) -> Exception | None:
    """Return the error of a TLS handshake, or None. Without a client certificate, a server of TLS 1.3 refuses it only later."""
    try:
        with socket.create_connection((host, port), PROBE_SECONDS) as plain:
            context.wrap_socket(plain, server_hostname=name).close()
    except (ssl.SSLError, OSError) as error:
        return error
    return None


def _unverified(folder: Path | None = None) -> ssl.SSLContext:
    """Return a context that takes every certificate: it only shows whether a server uses TLS. No data is sent."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if folder is not None:
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    return context


def _verified(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / AUTHORITY))
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    context.set_alpn_protocols(["h2"])
    return context
