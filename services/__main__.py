"""The one entry point: ``python -m quartet.services ROLE... --config CONFIG``.

Parses the config, then imports torch, builds each role's core, serves them together until SIGTERM, and drains.
"""

from __future__ import annotations

import quartet.import_path  # noqa: F401 - before the libraries whose names a file in the working directory may have

# isort: split
import argparse
import gc
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from quartet.buffer.redis_url import environment_overrides, required_buffer_url
from quartet.config import Config, load_config
from quartet.durable_files import describe_os_error
from quartet.errors import ConfigError, QuartetError, ServiceFailed
from quartet.failpoints import arm
from quartet.telemetry.logs import configure_logs
from quartet.topology import listen_address, num_threads
from quartet.train_extra import explain_missing_package
from quartet.types import Role

if TYPE_CHECKING:
    from quartet.rpc.security.credentials import Credentials
    from quartet.services.observability import Observation

log = structlog.get_logger()

END_OF_RUN = "end of the run"
WATCH = 1.0
"""Seconds between looks at work that nobody waits for."""


class ReadyNotifier:
    """Tells the process that started this one, through a pipe, when it is ready or why it ended."""

    def __init__(self, descriptor: int | None) -> None:
        self._pipe = None if descriptor is None else os.fdopen(descriptor, "w", buffering=1)

    def say(self, **message: Any) -> None:
        """One JSON line; nobody listening is no error."""
        if self._pipe is not None:
            try:
                self._pipe.write(json.dumps(message) + "\n")
            except OSError:
                self._pipe = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a drain, 2 for input that the user can mend, 1 for anything else; 143 for an orchestrator without a
    launcher that a signal ended before its run.
    """
    parser = argparse.ArgumentParser(prog="python -m quartet.services", description=__doc__)
    parser.add_argument("roles", nargs="+", metavar="ROLE", choices=[role.value for role in Role])
    parser.add_argument(
        "--config",
        required=True,
        action="append",
        type=Path,
        help="may be repeated: a later file's settings take the place of an earlier one's",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--listen", metavar="HOST:PORT", help="overrides services.ROLE.listen")
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    roles = [Role(role) for role in dict.fromkeys(options.roles)]
    configure_logs("+".join(roles))
    announcer = ReadyNotifier(options.ready_fd)
    try:
        if failpoints := arm(os.environ):
            log.warning("failpoints are set: this process will fail on purpose", names=failpoints)
        return _serve(roles, options, announcer)
    except PermissionError as error:
        return _ended(ConfigError(describe_os_error(error)), announcer)
    except ModuleNotFoundError as error:
        return _ended(explain_missing_package(error), announcer)
    except Exception as error:
        return _ended(error, announcer)


def _ended(error: Exception, announcer: ReadyNotifier) -> int:
    code = 2 if isinstance(error, ConfigError) else 1
    log.error("ended", error=str(error), exc_info=None if isinstance(error, QuartetError) else error)
    announcer.say(error=str(error) or type(error).__name__, exit_code=code)
    print(f"error: {error}", file=sys.stderr)
    return code


def _serve(roles: list[Role], options: argparse.Namespace, announcer: ReadyNotifier) -> int:
    first, *layers = options.config
    own = [] if options.listen is None else [f"services.{roles[0]}.listen={options.listen}"]
    config = load_config(first, [*options.overrides, *own, *environment_overrides()], layers)
    if Role.ORCHESTRATOR in roles and len(roles) > 1:
        raise ConfigError("roles: the orchestrator has a process of its own")
    place = getattr(config.services, roles[0])
    listen = listen_address(place)
    threads = num_threads(config, roles[0])
    # Set before torch is imported: its pools are sized once.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)

    # The first thing put in ends the process. Unlike an Event or a log, the queue may be used by a signal's handler even
    # where the handler interrupts its use.
    endings: queue.SimpleQueue[str] = queue.SimpleQueue()
    status = [0]
    failures: list[str] = []

    def on_signal(signum: int, _: Any) -> None:
        endings.put(signal.Signals(signum).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    from quartet.rpc.security.certificates import check_certificates
    from quartet.rpc.security.credentials import Credentials
    from quartet.services.observability import Observation

    credentials = Credentials(roles[0], config.security)
    if config.security.certificates is not None:
        check_certificates(config.security.certificates, roles[:1])
    observation = Observation(roles, config, credentials)
    with ExitStack() as stack:
        if roles == [Role.ORCHESTRATOR]:
            # Without a launcher nobody has prepared the run's directory, and nobody tells where its processes are.
            from quartet.services.orchestrator.leadership import acquire_run_directory

            tell = stack.enter_context(acquire_run_directory(config)) if options.ready_fd is None else None
            hosted, background = _orchestrator(config, endings, status, failures, announcer, observation, credentials)
        else:
            hosted, background, tell = _models(roles, config, threads, credentials), None, None
            observation.of_services(hosted)

        from quartet.rpc.server import Server

        observation.begin()
        server = Server(hosted, listen, credentials, observation.observers, observation.address, place.health_listen)
        log.info("ready", address=server.address, metrics=observation.address, threads=threads)
        announcer.say(address=server.address, metrics_address=observation.address)
        if tell is not None:
            tell(server.address)
        if background is not None:
            background.start()
        cause = _wait_for_the_end(endings, hosted, config.recovery.hang_timeout_seconds)
        log.info("stopping", cause=cause)
        if tell is not None and cause != END_OF_RUN:
            # Whoever started it is to start it again: the run is not at its end.
            status[0] = 128 + signal.SIGTERM
        server.stop(config.timeouts.drain_seconds)
        observation.close()
        log.info("stopped")
        for failure in failures:
            print(f"error: {failure}", file=sys.stderr)
        return status[0]


def _wait_for_the_end(endings: queue.SimpleQueue[str], hosted: list[Any], stall: float) -> str:
    """What ends the process. Raises ServiceFailed when a role works on for nobody: whoever restarts the process frees it."""
    while True:
        try:
            return endings.get(timeout=WATCH)
        except queue.Empty:
            for role in hosted:
                work, seconds = role.abandoned()
                if seconds > stall:
                    raise ServiceFailed(
                        f"{role.role}: stalled in {work}, {seconds:.0f} s after its deadline, and nobody waits for it any more; "
                        "if the work takes that long, raise its limit in the timeouts section"
                    ) from None


def _models(roles: list[Role], config: Config, threads: int, credentials: Credentials) -> list[Any]:
    from quartet.models.torch_threads import set_up_torch
    from quartet.rpc.compute_thread import ComputeThread
    from quartet.services.factories import build_model_role

    set_up_torch(threads)
    # Roles that share a process share a GPU, so they share the thread that computes.
    compute = ComputeThread()
    return [build_model_role(role, config, compute, threads, credentials.folder) for role in roles]


def _settle() -> None:
    """Counts what is there by now as permanent, so that cycles are looked for in what has come since.

    Python looks for old ones when a quarter of all is new. With the libraries in that all, those of thousands of steps would
    wait, and memory would grow meanwhile.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # Only now is what is frozen no longer part of that all.


