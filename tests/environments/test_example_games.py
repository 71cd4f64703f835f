"""The games of examples/multi_turn: what prepare.py teaches is what the environments of the configs answer."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from examples.multi_turn import prepare
from quartet.config.loading import load_config
from quartet.environments.environment import Environment
from quartet.system.user_code import import_callable

EPISODES = 100


def environment_of(game: str) -> Environment:
    """Return the environment of a game's config."""
    settings = load_config(Path(f"examples/multi_turn/{game}.yaml")).environment
    assert settings.class_name is not None
    environment: Environment = import_callable(settings.class_name)(**settings.arguments)
    return environment


def replay(environment: Environment, episode: prepare.Episode) -> float:
    """Play the turns of an episode, hold the observations to the environment's, and return the sum of the rewards."""
    total = 0.0
    for turn, observation in episode.turns[:-1]:
        answer, reward, done = environment.step(turn)
        assert (answer, done) == (observation, False)
        total += reward
    turn, observation = episode.turns[-1]
    assert observation == ""
    return total + environment.step(turn)[1]


def test_the_episodes_of_the_guessing_game_are_those_of_its_environment() -> None:
    draw, rewards = random.Random(0), []
    for _ in range(EPISODES):
        coming = random.Random()
        coming.setstate(draw.getstate())
        number = coming.randint(1, prepare.HIGH)
        environment = environment_of("guessing")
        environment.reset(1, {"number": number})
        rewards.append(replay(environment, prepare.guessing(draw)))
    assert 0.3 < sum(rewards) / EPISODES < 0.7


def test_the_episodes_of_the_calculator_are_those_of_its_environment() -> None:
    draw, rewards = random.Random(0), []
    for _ in range(EPISODES):
        episode = prepare.calculating(draw)
        one, _, other, _ = episode.prompt.split()
        environment = environment_of("calculator")
        environment.reset(1, {"answer": int(one) * int(other)})
        rewards.append(replay(environment, episode))
    assert 0.3 < sum(rewards) / EPISODES < 0.7


def test_the_episodes_of_the_puzzle_are_those_of_its_environment() -> None:
    draw, rewards = random.Random(0), []
    for _ in range(EPISODES):
        coming = random.Random()
        coming.setstate(draw.getstate())
        environment = environment_of("puzzle")
        opening = environment.reset(coming.getrandbits(32), {})
        episode = prepare.puzzling(draw)
        assert opening == episode.opening
        rewards.append(replay(environment, episode))
    assert 0.5 < sum(rewards) / EPISODES < 0.75


def test_a_policy_and_prompts_are_made_for_each_game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "EPISODES", 200)
    out = tmp_path / "out"
    assert prepare.main([str(out), "--games", "calculator", "--steps", "1"]) == 0
    assert [path.name for path in out.iterdir()] == ["calculator"]
    assert prepare.main([str(out), "--steps", "1"]) == 0
    for game in prepare.GAMES:
        assert (out / game / "policy/model.safetensors").is_file()
        assert all(json.loads(line)["text"] for line in (out / game / "prompts.jsonl").read_text().splitlines())
