"""Fixtures of the engine tests: every engine with the same tiny policy and adapter, and a server per session."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from quartet.config.models import LoraConfig
from quartet.contract.arrays import FloatArray
from quartet.contract.generation import SamplingParameters
from quartet.contract.trajectory import TokenBatch, Trajectory
from quartet.engines.engine import EngineResponse, Policy
from quartet.engines.request_checks import check_response
from quartet.models.forward.scoring import response_log_probs
from quartet.models.generation.torch_engine import served_model
from quartet.models.weights.lora import add_adapter
from tests.engines import http_servers
from tests.engines.http_servers import VLLMServer
from tests.engines.triton_server import Model, TritonServer, is_available
from tests.unit.models import tiny

SERVED = (
    Model("current"),
    Model("older", names="older"),
    Model("whole", decoupled=False),
    Model("older-whole", names="older", decoupled=False),
    Model("silent", log_probs="no"),
    Model("text", names="text", decoupled=False),
    Model("garbled", names="text", decoupled=False, log_probs="garbled"),
    Model("seedless", without=("seed",)),
    Model("vllm", names="vllm"),
)
EOS = 32
"""A token with a high probability, so that some responses end early, including greedy ones."""
SEED = 3
"""Seed of the adapter that a policy starts with."""


def policy(seed: int = SEED) -> Policy:
    """Return a tiny Llama with a random adapter and EOS as its only stop token."""
    model = tiny.causal("llama")
    adapter = add_adapter(model, "base", LoraConfig(rank=2, alpha=3.0), seed)
    change_adapter(model, seed)
    return Policy(model, tokenizer(), adapter, served_model(model, frozenset({EOS})))


def score(subject: Policy, batch: TokenBatch, temperature: float) -> FloatArray:
    """Return the trainer's log-probs."""
    return response_log_probs(subject.model, batch, temperature, 4096)


def trajectories(
    responses: Iterable[EngineResponse], subject: Policy, sampling: SamplingParameters, version: int = 0
) -> list[Trajectory]:
    """Return checked responses, ordered by id. The trainer computes the log-probs that an engine does not report, as in a run."""
    results = [check_response(each, subject.served, sampling, version, "engine") for each in responses]
    return [
        each
        if each.has_log_probs
        else each.with_log_probs(score(subject, TokenBatch.of([each]), sampling.temperature or 1.0))
        for each in sorted(results, key=lambda each: each.id)
    ]


def change_adapter(model: torch.nn.Module, seed: int) -> None:
    """Give the adapter other weights, as an update does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=generator)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of the words w0, w1, ... Decoding leaves out EOS only."""
    words = {f"w{index}": index for index in range(tiny.VOCABULARY)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=f"w{EOS}")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the policy without its adapter, as the servers load it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny.saved(tiny.causal("llama"), folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Start a real tritonserver that loads each model for its first test."""
    if not is_available():
        pytest.skip("needs nvidia-pytriton and tritonclient: make engines")
    server = TritonServer(tmp_path_factory.mktemp("triton"), checkpoint, SERVED, lazy=True)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """Start one vLLM server for all tests: it takes half a minute."""
    if not http_servers.PYTHON.exists():
        pytest.skip(f"needs vLLM: {http_servers.PYTHON} does not exist; QUARTET_VLLM_PYTHON names the Python with it")
    with http_servers.vllm_server(tmp_path_factory.mktemp("vllm")) as result:
        yield result


@pytest.fixture(scope="session")
def sglang_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model that the SGLang servers start with."""
    folder = tmp_path_factory.mktemp("sglang") / "model"
    http_servers.sglang_policy(0).save_pretrained(folder)
    return folder


_policy = functools.cache(policy)


@pytest.fixture
def subject() -> Policy:
    """Return the policy of a test, a copy of one that is created once."""
    return copy.deepcopy(_policy())
