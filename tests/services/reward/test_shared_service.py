"""A reward service that several runs share, over gRPC: same scores, turns between calls, refusals, and the callers' identity."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from quartet.config.deployment import SecurityConfig, SharingConfig
from quartet.config.root import Config
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import Scores, TokenBatch
from quartet.errors import Cancelled, InvalidRequest, NoResponse, QuotaExceeded
from quartet.rpc import replica_set
from quartet.rpc.clients import RewardClient
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.limits import shared_limits
from quartet.rpc.security.certificates import Authority
from quartet.rpc.security.credentials import Credentials
from quartet.rpc.server import Server
from quartet.services.reward.servicer import RewardServicer
from quartet.services.reward.sharing import RunUsage, SharedTurns, SharingMetrics
from quartet.services.roles import build_model_role
from tests.services.model_services import TIMEOUTS, Services, replicas_of
from tests.unit.models import tiny
from tests.waiting import LIMIT, wait_until

BATCH = tiny.batch([3, 2, 5, 4, 4], [4, 7, 1, 3, 3], seed=9)
SCORERS = """
def length(prompt, response, fields):
    return float(len(response)) + fields.get("bonus", 0)

def lengths(prompts, responses, fields):
    return [float(len(each)) for each in responses]
"""


@pytest.fixture(autouse=True)
def _functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared_scorers.py").write_text(SCORERS)
    monkeypatch.chdir(tmp_path)


class GatedSource:
    """A reward source whose units of work the test releases one by one. Records the responses' lengths of each unit."""

    def __init__(self) -> None:
        self.units: list[int] = []
        self.cancelled: list[Callable[[], bool]] = []
        """Functions that return whether the caller is gone, one for each call that has begun."""
        self.gate = threading.Semaphore(0)

    def score(self, batch: TokenBatch, fields: Sequence[str] = (), cancelled: Any = None) -> Scores:
        raise AssertionError("a shared service computes in units")

    def score_in_units(self, batch: TokenBatch, fields: Sequence[str] = (), cancelled: Any = None) -> Iterator[None]:
        self.cancelled.append(cancelled)
        for index, length in enumerate(batch.response_lengths.tolist()):
            if index:
                yield
            self.units.append(length)
            assert self.gate.acquire(timeout=20)
        return Scores(batch.response_lengths.astype(np.float32))

    def status(self) -> ServiceStatus:
        return ServiceStatus(role=Role.REWARD)

    def close(self) -> None:
        """Release nothing."""


def batch_of(sequences: int, length: int) -> TokenBatch:
    return tiny.batch([2] * sequences, [length] * sequences)


@contextmanager
def gated(**limits: Any) -> Iterator[tuple[GatedSource, SharedTurns, Callable[[str], RewardClient]]]:
    """Serve a gated source. Yield it, its turns, and a function that returns the client of a run."""
    source, turns = GatedSource(), SharedTurns(SharingConfig.model_validate(limits))
    allowed = shared_limits(2, limits.get("max_pending_calls", 8))
    with ExitStack() as stack:
        server = Server([RewardServicer(source, ComputeThread(), 1, shared=turns)], "127.0.0.1:0", limits=allowed)
        stack.callback(server.stop, 5.0)
        stack.callback(source.gate.release, 1000)

        def client(run: str) -> RewardClient:
            created = RewardClient(server.address, TIMEOUTS, Credentials(Role.ORCHESTRATOR, run=run))
            stack.callback(created.close)
            return created

        yield source, turns, client


def usage(turns: SharedTurns) -> dict[str, RunUsage]:
    return {each.run: each for each in turns.usage()}


