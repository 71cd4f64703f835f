"""The TensorRT-LLM engine: with the real package if it can be imported, otherwise with a fake of its calls."""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from contrib.tensorrt_llm.tests import fake_tensorrt_llm
from contrib.tensorrt_llm.tests.fake_tensorrt_llm import LLM, NEW, OLD
from quartet.config.loading import parse_config
from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import Trajectory, TrajectoryId
from quartet.contrib.tensorrt_llm import engine as tensorrt_llm
from quartet.contrib.tensorrt_llm.engine import TensorRTLLMEngine, TensorRTLLMSettings
from quartet.engines.checkpoint_files import readable_by_older_versions
from quartet.engines.engine import EngineResponse, Policy, ServedModel, find_engine
from quartet.errors import Cancelled, ConfigError, InvalidRequest, ServiceFailed
from quartet.weight_transfer.tensors import AdapterSettings, HostTensor, WeightSet, combined_digest, tensor_digest
from tests.engines.conftest import EOS, change_adapter, trajectories
from tests.engines.test_contract import greedy, requests
from tests.every_case import every_case
from tests.unit.models import tiny
from tests.waiting import LIMIT

REAL = "real"
TARGETS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
Create = Callable[..., TensorRTLLMEngine]


def weight_set(subject: Policy, version: int, folder: Path, merged: bool = False) -> WeightSet:
    """Return the policy's weights: base and adapter, or merged."""
    folder.mkdir(exist_ok=True)
    assert subject.adapter is not None
    tensors: dict[str, np.ndarray] = {}
    if merged:
        subject.adapter.snapshot_merged()(folder)
        tensors |= safetensors.numpy.load_file(folder / "model.safetensors")
    else:
        tensors |= {name: value.numpy() for name, value in tiny.causal("llama").state_dict().items()}
        subject.adapter.snapshot()(folder)
        tensors |= safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    host = {
        name: HostTensor("F32", value.shape, np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        for name, value in tensors.items()
    }
    digest = combined_digest({name: tensor_digest(tensor) for name, tensor in host.items()})
    return WeightSet(version, digest, host, None if merged else AdapterSettings(2, 3.0, TARGETS))


def run(
    engine: TensorRTLLMEngine, batch: list[GenerationRequest], seed: int = 0, **sampling: Any
) -> list[EngineResponse]:
    """Generate, and return the responses in the order of their ids."""
    parameters = SamplingParameters(**{"max_response_tokens": 10, "temperature": 0.8, **sampling})
    return sorted(engine.generate(batch, parameters, seed, lambda: False), key=lambda result: result.request.id)


def tokens(result: list[EngineResponse]) -> list[list[int]]:
    return [list(response.token_ids) for response in result]


def with_first_token(token: int, index: int = 99) -> GenerationRequest:
    return GenerationRequest(TrajectoryId("run", 0, index, 0), np.array([token, 3, 4], np.int32))


@pytest.fixture
def create(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Create]:
    """Create engines with a version of the fake, or the real package."""
    engines = []
    gc.freeze()  # The engine collects garbage whenever it shuts down, and need not search the objects of all tests.

    def start(version: str = NEW, longest: int = 64, **settings: Any) -> TensorRTLLMEngine:
        if version != REAL:
            fake_tensorrt_llm.install(monkeypatch, version)
        elif importlib.util.find_spec("tensorrt_llm") is None:
            pytest.skip("needs tensorrt_llm, and so a GPU")
        served = ServedModel(str(checkpoint), "float32", frozenset({EOS}), tiny.VOCABULARY, longest)
        engines.append(TensorRTLLMEngine(TensorRTLLMSettings(32, folder=tmp_path, **settings), served))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(params=[OLD, NEW, REAL])
def version(request: pytest.FixtureRequest) -> str:
    """Return each version in turn."""
    return str(request.param)


@pytest.fixture
def engine(create: Create, subject: Policy, tmp_path: Path) -> TensorRTLLMEngine:
    """Return an engine with the fake of the newest version and the adapter of the policy."""
    result = create()
    load(result, weight_set(subject, 0, tmp_path / "w0"))
    return result


def load(engine: TensorRTLLMEngine, weights: WeightSet, changed: set[str] | None = None) -> None:
    """Load weights, and check the digests that the engine returns."""
    digests = engine.load_weights(weights, set(weights.tensors) if changed is None else changed)
    assert combined_digest(digests) == weights.digest


@pytest.mark.parametrize("merged", [False, True], ids=["adapter", "whole"])
def test_greedy_tokens_are_those_without_cache_and_batching(
    create: Create, subject: Policy, tmp_path: Path, version: str, merged: bool
) -> None:
    engine, batch = create(version), requests(6)
    load(engine, weight_set(subject, 0, tmp_path / "w", merged))
    result = run(engine, batch, temperature=0.0)
    assert tokens(result) == [greedy(subject, request) for request in batch]
    assert engine.properties.weights == ("restart" if merged else "adapter")


@pytest.mark.parametrize("merged", [False, True], ids=["adapter", "whole"])
def test_new_weights_apply_to_the_next_generation(
    create: Create, subject: Policy, tmp_path: Path, version: str, merged: bool
) -> None:
    engine, batch = create(version), requests(4)
    load(engine, weight_set(subject, 0, tmp_path / "w0", merged))
    before = run(engine, batch, temperature=0.0)
    for number in (1, 2):
        change_adapter(subject.model, seed=10 + number)
        weights = weight_set(subject, number, tmp_path / f"w{number}", merged)
        load(engine, weights, None if merged else {name for name in weights.tensors if "lora" in name})
        after = run(engine, batch, temperature=0.0)
        assert tokens(after) == [greedy(subject, request) for request in batch]
        assert tokens(after) != tokens(before)
    if version != REAL:
        assert len(LLM.started) == (3 if merged else 1)
        assert [llm.is_running for llm in LLM.started][:-1] == [False] * (2 if merged else 0)
    assert sum(folder.is_dir() for folder in tmp_path.glob("quartet-*/*")) == (1 if merged else 2)


def checked(result: list[EngineResponse], subject: Policy, sampling: SamplingParameters) -> list[Trajectory]:
    return trajectories(result, subject, sampling)


@pytest.mark.parametrize(
    ("sampler", "temperature", "top_k", "reported"),
    [
        ("TorchSampler", 0.0, 0, (OLD, NEW)),
        ("TorchSampler", 1.0, 0, (OLD, NEW)),
        ("TorchSampler", 0.7, 0, (NEW,)),
        ("TorchSampler", 0.7, 5, ()),
        ("TorchSampler", 1.0, 5, ()),
        ("TRTLLMSampler", 0.0, 0, ()),
        ("TRTLLMSampler", 1.0, 0, (OLD,)),
        ("TRTLLMSampler", 0.7, 0, ()),
    ],
)
def test_reported_log_probs_are_those_of_the_whole_distribution(
    create: Create,
    subject: Policy,
    tmp_path: Path,
    version: str,
    sampler: str,
    temperature: float,
    top_k: int,
    reported: tuple[str, ...],
) -> None:
    if sampler == "TRTLLMSampler" and version != OLD:
        pytest.skip("only older versions have this sampler")
    engine = create(version, sampler=sampler)
    load(engine, weight_set(subject, 0, tmp_path / "w"))
    result = run(engine, requests(3), temperature=temperature, top_k=top_k)
    if version != REAL:
        assert {response.log_probs is not None for response in result} == {version in reported}
    sampling = SamplingParameters(10, temperature=temperature, top_k=top_k)
    for trajectory, scored in zip(
        checked(result, subject, sampling),
        checked([EngineResponse(r.request, r.token_ids, None) for r in result], subject, sampling),
        strict=True,
    ):
        assert np.allclose(trajectory.log_probs, scored.log_probs, atol=1e-3)
    # The declaration is about every temperature.
    assert engine.properties.log_probs == ("whole" if version == NEW and sampler == "TorchSampler" else "none")


def test_only_the_older_sampler_is_seeded(create: Create, subject: Policy, tmp_path: Path) -> None:
    batch, weights = requests(6), weight_set(subject, 0, tmp_path / "w")
    seeded = create(OLD, sampler="TRTLLMSampler")
    load(seeded, weights)
    assert seeded.properties.seeded
    first = tokens(run(seeded, batch))
    assert tokens(run(seeded, batch)) == first
    assert tokens(run(seeded, batch[3:6])) == first[3:6]
    assert tokens(run(seeded, batch, seed=1)) != first

    unseeded = create(OLD)
    load(unseeded, weights)
    assert not unseeded.properties.seeded
    assert tokens(run(unseeded, batch)) != tokens(run(unseeded, batch))


def test_a_version_without_the_sampler_is_refused(
    create: Create, subject: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weight_set(subject, 0, tmp_path / "w")
    with pytest.raises(ConfigError, match=r"rollout\.tensorrt_llm: .*TRTLLMSampler was removed"):
        create(NEW, sampler="TRTLLMSampler").load_weights(weights, set(weights.tensors))
    engine = create(OLD, sampler="TRTLLMSampler")

    class Ignoring(LLM):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**{**arguments, "sampler_type": "TorchSampler"})

    monkeypatch.setattr(sys.modules["tensorrt_llm"], "LLM", Ignoring)
    with pytest.raises(ConfigError, match=r"sampler TRTLLMSampler: this version of TensorRT-LLM uses TorchSampler"):
        engine.load_weights(weights, set(weights.tensors))
    assert not any(llm.is_running for llm in LLM.started)


def test_responses_are_valid(create: Create, subject: Policy, tmp_path: Path, version: str) -> None:
    engine = create(version)
    load(engine, weight_set(subject, 0, tmp_path / "w"))
    sampling = SamplingParameters(6, temperature=0.8)
    result = checked(run(engine, requests(12), max_response_tokens=6), subject, sampling)
    assert {len(t.response_ids) < 6 for t in result} == {True, False}
    assert {len(r.token_ids) for r in run(engine, requests(4), ignore_eos=True)} == {10}
    assert run(engine, []) == []


def test_a_response_does_not_wait_for_longer_ones(engine: TensorRTLLMEngine) -> None:
    batch = [with_first_token(58), *requests(4)]
    running = engine.generate(batch, SamplingParameters(10), 0, lambda: False)
    first = [next(running).request.id for _ in range(4)]
    assert batch[0].id not in first
    LLM.started[0].executor.release.set()
    assert [response.request.id for response in running] == [batch[0].id]


@pytest.mark.parametrize("close", [True, False], ids=["closed", "cancelled"])
def test_unfinished_requests_are_aborted(engine: TensorRTLLMEngine, close: bool) -> None:
    batch = [*(with_first_token(58, index) for index in range(90, 94)), *requests(2)]
    cancel: list[bool] = []
    running = engine.generate(batch, SamplingParameters(10), 0, lambda: bool(cancel))
    next(running)
    cancel.append(True)
    if close:
        getattr(running, "close")()  # noqa: B009
    else:
        with pytest.raises(Cancelled):
            list(running)
    assert [llm.is_running for llm in LLM.started] == [True]
    assert len(run(engine, requests(4))) == 4
    assert all(result.sent for result in LLM.started[0].executor.running)


def test_an_engine_that_does_not_abort_is_restarted(engine: TensorRTLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_llm, "ABORT_SECONDS", 0.05)
    LLM.started[0].executor.ignores_aborts = True
    running = engine.generate([with_first_token(58), *requests(1)], SamplingParameters(10), 0, lambda: False)
    next(running)
    getattr(running, "close")()  # noqa: B009
    assert not LLM.started[0].is_running
    assert len(run(engine, requests(4))) == 4


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (60, "RuntimeError: a worker process died"),
        (59, "RequestError: out of memory"),
        (57, "response to run/0/99/0: ended by timeout"),
    ],
)
def test_a_failed_request_is_an_error_and_the_engine_works_again(
    engine: TensorRTLLMEngine, token: int, message: str
) -> None:
    batch = [with_first_token(token), with_first_token(58, 98), *requests(2)]
    with pytest.raises(ServiceFailed, match=message):
        run(engine, batch)
    assert len(run(engine, requests(4))) == 4


