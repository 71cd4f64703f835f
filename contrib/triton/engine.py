"""Generation by a Triton Inference Server over gRPC, with the tensors of the TensorRT-LLM backend or of vLLM's."""

from __future__ import annotations

import contextlib
import queue
import shutil
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contrib.triton.kind import triton_properties
from quartet.contrib.triton.lora_tensors import LoraTensors, lora_tensors
from quartet.contrib.triton.tensors import Dialect, Partial, Served, Tensors, dialect_of
from quartet.engines.engine import EngineProperties, EngineResponse, Policy
from quartet.engines.request_checks import check_requests
from quartet.errors import (
    AccessRefused,
    Cancelled,
    ComputationFailed,
    ConfigError,
    MismatchError,
    ModelError,
    QuartetError,
    ServiceFailed,
    ServiceUnavailable,
)
from quartet.weight_transfer.tensors import WeightSet

POLL = 0.1
"""Seconds between checks whether the caller still waits."""
MAX_ANSWER = 64 * 2**20
"""Maximum size of a message from the server, many times the size of a response."""
MAX_REQUEST = 2**31 - 1
"""Maximum size of a message to the server in bytes. A request may contain an adapter."""


@dataclass(frozen=True, slots=True)
class TritonServer:
    """Address and settings of a served model. ``timeout`` is in seconds.

    ``adapters``: a folder for adapters that the server can read under the same path. With ``encrypted``: PEM ``authority``, and
    ``certificate`` with its ``key``, each None if not set.
    """

    address: str
    model: str
    timeout: float
    weights: Literal["lora", "static"]
    max_in_flight: int
    adapters: Path
    encrypted: bool = False
    authority: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None

    def __str__(self) -> str:
        return f"model {self.model} of Triton at {self.address}"


