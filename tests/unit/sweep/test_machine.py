"""The division of a machine between concurrent runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.config.loading import load_config
from quartet.errors import ConfigError
from quartet.launcher.sweep.jobs import slot_environments
from quartet.system.machine import CONCURRENT_RUNS_VARIABLE, available_cores, free_memory_bytes
from tests.unit.sweep.conftest import WriteConfig


def test_concurrent_runs_divide_cores_and_memory(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores, memory = available_cores(), free_memory_bytes()
    environments = slot_environments([load_config(config)], 2, {})
    assert environments == [{CONCURRENT_RUNS_VARIABLE: "2"}] * 2
    monkeypatch.setenv(CONCURRENT_RUNS_VARIABLE, "2")
    assert available_cores() == max(1, cores // 2)
    assert free_memory_bytes() < 0.6 * memory


@pytest.mark.parametrize("text", ["0", "x", "-1", ""])
def test_a_wrong_number_of_concurrent_runs_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONCURRENT_RUNS_VARIABLE, text)
    with pytest.raises(ConfigError, match=f"{CONCURRENT_RUNS_VARIABLE} {text}: expected a number"):
        available_cores()


def test_one_run_at_a_time_gets_the_whole_machine(write_config: WriteConfig) -> None:
    config = load_config(write_config(gateway={"listen": "127.0.0.1:8080"}))
    assert slot_environments([config], 1, {}) == [{}]


def test_each_slot_gets_its_own_gpus(write_config: WriteConfig) -> None:
    services = {"actor": {"devices": [0, 1]}, "reward": {"devices": [1]}}
    config = load_config(write_config(services=services))
    visible = {"CUDA_VISIBLE_DEVICES": "4,5,6,7,8"}
    environments = slot_environments([config], 2, visible)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match=r"--jobs 3: each run needs 2 GPUs .* offers 5; lower --jobs to 2"):
        slot_environments([config], 3, visible)


def test_gpus_that_cannot_be_listed_are_an_error(write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("quartet.launcher.sweep.jobs.subprocess.run", missing)
    config = load_config(write_config(services={"actor": {"devices": [0]}}))
    with pytest.raises(ConfigError, match="name them in CUDA_VISIBLE_DEVICES"):
        slot_environments([config], 2, {})


@pytest.mark.parametrize(
    ("section", "settings", "key"),
    [
        ("gateway", {"listen": "127.0.0.1:8080"}, "gateway.listen"),
        ("services", {"actor": {"metrics_listen": "127.0.0.1:9000"}}, "services.actor.metrics_listen"),
        ("services", {"critic": {"address": "127.0.0.1:9000"}}, "services.critic.address"),
        ("services", {"generators": ["127.0.0.1:9000"]}, "services.generators"),
    ],
)
def test_fixed_ports_and_services_of_one_run_are_refused_for_several_at_once(
    section: str, settings: dict[str, Any], key: str, write_config: WriteConfig
) -> None:
    config = load_config(write_config(buffer={"url": "redis://127.0.0.1:1"}, **{section: settings}))
    with pytest.raises(ConfigError, match=f"--jobs 2: {key} .*127.0.0.1:.* or use --jobs 1"):
        slot_environments([config], 2, {})


def test_free_ports_and_shared_frozen_services_are_allowed(write_config: WriteConfig) -> None:
    config = load_config(
        write_config(gateway={"listen": "127.0.0.1:0"}, services={"reward": {"address": "127.0.0.1:9000"}})
    )
    assert len(slot_environments([config], 2, {})) == 2
