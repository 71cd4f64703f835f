"""A group on GPUs: which process groups and devices it asks torch for. No GPU computes here."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.errors import ConfigError, ServiceUnavailable
from quartet.models.value_head import ValueModel
from quartet.models.weights.loading import load_causal_lm, load_critic, load_reward_model
from quartet.models.workers import group as group_module
from quartet.models.workers import shard_reading, sharding
from quartet.models.workers.group import WorkerGroup, join_group
from quartet.models.workers.progress import Progress
from quartet.models.workers.shard_reading import read_in_parts
from quartet.models.workers.sharding import shard_model
from quartet.models.workers.workers import Workers
from quartet.rewards import model as reward_module
from quartet.rpc.compute_thread import ComputeThread
from quartet.services import roles
from quartet.services.reference import reference as reference_module
from quartet.services.roles import set_up_thread
from tests.unit.models import tiny


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
    assert group.agreed(lambda: group.progress.report().reading)
    assert not group.progress.report().reading
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
    monkeypatch.setattr(roles, "check_gpu", lambda index: None)
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
        roles.build_model_role(role, config, ComputeThread(), 1, workers=workers)
    model = "policy" if role is Role.REFERENCE else "scorer"
    assert caught.value.args == (model, "float32", device, workers)


def device_types(model: torch.nn.Module) -> set[str]:
    return {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}


@pytest.fixture
def group() -> Any:
    """A group of one rank as far as loading and sharding use it, without torch.distributed."""
    result: Any = WorkerGroup.__new__(WorkerGroup)
    result.rank, result.size, result.mesh, result.tensor = 0, 2, None, None
    result.progress, result.agreed, result.evaluate = Progress(), lambda compute: compute(), lambda compute: None
    return result


@pytest.mark.parametrize("load_model", [load_causal_lm, load_critic, load_reward_model])
def test_ranks_that_compute_slices_load_the_model_into_host_memory(load_model: Any, group: Any, tmp_path: Path) -> None:
    group.tensor = SimpleNamespace(size=2)
    model = tiny.classifier("llama") if load_model is load_reward_model else tiny.causal("llama")
    # The meta device stands for a GPU.
    loaded = load_model(tiny.saved(model, tmp_path / "m"), "float32", "meta", group)
    assert device_types(loaded) == {"cpu"}


def test_a_model_that_is_read_in_turn_is_complete_in_host_memory_only(
    monkeypatch: pytest.MonkeyPatch, group: Any
) -> None:
    devices, group.size, group.shards = list[str](), 1, None
    monkeypatch.setattr(shard_reading, "_part_of", lambda parameter, mesh: None)

    def read(device: str) -> torch.nn.Module:
        devices.append(device)
        return tiny.causal("llama").to(device)

    loaded = read_in_parts(read, "meta", group, in_turn=True)
    assert (devices, device_types(loaded)) == (["cpu"], {"meta"})


def test_parameters_that_stay_whole_are_moved_to_the_device_of_the_group(
    monkeypatch: pytest.MonkeyPatch, group: Any
) -> None:
    model, moved = ValueModel.of_causal_lm(tiny.causal("llama")), list[tuple[int, torch.device]]()

    def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        moved.append((tensor.data_ptr(), device))
        return tensor

    group.device = torch.device("cuda", 3)
    monkeypatch.setattr(torch.Tensor, "to", move)
    # FSDP moves the others.
    monkeypatch.setattr(sharding, "fully_shard", lambda module, **_: module)
    shard_model(model, group, model.head.parameters())
    expected = {(parameter.data_ptr(), group.device) for parameter in model.head.parameters()}
    assert set(moved) == expected
