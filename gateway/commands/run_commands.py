"""Commands to active runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from quartet.config.live_settings import LIVE_SETTINGS
from quartet.contract.control import Setting
from quartet.errors import Cancelled, ConfigError, InvalidRequest, MismatchError, NoResponse, QuartetError
from quartet.gateway.commands.audit_log import audited
from quartet.gateway.http.http_errors import ProblemError, WrongField
from quartet.gateway.monitors.run_progress import END_STATES, RunMonitor
from quartet.gateway.readers.run_catalog import RunCatalog
from quartet.gateway.schemas import State
from quartet.rpc.clients import OrchestratorClient

T = TypeVar("T")


class RunCommands:
    """Sender of commands to the orchestrators of runs. Records each command in the run's audit log. Thread-safe.

    Each command raises ProblemError or QuartetError if the run refuses it. Each returns why it could not be recorded in the
    audit log, or an empty string.
    """

    def __init__(self, catalog: RunCatalog, monitor: RunMonitor) -> None:
        self._catalog, self._monitor = catalog, monitor

    def send(self, run: str, user: str, command: Literal["Pause", "Resume", "Stop", "Checkpoint"]) -> str:
        """Send a command without arguments."""
        return self._command(run, user, command.lower(), {}, lambda client: client.command(command))[1]

    def roll_back(self, run: str, user: str, step: int) -> str:
        """Restore the run from the checkpoint of a step."""
        return self._command(run, user, "rollback", {"step": step}, lambda client: client.roll_back(step))[1]

    def profile(self, run: str, user: str, steps: int) -> str:
        """Profile the next steps of the run."""
        return self._command(run, user, "profile", {"steps": steps}, lambda client: client.profile(steps))[1]

    def settings(self, run: str) -> list[Setting]:
        """Return the settings that can be changed now; empty if the run is not active."""
        orchestrator = self._monitor.orchestrator(run)
        if orchestrator is None or self._monitor.progress(run) is None:
            return []
        with _closed_at_the_end(run):
            return orchestrator.settings()

    def change_settings(self, run: str, user: str, values: Mapping[str, float]) -> str:
        """Change settings from the next step on: either all of them or none."""
        if not values:
            *names, last = (setting.name for setting in LIVE_SETTINGS)
            raise WrongField("body", f"contains no setting; send {', '.join(names)} or {last}")
        return self._command(run, user, "set", dict(values), lambda client: client.change_settings(values, user))[1]

    def _command(
        self,
        run: str,
        user: str,
        command: str,
        details: dict[str, Any],
        send: Callable[[OrchestratorClient], T],
    ) -> tuple[T, str]:
        """Return the orchestrator's response, and why the command could not be recorded in the audit log.

        If the orchestrator refuses a value, its message begins with the key of that value in ``details``.
        """
        with audited(self._catalog.find(run), user, command, details) as problems:
            orchestrator = self._active_orchestrator(run)
            try:
                with _closed_at_the_end(run):
                    response = send(orchestrator)
            except InvalidRequest as error:
                text = _without_address(error, orchestrator)
                fields = [f"body.{name}" for name in details if text.startswith(name)]
                raise WrongField(fields[0] if fields else "body", text) from None
            except MismatchError:
                raise ProblemError(
                    409,
                    f"run {run!r}: its orchestrator has a version that does not support this command; stop the run, "
                    "then continue it with --resume",
                ) from None
            except QuartetError as error:
                if isinstance(error, NoResponse):
                    raise ProblemError(503, f"run {run!r}: its orchestrator does not respond; try again") from None
                raise type(error)(_without_address(error, orchestrator)) from None
        return response, problems[0]

    def _active_orchestrator(self, run: str) -> OrchestratorClient:
        orchestrator = self._monitor.orchestrator(run)
        progress = self._monitor.progress(run)
        if orchestrator is None or progress is None or progress.state in END_STATES:
            latest = self._monitor.latest(run)
            if latest.state == State.FINISHED:
                now = f"it is finished, {latest.step} of {latest.total_steps} steps"
            else:
                now = (
                    f"it starts, or ended after step {latest.step} of {latest.total_steps}; try again, or continue it: "
                    "quartet train CONFIG --resume, or with Compose docker compose up"
                )
            raise ProblemError(409, f"run {run!r}: not active, so it accepts no commands: {now}")
        return orchestrator


def _without_address(error: QuartetError, orchestrator: OrchestratorClient) -> str:
    """Return an error's text without the orchestrator's address, which the caller cannot change."""
    text, address = str(error), f"orchestrator at {orchestrator.address}: "
    # The method's name follows the address.
    return text.removeprefix(address).partition(": ")[2] if text.startswith(address) else text


@contextmanager
def _closed_at_the_end(run: str) -> Iterator[None]:
    """Raise ConfigError if the channel is closed: the run has another orchestrator now, or none."""
    try:
        yield
    except Cancelled:
        raise ConfigError(f"run {run!r}: has just ended") from None
