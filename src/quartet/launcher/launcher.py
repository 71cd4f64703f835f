"""The processes of a run on this machine: start them in order, supervise them, stop them in order."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from pathlib import Path
from subprocess import TimeoutExpired
from types import TracebackType

from quartet.buffer.connection import connect
from quartet.buffer.embedded_redis import EmbeddedRedis
from quartet.buffer.redis_url import BUFFER_URL_VARIABLE, buffer_url
from quartet.config.deployment import ServiceConfig
from quartet.config.layout import devices_of_generator, model_roles, num_threads
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.errors import BufferFailed, ConfigError, QuartetError, ServiceFailed, ServiceUnavailable
from quartet.launcher.gateway_process import TOKENS, GatewayProcess
from quartet.launcher.service_process import ServiceProcess, describe_exit
from quartet.launcher.supervisor import (
    ProcessSupervisor,
    RestartCounter,
    StopClock,
    SupervisedProcess,
    exit_error,
    first_line,
)
from quartet.preflight.security_checks import local_processes
from quartet.rpc.security.allow_list import OPERATOR
from quartet.rpc.security.certificates import check_certificates
from quartet.rpc.security.credentials import Credentials
from quartet.rpc.service_channel import accepts_connections
from quartet.run_directory.run_files import RunFiles
from quartet.system.child_processes import package_path
from quartet.system.fork_server import ForkServer
from quartet.telemetry.logs import file_log

FAILURE_DRAIN_SECONDS = 1.0
"""Seconds that the other processes have to end after one has failed, before they are killed."""
EXIT_SECONDS = 1.0
"""Seconds that a process may take to end after its connections are lost."""
CLOSE_SECONDS = 5.0
"""Seconds that a process has to end after its calls have drained."""
PRELOADED = (
    "quartet.services.roles",
    "quartet.environments.host",
    "quartet.environments.agents",
    "quartet.services.environment.servicer",
    "quartet.services.environment.agents.servicer",
    "quartet.services.observability",
    "quartet.services.orchestrator.training_run",
    "quartet.services.orchestrator.servicer",
    "quartet.rpc.server",
)
"""Modules that the services import at their start. Together they import torch and the modelling code of transformers."""
WAITING_REPORT_SECONDS = 5.0
"""Interval of the lines that name the processes which are still loading."""
GATEWAY_START_SECONDS = 60.0
"""Seconds to wait for the gateway after all services are ready. The run continues without it after that."""


class Launcher:
    """The processes of one run. Starts every process to which the config gives no address. A context manager.

    Use it from one thread that lives as long as it does: the kernel ties a child process to the thread that starts it.
    """

    def __init__(self, config: Config, config_path: Path, interrupted: threading.Event | None = None) -> None:
        """``config_path`` is the resolved config that the children read. Raises ConfigError for wrong certificates.

        Another thread can end ``start`` by setting ``interrupted``.
        """
        self._config, self._config_path = config, config_path
        self._interrupted = interrupted or threading.Event()
        self.total_steps = config.run.steps
        self.credentials = Credentials(OPERATOR, config.security)
        self._files = RunFiles(config.run_directory)
        self._logs = self._files.logs
        self._redis: EmbeddedRedis | None = None
        self._fork_server: ForkServer | None = None
        self._services: list[ServiceProcess] = []
        self._restarts: dict[str, RestartCounter] = {}
        self._supervisors: list[ProcessSupervisor] = []
        self._messages: list[str] = []
        self.addresses: dict[Role, tuple[str, ...]] = {}
        self._generators: list[ServiceProcess] = []
        self._folders = ExitStack()
        self.url = ""

    def start(self, orchestrator: bool = True, report: Callable[[str], None] = lambda _: None) -> None:
        """Start the buffer, the model services and, once they are ready, the orchestrator. Supervise them from then on.

        ``report`` gets a line that names the processes which are still loading, every ``WAITING_REPORT_SECONDS``.
        Restarts a process that is killed during the start. Raises the error of the first process that fails: ConfigError if the
        user can fix it, else ServiceFailed. Raises KeyboardInterrupt if ``interrupted`` is set.
        """
        if self._config.security.certificates is not None:
            check_certificates(self._config.security.certificates, local_processes(self._config))
        self._start_buffer()
        if sys.platform == "linux":
            # The server loads in parallel with the gateway.
            log = self._logs / "fork_server.log"
            self._fork_server = ForkServer("quartet.services", PRELOADED, self._service_environment, log)
        if self._config.gateway.enabled:
            # The gateway loads in parallel with the models. Waiting for it comes last.
            self._services.append(
                GatewayProcess.for_run(self._config, self._config_path, self._children_url, self._logs / "gateway.log")
            )
        self._start_environment(report)
        for role in model_roles(self._config):
            service: ServiceConfig = getattr(self._config.services, role)
            if service.address is not None:
                self.addresses[role] = service.addresses
            else:
                self._start_service(role, self._environment_settings)
        for index in range(self._config.rollout.generators):
            self._start_generator(index)
        self._wait_until_ready(report)
        # Before the orchestrator starts, because from then on all processes must be supervised.
        self._wait_for_gateway()
        if orchestrator:
            overrides = [
                f"services.{role}.address={addresses[0] if len(addresses) == 1 else json.dumps(addresses)}"
                for role, addresses in self.addresses.items()
            ]
            if self.generators:
                overrides.append(f"services.generators={json.dumps(self.generators)}")
            self._start_service(Role.ORCHESTRATOR, _settings(overrides))
            self._wait_until_ready(report)
        log = file_log("launcher", self._logs / "launcher.log")
        recovery, load_timeout = self._config.recovery, self._config.timeouts.load_seconds
        self._supervisors = [ProcessSupervisor(process, recovery, load_timeout, log) for process in self._processes()]
        for message in self._messages:
            log.warning("start repaired", message=message)
        log.info("supervision started", processes=[process.name for process in self._processes()])

    def _start_environment(self, report: Callable[[str], None]) -> None:
        """Start the environment service, if there is one, and wait for its address, which processes that generate need."""
        if not self._config.has_environment_service:
            return
        address = self._config.services.environment.address
        if address is not None:
            self.addresses[Role.ENVIRONMENT] = (address,)
            return
        self._start_service(Role.ENVIRONMENT, [])
        self._wait_until_ready(report)

    @property
    def _environment_settings(self) -> list[str]:
        """The command-line arguments that name the environment service; none without one."""
        addresses = self.addresses.get(Role.ENVIRONMENT, ())
        return _settings([f"services.environment.address={address}" for address in addresses])

    def _start_buffer(self) -> None:
        url = buffer_url(self._config, self.credentials.folder)
        if url is None:
            self._redis = EmbeddedRedis(self._files.redis, self._logs / "redis.log")
            self.url = self._redis.url
            self._messages += [self._redis.damage] if self._redis.damage else []
            return
        self.url = url
        try:
            connect(self.url).close()
        except (ServiceUnavailable, BufferFailed) as error:
            # Nothing has started yet, so this is invalid input rather than a failure of the run.
            raise ConfigError(str(error)) from None

    @property
    def generators(self) -> list[str]:
        """Addresses of all generators: those of the config, and the local ones that are ready."""
        local = [process.address for process in self._generators if process.address is not None]
        return [*self._config.services.generators, *local]

    def _start_generator(self, index: int) -> None:
        """Start a local generator, in the environment of its engine."""
        devices = devices_of_generator(self._config, index)
        # The process sees a config with one generator, which trains, so it cannot compute its share of the cores.
        threads = num_threads(self._config, Role.GENERATOR)
        settings = _settings(
            [
                f"services.generator.devices={list(devices)}",
                f"services.generator.num_threads={threads}",
                "rollout.generators=1",
                "evaluation.generators=0",
            ]
        )
        settings += self._environment_settings
        module = ["quartet.services", Role.GENERATOR.value, "--config", str(self._config_path), *settings]
        name = f"{Role.GENERATOR}-{index}"
        python = self._config.services.generator.python
        environment = self._service_environment
        if python is not None:
            # The other environment need not have Quartet installed, only its base dependencies.
            paths = [self._folders.enter_context(package_path()), environment.get("PYTHONPATH", "")]
            environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        log, server = self._logs / f"{name}.log", None if python else self._fork_server
        process = ServiceProcess(name, module, environment, log, self.credentials, server, python, Role.GENERATOR)
        self._services.append(process)
        self._generators.append(process)

    def _start_service(self, role: Role, arguments: list[str]) -> None:
        module = ["quartet.services", role.value, "--config", str(self._config_path), *arguments]
        log = self._logs / f"{role}.log"
        self._services.append(
            ServiceProcess(role.value, module, self._service_environment, log, self.credentials, self._fork_server)
        )

    @property
    def _service_environment(self) -> dict[str, str]:
        # The URL may contain a password. The environment is private to the user, the command line is not. Services do not get
        # the gateway's tokens, because they may run functions of the user's choice.
        inherited = {name: value for name, value in os.environ.items() if name not in TOKENS}
        return {**inherited, BUFFER_URL_VARIABLE: self._children_url, "PYTHONUNBUFFERED": "1"}

    @property
    def _children_url(self) -> str:
        """The address of the buffer without this process's certificate: each child uses its own."""
        return buffer_url(self._config) or self.url

    def _processes(self) -> list[SupervisedProcess]:
        return [*([self._redis] if self._redis is not None else []), *self._services]

    def _wait_until_ready(self, report: Callable[[str], None]) -> None:
        timeout, hang_timeout = self._config.timeouts.load_seconds, self._config.recovery.hang_timeout_seconds
        start = reported = time.monotonic()
        deadline = start + timeout
        stop_clocks: defaultdict[str, StopClock] = defaultdict(StopClock)
        while waiting := [service for service in self._services if service is not self._gateway and not service.ready]:
            wait([service.pipe for service in waiting], timeout=0.2)
            if self._interrupted.is_set():
                raise KeyboardInterrupt
            for service in waiting:
                service.read_messages()
                if service.ready and service.address is not None and service not in self._generators:
                    self.addresses[Role(service.name)] = (service.address,)
                if stop_clocks[service.name].seconds(service.process.pid) > hang_timeout:
                    service.process.kill()
                    service.process.wait()
            for process in self._processes():
                if process.process.poll() is not None and self._restart_during_start(process):
                    deadline = time.monotonic() + timeout
            names = ", ".join(service.name for service in waiting)
            now = time.monotonic()
            if now - reported > WAITING_REPORT_SECONDS:
                reported = now
                report(f"loading for {now - start:.0f} s: {names}")
                if any(service.name == Role.REWARD for service in waiting):
                    for line in unanswered_reward_services(self._config):
                        report(line)
            if now > deadline:
                raise ConfigError(
                    f"{names}: not ready within timeouts.load_seconds {timeout:g} s; raise it, or see {self._logs}"
                )

    def _restart_during_start(self, process: SupervisedProcess) -> bool:
        """Restart a process that has ended, if it was killed and ``recovery`` allows it. Return whether it was restarted.

        Raises the process's error otherwise, unless the run can continue without the process.
        """
        if self._has_ended_run(process):
            return False
        if isinstance(process, ServiceProcess):
            process.read_messages()
        gave_up = ""
        # A process with an exit status or a reported error would fail again in the same way, unless one of its ranks was killed.
        reported = process.reported_error if isinstance(process, ServiceProcess) else None
        if reported["killed"] if reported else process.process.returncode < 0:
            restarts = self._restarts.setdefault(process.name, RestartCounter(self._config.recovery))
            now = time.monotonic()
            pause = restarts.next_pause(now, uptime=0.0)
            if pause is not None:
                how = reported["error"] if reported else describe_exit(process.process)
                self._messages.append(f"{process.name}: {how}; restarted ({restarts.count})")
                time.sleep(pause)
                process.start()
                return True
            gave_up = restarts.gave_up(now)
        error = exit_error(process, gave_up)
        if process is not self._gateway or isinstance(error, ConfigError):
            raise error
        return False

    def _wait_for_gateway(self) -> None:
        """Wait for the gateway. Raises ConfigError if the user can fix its error. For any other, the run continues without it."""
        if self._gateway is not None:
            try:
                self._gateway.wait_until_ready(GATEWAY_START_SECONDS)
            except ServiceFailed as error:
                self._remove_gateway(self._gateway, error)

    def _remove_gateway(self, gateway: GatewayProcess, error: QuartetError) -> None:
        self._messages.append(f"{first_line(error)}; the run continues without it, see {gateway.log}")
        for supervisor in self._supervisors:
            if supervisor.supervised is gateway:
                supervisor.stop()
        self._supervisors = [supervisor for supervisor in self._supervisors if supervisor.supervised is not gateway]
        self._services.remove(gateway)
        gateway.wait_or_kill(time.monotonic())

    def _remove_generator(self, process: SupervisedProcess, error: QuartetError) -> None:
        """Continue without a generator that is given up: the others do its work."""
        assert isinstance(process, ServiceProcess)
        self._messages.append(f"{first_line(error)}; the other generators do its work, see {process.log}")
        for supervisor in self._supervisors:
            if supervisor.supervised is process:
                supervisor.stop()
        self._supervisors = [each for each in self._supervisors if each.supervised is not process]
        self._services.remove(process)
        self._generators.remove(process)
        process.wait_or_kill(time.monotonic())

    @property
    def _gateway(self) -> GatewayProcess | None:
        return next((service for service in self._services if isinstance(service, GatewayProcess)), None)

    @property
    def dashboard_link(self) -> str | None:
        """The link that opens the dashboard, or None without a gateway."""
        return self._gateway.link() if self._gateway is not None else None

    def check(self) -> list[str]:
        """Restart processes that have ended, kill those that hang. Return messages for the user. Never waits.

        An orchestrator that has recorded the outcome of the run may end. Raises ServiceFailed if a process is given up.
        """
        for supervisor in [*self._supervisors]:
            if self._has_ended_run(supervisor.supervised):
                continue
            try:
                self._messages += supervisor.poll()
            except QuartetError as error:
                process = supervisor.supervised
                if isinstance(process, GatewayProcess):
                    self._remove_gateway(process, error)
                elif process in self._generators and len(self.generators) > 1:
                    self._remove_generator(process, error)
                else:
                    raise
        messages, self._messages = self._messages, []
        return messages

    def _has_ended_run(self, process: SupervisedProcess) -> bool:
        """Return whether this is the orchestrator, which has recorded the outcome of the run and has ended."""
        ended = process.name == Role.ORCHESTRATOR and process.process.poll() is not None
        return ended and self._files.read_outcome() is not None

    def raise_if_down(self, service: str) -> None:
        """Raise the error of a process other than the orchestrator and the gateway that is down: it may have failed the run.

        Waits a moment for the end of that behind ``service``, whose connection may be lost before.
        """
        name, _, address = service.partition(" at ")
        for supervisor in self._supervisors:
            process = supervisor.supervised
            if process.name == Role.ORCHESTRATOR or process is self._gateway:
                continue
            if process.name == name or (address and getattr(process, "address", None) == address):
                with suppress(TimeoutExpired):
                    process.process.wait(timeout=EXIT_SECONDS)
            supervisor.raise_if_down()

    def stop(self, timeout: float) -> None:
        """Stop the orchestrator, then the other services, then Redis. Kill processes that have not ended within ``timeout``
        seconds.
        """
        for supervisor in self._supervisors:
            supervisor.stop()
        for service in self._services:
            service.close_channel()
        for group in (
            [service for service in self._services if service.name == Role.ORCHESTRATOR],
            [service for service in self._services if service.name != Role.ORCHESTRATOR],
        ):
            for service in group:
                service.terminate()
            deadline = time.monotonic() + timeout
            for service in group:
                service.wait_or_kill(deadline)
        self._services.clear()
        self._generators.clear()
        self._folders.close()
        self._supervisors.clear()
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None
        if self._redis is not None:
            self._redis.stop()
            self._redis = None

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure there is nothing to finish. After Ctrl-C active calls may finish; a second Ctrl-C stops immediately.
        drain = self._config.timeouts.drain_seconds
        timeout = FAILURE_DRAIN_SECONDS if isinstance(error, Exception) else drain + CLOSE_SECONDS
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.stop(timeout)
        except KeyboardInterrupt:
            for number in previous:
                signal.signal(number, signal.SIG_IGN)
            self.stop(timeout=0.0)
            for number, handler in previous.items():
                signal.signal(number, handler)
            raise


def unanswered_reward_services(config: Config) -> list[str]:
    """Return a line for each RewardService that the reward service waits for at its start and at whose address no server is."""
    return [
        f"reward: waits up to {service.start_timeout_seconds:g} s for {key}.service.address {service.address}, where no server "
        "answers; start it, or correct the address"
        for key, source in config.reward.sources.items()
        if (service := source.service) is not None and not accepts_connections(service.address)
    ]


def _settings(overrides: Sequence[str]) -> list[str]:
    """Return the command-line arguments that override settings of the config."""
    return [argument for item in overrides for argument in ("--set", item)]
