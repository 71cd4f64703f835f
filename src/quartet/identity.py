"""What makes a run itself: an id of its own, and the settings and data that decide what a step learns. No torch here."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.config import Config
from quartet.errors import ConfigError
from quartet.files import sha256, storing, write_durably

MAY_CHANGE = (
    "run.steps",
    "run.directory",
    "data.prompts",
    "evaluation.judge",
    "evaluation.timeout",
    "rollout.triton.url",
    "rollout.triton.timeout",
    "rollout.triton.certificate_authority",
    "rollout.tensorrt_llm",
    "guards",
    "checkpoint",
    "buffer",
    "services",
    "timeouts",
    "recovery",
    "security",
    "gateway",
    "telemetry",
)
"""Settings that a run may go on with although they were others before: they do not decide what a step learns.

Of the prompts it is the file's content that counts. Evaluations are held against the one before the first step, so they stay on
its prompts; how often there is one may change where there was one at all.
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """``id`` tells a run from any other of its name; ``settings`` by key and the prompts' checksum must stay as they are."""

    id: str
    settings: dict[str, Any]
    prompts_sha256: str

    @classmethod
    def new(cls, config: Config) -> Identity:
        """Of a run that begins with this config. Reads the prompts file."""
        return cls(secrets.token_hex(8), settings_of(config), sha256(config.data.prompts))

    def write(self, path: Path) -> None:
        """Writes it to the run's ``run.json``."""
        content = {"id": self.id, "prompts_sha256": self.prompts_sha256, "settings": self.settings}
        with storing(path):
            write_durably(path, json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Identity | None:
        """What ``write`` wrote; None when there is nothing. Raises ConfigError when it cannot be read."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(str(content["id"]), dict(content["settings"]), str(content["prompts_sha256"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(f"run {path}: cannot be read; put the file back, or start the run anew") from None

    def check(self, config: Config, root: Path) -> None:
        """Raises ConfigError unless the run in ``root`` can go on with this config."""
        check_settings(self.settings, settings_of(config), root)
        if sha256(config.data.prompts) != self.prompts_sha256:
            raise ConfigError(
                f"data.prompts {config.data.prompts}: is not the file that the run in {root} began with; "
                "give that one, or start a new run"
            )


def settings_of(config: Config) -> dict[str, Any]:
    """The settings that decide what a step learns, by key."""
    flat = _flat(config.model_dump(mode="json"))
    return {key: value for key, value in flat.items() if not _may_change(key)}


def check_settings(before: dict[str, Any], now: dict[str, Any], root: Path) -> None:
    """Raises ConfigError naming the first setting that is another than the run in ``root`` had."""
    for key in sorted(before.keys() | now.keys()):
        if key == "evaluation.every" and not before.get(key) and now.get(key):
            raise ConfigError(
                f"--resume: {key} is {now[key]!r}, the run in {root} had none: evaluations are held against one before the first "
                "step; leave it at 0, or start a new run"
            )
        if before.get(key) != now.get(key) and key != "evaluation.every":
            raise ConfigError(
                f"--resume: {key} is {now.get(key)!r}, the run in {root} had {before.get(key)!r}; "
                "give the run's own config, or start a new run"
            )


def _may_change(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
