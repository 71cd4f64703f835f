"""What a config names to let processes in, looked at before anything is started: certificates, tokens, passwords.

Of processes that `quartet train` starts all of it has to be there. Where each is started by itself, as in containers, each has
its own part, so what is not on this machine is only noted.
"""

from __future__ import annotations

from pathlib import Path

from quartet.buffer.redis_url import buffer_url
from quartet.config import Config
from quartet.errors import ConfigError
from quartet.rpc.security.allow_list import GATEWAY, OPERATOR, PROCESSES
from quartet.rpc.security.certificates import check_certificates
from quartet.rpc.server import check_listen_address
from quartet.secret_files import check_certificate, read_token
from quartet.topology import listen_address, model_roles
from quartet.types import Role


def local_processes(config: Config) -> tuple[str, ...]:
    """Those that `quartet train` starts here, and itself."""
    roles = [role for role in model_roles(config) if getattr(config.services, role).address is None]
    return (OPERATOR, *roles, Role.ORCHESTRATOR, *([GATEWAY] if config.gateway.enabled else []))


def check_access(config: Config) -> list[str]:
    """Looks at every file that ``security``, ``buffer`` and ``gateway`` name; says what it found, one line each.

    And at every address that is listened on: beyond loopback it is encrypted, or meant not to be. Raises ConfigError.
    """
    _check_addresses(config)
    notes = _check_certificates(config)
    for key, path in _files(config).items():
        if _each_by_itself(config) and not _exists(path):
            notes.append(_not_here(key, path))
            continue
        _check(key, path, config)
        notes.append(f"{key} {path}: can be used")
    return notes


def _check_addresses(config: Config) -> None:
    encrypted, allowed = config.security.certificates is not None, config.security.allow_plaintext
    for role in (*model_roles(config), Role.ORCHESTRATOR):
        service = getattr(config.services, role)
        if _each_by_itself(config) or getattr(service, "address", None) is None:
            _check_address(f"services.{role}", listen_address(service), encrypted or allowed)
            _check_address(f"services.{role}.metrics_listen", service.metrics_listen, encrypted or allowed)
    if config.gateway.enabled or _each_by_itself(config):
        _check_address("gateway", config.gateway.listen, config.gateway.certificate_file is not None or allowed)


def _check_address(key: str, listen: str | None, allowed: bool) -> None:
    try:
        if listen is not None:
            check_listen_address(listen, allowed)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _check_certificates(config: Config) -> list[str]:
    folder = config.security.certificates
    if folder is None:
        return []
    processes = local_processes(config)
    if _each_by_itself(config):
        processes = tuple(process for process in PROCESSES if _exists(folder / process))
        if not processes:
            return [_not_here("security.certificates", folder)]
    check_certificates(folder, processes)
    return [f"security.certificates {folder}: those of {', '.join(processes)} can be used"]


def _each_by_itself(config: Config) -> bool:
    return config.services.orchestrator.address is not None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # Somebody's who may not look: reading it says so.


def _not_here(key: str, path: Path) -> str:
    return f"{key} {path}: not on this machine; the processes that are started elsewhere read theirs"


def _files(config: Config) -> dict[str, Path]:
    """The secrets that are to be read, by key."""
    gateway = config.gateway
    found = {"security.token_file": config.security.token_file, "buffer.password_file": config.buffer.password_file}
    if gateway.enabled or _each_by_itself(config):
        found |= {
            "gateway.token_file": gateway.token_file,
            "gateway.viewer_token_file": gateway.viewer_token_file,
            "gateway.certificate_file": gateway.certificate_file,
        }
    return {key: path for key, path in found.items() if path is not None}


def _check(key: str, path: Path, config: Config) -> None:
    if key == "buffer.password_file":
        buffer_url(config)
    elif key == "gateway.certificate_file":
        assert config.gateway.key_file is not None  # They are given both or not at all.
        check_certificate(path, config.gateway.key_file)
    else:
        read_token(path, key)
