"""gRPC servicer of the orchestrator: convert, delegate, convert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

import grpc

from quartet.services.orchestrator.control.live_settings import LiveSettings
from quartet.services.orchestrator.control.progress import Progress, ProgressBoard, RunState
from quartet.services.orchestrator.control.run_control import RunControl
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
    """OrchestratorService over the progress board, the commands and the live settings of a run."""

    role = Role.ORCHESTRATOR

    def __init__(
        self,
        board: ProgressBoard,
        control: RunControl,
        live_settings: LiveSettings,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """``close`` is called at the end of the process, when training may be in the middle of a step."""
        self._board, self._control, self._live_settings, self._close = board, control, live_settings, close

    def register(self, server: grpc.Server) -> None:
        """Add this servicer to ``server``."""
        orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(self, server)

    def status(self) -> ServiceStatus:
        """Return the status of the orchestrator."""
        progress = self._board.current()
        return ServiceStatus(role=Role.ORCHESTRATOR, run=progress.run, step=progress.step)

    def abandoned(self) -> tuple[str, float]:
        """Return no work: calls to the orchestrator never wait for a model."""
        return "", 0.0

    def close(self) -> None:
        """Stop the work that training started. Its thread has ended, or ends with the process."""
        self._close()

    def GetProgress(
        self, request: orchestrator_pb2.GetProgressRequest, context: grpc.ServicerContext
    ) -> orchestrator_pb2.GetProgressResponse:
        """Return the progress of the run."""
        return orchestrator_pb2.GetProgressResponse(progress=_to_proto(self._board.current()))

    def WatchProgress(
        self, request: orchestrator_pb2.WatchProgressRequest, context: grpc.ServicerContext
    ) -> Iterator[orchestrator_pb2.WatchProgressResponse]:
        """Stream the progress at every committed step and every change of phase."""
        for progress in self._board.watch(request.after_step):
            if not context.is_active():
                return
            if progress is not None:
                yield orchestrator_pb2.WatchProgressResponse(progress=_to_proto(progress))

    def Stop(
        self, request: orchestrator_pb2.StopRequest, context: grpc.ServicerContext
    ) -> orchestrator_pb2.StopResponse:
        """Stop the run after the current step."""
        self._control.stop()
        return orchestrator_pb2.StopResponse()

    def Pause(
        self, request: orchestrator_pb2.PauseRequest, context: grpc.ServicerContext
    ) -> orchestrator_pb2.PauseResponse:
        """Pause the run after the current step."""
        self._control.pause()
        return orchestrator_pb2.PauseResponse()

    def Resume(
        self, request: orchestrator_pb2.ResumeRequest, context: grpc.ServicerContext
    ) -> orchestrator_pb2.ResumeResponse:
        """Continue a paused run."""
        self._control.resume()
        return orchestrator_pb2.ResumeResponse()

    def Checkpoint(
        self, request: orchestrator_pb2.CheckpointRequest, context: grpc.ServicerContext
    ) -> orchestrator_pb2.CheckpointResponse:
        """Save a checkpoint after the current step."""
        self._control.checkpoint()
        return orchestrator_pb2.CheckpointResponse()

    def RollBack(
        self, request: orchestrator_pb2.RollBackRequest, context: grpc.ServicerContext
    ) -> orchestrator_pb2.RollBackResponse:
        """Return to a checkpoint after the current step."""
        self._control.roll_back(request.step)
        return orchestrator_pb2.RollBackResponse()

    def GetSettings(
        self, request: orchestrator_pb2.GetSettingsRequest, context: grpc.ServicerContext
    ) -> orchestrator_pb2.GetSettingsResponse:
        """Return the settings that can be changed now."""
        settings = [orchestrator_pb2.Setting(**asdict(setting)) for setting in self._live_settings.settings()]
        return orchestrator_pb2.GetSettingsResponse(settings=settings)

    def ChangeSettings(
        self, request: orchestrator_pb2.ChangeSettingsRequest, context: grpc.ServicerContext
    ) -> orchestrator_pb2.ChangeSettingsResponse:
        """Change settings from the next step on."""
        made = self._live_settings.change(request.values, request.user)
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
