"""`quartet train --resume`: after a kill of everything at once, with and without its Redis, to the undisturbed run's bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import transformers
import yaml

from tests.e2e.commands import QUARTET, Command, committed_steps, settings
from tests.e2e.conftest import LONGER, Run, Start, deterministic_metrics, weights


@pytest.mark.parametrize("redis", ["lost", "kept"])
@pytest.mark.sampled(2)
def test_a_run_of_which_everything_was_killed_goes_on_to_the_same_bits(
    redis: str, start: Start, config: Path, undisturbed: Run, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "tiny"
    command = start("train", config, *LONGER)
    command.wait_for(lambda: committed_steps(run) >= 4)
    command.kill_everything()
    assert not (run / "policy").exists()
    if redis == "lost":
        shutil.rmtree(run / "redis")
    ended = start("train", config, *LONGER, "--resume").ended()
    assert (ended.code, ended.err, ended.left) == (0, "", [])
    assert "note: resumed after step" in ended.out
    assert deterministic_metrics(Run(ended, run)) == deterministic_metrics(undisturbed)
    assert weights(run) == weights(undisturbed.directory)


def test_what_cannot_be_resumed_is_refused(start: Start, config: Path, undisturbed: Run, tmp_path: Path) -> None:
    nothing = start("train", config, "--resume").ended()
    assert nothing.code == 2
    assert "--resume: runs/tiny does not contain a run" in nothing.err
    shutil.copytree(undisturbed.directory, tmp_path / "runs" / "tiny", dirs_exist_ok=True)
    other = start("train", config, *LONGER, *settings("actor.learning_rate=0.5"), "--resume").ended()
    assert other.code == 2
    assert "--resume: actor.learning_rate is 0.5, the run in runs/tiny had 0.001" in other.err
    both = start("train", config, "--resume", "--overwrite").ended()
    assert both.code == 2
    assert weights(tmp_path / "runs" / "tiny") == weights(undisturbed.directory)


def test_a_finished_run_can_be_made_longer(start: Start, config: Path, undisturbed: Run, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    first = start("train", config, *settings("run.steps=5", "checkpoint.every_steps=3")).ended()
    assert first.code == 0, first
    assert yaml.safe_load((run / "config.yaml").read_text())["run"]["steps"] == 5
    ended = start("train", config, *LONGER, "--resume").ended()
    assert ended.code == 0, ended
    assert weights(run) == weights(undisturbed.directory)


def test_checkpoints_are_listed_and_verified(start: Start, undisturbed: Run, tmp_path: Path) -> None:
    run = shutil.copytree(undisturbed.directory, tmp_path / "copy")
    listed = start("checkpoints", "list", run).ended()
    assert listed.code == 0
    assert all(word in listed.out for word in ("6", "8", "MiB", "not verified"))
    verified = start("checkpoints", "verify", run).ended()
    assert (verified.code, verified.out.count("verified")) == (0, 2)
    (run / "checkpoints" / "step-000006" / "critic" / "config.json").write_text("{}")
    damaged = start("checkpoints", "verify", run).ended()
    assert damaged.code == 1
    assert "damaged" in damaged.out
    refused = start("rollback", run, "6").ended()
    assert refused.code == 2
    assert "critic/config.json does not match the manifest; choose another checkpoint" in refused.err
    assert "available steps: 6, 8" in start("rollback", run, "5").ended().err


def test_a_run_that_was_rolled_back_comes_to_the_same_end(
    start: Start, config: Path, undisturbed: Run, tmp_path: Path
) -> None:
    run = shutil.copytree(undisturbed.directory, tmp_path / "runs" / "tiny")
    assert start("rollback", "runs/tiny", "6").ended().code == 0
    assert committed_steps(run) == 6
    assert not (run / "policy").exists()
    ended = start("train", config, *LONGER, "--resume").ended()
    assert ended.code == 0, ended
    assert weights(run) == weights(undisturbed.directory)
    assert deterministic_metrics(Run(ended, run)) == deterministic_metrics(undisturbed)


def test_a_fork_continues_from_an_old_checkpoint_with_other_settings(
    start: Start, undisturbed: Run, tmp_path: Path
) -> None:
    shutil.copytree(undisturbed.directory, tmp_path / "runs" / "tiny")
    made = start("fork", "runs/tiny", "6", "--name", "faster", *settings("actor.learning_rate=0.01")).ended()
    assert (made.code, made.err) == (0, "")
    forked = tmp_path / "runs" / "faster"
    assert committed_steps(forked) == 6
    ended = start("train", forked / "config.yaml", "--resume").ended()
    assert ended.code == 0, ended
    rates = [step["learning_rate_actor"] for step in Run(ended, forked).metrics]
    assert rates == [1e-3] * 6 + [0.01] * 2
    assert weights(forked) != weights(undisturbed.directory)
    assert weights(tmp_path / "runs" / "tiny") == weights(undisturbed.directory)
    again = start("fork", "runs/tiny", "6", "--name", "faster").ended()
    assert again.code == 2
    assert "holds an earlier run" in again.err


def folders(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.fixture
def copied(undisturbed: Run, tmp_path: Path) -> Path:
    """A finished run of eight steps with checkpoints of steps 6 and 8."""
    return Path(shutil.copytree(undisturbed.directory, tmp_path / "runs" / "tiny"))


def refused(start: Start, *arguments: str | Path) -> str:
    """Return what a command says that is not done."""
    ended = start(*arguments).ended()
    assert (ended.code, ended.left) == (2, [])
    assert ended.err.startswith("error: ")
    return ended.err


def test_checkpoints_can_be_tagged_and_untagged(start: Start, copied: Path) -> None:
    for step, name in (("6", "best"), ("8", "last"), ("best", "first.of_two")):
        assert start("checkpoints", "tag", copied, step, name).ended().code == 0
    assert {name: (copied / "checkpoints" / name).readlink() for name in ("best", "last", "first.of_two")} == {
        "best": Path("step-000006"),
        "last": Path("step-000008"),
        "first.of_two": Path("step-000006"),
    }
    listed = start("checkpoints", "list", copied).ended()
    assert all(name in listed.out for name in ("best", "last", "first.of_two"))
    assert start("checkpoints", "tag", copied, "6", "best").ended().code == 0, "tagging again changes nothing"
    assert "tag best: belongs to step-000006; remove it there first" in refused(
        start, "checkpoints", "tag", copied, "8", "best"
    )
    for bad in ("7", "step-000007", "../best", "a b", ".best", ""):
        assert "expected up to 64 letters" in refused(start, "checkpoints", "tag", copied, "6", bad)
    assert "no checkpoint of step 7; available steps: 6, 8; tags: best, first.of_two, last" in refused(
        start, "checkpoints", "tag", copied, "7", "new"
    )
    # Rollback never deletes a tagged checkpoint.
    assert "step-000008 is tagged last" in refused(start, "rollback", copied, "best")
    assert committed_steps(copied) == 8
    assert start("checkpoints", "untag", copied, "last").ended().code == 0
    assert start("rollback", copied, "best").ended().code == 0
    assert (committed_steps(copied), folders(copied)) == (6, ["best", "first.of_two", "step-000006"])
    assert start("checkpoints", "untag", copied, "best").ended().code == 0
    assert folders(copied) == ["first.of_two", "step-000006"]
    assert "no checkpoint has the tag best; available steps: 6; tags: first.of_two" in refused(
        start, "checkpoints", "untag", copied, "best"
    )


def test_a_tagged_checkpoint_is_kept_regardless_of_keep_last(start: Start, config: Path, copied: Path) -> None:
    assert start("checkpoints", "tag", copied, "6", "best").ended().code == 0
    longer = settings("run.steps=13", "checkpoint.every_steps=3")
    assert start("train", config, *longer, "--resume").ended().code == 0
    assert folders(copied) == ["best", "step-000006", "step-000012", "step-000013"]
    assert start("checkpoints", "verify", copied).ended().out.count("verified") == 3
    made = start("fork", copied, "best", "--name", "other").ended()
    assert (made.code, folders(copied.with_name("other"))) == (0, ["step-000006"])


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_an_exported_checkpoint_equals_the_final_policy_of_the_run(start: Start, copied: Path, tmp_path: Path) -> None:
    assert start("checkpoints", "tag", copied, "8", "last").ended().code == 0
    (tmp_path / "empty").mkdir()
    for which, directory in (("8", "new"), ("last", "empty")):
        exported = start("checkpoints", "export", copied, which, directory).ended()
        assert (exported.code, exported.err, exported.left) == (0, "", [])
        assert f"{directory}: the policy of {copied} after step 8" in exported.out
        assert contents(tmp_path / directory) == contents(copied / "policy")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert model.generate(**tokenizer("a", return_tensors="pt"), max_new_tokens=2).shape[0] == 1
    assert start("checkpoints", "export", copied, "6", "earlier").ended().code == 0
    assert contents(tmp_path / "earlier").keys() == contents(tmp_path / "new").keys()
    assert contents(tmp_path / "earlier")["model.safetensors"] != contents(copied / "policy")["model.safetensors"]


def test_an_export_over_something_or_of_something_damaged_is_refused(
    start: Start, copied: Path, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    for directory in ("full", "full/mine"):
        assert "the directory is in use; choose a new or empty one" in refused(
            start, "checkpoints", "export", copied, "8", directory
        )
    assert contents(tmp_path / "full") == {"mine": b"x"}
    file = copied / "checkpoints" / "step-000008" / "actor" / "model.safetensors"
    spoilt = bytearray(file.read_bytes())
    spoilt[-1] ^= 1
    file.write_bytes(spoilt)
    assert "actor/model.safetensors does not match the manifest" in refused(
        start, "checkpoints", "export", copied, "8", "new"
    )
    assert "no checkpoint with the tag best; available steps: 6, 8" in refused(
        start, "checkpoints", "export", copied, "best", "new"
    )
    assert not (tmp_path / "new").exists()


def test_an_exported_adapter_is_merged_as_the_run_itself_does_it(start: Start, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    adapted = settings("actor.lora.rank=2", "actor.learning_rate=0.01", "run.steps=2", "checkpoint.every_steps=1")
    assert start("train", config, *adapted).ended().code == 0
    assert (run / "checkpoints" / "step-000002" / "actor" / "adapter_config.json").exists()
    exported = start("checkpoints", "export", run, "2", "merged").ended()
    assert (exported.code, exported.err) == (0, "")
    assert contents(tmp_path / "merged") == contents(run / "policy")
    assert start("checkpoints", "export", run, "1", "earlier").ended().code == 0
    assert contents(tmp_path / "earlier")["model.safetensors"] != contents(run / "policy")["model.safetensors"]


def test_a_run_whose_checkpoints_do_not_fit_on_the_disk_ends_well_and_goes_on_when_there_is_room(
    config: Path, undisturbed: Run, start: Start, tmp_path: Path
) -> None:
    saved = undisturbed.directory / "checkpoints" / "step-000008" / "actor"
    # The kernel refuses to let any file of any of the processes grow so large: the optimizer's is the only one.
    limit = (saved / "optimizer.safetensors").stat().st_size // 1024
    run = tmp_path / "runs" / "tiny"
    short = settings("run.steps=5", "checkpoint.every_steps=3")
    limited = Command(
        "bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", QUARTET, "train", config, *short, cwd=tmp_path
    )
    try:
        ended = limited.ended()
    finally:
        limited.clean_up()
    assert (ended.code, ended.err, ended.left) == (0, "", [])
    for step in (3, 5):
        assert f"checkpoint of step {step} failed: actor at " in ended.out.replace("\n", " ")
    assert "too large" in ended.out.replace("\n", " ")
    assert folders(run) == []
    assert (run / "policy" / "model.safetensors").exists()
    resumed = start("train", config, *LONGER, "--resume").ended()
    assert (resumed.code, folders(run)) == (0, ["step-000006", "step-000008"])
    assert weights(run) == weights(undisturbed.directory)
