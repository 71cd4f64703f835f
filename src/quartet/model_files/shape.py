"""Sizes of a model from its config.json: parameters, state of a sequence, bytes saved for the backward pass. Imports no torch.

The formulas are for the model types of ``FAMILIES``. `quartet.planner.measured_shape` measures all others. A test compares the
numbers of parameters with the modules of transformers, and the saved bytes with measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quartet.errors import ConfigError

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Family:
    """Facts about a model type that its config.json leaves out.

    ``norm``: RMS norm, RMS norm whose normalized states stay in float32, or layer norm with a bias. ``norms``: before attention
    and MLP, after them, or both. ``query_norm``: RMS norm of queries and keys, one weight per element of a head, or of all heads.
    ``eager``: attention keeps a score for each pair of tokens. ``windowed``: some layers always attend to a window only.
    ``fused``: one matrix for queries, keys and values, and one for both inputs of a gated MLP. ``sliceable``: a trained model can
    be tensor parallel, because transformers has a plan for it whose styles are supported. ``defaults``: values of keys that
    config.json may omit.
    """

    norm: Literal["rms", "rms-wide", "layer"] = "rms"
    norms: Literal["before", "after", "both"] = "before"
    query_norm: Literal["none", "head", "all"] = "none"
    gated: bool = True
    query_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    learned_positions: bool = False
    eager: bool = False
    windowed: bool = False
    fused: bool = False
    sliceable: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)


_LAYER_NORM: dict[str, Any] = {
    "norm": "layer",
    "gated": False,
    "query_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "fused": True,
}
_TIED = {"tie_word_embeddings": True}
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(defaults={"num_key_value_heads": 8}),
    "qwen2": Family(query_bias=True),
    "qwen3": Family(query_norm="head", defaults={"head_dim": 128}),
    "granite": Family(),
    "phi3": Family(fused=True),
    "smollm3": Family(defaults={"num_key_value_heads": 4, **_TIED}),
    "olmo2": Family(norm="rms-wide", norms="after", query_norm="all"),
    "gemma": Family(norm="rms-wide", defaults={"head_dim": 256, **_TIED}),
    "gemma2": Family(
        norm="rms-wide",
        norms="both",
        eager=True,
        windowed=True,
        defaults={"head_dim": 256, "num_key_value_heads": 4, **_TIED},
    ),
    "gemma3_text": Family(
        norm="rms-wide",
        norms="both",
        query_norm="head",
        windowed=True,
        defaults={"head_dim": 256, "num_key_value_heads": 4, **_TIED},
    ),
    "gpt2": Family(
        **_LAYER_NORM, learned_positions=True, sliceable=False, defaults={"hidden_act": "gelu_new", **_TIED}
    ),
    "gpt_neox": Family(**_LAYER_NORM, defaults={"hidden_act": "gelu", "use_parallel_residual": True}),
    "mixtral": Family(sliceable=False, defaults={"num_key_value_heads": 8, "num_experts_per_tok": 2}),
    "qwen2_moe": Family(query_bias=True, sliceable=False, defaults={"num_experts_per_tok": 4}),
    "qwen3_moe": Family(
        query_norm="head", sliceable=False, defaults={"num_key_value_heads": 4, "num_experts_per_tok": 8}
    ),
}
"""Model types that the planner can count."""

_OTHER_NAMES = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("n_inner",),
    "max_position_embeddings": ("n_positions",),
    "hidden_act": ("activation_function", "hidden_activation"),
    "num_experts": ("num_local_experts",),
}
"""Names of a setting in config.json besides its usual one."""
_PLAIN_MLP_TENSORS = {"gelu_new": 5, "gelu_fast": 6}
"""Tensors of the intermediate size that an MLP without gate saves, by activation function. 2 for functions in one kernel."""


@dataclass(frozen=True, slots=True)
class SequenceState:
    """What generation keeps of a sequence, in elements of the model's precision: keys and values, index keys, recurrent states.

    ``token``: elements per token. ``windows``: elements per token in layers that attend to a window, by the window's tokens.
    ``fixed``: elements that do not depend on the length, and ``float32`` those that are in float32 for every precision.
    """

    token: float
    windows: tuple[tuple[int, float], ...] = ()
    fixed: int = 0
    float32: int = 0

    def fixed_bytes(self, dtype_bytes: int) -> int:
        """Return the bytes of a sequence that do not depend on its length: recurrent and convolution states."""
        return dtype_bytes * self.fixed + FLOAT32_BYTES * self.float32

    def token_bytes(self, dtype_bytes: int, tokens: float, drops_tokens: bool) -> float:
        """Return the bytes of a sequence that depend on its ``tokens``.

        ``drops_tokens``: the engine keeps only the tokens of a window. The torch engine keeps all.
        """
        kept = sum(size * (min(window, tokens) if drops_tokens else tokens) for window, size in self.windows)
        return dtype_bytes * (self.token * tokens + kept)

    def bytes(self, dtype_bytes: int, tokens: float, drops_tokens: bool = False) -> float:
        """Return the bytes of a sequence of ``tokens`` tokens."""
        return self.token_bytes(dtype_bytes, tokens, drops_tokens) + self.fixed_bytes(dtype_bytes)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder. ``experts`` is 0 for a dense model. ``sparse_layers`` of the layers have experts.

    ``packs``: updates pack sequences in one row without pads (ADR 42). ``windowed_layers`` attend to ``window`` tokens.
    """

    kind: str
    family: Family
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    intermediate: int
    positions: int
    tied: bool
    query_bias: bool
    output_bias: bool
    mlp_bias: bool
    activation: str
    parallel_residual: bool
    packs: bool
    experts: int = 0
    active_experts: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    sparse_layers: int = 0
    windowed_layers: int = 0
    window: int = 0

    @property
    def query(self) -> int:
        """Size of the queries of a token."""
        return self.heads * self.head_size

    @property
    def key(self) -> int:
        """Size of the keys of a token; the values have the same size."""
        return self.key_value_heads * self.head_size

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding and of learned positions."""
        return self.hidden * (self.vocabulary + self.positions * self.family.learned_positions)

    @property
    def head_parameters(self) -> int:
        """Parameters of the vocabulary projection, also if it shares them with the embedding."""
        return self.hidden * self.vocabulary

    @property
    def attention_layers(self) -> int:
        """Layers that attend to other tokens."""
        return self.layers

    @property
    def expert_parameters(self) -> int:
        """Parameters of the experts that are chosen for each token, in all layers."""
        return self.sparse_layers * self.experts * self._mlp(self.expert_intermediate)

    @property
    def state(self) -> SequenceState:
        """What generation keeps of a sequence."""
        layer, windowed = 2.0 * self.key, self.windowed_layers
        return SequenceState(layer * (self.layers - windowed), ((self.window, layer * windowed),) if windowed else ())

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers, without embeddings and final norm."""
        family, norm = self.family, 2 if self.family.norm == "layer" else 1
        vectors = norm * self.hidden * (4 if family.norms == "both" else 2)
        vectors += {"none": 0, "head": 2 * self.head_size, "all": self.query + self.key}[family.query_norm]
        vectors += (self.query + 2 * self.key) * self.query_bias + self.hidden * self.output_bias
        dense_bias = (self.intermediate * (1 + family.gated) + self.hidden) * self.mlp_bias
        dense_layers = self.layers - self.sparse_layers
        return self.layers * (self._attention() + vectors) + (
            dense_layers * (self._mlp(self.intermediate) + dense_bias)
            + self.sparse_layers * self._expert_matrices(self.experts)
        )

    @property
    def backbone_parameters(self) -> int:
        """Parameters without the vocabulary projection."""
        norm = (2 if self.family.norm == "layer" else 1) * self.hidden
        return self.embedding_parameters + self.layer_parameters + norm

    @property
    def parameters(self) -> int:
        """Parameters of the causal language model."""
        return self.backbone_parameters + (0 if self.tied else self.head_parameters)

    @property
    def classifier_parameters(self) -> int:
        """Parameters of a classifier with one output."""
        return self.backbone_parameters + self.hidden

    @property
    def value_parameters(self) -> int:
        """Parameters of a value model that starts from a causal language model: a head with a bias."""
        return self.classifier_parameters + 1

    def matmul_weights(self) -> int:
        """Return the weights that each token is multiplied with, without the vocabulary projection."""
        return self.layers * self._matrices(self.active_experts)

    def lora_parameters(self, rank: int) -> int:
        """Return the parameters of adapters of this rank on all linear layers and experts of the decoder."""
        inputs = 1 if self.family.fused else 3
        attention = inputs * self.hidden + 2 * self.query + 2 * self.key + self.hidden

        def mlp(intermediate: int, fused: bool) -> int:
            ends = 2 + self.family.gated
            return (ends - (fused and self.family.gated)) * self.hidden + ends * intermediate

        sparse = self.experts * mlp(self.expert_intermediate, True)
        if self.shared_intermediate:
            sparse += mlp(self.shared_intermediate, False) + self.hidden + 1
        dense = (self.layers - self.sparse_layers) * mlp(self.intermediate, self.family.fused)
        return rank * (self.layers * attention + dense + self.sparse_layers * sparse)

    def saved_layer_bytes(self, dtype_bytes: int, longest: int, tensor: int = 1) -> float:
        """Return the bytes per token that a layer saves for the backward pass.

        Every input of an operation whose gradient needs it counts once: inputs of norms (RMS norms compute in float32), inputs of
        matmuls, queries, keys, values, output and log-sum-exp of attention, and the intermediate states of the MLP. ``longest``:
        tokens of the longest sequence. ``tensor``: devices that share attention and MLP; each has the states of all norms.
        """
        size, family = dtype_bytes, self.family
        states = size if family.norm == "layer" else FLOAT32_BYTES
        normalized = {"rms": size, "rms-wide": FLOAT32_BYTES, "layer": 0}[family.norm]
        before = (states + normalized + size) * self.hidden
        after = (states + normalized) * self.hidden
        if family.norms == "before":
            # With a parallel residual, both norms read the same states.
            norms = 2 * before - (states * self.hidden if self.parallel_residual else 0)
        else:
            norms = 2 * after + (2 * before if family.norms == "both" else 2 * size * self.hidden)
        attention = size * (2 * self.query + 2 * self.key) + FLOAT32_BYTES * self.heads
        if family.eager:
            # The capped scores, the probabilities in float32, and for half precision the rounded probabilities.
            pairs = 8 * self.heads * longest
            attention = 4 * size * self.query + pairs
        # Packed attention copies its outputs back into the row.
        attention += size * self.query if self.packs else 0
        if family.query_norm != "none":
            attention += (FLOAT32_BYTES + normalized) * (self.query + self.key)
        return norms + (attention + self._mlp_bytes(size)) / tensor

    def saved_model_bytes(self, dtype_bytes: int) -> float:
        """Return the bytes per token that the model saves outside its layers: final norm, rotary positions, token ids."""
        states = dtype_bytes if self.family.norm == "layer" else FLOAT32_BYTES
        normalized = {"rms": dtype_bytes, "rms-wide": FLOAT32_BYTES, "layer": 0}[self.family.norm]
        rotary = 0 if self.family.learned_positions else 2 * dtype_bytes * self.head_size
        return (states + normalized + dtype_bytes) * self.hidden + rotary + 40

    def _attention(self) -> int:
        return self.hidden * (2 * self.query + 2 * self.key)

    def _mlp(self, intermediate: int) -> int:
        return (2 + self.family.gated) * self.hidden * intermediate

    def _expert_matrices(self, experts: int) -> int:
        shared = self._mlp(self.shared_intermediate) + (self.hidden if self.shared_intermediate else 0)
        return experts * self._mlp(self.expert_intermediate) + self.hidden * self.experts + shared

    def _matrices(self, experts: int) -> int:
        dense = (self.layers - self.sparse_layers) * self._mlp(self.intermediate)
        sparse = self.sparse_layers * self._expert_matrices(experts) if self.sparse_layers else 0
        return self._attention() + (dense + sparse) // self.layers

    def _mlp_bytes(self, size: int) -> float:
        tensors = 4 if self.family.gated else _PLAIN_MLP_TENSORS.get(self.activation, 2)
        dense = tensors * size * self.intermediate
        if not self.sparse_layers:
            return dense
        # Each expert of a token gets a copy of the token's states. This is an estimate; no test holds it.
        routed = self.active_experts * size * (4 * self.expert_intermediate + 2 * self.hidden)
        sparse = routed + 4 * size * self.shared_intermediate + 8 * self.experts
        return (sparse * self.sparse_layers + dense * (self.layers - self.sparse_layers)) / self.layers


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """Sizes that every decoder with attention has, also one of a type that the planner cannot count."""

    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int

    @property
    def state(self) -> SequenceState:
        """What generation keeps of a sequence if every layer keeps keys and values."""
        return SequenceState(2.0 * self.layers * self.key_value_heads * self.head_size)


