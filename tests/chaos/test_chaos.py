"""A daily sample of the chaos suite, reproducible with CHAOS_SEED, and tests of the suite itself."""

from __future__ import annotations

import datetime
import json
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from quartet.system.failpoints import FAILPOINTS
from tests.chaos import __main__ as command
from tests.chaos import page
from tests.chaos.cases import CASES, GROUPS, MOMENTS, PARTS, SEEDS, SERVICES, STEPS, Case, Part, part_of
from tests.chaos.runs import ChaosSetup, Result, differences, disturb
from tests.e2e.conftest import wide_toy_task

DOCS = Path(__file__).parents[2] / "docs/evidence/durability.md"
CHAOS_SEED = os.environ.get("CHAOS_SEED") or datetime.datetime.now(datetime.UTC).date().isoformat()
PART = 0.1
OF_A_STEP = [*SERVICES.cases, *GROUPS.cases]


def sample_of_the_suite(seed: str) -> list[Case]:
    """Return every case with probability ``PART``."""
    draws = random.Random(seed)
    return [case for case in OF_A_STEP if draws.random() < PART]


@pytest.fixture(scope="session")
def setup(tmp_path_factory: pytest.TempPathFactory) -> ChaosSetup:
    folder = tmp_path_factory.mktemp("chaos")
    shutil.copytree(wide_toy_task(tmp_path_factory), folder / "toy-task")
    return ChaosSetup(folder)


@pytest.fixture(scope="session")
def setup_of_groups(setup: ChaosSetup, tmp_path_factory: pytest.TempPathFactory) -> ChaosSetup:
    folder = tmp_path_factory.mktemp("chaos-groups")
    shutil.copytree(setup.folder / "toy-task", folder / "toy-task")
    return ChaosSetup(folder, ranks=GROUPS.ranks)


