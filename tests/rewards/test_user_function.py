"""A user's function in a separate process: isolation and clean-up."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quartet.errors import Cancelled, ConfigError, FailedPrecondition, FunctionFailed
from quartet.system import user_function as function_worker
from quartet.system.user_function import FunctionWorker
from tests.rewards.processes import children, runs
from tests.waiting import LIMIT, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
Start = Callable[..., FunctionWorker]


@pytest.fixture
def start(functions: Path) -> Iterator[Start]:
    """Return a function that starts workers. Check at the end that no process is left."""
    before = children()
    with ExitStack() as stack:

        def start(name: str, **options: Any) -> FunctionWorker:
            worker = FunctionWorker(f"functions:{name}", "reward.function", **options)
            stack.callback(worker.close)
            return worker

        yield start
    assert children() <= before


def test_a_file_with_the_name_of_a_library_does_not_hide_it(functions: Path, start: Start) -> None:
    for library in ("json", "queue", "numpy", "quartet"):
        (functions / f"{library}.py").write_text("raise RuntimeError('taken for a library')")
    assert start("echo").call([1], 20) == 1


def test_a_function_in_a_file_with_the_name_of_a_library_is_refused(functions: Path) -> None:
    (functions / "json.py").write_text("def score(*_): return 1.0")
    with pytest.raises(
        ConfigError,
        match=rf"module json has no score; .*json/__init__\.py was imported instead of {functions}/json\.py",
    ):
        FunctionWorker("json:score", "reward.function")


def test_a_restart_that_times_out_can_be_retried(start: Start) -> None:
    worker = start("echo")
    assert worker._process is not None
    os.kill(worker._process._child.pid, signal.SIGKILL)
    worker._process._child.wait()
    worker._start_timeout, start_timeout = 0.0, worker._start_timeout
    with pytest.raises(FailedPrecondition, match="cannot be imported"):
        worker.call([1], 20)
    worker._start_timeout = start_timeout
    assert worker.call([1], 20) == 1


def test_arguments_and_results_are_json_values(start: Start) -> None:
    value = {"text": 'a "quoted"\nline \u2028 é \ud83d', "list": [1, -2.5, True, None], "nested": {"a": [[]]}}
    worker = start("echo")
    assert worker.call([value], 20) == value
    assert math.isnan(worker.call([math.nan], 20))
    assert start("numbers").call([0], 20) == {"one": 0.5, "many": [0, 1, 2], "truth": True}


def test_output_of_a_function_goes_to_standard_error(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    worker = start("noisy")
    assert worker.call([7], 20) == [7, ""]
    assert worker.call([8], 20) == [8, ""]
    worker.close()
    output = capfd.readouterr()
    assert output.out == ""
    for line in ("said on standard output", "said on standard error", "written to descriptor 1", "said by a child"):
        assert output.err.count(line) == 2


def test_a_flood_of_output_does_not_block_and_is_limited_in_the_log(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = start("flood")
    assert worker.call([5_000], 60) == "done"
    worker.close()
    printed = capfd.readouterr().err
    assert function_worker.MAX_OUTPUT_BYTES <= len(printed) < function_worker.MAX_OUTPUT_BYTES + 200
    assert printed.count("the rest is dropped") == 1


def test_a_batch_larger_than_the_pipe_buffer_is_transferred(start: Start) -> None:
    value = ["é" * 1000] * 2_000
    assert start("echo").call([value], 60) == value


def test_an_exception_is_reported_in_one_line(start: Start) -> None:
    worker = start("fails")
    with pytest.raises(FunctionFailed) as failed:
        worker.call(["secret"], 20, "sequence index 3")
    message = str(failed.value)
    assert message.startswith("reward.function functions:fails raised ValueError at functions.py:")
    assert "for sequence index 3; the text of the exception is left out" in message
    assert message.endswith("set reward.quote_texts: true to see it")
    assert "\n" not in message
    with pytest.raises(
        FunctionFailed, match=r"raised TypeError: too many positional arguments, called with 1 argument$"
    ):
        start("wrong_signature").call([1], 20)
    with pytest.raises(FunctionFailed, match=r"functions:leaves raised SystemExit at functions.py:\d+; "):
        start("leaves").call([], 20)


def test_all_calls_run_in_one_process(start: Start) -> None:
    worker = start("process")
    assert worker.call([], 20) == worker.call([], 20) != os.getpid()


def error_and_replacement(start: Start, name: str, timeout: float) -> str:
    """Return the error of a failed call. Check that the next calls run in a new process."""
    (Path.cwd() / "first.py").write_text(
        "import functions\nfrom pathlib import Path\n\n"
        "def first(*_):\n"
        "    if Path('failed').exists():\n"
        "        return functions.process()\n"
        "    Path('failed').touch()\n"
        f"    return functions.{name}()\n"
    )
    worker = FunctionWorker("first:first", "reward.function")
    try:
        with pytest.raises(FunctionFailed) as failed:
            worker.call([], timeout)
        fresh = worker.call([], 20)
        assert worker.call([], 20) == fresh
        assert runs(fresh)
    finally:
        worker.close()
    assert not runs(fresh)
    return str(failed.value)


def test_a_call_that_times_out_is_ended_and_the_next_call_works(start: Start) -> None:
    start_time = time.monotonic()
    message = error_and_replacement(start, "sleeps", 0.5)
    assert "first:first: took longer than 0.5 s, and was ended; raise its timeout" in message
    assert time.monotonic() - start_time < 20


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dies", "its process ended with status 3"),
        ("is_killed", "its process was killed by SIGKILL"),
        ("dies_and_leaves_a_child", "its process ended with status 5"),
    ],
)
def test_a_function_that_ends_its_process_is_reported_and_the_next_call_works(
    name: str, expected: str, start: Start
) -> None:
    start_time = time.monotonic()
    assert error_and_replacement(start, name, 40).endswith(expected)
    assert time.monotonic() - start_time < 20


def test_a_process_that_ends_between_calls_is_replaced(start: Start) -> None:
    worker = start("process")
    first = worker.call([], 20)
    os.kill(first, signal.SIGKILL)
    # The main thread may end shortly before the process does.
    wait_until(lambda: worker._process is not None and not worker._process.is_running())
    assert worker.call([], 20) != first


def test_each_call_fails_while_the_module_of_the_function_is_missing(start: Start, functions: Path) -> None:
    worker = start("dies")
    (functions / "functions.py").rename(functions / "away.py")
    with pytest.raises(FunctionFailed, match="status 3"):
        worker.call([], 20)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"reward.function functions:dies: .*No module named 'functions'"):
            worker.call([], 20)
    (functions / "away.py").rename(functions / "functions.py")
    with pytest.raises(FunctionFailed, match="status 3"):
        worker.call([], 20)


def test_results_that_are_not_json_are_refused_with_their_type(start: Start) -> None:
    with pytest.raises(FunctionFailed, match="functions:a_set: returned a value of type set, expected JSON"):
        start("a_set").call([1], 20)


def test_an_oversized_answer_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_worker, "MAX_RESPONSE_BYTES", 1_000_000)
    worker = start("huge")
    assert len(worker.call([900_000], 20)) == 900_000
    with pytest.raises(FunctionFailed, match="sent more than 1000000 bytes"):
        worker.call([3_000_000], 20)
    assert worker.call([3], 20) == "xxx"


def with_pipe(start: Start, name: str) -> tuple[FunctionWorker, int, int]:
    """Return a worker, its process, and the descriptor to which the process writes responses."""
    before = children()
    worker = start(name)
    (process,) = children() - before
    return worker, process, int(Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[-2])


def test_writing_to_the_pipe_of_the_worker_is_an_error(start: Start) -> None:
    worker, _, descriptor = with_pipe(start, "a_pipe_writer")
    with pytest.raises(FunctionFailed, match="wrote to its worker's pipe"):
        worker.call([descriptor], 20)


@pytest.mark.parametrize(
    "line",
    ['{"result": 9}', '{"number": 0, "result": 9}', '{"number": 1, "result": 9}', '{"number": 3, "result": 9}', "2"],
)
def test_a_line_without_the_number_of_the_call_is_refused(line: str, start: Start) -> None:
    worker, process, descriptor = with_pipe(start, "writes_and_waits")
    assert worker.call([descriptor, None], 20) == 1
    start_time = time.monotonic()
    with pytest.raises(FunctionFailed) as failed:
        worker.call([descriptor, f"{line}\n"], 40)
    assert time.monotonic() - start_time < 20
    assert str(failed.value).startswith("reward.function functions:writes_and_waits: wrote to its worker's pipe, and")
    assert not runs(process)
    assert worker.call([descriptor, None], 20) == 1


def test_a_late_answer_is_not_mistaken_for_that_of_the_next_call(start: Start) -> None:
    worker, process, descriptor = with_pipe(start, "echo")
    assert worker.call(["first"], 20) == "first"
    with open(f"/proc/{process}/fd/{descriptor}", "wb", buffering=0) as pipe:
        pipe.write(b'{"number": 1, "result": "late"}\n')
    with pytest.raises(FunctionFailed, match=r"^reward\.function functions:echo, step 2: wrote to its worker's pipe"):
        worker.call(["second"], 20, "step 2")
    assert worker.call(["third"], 20) == "third"


def test_a_forked_copy_of_the_process_cannot_answer_calls(start: Start) -> None:
    worker, process, descriptor = with_pipe(start, "forks")
    assert [worker.call([descriptor], 20) for _ in range(3)] == ["of the function"] * 3
    assert runs(process)


MODULES = {
    "raises": "1 / 0",
    "mistyped": "def f(:\n",
    "imports_nothing": "import not_there",
    "leaves": "import sys; sys.exit('later')",
    "dies": "import os; os._exit(9)",
    "hangs": "import time; time.sleep(60)",
}


def test_a_package_that_hides_a_module_of_the_user_is_reported(functions: Path) -> None:
    (functions / "json").mkdir()
    (functions / "json" / "mine.py").write_text("def f(): pass")
    with pytest.raises(ConfigError, match=r"No module named 'json\.mine'; .*json/__init__\.py was imported instead of"):
        FunctionWorker("json.mine:f", "reward.function")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("nowhere:f", "ModuleNotFoundError: No module named 'nowhere'"),
        ("functions:ecko", "module functions has no ecko; did you mean echo?"),
        ("functions:not_a_function", "is a value of type int, expected a function"),
        ("raises:f", "ZeroDivisionError: division by zero (raises.py:1)"),
        ("mistyped:f", "SyntaxError: invalid syntax (mistyped.py, line 1)"),
        ("imports_nothing:f", "ModuleNotFoundError: No module named 'not_there' (imports_nothing.py:1)"),
        ("leaves:f", "SystemExit: later"),
        ("dies:f", "its process ended with status 9"),
        ("hangs:f", "took longer than 2 s"),
    ],
)
def test_an_unusable_function_is_refused_at_the_start(function: str, expected: str, functions: Path) -> None:
    for name, text in MODULES.items():
        (functions / f"{name}.py").write_text(text)
    before = children()
    with pytest.raises(ConfigError) as refused:
        FunctionWorker(function, "reward.parts.taste.function", start_timeout=2 if function == "hangs:f" else 60)
    message = str(refused.value)
    assert message.startswith(f"reward.parts.taste.function {function}: ")
    assert expected in message
    assert "\n" not in message
    assert children() <= before


def test_the_process_imports_little_and_gets_no_secrets(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("QUARTET_BUFFER_URL", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD")
    for name in (*secrets, "OTHER"):
        monkeypatch.setenv(name, "value")
    assert start("loaded").call([], 20) == [
        "quartet",
        "quartet.contract",
        "quartet.contract.logged_values",
        "quartet.system",
        "quartet.system.user_code",
    ]
    assert start("inherited").call([], 20) == []
    worker = start("variable")
    assert [worker.call([name], 20) for name in (*secrets, "OTHER")] == [None] * len(secrets) + ["value"]


def test_concurrent_calls_get_their_own_results(start: Start) -> None:
    worker = start("echo")
    mismatches = []

    def call(name: int) -> None:
        mismatches.extend(index for index in range(50) if worker.call([[name, index]], 20) != [name, index])

    threads = [threading.Thread(target=call, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mismatches == []


def test_a_process_outlives_the_thread_whose_call_started_it(start: Start) -> None:
    worker = start("process")
    first = worker.call([], 20)
    os.kill(first, signal.SIGKILL)
    # Wait for the end of the whole process. While other threads of it end, the worker would still consider it running.
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(worker.call([], 20)))
    thread.start()
    thread.join()
    # If the process were tied to its thread, the kernel would end it shortly after the thread.
    for _ in range(20):
        assert worker.call([], 20) == results[0]


def test_closing_ends_the_process_and_its_child_processes(start: Start) -> None:
    worker = start("starts_a_child")
    child = worker.call([], 20)
    assert runs(child)
    worker.close()
    wait_until(lambda: not runs(child))
    worker.close()
    with pytest.raises(Cancelled, match="functions:starts_a_child: closed"):
        worker.call([], 20)


def test_closing_ends_a_running_call(start: Start, functions: Path) -> None:
    worker = start("sleeps")
    raised: list[BaseException] = []

    def call() -> None:
        try:
            worker.call([], 60)
        except Cancelled as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    wait_until((functions / "asleep").exists)
    start_time = time.monotonic()
    worker.close()
    thread.join()
    assert time.monotonic() - start_time < 10
    assert [str(error) for error in raised] == ["reward.function functions:sleeps: closed during the call"]


def test_after_ctrl_c_a_late_answer_is_not_used_for_another_call(start: Start, functions: Path) -> None:
    (functions / "late.py").write_text(
        "import time\nfrom pathlib import Path\n\n"
        "def late(name):\n"
        "    Path(name).touch()\n"
        "    while name == 'first' and not Path('second').exists():\n"
        "        time.sleep(0.01)\n"
        "    return name\n"
    )
    worker = FunctionWorker("late:late", "reward.function")

    def interrupt() -> None:
        wait_until((functions / "first").exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    # SIGINT is ignored if the tests run in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            worker.call(["first"], 20)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    (functions / "second").touch()
    assert worker.call(["other"], 20) == "other"
    worker.close()


PARENT = """
from quartet.system.user_function import FunctionWorker
FunctionWorker("functions:sleeps", "key").call([], 60)
"""


def test_a_call_ends_when_the_calling_process_dies(functions: Path) -> None:
    asleep = functions / "asleep"
    with subprocess.Popen([sys.executable, "-c", PARENT]) as parent:
        wait_until(lambda: asleep.exists() and asleep.read_text() != "")
        worker = int(asleep.read_text())
        assert runs(worker)
        parent.kill()
        wait_until(lambda: not runs(worker))


FORGETS = """
from quartet.system.user_function import FunctionWorker
print(FunctionWorker("functions:process", "key").call([], 20))
"""


def test_a_program_that_does_not_close_its_worker_ends(functions: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", FORGETS], capture_output=True, text=True, timeout=LIMIT, check=True)
    wait_until(lambda: not runs(int(ended.stdout)))
