"""The processes of a run on this machine: started in order, supervised, stopped in order."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType

from quartet.buffer.connection import connect
from quartet.buffer.embedded_redis import EmbeddedRedis
from quartet.buffer.redis_url import BUFFER_URL_VARIABLE, buffer_url
from quartet.config import Config, ServiceConfig
from quartet.errors import BufferFailed, ConfigError, QuartetError, ServiceFailed, ServiceUnavailable
from quartet.launcher.gateway_process import TOKENS, GatewayProcess
from quartet.launcher.security_checks import local_processes
from quartet.launcher.service_process import ServiceProcess, describe_exit
from quartet.launcher.supervisor import ProcessSupervisor, RestartCounter, SupervisedProcess, exit_error, first_line
from quartet.rpc.security.allow_list import OPERATOR
from quartet.rpc.security.certificates import check_certificates
from quartet.rpc.security.credentials import Credentials
from quartet.run_directory.run_files import RunFiles
from quartet.telemetry.logs import file_log
from quartet.topology import model_roles
from quartet.types import Role

FAILURE_PATIENCE = 1.0
"""Seconds that the other processes have to end after one has failed, before they are killed."""
GATEWAY_PATIENCE = 60.0
"""Seconds that the gateway may take to get ready after all else is; then the run goes on without it."""


class Launcher:
    """The processes of one run: what the config does not point at is started here. A context manager.

    To be used from one thread that lives as long as it: the kernel ties a process to the thread that starts it.
    """

    def __init__(self, config: Config, config_path: Path) -> None:
        """``config_path`` is the resolved config that the children read. Raises ConfigError for wrong certificates."""
        self._config, self._config_path = config, config_path
        self.credentials = Credentials(OPERATOR, config.security)
        self._logs = RunFiles(config.run_directory).logs
        self._redis: EmbeddedRedis | None = None
        self._services: list[ServiceProcess] = []
        self._restarts: dict[str, RestartCounter] = {}
        self._supervised: list[ProcessSupervisor] = []
        self._untold: list[str] = []
        self.addresses: dict[Role, str] = {}
        self.url = ""

    def start(self, orchestrator: bool = True) -> None:
        """Starts the buffer, the model services, and the orchestrator once they are ready. From then on they are supervised.

        One that is killed meanwhile is started again. Raises what the first process that fails says: ConfigError where the user
        can mend it, ServiceFailed otherwise.
        """
        if self._config.security.certificates is not None:
            check_certificates(self._config.security.certificates, local_processes(self._config))
        self._start_buffer()
        if self._config.gateway.enabled:
            # It loads beside the models, and is waited for last.
            self._services.append(
                GatewayProcess.of_run(self._config, self._config_path, self._told_url, self._logs / "gateway.log")
            )
        for role in model_roles(self._config):
            service: ServiceConfig = getattr(self._config.services, role)
            if service.address is not None:
                self.addresses[role] = service.address
            else:
                self._start_service(role, [])
        self._wait_until_ready()
        # Before the orchestrator begins: from then on all has to be watched.
        self._wait_for_the_gateway()
        if orchestrator:
            known = [f"services.{role}.address={address}" for role, address in self.addresses.items()]
            self._start_service(Role.ORCHESTRATOR, [part for item in known for part in ("--set", item)])
            self._wait_until_ready()
        log = file_log("launcher", self._logs / "launcher.log")
        recovery, load = self._config.recovery, self._config.timeouts.load_seconds
        self._supervised = [ProcessSupervisor(part, recovery, load, log) for part in self._parts()]
        for line in self._untold:
            log.warning("mended", what=line)
        log.info("supervising", processes=[part.name for part in self._parts()])

    def _start_buffer(self) -> None:
        url = buffer_url(self._config, self.credentials.folder)
        if url is None:
            self._redis = EmbeddedRedis(RunFiles(self._config.run_directory).redis, self._logs / "redis.log")
            self.url = self._redis.url
            self._untold += [self._redis.damage] if self._redis.damage else []
            return
        self.url = url
        try:
            connect(self.url).close()
        except (ServiceUnavailable, BufferFailed) as error:
            # Nothing has begun yet, so this is something to mend rather than a failure of the run.
            raise ConfigError(str(error)) from None

    def _start_service(self, role: Role, arguments: list[str]) -> None:
        # The url may hold a password: the environment is private to the user, the command line is not. The gateway's tokens are
        # nothing for services, which may run functions of the user's choice.
        inherited = {name: value for name, value in os.environ.items() if name not in TOKENS}
        environment = {**inherited, BUFFER_URL_VARIABLE: self._told_url, "PYTHONUNBUFFERED": "1"}
        module = ["quartet.services", role.value, "--config", str(self._config_path), *arguments]
        log = self._logs / f"{role}.log"
        self._services.append(ServiceProcess(role.value, module, environment, log, self.credentials))

    @property
    def _told_url(self) -> str:
        """What children are told of the buffer: each shows it a certificate of its own, not this process's."""
        return buffer_url(self._config) or self.url

    def _parts(self) -> list[SupervisedProcess]:
        return [*([self._redis] if self._redis is not None else []), *self._services]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._config.timeouts.load_seconds
        while waiting := [service for service in self._services if service is not self._gateway and not service.ready]:
            wait([service.pipe for service in waiting], timeout=0.2)
            for service in waiting:
                service.read_messages()
                if service.ready and service.address is not None:
                    self.addresses[Role(service.name)] = service.address
            for part in self._parts():
                if part.process.poll() is not None and self._begin_again(part):
                    deadline = time.monotonic() + self._config.timeouts.load_seconds
            if time.monotonic() > deadline:
                names = ", ".join(service.name for service in waiting)
                raise ConfigError(
                    f"{names}: not ready within timeouts.load_seconds {self._config.timeouts.load_seconds:g} s; raise it, or see {self._logs}"
                )

    def _begin_again(self, part: SupervisedProcess) -> bool:
        """Whether a process that has ended was started again: it was killed, and not more often than ``recovery`` allows.

        Raises what the end means otherwise, unless the run can go on without it.
        """
        if isinstance(part, ServiceProcess):
            part.read_messages()
            if part.outcome is not None:
                return False
        given_up = ""
        # With a status of its own, or words, it says that something is wrong: it would say so again.
        if part.process.returncode < 0 and not (isinstance(part, ServiceProcess) and part.reported_error):
            restarts = self._restarts.setdefault(part.name, RestartCounter(self._config.recovery))
            now = time.monotonic()
            pause = restarts.next(now, lasted=0.0)
            if pause is not None:
                self._untold.append(f"{part.name}: {describe_exit(part.process)}; restarted ({restarts.count})")
                time.sleep(pause)
                part.begin()
                return True
            given_up = restarts.given_up(now)
        error = exit_error(part, given_up)
        if part is not self._gateway or isinstance(error, ConfigError):
            raise error
        return False

    def _wait_for_the_gateway(self) -> None:
        """Raises ConfigError for what the user can mend. Whatever else it is that keeps it, the run goes on."""
        if self._gateway is not None:
            try:
                self._gateway.wait_until_ready(GATEWAY_PATIENCE)
            except ServiceFailed as error:
                self._do_without(self._gateway, error)

    def _do_without(self, gateway: GatewayProcess, error: QuartetError) -> None:
        self._untold.append(f"{first_line(error)}; the run goes on without it, see {gateway.log}")
        for supervised in self._supervised:
            if supervised.part is gateway:
                supervised.stop()
        self._supervised = [supervised for supervised in self._supervised if supervised.part is not gateway]
        self._services.remove(gateway)
        gateway.reap(time.monotonic())

    @property
    def _gateway(self) -> GatewayProcess | None:
        return next((service for service in self._services if isinstance(service, GatewayProcess)), None)

    @property
    def dashboard(self) -> str | None:
        """The link that opens the dashboard; None where there is no gateway."""
        return self._gateway.link() if self._gateway is not None else None

    def check(self, orchestrator: bool = True) -> list[str]:
        """Restart what has ended and should run, kills what has stalled. Gives what has happened, a line each; never waits.

        Raises ServiceFailed when a process is given up, and what the orchestrator said where it brought the run to its end.
        ``orchestrator`` False leaves the orchestrator out, whose news have not all been heard.
        """
        for supervised in [*self._supervised]:
            if supervised.part is self._orchestrator and (not orchestrator or self.run_ended):
                continue
            try:
                self._untold += supervised.look()
            except QuartetError as error:
                if not isinstance(supervised.part, GatewayProcess):
                    raise
                self._do_without(supervised.part, error)
        told, self._untold = self._untold, []
        return told

    @property
    def _orchestrator(self) -> ServiceProcess | None:
        return next((service for service in self._services if service.name == Role.ORCHESTRATOR), None)

    @property
    def run_ended(self) -> bool:
        """Whether the orchestrator has ended in order. Raises what it said where the run failed.

        An orchestrator that crashed said nothing: it is restarted, and the run goes on.
        """
        service = self._orchestrator
        if service is None or service.process.poll() is None:
            return False
        service.read_messages()
        # One that did not get ready again has not taken the run up: what it says is no word about the run.
        if service.ready and service.reported_error is not None:
            raise exit_error(service)
        return service.outcome is not None or (service.ready and service.process.returncode == 0)

    @property
    def outcome(self) -> str | None:
        """How the run ended, by the word of the orchestrator: "finished", "stopped"; None where it said none."""
        return self._orchestrator.outcome if self._orchestrator is not None else None

    def blame(self) -> None:
        """Raises ServiceFailed for a process other than the orchestrator that is down: it may be why the run failed."""
        for supervised in self._supervised:
            if supervised.part not in (self._orchestrator, self._gateway):
                supervised.blame()

    def stop(self, patience: float) -> None:
        """Stops what was started: orchestrator, model services and gateway, Redis. Each has ``patience`` seconds to drain."""
        for supervised in self._supervised:
            supervised.stop()
        for service in self._services:
            service.close()
        for group in (
            [service for service in self._services if service.name == Role.ORCHESTRATOR],
            [service for service in self._services if service.name != Role.ORCHESTRATOR],
        ):
            for service in group:
                service.terminate()
            deadline = time.monotonic() + patience
            for service in group:
                service.reap(deadline)
        self._services.clear()
        self._supervised.clear()
        if self._redis is not None:
            self._redis.stop()
            self._redis = None

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure there is nothing to finish. After Ctrl-C calls in hand may end; a second Ctrl-C means "now".
        patience = FAILURE_PATIENCE if isinstance(error, Exception) else self._config.timeouts.drain_seconds
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.stop(patience)
        except KeyboardInterrupt:
            for number in previous:
                signal.signal(number, signal.SIG_IGN)
            self.stop(patience=0.0)
            for number, handler in previous.items():
                signal.signal(number, handler)
            raise
