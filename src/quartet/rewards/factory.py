"""Creation of the reward source that a config describes."""

from __future__ import annotations

from contextlib import ExitStack

from quartet.config import Config, RewardPartConfig
from quartet.errors import MismatchError
from quartet.models.weights.tokenizer import load_tokenizer, tokenizer_fingerprint
from quartet.models.workers.workers import SINGLE, Workers
from quartet.rewards.ensemble import EnsemblePart, EnsembleReward
from quartet.rewards.function import FunctionReward
from quartet.rewards.model import ModelReward
from quartet.rewards.reward_source import RewardSource


def build_reward(config: Config, device: str, workers: Workers = SINGLE) -> RewardSource:
    """Load models on ``device`` and start the processes of functions. The caller must close the returned source.

    The ``workers`` hold the models together. Raises ModelError; ConfigError if a function cannot be imported; MismatchError if
    the parts of an ensemble have different vocabularies. After an error nothing is left running.
    """
    if config.reward.source == "model":
        return ModelReward(config.reward, device, workers)
    if config.reward.source == "function":
        return FunctionReward(config.reward, config.reward_tokenizer)
    with ExitStack() as built:
        parts = []
        for part in config.reward.parts:
            source = _build_part(part, config.reward_tokenizer, device, workers)
            built.callback(source.close)
            parts.append(EnsemblePart(part.name, part.weight, source))
        _check_tokenizers(config, parts)
        ensemble = EnsembleReward(parts)
        built.pop_all()
        return ensemble


def _build_part(part: RewardPartConfig, tokenizer: str, device: str, workers: Workers) -> RewardSource:
    if part.source == "model":
        return ModelReward(part, device, workers)
    return FunctionReward(part, tokenizer, f"reward.parts.{part.name}")


def _check_tokenizers(config: Config, parts: list[EnsemblePart]) -> None:
    expected = tokenizer_fingerprint(load_tokenizer(config.reward_tokenizer))
    for part in parts:
        status = part.source.status()
        if status.tokenizer_fingerprint != expected:
            raise MismatchError(
                f"reward.parts.{part.name}.model {status.model}: its vocabulary is not that of {config.reward_tokenizer} "
                "(reward.tokenizer, or actor.model if that is null), so token ids would be misread; use models "
                "trained with one tokenizer and set it as reward.tokenizer"
            )
