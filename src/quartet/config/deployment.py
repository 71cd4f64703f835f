"""Settings of deployment: addresses, devices, timeouts, recovery, security and the gateway."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from quartet.config.section import Count, Positive, Section, WholeNumber, pause_after

MAX_SHARED_CALLS = 512
"""Maximum number of calls of all runs together. Each of them holds a thread while it waits."""


class SharingConfig(Section):
    """Quotas of each run at a reward service that several runs share. A call beyond them is refused with the time after which to
    try again, and the run waits."""

    max_runs: Annotated[int, Field(ge=1, le=64)] = 8
    """Maximum number of runs with calls at the same time."""
    max_pending_calls: Annotated[int, Field(ge=1, le=64)] = 8
    """Maximum number of pending calls of a run. A run has at most four batches in flight at a reward service with one replica."""
    max_pending_sequences: Count = 1024
    """Maximum number of responses in the pending calls of a run. A single call with more of them is an error."""
    sequences_per_second: Positive | None = None
    """Maximum average number of responses per second of a run, with bursts of max_pending_sequences. Null: no limit."""
    over_quota_share: Annotated[float, Field(gt=0, le=0.5, allow_inf_nan=False)] = 0.1
    """Share of the time of all runs together that have exceeded a quota in the last seconds, while another run waits. If no other
    run waits, they have all of it."""

    @model_validator(mode="after")
    def _fits_threads(self) -> SharingConfig:
        if self.max_runs * self.max_pending_calls > MAX_SHARED_CALLS:
            raise ValueError(
                f"max_runs {self.max_runs} x max_pending_calls {self.max_pending_calls}: expected at most {MAX_SHARED_CALLS}; "
                "lower one of them"
            )
        return self


_BUFFER_URL = re.compile(
    r"(rediss?://([^/?#\s]*@)?(\[[^]/?#@\s]*\]|[^]:/?#@\s[]*)(:[0-9]{1,5})?(/[0-9]*)?|unix://([^/?#\s]*@)?/[^?#]*)"
    r"(\?[^#\s]*)?"
)
"""Stricter than redis-py, which ignores a fragment and a database that is not a number. A misplaced password could hide there."""


class BufferConfig(Section):
    """Redis, which buffers rollouts."""

    url: str | None = None
    """Address of the Redis server: redis://, rediss:// or unix://. Null: start an embedded server. The environment variable
    `QUARTET_BUFFER_URL` replaces it."""
    password_file: Path | None = None
    """File with the password of the user in `url`, so that neither the config nor the environment contains it."""

    @field_validator("url")
    @classmethod
    def _is_well_formed(cls, url: str | None) -> str | None:
        if url is not None and not _BUFFER_URL.fullmatch(url):
            raise ValueError(
                "expected redis://HOST:PORT/DB, rediss://… or unix:///PATH, with numbers for PORT and DB, without a fragment, "
                "special characters of a password escaped as %XX"
            )
        return url


def _host_port(value: str | None) -> str | None:
    if value is not None:
        host, _, port = value.rpartition(":")
        if not host or "/" in host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"{value!r}: expected HOST:PORT")
    return value


def _remote_addresses(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        _host_port(value)
        if value.endswith(":0"):
            raise ValueError(f"{value!r}: expected HOST:PORT with the port at which the process listens")
    if repeated := sorted({value for value in values if values.count(value) > 1}):
        raise ValueError(f"{', '.join(repeated)}: given more than once; name each address once")
    return values


def _one_or_more(value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    if isinstance(value, tuple):
        if not value:
            raise ValueError("expected at least one HOST:PORT, or null")
        return _remote_addresses(value)
    return _host_port(value)


def _remote_address(value: str) -> str:
    _remote_addresses((value,))
    return value


HostPort = Annotated[str | None, AfterValidator(_host_port)]
RemoteAddress = Annotated[str, AfterValidator(_remote_address)]
HostPorts = Annotated[str | tuple[str, ...] | None, AfterValidator(_one_or_more)]


class OrchestratorServiceConfig(Section):
    """Address of the orchestrator. `quartet train` and `quartet up` always start it on this machine."""

    address: HostPort = None
    """HOST:PORT at which the gateway reaches an orchestrator that was started separately. Null: the address in `listen`."""
    listen: HostPort = None
    """HOST:PORT to listen on. Port 0 selects a free port. Null: a free port on 127.0.0.1."""
    metrics_listen: HostPort = None
    """HOST:PORT that serves Prometheus metrics. Port 0 selects a free port. Null: a free port on 127.0.0.1."""
    health_listen: HostPort = None
    """HOST:PORT that serves only gRPC health checks, in plaintext, for probes. Null: no such port."""


class ParallelConfig(Section):
    """Division of a service's model over its ranks. replicate x shard x tensor is the number of ranks. Ranks are numbered with
    replicate as the outermost and tensor as the innermost dimension, so that tensor ranks are neighbors."""

    replicate: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of copies of the sharded model. Each copy computes a part of every mini-batch, and gradients are summed over the
    copies: one copy for each machine keeps the exchange of parameters within machines."""
    shard: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of ranks that hold a part of every parameter and of the optimizer, and gather a layer for its computation. Null: the
    number of ranks / (replicate x tensor)."""
    tensor: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of ranks that compute every layer together, each a slice of its heads and features (tensor parallelism). They
    exchange activations twice in each layer, so they belong on one machine. It divides the numbers of attention heads and of
    key-value heads of the model, whose architecture must have a tensor parallel plan in transformers."""

    def check(self, section: str, service: ServiceConfig) -> None:
        """Raise ValueError if these sizes do not make the number of ranks of ``service``. ``section``: its config section."""
        num_ranks, nodes = service.num_ranks, service.nodes
        known = self.replicate * self.tensor * (self.shard or 1)
        if num_ranks != known and (self.shard is not None or num_ranks % known):
            shard = "null" if self.shard is None else self.shard
            remedy = "change the sizes"
            if known % nodes == 0:
                size = known // nodes
                if service.devices:
                    remedy += f", or give {section}.devices {size} device{'s' if size > 1 else ''}"
                else:
                    remedy += f", or set {section}.processes {size}"
                remedy += f" on each of {nodes} nodes" if nodes > 1 else ""
            raise ValueError(
                f"{section}.parallel: replicate {self.replicate} x shard {shard} x tensor {self.tensor} must be the number of "
                f"ranks, which is {num_ranks}; {remedy}"
            )