@every_case(
    ("prompt", "limit", "message"),
    [
        ([3] * 60, 5, "positions for 64"),
        ([], 5, "at least one token"),
        ([3, tiny.VOCABULARY], 5, "vocabulary"),
        ([-1], 5, "vocabulary"),
        ([3], 0, "max_response_tokens"),
    ],
)
def test_an_invalid_request_is_refused_at_the_call(
    engine: TensorRTLLMEngine, prompt: list[int], limit: int, message: str
) -> None:
    batch = [GenerationRequest(TrajectoryId("r", 0, 0, 0), np.array(prompt, np.int32))]
    with pytest.raises(InvalidRequest, match=message):
        engine.generate(batch, SamplingParameters(limit), 0, lambda: False)


def test_the_limit_of_prompts_is_that_of_the_model(create: Create, subject: Policy, tmp_path: Path) -> None:
    weights = weight_set(subject, 0, tmp_path / "w")
    long = [GenerationRequest(TrajectoryId("r", 0, 0, 0), np.full(40, 3, np.int32))]
    for chunked in (False, True):
        engine = create(chunked_prefill=chunked)
        load(engine, weights)
        if not chunked:
            assert len(run(engine, long)) == 1
        arguments = LLM.started[0].args
        assert (arguments.max_input_len, arguments.max_seq_len) == (64, 64)
        assert (arguments.max_num_tokens >= 64) == (not chunked)
    # A model without a limit keeps the defaults of TensorRT-LLM, which refuses the request.
    unlimited = create(longest=0)
    load(unlimited, weights)
    with pytest.raises(InvalidRequest, match=r"request r/0/0/0: The prompt length \(40\)"):
        run(unlimited, [*requests(2), *long])
    assert len(run(unlimited, requests(2))) == 2


