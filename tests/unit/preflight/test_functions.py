"""Reward functions are checked before any process starts."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.errors import ConfigError
from tests.every_case import every_case
from tests.unit.preflight.files import check_inputs, config
from tests.unit.system.test_child_processes import is_running
from tests.waiting import wait_until

IMPORTED = "raise SystemExit('imported by the check')\n"


OWN = ("single", "package", "open")


@pytest.fixture
def modules(models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create modules in the working directory that raise SystemExit when they are imported."""
    files = ("single.py", "package/__init__.py", "package/inner.py", "package/deeper/__init__.py", "open/wide/door.py")
    for name in files:
        (models / name).parent.mkdir(parents=True, exist_ok=True)
        (models / name).write_text(IMPORTED)
    monkeypatch.chdir(models)
    return models


def with_function(models: Path, function: str, **services: dict[str, Any]) -> Config:
    tree = config(models, **services).model_dump()
    tree["reward"] = {"source": "function", "function": function}
    return parse_config(tree, "test")


@pytest.mark.parametrize(
    "module",
    [
        "single", "package", "package.inner", "package.deeper", "open.wide.door", "single.made_when_imported",
        "math", "os.path", "numpy.linalg", "quartet.errors",
    ],
)  # fmt: skip
def test_the_module_of_a_function_is_located_and_imported_only_in_another_process(module: str, modules: Path) -> None:
    before = set(sys.modules)
    with pytest.raises(ConfigError) as refused:
        check_inputs(with_function(modules, f"{module}:f"))
    reason = "imported by the check" if module.split(".")[0] in OWN else f"module {module} has no f"
    assert str(refused.value).startswith(f"reward.function {module}:f: ")
    assert reason in str(refused.value)
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] in OWN}


FUNCTIONS = """
import os, subprocess, sys
sys.stdout = sys.stderr
print("a line of the module")
os.environ["QUARTET_OF_THE_USER"]
child = subprocess.Popen(["sleep", "60"])
open("child", "w").write(str(child.pid))
def good(prompt, response, fields): return 1.0
def any_number(*arguments): return 1.0
def judge(prompt, response, initial, fields): return 1.0
def short(prompt): return 1.0
value = 3
class Reward:
    def __call__(self, prompt, response, fields): return 1.0
instance = Reward()
secret = lambda prompt, response, fields=os.environ.get("QUARTET_BUFFER_URL"): 1.0
assert "QUARTET_BUFFER_URL" not in os.environ
"""


