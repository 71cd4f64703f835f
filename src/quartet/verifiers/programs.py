"""Run a program against tests in a sandbox, and say for each test how it ended."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from quartet.verifiers.errors import InvalidField, SandboxFailed
from quartet.verifiers.sandbox.inside import calls, checks
from quartet.verifiers.sandbox.process import Limits, Sandbox, SandboxProcess, request

MAX_SOURCE_CHARACTERS = 256 * 1024
"""Maximum length of a program. A longer one passes no test."""
_SIGXCPU = 24


class Kind(StrEnum):
    """Result of a test."""

    PASSED = "passed"
    WRONG_ANSWER = "wrong answer"
    RUNTIME_ERROR = "runtime error"
    TIME_LIMIT = "time limit"
    MEMORY_LIMIT = "memory limit"
    OUTPUT_LIMIT = "output limit"
    NOT_RUN = "not run"
    """The tests before it decided the score, or took the time of all."""


@dataclass(frozen=True, slots=True)
class InputOutput:
    """A test that gives standard input and expects standard output."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class Report:
    """Result of each test."""

    kinds: tuple[Kind, ...]

    @property
    def passed(self) -> int:
        """Return the number of tests that passed."""
        return sum(kind is Kind.PASSED for kind in self.kinds)

    @property
    def share(self) -> float:
        """Return the share of tests that passed, 0 to 1."""
        return self.passed / len(self.kinds)


@dataclass(frozen=True, slots=True)
class Program:
    """A candidate program. ``command`` runs a file in another language, with {file} in the place of its path."""

    source: str
    command: tuple[str, ...] = ()
    file_name: str = "program.py"


def run_with_input(
    sandbox: Sandbox,
    program: Program,
    tests: Sequence[InputOutput],
    limits: Limits,
    *,
    total_seconds: float = float("inf"),
    stop_at_failure: bool = False,
) -> Report:
    """Run the program once per test, each time in a fresh sandbox, and compare what it prints.

    The expected output never enters the sandbox. Trailing white space of lines and empty lines at the end do not count. After
    ``total_seconds``, or at the first failure with ``stop_at_failure``, the other tests are not run. Raises SandboxFailed.
    """
    end = time.monotonic() + total_seconds

    def kinds() -> Iterator[Kind]:
        for test in tests:
            if time.monotonic() >= end:
                return
            kind = _run_once(sandbox, program, test, limits)
            yield kind
            if stop_at_failure and kind is not Kind.PASSED:
                return

    if len(program.source) > MAX_SOURCE_CHARACTERS:
        return _report([Kind.RUNTIME_ERROR], len(tests))
    return _report(list(kinds()), len(tests))


def run_with_calls(
    sandbox: Sandbox,
    program: Program,
    tests: Sequence[str],
    limits: Limits,
    *,
    entry_point: str = "",
    total_seconds: float = float("inf"),
    stop_at_failure: bool = False,
) -> Report:
    """Run test statements that call the program's functions, the statements and the program in one sandbox each.

    The tests share their names. A test that defines ``check(candidate)`` is called with the function ``entry_point``. If the
    program ends or exceeds a limit, it is started again for the next test. For ``total_seconds`` and ``stop_at_failure`` see
    ``run_with_input``. Raises SandboxFailed; InvalidField with the number of a test that is not usable.
    """
    end = time.monotonic() + total_seconds
    if len(program.source) > MAX_SOURCE_CHARACTERS:
        return _report([Kind.RUNTIME_ERROR], len(tests))
    kinds: list[Kind] = []
    while len(kinds) < len(tests) and time.monotonic() < end:
        if kinds and stop_at_failure and kinds[-1] is not Kind.PASSED:
            break
        kinds += _run_calls(sandbox, program, tests, len(kinds), limits, entry_point, end, stop_at_failure)
    return _report(kinds, len(tests))


def same_text(output: str, expected: str) -> bool:
    """Return whether two outputs are equal up to white space at the ends of lines and of the text."""
    return [line.rstrip() for line in output.rstrip().splitlines()] == [
        line.rstrip() for line in expected.rstrip().splitlines()
    ]


