"""The one typed config tree: one YAML file for laptop, compose and Helm alike. Unknown keys are errors. No torch here."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from quartet.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float16"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
MAX_RESPONSES = 65_536
"""Most responses of one step."""

Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of the tree: immutable, and strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, coerce_numbers_to_str=True)


class RunConfig(Section):
    """What the run is called, where it is kept, how long it is."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "run"
    """Letters, digits, '.', '_' and '-'; the run's folder and the prefix of its ids."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Every random number of the run is derived from it."""
    steps: Annotated[int, Field(ge=1, le=1_000_000_000)] = 100
    """Training steps."""
    directory: Path = Path("runs")
    """Runs are kept in DIRECTORY/NAME."""


class DataConfig(Section):
    """The prompts."""

    prompts: Path
    """JSON Lines: one object a line with `text` or `token_ids`."""
    max_prompt_tokens: Count = 512
    """Longer prompts are dropped, and counted."""


class TruncationConfig(Section):
    """What becomes of responses that the token limit cut off."""

    treatment: Literal["keep", "penalty", "mask", "scale"] = "keep"
    """keep: as scored; penalty: subtract `penalty`; mask: out of the policy loss; scale: multiply the score by `scale`."""
    penalty: NonNegative = 1.0
    """Subtracted from the score, in units of reward."""
    scale: Fraction = 0.5
    """Factor on the score."""


class KLControllerConfig(Section):
    """How the KL coefficient moves."""

    kind: Literal["fixed", "adaptive", "simple"] = "fixed"
    """fixed; adaptive (Ziegler et al., clipped); simple (the same without the clip)."""
    target: Positive = 6.0
    """Wanted KL to the reference, nats per response."""
    horizon: Positive = 10_000.0
    """Responses over which the coefficient adapts."""


class AlgorithmConfig(Section):
    """PPO."""

    estimator: Literal["gae"] = "gae"
    """How advantages are estimated."""
    gamma: Fraction = 1.0
    """Discount factor."""
    gae_lambda: Fraction = 0.95
    """λ of generalized advantage estimation."""
    kl_coefficient: NonNegative = 0.05
    """β: weight of the KL penalty in the token rewards."""
    kl_estimator: Literal["k1", "absolute"] = "k1"
    """KL of one token in the reward: log π − log π_ref, or its absolute value."""
    kl_controller: KLControllerConfig = KLControllerConfig()
    """How β moves."""
    kl_loss: Literal["none", "k2", "k3"] = "none"
    """KL term in the policy loss."""
    kl_loss_coefficient: NonNegative = 0.0
    """Its weight."""
    clip_ratio: Positive = 0.2
    """ε: ratios count within [1 − ε, 1 + clip_ratio_high]."""
    clip_ratio_high: Positive | None = None
    """Upper ε; null is clip_ratio."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """With negative advantage A the policy loss is at most −dual_clip·A; null is off."""
    value_clip: NonNegative = 0.2
    """Values count within this distance of those at generation; 0 is off."""
    entropy_bonus: NonNegative = 0.0
    """Weight of the entropy in the policy loss."""
    normalize_advantages: bool = True
    """Shift and scale advantages to mean 0, standard deviation 1 over the step's response tokens."""
    whiten_rewards: bool = False
    """Scale token rewards to standard deviation 1 over the step, keeping their mean."""
    truncation: TruncationConfig = TruncationConfig()
    """What becomes of truncated responses."""
    epochs: Count = 4
    """Passes over a step's experience."""
    mini_batches: Count = 1
    """Optimizer steps per pass."""


