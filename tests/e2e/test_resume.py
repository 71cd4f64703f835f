"""``quartet train --resume`` after SIGKILL of all processes, rollback, fork, and the checkpoints commands."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
import yaml

from quartet.cli.checkpoint import list_and_tag
from quartet.config.loading import load_config
from quartet.preflight import nothing_to_resume
from quartet.run_directory.run_files import RunFiles
from tests.documents import commands
from tests.e2e.commands import QUARTET, Command, committed_steps, settings
from tests.e2e.conftest import Call, Run, Start, step_metrics, weights
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


# tests/chaos and tests/training/test_resume.py resume with the experience that Redis has kept.
def test_a_run_whose_launcher_and_redis_are_lost_leaves_no_process_and_resumes_bit_identically(
    start: Start, config: Path, few_processes: list[str], first_run: Run, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "tiny"
    command = start("train", config, *few_processes)
    command.wait_for(lambda: committed_steps(run) >= 4)
    # The kernel ends the children of a launcher that is killed.
    command.process.kill()
    command.process.wait()
    wait_until(lambda: not command.processes(), command.processes)
    assert not (run / "policy").exists()
    shutil.rmtree(run / "redis")
    result = start("train", config, *few_processes, "--resume").wait()
    assert (result.code, result.err, result.leftovers) == (0, "", [])
    assert "note: resumed after step" in result.out
    assert step_metrics(Run(result, run)) == step_metrics(first_run)
    assert weights(run) == weights(first_run.directory)


def test_a_run_is_archived_and_restored_by_the_documented_commands(start: Start, config: Path, tmp_path: Path) -> None:
    def execute(line: str, folder: Path) -> None:
        program, *arguments = line.split()
        if program == "quartet":
            done = start(*arguments, cwd=folder).wait()
            assert (done.code, done.err) == (0, "")
        else:
            shell = subprocess.run(["/bin/sh", "-c", line], cwd=folder, capture_output=True, text=True, check=False)
            assert (shell.returncode, shell.stderr) == (0, "")

    archive, restore = commands("recover.md", "Back up a run", run="tiny")
    assert [line.split()[1] for line in (*archive, *restore) if line.startswith("quartet")] == [
        *("pause", "checkpoint", "resume", "checkpoints", "train")
    ]
    original, elsewhere = tmp_path / "runs" / "tiny", tmp_path / "elsewhere"
    restored = elsewhere / "runs" / "tiny"
    elsewhere.mkdir()
    first = start("train", config, *settings("run.steps=100000"))
    first.wait_for(lambda: committed_steps(original) >= 1)
    for line in archive:
        execute(line, tmp_path)
    (tmp_path / "tiny.tar").rename(elsewhere / "tiny.tar")
    for line in restore[:-1]:
        execute(line, elsewhere)
    archived = committed_steps(restored)
    assert not (restored / "redis").exists()
    first.wait_for(lambda: committed_steps(original) >= archived + 2)
    execute("quartet stop runs/tiny", tmp_path)
    assert first.wait().code == 0
    second = start("train", config, *settings("run.steps=100000"), "--resume", cwd=elsewhere)
    second.wait_for(lambda: f"note: resumed after step {archived}\n" in second.out)
    last = committed_steps(original)
    second.wait_for(lambda: committed_steps(restored) >= last)
    execute("quartet stop runs/tiny", elsewhere)
    result = second.wait()
    assert (result.code, result.err, result.leftovers) == (0, "", [])
    assert step_metrics(Run(result, restored))[:last] == step_metrics(Run(result, original))
    assert "sealed experience lost" not in (restored / "logs" / "orchestrator.log").read_text(encoding="utf-8")


def test_resume_refuses_a_missing_run_and_changed_settings(
    call: Call, config: Path, few_processes: list[str], first_run: Run, tmp_path: Path
) -> None:
    nothing = call("train", config, "--resume")
    assert nothing.code == 2
    assert "--resume: runs/tiny does not contain a run" in nothing.err
    shutil.copytree(first_run.directory, tmp_path / "runs" / "tiny", dirs_exist_ok=True)
    changed = settings("actor.learning_rate=0.5")
    other = call("train", config, *few_processes, *changed, "--resume")
    assert other.code == 2
    assert "--resume: actor.learning_rate is 0.5, the run in runs/tiny had 0.001" in other.err
    assert "quartet fork runs/tiny STEP --name NAME --set actor.learning_rate=0.5" in other.err
    both = call("train", config, "--resume", "--overwrite")
    assert both.code == 2
    assert weights(tmp_path / "runs" / "tiny") == weights(first_run.directory)


@pytest.mark.slow  # tests/training/test_resume.py resumes a stopped run in one process.
def test_a_finished_run_resumes_with_more_steps(start: Start, config: Path, first_run: Run, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    first = start("train", config, *settings("run.steps=5", "checkpoint.every_steps=3")).wait()
    assert first.code == 0, first
    assert yaml.safe_load((run / "config.yaml").read_text())["run"]["steps"] == 5
    result = start("train", config, "--resume").wait()
    assert result.code == 0, result
    assert weights(run) == weights(first_run.directory)


def test_checkpoints_are_listed_and_verified(call: Call, first_run: Run, tmp_path: Path) -> None:
    run = shutil.copytree(first_run.directory, tmp_path / "copy")
    listed = call("checkpoints", "list", run)
    assert listed.code == 0
    assert all(word in listed.out for word in ("6", "8", "MiB", "not verified"))
    verified = call("checkpoints", "verify", run)
    assert (verified.code, verified.out.count("verified")) == (0, 2)
    (run / "checkpoints" / "step-000006" / "critic" / "config.json").write_text("{}")
    damaged = call("checkpoints", "verify", run)
    assert damaged.code == 1
    assert "damaged" in damaged.out
    refused = call("rollback", run, "6", "--yes")
    assert refused.code == 2
    assert "critic/config.json does not match the manifest; choose another checkpoint" in refused.err
    assert "available steps: 6, 8" in call("rollback", run, "5").err


def test_resuming_a_finished_run_says_so_and_starts_nothing(call: Call, run_copy: Path) -> None:
    config, before = run_copy / "config.yaml", (run_copy / "config.yaml").stat().st_mtime_ns
    here = settings(f"run.directory={run_copy.parent}")
    finished = call("train", config, *here, "--resume")
    assert (finished.code, finished.err) == (0, "")
    assert f"{run_copy} is finished: 8 of 8 steps; to train further: quartet train " in finished.out
    assert "starting the services" not in finished.out
    assert (run_copy / "config.yaml").stat().st_mtime_ns == before
    shorter = call("train", config, *here, *settings("run.steps=5"), "--resume")
    assert shorter.code == 2
    assert "run.steps 5: the run in" in shorter.err
    assert "has taken 8 steps" in shorter.err


def test_a_run_whose_saved_policy_is_of_an_earlier_step_is_not_finished(run_copy: Path) -> None:
    files, config = RunFiles(run_copy), load_config(run_copy / "config.yaml")
    assert (files.policy_step(), nothing_to_resume(config, files)) == (8, True)
    files.write_policy_step(5)
    assert not nothing_to_resume(config, files)


def test_a_rollback_lists_what_it_removes_and_needs_a_yes(call: Call, run_copy: Path) -> None:
    refused = stderr_of_refused(call, "rollback", run_copy, "6")
    for line in ("steps 7 to 8, with metrics", "checkpoint of step 8", "the saved policy, of step 8", "give --yes"):
        assert line in refused
    assert (committed_steps(run_copy), RunFiles(run_copy).policy_step()) == (8, 8)
    rolled = call("rollback", run_copy, "6", "--yes")
    assert (rolled.code, committed_steps(run_copy), RunFiles(run_copy).policy_step()) == (0, 6, None)


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_rollback_asks_on_a_terminal(
    answer: str, call: Call, run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(list_and_tag, "_is_interactive", lambda: True)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{answer}\n"))
    result = call("rollback", run_copy, "6")
    assert "remove them? [y/N]" in result.out
    assert (result.code, committed_steps(run_copy)) == ((0, 6) if answer == "y" else (1, 8))


def test_a_rollback_to_the_last_step_keeps_the_policy(call: Call, run_copy: Path) -> None:
    result = call("rollback", run_copy, "latest")
    assert result.code == 0
    assert "is at step 8 already, nothing was removed" in result.out
    assert RunFiles(run_copy).policy_step() == 8


def test_commands_for_an_active_run_say_what_an_ended_run_offers(call: Call, run_copy: Path) -> None:
    for command in ("watch", "set", "resume"):
        finished = stderr_of_refused(call, command, run_copy)
        assert "it is finished, 8 of 8 steps; quartet view " in finished
        assert "quartet report " in finished
    assert call("rollback", run_copy, "6", "--yes").code == 0
    interrupted = stderr_of_refused(call, "resume", run_copy)
    assert f"it ended after step 6 of 8; quartet train {run_copy}/config.yaml --resume continues it" in interrupted


def test_a_fork_names_the_setting_or_argument_to_change(call: Call, run_copy: Path) -> None:
    last = stderr_of_refused(call, "fork", run_copy, "latest", "--name", "longer")
    assert "the fork starts after step 8; add --set run.steps=N, with N over 8" in last
    (run_copy.with_name("used") / "policy").mkdir(parents=True)
    used = stderr_of_refused(call, "fork", run_copy, "6", "--name", "used")
    assert "--name used: " in used
    assert used.endswith("holds an earlier run; choose another name\n")


@pytest.mark.slow  # tests/training/test_live_control.py rolls back in one process.
def test_a_run_resumes_bit_identically_after_the_documented_rollback(
    start: Start, config: Path, first_run: Run, tmp_path: Path
) -> None:
    run = shutil.copytree(first_run.directory, tmp_path / "runs" / "tiny")
    (documented,) = commands("recover.md", "If training went wrong", run="tiny")
    *before, rollback, resume = (line.removeprefix("quartet ").split() for line in documented)
    for line in (*before, [*rollback[:-1], "6", "--yes"]):
        assert start(*line).wait().code == 0, line
    assert committed_steps(run) == 6
    assert not (run / "policy").exists()
    assert resume == ["train", "tiny.yaml", "--resume"]
    result = start("train", config, "--resume").wait()
    assert result.code == 0, result
    assert weights(run) == weights(first_run.directory)
    assert step_metrics(Run(result, run)) == step_metrics(first_run)


@pytest.mark.slow  # tests/training/test_fork.py forks in one process.
def test_a_fork_continues_from_an_old_checkpoint_with_other_settings(
    start: Start, first_run: Run, tmp_path: Path
) -> None:
    shutil.copytree(first_run.directory, tmp_path / "runs" / "tiny")
    forked_result = start("fork", "runs/tiny", "6", "--name", "faster", *settings("actor.learning_rate=0.01")).wait()
    assert (forked_result.code, forked_result.err) == (0, "")
    forked = tmp_path / "runs" / "faster"
    assert committed_steps(forked) == 6
    result = start("train", forked / "config.yaml", "--resume").wait()
    assert result.code == 0, result
    rates = [step["learning_rate_actor"] for step in Run(result, forked).metrics]
    assert rates == [1e-3] * 6 + [0.01] * 2
    assert weights(forked) != weights(first_run.directory)
    assert weights(tmp_path / "runs" / "tiny") == weights(first_run.directory)
    second = start("fork", "runs/tiny", "6", "--name", "faster").wait()
    assert second.code == 2
    assert "holds an earlier run" in second.err


def checkpoint_folders(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.fixture
def run_copy(first_run: Run, tmp_path: Path) -> Path:
    """A finished run of eight steps with checkpoints of steps 6 and 8."""
    return Path(shutil.copytree(first_run.directory, tmp_path / "runs" / "tiny"))


def stderr_of_refused(call: Call, *arguments: str | Path) -> str:
    """Run a command that must fail with exit status 2; return its standard error."""
    result = call(*arguments)
    assert (result.code, result.leftovers) == (2, [])
    assert result.err.startswith("error: ")
    return result.err


def test_checkpoints_can_be_tagged_and_untagged(call: Call, run_copy: Path) -> None:
    for step, name in (("6", "good"), ("8", "last"), ("good", "first.of_two")):
        assert call("checkpoints", "tag", run_copy, step, name).code == 0
    assert {name: (run_copy / "checkpoints" / name).readlink() for name in ("good", "last", "first.of_two")} == {
        "good": Path("step-000006"),
        "last": Path("step-000008"),
        "first.of_two": Path("step-000006"),
    }
    listed = call("checkpoints", "list", run_copy)
    assert all(name in listed.out for name in ("good", "last", "first.of_two"))
    assert call("checkpoints", "tag", run_copy, "6", "good").code == 0, "tagging again changes nothing"
    assert "tag good: belongs to step-000006; remove it there first" in stderr_of_refused(
        call, "checkpoints", "tag", run_copy, "8", "good"
    )
    assert "names the newest checkpoint" in stderr_of_refused(call, "checkpoints", "tag", run_copy, "6", "latest")
    assert "the run sets it by checkpoint.best_metric" in stderr_of_refused(
        call, "checkpoints", "tag", run_copy, "6", "best"
    )
    for bad in ("7", "step-000007", "../good", "a b", ".good", ""):
        assert "expected up to 64 letters" in stderr_of_refused(call, "checkpoints", "tag", run_copy, "6", bad)
    assert "no checkpoint of step 7; available steps: 6, 8; tags: first.of_two, good, last" in stderr_of_refused(
        call, "checkpoints", "tag", run_copy, "7", "new"
    )
    # Rollback never deletes a tagged checkpoint.
    assert "step-000008 is tagged last" in stderr_of_refused(call, "rollback", run_copy, "good", "--yes")
    assert committed_steps(run_copy) == 8
    assert call("checkpoints", "untag", run_copy, "last").code == 0
    assert call("rollback", run_copy, "good", "--yes").code == 0
    assert (committed_steps(run_copy), checkpoint_folders(run_copy)) == (6, ["first.of_two", "good", "step-000006"])
    assert call("checkpoints", "untag", run_copy, "good").code == 0
    assert checkpoint_folders(run_copy) == ["first.of_two", "step-000006"]
    assert "no checkpoint has the tag good; available steps: 6; tags: first.of_two" in stderr_of_refused(
        call, "checkpoints", "untag", run_copy, "good"
    )


@pytest.mark.slow  # tests/services/orchestrator/checkpointing keeps tagged checkpoints.
def test_a_tagged_checkpoint_is_kept_regardless_of_keep_last(start: Start, config: Path, run_copy: Path) -> None:
    assert start("checkpoints", "tag", run_copy, "6", "good").wait().code == 0
    longer = settings("run.steps=13", "checkpoint.every_steps=3")
    assert start("train", config, *longer, "--resume").wait().code == 0
    assert checkpoint_folders(run_copy) == ["good", "step-000006", "step-000012", "step-000013"]
    assert start("checkpoints", "verify", run_copy).wait().out.count("verified") == 3
    forked_result = start("fork", run_copy, "good", "--name", "other").wait()
    assert (forked_result.code, checkpoint_folders(run_copy.with_name("other"))) == (0, ["step-000006"])


def contents(directory: Path) -> dict[str, bytes]:
    """Return the files of a model. Its model card is checked in tests/unit/cli/test_export.py."""
    return {
        path.name: path.read_bytes() for path in directory.iterdir() if path.name not in ("README.md", "curves.svg")
    }


def test_an_exported_checkpoint_equals_the_final_policy_of_the_run(call: Call, run_copy: Path, tmp_path: Path) -> None:
    assert call("checkpoints", "tag", run_copy, "8", "last").code == 0
    (tmp_path / "empty").mkdir()
    for which, directory in (("8", "new"), ("last", "empty")):
        exported = call("checkpoints", "export", run_copy, which, directory)
        assert (exported.code, exported.err, exported.leftovers) == (0, "", [])
        assert f"{directory}: the policy of {run_copy} after step 8" in exported.out
        assert contents(tmp_path / directory) == contents(run_copy / "policy")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert model.generate(**tokenizer("a", return_tensors="pt"), max_new_tokens=2).shape[0] == 1
    assert call("checkpoints", "export", run_copy, "6", "earlier").code == 0
    assert contents(tmp_path / "earlier").keys() == contents(tmp_path / "new").keys()
    assert contents(tmp_path / "earlier")["model.safetensors"] != contents(run_copy / "policy")["model.safetensors"]


def test_export_refuses_a_non_empty_directory_and_a_damaged_checkpoint(
    call: Call, run_copy: Path, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    for directory in ("full", "full/mine"):
        assert "not an empty directory; choose a new or empty one" in stderr_of_refused(
            call, "checkpoints", "export", run_copy, "8", directory
        )
    assert contents(tmp_path / "full") == {"mine": b"x"}
    file = run_copy / "checkpoints" / "step-000008" / "actor" / "model.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    assert "actor/model.safetensors does not match the manifest" in stderr_of_refused(
        call, "checkpoints", "export", run_copy, "8", "new"
    )
    assert "no checkpoint with the tag good; available steps: 6, 8" in stderr_of_refused(
        call, "checkpoints", "export", run_copy, "good", "new"
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.slow  # tests/unit/models/test_lora_files.py merges adapters.
def test_an_exported_adapter_is_merged_like_the_final_policy(start: Start, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    adapted = settings("actor.lora.rank=2", "actor.learning_rate=0.01", "run.steps=2", "checkpoint.every_steps=1")
    assert start("train", config, *adapted).wait().code == 0
    assert (run / "checkpoints" / "step-000002" / "actor" / "adapter_config.json").exists()
    exported = start("checkpoints", "export", run, "2", "merged").wait()
    assert (exported.code, exported.err) == (0, "")
    assert contents(tmp_path / "merged") == contents(run / "policy")
    assert start("checkpoints", "export", run, "1", "earlier").wait().code == 0
    assert contents(tmp_path / "earlier")["model.safetensors"] != contents(run / "policy")["model.safetensors"]


@pytest.mark.slow  # tests/training/test_checkpointing.py fails to write checkpoints.
def test_a_run_completes_without_room_for_checkpoints_and_resumes_when_there_is_room(
    config: Path, first_run: Run, start: Start, tmp_path: Path
) -> None:
    saved = first_run.directory / "checkpoints" / "step-000008" / "actor"
    # The limit on the file size stops only the largest file, the optimizer's.
    limit = (saved / "optimizer.safetensors").stat().st_size // 1024
    run = tmp_path / "runs" / "tiny"
    short = settings("run.steps=5", "checkpoint.every_steps=3")
    limited = Command(
        "bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", QUARTET, "train", config, *short, cwd=tmp_path
    )
    try:
        result = limited.wait()
    finally:
        limited.clean_up()
    assert (result.code, result.err, result.leftovers) == (0, "", [])
    for step in (3, 5):
        assert f"checkpoint of step {step} failed: actor at " in result.out.replace("\n", " ")
    assert "too large" in result.out.replace("\n", " ")
    assert checkpoint_folders(run) == []
    assert (run / "policy" / "model.safetensors").exists()
    resumed = start("train", config, "--resume").wait()
    assert (resumed.code, checkpoint_folders(run)) == (0, ["step-000006", "step-000008"])
    assert weights(run) == weights(first_run.directory)
