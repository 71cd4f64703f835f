"""Settings of reward sources: models, functions, scorers behind HTTP, Triton or gRPC, judges, and weighted sums of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from quartet.config.deployment import RemoteAddress
from quartet.config.rollout import server_url, triton_url
from quartet.config.section import (
    Count,
    Dtype,
    Finite,
    FunctionName,
    Name,
    NonNegative,
    Positive,
    Section,
    is_loopback,
    pause_after,
)

RewardKind = Literal["model", "function", "http", "triton", "service", "judge"]
_KEYS = ("model", "function", "http", "triton", "service", "judge")
_FUNCTION_ONLY = ("signature", "arguments", "batched", "timeout_seconds", "quote_texts")
_MODEL_ONLY = ("dtype", "micro_batch_tokens")
ENVIRONMENT_PART = "environment"
"""Name of the part of a score that the environment gave: the sum of its rewards."""
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of a function of signature trl beside the columns of the prompts."""
TRL_NO_COLUMNS = (*TRL_ARGUMENTS, "prompt", "completion")
"""Names that are no columns for it."""
MAX_CONCURRENCY = 4096
"""Maximum number of requests in flight to a scorer."""

ServerUrl = Annotated[str, AfterValidator(server_url)]


class RetryConfig(Section):
    """Concurrency, retries and limits of the calls of a scorer in another process."""

    max_concurrency: Annotated[int, Field(ge=1, le=MAX_CONCURRENCY)] = 32
    """Maximum number of requests in flight."""
    timeout_seconds: Positive = 60.0
    """Time limit of one request, in seconds."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 4
    """Maximum number of attempts of one request, if the scorer does not respond, is overloaded or cuts the connection."""
    backoff_seconds: NonNegative = 0.5
    """Pause before the second attempt, in seconds. It doubles with each further attempt, up to 30, and varies at random by half.
    The random part changes no result."""
    circuit_breaker_failures: Count = 16
    """Number of consecutive requests to a scorer that does not respond, after which the circuit breaker opens: requests then wait
    for circuit_breaker_seconds, and one of them tries for all."""
    circuit_breaker_seconds: NonNegative = 10.0
    """Time between two tries while the circuit breaker is open, in seconds."""

    def pause(self, failures: int) -> float:
        """Return the pause before the next attempt, in seconds without the random part, after this many failures."""
        return pause_after(failures, self.backoff_seconds)

    def seconds(self) -> float:
        """Return the time limit of one request with all its attempts, in seconds."""
        pauses = sum(1.5 * self.pause(failures) for failures in range(1, self.max_attempts))
        return self.max_attempts * (self.timeout_seconds + self.circuit_breaker_seconds) + pauses


class HttpScorerConfig(RetryConfig):
    """Connection to a scorer over HTTP."""

    api_key_file: Path | None = None
    """File with the scorer's API key, which is sent as a bearer token. Null: the scorer asks for none."""
    certificate_authority_file: Path | None = None
    """PEM file of the authority that signed the certificate of the scorer. Null: those of the system."""
    max_response_bytes: Annotated[int, Field(ge=64, le=2**30)] = 16 * 2**20
    """Maximum size of one response, in bytes."""


