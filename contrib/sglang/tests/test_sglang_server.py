"""The client of an SGLang server, against a server with the published interface of SGLang 0.5.23."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from quartet.contract.generation import SamplingParameters
from quartet.contrib.sglang.engine import SGLangServerEngine
from quartet.errors import (
    AccessRefused,
    Cancelled,
    ConfigError,
    InvalidRequest,
    MismatchError,
    ServiceFailed,
    ServiceUnavailable,
)
from tests.engines.faulty_proxy import Fault, proxy
from tests.engines.http_servers import KEY, connect_sglang
from tests.engines.remote_policy import (
    EOS,
    adapted,
    change_adapter,
    greedy,
    log_probs,
    policy,
    requests,
    run,
    tokens,
    weight_set,
)
from tests.engines.sglang_server import Launch, SGLangServer
from tests.waiting import wait_until


@pytest.fixture
def server(request: pytest.FixtureRequest, sglang_checkpoint: Path) -> Iterator[SGLangServer]:
    """Start a server, by default with seeds. A test's parameters change its arguments."""
    arguments = {"enable_deterministic_inference": True, "enable_lora": True, **getattr(request, "param", {})}
    result = SGLangServer(Launch(sglang_checkpoint, api_key=KEY, **arguments))
    result.start()
    yield result
    result.stop()


@pytest.fixture
def engine(server: SGLangServer, tmp_path: Path) -> Iterator[SGLangServerEngine]:
    """Return an engine that holds policy(1)."""
    result = connect_sglang(server, tmp_path)
    weights = weight_set(policy(1))
    result.load_weights(weights, weights.tensors)
    yield result
    result.close()


