"""Base of the engines that generate on an HTTP server which already runs, with its own GPUs."""

from __future__ import annotations

import abc
import contextlib
import threading
import uuid
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import VersionSpan
from quartet.engines.checkpoint_files import adapter_tensors, write_adapter, write_checkpoint
from quartet.engines.engine import Cancelled, EngineProperties, EngineResponse, ServedModel, TurnSource
from quartet.engines.http_client import EngineServer, ServerClient
from quartet.engines.request_checks import check_requests
from quartet.engines.weight_folders import WeightFolders
from quartet.errors import Cancelled as GenerationCancelled
from quartet.errors import ConfigError, QuartetError, ServiceFailed
from quartet.weight_transfer.tensors import WeightSet, tensor_digest

ABORT_SECONDS = 5.0
"""Time limit for aborting requests."""


@dataclass(slots=True)
class Partial:
    """Response that is not finished. ``stopped``: the server reports that a stop token or stop string ended it.

    ``spans``: the weights of its tokens, if they may change in the middle.
    """

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finished: bool = False
    stopped: bool = False
    spans: tuple[VersionSpan, ...] = ()


class ServerEngine(abc.ABC):
    """Engine that generates on a server. New weights reach it through a folder that both see.

    The version of the weights on the server is the hexadecimal digest of the policy version. Every response must name it.
    With ``properties.in_flight_updates``, ``load_weights`` may run on another thread than a generation.
    """

    generate_path: str

    def __init__(self, server: EngineServer, model: ServedModel) -> None:
        self.server, self.model = server, model
        self.client = ServerClient(server, self.explain)
        self._folders = WeightFolders(server.weights_directory)
        self.salt = ""
        """Key of the prefix cache: the digest of the weights."""
        self.adapter: str | None = None
        """Name of the policy's adapter on the server."""
        self._version: str | None = None
        # Policy version and digest of the weights that a generation may use, by their version on the server.
        self._versions: dict[str, tuple[int, bytes]] = {}
        # Held during an update, and while a generation begins.
        self._updating = threading.Lock()
        self._generations = 0
        self._failed_update = ""
        try:
            self.inspect()
        except QuartetError:
            self.client.close()
            raise

    @property
    @abc.abstractmethod
    def properties(self) -> EngineProperties:
        """Guarantees of this server."""

    @abc.abstractmethod
    def inspect(self) -> None:
        """Check the settings of the server. Raises ConfigError."""

    @property
    @abc.abstractmethod
    def max_tokens(self) -> int:
        """Longest sequence of the server, prompt and response together; 0 if unknown."""

    @abc.abstractmethod
    def body(self, key: str, request: GenerationRequest, sampling: SamplingParameters, seed: int) -> dict[str, Any]:
        """Return the body of a request for a stream of events. ``key`` is its id on the server."""

    @abc.abstractmethod
    def receive(self, partial: Partial, data: Mapping[str, Any], sampling: SamplingParameters) -> None:
        """Add one event to a response. Raises as ``check_versions``, and KeyError and the like if it is malformed."""

    @abc.abstractmethod
    def reports_log_probs(self, sampling: SamplingParameters) -> bool:
        """Return whether the server reports log-probs of the whole distribution."""

    @abc.abstractmethod
    def load_checkpoint(self, weights: WeightSet, folder: str, in_flight: bool) -> str:
        """Load the checkpoint in the folder and reset the prefix cache. Return the version that responses must name.

        ``in_flight``: running requests continue afterwards, with the keys and values that they have.
        """

    @abc.abstractmethod
    def load_adapter(self, weights: WeightSet, name: str, folder: str) -> None:
        """Load the adapter in the folder under this name."""

    @abc.abstractmethod
    def unload_adapter(self, name: str) -> None:
        """Remove an adapter."""

    @abc.abstractmethod
    def check_base(self, weights: WeightSet) -> str:
        """Check the base model of an adapter. Return the version that responses must name."""

    @abc.abstractmethod
    def abort(self, keys: Sequence[str]) -> None:
        """Abort requests on the server. Closing their connections does the same, but the server may notice it later."""

    @abc.abstractmethod
    def explain(self, status: int, path: str, text: str) -> QuartetError | None:
        """Explain the errors that a setting of the server or its restart causes."""

    def load_weights(self, weights: WeightSet, changed: Collection[str]) -> Mapping[str, bytes]:
        """Load a policy version through the folder, and reset the prefix cache. Returns the digest of each tensor.

        Raises ServiceFailed if the server holds other weights afterwards, or if it fails. After a failure the server stays
        paused, so that no other client gets responses of half an update, and a generation in progress raises ServiceFailed.
        """
        with self._updating:
            in_flight = self._generations > 0 and self.properties.in_flight_updates
            try:
                return self._load_weights(weights, in_flight)
            except QuartetError as error:
                self._failed_update = f"version {weights.version} failed in the middle of a generation: {error}"
                raise

    def _load_weights(self, weights: WeightSet, in_flight: bool) -> Mapping[str, bytes]:
        section = self.server.section
        if (weights.adapter is not None) != (self.server.weights == "lora"):
            raise ConfigError(
                f"{self.server}: {section}.weights is {self.server.weights}, and the policy has "
                f"{'no' if weights.adapter is None else 'an'} adapter; set lora with actor.lora, folder without"
            )
        self._version = None
        if weights.adapter is None:
            folder = self._folders.replaced(weights.digest.hex())
            write_checkpoint(folder, self.model, weights.tensors)
            version = self.load_checkpoint(weights, str(folder), in_flight)
            self._folders.keep(folder)
        else:
            self._change_adapter(weights)
            version = self.check_base(weights)
        self._versions[version] = weights.version, weights.digest
        self._version, self.salt = version, weights.digest.hex()
        return {name: tensor_digest(tensor) for name, tensor in weights.tensors.items()}

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParameters, seed: int, cancelled: Cancelled
    ) -> Iterator[EngineResponse]:
        """Yield each response as soon as it is finished.

        Raises InvalidRequest at the call. While iterating, raises Cancelled, ServiceFailed, also for a response of other weights,
        ServiceUnavailable or a ConfigError.
        """
        return self._generate(self._checked(requests, sampling), sampling, seed, cancelled)

    def generate_turns(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        cancelled: Cancelled,
        turns: TurnSource,
    ) -> Iterator[EngineResponse]:
        """Generate the requests that ``turns`` provides. See ``TurnEngine.generate_turns``."""
        self._checked(requests, sampling)
        return self._generate([], sampling, seed, cancelled, turns)

    def sleep(self, everything: bool = True) -> None:  # noqa: B027 - the same for every server
        """Do nothing. The server has its own device."""

    def close(self) -> None:
        """Close the connections and delete the folders with weights."""
        self.client.close()
        self._folders.close()

    def _change_adapter(self, weights: WeightSet) -> None:
        """Load the adapter under a name that contains its digest: a server without exactly this adapter refuses the requests."""
        assert weights.adapter is not None
        name, previous = f"quartet-{weights.digest.hex()}", self.adapter
        if name == previous:
            return
        folder = self._folders.replaced(weights.digest.hex())
        write_adapter(folder, self.model.model, weights.adapter, adapter_tensors(weights))
        self.load_adapter(weights, name, str(folder))
        self.adapter = name
        if previous is not None:
            with contextlib.suppress(QuartetError):
                self.unload_adapter(previous)
        self._folders.keep(folder)

    def _checked(self, requests: Sequence[GenerationRequest], sampling: SamplingParameters) -> list[GenerationRequest]:
        limits = [tokens for tokens in (self.model.max_sequence_tokens, self.max_tokens) if tokens]
        return check_requests(replace(self.model, max_sequence_tokens=min(limits, default=0)), requests, sampling)

    def _generate(
        self,
        requests: list[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        cancelled: Cancelled,
        turns: TurnSource | None = None,
    ) -> Iterator[EngineResponse]:
        if not requests and turns is None:
            return
        with self._updating:
            if self._version is None:
                raise ServiceFailed(f"{self.server}: holds no policy version; load weights first")
            self._failed_update = ""
            self._versions = {self._version: self._versions[self._version]}
            self._generations += 1

        def stopped() -> bool:
            if self._failed_update:
                raise ServiceFailed(f"{self._failed_update}; its responses are discarded")
            return cancelled()

        # The same trajectory may be generated again while the server still ends the former request.
        call = uuid.uuid4().hex[:8]
        waiting, running = deque(requests), dict[str, Partial]()
        streams = self.client.streams(self.generate_path)
        try:
            while waiting or running or (turns is not None and turns.open):
                if turns is not None:
                    if stopped():
                        raise GenerationCancelled("generation was cancelled by its caller")
                    waiting.extendleft(reversed(turns.take(wait=not (waiting or running))))
                while waiting and len(running) < self.server.max_in_flight:
                    request = waiting.popleft()
                    key = f"{request.id}/{call}"
                    running[key] = Partial(request)
                    streams.start(key, self.body(key, request, request.own_sampling(sampling), seed))
                for event in streams.wait(stopped, self._updating.locked) if running else ():
                    if event.data is not None:
                        self._receive(running[event.key], event.data, sampling)
                    else:
                        yield self._finish(running.pop(event.key), sampling)
        finally:
            streams.close()
            if running:
                with contextlib.suppress(QuartetError):
                    self.abort(list(running))
            with self._updating:
                self._generations -= 1

    def _receive(self, partial: Partial, data: Mapping[str, Any], sampling: SamplingParameters) -> None:
        where, sampling = f"{self.server}: response to {partial.request.id}", partial.request.own_sampling(sampling)
        try:
            self.receive(partial, data, sampling)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ServiceFailed(f"{where}: a malformed event ({type(error).__name__}: {error})") from None
        limit = sampling.max_response_tokens
        if len(partial.token_ids) > limit:
            raise ServiceFailed(f"{where}: more than {limit} tokens")

    def _finish(self, partial: Partial, sampling: SamplingParameters) -> EngineResponse:
        if not partial.finished:
            raise ServiceFailed(f"{self.server}: response to {partial.request.id}: ends without a reason")
        reports = self.reports_log_probs(partial.request.own_sampling(sampling))
        log_probs = partial.log_probs if reports else None
        stopped = partial.stopped and bool(sampling.stop_strings)
        return EngineResponse(partial.request, partial.token_ids, log_probs, stopped=stopped, spans=partial.spans)

    def check_versions(self, partial: Partial, spans: Any) -> None:
        """Raise ServiceFailed unless a whole response was generated with weights of this generation.

        ``spans``: list of dictionaries with version, start and end.
        """
        where = f"{self.server}: response to {partial.request.id}"
        names, expected = [str(span["version"]) for span in spans or ()], self._versions
        if not names or not set(names) <= expected.keys():
            raise ServiceFailed(
                f"{where}: generated with weights {sorted(set(names)) or 'of no version'}, and not with "
                f"{' or '.join(map(repr, expected))}; another client changed the weights, the server was restarted, or it is too "
                "old to report versions"
            )
        if not self.properties.in_flight_updates:
            return
        ends = [0, *(int(span["end"]) for span in spans)]
        if [int(span["start"]) for span in spans] != ends[:-1] or ends[-1] != len(partial.token_ids):
            raise ServiceFailed(f"{where}: names no version of the weights for each token")
        partial.spans = tuple(
            VersionSpan(*expected[name], tokens)
            for name, start, end in zip(names, ends[:-1], ends[1:], strict=True)
            if (tokens := end - start)
        )
