"""The four models: where they come from, how two of them are trained, what scores."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from quartet.config.section import (
    Count,
    Decay,
    Dtype,
    Finite,
    FunctionName,
    Name,
    NonNegative,
    Positive,
    Section,
    WholeNumber,
)

MAX_MICRO_BATCH_TOKENS = 4096
"""Of an update whose micro-batches are found by the free memory: larger ones did not pay."""


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


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021): only they are trained, the model below stays as it is."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rank of the two matrices."""
    alpha: Positive = 16.0
    """The adapter's output is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """Names of the linear layers that get one, such as q_proj; none: every linear layer of the decoder."""


class TrainedModelConfig(Section):
    """What actor and critic share: how a model that takes updates is kept and trained."""

    dtype: Dtype = "float32"
    """Parameter type; steps are taken in float32 in any case."""
    learning_rate: Positive = 1e-5
    """Learning rate after the warm-up."""
    warmup_steps: WholeNumber = 0
    """Steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, up to run.steps."""
    final_learning_rate: NonNegative = 0.0
    """What linear and cosine fall to: the step after the last would have it."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW's settings."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameter names that keep their weights, such as *embed_tokens* or *.layers.0.*"""
    lora: LoraConfig | None = None
    """Train adapters instead of the weights; null is off."""
    micro_batch_tokens: Count | None = None
    """Most tokens of one forward pass; pads count, where a model needs them. Changes speed and memory, and no more of the
    result than its last bits. null:
    4096, and fewer for updates where the memory that is free at the start holds no more; kept with the run."""
    gradient_checkpointing: bool | None = None
    """Compute activations again on the way back instead of keeping them: less memory, about a third more work, the same bits.
    null: where the free memory is too small otherwise."""

    @property
    def most_tokens_at_once(self) -> int:
        """Most tokens of one forward pass where memory asks for no fewer, as without gradients it does not."""
        return self.micro_batch_tokens or MAX_MICRO_BATCH_TOKENS

    @model_validator(mode="after")
    def _consistent(self) -> TrainedModelConfig:
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate {self.final_learning_rate:g}: expected at most learning_rate {self.learning_rate:g}"
            )
        if self.lora and self.freeze:
            raise ValueError("freeze: with lora all but the adapters is frozen already; leave one of the two out")
        return self


class ActorConfig(TrainedModelConfig):
    """The policy."""

    model: str
    """Path or hub id of a causal LM."""


class CriticConfig(TrainedModelConfig):
    """The value model. Estimators other than gae have none."""

    model: str | None = None
    """Path or hub id of a sequence classifier or a causal LM; null: the reward model, or the actor's where there is none."""


class RewardSourceConfig(Section):
    """One source of scores."""

    source: Literal["model", "function"] = "model"
    """model: a sequence classifier; function: a Python function."""
    model: str | None = None
    """Path or hub id of a sequence classifier with one output."""
    dtype: Dtype = "float32"
    """Parameter type of the model."""
    micro_batch_tokens: Count = 16384
    """Most tokens of one forward pass of the model; pads count, where it needs them."""
    function: FunctionName | None = None
    """package.module:callable, called as f(prompt, response, fields); fields are the prompt line's own."""
    batched: bool = False
    """The function takes lists of each, and gives a list."""
    timeout_seconds: Positive = 60.0
    """Seconds that one call of the function may take."""
    quote_texts: bool = False
    """Tell what the function's exceptions say, in logs and in notes, though it may quote prompts and responses; false: type, file
    and line."""

    def check_source(self) -> None:
        """Raises ValueError unless what the source needs is there, and no more."""
        given = {"model": self.model is not None, "function": self.function is not None}
        for name, present in given.items():
            if name == self.source and not present:
                raise ValueError(f"{name}: missing; source {self.source} needs it")
            if name != self.source and present:
                raise ValueError(f"{name}: not used with source {self.source}; set source {name}, or leave it out")


class RewardPartConfig(RewardSourceConfig):
    """One source of an ensemble."""

    name: Name
    """Under which its scores are kept."""
    weight: Finite = 1.0
    """Its weight in the sum."""

    @model_validator(mode="after")
    def _consistent(self) -> RewardPartConfig:
        self.check_source()
        return self


class RewardConfig(RewardSourceConfig):
    """The scorer."""

    source: Literal["model", "function", "ensemble"] = "model"  # type: ignore[assignment]
    """model: a sequence classifier; function: a Python function; ensemble: the weighted sum of `parts`."""
    parts: tuple[RewardPartConfig, ...] = ()
    """Sources of an ensemble: each with name, weight, source, and the source's own keys."""
    tokenizer: str | None = None
    """Path or hub id of the tokenizer that turns responses into text for functions; null: the reward model's, or the actor's."""

    @property
    def has_functions(self) -> bool:
        """Whether a prompt's own fields matter to the score."""
        return self.source == "function" or any(part.source == "function" for part in self.parts)

    def seconds_of_functions(self, batch: int) -> float:
        """Seconds that the functions may take for one batch of so many responses, by their time-outs."""
        sources: list[RewardSourceConfig] = [self, *self.parts]
        return sum(
            source.timeout_seconds * (1 if source.batched else batch) for source in sources if source.source == "function"
        )

    @model_validator(mode="after")
    def _consistent(self) -> RewardConfig:
        self.check_source()
        unused = {"dtype", "micro_batch_tokens", "batched", "timeout_seconds"} & self.model_fields_set
        changed = sorted(name for name in unused if getattr(self, name) != type(self).model_fields[name].default)
        if self.source == "ensemble" and changed:
            raise ValueError(f"{changed[0]}: not used with source ensemble; give it to each of the parts")
        if self.source == "ensemble" and not self.parts:
            raise ValueError("parts: source ensemble needs at least one")
        if self.source != "ensemble" and self.parts:
            raise ValueError(f"parts: not used with source {self.source}; set source ensemble, or leave them out")
        names = [part.name for part in self.parts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"parts: the name {twice[0]} stands twice; expected different names")
        return self


class ReferenceConfig(Section):
    """The frozen initial policy."""

    model: str | None = None
    """Path or hub id; null: the actor's initial weights, which an actor with lora answers for itself."""
    dtype: Dtype | None = None
    """Parameter type; null: the actor's."""
    micro_batch_tokens: Count = 16384
    """Most tokens of one forward pass; pads count, where a model needs them."""