class OffloadConfig(Section):
    """Parts of a trained model that stay in host memory between their uses. They leave memory on the GPU, and each update
    transfers them. Without a GPU, everything is in host memory already, and nothing changes."""

    parameters: bool = False
    """Keep the shards of the parameters, of their gradients and of the optimizer in host memory, and step there. Each layer goes
    to the GPU for its computation. Needs several devices."""
    optimizer: bool = False
    """Keep the moments of AdamW in host memory. The optimizer step moves those of one parameter after the other to the GPU, so
    the result is bit-identical."""


class ServiceConfig(Section):
    """Address and hardware of a model service. Roles that share a process use the `listen` addresses of the first role."""

    address: HostPorts = None
    """HOST:PORT of a service that already runs. Null: start it on this machine. For reward and reference also a list of the
    addresses of replicas, each with the whole model. A host name with several addresses is one replica for each address."""
    listen: HostPort = None
    """HOST:PORT to listen on. Port 0 selects a free port. Null: 127.0.0.1 with the port of `address`, or with a free port."""
    devices: tuple[Annotated[int, Field(ge=0, le=1023)], ...] = ()
    """Indices of the CUDA devices to use. Empty: the CPU. Several: one process per device, the ranks, which hold the model
    together."""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of CPU processes, the ranks, that hold a model together. Each has a part of the parameters, for actor and critic
    also of the optimizer, and computes a part of each batch. With torchrun: the number that it starts on a machine."""
    nodes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of machines whose processes hold the model together, each with as many processes or devices. More than 1: torchrun
    starts them, and `address` is that of rank 0."""
    parallel: ParallelConfig = ParallelConfig()
    """Division of the model over the ranks. Defaults to parts of every parameter."""
    offload: OffloadConfig = OffloadConfig()
    """Parts of the model of the actor or critic that stay in host memory between their uses."""
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of CPU threads of each process. Null: an equal share of the cores; during updates, an equal share among the services
    that train."""
    metrics_listen: HostPort = None
    """HOST:PORT that serves Prometheus metrics. Port 0 selects a free port. Null: a free port on 127.0.0.1."""
    health_listen: HostPort = None
    """HOST:PORT that serves only gRPC health checks, in plaintext, for probes. Null: no such port."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses of services that already run."""
        if self.address is None:
            return ()
        return (self.address,) if isinstance(self.address, str) else self.address

    @property
    def num_ranks(self) -> int:
        """Number of processes, on all machines, that hold the model together: one per device, or `processes` on CPUs."""
        return self.nodes * (len(self.devices) or self.processes)


class RewardServiceConfig(ServiceConfig):
    """Address and hardware of the reward service."""

    sharing: SharingConfig | None = None
    """Quotas of the runs that share this service. Such a service is started by itself. Null: it belongs to one run."""


