"""A run refuses services whose models have other files than those it started with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet.config.loading import parse_config
from quartet.contract.status import Role, ServiceStatus
from quartet.errors import ConfigError, MismatchError
from quartet.run_directory.identity import Identity
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.handshake import check_unchanged, load_identity, model_files_of

FILES = {"actor.model/config.json": "2 aa", "reward.model/model.safetensors": "9 bb"}


def test_the_files_of_the_services_are_recorded_at_the_start_and_compared_at_a_resume(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"text": "a"}\n')
    tree = {
        "run": {"directory": tmp_path},
        "data": {"prompts": tmp_path / "prompts.jsonl"},
        "actor": {"model": "a"},
        "reward": {"model": "r"},
    }
    config = parse_config(tree, "test")
    files = RunFiles(config.run_directory)
    files.root.mkdir()
    first = load_identity(config, files, False, {}, {}, FILES)
    assert first.model_files == FILES
    assert load_identity(config, files, True, {}, {}, FILES) == first
    with pytest.raises(
        ConfigError, match=r"^reward\.model r: model\.safetensors differs from the file .* quartet fork"
    ):
        load_identity(config, files, True, {}, {}, {**FILES, "reward.model/model.safetensors": "9 cc"})
    files.identity.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"run\.json: is missing; put the file back, or start a new run"):
        load_identity(config, files, True, {}, {}, FILES)
    # The identity of a fork has no files yet: those of its first start count.
    replace(first, model_files={}).write(files.identity)
    forked = load_identity(config, files, True, {}, {}, {**FILES, "reward.model/model.safetensors": "9 cc"})
    assert forked.model_files["reward.model/model.safetensors"] == "9 cc"
    assert Identity.read(files.identity) == forked


def test_a_service_that_comes_back_with_another_file_is_refused() -> None:
    before = ServiceStatus(Role.REWARD, model="r", model_files=FILES)
    check_unchanged({Role.REWARD: before}, {Role.REWARD: before})
    after = replace(before, model_files={**FILES, "reward.model/model.safetensors": "9 cc"})
    with pytest.raises(
        MismatchError, match=r"^services\.reward: came back with another reward\.model/model\.safetensors"
    ):
        check_unchanged({Role.REWARD: before}, {Role.REWARD: after})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "other"),
        ("dtype", "bfloat16"),
        ("parameters", 5),
        ("tokenizer_fingerprint", b"other"),
        ("vocabulary_size", 9),
        ("answers_as_reference", True),
    ],
)
def test_a_service_that_comes_back_with_another_model_is_refused(name: str, value: Any) -> None:
    before = ServiceStatus(Role.ACTOR, model="a", dtype="float32", parameters=4, vocabulary_size=8)
    message = rf"^services\.actor: came back with {name} {value!r}, expected {getattr(before, name)!r}; start it with this run's"
    with pytest.raises(MismatchError, match=message):
        check_unchanged({Role.ACTOR: before}, {Role.ACTOR: replace(before, **{name: value})})


def test_a_service_states_the_files_of_its_own_role_only() -> None:
    own = {
        "actor.model/config.json": "2 aa",
        "reward.parts.one.model/config.json": "2 bb",
        "reward.tokenizer/vocab": "3 c",
    }
    actor, reward = (
        {name: digest for name, digest in own.items() if name.startswith(role)} for role in ("actor", "reward")
    )
    foreign = {"actor.model/config.json": "2 zz", "actor.model/other": "2 zz", "actors": "2 zz", "": "2 zz"}
    statuses = {
        Role.ACTOR: ServiceStatus(Role.ACTOR, model_files=actor),
        Role.REWARD: ServiceStatus(Role.REWARD, model_files={**foreign, **reward}),
    }
    assert model_files_of(statuses) == own
