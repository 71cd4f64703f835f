"""Properties that the clients of all HTTP servers share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from quartet.contract.generation import EpisodeSettings, GenerationBatch, GenerationRequest, SamplingParameters
from quartet.contract.trajectory import Trajectory, TrajectoryId
from quartet.engines.engine import EngineResponse, TurnEngine, TurnSource
from quartet.engines.request_checks import check_response
from quartet.engines.server_engine import ServerEngine
from quartet.errors import InvalidRequest
from quartet.services.generator.episodes import EnvironmentAccess, generate_episodes
from tests.engines.http_servers import KEY, connect_sglang, connect_vllm
from tests.engines.remote_policy import EOS, POSITIONS, VOCABULARY, greedy, policy, requests, run, tokens, weight_set
from tests.engines.sglang_server import Launch, SGLangServer
from tests.every_case import every_case
from tests.services.generator.environments import EchoEnvironment

ENGINES = ("vllm", "sglang", "sglang-incremental")


@pytest.fixture(params=ENGINES, scope="module")
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, sglang_checkpoint: Path
) -> Iterator[ServerEngine]:
    """Return a client of each server in turn. It holds policy(1), and no test changes that."""
    server = None
    result: ServerEngine
    if request.param == "vllm":
        result = connect_vllm(request.getfixturevalue("vllm_server"))
    else:
        launch = Launch(
            sglang_checkpoint,
            api_key=KEY,
            enable_deterministic_inference=True,
            incremental_streaming_output=request.param == "sglang-incremental",
        )
        server = SGLangServer(launch)
        server.start()
        result = connect_sglang(server, tmp_path_factory.mktemp("client"))
    weights = weight_set(policy(1))
    result.load_weights(weights, weights.tensors)
    yield result
    result.close()
    if server is not None:
        server.stop()


@pytest.fixture(scope="module")
def greedy_responses() -> list[list[int]]:
    """The greedy responses of policy(1), longer than one event. Some end early."""
    result = greedy(policy(1), requests(6), 40)
    assert len({len(response) for response in result}) > 1
    assert result != greedy(policy(0), requests(6), 40)
    return result


def test_greedy_responses_are_those_of_the_loaded_weights(
    engine: ServerEngine, greedy_responses: list[list[int]]
) -> None:
    assert tokens(run(engine, requests(6), temperature=0.0, max_response_tokens=40)) == greedy_responses


def test_responses_depend_on_the_seed_and_not_on_the_batch(engine: ServerEngine) -> None:
    assert engine.properties.seeded
    # A vLLM server promises it with VLLM_BATCH_INVARIANT only.
    assert engine.properties.batch_invariant == (engine.properties.name == "sglang-server")
    batch = requests(6)
    first = tokens(run(engine, batch))
    assert tokens(run(engine, batch)) == first
    assert tokens(run(engine, batch[3:5])) == first[3:5]
    assert tokens(run(engine, batch, seed=1)) != first
    other = [GenerationRequest(TrajectoryId("run", 0, each.id.prompt, 1), each.prompt_ids) for each in batch]
    assert tokens(run(engine, other)) != first


def test_a_response_ends_with_its_stop_token_or_at_the_limit(engine: ServerEngine) -> None:
    for response in run(engine, requests(20), max_response_tokens=8, temperature=1.0):
        stops = [index for index, token in enumerate(response.token_ids) if token == EOS]
        assert stops == ([len(response.token_ids) - 1] if stops else [])
        assert stops or len(response.token_ids) == 8
    assert {len(ids) for ids in tokens(run(engine, requests(12), ignore_eos=True))} == {12}


def test_the_engine_works_after_a_caller_stops_reading(engine: ServerEngine) -> None:
    running = engine.generate(requests(8), SamplingParameters(20), 0, lambda: False)
    next(running)
    getattr(running, "close")()  # noqa: B009
    assert len(run(engine, requests(4))) == 4


@every_case(
    ("prompt", "limit", "message"),
    [
        ([3] * (POSITIONS - 5), 10, f"positions for {POSITIONS}"),
        ([], 5, "at least one token"),
        ([3, VOCABULARY], 5, "vocabulary"),
        ([-1], 5, "vocabulary"),
        ([3], 0, "max_response_tokens"),
    ],
)
def test_an_invalid_request_is_refused_at_the_call(
    engine: ServerEngine, prompt: list[int], limit: int, message: str
) -> None:
    batch = [GenerationRequest(TrajectoryId("r", 0, 0, 0), np.array(prompt, np.int32))]
    with pytest.raises(InvalidRequest, match=message):
        engine.generate(batch, SamplingParameters(limit), 0, lambda: False)


def test_no_requests_give_no_responses(engine: ServerEngine) -> None:
    assert run(engine, []) == []


@pytest.mark.parametrize("open_episodes", [2, 20])
def test_episodes_take_turns_while_the_server_generates_others(engine: ServerEngine, open_episodes: int) -> None:
    """Greedy, because a vLLM server promises the same draws only for the same batch."""
    prompts = requests(6)
    batch = GenerationBatch(
        "run", 0, 1, prompts, SamplingParameters(24, temperature=0.0), 5, 0, episode=EpisodeSettings(3, 5)
    )

    def generate(turns: Sequence[GenerationRequest]) -> Iterator[Trajectory]:
        return map(checked, engine.generate(turns, batch.sampling, batch.seed, lambda: False))

    def generate_turns(prompts: Sequence[GenerationRequest], turns: TurnSource) -> Iterator[Trajectory]:
        return map(checked, engine.generate_turns(prompts, batch.sampling, batch.seed, lambda: False, turns))

    def checked(response: EngineResponse) -> Trajectory:
        return check_response(response, engine.model, batch.sampling, 0, "server")

    def play(continuous: bool) -> list[list[list[int]]]:
        finished = list[Trajectory]()
        access = EnvironmentAccess(EchoEnvironment(turns=3, tokens=2), open_episodes)
        generate_episodes(
            access,
            batch,
            prompts,
            VOCABULARY,
            generate,
            generate_turns if continuous else None,
            finished.append,
            lambda: False,
        )
        ordered = sorted(finished, key=lambda item: item.id)
        return [[segment.token_ids.tolist() for segment in item.segments] for item in ordered]

    assert isinstance(engine, TurnEngine)
    result = play(continuous=True)
    assert result == play(continuous=False)
    assert {len(segments) for segments in result} == {6}