@pytest.mark.parametrize("kind", ["model", "function", "batched", "ensemble"])
def test_a_shared_service_gives_the_same_bits_as_one_of_a_single_run(
    kind: str, services: Services, make_config: Callable[..., Config], checkpoints: dict[str, Path]
) -> None:
    function = {"source": "function", "function": "shared_scorers:length"}
    # Micro-batches with a part of the sequences each.
    model = {"source": "model", "model": str(checkpoints["reward"]), "micro_batch_tokens": 20}
    reward = {
        "model": model,
        "function": function,
        "batched": {"source": "function", "function": "shared_scorers:lengths", "batched": True},
        "ensemble": {
            "source": "ensemble",
            "parts": [{"name": "a", **model}, {"name": "b", "weight": 0.5, **function}],
        },
    }[kind]
    fields = ['{"bonus": 2}', "{}", "{}", "{}", '{"bonus": 7}']
    expected = services.start(Role.REWARD, make_config(reward=reward)).score(BATCH, fields).result()
    shared_config = make_config(reward=reward, services={"reward": {"sharing": {}}})
    shared = services.start(Role.REWARD, shared_config)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: shared.score(BATCH, fields).result(), range(4)))
    for result in results:
        assert result.total.tobytes() == expected.total.tobytes()
        assert {name: part.tobytes() for name, part in result.parts.items()} == {
            name: part.tobytes() for name, part in expected.parts.items()
        }


def test_runs_take_turns_between_the_responses_of_their_calls() -> None:
    with gated() as (source, turns, client):
        first = client("a").score(batch_of(4, length=1))
        wait_until(lambda: source.units == [1])
        second = client("b").score(batch_of(2, length=9))
        third = client("a").score(batch_of(2, length=3))
        wait_until(lambda: {run: each.pending_sequences for run, each in usage(turns).items()} == {"a": 6, "b": 2})
        for call in (second, first, third):
            while not call.done():
                known = len(source.units)
                source.gate.release()
                wait_until(lambda call=call, known=known: call.done() or len(source.units) > known)  # type: ignore[misc]
        assert source.units.index(9) == 1
        assert [each for each in source.units if each != 9] == [1, 1, 1, 1, 3, 3]
        assert second.result().total.tolist() == [9.0, 9.0]


def test_a_flooding_run_is_refused_with_a_delay_and_another_run_is_not() -> None:
    with gated(max_pending_calls=2) as (source, turns, client):
        flood, normal = client("flood"), client("normal")
        started = [flood.score(batch_of(2, 1)) for _ in range(2)]
        wait_until(lambda: "flood" in usage(turns) and usage(turns)["flood"].pending_sequences == 4)
        with pytest.raises(QuotaExceeded, match=r"run flood: 2 calls are pending \(max_pending_calls\)") as refused:
            flood.score(batch_of(2, 1)).result()
        assert refused.value.retry_seconds == 0.05
        call = normal.score(batch_of(1, 5))
        source.gate.release(100)
        assert call.result().total.tolist() == [5.0]
        assert [each.result().total.tolist() for each in started] == [[1.0, 1.0]] * 2
        assert usage(turns)["normal"].refused_calls == 0
        registry = CollectorRegistry()
        registry.register(SharingMetrics(turns.usage))
        text = generate_latest(registry).decode()
        for line in ('refused_calls_total{run="flood"} 1.0', 'scored_sequences_total{run="normal"} 1.0'):
            assert f"quartet_shared_{line}" in text


def test_a_flooding_run_finishes_if_it_repeats_its_refused_calls() -> None:
    with gated(max_pending_calls=2) as (source, turns, client):
        flood = client("flood")
        batches = [batch_of(1, length) for length in range(1, 13)]
        calls = [replicas_of(flood).start(lambda each, batch=batch: each.score(batch)) for batch in batches]  # type: ignore[misc]
        wait_until(lambda: "flood" in usage(turns) and usage(turns)["flood"].refused_calls > 0)
        source.gate.release(1000)
        assert [call.result().total.tolist() for call in calls] == [[float(length)] for length in range(1, 13)]


def test_more_calls_in_flight_than_a_connection_may_have_are_all_answered() -> None:
    with gated(max_pending_calls=2) as (source, turns, client):
        source.gate.release(1000)
        flood = client("flood")
        calls = [replicas_of(flood).start(lambda each: each.score(batch_of(1, 1))) for _ in range(200)]
        assert [call.result().total.tolist() for call in calls] == [[1.0]] * 200
        assert usage(turns)["flood"].scored_sequences == 200


def test_a_repeated_call_can_be_cancelled_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_set, "QUOTA_JITTER", (1e6, 1e6))
    with gated(max_pending_calls=1) as (_, turns, client):
        running = client("a").score(batch_of(1, 1))
        wait_until(lambda: "a" in usage(turns))
        waiting = replicas_of(client("a")).start(lambda each: each.score(batch_of(1, 1)))
        wait_until(lambda: any(thread.name == "reward quota" for thread in threading.enumerate()))
        assert usage(turns)["a"].refused_calls == 1
        waiting.cancel()
        with pytest.raises(Cancelled, match="while it waited for its quota"):
            waiting.result(LIMIT)
        running.cancel()


