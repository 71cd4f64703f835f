"""The folder of a sweep: its definition, its outcomes and its lock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quartet.config.loading import load_config
from quartet.config.url_redaction import redact_url
from quartet.errors import ConfigError
from quartet.launcher.sweep.definition import Definition, SweepFiles, check_usable, lock_sweep
from quartet.launcher.sweep.grid import Grid, parse_grid
from tests.unit.sweep.conftest import WriteConfig

GRID = parse_grid(["run.steps=5", "actor.optimizer.betas=[0.9,0.95],[0.9,0.999]"], "0,7")

URLS = (
    "redis://me:s3cret@host:1/0",  # pragma: allowlist secret - an example
    "unix:///redis.sock?password=s3cret",
)
"""Addresses of Redis with a password."""


@pytest.fixture
def files(tmp_path: Path) -> SweepFiles:
    files = SweepFiles(tmp_path / "sweep")
    files.root.mkdir()
    return files


def test_a_definition_is_read_as_it_was_written_and_its_fixed_settings_are_in_the_config(
    files: SweepFiles, config: Path
) -> None:
    assert Definition.read(files) is None
    definition = Definition.new(GRID, 2, load_config(config))
    definition.write(files, config)
    again = Definition.read(files)
    assert again == Definition(Grid(GRID.axes, seeds=GRID.seeds), 2, definition.settings)
    again.check(definition, files.root)
    assert load_config(files.config) == load_config(config, list(GRID.fixed))
    text = files.config.read_text()
    again.write(files, files.config)
    assert (files.config.read_text(), Definition.read(files)) == (text, again)


@pytest.mark.parametrize("by_option", [True, False], ids=["option", "config file"])
@pytest.mark.parametrize("url", URLS)
def test_the_files_of_a_sweep_do_not_contain_the_password_of_redis(
    url: str, by_option: bool, files: SweepFiles, write_config: WriteConfig
) -> None:
    config = write_config() if by_option else write_config(buffer={"url": url})
    grid = parse_grid([f"buffer.url={url}", "actor.learning_rate=1,2"] if by_option else [], None)
    Definition.new(grid, 1, load_config(config, list(grid.fixed))).write(files, config)
    assert files.config.exists()
    assert "s3cret" not in files.config.read_text() + files.definition.read_text()
    assert load_config(files.config).buffer.url == redact_url(url)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "grid": {"axes": []}}'])
def test_a_damaged_definition_is_an_error(text: str, files: SweepFiles) -> None:
    files.definition.write_text(text)
    with pytest.raises(ConfigError, match=r"sweep\.json: cannot be read; put the file back"):
        Definition.read(files)


@pytest.mark.parametrize(
    "other", [Grid(GRID.axes, (), (0,)), Grid({"actor.learning_rate": ("1", "2")}, (), GRID.seeds), Grid({})]
)
def test_another_grid_is_refused_and_the_error_says_what_to_do(other: Grid, files: SweepFiles, config: Path) -> None:
    first = load_config(config)
    with pytest.raises(ConfigError, match=r"has another grid, .* continue it with quartet sweep .* with --name"):
        Definition.new(GRID, 1, first).check(Definition.new(other, 1, first), files.root)


def test_settings_that_decide_what_a_run_learns_are_fixed_and_others_may_change(
    files: SweepFiles, write_config: WriteConfig
) -> None:
    before = Definition.new(GRID, 1, load_config(write_config()))
    longer = load_config(write_config(run={"steps": 40}, checkpoint={"every_steps": 7}))
    before.check(Definition.new(GRID, 2, longer), files.root)
    changed = load_config(write_config(rollout={"max_response_tokens": 7}))
    with pytest.raises(ConfigError, match=r"rollout\.max_response_tokens is 7, the sweep has"):
        before.check(Definition.new(GRID, 1, changed), files.root)


def test_outcomes_are_kept_until_they_are_removed(files: SweepFiles) -> None:
    assert files.read_outcomes() == {}
    files.write_outcome("a", "actor: out of memory")
    files.write_outcome("b", "stopped")
    files.write_outcome("a", None)
    assert files.read_outcomes() == {"b": "stopped"}
    assert json.loads(files.outcomes.read_text()) == {"b": "stopped"}
    for damaged in ("{", "[]"):
        files.outcomes.write_text(damaged)
        with pytest.raises(ConfigError, match="remove the file"):
            files.read_outcomes()


def test_two_processes_cannot_work_on_one_sweep(files: SweepFiles) -> None:
    with lock_sweep(files), pytest.raises(ConfigError, match="is active in another process"), lock_sweep(files):
        pass
    with lock_sweep(files):
        pass
    check_usable(files)
