"""The one typed config tree, and what must fit together across its sections."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import yaml
from pydantic import model_validator

from quartet.config.algorithm import BY_GROUP, BY_TOKEN, MAX_RESPONSES, AlgorithmConfig, GuardsConfig, RolloutConfig
from quartet.config.models import ActorConfig, CriticConfig, ReferenceConfig, RewardConfig
from quartet.config.operation import (
    BufferConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    GatewayConfig,
    RecoveryConfig,
    RunConfig,
    SecurityConfig,
    ServicesConfig,
    TelemetryConfig,
    TimeoutsConfig,
)
from quartet.config.section import Section, is_loopback


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
    evaluation: EvaluationConfig = EvaluationConfig()
    guards: GuardsConfig = GuardsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    buffer: BufferConfig = BufferConfig()
    services: ServicesConfig = ServicesConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    gateway: GatewayConfig = GatewayConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    security: SecurityConfig = SecurityConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        self._check_sizes()
        self._check_estimator()
        self._check_kl()
        self._check_engine()
        self._check_parts()
        return self

    def _check_sizes(self) -> None:
        samples = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if samples > MAX_RESPONSES:
            raise ValueError(
                f"rollout: prompts_per_step times samples_per_prompt is {samples}; expected at most {MAX_RESPONSES}"
            )
        if self.algorithm.num_mini_batches > samples:
            raise ValueError(
                f"algorithm.num_mini_batches {self.algorithm.num_mini_batches}: expected at most the {samples} responses of a step"
            )
        buffer, limit = self.algorithm.overlong_penalty.buffer_tokens, self.rollout.max_response_tokens
        if buffer > limit:
            raise ValueError(
                f"algorithm.overlong_penalty.buffer_tokens {buffer}: expected at most rollout.max_response_tokens {limit}"
            )
        for name, trained in (("actor", self.actor), ("critic", self.critic)):
            if trained.warmup_steps > self.run.steps:
                raise ValueError(
                    f"{name}.warmup_steps {trained.warmup_steps}: expected at most run.steps {self.run.steps}"
                )

    def _check_estimator(self) -> None:
        algorithm, where = self.algorithm, f"algorithm.estimator {self.algorithm.estimator}"
        if algorithm.estimator in BY_GROUP and self.rollout.samples_per_prompt < 2:
            raise ValueError(
                f"{where}: compares the samples of a prompt; set rollout.samples_per_prompt to 2 or more, "
                f"not {self.rollout.samples_per_prompt}"
            )
        if algorithm.estimator == "reinforce" and self.rollout.prompts_per_step * self.rollout.samples_per_prompt < 2:
            raise ValueError(f"{where}: its baseline is the step's mean; a step needs 2 responses or more")
        if algorithm.estimator not in BY_TOKEN:
            if algorithm.gamma != 1:
                raise ValueError(
                    f"algorithm.gamma {algorithm.gamma}: {where} pays a response as a whole; leave it at 1"
                )
            if algorithm.whiten_rewards:
                raise ValueError(f"algorithm.whiten_rewards: {where} has no token rewards; leave it false")
        elif algorithm.ratio_level == "sequence":
            raise ValueError(
                f"algorithm.ratio_level sequence: {where} gives each token its own advantage; "
                "use reinforce, rloo or grpo, or ratio_level token"
            )
        if algorithm.critic_warmup_steps >= self.run.steps:
            raise ValueError(
                f"algorithm.critic_warmup_steps {algorithm.critic_warmup_steps}: the policy would never learn; expected "
                f"less than run.steps {self.run.steps}"
            )
        if algorithm.critic_warmup_steps and not algorithm.has_critic:
            raise ValueError(f"algorithm.critic_warmup_steps {algorithm.critic_warmup_steps}: {where} has no critic")
        if not algorithm.has_critic and self.services.critic.address:
            raise ValueError(f"services.critic.address: {where} has no critic; leave it null")

    def _check_kl(self) -> None:
        algorithm = self.algorithm
        if algorithm.kl_loss != "none" and algorithm.kl_loss_coefficient == 0:
            raise ValueError(f"algorithm.kl_loss {algorithm.kl_loss}: set kl_loss_coefficient above 0, or kl_loss none")
        if algorithm.kl_loss == "none" and algorithm.kl_loss_coefficient > 0:
            raise ValueError("algorithm.kl_loss_coefficient: it weighs nothing; set kl_loss to k2 or k3")
        self._check_kl_controller(self.rollout.prompts_per_step * self.rollout.samples_per_prompt)

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

    def _check_engine(self) -> None:
        engine, triton = self.rollout.engine, self.rollout.triton
        for name, given in (("triton", triton), ("tensorrt-llm", self.rollout.tensorrt_llm)):
            if given is not None and engine != name:
                key = name.replace("-", "_")
                raise ValueError(f"rollout.{key}: not used with engine {engine}; set engine {name}, or leave it out")
        if self.rollout.max_off_policy_steps:
            self._check_staleness()
        if engine != "triton":
            return
        if triton is None:
            raise ValueError("rollout.triton: missing; engine triton needs it: give rollout.triton.url")
        if triton.weights == "lora" and self.actor.lora is None:
            raise ValueError(
                "rollout.triton.weights lora: the server gets an adapter for each policy version, and actor.lora is null; set "
                "actor.lora, or weights static for a server whose weights never change"
            )
        if triton.weights == "static" and self.algorithm.importance_sampling_cap is None:
            raise ValueError(
                "rollout.triton.weights static: the server samples from another policy than the one that learns, which "
                "importance sampling corrects for; set algorithm.importance_sampling_cap, such as 2"
            )
        if (
            not triton.encrypted
            and not is_loopback(triton.address.rpartition(":")[0])
            and not self.security.allow_plaintext
        ):
            raise ValueError(
                f"rollout.triton.url {triton.url}: not a loopback address, and calls are not encrypted; give grpcs://, or "
                "allow it with security.allow_plaintext"
            )

    def _check_staleness(self) -> None:
        where = f"rollout.max_off_policy_steps {self.rollout.max_off_policy_steps}"
        if self.rollout.engine != "torch":
            raise ValueError(
                f"{where}: engine {self.rollout.engine} needs the policy that learns while it generates; set engine torch, "
                "or max_off_policy_steps 0"
            )
        if self.timeouts.update_seconds < self.timeouts.generate_seconds:
            raise ValueError(
                f"timeouts.update_seconds {self.timeouts.update_seconds:g}: with rollout.max_off_policy_steps an update ends when what is generated "
                f"meanwhile has come to its end; give at least timeouts.generate_seconds {self.timeouts.generate_seconds:g}"
            )
        if self.algorithm.importance_sampling_cap is None:
            raise ValueError(
                f"{where}: responses come from an older policy than the one that learns, which importance sampling corrects for; "
                "set algorithm.importance_sampling_cap, such as 2"
            )

    def _check_parts(self) -> None:
        if self.evaluation.every_steps and self.data.validation is None:
            raise ValueError("evaluation.every_steps: data.validation names no prompts; give some, or set evaluation.every_steps 0")
        if not self.has_reference and self.services.reference.address:
            raise ValueError(
                "services.reference.address: the actor answers as reference with its adapter off; leave it null, "
                "or give a reference.model"
            )
        if self.buffer.url is None and (self.services.actor.address or self.services.critic.address):
            raise ValueError(
                "buffer.url: an actor or critic at an address needs a Redis that it shares with this run; give its url"
            )

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic; estimators other than gae have none."""
        return self.algorithm.has_critic

    @property
    def has_reference(self) -> bool:
        """Whether the reference is a service of its own; an actor with adapters answers for it with them off."""
        return self.actor.lora is None or self.reference.model is not None

    @property
    def critic_model(self) -> str:
        """The checkpoint that the critic starts from."""
        return self.critic.model or self.reward.model or self.actor.model

    @property
    def reference_model(self) -> str:
        """The checkpoint of the frozen initial policy."""
        return self.reference.model or self.actor.model

    @property
    def reward_tokenizer(self) -> str:
        """The checkpoint whose tokenizer the reward service reads responses with."""
        return self.reward.tokenizer or self.reward.model or self.actor.model

    @property
    def models(self) -> dict[str, str]:
        """Every checkpoint that a service of this run starts from, by its key: ROLE.model, or reward.parts.NAME.model."""
        # The reward before the critic, which starts from it unless told otherwise: an error is to name a key of the file.
        found = {"actor.model": self.actor.model}
        if self.reward.model:
            found["reward.model"] = self.reward.model
        found |= {f"reward.parts.{part.name}.model": part.model for part in self.reward.parts if part.model}
        if self.has_critic:
            found["critic.model"] = self.critic_model
        if self.has_reference:
            found["reference.model"] = self.reference_model
        return found

    @property
    def run_directory(self) -> Path:
        """Where this run is kept."""
        return self.run.directory / self.run.name

    def to_yaml(self) -> str:
        """The whole tree as YAML, defaults included, without the passwords of the buffer's url."""
        tree = self.model_dump(mode="json")
        if self.buffer.url:
            tree["buffer"]["url"] = redact_url(self.buffer.url)
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


