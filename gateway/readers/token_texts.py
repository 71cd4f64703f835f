"""Texts of tokens, by the tokenizer that is stored with a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger()


def load_tokenizer(path: Path) -> Any | None:
    """Return the tokenizer of a ``tokenizer.json``, or None if it cannot be loaded."""
    try:
        from tokenizers import Tokenizer  # Not part of the base install.

        return Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises no more specific exception.
        log.warning("tokenizer not loaded: tokens are shown as ids", path=str(path), error=str(error))
        return None


def token_texts(tokenizer: Any | None, ids: list[int]) -> list[str]:
    """Return the text that each token adds, including special tokens. The texts concatenate to the whole text.

    A character that spans several tokens belongs to the last of them. Without a tokenizer, or if it does not know an id, the
    texts are the ids in brackets.
    """
    if tokenizer is None or any(tokenizer.id_to_token(number) is None for number in ids):
        return [f"⟨{number}⟩" for number in ids]
    if not ids:
        return []
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    texts = [stream.step(tokenizer, number) or "" for number in ids]
    whole, streamed = tokenizer.decode(ids, skip_special_tokens=False), "".join(texts)
    if whole.startswith(streamed):
        # The last tokens may end in an incomplete character, which the stream holds back.
        texts[-1] += whole[len(streamed) :]
    return texts
