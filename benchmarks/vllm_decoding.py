"""Generated tokens per second of vLLM on random prompts, for the table of `python -m benchmarks gpu`.

python -m benchmarks.vllm_decoding MODEL PROMPTS PROMPT_TOKENS TOKENS FOLDER needs an environment with vLLM. Each response has
TOKENS tokens. A first round warms up; the best of three counts. FOLDER/results.json gets the rate by the number of prompts.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path


def main(model: str, prompts: str, prompt_tokens: str, tokens: str, folder: str) -> None:
    """Measure and write the result."""
    import vllm

    count, length, limit = int(prompts), int(prompt_tokens), int(tokens)
    engine = vllm.LLM(model=model, dtype="bfloat16", max_model_len=length + limit, enable_prefix_caching=False)
    sampling = vllm.SamplingParams(temperature=1.0, max_tokens=limit, ignore_eos=True)
    generator = random.Random(0)
    ids = [{"prompt_token_ids": [generator.randrange(3, 1000) for _ in range(length)]} for _ in range(count)]
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        engine.generate(ids, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    Path(folder).mkdir(parents=True, exist_ok=True)
    report = {"rates": {str(count): count * limit / min(seconds[1:])}}
    (Path(folder) / "results.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
