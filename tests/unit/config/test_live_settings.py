"""The table of live settings: names, keys and bounds of a run, and the config of a step."""

from __future__ import annotations

import re
from typing import Any

import pytest

from quartet.config.live_settings import LIVE_NAME_PATTERN, LIVE_SETTINGS, live_settings, with_values
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.contract.control import SettingChange
from quartet.services.orchestrator.control.live_settings import config_at

PARTS = [
    {"name": "a.b", "weight": 2.0, "source": "function", "function": "rewards:old"},
    {"name": "new", "weight": 0.0, "source": "function", "function": "rewards:new"},
]


def config(**sections: Any) -> Config:
    tree = {"run": {"steps": 9}, "data": {"prompts": "p"}, "actor": {"model": "a"}}
    return parse_config({**tree, "reward": {"source": "ensemble", "parts": PARTS}, **sections}, "test")


def test_each_row_names_a_number_of_the_config_that_it_can_replace() -> None:
    whole = config()
    for name, row in live_settings(whole).items():
        low, high = row.bounds(whole, row.value(whole))
        assert low <= row.value(whole) <= high
        changed = with_values(whole, {name: high})
        assert row.value(changed) == high
        assert {each: other.value(changed) for each, other in live_settings(whole).items() if each != name} == {
            each: other.value(whole) for each, other in live_settings(whole).items() if each != name
        }
    assert len(live_settings(whole)) == len(LIVE_SETTINGS) - 1 + len(PARTS)


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        *((name, True) for name in live_settings(config())),
        ("kl_coefficient2", False),
        ("actor_learning_rate", False),
        ("reward.parts.new.name", False),
        ("reward.parts..weight", False),
    ],
)
def test_the_pattern_of_the_api_accepts_the_names(name: str, valid: bool) -> None:
    assert bool(re.search(LIVE_NAME_PATTERN, name)) == valid


def test_the_config_of_a_step_has_the_last_change_up_to_it() -> None:
    whole = config()
    made = [
        ("kl_coefficient", 0.2, 3),
        ("reward.parts.a.b.weight", 0.0, 3),
        ("reward.parts.new.weight", 1.0, 3),
        ("kl_coefficient", 0.3, 5),
        ("a setting of another version", 1.0, 1),
    ]
    changes = [SettingChange(name, 0.0, value, step, "me", 0.0) for name, value, step in made]
    assert [config_at(whole, changes, step).algorithm.kl_coefficient for step in (2, 3, 4, 5)] == [0.05, 0.2, 0.2, 0.3]
    assert config_at(whole, changes, 2) is whole
    assert config_at(whole, changes, 9).reward.part_weights == {"a.b": 0.0, "new": 1.0}
    assert whole.reward.part_weights == {"a.b": 2.0, "new": 0.0}
