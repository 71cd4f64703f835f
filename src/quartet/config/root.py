"""The root of the config tree, and the conditions between its sections."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import model_validator

from quartet.config.algorithm import AlgorithmConfig
from quartet.config.deployment import (
    BufferConfig,
    GatewayConfig,
    OffloadConfig,
    RecoveryConfig,
    SecurityConfig,
    ServiceConfig,
    ServicesConfig,
    TimeoutsConfig,
)
from quartet.config.environment import EnvironmentConfig
from quartet.config.guards import GuardsConfig
from quartet.config.models import ActorConfig, CriticConfig, ReferenceConfig
from quartet.config.penalties import check_penalties
from quartet.config.rewards import RewardConfig, is_encrypted_or_local
from quartet.config.rollout import MAX_RESPONSES, EngineServerConfig, RolloutConfig
from quartet.config.rollout_correction import check_rollout_correction
from quartet.config.run import CheckpointConfig, DataConfig, EvaluationConfig, RunConfig
from quartet.config.sampling_checks import check_sampling
from quartet.config.saved_models import check_average, check_best_checkpoint, check_synchronization
from quartet.config.section import Section, is_loopback
from quartet.config.telemetry import TelemetryConfig
from quartet.config.training_signal import check_distillation, check_reward_service, check_scores
from quartet.config.url_redaction import redact_url


class Config(Section):
    """All settings of a run."""

    run: RunConfig = RunConfig()
    data: DataConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    actor: ActorConfig
    critic: CriticConfig = CriticConfig()
    reward: RewardConfig
    reference: ReferenceConfig = ReferenceConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
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
    def _is_consistent(self) -> Config:
        self._resolve_truncation()
        self._check_sizes()
        self._check_estimator()
        self._check_warmup()
        check_penalties(self)
        self._check_engine()
        check_sampling(self)
        check_rollout_correction(self)
        check_reward_service(self)
        self._check_services()
        self._check_reward()
        check_distillation(self)
        check_scores(self)
        check_best_checkpoint(self)
        check_average(self)
        check_synchronization(self)
        return self

    def _resolve_truncation(self) -> None:
        """Replace a null algorithm.truncation.treatment, so that the run's config shows it. Defaults are shared: copy them."""
        if self.algorithm.truncation.treatment is None:
            algorithm, truncation = self.algorithm.model_copy(), self.algorithm.truncation.model_copy()
            truncation.__dict__["treatment"] = self._default_treatment
            algorithm.__dict__["truncation"] = truncation
            self.__dict__["algorithm"] = algorithm

    @property
    def _default_treatment(self) -> str:
        # The limits of an environment may be part of its task.
        return "penalty" if self.has_scores and not self.has_environment else "keep"

    def resolved_defaults(self) -> list[tuple[str, str]]:
        """Return section and name of each setting whose null other settings decide, and whose value is what they decide."""
        algorithm, keys = self.algorithm, []
        if algorithm.kl_loss == algorithm.default_kl_loss:
            keys.append(("algorithm", "kl_loss"))
        if algorithm.truncation.treatment == self._default_treatment:
            keys.append(("algorithm.truncation", "treatment"))
        return keys

    def _check_sizes(self) -> None:
        samples = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if samples > MAX_RESPONSES:
            raise ValueError(
                f"rollout: prompts_per_step times samples_per_prompt is {samples}; expected at most {MAX_RESPONSES}"
            )
        if self.algorithm.num_mini_batches > samples:
            raise ValueError(
                f"algorithm.num_mini_batches {self.algorithm.num_mini_batches}: expected at most the {samples} responses of "
                "a step"
            )
        buffer, limit = self.algorithm.overlong_penalty.buffer_tokens, self.rollout.max_response_tokens
        if buffer > limit:
            raise ValueError(
                f"algorithm.overlong_penalty.buffer_tokens {buffer}: expected at most rollout.max_response_tokens {limit}"
            )

    def _check_warmup(self) -> None:
        steps, pretraining = self.run.steps, self.algorithm.value_pretraining_steps
        if self.critic.warmup_steps > steps:
            raise ValueError(f"critic.warmup_steps {self.critic.warmup_steps}: expected at most run.steps {steps}")
        if self.actor.warmup_steps > steps - pretraining:
            less = f" less algorithm.value_pretraining_steps {pretraining}" if pretraining else ""
            raise ValueError(f"actor.warmup_steps {self.actor.warmup_steps}: expected at most run.steps {steps}{less}")

    def _check_estimator(self) -> None:
        algorithm, setting = self.algorithm, f"algorithm.estimator {self.algorithm.estimator}"
        spec = algorithm.estimator_spec
        samples = self.rollout.samples_per_prompt
        if spec.uses_groups and samples < spec.min_samples:
            raise ValueError(
                f"{setting}: compares the samples of a prompt; set rollout.samples_per_prompt to {spec.min_samples} or more, "
                f"not {samples}"
            )
        responses = self.rollout.prompts_per_step * samples
        if not spec.uses_groups and responses < spec.min_samples:
            raise ValueError(f"{setting}: a step needs at least {spec.min_samples} responses, not {responses}")
        if spec.granularity == "sequence":
            if algorithm.gamma != 1:
                raise ValueError(
                    f"algorithm.gamma {algorithm.gamma}: {setting} has one reward per response; leave gamma at 1"
                )
            if algorithm.whiten_rewards:
                raise ValueError(f"algorithm.whiten_rewards: {setting} has no token rewards; leave it false")
        elif algorithm.response_ratio:
            raise ValueError(
                f"algorithm.{algorithm.response_ratio}: {setting} gives each token its own advantage; "
                "use one with an advantage per response, such as reinforce, rloo or grpo, or a loss with one ratio per token"
            )
        if algorithm.value_pretraining_steps >= self.run.steps:
            raise ValueError(
                f"algorithm.value_pretraining_steps {algorithm.value_pretraining_steps}: the policy would never be trained; "
                f"expected less than run.steps {self.run.steps}"
            )
        if algorithm.value_pretraining_steps and not algorithm.has_critic:
            raise ValueError(
                f"algorithm.value_pretraining_steps {algorithm.value_pretraining_steps}: {setting} has no critic"
            )
        if not algorithm.has_critic and self.services.critic.address:
            raise ValueError(f"services.critic.address: {setting} has no critic; leave it null")

    def _check_turns(self) -> None:
        rollout = self.rollout
        if rollout.max_turn_tokens is not None and not rollout.max_turns:
            raise ValueError("rollout.max_turn_tokens: not used without rollout.max_turns; set both, or remove it")
        if (rollout.max_turn_tokens or 0) > rollout.max_response_tokens:
            raise ValueError(
                f"rollout.max_turn_tokens {rollout.max_turn_tokens}: expected at most rollout.max_response_tokens "
                f"{rollout.max_response_tokens}, the limit of all turns"
            )
        if rollout.max_turns and rollout.engine == "triton":
            raise ValueError(
                "rollout.max_turns: not with engine triton, whose server may get text, so that earlier turns would be tokenized "
                "again; set another rollout.engine, or max_turns 0"
            )

    def _check_engine(self) -> None:
        if self.rollout.merge_adapter and (self.actor.lora is None or self.rollout.engine != "torch"):
            raise ValueError(
                "rollout.merge_adapter: only for engine torch with actor.lora; expected both; set it to false, or actor.lora"
            )
        self._check_turns()
        engine, triton = self.rollout.engine, self.rollout.triton
        servers = {"vllm-server": self.rollout.vllm_server, "sglang-server": self.rollout.sglang_server}
        for name, given in (
            ("triton", triton),
            ("tensorrt-llm", self.rollout.tensorrt_llm),
            ("vllm", self.rollout.vllm),
            *servers.items(),
        ):
            if given is not None and engine != name:
                key = name.replace("-", "_")
                raise ValueError(f"rollout.{key}: not used with engine {engine}; set engine {name}, or remove it")
        self._check_generators()
        if self.rollout.dynamic_sampling:
            self._check_dynamic_sampling()
        if self.rollout.max_off_policy_steps:
            self._check_off_policy()
        if self.rollout.in_flight_updates:
            self._check_in_flight_updates()
        if engine in servers:
            self._check_engine_server(engine, servers[engine])
        if engine != "triton":
            return
        if triton is None:
            raise ValueError("rollout.triton: missing; engine triton needs it, set rollout.triton.url")
        if triton.weights == "lora" and self.actor.lora is None:
            raise ValueError(
                "rollout.triton.weights lora: the server needs an adapter for each policy version, and actor.lora is null; set "
                "actor.lora, or weights static for a server whose weights never change"
            )
        if triton.weights == "static" and (self.rollout.top_k or self.rollout.top_p < 1):
            raise ValueError(
                "rollout.triton.weights static: importance sampling needs log-probs of the sampled distribution, and servers "
                "report none if it is truncated; set rollout.top_k 0 and rollout.top_p 1, or weights lora"
            )
        if (
            not triton.encrypted
            and not is_loopback(triton.address.rpartition(":")[0])
            and not self.security.allow_plaintext
        ):
            raise ValueError(
                f"rollout.triton.url {triton.url}: not a loopback address, and calls are not encrypted; use grpcs://, or "
                "set security.allow_plaintext"
            )

    def _check_generators(self) -> None:
        engine, devices = self.rollout.engine, self.services.generator.devices
        if engine == "triton" and self.has_generators:
            raise ValueError(
                "rollout.engine triton: the actor calls the Triton server; remove rollout.generators and services.generators"
            )
        if engine not in ("torch", "triton") and not self.has_generators:
            raise ValueError(
                f"rollout.engine {engine}: runs in generators; set rollout.generators to 1 or more and services.generator.python "
                "to the Python of the engine's environment, or name running generators in services.generators"
            )
        if devices and self.rollout.generators and len(devices) % self.rollout.generators:
            raise ValueError(
                f"services.generator.devices {list(devices)}: expected an equal number for each of the "
                f"{self.rollout.generators} generators of rollout.generators"
            )
        if self.services.generators and self.buffer.url is None:
            raise ValueError(
                "buffer.url: the generators of services.generators need a Redis server that they share with this run; set "
                "buffer.url"
            )

    def _check_engine_server(self, engine: str, server: EngineServerConfig | None) -> None:
        section = f"rollout.{engine.replace('-', '_')}"
        if server is None:
            raise ValueError(f"{section}: missing; engine {engine} needs it, set {section}.url")
        if server.weights == "lora" and self.actor.lora is None:
            raise ValueError(
                f"{section}.weights lora: the server loads an adapter for each policy version, and actor.lora is null; set "
                "actor.lora, or weights folder"
            )
        if server.weights == "folder" and self.actor.lora is not None:
            raise ValueError(
                f"{section}.weights folder: the server loads a whole checkpoint, and actor.lora trains an adapter; set weights "
                "lora, or actor.lora null"
            )
        if self.rollout.generators > 1:
            raise ValueError(
                f"rollout.generators {self.rollout.generators}: a server holds the weights of one generator; set 1, or name the "
                "generators of further servers in services.generators"
            )
        if not server.encrypted and not is_loopback(server.host) and not self.security.allow_plaintext:
            raise ValueError(
                f"{section}.url {server.url}: not a loopback address, and calls are not encrypted; use https://, or set "
                "security.allow_plaintext"
            )

    def _check_dynamic_sampling(self) -> None:
        setting, samples = "rollout.dynamic_sampling", self.rollout.samples_per_prompt
        if samples < 2:
            raise ValueError(
                f"{setting}: compares the scores of a prompt's responses; set rollout.samples_per_prompt to 2 or more, not "
                f"{samples}"
            )
        if not self.has_scores:
            raise ValueError(
                f"{setting}: compares scores, and with reward.source none there are none; set another source, or "
                "dynamic_sampling false"
            )
        if self.rollout.max_off_policy_steps:
            raise ValueError(
                f"{setting}: the scores of a step decide which prompts the next one takes, so no later step can be generated "
                f"ahead; set rollout.max_off_policy_steps to 0, not {self.rollout.max_off_policy_steps}, or dynamic_sampling "
                "false"
            )

    def _check_off_policy(self) -> None:
        setting = f"rollout.max_off_policy_steps {self.rollout.max_off_policy_steps}"
        if self.rollout.engine == "triton":
            raise ValueError(
                f"{setting}: engine triton cannot generate during an update; set another engine, or max_off_policy_steps 0"
            )

    def _check_in_flight_updates(self) -> None:
        setting, vllm = "rollout.in_flight_updates", self.rollout.vllm
        if self.rollout.engine != "vllm":
            raise ValueError(
                f"{setting}: engine {self.rollout.engine} takes new weights between generations only; set engine vllm, or "
                "in_flight_updates false"
            )
        if not self.rollout.max_off_policy_steps:
            raise ValueError(
                f"{setting}: with max_off_policy_steps 0 nothing is generated during an update; set max_off_policy_steps to 1 or "
                "more, or in_flight_updates false"
            )
        if self.actor.lora is not None:
            raise ValueError(
                f"{setting}: vLLM keeps the adapter of a response until its end, and actor.lora trains an adapter; set "
                "in_flight_updates false, or actor.lora null"
            )
        if vllm is not None and vllm.release_memory:
            raise ValueError(
                f"{setting}: generation and training overlap, so rollout.vllm.release_memory cannot free the GPU in between; set "
                "one of the two to false"
            )

    def _check_processes(self) -> None:
        for name in ("actor", "critic", "reward", "reference"):
            service: ServiceConfig = getattr(self.services, name)
            devices = list(service.devices)
            if service.processes > 1 and devices:
                raise ValueError(
                    f"services.{name}.processes {service.processes}: counts processes on CPUs, and services.{name}.devices "
                    f"{devices} starts one process per device; set processes 1, or devices []"
                )
            if repeated := sorted({device for device in devices if devices.count(device) > 1}):
                raise ValueError(
                    f"services.{name}.devices {devices}: {repeated} given more than once; each rank needs another device"
                )
            service.parallel.check(f"services.{name}", service)
            if name in ("actor", "critic") and getattr(self, name).compile and service.parallel.tensor > 1:
                raise ValueError(
                    f"{name}.compile: layers of which each rank computes slices cannot be compiled; set {name}.compile false, or "
                    f"services.{name}.parallel.tensor 1"
                )
            if name in ("reward", "reference") and service.offload != OffloadConfig():
                raise ValueError(f"services.{name}.offload: only actor and critic are trained; leave it out")
            if service.offload.parameters and len(devices) == 1:
                raise ValueError(
                    f"services.{name}.offload.parameters: a model on one device keeps its parameters there; give several "
                    "devices, or set parameters false and optimizer true"
                )
            if service.num_ranks == 1:
                continue
            key, one = ("devices", "one device") if devices else ("processes", "1")
            setting = f"services.{name}.{key} {devices or service.processes}"
            if name == "reward" and not self.reward.has_model_only:
                raise ValueError(
                    f"{setting}: several processes hold a model together, and the reward has another source; set {key} to "
                    f"{one}, or give models only"
                )
            if name == "actor" and self.rollout.engine == "triton":
                raise ValueError(
                    f"{setting}: engine triton needs an actor with all of its weights in one process; set {key} to {one}, or "
                    "another rollout.engine"
                )
            if name == "actor" and len(devices) == 2 and self.rollout.max_off_policy_steps and not self.has_generators:
                first, second = devices
                raise ValueError(
                    f"{setting}: with rollout.max_off_policy_steps this could mean to train on both devices, or to train on one "
                    f"and generate on the other. To generate on device {second}, set services.actor.devices [{first}], "
                    f"rollout.generators 1 and services.generator.devices [{second}]. To train on both, let generators generate "
                    "(rollout.generators), which may share a device with the actor"
                )

    def _check_reward(self) -> None:
        for section, source in self.reward.sources.items():
            for key, url in source.urls.items():
                has_tls = source.service is not None and self.security.certificates is not None
                if not has_tls and not is_encrypted_or_local(url) and not self.security.allow_plaintext:
                    raise ValueError(
                        f"{section}.{key} {url}: not a loopback address, and calls are not encrypted; use TLS, or set "
                        "security.allow_plaintext"
                    )

    def _check_environment(self) -> None:
        setting = f"rollout.max_turns {self.rollout.max_turns}"
        if not self.has_environment:
            if self.environment.class_name is not None:
                raise ValueError(
                    f"environment.class_name {self.environment.class_name}: not used with {setting}; set rollout.max_turns to "
                    "the maximum number of turns, or remove it"
                )
            return
        if self.environment.class_name is None and self.services.environment.address is None:
            raise ValueError(
                f"environment.class_name: missing; {setting} needs an environment: name its class, or set "
                "services.environment.address to the address of one that runs"
            )

    def _check_services(self) -> None:
        self._check_processes()
        self._check_environment()
        for name in ("actor", "critic"):
            if not isinstance(getattr(self.services, name).address, str | None):
                raise ValueError(
                    f"services.{name}.address: one process has the trained model; give one HOST:PORT. Lists are for reward and "
                    "reference"
                )
        if self.evaluation.every_steps and not self.data.has_validation:
            raise ValueError(
                f"evaluation.every_steps {self.evaluation.every_steps}: data.validation is null; set data.validation, or "
                "evaluation.every_steps 0"
            )
        if not self.has_reference and self.services.reference.address:
            raise ValueError(
                "services.reference.address: the actor serves the reference, with its adapter disabled; leave it null, "
                "or set reference.model"
            )
        if self.buffer.url is None and (self.services.actor.address or self.services.critic.address):
            raise ValueError(
                "buffer.url: an actor or critic at an address needs a Redis server that it shares with this run; set buffer.url"
            )

    @property
    def has_critic(self) -> bool:
        """Return whether the run has a critic."""
        return self.algorithm.has_critic

    @property
    def num_greedy_baselines(self) -> int:
        """Return the number of greedy responses per prompt that a step generates and does not train on."""
        return int(self.algorithm.estimator_spec.needs_greedy_baseline)

    @property
    def has_reward(self) -> bool:
        """Return whether the run has a reward service."""
        return self.reward.source != "none"

    @property
    def has_scores(self) -> bool:
        """Return whether responses get scores: from a reward service or an environment."""
        return self.has_reward or self.has_environment

    @property
    def has_reference(self) -> bool:
        """Return whether the run has a reference service. If not, the actor serves the reference with its adapter
        disabled."""
        return self.actor.lora is None or self.reference.model is not None

    @property
    def has_generators(self) -> bool:
        """Return whether generators in separate processes generate, instead of the actor."""
        return self.rollout.generators > 0 or bool(self.services.generators)

    @property
    def has_environment(self) -> bool:
        """Return whether trajectories have turns with an environment, in a separate process."""
        return self.rollout.max_turns > 0

    @property
    def critic_model(self) -> str:
        """Checkpoint of the initial critic."""
        return self.critic.model or self.reward.model or self.actor.model

    @property
    def reference_model(self) -> str:
        """Checkpoint of the reference: the frozen initial policy, or a teacher."""
        return self.reference.model or self.actor.model

    @property
    def reward_tokenizer(self) -> str:
        """Checkpoint whose tokenizer decodes responses in the reward service."""
        return self.reward.tokenizer or self.reward.model or self.actor.model

    @property
    def models(self) -> dict[str, str]:
        """Checkpoints that the services load, by config key: ROLE.model or reward.parts.NAME.model."""
        # Reward before critic: a critic without a model starts from the reward model, and errors should name the key in the file.
        models = {"actor.model": self.actor.model}
        if self.reward.model:
            models["reward.model"] = self.reward.model
        models |= {f"reward.parts.{part.name}.model": part.model for part in self.reward.parts if part.model}
        if self.has_critic:
            models["critic.model"] = self.critic_model
        if self.has_reference:
            models["reference.model"] = self.reference_model
        return models

    @property
    def run_directory(self) -> Path:
        """Folder of this run."""
        return self.run.directory / self.run.name

    def to_yaml(self) -> str:
        """Return the tree as YAML, including defaults, with the password in buffer.url redacted."""
        tree = self.model_dump(mode="json")
        if self.buffer.url:
            tree["buffer"]["url"] = redact_url(self.buffer.url)
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
