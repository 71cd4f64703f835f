"""Reward model on a Triton Inference Server with the tensors of NeMo-Aligner's PyTriton server, over gRPC.

Inputs are ``tokens`` int64 [B, S] and ``sequence_lengths`` int64 [B, 1], or ``sentences`` bytes [B, 1]. The output is ``rewards``
float32 [B, 1].
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from quartet.config.rewards import TritonRewardConfig
from quartet.contract.trajectory import Outcome
from quartet.errors import ConfigError, MismatchError
from quartet.rewards.attempts import Attempts, RequestFailed, no_longer_a_scorer
from quartet.rewards.response_texts import ScoredText
from quartet.rewards.reward_source import Result, is_score, shown

MAX_RESPONSE_BYTES = 16 * 2**20
"""Maximum size of a response, many times the size of the rewards of a batch."""
_UNREACHABLE = ("StatusCode.UNAVAILABLE",)


class TritonScorer:
    """Scorer on a Triton server. Implements Scorer."""

    def __init__(self, config: TritonRewardConfig, key: str) -> None:
        """``key`` is the config key of the section. Raises ConfigError without the package."""
        try:
            import tritonclient.grpc
        except ImportError as error:
            raise ConfigError(f"{key}: {error}; install it with pip install 'quartet-rlhf[triton]'") from None
        self._grpc: Any = tritonclient.grpc
        self._config, self._where = config, f"{key}: model {config.model} at {config.url}"
        self._attempts = Attempts(config, self._where)
        self.batch_size = config.batch_size
        authority = config.certificate_authority_file
        if authority is not None and not authority.is_file():
            raise ConfigError(f"{key}.certificate_authority_file {authority}: cannot be read; expected a PEM file")
        scheme, _, address = config.url.partition("://")
        self._client: Any = self._grpc.InferenceServerClient(
            address,
            ssl=scheme == "grpcs",
            root_certificates=None if authority is None else str(authority),
            channel_args=[("grpc.max_receive_message_length", MAX_RESPONSE_BYTES), ("grpc.enable_http_proxy", 0)],
        )

    async def score(self, texts: Sequence[ScoredText]) -> list[Result]:
        inputs = self._inputs(texts)

        async def send(_: int) -> list[Result]:
            answer = await self._infer(inputs)
            try:
                rewards = answer.as_numpy("rewards")
            except Exception as error:  # The bytes of the tensor do not fit its shape and type.
                text = f"{self._where}: rewards cannot be read ({type(error).__name__})"
                raise RequestFailed(Outcome.SCORER_ERROR, text) from None
            return self._read(rewards, len(texts))

        return await self._attempts.run(send, max(text.updates for text in texts))

    def take_cured_faults(self) -> int:
        return self._attempts.take_cured_faults()

    async def close(self) -> None:
        """Close the connection."""
        self._client.close()

    async def _infer(self, inputs: list[Any]) -> Any:
        """Return the result of a request. gRPC has one event loop for a process, so its threads make the calls."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        ended: list[tuple[Any, Any]] = []

        def end(result: Any, error: Any) -> None:
            ended.append((result, error))
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(done.set)

        call = self._client.async_infer(
            self._config.model,
            inputs,
            end,
            outputs=[self._grpc.InferRequestedOutput("rewards")],
            client_timeout=self._config.timeout_seconds,
        )
        try:
            await done.wait()
        except asyncio.CancelledError:
            call.cancel()
            raise
        result, error = ended[0]
        if error is not None:
            raise self._failure(error)
        return result

    def _inputs(self, texts: Sequence[ScoredText]) -> list[Any]:
        if self._config.inputs == "sentences":
            sentences = np.array([[text.query.encode()] for text in texts], np.object_)
            return [self._input("sentences", sentences, "BYTES")]
        lengths = np.array([[len(text.token_ids)] for text in texts], np.int64)
        tokens = np.full((len(texts), int(lengths.max())), self._config.pad_token_id, np.int64)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text.token_ids)] = text.token_ids
        return [self._input("tokens", tokens, "INT64"), self._input("sequence_lengths", lengths, "INT64")]

    def _input(self, name: str, values: Any, kind: str) -> Any:
        tensor = self._grpc.InferInput(name, list(values.shape), kind)
        tensor.set_data_from_numpy(values)
        return tensor

    def _read(self, rewards: Any, count: int) -> list[Result]:
        if rewards is None or rewards.dtype != np.float32 or rewards.shape != (count, 1):
            described = "none" if rewards is None else f"{rewards.dtype} {list(rewards.shape)}"
            text = f"{self._where}: rewards: {described}, expected float32 [{count}, 1]"
            raise RequestFailed(Outcome.SCORER_ERROR, text)
        values = rewards[:, 0].tolist()
        return [
            float(value)
            if is_score(value)
            else (Outcome.SCORER_ERROR, f"{self._where}: the reward is {shown(value)}, expected a finite number")
            for value in values
        ]

    def _failure(self, error: Any) -> Exception:
        """Convert an error of the call. Its text is left out, because the server may quote an input."""
        status = str(error.status())
        if status in _UNREACHABLE:
            text = f"{self._where}: does not respond ({status}); start the server, or correct the address"
            return RequestFailed(Outcome.SCORER_ERROR, text, retry=True, unreachable=True)
        if status == "StatusCode.DEADLINE_EXCEEDED":
            text = f"{self._where}: no response within {self._config.timeout_seconds:g} s"
            return RequestFailed(Outcome.TIMEOUT, text, retry=True)
        if status in ("StatusCode.NOT_FOUND", "StatusCode.UNIMPLEMENTED"):
            return no_longer_a_scorer(
                MismatchError(
                    f"{self._where}: no such model on the server ({status}); correct the address or the model"
                )
            )
        if status == "StatusCode.INVALID_ARGUMENT":
            return RequestFailed(Outcome.REFUSED, f"{self._where}: refuses the request ({status})")
        return RequestFailed(Outcome.SCORER_ERROR, f"{self._where}: failed ({status})", retry=True)
