"""The planned memory of an update, compared with the measured peak of its tensors: within 10 %."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plan_cases import Case

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak memory is read from /proc")
SMALL = Case("llama", 256, 4, 4096, responses=16, prompt=32, response=96, tokens=512)
LARGE = [
    Case("llama", 512, 8, 8192, tokens=1024),
    Case("llama", 512, 8, 8192, tokens=1024, checkpointing=True),
    Case("gpt2", 512, 6, 8192, role="critic", tokens=1024),
    Case("qwen2", 512, 6, 32_000, dtype="bfloat16", tokens=1024),
    Case("llama", 768, 6, 8192, rank=8, tokens=1024),
    Case("llama", 384, 4, 4096, responses=16, prompt=32, response=96, tokens=256, processes=2),
    Case("llama", 256, 2, 16_000, responses=16, prompt=32, response=96, tokens=256, processes=2),
    Case("llama", 512, 6, 8192, rank=8, responses=32, prompt=32, response=96, tokens=1024, processes=2),
    Case("qwen2", 384, 4, 4096, dtype="bfloat16", responses=32, prompt=32, response=96, tokens=1024, processes=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", [SMALL, *LARGE], ids=lambda case: f"{case.role} {case.name}")
def test_the_planned_memory_of_an_update_is_within_a_tenth_of_the_measured_peak(case: Case) -> None:
    assert case.predicted_bytes() == pytest.approx(case.measured_bytes()[0], rel=0.1)


def test_a_group_shards_the_state_and_needs_buffers_for_gathered_layers() -> None:
    one, two = (replace(SMALL, processes=size) for size in (1, 2))
    parts = [case.predicted_parts() for case in (one, two)]
    for name in ("parameters", "gradients", "optimizer"):
        assert parts[1][name] == parts[0][name] / 2
    assert "gathered layers" not in parts[0]
    assert parts[1]["gathered layers"] > 0


def test_adapters_are_whole_on_every_device_of_a_group() -> None:
    one, two = (replace(SMALL, rank=8, processes=size).predicted_parts() for size in (1, 2))
    assert one["optimizer"] == two["optimizer"]
    assert one["parameters"] > two["parameters"] > one["parameters"] / 2
