"""Prompts of several sets: columns, templates, mixing by weight, and the content that a run records."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.config.loading import config_of
from quartet.config.root import Config
from quartet.contract.trajectory import Prompt
from quartet.data.prompt_cache import set_contents
from quartet.data.prompt_encoding import PromptEncoder, encode_lines
from quartet.data.prompt_lines import iterate_prompts
from quartet.data.prompt_order import MixedPromptOrder, WeightedPrompts, cumulative_parts, max_parts, shares_of_rest
from quartet.data.prompt_settings import PromptSettings
from quartet.errors import ConfigError, DataError
from quartet.run_directory.identity import Identity


def config_with(**data: Any) -> Config:
    return config_of({"data": data, "actor": {"model": "a"}, "reward": {"model": "b"}})


def settings_of(path: Path, **given: Any) -> PromptSettings:
    config = config_with(sets=[{"name": "one", "path": str(path), **given}])
    return PromptSettings.for_training(config)[0]


def rows(path: Path, **given: Any) -> list[dict[str, Any]]:
    """Return the prompt and the fields of each row."""
    settings = settings_of(path, **given)
    return [
        {"prompt": line.text if line.messages is None else list(line.messages), **json.loads(line.fields)}
        for line in iterate_prompts(settings, settings.path)
    ]


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_columns_are_renamed_and_the_others_become_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"question": "1+1", "label": 2, "image": "x" * 10, "prompt": "no"})
    renamed = {"columns": {"text": "question", "answer": "label"}, "ignore_columns": ["image", "prompt"]}
    assert rows(path, **renamed) == [{"prompt": "1+1", "text": "1+1", "answer": 2, "prompt_set": "one"}]


def test_messages_in_a_renamed_column_of_csv_are_json(tmp_path: Path) -> None:
    path = tmp_path / "p.csv.gz"
    messages = [{"role": "user", "content": "hi"}]
    path.write_bytes(gzip.compress(f'chat,n\n"{json.dumps(messages).replace(chr(34), chr(34) * 2)}",1\n'.encode()))
    assert rows(path, columns={"messages": "chat"}) == [
        {"prompt": messages, "messages": messages, "n": "1", "prompt_set": "one"}
    ]


def test_take_reads_the_first_rows_only(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"text": "a"}, {"text": "b"})
    with path.open("a") as file:
        file.write("not JSON\n")
    assert [row["prompt"] for row in rows(path, take=2)] == ["a", "b"]


def test_a_text_template_makes_the_prompt_of_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"question": "1+1", "prompt": "as it was", "n": 3})
    template = "{question} {{in}} {n} words:"
    assert rows(path, text_template=template) == [
        {"question": "1+1", "prompt": "as it was", "text": "1+1 {in} 3 words:", "n": 3, "prompt_set": "one"}
        | {"prompt": "as it was"}
    ]
    settings = settings_of(path, text_template=template)
    assert [line.text for line in iterate_prompts(settings, path)] == ["1+1 {in} 3 words:"]


def test_message_templates_make_a_chat_of_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"question": "1+1"})
    templates = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{question} = ?"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1 = ?"}]
    assert rows(path, message_templates=templates) == [
        {"prompt": messages, "messages": messages, "question": "1+1", "prompt_set": "one"}
    ]


CHAT = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("good", "bad", "given", "message"),
    [
        ({"question": "x"}, {"q": 1}, {"columns": {"text": "question"}}, "has no column question, but q; correct"),
        ({"q": "x"}, {"q": 1}, {"columns": {"text": "q"}}, "text (column q) is not a string, but "),
        ({"q": "x"}, {"q": ""}, {"columns": {"text": "q"}}, "text (column q) is empty; expected"),
        (
            {"q": CHAT},
            {"q": [{"role": "user"}]},
            {"columns": {"messages": "q"}},
            "messages (column q): message 1: content is missing; expected a text or text parts",
        ),
        ({"q": "x"}, {"q": "a", "text": "b"}, {"columns": {"text": "q"}}, "has a column text, and another value gets"),
        ({"text": "x"}, {"text": "b", "prompt_set": 1}, {}, "has a column prompt_set, and another value gets this"),
        ({"q": "x"}, {"q": None}, {"text_template": "{q}"}, "q is null, but the template needs it; expected a text"),
        ({"q": "x"}, {"p": 1}, {"text_template": "{q}"}, "q is missing, but the template needs it; expected a text"),
        ({"q": "x"}, {"q": None}, {"columns": {"text": "q"}}, "text (column q) is null; expected"),
        (
            {"q": "x"},
            {"q": [1]},
            {"columns": {"x": "q"}, "text_template": "{x}"},
            "x (column q) is of type list, but the template",
        ),
        ({"q": "x"}, {"q": ""}, {"text_template": "{q}"}, "the template makes an empty text of it"),
        ({"text": "x"}, {"text": 5}, {}, "text is not a string, but "),
    ],
)
def test_the_first_bad_row_is_named_with_its_column(
    good: dict[str, Any], bad: dict[str, Any], given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "p.jsonl", good, bad)
    with pytest.raises(DataError) as raised:
        rows(path, **given)
    assert str(raised.value).startswith(f"prompts {path}:2: {message}")


def test_a_chat_template_that_refuses_a_row_is_reported_with_its_column(tmp_path: Path) -> None:
    def refuse(messages: list[dict[str, Any]], *_: Any) -> str:
        if messages[0]["role"] == "tool":
            raise ValueError("no tools")
        return "x"

    path = write(tmp_path / "p.jsonl", *({"chat": [{"role": role, "content": "a"}]} for role in ("user", "tool")))
    settings = settings_of(path, columns={"messages": "chat"})
    encoder = PromptEncoder("m", lambda _: [], refuse, lambda batch: [[1]] * len(batch))
    with pytest.raises(DataError, match=r"p\.jsonl:2: .* refuses the messages of messages \(column chat\): no tools"):
        encode_lines(settings, iterate_prompts(settings, path), encoder, frozenset())


def test_the_set_s_name_is_in_the_cache_key_and_in_the_prompts(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"text": "a"})
    one, other = (PromptSettings.from_json(settings_of(path, name=name).to_json()) for name in ("one", "other"))
    assert (one.mapping.set_name, other.mapping.set_name) == ("one", "other")
    assert one == settings_of(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "expected either prompts, the path of a file, or sets"),
        (
            {"prompts": "a", "sets": [{"name": "a", "path": "b"}]},
            "expected either prompts, the path of a file, or sets",
        ),
        ({"sets": [{"name": "a", "path": "b"}] * 2}, "two sets have the name a"),
        ({"sets": [{"name": "a"}]}, "expected either path, for a file, or dataset"),
        ({"sets": [{"name": "a", "path": "b", "revision": "c"}]}, "revision: only used with dataset"),
        ({"sets": [{"name": "a", "path": "b", "text_template": "{a.b}"}]}, "expected {COLUMN} for values"),
        ({"sets": [{"name": "a", "path": "b", "text_template": "{}"}]}, "expected {COLUMN} for values"),
        ({"sets": [{"name": "a", "path": "b", "text_template": "{a"}]}, "expected {COLUMN} for values"),
        ({"prompts": "a", "validation": "b", "validation_set": {"name": "c", "path": "d"}}, "at most one of them"),
        ({"sets": [{"name": "a", "path": "b", "weight": 0}]}, "expected more than 0"),
        ({"sets": [{"name": "a", "path": "b", "trust_remote_code": False}]}, "unknown key"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_with(**data)
    assert message in str(raised.value)


def prompts(count: int, first: int = 0) -> list[Prompt]:
    return [Prompt(first + index, np.ones(1, np.int32)) for index in range(count)]


def mixed(per_step: int, *sizes_and_weights: tuple[int, float], seed: int = 3) -> MixedPromptOrder:
    sets = [
        WeightedPrompts(str(number), weight, prompts(size, 1000 * number))
        for number, (size, weight) in enumerate(sizes_and_weights)
    ]
    return MixedPromptOrder(sets, per_step, seed)


def indices(order: MixedPromptOrder, step: int) -> list[int]:
    return [prompt.index for prompt in order.of_step(step)]


weights = st.lists(st.floats(0.01, 100).map(lambda value: round(value, 2)), min_size=1, max_size=5)


@settings(deadline=None)
@given(weights, st.integers(0, 500), st.integers(1, 64))
def test_parts_follow_the_weights_and_only_grow(weights: list[float], total: int, count: int) -> None:
    shares = shares_of_rest(weights)
    before, after = cumulative_parts(shares, total), cumulative_parts(shares, total + count)
    assert (sum(before), sum(after)) == (total, total + count)
    assert all(
        0 <= end - start <= most for start, end, most in zip(before, after, max_parts(shares, count), strict=True)
    )
    for weight, part in zip(weights, after, strict=True):
        assert abs(part - (total + count) * weight / sum(weights)) <= len(weights) / 2


def test_a_step_is_a_pure_function_of_seed_and_number() -> None:
    sizes = ((7, 1), (20, 2.5), (9, 0.1))
    walked = mixed(5, *sizes)
    expected = [indices(walked, step) for step in range(1, 40)]
    assert [indices(mixed(5, *sizes), step) for step in range(1, 40)] == expected
    assert [indices(walked, step) for step in range(39, 0, -1)] == expected[::-1]
    assert [indices(mixed(5, *sizes, seed=4), step) for step in range(1, 40)] != expected


def test_each_set_has_its_own_passes_without_repeated_prompts() -> None:
    order = mixed(6, (8, 1), (50, 2))
    drawn = [indices(order, step) for step in range(1, 101)]
    assert all(len(set(step)) == 6 for step in drawn)
    # Two prompts per step from the set of 8: a pass takes four steps.
    for start in range(0, 100, 4):
        small = [index for step in drawn[start : start + 4] for index in step if index < 1000]
        assert sorted(small) == list(range(8))
    counts = Counter(index for step in drawn for index in step if index >= 1000)
    # 12 steps of four make a pass of 48 of the 50.
    assert max(counts.values()) - min(counts.values()) <= 4
    assert sum(counts.values()) == 400


def test_another_set_changes_nothing_in_the_passes_of_the_others() -> None:
    two, three = mixed(4, (9, 1), (30, 1)), mixed(6, (9, 1), (30, 1), (40, 1))
    for step in range(1, 20):
        assert [index for index in indices(three, step) if index < 2000] == indices(two, step)


def test_a_set_that_is_too_small_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.sets\.1: has only 2 usable prompts, and a step takes up to 3 of them"
    ):
        mixed(4, (9, 1), (2, 2))


def test_a_late_step_is_reached_in_time() -> None:
    assert len(indices(mixed(64, (1000, 1), (5000, 0.3), (300, 0.01)), 20_000)) == 64


def test_a_resumed_run_with_other_rows_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"text": "a"})
    config = config_with(
        sets=[{"name": "one", "path": str(path)}], validation_set={"name": "v", "path": str(path), "take": 1}
    )
    Identity.new(config, {}, set_contents(config)).write(tmp_path / "run.json")
    identity = Identity.read(tmp_path / "run.json")
    assert identity is not None
    moved = path.rename(tmp_path / "moved.jsonl")
    config = config_with(
        sets=[{"name": "one", "path": str(moved)}], validation_set={"name": "v", "path": str(moved), "take": 1}
    )
    identity.check(config, tmp_path, set_contents(config))
    write(moved, {"text": "b"})
    with pytest.raises(ConfigError, match=r"data\.sets\.one: its rows differ from those that the run in"):
        identity.check(config, tmp_path, set_contents(config))
    other = config_with(sets=[{"name": "one", "path": str(moved), "weight": 2}])
    with pytest.raises(ConfigError, match=r"--resume: data\.sets is "):
        identity.check(other, tmp_path, {})


def test_a_resumed_run_has_the_rows_of_its_evaluation_sets(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"text": "a"})

    def evaluated(path: Path, samples: int = 2) -> Config:
        evaluation = {"sets": [{"name": "one", "path": str(path), "samples_per_prompt": samples}]}
        tree = {"data": {"prompts": str(tmp_path / "t.jsonl")}, "actor": {"model": "a"}, "reward": {"model": "b"}}
        return config_of({**tree, "evaluation": evaluation})

    write(tmp_path / "t.jsonl", {"text": "t"})
    config = evaluated(path)
    identity = Identity.new(config, {}, set_contents(config))
    assert set(identity.prompt_sets) == {"evaluation.sets.one"}
    moved = path.rename(tmp_path / "moved.jsonl")
    config = evaluated(moved)
    identity.check(config, tmp_path, set_contents(config))
    with pytest.raises(ConfigError, match=r"--resume: evaluation\.sets is "):
        identity.check(evaluated(moved, 3), tmp_path, {})
    write(moved, {"text": "b"})
    with pytest.raises(ConfigError, match=r"evaluation\.sets\.one: its rows differ from those that the run in"):
        identity.check(config, tmp_path, set_contents(config))


def test_prompts_of_an_evaluation_set_are_limited_and_named(tmp_path: Path) -> None:
    sets = [{"name": "one", "path": "a"}, {"name": "two", "path": "b", "max_prompts": 7}]
    tree = {"data": {"prompts": "t"}, "actor": {"model": "a"}, "reward": {"model": "b"}}
    config = config_of({**tree, "evaluation": {"max_prompts": 3, "sets": sets}})
    settings = PromptSettings.for_evaluation_sets(config)
    assert [(each.key, each.limit, each.mapping.set_name) for each in settings] == [
        ("evaluation.sets.one", 3, "one"),
        ("evaluation.sets.two", 7, "two"),
    ]
