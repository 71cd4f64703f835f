"""Agents of a service: commands, HTTP services and functions; their results, failures, limits and processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quartet.config.environment import EnvironmentConfig
from quartet.contract.agent import HIDDEN_KEY, AgentResult, AgentRun, new_session_key
from quartet.contract.trajectory import FAILURES, Outcome
from quartet.environments import agents as agents_module
from quartet.environments.agent_results import OUTCOMES, Unusable, result_of, result_of_line
from quartet.environments.agents import AgentHost
from quartet.errors import ConfigError, InvalidRequest, ServiceBusy, SessionLost
from tests.environments.agent_functions import MEETING
from tests.environments.policy_endpoint import PolicyEndpoint
from tests.waiting import wait_until

HERE = Path(__file__).parent
COMMAND = [sys.executable, str(HERE / "agent_functions.py")]
FUNCTIONS = "tests.environments.agent_functions"
Start = Callable[..., AgentHost]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def endpoint(stack: ExitStack) -> PolicyEndpoint:
    return stack.enter_context(closing(PolicyEndpoint()))


def settings(num_workers: int = 1, quote_texts: bool = False, **agent: Any) -> EnvironmentConfig:
    values = {"kind": "agent", "num_workers": num_workers, "quote_texts": quote_texts, "agent": agent}
    return EnvironmentConfig.model_validate(values)


@pytest.fixture
def host(stack: ExitStack) -> Start:
    """Factory of hosts, which are closed at the end."""

    def start(certificates: Path | None = None, **arguments: Any) -> AgentHost:
        return stack.enter_context(closing(AgentHost(settings(**arguments), certificates)))

    return start


def run(url: str = "http://127.0.0.1:9/v1", session: str = "r/1/2/3/1", key: str = "", **fields: Any) -> AgentRun:
    return AgentRun(session, 7, json.dumps(fields), url, key or new_session_key(), "policy")


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


@contextmanager
def standard_error(folder: Path) -> Iterator[Path]:
    """Let this process write standard error to a file. ``capfd`` loses what is written while it is read."""
    path, before = folder / "stderr", os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield path
    finally:
        os.dup2(before, 2)
        os.close(before)


def logged(errors: Path, text: str) -> str:
    """Wait for the text in the log of this process, and return the log."""
    wait_until(lambda: text in errors.read_text())
    return errors.read_text()


def processes(marker: str) -> list[int]:
    """Return the processes that are alive and have this text in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def parent_of(pid: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_command_gets_the_row_and_the_endpoint_and_gives_a_reward(
    host: Start, endpoint: PolicyEndpoint, stack: ExitStack, tmp_path: Path
) -> None:
    errors = stack.enter_context(standard_error(tmp_path))
    agents, started = host(command=COMMAND), run(endpoint.url, text="hi there")
    result = agents.start(started).result()
    assert result == AgentResult(8.0, logged={"text": "HI THERE", "seed": 7})
    [(key, body)] = endpoint.requests
    assert (key, body["model"], body["path"]) == (started.api_key, "policy", "/v1/chat/completions")
    # Its output is logged, without the key and without the result.
    log = logged(errors, "my key")
    assert f"r/1/2/3/1: my key is {HIDDEN_KEY}" in log
    assert "r/1/2/3/1: thinking" in log
    assert started.api_key not in log
    assert "reward" not in log


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
def test_a_command_in_another_language(host: Start, endpoint: PolicyEndpoint) -> None:
    agents = host(command=["node", str(HERE / "agent.js")])
    assert agents.start(run(endpoint.url, text="abc")).result() == AgentResult(3.0, logged={"text": "ABC"})


def test_a_function_gets_what_it_names(host: Start, endpoint: PolicyEndpoint) -> None:
    agents, started = host(function=f"{FUNCTIONS}:two_turns"), run(endpoint.url, text="abc")
    logged = {"text": "ABC", "seed": 7, "session": "r/1/2/3/1"}
    assert agents.start(started).result() == AgentResult(3.0, logged=logged)
    assert endpoint.keys() == [started.api_key] * 2
    assert host(function=f"{FUNCTIONS}:called").start(run(number=0.5)).result().reward == 0.5


class Service:
    """An HTTP service that runs agents: it answers with ``answer(body, authorization)``, a status and text."""

    def __init__(self, stack: ExitStack, answer: Callable[[dict[str, Any], str], tuple[int, str]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, text = answer(body, self.headers.get("Authorization", ""))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}/run"


def test_an_http_service_runs_the_agent(host: Start, stack: ExitStack, tmp_path: Path) -> None:
    bodies: list[Any] = []

    def answer(body: dict[str, Any], authorization: str) -> tuple[int, str]:
        bodies.append((body, authorization))
        # Without room at first.
        return (503, "") if len(bodies) == 1 else (200, '{"reward": 0.25, "logged": {"steps": 2}}')

    (tmp_path / "key").write_text("k" * 20)
    agents = host(url=Service(stack, answer).url, api_key_file=tmp_path / "key")
    started = run(text="abc")
    assert agents.start(started).result() == AgentResult(0.25, logged={"steps": 2})
    body, authorization = bodies[-1]
    assert authorization == f"Bearer {'k' * 20}"
    assert body == {
        "session": started.session, "seed": 7, "fields": {"text": "abc"}, "base_url": started.base_url,
        "api_key": started.api_key, "model": "policy",
    }  # fmt: skip


def test_what_an_http_service_may_answer(host: Start, stack: ExitStack) -> None:
    answers: list[tuple[int, str, AgentResult | str]] = [
        (200, "", AgentResult()),
        (200, "null", AgentResult()),
        (200, "3", AgentResult(3.0)),
        (200, "<html>", "the response is not JSON"),
        (200, '{"score": 1}', "the response has the key 'score'"),
        (200, "x" * 2_000_000, "a response of more than 1048576 bytes"),
        (500, "secret text", "failed (status 500)"),
        (401, "", "check environment.agent.api_key_file"),
        (307, "", "failed (status 307)"),
    ]
    agents = host(url=Service(stack, lambda body, _: answers[body["fields"]["index"]][:2]).url)
    for index, (_, _, expected) in enumerate(answers):
        result = agents.start(run(index=index)).result()
        if isinstance(expected, AgentResult):
            assert result == expected
        else:
            assert result.outcome is Outcome.ENVIRONMENT_ERROR
            assert expected in result.detail
            assert "secret" not in result.detail


def test_an_http_service_that_is_away_is_waited_for_until_the_time_limit(host: Start) -> None:
    result = host(url="http://127.0.0.1:9/run", timeout_seconds=0.3).start(run()).result()
    assert (result.outcome, result.reward) == (Outcome.TIMEOUT, None)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("0.5", {"reward": 0.5}),
        ("-3", {"reward": -3.0}),
        ("", {}),
        ("done", {}),
        ("true", {}),
        ("[1]", {}),
        ("{}", {}),
        ('{"reward": null}', {}),
        ('{"reward": 1, "logged": {"a b": 2, "c": [1]}}', {"reward": 1.0, "logged": {"a_b": 2, "c": "[1]"}}),
        ('{"outcome": "refused"}', {"outcome": "refused", "detail": "the agent ended with outcome refused"}),
        ('{"outcome": "timeout", "detail": "no tool", "reward": 1}', {"outcome": "timeout", "detail": "no tool"}),
    ],
)
def test_the_last_line_of_a_command(line: str, expected: dict[str, Any]) -> None:
    assert result_of_line(line) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("NaN", "not a finite number"),
        ("1e39", "not a finite number"),
        ("{reward", "is no JSON object"),
        ('{"rewards": 1}', "has the key 'rewards'"),
        ('{"reward": "1"}', "as reward a value of type str"),
        ('{"reward": true}', "as reward a value of type bool"),
        ('{"outcome": "good"}', "unknown outcome"),
        ('{"logged": 3}', "logged that is a int"),
    ],
)
def test_an_unusable_last_line(line: str, expected: str) -> None:
    with pytest.raises(Unusable, match=expected):
        result_of_line(line)


