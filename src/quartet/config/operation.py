"""What surrounds the algorithm: the run and its data, evaluation, checkpoints, and where everything runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

from pydantic import AfterValidator, Field, field_validator, model_validator

from quartet.config.section import Count, FunctionName, Name, Positive, Section, WholeNumber

MAX_PAUSE = 30.0
"""Seconds before a further attempt at what failed, at most."""


class RunConfig(Section):
    """What the run is called, where it is kept, how long it is."""

    name: Name = "run"
    """Letters, digits, '.', '_' and '-'; the run's folder and the prefix of its ids."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Every random number of the run is derived from it."""
    steps: Count = 100
    """Training steps."""
    directory: Path = Path("runs")
    """Runs are kept in DIRECTORY/NAME."""


class DataConfig(Section):
    """The prompts."""

    prompts: Path
    """JSON Lines: one object a line with `text`, `messages` or `token_ids`; other fields go to reward functions."""
    validation: Path | None = None
    """Prompts of the same form for evaluations; null: none."""
    max_prompt_tokens: Count = 512
    """Longer prompts are dropped, and counted."""


class EvaluationConfig(Section):
    """What the policy does on the validation prompts, greedily and sampled, against what the initial policy did."""

    every_steps: WholeNumber = 0
    """Steps between evaluations; there is one before the first step and one after the last, too. 0: none."""
    max_prompts: Count = 64
    """At most so many of the validation prompts, from the first."""
    judge: FunctionName | None = None
    """package.module:callable, called as f(prompt, response, initial_response, fields); 1: the response is better."""
    timeout_seconds: Positive = 60.0
    """Seconds that one call of the judge may take."""


class CheckpointConfig(Section):
    """When the run is saved."""

    every_steps: WholeNumber = 50
    """Steps between checkpoints; 0: only the policy, at the end."""
    keep_last: Count = 2
    """Newest checkpoints kept, besides those with a name."""


_BUFFER_URL = re.compile(
    r"(rediss?://([^/?#\s]*@)?(\[[^]/?#@\s]*\]|[^]:/?#@\s[]*)(:[0-9]{1,5})?(/[0-9]*)?|unix://([^/?#\s]*@)?/[^?#]*)"
    r"(\?[^#\s]*)?"
)
"""Strict, as redis-py passes over a fragment and a database that is no number, in which a misplaced password would stay."""


class BufferConfig(Section):
    """The rollout buffer."""

    url: str | None = None
    """redis://, rediss:// or unix:// address; null starts an embedded server."""
    password_file: Path | None = None
    """File that holds the password of the url's user, so that neither the config nor the environment has to."""

    @field_validator("url")
    @classmethod
    def _well_formed(cls, url: str | None) -> str | None:
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


HostPort = Annotated[str | None, AfterValidator(_host_port)]


class OrchestratorServiceConfig(Section):
    """Where the orchestrator runs. `quartet train` and `quartet up` always start it here."""

    address: HostPort = None
    """HOST:PORT at which the gateway finds an orchestrator that was started by itself; null: where it listens."""
    listen: HostPort = None
    """HOST:PORT to listen on; port 0 takes a free one. Null: a free port on 127.0.0.1."""
    metrics_listen: HostPort = None
    """HOST:PORT at which Prometheus finds its figures; port 0 takes a free one. Null: a free port on 127.0.0.1."""
    health_listen: HostPort = None
    """HOST:PORT that answers gRPC health checks and nothing else, in plaintext, for probes; null: none."""


class ServiceConfig(Section):
    """Where one service runs. Several roles of one process listen where the first of them does."""

    address: HostPort = None
    """HOST:PORT at which it already runs; null: start it here."""
    listen: HostPort = None
    """HOST:PORT to listen on; port 0 takes a free one. Null: 127.0.0.1 and the port of `address`, or a free one."""
    devices: tuple[Annotated[int, Field(ge=0, le=1023)], ...] = ()
    """CUDA devices; none: the CPU. One; the actor with rollout.max_off_policy_steps 1 may have a second, to generate on."""
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads; null: its share of the cores, in an update its share among those that learn."""
    metrics_listen: HostPort = None
    """HOST:PORT at which Prometheus finds its figures; port 0 takes a free one. Null: a free port on 127.0.0.1."""
    health_listen: HostPort = None
    """HOST:PORT that answers gRPC health checks and nothing else, in plaintext, for probes; null: none."""


class ServicesConfig(Section):
    """Where the services run."""

    actor: ServiceConfig = ServiceConfig()
    """The policy."""
    critic: ServiceConfig = ServiceConfig()
    """The value model."""
    reward: ServiceConfig = ServiceConfig()
    """The scorer."""
    reference: ServiceConfig = ServiceConfig()
    """The frozen initial policy."""
    orchestrator: OrchestratorServiceConfig = OrchestratorServiceConfig()
    """The algorithm."""


class TimeoutsConfig(Section):
    """Deadlines, in seconds."""

    load_seconds: Positive = 600.0
    """From start to ready."""
    generate_seconds: Positive = 1800.0
    """One step's generation."""
    score_seconds: Positive = 600.0
    """One batch at reward, reference or critic."""
    update_seconds: Positive = 1800.0
    """One step's update."""
    save_seconds: Positive = 600.0
    """One save."""
    drain_seconds: Positive = 10.0
    """From SIGTERM to the end of calls in hand."""


