"""``examples/reviews/prepare.py`` as a user runs it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.commands import Command

SCRIPT = Path(__file__).parents[2] / "examples" / "reviews" / "prepare.py"
FAST = [
    "--vocabulary=300",
    "--hidden=16",
    "--layers=1",
    "--heads=2",
    "--policy-steps=3",
    "--reward-steps=3",
    "--samples=8",
]
Files = Callable[..., tuple[Path, Path, Path]]


def sentences(words: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [
        f"the {draw.choice(['plot', 'cast', 'score'])} of this {draw.choice(words.split())} film no {i}"
        for i in range(100)
    ]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Write both input files, by default with valid sentences. Return the paths of POSITIVE, NEGATIVE and OUT."""

    def write(positive: bytes | None = None, negative: bytes | None = None) -> tuple[Path, Path, Path]:
        good, bad = "\n".join(sentences("fine warm", 0)), "\n".join(sentences("dull cold", 1))
        (tmp_path / "positive.txt").write_bytes(good.encode() if positive is None else positive)
        (tmp_path / "negative.txt").write_bytes(bad.encode() if negative is None else negative)
        return tmp_path / "positive.txt", tmp_path / "negative.txt", tmp_path / "build" / "out"

    return write


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    spec = spec_from_file_location("prepare_reviews", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_two_files_become_checkpoints_and_prompts(files: Files, tmp_path: Path) -> None:
    positive, negative, out = files()
    command = Command(sys.executable, SCRIPT, positive, negative, out, *FAST, cwd=tmp_path)
    try:
        done = command.wait()
    finally:
        command.clean_up()
    assert done.code == 0, done.err
    assert "held-out" in done.out
    assert sorted(path.name for path in out.iterdir()) == ["policy", "prompts.jsonl", "reward"]
    assert list(out.parent.iterdir()) == [out]
    tokenizer = AutoTokenizer.from_pretrained(out / "policy")
    assert AutoModelForCausalLM.from_pretrained(out / "policy").config.eos_token_id == tokenizer.eos_token_id
    assert AutoModelForSequenceClassification.from_pretrained(out / "reward").config.num_labels == 1
    prompts = [json.loads(line)["text"] for line in (out / "prompts.jsonl").read_text().splitlines()]
    assert set(prompts) == {" ".join(s.split()[:5]) for s in sentences("fine warm", 0) + sentences("dull cold", 1)}
    assert len(prompts) == len(set(prompts))


def test_a_second_run_replaces_the_result_with_identical_bytes(
    prepare: ModuleType, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*map(str, files()), *FAST]
    out = Path(arguments[2])
    assert prepare.main(arguments) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert prepare.main(arguments) == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert "error" not in capsys.readouterr().err


LINES = "\n".join(f"a film of some note no {i}" for i in range(100)).encode()


@pytest.mark.parametrize(
    ("positive", "negative", "message"),
    [
        (b"", None, "positive.txt: empty"),
        (b"\n \n\n", None, "positive.txt: empty"),
        (None, b"one sentence\n", "negative.txt: 1 sentences; expected at least 50"),
        (None, LINES + b"\nmoti\xe9\nmore", "negative.txt:101: not UTF-8"),
        (b"first\nsec\0ond\n" + LINES, None, "positive.txt:2: contains a NUL"),
        (b"good\n" * 60, b"bad\n" * 60, "no sentence has more than 5 words"),
        (b"good " * 400 + b"\n" + b"\n".join([b"xyzzy-" * 100] * 99), None, ""),
    ],
    ids=["empty", "blank", "too few", "not utf-8", "nul", "too short", "partly too long"],
)
def test_bad_input_prints_one_line_exits_with_2_and_writes_nothing(
    prepare: ModuleType,
    files: Files,
    capsys: pytest.CaptureFixture[str],
    positive: bytes | None,
    negative: bytes | None,
    message: str,
) -> None:
    arguments = [*map(str, files(positive, negative)), *FAST]
    code = prepare.main(arguments)
    error = capsys.readouterr().err
    if not message:  # Long sentences are skipped if enough others remain.
        assert code == 0
        return
    assert code == 2
    assert error.count("\n") == 1
    assert message in error
    assert not Path(arguments[2]).exists()


def test_missing_and_unreadable_files_are_reported(
    prepare: ModuleType, files: Files, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    positive, negative, out = files()
    assert prepare.main([str(tmp_path / "none.txt"), str(negative), str(out)]) == 2
    assert "none.txt: no such file" in capsys.readouterr().err
    assert prepare.main([str(positive), str(tmp_path), str(out)]) == 2
    assert f"{tmp_path}: cannot be read: Is a directory" in capsys.readouterr().err
    assert not out.parent.exists()


def test_a_foreign_output_directory_is_refused_and_unchanged(
    prepare: ModuleType, files: Files, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    positive, negative, _ = files()
    assert prepare.main([str(positive), str(negative), str(tmp_path)]) == 2
    assert "which this program did not create" in capsys.readouterr().err
    assert prepare.main([str(positive), str(negative), str(positive)]) == 2
    assert "is a file" in capsys.readouterr().err
    assert prepare.main([str(positive), str(negative), str(positive / "under")]) == 2
    assert "positive.txt: is a file" in capsys.readouterr().err
    assert positive.read_text().startswith("the ")
