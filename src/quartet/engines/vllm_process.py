"""vLLM's AsyncLLM in an event loop of its thread: start, calls and end of vLLM's processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from quartet.engines.vllm_library import NAME, Library, check_head_size
from quartet.errors import ConfigError, EngineFailed, ServiceFailed
from quartet.system.child_processes import tied_spawns

EXIT_SECONDS = 20.0
"""Time that vLLM's processes get to end."""


class LoopTask:
    """A task of an event loop in another thread."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._ended = loop, threading.Event()
        self._task: asyncio.Task[None]
        loop.call_soon_threadsafe(self._start, coroutine)

    def cancel(self) -> None:
        """Cancel the task, and wait until it has ended."""
        self._loop.call_soon_threadsafe(lambda: self._task.cancel())
        self._ended.wait()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(lambda _: self._ended.set())


class StepClock:
    """Time since the last step of vLLM. vLLM reports each step to its logger of statistics."""

    def __init__(self) -> None:
        self.mark()

    def mark(self) -> None:
        """Record a step."""
        self._last = time.monotonic()

    def seconds(self) -> float:
        """Return the time since the last step."""
        return time.monotonic() - self._last

    def logger(self, *_: Any) -> Any:
        """Return a logger of vLLM's statistics that records steps and writes nothing."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        clock = self

        class StepLogger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self) -> None:
                pass

            def record(self, *_: Any, **__: Any) -> None:
                clock.mark()

            def log_engine_initialized(self) -> None:
                pass

        return StepLogger()


class VLLMProcess:
    """vLLM in its processes. Every call may come from any thread."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._processes: set[Any] = set()
        self._steps = StepClock()
        self._asleep = False
        self.llm: Any = None
        """The AsyncLLM; None before the start."""

    def start(self, arguments: Mapping[str, Any]) -> None:
        """Start vLLM with these arguments. Raises ConfigError."""
        before = set(multiprocessing.active_children())
        try:
            config = self._library.AsyncEngineArgs(**arguments).create_engine_config()
            check_head_size(config.model_config.get_head_size(), arguments["model"])
            with tied_spawns():  # The thread of the loop spawns vLLM's processes.
                start = _start(self._library.AsyncLLM, config, self._steps.logger)
                self.llm = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{NAME} does not start with the model {arguments['model']}: {error_text(error)}; the log above has the cause if "
                "it is in one of vLLM's processes"
            ) from error
        self._processes = set(multiprocessing.active_children()) - before

    def call(self, coroutine: Coroutine[Any, Any, Any], name: str) -> Any:
        """Return the result of a coroutine of the AsyncLLM. Raises ServiceFailed, which shows ``name``."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except Exception as error:
            raise self.failure(f"{NAME}: {name} failed: {error_text(error)}") from error

    def failure(self, text: str) -> ServiceFailed:
        """Return the error to raise: EngineFailed if one of vLLM's processes has died, because it never recovers."""
        return EngineFailed(text) if self.llm is not None and self.llm.errored else ServiceFailed(text)

    def rpc(self, method: str, *arguments: Any) -> list[str]:
        """Call a method in every worker and return the result of each rank. Raises ServiceFailed."""
        replies: list[str] = self.call(self.llm.collective_rpc(method, args=arguments), method)
        return replies

    def update_weights(self, regions: list[list[int]], tensors: Mapping[str, list[Any]]) -> None:
        """Let every worker load tensors from shared memory, see ``vllm_transfer.SharedTensors``. Raises ServiceFailed."""
        request = self._library.WeightTransferUpdateRequest({"regions": regions, "tensors": dict(tensors)})
        self.call(self.llm.start_weight_update(), "start_weight_update")
        self.call(self.llm.update_weights(request), "update_weights")
        try:
            self.call(self.llm.finish_weight_update(), "finish_weight_update")
        except ServiceFailed as error:
            raise EngineFailed(str(error)) from error  # vLLM begins no further update.

    def run(self, coroutine: Coroutine[Any, Any, None]) -> LoopTask:
        """Start a coroutine as a task."""
        return LoopTask(coroutine, self._loop)

    def idle_seconds(self) -> float:
        """Return the time since vLLM's last step, or the last call of ``mark_active``."""
        return self._steps.seconds()

    def mark_active(self) -> None:
        """Count the present as a step: vLLM had nothing to compute until now."""
        self._steps.mark()

    def sleep(self) -> None:
        """Move the weights to host memory and discard the cache."""
        if self.llm is not None and not self._asleep:
            self.call(self.llm.sleep(level=1), "sleep")
            self._asleep = True

    def wake(self) -> None:
        """Move the weights back to the GPU after ``sleep``."""
        if self._asleep:
            self.call(self.llm.wake_up(), "wake_up")
            self._asleep = False

    def close(self) -> None:
        """End vLLM's processes and the thread."""
        llm, self.llm = self.llm, None
        if not self._thread.is_alive():
            return
        # Before vLLM's processes end: its task that reads their output would report their end as an error.
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()
        if llm is not None:
            llm.shutdown()
        for process in self._processes:
            process.join(EXIT_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def error_text(error: BaseException) -> str:
    """Return the message of an error and of its causes: vLLM's own errors are often empty."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None:
        text = str(current) or type(current).__name__
        if text not in parts:
            parts.append(text)
        current = current.__cause__
    return ": ".join(parts)


async def _start(engine: Any, config: Any, step_logger: Any) -> Any:
    """Create vLLM's engine in the event loop that its tasks run in."""
    return engine.from_vllm_config(config, stat_loggers=[step_logger])


async def _end_tasks() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