class RecoveryConfig(Section):
    """What happens when something fails: how often it is tried again, and when the run gives up."""

    max_recoveries: WholeNumber = 5
    """Recoveries in a row, without a committed step between them, before the run gives up; 0: the first failure ends it."""
    max_restarts: WholeNumber = 5
    """Restarts in a row of one process that was started here before the run gives up; 0: none."""
    restart_reset_seconds: Positive = 600.0
    """Seconds for which a restarted process runs until its restarts are counted anew."""
    backoff_seconds: Positive = 0.5
    """Seconds before the first of several attempts in a row; doubled for each further one, to at most 30."""
    hang_timeout_seconds: Positive = 60.0
    """Seconds without an answer after which a process that was started here counts as stalled: it is killed and restarted. A
    model service ends itself where work goes on for as long after its deadline (`timeouts`) and its caller is gone."""
    max_scoring_attempts: Count = 3
    """Attempts to score a trajectory before it is set aside and another of the same prompt takes its place."""
    max_failed_trajectories: WholeNumber = 4
    """Trajectories of one step that may be set aside; one more ends the run."""

    def pause(self, failures: int) -> float:
        """Seconds before the next attempt after so many failures in a row, from 1 on."""
        return min(MAX_PAUSE, self.backoff_seconds * 2.0 ** min(failures - 1, 100))


class SecurityConfig(Section):
    """Whom the processes trust, and whom they let in."""

    certificates: Path | None = None
    """Folder that `quartet certificates` makes, with PROCESS/{tls.crt,tls.key,ca.crt}: mutual TLS on every call. Null: none."""
    token_file: Path | None = None
    """File that holds a token, the same for all processes, without which no call is answered. Null: none is asked for."""
    allow_plaintext: bool = False
    """Listen without TLS on addresses other than loopback. Only inside a network that you trust."""


class GatewayConfig(Section):
    """The REST API and the dashboard."""

    enabled: bool = True
    """Start it with the run."""
    listen: HostPort = None
    """HOST:PORT to listen on; port 0 takes a free one. Null: a free port on 127.0.0.1."""
    allowed_hosts: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9._:\[\]-]+$")], ...] = ()
    """Names by which it may be addressed, besides localhost and the address that it listens on."""
    start_runs: bool | None = None
    """Whether operators may start runs, and so run Python functions of their choice. Null: only where it listens on loopback."""
    max_requests_per_second: Positive = 100.0
    """Most requests of one client, on average; what is above gets status 429."""
    token_file: Path | None = None
    """File that holds the operators' token. Null: QUARTET_GATEWAY_TOKEN in the environment, or else one is drawn and printed."""
    viewer_token_file: Path | None = None
    """File that holds the token of those who may only look. Null: QUARTET_GATEWAY_VIEWER_TOKEN in the environment, or none."""
    certificate_file: Path | None = None
    """PEM file of the certificate that browsers see: the gateway speaks HTTPS. Null: it speaks HTTP."""
    key_file: Path | None = None
    """PEM file of that certificate's key."""

    @model_validator(mode="after")
    def _certificate_with_key(self) -> GatewayConfig:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file: one is given without the other; give both, or neither")
        return self


def _without_password(value: str) -> str:
    # A password that nobody escaped may hold a "/"; what follows a colon up to the path may as well be a port.
    in_user = re.search(r"://([^/]*@|[^/:]*:(?!\d+/).*@)", value, re.DOTALL)
    if in_user or re.search(r"[?&#][^=&]*password[^=&]*=", unquote(value), re.IGNORECASE):
        raise ValueError(
            "expected no user and password in it; give them in the environment, as OTEL_EXPORTER_OTLP_HEADERS, or as "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    return value


WithoutPassword = Annotated[str, AfterValidator(_without_password)]


class WandbConfig(Section):
    """Weights & Biases; needs quartet-rlhf[wandb]."""

    project: str
    """Project that runs are filed under."""
    entity: str | None = None
    """User or team; null: the default one."""


class MLflowConfig(Section):
    """MLflow; needs quartet-rlhf[mlflow]."""

    tracking_uri: WithoutPassword
    """Tracking server, or a folder."""
    experiment: str = "quartet"
    """Experiment that runs are filed under."""


class TelemetryConfig(Section):
    """What a run tells of itself, besides the files that it needs itself. None of it can fail a run."""

    tokens_every_steps: WholeNumber = 1
    """Steps between those whose trajectories are kept token by token, for the inspector; 0: none."""
    tokens_keep_steps: WholeNumber = 0
    """Newest steps whose tokens are kept; 0: all."""
    timeline: bool = True
    """Keep when each service did what, in every step."""
    tensorboard: bool = True
    """Write TensorBoard files."""
    wandb: WandbConfig | None = None
    """Send figures to Weights & Biases."""
    mlflow: MLflowConfig | None = None
    """Send figures to MLflow."""
    otlp_endpoint: Annotated[WithoutPassword, Field(pattern=r"^https?://.+")] | None = None
    """OTLP/HTTP endpoint that takes a trace for each step, such as http://127.0.0.1:4318; null: no traces."""
