"""Stop strings: the token that completes one, whatever the tokenizer, and the cut of an engine's response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import FinishReason, TrajectoryId, VersionSpan
from quartet.engines.engine import EngineResponse, ServedModel
from quartet.engines.request_checks import check_response
from quartet.engines.stop_strings import StopStringCache, StopStrings, token_decoder
from quartet.errors import ComputationFailed, InvalidRequest

Decode = Any


def byte_level() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, as GPT-2 and Qwen have: every token is bytes, also parts of characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("S", "T"), ("O", "P"), ("Ċ", "Ċ"), (">", "x"), ("Ċ", "U")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    inner = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def metaspace() -> PreTrainedTokenizerFast:
    """Return a tokenizer with words and bytes, as Llama 2 has: its decoder drops the space at the start of a text."""
    words = ["<unk>", "▁a", "▁the", "▁END", "END", "▁", "E", "ND", "."]
    tokens = [*words, *(f"<0x{value:02X}>" for value in range(256))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def ids_of(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[str]) -> np.ndarray:
    vocabulary = tokenizer.get_vocab()
    return np.array([vocabulary[token] for token in tokens], np.int32)


def stops(tokenizer: PreTrainedTokenizerFast, *strings: str) -> StopStrings:
    return StopStrings(strings, token_decoder(tokenizer), len(tokenizer))


@pytest.mark.parametrize(
    ("tokens", "string", "end"),
    [
        (["a", "S", "T", "O", "P", "b"], "STOP", 5),
        (["a", "ST", "OP", "b"], "STOP", 3),  # split between tokens
        (["a", "ST", "O", "b"], "STOP", None),
        (["a", ">x", "b"], ">", 2),  # inside a token, whose rest stays in the response
        (["a", "ĊU", "b"], "\nU", 2),
        (["a", "Ċ", "Ċ", "b"], "\n\n", 3),
        (["ĊĊ"], "\n\n", 1),  # the first token
        (["a", "Ã", "©", "b"], "é", 3),  # a character of two tokens
        (["a", "Ã", "©", ">x"], "é>", 4),
        (["Ã", ">x", "b"], ">x", 2),  # after bytes that are no character
        (["a"] * 300 + ["ST", "OP"], "STOP", 302),
        (["Ġ", "Ġ", "S"], " ", 1),
    ],
)
def test_a_response_ends_after_the_token_that_completes_a_string(
    tokens: list[str], string: str, end: int | None
) -> None:
    tokenizer = byte_level()
    assert stops(tokenizer, string).end_of(ids_of(tokenizer, tokens)) == end
    assert stops(tokenizer, "never", string, "other").end_of(ids_of(tokenizer, tokens)) == end


@pytest.mark.parametrize(
    ("tokens", "string", "end"),
    [
        (["▁a", "▁END", "."], " END", 2),
        (["▁a", "▁", "E", "ND"], " END", 4),
        (["▁a", "▁", "."], " ", 2),
        (["▁a", "<0xC3>", "<0xA9>", "."], "é", 3),
        (["▁a", "<0x0A>", "<0x0A>"], "\n\n", 3),
        (["▁the"] * 100 + ["▁END"], "the END", 101),
        (["▁END"], " END", None),  # the text of a response begins without the space
        (["▁END"], "END", 1),
    ],
)
def test_spaces_and_bytes_of_sentencepiece_tokenizers_count(tokens: list[str], string: str, end: int | None) -> None:
    tokenizer = metaspace()
    assert stops(tokenizer, string).end_of(ids_of(tokenizer, tokens)) == end


def test_the_end_is_the_first_prefix_whose_whole_text_has_a_stop_string() -> None:
    """Random tokens, compared with the decoding of each whole prefix."""
    tokenizer, strings = byte_level(), ("ab", "\n\n", "é", ">xa")
    decode, random = token_decoder(tokenizer), np.random.default_rng(0)
    choices = ids_of(tokenizer, ["a", "b", "Ċ", "ĊĊ", "Ã", "©", ">x", "ST", "Ġ"])
    checked, ended = stops(tokenizer, *strings), 0
    for _ in range(200):
        ids = random.choice(choices, 25)
        prefixes = [decode(ids[:count]) for count in range(1, 26)]
        expected = next((count for count, text in enumerate(prefixes, 1) if any(s in text for s in strings)), None)
        assert checked.end_of(ids) == expected
        ended += expected is not None
    assert ended > 100


def test_text_is_decoded_only_after_tokens_that_can_complete_a_string() -> None:
    tokenizer, calls = byte_level(), list[int]()
    decode = token_decoder(tokenizer)

    def counted(token_ids: Any) -> str:
        calls.append(len(token_ids))
        return decode(token_ids)

    checked = StopStrings(("STOP",), counted, len(tokenizer))
    ids = ids_of(tokenizer, ["a", "b", "c"] * 100)
    assert checked.end_of(ids) is None
    assert calls == [2, 2, 2]  # each token once, to learn whether it can end one
    assert checked.end_of(ids) is None
    assert len(calls) == 3


def response(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[str], **fields: Any) -> EngineResponse:
    ids = ids_of(tokenizer, tokens).tolist()
    request = GenerationRequest(TrajectoryId("r", 1, 0, 0), np.array([1], np.int32))
    return EngineResponse(request, ids, [-0.5 - index for index in range(len(ids))], **fields)


def test_tokens_after_a_stop_string_are_dropped_with_their_log_probs_and_versions() -> None:
    tokenizer = byte_level()
    served = ServedModel("m", "float32", frozenset({0}), len(tokenizer), 0)
    sampling = SamplingParameters(8, stop_strings=("STOP",))
    spans = (VersionSpan(1, b"a" * 16, 2), VersionSpan(2, b"b" * 16, 4))
    given = response(tokenizer, ["a", "ST", "OP", "b", "c", "a"], spans=spans)
    result = check_response(given, served, sampling, 2, "engine", stops(tokenizer, "STOP"))
    assert result.response_ids.tolist() == ids_of(tokenizer, ["a", "ST", "OP"]).tolist()
    assert result.log_probs.tolist() == [-0.5, -1.5, -2.5]
    assert result.finish_reason is FinishReason.EOS
    whole = response(tokenizer, ["a", "b"], stopped=True)
    assert check_response(whole, served, sampling, 2, "engine").finish_reason is FinishReason.EOS
    with pytest.raises(ComputationFailed, match="without a stop token"):
        check_response(response(tokenizer, ["a", "b"]), served, sampling, 2, "engine", stops(tokenizer, "STOP"))


def test_a_process_without_a_tokenizer_refuses_stop_strings() -> None:
    cache = StopStringCache(None, 10)
    assert cache.of(SamplingParameters(1)) is None
    with pytest.raises(InvalidRequest, match="stop_strings: this process has no tokenizer"):
        cache.of(SamplingParameters(1, stop_strings=("a",)))
