"""The engines of rollout.engine: what they can guarantee with default settings, and where they run.

Imports no engine, so it is complete on every machine. An engine that runs declares what it keeps there, see ``EngineProperties``.
Tests compare the guarantees with those of the engines that can run there.
"""

from __future__ import annotations

from dataclasses import dataclass

from quartet.engines.engine import EngineProperties
from quartet.engines.tensorrt_llm import tensorrt_llm_properties
from quartet.engines.triton_properties import TritonDialect, triton_properties


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One engine of the catalog.

    ``engine`` is the value of rollout.engine. ``runs_in`` names its process and environment. ``depends_on`` says which settings
    change the guarantees. ``tested``: where `make engines` has run the contract suite. ``batch_invariant``: where the engine is,
    in words.
    """

    engine: str
    properties: EngineProperties
    runs_in: str
    depends_on: str
    tested: str
    batch_invariant: str = "no"

    def cells(self) -> tuple[str, ...]:
        """Return the guarantees as the cells of ``COLUMNS``."""
        seeded, _, *rest = described(self.properties)
        return (self.properties.name, seeded, self.batch_invariant, *rest)


COLUMNS = ("engine", "seeded", "batch-invariant", "log-probs", "weights", "digest", "in-flight updates")
"""Columns of the table of guarantees."""

_DIALECTS: tuple[tuple[TritonDialect, bool, str], ...] = (
    ("tokens", True, "No log-probs if the model has no output_log_probs. "),
    ("llmapi", False, ""),
    ("vllm", False, "Whole log-probs at temperature 1. "),
)

CATALOG = (
    EngineEntry(
        "torch",
        EngineProperties(
            "torch", seeded=True, batch_invariant=False, log_probs="whole", weights="shared", digest="none"
        ),
        "the actor's process",
        "The trial needs a CPU and a dense model.",
        "CPU",
        "if its trial at the start passes",
    ),
    EngineEntry(
        "torch",
        EngineProperties(
            "torch", seeded=True, batch_invariant=False, log_probs="whole", weights="tensors", digest="read back"
        ),
        "a generator in Quartet's environment, or the actor's process with rollout.max_off_policy_steps",
        "The trial needs a CPU and a dense model.",
        "CPU",
        "if its trial at the start passes",
    ),
    EngineEntry(
        "vllm",
        EngineProperties(
            "vllm",
            seeded=True,
            batch_invariant=False,
            log_probs="whole",
            weights="tensors",
            digest="read back",
            in_flight_updates=True,
        ),
        "a generator in vLLM's environment",
        "",
        "CPU",
        "on GPUs, with VLLM_BATCH_INVARIANT=1",
    ),
    EngineEntry(
        "vllm-server",
        EngineProperties(
            "vllm-server",
            seeded=True,
            batch_invariant=False,
            log_probs="truncated",
            weights="folder",
            digest="reported",
        ),
        "a vLLM server, called by a generator",
        "The digest is read back once the server's checksums have proven all tensors.",
        "CPU",
        "if the server has VLLM_BATCH_INVARIANT=1",
    ),
    EngineEntry(
        "sglang-server",
        EngineProperties(
            "sglang-server", seeded=False, batch_invariant=False, log_probs="whole", weights="folder", digest="reported"
        ),
        "an SGLang server, called by a generator",
        "Seeded with --enable-deterministic-inference.",
        "not run: a server generated from its published interface stands in",
        "with --enable-deterministic-inference",
    ),
    *(
        EngineEntry(
            "triton",
            triton_properties(dialect, "lora", reports_log_probs),
            "a Triton server, called by the actor",
            f"{depends_on}rollout.triton.weights static: static weights.",
            "real server on a CPU, with a model in its Python backend",
        )
        for dialect, reports_log_probs, depends_on in _DIALECTS
    ),
    EngineEntry(
        "tensorrt-llm",
        tensorrt_llm_properties("TorchSampler", adapter=False, reports_at_temperature=True),
        "a generator in TensorRT-LLM's image",
        "Seeded with sampler TRTLLMSampler. With actor.lora: adapter. No log-probs where the version cannot report them after "
        "the temperature.",
        "not run: it needs an NVIDIA GPU; a fake with the behaviour of its sources stands in",
    ),
)


def described(properties: EngineProperties) -> tuple[str, ...]:
    """Return the guarantees in words, in the order of ``COLUMNS`` after the name."""
    return (
        _yes(properties.seeded),
        _yes(properties.batch_invariant),
        properties.log_probs,
        properties.weights,
        properties.digest,
        _yes(properties.in_flight_updates),
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"