class HttpRewardConfig(HttpScorerConfig):
    """A scorer over HTTP."""

    dialect: Literal["openrlhf", "slime", "vllm-classify", "sglang-embeddings", "nemo-gym"]
    """Format of requests and responses. openrlhf: {"query", "prompts", "labels"}. slime: {"prompt", "response", "label"}.
    vllm-classify and sglang-embeddings: a served reward model. nemo-gym: /verify of a resources server."""
    urls: Annotated[tuple[ServerUrl, ...], Field(min_length=1, max_length=64)]
    """Addresses: https://HOST:PORT/PATH with TLS, or http://HOST:PORT/PATH without. Without TLS only loopback addresses are
    allowed, unless security.allow_plaintext is set. Requests are shared among several servers. The path of vllm-classify,
    sglang-embeddings and nemo-gym is added."""
    model: str | None = None
    """Name of the model on the server, for vllm-classify and sglang-embeddings."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Maximum number of responses in one request. slime and nemo-gym always take one."""
    label_field: str = "label"
    """Field of the prompt's line that is sent as the label, for openrlhf and slime."""
    reward_key: str | None = None
    """Key of the score in the response. Null: rewards for openrlhf; the response is a number for slime; reward for nemo-gym."""
    seed_session: bool = False
    """Open a session with /seed_session before each /verify, for nemo-gym."""

    @model_validator(mode="after")
    def _has_model(self) -> HttpRewardConfig:
        serves_model = self.dialect in ("vllm-classify", "sglang-embeddings")
        if serves_model and self.model is None:
            raise ValueError(f"model: missing; dialect {self.dialect} needs the name of the model on the server")
        if not serves_model and self.model is not None:
            raise ValueError(f"model: not used with dialect {self.dialect}; remove it")
        if self.seed_session and self.dialect != "nemo-gym":
            raise ValueError(f"seed_session: not used with dialect {self.dialect}; remove it")
        if self.reward_key is not None and serves_model:
            raise ValueError(f"reward_key: not used with dialect {self.dialect}; remove it")
        return self


class TritonRewardConfig(RetryConfig):
    """A reward model on a Triton Inference Server, with the tensors of NeMo-Aligner. Needs the extra quartet-rlhf[triton]."""

    url: Annotated[str, AfterValidator(triton_url)]
    """Address of the server's gRPC port: grpcs://HOST:PORT with TLS, or grpc://HOST:PORT without. Without TLS only loopback
    addresses are allowed, unless security.allow_plaintext is set."""
    model: str = "reward_model"
    """Name of the model on the server."""
    inputs: Literal["tokens", "sentences"] = "tokens"
    """tokens: send token ids, for a server with the tokenizer of the policy. sentences: send the text of prompt and response."""
    pad_token_id: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Token id after the end of shorter sequences, for inputs tokens. The server does not read it."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Maximum number of responses in one request."""
    certificate_authority_file: Path | None = None
    """PEM file of the authority that signed the certificate of the server. Null: those of the system."""


class ServiceRewardConfig(RetryConfig):
    """A RewardService of the contract that already runs, in any language."""

    address: RemoteAddress
    """HOST:PORT. With security.certificates, the connection uses mutual TLS."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Maximum number of responses in one call."""
    start_timeout_seconds: Positive = 60.0
    """Time limit for the service to respond when the run starts, in seconds."""


