"""Programs against tests: kinds, scores, languages, and failures of the sandbox, which are never scores."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import quartet
from quartet.errors import ConfigError
from quartet.verifiers.code import program_of, run_tests, run_tests_batched
from quartet.verifiers.errors import InvalidField, SandboxFailed
from quartet.verifiers.programs import InputOutput, Kind, Program, run_with_calls, run_with_input
from quartet.verifiers.sandbox.process import Limits, Sandbox, request
from quartet.verifiers.sandbox.selection import open_sandbox
from tests.verifiers.conftest import MARKER, leftovers
from tests.verifiers.hostile_programs import ATTACKS

LIMITS = Limits(seconds=30.0, cpu_seconds=30)
SHORT = Limits(seconds=1.0)
ADD = "def add(a, b):\n    return a + b\n"


def calls(box: Sandbox, source: str, *tests: str, entry_point: str = "") -> tuple[str, ...]:
    """Return how each test of a program ends."""
    report = run_with_calls(box, Program(source), tests, LIMITS, entry_point=entry_point)
    return tuple(str(kind) for kind in report.kinds)


def test_each_test_with_input_has_a_kind(box: Sandbox) -> None:
    source = "n = int(input())\nif n == 3: 1 / 0\nprint(n * n if n < 4 else bytearray(10**12))"
    tests = [InputOutput("2\n", "4\n"), InputOutput("1", "2"), InputOutput("3", "9"), InputOutput("4", "16")]
    report = run_with_input(box, Program(source), tests, LIMITS)
    assert report.kinds == (Kind.PASSED, Kind.WRONG_ANSWER, Kind.RUNTIME_ERROR, Kind.MEMORY_LIMIT)
    assert (report.passed, report.share) == (1, 0.25)


def test_white_space_at_the_ends_of_lines_does_not_count(box: Sandbox) -> None:
    tests = [InputOutput("", "a\nb"), InputOutput("", "a b")]
    report = run_with_input(box, Program("print('a  \\nb\\n\\n')"), tests, LIMITS)
    assert report.kinds == (Kind.PASSED, Kind.WRONG_ANSWER)


def test_a_program_reads_all_of_a_long_input_and_may_leave_it_unread(box: Sandbox) -> None:
    text = "x" * 10**6
    for source, output in (("import sys; print(len(sys.stdin.read()))", "1000000"), ("print(1)", "1")):
        assert run_with_input(box, Program(source), [InputOutput(text, output)], LIMITS).passed == 1


def test_a_program_is_main_with_a_file_and_an_empty_folder(box: Sandbox) -> None:
    source = "import os, sys\nprint(__name__, __file__, sys.argv, os.listdir(), os.getcwd(), 'STARTED' in globals())"
    output = "__main__ /tmp/program.py ['/tmp/program.py'] [] /tmp False"
    assert run_with_input(box, Program(source), [InputOutput("", output)], LIMITS).passed == 1


def test_an_exit_status_other_than_0_fails_a_right_answer(box: Sandbox) -> None:
    report = run_with_input(box, Program("print(1)\nraise SystemExit(3)"), [InputOutput("", "1")], LIMITS)
    assert report.kinds == (Kind.RUNTIME_ERROR,)


def test_statements_call_functions_and_classes(box: Sandbox) -> None:
    source = (
        "import math\nLIMIT = 7\n"
        "def add(a, b=1): return a + b\n"
        "def order(values): values.sort()\n"
        "def fail(): raise ValueError('no')\n"
        "class Stack:\n"
        "    def __init__(self): self.items = []\n"
        "    def push(self, item): self.items.append(item); return self\n"
        "    def __len__(self): return len(self.items)\n"
        "def squares(n):\n    for i in range(n): yield i * i\n"
    )
    tests = (
        "assert add(2, b=3) == 5 and LIMIT == 7",
        "values = [3, 1, 2]\norder(values)\nassert values == [1, 2, 3]",
        "assert add((1, 2), ({3: b'x'}, {4}, None)) == (1, 2, {3: b'x'}, {4}, None)",
        "stack = Stack()\nassert len(stack.push(1).push(2)) == 2",
        "assert stack.items == [1, 2]",
        "assert list(squares(4)) == [0, 1, 4, 9]",
        "try:\n    fail()\nexcept ValueError:\n    pass\nelse:\n    assert False",
        "from solution import add as plus\nassert plus(1) == 2",
        "import math\nassert math.isclose(add(0.1, 0.2), 0.3)",
        "assert add(1, 1) == 3",
        "fail()",
        "missing(1)",
        "assert add(1, 1) == 2",
    )
    kinds = calls(box, source, *tests)
    assert kinds == ("passed",) * 9 + ("wrong answer", "runtime error", "runtime error", "passed")


OBJECTS = """
import itertools, math
from collections import deque
from decimal import Decimal
from fractions import Fraction
def half(kind): return {"f": Fraction, "d": Decimal}[kind]("0.5")
def factorial(n): return math.factorial(n)
def count(): return itertools.count(1)
def many(): yield from range(20000)
def line(): return deque([1, 2]), range(3)
def same(value): return value
class V:
    def __init__(self, x): self.x = x
    def __add__(self, other): return V(self.x + other.x)
    def __rmul__(self, other): return V(other * self.x)
    def __eq__(self, other): return self.x == getattr(other, "x", other)
    def __lt__(self, other): return self.x < other.x
    def __hash__(self): return hash(self.x)
    def __neg__(self): return V(-self.x)
    def __getitem__(self, index): return [self.x][index]
    def __contains__(self, item): return item == self.x
    def __bool__(self): return self.x != 0
    def __float__(self): return float(self.x)
    def __repr__(self): return f"V({self.x})"
    def __enter__(self): return self
    def __exit__(self, *error): self.x = 0
