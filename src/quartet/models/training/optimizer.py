"""AdamW and Muon for PPO: float32 master weights, weight decay, refusal of non-finite steps, and its state in safetensors."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from quartet.config.models import OptimizerConfig
from quartet.errors import ComputationFailed, ModelError
from quartet.models.training.activation_checkpointing import transformer_layers
from quartet.models.weights.lora import plus_parameters
from quartet.models.weights.saved_state import Part, SavedState, StateFile
from quartet.models.weights.snapshot import Writer, host_copy
from quartet.models.workers.workers import SINGLE, Workers
from quartet.system.failpoints import failpoint

OPTIMIZER_FILE = "optimizer.safetensors"
"""Name of the optimizer state in a checkpoint."""
_STEPPING = {"policy": "actor.stepping", "value": "critic.stepping"}
_STEPPED = {"policy": "actor.stepped", "value": "critic.stepped"}
_MASTER_WEIGHT = "master"
"""Name of a master weight in the file, next to AdamW's names of its moments."""
_RATIO = "learning_rate_ratio"
"""Entry of a group of parameters with another learning rate."""
_KIND = "kind"
"""Entry of a group of parameters that another optimizer than AdamW steps: its kind."""


class MasterWeightAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter 2019) with float32 master weights (Micikevicius et al. 2018).

    A parameter of lower precision than float32 has a master weight, a float32 copy that the steps update. After each step the
    parameter is set in place to the rounded master weight. Other parameters are updated directly and have no copy.

    On a GPU, gradients move to the master weights during the backward pass, and those of several micro-batches add up in
    float32. A sum of 16 in bfloat16 is off by 0.4 %, and gradients in both precisions would not be needed at once. On a CPU they
    move before the step.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], offload: bool = False, **settings: Any) -> None:
        """``groups`` of the model's parameters. ``settings``: see torch's AdamW.

        ``offload``: keep the moments of parameters on a GPU in host memory. A step moves those of one parameter at a time to the
        GPU, with the same result.
        """
        self._offload = offload
        self._host_memory: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        self.parameter_of_master_weight: dict[torch.Tensor, nn.Parameter] = {}
        """The model's parameter, by its master weight."""
        super().__init__(
            [{**group, "params": [self._stepped(p) for p in group["params"]]} for group in groups], **settings
        )

    def stepped_parameters(self) -> list[torch.Tensor]:
        """Return the tensors that steps update: float32 master weights, and parameters without a master weight."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def move_gradients(self) -> None:
        """Move the gradients of parameters to their master weights."""
        for master, parameter in self.parameter_of_master_weight.items():
            if parameter.grad is not None:
                _move_gradient(parameter, master)

    def saved_state(self, entry: Mapping[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the name in a file, and the value, of each tensor of a parameter's state."""
        return entry.items()

    def empty_state(self, name: str, stepped: torch.Tensor) -> torch.Tensor | None:
        """Return a new tensor for an entry of the state of ``stepped`` that has another shape or type; None for others."""
        return None

    def part(self, stepped: torch.Tensor, value: torch.Tensor) -> Part:
        """Return ``value``, an entry of the state of ``stepped``, as this rank's part of a tensor."""
        return Part.whole(value)

    def complete_shape(self, stepped: torch.Tensor) -> tuple[int, ...]:
        """Return the shape of the complete parameter of a stepped tensor."""
        return tuple(stepped.shape)

    def has_master_weight(self, stepped: torch.Tensor) -> bool:
        """Return whether a stepped tensor is the master weight of a parameter of lower precision."""
        return stepped in self.parameter_of_master_weight

    def rounded(self, stepped: torch.Tensor) -> torch.Tensor:
        """Return the parameter of a master weight, which is the rounded master weight."""
        return self.parameter_of_master_weight[stepped]

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clip the moved gradients to ``max_norm`` and return their norm before, []."""
        return torch.nn.utils.clip_grad_norm_(self.stepped_parameters(), max_norm)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step from the moved gradients, then update the model's parameters. There is no ``closure``."""
        if self._offload:
            self._step_one_by_one()
        else:
            self._step_groups()
        for master, parameter in self.parameter_of_master_weight.items():
            parameter.copy_(master)
        return None

    def _step_groups(self) -> None:
        """Step all parameters with a gradient."""
        super().step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, see torch's method."""
        super().load_state_dict(state_dict)
        if self._offload:
            # torch has moved all of them to the devices of their parameters.
            for parameter in self.stepped_parameters():
                self._move_moments_to_host(parameter)

    def _step_one_by_one(self) -> None:
        groups = [(group, group["params"]) for group in self.param_groups]
        for group, _ in groups:
            group["params"] = []
        try:
            for group, parameters in groups:
                for parameter in parameters:
                    for name, value in self.state[parameter].items() if parameter in self.state else ():
                        self.state[parameter][name] = value.to(parameter.device, non_blocking=True)
                    group["params"] = [parameter]
                    super().step()
                    self._move_moments_to_host(parameter)
                group["params"] = []
        finally:
            for group, parameters in groups:
                group["params"] = parameters
        if any(parameter.is_cuda for parameter in self.stepped_parameters()):
            # The copies to the host have no other end that a reader of the state could wait for.
            torch.cuda.current_stream().synchronize()

    def _move_moments_to_host(self, parameter: torch.Tensor) -> None:
        """Move the state of a parameter on a GPU to pinned host memory, which each parameter allocates once."""
        if not parameter.is_cuda:
            return
        for name, value in self.state.get(parameter, {}).items():
            key = (parameter, name)
            if key not in self._host_memory:
                self._host_memory[key] = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self.state[parameter][name] = self._host_memory[key].copy_(value, non_blocking=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also those that were not moved yet."""
        super().zero_grad(set_to_none)
        for parameter in self.parameter_of_master_weight.values():
            parameter.grad = None

    def _stepped(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype.itemsize >= torch.float32.itemsize:
            return parameter
        master = nn.Parameter(parameter.detach().float())
        self.parameter_of_master_weight[master] = parameter
        if master.is_cuda:
            # Weak, so that the gradients of a later optimizer do not go to this one.
            reference = weakref.ref(master)

            def move(parameter: torch.Tensor) -> None:
                if (target := reference()) is not None:
                    _move_gradient(parameter, target)

            parameter.register_post_accumulate_grad_hook(move)  # type: ignore[no-untyped-call]
        return master


class MasterWeightMuon(MasterWeightAdamW):
    """Muon (Jordan et al. 2024) for groups that ``create_optimizer`` marks, and AdamW for the others.

    torch's Muon makes the steps. The size of an update is that of AdamW (Liu et al. 2025, "Muon is Scalable for LLM Training").
    """

    def __init__(self, groups: Iterable[dict[str, Any]], momentum: float, **settings: Any) -> None:
        """``groups``, ``settings``: see ``MasterWeightAdamW``. Raises ModelError if no group is for Muon."""
        super().__init__(groups, **settings)
        own = [group for group in self.param_groups if _KIND in group]
        if not own:
            raise ModelError(
                "optimizer.kind muon: no trained matrix is in a transformer layer; train such matrices, or set kind adamw"
            )
        self._muon = torch.optim.Muon(
            [{name: group[name] for name in ("params", "lr", "weight_decay")} for group in own],
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )

    def _step_groups(self) -> None:
        groups = self.param_groups
        own = [group for group in groups if _KIND in group]
        self.param_groups = [group for group in groups if _KIND not in group]
        try:
            super()._step_groups()
        finally:
            self.param_groups = groups
        # A loaded state is another object.
        self._muon.state = self.state
        for group, theirs in zip(own, self._muon.param_groups, strict=True):
            theirs["lr"] = group["lr"]
        self._muon.step()  # type: ignore[no-untyped-call]
        for parameter in (parameter for group in own for parameter in group["params"]):
            if parameter.grad is not None:
                # AdamW expects a number of steps in every state that it loads.
                step = self.state[parameter].setdefault("step", torch.zeros((), dtype=torch.float32))
                step += 1


def _move_gradient(parameter: torch.Tensor, master: torch.Tensor) -> None:
    """Add the gradient of ``parameter`` to that of its master weight, and clear it."""
    assert parameter.grad is not None
    gradient = parameter.grad.float()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    parameter.grad = None


def create_optimizer(
    model: nn.Module,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    kind: Callable[..., MasterWeightAdamW] = MasterWeightAdamW,
    offload: bool = False,
    lora_ratio: float = 1.0,
    config: OptimizerConfig | None = None,
) -> MasterWeightAdamW:
    """Create AdamW over the parameters that require gradients, without weight decay on biases and norms (one dimension).

    ``config``: section whose kind of optimizer is created, AdamW without one. ``kind`` counts for AdamW only.

    ``kind``: class of the optimizer, with the parameters of ``MasterWeightAdamW``. ``offload``: see there. ``lora_ratio``: factor
    of the learning rate of the matrices B and magnitudes of an adapter (LoRA+).
    Uses the fused kernel: one pass over each parameter, bit-identical for the same number of threads.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    scaled = plus_parameters(model) if lora_ratio != 1 else set()
    name = config.kind if config else "adamw"
    hidden = _hidden_matrices(model) if name == "muon" else set()
    groups: list[dict[str, Any]] = []
    for ratio in (1.0, lora_ratio)[: 2 if scaled else 1]:
        some = [p for p in parameters if (p in scaled) == (ratio != 1)]
        more = {} if ratio == 1 else {_RATIO: ratio, "lr": learning_rate * ratio}
        groups += [
            {"params": [p for p in some if p in hidden], "weight_decay": weight_decay, _KIND: name, **more},
            {"params": [p for p in some if p.ndim > 1 and p not in hidden], "weight_decay": weight_decay, **more},
            {"params": [p for p in some if p.ndim <= 1], "weight_decay": 0.0, **more},
        ]
    groups = [{"lr": learning_rate, **group} for group in groups if group["params"]]
    if config and name == "muon":
        kind = partial(MasterWeightMuon, momentum=config.momentum)
    if name == "adamw8bit":
        # Imported here because it is a subclass of one of this module.
        from quartet.models.training.adamw8bit import MasterWeightAdamW8bit

        kind = MasterWeightAdamW8bit
        groups = [{**group, _KIND: name} for group in groups]
    return kind(groups, offload=offload, lr=learning_rate, betas=betas, eps=eps, fused=True)


def _hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the matrices of the transformer layers."""
    return {
        parameter
        for layer in transformer_layers(model)
        for module in layer.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 2
    }


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of the next steps for every parameter. Groups with a ratio get a multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get(_RATIO, 1.0)


def apply_gradients(
    optimizer: torch.optim.Optimizer,
    losses: Sequence[torch.Tensor],
    max_grad_norm: float,
    model_name: str,
    workers: Workers = SINGLE,
) -> float:
    """Clip the gradients to ``max_grad_norm`` (0: no clipping), take one step, and clear them. Return the norm before clipping.

    ``losses`` are the losses [] of these gradients, as many on each of the ``workers``. Raises ComputationFailed, before any
    weight changes, if a loss or the norm is not finite.
    """
    max_norm = max_grad_norm if max_grad_norm > 0 else math.inf
    if isinstance(optimizer, MasterWeightAdamW):
        optimizer.move_gradients()
        norm = optimizer.clip_gradients(max_norm)
    else:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    all_losses = workers.sum(torch.stack([loss.detach().float() for loss in losses]))
    # One transfer for all values, because each transfer waits for the device.
    *loss_values, norm_value = torch.cat([all_losses, norm.to(all_losses).reshape(1)]).tolist()
    if not all(map(math.isfinite, (*loss_values, norm_value))):
        optimizer.zero_grad(set_to_none=True)
        raise ComputationFailed(
            f"{model_name} update: loss {sum(loss_values)}, gradient norm {norm_value}: expected finite numbers; the "
            "weights are those before this mini-batch. Lower the learning rate, or look for outliers in rewards and advantages"
        )
    failpoint(_STEPPING[model_name])
    optimizer.step()
    failpoint(_STEPPED[model_name])
    optimizer.zero_grad(set_to_none=True)
    return float(norm_value)


def optimizer_parts(optimizer: MasterWeightAdamW) -> dict[str, Part]:
    """Return this rank's parts of the moments, step counts and master weights, as views, by their names in a checkpoint."""
    stepped = optimizer.stepped_parameters()
    parts = {
        f"{index}.{name}": optimizer.part(stepped[index], value)
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in optimizer.saved_state(entry)
    }
    for index, weight in enumerate(stepped):
        if optimizer.has_master_weight(weight):
            parts[f"{index}.{_MASTER_WEIGHT}"] = optimizer.part(weight, weight)
    return parts


def parameter_groups(optimizer: MasterWeightAdamW) -> str:
    """Return the hyperparameters as the JSON text that goes with the state."""
    return json.dumps(optimizer.state_dict()["param_groups"], sort_keys=True)


def snapshot_optimizer(optimizer: MasterWeightAdamW) -> Writer:
    """Copy master weights, moments, step counts and hyperparameters. Return a writer of the copy as a safetensors file."""
    tensors = {name: host_copy(part.tensor) for name, part in optimizer_parts(optimizer).items()}
    # One metadata entry: safetensors writes several in no fixed order.
    metadata = {"param_groups": parameter_groups(optimizer)}
    return lambda directory: safetensors.torch.save_file(tensors, directory / OPTIMIZER_FILE, metadata=metadata)


def load_optimizer(optimizer: MasterWeightAdamW, path: str | Path) -> None:
    """Restore the state that ``snapshot_optimizer`` has saved. See ``load_optimizer_state``."""
    try:
        state = StateFile(Path(path))
    except Exception as error:  # safetensors raises its own error, or OSError
        raise _unreadable(str(path), error) from error
    load_optimizer_state(optimizer, state)


def load_optimizer_state(optimizer: MasterWeightAdamW, saved: SavedState) -> None:
    """Restore master weights, moments and step counts. The optimizer keeps its hyperparameters.

    Reads only this rank's parts. The model must already have the weights of that checkpoint. Raises ModelError if the files are
    broken or belong to another model.
    """
    stepped = optimizer.stepped_parameters()
    try:
        groups = json.loads(saved.metadata["param_groups"])
        _check_groups(optimizer, groups, saved.place)
        parts = {
            name: _empty_part(optimizer, stepped, name, shape, saved.place) for name, shape in saved.shapes.items()
        }
        saved.read(parts)
    except ModelError:
        raise
    except Exception as error:  # safetensors raises its own error, OSError, KeyError or JSON's
        raise _unreadable(saved.place, error) from error
    master_weights: dict[int, torch.Tensor] = {}
    state: dict[int, dict[str, Any]] = {}
    for name, part in parts.items():
        index, _, key = name.partition(".")
        if key == _MASTER_WEIGHT:
            master_weights[int(index)] = part.tensor
        else:
            state.setdefault(int(index), {})[key] = part.tensor
    _load_master_weights(optimizer, master_weights, saved.place)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _unreadable(place: str, error: Exception) -> ModelError:
    return ModelError(
        f"optimizer state {place}: cannot be read: {error}; take the checkpoint before it, or start without"
    )


def _check_groups(optimizer: MasterWeightAdamW, groups: list[dict[str, Any]], place: str) -> None:
    kinds = [{group.get(_KIND, "adamw") for group in each} for each in (optimizer.param_groups, groups)]
    if kinds[0] != kinds[1]:
        wanted, found = (max(each) for each in kinds)
        raise ModelError(
            f"optimizer state {place}: is of optimizer.kind {found}, and the config has {wanted}; set kind {found}, or "
            "start a new run"
        )
    sizes = [[len(group["params"]) for group in optimizer.param_groups], [len(group["params"]) for group in groups]]
    if sizes[0] != sizes[1]:
        raise ModelError(f"optimizer state {place}: is for {sizes[1]} parameters in groups, the model has {sizes[0]}")


def _empty_part(
    optimizer: MasterWeightAdamW, stepped: list[torch.Tensor], name: str, shape: tuple[int, ...], place: str
) -> Part:
    """Return a new tensor in host memory for this rank's part of a tensor of the state."""
    index, _, key = name.partition(".")
    weight = stepped[int(index)]
    expected = optimizer.complete_shape(weight)
    other = optimizer.empty_state(key, weight)
    if other is not None and shape == tuple(other.shape):
        return Part.whole(other)
    if shape == expected and other is None:
        part = optimizer.part(weight, weight)
        return part.of(torch.empty(part.tensor.shape))
    if key == "step":
        return Part.whole(torch.empty(shape))
    raise ModelError(f"optimizer state {place}: parameter {index} has shape {shape}, the model's {expected}")


@torch.no_grad()
def _load_master_weights(optimizer: MasterWeightAdamW, master_weights: dict[int, torch.Tensor], place: str) -> None:
    expected = {
        index: weight
        for index, weight in enumerate(optimizer.stepped_parameters())
        if optimizer.has_master_weight(weight)
    }
    if master_weights.keys() != expected.keys():
        raise ModelError(
            f"optimizer state {place}: has float32 master weights of {len(master_weights)} parameters, the model {len(expected)} "
            "in half precision; expected the state of this model, in the dtype that it was trained in"
        )
    for index, master in expected.items():
        parameter, saved = optimizer.rounded(master), master_weights[index]
        if not torch.equal(saved.to(parameter.device).to(parameter.dtype), parameter):
            raise ModelError(
                f"optimizer state {place}: the master weight of parameter {index}, {saved.dtype} {tuple(saved.shape)}, "
                f"does not round to the model's, {parameter.dtype} {tuple(parameter.shape)}; "
                "expected weights and state of one checkpoint"
            )
    for index, master in expected.items():
        master.copy_(master_weights[index])
