"""Calls of OpenRLHF's own functions. Their modules import DeepSpeed, which is replaced by an empty module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.parity.losses.batch import SAMPLES, Batch, with_gradient
from tests.parity.losses.case import Results

NAME = "OpenRLHF"


def policy_loss(token_level: bool = True, **settings: Any) -> Callable[[Batch], Results]:
    """Return PolicyLoss and its gradient. ``token_level``: with advantages that differ within a response."""

    def run(batch: Batch) -> Results:
        module = _load("openrlhf.models.loss").PolicyLoss(**settings)
        advantages = batch.token_advantages if token_level else batch.advantages
        old, rollout = batch.padded(batch.old_log_probs), batch.padded(batch.rollout_log_probs)
        return with_gradient(
            lambda log_probs: module(
                batch.padded(log_probs), old, batch.padded(advantages), batch.padded(batch.mask), rollout
            )[0],
            batch.log_probs,
            batch,
        )

    return run


def value_loss(clip: float | None) -> Callable[[Batch], Results]:
    """Return ValueLoss and its gradient."""

    def run(batch: Batch) -> Results:
        module = _load("openrlhf.models.loss").ValueLoss(clip)
        old, returns = batch.padded(batch.old_values), batch.padded(batch.returns)
        return with_gradient(
            lambda values: module(batch.padded(values), old, returns, batch.whole()), batch.values, batch
        )

    return run


def aggregation(token_level: bool, mask: Callable[[Batch], Tensor]) -> Callable[[Batch], Results]:
    """Return the aggregate of one number per token, and its gradient: the weights of the tokens."""

    def run(batch: Batch) -> Results:
        aggregate = _load("openrlhf.models.loss").aggregate_loss
        return with_gradient(
            lambda values: aggregate(batch.padded(values), batch.padded(mask(batch)), token_level), batch.values, batch
        )

    return run


def kl(kind: str) -> Callable[[Batch], Results]:
    """Return the KL estimate of each token. OpenRLHF computes it in float32."""

    def run(batch: Batch) -> Results:
        estimate = _load("openrlhf.models.utils").compute_approx_kl
        return {"estimates": estimate(batch.log_probs, batch.reference_log_probs, kl_estimator=kind)}

    return run


def kl_controller(observed: tuple[float, ...], responses: int, **settings: float) -> Callable[[Batch], Results]:
    """Return the coefficient after each observed KL."""

    def run(batch: Batch) -> Results:
        controller = _load("openrlhf.trainer.ppo_utils.kl_controller").AdaptiveKLController(**settings)
        coefficients = []
        for value in observed:
            controller.update(value, responses)
            coefficients.append(float(controller.value))
        return {"coefficients": torch.tensor(coefficients, dtype=torch.float64)}

    return run


def advantages(
    estimator: str, kl_coefficient: float = 0.0, normalized: bool = False, **settings: float
) -> Callable[[Batch], Results]:
    """Return the advantages of RemoteExperienceMaker: [tokens]; for gae also the returns.

    Without ``normalized``, as they are before its normalization over the batch, which is the returns except with gae.
    """

    def run(batch: Batch) -> Results:
        maker = _load("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
        arguments = SimpleNamespace(
            algo=SimpleNamespace(
                advantage=SimpleNamespace(
                    **{"estimator": estimator, "gamma": 1.0, "lambd": 1.0, "no_std_norm": False, **settings}
                )
            ),
            rollout=SimpleNamespace(n_samples_per_prompt=SAMPLES),
            reward=SimpleNamespace(clip_range=None),
        )
        stub = SimpleNamespace(
            strategy=SimpleNamespace(args=arguments),
            advantage_estimator=estimator,
            kl_ctl=SimpleNamespace(value=kl_coefficient),
        )
        for name in ("get_advantages_and_returns", "get_cumulative_returns"):
            setattr(stub, name, getattr(maker, name).__get__(stub))
        experience = SimpleNamespace(
            rewards=batch.scores.clone(),
            index=list(range(len(batch.scores))),
            kl=batch.padded(batch.old_log_probs - batch.reference_log_probs),
            action_mask=batch.whole(),
            values=batch.padded(batch.values),
            info={},
        )
        with mock.patch.dict(maker.compute_advantages_and_returns.__globals__, apply_length_penalties=lambda *_: None):
            (result,) = maker.compute_advantages_and_returns(stub, [experience])
        results = {"advantages": batch.flat(result.advantages if normalized or estimator == "gae" else result.returns)}
        return results | ({"returns": batch.flat(result.returns)} if estimator == "gae" else {})

    return run


def _load(name: str) -> Any:
    """Import a module of OpenRLHF without its packages' __init__, which import all trainers."""
    if "openrlhf" not in sys.modules:
        (root,) = [path for path in (Path(entry) / "openrlhf" for entry in sys.path) if path.is_dir()]
        for folder in (root, *(path for path in root.rglob("*") if path.is_dir() and path.name != "__pycache__")):
            package = ModuleType(".".join(folder.relative_to(root.parent).parts))
            package.__path__ = [str(folder)]
            sys.modules[package.__name__] = package
        # Only its name is used, in an annotation.
        launcher = ModuleType("openrlhf.trainer.ray.launcher")
        launcher.RayActorGroup = object  # type: ignore[attr-defined]
        sys.modules[launcher.__name__] = launcher
    # Removed after the import, so that other libraries do not take it for DeepSpeed.
    sys.modules["deepspeed"] = mock.MagicMock(name="deepspeed")
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules["deepspeed"]
