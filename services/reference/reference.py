"""Logic of the reference service, without gRPC."""

from __future__ import annotations

from quartet.failpoints import failpoint
from quartet.models.forward.model_capabilities import max_positions
from quartet.models.forward.scoring import response_log_probs
from quartet.models.weights.loading import check_causal_lm, count_parameters, load_causal_lm
from quartet.models.weights.tokenizer import load_tokenizer, tokenizer_fingerprint
from quartet.models.workers.frozen import shard_frozen
from quartet.models.workers.workers import SINGLE, Workers
from quartet.types import FloatArray, Role, ServiceStatus, TokenBatch


class Reference:
    """A frozen causal language model."""

    def __init__(self, model: str, dtype: str, device: str, micro_batch_tokens: int, workers: Workers = SINGLE) -> None:
        """Load the model. The ``workers`` hold it together. Raises ModelError."""
        self._name, self._dtype, self._device, self._micro_batch_tokens = model, dtype, device, micro_batch_tokens
        self._model = workers.agreed(lambda: load_causal_lm(model, dtype, device, workers))
        self._vocabulary = int(self._model.get_input_embeddings().weight.shape[0])
        self._parameters = count_parameters(self._model)
        self._fingerprint = tokenizer_fingerprint(load_tokenizer(model))
        self._workers = shard_frozen(self._model, workers)
        if workers.size > 1:
            self._workers.evaluate(lambda: check_causal_lm(model, self._model))

    def log_probs(self, batch: TokenBatch, temperature: float) -> FloatArray:
        """Return the log-probs of the responses, float32 [response tokens], in nats."""
        failpoint("reference.scoring")
        return response_log_probs(self._model, batch, temperature, self._micro_batch_tokens, self._workers)

    def status(self) -> ServiceStatus:
        """Return the status of the reference."""
        return ServiceStatus(
            role=Role.REFERENCE,
            model=self._name,
            device=self._device,
            dtype=self._dtype,
            parameters=self._parameters,
            tokenizer_fingerprint=self._fingerprint,
            vocabulary_size=self._vocabulary,
            max_sequence_tokens=max_positions(self._model) or 0,
        )