def test_sleep_shuts_down_only_if_the_memory_is_needed(create: Create, subject: Policy, tmp_path: Path) -> None:
    for releases in (False, True):
        engine = create(release_memory=releases)
        load(engine, weight_set(subject, 0, tmp_path / "w"))
        engine.sleep()
        assert LLM.started[0].is_running == (not releases)
        batch = requests(4)
        assert tokens(run(engine, batch, temperature=0.0)) == [greedy(subject, request) for request in batch]
        assert len(LLM.started) == 1 + releases


def test_a_start_in_a_generation_counts_as_progress(
    create: Create, subject: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_llm, "POLL_SECONDS", 0.001)
    engine = create(release_memory=True)
    load(engine, weight_set(subject, 0, tmp_path / "w"))
    engine.sleep()
    polled = threading.Event()
    start = engine._start

    def slow_start() -> None:
        polled.clear()
        assert polled.wait(LIMIT)
        start()

    monkeypatch.setattr(engine, "_start", slow_start)
    assert len(list(engine.generate(requests(2), SamplingParameters(4), 0, lambda: polled.set() or False))) == 2


def test_close_shuts_down_and_deletes_the_weights(engine: TensorRTLLMEngine, tmp_path: Path) -> None:
    assert list(tmp_path.glob("quartet-*"))
    engine.close()
    assert not list(tmp_path.glob("quartet-*"))
    assert not LLM.started[0].is_running


