"""Values that chat templates get besides the messages, in a config and in rows of prompts."""

from __future__ import annotations

import json
from typing import Any

from quartet.config.section import MAX_PARAMETER_NAME

TEMPLATE_KEYS = ("tools", "documents", "chat_template_kwargs")
"""Keys of these values, in `data` and in rows."""
MAX_VARIABLES = 64
"""Maximum number of variables in `chat_template_kwargs`."""
MAX_INPUT_BYTES = 1024 * 1024
"""Maximum size of each of these values as JSON."""
_OWN_VARIABLES = frozenset(
    (
        *("messages", "conversation", "conversations", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens", "self"),
    )
)
"""Variables that the caller of a template sets, and the other parameters of transformers' functions that render it."""


def check_template_input(key: str, value: Any) -> None:
    """Raise ValueError unless a template can get ``value`` as ``key``, one of TEMPLATE_KEYS."""
    if key == "chat_template_kwargs":
        if not isinstance(value, dict):
            raise ValueError(
                f'is of type {type(value).__name__}; expected an object, such as {{"enable_thinking": false}}'
            )
        if len(value) > MAX_VARIABLES:
            raise ValueError(f"has {len(value)} variables, expected at most {MAX_VARIABLES}")
        for name in value:
            if not isinstance(name, str) or not name.isidentifier() or len(name) > MAX_PARAMETER_NAME:
                raise ValueError(
                    f"{str(name)[:MAX_PARAMETER_NAME]!r}: is not the name of a variable; expected letters, digits and _, at most "
                    f"{MAX_PARAMETER_NAME}, and no digit first"
                )
            if name in _OWN_VARIABLES:
                hint = f"give {name} beside it" if name in TEMPLATE_KEYS else "remove it"
                raise ValueError(f"{name}: is not a variable that can be set here; {hint}")
    else:
        shape = '{"type": "function", "function": {...}}' if key == "tools" else '{"title": ..., "text": ...}'
        if not isinstance(value, list | tuple):
            raise ValueError(f"is of type {type(value).__name__}; expected a list of objects such as {shape}")
        for number, item in enumerate(value, 1):
            if not isinstance(item, dict):
                raise ValueError(
                    f"item {number} is of type {type(item).__name__}; expected a list of objects such as {shape}"
                )
    try:
        size = len(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"expected values as in JSON ({error})") from None
    if size > MAX_INPUT_BYTES:
        raise ValueError(f"{size} bytes as JSON, expected at most {MAX_INPUT_BYTES}; shorten it")
