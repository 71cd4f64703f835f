"""A reference answers under the version that a request names, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.contract.weights import ReferenceVersion
from quartet.errors import FailedPrecondition, InvalidRequest, MismatchError
from quartet.models.weights.loading import load_causal_lm
from quartet.run_directory.reference_versions import RECORD, read_version, version_folder, write_record
from quartet.services.reference import servicer
from tests.services.model_services import Services
from tests.unit.models import tiny

BATCH = tiny.batch([3, 2], [4, 7])


def version(config: Config, step: int) -> ReferenceVersion:
    """Write a version whose weights depend on its step."""
    root = config.run_directory
    folder = version_folder(root / "reference", step)
    model = load_causal_lm(config.actor.model, "float32")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + step / 10)
    model.save_pretrained(folder)
    write_record(folder)
    result = read_version(root, root / "reference", step)
    assert result is not None
    return result


def test_each_request_is_answered_under_its_version(services: Services, make_config: Callable[..., Config]) -> None:
    config = make_config()
    reference = services.start(Role.REFERENCE, config)
    one, two = version(config, 1), version(config, 2)
    asked = (None, one, two, one, None)
    initial, first, second, first_again, initial_again = (
        reference.log_probs(BATCH, 1.0, each).result().tobytes() for each in asked
    )
    assert len({initial, first, second}) == 3
    assert (first, initial) == (first_again, initial_again)
    fresh = services.start(Role.REFERENCE, config)
    assert fresh.log_probs(BATCH, 1.0, two).result().tobytes() == second


def test_a_version_whose_files_differ_is_refused(services: Services, make_config: Callable[..., Config]) -> None:
    config = make_config()
    reference = services.start(Role.REFERENCE, config)
    before = reference.log_probs(BATCH, 1.0).result()
    one = version(config, 1)
    for wrong, message in (
        (replace(one, digest=bytes(32)), "has the digest"),
        (replace(one, directory="reference/step-000009"), "does not exist"),
    ):
        with pytest.raises(FailedPrecondition, match=message):
            reference.log_probs(BATCH, 1.0, wrong).result()
    for invalid in (replace(one, directory="../elsewhere"), replace(one, digest=b"short")):
        with pytest.raises(InvalidRequest):
            reference.log_probs(BATCH, 1.0, invalid).result()
    file = config.run_directory / one.directory / "model.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(FailedPrecondition, match="has the digest"):
        reference.log_probs(BATCH, 1.0, one).result()
    np.testing.assert_array_equal(reference.log_probs(BATCH, 1.0).result(), before)


def test_an_answer_of_another_version_is_refused(
    services: Services, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    reference = services.start(Role.REFERENCE, config)
    one, real = version(config, 1), servicer.to_message
    monkeypatch.setattr(servicer, "to_message", lambda kind, **fields: real(kind, **{**fields, "version_step": 0}))
    with pytest.raises(MismatchError, match="LogProbs of version 0, expected 1; use a reference service that supports"):
        reference.log_probs(BATCH, 1.0, one).result()


def test_the_record_is_not_part_of_the_digest(make_config: Callable[..., Config], tmp_path: Path) -> None:
    config = make_config()
    one = version(config, 1)
    folder = config.run_directory / one.directory
    write_record(folder)
    again = read_version(config.run_directory, config.run_directory / "reference", 1)
    assert again == one
    assert (folder / RECORD).is_file()
