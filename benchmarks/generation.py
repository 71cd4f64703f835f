"""Generation: the torch engine beside transformers' own ways, on the same prompts, until each response's natural end.

`make generation`, or python -m benchmarks.generation. Real tokens a second, those up to a response's end, with one thread. The
contenders run in turn, several times. The floor is what reading the weights once a token costs, and the cache as it grows: no
engine is faster on this memory. Writes the results below build/, the table into docs/performance.md. Where the config has the
actor on a GPU (configs/gpu) that is what is measured, and the table is only printed.
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
from quartet.config import load_config
from quartet.data import PromptEncoder, encode_prompts, iterate_prompt_lines
from quartet.errors import QuartetError
from quartet.models.forward.model_capabilities import vocabulary_size
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.weights.loading import load_causal_lm, load_tokenizer, stop_token_ids
from quartet.types import GenerationRequest, SamplingParameters, TrajectoryId

COUNTS = (1, 8, 64, 256)
"""Prompts at once, if nothing else is asked for."""
CONTENDERS = ("quartet", "generate()", "continuous batching")
"""The last two are transformers'. Its continuous batching has a manager that stays, as for a run of many steps."""
CALLS = 128
"""Responses of a round, at least: a single one is over too soon to be measured."""


@dataclass
class Result:
    """Of one number of prompts: real tokens a second, a figure a round."""

    prompts: int
    rates: dict[str, list[float]] = field(default_factory=dict)
    floor: float = 0.0

    def ratios(self, other: str) -> list[float]:
        """Quartet's rate over the other's, round by round."""
        return [ours / theirs for ours, theirs in zip(self.rates["quartet"], self.rates[other], strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("generation", __doc__)
    parser.add_argument(
        "--config", type=Path, default=Path("configs/reviews/ppo.yaml"), help="whose policy and prompts"
    )
    parser.add_argument("--prompts", action="append", type=positive, help="at once; may be repeated")
    parser.add_argument("--tokens", type=positive, default=48, help="longest response")
    add_shared(parser, "build/generation", rounds=5, threads=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    counts = options.prompts or COUNTS
    try:
        config = load_config(options.config, [])
        device = machine.device_of(config, options.config)
        where = machine.describe(device)
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
        result.floor = floor(model, prompts[: result.prompts], options.tokens, bandwidth)
    options.folder.mkdir(parents=True, exist_ok=True)
    report = {"machine": where, "bandwidth": bandwidth, "results": [asdict(result) for result in results]}
    (options.folder / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    text = table(results, options.tokens, options.threads, bandwidth, where)
    print(text)
    if device == "cpu":
        page.write(page_of(parser, options), "generation", text)
    return 0


def read_prompts(path: Path, tokenizer: Any, model: Any, stops: frozenset[int], count: int) -> list[Any]:
    """The token ids of the first ``count`` prompts of a file. Raises DataError."""
    encoder = PromptEncoder.of(tokenizer, str(path))
    lines = iterate_prompt_lines(path)
    result = encode_prompts(path, lines, encoder, stops, vocabulary_size(model), 512, limit=count).prompts
    return [prompt.token_ids for prompt in result]


def memory_bandwidth(device: str = "cpu") -> float:
    """Bytes a second that one thread, all, or a GPU read from memory, the best of a few passes: 256 MiB, 4 GiB of a GPU's."""
    data = torch.ones((64 if device == "cpu" else 1024) * 2**20, device=device)
    seconds = []
    for _ in range(5):
        machine.synchronize(device)
        start = time.perf_counter()
        data.sum()
        machine.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return data.numel() * data.element_size() / min(seconds)


def floor(model: Any, prompts: Sequence[Any], tokens: int, bandwidth: float) -> float:
    """Tokens a second if nothing but reading took time: the weights at every token, and each row's keys and values so far."""
    config = model.config.get_text_config()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * size * next(model.parameters()).element_size()
    length = float(np.mean([len(prompt) for prompt in prompts])) + tokens / 2
    return len(prompts) * bandwidth / (weights + len(prompts) * length * per_token)


def measure(model: Any, stops: frozenset[int], prompts: Sequence[Any], tokens: int, rounds: int) -> Result:
    """Each contender in turn, after one round that is not counted."""
    paged, engine = copy.deepcopy(model), TorchEngine(model, stops, max_concurrent_sequences=256)
    ways: dict[str, Callable[[int], int]] = {
        "quartet": lambda seed: _quartet(engine, prompts, tokens, seed),
        "generate()": lambda seed: _generate(model, stops, prompts, tokens, seed),
        "continuous batching": lambda seed: _continuous(paged, stops, prompts, tokens, seed),
    }
    result = Result(len(prompts), {name: [] for name in CONTENDERS})
    calls = max(1, CALLS // len(prompts))
    for number in range(rounds + 1):
        for name in CONTENDERS:
            start = time.perf_counter()
            made = sum(ways[name](number * calls + call) for call in range(calls if name in CONTENDERS[:2] else 1))
            if number:
                result.rates[name].append(made / (time.perf_counter() - start))
    paged.destroy_cached_continuous_batching_manager()
    return result


def _quartet(engine: TorchEngine, prompts: Sequence[Any], tokens: int, seed: int) -> int:
    asked = [GenerationRequest(TrajectoryId("r", 1, index, 0), ids) for index, ids in enumerate(prompts)]
    return sum(len(result.response_ids) for result in engine.generate(asked, SamplingParameters(tokens), seed, 0))


def _sampling(model: Any, stops: frozenset[int], tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=tokens,
        eos_token_id=sorted(stops),
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
    made = model.generate(ids, attention_mask=mask, generation_config=_sampling(model, stops, tokens))[:, longest:]
    return _real(made, stops)


def _real(made: torch.Tensor, stops: frozenset[int]) -> int:
    """Tokens up to each row's first stop."""
    stopped = torch.isin(made, torch.tensor(sorted(stops), device=made.device))
    before = stopped.long().cumsum(1) - stopped.long()
    return int((before == 0).sum())


def _continuous(model: Any, stops: frozenset[int], prompts: Sequence[Any], tokens: int, seed: int) -> int:
    torch.manual_seed(seed)
    asked = [prompt.tolist() for prompt in prompts]
    made = model.generate_batch(asked, _sampling(model, stops, tokens), progress_bar=False, persistent_manager=True)
    return sum(len(output.generated_tokens) for output in made.values())


def table(results: Sequence[Result], tokens: int, threads: int, bandwidth: float, where: str) -> str:
    """Return what the page says: medians over the rounds."""
    lines = [
        f"{where}. At most {tokens} tokens, natural ends, {threads} CPU threads, {bandwidth / 1e9:.1f} GB/s of memory; real "
        "tokens a second, medians, and of the ratios the least and the most.",
        "",
        f"| prompts | {' | '.join(CONTENDERS)} | {' | '.join(f'times {name}' for name in CONTENDERS[1:])} | of the floor |",
        "|" + "---|" * (2 * len(CONTENDERS) + 1),
    ]
    for result in results:
        rates = {name: statistics.median(rates) for name, rates in result.rates.items()}
        times = [
            f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"
            for ratios in (result.ratios(name) for name in CONTENDERS[1:])
        ]
        cells = [f"{rates[name]:.0f}" for name in CONTENDERS]
        lines.append(
            f"| {result.prompts} | {' | '.join(cells)} | {' | '.join(times)} | {100 * rates['quartet'] / result.floor:.1f} % |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
