"""Configs of the stages before RLHF: supervised fine-tuning, and the training of a reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from quartet.config.loading import load_section, read_tree
from quartet.config.root import Config
from quartet.config.section import Count, Decay, Fraction, Name, NonNegative, Positive, Section, WholeNumber
from quartet.config.telemetry import SinksConfig
from quartet.config.template_inputs import check_template_input
from quartet.errors import ConfigError


class StageRunConfig(Section):
    """Name, seed and length of the stage, and the folder that holds it."""

    name: Name
    """Name of the run and of its folder: letters, digits, '.', '_' and '-'."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the order of the rows, and of new heads and adapters."""
    epochs: Positive = 1.0
    """Passes over the rows. Not used if `steps` is set."""
    steps: Count | None = None
    """Number of optimizer steps. Null: those of `epochs`."""
    directory: Path = Path("runs")
    """Folder of all runs. A run is stored in DIRECTORY/NAME."""


class StageDataConfig(Section):
    """Rows to train on, and held-out rows."""

    train: Path
    """File of rows: JSON Lines, CSV or Parquet. Rows are pairs of answers: `chosen` and `rejected`, beside `prompt` or with it.
    For sft, a row may also have `messages`, or `prompt` and `completion`."""
    validation: Path | None = None
    """File of held-out rows in the same format. Null: a part of `train`, see `validation_fraction`."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Fraction of the conversations of `train` that are held out if there is no `validation`. A hash of the first message of the
    user decides, so conversations that begin alike are on one side. 0: none."""
    max_validation_rows: Count = 1000
    """Maximum number of held-out rows to evaluate with: the first ones."""
    max_tokens: Count = 1024
    """Maximum length of a conversation in tokens. Rows with a longer one are left out."""
    max_dropped_fraction: Fraction = 0.5
    """Maximum fraction of rows to leave out because they are too long. The run does not start if there are more."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """At most 64 further variables of the chat template, such as {enable_thinking: false}."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _reaches_template(cls, value: Any) -> Any:
        check_template_input("chat_template_kwargs", value)
        return value


class StageLoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021). Only they are trained; the result has them merged into the weights."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rank of the adapter matrices."""
    alpha: Positive = 16.0
    """Scaling: the output of the adapter is multiplied by alpha / rank."""
    dropout: Decay = 0.0
    """Probability of each input of an adapter to be set to 0 in training."""
    target_modules: tuple[str, ...] = ()
    """Names of the linear layers with an adapter, such as q_proj. Empty: all but the head."""


class StageModelConfig(Section):
    """The model to start from."""

    path: str
    """Path or Hugging Face hub id of a causal language model whose tokenizer has a chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the computation. bfloat16 is mixed precision: weights and optimizer stay float32."""
    device: Literal["cpu", "cuda"] | None = None
    """cuda is the first visible GPU. Null: a GPU if there is one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them: less memory, about a third more work."""
    lora: StageLoraConfig | None = None
    """Train low-rank adapters instead of the weights. Null disables it."""


class StageTrainingConfig(Section):
    """Batches and optimizer, which is AdamW."""

    batch_size: Count = 64
    """Rows of an optimizer step."""
    micro_batch_size: Count = 8
    """Rows of a forward pass, a divisor of `batch_size`. It affects speed and memory. The loss of sft is a mean over the tokens
    of a step, so without dropout the result changes only in the last bits. The loss of a reward model is the mean of those of the
    forward passes: if the last pass of an epoch has fewer rows, each of them counts more in its step. Metrics besides the loss of
    training are means over forward passes, too."""
    learning_rate: Positive = 1e-5
    """Learning rate after the warmup."""
    warmup_steps: WholeNumber = 0
    """Number of steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Learning rate schedule from the end of the warmup to the last step. linear and cosine end at 0."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay. It does not apply to biases and norms."""
    max_grad_norm: NonNegative = 1.0
    """Maximum L2 norm of the gradients. Larger gradients are scaled down. 0 disables it."""

    @model_validator(mode="after")
    def _divides(self) -> StageTrainingConfig:
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size {self.batch_size}: expected a multiple of micro_batch_size {self.micro_batch_size}"
            )
        return self


class StageEvaluationConfig(Section):
    """Evaluation on the held-out rows, besides those before the first and after the last step."""

    every_steps: WholeNumber = 0
    """Steps between evaluations. 0: only at the beginning and the end."""


class StageCheckpointConfig(Section):
    """Frequency of the checkpoints from which `--resume` continues."""

    every_steps: WholeNumber = 100
    """Steps between checkpoints. 0: none, so an interrupted stage starts again."""


class StageConfig(Section):
    """Settings that both stages share."""

    stage: Literal["sft", "reward-model"]
    """Kind of the config: the name of its command."""
    run: StageRunConfig
    data: StageDataConfig
    model: StageModelConfig
    training: StageTrainingConfig = StageTrainingConfig()
    evaluation: StageEvaluationConfig = StageEvaluationConfig()
    checkpoint: StageCheckpointConfig = StageCheckpointConfig()
    telemetry: SinksConfig = SinksConfig()

    @property
    def run_directory(self) -> Path:
        """Folder of this run."""
        return self.run.directory / self.run.name

    def to_yaml(self) -> str:
        """Return the tree as YAML, including defaults."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class SftConfig(StageConfig):
    """All settings of `quartet sft`."""

    stage: Literal["sft"]
    """Kind of the config: the name of its command."""


class RewardModelTrainingConfig(StageTrainingConfig):
    """Batches, optimizer and loss."""

    center_rewards_coefficient: NonNegative = 0.01
    """Weight of the squared sum of both scores in the loss, which determines their zero point (Eisenstein et al. 2023)."""
    margin_coefficient: NonNegative = 0.0
    """Multiplies the margin of a pair in the loss (Touvron et al. 2023): `margin`, or `score_chosen` minus `score_rejected`."""


class RewardModelModelConfig(StageModelConfig):
    """The model to start from: the policy, or another model with its tokenizer."""

    pad_token: str | None = None
    """Token of the vocabulary that conversations do not contain, for a tokenizer without a pad token besides EOS."""


class RewardModelConfig(StageConfig):
    """All settings of `quartet reward-model`."""

    stage: Literal["reward-model"]
    """Kind of the config: the name of its command."""
    model: RewardModelModelConfig
    training: RewardModelTrainingConfig = RewardModelTrainingConfig()


STAGES: dict[str, type[StageConfig]] = {"sft": SftConfig, "reward-model": RewardModelConfig}
"""Configs by the name of the command, which is also the value of `stage`."""


def load_stage(stage: str, path: Path, overrides: list[str] | None = None) -> StageConfig:
    """Load the config of a stage. Raises ConfigError."""
    given = read_tree(path).get("stage")
    if given != stage:
        remedy = (
            f"run quartet {given} {path}" if given in STAGES else f"set stage: {stage}, or run quartet train {path}"
        )
        raise ConfigError(f"config {path}: stage is {given or 'missing'}, expected {stage}; {remedy}")
    return load_section(STAGES[stage], path, overrides)


def load_any_config(
    path: Path, overrides: list[str] | None = None, layers: tuple[Path, ...] = ()
) -> Config | StageConfig:
    """Load the config of a run or of a stage. Raises ConfigError."""
    kind: type[Config] | type[StageConfig] = STAGES.get(str(read_tree(path).get("stage")), Config)
    return load_section(kind, path, overrides, layers)