_SECRETS = (
    # Of a user, whose name may be an address of mail.
    r"(://[^:/?#]*:)[^/?#]*(?=@)",
    # Up to the last @: a password that nobody escaped may hold any of ":/@".
    r"(://[^:@]*:).*(?=@)",
    # In the place of a port, as where the host was forgotten.
    r"(://(?:[^/?#]*@)?(?:\[[^]]*\]|[^]:/?#@[]*):)(?![0-9]{1,5}(?:[/?#]|$)|[^/?#]*@).+",
    # In a fragment.
    r"(://[^#]*#).+",
)
"""Where in a url a password may be, besides its query; the first group stays."""


def redact_url(url: str) -> str:
    """The url with its password, if any, replaced by stars, and with it what stands where nobody expects one."""
    for place in _SECRETS:
        url = re.sub(place, r"\1***", url, flags=re.DOTALL)
    return re.sub(r"(?<=[?&])([^?&=]*)=[^&#]*", _redact_option, url)


def _redact_option(option: re.Match[str]) -> str:
    name = "".join(unquote(option[1]).split()).lower()
    return f"{option[1]}=***" if "password" in name else option[0]


def is_redacted(url: str) -> bool:
    """Whether the url had a password, of which ``redact_url`` has left stars."""
    return "***" in url and redact_url(url) == url
