"""Messages of the orchestrator: progress, commands and live settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from quartet.contract.control import Alert, Progress, RunState, Setting, SettingChange
from quartet.contract.status import GeneratorInfo, GeneratorState
from quartet.errors import InvalidRequest
from quartet.v1 import orchestrator_pb2

_STATES = {
    RunState.STARTING: orchestrator_pb2.RUN_STATE_STARTING,
    RunState.TRAINING: orchestrator_pb2.RUN_STATE_TRAINING,
    RunState.FINISHED: orchestrator_pb2.RUN_STATE_FINISHED,
    RunState.STOPPED: orchestrator_pb2.RUN_STATE_STOPPED,
    RunState.FAILED: orchestrator_pb2.RUN_STATE_FAILED,
    RunState.PAUSED: orchestrator_pb2.RUN_STATE_PAUSED,
    RunState.RECOVERING: orchestrator_pb2.RUN_STATE_RECOVERING,
}
_STATE_NAMES = {number: state for state, number in _STATES.items()}

_GENERATOR_STATES = {
    GeneratorState.READY: orchestrator_pb2.GENERATOR_STATE_READY,
    GeneratorState.LOST: orchestrator_pb2.GENERATOR_STATE_LOST,
    GeneratorState.REFUSED: orchestrator_pb2.GENERATOR_STATE_REFUSED,
}
_GENERATOR_STATE_NAMES = {number: state for state, number in _GENERATOR_STATES.items()}

Command = Literal["Stop", "Pause", "Resume", "Checkpoint"]
"""A command without arguments, by the name of its RPC."""


def progress_to_proto(progress: Progress) -> orchestrator_pb2.Progress:
    """Convert the progress of a run."""
    return orchestrator_pb2.Progress(
        run=progress.run,
        state=_STATES[progress.state],
        step=progress.step,
        total_steps=progress.total_steps,
        phase=progress.phase,
        num_scored=progress.num_scored,
        num_expected=progress.num_expected,
        metrics=progress.metrics,
        error=progress.error,
        exit_code=progress.exit_code,
        notes=progress.notes,
        alerts=[orchestrator_pb2.Alert(**asdict(alert)) for alert in progress.alerts],
        recoveries=progress.recoveries,
        notes_before=progress.notes_before,
        alerts_before=progress.alerts_before,
    )


def progress_from_proto(message: orchestrator_pb2.Progress) -> Progress:
    """Convert the progress of a run. Raises InvalidRequest for an unknown state."""
    state = _STATE_NAMES.get(message.state)
    if state is None:
        raise InvalidRequest(f"progress.state {message.state}: unknown")
    return Progress(
        run=message.run,
        state=state,
        step=message.step,
        total_steps=message.total_steps,
        phase=message.phase,
        num_scored=message.num_scored,
        num_expected=message.num_expected,
        metrics=dict(message.metrics),
        error=message.error,
        exit_code=message.exit_code,
        notes=list(message.notes),
        alerts=[Alert(each.step, each.guard, each.action, each.evidence, each.remedy) for each in message.alerts],
        recoveries=message.recoveries,
        notes_before=message.notes_before,
        alerts_before=message.alerts_before,
    )


def get_progress_request() -> orchestrator_pb2.GetProgressRequest:
    """Return the request for the progress."""
    return orchestrator_pb2.GetProgressRequest()


def get_progress_response(progress: Progress) -> orchestrator_pb2.GetProgressResponse:
    """Return the response with the progress."""
    return orchestrator_pb2.GetProgressResponse(progress=progress_to_proto(progress))


def progress_of_response(
    message: orchestrator_pb2.GetProgressResponse | orchestrator_pb2.WatchProgressResponse,
) -> Progress:
    """Return the progress in a response. Raises InvalidRequest for an unknown state."""
    return progress_from_proto(message.progress)


def watch_progress_request(after_step: int) -> orchestrator_pb2.WatchProgressRequest:
    """Return the request for a stream of progress after a step."""
    return orchestrator_pb2.WatchProgressRequest(after_step=after_step)


def watched_step_from_proto(message: orchestrator_pb2.WatchProgressRequest) -> int:
    """Return the step after which a caller watches the progress."""
    return int(message.after_step)


def watch_progress_response(progress: Progress) -> orchestrator_pb2.WatchProgressResponse:
    """Return one message of a stream of progress."""
    return orchestrator_pb2.WatchProgressResponse(progress=progress_to_proto(progress))


def command_request(command: Command) -> Any:
    """Return the request of a command."""
    return getattr(orchestrator_pb2, f"{command}Request")()


def command_response(command: Command) -> Any:
    """Return the response to a command."""
    return getattr(orchestrator_pb2, f"{command}Response")()


def roll_back_request(step: int) -> orchestrator_pb2.RollBackRequest:
    """Return the request for a rollback to the checkpoint of ``step``."""
    return orchestrator_pb2.RollBackRequest(step=step)


def rollback_step_from_proto(message: orchestrator_pb2.RollBackRequest) -> int:
    """Return the step of the checkpoint that a rollback requests."""
    return int(message.step)


def roll_back_response() -> orchestrator_pb2.RollBackResponse:
    """Return the response to a rollback request."""
    return orchestrator_pb2.RollBackResponse()


def get_settings_request() -> orchestrator_pb2.GetSettingsRequest:
    """Return the request for the settings that can change."""
    return orchestrator_pb2.GetSettingsRequest()


def settings_to_proto(settings: Sequence[Setting]) -> orchestrator_pb2.GetSettingsResponse:
    """Convert the settings that can change."""
    return orchestrator_pb2.GetSettingsResponse(
        settings=[orchestrator_pb2.Setting(**asdict(setting)) for setting in settings]
    )


def settings_from_proto(message: orchestrator_pb2.GetSettingsResponse) -> list[Setting]:
    """Return the settings that can change."""
    return [Setting(each.name, each.value, each.low, each.high) for each in message.settings]


def change_settings_request(values: Mapping[str, float], user: str) -> orchestrator_pb2.ChangeSettingsRequest:
    """Return the request for new values of settings."""
    return orchestrator_pb2.ChangeSettingsRequest(values=values, user=user)


def changed_settings_from_proto(message: orchestrator_pb2.ChangeSettingsRequest) -> tuple[dict[str, float], str]:
    """Return the new values of settings, and the user who requests them."""
    return dict(message.values), message.user


def setting_changes_to_proto(changes: Sequence[SettingChange]) -> orchestrator_pb2.ChangeSettingsResponse:
    """Convert the changes of settings."""
    return orchestrator_pb2.ChangeSettingsResponse(
        changes=[orchestrator_pb2.Change(**asdict(change)) for change in changes]
    )


def setting_changes_from_proto(message: orchestrator_pb2.ChangeSettingsResponse) -> list[SettingChange]:
    """Return the changes of settings."""
    return [
        SettingChange(each.setting, each.before, each.after, each.step, each.user, each.at) for each in message.changes
    ]


def get_generators_request() -> orchestrator_pb2.GetGeneratorsRequest:
    """Return the request for the generators."""
    return orchestrator_pb2.GetGeneratorsRequest()


def generators_to_proto(generators: Sequence[GeneratorInfo]) -> orchestrator_pb2.GetGeneratorsResponse:
    """Convert the generators of a run."""
    return orchestrator_pb2.GetGeneratorsResponse(
        generators=[
            orchestrator_pb2.Generator(
                address=each.address,
                state=_GENERATOR_STATES[each.state],
                reason=each.reason,
                trajectories=each.trajectories,
            )
            for each in generators
        ]
    )


def generators_from_proto(message: orchestrator_pb2.GetGeneratorsResponse) -> list[GeneratorInfo]:
    """Return the generators of a run. Raises InvalidRequest for an unknown state."""
    for each in message.generators:
        if each.state not in _GENERATOR_STATE_NAMES:
            raise InvalidRequest(f"generators.state {each.state}: unknown")
    return [
        GeneratorInfo(each.address, _GENERATOR_STATE_NAMES[each.state], each.reason, each.trajectories)
        for each in message.generators
    ]
