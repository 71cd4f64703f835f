"""Checks of what the values of reward, reference, critic and actor mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from quartet.conformance.batch_checks import RAGGED, BatchMethod, require_equal
from quartet.conformance.batches import batch_of, floats
from quartet.conformance.check import Check
from quartet.conformance.environment_sessions import MAX_DETAIL
from quartet.conformance.outcome import Skipped, Violation, expect
from quartet.conformance.target import Target, TokenPair
from quartet.v1 import actor_pb2, critic_pb2, reference_pb2, reward_pb2, trajectory_pb2

REWARD = "proto/quartet/v1/reward.proto: ScoreResponse"
REFERENCE = "proto/quartet/v1/reference.proto: LogProbsResponse"
ACTOR = "proto/quartet/v1/actor.proto: LogProbsResponse"
CRITIC = "proto/quartet/v1/critic.proto: ValuesResponse"
MAX_VOCABULARY = 2048
"""Largest vocabulary whose whole distribution is computed."""
PROBABILITY_TOLERANCE = 0.01
NUM_RANDOM_RESPONSES = 64
"""Random responses whose scores are compared with each other."""

Request = Callable[[Any, float], Any]


def _read_scores(response: Any, count: int) -> NDArray[np.float32]:
    """Return the scores. Raises Violation, and Skipped if the source has no score for a sequence."""
    if problem := _require_valid(response, count):
        raise Skipped(f"{problem}; give --fields if the source needs them")
    for name, part in response.parts.items():
        floats(part, f"parts[{name!r}]", count, finite=False)
    return floats(response.scores, "scores", count)


def _require_valid(response: Any, count: int) -> str:
    """Raise Violation if scores and outcomes contradict each other. Return the cause of the first missing score, or ""."""
    scores = floats(response.scores, "scores", count, finite=not response.outcomes)
    if not response.outcomes:
        return ""
    for name in ("outcomes", "details"):
        given = len(getattr(response, name))
        expect(given in (0, count), f"{name}: has {given} entries; expected none, or {count}")
    known = trajectory_pb2.Outcome.values()
    unknown = [outcome for outcome in response.outcomes if outcome not in known]
    expect(not unknown, f"outcomes: has {unknown[:1]}; expected numbers of Outcome")
    for index, detail in enumerate(response.details):
        expect(
            len(detail) <= MAX_DETAIL, f"details[{index}] has {len(detail)} characters; expected at most {MAX_DETAIL}"
        )
    names = [trajectory_pb2.Outcome.Name(outcome) for outcome in response.outcomes]
    failures = [name != "OUTCOME_OK" for name in names]
    for index, (score, name, failed) in enumerate(zip(scores, names, failures, strict=True)):
        expect(
            np.isnan(score) if failed else np.isfinite(score),
            f"sequence {index} has the score {score:g} with {name}; expected a finite number with OUTCOME_OK, and NaN with any "
            "other",
        )
        expect(name != "OUTCOME_UNSPECIFIED", f"sequence {index} has {name}, which is never valid")
    if not any(failures):
        return ""
    first = failures.index(True)
    detail = response.details[first] if response.details else "no detail"
    return f"sequence {first} has no score: {names[first]}, {detail[:200]}"


SCORE = BatchMethod(
    "score",
    REWARD,
    "Score",
    lambda batch: reward_pb2.ScoreRequest(batch=batch),
    _read_scores,
    per_token=False,
)
VALUES = BatchMethod(
    "values",
    CRITIC,
    "Values",
    lambda batch: critic_pb2.ValuesRequest(batch=batch),
    lambda response, count: floats(response.values, "values", count),
    per_token=True,
)


def log_probs_method(source: str, request: Request, temperature: float = 1.0) -> BatchMethod:
    """Return LogProbs of the reference or of the actor at a temperature."""
    return BatchMethod(
        "log_probs",
        source,
        "LogProbs",
        lambda batch: request(batch, temperature),
        lambda response, count: floats(response.log_probs, "log_probs", count),
        per_token=True,
    )


def _reference_request(batch: Any, temperature: float) -> Any:
    return reference_pb2.ReferenceServiceLogProbsRequest(batch=batch, temperature=temperature)


def _actor_request(batch: Any, temperature: float) -> Any:
    return actor_pb2.ActorServiceLogProbsRequest(batch=batch, temperature=temperature)


REFERENCE_LOG_PROBS = log_probs_method(REFERENCE, _reference_request)
ACTOR_LOG_PROBS = log_probs_method(ACTOR, _actor_request)


def reward_checks() -> list[Check]:
    """Return the checks of scores."""

    def not_constant(target: Target) -> None:
        sequences = target.sequences([(6, 6)] * NUM_RANDOM_RESPONSES)
        if ids := target.limits.distinct_response:
            sequences.append((sequences[0][0], np.array(ids, np.int32)))
        scores = SCORE.values(target, sequences)
        size = max(1.0, float(np.abs(scores).max()))
        if np.ptp(scores) > target.limits.tolerance * size:
            return
        equal = f"{NUM_RANDOM_RESPONSES} random responses have the same score, {scores[0]:g}"
        expect(not ids, f"{equal}, and so has that of --distinct-response; expected another one")
        # A reward may be 0 for all random responses.
        raise Skipped(
            f"{equal}, so a constant would pass as well; give --fields with which they differ, or --distinct-response"
        )

    def fields(target: Target) -> None:
        sequences = target.sequences(RAGGED)
        objects = [
            target.limits.fields or f'{{"answer":"{number}","prompt_set":"ü"}}' for number in range(len(sequences))
        ]
        request = reward_pb2.ScoreRequest(batch=batch_of(sequences), fields=objects)
        _read_scores(target.call(target.stub.Score, request), len(sequences))

    def fields_count(target: Target) -> None:
        request = reward_pb2.ScoreRequest(batch=batch_of(target.sequences(RAGGED)), fields=["{}"])
        try:
            response = target.call(target.stub.Score, request)
        except Violation as refused:
            expect("INVALID_ARGUMENT" in str(refused), f"too few fields: {refused}; expected INVALID_ARGUMENT")
        else:
            # A source that does not use fields need not look at them.
            _read_scores(response, len(RAGGED))

    def failure(target: Target) -> None:
        if (failing := target.limits.failing_fields) is None:
            raise Skipped("needs fields with which the reward fails; give --failing-fields")
        sequences, usual = target.sequences(RAGGED), target.limits.fields or "{}"
        first, second = (
            target.call(target.stub.Score, reward_pb2.ScoreRequest(batch=batch_of(sequences), fields=fields))
            for fields in ([usual] * len(sequences), [usual, failing, *[usual] * (len(sequences) - 2)])
        )
        before = _read_scores(first, len(sequences))
        _require_valid(second, len(sequences))
        failed = [index for index, outcome in enumerate(second.outcomes) if outcome != trajectory_pb2.OUTCOME_OK]
        expect(
            failed == [1], f"sequences {failed} have no score; expected [1], which has the fields of --failing-fields"
        )
        after = floats(second.scores, "scores", len(sequences), finite=False)
        others = [0, *range(2, len(sequences))]
        require_equal(target, before[others], after[others], "a sequence has another score beside one that failed")

    return [
        Check("score.not_constant", "Different responses can get different scores.", REWARD, not_constant),
        Check(
            "score.failure",
            "A sequence without a score has NaN and an outcome; the others have scores.",
            REWARD,
            failure,
        ),
        Check("score.fields", "A request may have the fields of each prompt as a JSON object.", REWARD, fields),
        Check(
            "score.fields_count",
            "A source that uses fields refuses another number of them than sequences with INVALID_ARGUMENT.",
            REWARD,
            fields_count,
        ),
    ]


def _first_value_depends_on_prompt(target: Target, method: BatchMethod) -> bool:
    """Return whether the first value of a response changes with the last token of the prompt."""
    [(prompt, response)] = target.sequences([(3, 6)])
    changed = False
    for shift in range(1, 4):
        other = prompt.copy()
        other[-1] = (other[-1] + shift) % target.vocabulary_size
        first, second = (method.values(target, [(tokens, response)])[0] for tokens in (prompt, other))
        changed = changed or first != second
    return changed


def values_checks() -> list[Check]:
    """Return the checks of values."""

    def causal(target: Target) -> None:
        [(prompt, response)] = target.sequences([(3, 6)])
        other = response.copy()
        other[-1] = (other[-1] + 1) % target.vocabulary_size
        first, second = (VALUES.values(target, [(prompt, tokens)]) for tokens in (response, other))
        require_equal(target, first, second, "another last token changes the values of the states before it")

    def state(target: Target) -> None:
        expect(
            _first_value_depends_on_prompt(target, VALUES),
            "the first value does not depend on the last token of the prompt; expected the value of that state",
        )

    return [
        Check("values.causal", "A value is that of the state before its token was drawn.", CRITIC, causal),
        Check("values.state", "The first value is that of the state after the prompt.", CRITIC, state),
    ]


def log_probs_checks(request: Request, source: str) -> list[Check]:
    """Return the checks of log-probs."""
    method = log_probs_method(source, request)

    def distribution(target: Target, prompt: NDArray[np.int32], temperature: float) -> NDArray[np.float64]:
        """Return the log-probs of every token after a prompt, float64 [vocabulary]."""
        size = target.vocabulary_size
        if size > MAX_VOCABULARY:
            raise Skipped(f"the vocabulary has {size} tokens; the distribution is computed up to {MAX_VOCABULARY}")
        sequences: list[TokenPair] = [(prompt, np.array([token], np.int32)) for token in range(size)]
        at_temperature = log_probs_method(source, request, temperature)
        return at_temperature.values(target, sequences).astype(np.float64)

    def sign(target: Target) -> None:
        values = method.values(target, target.sequences(RAGGED))
        expect(values.max() <= 1e-4, f"a log-prob is {values.max():g}; expected at most 0")

    def normalized(target: Target) -> None:
        total = float(np.exp(distribution(target, target.tokens(4), 1.0)).sum())
        expect(
            abs(total - 1) < PROBABILITY_TOLERANCE, f"the probabilities of all tokens sum to {total:.4f}; expected 1"
        )

    def causal(target: Target) -> None:
        [(prompt, response)] = target.sequences([(3, 6)])
        whole = method.values(target, [(prompt, response)])
        beginning = method.values(target, [(prompt, response[:3])])
        require_equal(target, whole[:3], beginning, "later tokens change the log-probs of earlier ones")

    def prefix(target: Target) -> None:
        [(prompt, response)] = target.sequences([(3, 6)])
        whole = method.values(target, [(prompt, response)])
        moved = method.values(target, [(np.concatenate([prompt, response[:2]]), response[2:])])
        require_equal(
            target, whole[2:], moved, "the border between prompt and response changes the log-probs of the same tokens"
        )

    def state(target: Target) -> None:
        expect(
            _first_value_depends_on_prompt(target, method),
            "the first log-prob does not depend on the last token of the prompt",
        )

    def temperature(target: Target) -> None:
        prompt = target.tokens(4)
        plain, hot = distribution(target, prompt, 1.0), distribution(target, prompt, 2.0)
        scaled = plain / 2
        expected = scaled - np.log(np.exp(scaled).sum())
        require_equal(
            target, hot.astype(np.float32), expected.astype(np.float32), "temperature 2 does not divide the logits by 2"
        )

    def refuses_temperature(target: Target) -> None:
        batch = batch_of(target.sequences([(2, 2)]))
        for value in (0.0, -1.0, float("nan")):
            refusal = target.refusal(target.stub.LogProbs, request(batch, value))
            expect(
                refusal.code is grpc.StatusCode.INVALID_ARGUMENT,
                f"temperature {value} is refused with {refusal}; expected INVALID_ARGUMENT",
            )

    listed: list[tuple[str, str, Callable[[Target], None]]] = [
        ("sign", "Log-probs are at most 0.", sign),
        ("normalized", "The probabilities of all tokens sum to 1.", normalized),
        ("causal", "A log-prob depends only on the tokens up to its own.", causal),
        ("prefix", "A log-prob is that of its token after all tokens before it, of prompt and response.", prefix),
        ("state", "The first log-prob is that of a token after the whole prompt.", state),
        ("temperature", "The logits are divided by the temperature.", temperature),
        ("refuses_temperature", "A temperature that is not more than 0 is INVALID_ARGUMENT.", refuses_temperature),
    ]
    return [Check(f"log_probs.{name}", requirement, source, run) for name, requirement, run in listed]


def reference_checks() -> list[Check]:
    """Return the checks of the reference's log-probs."""
    return log_probs_checks(_reference_request, REFERENCE)


def actor_checks() -> list[Check]:
    """Return the checks of the actor's log-probs."""

    def version(target: Target) -> None:
        response = target.call(target.stub.LogProbs, _actor_request(batch_of(target.sequences([(2, 2)])), 1.0))
        expected = target.status().policy_version
        expect(
            response.policy_version == expected,
            f"policy_version is {response.policy_version}; expected {expected}, that of the status",
        )

    def reference(target: Target) -> None:
        request = _actor_request(batch_of(target.sequences([(2, 2)])), 1.0)
        request.reference = True
        if target.status().answers_as_reference:
            ACTOR_LOG_PROBS.read(target.call(target.stub.LogProbs, request), 2)
            return
        refusal = target.refusal(target.stub.LogProbs, request)
        expect(
            refusal.code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT),
            f"log-probs of the reference without an adapter are refused with {refusal}; expected FAILED_PRECONDITION",
        )

    return [
        *log_probs_checks(_actor_request, ACTOR),
        Check("log_probs.version", "The response has the number of updates of the policy.", ACTOR, version),
        Check(
            "log_probs.reference",
            "The actor answers as the reference if the status says so, and refuses it otherwise.",
            "proto/quartet/v1/status.proto: answers_as_reference",
            reference,
        ),
    ]
