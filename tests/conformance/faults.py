"""Faults that a service may have, as changes of a correct one."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from quartet.codec.scoring import score_request_from_proto, scores_to_proto
from quartet.contract.status import ServiceStatus
from quartet.contract.trajectory import Outcome, Scores
from quartet.contract.update import UpdateResult
from quartet.errors import Cancelled, FailedPrecondition, InvalidRequest, QuartetError, ScorerFailed, ServiceFailed
from quartet.v1 import trajectory_pb2
from tests.conformance.models import Service


def response(method: str, change: Callable[[Any], Any]) -> Callable[[Service], None]:
    """Return a mutation of the responses of a method."""

    def mutate(service: Service) -> None:
        right = getattr(service.servicer, method)

        def wrong(request: Any, context: Any) -> Any:
            answer = right(request, context)
            return change(answer) or answer

        setattr(service.servicer, method, wrong)

    return mutate


def request(method: str, change: Callable[[Any], Any]) -> Callable[[Service], None]:
    """Return a mutation of the requests that a method sees."""

    def mutate(service: Service) -> None:
        right = getattr(service.servicer, method)

        def wrong(message: Any, context: Any) -> Any:
            change(message)
            return right(message, context)

        setattr(service.servicer, method, wrong)

    return mutate


def model(name: str, wrong: Callable[..., Any]) -> Callable[[Service], None]:
    """Return a mutation of the model: ``wrong(model, right, *arguments)`` takes the place of a method."""

    def mutate(service: Service) -> None:
        right = getattr(service.model, name)
        setattr(service.model, name, lambda *arguments, **named: wrong(service.model, right, *arguments, **named))

    return mutate


def scores(change: Callable[[np.ndarray[Any, Any]], Any]) -> Callable[[Service], None]:
    """Return a mutation of the scores as an array."""

    def wrong(_: Any, right: Any, *arguments: Any) -> Scores:
        return Scores(np.asarray(change(right(*arguments).total), np.float32))

    return model("score", wrong)


def values(change: Callable[[np.ndarray[Any, Any]], Any], method: str = "values") -> Callable[[Service], None]:
    return model(method, lambda _, right, *arguments: np.asarray(change(right(*arguments)), np.float32))


def instead_of_refusal(condition: Callable[[Any], bool], make: Callable[[Any], Any]) -> Callable[[Service], None]:
    """Return a mutation of Score: a request with this condition gets a made-up response."""

    def mutate(service: Service) -> None:
        right = service.servicer.Score
        service.servicer.Score = lambda message, context: (
            make(message) if condition(message.batch) else right(message, context)
        )

    return mutate


def lengths(batch: Any, name: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(getattr(batch, name).data, "<i4")


def zeros(message: Any) -> Any:
    return scores_to_proto(Scores(np.zeros(len(lengths(message.batch, "prompt_lengths")), np.float32)))


def accepts(condition: Callable[[Any], bool]) -> Callable[[Service], None]:
    return instead_of_refusal(condition, zeros)


def refuses(condition: Callable[[Any], bool], error: type[QuartetError] = InvalidRequest) -> Callable[[Service], None]:
    def fail(_: Any) -> Any:
        raise error("no")

    return instead_of_refusal(condition, fail)


def tokens_of(batch: Any) -> np.ndarray[Any, Any]:
    data = batch.token_ids.data
    return np.frombuffer(data[: len(data) // 4 * 4], "<i4")


def outcomes(change: Callable[[list[int]], list[int]]) -> Callable[[Service], None]:
    """Return a mutation of the outcomes, which are all ok, while the scores stay numbers."""

    def add(answer: Any) -> None:
        answer.outcomes[:] = change([trajectory_pb2.OUTCOME_OK] * answer.scores.shape[0])

    return response("Score", add)


def without_number(answer: Any) -> None:
    """Put NaN in the place of the first score, which is still ok."""
    answer.scores.data = np.float32(np.nan).tobytes() + answer.scores.data[4:]


def zeros_for_failures(answer: Any) -> None:
    scores = np.nan_to_num(np.frombuffer(answer.scores.data, "<f4"))
    answer.scores.data = scores.astype("<f4").tobytes()
    del answer.outcomes[:], answer.details[:]


def fails_together(_: Any, right: Any, *arguments: Any) -> Scores:
    """Give no response a score if one has none."""
    scores: Scores = right(*arguments)
    if not scores.outcomes:
        return scores
    count = len(scores.total)
    return Scores(np.full(count, np.nan, np.float32), outcomes=(Outcome.SCORER_ERROR,) * count)


def raises_together(_: Any, right: Any, *arguments: Any) -> Scores:
    scores: Scores = right(*arguments)
    if scores.outcomes:
        raise ScorerFailed("one response has no score")
    return scores


def unknown_type(answer: Any) -> None:
    answer.scores.dtype = 99


def wrong_shape(answer: Any) -> None:
    answer.scores.shape.append(1)


def padded(answer: Any) -> None:
    answer.scores.data += bytes(12)
    answer.scores.shape[0] += 3


def doubles(answer: Any) -> None:
    answer.scores.data = np.frombuffer(answer.scores.data, "<f4").astype("<f8").tobytes()


def short_part(answer: Any) -> None:
    part = answer.parts["half"]
    part.data, part.shape[0] = part.data[:-4], part.shape[0] - 1


def hangs(service: Service) -> None:
    """Answer nothing for a while after the first large call whose caller is gone."""
    right, blocked = service.model.score, threading.Event()

    def wrong(batch: Any, fields: Any, cancelled: Callable[[], bool]) -> Scores:
        if len(batch) > 200:
            deadline = time.monotonic() + 0.2
            while not cancelled() and time.monotonic() < deadline:
                time.sleep(0.005)
            if cancelled() and not blocked.is_set():
                blocked.set()
                time.sleep(2)
        scored: Scores = right(batch, fields, cancelled)
        return scored

    service.model.score = wrong


def hangs_after_deadline(service: Service) -> None:
    """Answer nothing for a while after the first call with a short deadline."""
    right, blocked = service.servicer.Score, threading.Event()

    def wrong(message: Any, context: Any) -> Any:
        if context.time_remaining() < 1 and not blocked.is_set():
            blocked.set()
            service.servicer.compute._executor.submit(time.sleep, 2)
        return right(message, context)

    service.servicer.Score = wrong


def shares_state(service: Service) -> None:
    """Keep the batch of a call in a field, where the next call overwrites it."""
    right, model = service.servicer.Score, service.model
    real = model.score

    def wrong(message: Any, context: Any) -> Any:
        model.current = score_request_from_proto(message)[0]
        time.sleep(0.05)
        return right(message, context)

    def score(batch: Any, fields: Any, cancelled: Any) -> Scores:
        answer = real(model.current, fields, cancelled)
        total = np.resize(answer.total, len(batch))
        return Scores(total)

    service.servicer.Score, model.score = wrong, score


def small_messages(service: Service) -> None:
    right = service.servicer.Score

    def wrong(message: Any, context: Any) -> Any:
        if message.ByteSize() > 4 * 1024 * 1024:
            raise InvalidRequest("message larger than 4 MiB")
        return right(message, context)

    service.servicer.Score = wrong


def slow_status(service: Service) -> None:
    right = service.servicer.status

    def wrong() -> ServiceStatus:
        if service.servicer.compute.pending():
            time.sleep(1.2)
        return right()  # type: ignore[no-any-return]

    real = service.model.score

    def score(batch: Any, *arguments: Any) -> Scores:
        time.sleep(0.5 if len(batch) > 200 else 0)
        return real(batch, *arguments)  # type: ignore[no-any-return]

    service.servicer.status, service.model.score = wrong, score


def health(name: str, status: int) -> Callable[[Service], None]:
    def mutate(service: Service) -> None:
        service.after_start.append(lambda server: server._health.set(name, status))

    return mutate


def status(**changes: Any) -> Callable[[Service], None]:
    def mutate(service: Service) -> None:
        right = service.servicer.status
        service.servicer.status = lambda: replace(right(), **changes)

    return mutate


def other_error(error: Exception) -> Callable[[Service], None]:
    def fail(_: Any) -> Any:
        raise error

    return instead_of_refusal(lambda batch: not len(lengths(batch, "prompt_lengths")), fail)


class Misnamed(Cancelled, InvalidRequest):
    """An error with the class Cancelled on the wire, and the status code of InvalidRequest."""


def shifted_after_refusal(service: Service) -> None:
    refused = []
    right = service.servicer.Score

    def wrong(message: Any, context: Any) -> Any:
        try:
            answer = right(message, context)
        except QuartetError:
            refused.append(1)
            raise
        if refused:
            answer.scores.data = (np.frombuffer(answer.scores.data, "<f4") + 1).astype("<f4").tobytes()
        return answer

    service.servicer.Score = wrong


def noisy(service: Service) -> None:
    numbers = itertools.count()
    scores(lambda total: total + next(numbers))(service)


def positions(change: Callable[[int, int], tuple[int, int]]) -> Callable[[Service], None]:
    """Return a mutation of log-probs: the rows of the distribution from (first, last) of each response."""

    def wrong(tiny: Any, right: Any, batch: Any, temperature: float, reference: bool = False) -> Any:
        right(batch, temperature, reference)
        parts = []
        for ids, prompt in zip(batch.sequences(), batch.prompt_lengths, strict=True):
            first, last = change(int(prompt), len(ids))
            rows = np.clip(np.arange(first, last), 0, len(ids) - 1)
            parts.append(tiny.distribution(ids, temperature)[rows, ids[prompt:]])
        return np.concatenate(parts).astype(np.float32)

    return model("log_probs", wrong)


def logits_of(tiny: Any, right: Any, batch: Any, temperature: float, reference: bool = False) -> Any:
    right(batch, temperature, reference)
    parts = [
        tiny.logits(ids)[np.arange(prompt - 1, len(ids) - 1), ids[prompt:]]
        for ids, prompt in zip(batch.sequences(), batch.prompt_lengths, strict=True)
    ]
    return np.concatenate(parts).astype(np.float32) - 5


def length_dependent(tiny: Any, right: Any, batch: Any, temperature: float, reference: bool = False) -> Any:
    values = right(batch, temperature, reference)
    return values - np.repeat(batch.response_lengths, batch.response_lengths).astype(np.float32) / 10


def border(tiny: Any, right: Any, batch: Any, temperature: float, reference: bool = False) -> Any:
    values = right(batch, temperature, reference)
    return values - np.repeat(batch.prompt_lengths, batch.response_lengths).astype(np.float32) / 10


def shifted_values(offset: int) -> Callable[[Service], None]:
    def wrong(tiny: Any, right: Any, batch: Any) -> Any:
        right(batch)
        parts = []
        for ids, prompt in zip(batch.sequences(), batch.prompt_lengths, strict=True):
            rows = np.clip(np.arange(prompt - 1, len(ids) - 1) + offset, 0, len(ids) - 1)
            parts.append(tiny.logits(ids)[rows, 5])
        return np.concatenate(parts).astype(np.float32)

    return model("values", wrong)


def constant_state(tiny: Any, right: Any, batch: Any) -> Any:
    """Values that see the response only: the first one does not depend on the prompt."""
    right(batch)
    parts = [
        np.concatenate([[0.5], tiny.logits(ids[prompt:])[:-1, 5]])
        for ids, prompt in zip(batch.sequences(), batch.prompt_lengths, strict=True)
    ]
    return np.concatenate(parts).astype(np.float32)


def forgetful(tiny: Any, right: Any, run: str, step: int, *rest: Any) -> UpdateResult:
    """Apply a repeated update again."""
    if (run, step) == (tiny.updates.run, tiny.updates.step):
        tiny.weights = tiny.weights * 1.5
    return right(run, step, *rest)  # type: ignore[no-any-return]


def unfenced(tiny: Any, right: Any, *arguments: Any) -> Any:
    tiny.updates._fence.epoch = 0
    return right(*arguments)


def any_step(tiny: Any, right: Any, run: str, step: int, *rest: Any) -> UpdateResult:
    if step != tiny.updates.step:
        tiny.updates.step = step - 1
    return right(run, step, *rest)  # type: ignore[no-any-return]


def any_run(tiny: Any, right: Any, run: str, *rest: Any) -> UpdateResult:
    tiny.updates.run = run
    return right(run, *rest)  # type: ignore[no-any-return]


def keeps_scale(tiny: Any, right: Any, *arguments: Any) -> None:
    """Restore the counters, but not the weights."""
    tiny.weights = tiny.weights * tiny.scale()
    right(*arguments)


def without_metric(answer: Any) -> None:
    del answer.metrics["grad_norm"]


def any_settings(service: Service) -> None:
    right = service.servicer.Update

    def wrong(message: Any, context: Any) -> Any:
        message.optimization.num_epochs = 1
        if not message.optimization.learning_rate >= 0:
            message.optimization.learning_rate = 1.0
        return right(message, context)

    service.servicer.Update = wrong


def anywhere(tiny: Any, right: Any, run: str, epoch: int, directory: str, *rest: Any) -> Any:
    return right(run, epoch, directory.replace("..", "up").strip("/") or "root", *rest)


def without_sha(answer: Any) -> None:
    for file in answer.files:
        file.sha256 = ""


def elsewhere(answer: Any) -> None:
    for file in answer.files:
        file.path = f"other/{file.path}"


def events(change: Callable[[list[Any]], list[Any]]) -> Callable[[Service], None]:
    def mutate(service: Service) -> None:
        right = service.servicer.Generate
        service.servicer.Generate = lambda message, context: iter(change(list(right(message, context))))

    return mutate


def trajectories(change: Callable[[list[Any]], list[Any]]) -> Callable[[Service], None]:
    return model("trajectories", lambda _, right, batch: change(right(batch)))


def each_trajectory(change: Callable[[Any], Any]) -> Callable[[Service], None]:
    return trajectories(lambda done: [change(trajectory) for trajectory in done])


def unseeded(service: Service) -> None:
    numbers = itertools.count(100)
    model("sample", lambda _, right, one, batch: right(one, replace(batch, seed=next(numbers))))(service)


def writes_before_refusal(service: Service) -> None:
    def admit(tiny: Any, right: Any, batch: Any) -> None:
        try:
            right(batch)
        except FailedPrecondition:
            from quartet.buffer.connection import connect
            from quartet.buffer.rollout_stream import RolloutStream

            RolloutStream(connect(tiny.url), tiny.url, batch.run).append(tiny.trajectories(batch), 1)
            raise

    model("admit", admit)(service)


def longer(trajectory: Any) -> Any:
    prompt, turn = trajectory.segments
    ids, log_probs = np.append(turn.token_ids, np.int32(1)), np.append(turn.log_probs, np.float32(-1))
    return replace(trajectory, segments=(prompt, replace(turn, token_ids=ids, log_probs=log_probs)))


def sampled_greedy(service: Service) -> None:
    def wrong(_: Any, right: Any, one: Any, batch: Any) -> Any:
        if batch.sampling.temperature:
            return right(one, batch)
        return right(one, replace(batch, sampling=replace(batch.sampling, temperature=3.0)))

    model("sample", wrong)(service)


def any_sampling(service: Service) -> None:
    """Generate one token if a request asks for none."""
    right = service.servicer.Generate

    def wrong(message: Any, context: Any) -> Any:
        message.sampling.max_response_tokens = max(1, message.sampling.max_response_tokens)
        return right(message, context)

    service.servicer.Generate = wrong


def hangs_after_cancellation(service: Service) -> None:
    """Work for a while on the first request, whether its caller is there or not."""
    model("trajectories", lambda _, right, batch: time.sleep(2) or right(batch))(service)


def confused_by_fields(_: Any, right: Any, batch: Any, fields: Any, cancelled: Any) -> Scores:
    if len(fields) not in (0, len(batch)):
        raise ServiceFailed("list index out of range")
    return right(batch, fields, cancelled)  # type: ignore[no-any-return]


def neighbours(service: Service) -> None:
    """Let the number of requests change a response."""
    model("sample", lambda _, right, one, batch: right(one, replace(batch, seed=batch.seed + len(batch.requests))))(
        service
    )


def no_sequences(batch: Any) -> bool:
    return not len(lengths(batch, "prompt_lengths"))


def has_empty(name: str) -> Callable[[Any], bool]:
    return lambda batch: bool(len(lengths(batch, name)) and lengths(batch, name).min() == 0)


def drop_last(total: Any) -> Any:
    return total[:-1]
