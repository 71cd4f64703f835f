"""Rows of trajectories: the generator, its weights and their versions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from quartet.errors import ServiceFailed
from quartet.services.orchestrator.checkpointing.step_artifacts import failed_trajectory_rows, trajectory_rows
from quartet.services.orchestrator.rollout.collector import CollectedStep
from quartet.services.orchestrator.rollout.scoring_queue import FailedTrajectory
from quartet.types import Trajectory, VersionSpan
from tests.buffer.samples import trajectory

OLD, NEW = bytes(range(16)), bytes(range(16, 32))


class Decoder:
    """A tokenizer that only decodes."""

    def batch_decode(self, sequences: list[Any], skip_special_tokens: bool = False) -> list[str]:
        return [" ".join(map(str, ids)) for ids in sequences]


def rows_of(item: Trajectory) -> list[dict[str, Any]]:
    """Return the rows of a trajectory that was scored, and of the same one that could not be scored."""
    scored: Any = SimpleNamespace(trajectory=item, score=1.0, parts={})
    failed = FailedTrajectory(item, 3, "error", ServiceFailed)
    prepared: Any = SimpleNamespace(response_kl=np.zeros(1, np.float32))
    collected = CollectedStep([scored], [failed], [], 0.0, 0.0)
    return [*trajectory_rows(Decoder(), collected, prepared), *failed_trajectory_rows(Decoder(), [failed])]


def test_a_trajectory_names_its_generator_and_the_versions_of_its_weights() -> None:
    spans = (VersionSpan(4, OLD, 1), VersionSpan(5, NEW, 2))
    item = replace(trajectory("run", 0, version=5), weights_digest=NEW, generator="10.0.0.1:9000", version_spans=spans)
    for row in rows_of(item):
        assert (row["policy_version"], row["generator"], row["weights_digest"]) == (5, "10.0.0.1:9000", NEW.hex())
        assert row["version_spans"] == [
            {"policy_version": 4, "weights_digest": OLD.hex(), "tokens": 1},
            {"policy_version": 5, "weights_digest": NEW.hex(), "tokens": 2},
        ]


def test_a_trajectory_of_the_actor_has_only_a_policy_version() -> None:
    for row in rows_of(trajectory("run", 0, version=5)):
        assert row["policy_version"] == 5
        assert not {"generator", "weights_digest", "version_spans"} & row.keys()