class GeneratorServiceConfig(Section):
    """Hardware and environment of the generators that are started on this machine, and the listen address of each generator."""

    listen: HostPort = None
    """HOST:PORT to listen on. Port 0 selects a free port. Null: a free port on 127.0.0.1."""
    python: Path | None = None
    """Python interpreter of the environment with the engine of rollout.engine. Null: the interpreter of this command."""
    devices: tuple[Annotated[int, Field(ge=0, le=1023)], ...] = ()
    """Indices of the CUDA devices of all local generators, which get equal shares in order. Empty: the CPU."""
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of CPU threads of each generator. Null: an equal share of the cores among the local generators."""
    metrics_listen: HostPort = None
    """HOST:PORT that serves Prometheus metrics. Port 0 selects a free port. Null: a free port on 127.0.0.1."""
    health_listen: HostPort = None
    """HOST:PORT that serves only gRPC health checks, in plaintext, for probes. Null: no such port."""


class EnvironmentServiceConfig(Section):
    """Address of the environment service, which a run uses if rollout.max_turns is above 0."""

    address: HostPort = None
    """HOST:PORT of a service that already runs. One process has all sessions. Null: start it on this machine."""
    listen: HostPort = None
    """HOST:PORT to listen on. Port 0 selects a free port. Null: 127.0.0.1 with the port of `address`, or with a free port."""
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of CPU threads of libraries in its processes. Null: 1."""
    metrics_listen: HostPort = None
    """HOST:PORT that serves Prometheus metrics. Port 0 selects a free port. Null: a free port on 127.0.0.1."""
    health_listen: HostPort = None
    """HOST:PORT that serves only gRPC health checks, in plaintext, for probes. Null: no such port."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of a service that already runs, as a tuple."""
        return () if self.address is None else (self.address,)


class ServicesConfig(Section):
    """Addresses and hardware of the services."""

    actor: ServiceConfig = ServiceConfig()
    """Service of the policy."""
    critic: ServiceConfig = ServiceConfig()
    """Service of the value model."""
    reward: RewardServiceConfig = RewardServiceConfig()
    """Service that scores responses."""
    reference: ServiceConfig = ServiceConfig()
    """Service of the frozen initial policy."""
    generators: Annotated[tuple[str, ...], AfterValidator(_remote_addresses)] = ()
    """HOST:PORT of generators that already run, or will. A host name with several addresses is one generator for each address.
    Generators may join and leave during a run. They are used beside those of rollout.generators."""
    generator: GeneratorServiceConfig = GeneratorServiceConfig()
    """Processes that generate, if rollout.generators or services.generators asks for them."""
    environment: EnvironmentServiceConfig = EnvironmentServiceConfig()
    """Process of the environment, if there is one."""
    orchestrator: OrchestratorServiceConfig = OrchestratorServiceConfig()
    """Process that runs the training loop."""


class TimeoutsConfig(Section):
    """Time limits of calls, in seconds."""

    load_seconds: Positive = 600.0
    """Time limit for a service to load its models and become ready."""
    generate_seconds: Positive = 1800.0
    """Time limit for generating the responses of one step."""
    score_seconds: Positive = 600.0
    """Time limit for one batch at the reward, reference or critic service, and for one step of a generation engine (torch and
    vllm). After that, the engine counts as stuck, and its process ends and is restarted."""
    update_seconds: Positive = 1800.0
    """Time limit for one update of a model."""
    save_seconds: Positive = 600.0
    """Time limit for saving one model."""
    drain_seconds: Positive = 10.0
    """Time that pending calls have to finish after SIGTERM."""


class OutcomeConfig(Section):
    """Action for a response that has no score."""

    action: Literal["retry", "replace", "stop"] = "retry"
    """retry: score it again, or play its episode again from the start, up to recovery.max_scoring_attempts, then replace it.
    replace: record it as failed, and generate another response to the same prompt at once. stop: record it and end the run."""
    skip_prompt: bool = True
    """The prompt may be the cause: if recovery.max_failures_per_prompt responses to it failed and none has a score, the step
    skips the prompt and takes the next one of the data. False: the step continues with responses to the same prompt."""


class CancelledOutcomeConfig(OutcomeConfig):
    """Action for a response whose scoring or episode was cancelled."""

    skip_prompt: bool = False
    """The same as for other outcomes. Defaults to false, because the prompt is not the cause."""


class RefusedOutcomeConfig(OutcomeConfig):
    """Action for a response that the source declined to score."""

    action: Literal["retry", "replace", "stop"] = "replace"
    """The same as for other outcomes. Defaults to replace, because another attempt would be refused as well."""


