"""Seconds of a weight update of vLLM: from the actor's memory into vLLM's processes, and with all digests read back.

python -m benchmarks.vllm_updates [--layers N] [--rounds N] [--ranks N] needs an environment with vLLM (`make engines` installs
one for CPUs: build/vllm-venv/bin/python). A second process is the actor. Its bfloat16 weights have the shapes of Qwen2.5-0.5B,
and every element changes from version to version. Prints medians as JSON: ``load`` until vLLM has the weights, with its CPU
seconds, and ``update`` from the pull until they are read back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import machine
from benchmarks.options import positive
from benchmarks.weights import HIDDEN, INTERMEDIATE, LAYERS, RUN, TIMEOUT, VOCABULARY, Remote
from quartet.contract.status import Role
from quartet.engines.engine import ServedModel
from quartet.engines.vllm import VLLMEngine, VLLMSettings
from quartet.engines.vllm_weights import VLLMWeights
from quartet.rpc.clients import WeightClient
from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.tensors import HostTensor, combined_digest

DISTANCE = 1e-3
"""Distance that an update moves each weight: large enough to change every element."""
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


class TimedWeights(VLLMWeights):
    """Weights that measure the seconds of the last load, without those of reading back."""

    seconds = cpu_seconds = 0.0

    def _load(self, tensors: Mapping[str, HostTensor]) -> None:
        start, cpu = time.perf_counter(), _cpu_seconds()
        super()._load(tensors)
        self.seconds, self.cpu_seconds = time.perf_counter() - start, _cpu_seconds() - cpu


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those below it: the actor is idle during a load."""
    import psutil

    this = psutil.Process()
    times = (process.cpu_times() for process in (this, *this.children(recursive=True)))
    return float(sum(each.user + each.system for each in times))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_updates", description=__doc__)
    parser.add_argument("--layers", type=positive, default=LAYERS)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--ranks", type=positive, default=1, help="tensor_parallel_size")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = {**CONFIG, "num_hidden_layers": options.layers}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        settings = VLLMSettings(
            max_concurrent_sequences=4,
            tensor_parallel_size=options.ranks,
            enforce_eager=True,
            engine_arguments={"kv_cache_memory_bytes": 256 << 20},
        )
        engine = VLLMEngine(settings, ServedModel(str(folder), "bfloat16", frozenset({1}), VOCABULARY, 256))
        stack.callback(engine.close)
        engine._weights = weights = TimedWeights(engine._process, str(folder), engine._folder)
        actor = Remote(stack)
        client = WeightClient(Role.ACTOR, actor.first[0])
        mirror = WeightMirror()
        stack.callback(mirror.close)
        published = actor.call("start", "BF16", options.layers, 0)
        seconds: dict[str, list[float]] = {"publish": [], "pull": [], "load": [], "load_cpu": [], "update": []}
        for number in range(options.rounds + 1):
            start = time.perf_counter()
            pulled = mirror.pull([client], RUN, published["version"], bytes.fromhex(published["digest"]), TIMEOUT)
            middle = time.perf_counter()
            held = engine.load_weights(pulled.weight_set, pulled.changed)
            update = time.perf_counter() - start
            assert combined_digest(held) == pulled.weight_set.digest
            mirror.release()
            times = published["seconds"], middle - start, weights.seconds, weights.cpu_seconds, update
            print(number, pulled.way, *(f"{value:.3f}" for value in times), file=sys.stderr, flush=True)
            if number:  # The first starts vLLM.
                for name, value in zip(seconds, times, strict=True):
                    seconds[name].append(value)
            published = actor.call("step", number + 1, DISTANCE)
        medians = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
        report = {"machine": machine.describe(), "bytes": published["total_bytes"], "way": pulled.way, **medians}
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
