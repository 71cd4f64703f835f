"""Protobuf <-> types. The only package that knows protobuf's messages of data; everything it reads is checked."""

from quartet.codec.checks import LARGEST, positive
from quartet.codec.experience import EXPERIENCE_CHUNK_BYTES, EncodedExperience, decode_experience, encode_experience
from quartet.codec.saved_files import (
    save_kind_from_proto,
    save_kind_to_proto,
    saved_file_from_proto,
    saved_file_to_proto,
)
from quartet.codec.scores import scores_from_proto, scores_to_proto
from quartet.codec.status import status_from_proto, status_to_proto
from quartet.codec.tensors import floats_from_proto, ints_from_proto, tensor_to_proto
from quartet.codec.trajectories import (
    MAX_RESPONSE_TOKENS,
    batch_from_proto,
    batch_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    trajectory_from_bytes,
    trajectory_to_bytes,
    write_batch,
)
from quartet.codec.updates import (
    MAX_EPOCHS,
    optimization_from_proto,
    optimization_to_proto,
    policy_loss_from_proto,
    policy_loss_to_proto,
    value_loss_from_proto,
    value_loss_to_proto,
)

__all__ = [
    "EXPERIENCE_CHUNK_BYTES",
    "LARGEST",
    "MAX_EPOCHS",
    "MAX_RESPONSE_TOKENS",
    "EncodedExperience",
    "batch_from_proto",
    "batch_to_proto",
    "decode_experience",
    "encode_experience",
    "floats_from_proto",
    "ints_from_proto",
    "optimization_from_proto",
    "optimization_to_proto",
    "policy_loss_from_proto",
    "policy_loss_to_proto",
    "positive",
    "sampling_from_proto",
    "sampling_to_proto",
    "save_kind_from_proto",
    "save_kind_to_proto",
    "saved_file_from_proto",
    "saved_file_to_proto",
    "scores_from_proto",
    "scores_to_proto",
    "status_from_proto",
    "status_to_proto",
    "tensor_to_proto",
    "trajectory_from_bytes",
    "trajectory_to_bytes",
    "value_loss_from_proto",
    "value_loss_to_proto",
    "write_batch",
]
