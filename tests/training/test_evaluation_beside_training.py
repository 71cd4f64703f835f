"""Evaluations beside training: the same files as with evaluations for which training stops, also after failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.demo.toy_task import ToyTask
from quartet.errors import LeadershipConflict, ServiceUnavailable
from quartet.run_directory.checkpoints import tagged_checkpoints
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.leadership import Leadership
from quartet.services.orchestrator.rollout.evaluation import Evaluator
from quartet.services.orchestrator.rollout.generator_pool import GeneratorPool
from quartet.services.orchestrator.step import StepTransaction
from tests.training.conftest import MakeConfig
from tests.training.generator_runs import Generators, active_run_with_generators
from tests.training.runs import ActiveRun, Fleet, Run, assert_same, fleet, json_lines, orchestrator, wait_for
from tests.waiting import LIMIT

STEPS = 5
GENERATORS = 2
FINISH = "_finish_evaluation"


@pytest.fixture(scope="module")
def settings(toy_task: ToyTask) -> dict[str, Any]:
    """Settings of a run with evaluations after every second step."""
    sets = [{"name": "more", "path": str(toy_task.prompts), "samples_per_prompt": 2, "pass_at": [2]}]
    return {
        "run": {"steps": STEPS},
        "data": {"validation": str(toy_task.prompts)},
        "evaluation": {"every_steps": 2, "max_prompts": 3, "sets": sets},
        "rollout": {"generators": GENERATORS},
        "checkpoint": {"every_steps": 2, "keep_last": 1, "best_metric": "eval_kl", "best_mode": "min"},
        "recovery": {"backoff_seconds": 0.01},
    }


Configure = Callable[..., Config]


@pytest.fixture(scope="module")
def beside(make: MakeConfig, settings: dict[str, Any]) -> Configure:
    """Factory of configs in which one generator only evaluates."""

    def configured(**changes: Any) -> Config:
        evaluation = {**settings["evaluation"], "generators": 1, **changes.pop("evaluation", {})}
        rollout = {**settings["rollout"], **changes.pop("rollout", {})}
        return make(**{**settings, "evaluation": evaluation, "rollout": rollout, **changes})

    return configured


def run(config: Config) -> Run:
    with active_run_with_generators(config, GENERATORS) as (active, _):
        result = active.finish()
    assert result.code == 0, result.progress.error
    return result


@pytest.fixture(scope="module")
def stopping(make: MakeConfig, settings: dict[str, Any]) -> Run:
    """A run that stops training for its evaluations."""
    return run(make(**settings))


@pytest.fixture(scope="module")
def parallel(beside: Configure) -> Run:
    """A run whose evaluations run beside training."""
    return run(beside())


def evaluation_files(result: Run) -> dict[str, str]:
    """Return the content of all files of evaluations, by path."""
    root = result.files.root
    paths = [result.files.evaluation_summaries, *sorted(result.files.evaluations.rglob("*.jsonl"))]
    return {path.relative_to(root).as_posix(): path.read_text() for path in paths}


def assert_same_evaluations(result: Run, expected: Run) -> None:
    """Check that training and evaluations are bit-identical."""
    assert_same(result, expected)
    assert evaluation_files(result) == evaluation_files(expected)


@contextmanager
def calls(owner: type, name: str, before: Callable[..., None]) -> Iterator[None]:
    """Call ``before`` with the arguments of each call of a method, before it."""
    real = getattr(owner, name)

    def called(*arguments: Any, **named: Any) -> Any:
        before(*arguments)
        return real(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, called)
        yield


def spans(result: Run, phase: str) -> set[str]:
    """Return the services that have a span of this phase in any step."""
    lines = json_lines(result.files.root / "timeline.jsonl")
    return {span["service"] for line in lines for span in line["spans"] if span["phase"] == phase}


def test_an_evaluation_beside_training_has_the_bits_of_one_that_stops_it(parallel: Run, stopping: Run) -> None:
    assert [line["step"] for line in json_lines(stopping.files.evaluation_summaries)] == [0, 2, 4, 5]
    result = parallel
    assert_same_evaluations(result, stopping)
    evaluating = spans(result, "evaluate") - {"orchestrator"}
    assert len(evaluating) == 1
    assert len(spans(result, "generate") - evaluating) == GENERATORS - 1
    assert all(line["evaluation_wait_seconds"] >= 0 for line in result.metrics)
    assert not any("evaluation_wait_seconds" in line for line in stopping.metrics)


def test_off_policy_steps_and_evaluations_beside_them_keep_their_bits(
    make: MakeConfig, settings: dict[str, Any], beside: Configure
) -> None:
    off_policy = {"max_off_policy_steps": 1}
    expected = run(make(**{**settings, "rollout": {**settings["rollout"], **off_policy}}))
    assert_same_evaluations(run(beside(rollout=off_policy)), expected)


def test_a_step_is_updated_while_the_evaluation_before_it_generates(beside: Configure, stopping: Run) -> None:
    updated, opened = threading.Event(), []
    threads = {"evaluation": 0}

    def finish(*_: Any) -> None:
        updated.set()

    def compute(*arguments: Any) -> None:
        if threading.current_thread().name == "evaluation":
            threads["evaluation"] += 1
            # The evaluation goes on only once the update of the next step has ended.
            opened.append(updated.wait(LIMIT))
            updated.clear()

    with calls(StepTransaction, FINISH, finish), calls(Evaluator, "_compute", compute):
        result = run(beside())
    assert_same_evaluations(result, stopping)
    assert opened == [True] * 3
    assert all(result.metrics[step]["evaluation_wait_seconds"] > 0 for step in (0, 2, 4))
    assert all(result.metrics[step]["evaluation_wait_seconds"] == 0 for step in (1, 3))


STEP = 3
"""A step beside which the evaluation of the step before it runs."""
MOMENTS = {
    "before the result": (FINISH, 2, 0),
    "after the result": ("_commit", 2, 2),
    "after the commit": ("_clean_up", 3, 2),
}
"""By moment: the method before which a run fails, and the last step that is committed and evaluated then."""


CASES = [
    moment if number == 0 else pytest.param(moment, marks=pytest.mark.slow) for number, moment in enumerate(MOMENTS)
]


class Crash(Exception):
    """The end of a process."""


def once_at(step: int, action: Callable[[], None]) -> Callable[..., None]:
    """Return a function that calls ``action`` once, when the transaction that it receives has a step pending."""
    remaining = [action]

    def called(transaction: StepTransaction, *_: Any) -> None:
        if transaction.pending_step == step and remaining:
            remaining.pop()()

    return called


def crash() -> None:
    raise Crash


@pytest.mark.parametrize("moment", CASES)
def test_a_process_that_ends_beside_an_evaluation_leaves_it_to_the_next(
    moment: str, beside: Configure, stopping: Run
) -> None:
    config, (method, committed, evaluated) = beside(), MOMENTS[moment]
    with (
        calls(StepTransaction, method, once_at(STEP, crash)),
        active_run_with_generators(config, GENERATORS) as (active, _),
    ):
        failed = active.finish()
    assert failed.code == 1
    assert failed.metrics[-1]["step"] == committed
    assert json_lines(failed.files.evaluation_summaries)[-1]["step"] == evaluated
    assert_same_evaluations(run(config), stopping)


@pytest.mark.parametrize("moment", CASES)
def test_a_run_that_recovers_beside_an_evaluation_repeats_it_by_the_same_policy(
    moment: str, beside: Configure, stopping: Run
) -> None:
    def lose_connection() -> None:
        # The actor has taken the update of the step, and still has the version before it.
        raise ServiceUnavailable("reference: lost")

    with calls(StepTransaction, MOMENTS[moment][0], once_at(STEP, lose_connection)):
        result = run(beside())
    assert result.progress.recoveries == 1
    assert_same_evaluations(result, stopping)


@pytest.mark.parametrize("role", [Role.ACTOR, pytest.param(Role.REWARD, marks=pytest.mark.slow)])
def test_a_service_that_is_lost_beside_an_evaluation_changes_nothing(
    role: Role, beside: Configure, stopping: Run
) -> None:
    with (
        run_with_services(beside()) as (active, services, _),
        calls(StepTransaction, FINISH, once_at(STEP, lambda: services.restart(role))),
    ):
        result = active.finish()
    assert_same_evaluations(result, stopping)


def test_generators_that_are_lost_at_an_evaluation_change_nothing(beside: Configure, stopping: Run) -> None:
    lost = []
    with run_with_services(beside()) as (active, _, generators):

        def lose(pool: GeneratorPool, generator: Any, work: Any) -> None:
            if work.beside_training and generator.digest == work.batch.weights_digest and len(lost) < 3:
                lost.append(generator.address)
                generators.replace(generator.address)

        with calls(GeneratorPool, "_start_call", lose):
            result = active.finish()
    assert len(lost) == 3
    assert_same_evaluations(result, stopping)


@contextmanager
def run_with_services(config: Config) -> Iterator[tuple[ActiveRun, Fleet, Generators]]:
    """Run services, generators and training. Each of the processes can be lost."""
    running = Generators(config, GENERATORS)
    named = config.services.model_copy(update={"generators": running.addresses})
    try:
        with fleet(config.model_copy(update={"services": named})) as services, orchestrator(services.config) as active:
            yield active, services, running
    finally:
        running.stop()


def test_a_stop_and_a_pause_wait_for_the_evaluation_in_progress(beside: Configure) -> None:
    with run_with_services(beside(run={"steps": 50})) as (active, _, _):
        with calls(Evaluator, "start", lambda evaluator, step, *_: step == 2 and active.control.pause()):
            wait_for(active, lambda: active.board.current().phase == "paused")
        files = RunFiles(active.config.run_directory)
        committed = active.board.current().step
        assert committed in (2, 3)
        assert [line["step"] for line in json_lines(files.evaluation_summaries)] == [0, 2]
        active.control.stop()
        result = active.finish()
    assert result.code == 0
    assert [line["step"] for line in json_lines(files.evaluation_summaries)] == sorted({0, 2, committed})


def test_a_failed_evaluation_is_recorded_and_the_run_continues(
    beside: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "judges.py").write_text("def fails(*_):\n    raise KeyError('no judge')\n")
    monkeypatch.chdir(tmp_path)
    config = beside(evaluation={"judge": "judges:fails"}, actor={"learning_rate": 0.05})
    result = run(config)
    assert [line["step"] for line in json_lines(result.files.evaluation_summaries)] == [0]
    failed = json_lines(result.files.failed_trajectories)
    assert [line["step"] for line in failed] == [2, 4, 5]
    assert len(result.metrics) == STEPS


def test_the_best_checkpoint_is_that_of_evaluations_that_stop_training(parallel: Run, stopping: Run) -> None:
    assert tagged_checkpoints(parallel.files) == tagged_checkpoints(stopping.files) != {}
    folders = [sorted(path.name for path in each.files.checkpoints.iterdir()) for each in (parallel, stopping)]
    assert folders[0] == folders[1]
    assert not any("cannot be the best" in note for note in parallel.progress.notes)


def test_an_orchestrator_that_has_lost_its_lease_writes_no_evaluation(beside: Configure) -> None:
    held = True

    def lose_lease(transaction: StepTransaction, leadership: Leadership) -> None:
        nonlocal held
        held = False

    def check(leadership: Leadership) -> None:
        if not held:
            raise LeadershipConflict("another orchestrator leads")

    with (
        calls(StepTransaction, FINISH, lose_lease),
        calls(Leadership, "check", check),
        active_run_with_generators(beside(), GENERATORS) as (active, _),
    ):
        result = active.finish()
    assert result.code != 0
    assert not result.files.evaluation_summaries.exists()
