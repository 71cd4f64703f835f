"""Process that tokenizes prompts for a check before a run, so that the checking process does not import transformers.

``python -m quartet.preflight.prompt_worker REQUEST DESCRIPTOR`` writes one JSON object per line to the descriptor:
``progress``, then ``results``, ``missing`` or ``error``. It does not import torch, which takes seconds and which few
tokenizers need.
"""

from __future__ import annotations

import quartet.system.sys_path  # noqa: F401 - first, so that files in the working directory cannot shadow libraries

# isort: split
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from quartet.data.prompt_cache import load_prompts
from quartet.data.prompt_encoding import PromptEncoder, summarize_prompts
from quartet.data.prompt_settings import PromptSettings
from quartet.errors import ConfigError, DataError, ModelError

WITH_TORCH = "with torch"
"""Third argument of a process that imports torch, because the tokenizer cannot be loaded without it."""


def _main(request: str, descriptor: str, *options: str) -> None:
    if not options:
        sys.modules["torch"] = None  # type: ignore[assignment]
    answers = int(descriptor)

    def answer(**message: Any) -> None:
        os.write(answers, (json.dumps(message) + "\n").encode())

    try:
        results = _results(json.loads(request), lambda line: answer(progress=line))
    except (DataError, ModelError) as error:
        if isinstance(error, ModelError) and not options:
            os.set_inheritable(answers, True)
            command = [sys.executable, "-P", "-m", "quartet.preflight.prompt_worker", request, descriptor, WITH_TORCH]
            os.execv(sys.executable, command)
        answer(error=str(error), kind=type(error).__name__)
    except ConfigError as error:
        answer(error=str(error), kind="ConfigError")
    except ModuleNotFoundError as error:
        answer(missing=error.name or "", error=str(error))
    except Exception as error:
        answer(error=f"the prompts cannot be tokenized: {error} ({type(error).__name__})", kind="ServiceFailed")
    else:
        answer(results=results)


def _results(request: dict[str, Any], report: Callable[[str], None]) -> list[dict[str, Any]]:
    from quartet.models.weights.tokenizer import load_tokenizer

    results = []
    for item in request["files"]:
        settings = PromptSettings.from_json(item)

        def make_encoder(model: str = settings.model) -> tuple[PromptEncoder, frozenset[int]]:
            tokenizer = load_tokenizer(model)
            return PromptEncoder.of(tokenizer, model), frozenset({tokenizer.eos_token_id} - {None})

        encoded = load_prompts(settings, make_encoder, report)
        results.append(asdict(summarize_prompts(encoded, settings, request["vocabulary_size"])))
    return results


if __name__ == "__main__":
    _main(*sys.argv[1:])