def decoder_sizes(description: Mapping[str, Any], where: str) -> DecoderSizes:
    """Return the sizes that a config.json describes, of any model type. ``where`` names it in messages. Raises ConfigError."""
    family = FAMILIES.get(str(description.get("model_type")))
    if family is None:
        description = description.get("text_config") or description
    keys = _keys(description, family, where)
    heads, hidden = keys.count("num_attention_heads"), keys.count("hidden_size")
    has_heads = "head_dim" in keys.values
    if not has_heads and hidden % heads:
        raise ConfigError(
            f"{where}: config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; correct it"
        )
    return DecoderSizes(
        layers=keys.count("num_hidden_layers"),
        heads=heads,
        key_value_heads=keys.count("num_key_value_heads", heads),
        head_size=keys.count("head_dim") if has_heads else hidden // heads,
        vocabulary=keys.count("vocab_size"),
    )


def _keys(description: Mapping[str, Any], family: Family | None, where: str) -> _Keys:
    given = {**(family.defaults if family else {}), **description}
    return _Keys({name: value for name, value in given.items() if value is not None}, where)


def model_shape(description: Mapping[str, Any], where: str) -> ModelShape:
    """Return the sizes that a config.json describes. ``where`` names it in messages. Raises ConfigError."""
    kind = description.get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(
            f"{where}: config.json has model_type {kind!r}, which the planner cannot count; expected one of {known}; plan with a "
            "model of the same size of one of these types, or install quartet-rlhf[train], which counts every causal type"
        )
    family = FAMILIES[kind]
    keys, sizes = _keys(description, family, where), decoder_sizes(description, where)
    hidden, layers = keys.count("hidden_size"), sizes.layers
    bias = keys.flag("attention_bias", family.output_bias)
    experts = keys.count("num_experts", 8 if kind == "mixtral" else 0) if "moe" in kind or kind == "mixtral" else 0
    intermediate = keys.count("intermediate_size", 4 * hidden if kind == "gpt2" else None)
    kinds = keys.values.get("layer_types")
    windowed = kinds.count("sliding_attention") if isinstance(kinds, list) else 0
    return ModelShape(
        kind=kind,
        family=family,
        vocabulary=sizes.vocabulary,
        hidden=hidden,
        layers=layers,
        heads=sizes.heads,
        key_value_heads=sizes.key_value_heads,
        head_size=sizes.head_size,
        intermediate=intermediate,
        positions=keys.count("max_position_embeddings", 0 if not family.learned_positions else None),
        tied=keys.flag("tie_word_embeddings", False),
        query_bias=keys.flag("qkv_bias", family.query_bias or bias),
        output_bias=bias,
        mlp_bias=keys.flag("mlp_bias", family.mlp_bias),
        activation=str(keys.values.get("hidden_act") or keys.other("hidden_act") or ""),
        parallel_residual=keys.flag("use_parallel_residual", False),
        packs=not family.windowed and not (kind in ("mistral", "mixtral") and "sliding_window" in keys.values),
        experts=experts,
        active_experts=keys.count("num_experts_per_tok") if experts else 0,
        expert_intermediate=keys.count("moe_intermediate_size", intermediate) if experts else 0,
        shared_intermediate=keys.count("shared_expert_intermediate_size", 0) if experts else 0,
        sparse_layers=_sparse_layers(keys, layers) if experts else 0,
        windowed_layers=windowed,
        window=keys.count("sliding_window") if windowed else 0,
    )


def _sparse_layers(keys: _Keys, layers: int) -> int:
    dense = keys.values.get("mlp_only_layers", [])
    step = keys.count("decoder_sparse_step", 1)
    return sum(index not in dense and (index + 1) % step == 0 for index in range(layers))


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of a config.json, with checks."""

    values: Mapping[str, Any]
    where: str

    def other(self, name: str) -> Any:
        """Return the value of a key under one of its other names, or None."""
        return next((self.values[each] for each in _OTHER_NAMES.get(name, ()) if each in self.values), None)

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number. Raises ConfigError if it is missing without a ``default``, or below 1."""
        value = self.values.get(name, self.other(name))
        value = default if value is None else value
        if value is None or isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != default):
            shown = "missing" if value is None else f"{value!r}"
            raise ConfigError(
                f"{self.where}: config.json: {name} is {shown}; expected a whole number of at least 1; save the model again"
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a flag. Raises ConfigError if it is not one."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(
                f"{self.where}: config.json: {name} is {value!r}; expected true or false; save the model again"
            )
        return value