class TritonEngine:
    """Engine that generates on a server. Raises ConfigError without the package, ModelError for an adapter that servers do not
    support.
    """

    def __init__(self, server: TritonServer, policy: Policy) -> None:
        try:
            import tritonclient.grpc
        except ImportError as error:
            raise ConfigError(
                f"rollout.engine triton: {error}; install it with pip install 'quartet-rlhf[triton]'"
            ) from None
        self._grpc: Any = tritonclient.grpc
        self._server, self._policy = server, policy
        self._lora: LoraTensors | None = None
        self._properties = triton_properties(None, server.weights, reports_log_probs=False)
        if server.weights == "lora":
            self._adapter()

    @property
    def properties(self) -> EngineProperties:
        """Guarantees of the served model; before the first generation, those that every model has."""
        return self._properties

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[EngineResponse]:
        """Yield each response when it is finished, in any order.

        ``log_probs`` come from the server if it reports them. Raises InvalidRequest at the call. While iterating, raises
        Cancelled, ServiceUnavailable, ServiceFailed, MismatchError, AccessRefused or ComputationFailed.
        """
        ordered = check_requests(self._policy.served, requests, sampling)
        return self._generate(ordered, sampling, seed, cancelled)

    def load_weights(self, weights: WeightSet, changed: Collection[str]) -> Mapping[str, bytes]:
        """Send the current adapter of the policy with the next generation. Return no digests."""
        self._lora = None
        return {}

    def sleep(self, everything: bool = True) -> None:
        """Do nothing. The memory belongs to the server."""

    def close(self) -> None:
        """Delete the adapters that were written for the server."""
        shutil.rmtree(self._server.adapters, ignore_errors=True)

    def _generate(
        self,
        requests: list[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        cancelled: Callable[[], bool],
    ) -> Iterator[EngineResponse]:
        waiting, running = deque(requests), dict[str, Partial]()
        if not waiting:
            return
        with self._client() as client:
            served, dialect = self._dialect(client)
            self._check_static(dialect, sampling)
            adapter = self._adapter_tensors(served)
            stream = _ResponseStream(client, self._server)
            try:
                limit = 1 if adapter else self._server.max_in_flight
                while waiting or running:
                    while waiting and len(running) < limit:
                        request = waiting.popleft()
                        tensors = dialect.request(request, request.own_sampling(sampling), seed) | adapter
                        self._send(client, served, dialect, str(request.id), tensors)
                        running[str(request.id)] = Partial(request)
                    finished = []
                    for response in stream.wait(cancelled):
                        partial = running.get(response.id)
                        if partial is None:
                            raise ServiceFailed(f"{self._server}: a response to an unknown request {response.id!r}")
                        self._receive(dialect, partial, response.tensors, sampling.max_response_tokens)
                        if response.final:
                            finished.append(self._finished(dialect, running.pop(response.id), sampling))
                        # After its first response the server knows the adapter by its number.
                        limit = self._server.max_in_flight
                        adapter = {name: value for name, value in adapter.items() if name not in _WEIGHTS}
                    yield from finished
            finally:
                stream.close()

    def _receive(self, dialect: Dialect, partial: Partial, tensors: Tensors, limit: int) -> None:
        if tensors:
            dialect.receive(partial, tensors)
        if len(partial.token_ids) > limit:
            raise ComputationFailed(f"{self._server}: response to {partial.request.id}: more than {limit} tokens")

    def _finished(self, dialect: Dialect, partial: Partial, sampling: SamplingParameters) -> EngineResponse:
        answer, sampling = dialect.finish(partial), partial.request.own_sampling(sampling)
        if not dialect.reports_log_probs(sampling):
            return replace(answer, log_probs=None)
        if answer.log_probs is None and answer.token_ids and self._server.weights == "static":
            raise ComputationFailed(
                f"{self._server}: response to {answer.request.id}: no log-probs; {_NEEDS_LOG_PROBS}"
            )
        return answer

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        server, credentials = self._server, None
        if server.encrypted:
            import grpc

            credentials = grpc.ssl_channel_credentials(server.authority, server.key, server.certificate)
        options = [
            ("grpc.max_send_message_length", MAX_REQUEST),
            ("grpc.max_receive_message_length", MAX_ANSWER),
        ]
        client = self._grpc.InferenceServerClient(server.address, creds=credentials, channel_args=options)
        try:
            yield client
        except self._grpc.InferenceServerException as error:
            raise failure(error, server) from None
        finally:
            client.close()

    def _dialect(self, client: Any) -> tuple[Served, Dialect]:
        """Return the server's description of the model. Not cached: a restarted server may have another model."""
        server = self._server
        metadata = client.get_model_metadata(server.model, client_timeout=server.timeout)
        config = client.get_model_config(server.model, client_timeout=server.timeout).config
        served = Served(
            str(server),
            {tensor.name: tensor.datatype for tensor in metadata.inputs},
            frozenset(tensor.name for tensor in metadata.outputs),
            config.model_transaction_policy.decoupled,
            config.max_batch_size > 0,
        )
        dialect = dialect_of(served, self._policy)
        if dialect.name == "vllm" and server.weights == "lora":
            raise MismatchError(
                f"{server}: vLLM's backend for Triton reads adapters from a file when it starts, so it cannot get those of new "
                "policy versions; set rollout.engine vllm, or rollout.triton.weights static"
            )
        self._properties = triton_properties(
            dialect.name, server.weights, dialect.reports_log_probs(SamplingParameters(1, temperature=0.5))
        )
        return served, dialect

    def _check_static(self, dialect: Dialect, sampling: SamplingParameters) -> None:
        """Raise MismatchError if importance sampling cannot correct for weights that never change.

        Greedy responses are for evaluation only, so the trainer may compute their log-probs.
        """
        if self._server.weights != "static" or sampling.temperature == 0 or dialect.reports_log_probs(sampling):
            return
        if sampling.reshapes:
            reason = (
                "log-probs of a distribution that top_k and top_p truncate; set rollout.top_k 0 and rollout.top_p 1"
            )
        elif dialect.name == "vllm":
            reason = f"log-probs at temperature 1 only, not at {sampling.temperature:g}; set rollout.temperature 1"
        else:
            reason = f"no log-probs (dialect {dialect.name}); set rollout.triton.weights lora, or serve a model that reports them"
        raise MismatchError(f"{self._server}: reports {reason}: {_NEEDS_LOG_PROBS}")

    def _adapter(self) -> LoraTensors:
        if self._lora is None:
            if self._policy.adapter is None:
                raise ModelError("rollout.triton.weights lora: the policy has no adapter; set actor.lora")
            self._lora = lora_tensors(self._policy.adapter)
        return self._lora

    def _adapter_tensors(self, served: Served) -> Tensors:
        """Return the inputs that send the adapter to the server; none for static weights."""
        if self._server.weights == "static":
            return {}
        lora = self._adapter()
        if "input_ids" in served.inputs:
            served.need("lora_task_id", *_WEIGHTS)
            return {
                "lora_task_id": np.array([lora.task], np.uint64),
                "lora_weights": lora.weights,
                "lora_config": lora.config,
            }
        served.need("lora_id", "lora_name", "lora_path")
        return {
            "lora_id": np.array([lora.task], np.uint64),
            "lora_name": np.array([f"quartet-{lora.task}".encode()], np.object_),
            "lora_path": np.array([str(self._written(lora)).encode()], np.object_),
        }

    def _written(self, lora: LoraTensors) -> Path:
        """Return the adapter's folder, for servers that read it from disk. Deletes the folders of previous versions."""
        assert self._policy.adapter is not None
        target = self._server.adapters / f"adapter-{lora.task}"
        if not target.exists():
            shutil.rmtree(self._server.adapters, ignore_errors=True)
            target.mkdir(parents=True)
            self._policy.adapter.snapshot()(target)
        return target

    def _send(self, client: Any, served: Served, dialect: Dialect, name: str, tensors: Tensors) -> None:
        inputs = []
        for tensor, value in tensors.items():
            kind = served.inputs.get(tensor)
            if kind is None:
                continue
            shaped = value[None] if served.batched else value
            entry = self._grpc.InferInput(tensor, list(shaped.shape), kind)
            entry.set_data_from_numpy(shaped.astype(_DTYPES.get(kind, shaped.dtype)))
            inputs.append(entry)
        client.async_stream_infer(
            self._server.model,
            inputs,
            request_id=name,
            outputs=[self._grpc.InferRequestedOutput(output) for output in dialect.outputs],
            enable_empty_final_response=True,
        )


_NEEDS_LOG_PROBS = (
    "rollout.triton.weights static needs them: the policy's log-probs differ from those of the served weights"
)
_WEIGHTS = ("lora_weights", "lora_config")
# BF16 is sent from float32.
_DTYPES = {"FP16": np.float16, "FP32": np.float32, "BF16": np.float32}


@dataclass(frozen=True, slots=True)
class _Response:
    id: str
    tensors: Tensors
    final: bool


class _ResponseStream:
    """The responses that arrive on one gRPC stream."""

    def __init__(self, client: Any, server: TritonServer) -> None:
        self._client, self._server = client, server
        self._arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._last = time.monotonic()
        client.start_stream(lambda result, error: self._arrived.put((result, error)))

    def wait(self, cancelled: Callable[[], bool]) -> list[_Response]:
        """Wait for at least one response and return all that arrived. Raises Cancelled, or the server's error."""
        while True:
            if cancelled():
                raise Cancelled("generation was cancelled by its caller")
            try:
                results = [self._read(*self._arrived.get(timeout=POLL))]
                break
            except queue.Empty:
                if time.monotonic() - self._last > self._server.timeout:
                    raise ServiceUnavailable(
                        f"{self._server}: no response for {self._server.timeout:g} s; raise rollout.triton.timeout_seconds"
                    ) from None
        while not self._arrived.empty():
            results.append(self._read(*self._arrived.get()))
        self._last = time.monotonic()
        return results

    def close(self) -> None:
        """Cancel the running requests."""
        stream = self._client._stream
        self._client.stop_stream(cancel_requests=True)
        if stream is not None:
            # tritonclient leaves the thread running that waits for further requests.
            stream._request_queue.put(None)

    def _read(self, result: Any, error: Any) -> _Response:
        if error is not None:
            raise failure(error, self._server)
        message = result.get_response()
        # as_numpy gives None for an output that a response lacks.
        tensors = {output.name: result.as_numpy(output.name) for output in message.outputs}
        parameters = message.parameters
        final = "triton_final_response" in parameters and parameters["triton_final_response"].bool_param
        return _Response(message.id, {name: value for name, value in tensors.items() if value.size}, final)


def failure(error: Any, server: TritonServer) -> QuartetError:
    """Convert an error of tritonclient. An error of the connection has a status, an error of the model has none."""
    code, text = error.status() or "", error.message()
    where = f"{server}: {text}"
    if not code:
        return ServiceFailed(f"{server}: the model failed: {text}")
    if code in ("StatusCode.UNAUTHENTICATED", "StatusCode.PERMISSION_DENIED"):
        return AccessRefused(f"{where}; check rollout.triton.url and its certificates")
    if code == "StatusCode.NOT_FOUND" or (code == "StatusCode.UNAVAILABLE" and "unknown model" in text):
        return MismatchError(f"{where}; rollout.triton.model names the model")
    if code in ("StatusCode.INVALID_ARGUMENT", "StatusCode.UNIMPLEMENTED"):
        return MismatchError(where)
    if code in ("StatusCode.RESOURCE_EXHAUSTED", "StatusCode.INTERNAL", "StatusCode.DATA_LOSS"):
        return ComputationFailed(f"{where} ({code})")
    return ServiceUnavailable(f"{where} ({code}); start the server, or correct rollout.triton.url")
