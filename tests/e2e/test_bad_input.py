"""Invalid input: exit status 2, one line that says what and where, and no process left running."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quartet.demo.toy_task import ToyTask
from tests.e2e.commands import CommandResult, settings
from tests.e2e.conftest import STEPS, Call, Run, Service, Start

AssertTrainFails = Callable[..., None]


def assert_refused(result: CommandResult, *mentioned: str | Path) -> None:
    assert result.code == 2, result
    assert result.err.startswith("error: ")
    assert result.err.replace("\n  ", "").count("\n") == 1, result.err  # Several problems have a line each.
    for text in mentioned:
        assert str(text) in result.err
    assert "Traceback" not in result.out
    assert result.leftovers == []


@pytest.fixture
def assert_train_fails(start: Start, call: Call, config: Path, tmp_path: Path) -> AssertTrainFails:
    """Train with changed settings, and check that the command fails with an error that contains all of ``mentioned``.

    With ``options`` for running services, the command is a separate process, because it starts the other services.
    """

    def train(*assignments: str, options: list[str] | None = None, mentioned: tuple[str | Path, ...]) -> None:
        arguments = ("train", config, *(options or []), *settings(*assignments))
        assert_refused(call(*arguments) if options is None else start(*arguments).wait(), *mentioned)
        assert not list(tmp_path.glob("runs/*/policy"))
        assert not list(tmp_path.glob("runs/*/metrics.jsonl"))

    return train


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[Path], Path]:
    """Copy a checkpoint, so that a test can damage the copy."""

    def duplicate(model: Path) -> Path:
        return Path(shutil.copytree(model, tmp_path / "damaged"))

    return duplicate


@pytest.mark.parametrize(
    ("text", "mentioned"),
    [
        ("run:\n  stepz: 3\n", ("{file}:2", "run.stepz", "unknown key", "did you mean 'steps'")),
        ("run:\n  steps: 0\n", ("{file}:2", "run.steps", "expected at least 1", "not 0")),
        ("data:\n  prompts: p.jsonl\n", ("{file}", "actor: missing", "reward: missing")),
        ("run: [\n", ("{file}:2", "not YAML")),
    ],
    ids=["unknown key", "out of range", "missing key", "not YAML"],
)
def test_an_invalid_config_is_refused(text: str, mentioned: tuple[str, ...], call: Call, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    assert_refused(call("train", file), *(words.format(file=file) for words in mentioned))


def test_a_missing_config_is_refused(start: Start, tmp_path: Path) -> None:
    assert_refused(start("train", tmp_path / "absent.yaml").wait(), tmp_path / "absent.yaml", "No such file")


def test_a_mistyped_option_is_explained_without_a_traceback(call: Call, config: Path) -> None:
    result = call("train", config, "--steps", "3")
    assert result.code == 2
    assert "--steps" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("content", "mentioned"),
    [
        (None, ("cannot be read", "No such file", "give a file in JSON Lines")),
        ('{"text": "a"}\n{"text": \n', (":2: not JSON", "expected a JSON object per line")),
    ],
    ids=["missing", "not JSON"],
)
def test_an_invalid_prompts_file_is_refused(
    content: str | None, mentioned: tuple[str, ...], assert_train_fails: AssertTrainFails, tmp_path: Path
) -> None:
    prompts = tmp_path / "wrong.jsonl"
    if content is not None:
        prompts.write_text(content)
    assert_train_fails(f"data.prompts={prompts}", mentioned=(prompts, *mentioned))


def test_a_missing_model_is_refused(assert_train_fails: AssertTrainFails, tmp_path: Path) -> None:
    assert_train_fails(
        f"actor.model={tmp_path}/absent", mentioned=("actor.model", tmp_path / "absent", "no such directory")
    )


def test_a_model_with_a_damaged_config_is_refused(
    assert_train_fails: AssertTrainFails, toy_task: ToyTask, copy: Callable[[Path], Path]
) -> None:
    model = copy(toy_task.reward)
    (model / "config.json").write_text("{")
    assert_train_fails(f"reward.model={model}", mentioned=("reward.model", model, "config.json is not JSON"))


def test_a_model_without_tokenizer_is_refused_and_leaves_no_folder(
    assert_train_fails: AssertTrainFails, toy_task: ToyTask, copy: Callable[[Path], Path], tmp_path: Path
) -> None:
    model = copy(toy_task.policy)
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert_train_fails(f"actor.model={model}", mentioned=("actor.model", model, "its tokenizer files are missing"))
    assert not (tmp_path / "runs").exists()


def test_a_language_model_as_reward_model_is_refused(
    assert_train_fails: AssertTrainFails, toy_task: ToyTask, frozen: Service
) -> None:
    options = frozen.serving("actor", "critic", "reference")
    expected = ("reward.model", toy_task.policy, "LlamaForCausalLM", "expected a sequence classifier")
    assert_train_fails(f"reward.model={toy_task.policy}", options=options, mentioned=expected)


def test_a_port_in_use_is_refused(assert_train_fails: AssertTrainFails) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        mentioned = ("services.reward.listen", address, "in use", "choose another port")
        assert_train_fails(f"services.reward.listen={address}", mentioned=mentioned)


@pytest.fixture
def unreachable_redis() -> Iterator[str]:
    """Yield the URL of a Redis that does not exist."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # Bound but not listening, so that no other process can use the port.
        yield f"redis://127.0.0.1:{closed.getsockname()[1]}/0"


