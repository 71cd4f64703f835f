"""Checks of the methods that take a batch of sequences: shapes, ragged edges, invalid batches, deadlines and limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from quartet.conformance.batches import batch_of, padded, tensor
from quartet.conformance.check import Check
from quartet.conformance.outcome import Skipped, Violation, expect
from quartet.conformance.process_checks import STATUS_SECONDS
from quartet.conformance.target import (
    ERRORS,
    Refusal,
    Target,
    TokenPair,
    require_class,
    require_garbage_refused,
    require_text,
)

TRAJECTORY = "proto/quartet/v1/trajectory.proto"
TENSOR = "proto/quartet/v1/tensor.proto"
LIMITS = "docs/conformance.md"
MANY_SEQUENCES = 256
LARGE_MESSAGE = 8 * 1024 * 1024
"""Bytes of a message that every service must take. The default limit of gRPC is 4 MiB."""
CONCURRENT_CALLS = 8

Lengths = Sequence[tuple[int, int]]
RAGGED: Lengths = ((3, 5), (1, 2), (7, 1), (2, 9), (4, 4))


@dataclass(frozen=True)
class BatchMethod:
    """A method that takes a batch.

    ``request`` makes a request, and ``read`` returns the values of its response, float32 [values]; it raises Violation.
    ``per_token``: there is a value for each response token, otherwise for each sequence. ``rpc`` is the name of the method.
    """

    area: str
    source: str
    rpc: str
    request: Callable[[Any], Any]
    read: Callable[[Any, int], NDArray[np.float32]]
    per_token: bool

    def method(self, target: Target) -> Any:
        """Return the method of a target."""
        return getattr(target.stub, self.rpc)

    def message(self, target: Target, batch: Any) -> Any:
        """Return a request for a batch, with the fields of the target for each prompt."""
        request = self.request(batch)
        if target.limits.fields is not None and hasattr(request, "fields"):
            request.fields.extend([target.limits.fields] * batch.prompt_lengths.shape[0])
        return request

    def count(self, sequences: Sequence[TokenPair]) -> int:
        """Return the number of values of these sequences."""
        return sum(len(response) for _, response in sequences) if self.per_token else len(sequences)

    def values(
        self, target: Target, sequences: Sequence[TokenPair], seconds: float | None = None
    ) -> NDArray[np.float32]:
        """Return the values of sequences. Raises Violation."""
        response = target.call(self.method(target), self.message(target, batch_of(sequences)), seconds)
        return self.read(response, self.count(sequences))

    def split(self, values: NDArray[np.float32], sequences: Sequence[TokenPair]) -> list[NDArray[np.float32]]:
        """Return the values of each sequence."""
        counts = [len(response) if self.per_token else 1 for _, response in sequences]
        return np.split(values, np.cumsum(counts)[:-1])


def require_equal(target: Target, first: NDArray[np.float32], second: NDArray[np.float32], message: str) -> None:
    """Raise Violation with ``message`` if two results differ by more than the tolerance."""
    size = np.maximum(1.0, np.maximum(np.abs(first), np.abs(second)))
    difference = float(np.max(np.abs(first - second) / size, initial=0.0))
    expect(difference <= target.limits.tolerance, f"{message} (they differ by {difference:.2g})")


def require_invalid(target: Target, method: BatchMethod, batch: Any, what: str) -> None:
    """Raise Violation unless the service refuses a batch with INVALID_ARGUMENT."""
    refusal = target.refusal(method.method(target), method.message(target, batch))
    expect(
        refusal.code is grpc.StatusCode.INVALID_ARGUMENT, f"{what} is refused with {refusal}; expected INVALID_ARGUMENT"
    )


def _edges(method: BatchMethod) -> list[tuple[str, str, str, Callable[[Target], None]]]:
    unit = "response token" if method.per_token else "sequence"

    def shape(target: Target) -> None:
        method.values(target, target.sequences(RAGGED))

    def one_token(target: Target) -> None:
        method.values(target, target.sequences([(1, 1)]))

    def long(target: Target) -> None:
        length = target.long_tokens
        method.values(target, target.sequences([(length - length // 2, length // 2), (1, 1)]))

    def many(target: Target) -> None:
        lengths = [(1 + number % 3, 1 + number % 4) for number in range(MANY_SEQUENCES)]
        sequences = target.sequences(lengths)
        values = method.split(method.values(target, sequences), sequences)
        chosen = [0, MANY_SEQUENCES // 2, MANY_SEQUENCES - 1]
        for index in chosen:
            single = method.values(target, [sequences[index]])
            require_equal(
                target,
                values[index],
                single,
                f"sequence {index} of {MANY_SEQUENCES} has other values when it is sent without the others",
            )

    def independence(target: Target) -> None:
        sequences = target.sequences(RAGGED)
        together = method.split(method.values(target, sequences), sequences)
        for index, sequence in enumerate(sequences):
            single = method.values(target, [sequence])
            require_equal(
                target, together[index], single, f"sequence {index} has other values when it is sent without the others"
            )

    def order(target: Target) -> None:
        sequences = target.sequences(RAGGED)
        values = method.split(method.values(target, sequences), sequences)
        backwards = method.split(method.values(target, sequences[::-1]), sequences[::-1])[::-1]
        for index, (first, second) in enumerate(zip(values, backwards, strict=True)):
            require_equal(target, first, second, f"sequence {index} has other values in a batch of the opposite order")

    def distinct(target: Target) -> None:
        sequences = target.sequences([(6, 6)] * 8)
        values = method.values(target, sequences)
        expect(
            len(np.unique(values)) > 1, f"8 random sequences all have the value {values[0]:g}; expected them to differ"
        )

    def repeatable(target: Target) -> None:
        sequences = target.sequences(RAGGED)
        first, second = (method.values(target, sequences) for _ in range(2))
        require_equal(target, first, second, "the same request has other values the second time")

    listed: list[tuple[str, str, str, Callable[[Target], None]]] = [
        ("shape", f"The result has one finite float32 for each {unit}, without padding.", method.source, shape),
        ("one_token", "A prompt and a response may have one token each.", TRAJECTORY, one_token),
        ("long", "A sequence may have as many tokens as max_sequence_tokens of the status.", TRAJECTORY, long),
        ("many", f"A batch may have {MANY_SEQUENCES} sequences.", TRAJECTORY, many),
        (
            "independence",
            "The other sequences of a batch do not change the values of a sequence.",
            TRAJECTORY,
            independence,
        ),
        ("order", "The values have the order of the sequences.", method.source, order),
        ("repeatable", "A repeated request gets the same values.", "docs/architecture.md", repeatable),
    ]
    if method.per_token:  # A reward may be 0 for all random responses.
        listed.append(("distinct", "The values depend on the tokens.", method.source, distinct))
    return listed


def _invalid(method: BatchMethod) -> list[tuple[str, str, str, Callable[[Target], None]]]:
    def changed(target: Target, change: Callable[[Any], None]) -> Any:
        batch = batch_of(target.sequences([(2, 3), (1, 2)]))
        change(batch)
        return batch

    def refuses(what: str, change: Callable[[Any, Target], None]) -> Callable[[Target], None]:
        return lambda target: require_invalid(
            target, method, changed(target, lambda batch: change(batch, target)), what
        )

    def set_token(batch: Any, value: int) -> None:
        ids = np.frombuffer(batch.token_ids.data, "<i4").copy()
        ids[-1] = value
        batch.token_ids.CopyFrom(tensor(ids))

    def too_long(target: Target) -> None:
        if not (limit := target.max_tokens):
            raise Skipped("the status has no max_sequence_tokens")
        require_invalid(target, method, batch_of(target.sequences([(limit, 1)])), f"a sequence of {limit + 1} tokens")

    def harmless(target: Target) -> None:
        sequences = target.sequences(RAGGED)
        before = method.values(target, sequences)
        for _ in range(3):
            target.refusal(method.method(target), method.message(target, batch_of([])))
        require_equal(
            target, before, method.values(target, sequences), "a valid request has other values after a refusal"
        )

    def cut(batch: Any, _: Target) -> None:
        batch.token_ids.data = batch.token_ids.data[:-2]

    def floats(batch: Any, _: Target) -> None:
        batch.token_ids.CopyFrom(tensor(np.ones(8, np.float32)))

    def matrix(batch: Any, _: Target) -> None:
        batch.token_ids.shape[:] = [2, 4]

    def refusal(target: Target) -> Refusal:
        return target.refusal(method.method(target), method.message(target, batch_of([])))

    def garbage(target: Target) -> None:
        require_garbage_refused(target, method.rpc)
        method.values(target, target.sequences([(2, 2)]))

    lengths = "prompt_lengths and response_lengths"
    return [
        (
            "refuses_no_sequences",
            "A batch without sequences is INVALID_ARGUMENT.",
            TRAJECTORY,
            lambda target: require_invalid(target, method, batch_of([]), "a batch without sequences"),
        ),
        (
            "refuses_empty_prompt",
            "A prompt has at least one token; another batch is INVALID_ARGUMENT.",
            TRAJECTORY,
            lambda target: require_invalid(target, method, batch_of(target.sequences([(0, 3)])), "an empty prompt"),
        ),
        (
            "refuses_empty_response",
            "A response has at least one token; another batch is INVALID_ARGUMENT.",
            TRAJECTORY,
            lambda target: require_invalid(target, method, batch_of(target.sequences([(3, 0)])), "an empty response"),
        ),
        (
            "refuses_missing_tokens",
            "token_ids has as many tokens as the lengths say; another batch is INVALID_ARGUMENT.",
            TRAJECTORY,
            refuses(
                "a batch with fewer tokens than its lengths say", lambda batch, _: batch.token_ids.CopyFrom(tensor([1]))
            ),
        ),
        (
            "refuses_other_counts",
            f"{lengths} have the same length; another batch is INVALID_ARGUMENT.",
            TRAJECTORY,
            refuses(
                "a batch with more prompts than responses",
                lambda batch, _: batch.response_lengths.CopyFrom(tensor([5])),
            ),
        ),
        (
            "refuses_negative_length",
            "Lengths are positive; another batch is INVALID_ARGUMENT.",
            TRAJECTORY,
            refuses(
                "a batch with a negative length", lambda batch, _: batch.response_lengths.CopyFrom(tensor([9, -4]))
            ),
        ),
        (
            "refuses_unknown_token",
            "A token id at or above vocabulary_size is INVALID_ARGUMENT.",
            TRAJECTORY,
            refuses(
                "a token id that is vocabulary_size", lambda batch, target: set_token(batch, target.vocabulary_size)
            ),
        ),
        (
            "refuses_negative_token",
            "A negative token id is INVALID_ARGUMENT.",
            TRAJECTORY,
            refuses("a negative token id", lambda batch, _: set_token(batch, -1)),
        ),
        (
            "refuses_too_long",
            "A sequence over max_sequence_tokens is INVALID_ARGUMENT.",
            "proto/quartet/v1/status.proto",
            too_long,
        ),
        (
            "refuses_cut_data",
            "A tensor whose data does not fit its shape is INVALID_ARGUMENT.",
            TENSOR,
            refuses("a tensor without its last bytes", cut),
        ),
        (
            "refuses_floats",
            "Token ids that are not int32 are INVALID_ARGUMENT.",
            TENSOR,
            refuses("a tensor of float32 token ids", floats),
        ),
        (
            "refuses_matrix",
            "Token ids of two dimensions are INVALID_ARGUMENT.",
            TENSOR,
            refuses("a matrix of token ids", matrix),
        ),
        ("refusal_harmless", "A refused request changes nothing.", "docs/architecture.md", harmless),
        (
            "error_class",
            "The class of an error in google.rpc.ErrorInfo is of the domain quartet, and fits the status code.",
            ERRORS,
            lambda target: require_class(refusal(target)),
        ),
        (
            "error_text",
            "The text of an error is one line that is not too long.",
            ERRORS,
            lambda target: require_text(refusal(target)),
        ),
        (
            "garbage",
            "A request that is not the message fails, and the service continues.",
            "docs/threat-model.md",
            garbage,
        ),
    ]


def _calls(method: BatchMethod) -> list[tuple[str, str, str, Callable[[Target], None]]]:
    def large(target: Target) -> list[TokenPair]:
        length = min(target.long_tokens, 64)
        return target.sequences([(length // 2, length - length // 2)] * MANY_SEQUENCES)

    def require_service(target: Target, after: str) -> None:
        sequences = target.sequences([(2, 2)])
        try:
            method.values(target, sequences)
        except Violation as violation:
            raise Violation(f"after {after}, {violation}") from None

    def deadline(target: Target) -> None:
        request = method.message(target, batch_of(large(target)))
        for seconds in (0.01, 0.05, 0.2):
            call = target.start(method.method(target), request, seconds)
            code = call.code()
            expect(
                code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.OK),
                f"a call with a deadline of {seconds:g} s ends with {code.name}; expected DEADLINE_EXCEEDED",
            )
        require_service(target, "calls whose deadline has passed")
        require_idle(target, "calls whose deadline has passed")

    def cancel(target: Target) -> None:
        request = method.message(target, batch_of(large(target)))
        for _ in range(3):
            call = target.start(method.method(target), request)
            time.sleep(0.02)
            call.cancel()
        require_service(target, "cancelled calls")
        require_idle(target, "cancelled calls")

    def concurrent(target: Target) -> None:
        batches = [target.sequences([(2, 1 + number), (3, 2)]) for number in range(CONCURRENT_CALLS)]
        calls = [target.start(method.method(target), method.message(target, batch_of(batch))) for batch in batches]
        results = []
        for call, batch in zip(calls, batches, strict=True):
            try:
                results.append(method.read(call.result(), method.count(batch)))
            except grpc.RpcError as error:
                raise Violation(f"one of {CONCURRENT_CALLS} calls at once failed with {Refusal.of(error)}") from None
        for result, batch in zip(results, batches, strict=True):
            require_equal(target, result, method.values(target, batch), "a call has other values among calls at once")

    def status(target: Target) -> None:
        requests = [method.message(target, batch_of(large(target))) for _ in range(4)]
        calls = [target.start(method.method(target), request) for request in requests]
        require_quick_status(target, calls)

    def large_message(target: Target) -> None:
        sequences = target.sequences(RAGGED)
        plain = method.values(target, sequences)
        request = padded(method.message(target, batch_of(sequences)), LARGE_MESSAGE)
        response = target.call(method.method(target), request)
        values = method.read(response, method.count(sequences))
        require_equal(target, plain, values, "a request with an unknown field has other values")

    return [
        ("deadline", "A call whose deadline passes ends, and does not stay in the service's way.", LIMITS, deadline),
        ("cancel", "A cancelled call ends, and does not stay in the service's way.", LIMITS, cancel),
        ("concurrent", f"{CONCURRENT_CALLS} calls at once each get their own values.", LIMITS, concurrent),
        ("status", "GetStatus answers at once, also during other calls.", "proto/quartet/v1/status.proto", status),
        (
            "large_message",
            f"A message of {LARGE_MESSAGE // 1024**2} MiB is accepted, and unknown fields are ignored.",
            LIMITS,
            large_message,
        ),
    ]


def require_quick_status(target: Target, calls: Sequence[Any]) -> None:
    """Raise Violation unless GetStatus answers at once while ``calls`` run, for a second at most. Cancels the calls."""
    slowest, end = 0.0, time.monotonic() + 1.0
    while slowest == 0 or (time.monotonic() < end and not all(call.done() for call in calls)):
        started = time.monotonic()
        target.status()
        slowest = max(slowest, time.monotonic() - started)
        time.sleep(0.02)
    for call in calls:
        call.cancel()
    expect(slowest < STATUS_SECONDS, f"GetStatus took {slowest:.1f} s during other calls; expected an answer at once")


def require_idle(target: Target, after: str) -> None:
    """Raise Violation if the status shows pending work of callers that are gone. Services may leave work_pending at 0."""
    idle = target.wait_for(lambda: target.status().work_pending == 0, target.limits.seconds)
    expect(idle, f"work_pending is {target.status().work_pending} after {after}; expected 0")


def batch_checks(method: BatchMethod) -> list[Check]:
    """Return the checks of a method that takes a batch."""
    listed = [*_edges(method), *_invalid(method), *_calls(method)]
    return [Check(f"{method.area}.{name}", requirement, source, run) for name, requirement, source, run in listed]
