"""Check certificates, tokens, passwords and listen addresses of a config before any process starts.

For processes that `quartet train` starts, every file must be on this machine. Processes that are started separately, as in
containers, read their own files, so a file that is not on this machine is only reported.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

from quartet.buffer.redis_url import buffer_url
from quartet.config.layout import check_listen_address, listen_address, service_roles
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.errors import ConfigError
from quartet.preflight.findings import Finding, collect
from quartet.rpc.security.allow_list import GATEWAY, OPERATOR, PROCESSES
from quartet.system.secret_files import check_certificate, read_token, read_tokens


def check_port(key: str, listen: str) -> None:
    """Check that a process can listen at HOST:PORT. Raises ConfigError."""
    host, _, port = listen.rpartition(":")
    if port == "0":
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the server does, so that a port with lingering connections counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            raise ConfigError(
                f"{key} {listen}: cannot listen there ({error.strerror}); "
                "stop the process that uses the port, choose another port, or null for a free one"
            ) from None


def local_processes(config: Config) -> tuple[str, ...]:
    """Return the processes that `quartet train` starts on this machine, and itself."""
    roles = [role for role in service_roles(config) if getattr(config.services, role).address is None]
    roles += [Role.GENERATOR] if config.rollout.generators else []
    return (OPERATOR, *roles, Role.ORCHESTRATOR, *([GATEWAY] if config.gateway.enabled else []))


def check_access(config: Config) -> Iterator[Finding]:
    """Check every secret file and listen address of the config.

    Errors are unusable files, and unencrypted addresses beyond loopback unless plaintext is allowed.
    """
    yield from _check_addresses(config)
    yield from collect(_check_certificates, config)
    for key, path in _files(config).items():
        if _is_elsewhere(key, config) and not _exists(path):
            yield _not_here(key, path)
        else:
            yield from collect(_check, key, path, config)


def _check_addresses(config: Config) -> Iterator[Finding]:
    encrypted, allowed = config.security.certificates is not None, config.security.allow_plaintext
    generators = (Role.GENERATOR,) if config.has_generators else ()
    for role in (*service_roles(config), *generators, Role.ORCHESTRATOR):
        service = getattr(config.services, role)
        local = config.rollout.generators > 0 if role is Role.GENERATOR else getattr(service, "address", None) is None
        if _is_distributed(config) or local:
            yield from _check_address(f"services.{role}", listen_address(service), encrypted or allowed)
            yield from _check_address(f"services.{role}.metrics_listen", service.metrics_listen, encrypted or allowed)
    if config.gateway.enabled or _is_distributed(config):
        encrypted = config.gateway.certificate_file is not None
        yield from _check_address("gateway", config.gateway.listen, encrypted or allowed)


def _check_address(key: str, listen: str | None, allowed: bool) -> Iterator[Finding]:
    try:
        if listen is not None:
            check_listen_address(listen, allowed)
    except ConfigError as error:
        yield Finding("error", key, str(error))


def _check_certificates(config: Config) -> Iterator[Finding]:
    folder = config.security.certificates
    if folder is None:
        return
    processes = local_processes(config)
    if _is_distributed(config):
        processes = tuple(process for process in PROCESSES if _exists(folder / process))
        if not processes:
            yield _not_here("security.certificates", folder)
            return
    # Its libraries for TLS take a noticeable time to import, and most configs have no certificates.
    from quartet.rpc.security.certificates import check_certificates

    check_certificates(folder, processes)
    yield Finding("ok", f"security.certificates {folder}", f"usable for {', '.join(processes)}")


def _is_distributed(config: Config) -> bool:
    return config.services.orchestrator.address is not None


def _is_elsewhere(key: str, config: Config) -> bool:
    """Return whether a process that another command starts reads the file, possibly on another machine."""
    return _is_distributed(config) or (key.startswith("rollout.") and not config.rollout.generators)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # This user may not read the directory. Reading the file gives a clear error.


def _not_here(key: str, path: Path) -> Finding:
    return Finding("ok", f"{key} {path}", "not on this machine; processes on other machines read their own")


def _files(config: Config) -> dict[str, Path]:
    """Return the configured secret files by config key."""
    gateway = config.gateway
    results = {"security.token_file": config.security.token_file, "buffer.password_file": config.buffer.password_file}
    if gateway.enabled or _is_distributed(config):
        results |= {
            "gateway.token_file": gateway.token_file,
            "gateway.viewer_token_file": gateway.viewer_token_file,
            "gateway.certificate_file": gateway.certificate_file,
        }
    for section in ("vllm_server", "sglang_server"):
        server = getattr(config.rollout, section)
        if server is not None:
            results[f"rollout.{section}.api_key_file"] = server.api_key_file
    if config.has_agents and config.services.environment.address is None:
        results["environment.agent.api_key_file"] = config.environment.agent.api_key_file
    if config.has_traffic and config.rollout.generators:
        traffic = config.environment.traffic
        results["environment.traffic.viewer_keys_file"] = traffic.viewer_keys_file
        results["environment.traffic.operator_keys_file"] = traffic.operator_keys_file
    if config.services.reward.address is None:
        for key, source in config.reward.sources.items():
            for name, scorer in (("http", source.http), ("judge", source.judge)):
                if scorer is not None:
                    results[f"{key}.{name}.api_key_file"] = scorer.api_key_file
    return {key: path for key, path in results.items() if path is not None}


def _check(key: str, path: Path, config: Config) -> Iterator[Finding]:
    if key == "buffer.password_file":
        buffer_url(config)
    elif key == "gateway.certificate_file":
        assert config.gateway.key_file is not None  # The config requires both or neither.
        check_certificate(path, config.gateway.key_file)
    elif key.startswith("environment.traffic."):
        read_tokens(path, key)
    else:
        read_token(path, key)
    yield Finding("ok", f"{key} {path}", "usable")
