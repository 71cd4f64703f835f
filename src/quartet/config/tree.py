"""The config tree: its sections, and what follows from them."""

from __future__ import annotations

from pathlib import Path

import yaml

from quartet.config.algorithm import AlgorithmConfig
from quartet.config.deployment import (
    BufferConfig,
    GatewayConfig,
    RecoveryConfig,
    SecurityConfig,
    ServicesConfig,
    TimeoutsConfig,
)
from quartet.config.environment import EnvironmentConfig
from quartet.config.evaluation import EvaluationConfig
from quartet.config.guards import GuardsConfig
from quartet.config.models import ActorConfig, CriticConfig, ReferenceConfig
from quartet.config.rewards import RewardConfig
from quartet.config.rollout import RolloutConfig
from quartet.config.run import CheckpointConfig, DataConfig, RunConfig
from quartet.config.section import Section
from quartet.config.telemetry import TelemetryConfig
from quartet.config.url_redaction import redact_url


class ConfigTree(Section):
    """All settings of a run, before the conditions between sections are checked."""

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

    @property
    def default_treatment(self) -> str:
        # The limits of an environment may be part of its task.
        return "penalty" if self.has_scores and not self.has_environment else "keep"

    def resolved_defaults(self) -> list[tuple[str, str]]:
        """Return section and name of each setting whose null other settings decide, and whose value is what they decide."""
        algorithm, keys = self.algorithm, []
        if algorithm.kl_loss == algorithm.default_kl_loss:
            keys.append(("algorithm", "kl_loss"))
        if algorithm.truncation.treatment == self.default_treatment:
            keys.append(("algorithm.truncation", "treatment"))
        return keys

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
        """Return whether trajectories have turns, whose other side is an environment, an agent or a user."""
        return self.rollout.max_turns > 0

    @property
    def has_agents(self) -> bool:
        """Return whether the environment is an agent, which calls the policy."""
        return self.has_environment and self.environment.kind == "agent"

    @property
    def has_traffic(self) -> bool:
        """Return whether trajectories are sessions of users, who call the policy."""
        return self.has_environment and self.environment.kind == "traffic"

    @property
    def has_environment_service(self) -> bool:
        """Return whether a separate process answers the turns of trajectories, or runs the agents that call the policy."""
        return self.has_environment and not self.has_traffic

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
        # The emitter in C takes a quarter of the time. It escapes some characters that the other one writes as they are.
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        fast: str = yaml.dump(tree, Dumper=dumper, sort_keys=False, allow_unicode=True)
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True) if "\\" in fast else fast
