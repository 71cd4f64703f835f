"""Generation by a vLLM server over HTTP, token ids in and out, streamed.

The server needs ``--enable-scale-out --logprobs-mode processed_logprobs``. New weights reach it through a folder that both see.
The whole checkpoint needs ``VLLM_SERVER_DEV_MODE=1``, an adapter ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``.
The development routes have no authentication, so that they need loopback or a network policy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quartet.config.root import Config
from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.random_streams import engine_seed
from quartet.engines.checkpoint_files import base_tensors
from quartet.engines.engine import Engine, EngineKind, EngineProperties, Guarantees, ServedModel
from quartet.engines.http_client import EngineServer, engine_server
from quartet.engines.served_model import read_served_model
from quartet.engines.server_engine import ABORT_SECONDS, Partial, ServerEngine
from quartet.engines.vllm_checksums import compare
from quartet.errors import (
    AccessRefused,
    ConfigError,
    MismatchError,
    QuartetError,
    ServiceBusy,
    ServiceFailed,
)
from quartet.weight_transfer.tensors import WeightSet

LOADING = "quartet-loading"
"""Version of the server during an update. A response with it is refused."""
MISSING_LOG_PROB = -9999.0
"""vLLM's value for a log-prob that it does not have."""
_STRUCTURED_OUTPUTS = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}
"""Names of the forms in vLLM's StructuredOutputsParams."""
_CACHE_RESET_SECONDS = 10.0
PROPERTIES = EngineProperties(
    "vllm-server", seeded=True, batch_invariant=False, log_probs="truncated", weights="folder", digest="reported"
)
"""Guarantees with default settings."""


