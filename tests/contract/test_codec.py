"""Messages are unchanged after a round trip."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from quartet import codec
from quartet.contract.control import Progress, RunState, Setting, SettingChange
from quartet.contract.generation import GenerationBatch, SamplingParameters
from quartet.contract.status import ProcessStatus, Role, ServiceStatus
from quartet.contract.trajectory import Outcome, Scores, TokenBatch, Trajectory
from quartet.contract.update import Experience, OptimizationSettings, UpdateRequest
from quartet.contract.weights import ReferenceVersion, RestoreRequest, SavedFile, SaveKind, SaveRequest
from quartet.errors import InvalidRequest, ServiceFailed
from quartet.v1 import trajectory_pb2
from tests.contract import strategies
from tests.contract.strategies import check
from tests.unit.models import tiny


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


@check
@given(strategies.batches())
def test_ragged_batches_round_trip(batch: TokenBatch) -> None:
    assert_same(codec.batch_from_proto(codec.batch_to_proto(batch)), batch)


@check
@given(strategies.batches())
def test_batches_are_sent_without_padding(batch: TokenBatch) -> None:
    message = codec.batch_to_proto(batch)
    assert len(message.token_ids.data) == 4 * int(batch.lengths.sum())
    assert message.token_ids.data == b"".join(sequence.astype("<i4").tobytes() for sequence in batch.sequences())
    # A batch adds only a few bytes of headers to ids and lengths.
    assert message.ByteSize() <= 4 * (int(batch.lengths.sum()) + 2 * len(batch)) + 64


@check
@given(strategies.trajectories())
def test_trajectories_round_trip(trajectory: Trajectory) -> None:
    assert_same(codec.trajectory_from_bytes(codec.trajectory_to_bytes(trajectory)), trajectory)


@check
@given(strategies.experiences(), st.integers(5, 64))
def test_experience_round_trips_for_any_chunk_size(experience: Experience, chunk_bytes: int) -> None:
    encoded = codec.encode_experience(experience, chunk_bytes)
    assert all(0 < len(chunk) <= chunk_bytes for chunk in encoded.chunks.values())
    assert_same(codec.decode_experience(encoded.manifest, encoded.chunks.get), experience)


@check
@given(strategies.statuses)
def test_statuses_round_trip(status: ServiceStatus) -> None:
    assert_same(codec.status_from_proto(codec.status_to_proto(status)), status)


@check
@given(strategies.samplings)
def test_sampling_parameters_round_trip(sampling: SamplingParameters) -> None:
    assert_same(codec.sampling_from_proto(codec.sampling_to_proto(sampling)), sampling)


@check
@given(strategies.optimizations)
def test_optimization_settings_round_trip(settings: OptimizationSettings) -> None:
    assert_same(codec.optimization_from_proto(codec.optimization_to_proto(settings)), settings)


@check
@given(strategies.update_requests)
def test_update_requests_round_trip(request: UpdateRequest) -> None:
    assert_same(codec.update_request_from_proto(codec.update_request_to_proto(request)), request)


@check
@given(strategies.generation_batches())
def test_generation_batches_round_trip(batch: GenerationBatch) -> None:
    assert_same(codec.generation_batch_from_proto(codec.generation_batch_to_proto(batch)), batch)


@check
@given(strategies.progresses)
def test_progress_round_trips(progress: Progress) -> None:
    assert_same(codec.progress_from_proto(codec.progress_to_proto(progress)), progress)


def test_every_run_state_round_trips() -> None:
    states = [codec.progress_from_proto(codec.progress_to_proto(Progress("r", 1, state))).state for state in RunState]
    assert states == list(RunState)


def test_an_unknown_run_state_is_refused() -> None:
    message = codec.progress_to_proto(Progress("r", 1))
    message.state = 99  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match=r"progress\.state 99: unknown"):
        codec.progress_from_proto(message)


def test_settings_and_their_changes_round_trip() -> None:
    settings = [Setting("kl_coefficient", 0.1, 0.0, 1.0)]
    assert codec.settings_from_proto(codec.settings_to_proto(settings)) == settings
    changes = [SettingChange("actor.learning_rate", 1e-5, 2e-5, 7, "a user", 1.5e9)]
    assert codec.setting_changes_from_proto(codec.setting_changes_to_proto(changes)) == changes


def test_a_process_status_round_trips() -> None:
    status = ProcessStatus((ServiceStatus(Role.ACTOR), ServiceStatus(Role.REWARD)), "1.2", "127.0.0.1:9", "a1")
    assert codec.process_status_from_proto(codec.process_status_to_proto(status)) == status


def test_a_finished_generation_contains_its_number_of_trajectories() -> None:
    assert codec.trajectories_from_proto(codec.generation_finished_to_proto(8, 90, 0.5)) == 8
    with pytest.raises(ServiceFailed, match="without the event `finished`"):
        codec.trajectories_from_proto(codec.generation_started_to_proto())


@check
@given(strategies.scores())
def test_scores_round_trip(scores: Scores) -> None:
    assert_same(codec.scores_from_proto(codec.scores_to_proto(scores), len(scores.total)), scores)


def test_scores_of_another_number_of_sequences_are_refused() -> None:
    message = codec.scores_to_proto(Scores(np.zeros(3, np.float32), {"a": np.zeros(2, np.float32)}))
    with pytest.raises(InvalidRequest, match="scores: expected 2 elements, got 3"):
        codec.scores_from_proto(message, 2)
    with pytest.raises(InvalidRequest, match=r"parts\.a: expected 3 elements, got 2"):
        codec.scores_from_proto(message, 3)


def test_what_a_source_logged_round_trips_and_is_checked() -> None:
    scores = Scores(np.ones(2, np.float32), logged=({"right": True, "length": 2.5, "answer": "\u00e9"}, {}))
    message = codec.scores_to_proto(scores)
    assert codec.scores_from_proto(message, 2).logged == scores.logged
    for text, problem in (
        ("[]", "not a JSON object"),
        ("{", "not a JSON object"),
        ('{"a": NaN}', "a is not a finite number, a boolean or a text of at most 1000 characters"),
        ('{"a b": 1}', "a name that is not 1 to 64 ASCII letters, digits and underscores"),
    ):
        message.logged[1] = text
        with pytest.raises(InvalidRequest, match=rf"logged\[1\]: {problem}"):
            codec.scores_from_proto(message, 2)
    del message.logged[1]
    with pytest.raises(InvalidRequest, match="logged: expected none, or 2 elements, got 1"):
        codec.scores_from_proto(message, 2)


def test_a_score_request_says_how_many_updates_the_policy_has_taken() -> None:
    batch = TokenBatch(np.array([1, 2], np.int32), np.ones(1, np.int32), np.ones(1, np.int32), updates=3)
    assert codec.score_request_from_proto(codec.score_request_to_proto(batch, []))[0].updates == 3


def test_every_outcome_has_its_number_in_the_contract() -> None:
    numbers = {codec.outcome_to_proto(outcome) for outcome in Outcome}
    assert numbers == set(trajectory_pb2.Outcome.values()) - {trajectory_pb2.OUTCOME_UNSPECIFIED}
    for outcome in Outcome:
        assert codec.outcome_from_proto(codec.outcome_to_proto(outcome), "outcome") is outcome
        assert trajectory_pb2.Outcome.Name(codec.outcome_to_proto(outcome)) == f"OUTCOME_{outcome.name}"


@pytest.mark.parametrize("number", [0, 8])
def test_an_outcome_that_is_none_is_refused(number: int) -> None:
    message = codec.scores_to_proto(Scores(np.ones(2, np.float32)))
    message.outcomes.extend([trajectory_pb2.OUTCOME_OK, number])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match=rf"outcomes\[1\]: {number} is not an outcome"):
        codec.scores_from_proto(message, 2)


@pytest.mark.parametrize("failure", [outcome for outcome in Outcome if outcome is not Outcome.OK])
@pytest.mark.parametrize("number", [0.0, 1.0, -3.5, np.inf, -np.inf])
def test_a_number_with_the_outcome_of_a_failure_is_refused(number: float, failure: Outcome) -> None:
    message = codec.scores_to_proto(
        Scores(np.array([1, np.nan], np.float32), outcomes=(Outcome.OK, failure), details=("", "why"))
    )
    assert codec.scores_from_proto(message, 2).outcomes == (Outcome.OK, failure)
    message.scores.data = np.array([1, number], np.float32).tobytes()
    with pytest.raises(InvalidRequest, match="scores: "):
        codec.scores_from_proto(message, 2)


@pytest.mark.parametrize("outcomes", [(), (Outcome.OK, Outcome.OK)])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_score_that_is_no_number_needs_the_outcome_of_a_failure(number: float, outcomes: tuple[Outcome, ...]) -> None:
    message = codec.scores_to_proto(Scores(np.ones(2, np.float32), outcomes=outcomes))
    message.scores.data = np.array([1, number], np.float32).tobytes()
    with pytest.raises(InvalidRequest, match=r"scores: index 1 is (nan|inf) with outcome ok"):
        codec.scores_from_proto(message, 2)


@pytest.mark.parametrize("field", ["outcomes", "details"])
@pytest.mark.parametrize("count", [1, 3])
def test_outcomes_and_details_of_another_number_of_sequences_are_refused(field: str, count: int) -> None:
    message = codec.scores_to_proto(Scores(np.ones(2, np.float32)))
    getattr(message, field).extend([trajectory_pb2.OUTCOME_OK if field == "outcomes" else "why"] * count)
    with pytest.raises(InvalidRequest, match=f"{field}: expected none, or 2 elements, got {count}"):
        codec.scores_from_proto(message, 2)


def test_a_detail_is_one_line_of_limited_length() -> None:
    scores = Scores(np.array([np.nan], np.float32), outcomes=(Outcome.TIMEOUT,), details=("a\nb" * 999,))
    [detail] = codec.scores_from_proto(codec.scores_to_proto(scores), 1).details
    assert len(detail) == 1024
    assert detail.startswith("a ba b")
    message = codec.scores_to_proto(scores)
    message.details[0] = "x" * 5000
    assert len(codec.scores_from_proto(message, 1).details[0]) == 1024


@pytest.mark.parametrize("kind", list(SaveKind))
@pytest.mark.parametrize("step", [None, 0, 2**64 - 1])
def test_save_requests_round_trip(kind: SaveKind, step: int | None) -> None:
    request = SaveRequest("run", "policy", kind, 3, step)
    assert codec.save_request_from_proto(codec.save_request_to_proto(request)) == request


@pytest.mark.parametrize("version", [None, ReferenceVersion(20, "reference/step-000020", bytes(range(32)))])
def test_reference_requests_name_their_version(version: ReferenceVersion | None) -> None:
    batch = tiny.batch([2], [3])
    message = codec.reference_log_probs_to_proto(batch, 0.5, version)
    _, temperature, read = codec.reference_log_probs_from_proto(message)
    assert (temperature, read) == (0.5, version)


@pytest.mark.parametrize("digest", [b"", bytes(31), bytes(33)])
def test_a_reference_version_without_a_whole_digest_is_refused(digest: bytes) -> None:
    message = codec.reference_log_probs_to_proto(tiny.batch([2], [3]), 1.0, ReferenceVersion(1, "reference/a", digest))
    with pytest.raises(InvalidRequest, match=f"version.digest of {len(digest)} bytes: expected 32"):
        codec.reference_log_probs_from_proto(message)


def test_restore_requests_round_trip() -> None:
    request = RestoreRequest("run", 4, "checkpoints/step-000004/actor", 3)
    assert codec.restore_request_from_proto(codec.restore_request_to_proto(request)) == request


def test_saved_files_round_trip() -> None:
    files = [SavedFile("policy/model.safetensors", 2**40, "ab" * 32)]
    assert codec.saved_files_from_proto(codec.save_response_to_proto(files, 4)) == files


def test_tensors_are_little_endian_for_any_memory_layout() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for layout in (array, np.asfortranarray(array), array.astype(">f4"), np.repeat(array, 2, axis=1)[:, ::2]):
        message = codec.tensor_to_proto(layout)
        assert list(message.shape) == [2, 3]
        assert message.data == array.astype("<f4").tobytes()


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint32, np.float16])
def test_other_dtypes_cannot_be_encoded(dtype: type) -> None:
    with pytest.raises(InvalidRequest, match="expected float32, int32 or bool"):
        codec.tensor_to_proto(np.zeros(1, dtype))
