"""Weights that ranks on GPUs send through NCCL: what is asked of torch, and the transfer itself on a machine with two GPUs."""

from __future__ import annotations

import multiprocessing
import socket
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

from quartet.weight_transfer import process_group
from quartet.weight_transfer.messages import RankSlices, WeightGroup
from quartet.weight_transfer.process_group import GroupSettings, Meeting, send_slices
from tests.device.pretended_gpu import PretendedGpu

NCCL = GroupSettings("nccl", 60.0, "cuda:0")


class FakeNccl:
    """ProcessGroupNCCL as far as it is asked for. It sends nothing."""

    calls: ClassVar[list[Any]] = []

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.calls.append(("group", rank, size, options._timeout.total_seconds()))

    def send(self, tensors: list[torch.Tensor], other: int, tag: int) -> Any:
        self.calls.append(("send", str(tensors[0].device), other, tag))
        return SimpleNamespace(wait=lambda timeout: None)

    def recv(self, tensors: list[torch.Tensor], other: int, tag: int) -> Any:
        self.calls.append(("recv", str(tensors[0].device), other, tag))
        return SimpleNamespace(wait=lambda timeout: tensors[0].fill_(7))

    def abort(self) -> None:
        self.calls.append("abort")


def test_bytes_go_through_the_memory_of_the_gpu(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: FakeNccl.calls.append(str(device)))
    FakeNccl.calls.clear()
    own, other = socket.socketpair()
    with other:
        member = process_group._Member(NCCL, own, process_group.RECEIVER)
        data = np.arange(4, dtype=np.uint8)
        member.send(data, 3)()
        member.receive(data, 4)()
        member.close()
    assert data.tolist() == [7, 7, 7, 7]
    on_gpu = "cuda:0"
    assert FakeNccl.calls == [
        on_gpu,
        ("group", 1, 2, 60.0),
        ("send", on_gpu, 0, 3),
        ("recv", on_gpu, 0, 4),
        "abort",
    ]


def _send(group: WeightGroup, data: Any) -> None:
    send_slices(replace(NCCL, device="cuda:1"), group, 0, [data])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses one that two processes use")
def test_a_rank_on_one_gpu_sends_to_a_receiver_on_another() -> None:
    data = np.random.default_rng(0).integers(0, 256, 3 * process_group.PIECE_BYTES + 5).astype(np.uint8)
    received, complete = np.zeros_like(data), list[int]()
    meeting = Meeting(NCCL, "127.0.0.1")
    sender = multiprocessing.get_context("spawn").Process(target=_send, args=(meeting.group, data))
    sender.start()
    ranks = [RankSlices((0,), (0,), (len(data),))]
    assert meeting.receive(ranks, [received], complete.append, time.monotonic() + 120) == len(data)
    sender.join(60)
    meeting.close()
    assert (complete, sender.exitcode) == ([0], 0)
    assert np.array_equal(received, data)