class JudgeConfig(HttpScorerConfig):
    """A language model behind an OpenAI-compatible server that scores responses by a rubric."""

    url: ServerUrl
    """Base address, such as https://HOST/v1; /chat/completions is added. Without TLS only loopback addresses are allowed, unless
    security.allow_plaintext is set."""
    model: str
    """Name of the model on the server."""
    rubric: str
    """Text that says how to score a response. Part of the system message."""
    template: str = "Prompt:\n{prompt}\n\nResponse:\n{response}"
    """User message. {prompt}, {response} and {FIELD} for a field of the prompt's line are replaced once, so text in a response
    cannot insert others."""
    min_score: Finite = 0.0
    """Lowest score of the rubric. A score below it is a scorer error."""
    max_score: Finite = 10.0
    """Highest score of the rubric. A score above it is a scorer error."""
    max_tokens: Count = 1024
    """Maximum number of tokens of the judge's answer."""
    temperature: NonNegative = 0.0
    """Sampling temperature of the judge."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = 0
    """Seed that is sent to the server. Null: none is sent."""
    cache_entries: Annotated[int, Field(ge=0, le=10_000_000)] = 100_000
    """Maximum number of scores in the cache, which is a file in the run's directory. A response is judged once, also after a
    restart. 0 disables the cache."""
    input_price: NonNegative = 0.0
    """Price per million input tokens, for the cost in the log."""
    output_price: NonNegative = 0.0
    """Price per million output tokens, for the cost in the log."""

    @model_validator(mode="after")
    def _has_range(self) -> JudgeConfig:
        if not self.min_score < self.max_score:
            raise ValueError(f"min_score {self.min_score:g}: expected less than max_score {self.max_score:g}")
        if "{response}" not in self.template:
            raise ValueError("template: expected {response} in the text")
        if not self.rubric.strip():
            raise ValueError("rubric: expected a text")
        return self


class RewardSourceConfig(Section):
    """A source of scores."""

    source: RewardKind = "model"
    """model: a sequence classifier. function: a Python function. http: a scorer over HTTP. triton: a reward model on a Triton
    server. service: a RewardService at an address. judge: a language model that scores by a rubric."""
    model: str | None = None
    """Path or hub id of a sequence classifier with one output, for source model."""
    dtype: Dtype = "float32"
    """Data type of the parameters of the model."""
    micro_batch_tokens: Count = 16384
    """Maximum number of tokens per forward pass of the model, including padding if the model needs it."""
    function: FunctionName | None = None
    """Function for source function, as package.module:callable: f(prompt, response, fields), with the other fields of the line
    of the prompt. It returns a score."""
    signature: Literal["quartet", "trl", "verl", "openrlhf", "slime"] = "quartet"
    """Parameters of the function. quartet: f(prompt, response, fields). trl: f(prompts, completions, completion_ids, **columns),
    which returns a list. verl: f(data_source, solution_str, ground_truth, extra_info). openrlhf: f(queries, prompts, labels).
    slime: f(args, sample). Any of them may be async."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that every call of the function gets; for slime the attributes of args."""
    batched: bool = False
    """The function takes lists of prompts, responses and fields, and returns a list of scores."""
    timeout_seconds: Positive = 60.0
    """Time limit for one call of the function, in seconds."""
    quote_texts: bool = False
    """Include the text of exceptions of the function in logs and notes, although it may quote prompts and responses. False:
    only type, file and line."""
    http: HttpRewardConfig | None = None
    """Settings of source http."""
    triton: TritonRewardConfig | None = None
    """Settings of source triton."""
    service: ServiceRewardConfig | None = None
    """Settings of source service."""
    judge: JudgeConfig | None = None
    """Settings of source judge."""

    @property
    def remote(self) -> HttpRewardConfig | TritonRewardConfig | ServiceRewardConfig | JudgeConfig | None:
        """Settings of a scorer in another process, or None."""
        return self.http or self.triton or self.service or self.judge

    @property
    def urls(self) -> dict[str, str]:
        """URLs that the source calls, by key below the source."""
        urls = {f"http.urls[{index}]": url for index, url in enumerate(self.http.urls)} if self.http else {}
        if self.service is not None:
            # TLS depends on security.certificates.
            urls["service.address"] = f"grpc://{self.service.address}"
        named = {"triton.url": self.triton, "judge.url": self.judge}
        return urls | {key: section.url for key, section in named.items() if section is not None}

    def score_seconds(self, batch_size: int) -> float:
        """Return the time limit of one batch of responses, in seconds; 0 for a model."""
        if self.source == "function":
            whole = self.batched or self.signature == "trl"
            return self.timeout_seconds * (1 if whole else batch_size)
        return 0.0 if self.remote is None else self.remote.seconds() * -(-batch_size // self.remote.max_concurrency)

    def check_source(self) -> None:
        """Check that exactly the keys of this source are given. Raises ValueError if not."""
        for name in _KEYS:
            present = getattr(self, name) is not None
            if name == self.source and not present:
                raise ValueError(f"{name}: missing; source {self.source} needs it")
            if name != self.source and present:
                raise ValueError(f"{name}: not used with source {self.source}; set source {name}, or remove it")
        if self.signature != "quartet" and self.batched:
            raise ValueError(f"batched: not used with signature {self.signature}, which has its own; remove it")

    def check_unused(self, names: tuple[str, ...], advice: str) -> None:
        """Raise ValueError if a key that this source does not use has another value than its default."""
        for name in sorted(self.model_fields_set & set(names)):
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name}: not used with source {self.source}; {advice}")


