"""Actor and critic as groups of processes: the same training, recovery, and checkpoints for another number of processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import transformers

from quartet.model_files.sharded_files import rank_file
from quartet.system.failpoints import FOLDER_VARIABLE, VARIABLE
from tests.e2e.commands import QUARTET, Command, committed_steps, settings
from tests.e2e.conftest import GROUPS, Call, Run, Start, step_metrics, train, weights


def test_groups_train_as_one_process_does(group_run: Run, first_run: Run) -> None:
    steps = zip(step_metrics(group_run), step_metrics(first_run), strict=True)
    for step, expected in steps:
        assert step.keys() == expected.keys()
        # Rounding may change a sampled token in a later step.
        if step["step"] <= 2:
            assert step == pytest.approx(expected, rel=1e-3, abs=1e-5)
    policy = transformers.AutoModelForCausalLM.from_pretrained(group_run.directory / "policy")
    assert type(policy).__name__ == "LlamaForCausalLM"
    assert policy.config.architectures == ["LlamaForCausalLM"]


@pytest.mark.slow  # test_hung_ranks.py restarts a group, tests/services/test_group_failures.py kills ranks.
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_group_that_loses_a_rank_is_restarted_and_ends_bit_identically(
    start: Start, config: Path, few_processes: list[str], group_run: Run, tmp_path: Path, role: str
) -> None:
    command = start("train", config, *few_processes, *GROUPS)
    command.wait_for(lambda: committed_steps(tmp_path / "runs" / "tiny") >= 2)
    process = command.child(role, 1)
    os.kill(process, signal.SIGKILL)
    expected = (
        rf"{role}: ended with status 1 \({role}: rank 1 of 2 \(process {process}\): killed by SIGKILL; .*\); "
        rf"restarted \(1 of 5 in a row\)\n(.*\n)*{role}: back after [\d.]+ s"
    )
    command.wait_for(lambda: re.search(expected, command.out))
    result = command.wait()
    assert (result.code, result.err, result.leftovers) == (0, "", [])
    run = Run(result, tmp_path / "runs" / "tiny")
    assert step_metrics(run) == step_metrics(group_run)
    assert weights(run.directory) == weights(group_run.directory)


@pytest.mark.parametrize("way", [pytest.param("shared memory", marks=pytest.mark.slow), "process group"])
def test_generators_get_the_policy_of_a_group_from_all_ranks(
    start: Start, config: Path, few_processes: list[str], group_run: Run, tmp_path: Path, way: str
) -> None:
    ways = {
        "shared memory": settings("rollout.share_weights=true"),
        "process group": settings("rollout.share_weights=false", "rollout.process_group=gloo"),
    }
    generators = settings("rollout.generators=2", "services.generator.num_threads=1", *ways[way][1::2])
    result = start("train", config, *few_processes, *GROUPS, *generators).wait()
    assert (result.code, result.err, result.leftovers) == (0, "", []), result
    run = Run(result, tmp_path / "runs" / "tiny")
    assert weights(run.directory) == weights(group_run.directory)
    logs = [path.read_text() for path in (run.directory / "logs").glob("generator*.log")]
    assert [set(re.findall("event='weights loaded'.* way='(.*)'", log)) for log in logs] == [{way}, {way}]


def checkpoint_files(run: Run) -> dict[str, bytes]:
    """Return the models in the checkpoints of a run."""
    checkpoints = run.directory / "checkpoints"
    assert [path.name for path in checkpoints.iterdir() if path.name.startswith(".")] == []
    files = (path for path in checkpoints.glob("step-*/*/**/*") if path.is_file())
    return {path.relative_to(checkpoints).as_posix(): path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize(("role", "rank"), [("actor", 0), ("actor", 1), ("critic", 0), ("critic", 1)])
def test_a_rank_that_is_killed_while_its_group_writes_a_checkpoint_changes_nothing(
    config: Path, few_processes: list[str], group_run: Run, tmp_path: Path, role: str, rank: int
) -> None:
    folder = tmp_path / "failpoints"
    folder.mkdir()
    environment = {VARIABLE: f"{role}.saving=hold", FOLDER_VARIABLE: str(folder)}
    command = Command(QUARTET, "train", config, *few_processes, *GROUPS, cwd=tmp_path, environment=environment)
    try:
        command.wait_for((folder / f"{role}.saving.reached").exists)
        os.kill(command.child(role, rank), signal.SIGKILL)
        (folder / f"{role}.saving.go").touch()
        result = command.wait()
    finally:
        command.clean_up()
    assert (result.code, result.err, result.leftovers) == (0, "", []), result
    run = Run(result, tmp_path / "runs" / "tiny")
    assert step_metrics(run) == step_metrics(group_run)
    assert weights(run.directory) == weights(group_run.directory)
    assert checkpoint_files(run) == checkpoint_files(group_run)


def test_a_checkpoint_of_groups_is_verified_exported_and_used_as_a_model(call: Call, group_run: Run) -> None:
    assert call("checkpoints", "verify", group_run.directory).code == 0
    exported = call("checkpoints", "export", group_run.directory, "8", "exported")
    assert (exported.code, exported.err) == (0, "")
    for file in (group_run.directory / "policy").iterdir():
        assert (Path("exported") / file.name).read_bytes() == file.read_bytes(), file.name
    transformers.AutoModelForCausalLM.from_pretrained("exported")
    outputs = [
        call("generate", model, "the film", "--max-tokens", "4", "--seed", "1").out
        for model in ("exported", group_run.directory / "checkpoints" / "step-000008")
    ]
    assert outputs[0] == outputs[1] != ""


@pytest.mark.slow  # tests/training/test_group_checkpoints.py damages the parts of one model.
def test_one_process_continues_before_a_damaged_part_and_a_fork(
    start: Start, config: Path, few_processes: list[str], group_run: Run, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(group_run.directory, tmp_path / "runs" / "tiny"))
    forked_result = start("fork", run, "6", "--name", "forked").wait()
    assert (forked_result.code, forked_result.err) == (0, "")
    rank_file(run / "checkpoints" / "step-000008" / "critic", 1, 2).unlink()
    longer = start("train", config, *few_processes, *settings("run.steps=9"), "--resume").wait()
    assert (longer.code, longer.err) == (0, ""), longer
    assert re.search(
        r"step-000008 is skipped: critic/sharded/rank-00001-of-00002.safetensors\s+is\s+missing", longer.out
    )
    assert committed_steps(run) == 9
    single = settings("services.actor.processes=1", "services.critic.processes=1")
    forked = start("train", tmp_path / "runs" / "forked" / "config.yaml", *few_processes, *single, "--resume").wait()
    assert (forked.code, forked.err) == (0, ""), forked
    assert committed_steps(tmp_path / "runs" / "forked") == 8


@pytest.mark.slow  # tests/training/test_group_checkpoints.py restores checkpoints of groups in one process.
@pytest.mark.parametrize(
    "model",
    [
        (),
        ("actor.dtype=bfloat16", "critic.dtype=bfloat16"),
        ("actor.lora.rank=2", "critic.lora.rank=2", "services.reference.address=null"),
    ],
)
def test_another_number_of_processes_continues_a_checkpoint(
    start: Start, config: Path, few_processes: list[str], tmp_path: Path, model: tuple[str, ...]
) -> None:
    few_processes = [*few_processes, *settings(*model)]
    first = start("train", config, *few_processes, *settings("run.steps=2"), *GROUPS)
    assert first.wait().code == 0
    second = start("train", config, *few_processes, *settings("run.steps=4"), "--resume")
    result = second.wait()
    assert (result.code, result.err) == (0, ""), result
    assert committed_steps(tmp_path / "runs" / "tiny") == 4
    third = start("train", config, *few_processes, *settings("run.steps=5"), *GROUPS, "--resume")
    result = third.wait()
    assert (result.code, result.err, result.leftovers) == (0, "", []), result
    assert committed_steps(tmp_path / "runs" / "tiny") == 5


@pytest.mark.slow
def test_a_group_that_generates_while_it_trains_ends_bit_identically_after_a_lost_rank(
    start: Start, config: Path, few_processes: list[str], tmp_path: Path
) -> None:
    (tmp_path / "undisturbed").mkdir()
    off_policy = settings("rollout.max_off_policy_steps=1", "algorithm.rollout_correction.upper=2")
    undisturbed = train(tmp_path / "undisturbed", config, *few_processes, *GROUPS, *off_policy)
    assert undisturbed.result.code == 0, undisturbed.result
    command = start("train", config, *few_processes, *GROUPS, *off_policy)
    command.wait_for(lambda: committed_steps(tmp_path / "runs" / "tiny") >= 2)
    os.kill(command.child("actor", 1), signal.SIGKILL)
    result = command.wait()
    assert (result.code, result.err, result.leftovers) == (0, "", []), result
    run = Run(result, tmp_path / "runs" / "tiny")
    assert step_metrics(run) == step_metrics(undisturbed)
    assert weights(run.directory) == weights(undisturbed.directory)


@pytest.mark.slow  # tests/unit/models/workers/test_frozen_groups.py compares the scores of groups.
def test_frozen_models_in_groups_score_as_single_processes_do_also_after_a_lost_rank(
    start: Start, config: Path, first_run: Run, tmp_path: Path
) -> None:
    groups = settings("services.reward.processes=2", "services.reference.processes=2", "gateway.enabled=false")
    command = start("train", config, *groups)
    command.wait_for(lambda: committed_steps(tmp_path / "runs" / "tiny") >= 2)
    os.kill(command.child("reward", 1), signal.SIGKILL)
    command.wait_for(lambda: re.search(r"reward: back after [\d.]+ s", command.out))
    result = command.wait()
    assert (result.code, result.err, result.leftovers) == (0, "", []), result
    steps = step_metrics(Run(result, tmp_path / "runs" / "tiny"))
    for step, expected in zip(steps[:2], step_metrics(first_run), strict=False):
        assert step == pytest.approx(expected, rel=1e-3, abs=1e-5)


SLICED = settings(
    *(f"services.{role}.{setting}" for role in ("actor", "critic") for setting in ("processes=2", "parallel.tensor=2"))
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [(), ("actor.lora.rank=2", "critic.lora.rank=2", "services.reference.address=null")], ids=["all", "lora"]
)
def test_ranks_that_compute_slices_of_layers_train_as_one_process_does(
    start: Start, config: Path, few_processes: list[str], tmp_path: Path, model: tuple[str, ...]
) -> None:
    few_processes = [*few_processes, *settings(*model)]
    (tmp_path / "one").mkdir()
    expected = train(tmp_path / "one", config, *few_processes, *settings("run.steps=2"))
    first = start("train", config, *few_processes, *settings("run.steps=2"), *SLICED)
    assert first.wait().code == 0
    run = Run(first.wait(), tmp_path / "runs" / "tiny")
    for step, other in zip(step_metrics(run), step_metrics(expected), strict=True):
        assert step == pytest.approx(other, rel=1e-3, abs=1e-5)
    # An export and a checkpoint do not show how many ranks there were.
    policies = [
        transformers.AutoModelForCausalLM.from_pretrained(each.directory / "policy").state_dict()
        for each in (run, expected)
    ]
    assert policies[0].keys() == policies[1].keys()
    for name, value in policies[0].items():
        assert (value - policies[1][name]).abs().max() < 1e-4, name
    for steps, options in ((4, []), (5, SLICED)):
        result = start("train", config, *few_processes, *settings(f"run.steps={steps}"), *options, "--resume").wait()
        assert (result.code, result.err, result.leftovers) == (0, "", []), result
        assert committed_steps(run.directory) == steps


@pytest.mark.slow
def test_a_model_that_cannot_be_sliced_is_refused(
    start: Start, config: Path, few_processes: list[str], tmp_path: Path
) -> None:
    four = settings("services.critic.processes=4", "services.critic.parallel.tensor=4")
    result = start("train", config, *few_processes, *four).wait()
    assert (result.code, result.leftovers) == (2, [])
    assert "services.critic.parallel.tensor 4: does not divide num_attention_heads 2 of " in result.err
