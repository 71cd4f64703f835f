"""Verifiers of programs: ``quartet.verifiers.code:run_tests``, and ``run_tests_batched`` for ``batched: true``.

The programs run in a sandbox, see docs/verifiers.md. A program that fails in any way scores 0. A sandbox that fails raises
SandboxFailed, which is never a score.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from quartet.errors import ConfigError
from quartet.verifiers.errors import InvalidField
from quartet.verifiers.fields import field, texts
from quartet.verifiers.programs import InputOutput, Program, Report, run_with_calls, run_with_input
from quartet.verifiers.sandbox.process import Limits
from quartet.verifiers.sandbox.selection import DEFAULT_IMAGE, open_sandbox

MAX_TESTS = 1000
FENCE = "```"


def run_tests(
    prompt: str,
    response: str,
    fields: dict[str, Any],
    *,
    tests_field: str = "tests",
    entry_point_field: str = "entry_point",
    prefix_field: str = "",
    partial: bool = False,
    command: Sequence[str] = (),
    file_name: str = "program.py",
    sandbox: str = "auto",
    python: str = "",
    image: str = DEFAULT_IMAGE,
    limits: dict[str, Any] | None = None,
    total_seconds: float = 30.0,
) -> float:
    """Return 1 if the response's program passes all tests of its line, otherwise 0; with ``partial``, the share that it passes.

    The program is the last Markdown block of the response, or all of it without one, after the text of ``prefix_field``, if
    given. Tests are a list of {"input": "...", "output": "..."}, a list of Python statements, or a text with Python.
    ``command`` runs a program in another language, with {file} in the place of its path. ``limits`` are those of ``Limits``,
    and all tests together get ``total_seconds``. Raises InvalidField, ConfigError; SandboxFailed if there is no working
    sandbox.
    """
    tests = _tests(fields, tests_field)
    prefix = field(fields, prefix_field) if prefix_field else ""
    if not isinstance(prefix, str):
        raise InvalidField(f"fields: {prefix_field!r} is of type {type(prefix).__name__}, expected a text")
    entry_point = fields.get(entry_point_field) or ""
    if not isinstance(entry_point, str):
        raise InvalidField(f"fields: {entry_point_field!r} is of type {type(entry_point).__name__}, expected a name")
    program = Program(prefix + program_of(response), tuple(command), file_name)
    box, bounds = open_sandbox(sandbox, python, image), _limits(limits)
    if isinstance(tests[0], InputOutput):
        pairs = [test for test in tests if isinstance(test, InputOutput)]
        report: Report = run_with_input(
            box, program, pairs, bounds, total_seconds=total_seconds, stop_at_failure=not partial
        )
    else:
        if command:
            raise ConfigError("command: only for tests with input and output; statements call functions of Python")
        statements = [test for test in tests if isinstance(test, str)]
        report = run_with_calls(
            box,
            program,
            statements,
            bounds,
            entry_point=entry_point,
            total_seconds=total_seconds,
            stop_at_failure=not partial,
        )
    return report.share if partial else float(report.passed == len(tests))


def run_tests_batched(
    prompts: Sequence[str],
    responses: Sequence[str],
    fields: Sequence[dict[str, Any]],
    *,
    workers: int = 0,
    **settings: Any,
) -> list[float]:
    """Return the score of each response, see ``run_tests``, with ``workers`` programs at a time. 0: one for each CPU.

    Equal responses to equal lines run once.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    arguments = list(zip(responses, [json.dumps(line, sort_keys=True) for line in fields], strict=True))
    calls: dict[tuple[str, str], Future[float]] = {}
    with ThreadPoolExecutor(max_workers=workers or cpus or 1, thread_name_prefix="sandbox") as pool:
        for prompt, key, line in zip(prompts, arguments, fields, strict=True):
            if key not in calls:
                calls[key] = pool.submit(run_tests, prompt, key[0], line, **settings)
        try:
            return [calls[key].result() for key in arguments]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def program_of(response: str) -> str:
    """Return the last Markdown block of a response, without its fences, or the whole response without a block."""
    lines = response.splitlines(keepends=True)
    fences = [number for number, line in enumerate(lines) if line.lstrip().startswith(FENCE)]
    if not fences:
        return response
    if len(fences) % 2:  # The last block is not closed.
        return "".join(lines[fences[-1] + 1 :])
    return "".join(lines[fences[-2] + 1 : fences[-1]])


def _tests(fields: dict[str, Any], name: str) -> list[InputOutput | str]:
    tests = field(fields, name)
    if isinstance(tests, str) and tests.strip():
        return [tests]
    if not isinstance(tests, list) or not 0 < len(tests) <= MAX_TESTS:
        raise InvalidField(f"fields: {name!r} is not a text and not a list of 1 to {MAX_TESTS} tests")
    if not isinstance(tests[0], dict):
        return list(texts(tests, f"fields: {name!r}"))
    for index, test in enumerate(tests):
        is_pair = isinstance(test, dict) and all(isinstance(test.get(key), str) for key in ("input", "output"))
        if not is_pair:
            raise InvalidField(f'fields: {name}[{index}] is not an object with the texts "input" and "output"')
    return [InputOutput(test["input"], test["output"]) for test in tests]


def _limits(limits: dict[str, Any] | None) -> Limits:
    try:
        return Limits(**(limits or {}))
    except (TypeError, ValueError) as error:
        expected = ", ".join(Limits.__dataclass_fields__)
        raise ConfigError(f"limits: {str(error).rpartition('__init__() ')[2]}; expected some of {expected}") from None
