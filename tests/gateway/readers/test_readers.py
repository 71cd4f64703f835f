"""Readers of files that grow, are replaced or are damaged. Cached contents always match the file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quartet.errors import ConfigError
from quartet.gateway.readers.log_tail import BLOCK_BYTES, MAX_BYTES, last_lines, log_files
from quartet.gateway.readers.metric_columns import LINES_PER_READ, MetricColumns
from quartet.gateway.readers.run_readers import RunReaders
from quartet.gateway.readers.token_texts import token_texts
from quartet.system.durable_files import write_durably
from tests.gateway.conftest import write_metrics
from tests.gateway.serving import create_run


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def line(step: int, **metrics: float | None) -> str:
    return json.dumps({"step": step, **metrics}) + "\n"


def test_columns_read_appended_lines_and_skip_an_incomplete_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    columns = MetricColumns(path)
    columns.refresh()
    assert (columns.count(), columns.names()) == (0, [])
    append(path, line(1, a=1.0) + '{"step": 2, "a"')
    columns.refresh()
    assert columns.count() == 1
    append(path, ": 2.5}\n" + line(3, b=7))
    columns.refresh()
    assert columns.count() == 3
    assert columns.row(2) == {"a": 2.5, "b": None}
    assert columns.row(3) == {"a": None, "b": 7.0}


def test_columns_follow_rollbacks(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    columns = MetricColumns(path)
    for num_dropped in range(4):
        first_lines = "".join(line(step, a=1.0) for step in range(1, 4))
        write_durably(
            path, first_lines + "".join(line(step, a=10.0 * num_dropped + step) for step in range(4, 7 - num_dropped))
        )
        columns.refresh()
        assert columns.count() == 6 - num_dropped
        assert [columns.row(step)["a"] for step in range(1, 7 - num_dropped)] == [1.0] * 3 + [
            10.0 * num_dropped + step for step in range(4, 7 - num_dropped)
        ]
    path.unlink()
    columns.refresh()
    assert columns.count() == 0


def test_a_line_of_a_former_leader_is_not_a_commit(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, line(1, a=1) + line(2, a=2) + line(2, a=99) + line(3, a=3))
    columns = MetricColumns(path)
    columns.refresh()
    assert [columns.row(step)["a"] for step in (1, 2, 3)] == [1, 2, 3]
    write_durably(path, line(1, a=1) + line(2, a=2) + line(2, a=99) + line(3, a=4))
    columns.refresh()
    assert [columns.row(step)["a"] for step in (1, 2, 3)] == [1, 2, 4]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nonsense\n", ":2: not JSON"),
        ("[" * 100_000 + "\n", ":2: not JSON"),
        ("[2]\n", ":2: has no step number"),
        ('{"step": true}\n', ":2: has no step number"),
        ('{"step": 1e3}\n', ":2: has no step number"),
        ('{"step": 3}\n', ":2: is not step 2"),
        ('{"step": 2, "a": "high"}\n', ":2: a is not a number"),
        ('{"step": 2, "a": [1]}\n', ":2: a is not a number"),
    ],
)
def test_a_damaged_line_raises_until_it_is_repaired(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, line(1, a=1.0) + text)
    columns = MetricColumns(path)
    for _ in range(2):
        with pytest.raises(ConfigError, match=problem):
            columns.refresh()
    write_durably(path, line(1, a=1.0) + line(2, a=2.0))
    columns.refresh()
    assert columns.count() == 2


def test_curves_match_a_plain_loop_over_the_rows(tmp_path: Path) -> None:
    steps, path = LINES_PER_READ + 1234, tmp_path / "metrics.jsonl"
    generator = np.random.default_rng(0)
    values = generator.normal(size=steps)
    values[generator.random(steps) < 0.3] = math.nan
    values[100:250] = math.nan
    values[7] = math.inf
    path.write_text("".join(line(step, a=value) for step, value in enumerate(values.tolist(), 1)))
    columns = MetricColumns(path)
    columns.refresh()
    values[7] = math.nan
    for first, last, points in (
        (1, steps, 33),
        (90, 260, 5),
        (5, 5, 1),
        (1, 10**9, 10_000),
        (steps - 10, steps + 10, 3),
    ):
        result = columns.curves(["a"], first, last, points)
        curve = result.curves["a"]
        last_step = min(last, steps)
        assert (result.first, result.last) == (first, last_step)
        assert len(curve.steps) <= points
        start = first
        for step, mean, low, high in zip(curve.steps, curve.mean, curve.low, curve.high, strict=True):
            bucket = [value for value in values[start - 1 : step] if not math.isnan(value)]
            assert step - start < result.bucket
            if bucket:
                assert [mean, low, high] == pytest.approx([sum(bucket) / len(bucket), min(bucket), max(bucket)])
            else:
                assert all(map(math.isnan, (mean, low, high)))
            start = step + 1
        assert start == last_step + 1


def test_steps_out_of_range_give_empty_curves(tmp_path: Path) -> None:
    files = create_run(tmp_path, steps=3)
    columns = RunReaders().metrics(files.metrics)
    for first, last in ((4, 10), (3, 2)):
        result = columns.curves(["reward_mean"], first, last, 10)
        assert (result.first, result.last, result.curves["reward_mean"].steps) == (0, 0, [])


def test_the_least_recently_used_columns_are_dropped(tmp_path: Path) -> None:
    readers = RunReaders(max_metrics_bytes=60_000)
    runs = [create_run(tmp_path, f"run-{number}") for number in range(4)]
    for files in runs:
        write_metrics(files, 1000)
    columns = [readers.metrics(files.metrics) for files in runs]
    assert readers.metrics(runs[3].metrics) is columns[3]
    assert readers.metrics(runs[0].metrics) is not columns[0]
    assert readers.metrics(runs[0].metrics).count() == 1000


def test_records_are_read_again_when_their_file_changes(tmp_path: Path) -> None:
    records, path = RunReaders().records, tmp_path / "alerts.jsonl"
    assert records(path) == []
    append(path, '{"a": 1}\n{"a"')
    assert records(path) == [{"a": 1}]
    assert records(path) is records(path)
    append(path, ": 2}\n")
    assert records(path) == [{"a": 1}, {"a": 2}]
    append(path, "null\n")
    with pytest.raises(ConfigError, match=r"alerts.jsonl:3: not a JSON object"):
        records(path)


def test_the_last_timeline_of_a_repeated_step_counts_and_fragments_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    timeline = RunReaders().timeline(path)
    assert timeline.step(1) is None
    append(path, line(1, seconds=1.0) + line(2, seconds=1.0) + '{"step": 3, "sec\n' + line(2, seconds=2.0))
    assert timeline.step(2) == {"step": 2, "seconds": 2.0}
    assert timeline.step(3) is None
    append(path, line(3, seconds=3.0))
    assert timeline.step(3) == {"step": 3, "seconds": 3.0}
    write_durably(path, line(1, seconds=9.0))
    assert timeline.step(1) == {"step": 1, "seconds": 9.0}
    assert timeline.step(2) is None


@pytest.mark.parametrize("ending", ["\n", ""])
@pytest.mark.parametrize("width", [1, 80, BLOCK_BYTES])
def test_the_last_lines_of_a_log_are_returned(tmp_path: Path, ending: str, width: int) -> None:
    path = tmp_path / "actor.log"
    all_lines = [f"{number} " + "x" * (width % 19_000) for number in range(30)]
    path.write_text("\n".join(all_lines) + ending)
    for count in (1, 7, 29, 30, 31):
        assert last_lines(path, count) == (all_lines[-count:], count < 30)


def test_very_long_lines_and_invalid_utf8_are_read_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "actor.log"
    path.write_bytes(b"x" * (MAX_BYTES + BLOCK_BYTES) + b"\n\xff\xfe end\r\n")
    lines, truncated = last_lines(path, 1)
    assert (lines, truncated) == (["�� end"], True)
    lines, truncated = last_lines(path, 5)
    assert (lines, truncated) == (["�� end"], True)
    path.write_bytes(b"")
    assert last_lines(path, 5) == ([], False)


def test_links_and_folders_are_not_logs(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("no")
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "link.log").symlink_to(secret)
    (logs / "folder.log").mkdir()
    (logs / "actor.log").write_text("yes")
    assert list(log_files(logs)) == ["actor"]


def byte_level(tmp_path: Path) -> Tokenizer:
    """Return a tokenizer with one token per byte, like the base of byte-level BPE."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize("text", ["plain", "naïve 日本 🙂!", " leading", "", "ends <eos>"])
def test_token_texts_concatenate_to_the_whole_text(tmp_path: Path, text: str) -> None:
    byte_level(tmp_path)
    tokenizer = RunReaders().tokenizer(tmp_path)
    assert tokenizer is not None
    ids = tokenizer.encode(text).ids
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=False) == text
    if text.startswith("na"):
        assert texts[2:4] == ["", "ï"]


def test_an_incomplete_character_at_the_end_is_shown(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    ids = tokenizer.encode("a🙂").ids[:-1]
    assert "".join(token_texts(tokenizer, ids)) == tokenizer.decode(ids) != "a"


def test_without_a_tokenizer_token_ids_are_shown(tmp_path: Path) -> None:
    assert RunReaders().tokenizer(tmp_path) is None
    assert token_texts(None, [5, 12]) == ["⟨5⟩", "⟨12⟩"]
    assert token_texts(byte_level(tmp_path), [5, 10**6]) == ["⟨5⟩", "⟨1000000⟩"]
    (tmp_path / "tokenizer.json").write_text("{}")
    assert RunReaders().tokenizer(tmp_path) is None
