"""`quartet certificates FOLDER`: an authority of one's own, and a certificate for every process.

The authority's key signs and is thrown away: nobody can make a further certificate that the processes trust. Who needs others
makes all of them anew.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from quartet.errors import ConfigError
from quartet.rpc.security.allow_list import GATEWAY, PROCESSES, REDIS
from quartet.rpc.security.certificate_authority import Authority
from quartet.rpc.security.credentials import DOMAIN
from quartet.types import MODEL_ROLES

console = Console()
HERE = ("localhost", "127.0.0.1")
"""Names of this machine: browsers open the gateway's dashboard by them."""
_SHARING = ", ".join(MODEL_ROLES)
REDIS_NAMES = ("redis", *HERE)
"""Names by which the rollout buffer is reached: its clients know it by its address."""


def certificates(folder: Path, days: int, shared: Sequence[str], redis_names: Sequence[str]) -> None:
    """Makes ``folder``, which must be new or empty. ``shared``: processes of several roles, such as critic+reward.

    Raises ConfigError for roles that there are not, and for a folder that is in use or cannot be written.
    """
    processes = _processes(shared)
    for name in redis_names:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.:-]*[A-Za-z0-9])?", name):
            raise ConfigError(
                f"--redis-name {name!r}: expected a host name or an address, such as redis.internal or 10.0.0.7"
            )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: is in use; give a folder that is new or empty, or remove it first")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        authority = Authority(timedelta(days=days))
        for process, roles in processes.items():
            names = [f"{role}.{DOMAIN}" for role in roles]
            names += (*REDIS_NAMES, *redis_names) if process == REDIS else ()
            names += HERE if process == GATEWAY else ()
            authority.issue(partial / process, names)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); give a folder of yours") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    console.print(
        f"{folder}: certificates of {', '.join('+'.join(roles) for roles in processes.values())}, good for {days} days\n"
        f"set security.certificates to {folder.absolute()} in the config of every process",
        highlight=False,
        soft_wrap=True,
    )


def _processes(shared: Sequence[str]) -> dict[str, Sequence[str]]:
    """By process its roles: each has one of its own unless it is in one of ``shared``, which goes by its first."""
    groups = [group.split("+") for group in shared]
    together = [role for group in groups for role in group]
    for group in groups:
        for role in group:
            if role not in PROCESSES or together.count(role) > 1:
                raise ConfigError(
                    f"--process {'+'.join(group)}: {role or 'nothing'} is no role, or stands twice; expected roles joined by +, "
                    f"such as critic+reward, out of {_SHARING}"
                )
            if len(group) > 1 and role not in MODEL_ROLES:
                raise ConfigError(
                    f"--process {'+'.join(group)}: the {role} has a process of its own; {_SHARING} may share one"
                )
    return {group[0]: group for group in [*groups, *([role] for role in PROCESSES if role not in together)]}
