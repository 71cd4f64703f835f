"""A group on GPUs: which process groups and devices it asks torch for. No GPU computes here."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quartet.config import Config
from quartet.errors import ConfigError, ServiceUnavailable
from quartet.models.workers import group as group_module
from quartet.models.workers.group import WorkerGroup, join_group
from quartet.models.workers.workers import Workers
from quartet.rewards import model as reward_module
from quartet.rpc.compute_thread import ComputeThread
from quartet.services import factories
from quartet.services.factories import set_up_thread
from quartet.services.reference import reference as reference_module
from quartet.types import Role


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Requests of a group of two on GPUs to torch, in order. Collectives record the device of their tensor."""
    results: list[Any] = []
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: results.append(("set_device", str(device))))
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backend, **options: results.append((backend, options["rank"], str(options["device_id"]))),
    )
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(group_module, "init_device_mesh", partial(make_mesh, results))
    for name in ("all_reduce", "broadcast"):
        monkeypatch.setattr(dist, name, partial(record, results, name))
    return results


def make_mesh(results: list[Any], kind: str, shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> dict[str, Any]:
    results.append(("mesh", kind, shape))
    return dict.fromkeys(mesh_dim_names)


def record(results: list[Any], name: str, tensor: torch.Tensor, *_: Any) -> None:
    results.append((name, tensor.device.type))
    if name == "broadcast" and tensor.dtype == torch.int64:
        tensor.zero_()


def join() -> WorkerGroup:
    return join_group(1, 2, ("127.0.0.1", 1), device="cuda:3", store=dist.HashStore())


def test_a_rank_takes_its_device_before_it_joins_by_gloo_and_nccl(requests: list[Any]) -> None:
    group = join()
    assert requests == [("set_device", "cuda:3"), ("cpu:gloo,cuda:nccl", 1, "cuda:3"), ("mesh", "cuda", (2,))]
    assert group.device == torch.device("cuda", 3)


def test_commands_and_agreement_are_host_tensors(requests: list[Any]) -> None:
    group = join()
    requests.clear()
    group.send(1, True, b"data")
    group.smallest(4)
    assert group.agreed(lambda: 5) == 5
    group.receive()
    with pytest.raises(ServiceUnavailable):
        group.agreed(fail)
    assert {device for _, device in requests} == {"cpu"}
    assert [name for name, _ in requests] == ["broadcast", "broadcast", *["all_reduce"] * 2, "broadcast", "all_reduce"]


def fail() -> None:
    raise ServiceUnavailable("the buffer is away")


def test_each_computing_thread_uses_the_device_of_its_rank(requests: list[Any]) -> None:
    group = join()
    requests.clear()
    set_up_thread(1, group)()
    assert requests == [("set_device", "cuda:3")]


def test_a_torch_without_nccl_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match=r"needs NCCL, which torch .* lacks; install torch for CUDA"):
        join()


class Loads(Exception):
    """A load of a model."""


def load(*arguments: Any) -> None:
    raise Loads(*arguments)


@pytest.mark.parametrize("role", [Role.REWARD, Role.REFERENCE])
@pytest.mark.parametrize(("rank", "device"), [(0, "cuda:3"), (1, "cuda:1")])
def test_each_rank_of_a_frozen_role_loads_its_part_on_its_device(
    monkeypatch: pytest.MonkeyPatch, role: Role, rank: int, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(factories, "check_gpu", lambda index: None)
    monkeypatch.setattr(reward_module, "load_reward_model", load)
    monkeypatch.setattr(reference_module, "load_causal_lm", load)
    config = Config.model_validate(
        {
            "actor": {"model": "policy"},
            "reward": {"source": "model", "model": "scorer"},
            "data": {"prompts": "prompts.jsonl"},
            "services": {role: {"devices": [3, 1]}},
        }
    )
    workers = Workers()
    workers.rank, workers.size = rank, 2
    with pytest.raises(Loads) as caught:
        factories.build_model_role(role, config, ComputeThread(), 1, workers=workers)
    model = "policy" if role is Role.REFERENCE else "scorer"
    assert caught.value.args == (model, "float32", device, workers)