@every_case(
    ("function", "message"),
    [
        ("good", ""),
        ("any_number", ""),
        ("instance", ""),
        ("secret", ""),
        ("short", "too many positional arguments, called with 3 arguments: prompt, response, fields"),
        ("judge", "missing a required argument: 'fields', called with 3 arguments"),
        ("goood", "module mine has no goood; did you mean good?"),
        ("value", "is a value of type int, expected a function"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(
    function: str, message: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (models / "mine.py").write_text(FUNCTIONS)
    monkeypatch.chdir(models)
    monkeypatch.setenv("QUARTET_OF_THE_USER", "1")
    monkeypatch.setenv("QUARTET_BUFFER_URL", "redis://:secret@h/0")  # pragma: allowlist secret - an example
    if not message:
        note = f"reward.function mine:{function}: can be imported and accepts 3 arguments"
        assert note in check_inputs(with_function(models, f"mine:{function}"))
        wait_until(lambda: not is_running(int((models / "child").read_text())))
        return
    with pytest.raises(ConfigError, match=re.escape(f"reward.function mine:{function}: ") + ".*" + re.escape(message)):
        check_inputs(with_function(models, f"mine:{function}"))


@every_case(
    ("function", "message"),
    [
        ("loss", ""),
        ("los", "module algorithms has no los; did you mean loss?"),
        ("two", "missing a required argument: 'b', called with 1 argument: inputs"),
    ],
)
def test_functions_of_the_algorithm_are_checked_too(
    function: str, message: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (models / "algorithms.py").write_text("def loss(inputs): ...\ndef two(a, b): ...\n")
    monkeypatch.chdir(models)
    tree = config(models).model_dump()
    tree["algorithm"] |= {"policy_loss": f"algorithms:{function}"}
    if not message:
        notes = check_inputs(parse_config(tree, "test"))
        assert f"algorithm.policy_loss algorithms:{function}: can be imported and accepts 1 argument" in notes
        return
    with pytest.raises(ConfigError, match=re.escape(f"algorithm.policy_loss algorithms:{function}: {message}")):
        check_inputs(parse_config(tree, "test"))


@every_case(
    ("name", "problem"),
    [
        ("Game", ""),
        ("NoStep", "does not define step"),
        ("Other", "is not an environment: no method reset; derive a class from quartet.environments.Environment"),
        ("function", "is not an environment: no method reset; derive a class"),
        (
            "Deep",
            "environment.arguments: missing a required argument: 'depth', called with 0 arguments and level by name",
        ),
        (
            "Closed",
            "environment.arguments: got an unexpected keyword argument 'level', called with 0 arguments and level",
        ),
    ],
)
def test_a_class_that_has_no_environments_is_refused(
    name: str, problem: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (models / "worlds.py").write_text(
        "from quartet.environments import Environment\n"
        "class NoStep(Environment):\n    def reset(self, seed, fields): ...\n"
        "class Closed(NoStep):\n    def step(self, text): ...\n"
        "class Game(Closed):\n    def __init__(self, level): ...\n"
        "class Deep(Closed):\n    def __init__(self, level, depth): ...\n"
        "class Other: ...\n"
        "def function(level): ...\n"
    )
    monkeypatch.chdir(models)
    tree = config(models).model_dump()
    tree["rollout"] |= {"max_turns": 2, "max_turn_tokens": 8}
    tree["environment"] = {"class_name": f"worlds:{name}", "arguments": {"level": 1}}
    settings = parse_config(tree, "test")
    if not problem:
        assert f"environment.class_name worlds:{name}: can be imported and accepts level by name" in (
            check_inputs(settings)
        )
        return
    with pytest.raises(ConfigError, match=re.escape(f"environment.class_name worlds:{name}: {problem}")):
        check_inputs(settings)


@pytest.mark.parametrize(
    ("signature", "function", "problem"),
    [
        ("quartet", "scaled", ""),
        ("quartet", "plain", "unexpected keyword argument 'scale'"),
        ("trl", "trl", ""),
        ("trl", "plain", "its parameter prompt is no column of the prompts, which have text; .*rename the parameter"),
        ("trl", "closed", "unexpected keyword argument 'prompts', .*; add \\*\\*kwargs to its parameters"),
        ("trl", "column", ""),
        ("verl", "verl", ""),
        ("verl", "trl", "missing a required argument: 'completions'"),
    ],
)
def test_a_function_must_accept_its_signature_and_the_arguments_of_the_config(
    signature: str, function: str, problem: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (models / "signed.py").write_text(
        "def plain(prompt, response, fields): return 1.0\n"
        "def scaled(prompt, response, fields, scale): return scale\n"
        "def trl(completions, scale, **kwargs): return [scale]\n"
        "def closed(completions, scale): return [scale]\n"
        "def column(text, scale, **kwargs): return [scale]\n"
        "def verl(data_source, solution_str, ground_truth, extra_info, scale): return scale\n"
    )
    monkeypatch.chdir(models)
    tree = with_function(models, f"signed:{function}").model_dump()
    tree["reward"] |= {"signature": signature, "arguments": {"scale": 2.0}}
    settings = parse_config(tree, "test")
    if problem:
        with pytest.raises(ConfigError, match=re.escape(f"reward.function signed:{function}: ") + ".*" + problem):
            check_inputs(settings)
        return
    notes = [note for note in check_inputs(settings) if note.startswith("reward.function")]
    assert len(notes) == 1
    assert notes[0].endswith("scale and the columns text by name" if signature == "trl" else "scale by name")


@pytest.mark.parametrize(("rows", "is_known"), [(4, True), (3, False)])
def test_columns_are_unknown_if_a_set_has_more_rows_than_are_read(
    rows: int, is_known: bool, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (models / "prompts.jsonl").write_text('{"text": "a b"}\n' * 3 + '{"text": "a b", "answer": "c"}\n')
    (models / "late.py").write_text(
        "def f(completions, answer, **kwargs): return [0.0]\ndef g(completions, absent, **kwargs): return [0.0]\n"
    )
    monkeypatch.chdir(models)
    monkeypatch.setattr("quartet.preflight.functions.MAX_COLUMN_ROWS", rows)
    settings = {}
    for name in "fg":
        tree = with_function(models, f"late:{name}").model_dump()
        tree["reward"]["signature"] = "trl"
        settings[name] = parse_config(tree, "test")
    assert any("late:f: can be imported and accepts" in note for note in check_inputs(settings["f"]))
    if is_known:
        with pytest.raises(ConfigError, match="its parameter absent is no column of the prompts"):
            check_inputs(settings["g"])
    else:
        check_inputs(settings["g"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os\nos._exit(3)\n", "its import ends the process"),
        ("import absent_module\n", "cannot be imported from .*: ModuleNotFoundError: No module named 'absent_module'"),
    ],
)
def test_a_module_that_fails_to_import_is_refused(
    text: str, message: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (models / "mine.py").write_text(text)
    monkeypatch.chdir(models)
    with pytest.raises(ConfigError, match=f"^reward.function mine:f: {message}"):
        check_inputs(with_function(models, "mine:f"))


def test_a_package_that_hides_a_module_of_the_user_is_reported(modules: Path) -> None:
    (modules / "json").mkdir()
    (modules / "json" / "__init__.py").touch()
    (modules / "json" / "mine.py").touch()
    with pytest.raises(
        ConfigError, match=r"json/__init__\.py hides the module json in this directory: rename that module$"
    ):
        check_inputs(with_function(modules, "json.mine:f"))


@pytest.mark.parametrize(
    "module", ["absent", "package.absent", "package.deeper.absent", "open.absent", "open.wide.shut"]
)
def test_a_function_in_a_missing_module_is_refused(module: str, modules: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        check_inputs(with_function(modules, f"{module}:f"))
    message = str(refused.value)
    assert message.startswith(f"reward.function {module}:f: no module {module} in {modules} or among the installed")
    assert "PYTHONPATH" in message


def test_functions_of_ensembles_and_judges_are_checked(modules: Path) -> None:
    tree = config(modules).model_dump()
    parts = [{"name": "absent", "source": "function", "function": "absent:f"}]
    with pytest.raises(ConfigError, match=r"^reward\.parts\.absent\.function absent:f: no module absent"):
        check_inputs(parse_config({**tree, "reward": {"source": "ensemble", "parts": parts}}, "test"))
    with pytest.raises(ConfigError, match=r"^evaluation\.judge absent\.judges:f: no module absent\.judges"):
        check_inputs(parse_config({**tree, "evaluation": {"judge": "absent.judges:f"}}, "test"))


def test_the_function_of_a_remote_reward_is_not_checked(modules: Path) -> None:
    check_inputs(with_function(modules, "absent:f", reward={"address": "far:7001"}))
