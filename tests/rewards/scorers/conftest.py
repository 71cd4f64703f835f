"""Reward sources with a tokenizer of words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quartet.rewards.factory import build_reward
from quartet.rewards.reward_source import RewardSource
from tests.rewards.scorers.sources import config_of
from tests.unit.models import tiny

Build = Callable[[dict[str, Any]], RewardSource]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the tokenizer of words."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def build(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """Return a function that builds a source from the reward section of a config, and closes it at the end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    with ExitStack() as stack:

        def start(reward: dict[str, Any]) -> RewardSource:
            source = build_reward(config_of(reward, tokenizer, tmp_path), "cpu")
            stack.callback(source.close)
            return source

        yield start
