"""Process that compares what checkpoints say with what they hold, so that the checking process does not import torch.

``python -m quartet.preflight.checkpoint_worker REQUEST DESCRIPTOR`` writes one JSON object to the descriptor for each model
of the request, which is a list of roles and directories. It builds the models without memory for weights, and reads the
headers of the files.
"""

from __future__ import annotations

import quartet.system.sys_path  # noqa: F401 - first, so that files in the working directory cannot shadow libraries

# isort: split
import gc
import json
import os
import sys
from typing import Any

import structlog

from quartet.contract.status import Role
from quartet.errors import ModelError


def _main(request: str, descriptor: str) -> None:
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as answers:
        for role, model in json.loads(request):
            try:
                answer = _described(Role(role), model)
            except ModuleNotFoundError as error:
                answer = {"missing": error.name or str(error)}
            except ModelError as error:
                answer = {"error": str(error)}
            except Exception as error:
                answer = {"error": f"model {model}: cannot be checked: {error} ({type(error).__name__})"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _described(role: Role, model: str) -> dict[str, Any]:
    """Return the size of a model's vocabulary, and notes. Raises ModelError."""
    from quartet.models.forward.model_capabilities import vocabulary_size
    from quartet.models.weights.loading import load_causal_lm, load_critic, load_reward_model

    load: Any = {Role.REWARD: load_reward_model, Role.CRITIC: load_critic}.get(role, load_causal_lm)
    with structlog.testing.capture_logs() as logs:
        loaded = load(model, device="meta")
    return {"vocabulary_size": vocabulary_size(loaded), "notes": [str(each["event"]) for each in logs]}


if __name__ == "__main__":
    gc.disable()  # The imports create only objects that stay: searches among them take a sixth of their time.
    _main(*sys.argv[1:])
