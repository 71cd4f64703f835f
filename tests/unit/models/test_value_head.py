"""The head of a critic: its initial weights, saving and loading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from quartet.errors import ModelError
from quartet.models.forward.scoring import response_values
from quartet.models.value_head import HEAD_FILE
from quartet.models.weights.loading import load_critic
from tests.unit.models import tiny
from tests.unit.models.saving import save_critic

BATCH = tiny.batch([3, 2], [4, 6])


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_critic_from_a_causal_lm_starts_with_zero_values(kind: str, tmp_path: Path) -> None:
    critic = load_critic(tiny.saved(tiny.causal(kind), tmp_path / "m"))
    assert response_values(critic, BATCH, 100).tolist() == [0.0] * 10
    assert critic.head.bias is not None


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_critic_from_a_reward_model_has_its_backbone_and_head(kind: str, tmp_path: Path) -> None:
    classifier = tiny.classifier(kind)
    critic = load_critic(tiny.saved(classifier, tmp_path / "m"))
    assert torch.equal(critic.head.weight, classifier.score.weight)
    loaded = critic.backbone.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in classifier.base_model.state_dict().items())


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("source", [tiny.causal, tiny.classifier])
def test_a_saved_critic_loads_bit_identical(source: object, kind: str, tmp_path: Path) -> None:
    critic = load_critic(tiny.saved(source(kind), tmp_path / "m"))  # type: ignore[operator]
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save_critic(critic, tmp_path / "saved")
    save_critic(critic, tmp_path / "again")
    again = load_critic(tmp_path / "saved")
    assert again.state_dict().keys() == critic.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in critic.state_dict().items())
    assert response_values(again, BATCH, 100).tobytes() == response_values(critic, BATCH, 100).tobytes()
    for path in (tmp_path / "saved").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_values_are_in_fp32_for_a_backbone_in_bf16(tmp_path: Path) -> None:
    critic = load_critic(tiny.saved(tiny.classifier("llama"), tmp_path / "m"), dtype="bfloat16")
    assert {parameter.dtype for parameter in critic.backbone.parameters()} == {torch.bfloat16}
    assert critic.head.weight.dtype == torch.float32
    values = response_values(critic, BATCH, 100)
    exact = response_values(load_critic(tmp_path / "m"), BATCH, 100)
    assert np.abs(values - exact).max() < 0.5
    assert np.any(torch.from_numpy(values).bfloat16().float().numpy() != values)


def test_an_encoder_classifier_is_refused_as_a_critic(tmp_path: Path) -> None:
    tiny.saved(tiny.classifier("bert"), tmp_path / "m")
    with pytest.raises(ModelError, match="no value per token"):
        load_critic(tmp_path / "m")


def test_a_broken_head_is_an_error(tmp_path: Path) -> None:
    save_critic(load_critic(tiny.saved(tiny.causal("llama"), tmp_path / "m")), tmp_path / "saved")
    (tmp_path / "saved" / HEAD_FILE).write_bytes(b"\0" * 20)
    with pytest.raises(ModelError, match="value head"):
        load_critic(tmp_path / "saved")