class RolloutConfig(Section):
    """How responses are generated."""

    prompts_per_step: Count = 64
    """Prompts of one step."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Responses for each prompt."""
    max_response_tokens: Count = 64
    """Token limit of a response."""
    temperature: Annotated[float, Field(ge=0.001, le=1000)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep this many tokens; 0 is off."""
    engine: Literal["torch"] = "torch"
    """What generates."""
    max_concurrent: Count = 256
    """Sequences decoded at once."""
    score_batch: Count = 16
    """Finished responses are scored in batches of this many, in the order in which they finish."""


class OptimizerConfig(Section):
    """AdamW."""

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of matrices."""
    max_grad_norm: NonNegative = 1.0
    """Gradients are scaled down to this norm; 0 is off."""


class TrainedModelConfig(Section):
    """What actor and critic share: how a model that takes updates is kept and trained."""

    dtype: Dtype = "float32"
    """Parameter type."""
    learning_rate: Positive = 1e-5
    """Constant learning rate."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW's settings."""
    micro_batch_tokens: Count = 4096
    """Most tokens, padding included, of one forward pass. Changes speed and memory, not the result."""


class ActorConfig(TrainedModelConfig):
    """The policy."""

    model: str
    """Path or hub id of a causal LM."""


class CriticConfig(TrainedModelConfig):
    """The value model."""

    model: str | None = None
    """Path or hub id of a sequence classifier or a causal LM; null: the reward model."""


class RewardConfig(Section):
    """The scorer."""

    source: Literal["model"] = "model"
    """What scores."""
    model: str
    """Path or hub id of a sequence classifier with one output."""
    dtype: Dtype = "float32"
    """Parameter type."""
    micro_batch_tokens: Count = 16384
    """Most tokens, padding included, of one forward pass."""
    normalize: bool = False
    """Shift and scale scores to mean 0, standard deviation 1 on the first step's responses, which the initial policy wrote."""


class ReferenceConfig(Section):
    """The frozen initial policy."""

    model: str | None = None
    """Path or hub id; null: the actor's initial weights."""
    dtype: Dtype | None = None
    """Parameter type; null: the actor's."""
    micro_batch_tokens: Count = 16384
    """Most tokens, padding included, of one forward pass."""


class CheckpointConfig(Section):
    """When the run is saved."""

    every: Annotated[int, Field(ge=0)] = 50
    """Steps between checkpoints; 0: only the policy, at the end."""
    keep: Count = 2
    """Newest checkpoints kept."""


class BufferConfig(Section):
    """The rollout buffer."""

    url: str | None = None
    """redis://, rediss:// or unix:// address; null starts an embedded server."""

    @field_validator("url")
    @classmethod
    def _scheme(cls, url: str | None) -> str | None:
        if url is not None and not re.match(r"^(rediss?|unix)://.", url):
            raise ValueError("expected redis://HOST:PORT/DB, rediss://… or unix:///PATH")
        return url


def _host_port(value: str | None) -> str | None:
    if value is not None:
        host, _, port = value.rpartition(":")
        if not host or "/" in host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"{value!r}: expected HOST:PORT")
    return value


HostPort = Annotated[str | None, AfterValidator(_host_port)]


class OrchestratorServiceConfig(Section):
    """Where the orchestrator listens. It is always started here."""

    listen: HostPort = None
    """HOST:PORT to listen on; port 0 takes a free one. Null: a free port on 127.0.0.1."""


class ServiceConfig(Section):
    """Where one service runs. Several roles of one process listen where the first of them does."""

    address: HostPort = None
    """HOST:PORT at which it already runs; null: start it here."""
    listen: HostPort = None
    """HOST:PORT to listen on; port 0 takes a free one. Null: 127.0.0.1 and the port of `address`, or a free one."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """CUDA devices; none: the CPU."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads; null: its share of the cores."""


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

    load: Positive = 600.0
    """From start to ready."""
    generate: Positive = 1800.0
    """One step's generation."""
    score: Positive = 600.0
    """One batch at reward, reference or critic."""
    update: Positive = 1800.0
    """One step's update."""
    save: Positive = 600.0
    """One save."""
    drain: Positive = 10.0
    """From SIGTERM to the end of calls in hand."""


class SecurityConfig(Section):
    """What the processes let in."""

    allow_plaintext: bool = False
    """Listen without TLS on addresses other than loopback. Only inside a network that you trust."""