class OutcomesConfig(Section):
    """Actions by outcome. Each failed response counts towards recovery.max_failed_trajectories, all those of a skipped prompt as
    one."""

    timeout: OutcomeConfig = OutcomeConfig()
    """The reward source or the environment did not answer in time."""
    scorer_error: OutcomeConfig = OutcomeConfig()
    """The reward source failed, or returned no finite number."""
    sandbox_error: OutcomeConfig = OutcomeConfig()
    """The sandbox of a verifier failed."""
    environment_error: OutcomeConfig = OutcomeConfig()
    """The environment failed."""
    cancelled: CancelledOutcomeConfig = CancelledOutcomeConfig()
    """The work was cancelled."""
    refused: RefusedOutcomeConfig = RefusedOutcomeConfig()
    """The source declined to score the response."""

    def action(self, outcome: str) -> Literal["retry", "replace", "stop"]:
        """Return the action for the outcome of a failure."""
        config: OutcomeConfig = getattr(self, outcome)
        return config.action

    def skips_prompt(self, outcome: str) -> bool:
        """Return whether a prompt may be the cause of failures with this outcome."""
        config: OutcomeConfig = getattr(self, outcome)
        return config.skip_prompt


class RecoveryConfig(Section):
    """Retries, restarts, and the limits at which the run gives up."""

    max_recoveries: WholeNumber = 5
    """Maximum number of consecutive recoveries without a committed step in between. 0: the first failure ends the run."""
    max_restarts: WholeNumber = 5
    """Maximum number of consecutive restarts of a process that was started on this machine. 0: no restarts."""
    restart_reset_seconds: Positive = 600.0
    """Uptime in seconds after which the count of consecutive restarts is reset."""
    backoff_seconds: Positive = 0.5
    """Pause before the first retry, in seconds. It doubles with each further retry, up to 30."""
    hang_timeout_seconds: Positive = 60.0
    """Time without a response, in seconds, after which a process started on this machine is killed and restarted. So is one that
    a signal has stopped for this long while it loads. A model service also exits if a call keeps running for this long after its
    deadline and its caller is gone, or if one of its processes makes no progress for this long while the others wait for it."""
    max_scoring_attempts: Count = 3
    """Maximum number of attempts to score a trajectory, or to play its episode with an environment. After that it is recorded as
    failed, and a new response to the same prompt replaces it."""
    max_failed_trajectories: WholeNumber = 4
    """Maximum number of failed trajectories per step. One more ends the run. The failures of a prompt without a score count as
    one."""
    max_failures_per_prompt: Count = 3
    """Number of failed responses to a prompt in one step, with none that has a score, after which the prompt is skipped: the step
    takes the next prompt of the data instead. The prompt is tried again in the next pass over the data."""
    max_skipped_prompt_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Maximum fraction of skipped prompts, in each step and in all steps so far. In both, max_failed_trajectories of them are
    allowed in any case. One more ends the run. 0: no prompt is skipped."""
    outcomes: OutcomesConfig = OutcomesConfig()
    """Actions for responses without a score, by the kind of failure."""

    def max_attempts(self, outcome: str) -> int:
        """Return how often to score a response, or to play an episode, whose failures have this outcome."""
        return self.max_scoring_attempts if self.outcomes.action(outcome) == "retry" else 1

    def pause(self, failures: int) -> float:
        """Return the pause before the next attempt, in seconds, after this many consecutive failures (at least 1)."""
        return pause_after(failures, self.backoff_seconds)


class SecurityConfig(Section):
    """Encryption and authentication between the processes."""

    certificates: Path | None = None
    """Folder written by `quartet certificates`, with PROCESS/{tls.crt,tls.key,ca.crt}. All calls then use mutual TLS. Null: no
    TLS."""
    token_file: Path | None = None
    """File with a token that all processes share and that every call must carry. Null: no token."""
    allow_plaintext: bool = False
    """Allow listening without TLS on addresses other than loopback. Only for networks that you trust."""


class GatewayConfig(Section):
    """REST API and dashboard."""

    enabled: bool = True
    """Start the gateway with the run."""
    listen: HostPort = None
    """HOST:PORT to listen on. Port 0 selects a free port. Null: a free port on 127.0.0.1."""
    allowed_hosts: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._:\[\]-]+$")], ...] = ()
    """Host names that requests may use, in addition to localhost and the listening address."""
    start_runs: bool | None = None
    """Allow operators to start runs, and with them Python functions of their choice. Null: only on a loopback address."""
    max_requests_per_second: Positive = 100.0
    """Maximum average request rate of one client. Requests above it get status 429."""
    token_file: Path | None = None
    """File with the token of operators. Null: the variable QUARTET_GATEWAY_TOKEN, or else a random token that is printed."""
    viewer_token_file: Path | None = None
    """File with the token of viewers, who have read access. Null: the variable QUARTET_GATEWAY_VIEWER_TOKEN, or else no such
    token."""
    certificate_file: Path | None = None
    """PEM file of the certificate for HTTPS. Null: the gateway uses HTTP."""
    key_file: Path | None = None
    """PEM file of the private key of `certificate_file`."""

    @model_validator(mode="after")
    def _has_key_with_certificate(self) -> GatewayConfig:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file: only one of them is given; give both or neither")
        return self