def test_log_probs_are_those_of_the_whole_distribution_at_the_temperature(engine: SGLangServerEngine) -> None:
    for sampling in ({"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}):
        for response in run(engine, requests(4), **sampling):
            assert response.log_probs is not None
            expected = log_probs(policy(1), response, sampling.get("temperature", 0.8) or 1.0)
            assert np.allclose(response.log_probs, expected, atol=1e-3)


@pytest.mark.parametrize("server", [{"enable_deterministic_inference": False}], indirect=True)
def test_without_deterministic_inference_the_engine_declares_no_seeds(engine: SGLangServerEngine) -> None:
    assert not engine.properties.seeded
    assert not engine.properties.batch_invariant
    batch = requests(6)
    assert tokens(run(engine, batch)) != tokens(run(engine, batch))  # the server ignores seeds


def test_a_stop_token_of_the_checkpoint_only_is_reported(server: SGLangServer, engine: SGLangServerEngine) -> None:
    first = greedy(policy(1), requests(1))[0][0]
    server.state.model.config.eos_token_id = first
    with pytest.raises(
        ServiceFailed, match=f"stopped at token {first}, which is a stop token of the served checkpoint"
    ):
        run(engine, requests(1), temperature=0.0)


def test_new_weights_flush_the_prefix_cache(server: SGLangServer, engine: SGLangServerEngine, tmp_path: Path) -> None:
    batch = requests(6, length=60)

    def without_salt() -> list[list[int]]:
        return [
            post(
                server,
                "/generate",
                input_ids=request.prompt_ids.tolist(),
                sampling_params={"temperature": 0, "max_new_tokens": 12, "stop_token_ids": [EOS]},
            )["output_ids"]
            for request in batch
        ]

    assert without_salt() == greedy(policy(1), batch)
    policy(2).save_pretrained(tmp_path / "other")
    post(server, "/update_weights_from_disk", model_path=str(tmp_path / "other"), flush_cache=False)
    expected = greedy(policy(2), batch)
    assert without_salt() != expected  # the flush was forgotten
    weights = weight_set(policy(2))
    engine.load_weights(weights, weights.tensors)
    assert without_salt() == expected
    assert tokens(run(engine, batch, temperature=0.0)) == expected


def post(server: SGLangServer, path: str, **body: Any) -> Any:
    """Call the server as another client does."""
    headers = {"Authorization": f"Bearer {KEY}"}
    response = httpx2.post(server.url + path, json=body, headers=headers, timeout=20, trust_env=False)
    assert response.is_success, response.text
    return response.json() if response.content else None


def test_adapters_are_loaded_by_their_digest(server: SGLangServer, tmp_path: Path) -> None:
    engine, model = connect_sglang(server, tmp_path, weights="lora"), adapted(policy(0), seed=5)
    assert engine.properties.weights == "adapter"
    batch = requests(6)
    for seed in (5, 6):
        change_adapter(model, seed)
        weights = weight_set(model)
        engine.load_weights(weights, weights.tensors)
        expected = greedy(model, batch)
        assert tokens(run(engine, batch, temperature=0.0)) == expected
        assert expected != greedy(policy(0), batch)
    assert list(server.state.adapters) == [f"quartet-{weights.digest.hex()}"]
    server.state.adapters.clear()  # as after a restart
    with pytest.raises(ServiceFailed, match="never been loaded"):
        run(engine, batch)
    engine.close()


def test_the_engine_works_after_a_cancelled_generation(server: SGLangServer, engine: SGLangServerEngine) -> None:
    before = server.state.tokens
    with pytest.raises(Cancelled):
        list(
            engine.generate(
                requests(8), SamplingParameters(1900, ignore_eos=True), 0, lambda: server.state.tokens > before
            )
        )
    wait_until(lambda: not server.state.running)
    assert server.state.tokens < before + 8 * 1900
    assert len(run(engine, requests(4))) == 4


def test_an_update_ends_the_requests_of_other_clients(
    server: SGLangServer, engine: SGLangServerEngine, tmp_path: Path
) -> None:
    other, same = connect_sglang(server, tmp_path), weight_set(policy(1))
    other.load_weights(same, same.tensors)

    def update() -> bool:
        if server.state.running and server.state.resumed.is_set():
            weights = weight_set(policy(2))
            engine.load_weights(weights, weights.tensors)
        return False

    with pytest.raises(ServiceFailed, match="ended by the server with reason 'abort'"):
        list(other.generate(requests(2), SamplingParameters(1900, ignore_eos=True), 0, update))
    other.close()


class Update:
    """A poll of a caller that loads policy(2) as version 2 when the server has made some tokens."""

    def __init__(self, server: SGLangServer, engine: SGLangServerEngine, after: int = 100) -> None:
        self._state, self._engine = server.state, engine
        self._after, self._done = server.state.tokens + after, False
        self.weights = weight_set(policy(2), version=2)

    def __call__(self) -> bool:
        if self._state.tokens >= self._after and not self._done:
            self._done = True
            self._engine.load_weights(self.weights, self.weights.tensors)
        return False


@pytest.mark.parametrize("server", [{}, {"incremental_streaming_output": True}], indirect=True)
def test_in_flight_updates_change_the_weights_in_the_middle_of_a_response(
    server: SGLangServer, engine: SGLangServerEngine
) -> None:
    assert engine.properties.in_flight_updates
    batch, update = requests(2, length=40), Update(server, engine)
    sampling = SamplingParameters(150, temperature=0.0, ignore_eos=True)
    former, newer = policy(1), policy(2)
    for response in engine.generate(batch, sampling, 0, update):
        first, second = response.spans
        assert (first.policy_version, first.weights_digest) == (1, weight_set(former).digest)
        assert (second.policy_version, second.weights_digest) == (2, update.weights.digest)
        assert first.tokens + second.tokens == len(response.token_ids) == 150
        ids = torch.tensor([response.request.prompt_ids.tolist() + list(response.token_ids)])
        begin = 40 + first.tokens - 1
        with torch.no_grad():
            logits = former(ids[:, :begin]).logits[0, 39:]
            cache = former(ids[:, :begin], use_cache=True).past_key_values
            continued = newer(ids[:, begin:-1], past_key_values=cache).logits[0]
        # Token by token, the weights change where the spans say.
        assert torch.cat([logits, continued]).argmax(-1).tolist() == list(response.token_ids)
    # The prompts of the next generation are computed by the new weights.
    assert tokens(run(engine, batch, temperature=0.0)) == greedy(newer, batch)


def test_an_update_in_flight_that_fails_ends_the_generation(server: SGLangServer, tmp_path: Path) -> None:
    loads = 0

    def fail_second(path: str, _: bytes) -> tuple[int, bytes] | None:
        nonlocal loads
        loads += path == "/update_weights_from_disk"
        return (500, b"no memory") if path == "/update_weights_from_disk" and loads == 2 else None

    with proxy(server.url, fail_second) as url:
        engine, weights = connect_sglang(server, tmp_path, url), weight_set(policy(1))
        engine.load_weights(weights, weights.tensors)
        update = Update(server, engine)

        def failing() -> bool:
            with contextlib.suppress(ServiceFailed):
                update()
            return False

        with pytest.raises(ServiceFailed, match=r"version 2 failed in the middle of a generation: .*no memory"):
            list(engine.generate(requests(2), SamplingParameters(1900, ignore_eos=True), 0, failing))
        with pytest.raises(ServiceFailed, match="holds no policy version"):
            run(engine, requests(1))
        engine.load_weights(update.weights, update.weights.tensors)
        assert tokens(run(engine, requests(4), temperature=0.0)) == greedy(policy(2), requests(4))
        engine.close()


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 5)], "names no version of the weights for each token"),
        ([(1, 12)], "names no version of the weights for each token"),
        ([(0, 4), (5, 12)], "names no version of the weights for each token"),
        ([], "of no version"),
    ],
)
def test_a_response_names_the_weights_of_each_token(
    server: SGLangServer, engine: SGLangServerEngine, spans: list[tuple[int, int]], message: str
) -> None:
    output = server._output

    def wrong(*arguments: Any) -> dict[str, Any]:
        result = output(*arguments)
        result["meta_info"]["weight_versions"] = [
            {"version": server.state.version, "start": start, "end": end} for start, end in spans
        ]
        return result

    server._output = wrong  # type: ignore[method-assign]
    with pytest.raises(ServiceFailed, match=message):
        run(engine, requests(1), ignore_eos=True)


