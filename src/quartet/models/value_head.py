"""The critic's model: a decoder backbone and a linear head that returns one value per position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from quartet.errors import ModelError
from quartet.models.forward.model_capabilities import backbone as backbone_of
from quartet.models.forward.packing import Packing, hidden_states, select_positions
from quartet.models.weights.lora import Adapter
from quartet.models.weights.snapshot import Writer, host_copy, host_state
from quartet.models.weights.streamed_model import write_config

HEAD_FILE = "value_head.safetensors"


class ValueModel(nn.Module):
    """Backbone and a value head, whose values are fp32 for every dtype of the backbone. bf16 is too coarse for returns.

    ``backbone`` is the base model of a causal LM or of a decoder classifier. ``head`` is a linear layer, hidden -> 1, in fp32.
    """

    def __init__(self, backbone: Any, head: nn.Linear) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head.float()

    @classmethod
    def of_classifier(cls, classifier: Any) -> ValueModel:
        """Use the backbone and the ``score`` head of a decoder classifier with one output. Values start as its scores."""
        score = classifier.score
        head = _empty_head(score.in_features, score.bias is not None, score.weight.device)
        head.load_state_dict({name: value.float() for name, value in score.state_dict().items()})
        return cls(backbone_of(classifier), head)

    @classmethod
    def of_causal_lm(cls, model: Any) -> ValueModel:
        """Use the backbone of a causal LM, and a head of zeros, so every value starts at 0."""
        projection = model.get_output_embeddings().weight
        return cls(backbone_of(model), _empty_head(projection.shape[1], True, projection.device))

    @classmethod
    def with_saved_head(cls, backbone: Any, directory: Path) -> ValueModel:
        """Combine ``backbone`` with the head that ``snapshot`` wrote to ``directory``. Raises ModelError."""
        tensors = safetensors.torch.load_file(directory / HEAD_FILE)
        weight, bias = tensors.get("weight"), tensors.get("bias")
        if weight is None or weight.ndim != 2 or weight.shape[0] != 1:
            raise ModelError(f"{directory / HEAD_FILE}: expected a weight of shape [1, hidden]")
        head = _empty_head(weight.shape[1], bias is not None, torch.device("cpu"))
        head.load_state_dict(tensors)
        return cls(backbone, head)

    @property
    def config(self) -> Any:
        """The backbone's transformers config."""
        return self.backbone.config

    def get_input_embeddings(self) -> Any:
        """The backbone's token embedding."""
        return self.backbone.get_input_embeddings()

    @property
    def base_model(self) -> Any:
        """The backbone, under the name that transformers uses."""
        return self.backbone

    def forward(self, input_ids: torch.Tensor, keep: torch.Tensor, packing: Packing | None = None) -> torch.Tensor:
        """Return the values at the positions ``keep``, float32 [n]. For ``keep`` see ``logits_at_positions``.

        ``input_ids`` int64 [rows, longest], padded on the right, or [1, tokens] with a ``packing``.
        """
        hidden = hidden_states(self.backbone, input_ids, packing)
        values: torch.Tensor = self.head(select_positions(hidden, keep).float()).squeeze(-1)
        return values

    def snapshot(self, adapter: Adapter | None = None) -> Writer:
        """Copy the weights. The returned writer writes the backbone in Hugging Face format, and the head, for ``load_critic``.

        With the backbone's ``adapter`` the writer writes the merged backbone. The backbone itself is unchanged.
        """
        state = None if adapter else host_state(self.backbone)
        merged = adapter.snapshot_merged() if adapter else None
        head = self._snapshot_head()

        def write(directory: Path) -> None:
            if merged is not None:
                merged(directory)
            else:
                self.backbone.save_pretrained(directory, state_dict=state)
            self._name_backbone(directory)
            head(directory)

        return write

    def snapshot_head(self, dtype: torch.dtype) -> Writer:
        """Copy the head. The returned writer writes it, and the config of the backbone with weights of ``dtype``."""
        head = self._snapshot_head()

        def write(directory: Path) -> None:
            write_config(self.backbone, directory, dtype)
            self._name_backbone(directory)
            head(directory)

        return write

    def snapshot_adapter(self, adapter: Adapter) -> Writer:
        """Copy the backbone's adapter and the head. The returned writer writes the adapter in peft's format, and the head."""
        writers = (adapter.snapshot(), self._snapshot_head())

        def write(directory: Path) -> None:
            for writer in writers:
                writer(directory)

        return write

    def read_head(self, directory: Path) -> None:
        """Restore the head that ``snapshot`` or ``snapshot_adapter`` wrote to ``directory``. Raises ModelError."""
        saved = ValueModel.with_saved_head(self.backbone, directory).head
        if saved.weight.shape != self.head.weight.shape or (saved.bias is None) != (self.head.bias is None):
            raise ModelError(f"{directory / HEAD_FILE}: is the head of another model")
        self.head.load_state_dict(saved.state_dict())

    def _snapshot_head(self) -> Writer:
        tensors = {name: host_copy(value) for name, value in self.head.state_dict().items()}
        return lambda directory: safetensors.torch.save_file(tensors, directory / HEAD_FILE)

    def _name_backbone(self, directory: Path) -> None:
        # The config names the class of the original model. The checkpoint needs the class of its base model.
        config = directory / "config.json"
        content = {**json.loads(config.read_text()), "architectures": [type(self.backbone).__name__]}
        config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _empty_head(hidden: int, bias: bool, device: torch.device) -> nn.Linear:
    head = nn.Linear(hidden, 1, bias=bias, device=device, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    if bias:
        nn.init.zeros_(head.bias)
    return head
