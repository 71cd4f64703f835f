"""The config: one typed tree, loaded from the same YAML file on a laptop, in Compose and in Helm. Does not import torch."""

from quartet.config.algorithm import (
    AlgorithmConfig,
    KLControllerConfig,
    LengthPenaltyConfig,
    OverlongPenaltyConfig,
    ScoreConfig,
    TruncationConfig,
)
from quartet.config.deployment import (
    BufferConfig,
    GatewayConfig,
    GeneratorServiceConfig,
    OrchestratorServiceConfig,
    RecoveryConfig,
    SecurityConfig,
    ServiceConfig,
    ServicesConfig,
    TimeoutsConfig,
)
from quartet.config.guards import GuardConfig, GuardsConfig
from quartet.config.loading import config_of, copy_sections, invalid_keys, load_config, parse_config
from quartet.config.models import (
    MAX_MICRO_BATCH_TOKENS,
    MAX_MICRO_BATCH_TOKENS_GPU,
    ActorConfig,
    CriticConfig,
    LoraConfig,
    OptimizerConfig,
    ReferenceConfig,
    RewardConfig,
    RewardPartConfig,
    RewardSourceConfig,
    TrainedModelConfig,
)
from quartet.config.rollout import (
    MAX_RESPONSES,
    EngineServerConfig,
    RolloutConfig,
    SGLangServerConfig,
    TensorRTLLMConfig,
    TritonConfig,
    VLLMConfig,
    VLLMServerConfig,
)
from quartet.config.root import Config
from quartet.config.run import CheckpointConfig, DataConfig, EvaluationConfig, RunConfig
from quartet.config.schema import json_schema
from quartet.config.section import Section, is_loopback
from quartet.config.telemetry import MLflowConfig, TelemetryConfig, WandbConfig
from quartet.config.url_redaction import is_redacted, redact_url

__all__ = [
    "MAX_MICRO_BATCH_TOKENS",
    "MAX_MICRO_BATCH_TOKENS_GPU",
    "MAX_RESPONSES",
    "ActorConfig",
    "AlgorithmConfig",
    "BufferConfig",
    "CheckpointConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "EngineServerConfig",
    "EvaluationConfig",
    "GatewayConfig",
    "GeneratorServiceConfig",
    "GuardConfig",
    "GuardsConfig",
    "KLControllerConfig",
    "LengthPenaltyConfig",
    "LoraConfig",
    "MLflowConfig",
    "OptimizerConfig",
    "OrchestratorServiceConfig",
    "OverlongPenaltyConfig",
    "RecoveryConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RewardPartConfig",
    "RewardSourceConfig",
    "RolloutConfig",
    "RunConfig",
    "SGLangServerConfig",
    "ScoreConfig",
    "Section",
    "SecurityConfig",
    "ServiceConfig",
    "ServicesConfig",
    "TelemetryConfig",
    "TensorRTLLMConfig",
    "TimeoutsConfig",
    "TrainedModelConfig",
    "TritonConfig",
    "TruncationConfig",
    "VLLMConfig",
    "VLLMServerConfig",
    "WandbConfig",
    "config_of",
    "copy_sections",
    "invalid_keys",
    "is_loopback",
    "is_redacted",
    "json_schema",
    "load_config",
    "parse_config",
    "redact_url",
]