def _orchestrator(
    config: Config,
    endings: queue.SimpleQueue[str],
    status: list[int],
    failures: list[str],
    announcer: ReadyNotifier,
    observation: Observation,
    credentials: Credentials,
) -> tuple[list[Any], threading.Thread]:
    from quartet.models.torch_threads import set_up_torch
    from quartet.run_directory.run_files import RunFiles
    from quartet.services.orchestrator.control.progress import ProgressBoard
    from quartet.services.orchestrator.control.run_control import RunControl
    from quartet.services.orchestrator.run import TrainingRun, run_training
    from quartet.services.orchestrator.servicer import OrchestratorServicer
    from quartet.services.orchestrator.telemetry.run_metrics import BufferDepth, RunMetrics

    set_up_torch(1)
    board = ProgressBoard(config.run.name, config.run.steps)
    control = RunControl(RunFiles(config.run_directory))
    url = required_buffer_url(config, credentials.folder)
    training = TrainingRun(config, url, board, control, _settle, observation.traces, credentials)
    observation.registry.register(RunMetrics(config, board, BufferDepth(url, config.run.name)))

    def finished(code: int) -> None:
        status[0] = code
        if code:
            # For a launcher that was not watching yet when the run ended.
            announcer.say(error=board.current().error, exit_code=code)
            failures.append(board.current().error)
        else:
            announcer.say(outcome=board.current().state)
        endings.put(END_OF_RUN)

    thread = threading.Thread(target=run_training, args=(training, board, finished), name="training", daemon=True)
    return [OrchestratorServicer(board, control, training.live_settings, training.close)], thread


if __name__ == "__main__":
    code = main()
    # All is drained and written; taking the interpreter and torch's pools apart would only take seconds.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
