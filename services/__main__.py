"""Entry point of all services: ``python -m quartet.services ROLE... --config CONFIG``.

Reads the config, builds the servicer of each role, serves them until SIGTERM, and shuts down gracefully.
"""

from __future__ import annotations

import quartet.system.sys_path  # noqa: F401 - first, so that files in the working directory cannot shadow libraries

# isort: split
import argparse
import gc
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from quartet.buffer.redis_url import environment_overrides, required_buffer_url
from quartet.config.layout import listen_address, num_memory_sharers, num_threads
from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.errors import ConfigError, QuartetError, ServiceFailed
from quartet.services.ranks.processes import RankProcess, start_ranks
from quartet.system.child_processes import kill_descendants
from quartet.system.compute_environment import set_cpu_environment, set_gpu_environment
from quartet.system.durable_files import describe_os_error
from quartet.system.failpoints import arm
from quartet.system.missing_packages import explain_missing_package
from quartet.telemetry.logs import configure_logs

if TYPE_CHECKING:
    from quartet.rpc.security.credentials import Credentials
    from quartet.run_directory.run_files import RunOutcome
    from quartet.services.observability import Observability

log = structlog.get_logger()

END_OF_RUN = "end of the run"
ANSWER_SECONDS = 1.0
"""Time to answer the running calls of a process that has failed."""
CLOSE_SECONDS = 10.0
"""Time to close the roles of a process that has failed, such as one with a stuck engine."""
OUTCOME_SECONDS = 15.0
"""Time for a run that has ended to report its outcome when its process ends at the same time."""
RESTART_BIND_SECONDS = 30.0
"""Time that a restarted process waits for its port. While it was down, another program may have used the port for a moment."""
CHECK_INTERVAL = 1.0
"""Seconds between two checks for abandoned work."""
GROUP_CHECK_INTERVAL = 0.1
"""The same, for a group of processes: a call to a group that has lost one fails again and again."""


