"""Reward function: a public reward model with another tokenizer than the policy's.

    reward:
      source: function
      function: "examples.dialogue.public_reward:score"
      arguments: {model: OWNER/NAME, device: "cuda:0", dtype: bfloat16}

``reward.model`` gets the policy's token ids, so it needs the policy's tokenizer. This function gets text. It writes the messages
of the prompt's line and the response by the reward model's chat template, and tokenizes them with that model's tokenizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class TooLong(Exception):
    """A conversation that exceeds ``max_tokens``. Its response is replaced, and its text is in no message."""

    outcome = "refused"
    quotes_texts = False


def score(
    prompt: str,
    response: str,
    fields: dict[str, Any],
    model: str,
    device: str = "cpu",
    dtype: str = "float32",
    max_tokens: int = 8192,
) -> float:
    """Return the score of the conversation. One at a time, so it does not depend on the other responses of a batch.

    Raises TooLong, and KeyError if the prompt's line has neither ``prompt`` nor ``messages``.
    """
    messages = fields["messages"] if "messages" in fields else fields["prompt"]
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return _scorer(model, device, dtype)([*messages, {"role": "assistant", "content": response}], max_tokens)


@functools.cache
def _scorer(model: str, device: str, dtype: str) -> Callable[[list[dict[str, str]], int], float]:
    """Load a reward model, and return the function that scores a conversation. Raises ModelError."""
    # Imported here because a check of the config imports this module.
    import torch

    from quartet.models.weights.loading import load_reward_model
    from quartet.models.weights.tokenizer import load_tokenizer

    classifier, tokenizer = load_reward_model(model, dtype, device), load_tokenizer(model)

    def scored(messages: list[dict[str, str]], max_tokens: int) -> float:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) > max_tokens:
            raise TooLong(f"the conversation has {len(ids)} tokens, expected at most {max_tokens}")
        with torch.inference_mode():
            return float(classifier(input_ids=torch.tensor([ids], device=device)).logits[0, 0])

    return scored
