"""Settings of generation: how many responses, with which sampling, by which engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from quartet.config.section import Count, Fraction, Positive, Section, WholeNumber

MAX_RESPONSES = 65_536
"""Maximum number of responses per step."""
MAX_TURNS = 1024
"""Maximum number of turns of a trajectory."""
MAX_SAMPLING_ROUNDS = 1000
"""Maximum number of rounds of dynamic sampling per step."""
MAX_OFF_POLICY_STEPS = 32
"""Maximum number of updates by which the generating policy may lag behind."""
MAX_REPETITION_PENALTY, MAX_ADDITIVE_PENALTY = 100.0, 2.0
"""Maximum repetition penalty, and maximum presence and frequency penalty. vLLM has the second one."""
MAX_STRUCTURED_OUTPUT = 65_536
"""Maximum number of characters of a JSON schema, regular expression or grammar."""
AdditivePenalty = Annotated[float, Field(ge=-MAX_ADDITIVE_PENALTY, le=MAX_ADDITIVE_PENALTY)]
Responses = Annotated[int, Field(ge=1, le=MAX_RESPONSES)]
ENGINES = {
    "torch": "quartet.models.generation.torch_kind",
    "vllm": "quartet.engines.vllm",
    "vllm-server": "quartet.engines.vllm_server",
}
"""Modules of the built-in engines."""
ENGINE_ENTRY_POINTS = "quartet.engines"
"""Group of the entry points by which contrib/ and other packages name their engines."""


def engine_names() -> list[str]:
    """Return the names of all installed engines."""
    return list(dict.fromkeys([*ENGINES, *(entry.name for entry in entry_points(group=ENGINE_ENTRY_POINTS))]))


def check_engine_name(value: str) -> str:
    if value not in ENGINES and not entry_points(group=ENGINE_ENTRY_POINTS, name=value):
        raise ValueError(f"no installed package has this engine; expected one of {', '.join(engine_names())}")
    return value


def triton_url(value: str) -> str:
    scheme, separator, address = value.partition("://")
    host, _, port = address.rpartition(":")
    if (
        scheme not in ("grpc", "grpcs")
        or not separator
        or not host
        or set("/@?") & set(address)
        or not port.isdecimal()
        or not 0 < int(port) < 65536
    ):
        raise ValueError(
            "expected grpc://HOST:PORT, or grpcs://HOST:PORT for TLS; PORT, from 1 to 65535, is the gRPC port of Triton, "
            "often 8001"
        )
    return value


class TritonConfig(Section):
    """Generation on a Triton Inference Server with the TensorRT-LLM or vLLM backend. Needs the extra quartet-rlhf[triton]."""

    url: Annotated[str, AfterValidator(triton_url)]
    """Address of the server: grpcs://HOST:PORT with TLS, or grpc://HOST:PORT without. Without TLS only loopback addresses are
    allowed, unless security.allow_plaintext is set."""
    model: str = "tensorrt_llm"
    """Name of the model on the server."""
    weights: Literal["lora", "static"] = "lora"
    """lora: send the adapter of each policy version with the requests. static: the weights of the server never change, and
    rollout_correction, or old_log_probs rollout, corrects for the difference. It needs a server that reports log-probs, and no
    top_k, top_p and min_p."""
    timeout_seconds: Positive = 60.0
    """Time without any output, in seconds, after which a pending request fails."""
    certificate_authority_file: Path | None = None
    """PEM file of the authority that signed the certificate of the server. Null: the authority in security.certificates, or else
    those of the system."""

    @property
    def encrypted(self) -> bool:
        """Return whether the connection uses TLS."""
        return self.url.startswith("grpcs://")

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self.url.partition("://")[2]


def server_url(value: str) -> str:
    parts = urlsplit(value)
    try:
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        port_is_valid = False
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not port_is_valid
        or "@" in parts.netloc
        or parts.query
        or parts.fragment
    ):
        raise ValueError(
            "expected http://HOST:PORT, or https://HOST:PORT for TLS, without a password; api_key_file names the file with a key"
        )
    return value


class EngineServerConfig(Section):
    """Generation on an HTTP server that already runs, with its own GPUs."""

    url: Annotated[str, AfterValidator(server_url)]
    """Address of the server: https://HOST:PORT with TLS, or http://HOST:PORT without. Without TLS only loopback addresses are
    allowed, unless security.allow_plaintext is set."""
    weights: Literal["folder", "lora"] = "folder"
    """folder: load each policy version from a checkpoint in weights_directory. lora: load the adapter of each policy version from
    weights_directory."""
    weights_directory: Path
    """Directory that the generator and the server see under the same path, on a shared volume. /dev/shm if both run on one
    machine."""
    api_key_file: Path | None = None
    """File with the server's API key. Null: the server asks for none."""
    timeout_seconds: Positive = 60.0
    """Time without any output, in seconds, after which pending requests fail."""
    load_timeout_seconds: Positive = 600.0
    """Time in seconds after which a step of a weight update fails."""
    certificate_authority_file: Path | None = None
    """PEM file of the authority that signed the certificate of the server. Null: those of the system."""

    @property
    def encrypted(self) -> bool:
        """Return whether the connection uses TLS."""
        return self.url.startswith("https://")

    @property
    def host(self) -> str:
        """Host name or address of the server."""
        return urlsplit(self.url).hostname or ""


