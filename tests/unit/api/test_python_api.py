"""The Python API without processes: its names, configs, and runs on the disk."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quartet
from quartet.config.root import Config
from quartet.contract.trajectory import VersionSpan
from quartet.errors import ConfigError
from quartet.launcher import background_run
from quartet.run_directory.identity import Identity
from quartet.run_directory.run_files import RunFiles
from tests.training.conftest import _measured_once  # noqa: F401
from tests.unit.models import tiny

TREE = {
    "run": {"name": "tiny", "steps": 3},
    "data": {"prompts": Path("prompts.jsonl")},
    "actor": {"model": Path("models") / "policy"},
    "reward": {"model": "models/reward"},
}


def chat_model(folder: Path) -> Path:
    """Save a tiny model with a chat template."""
    path = tiny.saved(tiny.causal("llama"), folder / "model")
    tiny.tokenizer().save_pretrained(path)
    (path / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    return path


def test_the_import_loads_no_library() -> None:
    command = "import quartet, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.split()
    assert {"numpy", "torch", "grpc", "pydantic", "yaml", "quartet.api"} & set(modules) == set()


def test_the_api_imports_no_torch() -> None:
    command = "import quartet, sys; quartet.train, quartet.generate, quartet.Run; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.split()
    assert "quartet.api" in modules
    assert {"torch", "transformers", "tokenizers", "typer"} & set(modules) == set()


def test_the_stub_declares_every_name_of_the_module() -> None:
    assert quartet.__file__ is not None
    stub = ast.parse(Path(quartet.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    declared = {
        alias.asname or alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert declared | {"__version__"} == set(quartet.__all__)
    assert all(getattr(quartet, name) for name in quartet.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        quartet.trian  # type: ignore[attr-defined]  # noqa: B018


def test_a_config_is_loaded_from_a_file_a_mapping_or_a_config(tmp_path: Path) -> None:
    expected = quartet.load_config(TREE)
    assert isinstance(expected, Config)
    assert (expected.actor.model, expected.run.steps) == ("models/policy", 3)
    path = tmp_path / "my.yaml"
    path.write_text(expected.to_yaml())
    assert quartet.load_config(path) == quartet.load_config(str(path)) == quartet.load_config(expected) == expected


@pytest.mark.parametrize(
    "overrides",
    [
        {"run.steps": 5, "actor.learning_rate": 1e-05, "actor.model": Path("a#b")},
        ["run.steps=5", "actor.learning_rate=1e-05", "actor.model=a#b"],
    ],
)
def test_overrides_are_a_mapping_or_assignments(overrides: dict[str, object] | list[str]) -> None:
    for source in (TREE, quartet.load_config(TREE)):
        config = quartet.load_config(source, overrides)
        assert (config.run.steps, config.actor.learning_rate, config.actor.model) == (5, 1e-05, "a#b")
    assert TREE["run"] == {"name": "tiny", "steps": 3}, "the mapping is not changed"


def test_an_invalid_mapping_is_refused_with_the_key() -> None:
    with pytest.raises(ConfigError, match=r"config of the mapping: .*actor.learning_rat"):
        quartet.load_config({**TREE, "actor": {"model": "m", "learning_rat": 1}})


def test_a_config_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="config of type int; expected the path of a YAML file"):
        quartet.load_config(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "prompt 1: messages is empty"),
        (["a", [{"content": "hello"}]], "prompt 2: messages: message 1: role is missing"),
        ([3], "prompt 1: is of type int; expected a text or a list of messages"),
        (["\ud800"], "prompt 1: is not valid Unicode"),
        ([[{"role": "user", "content": "\ud800"}]], "prompt 1: is not valid Unicode"),
        ([{"role": "user", "content": "hello"}], "prompts is a list of messages; for one prompt, give a list with"),
        ({"role": "user"}, "prompts is of type dict"),
        ([], "expected at least one prompt"),
    ],
)
def test_invalid_prompts_are_refused_before_the_model_is_loaded(prompts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"generate: {message}"):
        quartet.generate("missing", prompts)


@pytest.mark.parametrize("settings", [{"max_tokens": 0}, {"temperature": -1.0}, {"max_tokens": 10_000}])
def test_invalid_settings_of_generate_are_a_config_error(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = chat_model(tmp_path)
    with pytest.raises(ConfigError, match="generate: "):
        quartet.generate(path, "hello", **settings)


def test_the_chat_template_of_generate_gets_variables(tmp_path: Path) -> None:
    path = chat_model(tmp_path)
    (path / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }} {% endfor %}{% if enable_thinking is false %}w7{% endif %}"
    )

    def prompt(**variables: Any) -> str:
        chat = [{"role": "user", "content": "w5 w6"}]
        [completion] = quartet.generate(path, [chat], max_tokens=1, chat_template_kwargs=variables)
        return completion.prompt

    assert prompt(enable_thinking=False) == "w5 w6 w7"
    assert prompt(enable_thinking=True) == prompt(enable_thinking=0) == prompt() == "w5 w6"
    with pytest.raises(ConfigError, match="generate: chat_template_kwargs: tokenize: is not a variable"):
        prompt(tokenize=True)


def test_a_completion_ends_with_the_stop_string(tmp_path: Path) -> None:
    path = chat_model(tmp_path)
    [whole] = quartet.generate(path, "w5 w6", max_tokens=12)
    words = whole.text.split()
    [stopped] = quartet.generate(path, "w5 w6", max_tokens=12, stop_strings=[words[3]])
    end = words.index(words[3]) + 1
    assert stopped.text.split() == words[:end]
    assert (stopped.finish_reason, stopped.token_ids.tolist()) == ("eos", whole.token_ids[:end].tolist())


@pytest.mark.parametrize(
    "strings", ["w5", [5], [""], ["a" * 65], ["a"] * 17], ids=["text", "number", "empty", "long", "many"]
)
def test_invalid_stop_strings_are_refused_before_the_model_is_loaded(strings: Any) -> None:
    with pytest.raises(ConfigError, match="generate: stop_strings"):
        quartet.generate("missing", "hello", stop_strings=strings)


def test_generate_continues_the_message_of_the_assistant(tmp_path: Path) -> None:
    path = chat_model(tmp_path)
    messages = [[{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w7"}]]
    with pytest.raises(ConfigError, match="the last message is the assistant's"):
        quartet.generate(path, messages, max_tokens=1)
    [completion] = quartet.generate(path, messages, max_tokens=1, continue_final_message=True)
    assert completion.prompt == "w5 w7"


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the directory of a run"):
        quartet.Run(tmp_path)


def test_an_existing_run_and_missing_secrets_are_reported_before_the_prompts_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"security.token_file missing"):
        quartet.train(TREE, {"security.token_file": "missing"})
    with pytest.raises(ConfigError, match="runs/tiny does not contain a run"):
        quartet.train(TREE, resume=True)
    assert not Path("runs").exists()
    files = RunFiles(Path("runs/tiny"))
    files.write_config(quartet.load_config(TREE).to_yaml())
    files.append_metrics({"step": 1})
    with pytest.raises(ConfigError, match="runs/tiny: holds an earlier run"):
        quartet.train(TREE)
    Path("prompts.jsonl").write_text('{"text": "hello"}\n')
    Identity.new(quartet.load_config(TREE), {}).write(files.identity)
    Path("prompts.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"cannot be read .*; give the file that the run in runs/tiny started with"):
        quartet.train(TREE, resume=True)


def test_a_fork_does_not_wait_for_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def running(*arguments: Any, **options: Any) -> Iterator[None]:
        with arguments[4]("running"):
            arguments[5].wait()
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(background_run, "started_run", running)
    run = background_run.BackgroundRun(quartet.load_config(TREE), overwrite=False, resume=False)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        run.interrupt()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not run.ended
    run.interrupt()
    assert run.interrupted


def test_metrics_are_arrays_also_while_the_run_writes_them(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "tiny")
    files.write_config(quartet.load_config(TREE).to_yaml())
    run = quartet.Run(files.root)
    assert (run.state, run.step, run.metrics, run.evaluations) == ("idle", 0, {}, {})
    with pytest.raises(ConfigError, match="no trajectories of step 0; stored steps: none yet"):
        run.trajectories()
    files.append_metrics({"step": 1, "reward_mean": 0.5})
    files.append_metrics({"step": 2, "reward_mean": 0.75, "lag": 1})
    with files.metrics.open("a") as file:
        file.write('{"step": 3, "rew')
    np.testing.assert_array_equal(run.metrics["reward_mean"], [0.5, 0.75])
    np.testing.assert_array_equal(run.metrics["lag"], [np.nan, 1])
    assert run.step == 2
    assert files.metrics.read_text().endswith('{"step": 3, "rew'), "the file is not repaired"


def test_trajectories_name_their_generator_and_the_versions_of_its_weights(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "tiny")
    files.write_config(quartet.load_config(TREE).to_yaml())
    plain = {"id": "tiny/1/0/0", "policy_version": 0, "prompt": "p", "response": "r", "score": 1.0, "kl": 0.0}
    plain |= {"response_tokens": 3, "finished": True}
    digest = bytes(range(16))
    span = {"policy_version": 0, "weights_digest": digest.hex(), "tokens": 3}
    origin = {"generator": "a:1", "weights_digest": digest.hex(), "version_spans": [span]}
    files.write_trajectories(1, [plain, plain | origin])
    by_actor, by_generator = quartet.Run(files.root).trajectories(1)
    assert (by_actor.generator, by_actor.weights_digest, by_actor.version_spans) == ("", b"", ())
    assert (by_generator.generator, by_generator.weights_digest) == ("a:1", digest)
    assert by_generator.version_spans == (VersionSpan(0, digest, 3),)
    files.write_trajectories(1, [plain | origin | {"weights_digest": "none"}])
    with pytest.raises(ConfigError, match="the trajectories of step 1 are damaged"):
        quartet.Run(files.root).trajectories(1)
