"""AdamW with moments of 8 bits, by torchao (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization")."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from quartet.errors import ConfigError
from quartet.models.training.optimizer import MasterWeightAdamW

CODES, SCALES = ".codes", ".scale"
"""Suffixes of the names of a quantized moment's parts in a file."""
_BLOCK = 256
"""Values of a moment that share a scale."""
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class MasterWeightAdamW8bit(MasterWeightAdamW):
    """AdamW whose two moments have 8 bits per value, in blocks with a scale each.

    torchao makes the steps in float32, and quantizes the moments after each. Parameters of fewer than 4096 values, or of another
    number than a multiple of 256, have float32 moments. Master weights are float32.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: Any) -> None:
        """``groups``, ``settings``: see ``MasterWeightAdamW``. Raises ConfigError without torchao."""
        try:
            from torchao.optim import AdamW8bit
        except ImportError:
            raise ConfigError(
                "optimizer.kind adamw8bit: torchao is not installed; install it with pip install 'quartet-rlhf[torchao]', or set "
                "kind adamw"
            ) from None
        super().__init__(groups, **settings)
        names = ("params", "betas", "eps", "weight_decay")
        self._quantized: Any = AdamW8bit([{name: group[name] for name in names} for group in self.param_groups])

    def _step_groups(self) -> None:
        # A loaded state is another object.
        self._quantized.state = self.state
        for group, theirs in zip(self.param_groups, self._quantized.param_groups, strict=True):
            theirs["lr"].fill_(group["lr"])
        # torchao compiles the step of each shape of parameter, which needs a C++ compiler on a CPU.
        with torch.compiler.set_stance("force_eager"):
            self._quantized.step()

    def saved_state(self, entry: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name in a file, and the value, of each tensor of a parameter's state: codes and scales by themselves."""
        for name, value in entry.items():
            if hasattr(value, "codes"):
                yield f"{name}{CODES}", value.codes
                yield f"{name}{SCALES}", value.scale
            else:
                yield name, value

    def empty_state(self, name: str, stepped: torch.Tensor) -> torch.Tensor | None:
        """Return a new tensor for an entry of the state of ``stepped`` that has another shape or type; None for others."""
        if name.endswith(CODES):
            return torch.empty(stepped.shape, dtype=torch.uint8)
        return torch.empty(stepped.numel() // _BLOCK) if name.endswith(SCALES) else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state with the names of ``saved_state``."""
        state = state_dict["state"]
        # torch would convert the codes to float32.
        steps = {index: {"step": entry["step"]} for index, entry in state.items()}
        super().load_state_dict({**state_dict, "state": steps})
        stepped = self.stepped_parameters()
        for index, entry in state.items():
            for name, is_signed in _SIGNED.items():
                self.state[stepped[index]][name] = self._moment(stepped[index], entry, name, is_signed)

    def _moment(
        self, stepped: torch.Tensor, entry: Mapping[str, torch.Tensor], name: str, is_signed: bool
    ) -> torch.Tensor:
        if name in entry:
            return entry[name].to(stepped.device, stepped.dtype)
        from torchao.optim.subclass_8bit import OptimState8bit

        moment: Any = OptimState8bit.zeros(stepped.shape, is_signed, _BLOCK, stepped.device, stepped.dtype)
        moment.codes.copy_(entry[f"{name}{CODES}"])
        moment.scale.copy_(entry[f"{name}{SCALES}"])
        result: torch.Tensor = moment
        return result
