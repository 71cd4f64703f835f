"""What makes a run itself: an id of its own, and the settings and data that decide what a step learns. No torch here."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quartet.config import MAX_MICRO_BATCH_TOKENS, Config
from quartet.durable_files import sha256, storing, write_durably
from quartet.errors import ConfigError
from quartet.types import Role

MAY_CHANGE = (
    "run.steps",
    "run.directory",
    "data.prompts",
    "actor.gradient_checkpointing",
    "critic.gradient_checkpointing",
    "evaluation.judge",
    "evaluation.timeout_seconds",
    "rollout.triton.url",
    "rollout.triton.timeout_seconds",
    "rollout.triton.certificate_authority_file",
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

Of the prompts it is the file's content that counts. EvaluationSchedule are held against the one before the first step, so they stay on
its prompts; how often there is one may change where there was one at all.
"""


CAME_LATER = {"rollout.max_off_policy_steps": 0}
"""Settings that the first runs did not have, with what they did."""


@dataclass(frozen=True, slots=True)
class Identity:
    """``id`` tells a run from any other of its name; ``settings`` by key and the prompts' checksum must stay as they are.

    ``micro_batch_tokens``: by role, as the services found them when the run began. How a mini-batch is split decides the last
    bits.
    """

    id: str
    settings: dict[str, Any]
    prompts_sha256: str
    micro_batch_tokens: dict[str, int] = field(default_factory=dict)

    @classmethod
    def new(cls, config: Config, micro_batch_tokens: Mapping[Role, int]) -> Identity:
        """Of a run that begins with this config, with what was found where the config leaves it open. Reads the prompts file."""
        asked = {Role.ACTOR: config.actor.micro_batch_tokens, Role.CRITIC: config.critic.micro_batch_tokens}
        sizes = {role.value: asked[role] or found for role, found in micro_batch_tokens.items()}
        return cls(secrets.token_hex(8), settings_of(config), sha256(config.data.prompts), sizes)

    def write(self, path: Path) -> None:
        """Writes it to the run's ``run.json``."""
        content = {
            "id": self.id,
            "prompts_sha256": self.prompts_sha256,
            "micro_batch_tokens": self.micro_batch_tokens,
            "settings": self.settings,
        }
        with storing(path):
            write_durably(path, json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Identity | None:
        """What ``write`` wrote; None when there is nothing. Raises ConfigError when it cannot be read."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            # Runs from before these could be found have them in their settings alone.
            sizes = {str(role): int(tokens) for role, tokens in content.get("micro_batch_tokens", {}).items()}
            return cls(str(content["id"]), dict(content["settings"]), str(content["prompts_sha256"]), sizes)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"run {path}: cannot be read; put the file back, or start the run anew") from None

    def micro_batch_tokens_of(self, role: Role) -> int:
        """What every update of ``role`` is split by; 0 where the run leaves it to the service."""
        return self.micro_batch_tokens.get(role) or int(self.settings.get(f"{role}.micro_batch_tokens") or 0)

    def completed(self, micro_batch_tokens: Mapping[Role, int]) -> Identity:
        """The same, with what was found for a role of which nothing is known yet, such as the critic that a branch has got."""
        new = {role.value: found for role, found in micro_batch_tokens.items() if not self.micro_batch_tokens_of(role)}
        return replace(self, micro_batch_tokens={**self.micro_batch_tokens, **new})

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
    # Where policies may be stale, checkpoints decide which of them generates a step.
    also = {"checkpoint.every_steps"} if config.rollout.max_off_policy_steps else set()
    return {key: value for key, value in flat.items() if key in also or not _may_change(key)}


def check_settings(before: dict[str, Any], now: dict[str, Any], root: Path) -> None:
    """Raises ConfigError naming the first setting that is another than the run in ``root`` had."""
    before = CAME_LATER | before
    # What one of the two alone has is there because another setting differs, which is the one to name.
    for key in sorted(before.keys() | now.keys(), key=lambda key: (key not in before or key not in now, key)):
        if key == "evaluation.every_steps" and not before.get(key) and now.get(key):
            raise ConfigError(
                f"--resume: {key} is {now[key]!r}, the run in {root} had none: evaluations are held against one before the first "
                "step; leave it at 0, or start a new run"
            )
        if _was_the_default(key, before.get(key)) and now.get(key) is None:
            continue
        if before.get(key) != now.get(key) and key != "evaluation.every_steps":
            raise ConfigError(
                f"--resume: {key} is {now.get(key)!r}, the run in {root} had {before.get(key)!r}; "
                "give the run's own config, or start a new run"
            )


def _was_the_default(key: str, before: Any) -> bool:
    """Of a run from before it could be found, which goes on with what it had."""
    return key in ("actor.micro_batch_tokens", "critic.micro_batch_tokens") and before == MAX_MICRO_BATCH_TOKENS


def _may_change(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
