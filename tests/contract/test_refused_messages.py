"""Malformed messages are refused with the name of the field."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from quartet.codec.experience import decode_experience, encode_experience
from quartet.codec.generation import trajectories_from_proto
from quartet.codec.messages import from_message
from quartet.codec.tensors import experts_from_proto, floats_from_proto, ints_from_proto
from quartet.codec.trajectories import trajectory_from_bytes, trajectory_to_bytes
from quartet.codec.updates import update_request_from_proto, update_request_to_proto
from quartet.contract.generation import EpisodeSettings, SamplingParameters
from quartet.contract.status import ServiceStatus
from quartet.contract.trajectory import FinishReason, TokenBatch, Trajectory, TrajectoryId
from quartet.contract.update import (
    Experience,
    OptimizationSettings,
    PolicyLossSettings,
    RolloutCorrection,
    UpdateRequest,
)
from quartet.contract.weights import PublishedWeights, SaveRequest, WeightTransfer
from quartet.errors import InvalidRequest, ServiceFailed
from quartet.v1 import experience_pb2, generation_pb2, status_pb2, tensor_pb2, trajectory_pb2, update_pb2
from tests.contract.tensors import tensor_message
from tests.every_case import every_case

FLOAT, INT = tensor_pb2.DATA_TYPE_FLOAT32, tensor_pb2.DATA_TYPE_INT32


def tensor(dtype: int, shape: list[int], data: bytes) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=dtype, shape=shape, data=data)  # type: ignore[arg-type]


MALFORMED = {
    "another dtype": (tensor(FLOAT, [1], b"\0" * 4), "expected dtype int32, got float32"),
    "no dtype": (tensor(0, [1], b"\0" * 4), "expected dtype int32, got none"),
    "an unknown dtype": (tensor(77, [1], b"\0" * 4), "expected dtype int32, got none"),
    "too few bytes": (tensor(INT, [2], b"\0" * 7), r"shape \[2\] of int32 needs 8 bytes, got 7"),
    "too many bytes": (tensor(INT, [2], b"\0" * 12), r"shape \[2\] of int32 needs 8 bytes, got 12"),
    "a huge shape with few bytes": (tensor(INT, [2**62], b"\0" * 4), "needs 18446744073709551616 bytes, got 4"),
    "a negative extent": (tensor(INT, [-1], b""), r"expected one dimension, got shape \[-1\]"),
    "two dimensions": (tensor(INT, [1, 1], b"\0" * 4), r"expected one dimension, got shape \[1, 1\]"),
    "a million dimensions": (tensor(INT, [1] * 1000, b"\0" * 4), "expected one dimension"),
    "no dimension": (tensor(INT, [], b"\0" * 4), r"expected one dimension, got shape \[\]"),
    "nothing": (tensor_pb2.Tensor(), "expected dtype int32, got none"),
    "another length": (tensor(INT, [3], b"\0" * 12), "expected 2 elements, got 3"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_tensor_is_refused_with_the_name_of_its_field(name: str) -> None:
    message, expected = MALFORMED[name]
    with pytest.raises(InvalidRequest, match=f"^prompt_lengths: .*{expected}"):
        ints_from_proto(message, "prompt_lengths", 2)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(InvalidRequest, match=r"^log_probs: contains NaN or infinity"):
        floats_from_proto(tensor_message(np.array([0, value], np.float32)), "log_probs")


U8, U16 = tensor_pb2.DATA_TYPE_UINT8, tensor_pb2.DATA_TYPE_UINT16
MALFORMED_EXPERTS = {
    "another dtype": (tensor(INT, [1, 1, 1], b"\0" * 4), "expected dtype uint8 or uint16, got int32"),
    "nothing": (tensor_pb2.Tensor(), "expected dtype uint8 or uint16, got none"),
    "too few bytes": (tensor(U16, [1, 2, 1], b"\0" * 2), r"shape \[1, 2, 1\] of uint16 needs 4 bytes, got 2"),
    "a huge shape": (tensor(U8, [2**40, 2**40, 2], b"\0"), "bytes, got 1"),
    "two dimensions": (
        tensor(U8, [1, 1], b"\0"),
        r"expected \[tokens, layers, experts per token\], got shape \[1, 1\]",
    ),
    "no layers": (tensor(U8, [1, 0, 1], b""), r"got shape \[1, 0, 1\]"),
    "negative extents": (tensor(U8, [-1, -1, 1], b"\0"), r"got shape \[-1, -1, 1\]"),
}


@pytest.mark.parametrize("name", MALFORMED_EXPERTS)
def test_malformed_experts_are_refused_with_the_name_of_their_field(name: str) -> None:
    message, expected = MALFORMED_EXPERTS[name]
    with pytest.raises(InvalidRequest, match=f"^batch.routed_experts: .*{expected}"):
        experts_from_proto(message, "batch.routed_experts")


@given(st.integers(0, 5), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3), st.binary(max_size=40))
def test_any_tensor_is_either_read_or_refused(dtype: int, shape: list[int], data: bytes) -> None:
    message = tensor(dtype, shape, data)
    for read, size in ((ints_from_proto, 4), (floats_from_proto, 4)):
        try:
            result = read(message, "field")
        except InvalidRequest:
            continue
        assert [len(result)] == shape
        assert result.nbytes == len(data) == size * shape[0]


def small_trajectory() -> Trajectory:
    ids = np.array([1, 2], np.int32)
    return Trajectory.of_response(TrajectoryId("r", 1, 0, 0), 0, ids, ids, np.zeros(2, np.float32), FinishReason.EOS)


def small_experience() -> Experience:
    batch = TokenBatch(np.array([1, 2, 3], np.int32), np.array([1], np.int32), np.array([2], np.int32))
    flat = np.zeros(2, np.float32)
    return Experience("r", 1, 0, ("r/1/0/0",), batch, np.zeros(1, np.float32), flat, flat, flat, flat, flat, flat)


def changed_trajectory(change: Callable[[trajectory_pb2.Trajectory], None]) -> bytes:
    message = trajectory_pb2.Trajectory.FromString(trajectory_to_bytes(small_trajectory()))
    change(message)
    return message.SerializeToString()


def drop(field: str) -> Callable[[Any], None]:
    return lambda message: message.ClearField(field)


@pytest.mark.parametrize("field", ["id", "segments", "finish_reason", "outcome"])
def test_a_trajectory_without_a_required_field_is_refused(field: str) -> None:
    with pytest.raises(InvalidRequest, match="trajectory"):
        trajectory_from_bytes(changed_trajectory(drop(field)))


def tokens(count: int) -> Any:
    return tensor_message(np.zeros(count, np.int32))


POLICY, OBSERVATION = trajectory_pb2.SEGMENT_ROLE_POLICY, trajectory_pb2.SEGMENT_ROLE_OBSERVATION


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: m.segments[1].log_probs.CopyFrom(tensor_message(np.zeros(1, np.float32))), "expected 2"),
        (lambda m: m.segments[0].log_probs.CopyFrom(tensor_message(np.zeros(2, np.float32))), "expected none"),
        (lambda m: m.segments[0].token_ids.CopyFrom(tokens(0)), "at least one token"),
        (
            lambda m: m.segments[1].ClearField("role"),
            r"segments\[1\]\.role 0: unknown, expected prompt, policy, observation",
        ),
        (lambda m: m.segments.add(role=trajectory_pb2.SEGMENT_ROLE_PROMPT, token_ids=tokens(1)), "one prompt"),
        (lambda m: m.segments.add(role=OBSERVATION, token_ids=tokens(1)), "a segment of the policy at the end"),
        (lambda m: m.segments.add(role=POLICY, token_ids=tokens(1)), "in all segments of the policy, or in none"),
        (lambda m: m.segments.pop(0), "as the first segment"),
        (lambda m: m.turn_rewards.extend([1.0, 2.0]), "expected 1, one per turn"),
        (lambda m: m.turn_rewards.extend([float("nan")]), "NaN or infinity"),
        (lambda m: m.version_spans.add(tokens=1), "cover the 2 tokens"),
        (
            lambda m: m.routed_experts.CopyFrom(tensor(U8, [2, 1, 1], bytes(2))),
            r"routed_experts: expected \[3, layers, experts per token\] of one prompt and one response, got \[2, 1, 1\]",
        ),
        (lambda m: setattr(m, "outcome", trajectory_pb2.OUTCOME_TIMEOUT), "outcome timeout with finish_reason eos"),
        (lambda m: setattr(m, "finish_reason", trajectory_pb2.FINISH_REASON_FAILED), "outcome ok with finish_reason"),
        (lambda m: setattr(m, "outcome", 99), "outcome 99: unknown, expected ok, timeout"),
    ],
)
def test_a_trajectory_that_contradicts_itself_is_refused(change: Callable[[Any], Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as raised:
        trajectory_from_bytes(changed_trajectory(change))
    assert str(raised.value).startswith("trajectory")


def fork(message: Any, shared: int = 2, parent: int = 0, first_id: int = 1) -> Any:
    """Add a branch to the small trajectory that begins with its first tokens, 1 and 2, and return it."""
    prompt = trajectory_pb2.Segment(role=trajectory_pb2.SEGMENT_ROLE_PROMPT)
    prompt.token_ids.CopyFrom(tensor_message(np.array([first_id, 2, 7], np.int32)))
    turn = trajectory_pb2.Segment(role=POLICY, token_ids=tokens(1), log_probs=tensor_message(np.zeros(1, np.float32)))
    return message.further_branches.add(segments=[prompt, turn], parent=parent, shared_tokens=shared)


def test_a_branch_may_begin_with_tokens_of_its_parent() -> None:
    item = trajectory_from_bytes(changed_trajectory(fork))
    assert [branch.prompt_ids.tolist() for branch in item.branches] == [[1, 2], [1, 2, 7]]
    assert (item.further_branches[0].parent, item.further_branches[0].shared_tokens) == (0, 2)
    assert item.branch_ids == ("r/1/0/0", "r/1/0/0#1")


def many_branches(message: Any) -> None:
    branch = fork(message)
    message.further_branches.extend([branch] * 4095)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: fork(m, parent=1), r"parent 1: expected -1, or the index of an earlier branch, 0 to 0"),
        (lambda m: fork(m, parent=-2), "parent -2: expected -1"),
        (lambda m: fork(m, parent=-1), "shared_tokens 2: expected 0 without a parent"),
        (lambda m: fork(m, shared=3), "shared_tokens 3: its prompt and branch 0 do not begin with as many equal"),
        (lambda m: fork(m, shared=9), "shared_tokens 9: its prompt and branch 0 do not begin with as many equal"),
        (lambda m: fork(m, first_id=4), "shared_tokens 2: its prompt and branch 0 do not begin with as many equal"),
        (lambda m: fork(m).segments.pop(0), r"further_branches\[0\]\.segments: expected one prompt, as the first"),
        (lambda m: fork(m).segments.pop(1), "further_branches.*a segment of the policy at the end"),
        (lambda m: fork(m).segments[1].ClearField("log_probs"), "in all segments of the policy, or in none"),
        (lambda m: fork(m).segments[1].ClearField("role"), r"further_branches\[0\]\.segments\[1\]\.role 0: unknown"),
        (lambda m: (fork(m), m.turn_rewards.append(1.0)), "expected 2, one per turn"),
        (many_branches, "further_branches: 4096, expected less than 4096"),
    ],
)
def test_a_branch_that_contradicts_its_episode_is_refused(change: Callable[[Any], Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as raised:
        trajectory_from_bytes(changed_trajectory(change))
    assert str(raised.value).startswith("trajectory")


def test_a_failure_with_a_reward_is_refused() -> None:
    def fail(message: trajectory_pb2.Trajectory) -> None:
        message.outcome, message.finish_reason = trajectory_pb2.OUTCOME_TIMEOUT, trajectory_pb2.FINISH_REASON_FAILED
        message.turn_rewards.append(0.0)

    with pytest.raises(InvalidRequest, match="none for a failure"):
        trajectory_from_bytes(changed_trajectory(fail))


@pytest.mark.parametrize(
    ("mask", "problem"),
    [(np.ones(1, np.bool_), "expected 2 elements, got 1"), (np.ones(2, np.int32), "expected dtype bool")],
)
def test_experience_with_a_mask_that_does_not_fit_is_refused(mask: Any, problem: str) -> None:
    encoded = encode_experience(dataclasses.replace(small_experience(), response_mask=mask))
    with pytest.raises(InvalidRequest, match=f"experience.response_mask: {problem}"):
        decode_experience(encoded.manifest, encoded.chunks.get)


def test_experience_with_a_mask_of_other_bytes_than_0_and_1_is_refused() -> None:
    mask = np.array([2, 1], np.uint8).view(np.bool_)
    encoded = encode_experience(dataclasses.replace(small_experience(), response_mask=mask))
    with pytest.raises(InvalidRequest, match=r"experience\.response_mask: expected bytes 0 and 1"):
        decode_experience(encoded.manifest, encoded.chunks.get)


def test_all_tokens_of_the_policy_need_no_mask() -> None:
    encoded = encode_experience(small_experience())
    manifest = experience_pb2.ExperienceManifest.FromString(encoded.manifest)
    assert (manifest.response_mask.length, len(manifest.response_mask.chunks)) == (0, 0)


FLAT = ("log_probs", "reference_log_probs", "values", "advantages", "returns", "actor_mask")


def decode_changed_experience(change: Callable[[experience_pb2.ExperienceManifest], None]) -> Experience:
    """Encode an experience, change its manifest and decode it."""
    encoded = encode_experience(small_experience())
    manifest = experience_pb2.ExperienceManifest.FromString(encoded.manifest)
    change(manifest)
    return decode_experience(manifest.SerializeToString(), encoded.chunks.get)


@pytest.mark.parametrize(
    "field", [*FLAT, "scores", "ids", "token_ids", "prompt_lengths", "response_lengths", "response_mask"]
)
def test_experience_without_one_of_its_fields_is_refused(field: str) -> None:
    with pytest.raises(InvalidRequest):
        decode_changed_experience(drop(field))


@pytest.mark.parametrize("field", [*FLAT, "scores"])
def test_experience_with_an_array_of_another_length_or_type_is_refused(field: str) -> None:
    def longer(manifest: experience_pb2.ExperienceManifest) -> None:
        getattr(manifest, field).length += 1

    def other_type(manifest: experience_pb2.ExperienceManifest) -> None:
        getattr(manifest, field).dtype = INT

    for change in (longer, other_type):
        with pytest.raises(InvalidRequest, match=f"experience.{field}"):
            decode_changed_experience(change)


@pytest.mark.parametrize("field", [*FLAT, "scores"])
def test_experience_with_nan_is_refused(field: str) -> None:
    invalid = np.full(1 if field == "scores" else 2, np.nan, np.float32)
    encoded = encode_experience(dataclasses.replace(small_experience(), **{field: invalid}))
    with pytest.raises(InvalidRequest, match=f"experience.{field}: contains NaN"):
        decode_experience(encoded.manifest, encoded.chunks.get)


def test_experience_with_a_missing_or_damaged_chunk_is_refused() -> None:
    encoded = encode_experience(small_experience(), chunk_bytes=4)
    with pytest.raises(InvalidRequest, match=r"experience.token_ids: chunk 0 of 3 is missing"):
        decode_experience(encoded.manifest, {}.get)
    damaged = {name: bytes(chunk[:-1]) for name, chunk in encoded.chunks.items()}
    with pytest.raises(InvalidRequest, match=r"experience.token_ids: chunk 0 of 3 does not match its SHA-256"):
        decode_experience(encoded.manifest, damaged.get)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_as_invalid(data: bytes) -> None:
    for read in (trajectory_from_bytes, lambda data: decode_experience(data, {}.get)):
        with pytest.raises(InvalidRequest):
            read(data)


@given(st.data())
def test_a_damaged_entry_is_either_read_or_refused(data: st.DataObject) -> None:
    encoded = encode_experience(small_experience())
    for valid, read in (
        (trajectory_to_bytes(small_trajectory()), trajectory_from_bytes),
        (encoded.manifest, lambda manifest: decode_experience(manifest, encoded.chunks.get)),
    ):
        damaged = bytearray(valid)
        damaged[data.draw(st.integers(0, len(valid) - 1))] = data.draw(st.integers(0, 255))
        try:
            read(bytes(damaged[: data.draw(st.integers(0, len(valid)))]))
        except InvalidRequest:
            continue


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    "invalid",
    [
        {"max_response_tokens": 0},
        {"temperature": -0.1},
        {"temperature": NAN},
        {"temperature": INFINITY},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": NAN},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": NAN},
        {"stop_strings": [""]},
        {"stop_strings": ["a" * 65]},
        {"stop_strings": ["a\ufffd"]},
        {"stop_strings": ["a"] * 17},
        {"structured_output": {"kind": "choice", "value": "a"}},
        {"structured_output": {"kind": "regex", "value": ""}},
        {"structured_output": {"kind": "regex", "value": "a" * 65_537}},
        {"penalties": {"repetition": 0.0}},
        {"penalties": {"repetition": 101.0}},
        {"penalties": {"repetition": 1.0, "presence": 2.1}},
        {"penalties": {"repetition": 1.0, "frequency": NAN}},
    ],
)
def test_sampling_parameters_out_of_range_are_refused(invalid: dict[str, Any]) -> None:
    valid = {"max_response_tokens": 1, "temperature": 1.0, "top_p": 1.0}
    from_message(SamplingParameters, trajectory_pb2.SamplingParameters(**valid), "sampling")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=f"sampling.{next(iter(invalid))}"):
        from_message(SamplingParameters, trajectory_pb2.SamplingParameters(**{**valid, **invalid}), "sampling")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "invalid",
    [{"num_mini_batches": 0}]
    + [{name: value} for name in ("learning_rate", "max_grad_norm") for value in (-1e-9, NAN, INFINITY)],
)
def test_optimization_settings_out_of_range_are_refused(invalid: dict[str, float]) -> None:
    valid = {"num_epochs": 1, "num_mini_batches": 1, "learning_rate": 0.1, "max_grad_norm": 0.0}
    from_message(OptimizationSettings, update_pb2.OptimizationSettings(**valid))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=next(iter(invalid))):
        from_message(OptimizationSettings, update_pb2.OptimizationSettings(**{**valid, **invalid}))  # type: ignore[arg-type]


def update(**loss: Any) -> update_pb2.UpdateRequest:
    return update_pb2.UpdateRequest(optimization=update_pb2.OptimizationSettings(num_mini_batches=1), **loss)


@every_case(
    "invalid",
    [{"temperature": 0.0}, {"temperature": NAN}, {"dual_clip": 1.0}, {"dual_clip": 0.5}]
    + [{name: number} for name in ("kl_loss", "ratio_level", "aggregation", "old_log_probs") for number in (0, 9)]
    + [
        {name: value}
        for name in (
            "clip_low",
            "clip_high",
            "dual_clip",
            "entropy_coefficient",
            "kl_loss_coefficient",
            "target_kl",
            "loss_divisor",
        )
        for value in (-0.1, NAN, INFINITY)
    ]
    + [{"policy_loss": ""}]
    + [{"parameters": {"tau": value}} for value in (NAN, INFINITY)]
    + [{"parameters": {"": 1.0}}, {"parameters": {"x" * 65: 1.0}}]
    + [{"parameters": {f"p{number}": 1.0 for number in range(33)}}]
    + [{"loss_divisor": 0.0, "aggregation": update_pb2.LOSS_AGGREGATION_SEQUENCE_MEAN_TOKEN_SUM_NORM}],
)
def test_policy_loss_settings_out_of_range_are_refused(invalid: dict[str, Any]) -> None:
    valid: dict[str, Any] = {
        "temperature": 1.0,
        "kl_loss": update_pb2.KL_LOSS_NONE,
        "ratio_level": update_pb2.RATIO_LEVEL_TOKEN,
        "aggregation": update_pb2.LOSS_AGGREGATION_TOKEN_MEAN,
        "policy_loss": "clipped",
        "old_log_probs": update_pb2.OLD_LOG_PROBS_TRAINER,
        "rollout_correction": update_pb2.RolloutCorrection(
            level=update_pb2.CORRECTION_LEVEL_NONE, treatment=update_pb2.CORRECTION_TREATMENT_TRUNCATE
        ),
    }
    update_request_from_proto(update(policy_loss=update_pb2.PolicyLossSettings(**valid)))
    with pytest.raises(InvalidRequest, match=next(iter(invalid))):
        update_request_from_proto(update(policy_loss=update_pb2.PolicyLossSettings(**{**valid, **invalid})))


RULE: dict[str, Any] = {"statistic": update_pb2.REJECTION_STATISTIC_TOKEN_K1, "upper": 2.0}


@every_case(
    "invalid",
    [{name: number} for name in ("level", "treatment") for number in (0, 9)]
    + [{name: value} for name in ("lower", "upper", "off_policy_mask") for value in (-0.1, NAN, INFINITY)]
    + [
        {"lower": 2.5},
        {"treatment": update_pb2.CORRECTION_TREATMENT_SEQ_MASK, "level": update_pb2.CORRECTION_LEVEL_SEQUENCE},
        {"rejection": [RULE, RULE]},
        {"rejection": [RULE] * 100},
        {"rejection": [{}]},
        {"rejection": [RULE | {"statistic": 99}]},
        *({"rejection": [RULE | {"upper": value}]} for value in (0.0, 0.5, -1.0, NAN, INFINITY)),
        *({"rejection": [RULE | {"lower": value}]} for value in (3.0, -1.0, NAN)),
        {"rejection": [RULE | {"statistic": update_pb2.REJECTION_STATISTIC_TOKEN_K2, "lower": 0.5}]},
    ],
)
def test_a_rollout_correction_out_of_range_is_refused(invalid: dict[str, Any]) -> None:
    valid: dict[str, Any] = {
        "level": update_pb2.CORRECTION_LEVEL_TOKEN,
        "treatment": update_pb2.CORRECTION_TREATMENT_TRUNCATE,
        "upper": 2.0,
    }
    from_message(RolloutCorrection, update_pb2.RolloutCorrection(**valid))
    with pytest.raises(InvalidRequest, match=next(iter(invalid))):
        from_message(RolloutCorrection, update_pb2.RolloutCorrection(**{**valid, **invalid}))


def test_importance_weights_and_the_old_log_probs_of_the_engine_exclude_each_other() -> None:
    correction = RolloutCorrection("token", upper=2.0)
    loss = PolicyLossSettings(rollout_correction=correction, old_log_probs="rollout")
    request = UpdateRequest("r", 1, 0, OptimizationSettings(1, 1, 0.1, 1.0, 0), loss)
    with pytest.raises(InvalidRequest, match="old_log_probs rollout"):
        update_request_from_proto(update_request_to_proto(request))


@pytest.mark.parametrize("value", [-0.1, NAN, INFINITY])
def test_a_value_clip_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequest, match="value_clip"):
        update_request_from_proto(update(value_loss=update_pb2.ValueLossSettings(value_clip=value)))


@pytest.mark.parametrize(
    ("record_type", "message", "problem"),
    [
        (EpisodeSettings, generation_pb2.EpisodeSettings(), "max_turns 0: expected 1 to 1024"),
        (
            EpisodeSettings,
            generation_pb2.EpisodeSettings(max_turns=1, max_turn_tokens=2**21),
            "max_turn_tokens 2097152",
        ),
        (
            WeightTransfer,
            generation_pb2.WeightTransfer(weights_digest=b"x", way="full"),
            "weights_digest: expected 16 bytes, got 1",
        ),
        (
            PublishedWeights,
            status_pb2.WeightPublication(weights_digest=bytes(17)),
            "weights_digest: expected 16 bytes",
        ),
    ],
)
def test_a_record_beyond_its_limits_is_refused_with_its_path(record_type: Any, message: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^at\.{problem}"):
        from_message(record_type, message, "at", **({"fields": {}} if record_type is EpisodeSettings else {}))


@pytest.mark.parametrize("kind", [0, 5, 99])
def test_an_unknown_save_kind_is_refused(kind: int) -> None:
    with pytest.raises(InvalidRequest, match=f"kind {kind}: unknown, expected checkpoint, model, adapter, ema"):
        from_message(SaveRequest, update_pb2.SaveRequest(kind=kind))  # type: ignore[arg-type]


@pytest.mark.parametrize("role", [0, 99])
def test_an_unknown_role_is_refused(role: int) -> None:
    with pytest.raises(InvalidRequest, match=f"status.role {role}: unknown"):
        from_message(ServiceStatus, status_pb2.RoleStatus(role=role), "status")  # type: ignore[arg-type]


def test_a_generation_without_a_finished_event_is_a_service_failure() -> None:
    for last in (None, generation_pb2.GenerateResponse(started=generation_pb2.GenerationStarted())):
        with pytest.raises(ServiceFailed, match="without the event `finished`"):
            trajectories_from_proto(last)
