"""Reward source with a reward model: a frozen sequence classifier with one output."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from quartet.config.rewards import RewardSourceConfig
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import Scores, TokenBatch
from quartet.errors import ModelError
from quartet.models.forward.model_capabilities import max_positions, vocabulary_size
from quartet.models.forward.scoring import sequence_score_passes
from quartet.models.weights.loading import count_parameters, load_reward_model
from quartet.models.weights.tokenizer import load_tokenizer, tokenizer_fingerprint
from quartet.models.workers.workers import SINGLE, Workers, shard_frozen
from quartet.rewards.reward_source import completed, never, parse_fields


class ModelReward:
    """A frozen sequence classifier, read at the last token of each prompt+response."""

    def __init__(self, config: RewardSourceConfig, device: str, workers: Workers = SINGLE) -> None:
        """Load the model. The ``workers`` hold it together. Raises ModelError."""
        if config.model is None:
            raise ModelError("reward.model: missing; source model needs it")
        model, dtype = config.model, config.dtype
        self._model = workers.agreed(lambda: load_reward_model(model, dtype, device, workers))
        self._micro_batch_tokens = config.micro_batch_tokens
        self._status = ServiceStatus(
            role=Role.REWARD,
            model=config.model,
            device=device,
            dtype=config.dtype,
            parameters=count_parameters(self._model),
            tokenizer_fingerprint=tokenizer_fingerprint(load_tokenizer(config.model)),
            vocabulary_size=vocabulary_size(self._model),
            max_sequence_tokens=max_positions(self._model) or 0,
        )
        self._workers = shard_frozen(self._model, workers)

    def score(self, batch: TokenBatch, fields: Sequence[str] = (), cancelled: Callable[[], bool] = never) -> Scores:
        """Return the score of each prompt+response. ``fields`` are checked but not used."""
        return completed(self.score_in_units(batch, fields))

    def score_in_units(
        self, batch: TokenBatch, fields: Sequence[str] = (), cancelled: Callable[[], bool] = never
    ) -> Generator[None, None, Scores]:
        """Compute the scores of ``score``. Yields between two micro-batches."""
        parse_fields(fields, len(batch))
        return Scores((yield from sequence_score_passes(self._model, batch, self._micro_batch_tokens, self._workers)))

    def status(self) -> ServiceStatus:
        """Return the status of the model."""
        return self._status

    def close(self) -> None:
        """Do nothing: a model has no process."""