def test_an_engine_that_does_not_start_is_an_error(
    create: Create, subject: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, weights = create(), weight_set(subject, 0, tmp_path / "w")
    with pytest.raises(ServiceFailed, match="no weights are loaded"):
        engine.generate(requests(1), SamplingParameters(1), 0, lambda: False)
    for error, kind, message in (
        (RuntimeError("CUDA error"), ServiceFailed, "does not start: RuntimeError: CUDA error"),
        (ValueError("dtype"), ConfigError, "refuses the settings: dtype"),
    ):

        def fail(error: Exception = error, **_: Any) -> None:
            raise error

        monkeypatch.setattr(sys.modules["tensorrt_llm"], "LLM", fail)
        with pytest.raises(kind, match=message):
            engine.load_weights(weights, set(weights.tensors))


def test_settings_reach_the_engine(
    checkpoint: Path, subject: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_tensorrt_llm.install(monkeypatch)
    rollout = {
        "engine": "tensorrt-llm",
        "generators": 1,
        "max_concurrent_sequences": 7,
        "tensorrt_llm": {"memory_fraction": 0.3, "tensor_parallel_size": 2, "cuda_graphs": False},
    }
    config = parse_config(
        {
            "actor": {"model": str(checkpoint)},
            "reward": {"model": str(checkpoint)},
            "data": {"prompts": "p"},
            "rollout": rollout,
        },
        "test",
    )
    create = find_engine("tensorrt-llm").create
    assert create is not None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2: CUDA_VISIBLE_DEVICES '3' shows 1 GPUs"):
        create(config)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    engine: Any = create(config)[0]
    load(engine, weight_set(subject, 0, tmp_path / "w"))
    arguments = LLM.started[0].args
    assert (arguments.max_batch_size, arguments.tensor_parallel_size, arguments.cuda_graph_config) == (7, 2, None)
    assert arguments.kv_cache_config.free_gpu_memory_fraction == 0.3
    assert (arguments.dtype, arguments.lora_config.max_lora_rank if arguments.lora_config else 0) == ("float32", 2)
    engine.close()


def test_a_missing_package_is_reported_with_the_image_that_has_it(checkpoint: Path) -> None:
    if importlib.util.find_spec("tensorrt_llm") is not None:
        pytest.skip("the package is here")
    served = ServedModel(str(checkpoint), "float32", frozenset({EOS}), tiny.VOCABULARY, 64)
    with pytest.raises(ConfigError, match=r"the image of docker/Dockerfile\.generator"):
        TensorRTLLMEngine(TensorRTLLMSettings(32), served)


def test_the_config_file_can_be_read_by_older_transformers() -> None:
    modern: dict[str, Any] = {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    result = readable_by_older_versions(modern, "float16")
    assert (result["torch_dtype"], result["rope_theta"], result["rope_scaling"]) == ("float16", 5e5, None)
    scaled = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}
    assert readable_by_older_versions(scaled, "float32")["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    older = {"rope_theta": 3e4, "rope_scaling": None, "torch_dtype": "float32"}
    assert json.loads(json.dumps(readable_by_older_versions(older, "float32"))) == {**older, "dtype": "float32"}


def test_the_engine_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, quartet.contrib.tensorrt_llm.engine; "
        "sys.exit(', '.join({'torch', 'transformers', 'tensorrt_llm'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr.strip() == ""
    )