class ReadyNotifier:
    """Sender of messages to the parent process through a pipe: this process is ready, or why it ended."""

    def __init__(self, descriptor: int | None) -> None:
        self._pipe = None if descriptor is None else os.fdopen(descriptor, "w", buffering=1)
        self.ranks = RankProcess()
        """This process in its group: its end is that of a rank that was killed, if one was."""

    def close(self) -> None:
        """Send no more messages: another process sends them."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def notify(self, **message: Any) -> None:
        """Write one line of JSON. Ignores a pipe that the parent has closed."""
        if self._pipe is not None:
            try:
                self._pipe.write(json.dumps(message) + "\n")
            except OSError:
                self._pipe = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the end and return the exit status.

    0 after a graceful shutdown, 2 for invalid input, 1 for any other error, and 143 for an orchestrator that a signal
    stopped before the end of its run.
    """
    parser = argparse.ArgumentParser(prog="python -m quartet.services", description=__doc__)
    parser.add_argument("roles", nargs="+", metavar="ROLE", choices=[role.value for role in Role])
    parser.add_argument(
        "--config",
        required=True,
        action="append",
        type=Path,
        help="config file; may be repeated, later files override earlier ones",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--listen", metavar="HOST:PORT", help="overrides services.ROLE.listen")
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    roles = [Role(role) for role in dict.fromkeys(options.roles)]
    configure_logs("+".join(roles))
    set_cpu_environment(os.environ)
    notifier = ReadyNotifier(options.ready_fd)
    try:
        if failpoints := arm(os.environ):
            log.warning("failpoints are set: this process will fail on purpose", names=failpoints)
        return _serve(roles, options, notifier)
    except PermissionError as error:
        return _ended(ConfigError(describe_os_error(error)), notifier)
    except ModuleNotFoundError as error:
        return _ended(explain_missing_package(error), notifier)
    except Exception as error:
        return _ended(error, notifier)


def _ended(error: Exception, notifier: ReadyNotifier) -> int:
    code = 2 if isinstance(error, ConfigError) else 1
    log.error("process failed", error=str(error), exc_info=None if isinstance(error, QuartetError) else error)
    notifier.notify(error=str(error) or type(error).__name__, exit_code=code, killed=notifier.ranks.killed)
    print(f"error: {error}", file=sys.stderr)
    return code


def _is_restart(options: argparse.Namespace) -> bool:
    """Return whether a launcher starts the process again, at the address that it had before."""
    return options.ready_fd is not None and options.listen is not None


def _serve(roles: list[Role], options: argparse.Namespace, notifier: ReadyNotifier) -> int:
    first, *layers = options.config
    listen_override = [] if options.listen is None else [f"services.{roles[0]}.listen={options.listen}"]
    config = load_config(first, [*options.overrides, *listen_override, *environment_overrides()], layers)
    separate = [role for role in roles if not role.holds_model]
    if separate and len(roles) > 1:
        raise ConfigError(f"roles: the {separate[0]} needs a separate process; start the other roles in another one")
    groups = [role for role in roles if role.holds_model and getattr(config.services, role).num_ranks > 1]
    if groups and len(roles) > 1:
        raise ConfigError(
            f"services.{groups[0]}: a role of several processes or devices needs a separate service; start the other roles "
            "in another one, or set processes 1 and one device"
        )
    sharing = config.services.reward.sharing if Role.REWARD in roles else None
    if sharing is not None and len(roles) > 1:
        raise ConfigError(
            "services.reward.sharing: a shared reward service needs a separate process; start the other roles in another one"
        )
    service = getattr(config.services, roles[0])
    listen = listen_address(service)
    threads = num_threads(config, roles[0])
    # Set before the import of torch, which sizes its thread pools once.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    if _torch_devices(roles, config):
        set_gpu_environment(os.environ)

    # The first entry ends the process. A SimpleQueue is reentrant: a signal handler may use it at any time.
    endings: queue.SimpleQueue[str] = queue.SimpleQueue()
    ranks = RankProcess()
    if roles[0].holds_model:
        # Before the process has threads.
        ranks = notifier.ranks = start_ranks(roles[0], service, os.environ)
    if ranks.rank:
        configure_logs(f"{roles[0]}-{ranks.rank}")
        notifier.close()
        arm(os.environ, ranks.rank)
    outcomes: list[RunOutcome] = []

    def on_signal(signum: int, _: Any) -> None:
        endings.put(signal.Signals(signum).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        if not ranks.rank:
            signal.signal(number, on_signal)
    from quartet.rpc.security.certificates import check_certificates
    from quartet.rpc.security.credentials import Credentials
    from quartet.services.observability import Observability

    credentials = Credentials(roles[0], config.security, config.run.name)
    if config.security.certificates is not None:
        check_certificates(config.security.certificates, roles[:1])
    if ranks.rank:
        _follow(ranks, roles[0], config, threads, credentials)
        return 0
    observability = Observability(roles, config, credentials)
    with ExitStack() as stack:
        # The imports below create only objects that stay. A search for garbage among them takes a sixth of the start.
        gc.disable()
        stack.callback(gc.enable)
        if roles == [Role.ORCHESTRATOR]:
            # A launcher prepares the run's directory and publishes the addresses; without one, this process does.
            from quartet.services.orchestrator.leadership import acquire_run_directory

            publish = stack.enter_context(acquire_run_directory(config)) if options.ready_fd is None else None
            hosted, background, wait_for_outcome = _orchestrator(config, endings, outcomes, observability, credentials)
        else:
            if roles == [Role.GENERATOR]:
                hosted = _generator(config, threads, credentials, observability)
            elif roles == [Role.ENVIRONMENT]:
                hosted = _environment(config, threads, credentials, observability)
            else:
                hosted = _models(roles, config, threads, credentials, ranks, notifier)
            background, publish, wait_for_outcome = None, None, None
            observability.add_services(hosted)
            if sharing is not None:
                from quartet.services.reward.sharing import SharingMetrics

                observability.registry.register(SharingMetrics(hosted[0].shared.usage))

        from quartet.rpc.limits import agent_limits, shared_limits
        from quartet.rpc.server import Server

        gc.enable()

        devices = observability.watch_devices(_visible_devices(roles, config))
        stack.callback(devices.close)
        observability.start()
        limits = None if sharing is None else shared_limits(sharing.max_runs, sharing.max_pending_calls)
        if roles == [Role.ENVIRONMENT] and config.environment.kind == "agent":
            limits = agent_limits(config.environment.agent.max_concurrent)
        server = Server(
            *(hosted, listen, credentials, observability.interceptors, observability.address, service.health_listen),
            bind_seconds=RESTART_BIND_SECONDS if _is_restart(options) else 0.0,
            limits=limits,
            devices=devices.readings,
            register=_profiles(roles, config, hosted),
        )
        for role in hosted:
            if (engine := role.status().engine) is not None:
                log.info("engine", **asdict(engine))
        log.info("ready", address=server.address, metrics=observability.address, threads=threads)
        notifier.notify(address=server.address, metrics_address=observability.address)
        if publish is not None:
            publish(server.address)
        if background is not None:
            background.start()
        try:
            interval = GROUP_CHECK_INTERVAL if ranks.size > 1 else CHECK_INTERVAL
            cause = _wait_for_end(endings, hosted, config.recovery.hang_timeout_seconds, interval)
        except ServiceFailed:
            # Ends the collective in which this process may wait, so that the call is answered with the cause.
            ranks.kill()
            server.drain(ANSWER_SECONDS)
            _close_within(hosted, CLOSE_SECONDS)
            raise
        log.info("stopping", cause=cause)
        server.stop(config.timeouts.drain_seconds)
        if wait_for_outcome is not None:
            wait_for_outcome()
        observability.close()
        log.info("stopped")
        for outcome in outcomes:
            if outcome.exit_status:
                print(f"error: {outcome.message}", file=sys.stderr)
            return outcome.exit_status
        # A run that has not ended: a non-zero status makes a supervisor restart this process.
        return 128 + signal.SIGTERM if roles == [Role.ORCHESTRATOR] else 0


def _wait_for_end(
    endings: queue.SimpleQueue[str], hosted: list[Any], hang_timeout: float, interval: float = CHECK_INTERVAL
) -> str:
    """Wait until the process is to end and return the cause.

    Raises ServiceFailed if only a restart frees the role: its engine has failed, another rank has ended or hangs, or work is
    still running ``hang_timeout`` seconds after its deadline.
    """
    while True:
        try:
            return endings.get(timeout=interval)
        except queue.Empty:
            for role in hosted:
                if failure := role.failure():
                    raise ServiceFailed(f"{role.role}: {failure}; this process ends, so that it is restarted") from None
                work, seconds = role.abandoned()
                if seconds > hang_timeout:
                    raise ServiceFailed(
                        f"{role.role}: {work} is still running {seconds:.0f} s after its deadline and its caller is gone; "
                        "if the work takes that long, raise its limit in the timeouts section"
                    ) from None


def _close_within(hosted: list[Any], seconds: float) -> None:
    """Close the roles of a process that has failed, then kill the processes that they leave. ``seconds``: time to close."""

    def close() -> None:
        for role in hosted:
            try:
                role.close()
            except Exception as error:
                log.warning("a role does not close cleanly", role=role.role, error=str(error))

    thread = threading.Thread(target=close, name="close", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        log.warning("roles do not close; their processes are killed", seconds=seconds)
    kill_descendants()


def _torch_devices(roles: list[Role], config: Config) -> list[int]:
    """Return the CUDA devices on which this process computes with its own torch, and not with another engine's."""
    uses_torch = [
        role for role in roles if role.holds_model or (role is Role.GENERATOR and config.rollout.engine == "torch")
    ]
    return [index for role in uses_torch for index in getattr(config.services, role).devices]


def _visible_devices(roles: list[Role], config: Config) -> list[int]:
    """Return CUDA's indices of this process's GPUs: those of all roles, and of all ranks on this machine."""
    indices = sorted({index for role in roles for index in getattr(getattr(config.services, role), "devices", ())})
    # See ``set_up_engine``.
    return indices if config.rollout.engine == "torch" or roles != [Role.GENERATOR] else [*range(len(indices))]


def _profiles(roles: list[Role], config: Config, hosted: list[Any]) -> Callable[[Any], None]:
    """Return the function that adds the profiles of this process to its server, if torch trains or generates in it."""
    if not any(role.trained or (role is Role.GENERATOR and config.rollout.engine == "torch") for role in roles):
        return lambda server: None
    from quartet.services.profile.servicer import ProfileServicer

    return ProfileServicer(hosted[0].compute).register


def _models(
    roles: list[Role],
    config: Config,
    threads: int,
    credentials: Credentials,
    ranks: RankProcess,
    notifier: ReadyNotifier,
) -> list[Any]:
    from quartet.models.torch_settings import release_gpu_memory, set_up_gpu, set_up_torch
    from quartet.rpc.compute_thread import ComputeThread
    from quartet.run_directory.model_digests import model_digests, role_models
    from quartet.services.ranks.commands import join
    from quartet.services.ranks.watch import GroupFailures
    from quartet.services.roles import build_model_role, device_of, set_up_thread

    set_up_torch(threads)
    if _torch_devices(roles, config):
        set_up_gpu()
    service = getattr(config.services, roles[0])
    # Roles of one process share a GPU, so they share a compute thread. OpenMP has a number of threads per calling thread.
    shared = any(_shares_gpu(role, config) for role in roles)
    on_idle = release_gpu_memory if shared else lambda: None
    failures = GroupFailures(ranks)

    def end(error: Exception) -> None:
        code = _ended(error, notifier)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    with failures.watched_start(end):
        device = device_of(service) if ranks.size > 1 else "cpu"
        workers, commands = join(ranks, service, device, config, failures)
        compute = ComputeThread(set_up_thread(threads, workers), config.timeouts.score_seconds, on_idle)
        hosted = [build_model_role(role, config, compute, threads, workers, commands, credentials) for role in roles]
        for role, servicer in zip(roles, hosted, strict=True):
            servicer.model_files = model_digests(role_models(config, role))
        return hosted


def _shares_gpu(role: Role, config: Config, rank: int = 0) -> bool:
    return bool(_torch_devices([role], config)) and num_memory_sharers(config, role, rank) > 1


def _follow(ranks: RankProcess, role: Role, config: Config, threads: int, credentials: Credentials) -> None:
    """Compute the commands of rank 0 until it ends this process. The servicer of this rank serves no calls."""
    from quartet.models.torch_settings import release_gpu_memory, set_up_gpu, set_up_torch
    from quartet.rpc.compute_thread import ComputeThread
    from quartet.services.ranks.commands import GroupCommands, join
    from quartet.services.ranks.watch import GroupFailures
    from quartet.services.roles import build_model_role, device_of

    failures = GroupFailures(ranks)
    with failures.reported_error():
        set_up_torch(threads)
        if _torch_devices([role], config):
            set_up_gpu()
        service = getattr(config.services, role)
        workers, commands = join(ranks, service, device_of(service, ranks.rank), config, failures)
        assert isinstance(commands, GroupCommands)
        servicer = build_model_role(role, config, ComputeThread(), threads, workers, commands, credentials)
        log.info("ready", rank=ranks.rank, ranks=ranks.size, threads=threads)
        shared = _shares_gpu(role, config, ranks.rank)
        commands.follow(servicer.handlers(), release_gpu_memory if shared else lambda: None)


def _generator(config: Config, threads: int, credentials: Credentials, observability: Observability) -> list[Any]:
    from quartet.rpc.compute_thread import ComputeThread
    from quartet.services.generator.factory import build_generator, set_up_engine

    initializer = set_up_engine(config, threads)
    servicer = build_generator(config, ComputeThread(initializer, config.timeouts.score_seconds), threads, credentials)
    if (traffic := servicer.core.traffic) is not None:
        from quartet.services.generator.sessions.metrics import TrafficMetrics

        observability.registry.register(TrafficMetrics(traffic.responses, traffic.waiting))
    return [servicer]


def _environment(config: Config, threads: int, credentials: Credentials, observability: Observability) -> list[Any]:
    if config.environment.kind == "agent":
        from quartet.environments.agents import AgentHost
        from quartet.services.environment.agents.servicer import AgentMetrics, AgentServicer

        agents = AgentHost(config.environment, credentials.folder)
        observability.registry.register(AgentMetrics(lambda: dict(agents.ended)))
        return [AgentServicer(agents, threads)]
    from quartet.data.chat_template import TemplateInputs
    from quartet.environments.host import EnvironmentHost
    from quartet.services.environment.servicer import EnvironmentServicer

    host = EnvironmentHost(config.environment, config.actor.model, inputs=TemplateInputs.of_config(config))
    return [EnvironmentServicer(host, threads)]


def _freeze_loaded_objects() -> None:
    """Exclude all current objects from garbage collection, so that cycles among later objects are collected early.

    Python collects the oldest generation only when the new objects are a quarter of all objects. With the imported libraries in
    that count, the cycles of thousands of steps would accumulate and memory would grow.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # Updates the object count, which still includes the frozen objects.


def _orchestrator(
    config: Config,
    endings: queue.SimpleQueue[str],
    outcomes: list[RunOutcome],
    observability: Observability,
    credentials: Credentials,
) -> tuple[list[Any], threading.Thread, Callable[[], None]]:
    from quartet.models.torch_settings import set_up_torch
    from quartet.run_directory.run_files import RunFiles
    from quartet.services.orchestrator.control.progress import ProgressBoard
    from quartet.services.orchestrator.control.run_control import RunControl
    from quartet.services.orchestrator.servicer import OrchestratorServicer
    from quartet.services.orchestrator.telemetry.run_metrics import RunMetrics, buffer_depth
    from quartet.services.orchestrator.training_run import TrainingRun, run_training

    set_up_torch(1)
    board = ProgressBoard(config.run.name, config.run.steps)
    files = RunFiles(config.run_directory)
    control = RunControl(files)
    url = required_buffer_url(config, credentials.folder)
    training = TrainingRun(config, url, board, control, _freeze_loaded_objects, observability.traces, credentials)
    observability.registry.register(RunMetrics(config, board, buffer_depth(url, config.run.name), training.generators))

    def finished(outcome: RunOutcome) -> None:
        outcomes.append(outcome)
        endings.put(END_OF_RUN)

    thread = threading.Thread(
        target=run_training, args=(training, files, board, finished), name="training", daemon=True
    )
    servicer = OrchestratorServicer(board, control, training.live_settings, training.interrupt, training.generators)

    def wait_for_outcome() -> None:
        if training.has_outcome:
            thread.join(OUTCOME_SECONDS)

    return [servicer], thread, wait_for_outcome


if __name__ == "__main__":
    code = main()
    # Everything is written. Skip the teardown of the interpreter and of torch's thread pools, which takes seconds.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
