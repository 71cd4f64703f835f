"""Invalid input: exit code 2, one line that says what and where, and no process left running."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quartet.demo.toy_task import ToyTask, make_toy_task
from tests.e2e.commands import Ended, settings
from tests.e2e.conftest import MINIATURE, STEPS, Run, Service, Start

Refuse = Callable[..., None]


def assert_refused(ended: Ended, *mentioned: str | Path) -> None:
    assert ended.code == 2, ended
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1, ended.err
    for words in mentioned:
        assert str(words) in ended.err
    assert "Traceback" not in ended.out
    assert ended.left == []


@pytest.fixture
def refuse(start: Start, config: Path, tmp_path: Path) -> Refuse:
    """Train with these settings changed and expects a refusal that mentions all of ``mentioned``."""

    def train(*assignments: str, options: list[str] | None = None, mentioned: tuple[str | Path, ...]) -> None:
        ended = start("train", config, *(options or []), *settings(*assignments)).ended()
        assert_refused(ended, *mentioned)
        assert not list(tmp_path.glob("runs/*/policy"))
        assert not list(tmp_path.glob("runs/*/metrics.jsonl"))

    return train


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[Path], Path]:
    """A checkpoint's copy, to be damaged."""

    def duplicate(model: Path) -> Path:
        return Path(shutil.copytree(model, tmp_path / "damaged"))

    return duplicate


@pytest.mark.parametrize(
    ("text", "mentioned"),
    [
        ("run:\n  stepz: 3\n", ("{file}:2", "run.stepz", "unknown key", "did you mean 'steps'")),
        ("run:\n  steps: 0\n", ("{file}:2", "run.steps", "greater than or equal to 1", "not 0")),
        ("data:\n  prompts: p.jsonl\n", ("{file}", "actor: missing", "reward: missing")),
        ("run: [\n", ("{file}:2", "not YAML")),
    ],
    ids=["unknown key", "out of range", "missing key", "not YAML"],
)
def test_a_wrong_config(text: str, mentioned: tuple[str, ...], start: Start, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    assert_refused(start("train", file).ended(), *(words.format(file=file) for words in mentioned))


def test_a_config_that_is_not_there(start: Start, tmp_path: Path) -> None:
    assert_refused(start("train", tmp_path / "absent.yaml").ended(), tmp_path / "absent.yaml", "No such file")


def test_a_mistyped_option_is_explained_without_a_traceback(start: Start, config: Path) -> None:
    ended = start("train", config, "--steps", "3").ended()
    assert ended.code == 2
    assert "--steps" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("content", "mentioned"),
    [
        (None, ("cannot be read", "No such file", "give a JSON Lines file")),
        ('{"text": "a"}\n{"text": \n', (":2: not JSON", 'expected a JSON object with "text"')),
        ('{"text": "a"}\n\n{"prompt": "b"}\n', (":3: found none of text, messages and token_ids",)),
        ('{"text": "a"}\n{"text": ""}\n', (":2: text is empty",)),
        ("\n\n", ("empty", "at least one prompt")),
    ],
    ids=["missing", "not JSON", "no text", "empty text", "empty file"],
)
def test_a_wrong_prompts_file(content: str | None, mentioned: tuple[str, ...], refuse: Refuse, tmp_path: Path) -> None:
    prompts = tmp_path / "wrong.jsonl"
    if content is not None:
        prompts.write_text(content)
    refuse(f"data.prompts={prompts}", mentioned=(prompts, *mentioned))


def test_a_model_that_is_not_there(refuse: Refuse, tmp_path: Path) -> None:
    refuse(f"actor.model={tmp_path}/absent", mentioned=("actor.model", tmp_path / "absent", "no such directory"))


def test_a_model_whose_config_is_broken(refuse: Refuse, toy_task: ToyTask, copy: Callable[[Path], Path]) -> None:
    model = copy(toy_task.reward)
    (model / "config.json").write_text("{")
    refuse(f"reward.model={model}", mentioned=("reward.model", model / "config.json", "not JSON"))


def test_a_model_without_its_tokenizer_leaves_no_folder(
    refuse: Refuse, toy_task: ToyTask, copy: Callable[[Path], Path], tmp_path: Path
) -> None:
    model = copy(toy_task.policy)
    for file in model.glob("tokenizer*"):
        file.unlink()
    refuse(f"actor.model={model}", mentioned=("actor.model", model, "its tokenizer files are missing"))
    assert not (tmp_path / "runs").exists()


