"""Parts of models whose classes differ from the others."""

from __future__ import annotations

import pytest

from quartet.models.forward.model_capabilities import backbone
from tests.architectures import models


@pytest.mark.parametrize("kind", ["llama", "gpt2", "llama4_text"])
def test_the_backbone_returns_hidden_states(kind: str) -> None:
    model = models.causal_lm(kind)
    assert backbone(model) is not model
    assert backbone(model)(model.dummy_inputs["input_ids"] % 60).last_hidden_state.shape[-1] == 32
