"""The benchmarks: their calculations and tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from benchmarks import __main__ as command
from benchmarks import (
    buffer,
    durability,
    end_to_end,
    evaluations,
    exposed_weights,
    gae,
    generation,
    growth,
    machine,
    orchestration,
    overlap,
    page,
    precision,
    random_models,
    router_replay,
    simulated,
    soak,
    startup,
    transport,
    trl_training,
    update,
    weights,
)
from benchmarks.agent_sessions import Answer, Load, load_of
from benchmarks.durability import cost_of, logged_seconds
from benchmarks.options import PERFORMANCE, add_shared, page_of, parser_of
from benchmarks.soak import KIB, Sample, faults_of, rows_of
from quartet.config.loading import load_config
from quartet.contract.status import Role
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.weights.loading import load_causal_lm, load_reward_model
from quartet.models.weights.tokenizer import load_tokenizer
from quartet.rpc.server import Server
from tests.unit.models import tiny

GPU = Path(__file__).parents[2] / "configs/gpu"


def samples(leak: int = 0, files: int = 0, redis: int = 0) -> list[Sample]:
    """Return samples of 1,000 steps, five per second. ``leak``, ``redis``: bytes per step. ``files``: open files after half of
    the run.
    """
    return [
        Sample(
            step,
            step / 5,
            # Growth during the warm-up and oscillation after it are not a leak.
            {"actor": 10_000_000 + 50_000 * min(step, 150) + 5_000 * (step % 2) + leak * step},
            {"actor": 12 + (files if step > 500 else 0)},
            1_000_000 + 20_000 * (step % 50) + redis * step,
        )
        for step in range(1, 1001, 5)
    ]


def test_the_slope_ignores_oscillating_memory_and_measures_a_leak() -> None:
    actor, redis = rows_of(samples(), 1000)
    assert (actor.name, redis.name) == ("actor", "redis, used_memory")
    assert abs(actor.slope) < 1
    assert abs(redis.slope) < 30
    assert faults_of([actor, redis], bound=30) == []
    actor, redis = rows_of(samples(leak=1024, redis=4096), 1000)
    assert actor.slope == pytest.approx(100, abs=1)
    assert redis.slope == pytest.approx(400, abs=30)
    assert actor.mebibytes_last - actor.mebibytes_first == pytest.approx(720 * 1024 / KIB**2, abs=0.02)


def test_a_temporary_drop_in_memory_does_not_change_the_slope() -> None:
    steps = list(range(200, 1000, 4))
    values = [10_000 + 3 * step - (5_000_000 if 300 < step < 400 else 0) for step in steps]
    assert soak.slope(steps, values) == pytest.approx(3)


def test_leaks_and_open_files_are_reported_with_the_process() -> None:
    [leak] = faults_of(rows_of(samples(leak=1024), 1000), bound=80)
    assert leak == "actor: memory rises by 100 KiB per 100 steps, at most 80 are allowed"
    [files] = faults_of(rows_of(samples(files=1), 1000), bound=80)
    assert files == "actor: had 12 open files, has 13"
    [redis] = faults_of(rows_of(samples(redis=4096), 1000), bound=80)
    assert redis.startswith("redis, used_memory: memory rises by")


LINE = (
    "timestamp='2026-01-01' level='info' role='orchestrator' event='step committed' step={step} seconds={seconds} "
    "seal_seconds=0.004 lease_seconds=0.001 commit_seconds=2e-3 acknowledge_seconds=0.001 checkpoint_seconds={wait}"
)


def test_the_cost_includes_steps_and_checkpoints_at_the_configured_interval() -> None:
    def line(step: int) -> str:
        after = step % 10 == 1 and step > 1
        return LINE.format(step=step, seconds=2.3 if after else 9.0 if step == 1 else 2.0, wait=0.05 if after else 0.0)

    log = "\n".join(text for step in range(1, 31) for text in (line(step), f"event='step' step={step} seconds=1.0"))
    cost = cost_of(logged_seconds(log), {Role.ACTOR: 0.02, Role.CRITIC: 0.04}, measured_every=10, every=50)
    assert cost.step == 2.0
    assert cost.parts == {"seal": 0.004, "lease": 0.001, "commit": 0.002, "acknowledge": 0.001}
    assert (cost.copies, cost.waits) == (0.04, pytest.approx(0.05))
    assert cost.slower == pytest.approx(0.3)
    assert cost.checkpoint == pytest.approx(0.3)
    assert cost.share == pytest.approx((0.008 + 0.3 / 50) / 2.0)
    assert "| together | 14.00 | 0.700 % |" in durability.table(cost, Path("ppo.yaml"), 30)


def test_an_unknown_benchmark_is_an_error_and_no_name_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["nope"]) == 2
    assert capsys.readouterr().err == "error: no benchmark 'nope'; python -m benchmarks lists them\n"
    assert command.main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(command.NAMES)


def test_a_benchmark_writes_only_between_its_marks(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"above\n{page.begin('soak')}\nold\n{page.end('soak')}\nbelow\n")
    page.write(path, "soak", soak.table(rows_of(samples(), 1000), 1000, 200.0, 24_000, 30.0, []))
    text = path.read_text()
    assert text.startswith("above\n")
    assert text.endswith("\nbelow\n")
    assert "old" not in text
    assert "memory and open files stay flat" in text
    page.write(path, "soak", "new")
    assert (
        path.read_text()
        == f"above\n{page.begin('soak')}\n\n`python -m benchmarks soak`\n\nnew\n\n{page.end('soak')}\nbelow\n"
    )
    with pytest.raises(ValueError, match="lost a mark"):
        page.write(path, "cost", "new")


def test_results_with_other_options_are_not_written_to_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    parser = parser_of("gae", None)
    add_shared(parser, "build/gae", rounds=30)

    def page_for(*arguments: str) -> Path | None:
        return page_of(parser, parser.parse_args(arguments))

    assert page_for() == page_for("--folder", "elsewhere") == PERFORMANCE
    assert page_for("--rounds", "3", "--page", "mine.md") == Path("mine.md")
    assert capsys.readouterr().err == ""
    assert page_for("--rounds", "3") is None
    assert "not written to docs/evidence/performance.md" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        page_for("--rounds", "0")
    assert "argument --rounds: 0: expected at least 1" in capsys.readouterr().err


@pytest.fixture
def services_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def within(role: Role, count: int, times: simulated.Times, url: str, activity: Path | None) -> Iterator[list[str]]:
        servers = [Server([simulated.hosted(role, times, url, activity)], "127.0.0.1:0") for _ in range(count)]
        yield [server.address for server in servers]
        for server in servers:
            server.stop(0.0)

    monkeypatch.setattr(orchestration, "replicas", within)


@pytest.mark.usefixtures("services_in_this_process")
def test_the_orchestrator_is_measured_with_simulated_services(tmp_path: Path) -> None:
    result = orchestration.measure(orchestration.Case(2, 6), 2, tmp_path)
    [step] = result.steps
    assert step.tokens > 6 * orchestration.MAX_RESPONSE // 4
    assert step.ratio >= 1.0


@pytest.mark.usefixtures("services_in_this_process")
def test_off_policy_runs_are_measured_with_simulated_devices(tmp_path: Path) -> None:
    times = simulated.Times(generate=5e-6, update=5e-6)
    result = overlap.measure(1, 9, times, tmp_path)
    work = result.work
    assert len(work.generations) == len(work.updates) == 9
    for number in range(8):
        # The next step is generated by the policy before this update, so both may overlap, but not the step after it.
        assert work.generations[number][1] <= work.updates[number][0]
        assert work.generations[number][1] <= work.generations[number + 1][0]
        assert number < 2 or work.updates[number - 2][1] <= work.generations[number][0]
    assert overlap.seconds_per_step(work) >= overlap.seconds_per_step(result.critical)


@pytest.mark.slow
def test_processes_of_simulated_services_and_writers_start(redis_url: str) -> None:
    with simulated.replicas(Role.REWARD) as addresses:
        assert len(addresses) == 1
    assert buffer.stream(redis_url, 2 * buffer.FLUSH).trajectories == 2 * buffer.FLUSH


@pytest.mark.parametrize("kind", list(gae.KINDS))
def test_lengths_are_deterministic_and_add_up_to_the_requested_tokens(kind: str) -> None:
    lengths = gae.lengths_of(kind, 100_000)
    assert lengths.sum() == 100_000
    assert lengths.min() >= 1
    assert lengths.tolist() == gae.lengths_of(kind, 100_000).tolist()


def test_the_gae_table_shows_the_best_call() -> None:
    result = gae.Result("equal", 2000, 2, 1000, [0.03, 0.02, 0.07])
    assert "| 2 | 1,000 | 1,000 | **20.0** | 30.0 |" in gae.table([result], "a machine")


def test_the_codec_rate_is_that_of_the_slower_direction_and_excludes_large_messages() -> None:
    small, large = (transport.Rate("tensor", size, write=0.004, read=0.001) for size in (2_000_000, 200_000_000))
    assert small.slower == pytest.approx(5e8)
    assert transport.counts(small)
    assert not transport.counts(large)
    assert transport.counts(transport.Rate("experience", 200_000_000, 0.1, 0.1))
    text = transport.table([small], [transport.Call(3_000_000, 0.002)], 1234.5, "a machine")
    assert "| tensor | 2.0 | 0.50 | 2.00 |" in text
    assert "| 3.0 MB | 2.0 | 1.50 |" in text
    assert "**1234** per second" in text


def test_batches_and_experience_have_the_requested_tokens() -> None:
    assert len(transport.batch_of(10_500).token_ids) == 10_500
    assert len(transport.experience_of(9_000).advantages) == pytest.approx(9_000, abs=10)


def test_the_weights_have_the_shapes_and_the_rounding_of_the_model() -> None:
    assert sum(np.prod(shape) for shape in weights.shapes().values()) == 494_032_768
    values = np.random.default_rng(0).standard_normal(1000, np.float32)
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    assert weights.bfloat16(values).tolist() == expected.tolist()
    trainer = weights.Trainer("F32", {"w": (10, 3)})
    before = trainer.weights()["w"].data.view(np.float32).copy()
    trainer.step(1e-3)
    moved = trainer.weights()["w"].data.view(np.float32) - before
    assert np.abs(moved) == pytest.approx(1e-3, rel=1e-3)
    assert set(np.sign(moved)) == {-1.0, 1.0}


def test_the_weights_table_counts_all_weights_and_shows_every_tree() -> None:
    transfer = weights.Transfer("BF16", 1e-6, 0.031, 2_000_000_000, 40_000_000, 2.0, 4.0)
    seconds = [weights.Distribution(64, "full", fan_out, 20e6, 8.0 / (1 + fan_out)) for fan_out in (0, 1, 3)]
    text = weights.table([transfer], seconds, "a machine")
    assert "| BF16, delta | 1e-06 | 3.1% | 2.00 | 0.040 | 2.0% | 2.00 | 4.00 | **0.50** |" in text
    assert "| generators | kind | actor only | fan-out 1 | fan-out 3 |" in text
    assert "| at most 20 MB/s | 64 | full | 8.00 | 4.00 | 2.00 |" in text


def test_the_seconds_that_a_step_waits_for_weights_are_those_after_the_warm_up() -> None:
    metrics = [
        {
            "step": step,
            "seconds": 2.0 if step > exposed_weights.WARM_UP else 99.0,
            "weight_update_seconds": 0.02,
            "weights_exposed_seconds": 0.01 * (step > exposed_weights.WARM_UP),
        }
        for step in range(1, 9)
    ]
    timeline = [
        {"step": step, "spans": [{"phase": "publish", "start": 1.0, "end": 1.0 + (9 if step < 4 else 0.005)}]}
        for step in range(1, 9)
    ]
    result = exposed_weights.exposed_of("gRPC", metrics, timeline)
    assert result.share == pytest.approx(0.005)
    assert result.publish == pytest.approx(0.005)
    text = exposed_weights.table([result, result], 8, "a machine")
    assert "| gRPC | 2 | 2.00 | 5.0 | 20.0 | 10.0 | **0.5%** (0.5% to 0.5%) |" in text


def test_the_cost_of_evaluations_is_the_ratio_of_equal_steps() -> None:
    without = [9.0, 9.0, 1.0, 2.0, 4.0, 2.0, 9.0]
    stopping, beside = [99.0, 99.0, 2.0, 4.0, 8.0, 4.0, 99.0], [99.0, 99.0, 1.1, 2.0, 4.0, 2.0 / 1.1, 99.0]
    pairs = evaluations.paired({"none": without, "training stops": stopping, "beside training": beside})
    assert [pair.step for pair in pairs] == [3, 4, 5, 6] * 2
    stops, runs_beside = evaluations.cost(pairs[:4]), evaluations.cost(pairs[4:])
    assert (stops.ratio, stops.low, stops.high) == pytest.approx((2.0, 2.0, 2.0))
    assert stops.added == pytest.approx(2.25)
    assert runs_beside.ratio == pytest.approx(1.0)
    # The standard deviation of log 1.1, 0, 0 and -log 1.1, and the quantile of Student's t with three degrees of freedom.
    assert runs_beside.high == pytest.approx(np.exp(3.182 * np.log(1.1) * np.sqrt(2 / 3) / 2), rel=2e-3)
    assert evaluations._quantile(17) == pytest.approx(2.110, abs=1e-3)
    assert "| training stops | 4.500 | 2250 | **2.000** (2.000 to 2.000) |" in evaluations.table(pairs, "a machine")


def test_the_buffer_rate_is_measured_from_the_first_append_to_the_last_read() -> None:
    rounds = [buffer.Stream(1000, write=0.1, all=0.2), buffer.Stream(1000, write=0.05, all=0.25)]
    assert rounds[0].rate == pytest.approx(5000)
    text = buffer.table(rounds, [buffer.Sealed(10, 2_000_000_000, seal=2.0, load=4.0)], "a machine")
    assert "| appended and read | **5,000** | 4,500 | 4,000 |" in text
    assert "| 10 | 2000 | 2.000 | 1.00 | 4.000 | 0.50 |" in text


def test_the_critical_path_follows_the_slowest_service() -> None:
    times = simulated.Times(generate=1.0, score=0.0, values=0.0, update=0.5)
    # Responses of 3, 2 and 1 tokens are generated in 6 s. Updates take 3 s.
    assert orchestration.critical_path([3, 2, 1], 1, 1, 1, times) == 9.0
    # From 3 s on, sequences of 4, 3 and 2 tokens are scored one after the other, at one second per token.
    scored = simulated.Times(generate=1.0, score=1.0, values=0.0, update=0.5)
    assert orchestration.critical_path([3, 2, 1], 1, 1, 1, scored) == 12.0 + 3.0
    # With two replicas: from 3 to 7, from 5 to 8, and the last one from 7, when the first replica is free, to 9.
    assert orchestration.critical_path([3, 2, 1], 1, 1, 2, scored) == 9.0 + 3.0
    # In batches of two: 7 tokens from 5 on, and 2 tokens from 6 on by the other replica. There is only one critic.
    assert orchestration.critical_path([3, 2, 1], 1, 2, 2, scored) == 12.0 + 3.0
    assert orchestration.critical_path([3, 2, 1], 1, 1, 2, simulated.Times(1.0, 0.0, 1.0, 0.5)) == 12.0 + 3.0


def test_generations_wait_for_their_policy_and_for_the_generator() -> None:
    times = simulated.Times(generate=1.0, update=1.0)
    lengths = [[2], [2], [4], [2]]
    # Without off-policy steps, everything is in sequence.
    work = overlap.critical_work(lengths, 0, times)
    assert work.generations == [(0, 2), (4, 6), (8, 12), (16, 18)]
    assert work.updates == [(2, 4), (6, 8), (12, 16), (18, 20)]
    # One step ahead: step 3 waits for the first update, step 4 for the generator.
    work = overlap.critical_work(lengths, 1, times)
    assert work.generations == [(0, 2), (2, 4), (4, 8), (8, 10)]
    assert work.updates == [(2, 4), (4, 6), (8, 12), (12, 14)]
    work = overlap.critical_work([[4], [2], [2], [2]], 1, times)
    assert work.generations == [(0, 4), (4, 6), (8, 10), (10, 12)]


def test_the_overlap_is_measured_and_drawn_without_the_first_and_last_steps() -> None:
    steps = range(2 * overlap.MARGIN + 4)
    # Generation takes 2 s of each 4 s, the update the next 3 s.
    work = overlap.Work(
        [(4.0 * step, 4.0 * step + 2) for step in steps], [(4.0 * step + 2, 4.0 * step + 5) for step in steps]
    )
    assert overlap.seconds_per_step(work) == 4.0
    assert overlap.busy(work) == (0.5, 0.75, 0.25)
    results = [overlap.Result(0, work, work), overlap.Result(1, work, work)]
    assert "| 1 | 4.00 | 4.00 | 1.000 | 50% | 75% | **33%** | 1.00 |" in overlap.table(results, "a machine")
    lines = overlap.drawing(results).splitlines()
    assert lines[2:5] == [
        "max_off_policy_steps: 0",
        "  generator  55555"
        + "··········"
        + "6666666666"
        + "··········"
        + "7777777777"
        + "··········"
        + "8888888888"
        + "··········"
        + "99999",
        "  updates    " + "·····555555555555555·····666666666666666·····777777777777777·····888888888888888",
    ]


def test_the_rate_of_agents_counts_until_the_last_one_that_is_not_slow() -> None:
    answers = [
        Answer(1, 1, False, 10.0, 11.0, 4),
        Answer(1, 1, False, 11.0, 14.0, 6),
        Answer(1, 2, False, 12.0, 13.0, 8),
        Answer(1, 10, True, 10.0, 12.0, 2),
        Answer(1, 10, True, 19.0, 20.0, 50),
    ]
    assert load_of(answers) == Load(True, 20 / 4, 1.0, 3)
    assert load_of(answers[:2]) == Load(False, 10 / 4, 2.0, 1)


def test_lengths_of_simulated_responses_are_uniform_and_deterministic() -> None:
    lengths = simulated.response_lengths(range(1000), 1600)
    assert (min(lengths), max(lengths)) == (pytest.approx(401, abs=9), pytest.approx(1600, abs=9))
    assert sum(lengths) / 1000 == pytest.approx(1000, rel=0.01)
    assert simulated.response_lengths([7, 3], 1600) == [lengths[7], lengths[3]]
    # Prompt indices may come from NumPy, but the lengths must be JSON values.
    assert json.dumps(simulated.response_lengths(np.array([7, 3]), 1600)) == str([lengths[7], lengths[3]])


def test_the_orchestrator_table_shows_the_step_with_the_least_overhead() -> None:
    case = orchestration.Case(8, 500)
    assert case.times.score == pytest.approx(8 * orchestration.STATED.score)
    steps = [orchestration.Step(5.0, 4.0, 0.5, 500_000), orchestration.Step(4.2, 4.0, 0.25, 500_000)]
    text = orchestration.table([orchestration.Result(case, steps, 2**30)], "a machine")
    assert "| 8 | actor | 500,000 | 500 | 4.00 | 4.20 | **1.050** (1.250) | 0.20 | 0.50 | 1,024 |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("benchmark", [generation, update, end_to_end])
def test_a_gpu_benchmark_without_a_gpu_fails_and_keeps_old_results(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "results.json").write_text("of an earlier run")
    assert benchmark.main(["--config", str(GPU / "ppo.yaml"), "--folder", str(folder)]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: no GPU here: ")
    assert "build/gpu/policy in bfloat16, 128 responses of at most 512 tokens" in stderr
    assert (folder / "results.json").read_text() == "of an earlier run"


def test_random_models_include_a_policy_a_reward_model_and_prompts_of_equal_length(tmp_path: Path) -> None:
    assert random_models.main([str(tmp_path), "--layers", "1", "--vocabulary", "300"]) == 0
    policy, reward = (load(tmp_path / name, "bfloat16") for load, name in MODELS)
    assert policy.config.num_hidden_layers == reward.config.num_hidden_layers == 1
    tokenizer = load_tokenizer(tmp_path / "policy")
    lines = [json.loads(line)["text"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(lines) >= 128
    assert {len(tokenizer(text)["input_ids"]) for text in lines[:50]} == {128}


MODELS = ((load_causal_lm, "policy"), (load_reward_model, "reward"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_random_models_for_a_missing_gpu_are_not_created(tmp_path: Path) -> None:
    assert random_models.main([str(tmp_path / "out"), "--for", str(GPU / "ppo.yaml")]) == 2
    assert not (tmp_path / "out").exists()


def test_random_models_have_the_shape_of_qwen2() -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(random_models.shape("qwen2-0.5b"))
    assert model.num_parameters() == pytest.approx(494e6, rel=0.001)


@pytest.mark.parametrize(("name", "rows"), [("ppo", 8), ("rloo", 16)])
def test_trl_uses_the_token_limit_on_a_gpu_and_whole_mini_batches_on_a_cpu(name: str, rows: int) -> None:
    config = load_config(GPU / f"{name}.yaml")
    assert trl_training._rows(config) == rows
    assert trl_training._rows(load_config(GPU / f"{name}.yaml", ["services.actor.devices=[]"])) == 128


def test_tables_begin_with_their_machine() -> None:
    description = machine.describe()
    changes = precision.WeightChanges(1e-5, 1.0, 0.9, 0.25, 0.5)
    speed = end_to_end.Speed(2.0, 20.0, 1.0, 0.0)
    half = precision.Result(
        "small", 4, 8, {"float32": [10, 10], "bfloat16": [15, 25]}, {"float32": [2], "bfloat16": [1]}
    )
    tables = [
        generation.table(
            [generation.Result(1, {name: [1.0] for name in generation.CONTENDERS}, 4.0)], 8, 1, 1e9, description
        ),
        update.table([update.Result("policy", 8, 4, 1e9, [1.0], [2.0])], 1e10, "bfloat16", 1, description),
        end_to_end.table({"ppo.yaml": [end_to_end.Pair(speed, speed)]}, 4, "bfloat16", description),
        precision.table([half], [changes], {"float32": 1e11, "bfloat16": 4e11}, 1, description),
    ]
    assert all(text.startswith(f"{description}. ") for text in tables)
    assert "| policy | 8 | 4 | 2.000 | 1.000 | **2.00** (2.00 to 2.00) | 10 % |" in tables[1]
    assert "| small | generation, 4 x 8 tokens, tokens/s | 10 | 20 | **2.00** (1.50 to 2.50) |" in tables[3]
    assert tables[3].endswith("| 1e-05 | 100.0 % | 90.0 % | 25.0 % | 0.50 |")
    assert "| small | update, seconds | 2.00 | 1.00 | **2.00** (2.00 to 2.00) |" in tables[3]


def test_experience_has_the_maximum_length_on_request(tmp_path: Path) -> None:
    random_models.main([str(tmp_path), "--layers", "1", "--vocabulary", "300"])
    small = [f"actor.model={tmp_path}/policy", "rollout.prompts_per_step=3", "rollout.max_response_tokens=4"]
    config = load_config(GPU / "ppo.yaml", small)
    batch = update.policy_update_of(config, "cpu", full=True).experience.batch
    assert batch.prompt_lengths.tolist() == [128] * 3
    assert batch.response_lengths.tolist() == [4] * 3


def test_growth_is_relative_to_proportional_growth() -> None:
    def result(seconds: float, parameters: int, **point: int) -> growth.Result:
        return growth.Result(growth.Point(**point), parameters, dict.fromkeys(growth.PHASES, seconds))

    first, later = result(2.0, 10, prompts=16, tokens=32), result(12.0, 40, prompts=64, tokens=32)
    assert (first.growth(first, "prompts", "step"), later.growth(first, "prompts", "step")) == (1.0, 1.5)
    assert later.growth(first, "model", "step") == 1.5
    assert first.rate("step") == 256


def test_a_step_of_the_growth_curve_has_phases() -> None:
    seconds = growth.measure(growth.Point(prompts=2, tokens=2), rounds=1).seconds
    assert seconds["step"] >= seconds["generation"] + seconds["update"] > 0


def test_the_table_of_the_start_compares_medians() -> None:
    results = [
        startup.Result(name, {"dashboard": factor * seconds, "first step": 2.0}, 3.0, 4.0, 500.0)
        for seconds in (1.0, 2.0, 6.0)
        for name, factor in (("this checkout", 1), ("compared", 3))
    ]
    text = startup.table(results, "a machine")
    assert text.startswith("3 runs each, a machine: ")
    assert "| seconds to the dashboard | 2.0 (1.0 to 6.0) | 6.0 (3.0 to 18.0) |" in text
    assert "| memory in MiB | 500 (500 to 500) | 500 (500 to 500) |" in text


def test_the_source_of_weights_says_what_it_has_published() -> None:
    source = weights.Source()
    try:
        first, second = source.start("BF16", 0, 1_000_000), source.step(1, 1e-3)
    finally:
        source._server.stop(0.0)
        source._source.close()
    assert (first["version"], second["version"], second["total_bytes"]) == (0, 1, 2_000_000)
    assert first["digest"] != second["digest"]


def test_the_mfu_of_a_run_is_compared_with_that_of_the_benchmark() -> None:
    results = [update.Result(name, 10, 5, 2e9, [0.1, 0.2, 0.3], []) for name in ("policy", "critic")]
    steps = [{"mfu_actor": 0.11, "mfu_critic": value} for value in (0.05, 0.09, 0.2)]
    assert update.beside(results, 1e11, steps) == [
        "policy: MFU 0.100, of the run 0.110, which is 1.10 times as much",
        "critic: MFU 0.100, of the run 0.090, which is 0.90 times as much",
    ]


def test_router_replay_is_measured_with_the_metrics_of_an_update() -> None:
    model, requests = tiny.causal("qwen3_moe"), tiny.requests(4)
    result = tiny.generated(TorchEngine(model, frozenset(), 4, routed_experts=True), requests)
    assert router_replay.other_experts(model, result)[:2] == (0, 0)
    others = [replace(item, routed_experts=_next_experts(item.routed_experts)) for item in result]
    choices, affected, tokens = router_replay.other_experts(model, others)
    assert 0 < choices <= affected == 1
    assert tokens == sum(len(item.prompt_ids) + len(item.response_ids) - 1 for item in result)
    for replays, low in ((False, True), (True, False)):
        mismatch = router_replay.metrics(model, others, replays)["rollout_mismatch_kl"]
        assert (mismatch < 1e-6) is low


def _next_experts(experts: Any) -> Any:
    return (experts + 1) % 4
