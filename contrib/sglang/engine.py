"""Generation by an SGLang server over HTTP, token ids in and out, streamed.

New weights reach it through a folder that both see, by ``/update_weights_from_disk`` or ``/load_lora_adapter``. Seeds count only
with ``--enable-deterministic-inference``. SGLang's log-probs are those at the temperature, before top_k, top_p and min_p, unless
the server has the environment variable SGLANG_RETURN_ORIGINAL_LOGPROB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quartet.config.root import Config
from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.random_streams import engine_seed
from quartet.engines.engine import Engine, EngineKind, EngineProperties, Guarantees, ServedModel
from quartet.engines.http_client import EngineServer, engine_server
from quartet.engines.served_model import read_served_model
from quartet.engines.server_engine import ABORT_SECONDS, Partial, ServerEngine
from quartet.errors import ConfigError, MismatchError, QuartetError, ServiceFailed
from quartet.weight_transfer.tensors import WeightSet

LOADING = "quartet-loading"
"""Version of the server during an update. A response with it is refused."""
STREAM_INTERVAL = 32
"""Tokens per event. Without --incremental-streaming-output, each event repeats all previous tokens."""
_DTYPES = {"float": "float32", "half": "float16"}


PROPERTIES = EngineProperties(
    "sglang-server",
    seeded=False,
    batch_invariant=False,
    log_probs="whole",
    weights="folder",
    digest="reported",
    in_flight_updates=True,
)
"""Guarantees with default settings."""


class SGLangServerEngine(ServerEngine):
    """Engine that generates on an SGLang server. Raises ConfigError if the server lacks a setting that it needs."""

    generate_path = "/generate"

    def __init__(self, server: EngineServer, model: ServedModel) -> None:
        self._deterministic = self._incremental = False
        self._max_tokens = 0
        super().__init__(server, model)

    @property
    def properties(self) -> EngineProperties:
        """Guarantees of this server. Its own checksums are hashes computed by the GPU, which another process cannot compare.

        It keeps the adapter of a response until its end.
        """
        return replace(
            PROPERTIES,
            seeded=self._deterministic,
            batch_invariant=self._deterministic,
            weights="adapter" if self.server.weights == "lora" else "folder",
            in_flight_updates=self.server.weights == "folder",
        )

    @property
    def max_tokens(self) -> int:
        """Longest sequence of the server: its --context-length, if it is set."""
        return self._max_tokens

    def reports_log_probs(self, sampling: SamplingParameters) -> bool:
        """Return whether the log-probs are those of the whole distribution: penalties and structured output change them."""
        return sampling.penalties is None and sampling.structured_output is None

    def inspect(self) -> None:
        """Check the settings of the server. Raises ConfigError."""
        info = self.client.get("/server_info")
        version = self.client.get("/model_info").get("weight_version")
        if not isinstance(info, dict) or "enable_deterministic_inference" not in info or not isinstance(version, str):
            raise MismatchError(
                f"{self.server}: not the answers of an SGLang server of version 0.5.23 or newer; correct "
                f"{self.server.section}.url"
            )
        self._deterministic = bool(info["enable_deterministic_inference"] or info.get("rl_on_policy_target"))
        self._incremental = bool(info.get("incremental_streaming_output"))
        self._max_tokens = int(info.get("context_length") or 0)
        dtype = str(info.get("dtype"))
        dtype = _DTYPES.get(dtype, dtype)
        if dtype not in ("auto", self.model.dtype):
            raise ConfigError(
                f"{self.server}: computes in {dtype}, and the policy is sent in {self.model.dtype}; start it with "
                f"--dtype {self.model.dtype}"
            )
        if self.server.weights == "lora" and not info.get("enable_lora"):
            raise ConfigError(
                f"{self.server}: does not serve adapters; start it with --enable-lora, --max-lora-rank and "
                "--lora-target-modules"
            )
        if abs(self._probe(1.0) - self._probe(2.0)) < 1e-7:
            raise ConfigError(
                f"{self.server}: reports log-probs before temperature; start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )

    def body(self, key: str, request: GenerationRequest, sampling: SamplingParameters, seed: int) -> dict[str, Any]:
        """Return the body of a request for a stream of events."""
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": sampling.max_response_tokens,
            # This also ignores stop_token_ids, so that it cannot replace the server's own stop tokens.
            "ignore_eos": sampling.ignore_eos,
            "stream_interval": STREAM_INTERVAL,
        }
        if self._deterministic:
            parameters["sampling_seed"] = engine_seed(seed, request.id, request.turn)
        if sampling.stop_strings:
            parameters |= {
                "stop": list(sampling.stop_strings),
                "no_stop_trim": True,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
            }
        if sampling.min_p:
            parameters["min_p"] = sampling.min_p
        if sampling.penalties is not None:
            parameters |= sampling.penalties.arguments
        if (output := sampling.structured_output) is not None:
            parameters["ebnf" if output.kind == "grammar" else output.kind] = output.value
        if not sampling.ignore_eos:
            parameters["stop_token_ids"] = sorted(self.model.stop_ids)
        body = {
            "rid": key,
            "input_ids": request.prompt_ids.tolist(),
            "sampling_params": parameters,
            "return_logprob": True,
            "stream": True,
            "cache_salt": self.salt,
        }
        if self.adapter is not None:
            body["lora_path"] = self.adapter
        return body

    def receive(self, partial: Partial, data: Mapping[str, Any], sampling: SamplingParameters) -> None:
        """Add one event: the tokens so far, or with --incremental-streaming-output the next tokens."""
        where = f"{self.server}: response to {partial.request.id}"
        meta = data["meta_info"]
        reason = meta["finish_reason"]
        if reason is not None and reason["type"] not in ("stop", "length"):
            message = reason.get("message") or ""
            raise ServiceFailed(f"{where}: ended by the server with reason {reason['type']!r} {message}".rstrip())
        if self._incremental or reason is not None:
            ids = [int(entry[1]) for entry in meta["output_token_logprobs"]]
            log_probs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
            if not self._incremental:
                partial.token_ids.clear()
                partial.log_probs.clear()
            partial.token_ids += ids
            partial.log_probs += log_probs
        if reason is None:
            return
        last = partial.token_ids[-1]
        if reason["type"] == "stop" and last not in self.model.stop_ids and not sampling.stop_strings:
            raise ServiceFailed(
                f"{where}: stopped at token {last}, which is a stop token of the served checkpoint and not of the policy; "
                "correct eos_token_id in the server's generation_config.json and config.json"
            )
        self.check_versions(partial, meta.get("weight_versions"))
        partial.finished, partial.stopped = True, reason["type"] == "stop"

    def abort(self, keys: Sequence[str]) -> None:
        """Abort requests."""
        for key in keys:
            self.client.post("/abort_request", {"rid": key}, ABORT_SECONDS)

    def load_checkpoint(self, weights: WeightSet, folder: str, in_flight: bool) -> str:
        """Load the checkpoint in the folder and flush the prefix cache.

        In flight, SGLang cannot flush it: running requests keep their part. The salt keeps later requests from the rest.
        """
        client, seconds, version = self.client, self.server.load_timeout, weights.digest.hex()
        client.post("/pause_generation", {"mode": "in_place" if in_flight else "abort"}, seconds)
        if not in_flight:
            client.post("/update_weight_version", {"new_version": LOADING, "abort_all_requests": True})
        # Only updates by tensors or from a process group need begin_weight_update and end_weight_update.
        body = {
            "model_path": folder,
            "flush_cache": not in_flight,
            "abort_all_requests": not in_flight,
            "weight_version": version,
        }
        answer = client.post("/update_weights_from_disk", body, seconds)
        if not isinstance(answer, dict) or not answer.get("success"):
            raise ServiceFailed(f"{self.server}: cannot load the weights: {answer}")
        client.post("/continue_generation", {}, seconds)
        return version

    def load_adapter(self, weights: WeightSet, name: str, folder: str) -> None:
        """Load the adapter in the folder under this name."""
        answer = self.client.post(
            "/load_lora_adapter", {"lora_name": name, "lora_path": folder}, self.server.load_timeout
        )
        if not isinstance(answer, dict) or not answer.get("success"):
            raise ServiceFailed(f"{self.server}: cannot load the adapter: {answer}")

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter."""
        self.client.post("/unload_lora_adapter", {"lora_name": name}, self.server.load_timeout)

    def check_base(self, weights: WeightSet) -> str:
        """Return the version of the base model. The server does not prove its weights."""
        return str(self.client.get("/model_info").get("weight_version"))

    def explain(self, status: int, path: str, text: str) -> QuartetError | None:
        """Explain the errors that a setting of the server or its restart causes."""
        server = self.server
        if path == "/update_weights_from_disk" and status in (400, 500):
            return ServiceFailed(
                f"{server}: cannot load the weights: {text}; it must see {server.section}.weights_directory under the same path"
            )
        if path == "/load_lora_adapter" and status in (400, 500):
            return ServiceFailed(
                f"{server}: cannot load the adapter: {text}; it must see {server.section}.weights_directory, and need a "
                "--max-lora-rank and --lora-target-modules that fit the policy"
            )
        if path in ("/server_info", "/model_info") and status in (404, 405):
            return MismatchError(
                f"{server}: has no {path}; it must be SGLang 0.5.23 or newer; correct {server.section}.url"
            )
        return None

    def _probe(self, temperature: float) -> float:
        """Generate one token and return the log-prob of the likeliest."""
        # The first token may be padding, after which all tokens are equally likely.
        prompt = list(range(min(8, self.model.vocabulary_size)))
        # A top_k above 1, because greedy log-probs are always those at temperature 1.
        parameters = {"temperature": temperature, "top_k": 2, "max_new_tokens": 1, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": parameters, "return_logprob": True, "top_logprobs_num": 1}
        answer = self.client.post("/generate", body)
        try:
            return float(answer["meta_info"]["output_top_logprobs"][0][0][0])
        except (KeyError, TypeError, IndexError, ValueError):
            raise MismatchError(
                f"{self.server}: /generate: no log-probs in the response; it must be SGLang 0.5.23 or newer"
            ) from None


def create(config: Config) -> tuple[Engine, ServedModel]:
    """Connect to the SGLang server of ``rollout.sglang_server``.

    Raises ConfigError if a setting of the server does not fit, ModelError, and ServiceUnavailable if it does not respond.
    """
    chosen, model = config.rollout.sglang_server, read_served_model(config.actor.model, config.actor.dtype)
    assert chosen is not None
    server = engine_server(chosen, "SGLang", "rollout.sglang_server", config.rollout.max_concurrent_sequences)
    return SGLangServerEngine(server, model), model


_DETERMINISTIC = "start the server with --enable-deterministic-inference"
KIND = EngineKind(
    "sglang-server",
    "httpx2",
    (
        Guarantees(
            PROPERTIES,
            "an SGLang server, called by a generator",
            "not run: a server generated from its published interface stands in",
            "Seeded with --enable-deterministic-inference.",
            "with --enable-deterministic-inference",
        ),
    ),
    create,
    seed_remedy=_DETERMINISTIC,
    batch_remedy=_DETERMINISTIC,
)