def test_the_outcomes_that_an_agent_may_name_are_those_of_trajectories() -> None:
    assert set(OUTCOMES) == set(FAILURES)
    assert result_of({"outcome": "ok", "reward": 2}) == {"reward": 2.0}


@pytest.mark.parametrize("quotes", [False, True])
def test_a_command_that_fails(host: Start, quotes: bool) -> None:
    agents = host(command=["sh", "-c", "eval $(tail -c +13 | head -c -3)"], quote_texts=quotes)
    hidden = "; the last line of its standard error is left out because it may quote a response"
    for script, detail in {
        "echo no luck >&2; exit 3": f"ended with status 3{': no luck' if quotes else hidden}",
        "kill -9 $$": "was killed by SIGKILL",
        "printf '{reward'": "the last line that the command printed starts with { and is no JSON",
        "echo $OPENAI_API_KEY >&2; exit 1": f"ended with status 1{f': {HIDDEN_KEY}' if quotes else hidden}",
    }.items():
        result = agents.start(run(key="a-key-of-another-form-than-usual", script=script)).result()
        assert (result.outcome, result.reward) == (Outcome.ENVIRONMENT_ERROR, None)
        assert detail in result.detail


def test_a_function_that_fails(host: Start) -> None:
    agents = host(function=f"{FUNCTIONS}:as_told", timeout_seconds=2)
    cases: list[tuple[dict[str, Any], Outcome, str]] = [
        (
            {"raise": "secret"},
            Outcome.ENVIRONMENT_ERROR,
            r"raised ValueError at agent_functions.py:\d+; the text is left",
        ),
        ({"failed": ["no tool", "sandbox_error"]}, Outcome.SANDBOX_ERROR, "no tool"),
        ({"exit": 0}, Outcome.ENVIRONMENT_ERROR, "raised SystemExit"),
        ({"object": 1}, Outcome.ENVIRONMENT_ERROR, "its result is or has as reward a value of type object"),
        ({"return": {"reward": "x"}}, Outcome.ENVIRONMENT_ERROR, "its result is or has as reward a value of type str"),
        ({"wait": 30}, Outcome.TIMEOUT, r"took longer than 2 s \(environment.agent.timeout_seconds\)"),
    ]
    started = [agents.start(run(**fields)) for fields, _, _ in cases]
    for each, (_, outcome, detail) in zip(started, cases, strict=True):
        result = each.result()
        assert (result.outcome, result.reward) == (outcome, None)
        assert re.search(detail, result.detail), result.detail
        assert "secret" not in result.detail


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        ({"command": ["no-such-program-here"]}, "environment.agent.command no-such-program-here: no such program"),
        ({"function": f"{FUNCTIONS}:nothing"}, f"agent {FUNCTIONS}:nothing: module {FUNCTIONS} has no nothing"),
        ({"function": f"{FUNCTIONS}:not_async"}, "is not async; define it with async def"),
        (
            {"function": f"{FUNCTIONS}:wants_more"},
            "has the parameter tools; an agent gets what it names of fields, base_url",
        ),
        (
            {"url": "http://127.0.0.1:9", "api_key_file": "no-such-file"},  # pragma: allowlist secret
            "api_key_file no-such-file: cannot be read",
        ),
        ({"url": "http://127.0.0.1:9", "certificate_authority_file": "no-such-file"}, "expected a PEM file"),
    ],
)
def test_an_agent_that_cannot_be_used(agent: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected.replace("(", r"\(")):
        AgentHost(settings(**agent))


