"""The cache of tokenized prompts."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from quartet.data import prompt_cache
from quartet.data.prompt_cache import cached_prompts, load_prompts
from quartet.data.prompt_encoding import EncodedPrompts, PromptEncoder, select_prompts
from quartet.data.prompt_settings import PromptSettings
from quartet.errors import DataError

CHAT = {"messages": [{"role": "user", "content": "ö\u2028b"}], "answer": "é"}
LINES = [{"text": "abc"}, CHAT, {"token_ids": [7, 8]}, {"prompt": "a" * 9}]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PromptSettings:
    """Create prompts, the files of a tokenizer, and an empty cache."""
    monkeypatch.setenv("QUARTET_CACHE", str(tmp_path / "cache"))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/tokenizer.json").write_text("{}")
    (tmp_path / "policy/chat_template.jinja").write_text("{{ messages }}")
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return PromptSettings(path, str(tmp_path / "policy"), max_prompt_tokens=8)


class Encoder:
    """Encoder by character code that counts the lines which it tokenizes."""

    def __init__(self) -> None:
        self.lines = 0

    def __call__(self) -> tuple[PromptEncoder, frozenset[int]]:
        def texts(batch: list[str]) -> list[list[int]]:
            self.lines += len(batch)
            return [[ord(character) for character in text] for text in batch]

        encoder = PromptEncoder("m", texts, lambda messages, *_: messages[0]["content"] + ">", texts, bos_id=1)
        return encoder, frozenset({ord("c")})


def load(settings: PromptSettings) -> tuple[EncodedPrompts, int]:
    """Return the prompts, and the number of lines that were tokenized for them."""
    encoder = Encoder()
    return load_prompts(settings, encoder), encoder.lines


def equal(left: EncodedPrompts, right: EncodedPrompts) -> bool:
    return all(np.array_equal(getattr(left, item.name), getattr(right, item.name)) for item in fields(EncodedPrompts))


def cache_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache/prompts").iterdir())


def test_prompts_from_the_cache_equal_those_that_were_tokenized(settings: PromptSettings, tmp_path: Path) -> None:
    assert cached_prompts(settings) is None
    cold, lines = load(settings)
    warm, lines_again = load(settings)
    assert (lines, lines_again) == (3, 0)
    assert equal(cold, warm)
    selected = [select_prompts(encoded, settings, 10_000) for encoded in (cold, warm)]
    assert selected[0].notes == selected[1].notes != []
    for before, after in zip(selected[0].prompts, selected[1].prompts, strict=True):
        assert (before.index, before.text, before.fields) == (after.index, after.text, after.fields)
        assert before.token_ids.tolist() == after.token_ids.tolist()
        assert before.token_ids.dtype == after.token_ids.dtype == np.int32
    assert selected[1].prompts[0].token_ids.tolist() == [97, 98]
    assert json.loads(selected[1].prompts[1].fields) == CHAT
    assert all(path.stat().st_mode & 0o077 == 0 for path in cache_files(tmp_path))


def changed_prompts(settings: PromptSettings) -> PromptSettings:
    settings.path.write_text('{"text": "abd"}\n')
    return settings


def changed_template(settings: PromptSettings) -> PromptSettings:
    (Path(settings.model) / "chat_template.jinja").write_text("{{ messages }} ")
    return settings


def new_tokenizer_file(settings: PromptSettings) -> PromptSettings:
    (Path(settings.model) / "added_tokens.json").write_text("{}")
    return settings


@pytest.mark.parametrize(
    "change",
    [
        changed_prompts,
        changed_template,
        new_tokenizer_file,
        lambda settings: replace(settings, continue_final_message=True),
        lambda settings: replace(settings, limit=1),
    ],
)
def test_a_change_of_what_decides_the_ids_misses_the_cache(
    change: Callable[[PromptSettings], PromptSettings], settings: PromptSettings
) -> None:
    load(settings)
    assert load(change(settings))[1] > 0


def test_a_change_of_what_is_applied_later_hits_the_cache(settings: PromptSettings) -> None:
    load(settings)
    (Path(settings.model) / "model.safetensors").write_bytes(b"weights")
    assert load(replace(settings, max_prompt_tokens=3, truncation="left", max_dropped_fraction=0.0))[1] == 0


def test_another_version_of_a_package_misses_the_cache(
    settings: PromptSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(settings)
    monkeypatch.setattr(prompt_cache, "installed_version", lambda _: "99")
    assert load(settings)[1] > 0


def test_a_template_that_writes_the_date_misses_the_cache_on_another_day(
    settings: PromptSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(settings.model) / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}{{ messages }}")
    load(settings)
    assert load(settings)[1] == 0
    monkeypatch.setattr(prompt_cache.time, "strftime", lambda _: "another day")
    assert load(settings)[1] > 0


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 and more", None, 100, 1000, -10])
def test_a_damaged_file_is_replaced(damage: bytes | int | None, settings: PromptSettings, tmp_path: Path) -> None:
    cold, _ = load(settings)
    (path,) = cache_files(tmp_path)
    content = path.read_bytes()
    if damage is None:
        np.savez(path, rows=np.arange(3))
    elif isinstance(damage, int):
        flipped = bytearray(content)
        flipped[damage] ^= 0xFF
        path.write_bytes(flipped)
    else:
        path.write_bytes(damage)
    again, _ = load(settings)
    assert equal(cold, again)
    assert equal(load(settings)[0], cold)


def test_arrays_that_do_not_fit_together_are_refused(settings: PromptSettings, tmp_path: Path) -> None:
    cold, _ = load(settings)
    (path,) = cache_files(tmp_path)
    arrays = {item.name: getattr(cold, item.name) for item in fields(cold)}
    for name, wrong in (
        ("token_ids", cold.token_ids[1:]),
        ("token_ends", cold.token_ends[::-1].copy()),
        ("flags", cold.flags[1:]),
        ("token_ids", cold.token_ids.astype(np.int64)),
        ("rows", cold.rows.reshape(2, 2)),
    ):
        np.savez(path, **{**arrays, name: wrong})
        assert load(settings)[1] == 3


def test_the_cache_can_be_off_or_not_writable(
    settings: PromptSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for place in ("", str(tmp_path / "file")):
        monkeypatch.setenv("QUARTET_CACHE", place)
        assert (load(settings)[1], load(settings)[1]) == (3, 3)
    monkeypatch.delenv("QUARTET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert (load(settings)[1], load(settings)[1]) == (3, 0)
    assert len(list((tmp_path / "xdg/quartet/prompts").iterdir())) == 1


def test_a_cache_that_does_not_accept_a_new_time_is_read(
    settings: PromptSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(settings)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert load(settings)[1] == 0


def test_the_files_that_were_not_used_for_the_longest_time_are_deleted(
    settings: PromptSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = [replace(settings, limit=limit) for limit in (1, 2, 3)]
    for age, variant in zip((300, 200), variants, strict=False):
        load(variant)
        newest = max(cache_files(tmp_path), key=lambda path: path.stat().st_mtime)
        past = newest.stat().st_mtime - age
        os.utime(newest, (past, past))
    assert load(variants[0])[1] == 0  # A hit counts as use.
    size = cache_files(tmp_path)[0].stat().st_size
    monkeypatch.setattr(prompt_cache, "MAX_CACHE_BYTES", 2.5 * size)
    load(variants[2])
    assert len(cache_files(tmp_path)) == 2
    assert load(variants[0])[1] == 0
    assert cached_prompts(variants[1]) is None


@pytest.mark.parametrize("change", [changed_prompts, changed_template, new_tokenizer_file])
def test_prompts_whose_files_change_while_they_are_tokenized_are_not_cached(
    change: Callable[[PromptSettings], PromptSettings], settings: PromptSettings, tmp_path: Path
) -> None:
    def changing() -> tuple[PromptEncoder, frozenset[int]]:
        encoder = Encoder()()  # A tokenizer that was loaded before the change.
        change(settings)
        return encoder

    load_prompts(settings, changing)
    assert not (tmp_path / "cache").exists()
    assert load(settings)[1] > 0


def test_a_hit_does_not_load_the_tokenizer(settings: PromptSettings) -> None:
    load(settings)

    def load_tokenizer() -> tuple[PromptEncoder, frozenset[int]]:
        raise AssertionError

    load_prompts(settings, load_tokenizer)


def test_several_writers_leave_one_complete_file(settings: PromptSettings, tmp_path: Path) -> None:
    threads = [threading.Thread(target=load, args=(settings,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (path,) = cache_files(tmp_path)
    assert path.suffix == ".npz"
    assert load(settings)[1] == 0


def test_progress_is_reported_with_the_number_of_lines(
    settings: PromptSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_cache, "PROGRESS_SECONDS", 0.0)
    settings.path.write_text('{"text": "a"}\n' * 2500)
    lines: list[str] = []
    load_prompts(settings, Encoder(), lines.append)
    assert lines == [f"tokenizing prompts: {count} of 2,500" for count in ("1,024", "2,048", "2,500")]


def test_a_missing_file_is_refused_before_the_tokenizer_is_needed(settings: PromptSettings) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl: cannot be read \(No such file or directory\); give a file"):
        cached_prompts(replace(settings, path=settings.path.with_name("absent.jsonl")))


COMMIT = "a" * 40


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the directory of owner/name in the local cache of the hub."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub/models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(COMMIT)
    directory = folder / "snapshots" / COMMIT
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_the_downloaded_files_identify_the_tokenizer_of_a_hub_model(settings: PromptSettings, snapshot: Path) -> None:
    of_hub = replace(settings, model="owner/name")
    assert (load(of_hub)[1], load(of_hub)[1]) == (3, 0)
    # A later download of the same commit may add files.
    (snapshot / "chat_template.jinja").write_text("{{ messages }}")
    assert (load(of_hub)[1], load(of_hub)[1]) == (3, 0)
    (snapshot.parents[1] / "refs/main").write_text("b" * 40)
    assert (load(of_hub)[1], load(of_hub)[1]) == (3, 3)
