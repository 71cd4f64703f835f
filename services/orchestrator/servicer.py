"""OrchestratorService: converts requests and responses, and passes commands to the training thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from quartet.codec.messages import to_message
from quartet.contract.status import GeneratorInfo, Role, ServiceStatus
from quartet.services.orchestrator.control.live_settings import LiveSettings
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.control.run_control import RunControl
from quartet.v1 import orchestrator_pb2, orchestrator_pb2_grpc


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """OrchestratorService over the progress board, the commands and the live settings of a run."""

    role = Role.ORCHESTRATOR

    def __init__(
        self,
        board: ProgressBoard,
        control: RunControl,
        live_settings: LiveSettings,
        close: Callable[[], None] = lambda: None,
        generators: Callable[[], Sequence[GeneratorInfo]] = tuple,
    ) -> None:
        """``close`` is called at the end of the process, when training may be in the middle of a step.

        ``generators`` returns those in separate processes, at once.
        """
        self._board, self._control, self._live_settings, self._close = board, control, live_settings, close
        self._generators = generators

    def register(self, server: grpc.Server) -> None:
        """Add this servicer to ``server``."""
        orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(self, server)

    def status(self) -> ServiceStatus:
        """Return the status of the orchestrator."""
        progress = self._board.current()
        return ServiceStatus(role=Role.ORCHESTRATOR, run=progress.run, step=progress.step)

    def failure(self) -> str:
        """Return "": the run handles its errors."""
        return ""

    def abandoned(self) -> tuple[str, float]:
        """Return no work: calls to the orchestrator never wait for a model."""
        return "", 0.0

    def close(self) -> None:
        """Stop the work that training started. Its thread has ended, or ends with the process."""
        self._close()

    def GetProgress(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Return the progress of the run."""
        return to_message(orchestrator_pb2.GetProgressResponse, progress=self._board.current())

    def WatchProgress(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """Stream the progress at every committed step and every change of phase."""
        for progress in self._board.watch(request.after_step):
            if not context.is_active():
                return
            if progress is not None:
                yield to_message(orchestrator_pb2.WatchProgressResponse, progress=progress)

    def Stop(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Stop the run after the current step."""
        self._control.stop()
        return orchestrator_pb2.StopResponse()

    def Pause(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Pause the run after the current step."""
        self._control.pause()
        return orchestrator_pb2.PauseResponse()

    def Resume(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Continue a paused run."""
        self._control.resume()
        return orchestrator_pb2.ResumeResponse()

    def Checkpoint(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Save a checkpoint after the current step."""
        self._control.checkpoint()
        return orchestrator_pb2.CheckpointResponse()

    def RollBack(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Return to a checkpoint after the current step."""
        self._control.roll_back(request.step)
        return orchestrator_pb2.RollBackResponse()

    def Profile(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Profile the next steps."""
        self._control.profile(request.steps)
        return orchestrator_pb2.ProfileResponse()

    def GetSettings(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Return the settings that can be changed now."""
        return to_message(orchestrator_pb2.GetSettingsResponse, settings=self._live_settings.settings())

    def ChangeSettings(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Change settings from the next step on."""
        changes = self._live_settings.change(dict(request.values), request.user)
        return to_message(orchestrator_pb2.ChangeSettingsResponse, changes=changes)

    def GetGenerators(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Return the generators in separate processes."""
        return to_message(orchestrator_pb2.GetGeneratorsResponse, generators=self._generators())