def test_fields_that_are_no_object_are_refused(host: Start) -> None:
    agents = host(command=shell("true"))
    with pytest.raises(InvalidRequest, match="expected a JSON object"):
        agents.start(AgentRun("s", 1, "[1]", "http://127.0.0.1:9/v1", new_session_key(), "m"))
    # Its place is free again.
    assert agents.start(AgentRun("s", 1, "", "http://127.0.0.1:9/v1", new_session_key(), "m")).result() == AgentResult()


def test_a_command_gets_only_the_variables_that_it_needs(host: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUARTET_BUFFER_URL", "redis://secret")
    monkeypatch.setenv("MY_SECRET", "secret")
    monkeypatch.setenv("MY_TOOL", "here")
    result = host(command=shell('echo "{\\"logged\\": {\\"names\\": \\"$(env | cut -d= -f1 | tr "\\n" " ")\\"}}"'),
                  pass_variables=["MY_TOOL"]).start(run()).result()  # fmt: skip
    names = set(str(result.logged["names"]).split())
    assert {"MY_TOOL", "PATH", "OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL", "QUARTET_SESSION"} <= names
    assert not {"QUARTET_BUFFER_URL", "MY_SECRET"} & names


def test_a_cancelled_agent_ends_with_everything_that_it_started(host: Start, endpoint: PolicyEndpoint) -> None:
    marker = f"600.{time.monotonic_ns()}"
    # A child, one in another group and session, and one that ignores SIGTERM.
    script = f"sleep {marker} & setsid sleep {marker} & trap '' TERM; sleep {marker}; sleep {marker}"
    agents = host(command=shell(script))
    started = agents.start(run())
    wait_until(lambda: len(processes(marker)) >= 4)
    started.cancel()
    result = started.result()
    assert (result.outcome, result.reward) == (Outcome.CANCELLED, None)
    wait_until(lambda: processes(marker) == [])
    # Nothing is left of it in the host.
    assert agents.status().open_sessions == 0


def test_an_agent_that_takes_too_long_is_ended(host: Start) -> None:
    marker = f"600.{time.monotonic_ns()}"
    result = host(command=shell(f"sleep {marker}"), timeout_seconds=0.5).start(run()).result()
    assert (result.outcome, result.reward) == (Outcome.TIMEOUT, None)
    assert "took longer than 0.5 s (environment.agent.timeout_seconds)" in result.detail
    assert processes(marker) == []


def test_a_process_that_outlives_its_agent_is_ended(host: Start) -> None:
    marker = f"600.{time.monotonic_ns()}"
    result = host(command=shell(f"setsid sleep {marker} >/dev/null 2>&1 & echo 1")).start(run()).result()
    assert result == AgentResult(1.0)
    wait_until(lambda: processes(marker) == [])


def test_a_function_that_blocks_its_process_does_not_block_the_service(
    host: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents_module, "REPLY_SECONDS", 0.5)
    agents = host(function=f"{FUNCTIONS}:as_told", timeout_seconds=1)
    innocent = agents.start(run(wait=0.9))
    blocking = agents.start(run(block=60))
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda each=each: results.append(outcome_of(each))) for each in (blocking, innocent)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    # The one whose time is over first is taken for the cause; the other one is lost and may start again.
    assert sorted(results, key=str) == ["lost", Outcome.TIMEOUT]
    assert agents.start(run(**{"return": 2})).result() == AgentResult(2.0)


