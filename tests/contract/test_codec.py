"""Messages are unchanged after a round trip."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from quartet.codec.experience import decode_experience, encode_experience
from quartet.codec.generation import generation_batch_from_proto, generation_batch_to_proto, trajectories_from_proto
from quartet.codec.messages import from_message, to_message
from quartet.codec.scoring import score_request_from_proto, scores_from_proto, scores_to_proto
from quartet.codec.trajectories import trajectory_from_bytes, trajectory_to_bytes
from quartet.codec.updates import update_request_from_proto, update_request_to_proto
from quartet.contract.control import Progress, RunState, Setting, SettingChange
from quartet.contract.generation import GenerationBatch
from quartet.contract.status import GeneratorInfo, GeneratorState, ProcessStatus, Role
from quartet.contract.trajectory import FAILURES, FinishReason, Outcome, Scores, SegmentRole, TokenBatch, Trajectory
from quartet.contract.update import (
    Experience,
    PolicyLossSettings,
    RejectionRule,
    RolloutCorrection,
    UpdateRequest,
    UpdateResult,
)
from quartet.contract.weights import (
    PublishedWeights,
    ReferenceVersion,
    RestoreRequest,
    SavedFile,
    SaveKind,
    SaveRequest,
)
from quartet.errors import InvalidRequest, ServiceFailed
from quartet.v1 import (
    experience_pb2,
    generation_pb2,
    orchestrator_pb2,
    profile_pb2,
    reference_pb2,
    reward_pb2,
    status_pb2,
    trajectory_pb2,
    update_pb2,
    weights_pb2,
)
from quartet.weight_transfer.messages import Encoding
from quartet.weight_transfer.tensors import TensorType
from tests.buffer import samples
from tests.contract import strategies
from tests.contract.tensors import tensor_message


def assert_same(left: Any, right: Any) -> None:
    """Check that two values are equal by field and type, and arrays by dtype and bytes."""
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes()
    elif dataclasses.is_dataclass(left):
        assert type(left) is type(right)
        for field in dataclasses.fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, (list, tuple)):
        assert type(left) is type(right)
        for item, other in zip(left, right, strict=True):
            assert_same(item, other)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for name, value in left.items():
            assert_same(value, right[name])
    else:
        assert left == right
        assert type(left) is type(right)


publications = st.builds(
    PublishedWeights,
    policy_version=strategies.uint64,
    weights_digest=strategies.digests,
    changed_tensors=strategies.uint32,
    total_bytes=strategies.uint64,
    seconds=strategies.doubles,
)
names, uint32, uint64 = strategies.names, strategies.uint32, strategies.uint64
steps = st.none() | uint64
RECORDS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (trajectory_pb2.TokenBatch, strategies.batches()),
    (trajectory_pb2.SamplingParameters, strategies.samplings),
    (update_pb2.OptimizationSettings, strategies.optimizations),
    (update_pb2.PolicyLossSettings, strategies.policy_losses),
    (update_pb2.ValueLossSettings, strategies.value_losses),
    (update_pb2.SaveRequest, st.builds(SaveRequest, names, names, st.sampled_from(SaveKind), uint64, steps)),
    (update_pb2.RestoreRequest, st.builds(RestoreRequest, names, uint64, names, uint64)),
    (update_pb2.SavedFile, st.builds(SavedFile, names, uint64, names)),
    (
        update_pb2.UpdateResponse,
        st.builds(UpdateResult, uint64, uint64, st.dictionaries(names, strategies.doubles), st.none() | publications),
    ),
    (reference_pb2.ReferenceVersion, st.builds(ReferenceVersion, uint64, names, st.binary(min_size=32, max_size=32))),
    (generation_pb2.WeightTransfer, strategies.weight_transfers),
    (status_pb2.WeightPublication, publications),
    (status_pb2.EngineProperties, strategies.engines),
    (status_pb2.RoleStatus, strategies.statuses),
    (profile_pb2.ProfileSummary, strategies.profile_summaries),
    (
        status_pb2.GetStatusResponse,
        st.builds(
            ProcessStatus,
            st.tuples(strategies.statuses),
            *(names, names, names),
            st.lists(strategies.device_readings, max_size=2).map(tuple),
        ),
    ),
    (orchestrator_pb2.Progress, strategies.progresses),
    (orchestrator_pb2.Setting, st.builds(Setting, names, strategies.doubles, strategies.doubles, strategies.doubles)),
    (
        orchestrator_pb2.Change,
        st.builds(SettingChange, names, strategies.doubles, strategies.doubles, uint64, names, strategies.doubles),
    ),
    (orchestrator_pb2.Generator, st.builds(GeneratorInfo, names, st.sampled_from(GeneratorState), names, uint32)),
]
"""Message types, and records with their fields."""


@pytest.mark.parametrize("message_type", [message_type for message_type, _ in RECORDS])
@given(st.data())
def test_records_round_trip(message_type: Any, data: st.DataObject) -> None:
    record = data.draw(dict(RECORDS)[message_type])
    assert_same(from_message(type(record), to_message(message_type, record)), record)
    elsewhere = {"updates"} if isinstance(record, TokenBatch) else set()
    assert {field.name for field in dataclasses.fields(record)} - elsewhere == set(
        message_type.DESCRIPTOR.fields_by_name
    )


def values_of(record_type: type, field: str) -> tuple[str, ...]:
    return get_args(get_type_hints(record_type)[field])


@pytest.mark.parametrize(
    ("values", "enumeration"),
    [
        (tuple(Outcome), trajectory_pb2.Outcome),
        (tuple(FinishReason), trajectory_pb2.FinishReason),
        (tuple(SegmentRole), trajectory_pb2.SegmentRole),
        (tuple(SaveKind), update_pb2.SaveKind),
        (tuple(Role), status_pb2.Role),
        (tuple(RunState), orchestrator_pb2.RunState),
        (tuple(GeneratorState), orchestrator_pb2.GeneratorState),
        (tuple(Encoding), weights_pb2.ChunkEncoding),
        (get_args(TensorType), weights_pb2.WeightType),
        (values_of(PolicyLossSettings, "kl_loss"), update_pb2.KlLoss),
        (values_of(PolicyLossSettings, "ratio_level"), update_pb2.RatioLevel),
        (values_of(PolicyLossSettings, "aggregation"), update_pb2.LossAggregation),
        (values_of(PolicyLossSettings, "old_log_probs"), update_pb2.OldLogProbs),
        (values_of(RolloutCorrection, "level"), update_pb2.CorrectionLevel),
        (values_of(RolloutCorrection, "treatment"), update_pb2.CorrectionTreatment),
        (values_of(RejectionRule, "statistic"), update_pb2.RejectionStatistic),
    ],
)
def test_every_enumeration_has_the_values_of_the_contract(values: tuple[str, ...], enumeration: Any) -> None:
    prefix = enumeration.keys()[0].removesuffix("UNSPECIFIED")
    assert [prefix + value.upper().replace(" ", "_") for value in values] == enumeration.keys()[1:]


@given(strategies.batches())
def test_batches_are_sent_without_padding(batch: TokenBatch) -> None:
    message = to_message(trajectory_pb2.TokenBatch, batch)
    assert len(message.token_ids.data) == 4 * int(batch.lengths.sum())
    assert message.token_ids.data == b"".join(sequence.astype("<i4").tobytes() for sequence in batch.sequences())
    # A batch adds only a few bytes of headers to ids, lengths and experts.
    experts = 0 if batch.routed_experts is None else batch.routed_experts.nbytes
    assert message.ByteSize() <= 4 * (int(batch.lengths.sum()) + 2 * len(batch)) + experts + 96


@given(strategies.trajectories())
def test_trajectories_round_trip(trajectory: Trajectory) -> None:
    assert_same(trajectory_from_bytes(trajectory_to_bytes(trajectory)), trajectory)


@given(strategies.experiences(), st.integers(5, 64))
def test_experience_round_trips_for_any_chunk_size(experience: Experience, chunk_bytes: int) -> None:
    encoded = encode_experience(experience, chunk_bytes)
    assert all(0 < len(chunk) <= chunk_bytes for chunk in encoded.chunks.values())
    assert_same(decode_experience(encoded.manifest, encoded.chunks.get), experience)


def test_without_experts_neither_trajectories_nor_experience_have_a_field_for_them() -> None:
    """Records of older versions stay readable, and their bytes the same."""
    without = samples.trajectory("r", 1)
    assert not trajectory_pb2.Trajectory.FromString(trajectory_to_bytes(without)).HasField("routed_experts")
    manifest = experience_pb2.ExperienceManifest.FromString(encode_experience(samples.experience("r")).manifest)
    assert not manifest.HasField("routed_experts")
    assert not any(value.row_shape for _, value in manifest.ListFields() if hasattr(value, "row_shape"))


@given(strategies.experiences())
def test_the_critic_reads_no_experts(experience: Experience) -> None:
    encoded = encode_experience(experience)
    read = decode_experience(encoded.manifest, encoded.chunks.get, for_policy=False)
    assert_same(read, replace(experience, batch=replace(experience.batch, routed_experts=None)))


@given(strategies.update_requests)
def test_update_requests_round_trip(request: UpdateRequest) -> None:
    assert_same(update_request_from_proto(update_request_to_proto(request)), request)


@given(strategies.generation_batches())
def test_generation_batches_round_trip(batch: GenerationBatch) -> None:
    assert_same(generation_batch_from_proto(generation_batch_to_proto(batch)), batch)


def test_an_unknown_run_state_is_refused() -> None:
    message = to_message(orchestrator_pb2.Progress, Progress("r", 1))
    message.state = 99  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match=r"progress\.state 99: unknown"):
        from_message(Progress, message, "progress")


def test_a_finished_generation_contains_its_number_of_trajectories() -> None:
    finished = generation_pb2.GenerationFinished(trajectories=8, response_tokens=90, seconds=0.5)
    assert trajectories_from_proto(generation_pb2.GenerateResponse(finished=finished)) == 8
    with pytest.raises(ServiceFailed, match="without the event `finished`"):
        trajectories_from_proto(generation_pb2.GenerateResponse(started=generation_pb2.GenerationStarted()))


@given(strategies.scores())
def test_scores_round_trip(scores: Scores) -> None:
    assert_same(scores_from_proto(scores_to_proto(scores), len(scores.total)), scores)


def test_scores_of_another_number_of_sequences_are_refused() -> None:
    message = scores_to_proto(Scores(np.zeros(3, np.float32), {"a": np.zeros(2, np.float32)}))
    with pytest.raises(InvalidRequest, match="scores: expected 2 elements, got 3"):
        scores_from_proto(message, 2)
    with pytest.raises(InvalidRequest, match=r"parts\.a: expected 3 elements, got 2"):
        scores_from_proto(message, 3)


def test_what_a_source_logged_round_trips_and_is_checked() -> None:
    scores = Scores(np.ones(2, np.float32), logged=({"right": True, "length": 2.5, "answer": "\u00e9"}, {}))
    message = scores_to_proto(scores)
    assert scores_from_proto(message, 2).logged == scores.logged
    for text, problem in (
        ("[]", "not a JSON object"),
        ("{", "not a JSON object"),
        ('{"a": NaN}', "a is not a finite number, a boolean or a text of at most 1000 characters"),
        ('{"a b": 1}', "a name that is not 1 to 64 ASCII letters, digits and underscores"),
    ):
        message.logged[1] = text
        with pytest.raises(InvalidRequest, match=rf"logged\[1\]: {problem}"):
            scores_from_proto(message, 2)
    del message.logged[1]
    with pytest.raises(InvalidRequest, match="logged: expected none, or 2 elements, got 1"):
        scores_from_proto(message, 2)


def test_a_score_request_says_how_many_updates_the_policy_has_taken() -> None:
    batch = TokenBatch(np.array([1, 2], np.int32), np.ones(1, np.int32), np.ones(1, np.int32), updates=3)
    message = to_message(reward_pb2.ScoreRequest, batch=batch, updates=batch.updates)
    assert score_request_from_proto(message)[0].updates == 3


@pytest.mark.parametrize("number", [0, 9])
def test_an_outcome_that_is_none_is_refused(number: int) -> None:
    message = scores_to_proto(Scores(np.ones(2, np.float32)))
    message.outcomes.extend([trajectory_pb2.OUTCOME_OK, number])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match=rf"outcomes\[1\] {number}: unknown, expected ok, timeout"):
        scores_from_proto(message, 2)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("number", [0.0, 1.0, -3.5, np.inf, -np.inf])
def test_a_number_with_the_outcome_of_a_failure_is_refused(number: float, failure: Outcome) -> None:
    message = scores_to_proto(
        Scores(np.array([1, np.nan], np.float32), outcomes=(Outcome.OK, failure), details=("", "why"))
    )
    assert scores_from_proto(message, 2).outcomes == (Outcome.OK, failure)
    message.scores.data = np.array([1, number], np.float32).tobytes()
    with pytest.raises(InvalidRequest, match="scores: "):
        scores_from_proto(message, 2)


@pytest.mark.parametrize("outcomes", [(), (Outcome.OK, Outcome.OK)])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_score_that_is_no_number_needs_the_outcome_of_a_failure(number: float, outcomes: tuple[Outcome, ...]) -> None:
    message = scores_to_proto(Scores(np.ones(2, np.float32), outcomes=outcomes))
    message.scores.data = np.array([1, number], np.float32).tobytes()
    with pytest.raises(InvalidRequest, match=r"scores: index 1 is (nan|inf) with outcome ok"):
        scores_from_proto(message, 2)


@pytest.mark.parametrize("field", ["outcomes", "details"])
@pytest.mark.parametrize("count", [1, 3])
def test_outcomes_and_details_of_another_number_of_sequences_are_refused(field: str, count: int) -> None:
    message = scores_to_proto(Scores(np.ones(2, np.float32)))
    getattr(message, field).extend([trajectory_pb2.OUTCOME_OK if field == "outcomes" else "why"] * count)
    with pytest.raises(InvalidRequest, match=f"{field}: expected none, or 2 elements, got {count}"):
        scores_from_proto(message, 2)


def test_a_detail_is_one_line_of_limited_length() -> None:
    scores = Scores(np.array([np.nan], np.float32), outcomes=(Outcome.TIMEOUT,), details=("a\nb" * 999,))
    [detail] = scores_from_proto(scores_to_proto(scores), 1).details
    assert len(detail) == 1024
    assert detail.startswith("a ba b")
    message = scores_to_proto(scores)
    message.details[0] = "x" * 5000
    assert len(scores_from_proto(message, 1).details[0]) == 1024


@pytest.mark.parametrize("digest", [b"", bytes(31), bytes(33)])
def test_a_reference_version_without_a_whole_digest_is_refused(digest: bytes) -> None:
    message = to_message(reference_pb2.ReferenceVersion, ReferenceVersion(1, "reference/a", digest))
    with pytest.raises(InvalidRequest, match=f"version.digest: expected 32 bytes, got {len(digest)}"):
        from_message(ReferenceVersion, message, "version")


def test_tensors_are_little_endian_for_any_memory_layout() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for layout in (array, np.asfortranarray(array), array.astype(">f4"), np.repeat(array, 2, axis=1)[:, ::2]):
        message = tensor_message(layout)
        assert list(message.shape) == [2, 3]
        assert message.data == array.astype("<f4").tobytes()


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint32, np.float16])
def test_other_dtypes_cannot_be_encoded(dtype: type) -> None:
    with pytest.raises(InvalidRequest, match="expected float32, int32, bool, uint8, uint16"):
        tensor_message(np.zeros(1, dtype))
