"""The lines of the check, devices, outputs and addresses."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from quartet.config.loading import parse_config
from quartet.errors import ConfigError, ModelError
from quartet.preflight import problems
from quartet.preflight.findings import has_error, raise_errors
from quartet.run_directory.run_files import RunFiles
from tests.unit.preflight.files import check_inputs, config


def test_each_check_is_reported_in_one_line(models: Path) -> None:
    notes = check_inputs(config(models))
    assert notes[0] == f"data.prompts {models}/prompts.jsonl: 2 prompts"
    assert [note.split()[0] for note in notes[1:]] == ["actor.model", "reward.model", "critic.model", "reference.model"]
    assert notes[1].endswith("LlamaForCausalLM")
    assert notes[3].endswith("LlamaForSequenceClassification")


def test_an_output_without_its_package_is_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    tree = config(models).model_dump()
    tree["telemetry"]["wandb"] = {"project": "p"}
    with pytest.raises(ConfigError, match=r"^telemetry\.wandb: the package wandb is not installed"):
        check_inputs(parse_config(tree, "test"))


def test_a_run_directory_that_is_not_utf_8_is_refused(models: Path) -> None:
    tree = config(models).model_dump()
    tree["run"]["directory"] = Path("raw\udcff")
    with pytest.raises(ConfigError, match=r"^run\.directory .*raw\\udcff.*: the path is not valid UTF-8"):
        check_inputs(parse_config(tree, "test"))


@pytest.mark.parametrize("key", ["listen", "metrics_listen", "health_listen"])
def test_a_port_in_use_is_reported_with_its_key(models: Path, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"services\.reward\.{key} {address}: cannot listen there"):
            check_inputs(config(models, reward={key: address}))
        check_inputs(config(models, reward={key: address, "address": "far:7001"}))
    check_inputs(config(models, reward={key: address}))


def test_an_address_of_another_machine_is_refused(models: Path) -> None:
    with pytest.raises(ConfigError, match=r"services\.actor\.listen 192\.0\.2\.1:7000: cannot listen there"):
        check_inputs(config(models, actor={"listen": "192.0.2.1:7000"}))


def test_ranks_of_several_machines_are_started_elsewhere(models: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"services\.actor\.nodes 2: .* start the ranks with torchrun on every machine"
    ):
        check_inputs(config(models, actor={"nodes": 2}))
    check_inputs(config(models, actor={"nodes": 2, "address": "node0:7001"}))


def test_slices_that_the_model_does_not_allow_are_refused(models: Path) -> None:
    path = models / "policy/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_attention_heads": 4}))
    sizes = {"processes": 3, "parallel": {"tensor": 3}}
    with pytest.raises(ModelError, match=r"services\.actor\.parallel\.tensor 3: does not divide num_attention_heads 4"):
        check_inputs(config(models, actor=sizes))


def test_all_mistakes_are_shown_together(models: Path, tmp_path: Path) -> None:
    (models / "prompts.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "runs/run").mkdir(parents=True)
    files = RunFiles(tmp_path / "runs/run")
    files.metrics.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        tree = config(models, reward={"listen": address}, critic={"listen": address}).model_dump()
        tree |= {"gateway": {"listen": address}, "checkpoint": {"best_metric": "reward_men"}}
        tree["security"]["token_file"] = models / "absent"
        found = problems(parse_config(tree, "test"), files)
    assert has_error(found)
    with pytest.raises(ConfigError) as refused:
        raise_errors(found)
    first, *lines = str(refused.value).splitlines()
    assert first == "7 problems:"
    keys = [line.split()[0].rstrip(":") for line in lines]
    assert keys == [
        "rollout.prompts_per_step", "security.token_file", "gateway.listen", "run", "services.critic.listen",
        "services.reward.listen", "checkpoint.best_metric",
    ]  # fmt: skip


def test_one_mistake_keeps_its_class_and_its_message(models: Path) -> None:
    (models / "policy/config.json").unlink()
    with pytest.raises(ModelError, match=r"^actor\.model .*/policy: config\.json cannot be read .*[^\n]*$"):
        check_inputs(config(models))


def test_a_directory_that_cannot_share_weights_is_reported(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()

    def notes(name: str, **more: object) -> list[str]:
        tree = config(models).model_dump()
        tree["rollout"] |= {"share_directory": tmp_path / name, "generators": 1, **more}
        return [line for line in check_inputs(parse_config(tree, "test")) if ".share_directory" in line]

    where, remedy = (
        f"warning: rollout.share_directory {tmp_path}",
        "so weights are not shared between containers; mount",
    )
    assert notes("open") == [f"rollout.share_directory {tmp_path}/open: can be used"]
    assert notes("none")[0].startswith(f"{where}/none: there is no such directory, {remedy}")
    assert notes("file")[0].startswith(f"{where}/file: not a directory, {remedy}")
    assert notes("none", share_weights=False) == [
        "warning: rollout.share_directory: not used: rollout.share_weights is false"
    ]
    # The tests may run as root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "open")
    assert notes("open")[0].startswith(f"{where}/open: user {os.geteuid()} may not write there, {remedy}")