def outcome_of(started: Any) -> Any:
    try:
        return started.result().outcome
    except SessionLost:
        return "lost"


def test_agents_of_a_process_that_dies_are_lost_and_it_is_replaced(host: Start) -> None:
    agents = host(function=f"{FUNCTIONS}:as_told")
    waiting = agents.start(run(wait=60))
    with pytest.raises(SessionLost, match="the process that ran the agent ended with status 7"):
        agents.start(run(end=7)).result()
    with pytest.raises(SessionLost):
        waiting.result()
    assert agents.start(run(**{"return": 2})).result() == AgentResult(2.0)


def test_a_killed_process_of_the_service_leaves_no_agent(host: Start) -> None:
    marker = f"600.{time.monotonic_ns()}"
    agents = host(command=shell(f"setsid sleep {marker} & sleep {marker}; true"))
    started = agents.start(run())
    wait_until(lambda: len(processes(marker)) >= 3)
    [worker] = [pid for pid in processes("quartet.environments.agent_child") if parent_of(pid) == os.getpid()]
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(SessionLost, match="was killed by SIGKILL"):
        started.result()
    wait_until(lambda: processes(marker) == [])


def test_more_agents_than_the_limit_are_refused_and_their_places_come_back(host: Start) -> None:
    agents = host(function=f"{FUNCTIONS}:as_told", max_concurrent=2, num_workers=2)
    started = [agents.start(run(wait=60)) for _ in range(2)]
    with pytest.raises(ServiceBusy, match=r"2 agents run already; raise environment\.agent\.max_concurrent"):
        agents.start(run())
    status = agents.status()
    assert (status.open_sessions, status.model) == (2, f"agent {FUNCTIONS}:as_told")
    assert status.busy_seconds["agent"] > 0
    for each in started:
        each.cancel()
        assert each.result().outcome is Outcome.CANCELLED
    assert agents.start(run()).result() == AgentResult()
    assert (agents.status().open_sessions, agents.ended) == (0, {Outcome.CANCELLED: 2, Outcome.OK: 1})


def test_many_functions_wait_at_once_in_one_process(host: Start) -> None:
    agents = host(function=f"{FUNCTIONS}:as_told", max_concurrent=200)
    started = [agents.start(run(session=f"r/1/{index}/0/1", wait=1, **{"return": index})) for index in range(200)]
    assert [each.result().reward for each in started] == list(range(200))


def test_many_functions_wait_in_threads_at_once(host: Start) -> None:
    agents = host(function=f"{FUNCTIONS}:as_told")
    started = [agents.start(run(meet=True)) for _ in range(MEETING)]
    assert [each.result() for each in started] == [AgentResult()] * MEETING


def test_a_printed_key_does_not_reach_the_log(host: Start, stack: ExitStack, tmp_path: Path) -> None:
    errors = stack.enter_context(standard_error(tmp_path))
    agents, started = host(function=f"{FUNCTIONS}:as_told"), run(print="this is")
    agents.start(started).result()
    log = logged(errors, "this is")
    assert f"this is {HIDDEN_KEY}" in log
    assert started.api_key not in log
