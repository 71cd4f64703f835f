"""Token files of a step: one trajectory is read without the others, and damage is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet.errors import ConfigError
from quartet.run_directory.run_files import RunFiles

LENGTHS = [(3, 2), (1, 4), (2, 1)]


def arrays(values: bool = True) -> dict[str, Any]:
    prompts, responses = (sum(lengths) for lengths in zip(*LENGTHS, strict=True))
    numbers = np.arange(responses, dtype=np.float32)
    results = {
        "prompt_lengths": np.array([prompt for prompt, _ in LENGTHS], np.int32),
        "response_lengths": np.array([response for _, response in LENGTHS], np.int32),
        "prompt_ids": np.arange(100, 100 + prompts, dtype=np.int32),
        "response_ids": np.arange(200, 200 + responses, dtype=np.int32),
        "log_probs": -numbers,
        "reference_log_probs": -2 * numbers,
        "kl": numbers,
        "advantages": 3 * numbers,
        "returns": 4 * numbers,
    }
    return results | ({"values": 5 * numbers} if values else {})


def test_each_trajectory_is_read_from_its_part_of_the_arrays(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.write_tokens(7, arrays())
    second = files.read_tokens(7, 1)
    assert second is not None
    assert second.prompt_ids.tolist() == [103]
    assert second.response_ids.tolist() == [202, 203, 204, 205]
    assert second.log_probs.tolist() == [-2, -3, -4, -5]
    assert second.reference_log_probs.tolist() == [-4, -6, -8, -10]
    assert second.kl.tolist() == [2, 3, 4, 5]
    assert second.advantages.tolist() == [6, 9, 12, 15]
    assert second.returns.tolist() == [8, 12, 16, 20]
    assert second.values is not None
    assert second.values.tolist() == [10, 15, 20, 25]
    ends = [files.read_tokens(7, 0), files.read_tokens(7, 2)]
    assert [None if end is None else end.response_ids.tolist() for end in ends] == [[200, 201], [206]]
    assert [path.name for path in files.tokens.iterdir()] == ["step-000007.safetensors"]


def test_a_trajectory_has_its_branches(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.write_tokens(7, arrays() | {"branches": np.array([1, 2], np.int32)})
    one, two = files.read_tokens(7, 0), files.read_tokens(7, 1)
    assert one is not None
    assert two is not None
    assert (one.response_ids.tolist(), one.further_branches) == ([200, 201], ())
    assert two.response_ids.tolist() == [202, 203, 204, 205]
    (further,) = two.further_branches
    assert (further.prompt_ids.tolist(), further.response_ids.tolist()) == ([104, 105], [206])
    assert further.advantages.tolist() == [18]
    with pytest.raises(ConfigError, match="has 2 trajectories, expected one at 2"):
        files.read_tokens(7, 2)


@pytest.mark.parametrize("counts", [[1, 1], [2, 2], [3, 0], [4, -1]])
def test_numbers_of_branches_that_do_not_fit_are_reported(tmp_path: Path, counts: list[int]) -> None:
    files = RunFiles(tmp_path)
    files.write_tokens(7, arrays() | {"branches": np.array(counts, np.int32)})
    with pytest.raises(ConfigError, match="different lengths"):
        files.read_tokens(7, 0)


def test_there_are_no_values_without_a_critic(tmp_path: Path) -> None:
    RunFiles(tmp_path).write_tokens(1, arrays(values=False))
    result = RunFiles(tmp_path).read_tokens(1, 0)
    assert result is not None
    assert result.values is None


def test_a_trajectory_has_its_part_of_the_mask(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.write_tokens(1, {**arrays(), "response_mask": np.array([1, 1, 1, 0, 0, 1, 1], np.bool_)})
    files.write_tokens(2, arrays())
    masks = [files.read_tokens(step, 1) for step in (1, 2)]
    assert [None if each is None else each.response_mask.tolist() for each in masks] == [
        [True, False, False, True],
        [True] * 4,
    ]


def test_a_step_without_a_token_file_returns_none(tmp_path: Path) -> None:
    assert RunFiles(tmp_path).read_tokens(1, 0) is None


@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_out_of_range_is_an_error(tmp_path: Path, index: int) -> None:
    RunFiles(tmp_path).write_tokens(1, arrays())
    with pytest.raises(ConfigError, match=f"has 3 trajectories, expected one at {index}"):
        RunFiles(tmp_path).read_tokens(1, index)


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.write_tokens(1, arrays())
    path = files.tokens / "step-000001.safetensors"
    content = path.read_bytes()
    for damaged in (content[:-4], content[:20], b"", b"\xff" * len(content)):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"step-000001\.safetensors: cannot be read"):
            files.read_tokens(1, 0)
    files.write_tokens(1, {name: array for name, array in arrays().items() if name != "kl"})
    with pytest.raises(ConfigError, match="cannot be read"):
        files.read_tokens(1, 0)
    files.write_tokens(1, {**arrays(), "kl": arrays()["kl"][:-1]})
    with pytest.raises(ConfigError, match=r"cannot be read|different lengths"):
        files.read_tokens(1, 2)


def test_only_the_newest_token_files_are_kept(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    for step in (999_998, 999_999, 1_000_000, 1_000_001):
        files.write_tokens(step, arrays(), keep=2)
    assert sorted(path.name for path in files.tokens.iterdir()) == [
        "step-1000000.safetensors",
        "step-1000001.safetensors",
    ]
    files.truncate_after(1_000_000)
    assert [path.name for path in files.tokens.iterdir()] == ["step-1000000.safetensors"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_leaves_no_partial_file(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.write_tokens(1, arrays())
    (files.tokens / ".step-000002.safetensors.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        files.write_tokens(2, arrays())
    assert [path.name for path in files.tokens.iterdir()] == ["step-000001.safetensors"]
