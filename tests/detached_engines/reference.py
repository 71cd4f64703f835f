"""Generation without cache and batching, with the transformers of this environment."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from quartet.contract.generation import GenerationRequest, Penalties

Arrays = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


class Reference:
    """A model of transformers with given weights, in float32."""

    def __init__(self, folder: Path, values: Arrays) -> None:
        import torch
        import transformers

        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_config(_config(folder)).eval()
        missing = self._model.load_state_dict({n: torch.from_numpy(v.copy()) for n, v in values.items()}, strict=False)
        assert not missing.unexpected_keys
        assert set(missing.missing_keys) <= {"lm_head.weight"}
        self._model.tie_weights()

    def greedy(
        self, request: GenerationRequest, limit: int, stop: int, penalties: Penalties | None = None
    ) -> list[int]:
        """Return the greedy response, with the stop token."""
        ids = request.prompt_ids.tolist()
        for _ in range(limit):
            with self._torch.no_grad():
                logits = self._model(input_ids=self._torch.tensor([ids])).logits[0, -1].numpy()
            response = ids[len(request.prompt_ids) :]
            if penalties is not None:
                for token in set(ids):
                    logits[token] *= 1 / penalties.repetition if logits[token] > 0 else penalties.repetition
                for token in set(response):
                    logits[token] -= penalties.presence + penalties.frequency * response.count(token)
            ids.append(int(logits.argmax()))
            if ids[-1] == stop:
                break
        return ids[len(request.prompt_ids) :]

    def log_probs(self, request: GenerationRequest, response: list[int], temperature: float) -> list[float]:
        """Return the log-probs of a response over the whole distribution at a temperature."""
        prompt = request.prompt_ids.tolist()
        ids = self._torch.tensor([prompt + response])
        with self._torch.no_grad():
            logits = self._model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
        rows = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])
        return [float(value) for value in rows.squeeze(1)]

    def continued(
        self, former: Reference, request: GenerationRequest, response: list[int], old: int
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return this model's log-probs, float32 [tokens after ``old``, vocabulary], on the key-value cache of a former model.

        The former model has computed all tokens before the last one of its part.
        """
        ids = self._torch.tensor([request.prompt_ids.tolist() + response])
        begin = len(request.prompt_ids) + old - 1
        with self._torch.no_grad():
            cache = former._model(input_ids=ids[:, :begin], use_cache=True).past_key_values
            logits = self._model(input_ids=ids[:, begin:-1], past_key_values=cache).logits[0]
        return logits.log_softmax(-1).numpy()


@lru_cache
def _config(folder: Path) -> Any:
    import transformers

    return transformers.AutoConfig.from_pretrained(folder)
