"""Evaluation with real services. Its metrics match those of direct requests and of ``quartet evaluate``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quartet.buffer.connection import Redis
from quartet.buffer.rollout_stream import RolloutStream
from quartet.cli.inference.evaluate import compare_with_initial
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.contract.trajectory import FinishReason, TokenBatch, Trajectory
from quartet.data.evaluation import greedy_sampling, read_validation_prompts, run_sampling, stream_name
from quartet.data.evaluation_sets import read_evaluation_sets
from quartet.errors import ComputationFailed, ConfigError, FailedPrecondition
from quartet.rpc.clients import GenerationClient
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.step_lines import read_step_lines
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.rollout.evaluation import Evaluator
from quartet.services.orchestrator.rollout.generation import ActorGeneration, RepeatabilityNotes
from quartet.services.orchestrator.rollout.scoring import ScoringServices
from quartet.services.orchestrator.telemetry.step_profiler import ignore_call
from tests.buffer.samples import trajectory
from tests.services.model_services import Services, replicas_of, save_checkpoint, start_generation
from tests.unit.models import tiny

PROMPTS = [{"text": f"w{30 + index} w{5 + index % 4} w7", "answer": index / 8} for index in range(9)]
NUM_PROMPTS = 7
STEP = 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a policy that differs from the initial one."""
    return save_checkpoint(tiny.causal("llama", seed=11), tmp_path_factory.mktemp("trained") / "policy")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with validation prompts and user functions."""
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    (tmp_path / "mine.py").write_text(
        "def answer(prompt, response, fields):\n    return fields['answer']\n"
        "def longer(prompt, response, initial_response, fields):\n    return float(len(response) > len(initial_response))\n"
        "def length(prompt, response, fields):\n    return float(len(response) % 2)\n"
        "def first_word(prompt, response, fields):\n    return (response.split() or [None])[0]\n"
        "def failing(*_):\n    raise KeyError('no judge')\n"
        "def hanging(*_):\n    import time\n    time.sleep(600)\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


Configure = Callable[..., Config]


@pytest.fixture
def configure(folder: Path, make_config: Configure, request: pytest.FixtureRequest) -> Configure:
    """Factory of configs of a run with evaluations and the name of the test."""
    name = request.node.name.partition("[")[0][:60]

    def configured(**sections: Any) -> Config:
        return make_config(
            **{
                "run": {"directory": folder / "runs", "name": name, "seed": 3},
                "data": {"prompts": "none.jsonl", "validation": folder / "validation.jsonl"},
                "rollout": {
                    "max_response_tokens": 9,
                    "temperature": 0.8,
                    "max_concurrent_sequences": 4,
                    "score_batch_size": 3,
                },
                "evaluation": {"every_steps": STEP, "max_prompts": NUM_PROMPTS},
                **sections,
            }
        )

    return configured


Build = Callable[..., Evaluator]


@pytest.fixture
def build(services: Services, clients: dict[Role, Any], redis_client: Redis, redis_url: str) -> Iterator[Build]:
    """Factory of evaluators. It uses the services of the session by default."""
    with ExitStack() as stack:

        def build_evaluator(config: Config, actor: Any = None, reward: Any = None) -> Evaluator:
            validation = config.data.validation is not None
            prompts = read_validation_prompts(config, tiny.tokenizer, tiny.VOCABULARY).prompts if validation else []
            scoring = ScoringServices(
                replicas_of(reward or clients[Role.REWARD]),
                replicas_of(clients[Role.REFERENCE]),
                None,
                config.rollout.temperature,
            )
            files = RunFiles(config.run_directory)
            files.root.mkdir(parents=True, exist_ok=True)
            actor = actor or clients[Role.ACTOR]
            client = GenerationClient(actor.channel.address, actor.timeouts, role=Role.ACTOR)
            run: Any = SimpleNamespace(
                config=config,
                files=files,
                redis=redis_client,
                url=redis_url,
                generation=ActorGeneration(client, actor, False, ignore_call, RepeatabilityNotes(config, print)),
                clients=SimpleNamespace(scoring=lambda for_training: scoring),
                live_settings=SimpleNamespace(config_at=lambda _: config),
                board=ProgressBoard(config.run.name, config.run.steps),
                telemetry=None,
            )
            sets = [each.prompts for each in read_evaluation_sets(config, tiny.tokenizer, tiny.VOCABULARY)]
            evaluator = Evaluator(run, prompts, tiny.tokenizer(), sets)
            stack.callback(evaluator.close)
            return evaluator

        yield build_evaluator


def stream_of(config: Config, client: Redis, url: str) -> RolloutStream:
    return RolloutStream(client, url, stream_name(config.run.name))


def actor_of(services: Services, checkpoint: Path, config: Config) -> Any:
    """Start an actor service with this checkpoint as policy version 0."""
    tree = config.actor.model_copy(update={"model": str(checkpoint)})
    return services.start(Role.ACTOR, config.model_copy(update={"actor": tree}))


def rows_of(config: Config, step: int) -> list[dict[str, Any]]:
    return RunFiles(config.run_directory).read_evaluation(step)


def request_directly(
    clients: dict[Role, Any], actor: Any, stream: RolloutStream, config: Config, greedy: bool
) -> tuple[list[Trajectory], Any, Any]:
    """Request trajectories, scores and reference log-probs of the validation prompts from each service."""
    stream.reset()
    prompts = read_validation_prompts(config, tiny.tokenizer, tiny.VOCABULARY).prompts
    sampling = (greedy_sampling if greedy else run_sampling)(config.rollout)
    run = stream.key.removeprefix("quartet:").removesuffix(":rollouts")
    start_generation(actor, run, prompts, sampling, step=0, seed=config.run.seed).result()
    result = sorted((item.trajectory for item in stream.read(100, 0.1)), key=lambda item: item.id)
    batch = TokenBatch.of(result)
    scores = clients[Role.REWARD].score(batch).result().total
    reference = clients[Role.REFERENCE].log_probs(batch, config.rollout.temperature).result()
    return result, scores, reference


def test_evaluation_metrics_match_direct_requests_to_the_services(
    services: Services,
    clients: dict[Role, Any],
    build: Build,
    configure: Configure,
    trained: Path,
    redis_client: Redis,
    redis_url: str,
) -> None:
    config, counts = configure(), []
    actor = actor_of(services, trained, config)
    summary = build(config, actor).evaluate(0, 0, 1, counts.append)
    stream = RolloutStream(redis_client, redis_url, f"{config.run.name}:direct")
    greedy, greedy_scores, _ = request_directly(clients, actor, stream, config, greedy=True)
    sampled, scores, reference = request_directly(clients, actor, stream, config, greedy=False)
    log_probs = np.concatenate([item.log_probs for item in sampled]).astype(np.float64)
    ends = np.cumsum([len(item.response_ids) for item in sampled])[:-1]
    kl = np.array([part.sum() for part in np.split(log_probs - reference, ends)])
    lengths = {kind: [len(item.response_ids) for item in result] for kind, result in (("g", greedy), ("s", sampled))}
    assert [len(greedy), counts[-1]] == [NUM_PROMPTS, 2 * NUM_PROMPTS]
    assert summary == pytest.approx(
        {
            "eval_reward_greedy": greedy_scores.mean(dtype=np.float64),
            "eval_reward_sampled": scores.mean(dtype=np.float64),
            "eval_kl": kl.mean(),
            "eval_tokens_greedy": np.mean(lengths["g"]),
            "eval_tokens_sampled": np.mean(lengths["s"]),
            "eval_eos_rate": np.mean([item.finish_reason is FinishReason.EOS for item in sampled]),
            "eval_win_rate_greedy": 0.5,
            "eval_win_rate_sampled": 0.5,
        },
        abs=1e-5,
    )
    assert [item.response_ids.tolist() for item in greedy] != [item.response_ids.tolist() for item in sampled]
    rows = rows_of(config, 0)
    assert abs(kl.mean()) > 0.1
    assert [item["kl"] for item in rows] == pytest.approx(kl, abs=1e-5)
    texts = tiny.tokenizer().batch_decode([item.response_ids for item in sampled], skip_special_tokens=True)
    assert [(item["index"], item["sampled"]) for item in rows] == list(enumerate(texts))
    assert [item["prompt"] for item in rows] == [prompt["text"] for prompt in PROMPTS[:NUM_PROMPTS]]
    assert "answer" not in rows[0]


def test_a_later_policy_is_compared_with_the_first_evaluation_also_after_a_restart(
    services: Services, build: Build, configure: Configure, trained: Path
) -> None:
    config = configure()
    first = build(config)
    first.evaluate(0, 0, 1)
    initial = rows_of(config, 0)
    later_actor = actor_of(services, trained, config)
    after = build(config, actor=later_actor).evaluate(STEP, 0, 1)
    rows = rows_of(config, STEP)
    for kind in ("greedy", "sampled"):
        assert [item[f"initial_{kind}"] for item in rows] == [item[kind] for item in initial]
        before = [item[f"score_{kind}"] for item in initial]
        differences = np.array([item[f"score_{kind}"] for item in rows]) - np.array(before)
        assert after[f"eval_win_rate_{kind}"] == ((np.sign(differences) + 1) / 2).mean()
        assert differences.any()
    assert after["eval_kl"] > 0.1
    lines = read_step_lines(config.run_directory / "evaluations.jsonl")
    assert [line.pop("step") for line in lines] == [0, STEP]
    assert lines[1] == {"policy_version": 0, **after}


def test_quartet_evaluate_gives_the_same_rows(
    services: Services, build: Build, configure: Configure, trained: Path
) -> None:
    config = configure(evaluation={"every_steps": 1, "max_prompts": NUM_PROMPTS, "judge": "mine:longer"})
    build(config).evaluate(0, 0, 1)
    summary = build(config, actor=actor_of(services, trained, config)).evaluate(STEP, 0, 1)
    result = compare_with_initial(str(trained), config, "cpu")
    assert [{"policy_version": 0} | item for item in result.rows()] == rows_of(config, STEP)
    assert result.policy_metrics() == summary
    assert result.notes == []


SETS = [
    {"name": "long", "path": "validation.jsonl", "samples_per_prompt": 4, "pass_at": [1, 3], "max_prompts": 5},
    {"name": "votes", "path": "validation.jsonl", "samples_per_prompt": 3, "maj_at": [3], "answer": "mine:first_word"},
]
LENGTH = {"source": "function", "function": "mine:length", "tokenizer": None}


def set_rows(config: Config, name: str, step: int = 0) -> list[dict[str, Any]]:
    path = RunFiles(config.run_directory).evaluation_of(step, name)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_evaluation_set_has_samples_and_metrics_of_its_own(
    services: Services, build: Build, configure: Configure, trained: Path
) -> None:
    config = configure(
        evaluation={"every_steps": 1, "max_prompts": NUM_PROMPTS, "sets": SETS},
        reward=LENGTH,
        rollout={"max_response_tokens": 9, "max_concurrent_sequences": 8, "score_batch_size": 3},
    )
    counts: list[int] = []
    reward = services.start(Role.REWARD, config)
    summary = build(config, reward=reward).evaluate(0, 0, 1, counts.append)
    assert counts[-1] == 2 * NUM_PROMPTS + 4 * 5 + 3 * NUM_PROMPTS
    long, votes = set_rows(config, "long"), set_rows(config, "votes")
    assert [len(long), len(votes)] == [5, NUM_PROMPTS]
    for rows, samples in ((long, 4), (votes, 3)):
        for number, item in enumerate(rows):
            assert (item["index"], item["policy_version"], item["prompt"]) == (number, 0, PROMPTS[number]["text"])
            scores = [sample["score"] for sample in item["samples"]]
            assert scores == [len(sample["response"]) % 2 for sample in item["samples"]]
            assert (len(scores), item["successes"]) == (samples, sum(scores))
    assert len({sample["response"] for item in long for sample in item["samples"]}) > 5
    # Of 4 samples with c successes, C(4 - c, 3) of the 4 choices of 3 have none.
    without = [{0: 1, 1: 1 / 4}.get(item["successes"], 0) for item in long]
    assert summary["eval_long_pass_at_1"] == pytest.approx(np.mean([item["successes"] / 4 for item in long]))
    assert summary["eval_long_pass_at_3"] == pytest.approx(1 - np.mean(without))
    assert 0 < summary["eval_long_pass_at_1"] < summary["eval_long_pass_at_3"]
    assert summary["eval_long_reward_mean"] == pytest.approx(summary["eval_long_pass_at_1"])
    won = []
    for item in votes:
        answers = [sample["answer"] for sample in item["samples"]]
        assert answers == [sample["response"].split()[0] for sample in item["samples"]]
        winner = max(dict.fromkeys(answers), key=answers.count)
        won.append(item["samples"][answers.index(winner)]["score"])
    assert summary["eval_votes_maj_at_3"] == pytest.approx(np.mean(won))
    tokens = [sample["tokens"] for item in votes for sample in item["samples"]]
    assert summary["eval_votes_tokens_mean"] == np.mean(tokens)
    local = compare_with_initial(config.actor.model, config, "cpu")
    assert local.policy_metrics() == summary
    of_sets = [item for item in local.rows() if "prompt_set" in item]
    assert [{"policy_version": 0} | item for item in of_sets] == [
        {"prompt_set": name} | item for name, rows in (("long", long), ("votes", votes)) for item in rows
    ]


def test_sets_need_no_validation_prompts_and_take_the_threshold_of_their_config(
    services: Services, build: Build, configure: Configure
) -> None:
    low = [{**SETS[0], "success_score": 0.0}]
    config = configure(data={"prompts": "none.jsonl"}, evaluation={"every_steps": 1, "sets": low}, reward=LENGTH)
    evaluator = build(config, reward=services.start(Role.REWARD, config))
    for step in (0, STEP):
        summary = evaluator.evaluate(step, 0, 1)
        assert (summary["eval_long_pass_at_1"], summary["eval_long_pass_at_3"]) == (1.0, 1.0)
        assert not any(name.endswith(("greedy", "sampled")) for name in summary)
        assert rows_of(config, step) == []
    assert set_rows(config, "long") == set_rows(config, "long", STEP)


def test_an_answer_that_is_no_text_fails_the_evaluation(build: Build, configure: Configure) -> None:
    wrong = [{**SETS[1], "answer": "mine:length"}]
    config = configure(evaluation={"every_steps": 1, "max_prompts": NUM_PROMPTS, "sets": wrong})
    message = r"evaluation\.sets\.votes\.answer mine:length, prompt 1: returned a float, expected a text, or None"
    with pytest.raises(ComputationFailed, match=message):
        build(config).evaluate(0, 0, 1)
    with pytest.raises(ConfigError, match=r"evaluation\.sets\.votes\.answer mine:absent"):
        build(configure(evaluation={"every_steps": 1, "sets": [{**SETS[1], "answer": "mine:absent"}]}))


def test_every_evaluation_uses_the_same_random_numbers(build: Build, configure: Configure) -> None:
    config = configure()
    evaluator = build(config)
    assert evaluator.evaluate(0, 0, 1) == evaluator.evaluate(STEP, 0, 1) == evaluator.evaluate(2 * STEP, 0, 1)
    assert rows_of(config, 0) == rows_of(config, 2 * STEP)


@pytest.mark.parametrize("change", [{"temperature": 0.3}, {"top_k": 1}, {"max_response_tokens": 2}])
def test_sampled_responses_are_drawn_with_the_runs_settings(
    change: dict[str, Any], build: Build, configure: Configure
) -> None:
    default = configure()
    build(default).evaluate(0, 0, 1)
    before = rows_of(default, 0)
    changed = configure(rollout={**default.rollout.model_dump(), **change})
    build(changed).evaluate(0, 0, 1)
    assert [item["sampled"] for item in rows_of(changed, 0)] != [item["sampled"] for item in before]
    if "max_response_tokens" not in change:
        assert [item["greedy"] for item in rows_of(changed, 0)] == [item["greedy"] for item in before]


def test_an_evaluation_uses_its_own_stream_and_drops_earlier_entries(
    build: Build, configure: Configure, redis_client: Redis, redis_url: str
) -> None:
    config = configure()
    training = RolloutStream(redis_client, redis_url, config.run.name)
    training.reset()
    training.append([trajectory(config.run.name, 1)])
    evaluation_stream = stream_of(config, redis_client, redis_url)
    evaluation_stream.reset()
    evaluation_stream.append([trajectory(stream_name(config.run.name), 1)])
    build(config).evaluate(0, 0, 1)
    assert (training.depth(), evaluation_stream.depth()) == (1, 0)


def test_functions_receive_the_fields_of_their_prompt(services: Services, build: Build, configure: Configure) -> None:
    config = configure(reward={"source": "function", "function": "mine:answer", "tokenizer": None})
    reward = services.start(Role.REWARD, config)
    summary = build(config, reward=reward).evaluate(0, 0, 1)
    expected = [prompt["answer"] for prompt in PROMPTS[:NUM_PROMPTS]]
    assert [item["score_greedy"] for item in rows_of(config, 0)] == expected
    assert summary["eval_reward_sampled"] == pytest.approx(np.mean(expected))
    result = compare_with_initial(config.actor.model, config, "cpu")
    assert [item.policy.sampled.score for item in result.comparisons] == expected


def test_a_judge_compares_sampled_responses_with_the_initial_ones(
    services: Services, build: Build, configure: Configure, trained: Path
) -> None:
    config = configure(evaluation={"every_steps": 1, "max_prompts": NUM_PROMPTS, "judge": "mine:longer"})
    assert build(config).evaluate(0, 0, 1)["eval_judge_win_rate"] == 0.5
    after = build(config, actor=actor_of(services, trained, config)).evaluate(STEP, 0, 1)
    rows = rows_of(config, STEP)
    expected = [
        0.5
        if item["sampled"] == item["initial_sampled"]
        else float(len(item["sampled"]) > len(item["initial_sampled"]))
        for item in rows
    ]
    assert [item["judge"] for item in rows] == expected
    assert len(set(expected)) > 1
    assert after["eval_judge_win_rate"] == np.mean(expected)


def test_a_failed_evaluation_is_raised_and_leaves_no_file(
    services: Services, build: Build, configure: Configure, trained: Path
) -> None:
    config = configure(evaluation={"every_steps": 1, "max_prompts": NUM_PROMPTS, "judge": "mine:failing"})
    with pytest.raises(ConfigError, match=r"step-000000\.jsonl: cannot be read"):
        build(config).evaluate(STEP, 0, 1)
    with pytest.raises(FailedPrecondition, match="policy version 3"):
        build(config).evaluate(0, 3, 1)
    build(config).evaluate(0, 0, 1)
    with pytest.raises(ComputationFailed, match=r"evaluation\.judge mine:failing raised KeyError at"):
        build(config, actor=actor_of(services, trained, config)).evaluate(STEP, 0, 1)
    slow = configure(
        evaluation={"every_steps": 1, "max_prompts": NUM_PROMPTS, "judge": "mine:hanging", "timeout_seconds": 0.25}
    )
    with pytest.raises(ComputationFailed, match=r"mine:hanging, prompt 1: took longer than 0\.25 s"):
        build(slow, actor=actor_of(services, trained, slow)).evaluate(STEP, 0, 1)
    assert len(read_step_lines(config.run_directory / "evaluations.jsonl")) == 1
    assert [path.name for path in (config.run_directory / "evaluations").iterdir()] == ["step-000000.jsonl"]


def test_a_judge_that_cannot_be_imported_is_refused_before_generation(build: Build, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.judge mine:absent"):
        build(configure(evaluation={"every_steps": 1, "judge": "mine:absent"}))


def test_evaluations_run_before_the_first_step_at_the_interval_and_after_the_last(
    build: Build, configure: Configure
) -> None:
    regular = build(configure())
    assert [step for step in range(14) if regular.is_due(step, last=step == 13)] == [0, 5, 10, 13]
    never = build(configure(evaluation={"every_steps": 0, "judge": "mine:absent"}))
    assert not any(never.is_due(step, last=True) for step in range(14))