SAMPLE = sample_of_the_suite(CHAOS_SEED)
OF_TODAY = next((case for case in SAMPLE if part_of(case) is SERVICES), SERVICES.cases[0])
"""The case of ``make test``, where tests/e2e/test_hung_ranks.py restarts groups. `make test-all` runs the whole sample."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=f"CHAOS_SEED={CHAOS_SEED}-{case.name}", marks=[] if case is OF_TODAY else [pytest.mark.slow]
        )
        for case in [OF_TODAY, *(case for case in SAMPLE if case is not OF_TODAY)]
    ],
)
def test_a_disturbed_run_is_bit_identical_to_the_undisturbed_one(
    case: Case, setup: ChaosSetup, request: pytest.FixtureRequest
) -> None:
    result = disturb(case, request.getfixturevalue("setup_of_groups") if part_of(case) is GROUPS else setup)
    assert result.problems == (), f"python -m tests.chaos --only {case.name}"


def test_the_sample_is_a_tenth_and_depends_only_on_the_seed() -> None:
    assert sample_of_the_suite("2026-01-01") == sample_of_the_suite("2026-01-01")
    assert sample_of_the_suite("2026-01-01") != sample_of_the_suite("2026-01-02")
    parts = [len(sample_of_the_suite(str(seed))) for seed in range(200)]
    assert 0.09 * len(OF_A_STEP) < sum(parts) / len(parts) < 0.11 * len(OF_A_STEP)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_cases_cover_every_process_fault_and_moment(part: Part) -> None:
    cases = part.cases
    assert len({case.name for case in cases}) == len(cases) == len(part.pairs) * len(part.moments)
    for of in (lambda case: (case.process, case.fault), lambda case: case.moment.name):
        assert all(
            {case.seed for case in cases if of(case) == group} == set(SEEDS) for group in {of(case) for case in cases}
        )
    counts = Counter(case.seed for case in cases)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_every_moment_is_a_failpoint_two_steps_before_the_end() -> None:
    for moment in MOMENTS:
        assert {moment.failpoint, *moment.by_process.values()} <= FAILPOINTS.keys()
        assert all((0 if moment.at_start else 1) < moment.step(seed) <= STEPS - 2 for seed in SEEDS)
    scoring = next(moment for moment in MOMENTS if moment.name == "scoring")
    assert scoring.setting("critic", 1) == "critic.scoring=hold@8"  # Step 3: two steps of 3 batches, and the second.
    assert scoring.setting("critic-1", 1) == "critic.scoring:1=hold@8"
    assert scoring.setting("actor-1", 1) == "reward.scoring=hold@8"
    stepped = next(moment for moment in MOMENTS if moment.name == "stepped")
    assert [stepped.setting(f"critic-{rank}", 0) for rank in (0, 1)] == [
        "critic.stepped=hold@5",
        "critic.stepped:1=hold@5",
    ]
    saving = next(moment for moment in MOMENTS if moment.name == "saving")
    assert saving.setting("critic-1", 0) == "critic.saving=hold@1"
    assert saving.setting("redis", 1) == "actor.saving=hold@2"  # After step 4, the second checkpoint.


def test_the_page_describes_every_moment() -> None:
    by_hand = DOCS.read_text(encoding="utf-8").partition(page.begin(SERVICES))[0]
    assert re.findall(r"^\| (\w+) \| [^|]+ \|$", by_hand, re.MULTILINE)[1:] == [moment.name for moment in MOMENTS]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def edit_line(path: Path, number: int, **changes: object) -> None:
    lines = path.read_text().splitlines()
    lines[number] = json.dumps({**json.loads(lines[number]), **changes})
    path.write_text("\n".join(lines) + "\n")


def repeat_first_line(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], *lines]))


def drop_last_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def lower_epoch(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "leader_epoch": 0}))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("policy/model.safetensors", flip_a_bit, "policy/model.safetensors: SHA-256"),
        ("policy/model.safetensors", Path.unlink, "there is no policy"),
        ("checkpoints/step-000006/critic/model.safetensors", flip_a_bit, "critic/model.safetensors: SHA-256"),
        ("checkpoints/step-000006/actor/optimizer.safetensors", flip_a_bit, "actor/optimizer.safetensors: SHA-256"),
        ("checkpoints/step-000006", shutil.rmtree, "checkpoints are of the steps [4]"),
        ("checkpoints/step-000006/manifest.json", lower_epoch, "leader epochs decrease"),
        ("metrics.jsonl", repeat_first_line, "metrics.jsonl has the steps [1, 1, 2, 3, 4, 5, 6]"),
        ("metrics.jsonl", drop_last_line, "metrics.jsonl has the steps [1, 2, 3, 4, 5]"),
        ("metrics.jsonl", lambda path: edit_line(path, 2, kl_coefficient=0.5), "step 3: metrics differ"),
        ("trajectories/step-000004.jsonl", repeat_first_line, "not every trajectory was trained on once"),
        ("trajectories/step-000004.jsonl", drop_last_line, "not every trajectory was trained on once"),
        ("trajectories/step-000002.jsonl", lambda path: edit_line(path, 0, policy_version=0), "policy versions [0, 1]"),
        (
            "trajectories/step-000002.jsonl",
            lambda path: edit_line(path, 0, response="x"),
            "step 2: trajectories differ",
        ),
    ],
)
def test_the_suite_detects_every_kind_of_damage(
    file: str, damage: Callable[[Path], None], message: str, setup: ChaosSetup, tmp_path: Path
) -> None:
    undisturbed = setup.undisturbed(OF_TODAY.seed)
    run = shutil.copytree(undisturbed, tmp_path / "run")
    assert list(differences(run, undisturbed)) == []
    damage(run / file)
    assert message in " ".join(differences(run, undisturbed))


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_page_shows_every_case_and_keeps_its_other_text(part: Part) -> None:
    results = {case.name: Result(case.name, 1, 2.5, 10.0, ()) for case in CASES}
    failed = part.cases[-1].name
    results[failed] = Result(failed, 0, None, 10.0, ("weights differ",))
    before = f"above\n{page.begin(part)}\nold\n{page.end(part)}\nbelow\n"
    written = page.rewritten(before, part, results, "9 minutes on 2 CPU cores")
    assert written.startswith("above\n")
    assert written.endswith("\nbelow\n")
    assert "old" not in written
    assert f"{len(part.cases)} of {len(part.cases)} cases, 9 minutes on 2 CPU cores: **1 failed**." in written
    cells = page.cells(written)
    assert cells[failed] == f"**failed** ({part.cases[-1].seed})"
    assert {cells[case.name] for case in part.cases if case.name != failed} == {"2.5 (0)", "2.5 (1)", "2.5 (2)"}
    assert page.rewritten(written, part, results, "9 minutes on 2 CPU cores") == written
    with pytest.raises(ValueError, match="lost a mark"):
        page.rewritten("no marks", part, results, "")


def test_the_committed_page_shows_every_case_and_no_failure() -> None:
    cells = page.cells(DOCS.read_text(encoding="utf-8"))
    assert cells.keys() == {case.name for case in CASES}
    assert not [name for name, cell in cells.items() if "failed" in cell or "not run" in cell]


def test_an_interrupted_suite_resumes_and_writes_the_page_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "durability.md"
    target.write_text("by hand\n" + "".join(f"{page.begin(part)}\n{page.end(part)}\n" for part in PARTS))
    arguments = ["--folder", str(tmp_path / "chaos"), "--page", str(target)]
    failing, interrupted = {CASES[2].name}, CASES[5].name
    run: list[str] = []

    def fake(case: Case, *_: object) -> Result:
        if case.name == interrupted and not run.count(interrupted):
            run.append(case.name)
            raise KeyboardInterrupt
        run.append(case.name)
        return Result(case.name, 1, 2.0, 9.0, ("weights differ",) if case.name in failing else ())

    monkeypatch.setattr(command, "disturb", fake)
    with pytest.raises(KeyboardInterrupt):
        command.main(arguments)
    assert page.cells(target.read_text()) == {}
    assert command.main([*arguments, "--resume"]) == 1
    assert run[6:] == [CASES[2].name, *(case.name for case in CASES[5:])]
    assert f"python -m tests.chaos --only {CASES[2].name}" in capsys.readouterr().err
    assert page.cells(target.read_text())[CASES[2].name] == f"**failed** ({CASES[2].seed})"
    failing.clear()
    assert command.main([*arguments, "--resume", "--only", CASES[2].name]) == 0
    assert run[-1] == CASES[2].name
    assert "failed" not in target.read_text()
    assert command.main([*arguments, "--resume"]) == 0
    assert run[-1] == CASES[2].name
