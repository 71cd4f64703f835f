"""A tokenizer of characters with chat templates in the styles of published models, written for these tests."""

from __future__ import annotations

from typing import Any

import tokenizers
import transformers

SPECIAL = ("<eos>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
KEPT = ("<tool_call>", "</tool_call>")
"""Tokens that are not special: decoding keeps them."""

CHATML = """{% for message in messages %}{% if message.role == 'tool' %}{%
if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user
{% endif %}<tool_response>{{ message.content }}</tool_response>{%
if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""One user's message holds the results of neighbouring calls."""
HEADERS = """{% for message in messages %}<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role
}}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
DROPS_THOUGHTS = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}{% else %}{{ message.content
}}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that rewrites earlier turns: only the last one keeps its reasoning."""
DROPS_ALL_THOUGHTS = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
DROPS_BEFORE_USER = """{% set last = namespace(user=-1) %}{% for message in messages %}{% if message.role == 'user' %}{%
set last.user = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and loop.index0 < last.user %}{{ message.content.split('</think>')[-1].lstrip() }}{% else %}{{
message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that keeps reasoning until the next message of the user, as that of Qwen3."""
OPENS_THOUGHTS = DROPS_THOUGHTS.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
)
"""A template that opens the reasoning of each turn, and drops that of earlier ones."""
STRICT = """{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{
raise_exception('roles') }}{% endif %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that refuses roles which do not alternate."""


def tokenizer(template: str | None = None) -> Any:
    """Return a tokenizer with one token for each printable ASCII character and line break."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *KEPT, "<unk>", *characters])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    inner.add_special_tokens(list(SPECIAL))
    inner.add_tokens(list(KEPT))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = template
    return fast
