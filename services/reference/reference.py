"""Logic of the reference service, without gRPC."""

from __future__ import annotations

from pathlib import Path

import structlog

from quartet.contract.arrays import FloatArray
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import TokenBatch
from quartet.contract.weights import ReferenceVersion
from quartet.errors import FailedPrecondition
from quartet.models.forward.model_capabilities import max_positions
from quartet.models.forward.scoring import response_log_probs
from quartet.models.weights.loading import check_causal_lm, count_parameters, load_causal_lm
from quartet.models.weights.tokenizer import load_tokenizer, tokenizer_fingerprint
from quartet.models.workers.workers import SINGLE, Workers, shard_frozen
from quartet.run_directory.reference_versions import files_digest
from quartet.system.durable_files import confine_path
from quartet.system.failpoints import failpoint

log = structlog.get_logger()


class Reference:
    """A frozen causal language model, or the version of it that a request names."""

    def __init__(
        self,
        model: str,
        dtype: str,
        device: str,
        micro_batch_tokens: int,
        workers: Workers = SINGLE,
        root: Path | None = None,
    ) -> None:
        """Load the initial model. The ``workers`` hold it together. Versions are below ``root``. Raises ModelError."""
        self._name, self._dtype, self._device, self._micro_batch_tokens = model, dtype, device, micro_batch_tokens
        self._root = root
        # Digest of the version in memory: empty for the initial model, None after a failure.
        self._held: bytes | None = b""
        self._model = workers.agreed(lambda: load_causal_lm(model, dtype, device, workers))
        self._vocabulary = int(self._model.get_input_embeddings().weight.shape[0])
        self._parameters = count_parameters(self._model)
        self._fingerprint = tokenizer_fingerprint(load_tokenizer(model))
        self._workers = shard_frozen(self._model, workers)
        if workers.size > 1:
            self._workers.evaluate(lambda: check_causal_lm(model, self._model))

    def log_probs(self, batch: TokenBatch, temperature: float, version: ReferenceVersion | None = None) -> FloatArray:
        """Return the log-probs of the responses, float32 [response tokens], in nats, under ``version``. None: the initial model.

        Another version is loaded first. Raises FailedPrecondition if its files are not those of its digest, InvalidRequest if
        they are not below the run's directory, and ModelError.
        """
        failpoint("reference.scoring")
        self._hold(version)
        return response_log_probs(self._model, batch, temperature, self._micro_batch_tokens, self._workers)

    def _hold(self, version: ReferenceVersion | None) -> None:
        digest = version.digest if version else b""
        if digest == self._held:
            return
        source: str | Path = self._name
        if version is not None:
            source = self._verified(version)
        # The model before is released first, because there may be no memory for both. Until the new one is here, none answers.
        self._held = None
        vars(self).pop("_model", None)
        self._model = load_causal_lm(source, self._dtype, self._device, self._workers)
        self._held = digest
        log.info("reference loaded", version=version.step if version else 0)

    def _verified(self, version: ReferenceVersion) -> Path:
        if self._root is None or self._workers.size > 1:
            raise FailedPrecondition(
                f"reference version {version.step}: this service serves the initial model only; see reference.sync_steps"
            )
        folder = confine_path(self._root, version.directory)
        if not folder.is_dir():
            raise FailedPrecondition(
                f"reference version {version.step}: {folder} does not exist; run.directory must be a path that orchestrator, "
                "actor and reference share"
            )
        if (digest := files_digest(folder)) != version.digest:
            raise FailedPrecondition(
                f"reference version {version.step}: {folder} has the digest {digest.hex()}, expected {version.digest.hex()}; "
                "roll back to an earlier checkpoint"
            )
        return folder

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