def _report(kinds: Sequence[Kind], tests: int) -> Report:
    return Report((*kinds, *[Kind.NOT_RUN] * (tests - len(kinds))))


def _run_once(sandbox: Sandbox, program: Program, test: InputOutput, limits: Limits) -> Kind:
    first = request(limits, program.source, command=program.command, file_name=program.file_name)
    with sandbox.launch(limits) as process:
        process.begin(first + test.input.encode(), closes_input=True)
        status = process.wait(time.monotonic() + limits.seconds)
        if status == 0:
            return Kind.PASSED if same_text(process.output.decode(errors="replace"), test.output) else Kind.WRONG_ANSWER
        return _failure(process, status)


def _failure(process: SandboxProcess, status: int | None) -> Kind:
    """Return how a program failed. The kind is for people: a program can make any failure look like another."""
    if process.exceeded_output:
        return Kind.OUTPUT_LIMIT
    if status is None or status == 128 + _SIGXCPU:
        return Kind.TIME_LIMIT
    lines = process.errors.strip().splitlines()
    return Kind.MEMORY_LIMIT if lines and lines[-1].startswith("MemoryError") else Kind.RUNTIME_ERROR


def _run_calls(
    sandbox: Sandbox,
    program: Program,
    tests: Sequence[str],
    first: int,
    limits: Limits,
    entry_point: str,
    end: float,
    stop_at_failure: bool,
) -> list[Kind]:
    """Run the tests from number ``first`` on until the program ends. Return how they ended, at least one."""
    kinds: list[Kind] = []
    with sandbox.launch(limits) as candidate, sandbox.launch(limits) as checker:
        candidate.begin(request(limits, program.source, script=calls))
        checker.begin(request(limits, "", script=checks, more=entry_point))
        deadline = time.monotonic() + limits.seconds
        # The first answer comes when the program has defined its functions.
        candidate.send(b'{"number": 0, "do": "start"}\n')
        answer = candidate.read_line(deadline)
        if answer is None:
            return [_ended(candidate, deadline)] * (len(tests) - first)
        if b'"raised"' in answer:
            kind = Kind.MEMORY_LIMIT if b'"MemoryError"' in answer else Kind.RUNTIME_ERROR
            return [kind] * (len(tests) - first)
        for number in range(first, len(tests)):
            deadline = min(end, time.monotonic() + limits.seconds)
            checker.send(json.dumps({"test": tests[number]}).encode() + b"\n")
            kind = _relay(candidate, checker, number, deadline)
            kinds.append(kind)
            has_ended = kind is Kind.TIME_LIMIT or not (candidate.is_running() and checker.is_running())
            if has_ended or candidate.exceeded_output or (stop_at_failure and kind is not Kind.PASSED):
                break
    return kinds


def _relay(candidate: SandboxProcess, checker: SandboxProcess, number: int, deadline: float) -> Kind:
    """Pass calls and results on until the verdict on test ``number``."""
    answers = 0
    while True:
        line = checker.read_line(deadline)
        if line is None:
            if time.monotonic() >= deadline:
                return Kind.TIME_LIMIT
            # A result of the program may be too large for the test.
            if answers:
                return Kind.OUTPUT_LIMIT if checker.exceeded_output else Kind.RUNTIME_ERROR
            if checker.exceeded_output:
                raise InvalidField(f"tests[{number}]: writes more than limits.output_bytes; shorten its arguments")
            raise SandboxFailed(f"the process of tests[{number}] ended before its verdict")
        if line.startswith(b"C"):
            candidate.send(line[1:])
            answer = candidate.read_line(deadline)
            if answer is None:
                return _ended(candidate, deadline)
            checker.send(answer)
            answers += 1
            continue
        verdict = json.loads(line[1:])
        if "unusable" in verdict:
            raise InvalidField(f"tests[{number}]: {verdict['unusable']}")
        return Kind(verdict["kind"])


def _ended(candidate: SandboxProcess, deadline: float) -> Kind:
    """Return how a program failed that gave no answer."""
    status = candidate.wait(deadline)
    return Kind.RUNTIME_ERROR if status == 0 else _failure(candidate, status)
