"""Token ids as texts, by the tokenizer that a run keeps: each token's own share of the whole text."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import structlog

from quartet.gateway.runs.catalog import Signature, signature

log = structlog.get_logger()

KEPT = 8
"""Tokenizers that are kept."""


class Tokenizers:
    """The tokenizers of runs that were asked for lately. Safe to use from several threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, tuple[Signature, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, folder: Path) -> Any | None:
        """The tokenizer of a run's ``tokenizer/``; None where it keeps none that can be used, and the log says so."""
        path = folder / "tokenizer.json"
        try:
            seen = signature(path)
        except OSError:
            return None
        with self._lock:
            known = self._kept.get(path)
            if known is not None and known[0] == seen:
                return known[1]
        try:
            from tokenizers import Tokenizer  # The base install does not have it.

            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises nothing more precise.
            log.warning("tokenizer cannot be used: tokens are shown as numbers", path=str(path), error=str(error))
            tokenizer = None
        with self._lock:
            self._kept[path] = (seen, tokenizer)
            self._kept.move_to_end(path)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return tokenizer


def token_texts(tokenizer: Any | None, ids: list[int]) -> list[str]:
    """What each token adds to the text, special ones too: joined, they are the whole text.

    A character of several tokens belongs to the last of them. Without a tokenizer, or one that does not know an id, the ids
    in brackets.
    """
    if tokenizer is None or any(tokenizer.id_to_token(number) is None for number in ids):
        return [f"⟨{number}⟩" for number in ids]
    if not ids:
        return []
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    texts = [stream.step(tokenizer, number) or "" for number in ids]
    whole, shown = tokenizer.decode(ids, skip_special_tokens=False), "".join(texts)
    if whole.startswith(shown):
        # A character that the last tokens begin and do not end.
        texts[-1] += whole[len(shown) :]
    return texts
