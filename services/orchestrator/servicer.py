"""The orchestrator behind gRPC: convert, delegate, convert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

import grpc

from quartet.services.orchestrator.control.commands import Commands
from quartet.services.orchestrator.control.progress import Progress, ProgressBoard, RunState
from quartet.types import Role, ServiceStatus
from quartet.v1 import orchestrator_pb2, orchestrator_pb2_grpc

_STATES = {
    RunState.STARTING: orchestrator_pb2.RUN_STATE_STARTING,
    RunState.TRAINING: orchestrator_pb2.RUN_STATE_TRAINING,
    RunState.FINISHED: orchestrator_pb2.RUN_STATE_FINISHED,
    RunState.STOPPED: orchestrator_pb2.RUN_STATE_STOPPED,
    RunState.FAILED: orchestrator_pb2.RUN_STATE_FAILED,
    RunState.PAUSED: orchestrator_pb2.RUN_STATE_PAUSED,
    RunState.RECOVERING: orchestrator_pb2.RUN_STATE_RECOVERING,
}


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """OrchestratorService over a progress board; ``commands`` takes what users ask of the training thread."""

    role = Role.ORCHESTRATOR

    def __init__(self, board: ProgressBoard, commands: Commands, close: Callable[[], None] = lambda: None) -> None:
        """``close`` is called at the end of the process, where the training may be in the middle of a step."""
        self._board, self._commands, self._close = board, commands, close

    def register(self, server: grpc.Server) -> None:
        """Adds this servicer."""
        orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(self, server)

    def status(self) -> ServiceStatus:
        """What the orchestrator says of itself."""
        progress = self._board.current()
        return ServiceStatus(role=Role.ORCHESTRATOR, run=progress.run, step=progress.step)

    def abandoned(self) -> tuple[str, float]:
        """Nothing: its calls wait for no model."""
        return "", 0.0

    def close(self) -> None:
        """Ends what the training started; its thread has ended or ends with the process."""
        self._close()

    def GetProgress(
        self, request: orchestrator_pb2.GetProgressRequest, context: grpc.ServicerContext
    ) -> orchestrator_pb2.GetProgressResponse:
        """Where the run stands."""
        return orchestrator_pb2.GetProgressResponse(progress=_to_proto(self._board.current()))

    def WatchProgress(
        self, request: orchestrator_pb2.WatchProgressRequest, context: grpc.ServicerContext
    ) -> Iterator[orchestrator_pb2.WatchProgressResponse]:
        """Every step as it is committed and every change of phase."""
        for progress in self._board.watch(request.after_step):
            if not context.is_active():
                return
            if progress is not None:
                yield orchestrator_pb2.WatchProgressResponse(progress=_to_proto(progress))

    def Stop(
        self, request: orchestrator_pb2.StopRequest, context: grpc.ServicerContext
    ) -> orchestrator_pb2.StopResponse:
        """Stops after the step in hand."""
        self._commands.stop()
        return orchestrator_pb2.StopResponse()

    def Pause(
        self, request: orchestrator_pb2.PauseRequest, context: grpc.ServicerContext
    ) -> orchestrator_pb2.PauseResponse:
        """Waits after the step in hand."""
        self._commands.pause()
        return orchestrator_pb2.PauseResponse()

    def Resume(
        self, request: orchestrator_pb2.ResumeRequest, context: grpc.ServicerContext
    ) -> orchestrator_pb2.ResumeResponse:
        """Goes on."""
        self._commands.resume()
        return orchestrator_pb2.ResumeResponse()

    def Checkpoint(
        self, request: orchestrator_pb2.CheckpointRequest, context: grpc.ServicerContext
    ) -> orchestrator_pb2.CheckpointResponse:
        """Saves a checkpoint after the step in hand."""
        self._commands.checkpoint()
        return orchestrator_pb2.CheckpointResponse()

    def RollBack(
        self, request: orchestrator_pb2.RollBackRequest, context: grpc.ServicerContext
    ) -> orchestrator_pb2.RollBackResponse:
        """Goes back to a checkpoint after the step in hand."""
        self._commands.roll_back(request.step)
        return orchestrator_pb2.RollBackResponse()

    def GetSettings(
        self, request: orchestrator_pb2.GetSettingsRequest, context: grpc.ServicerContext
    ) -> orchestrator_pb2.GetSettingsResponse:
        """Which settings can be changed."""
        settings = [orchestrator_pb2.Setting(**asdict(setting)) for setting in self._commands.settings()]
        return orchestrator_pb2.GetSettingsResponse(settings=settings)

    def ChangeSettings(
        self, request: orchestrator_pb2.ChangeSettingsRequest, context: grpc.ServicerContext
    ) -> orchestrator_pb2.ChangeSettingsResponse:
        """Changes settings from the first step on that has not begun."""
        made = self._commands.change(request.values, request.user)
        return orchestrator_pb2.ChangeSettingsResponse(
            changes=[orchestrator_pb2.Change(**asdict(change)) for change in made]
        )


def _to_proto(progress: Progress) -> orchestrator_pb2.Progress:
    return orchestrator_pb2.Progress(
        run=progress.run,
        state=_STATES[progress.state],
        step=progress.step,
        total_steps=progress.total_steps,
        phase=progress.phase,
        scored=progress.scored,
        wanted=progress.wanted,
        metrics=progress.metrics,
        error=progress.error,
        exit_code=progress.exit_code,
        notes=progress.notes,
        recoveries=progress.recoveries,
        notes_before=progress.notes_before,
        alerts_before=progress.alerts_before,
        alerts=[
            orchestrator_pb2.Alert(
                step=alert.step,
                guard=alert.guard,
                action=alert.action,
                evidence=alert.evidence,
                remedy=alert.remedy,
            )
            for alert in progress.alerts
        ],
    )
