"""Checks of an agent that is a command or an HTTP service, and of the port at which agents call the policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from quartet.config.root import Config
from quartet.environments.agent_command import command_problem
from quartet.preflight.findings import Finding, collect
from quartet.preflight.security_checks import check_port


def check_agent(config: Config) -> Iterator[Finding]:
    """Check the agent that this machine runs, if there is one, and the port of the endpoint.

    The agent itself is not run: it needs the policy.
    """
    if not config.has_agents and not config.has_traffic:
        return
    agent = config.environment.agent
    generates_here = (
        config.services.actor.address is None if not config.has_generators else config.rollout.generators > 0
    )
    if agent.listen is not None and generates_here:
        yield from collect(check_port, "environment.agent.listen", agent.listen)
    if config.services.environment.address is not None or not config.has_agents:
        return
    if agent.command is not None:
        where = f"environment.agent.command {agent.command[0]}"
        if problem := command_problem(agent.command):
            yield Finding("error", where, problem)
            return
        yield Finding("ok", where, "can be started")
        for argument in agent.command[1:]:
            # A path of the file system, and not of a module or an option.
            if Path(argument).suffix in _PROGRAMS and not argument.startswith("-") and not Path(argument).exists():
                yield Finding(
                    "warning",
                    f"environment.agent.command {argument}",
                    f"no such file in {Path.cwd()}; correct the path",
                )
    if agent.url is not None:
        # Its libraries take a noticeable time to import.
        from quartet.rpc.service_channel import accepts_connections

        parts = urlsplit(agent.url)
        address = f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
        if accepts_connections(address):
            yield Finding("ok", f"environment.agent.url {agent.url}", "accepts connections")
        else:
            yield Finding(
                "warning",
                f"environment.agent.url {agent.url}",
                f"no service responds at {address}; start it before the run, or correct the address",
            )


_PROGRAMS = (".py", ".js", ".mjs", ".ts", ".sh", ".rb", ".jar")
"""Suffixes of files that a command names."""