class Config(Section):
    """Everything a run is, in one tree."""

    run: RunConfig = RunConfig()
    data: DataConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    actor: ActorConfig
    critic: CriticConfig = CriticConfig()
    reward: RewardConfig
    reference: ReferenceConfig = ReferenceConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    buffer: BufferConfig = BufferConfig()
    services: ServicesConfig = ServicesConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    security: SecurityConfig = SecurityConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        samples = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if samples > MAX_RESPONSES:
            raise ValueError(
                f"rollout: prompts_per_step times samples_per_prompt is {samples}; expected at most {MAX_RESPONSES}"
            )
        if self.algorithm.mini_batches > samples:
            raise ValueError(
                f"algorithm.mini_batches {self.algorithm.mini_batches}: expected at most the {samples} responses of a step"
            )
        if self.algorithm.kl_loss != "none" and self.algorithm.kl_loss_coefficient == 0:
            raise ValueError(
                f"algorithm.kl_loss {self.algorithm.kl_loss}: set kl_loss_coefficient above 0, or kl_loss none"
            )
        if self.algorithm.kl_loss == "none" and self.algorithm.kl_loss_coefficient > 0:
            raise ValueError("algorithm.kl_loss_coefficient: it weighs nothing; set kl_loss to k2 or k3")
        self._check_kl_controller(samples)
        if self.buffer.url is None and (self.services.actor.address or self.services.critic.address):
            raise ValueError(
                "buffer.url: an actor or critic at an address needs a Redis that it shares with this run; give its url"
            )
        return self

    def _check_kl_controller(self, samples: int) -> None:
        controller, coefficient = self.algorithm.kl_controller, self.algorithm.kl_coefficient
        if controller.kind == "fixed":
            return
        where = f"algorithm.kl_controller.kind {controller.kind}"
        if coefficient == 0:
            raise ValueError(f"{where}: it multiplies kl_coefficient, which is 0; set it above 0, or kind fixed")
        if controller.kind == "adaptive" and controller.horizon <= 0.2 * samples:
            raise ValueError(
                f"{where}: horizon {controller.horizon:g}: expected more than {0.2 * samples:g}, a fifth of a step's responses"
            )
        if controller.kind == "simple" and controller.horizon <= 1:
            raise ValueError(f"{where}: horizon {controller.horizon:g}: expected more than 1 step")

    @property
    def critic_model(self) -> str:
        """The checkpoint that the critic starts from."""
        return self.critic.model or self.reward.model

    @property
    def reference_model(self) -> str:
        """The checkpoint of the frozen initial policy."""
        return self.reference.model or self.actor.model

    @property
    def models(self) -> dict[str, str]:
        """The checkpoint that each role starts from, by the role's name."""
        # The reward before the critic, which starts from it unless told otherwise: an error is to name a key of the file.
        return {
            "actor": self.actor.model,
            "reward": self.reward.model,
            "critic": self.critic_model,
            "reference": self.reference_model,
        }

    @property
    def run_directory(self) -> Path:
        """Where this run is kept."""
        return self.run.directory / self.run.name

    def to_yaml(self) -> str:
        """The whole tree as YAML, defaults included, without the password of the buffer's url."""
        tree = self.model_dump(mode="json")
        if self.buffer.url:
            tree["buffer"]["url"] = redact_url(self.buffer.url)
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def redact_url(url: str) -> str:
    """The url with its password, if any, replaced by stars."""
    # Up to the last @: a password that nobody escaped may hold any of ":/@".
    url = re.sub(r"(?<=://)([^:@]*):.*(?=@)", r"\1:***", url)
    return re.sub(r"(?<=[?&]password=)[^&]*", "***", url)


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Reads a config file and applies ``a.b=c`` overrides. Raises ConfigError naming file, line and key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: cannot be read ({_reason(error)}); give the path of a YAML file") from None
    try:
        places = _key_places(yaml.compose(text, Loader=yaml.SafeLoader), str(path))
        tree = yaml.safe_load(text)
    except RecursionError:
        raise ConfigError(f"config {path}: nested too deeply; expected a mapping of sections") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "malformed"
        raise ConfigError(f"config {where}: not YAML ({problem})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"config {path}: expected a mapping of sections (run, data, actor, reward, ...)")
    for override in overrides or []:
        places[_apply_override(tree, override)] = "--set "
    return parse_config(tree, source=str(path), places=places)


def parse_config(tree: dict[str, Any], source: str, places: dict[tuple[str, ...], str] | None = None) -> Config:
    """Checks a tree of plain values; ``places`` says where a key stands. Raises ConfigError naming every wrong key."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems = [_describe(dict(item), source, places or {}) for item in error.errors()]
        raise ConfigError("; ".join(problems)) from None


def _describe(item: dict[str, Any], source: str, places: dict[tuple[str, ...], str]) -> str:
    location = tuple(str(part) for part in item["loc"])
    # An element of a list, or a key that is missing, stands where its parent does.
    known_places = (places[location[:end]] for end in range(len(location), 0, -1) if location[:end] in places)
    where = next(known_places, f"config {source}: ")
    key = ".".join(location)
    if item["type"] == "extra_forbidden":
        known = _keys_beside(location)
        close = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"{where}{key}: unknown key; {hint}"
    if item["type"] == "missing":
        return f"{where}{key}: missing; it has no default"
    message = item["msg"].removeprefix("Value error, ")
    if not key:
        return f"{where}{message}"
    found = redact_url(item["input"]) if isinstance(item["input"], str) else item["input"]
    return f"{where}{key}: {message}, not {found!r}"


def _keys_beside(location: tuple[str, ...]) -> list[str]:
    section: type[BaseModel] = Config
    for part in location[:-1]:
        field = section.model_fields.get(part)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        section = field.annotation
    return list(section.model_fields)


def _key_places(node: yaml.Node | None, source: str, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    if not isinstance(node, yaml.MappingNode):
        return {}
    found: dict[tuple[str, ...], str] = {}
    for key, value in node.value:
        path, place = (*prefix, str(key.value)), f"config {source}:{key.start_mark.line + 1}: "
        if path in found:
            raise ConfigError(f"{place}{'.'.join(path)}: stands twice; expected each key once, remove one")
        found[path] = place
        found |= _key_places(value, source, path)
    return found


def _apply_override(tree: dict[str, Any], override: str) -> tuple[str, ...]:
    """Sets the key, and gives its path."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: expected KEY.KEY=VALUE, for example run.steps=10")
    try:
        # Elsewhere a # begins a comment, and the rest of a path or password would be lost.
        value = text if "#" in text and text.lstrip()[:1] not in "[{'\"" else yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    # YAML 1.1 reads 1e-5 as a string; everyone here means the number.
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        value = float(value)
    here = tree
    for part in parts[:-1]:
        if here.get(part) is None:
            here[part] = {}
        if not isinstance(here[part], dict):
            raise ConfigError(f"--set {override}: {part} is a value, not a section")
        here = cast("dict[str, Any]", here[part])
    here[parts[-1]] = value
    return tuple(parts)


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or "failed") if isinstance(error, OSError) else f"not UTF-8 at byte {error.start}"