def test_weights_that_another_client_changed_are_refused(server: SGLangServer, engine: SGLangServerEngine) -> None:
    post(server, "/update_weight_version", new_version="another")
    with pytest.raises(ServiceFailed, match="another client changed the weights"):
        run(engine, requests(4))


@pytest.mark.parametrize(
    ("fault", "when", "message"),
    [
        (
            lambda path, _: (200, b'{"success": true}') if path == "/update_weights_from_disk" else None,
            "generate",
            "generated with weights .'quartet-loading'",
        ),
        (
            lambda path, _: (200, b'{"success": false}') if path == "/update_weights_from_disk" else None,
            "load",
            "cannot load the weights",
        ),
        (
            lambda path, _: (
                (400, b'{"success": false, "message": "the cache was not flushed"}')
                if path == "/update_weights_from_disk"
                else None
            ),
            "load",
            "cannot load the weights: the cache was not flushed",
        ),
        (
            lambda path, _: (200, b"data: {}\n\n") if path == "/generate" else None,
            "generate",
            "malformed event",
        ),
        (lambda path, _: (500, b"no memory") if path == "/generate" else None, "generate", "no memory"),
    ],
    ids=["dropped", "failed", "cache", "malformed", "error"],
)
def test_a_faulty_server_is_refused_by_name(
    server: SGLangServer, tmp_path: Path, fault: Fault, when: str, message: str
) -> None:
    active = False
    with proxy(server.url, lambda path, body: fault(path, body) if active else None) as url:
        engine, weights = connect_sglang(server, tmp_path, url), weight_set(policy(3))
        active = True
        if when == "load":
            with pytest.raises(ServiceFailed, match=f"SGLang server at {url}.*{message}"):
                engine.load_weights(weights, weights.tensors)
            message = "holds no policy version"
        else:
            engine.load_weights(weights, weights.tensors)
        with pytest.raises(ServiceFailed, match=f"SGLang server at {url}.*{message}"):
            run(engine, requests(1))
        active = False
        engine.load_weights(weights, weights.tensors)  # and it works again
        assert tokens(run(engine, requests(4), temperature=0.0)) == greedy(policy(3), requests(4))
        engine.close()


def test_a_server_that_cannot_see_the_directory_is_reported(server: SGLangServer, tmp_path: Path) -> None:
    def elsewhere(path: str, body: bytes) -> tuple[int, bytes] | None:
        if path != "/update_weights_from_disk":
            return None
        changed = json.loads(body) | {"model_path": "/nowhere"}
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = httpx2.post(server.url + path, json=changed, headers=headers, trust_env=False)
        return answer.status_code, answer.content

    with proxy(server.url, elsewhere) as url:
        engine, weights = connect_sglang(server, tmp_path, url), weight_set(policy(3))
        with pytest.raises(ServiceFailed, match=r"it must see rollout\.sglang_server\.weights_directory"):
            engine.load_weights(weights, weights.tensors)
        engine.close()


@pytest.mark.parametrize(
    ("server", "weights", "message"),
    [
        ({"original_log_probs": True}, "folder", "without SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ({"dtype": "half"}, "folder", "computes in float16, .*--dtype float32"),
        ({"enable_lora": False}, "lora", "--enable-lora"),
    ],
    indirect=["server"],
)
def test_settings_of_the_server_that_do_not_fit_are_refused(
    server: SGLangServer, tmp_path: Path, weights: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        connect_sglang(server, tmp_path, weights=weights)


@pytest.mark.parametrize("server", [{"context_length": 64}], indirect=True)
def test_the_context_length_of_the_server_limits_requests(engine: SGLangServerEngine) -> None:
    with pytest.raises(InvalidRequest, match="positions for 64"):
        run(engine, requests(1, length=60))


def test_a_wrong_key_server_or_address_is_reported(server: SGLangServer, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("another-key-of-the-tests")
    with pytest.raises(AccessRefused, match=r"rollout\.sglang_server\.api_key_file"):
        connect_sglang(server, tmp_path, api_key_file=wrong)
    with pytest.raises(ServiceUnavailable, match=r"correct rollout\.sglang_server\.url"):
        connect_sglang(server, tmp_path, "http://127.0.0.1:1")
    absent = (404, b'{"detail": "Not Found"}')
    with proxy(server.url, lambda *_: absent) as url, pytest.raises(MismatchError, match="must be SGLang"):
        connect_sglang(server, tmp_path, url)


def test_a_server_that_ends_fails_the_generation(server: SGLangServer, engine: SGLangServerEngine) -> None:
    before = server.state.tokens

    def stop_after_the_first_tokens() -> bool:
        if server.state.tokens > before and not server._server.should_exit:
            server.stop()
        return False

    sampling = SamplingParameters(1900, ignore_eos=True)
    with pytest.raises(ServiceFailed, match=f"SGLang server at {server.url}"):
        list(engine.generate(requests(4), sampling, 0, stop_after_the_first_tokens))
