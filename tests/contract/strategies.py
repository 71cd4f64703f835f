"""Hypothesis strategies for the types of the contract."""

from __future__ import annotations

import string
from typing import get_args

import hypothesis.strategies as st
import numpy as np

from quartet.codec.checks import MAX_EPOCHS, MAX_RESPONSE_TOKENS
from quartet.config.section import MAX_SETTING
from quartet.contract.arrays import ExpertArray, FloatArray, IntArray
from quartet.contract.control import Alert, Progress, RunState
from quartet.contract.generation import (
    EngineProperties,
    EpisodeSettings,
    GenerationBatch,
    GenerationRequest,
    Penalties,
    SamplingParameters,
    StructuredOutput,
)
from quartet.contract.profile import Gap, OperatorTime, ProfileSummary
from quartet.contract.status import DeviceReading, Role, ServiceStatus
from quartet.contract.trajectory import (
    FAILURES,
    Branch,
    FinishReason,
    Outcome,
    Scores,
    Segment,
    SegmentRole,
    TokenBatch,
    Trajectory,
    TrajectoryId,
    VersionSpan,
)
from quartet.contract.update import (
    CorrectionLevel,
    CorrectionTreatment,
    Experience,
    LossAggregation,
    OptimizationSettings,
    PolicyLossSettings,
    RejectionRule,
    RejectionStatistic,
    RolloutCorrection,
    UpdateRequest,
    ValueLossSettings,
)
from quartet.contract.weights import TransferWay, WeightTransfer

names = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
positive32 = st.floats(2.0**-40, 2.0**40, width=32)
doubles = st.floats(0, 1e300, allow_nan=False)
lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6)


def ints(size: int) -> st.SearchStrategy[IntArray]:
    values = st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size)
    return values.map(lambda result: np.array(result, np.int32))


def floats(size: int) -> st.SearchStrategy[FloatArray]:
    return st.lists(float32, min_size=size, max_size=size).map(lambda result: np.array(result, np.float32))


@st.composite
def experts(draw: st.DrawFn, tokens: int) -> ExpertArray | None:
    """Return experts of ``tokens``, or None, also without tokens."""
    if not tokens or draw(st.booleans()):
        return None
    dtype, shape = draw(st.sampled_from([np.uint8, np.uint16])), (draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    size = tokens * shape[0] * shape[1] * np.dtype(dtype).itemsize
    return np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(tokens, *shape)


@st.composite
def batches(draw: st.DrawFn) -> TokenBatch:
    pairs = draw(lengths)
    prompts, responses = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
    tokens = int(prompts.sum() + responses.sum())
    return TokenBatch(draw(ints(tokens)), prompts, responses, routed_experts=draw(experts(tokens - len(pairs))))


ids = st.builds(TrajectoryId, names, uint64, uint64, uint32)
digest = st.binary(min_size=16, max_size=16)
digests = st.just(b"") | digest


@st.composite
def version_spans(draw: st.DrawFn, tokens: int) -> tuple[VersionSpan, ...]:
    ends = sorted(draw(st.sets(st.integers(1, tokens - 1), max_size=2))) if tokens > 1 else []
    if draw(st.booleans()):
        return ()
    return tuple(
        VersionSpan(draw(uint64), draw(digests), end - start)
        for start, end in zip([0, *ends], [*ends, tokens], strict=True)
    )


@st.composite
def segments(draw: st.DrawFn, failed: bool, reports: bool) -> tuple[Segment, ...]:
    """Return the prompt, and up to four segments of policy and environment. An episode that has not failed ends with a turn.

    ``reports``: the engine reports log-probs.
    """
    result = [Segment(SegmentRole.PROMPT, draw(ints(draw(st.integers(1, 12)))))]
    roles = draw(st.lists(st.sampled_from([SegmentRole.POLICY, SegmentRole.OBSERVATION]), max_size=4))
    for role in roles if failed else [*roles, SegmentRole.POLICY]:
        size = draw(st.integers(1, 12))
        if role is SegmentRole.POLICY:
            log_probs = draw(floats(size if reports else 0))
            result.append(Segment(role, draw(ints(size)), log_probs, draw(uint64)))
        else:
            result.append(Segment(role, draw(ints(size))))
    return tuple(result)


@st.composite
def branches(draw: st.DrawFn, failed: bool) -> list[Branch]:
    """Return one to four branches. Each further one begins anew, or with some tokens of an earlier one."""
    reports = draw(st.booleans())
    result = [Branch(draw(segments(failed, reports)))]
    for _ in range(draw(st.integers(0, 3))):
        prompt, *response = draw(segments(failed, reports))
        parent = draw(st.integers(-1, len(result) - 1))
        shared = np.zeros(0, np.int32)
        if parent >= 0:
            ids = np.concatenate([part.token_ids for part in result[parent].segments])
            shared = ids[: draw(st.integers(0, len(ids)))]
        prompt = Segment(SegmentRole.PROMPT, np.concatenate([shared, prompt.token_ids]))
        result.append(Branch((prompt, *response), parent, len(shared)))
    return result


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    outcome = draw(st.sampled_from(Outcome))
    failed = outcome is not Outcome.OK
    first, *further = draw(branches(failed))
    turns = [turn for branch in (first, *further) for turn in branch.turns]
    sizes = [len(turn.token_ids) for turn in turns]
    rewards = draw(st.booleans()) and not failed
    one_turn = len(first.segments) == 2 and not further and sizes
    return Trajectory(
        draw(ids),
        draw(uint64),
        first.segments,
        FinishReason.FAILED
        if failed
        else draw(st.sampled_from([FinishReason.EOS, FinishReason.LENGTH, FinishReason.DONE])),
        draw(digests),
        draw(st.just("") | names),
        draw(version_spans(sum(sizes))) if sizes else (),
        draw(uint64),
        tuple(draw(st.lists(doubles, min_size=len(sizes), max_size=len(sizes)))) if rewards else (),
        outcome,
        draw(st.text(string.ascii_letters, max_size=9)) if failed else "",
        tuple(further),
        draw(st.dictionaries(st.sampled_from(["steps", "note"]), st.integers(0, 9) | st.booleans() | names)),
        draw(experts(len(first.prompt_ids) + sizes[0] - 1)) if one_turn else None,
    )


@st.composite
def experiences(draw: st.DrawFn) -> Experience:
    batch = draw(batches())
    tokens = int(batch.response_lengths.sum())
    return Experience(
        draw(names),
        draw(uint64),
        draw(uint64),
        tuple(draw(st.lists(names, min_size=len(batch), max_size=len(batch)))),
        batch,
        draw(floats(draw(st.sampled_from([0, len(batch)])))),
        *(draw(floats(tokens)) for _ in range(6)),
        np.array(draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)), np.bool_)
        if draw(st.booleans())
        else np.zeros(0, np.bool_),
    )