def test_a_model_whose_weights_are_truncated(
    refuse: Refuse, toy_task: ToyTask, frozen: Service, copy: Callable[[Path], Path]
) -> None:
    model = copy(toy_task.policy)
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    # Only the actor is started here: it must refuse before the others are looked at.
    options = frozen.serving("critic", "reward", "reference")
    refuse(f"actor.model={model}", options=options, mentioned=("actor: ", model, "weights cannot be used"))


def test_a_language_model_given_as_reward_model(refuse: Refuse, toy_task: ToyTask, frozen: Service) -> None:
    options = frozen.serving("actor", "critic", "reference")
    wrong = ("reward.model", toy_task.policy, "LlamaForCausalLM", "expected a sequence classifier")
    refuse(f"reward.model={toy_task.policy}", options=options, mentioned=wrong)


def test_a_classifier_with_two_outputs_given_as_reward_model(
    refuse: Refuse, toy_task: ToyTask, frozen: Service, copy: Callable[[Path], Path]
) -> None:
    model = copy(toy_task.reward)
    description = json.loads((model / "config.json").read_text())
    labels = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    (model / "config.json").write_text(json.dumps(description | labels))
    options = frozen.serving("actor", "critic", "reference")
    refuse(f"reward.model={model}", options=options, mentioned=("reward: ", model, "2 outputs", "exactly one"))


def test_a_reward_model_with_another_vocabulary(refuse: Refuse, frozen: Service, tmp_path: Path) -> None:
    other = make_toy_task(tmp_path / "other", recipe=replace(MINIATURE, vocabulary=280))
    refuse(
        f"reward.model={other.reward}",
        options=frozen.serving("reference"),
        mentioned=("reward.model", other.reward, "280", "300", "the actor's tokenizer"),
    )


def test_a_taken_port(refuse: Refuse) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        wanted = ("services.reward.listen", taken, "in use", "choose another port")
        refuse(f"services.reward.listen={taken}", mentioned=wanted)


@pytest.fixture
def unreachable_redis() -> Iterator[str]:
    """Yield the URL of a Redis that does not exist."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # Bound but not listening: no other process can take the port meanwhile.
        yield f"redis://127.0.0.1:{closed.getsockname()[1]}/0"


def test_a_redis_that_cannot_be_reached(refuse: Refuse, unreachable_redis: str) -> None:
    refuse(f"buffer.url={unreachable_redis}", mentioned=(unreachable_redis, "unreachable", "correct buffer.url"))


def test_an_address_where_another_service_answers(refuse: Refuse, frozen: Service) -> None:
    refuse(
        options=frozen.serving("actor", "critic", "reward", "reference"),
        mentioned=("services.actor.address", frozen.address, "expected the actor, got the reward, reference service"),
    )


def test_a_run_directory_with_an_earlier_run_is_kept_unless_overwrite_is_given(
    first_run: Run, start: Start, config: Path
) -> None:
    before = (first_run.directory / "metrics.jsonl").read_bytes()
    ended = start("train", config, *settings(f"run.directory={first_run.directory.parent}")).ended()
    assert_refused(ended, first_run.directory, "holds an earlier run", "--overwrite")
    assert (first_run.directory / "metrics.jsonl").read_bytes() == before
    assert len(first_run.metrics) == STEPS


def test_overwrite_refuses_what_is_not_of_a_run(start: Start, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    (run / "policy").mkdir(parents=True)
    (run / "config.yaml").write_text("precious")
    assert_refused(start("train", config, "--overwrite").ended(), "does not belong to a run of Quartet")
    assert (run / "config.yaml").read_text() == "precious"
    assert (run / "policy").is_dir()


def test_an_overwritten_run_comes_back_when_the_new_one_never_trains(
    first_run: Run, start: Start, config: Path, tmp_path: Path, unreachable_redis: str
) -> None:
    run = tmp_path / "runs" / "tiny"
    shutil.copytree(first_run.directory, run)
    before = (run / "metrics.jsonl").read_bytes()
    assert_refused(
        start("train", config, "--overwrite", *settings(f"buffer.url={unreachable_redis}")).ended(), "unreachable"
    )
    assert (run / "metrics.jsonl").read_bytes() == before
    assert (run / "policy" / "model.safetensors").is_file()


def test_a_run_directory_with_an_active_run_is_refused(start: Start, config: Path, frozen: Service) -> None:
    options = frozen.serving("reward", "reference")
    first = start("train", config, *options)
    first.wait_for(first.processes)
    assert_refused(start("train", config, "--overwrite", *options).ended(), "runs/tiny", "a run is active there")
    assert first.process.poll() is None, "the refused command must not end the active run"
