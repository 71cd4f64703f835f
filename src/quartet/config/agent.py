"""Settings of agents: programs with a loop of their own, which call the policy over the OpenAI protocol."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator

from quartet.config.deployment import HostPort
from quartet.config.rewards import ServerUrl
from quartet.config.section import Count, FunctionName, Positive, Section

MAX_AGENTS = 1024
"""Maximum number of agents that run at once. Each holds a thread of the environment service."""
ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound.
"""Hosts that stand for all addresses of a machine."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _variable_name(value: str) -> str:
    if not _VARIABLE.fullmatch(value):
        raise ValueError(f"{value!r}: expected the name of an environment variable")
    return value


class AgentConfig(Section):
    """The agent of trajectories with environment.kind agent. It runs once for each trajectory, gets the fields of the prompt's
    line, and calls the policy at a base URL with a key. Exactly one of command, url and function names it. See docs/agents.md."""

    command: Annotated[tuple[str, ...], Field(min_length=1, max_length=1024)] | None = None
    """Program and its arguments, without a shell. It gets the fields as JSON on standard input, and base URL, key and model in
    OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL. Its result is the last line that it prints."""
    url: ServerUrl | None = None
    """Address of a service that runs the agent: https://HOST:PORT/PATH with TLS, or http://HOST:PORT/PATH without. It gets a POST
    for each trajectory, and its response is the result. Without TLS only loopback addresses are allowed, unless
    security.allow_plaintext is set."""
    function: FunctionName | None = None
    """Async function, as package.module:callable. It gets what it names of fields, base_url, api_key, model, seed and session."""
    api_key_file: Path | None = None
    """File with a key of the service at `url`, which is sent as a bearer token. Null: it asks for none."""
    certificate_authority_file: Path | None = None
    """PEM file of the authority that signed the certificate of the service at `url`. Null: those of the system."""
    pass_variables: Annotated[tuple[Annotated[str, AfterValidator(_variable_name)], ...], Field(max_length=256)] = ()
    """Names of environment variables of the environment service that a command or function gets. Others are left out, except for
    those of paths, languages and time zones."""
    timeout_seconds: Positive = 600.0
    """Time limit of one run of the agent, in seconds. After that, it is ended, and the outcome is timeout."""
    max_branches: Annotated[int, Field(ge=1, le=MAX_AGENTS)] = 16
    """Maximum number of branches of a trajectory: token sequences that requests begin which do not continue an earlier one."""
    max_tokens: Count | None = None
    """Maximum number of tokens that the policy generates in all branches of a trajectory. Null: only rollout.max_turns and
    rollout.max_response_tokens, the limit of each branch, apply."""
    max_concurrent: Annotated[int, Field(ge=1, le=MAX_AGENTS)] = 64
    """Maximum number of agents that run at once. Further trajectories wait."""
    listen: HostPort = None
    """HOST:PORT at which each process that generates listens for agents. Port 0 selects a free port. Null: a free port on
    127.0.0.1."""
    advertise: HostPort = None
    """HOST:PORT at which agents reach that process. Port 0 is the port at which it listens. Null: the address in `listen`, or the
    machine's own address if it listens at all."""

    @property
    def kind(self) -> str:
        """Name of the setting that names the agent; "" if none does."""
        return next((name for name in ("command", "url", "function") if getattr(self, name) is not None), "")

    @property
    def name(self) -> str:
        """Name of the agent for logs, the status and messages. Arguments of a command and paths of a URL may be secret."""
        if self.command is not None:
            return f"agent {Path(self.command[0]).name}"
        return f"agent {self.function}" if self.url is None else f"agent at {urlsplit(self.url).netloc}"

    @field_validator("command", mode="before")
    @classmethod
    def _is_list(cls, command: Any) -> Any:
        if isinstance(command, str):
            words = json.dumps(command.split())
            raise ValueError(f"expected a list of the program and its arguments, such as {words}; there is no shell")
        return command

    @field_validator("command")
    @classmethod
    def _is_command(cls, command: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if command is not None and (not command[0].strip() or any("\0" in argument for argument in command)):
            raise ValueError("expected the program first, and no null character")
        return command

    def base_url(self, address: str, encrypted: bool, own_host: Callable[[], str] = lambda: "") -> str:
        """Return the base URL of the endpoint of a process that listens at ``address``, HOST:PORT, for its agents.

        ``own_host`` returns an address of this machine for a process that listens at all of them, without brackets.
        """
        host, _, port = (self.advertise or address).rpartition(":")
        port = address.rpartition(":")[2] if port == "0" else port
        if host.strip("[]") in ALL_ADDRESSES and (own := own_host()):
            host = f"[{own}]" if ":" in own else own
        address = f"{host}:{port}"
        return f"http{'s' if encrypted else ''}://{address}/v1"

    def check(self) -> None:
        """Raise ValueError, with the name of the setting first, if the settings contradict each other."""
        given = [name for name in ("command", "url", "function") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]}: both name the agent; give one of command, url and function")
        for name in ("api_key_file", "certificate_authority_file"):
            if getattr(self, name) is not None and self.url is None:
                raise ValueError(f"{name}: not used without url; set url, or remove it")
        if self.pass_variables and self.url is not None:
            raise ValueError("pass_variables: not used with url, whose agents run elsewhere; remove it")