engines = st.builds(
    EngineProperties,
    name=names,
    seeded=st.booleans(),
    batch_invariant=st.booleans(),
    log_probs=st.sampled_from(["whole", "truncated", "none"]),
    weights=st.sampled_from(["shared", "tensors", "folder", "adapter", "restart", "static"]),
    digest=st.sampled_from(["read back", "reported", "none"]),
    in_flight_updates=st.booleans(),
    trial=names,
    trial_digest=names,
)
weight_transfers = st.builds(
    WeightTransfer,
    policy_version=uint64,
    weights_digest=digests,
    source=names,
    bytes=uint64,
    way=st.sampled_from(get_args(TransferWay)),
    transfer_seconds=doubles,
    load_seconds=doubles,
)
statuses = st.builds(
    ServiceStatus,
    role=st.sampled_from(Role),
    model=names,
    device=names,
    dtype=names,
    parameters=uint64,
    policy_version=uint64,
    tokenizer_fingerprint=names,
    vocabulary_size=uint64,
    run=names,
    step=uint64,
    threads=uint32,
    busy_seconds=st.dictionaries(names, doubles, max_size=4),
    max_sequence_tokens=uint64,
    answers_as_reference=st.booleans(),
    broken=st.booleans(),
    leader_epoch=uint64,
    buffer_unreachable=st.booleans(),
    work_pending=uint32,
    tokens=st.dictionaries(names, uint64, max_size=3),
    micro_batch_tokens=uint32,
    micro_batch_tokens_held=uint32,
    gradient_checkpointing=st.booleans(),
    token_bytes=uint64,
    free_bytes=uint64,
    peak_flops=doubles,
    engine=st.none() | engines,
    published_weights=st.dictionaries(uint64, digest, max_size=3),
    last_transfer=st.none() | weight_transfers,
    open_sessions=uint32,
)
device_readings = st.builds(
    DeviceReading, names, st.none() | doubles, st.none() | uint64, st.none() | uint64, st.none() | doubles
)
operator_times = st.lists(st.builds(OperatorTime, names, uint64, doubles), max_size=2).map(tuple)
profile_summaries = st.builds(
    ProfileSummary,
    st.sampled_from(("cpu", "cuda")),
    doubles,
    st.dictionaries(names, doubles, max_size=3),
    *(doubles, doubles, doubles, doubles),
    *(operator_times, operator_times),
    st.lists(st.builds(Gap, names, names, doubles), max_size=2).map(tuple),
    st.booleans(),
)
samplings = st.builds(
    SamplingParameters,
    st.integers(1, MAX_RESPONSE_TOKENS),
    st.one_of(st.just(0.0), positive32),
    st.floats(2.0**-20, 1, width=32),
    uint32,
    st.booleans(),
    st.floats(0, 1),
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1, max_size=64), max_size=16
    ).map(tuple),
    st.none()
    | st.builds(
        Penalties,
        st.floats(0, 100, exclude_min=True, allow_subnormal=False),
        st.floats(-2, 2),
        st.floats(-2, 2),
    ),
    st.none()
    | st.builds(
        StructuredOutput,
        st.sampled_from(("json_schema", "regex", "grammar")),
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=50),
    ),
)
_settings = st.floats(0, MAX_SETTING)
optimizations = st.builds(
    OptimizationSettings,
    st.integers(0, MAX_EPOCHS),
    st.integers(1, 2**32 - 1),
    _settings,
    _settings,
    uint64,
    st.booleans(),
    uint32,
)
non_negative32 = st.floats(0, 2.0**40, width=32)
_statistics = st.sampled_from(get_args(RejectionStatistic))
_upper32, _lower32 = st.floats(1, 2.0**40, width=32), st.one_of(st.just(0.0), st.floats(2.0**-20, 1, width=32))
rejection_rules = _statistics.flatmap(
    lambda name: st.builds(RejectionRule, st.just(name), _upper32, _lower32 if name.endswith("k1") else st.just(0.0))
)
rollout_corrections = st.builds(
    RolloutCorrection,
    level=st.just("token"),
    treatment=st.sampled_from(get_args(CorrectionTreatment)),
    lower=_lower32,
    upper=st.one_of(st.just(0.0), _upper32),
    normalize=st.booleans(),
    rejection=st.lists(rejection_rules, max_size=3, unique_by=lambda rule: rule.statistic).map(tuple),
    off_policy_mask=non_negative32,
) | st.builds(
    RolloutCorrection,
    level=st.sampled_from(get_args(CorrectionLevel)),
    treatment=st.sampled_from(["truncate", "mask"]),
    upper=st.one_of(st.just(0.0), _upper32),
)
policy_losses = st.builds(
    PolicyLossSettings,
    temperature=positive32,
    clip_low=non_negative32,
    clip_high=non_negative32,
    dual_clip=st.one_of(st.just(0.0), st.floats(1.5, 100, width=32)),
    entropy_coefficient=non_negative32,
    kl_loss=st.sampled_from(["none", "k2", "k3"]),
    kl_loss_coefficient=non_negative32,
    ratio_level=st.sampled_from(["token", "sequence"]),
    aggregation=st.sampled_from(get_args(LossAggregation)),
    target_kl=non_negative32,
    policy_loss=st.sampled_from(["clipped", "package.module:loss"]),
    parameters=st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=64),
        st.floats(allow_nan=False, allow_infinity=False),
        max_size=32,
    ),
    loss_divisor=st.floats(1.0, 2.0**40),
    rollout_correction=rollout_corrections,
) | st.builds(PolicyLossSettings, old_log_probs=st.just("rollout"))
value_losses = st.builds(ValueLossSettings, non_negative32)


