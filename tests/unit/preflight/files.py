"""Files and configs for the checks before the start."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.preflight import check_inputs as findings_of_inputs
from quartet.preflight.findings import Finding, raise_errors


def save_tokenizer(directory: Path) -> None:
    words = tokenizers.models.WordLevel({word: number for number, word in enumerate("abcd?")}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    description = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "?"})
    (directory / "tokenizer_config.json").write_text(description)


def config(models: Path, **services: dict[str, Any]) -> Config:
    tree = {
        "data": {"prompts": models / "prompts.jsonl"},
        "actor": {"model": str(models / "policy")},
        "reward": {"model": str(models / "reward")},
        "buffer": {"url": "redis://far"},
        "rollout": {"prompts_per_step": 2},
        "services": services,
    }
    return parse_config(tree, "test")


def lines(findings: Iterable[Finding]) -> list[str]:
    """Return the lines of findings, or raise their errors as a command does."""
    found = [*findings]
    raise_errors(found)
    return [str(finding) for finding in found]


def check_inputs(config: Config) -> list[str]:
    return lines(findings_of_inputs(config))
