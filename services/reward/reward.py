"""The reward model as a plain class: what the reward service does, without gRPC."""

from __future__ import annotations

from quartet.config import RewardConfig
from quartet.models.forward import max_positions
from quartet.models.loading import count_parameters, load_reward_model, load_tokenizer, tokenizer_fingerprint
from quartet.models.scoring import sequence_scores
from quartet.types import FloatArray, Role, ServiceStatus, TokenBatch


class RewardModel:
    """A frozen sequence classifier with one output."""

    def __init__(self, config: RewardConfig, device: str) -> None:
        """Loads the model. Raises ModelError."""
        self._config, self._device = config, device
        self._model = load_reward_model(config.model, config.dtype, device)
        self._vocabulary = int(self._model.get_input_embeddings().weight.shape[0])
        self._parameters = count_parameters(self._model)
        self._fingerprint = tokenizer_fingerprint(load_tokenizer(config.model))

    def score(self, batch: TokenBatch) -> FloatArray:
        """Score of each prompt+response, read at its last token, float32 [sequences]."""
        return sequence_scores(self._model, batch, self._config.micro_batch_tokens)

    def status(self) -> ServiceStatus:
        """What the reward model says of itself."""
        return ServiceStatus(
            role=Role.REWARD,
            model=self._config.model,
            device=self._device,
            dtype=self._config.dtype,
            parameters=self._parameters,
            tokenizer_fingerprint=self._fingerprint,
            vocabulary_size=self._vocabulary,
            max_sequence_tokens=max_positions(self._model) or 0,
        )
