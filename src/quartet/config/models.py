"""Settings of actor, critic and reference: their checkpoints, and how two of them are trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from quartet.config.section import (
    Count,
    Decay,
    Dtype,
    NonNegative,
    Positive,
    Section,
    WholeNumber,
)

MAX_MICRO_BATCH_TOKENS = 4096
"""Upper limit of the micro-batch size that a service chooses by its free memory. Larger ones are no faster on a CPU."""
MAX_MICRO_BATCH_TOKENS_GPU = 16384
"""The same on a GPU, which needs larger matmuls to be busy."""


class OptimizerConfig(Section):
    """The optimizer. The weights that it steps are float32, and so is its state, unless the kind says otherwise."""

    kind: Literal["adamw", "muon", "adamw8bit"] = "adamw"
    """adamw: AdamW. muon: Muon (Jordan et al. 2024) for the matrices of the transformer layers, also those of adapters, and AdamW
    for all other parameters: embeddings, heads, biases, norms and experts. Muon's steps are as large as AdamW's (Liu et al.
    2025), so they have the same learning rate. It needs whole matrices, so only models in one process,
    without offload.optimizer. torch's Muon computes in bfloat16, so its bits depend on the processor, unless ONEDNN_MAX_CPU_ISA
    is AVX2 in the environment of the services. adamw8bit: AdamW with moments of 8 bits (Dettmers et al. 2022) by torchao, extra
    torchao, also for models in one process and without offload.optimizer: 6 bytes less per trained parameter."""
    momentum: Decay = 0.95
    """Momentum of Muon, with Nesterov's correction. Not used by AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of the first and second moment of AdamW, β1 and β2."""
    eps: Positive = 1e-8
    """ε of AdamW, added to the denominator."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay. It applies to matrices only."""
    max_grad_norm: NonNegative = 1.0
    """Maximum L2 norm of the gradients. Larger gradients are scaled down. 0 disables it."""


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021). Only the adapters are trained, the base model is frozen."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rank of the adapter matrices."""
    alpha: Positive = 16.0
    """Scaling: the output of the adapter is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply by alpha / √rank instead (rank-stabilized LoRA, Kalajdzievski 2023), so that the size of the updates does not fall
    with the rank."""
    dropout: Decay = 0.0
    """Probability of each input of an adapter to be set to 0 in the passes that compute gradients. The others are divided by 1 -
    dropout. Scores, old log-probs and generation are without dropout. The old log-probs then need one more forward pass in each
    update. Not for experts, and not with compile."""
    learning_rate_ratio: Positive = 1.0
    """Learning rate of the matrices B, in multiples of that of A (LoRA+, Hayou et al. 2024). With dora also of the magnitudes."""
    dora: bool = False
    """Also train the magnitude of each output of an adapted layer (DoRA, Liu et al. 2024). Each pass computes the norms of the
    whole weights, so use rollout.merge_adapter. Only with engine torch and models in one process; not for experts, and not with
    compile."""
    target_modules: tuple[str, ...] = ()
    """Names of the linear layers with an adapter, such as q_proj, or of parameters of experts, such as experts.down_proj. Empty:
    all linear layers and experts of the decoder, without routers."""


class TrainedModelConfig(Section):
    """Settings that actor and critic share: precision, optimizer and memory."""

    dtype: Dtype = "float32"
    """Data type of the parameters. The optimizer always computes in float32."""
    learning_rate: Positive = 1e-5
    """Learning rate after the warmup."""
    warmup_steps: WholeNumber = 0
    """Number of steps over which the learning rate rises linearly from 0. The actor's begin after the value pretraining."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule from the end of the warmup to run.steps."""
    final_learning_rate: NonNegative = 0.0
    """Learning rate at the end of schedules linear and cosine. The step after the last one would have it."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    freeze: tuple[str, ...] = ()
    """Patterns of the names of parameters that are not trained, such as *embed_tokens* or *.layers.0.*"""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights. Null disables it."""
    micro_batch_tokens: Count | None = None
    """Maximum number of tokens per forward pass, including padding if the model needs it. It affects speed and memory, and only
    the last bits of the result. Null: 4096, or 16384 on a GPU, or less if the free memory at the start of the service is too
    small; the run keeps the chosen value."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass instead of storing them: less memory, about a third more work, bit-identical
    results. Null: only if the free memory is too small otherwise."""

    deterministic_updates: bool = True
    """On a GPU: use only kernels whose results are bit-identical if repeated, which may be slower. An actor that generates
    during its updates uses any kernel, see rollout.max_off_policy_steps."""
    compile: bool = False
    """Compile the transformer layers for updates with torch.compile. Results differ by rounding. The service compiles at its
    start, which takes minutes. Not run on a GPU. On a CPU it needs a C++ compiler, and linear layers do not use oneDNN. Not with
    a parallel.tensor above 1. Off for models whose layers keep a state, such as hybrids of attention and Mamba, and in layers
    that gradient_checkpointing recomputes."""

    @property
    def max_forward_tokens(self) -> int:
        """Maximum number of tokens per forward pass without gradients, which needs no further reduction for memory."""
        return self.micro_batch_tokens or MAX_MICRO_BATCH_TOKENS

    @model_validator(mode="after")
    def _consistent(self) -> TrainedModelConfig:
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate {self.final_learning_rate:g}: expected at most learning_rate {self.learning_rate:g}"
            )
        if self.lora and self.freeze:
            raise ValueError(
                "freeze: not used with lora, which freezes everything but the adapters; remove one of the two"
            )
        if self.lora and self.lora.dora and self.compile:
            raise ValueError(
                "lora.dora: compiled layers with magnitudes are not supported; set compile false, or dora false"
            )
        if self.lora and self.lora.dropout and self.compile:
            raise ValueError(
                f"lora.dropout {self.lora.dropout:g}: compiled layers do not have the masks of each token; set compile false, or "
                "dropout 0"
            )
        return self


class ActorConfig(TrainedModelConfig):
    """The policy."""

    model: str
    """Path or Hugging Face hub id of a causal language model. The page Tested architectures lists the model types that work."""
    ema_decay: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = None
    """Decay d of a moving average of the trained weights: after each update, average <- d average + (1 - d) weights. The run
    saves it as a second model, policy-ema. Nothing is generated or trained with it. Null: no average."""


class CriticConfig(TrainedModelConfig):
    """The value model. Estimators without a critic ignore this section."""

    model: str | None = None
    """Path or hub id of a sequence classifier or causal language model. Null: the reward model, or the model of the actor if
    the reward has no model."""


class ReferenceConfig(Section):
    """The initial policy, frozen or synchronized with the policy, or the teacher of a distillation."""

    model: str | None = None
    """Path or hub id. Null: the initial weights of the actor. An actor with lora then serves them itself, with its adapter
    disabled. For algorithm.distillation: the teacher, which may be larger and has the tokenizer of the actor."""
    dtype: Dtype | None = None
    """Data type of the parameters. Null: that of the actor."""
    sync_steps: Count | None = None
    """Steps between synchronizations with the policy: reference <- sync_alpha policy + (1 - sync_alpha) reference. Null: the
    reference is frozen."""
    sync_alpha: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.6
    """Weight of the policy in a synchronization. 1: the reference becomes the policy."""
    micro_batch_tokens: Count = 16384
    """Maximum number of tokens per forward pass, including padding if the model needs it."""

    def version_of(self, step: int) -> int | None:
        """Return the step after which the version that scores ``step`` was made, None for a frozen reference."""
        return None if self.sync_steps is None else (step - 1) - (step - 1) % self.sync_steps