@st.composite
def scores(draw: st.DrawFn) -> Scores:
    count = draw(st.integers(1, 6))
    total, parts = draw(floats(count)), draw(st.dictionaries(names, floats(count), max_size=3))
    if draw(st.booleans()):
        return Scores(total, parts)
    outcomes = draw(st.lists(st.sampled_from((Outcome.OK, *FAILURES)), min_size=count, max_size=count))
    details = draw(st.lists(st.text(st.characters(categories=["L", "N"]), max_size=9), min_size=count, max_size=count))
    total = np.where([outcome is Outcome.OK for outcome in outcomes], total, np.float32(np.nan))
    return Scores(total, parts, tuple(outcomes), tuple(details))


update_requests = st.builds(
    UpdateRequest,
    run=names,
    step=uint64,
    leader_epoch=uint64,
    optimization=optimizations,
    loss=st.one_of(policy_losses, value_losses),
)


@st.composite
def generation_batches(draw: st.DrawFn) -> GenerationBatch:
    run, step = draw(names), draw(uint64)
    requests = [
        GenerationRequest(TrajectoryId(run, step, prompt, sample), ids, greedy=draw(st.booleans()))
        for prompt in draw(st.lists(uint64, min_size=1, max_size=4, unique=True))
        for ids in [draw(ints(draw(st.integers(1, 5))))]
        for sample in draw(st.lists(uint32, min_size=1, max_size=4, unique=True))
    ]
    return GenerationBatch(
        run=run,
        step=step,
        leader_epoch=draw(uint64),
        requests=draw(st.permutations(requests)),
        sampling=draw(samplings),
        seed=draw(uint64),
        policy_version=draw(uint64),
        weights_digest=draw(digests),
        episode=draw(st.none() | episodes({request.id.prompt for request in requests})),
    )


def episodes(prompts: set[int]) -> st.SearchStrategy[EpisodeSettings]:
    """Settings of episodes with the fields of these prompts."""
    return st.builds(
        EpisodeSettings,
        max_turns=st.integers(1, 1024),
        max_turn_tokens=st.integers(0, 2**20),
        fields=st.fixed_dictionaries(dict.fromkeys(sorted(prompts), names)),
    )


alerts = st.builds(Alert, step=uint64, guard=names, action=names, evidence=names, remedy=names)
progresses = st.builds(
    Progress,
    run=names,
    total_steps=uint64,
    state=st.sampled_from(RunState),
    step=uint64,
    phase=names,
    num_scored=uint64,
    num_expected=uint64,
    metrics=st.dictionaries(names, doubles, max_size=4),
    error=names,
    exit_code=st.integers(0, 2),
    notes=st.lists(names, max_size=3),
    alerts=st.lists(alerts, max_size=3),
    recoveries=uint64,
    notes_before=uint64,
    alerts_before=uint64,
)
