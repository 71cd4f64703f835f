"""Weights of a torch model as bytes, by the names of its Hugging Face checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from quartet.models.weights.lora import Adapter
from quartet.models.workers.workers import SINGLE, Workers
from quartet.system.machine import available_cores
from quartet.weight_transfer.messages import TensorLayout
from quartet.weight_transfer.tensors import (
    AdapterSettings,
    Bytes,
    DeviceTensors,
    HostTensor,
    TensorType,
    tensor_digest,
    tensor_digests,
)

_NAMES: dict[torch.dtype, TensorType] = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def named_weights(model: nn.Module, adapter: Adapter | None = None) -> dict[str, torch.Tensor]:
    """Return the model's own weights by the names of its checkpoint.

    Tied weights appear once, by their first name. With an ``adapter``: the weights of the base model, and those of the adapter by
    peft's names.
    """
    weights: dict[str, torch.Tensor] = {}
    seen = set[int]()
    for name, value in (adapter.base_state() if adapter else model.state_dict(keep_vars=True)).items():
        # A sharded parameter may have no elements on this rank, and so no address.
        key = id(value) if isinstance(value, nn.Parameter) else value.data_ptr()
        if value.dtype in _NAMES and key not in seen:
            weights[name] = value
            seen.add(key)
    return weights | (adapter.state() if adapter else {})


def host_tensor(value: torch.Tensor) -> HostTensor:
    """Return the bytes of a tensor, without a copy if it is contiguous and in host memory."""
    return HostTensor(_NAMES[value.dtype], tuple(value.shape), host_bytes(value))


def host_bytes(value: torch.Tensor) -> Bytes:
    """Return the bytes of a tensor, see ``host_tensor``."""
    data: Bytes = value.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy()
    return data


def layout_of(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorLayout:
    """Return the layout of a weight."""
    return TensorLayout(name, _NAMES[dtype], shape)


def host_tensors(weights: Mapping[str, torch.Tensor]) -> dict[str, HostTensor]:
    """Return the bytes of every weight. Those in host memory are views: the caller copies what it keeps."""
    return {name: host_tensor(value) for name, value in weights.items()}


def complete_tensors(
    weights: Mapping[str, torch.Tensor], workers: Workers = SINGLE
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight whole, in the type in which the model computes. All ranks must consume the iterator."""
    return ((name, workers.complete(value)) for name, value in weights.items())


def load_tensors(
    targets: Mapping[str, torch.Tensor],
    tensors: Mapping[str, HostTensor],
    changed: Collection[str],
    on_device: DeviceTensors | None = None,
) -> dict[str, bytes]:
    """Copy the ``changed`` tensors to their ``targets``. Return the digest of the bytes that each target has then.

    ``on_device``: the same tensors in memory of a GPU, for targets on one. Several threads share the work. Raises ValueError if
    dtype or shape of one differ; then nothing has been copied. Raises ServiceUnavailable if memory of a GPU cannot be copied.
    """
    for name in changed:
        target, source = targets[name], tensors[name]
        if _NAMES.get(target.dtype) != source.dtype or tuple(target.shape) != source.shape:
            raise ValueError(
                f"{name}: {source.dtype} {list(source.shape)} does not fit "
                f"{_NAMES.get(target.dtype)} {list(target.shape)}"
            )
    copied = frozenset(changed)

    on_host = [name for name, target in targets.items() if target.device.type == "cpu" and target.is_contiguous()]

    def place(name: str) -> tuple[HostTensor, Bytes | None]:
        held = host_tensor(targets[name])
        return (tensors[name], held.data) if name in copied else (held, None)

    def load(name: str) -> bytes:
        if name in copied:
            target = targets[name].detach()
            if on_device is not None and target.is_cuda and target.is_contiguous():
                # The digest reads the target in the same stream.
                on_device.copy(name, target)
            else:
                _write(target, tensors[name])
        return tensor_digest(host_tensor(targets[name]))

    # torch accepts read-only arrays only with a warning. The filters are those of the process, so the threads do not change them.
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(available_cores()) as pool:
        digests = dict(zip(on_host, tensor_digests(list(map(place, on_host)), pool.map), strict=True))
        others = sorted(targets.keys() - digests.keys(), key=lambda name: -targets[name].nbytes)
        return digests | dict(zip(others, pool.map(load, others), strict=True))


def _write(target: torch.Tensor, source: HostTensor) -> None:
    # NumPy has no bfloat16.
    values = torch.from_numpy(source.data).view(_DTYPES[source.dtype])
    target.copy_(values.view(source.shape))


def adapter_settings(adapter: Adapter | None) -> AdapterSettings | None:
    """Return the settings of a model's adapter, None without one."""
    return None if adapter is None else AdapterSettings(adapter.rank, adapter.alpha, adapter.target_modules)
