"""Mutants: services with one fault each, and the check that must fail for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from grpc_health.v1 import health_pb2

from quartet.conformance.runner import AGENT
from quartet.contract.status import Role
from quartet.errors import FailedPrecondition, InvalidRequest
from quartet.v1 import trajectory_pb2
from tests.conformance.agent_mutants import AGENT_MUTANTS
from tests.conformance.environment_mutants import ENVIRONMENT_MUTANTS
from tests.conformance.faults import (
    Misnamed,
    accepts,
    any_run,
    any_sampling,
    any_settings,
    any_step,
    anywhere,
    border,
    confused_by_fields,
    constant_state,
    doubles,
    drop_last,
    each_trajectory,
    elsewhere,
    events,
    fails_together,
    forgetful,
    hangs,
    hangs_after_cancellation,
    hangs_after_deadline,
    has_empty,
    health,
    keeps_scale,
    length_dependent,
    lengths,
    logits_of,
    longer,
    model,
    neighbours,
    no_sequences,
    noisy,
    other_error,
    outcomes,
    padded,
    positions,
    raises_together,
    refuses,
    request,
    response,
    sampled_greedy,
    scores,
    shares_state,
    shifted_after_refusal,
    shifted_values,
    short_part,
    slow_status,
    small_messages,
    status,
    tokens_of,
    trajectories,
    unfenced,
    unknown_type,
    unseeded,
    values,
    without_metric,
    without_number,
    without_sha,
    writes_before_refusal,
    wrong_shape,
    zeros_for_failures,
)
from tests.conformance.models import MAX_TOKENS, VOCABULARY, Service
from tests.conformance.server_mutants import SERVER_MUTANTS

REWARD, REFERENCE, CRITIC, ACTOR = Role.REWARD, Role.REFERENCE, Role.CRITIC, Role.ACTOR


@dataclass(frozen=True)
class Mutant:
    """A fault of a service, and the id of the check that names it."""

    name: str
    role: str
    check: str
    mutate: Callable[[Service], None]


UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING

MUTANTS = [
    Mutant("scores with a dimension of 1", REWARD, "score.shape", response("Score", wrong_shape)),
    Mutant("one score too few", REWARD, "score.shape", scores(drop_last)),
    Mutant("scores padded with zeros", REWARD, "score.shape", response("Score", padded)),
    Mutant("an unknown type of a tensor", REWARD, "score.shape", response("Score", unknown_type)),
    Mutant("scores in double precision", REWARD, "score.shape", response("Score", doubles)),
    Mutant("NaN without a failure", REWARD, "score.shape", response("Score", without_number)),
    Mutant(
        "a number for a failure", REWARD, "score.shape", outcomes(lambda ok: [trajectory_pb2.OUTCOME_REFUSED, *ok[1:]])
    ),
    Mutant("an outcome too few", REWARD, "score.shape", outcomes(lambda ok: ok[1:])),
    Mutant("a part with a score too few", REWARD, "score.shape", response("Score", short_part)),
    Mutant("scores in the opposite order", REWARD, "score.independence", scores(lambda total: total[::-1])),
    Mutant("scores sorted by size", REWARD, "score.order", scores(np.sort)),
    Mutant("scores without their mean", REWARD, "score.independence", scores(lambda total: total - total.mean())),
    Mutant(
        "the last sequences of a large batch dropped",
        REWARD,
        "score.many",
        scores(lambda total: np.where(np.arange(len(total)) < 200, total, 0)),
    ),
    Mutant("the same value everywhere", CRITIC, "values.distinct", values(np.zeros_like)),
    Mutant("a constant score", REWARD, "score.not_constant", scores(np.zeros_like)),
    Mutant("another score each time", REWARD, "score.repeatable", noisy),
    Mutant(
        "a response of one token refused",
        REWARD,
        "score.one_token",
        refuses(lambda batch: batch.token_ids.shape[0] == 2),
    ),
    Mutant(
        "long sequences refused",
        REWARD,
        "score.long",
        refuses(
            lambda batch: bool(len(lengths(batch, "prompt_lengths"))) and batch.token_ids.shape[0] == MAX_TOKENS + 2
        ),
    ),
    Mutant(
        "large batches refused",
        REWARD,
        "score.many",
        refuses(lambda batch: len(lengths(batch, "prompt_lengths")) > 128),
    ),
    Mutant(
        "fields refused",
        REWARD,
        "score.fields",
        request("Score", lambda message: message.fields.append("{}") if message.fields else None),
    ),
    Mutant("a score of 0 for a failure", REWARD, "score.failure", response("Score", zeros_for_failures)),
    Mutant("a failure for the whole batch", REWARD, "score.failure", model("score", fails_together)),
    Mutant("an error for one failure", REWARD, "score.failure", model("score", raises_together)),
    Mutant("INTERNAL for another number of fields", REWARD, "score.fields_count", model("score", confused_by_fields)),
    Mutant("no sequences accepted", REWARD, "score.refuses_no_sequences", accepts(no_sequences)),
    Mutant("INTERNAL for an invalid batch", REWARD, "score.refuses_no_sequences", other_error(ZeroDivisionError())),
    Mutant(
        "FAILED_PRECONDITION for an invalid batch",
        REWARD,
        "score.refuses_no_sequences",
        refuses(no_sequences, FailedPrecondition),
    ),
    Mutant("empty prompts accepted", REWARD, "score.refuses_empty_prompt", accepts(has_empty("prompt_lengths"))),
    Mutant("empty responses accepted", REWARD, "score.refuses_empty_response", accepts(has_empty("response_lengths"))),
    Mutant(
        "missing tokens accepted",
        REWARD,
        "score.refuses_missing_tokens",
        accepts(lambda batch: batch.token_ids.shape[0] == 1),
    ),
    Mutant(
        "other numbers of prompts and responses accepted",
        REWARD,
        "score.refuses_other_counts",
        accepts(lambda batch: len(batch.prompt_lengths.data) != len(batch.response_lengths.data)),
    ),
    Mutant(
        "negative lengths accepted",
        REWARD,
        "score.refuses_negative_length",
        accepts(lambda batch: bool((lengths(batch, "response_lengths") < 0).any())),
    ),
    Mutant(
        "unknown tokens accepted",
        REWARD,
        "score.refuses_unknown_token",
        accepts(lambda batch: bool((tokens_of(batch) == VOCABULARY).any())),
    ),
    Mutant(
        "negative tokens accepted",
        REWARD,
        "score.refuses_negative_token",
        accepts(lambda batch: bool((tokens_of(batch) == -1).any())),
    ),
    Mutant(
        "too long sequences accepted",
        REWARD,
        "score.refuses_too_long",
        accepts(lambda batch: batch.token_ids.shape[0] == MAX_TOKENS + 1),
    ),
    Mutant(
        "cut data accepted",
        REWARD,
        "score.refuses_cut_data",
        accepts(lambda batch: bool(len(batch.token_ids.data) % 4)),
    ),
    Mutant(
        "float32 token ids accepted", REWARD, "score.refuses_floats", accepts(lambda batch: batch.token_ids.dtype == 1)
    ),
    Mutant(
        "a matrix of token ids accepted",
        REWARD,
        "score.refuses_matrix",
        accepts(lambda batch: len(batch.token_ids.shape) == 2),
    ),
    Mutant("other scores after a refusal", REWARD, "score.refusal_harmless", shifted_after_refusal),
    Mutant("another class of error than its code", REWARD, "score.error_class", other_error(Misnamed("no"))),
    Mutant("an error without a text", REWARD, "score.error_text", other_error(InvalidRequest(""))),
    Mutant("hanging after a cancelled call", REWARD, "score.cancel", hangs),
    Mutant("hanging after a deadline", REWARD, "score.deadline", hangs_after_deadline),
    Mutant("calls at once that share a batch", REWARD, "score.concurrent", shares_state),
    Mutant("messages over 4 MiB refused", REWARD, "score.large_message", small_messages),
    Mutant("a status that waits for the model", REWARD, "score.status", slow_status),
    Mutant("no health of the server", REWARD, "health.server", health("", NOT_SERVING)),
    Mutant("no health of the service", REWARD, "health.service", health("quartet.v1.RewardService", UNKNOWN)),
    Mutant("health of every service", REWARD, "health.unknown", health("quartet.v1.NoSuchService", SERVING)),
    Mutant("the status of another role", REWARD, "status.role", status(role=Role.CRITIC)),
    Mutant("a status without a vocabulary", REWARD, "status.vocabulary", status(vocabulary_size=0)),
    Mutant("a status without a fingerprint", REWARD, "status.vocabulary", status(tokenizer_fingerprint="llama")),
    Mutant(
        "log-probs of the token after", REFERENCE, "log_probs.normalized", positions(lambda prompt, end: (prompt, end))
    ),
    Mutant(
        "log-probs one position early",
        REFERENCE,
        "log_probs.state",
        positions(lambda prompt, end: (prompt - 2, end - 2)),
    ),
    Mutant("logits in the place of log-probs", REFERENCE, "log_probs.normalized", model("log_probs", logits_of)),
    Mutant("positive log-probs", REFERENCE, "log_probs.sign", values(np.negative, "log_probs")),
    Mutant("log-probs that depend on the length", REFERENCE, "log_probs.causal", model("log_probs", length_dependent)),
    Mutant("log-probs that depend on the border", REFERENCE, "log_probs.prefix", model("log_probs", border)),
    Mutant(
        "the temperature ignored",
        REFERENCE,
        "log_probs.temperature",
        model("log_probs", lambda _, right, batch, temperature, *rest: right(batch, 1.0, *rest)),
    ),
    Mutant(
        "temperature 0 accepted",
        REFERENCE,
        "log_probs.refuses_temperature",
        request(
            "LogProbs",
            lambda message: setattr(message, "temperature", message.temperature if message.temperature > 0 else 1.0),
        ),
    ),
    Mutant(
        "a policy version that does not rise",
        ACTOR,
        "log_probs.version",
        response("LogProbs", lambda answer: setattr(answer, "policy_version", 9)),
    ),
    Mutant(
        "the policy as the reference",
        ACTOR,
        "log_probs.reference",
        request("LogProbs", lambda message: message.ClearField("reference")),
    ),
    Mutant("values of the state after the token", CRITIC, "values.causal", shifted_values(1)),
    Mutant("values of the response only", CRITIC, "values.state", model("values", constant_state)),
    Mutant("an update that changes nothing", CRITIC, "update.applies", model("scale", lambda *_: 1.0)),
    Mutant("an update without its metrics", CRITIC, "update.metrics", response("Update", without_metric)),
    Mutant("a repeated update applied again", CRITIC, "update.idempotent", model("update", forgetful)),
    Mutant("a step left out", CRITIC, "update.order", model("update", any_step)),
    Mutant("an update of another run", CRITIC, "update.other_run", model("update", any_run)),
    Mutant("an update without experience", CRITIC, "update.missing_experience", model("load", lambda *_: None)),
    Mutant("the epoch of an update ignored", CRITIC, "update.fencing", model("update", unfenced)),
    Mutant("the epoch of a restore ignored", CRITIC, "restore.fencing", model("restore", unfenced)),
    Mutant("invalid settings replaced", CRITIC, "update.invalid", any_settings),
    Mutant("a restore without the weights", CRITIC, "restore.initial", model("restore", keeps_scale)),
    Mutant("a save outside the run's directory", CRITIC, "save.confined", model("snapshot", anywhere)),
    Mutant("saved files without SHA-256", CRITIC, "save.files", response("Save", without_sha)),
    Mutant("saved files elsewhere", CRITIC, "save.files", response("Save", elsewhere)),
    Mutant("no started event", ACTOR, "generate.events", events(lambda all_of: all_of[1:])),
    Mutant("no finished event", ACTOR, "generate.events", events(lambda all_of: all_of[:-1])),
    Mutant("a dropped trajectory", ACTOR, "generate.ids", trajectories(lambda done: done[:-1])),
    Mutant("a trajectory twice", ACTOR, "generate.ids", trajectories(lambda done: [*done, done[0]])),
    Mutant(
        "positions in the place of indices",
        ACTOR,
        "generate.ids",
        each_trajectory(lambda each: replace(each, id=replace(each.id, prompt=0))),
    ),
    Mutant("another attempt", ACTOR, "generate.origin", each_trajectory(lambda each: replace(each, attempt=0))),
    Mutant("a response that is too long", ACTOR, "generate.tokens", each_trajectory(longer)),
    Mutant(
        "log-probs of another policy",
        ACTOR,
        "generate.log_probs",
        each_trajectory(lambda each: each.with_log_probs(each.log_probs - 1)),
    ),
    Mutant("random responses", ACTOR, "generate.repeatable", unseeded),
    Mutant("responses that depend on the batch", ACTOR, "generate.split", neighbours),
    Mutant(
        "the seed ignored",
        ACTOR,
        "generate.seeds",
        model("sample", lambda _, right, one, batch: right(one, replace(batch, seed=1))),
    ),
    Mutant("sampling at temperature 0", ACTOR, "generate.greedy", sampled_greedy),
    Mutant(
        "greedy trajectories sampled",
        ACTOR,
        "generate.greedy",
        model("sample", lambda _, right, one, batch: right(replace(one, greedy=False), batch)),
    ),
    Mutant("the epoch of a generation ignored", ACTOR, "generate.fencing", model("fence", lambda *_: None)),
    Mutant("invalid samplings replaced", ACTOR, "generate.invalid", any_sampling),
    Mutant("generation that continues without its caller", ACTOR, "generate.cancel", hangs_after_cancellation),
    Mutant("any policy version", ACTOR, "generate.version", model("admit", lambda *_: None)),
    Mutant("trajectories of a refused request", ACTOR, "generate.version", writes_before_refusal),
    *(Mutant(name, role, check, fault) for name, role, check, fault in SERVER_MUTANTS),
    *(Mutant(name, Role.ENVIRONMENT, check, fault) for name, check, fault in ENVIRONMENT_MUTANTS),
    *(Mutant(name, AGENT, check, fault) for name, check, fault in AGENT_MUTANTS),
]
