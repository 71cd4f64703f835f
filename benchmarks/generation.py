"""Generated tokens per second of the torch engine and of transformers, on the same prompts.

Counts the tokens up to the end of each response, with one thread. The engines run alternately, several times. The memory limit
is the rate at which memory delivers the weights once per token, and the key-value cache as it grows; no engine can be faster.
Writes the results below build/ and the table into docs/evidence/performance.md. If the config puts the actor on a GPU
(configs/gpu), measures that GPU and only prints the table.

With --types, measures tiny random models of these types (by default, of TYPES) beside generate() with prompts of 4 to 28 random
tokens: what the engines do between the matmuls takes nearly all of the time.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine, page
from benchmarks.options import add_shared, page_of, parser_of, positive
from quartet.config.loading import load_config
from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import TrajectoryId
from quartet.data.prompt_encoding import PromptEncoder, encode_prompts
from quartet.data.prompt_lines import iterate_prompt_lines
from quartet.data.prompt_settings import PromptSettings
from quartet.errors import QuartetError
from quartet.models.forward.model_capabilities import vocabulary_size
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.weights.loading import load_causal_lm, stop_token_ids
from quartet.models.weights.tokenizer import load_tokenizer
from tests.architectures import models

COUNTS = (1, 8, 64, 256)
"""Numbers of concurrent prompts, by default."""
CONTENDERS = ("quartet", "generate()", "continuous batching")
"""The last two belong to transformers. Its continuous-batching manager is persistent, as in a run of many steps."""
TYPES = (
    *("llama", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "falcon_h1", "nemotron_h"),
    *("granitemoehybrid", "bamba", "jamba", "zamba2", "mamba", "mamba2", "falcon_mamba", "olmo_hybrid", "kimi_linear"),
    *("deepseek_v32", "glm_moe_dsa", "gemma3n_text", "recurrent_gemma", "minimax", "deepseek_v4"),
)
"""Model types of today, and one with attention only."""
CALLS = 128
"""Minimum number of responses per round, because a single one is too short to measure."""


@dataclass
class Result:
    """Tokens per second for one number of prompts, with an item per round, and the limit by memory bandwidth."""

    prompts: int
    rates: dict[str, list[float]] = field(default_factory=dict)
    memory_limit: float = 0.0

    def ratios(self, other: str) -> list[float]:
        """Return Quartet's rate over that of ``other``, for each round."""
        return [ours / theirs for ours, theirs in zip(self.rates["quartet"], self.rates[other], strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("generation", __doc__)
    parser.add_argument(
        "--config", type=Path, default=Path("configs/reviews/ppo.yaml"), help="config with the policy and prompts"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting, for example actor.model=build/gpu/qwen3-8b/policy",
    )
    parser.add_argument("--prompts", action="append", type=positive, help="concurrent prompts; may be repeated")
    parser.add_argument("--tokens", type=positive, default=48, help="maximum length of a response")
    parser.add_argument("--types", nargs="*", metavar="TYPE", help="model types, instead of a config")
    add_shared(parser, "build/generation", rounds=5, threads=True)
    options = parser.parse_args(arguments)
    if options.types is not None:
        machine.set_up("cpu", options.threads)
        text = table_of_types(options.types or TYPES, options.rounds, options.threads)
        print(text)
        # All types are the default of this table.
        options.types = options.types or None
        page.write(page_of(parser, options), "generation --types", text)
        return 0
    counts = options.prompts or COUNTS
    try:
        config = load_config(options.config, options.set)
        device = machine.device_of(config, options.config)
        machine.set_up(device, options.threads)
        host = machine.describe(device)
        model = load_causal_lm(config.actor.model, config.actor.dtype, device)
        tokenizer = load_tokenizer(config.actor.model)
        stops = stop_token_ids(model, tokenizer)
        prompts = read_prompts(Path(config.data.prompts), tokenizer, model, stops, max(counts))
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bandwidth = memory_bandwidth(device)
    results = [measure(model, stops, prompts[:count], options.tokens, options.rounds) for count in counts]
    for result in results:
        result.memory_limit = memory_limit(model, prompts[: result.prompts], options.tokens, bandwidth)
    options.folder.mkdir(parents=True, exist_ok=True)
    report = {"machine": host, "bandwidth": bandwidth, "results": [asdict(result) for result in results]}
    (options.folder / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    text = table(results, options.tokens, options.threads, bandwidth, host)
    print(text)
    if device == "cpu":
        page.write(page_of(parser, options), "generation", text)
    return 0


def read_prompts(path: Path, tokenizer: Any, model: Any, stops: frozenset[int], count: int) -> list[Any]:
    """Return the token ids of the first ``count`` prompts of a file. Raises DataError if the file is invalid."""
    encoder = PromptEncoder.of(tokenizer, str(path))
    lines = iterate_prompt_lines(path)
    settings = PromptSettings(path, str(path), max_prompt_tokens=512, limit=count)
    result = encode_prompts(settings, lines, encoder, stops, vocabulary_size(model)).prompts
    return [prompt.token_ids for prompt in result]


def memory_bandwidth(device: str = "cpu") -> float:
    """Return the bytes per second read from memory, the best of a few passes over 256 MiB, or 4 GiB on a GPU."""
    data = torch.ones((64 if device == "cpu" else 1024) * 2**20, device=device)
    seconds = []
    for _ in range(5):
        machine.synchronize(device)
        start = time.perf_counter()
        data.sum()
        machine.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return data.numel() * data.element_size() / min(seconds)


def memory_limit(model: Any, prompts: Sequence[Any], tokens: int, bandwidth: float) -> float:
    """Return the tokens per second if only reading took time: the weights and all keys and values, once per token."""
    config = model.config.get_text_config()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * size * next(model.parameters()).element_size()
    length = float(np.mean([len(prompt) for prompt in prompts])) + tokens / 2
    return len(prompts) * bandwidth / (weights + len(prompts) * length * per_token)


def table_of_types(kinds: Sequence[str], rounds: int, threads: int) -> str:
    """Return the table of Quartet's rate over that of generate() for tiny models of each type."""
    counts, tokens = (1, 8, 64), 32
    lines = [
        f"{machine.describe('cpu')}. {tokens} tokens per response, CPU threads: {threads}. Tokens per second of Quartet over "
        "those of `generate()`, medians with their range.",
        "",
        f"| model type | decoding | {' | '.join(f'{count} prompt' + 's' * (count > 1) for count in counts)} |",
        "|" + "---|" * (len(counts) + 2),
    ]
    generator = np.random.default_rng(0)
    for kind in kinds:
        model = models.causal_lm(kind)
        size = vocabulary_size(model)
        prompts = [generator.integers(2, size, length).astype(np.int32) for length in generator.integers(4, 29, 64)]
        engine = TorchEngine(model, frozenset(), max_concurrent_sequences=64)
        cells = []
        for count in counts:
            result = measure(model, frozenset(), prompts[:count], tokens, rounds, CONTENDERS[:2], engine, 16)
            ratios = result.ratios("generate()")
            cells.append(f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})")
        lines.append(f"| `{kind}` | {engine.decoding} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measure(
    model: Any,
    stops: frozenset[int],
    prompts: Sequence[Any],
    tokens: int,
    rounds: int,
    contenders: Sequence[str] = CONTENDERS,
    engine: TorchEngine | None = None,
    least: int = CALLS,
) -> Result:
    """Measure all contenders alternately, after a warm-up round. ``least``: responses per round."""
    paged = copy.deepcopy(model) if CONTENDERS[2] in contenders else None
    engine = engine or TorchEngine(model, stops, max_concurrent_sequences=256)
    generate: dict[str, Callable[[int], int]] = {
        "quartet": lambda seed: _quartet(engine, prompts, tokens, seed),
        "generate()": lambda seed: _generate(model, stops, prompts, tokens, seed),
        "continuous batching": lambda seed: _continuous(paged, stops, prompts, tokens, seed),
    }
    result = Result(len(prompts), {name: [] for name in contenders})
    calls = max(1, least // len(prompts))
    for number in range(rounds + 1):
        for name in contenders:
            start = time.perf_counter()
            tokens_made = sum(
                generate[name](number * calls + call) for call in range(calls if name in CONTENDERS[:2] else 1)
            )
            if number:
                result.rates[name].append(tokens_made / (time.perf_counter() - start))
    if paged is not None:
        paged.destroy_cached_continuous_batching_manager()
    return result


def _quartet(engine: TorchEngine, prompts: Sequence[Any], tokens: int, seed: int) -> int:
    requests = [GenerationRequest(TrajectoryId("r", 1, index, 0), ids) for index, ids in enumerate(prompts)]
    return sum(len(result.response_ids) for result in engine.trajectories(requests, SamplingParameters(tokens), seed))


def _sampling(model: Any, stops: frozenset[int], tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=tokens,
        eos_token_id=sorted(stops) or None,
        pad_token_id=model.config.pad_token_id or 0,
    )


@torch.inference_mode()
def _generate(model: Any, stops: frozenset[int], prompts: Sequence[Any], tokens: int, seed: int) -> int:
    torch.manual_seed(seed)
    longest = max(map(len, prompts))
    ids, mask = (torch.zeros((len(prompts), longest), dtype=torch.int64, device=model.device) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, longest - len(prompt) :] = 1
    generated = model.generate(ids, attention_mask=mask, generation_config=_sampling(model, stops, tokens))[:, longest:]
    return _count_tokens(generated, stops)


def _count_tokens(generated: torch.Tensor, stops: frozenset[int]) -> int:
    """Return the number of tokens up to the first stop token of each row."""
    stopped = torch.isin(generated, torch.tensor(sorted(stops), device=generated.device))
    before = stopped.long().cumsum(1) - stopped.long()
    return int((before == 0).sum())


def _continuous(model: Any, stops: frozenset[int], prompts: Sequence[Any], tokens: int, seed: int) -> int:
    torch.manual_seed(seed)
    ids = [prompt.tolist() for prompt in prompts]
    outputs = model.generate_batch(ids, _sampling(model, stops, tokens), progress_bar=False, persistent_manager=True)
    return sum(len(output.generated_tokens) for output in outputs.values())


def table(results: Sequence[Result], tokens: int, threads: int, bandwidth: float, host: str) -> str:
    """Return the table for the page: medians over the rounds."""
    lines = [
        f"{host}. At most {tokens} tokens per response, CPU threads: {threads}, memory bandwidth: {bandwidth / 1e9:.1f} GB/s. "
        "Medians of tokens per second; speedups of Quartet also have their range.",
        "",
        f"| prompts | {' | '.join(CONTENDERS)} | {' | '.join(f'over {name}' for name in CONTENDERS[1:])} | of the memory limit |",
        "|" + "---|" * (2 * len(CONTENDERS) + 1),
    ]
    for result in results:
        rates = {name: statistics.median(rates) for name, rates in result.rates.items()}
        speedups = [
            f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"
            for ratios in (result.ratios(name) for name in CONTENDERS[1:])
        ]
        cells = [f"{rates[name]:.0f}" for name in CONTENDERS]
        share = 100 * rates["quartet"] / result.memory_limit
        lines.append(f"| {result.prompts} | {' | '.join(cells)} | {' | '.join(speedups)} | {share:.1f} % |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