class VLLMServerEngine(ServerEngine):
    """Engine that generates on a vLLM server. Raises ConfigError if the server lacks a setting that it needs."""

    generate_path = "/inference/v1/generate"

    def __init__(self, server: EngineServer, model: ServedModel) -> None:
        self._name, self._max_tokens = "", 0
        self._has_control = self._batch_invariant = self._proven = False
        super().__init__(server, model)

    @property
    def properties(self) -> EngineProperties:
        """Guarantees of this server. ``digest`` is "read back" once its checksums have proven all tensors."""
        return replace(
            PROPERTIES,
            batch_invariant=self._batch_invariant,
            weights="adapter" if self.server.weights == "lora" else "folder",
            digest="read back" if self._proven else "reported",
        )

    @property
    def max_tokens(self) -> int:
        """Longest sequence of the server: its --max-model-len."""
        return self._max_tokens

    def reports_log_probs(self, sampling: SamplingParameters) -> bool:
        """Return whether log-probs are those of the whole distribution. vLLM reports those after penalties,
        top_k, top_p and min_p."""
        return not sampling.reshapes

    def body(self, key: str, request: GenerationRequest, sampling: SamplingParameters, seed: int) -> dict[str, Any]:
        """Return the body of a request for a stream of events."""
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": engine_seed(seed, request.id, request.turn),
            "max_tokens": sampling.max_response_tokens,
            # The stop tokens are those of the policy, and not those in the server's generation config.
            "ignore_eos": True,
            "detokenize": False,
        }
        if sampling.min_p:
            parameters["min_p"] = sampling.min_p
        if sampling.penalties is not None:
            parameters |= sampling.penalties.arguments
        if (output := sampling.structured_output) is not None:
            parameters["structured_outputs"] = {_STRUCTURED_OUTPUTS[output.kind]: output.value}
        if not sampling.ignore_eos:
            parameters["stop_token_ids"] = sorted(self.model.stop_ids)
        if sampling.stop_strings:
            parameters |= {
                "stop": list(sampling.stop_strings),
                "include_stop_str_in_output": True,
                "detokenize": True,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
            }
        if self.reports_log_probs(sampling):
            parameters["logprobs"] = 0
        return {
            "request_id": key,
            "model": self.adapter or self._name,
            "token_ids": request.prompt_ids.tolist(),
            "sampling_params": parameters,
            "stream": True,
            "cache_salt": self.salt,
        }

    def receive(self, partial: Partial, data: Mapping[str, Any], sampling: SamplingParameters) -> None:
        """Add one event with the next tokens."""
        where = f"{self.server}: response to {partial.request.id}"
        for choice in data["choices"]:
            partial.token_ids += [int(token) for token in choice["token_ids"] or ()]
            if self.reports_log_probs(sampling):
                log_probs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
                if log_probs and min(log_probs) <= MISSING_LOG_PROB:
                    raise ServiceFailed(f"{where}: a token without a log-prob")
                partial.log_probs += log_probs
            reason = choice["finish_reason"]
            if reason is None:
                continue
            if reason not in ("stop", "length"):
                raise ServiceFailed(f"{where}: ended by the server with reason {reason!r}")
            self.check_versions(partial, choice.get("weight_versions"))
            partial.finished, partial.stopped = True, reason == "stop"

    def abort(self, keys: Sequence[str]) -> None:
        """Abort requests. The server has prepended a prefix to their ids."""
        ids = [f"generate-tokens-{key}" for key in keys]
        self.client.post("/inference/v1/abort_requests", {"request_ids": ids}, ABORT_SECONDS)

    def load_checkpoint(self, weights: WeightSet, folder: str, in_flight: bool) -> str:
        """Load the checkpoint in the folder and reset the prefix cache."""
        client, seconds, version = self.client, self.server.load_timeout, weights.digest.hex()
        client.post("/pause", timeout=seconds, mode="wait")
        client.post("/update_weight_version", {"new_version": LOADING})
        client.post(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}, timeout=seconds
        )
        self._reset_prefix_cache()
        self._verify(weights)
        client.post("/update_weight_version", {"new_version": version})
        client.post("/resume", timeout=seconds)
        return version

    def load_adapter(self, weights: WeightSet, name: str, folder: str) -> None:
        """Load the adapter in the folder under this name."""
        body = {"lora_name": name, "lora_path": folder, "load_inplace": True}
        self.client.post("/v1/load_lora_adapter", body, self.server.load_timeout)

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter."""
        self.client.post("/v1/unload_lora_adapter", {"lora_name": name}, self.server.load_timeout)

    def check_base(self, weights: WeightSet) -> str:
        """Compare the base model with the server's checksums, if it has development routes."""
        if self._has_control:
            self._verify(weights)
        return self._probe()[0]

    def _reset_prefix_cache(self) -> None:
        """Reset the prefix cache, also an external one. Blocks may be in use for a moment after the pause."""
        end = time.monotonic() + _CACHE_RESET_SECONDS
        while True:
            answer = self.client.post("/reset_prefix_cache", reset_external="true")
            if isinstance(answer, dict) and answer.get("success"):
                return
            if time.monotonic() > end:
                raise ServiceFailed(
                    f"{self.server}: cannot reset its prefix cache, which has keys and values of former weights"
                )
            time.sleep(0.05)

    def _verify(self, weights: WeightSet) -> None:
        """Compare the server's checksums with the weights. Raises ServiceFailed if it holds others."""
        if not self.server.verify_weights:
            return
        answer = self.client.post("/weight_checker", {"action": "checksum"}, self.server.load_timeout)
        checksums = answer.get("checksums") if isinstance(answer, dict) else None
        if not isinstance(checksums, dict):
            raise ServiceFailed(f"{self.server}: /weight_checker: an answer without checksums")
        base = base_tensors(weights)
        result = compare(base, checksums)
        if result.different:
            names = sorted(result.different)
            raise ServiceFailed(
                f"{self.server}: holds other values than policy version {weights.version} in {len(names)} of {len(base)} "
                f"tensors, such as {names[0]}; if the server stores weights in another layout, set "
                f"{self.server.section}.verify_weights false"
            )
        self._proven = not result.unknown and weights.adapter is None

    def inspect(self) -> None:
        """Check the settings of the server. Raises ConfigError."""
        self._name, self._max_tokens = self._served_model()
        config = self._config()
        if config is None and self.server.weights == "folder":
            raise ConfigError(
                f"{self.server}: has no development routes, which load weights; start it with the environment variable "
                "VLLM_SERVER_DEV_MODE=1, reachable from this process only"
            )
        if config is not None:
            self._check_config(config)
        log_prob = self._probe()[1]
        if config is None and abs(log_prob - self._probe(2.0)[1]) < 1e-7:
            raise ConfigError(
                f"{self.server}: reports log-probs before temperature; start it with --logprobs-mode processed_logprobs"
            )
        self._has_control = config is not None
        self._batch_invariant = config is not None and bool(config["vllm_env"].get("VLLM_BATCH_INVARIANT"))

    def _served_model(self) -> tuple[str, int]:
        """Return the name of the model and its longest sequence in tokens."""
        try:
            models = {
                str(entry["id"]): int(entry.get("max_model_len") or 0)
                for entry in self.client.get("/v1/models")["data"]
                if entry.get("parent") is None
            }
        except (KeyError, TypeError, ValueError, AttributeError):
            raise MismatchError(
                f"{self.server}: /v1/models: not the answer of a vLLM server; correct {self.server.section}.url"
            ) from None
        name = self.server.model or next(iter(models), "")
        if name not in models:
            raise MismatchError(
                f"{self.server}: has no model {name!r}, but {', '.join(sorted(models)) or 'none'}; {self.server.section}.model "
                "names the model"
            )
        return name, models[name]

    def _config(self) -> dict[str, Any] | None:
        """Return the server's configuration; None without development routes."""
        try:
            answer = self.client.get("/server_info", config_format="json")
        except _NoDevelopmentRoutes:
            return None
        if not isinstance(answer, dict) or not isinstance(answer.get("vllm_config"), dict):
            raise MismatchError(
                f"{self.server}: /server_info: not the answer of a vLLM server of version 0.32 or newer"
            )
        return {"vllm_env": {}} | answer

    def _check_config(self, config: Mapping[str, Any]) -> None:
        server, options = self.server, config["vllm_config"]
        model, lora = options.get("model_config") or {}, options.get("lora_config")
        mode = model.get("logprobs_mode")
        if mode != "processed_logprobs":
            raise ConfigError(
                f"{server}: --logprobs-mode is {mode}, whose log-probs are those before temperature; start it with "
                "--logprobs-mode processed_logprobs"
            )
        dtype = str(model.get("dtype")).removeprefix("torch.")
        if dtype != self.model.dtype:
            raise ConfigError(
                f"{server}: computes in {dtype}, and the policy is sent in {self.model.dtype}; start it with "
                f"--dtype {self.model.dtype}"
            )
        if server.weights == "lora" and lora is None:
            raise ConfigError(f"{server}: does not serve adapters; start it with --enable-lora and --max-lora-rank")

    def _probe(self, temperature: float = 1.0) -> tuple[str, float]:
        """Generate one token. Return the version of the weights, and the log-prob of the likeliest token."""
        parameters = {
            "temperature": temperature,
            "seed": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "ignore_eos": True,
            "detokenize": False,
        }
        # The first token may be padding, after which all tokens are equally likely.
        prompt = list(range(min(8, self.model.vocabulary_size)))
        answer = self.client.post(
            self.generate_path, {"model": self._name, "token_ids": prompt, "sampling_params": parameters}
        )
        try:
            choice = answer["choices"][0]
            version = str(choice["weight_versions"][0]["version"])
            likeliest = max(float(entry["logprob"]) for entry in choice["logprobs"]["content"][0]["top_logprobs"])
        except (KeyError, TypeError, IndexError, ValueError):
            raise MismatchError(
                f"{self.server}: {self.generate_path}: no weight_versions and log-probs in the response; it needs vLLM 0.32 or "
                "newer"
            ) from None
        return version, likeliest

    def explain(self, status: int, path: str, text: str) -> QuartetError | None:
        """Explain the errors that a setting of the server or its restart causes."""
        server = self.server
        if "scale-out" in text.lower():
            return ConfigError(f"{server}: {path}: {text}; start it with --enable-scale-out")
        if path == self.generate_path and status == 404 and self.adapter is not None and self.adapter in text:
            return ServiceFailed(
                f"{server}: no longer has the adapter of the policy: {text}; it was probably restarted"
            )
        if path == self.generate_path and status == 404 and "model" in text:
            return MismatchError(f"{server}: {text}; {server.section}.model names the model")
        if path == "/server_info" and status == 404:
            return _NoDevelopmentRoutes(f"{server}: has no {path}")
        if "lora_adapter" in path and status in (404, 405):
            return ConfigError(
                f"{server}: {path}: {text}; start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        if "lora_adapter" in path and status in (400, 422, 500):
            return ServiceFailed(
                f"{server}: {path}: {text}; it must see {server.section}.weights_directory, and need a --max-lora-rank of the "
                "policy's rank"
            )
        if path == "/collective_rpc" and status >= 500:
            return ServiceFailed(
                f"{server}: cannot load the weights: {text}; it must see {server.section}.weights_directory under the same path"
            )
        if status in (401, 403):
            return AccessRefused(f"{server}: {path}: {text}; check {server.section}.api_key_file")
        if status == 503 and path == self.generate_path:
            return ServiceBusy(f"{server}: {text}")
        return None


class _NoDevelopmentRoutes(MismatchError):
    """The server was started without VLLM_SERVER_DEV_MODE."""


def create(config: Config) -> tuple[Engine, ServedModel]:
    """Connect to the vLLM server of ``rollout.vllm_server``.

    Raises ConfigError if a setting of the server does not fit, ModelError, and ServiceUnavailable if it does not respond.
    """
    chosen, model = config.rollout.vllm_server, read_served_model(config.actor.model, config.actor.dtype)
    assert chosen is not None
    server = engine_server(
        chosen,
        "vLLM",
        "rollout.vllm_server",
        config.rollout.max_concurrent_sequences,
        model=chosen.model,
        verify_weights=chosen.verify_weights,
    )
    return VLLMServerEngine(server, model), model


KIND = EngineKind(
    "vllm-server",
    "httpx2",
    (
        Guarantees(
            PROPERTIES,
            "a vLLM server, called by a generator",
            "CPU",
            "The digest is read back once the server's checksums have proven all tensors.",
            "if the server has VLLM_BATCH_INVARIANT=1",
        ),
    ),
    create,
    batch_remedy="start the server with VLLM_BATCH_INVARIANT=1, on GPUs that vLLM supports it on",
)
