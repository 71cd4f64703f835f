"""`quartet generate` explains why nothing was printed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quartet.cli.inference import generate as command
from quartet.types import SamplingParameters


@pytest.mark.parametrize(("texts", "is_explained"), [(["", ""], True), (["", "a word"], False)])
def test_empty_responses_are_explained(
    texts: list[str], is_explained: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    completions = [SimpleNamespace(prompt="a prompt", text=text) for text in texts]
    monkeypatch.setattr(command, "complete", lambda *_: completions)
    command.generate("model", ["a prompt"], None, SamplingParameters(4), 2, 0, "cpu", json_lines=False)
    assert ("answers with --chat" in capsys.readouterr().err) == is_explained