class RewardPartConfig(RewardSourceConfig):
    """A source of an ensemble."""

    name: Name
    """Name of the source. Its scores are recorded under this name."""
    weight: Finite = 1.0
    """Weight of its scores in the sum. It can change during the run. With 0 the source is a shadow: it is scored and logged, and
    nothing depends on its scores or its failures."""
    optional: bool = False
    """If the function declines to score a response (None, or outcome refused), leave it out of the sum, as TRL does. It then
    counts as 0 for this response. Only for source function. False: the response then has no score."""

    @model_validator(mode="after")
    def _consistent(self) -> RewardPartConfig:
        self.check_source()
        if self.optional and self.source != "function":
            raise ValueError(
                f"optional: not with source {self.source}, whose refusal may be an error, such as a rejected request, and would "
                "count as a score of 0; only a function declines on purpose (None); remove it"
            )
        return self


class RewardConfig(RewardSourceConfig):
    """The source of scores for responses."""

    source: Literal[RewardKind, "ensemble", "none"] = "model"  # type: ignore[assignment]
    """model: a sequence classifier. function: a Python function. http: a scorer over HTTP. triton: a reward model on a Triton
    server. service: a RewardService at an address. judge: a language model that scores by a rubric. ensemble: the weighted sum of
    `parts`. none: no reward service; scores come from an environment only, or there are none (algorithm.distillation)."""
    parts: tuple[RewardPartConfig, ...] = ()
    """Sources of an ensemble, each with `name`, `weight`, `source`, and the keys of that source."""
    tokenizer: str | None = None
    """Path or hub id of the tokenizer that decodes responses for functions, scorers and judges. Null: that of the reward model,
    or else of the actor."""
    shadow_timeout_seconds: Positive = 60.0
    """Time for which the scores of a batch wait for parts with weight 0, in seconds. A part that does not respond in time is then
    left out for ten times as long."""

    @property
    def part_weights(self) -> dict[str, float]:
        """Weight of each part of an ensemble by name; empty for a single source."""
        return {part.name: part.weight for part in self.parts}

    @property
    def sources(self) -> dict[str, RewardSourceConfig]:
        """Every single source by its config key."""
        if self.source == "none":
            return {}
        if self.source != "ensemble":
            return {"reward": self}
        return {f"reward.parts.{part.name}": part for part in self.parts}

    @property
    def needs_fields(self) -> bool:
        """Return whether a source may read the other fields of a prompt."""
        return any(source.source not in ("model", "triton") for source in self.sources.values())

    @property
    def has_model_only(self) -> bool:
        """Return whether only models score, which several processes can hold together."""
        return all(source.source == "model" for source in self.sources.values())

    def source_seconds(self, batch_size: int) -> float:
        """Return the total time limit of all sources other than models for one batch of responses, in seconds."""
        return sum(source.score_seconds(batch_size) for source in self.sources.values())

    @model_validator(mode="after")
    def _consistent(self) -> RewardConfig:
        self.check_source()
        if self.source == "ensemble":
            self.check_unused((*_MODEL_ONLY, *_FUNCTION_ONLY), "set it in the parts")
            if not self.parts:
                raise ValueError("parts: source ensemble needs at least one")
            if not any(part.weight for part in self.parts):
                raise ValueError("parts: every weight is 0, so nothing is trained on; give one part another weight")
        elif self.source == "none":
            self.check_unused((*_MODEL_ONLY, *_FUNCTION_ONLY), "remove it")
        if self.source != "ensemble":
            if self.parts:
                raise ValueError(f"parts: not used with source {self.source}; set source ensemble, or remove them")
            self.check_unused(("shadow_timeout_seconds",), "only a part of an ensemble can be a shadow; remove it")
        names = [part.name for part in self.parts]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"parts: the name {repeated[0]} is used twice; give each part its own name")
        if ENVIRONMENT_PART in names:
            raise ValueError(
                f"parts: the name {ENVIRONMENT_PART} is that of the environment's rewards; choose another name"
            )
        return self


def is_encrypted_or_local(url: str) -> bool:
    """Return whether a URL uses TLS or a loopback address."""
    parts = urlsplit(url)
    return parts.scheme in ("https", "grpcs") or is_loopback(parts.hostname or "")
