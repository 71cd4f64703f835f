from __future__ import annotations

import pytest

from quartet.contract.profile import Gap, OperatorTime
from quartet.telemetry.trace_summary import MAX_GAPS, MAX_ROWS, TraceEvent, summarise

S = 10**9
"""A second, in the unit of events."""


def call(kind: str, start: float, end: float) -> TraceEvent:
    return TraceEvent(f"quartet: {kind}", int(start * S), int(end * S), 1, "annotation")


def operator(name: str, start: float, end: float, thread: int = 1) -> TraceEvent:
    return TraceEvent(name, int(start * S), int(end * S), thread)


def kernel(name: str, start: float, end: float, stream: int = 7) -> TraceEvent:
    return TraceEvent(name, int(start * S), int(end * S), stream, "kernel")


def collective(name: str, start: float, end: float) -> TraceEvent:
    return TraceEvent(name, int(start * S), int(end * S), 1, "annotation")


def test_an_operator_has_its_time_without_that_of_those_which_it_calls() -> None:
    events = [
        operator("linear", 0, 10),
        operator("addmm", 1, 7),
        operator("copy", 2, 4),
        operator("add", 7, 8),
        operator("linear", 20, 21),
        operator("addmm", 0, 3, thread=2),
    ]
    assert summarise(events, 30).operators == (
        OperatorTime("addmm", 2, 4 + 3),
        OperatorTime("linear", 2, 3 + 1),
        OperatorTime("copy", 1, 2),
        OperatorTime("add", 1, 1),
    )


def test_gaps_are_the_times_of_a_call_in_which_nothing_runs() -> None:
    events = [
        call("update", 0, 10),
        operator("a", 1, 4),
        operator("b", 3, 5),
        operator("c", 8, 9),
        operator("d", 12, 13),
    ]
    summary = summarise(events, 20)
    assert summary.gap_seconds == 1 + 3 + 1
    assert summary.gaps == (Gap("b", "c", 3), Gap("", "a", 1), Gap("c", "", 1))
    assert summary.compute_seconds == 4 + 1 + 1


def test_calls_of_one_kind_are_added_and_the_rest_is_waiting() -> None:
    events = [call("update", 0, 2), call("values", 3, 4), call("update", 5, 8)]
    assert summarise(events, 10).work_seconds == {"update": 5, "values": 1}


def test_on_a_gpu_kernels_count_on_all_streams_together() -> None:
    events = [
        call("update", 0, 10),
        operator("aten::mm", 0, 1),
        kernel("gemm", 1, 4),
        kernel("copy", 3, 5, stream=20),
        kernel("gemm", 6, 7),
    ]
    summary = summarise(events, 10)
    assert (summary.device, summary.compute_seconds, summary.gap_seconds) == ("cuda", 5, 5)
    assert summary.kernels == (OperatorTime("gemm", 2, 4), OperatorTime("copy", 1, 2))
    assert summary.operators == (OperatorTime("aten::mm", 1, 1),)


@pytest.mark.parametrize("name", ["ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclKernel_AllGather"])
def test_communication_is_exposed_while_no_kernel_computes(name: str) -> None:
    events = [call("update", 0, 10), kernel("gemm", 0, 4), kernel(name, 3, 8, stream=20), kernel("gemm", 6, 7)]
    summary = summarise(events, 10)
    assert summary.communication_seconds == 5
    assert summary.exposed_communication_seconds == 5 - 1 - 1
    assert summary.gap_seconds == 2


def test_collectives_of_gloo_are_communication_on_a_cpu() -> None:
    events = [
        call("update", 0, 10),
        operator("aten::mm", 0, 4),
        operator("c10d::allreduce_", 4, 9),
        collective("gloo:all_reduce", 3, 9),
    ]
    summary = summarise(events, 10)
    assert (summary.communication_seconds, summary.exposed_communication_seconds) == (6, 5)
    assert (summary.compute_seconds, summary.gap_seconds) == (4, 1)


def test_an_operator_does_not_compute_while_a_collective_blocks_it() -> None:
    events = [
        call("update", 0, 10),
        operator("backward", 0, 8),
        operator("_c10d_functional::wait_tensor", 2, 5),
        collective("gloo:all_gather", 1, 5),
        operator("aten::mm", 9, 10),
    ]
    summary = summarise(events, 10)
    assert (summary.compute_seconds, summary.gap_seconds) == (5 + 1, 1)
    assert (summary.communication_seconds, summary.exposed_communication_seconds) == (4, 3)


def test_a_summary_is_bounded() -> None:
    events = [call("update", 0, 1000), *(operator(f"op{i}", 2 * i, 2 * i + 1) for i in range(400))]
    summary = summarise(events, 1000)
    assert (len(summary.operators), len(summary.gaps)) == (MAX_ROWS, MAX_GAPS)
    assert summary.gap_seconds == 600


def test_a_profile_without_work_is_all_waiting() -> None:
    summary = summarise([], 5.0)
    assert (summary.device, summary.seconds, summary.work_seconds, summary.gap_seconds) == ("cpu", 5.0, {}, 0)
