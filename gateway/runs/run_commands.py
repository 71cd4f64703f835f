"""What operators ask of runs that go on."""

from __future__ import annotations

from typing import Any

from quartet.errors import InvalidRequest, MismatchError, NoResponse, QuartetError
from quartet.gateway.audit import audited
from quartet.gateway.http_errors import ProblemError, WrongField
from quartet.gateway.monitors.run_monitor import ENDS, Live, Orchestrator
from quartet.gateway.runs.catalog import Runs
from quartet.gateway.schemas import Change, ChangeSettings, SettingInfo
from quartet.v1 import orchestrator_pb2


class Commands:
    """Passes commands on to the orchestrators, and notes each in the run's audit. Safe to use from several threads."""

    def __init__(self, runs: Runs, live: Live) -> None:
        self._runs, self._live = runs, live

    def pause(self, run: str, who: str) -> str:
        """The run waits after the step in hand. Raises ProblemError, as all of these, and QuartetError.

        Returns, as these do, why the command is not in the audit, or nothing.
        """
        return self._command(run, who, "pause", {}, "Pause", orchestrator_pb2.PauseRequest())[1]

    def resume(self, run: str, who: str) -> str:
        """The run goes on."""
        return self._command(run, who, "resume", {}, "Resume", orchestrator_pb2.ResumeRequest())[1]

    def stop(self, run: str, who: str) -> str:
        """The run ends after the step in hand, its policy saved."""
        return self._command(run, who, "stop", {}, "Stop", orchestrator_pb2.StopRequest())[1]

    def checkpoint(self, run: str, who: str) -> str:
        """A checkpoint is saved after the step in hand."""
        return self._command(run, who, "checkpoint", {}, "Checkpoint", orchestrator_pb2.CheckpointRequest())[1]

    def roll_back(self, run: str, who: str, step: int) -> str:
        """The run goes back to the checkpoint of ``step``."""
        request = orchestrator_pb2.RollBackRequest(step=step)
        return self._command(run, who, "rollback", {"step": step}, "RollBack", request)[1]

    def settings(self, run: str) -> list[SettingInfo]:
        """What can be changed now; nothing unless the run goes on."""
        orchestrator = self._live.orchestrator(run)
        if orchestrator is None or self._live.progress(run) is None:
            return []
        answer = orchestrator.call("GetSettings", orchestrator_pb2.GetSettingsRequest())
        return [
            SettingInfo.model_validate({"name": item.name, "value": item.value, "low": item.low, "high": item.high})
            for item in answer.settings
        ]

    def change(self, run: str, who: str, wanted: ChangeSettings) -> list[Change]:
        """Changes settings, all or none, from the next step on."""
        values = {name: value for name, value in wanted.model_dump(by_alias=True).items() if value is not None}
        if not values:
            raise WrongField(
                "body", "names no setting; give kl_coefficient, actor.learning_rate or critic.learning_rate"
            )
        request = orchestrator_pb2.ChangeSettingsRequest(values=values, who=who)
        answer, _ = self._command(run, who, "set", dict(values), "ChangeSettings", request)
        return [
            Change(setting=item.setting, before=item.before, after=item.after, step=item.step, who=item.who, at=item.at)
            for item in answer.changes
        ]

    def _command(
        self,
        run: str,
        who: str,
        command: str,
        details: dict[str, Any],
        title: str,
        request: Any,
    ) -> tuple[Any, str]:
        """The orchestrator's answer, and why the command is not in the audit.

        Where it refuses a value, its text begins with the one of ``details`` that is to blame.
        """
        with audited(self._runs.find(run), who, command, details) as noted:
            orchestrator = self._of(run)
            try:
                answer = orchestrator.call(title, request)
            except InvalidRequest as error:
                text = _what_it_said(error, orchestrator, title)
                named = [f"body.{name}" for name in details if text.startswith(name)]
                raise WrongField(named[0] if named else "body", text) from None
            except MismatchError:
                raise ProblemError(
                    409,
                    f"run {run!r}: its orchestrator is of a version that does not know this command; stop the run, "
                    "then go on with --resume",
                ) from None
            except QuartetError as error:
                if isinstance(error, NoResponse):
                    raise ProblemError(503, f"run {run!r}: its orchestrator does not answer; try again") from None
                raise type(error)(_what_it_said(error, orchestrator, title)) from None
        return answer, noted.problem

    def _of(self, run: str) -> Orchestrator:
        orchestrator = self._live.orchestrator(run)
        progress = self._live.progress(run)
        if orchestrator is None or progress is None or progress.state in ENDS:
            raise ProblemError(
                409,
                f"run {run!r}: does not go on now, so it takes no commands; quartet train CONFIG --resume takes it up again",
            )
        return orchestrator


def _what_it_said(error: QuartetError, orchestrator: Orchestrator, title: str) -> str:
    """Without who said it: where a process listens is nothing that whoever commands can change."""
    return str(error).removeprefix(f"orchestrator at {orchestrator.address}: {title}: ")
