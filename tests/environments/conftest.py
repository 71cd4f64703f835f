"""Environment classes in the working directory, and hosts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quartet.config.environment import EnvironmentConfig
from quartet.environments.host import EnvironmentHost
from tests.environments import chats

CLASSES = """
import os, random, signal, sys, time
from pathlib import Path

from quartet.environments import Environment, EnvironmentFailed


class Refusing(Environment):
    def __init__(self):
        raise ValueError("no such level")

    def reset(self, seed, fields):
        return ""

    def step(self, text):
        return "", 0.0, True


class Failing(Environment):
    def reset(self, seed, fields):
        raise ValueError("secret")

    def step(self, text):
        return "", 0.0, True


class Echo(Environment):
    def __init__(self, prefix="", turns=3):
        self.prefix, self.turns, self.number = prefix, turns, 0

    def reset(self, seed, fields):
        self.random = random.Random(seed)
        self.word = fields.get("word", "none")
        note("reset")
        return f"{self.prefix}{self.word} {self.random.randrange(10**6)}"

    def step(self, text):
        self.number += 1
        note("step")
        if text in BAD:
            BAD[text]()
        done = self.number == self.turns
        return f"{text} {self.random.randrange(10**6)}", 0.25 * self.number, done

    def close(self):
        note("close")


class Saved(Echo):
    def snapshot(self):
        return [self.word, self.number, self.random.getstate()]

    def restore(self, seed, fields, state):
        note("restore")
        self.word, self.number, (version, words, gauss) = state
        self.random = random.Random()
        self.random.setstate((version, tuple(words), gauss))


class Huge(Saved):
    def snapshot(self):
        return "x" * 65535


class NotJson(Saved):
    def snapshot(self):
        return {1, 2}


class NoRestore(Echo):
    def snapshot(self):
        return 1


class BadRestore(Saved):
    def restore(self, seed, fields, state):
        raise ValueError("secret text")


class SlowToClose(Echo):
    def close(self):
        note("close")
        time.sleep(60)


class Unsteady(Echo):
    def step(self, text):
        observation, reward, done = super().step(text)
        return f"{observation} {os.getpid()}", reward, done


class Given(Environment):
    def reset(self, seed, fields):
        self.fields = fields
        return fields.get("first")

    def step(self, text):
        return self.fields["result"] if "result" in self.fields else eval(self.fields["python"])


class Raw(Echo):
    keeps_special_tokens = True


class NoStep:
    def reset(self, seed, fields):
        return ""


def note(event):
    with Path("events").open("a") as file:
        file.write(event + "\\n")


def fail(error):
    raise error


BAD = {
    "sleep": lambda: time.sleep(60),
    "raise": lambda: fail(ValueError("secret text")),
    "refuse": lambda: fail(EnvironmentFailed("declined", "refused")),
    "exit": lambda: sys.exit(3),
    "die": lambda: os._exit(3),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
not_a_class = 5
"""

Host = Callable[..., EnvironmentHost]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the module `worlds`, which has the classes above."""
    (tmp_path / "worlds.py").write_text(CLASSES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer of characters that has a chat template."""
    chats.tokenizer(chats.CHATML).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def host(folder: Path, model: Path) -> Iterator[Host]:
    """Factory of hosts for a class of `worlds`; ``clock`` replaces the clock of idle times."""
    with ExitStack() as stack:

        def start(name: str = "Echo", clock: Callable[[], float] | None = None, **settings: Any) -> EnvironmentHost:
            config = EnvironmentConfig(**{"class_name": f"worlds:{name}", **settings})
            started = EnvironmentHost(config, str(model), *([clock] if clock else []))
            stack.callback(started.close)
            return started

        yield start