def test_an_unreachable_redis_is_refused(assert_train_fails: AssertTrainFails, unreachable_redis: str) -> None:
    assert_train_fails(
        f"buffer.url={unreachable_redis}", mentioned=(unreachable_redis, "unreachable", "correct buffer.url")
    )


def test_an_address_of_another_service_is_refused(assert_train_fails: AssertTrainFails, frozen: Service) -> None:
    assert_train_fails(
        options=frozen.serving("actor", "critic", "reward", "reference"),
        mentioned=("services.actor.address", frozen.address, "expected the actor, got the reward, reference service"),
    )


def test_a_run_directory_with_an_earlier_run_is_kept_unless_overwrite_is_given(
    first_run: Run, call: Call, config: Path
) -> None:
    before = (first_run.directory / "metrics.jsonl").read_bytes()
    result = call("train", config, *settings(f"run.directory={first_run.directory.parent}"))
    assert_refused(result, first_run.directory, "holds an earlier run", "--overwrite")
    assert (first_run.directory / "metrics.jsonl").read_bytes() == before
    assert len(first_run.metrics) == STEPS


def test_overwrite_refuses_files_that_belong_to_no_run(call: Call, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    (run / "policy").mkdir(parents=True)
    (run / "config.yaml").write_text("precious")
    assert_refused(call("train", config, "--overwrite"), "does not belong to a run of Quartet")
    assert (run / "config.yaml").read_text() == "precious"
    assert (run / "policy").is_dir()


def test_an_overwritten_run_is_restored_if_the_new_run_never_trains(
    first_run: Run, start: Start, config: Path, tmp_path: Path, unreachable_redis: str
) -> None:
    run = tmp_path / "runs" / "tiny"
    shutil.copytree(first_run.directory, run)
    before = (run / "metrics.jsonl").read_bytes()
    assert_refused(
        start("train", config, "--overwrite", *settings(f"buffer.url={unreachable_redis}")).wait(), "unreachable"
    )
    assert (run / "metrics.jsonl").read_bytes() == before
    assert (run / "policy" / "model.safetensors").is_file()


def test_a_run_directory_with_an_active_run_is_refused(
    start: Start, call: Call, config: Path, few_processes: list[str]
) -> None:
    first = start("train", config, *few_processes, *settings("run.steps=100000"))
    first.wait_for(lambda: "starting the services" in first.out)
    assert_refused(call("train", config, "--overwrite"), "runs/tiny", "a run is active there")
    assert first.process.poll() is None, "the refused command must not end the active run"