class VLLMServerConfig(EngineServerConfig):
    """Generation on a vLLM server that already runs. It needs --enable-scale-out and --logprobs-mode processed_logprobs."""

    model: str | None = None
    """Name of the model on the server. Null: the only one."""
    verify_weights: bool = True
    """Compare the server's checksums with the weights after each update. False for servers that store weights in another layout,
    such as quantized ones."""


class SGLangServerConfig(EngineServerConfig):
    """Generation on an SGLang server that already runs."""


class TensorRTLLMConfig(Section):
    """Generation with TensorRT-LLM, in a generator process."""

    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Fraction of the free GPU memory to use for the key-value cache."""
    release_memory: bool = False
    """Shut the engine down while it does not generate, and load it again for the next step. For a generator that shares its GPU
    with training."""
    sampler: Literal["TorchSampler", "TRTLLMSampler"] = "TorchSampler"
    """TorchSampler: requests have no seeds. TRTLLMSampler: each trajectory has its seed, but log-probs only at temperature 1;
    TensorRT-LLM 1.3.0rc26 and later refuse it."""
    tensor_parallel_size: Count = 1
    """Number of GPUs of one generator that share the model."""
    chunked_prefill: bool = False
    """Compute long prompts in several forward passes."""
    cuda_graphs: bool = True
    """Replay decode steps as CUDA graphs. Their capture takes time at every start of the engine."""


class SpeculativeDecodingConfig(Section):
    """Speculative decoding in vLLM: tokens are proposed cheaply, and the policy keeps those that it would sample.

    The distribution of responses stays that of the policy, which alone is trained and attested.
    """

    num_speculative_tokens: Annotated[int, Field(ge=1, le=64)]
    """Number of tokens proposed at a time."""
    draft_model: str | None = None
    """Smaller model with the policy's vocabulary that proposes tokens: a directory or a Hugging Face hub id, with weights in
    safetensors. It is not trained, so it fits the policy less as that changes. Null: the tokens that followed the last n-gram at
    its former place in prompt and response."""
    prompt_lookup_max: Count = 5
    """Maximum length of the n-gram, without draft_model."""
    prompt_lookup_min: Count | None = None
    """Minimum length of the n-gram, without draft_model. Null: prompt_lookup_max."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if (self.prompt_lookup_min or 0) > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min}: expected at most prompt_lookup_max {self.prompt_lookup_max}"
            )
        return self


class VLLMConfig(Section):
    """Generation with vLLM in the processes of the generators, in a separate environment: see services.generator.python."""

    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of devices of each generator. services.generator.devices lists those of all generators."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Fraction of the memory of a GPU for weights and key-value cache. On a CPU: of the machine's memory."""
    release_memory: bool = False
    """Free the memory of the GPU while nothing is generated. For a generator that shares its GPU with training."""
    prefix_caching: bool = True
    """Compute the common beginning of prompts once. The cache is reset with every policy version."""
    enforce_eager: bool = False
    """Decode without CUDA graphs."""
    speculative: SpeculativeDecodingConfig | None = None
    """Speculative decoding. Null disables it."""
    engine_arguments: dict[str, bool | int | float | str] = Field(default={})
    """Further arguments of vLLM's engine, by the names of its EngineArgs."""


MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 16, 64
"""Limits on the number of stop strings, and on the length of each."""


def check_stop_strings(strings: Sequence[str]) -> Sequence[str]:
    """Return the stop strings. Raises ValueError for too many, and for one that is too long or can never occur."""
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"{len(strings)} stop strings; expected at most {MAX_STOP_STRINGS}")
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS or "\ufffd" in string:
            raise ValueError(
                f"{string!r}: expected 1 to {MAX_STOP_CHARACTERS} characters, without the replacement character U+FFFD"
            )
    return strings


class StructuredOutputConfig(Section):
    """The form of each response, with max_turns of each turn. The engine removes the tokens that would leave it. One of the keys.

    Needs engine vllm-server or sglang-server.
    """

    json_schema: dict[str, Any] | None = None
    """JSON schema of the response."""
    regex: str | None = None
    """Regular expression that the whole response matches."""
    grammar: str | None = None
    """Grammar of the response in the EBNF dialect of the engine."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        given = [key for key in ("json_schema", "regex", "grammar") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"{' and '.join(given) or 'no key'}: expected one of json_schema, regex and grammar")
        if not 1 <= len(self.value) <= MAX_STRUCTURED_OUTPUT:
            raise ValueError(f"{given[0]}: {len(self.value)} characters; expected 1 to {MAX_STRUCTURED_OUTPUT}")
        return self

    @property
    def kind(self) -> Literal["json_schema", "regex", "grammar"]:
        """The key that is set."""
        return "json_schema" if self.json_schema is not None else "regex" if self.regex is not None else "grammar"

    @property
    def value(self) -> str:
        """The form as text."""
        if self.json_schema is None:
            return self.regex or self.grammar or ""
        try:
            return json.dumps(self.json_schema, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"json_schema: expected values as in JSON ({error})") from None


class RolloutConfig(Section):
    """Number of responses, sampling and engine."""

    prompts_per_step: Responses = 64
    """Number of prompts per step."""
    samples_per_prompt: Responses = 1
    """Number of responses per prompt."""
    extra_samples: WholeNumber = 0
    """With max_turns: number of further trajectories per prompt. The step keeps samples_per_prompt of them, those that use the
    fewest tokens of the policy, then the fewest turns. The others are ended as soon as that is known. It prefers short
    trajectories, and never fast ones: time does not count, so such a run repeats bit-identically."""
    dynamic_sampling: bool = False
    """Replace prompts whose responses all have the same score by further prompts, until the step has prompts_per_step prompts.
    Needs samples_per_prompt 2 or more."""
    max_sampling_rounds: Annotated[int, Field(ge=1, le=MAX_SAMPLING_ROUNDS)] = 10
    """With dynamic_sampling: maximum number of rounds of generation per step, with at most prompts_per_step prompts each. Beyond
    it, the run fails."""
    max_response_tokens: Count = 64
    """Maximum length of a response in tokens. With max_turns: of all turns and observations together."""
    max_turns: Annotated[int, Field(ge=0, le=MAX_TURNS)] = 0
    """Maximum number of turns with the environment. 0: one response to each prompt, without an environment."""
    max_turn_tokens: Count | None = None
    """Maximum length of one turn in tokens. Null: only max_response_tokens limits it."""
    temperature: Annotated[float, Field(ge=0.001, le=1000)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability. 1 disables it."""
    top_k: WholeNumber = 0
    """Sample from this many most likely tokens. 0 disables it."""
    min_p: Fraction = 0.0
    """Sample from the tokens whose probability is at least this fraction of the largest one. 0 disables it."""
    repetition_penalty: Annotated[float, Field(gt=0, le=MAX_REPETITION_PENALTY)] = 1.0
    """Divide the positive logits of tokens that occur in the prompt or the response by it, and multiply the others. Above 1
    discourages repetition, 1 disables it. With max_turns: the response is the turn, the prompt all before it."""
    presence_penalty: AdditivePenalty = 0.0
    """Subtract it from the logits of tokens that occur in the response, as in vLLM. 0 disables it."""
    frequency_penalty: AdditivePenalty = 0.0
    """Subtract it from the logits of tokens for each time that they occur in the response, as in vLLM. 0 disables it."""
    stop_strings: Annotated[tuple[str, ...], AfterValidator(check_stop_strings)] = ()
    """Texts that end a response, or a turn: the token that completes one is its last, as if it were the end-of-sequence token. At
    most 16 of 1 to 64 characters."""
    structured_output: StructuredOutputConfig | None = None
    """Form of each response. Null: any."""
    engine: Annotated[str, AfterValidator(check_engine_name)] = "torch"
    """torch: PyTorch, in the actor or in generators. triton: the server of rollout.triton. vllm and tensorrt-llm: these engines,
    in generators. vllm-server and sglang-server: the servers of rollout.vllm_server and rollout.sglang_server, by a generator.
    Another installed package may add engines."""
    generators: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of generator processes to start on this machine. 0 without services.generators: the actor generates."""
    vllm: VLLMConfig | None = None
    """Settings of engine vllm. Null: their defaults."""
    triton: TritonConfig | None = None
    """Server of engine triton. Null with other engines."""
    vllm_server: VLLMServerConfig | None = None
    """Server of engine vllm-server. Null with other engines."""
    sglang_server: SGLangServerConfig | None = None
    """Server of engine sglang-server. Null with other engines."""
    tensorrt_llm: TensorRTLLMConfig | None = None
    """Settings of engine tensorrt-llm. Null: their defaults."""
    max_concurrent_sequences: Responses = 256
    """Maximum number of sequences that are decoded at the same time."""
    merge_adapter: bool = False
    """With actor.lora and engine torch: decode with the adapter merged into copies of the weights. Faster, but needs memory for
    the copies. In float32 it changes only the last bits; in half precision the merged weights are rounded."""
    max_off_policy_steps: Annotated[int, Field(ge=0, le=MAX_OFF_POLICY_STEPS)] = 0
    """Maximum number of updates by which the generating policy lags behind. 0: generate, then train. k: generate up to k steps
    ahead while training. The policy of a step follows from its number, so such a run repeats bit-identically, too. The engine
    must report log-probs: vllm, vllm-server and tensorrt-llm need top_p 1, top_k 0 and min_p 0, and all but torch no
    penalties and no structured_output."""
    in_flight_updates: bool = False
    """Give generators each new policy in the middle of their responses, instead of at the next step. Needs max_off_policy_steps
    and generators with engine torch or vllm, or with sglang-server without an adapter. Timing decides which policy generates a
    token, so such a run does not repeat bit-identically."""
    router_replay: bool = False
    """For a mixture of experts: the actor's forward and backward passes use the experts that the engine chose for each token,
    which engine torch or vllm reports. Otherwise its routers choose again, and rounding gives some tokens other experts."""
    share_weights: bool = True
    """Let generators on the actor's machine read each new policy from its memory. Elsewhere, and with false, it is sent."""
    share_directory: Path | None = None
    """Directory that actor and generators see, for those in different containers of one machine: sockets in it give access to the
    memory. Null: the memory is found in /proc, so they need one namespace of processes."""
    share_gpu_memory: bool = False
    """Keep each new policy once more in the memory of the actor's GPU. Generators with engine torch, on this or another GPU of
    the machine, copy it from there (CUDA IPC). Needs share_weights and an actor on one GPU. It has not run on a GPU."""
    process_group: Literal["none", "gloo", "nccl"] = "none"
    """Send each new policy through process groups of torch: gloo between CPUs, nccl between GPUs of one fabric. Each rank of an
    actor sends what it holds. Neither encrypts or authenticates. If one fails, and with none, gRPC sends the policy."""
    score_batch_size: Count = 16
    """Number of responses per scoring batch. A batch has the responses of neighbouring prompts, and is scored when all of them
    are finished. With extra_samples, whole prompts: at least so many."""

    @property
    def generated_samples(self) -> int:
        """Number of responses per prompt that a step generates."""
        return self.samples_per_prompt + self.extra_samples
