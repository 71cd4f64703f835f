"""What a run is, for the classes of the orchestrator that work on it."""

from __future__ import annotations

from dataclasses import dataclass

from quartet.buffer.connection import Redis, connect_at_start
from quartet.buffer.experience_store import ExperienceStore
from quartet.buffer.rollout_stream import RolloutStream
from quartet.buffer.traffic import TrafficStore
from quartet.buffer.turn_records import TurnRecordStore
from quartet.config.root import Config
from quartet.contract.status import GeneratorState, Role
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.control.live_settings import LiveSettings
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.control.run_control import RunControl
from quartet.services.orchestrator.rollout.generation import Generation
from quartet.services.orchestrator.service_clients import ServiceClients
from quartet.services.orchestrator.telemetry.device_samples import DeviceSampler
from quartet.services.orchestrator.telemetry.profile_recorder import ProfileRecorder
from quartet.services.orchestrator.telemetry.run_outputs import RunTelemetry
from quartet.services.orchestrator.telemetry.step_profiler import StepProfiler
from quartet.telemetry.traces import Traces


@dataclass(frozen=True, slots=True)
class RunContext:
    """One run: its config and files, its connections to buffer and services, its commands, and what observes it.

    ``turns``: the turn records of a run with turns, or the sessions of users.
    """

    config: Config
    files: RunFiles
    url: str
    redis: Redis
    stream: RolloutStream
    experience: ExperienceStore
    turns: TurnRecordStore | TrafficStore | None
    clients: ServiceClients
    generation: Generation
    control: RunControl
    live_settings: LiveSettings
    board: ProgressBoard
    profiler: StepProfiler
    telemetry: RunTelemetry
    devices: DeviceSampler
    profiles: ProfileRecorder

    @classmethod
    def connect(
        cls,
        config: Config,
        url: str,
        board: ProgressBoard,
        control: RunControl,
        traces: Traces | None = None,
        credentials: Credentials = LOCAL,
    ) -> RunContext:
        """Connect to the buffer at ``url`` and to the services. Raises ConfigError or ServiceUnavailable."""
        files, run = RunFiles(config.run_directory), config.run.name
        redis = connect_at_start(url, config.timeouts.load_seconds)
        clients, profiler = ServiceClients(config, credentials, board.note), StepProfiler(traces)
        if traces is not None:
            clients.observe(traces)
        # Before the generators are watched on threads: it may refuse the config.
        telemetry = RunTelemetry(config, files, board, profiler)
        generation = clients.generation(board.note, profiler.observe)

        def torch_services() -> dict[str, str]:
            trained = {str(client.role): client.channel.address for client in clients.trained}
            generators = (each.address for each in generation.generators() if each.state is GeneratorState.READY)
            return trained | {f"{Role.GENERATOR} {address}": address for address in generators}

        return cls(
            config=config,
            files=files,
            url=url,
            redis=redis,
            stream=RolloutStream(redis, url, run),
            experience=ExperienceStore(redis, url, run),
            turns=TrafficStore(redis, url, run)
            if config.has_traffic
            else TurnRecordStore(redis, url, run)
            if config.has_environment
            else None,
            clients=clients,
            telemetry=telemetry,
            generation=generation,
            control=control,
            live_settings=LiveSettings(config, files, control),
            board=board,
            profiler=profiler,
            devices=DeviceSampler(torch_services, credentials),
            profiles=ProfileRecorder(config, files, control, board.note, torch_services, credentials),
        )