def sort(values): values.sort()
"""


def test_numbers_and_objects_of_a_right_program_work_as_in_its_process(box: Sandbox) -> None:
    tests = (
        "assert half('f') == 0.5 and half('f') > 0 and half('d') * 2 == 1 and float(half('d')) == 0.5",
        "from fractions import Fraction\nassert same(Fraction(1, 3)) == Fraction(1, 3)",
        "import math\nassert factorial(2000) == math.factorial(2000) and same(-10**6000) == -10**6000",
        "numbers = count()\nassert next(numbers) == 1 and next(numbers) == 2",
        "assert sum(many()) == 199990000",
        "numbers = many()\nassert sum(next(numbers) for _ in range(300)) == 44850 and next(numbers) == 300",
        "from itertools import islice\nassert list(islice(count(), 3)) == [1, 2, 3]",
        "from collections import deque\nassert line() == (deque([1, 2]), range(3))",
        "assert (V(1) + V(2)).x == 3 and V(1) + V(2) == V(3) and V(1) != V(2) and 2 * V(3) == V(6) and V(3) == 3",
        "assert V(1) < V(2) and sorted([V(2), V(1)]) == [V(1), V(2)] and max(V(1), V(2)) == V(2)",
        "assert -V(1) == V(-1) and {V(1): 2}[V(1)] == 2 and len({V(1), V(1)}) == 1 and bool(V(0)) is False",
        "assert V(4)[0] == 4 and 4 in V(4) and 5 not in V(4) and float(V(4)) == 4.0 and f'{V(4)}' == 'V(4)'",
        "v = V(1)\nv.x = 7\nassert v.x == 7 and isinstance(v, V) and not isinstance(3, V)",
        "import copy\nv = V([1])\nw = copy.deepcopy(v)\nv.x.append(2)\nassert w == V([1])",
        "with V(1) as v:\n    assert v.x == 1\nassert v.x == 0",
        "values = [V(2), V(1)]\nsort(values)\nassert values == [V(1), V(2)]",
    )
    assert calls(box, OBJECTS, *tests) == ("passed",) * len(tests)
    assert calls(box, OBJECTS, "V(1) + 1", "V(1)[3]", "assert V(1) == V(2)", "assert half('f') == 0.25") == (
        "runtime error",
        "runtime error",
        "wrong answer",
        "wrong answer",
    )


def test_a_program_that_raises_syntax_error_fails_the_test(box: Sandbox) -> None:
    assert calls(box, "def add(a, b): raise SyntaxError", "assert add(1, 2) == 3") == ("runtime error",)


def test_an_object_of_the_program_does_not_decide_how_a_result_compares(box: Sandbox) -> None:
    source = (
        "class Any:\n"
        "    def true(self, *other): return True\n"
        "    __eq__ = __lt__ = __gt__ = __contains__ = true\n"
        "    def zero(self, *other): return 0\n"
        "    __sub__ = __rsub__ = __len__ = __hash__ = zero\n"
        "    def __iter__(self): return iter([Any()])\n"
        "def add(a, b): return Any()\n"
        "class Solution(Any):\n    def add(self, a, b): return self.__class__()\n"
    )
    tests = (
        "assert add(2, 3) == 5",
        "assert 5 in add(2, 3)",
        "assert abs(add(2, 3) - 5) < 1e-6",
        "assert 4 < add(2, 3) < 6",
        "assert add(2, 3) in [5]",
        "assert Solution().add(2, 3) == 5",
        "assert abs(Solution().add(2, 3) - 5) < 1e-6",
    )
    assert "passed" not in calls(box, source, *tests)


def test_a_test_file_checks_the_entry_point(box: Sandbox) -> None:
    test = "def check(candidate):\n    for n in range(5):\n        assert candidate(n, 1) == n + 1\n"
    assert calls(box, ADD, test, entry_point="add") == ("passed",)
    assert calls(box, "def add(a, b): return 1", test, entry_point="add") == ("wrong answer",)


def test_a_function_with_the_name_of_a_builtin_is_tested_as_the_entry_point(box: Sandbox) -> None:
    with pytest.raises(InvalidField, match=r"tests\[0\]: uses nothing of the program"):
        calls(box, "def sum(values): return 0", "assert sum([1]) == 1")
    assert calls(box, "def sum(values): return 0", "assert sum([1]) == 1", entry_point="sum") == ("wrong answer",)


def test_a_program_that_ends_in_a_test_is_started_again_for_the_next(box: Sandbox) -> None:
    source = f"import os\n{ADD}def leave(): os._exit(3)\n"
    tests = ("assert add(1, 1) == 2", "leave()", "assert add(2, 2) == 4")
    assert calls(box, source, *tests) == ("passed", "runtime error", "passed")


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("assert add(", "is not Python"),
        ("add(1, lambda: 2)", "gives the program a value of type function"),
        ("class Mine(add):\n    pass", "derives a class from one of the program's"),
        ("try:\n    add(1)\nexcept add:\n    pass", "catches an exception class of the program"),
        ("async def wait():\n    await add\nwait().send(None)", "awaits the program"),
    ],
)
def test_an_unusable_test_is_an_error_and_no_score(test: str, reason: str, box: Sandbox) -> None:
    with pytest.raises(InvalidField, match=reason):
        calls(box, ADD, test)


def test_tests_after_the_first_failure_are_not_run_if_they_cannot_change_the_score(box: Sandbox) -> None:
    pairs = [InputOutput("", "2"), InputOutput("", "1")]
    report = run_with_input(box, Program("print(1)"), pairs, LIMITS, stop_at_failure=True)
    assert report.kinds == (Kind.WRONG_ANSWER, Kind.NOT_RUN)
    report = run_with_calls(box, Program(ADD), ["assert add(1, 1) == 3"] * 3, LIMITS, stop_at_failure=True)
    assert report.kinds == (Kind.WRONG_ANSWER, Kind.NOT_RUN, Kind.NOT_RUN)


def test_all_tests_together_have_a_time_limit(box: Sandbox) -> None:
    source = "import time\ntime.sleep(100)"
    report = run_with_input(box, Program(source), [InputOutput("", "")] * 9, SHORT, total_seconds=0.5)
    assert report.kinds == (Kind.TIME_LIMIT,) + (Kind.NOT_RUN,) * 8
    source = f"import time\n{ADD}def wait(): time.sleep(100)"
    report = run_with_calls(box, Program(source), ["wait()"] * 9, SHORT, total_seconds=0.5)
    assert report.kinds == (Kind.TIME_LIMIT,) + (Kind.NOT_RUN,) * 8


def test_a_program_in_another_language_runs_by_its_command(box: Sandbox) -> None:
    program = Program("read x\necho $((x + 1))\n", command=("/bin/sh", "{file}"), file_name="program.sh")
    assert run_with_input(box, program, [InputOutput("41\n", "42")], LIMITS).passed == 1


def test_a_missing_interpreter_is_a_failure_of_the_program_s_command(box: Sandbox) -> None:
    program = Program("", command=("/usr/bin/no-such-program", "{file}"))
    assert run_with_input(box, program, [InputOutput("", "")], LIMITS).kinds == (Kind.RUNTIME_ERROR,)


def test_a_program_that_is_too_long_passes_no_test(box: Sandbox) -> None:
    source = "#" * 10**6
    assert run_with_input(box, Program(source), [InputOutput("", "")], LIMITS).passed == 0
    assert run_with_calls(box, Program(source), ["f()"], LIMITS).passed == 0


def test_a_sandbox_that_is_killed_from_outside_is_a_failure_and_no_score(box: Sandbox) -> None:
    with box.launch(LIMITS) as process:
        process.begin(request(LIMITS, "import time\ntime.sleep(1000)"))
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(SandboxFailed, match="killed by signal 9 from outside"):
            process.wait(time.monotonic() + 60)


def test_a_sandbox_that_does_not_start_is_a_failure_and_no_score(box: Sandbox) -> None:
    broken = type(box)("/usr/bin/no-such-python")  # type: ignore[call-arg]
    with pytest.raises(SandboxFailed, match="did not start") as failure:
        run_with_input(broken, Program("print(1)"), [InputOutput("", "1")], LIMITS)
    assert failure.value.outcome == "sandbox_error"


def test_many_programs_run_at_a_time(box: Sandbox) -> None:
    def run(number: int) -> int:
        return run_with_input(box, Program("print(input())"), [InputOutput(str(number), str(number))], LIMITS).passed

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(run, range(24))) == 24
    assert leftovers() == []


def test_nothing_is_left_of_a_sandbox_that_is_closed_while_it_starts(box: Sandbox) -> None:
    for number in range(20):
        process = box.launch(LIMITS)
        time.sleep(number * 0.0005)
        process.close()
    assert leftovers() == []


def test_nothing_is_left_of_a_program_when_its_caller_is_killed(box: Sandbox, tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(
        "from quartet.verifiers.sandbox import bubblewrap\n"
        "from tests.verifiers.conftest import MARKER\nimport sys\n"
        "bubblewrap.START_SCRIPT = '# ' + sys.argv[1] + '\\n' + bubblewrap.START_SCRIPT\n"
        "from quartet.verifiers.sandbox.selection import open_sandbox\n"
        "from quartet.verifiers.sandbox.process import request\n"
        "from quartet.verifiers.sandbox.process import Limits\n"
        "limits = Limits()\n"
        "process = open_sandbox('bubblewrap').launch(limits)\n"
        "process.begin(request(limits, 'import time\\ntime.sleep(1000)'))\n"
        "print('running', flush=True)\nprocess.wait(1e6)\n"
    )
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    with subprocess.Popen(
        [sys.executable, str(script), MARKER], stdout=subprocess.PIPE, env=environment, cwd=root
    ) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"running\n"
        assert leftovers() != []
        caller.kill()
    deadline = 200
    while leftovers() and deadline:
        deadline -= 1
        threading.Event().wait(0.05)
    assert leftovers() == []


AS_A_USER = """
from quartet.verifiers.programs import InputOutput, Program, run_with_input
from quartet.verifiers.sandbox.process import Limits
from quartet.verifiers.sandbox.selection import open_sandbox
source = sys.argv[1]
limits = Limits(seconds=60.0, cpu_seconds=60)
report = run_with_input(open_sandbox("bubblewrap"), Program(source), [InputOutput("", "contained")], limits)
print(os.getuid(), *report.kinds)
"""


def test_the_limit_of_processes_holds_for_users_without_root(box: Sandbox) -> None:
    python, source = Path("/usr/bin/python3"), Path(quartet.__file__).parents[1]
    if os.geteuid() != 0:
        pytest.skip("these tests run without root as a whole")
    script = f"import os, sys\nsys.path.insert(0, {str(source)!r})\n{AS_A_USER}"
    command = [str(python), "-I", "-S", "-c", script, ATTACKS["starts many processes"]]
    check = [
        str(python),
        "-c",
        f"import sys, os; sys.exit(sys.version_info < (3, 11) or not os.access({str(source)!r}, 5))",
    ]
    if not python.exists() or subprocess.run(check, user=12345, cwd="/").returncode:
        pytest.skip("no Python 3.11 or newer in /usr/bin, or other users may not read this checkout")
    result = subprocess.run(command, user=12345, group=12345, extra_groups=[], cwd="/", capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("12345 passed\n", "")


class TestTheRewardFunction:
    """``quartet.verifiers.code``: fields, settings and scores."""

    def test_it_scores_the_last_block_of_the_response(self, box: Sandbox) -> None:
        response = f"First:\n```python\nnonsense\n```\nBetter:\n```python\n{ADD}```\nDone."
        assert program_of(response) == ADD
        assert program_of(ADD) == ADD
        assert program_of(f"```\n{ADD}") == ADD
        assert run_tests("", response, {"tests": ["assert add(1, 2) == 3"]}) == 1.0

    def test_partial_credit_is_the_share_of_passed_tests(self, box: Sandbox) -> None:
        fields = {"tests": ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]}
        assert run_tests("", ADD, fields) == 0.0
        assert run_tests("", ADD, fields, partial=True) == 0.5

    def test_a_prefix_completes_the_program(self, box: Sandbox) -> None:
        fields = {"tests": "assert add(1, 2) == 3", "start": "def add(a, b):\n"}
        assert run_tests("", "    return a + b\n", fields, prefix_field="start") == 1.0

    def test_a_batch_has_one_score_for_each_response(self, box: Sandbox) -> None:
        fields = [{"tests": [{"input": str(n), "output": str(n)}]} for n in range(6)]
        responses = ["print(input())"] * 3 + ["print(3)"] * 3
        assert run_tests_batched([""] * 6, responses, fields, workers=3) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]

    def test_equal_responses_of_a_batch_run_once(self, box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        launches = []
        launch = type(box).launch
        monkeypatch.setattr(type(box), "launch", lambda self, limits: launches.append(1) or launch(self, limits))
        line = {"tests": [{"input": "1", "output": "1"}]}
        other = {"tests": [{"input": "2", "output": "2"}]}
        assert run_tests_batched([""] * 5, ["print(1)"] * 5, [line] * 4 + [other]) == [1.0] * 4 + [0.0]
        assert len(launches) == 2

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({}, "'tests' is missing, found none"),
            ({"tests": []}, "not a list of 1 to 1000 tests"),
            ({"tests": " "}, "not a text"),
            ({"tests": [1]}, "has an entry that is not a text"),
            ({"tests": [{"input": "1"}]}, r'tests\[0\] is not an object with the texts "input" and "output"'),
            ({"tests": ["f()"], "entry_point": 3}, "'entry_point' is of type int"),
        ],
    )
    def test_a_bad_field_is_an_error(self, fields: dict[str, object], message: str) -> None:
        with pytest.raises(InvalidField, match=message):
            run_tests("", ADD, fields)

    def test_a_bad_setting_is_an_error(self, box: Sandbox) -> None:
        for settings in ({"limits": {"secs": 1}}, {"limits": {"seconds": 0}}, {"sandbox": "none"}, {"command": ["sh"]}):
            with pytest.raises(ConfigError):
                run_tests("", ADD, {"tests": ["add(1, 1)"]}, **settings)  # type: ignore[arg-type]


def test_without_a_tool_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    open_sandbox.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SandboxFailed, match=r"no bwrap in PATH; install the package bubblewrap.*docker.*podman"
    ) as failure:
        run_tests("", ADD, {"tests": ["add(1, 1)"]})
    assert failure.value.outcome == "sandbox_error"


def test_a_forbidden_user_namespace_is_an_error_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    open_sandbox.cache_clear()
    tool = tmp_path / "bwrap"
    tool.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    tool.chmod(0o755)
    tmp_path.chmod(0o755)
    for folder in list(tmp_path.parents)[:3]:
        folder.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SandboxFailed, match="No permissions to create new namespace"):
        open_sandbox("bubblewrap")
    assert shutil.which("bwrap") == str(tool)