def test_a_call_whose_caller_is_gone_leaves_and_passes_its_turn_on() -> None:
    with gated() as (source, turns, client):
        first, second = client("a").score(batch_of(3, 1)), client("b").score(batch_of(3, 2))
        wait_until(lambda: len(turns.usage()) == 2 and len(source.units) == 1)
        gone = first if source.units == [1] else second
        other = second if gone is first else first
        gone.cancel()
        wait_until(lambda: source.cancelled[0]())
        source.gate.release()
        wait_until(lambda: sum(each.pending_sequences > 0 for each in turns.usage()) == 1)
        wait_until(lambda: len(source.units) == 2)
        source.gate.release(100)
        other.result()
        assert sum(each.scored_sequences > 0 for each in turns.usage()) == 1


def test_a_waiting_call_ends_at_its_deadline() -> None:
    with gated() as (_, turns, client):
        running = client("a").score(batch_of(1, 1))
        wait_until(lambda: "a" in usage(turns))
        late = client("b")
        late._seconds = 0.3
        with pytest.raises(NoResponse):
            late.score(batch_of(1, 1)).result()
        wait_until(lambda: usage(turns)["b"].pending_sequences == 0)
        assert not running.done()


def test_a_failing_call_leaves() -> None:
    with gated() as (source, turns, client):
        source.score_in_units = lambda *_: _fails()  # type: ignore[method-assign]
        with pytest.raises(InvalidRequest, match="no"):
            client("a").score(batch_of(1, 1)).result()
        assert usage(turns)["a"] == RunUsage("a", 0, 0, 0, seconds=usage(turns)["a"].seconds)


def _fails() -> Iterator[None]:
    raise InvalidRequest("no")
    yield


def test_the_certificate_of_a_run_decides_whose_quota_a_call_uses(tmp_path: Path) -> None:
    authority = Authority(timedelta(days=1))
    authority.issue(tmp_path / "reward", ["reward.quartet"])
    authority.issue(tmp_path / "orchestrator", ["orchestrator.quartet", "mine.run.quartet"])
    (tmp_path / "other").mkdir()
    authority.issue(tmp_path / "other" / "orchestrator", ["orchestrator.quartet"])
    source, turns = GatedSource(), SharedTurns(SharingConfig())
    source.gate.release(1000)
    security = SecurityConfig(certificates=tmp_path)
    server = Server(
        [RewardServicer(source, ComputeThread(), 1, shared=turns)], "127.0.0.1:0", Credentials("reward", security)
    )
    try:
        for certificates, run, name in (("", "mine", "mine"), ("", "", "mine"), ("other", "any", "any")):
            caller = SecurityConfig(certificates=tmp_path / certificates)
            client = RewardClient(server.address, TIMEOUTS, Credentials(Role.ORCHESTRATOR, caller, run))
            client.score(batch_of(1, 1)).result()
            assert usage(turns)[name].scored_sequences > 0
            client.close()
        client = RewardClient(server.address, TIMEOUTS, Credentials(Role.ORCHESTRATOR, security, "theirs"))
        with pytest.raises(
            InvalidRequest, match="metadata quartet-run 'theirs': the certificate of the caller is for run mine"
        ):
            client.score(batch_of(1, 1)).result()
        client.close()
        assert set(usage(turns)) == {"mine", "any"}
    finally:
        server.stop(5.0)


def test_a_name_that_no_run_can_have_is_refused() -> None:
    with (
        gated() as (_, turns, client),
        pytest.raises(InvalidRequest, match="metadata quartet-run: expected the name of a run"),
    ):
        client("no run / has this name").score(batch_of(1, 1)).result()
    assert turns.usage() == []


def test_a_shared_service_needs_a_separate_process(make_config: Callable[..., Config]) -> None:
    config = make_config(services={"reward": {"sharing": {"max_runs": 2}}})
    servicer = build_model_role(Role.REWARD, config, ComputeThread(), threads=1)
    assert isinstance(servicer, RewardServicer)
    assert servicer.shared is not None
    servicer.close()
