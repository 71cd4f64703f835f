"""Calls in progress: the response of a unary method, and the messages of a server stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import grpc

from quartet.errors import Cancelled, QuartetError

T = TypeVar("T")
ErrorOf = Callable[[grpc.RpcError], QuartetError]


class PendingCall:
    """A call whose response is pending."""

    def __init__(self, future: Any, error_of: ErrorOf, title: str) -> None:
        """``future`` is the call's, ``error_of`` converts its failure, and ``title`` names service and method."""
        self._future, self._error_of, self._title = future, error_of, title

    def done(self) -> bool:
        """Return whether the call has ended, with a response or a failure."""
        return bool(self._future.done())

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on another thread when the call ends, or now if it has ended."""
        self._future.add_done_callback(lambda _: callback())

    def result(self) -> Any:
        """Wait for the response. Raises the exception that the service raised, Cancelled after ``cancel``."""
        try:
            return self._future.result()
        except grpc.RpcError as error:
            raise self._error_of(error) from None
        except grpc.FutureCancelledError:
            raise Cancelled(f"{self._title}: cancelled") from None

    def cancel(self) -> None:
        """Cancel the call. The service learns of it and may stop its work."""
        self._future.cancel()


class PendingStream(PendingCall):
    """A call with a stream of responses. A separate thread reads it; the result is the last message."""

    def __init__(
        self, stream: Any, error_of: ErrorOf, title: str, on_message: Callable[[Any], None] = lambda message: None
    ) -> None:
        """``on_message`` receives every message on that thread. See ``PendingCall`` for the rest."""
        super().__init__(Future(), error_of, title)
        self._stream, self._on_message = stream, on_message
        threading.Thread(target=self._read, name="stream", daemon=True).start()

    def cancel(self) -> None:
        """Cancel the call. The service learns of it and may stop its work."""
        self._stream.cancel()

    def _read(self) -> None:
        last: Any = None
        try:
            for message in self._stream:
                last = message
                self._on_message(message)
        except Exception as error:
            self._future.set_exception(grpc.FutureCancelledError() if self._stream.cancelled() else error)
        else:
            self._future.set_result(last)


class PendingResult(Generic[T]):
    """A pending call together with the conversion of its response."""

    def __init__(self, pending: PendingCall | PendingResult[Any], convert: Callable[[Any], T]) -> None:
        self._pending, self._convert = pending, convert
        self._result: T | None = None

    def done(self) -> bool:
        """Return whether the call has ended, with a response or a failure."""
        return self._pending.done()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on another thread when the call ends, or now if it has ended."""
        self._pending.when_done(callback)

    def result(self) -> T:
        """Wait for the response and return it converted. Raises the exception that the service raised."""
        if self._result is None:
            self._result = self._convert(self._pending.result())
        return self._result

    def cancel(self) -> None:
        """Cancel the call. The service learns of it and may stop its work."""
        self._pending.cancel()


class PendingGeneration(PendingResult[int]):
    """A pending Generate call. Its result is the number of trajectories in the rollout stream."""
