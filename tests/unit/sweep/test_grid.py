"""The grid of a sweep: values, seeds, names and configs of its runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quartet.errors import ConfigError
from quartet.launcher.sweep.grid import (
    Grid,
    parse_grid,
    parse_seeds,
    plan_runs,
    setting_names,
    short_keys,
    split_values,
)

FOLDER = Path("runs/it's a # sweep")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-5,3e-5", ("1e-5", "3e-5")),
        ("[0.9,0.95],[0.9,0.999]", ("[0.9,0.95]", "[0.9,0.999]")),
        ("[0.9,0.95]", ("[0.9,0.95]",)),
        ("{kind: fixed, target: 1}, {kind: adaptive}", ("{kind: fixed, target: 1}", "{kind: adaptive}")),
        ("'a,b',\"c,d\"", ("'a,b'", '"c,d"')),
        ("['a,]',b],c", ("['a,]',b]", "c")),
        ("it's,a[0]", ("it's", "a[0]")),
        ("''", ("''",)),
        ("null", ("null",)),
    ],
)
def test_commas_outside_brackets_and_quotes_separate_values(text: str, values: tuple[str, ...]) -> None:
    assert split_values("key", text) == values


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[0.9,0.95", "']' is missing"),
        ("'a,b", '"\'" is missing'),
        ("1,,2", "an empty value"),
        ("1,2,", "an empty value"),
        ("", "an empty value; write null or a value"),
        (" ", "an empty value"),
        ("1,2,1", "the value 1 is given twice"),
    ],
)
def test_a_malformed_list_of_values_is_an_error(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"--set key=.*{problem.replace('[', '.')}"):
        split_values("key", text)


@pytest.mark.parametrize(
    "text", ["redis://:s3,cret@h/0,", "redis://:s3cret@h/0,redis://:s3cret@h/0", "[redis://:s3cret@h/0"]
)
def test_the_error_of_a_malformed_list_of_values_shows_no_password(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--set buffer\.url=") as error:
        split_values("buffer.url", text)
    assert not {"s3", "cret"} & set(re.findall("s3|cret", str(error.value)))


@pytest.mark.parametrize(("text", "seeds"), [("3", (0, 1, 2)), ("1", (0,)), ("0,7", (0, 7)), ("7, 3", (7, 3))])
def test_seeds_are_a_number_of_them_or_a_list(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "0", "-1", "a", "1,", "1.5", "2,2", "1001", "²"])
def test_malformed_seeds_are_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--seeds {text}"):
        parse_seeds(text)


@pytest.mark.parametrize(
    ("overrides", "seeds", "problem"),
    [
        (["actor.learning_rate"], None, "expected KEY.KEY=VALUE,VALUE"),
        (["a.b=1", "a.b=2"], None, "--set a.b: given twice"),
        (["run.name=a,b"], None, "name the sweep with --name"),
        (["run.name=a"], None, "name the sweep with --name"),
        (["run.directory=a,b"], None, "in its folder"),
        (["buffer.url=redis://a/0,redis://b/0"], None, "all runs of a sweep use one Redis"),
        (["buffer={url: null},{}"], None, "all runs of a sweep use one Redis"),
        (["run.seed=1,2"], None, "--seeds 0,7"),
        (["run.seed=1"], "3", "give only one of them"),
    ],
)
def test_settings_that_no_grid_can_have_are_errors(overrides: list[str], seeds: str | None, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_grid(overrides, seeds)


def test_the_grid_has_every_combination_of_values_and_seeds(config: Path) -> None:
    overrides = [
        "run.steps=5",
        "actor.learning_rate=1e-5,3e-5",
        "actor.optimizer.betas=[0.9,0.95],[0.9,0.999]",
    ]
    runs = plan_runs(config, parse_grid(overrides, "0,7"), FOLDER)
    assert [
        (run.config.actor.learning_rate, run.config.actor.optimizer.betas, run.seed, run.config.run.steps)
        for run in runs
    ] == [(rate, betas, seed, 5) for rate in (1e-5, 3e-5) for betas in ((0.9, 0.95), (0.9, 0.999)) for seed in (0, 7)]
    assert runs[0].name == "learning_rate-1e-5--betas-0.9_0.95--seed-0"
    assert len({run.name for run in runs}) == 8
    assert {run.config.run_directory for run in runs} == {FOLDER / run.name for run in runs}


def test_a_sweep_without_seeds_has_the_seed_of_the_config(config: Path) -> None:
    runs = plan_runs(config, parse_grid(["actor.learning_rate=1e-5,3e-5", "run.seed=4"], None), FOLDER)
    assert [run.name for run in runs] == ["learning_rate-1e-5--seed-4", "learning_rate-3e-5--seed-4"]
    (only,) = plan_runs(config, parse_grid([], None), FOLDER)
    assert only.name == "seed-0"


def test_keys_in_names_are_as_short_as_possible() -> None:
    keys = ["actor.learning_rate", "critic.learning_rate", "algorithm.kl_coefficient"]
    assert list(short_keys(keys).values()) == ["actor.learning_rate", "critic.learning_rate", "kl_coefficient"]


@pytest.mark.parametrize("values", [("a" * 60, "b"), ("a/b", "a b")], ids=["too long", "equal after cleaning"])
def test_settings_get_numbers_if_their_values_make_no_names(values: tuple[str, str]) -> None:
    assert setting_names(Grid({"actor.model": values}), 0) == ["setting-1", "setting-2"]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("actor.learning_rat=1,2", "--set actor.learning_rat: unknown key; did you mean 'learning_rate'"),
        ("actor.learning_rate=1e-5,x", "--set actor.learning_rate: expected a number, not 'x'\n  in the setting"),
        ("actor.learning_rate=1e-5,0.00001", "the same as actor.learning_rate=1e-5"),
        (f"run.steps={','.join(map(str, range(1, 1003)))}", "the grid has 1002 runs; expected at most 1000"),
    ],
)
def test_every_wrong_setting_of_the_grid_is_an_error(config: Path, override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        plan_runs(config, parse_grid([override], None), FOLDER)


def test_the_error_of_a_setting_shows_no_password_of_a_url_in_it(config: Path) -> None:
    urls = 'reward.http.urls=["http://u:s3cret@h1/s"],["http://u:s3cret@h2/s"]'  # pragma: allowlist secret - an example
    with pytest.raises(ConfigError, match=r"in the setting reward\.http\.urls=") as error:
        plan_runs(config, parse_grid([urls], None), FOLDER)
    assert "s3cret" not in str(error.value)


def test_the_arguments_of_a_grid_give_it_again() -> None:
    overrides = ["run.steps=5", "actor.optimizer.betas=[0.9,0.95],[0.9,0.999]"]
    text = parse_grid(overrides, "3").arguments()
    assert text == "--set run.steps=5 --set 'actor.optimizer.betas=[0.9,0.95],[0.9,0.999]' --seeds 3"
