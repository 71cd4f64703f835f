"""`quartet certificates FOLDER`: a private certificate authority, and a certificate for every process.

The private key of the authority is discarded after signing, so that no further trusted certificate can be created. To add or
renew certificates, create all of them again.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from quartet.cli.console import make_console
from quartet.contract.status import MODEL_ROLES
from quartet.errors import ConfigError
from quartet.rpc.security.allow_list import GATEWAY, PROCESSES, REDIS
from quartet.rpc.security.certificates import Authority
from quartet.rpc.security.credentials import DOMAIN

console = make_console()
LOCAL_NAMES = ("localhost", "127.0.0.1")
"""Names of this machine, which browsers use to open the dashboard."""
_MODEL_ROLES = ", ".join(MODEL_ROLES)
REDIS_NAMES = ("redis", *LOCAL_NAMES)
"""Names in the certificate of Redis. Clients check the host name that they connect to."""


def make_certificates(folder: Path, days: int, shared: Sequence[str], redis_names: Sequence[str]) -> None:
    """Create the certificates in ``folder``, which must be new or empty.

    ``shared``: roles that share a process, such as critic+reward. Raises ConfigError for an unknown role, and for a folder that
    is not empty or cannot be written.
    """
    processes = _processes(shared)
    for name in redis_names:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.:-]*[A-Za-z0-9])?", name):
            raise ConfigError(
                f"--redis-name {name!r}: expected a host name or an address, such as redis.internal or 10.0.0.7"
            )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: not an empty folder; choose a new or empty one")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        authority = Authority(timedelta(days=days))
        for process, roles in processes.items():
            names = [f"{role}.{DOMAIN}" for role in roles]
            names += (*REDIS_NAMES, *redis_names) if process == REDIS else ()
            names += LOCAL_NAMES if process == GATEWAY else ()
            authority.issue(partial / process, names)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error.strerror}); choose a folder that you can write to"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    console.print(
        f"{folder}: certificates of {', '.join('+'.join(roles) for roles in processes.values())}, valid for {days} days\n"
        f"set security.certificates to {folder.absolute()} in the config of every process",
        soft_wrap=True,
    )


def _processes(shared: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return the roles of each process. Roles in ``shared`` use one process, named after the first of them."""
    groups = [group.split("+") for group in shared]
    together = [role for group in groups for role in group]
    for group in groups:
        for role in group:
            if role not in PROCESSES or together.count(role) > 1:
                raise ConfigError(
                    f"--process {'+'.join(group)}: {role or 'empty name'} is not a role, or is given twice; "
                    f"expected roles joined by +, such as critic+reward, from {_MODEL_ROLES}"
                )
            if len(group) > 1 and role not in MODEL_ROLES:
                raise ConfigError(
                    f"--process {'+'.join(group)}: the {role} needs a separate process; only {_MODEL_ROLES} may share one"
                )
    return {group[0]: group for group in [*groups, *([role] for role in PROCESSES if role not in together)]}
