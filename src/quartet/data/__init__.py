"""Prompts: read from JSON Lines, tokenized once, and assigned to the steps in an order that the seed determines."""

from quartet.data.prompt_encoding import ENCODE_LINES, PromptEncoder, PromptSet, encode_prompts
from quartet.data.prompt_lines import (
    MAX_FIELDS_BYTES,
    MAX_LINE_BYTES,
    MAX_MESSAGES,
    PromptLine,
    iterate_prompt_lines,
    read_prompt_lines,
)
from quartet.data.prompt_order import PromptOrder

__all__ = [
    "ENCODE_LINES",
    "MAX_FIELDS_BYTES",
    "MAX_LINE_BYTES",
    "MAX_MESSAGES",
    "PromptEncoder",
    "PromptLine",
    "PromptOrder",
    "PromptSet",
    "encode_prompts",
    "iterate_prompt_lines",
    "read_prompt_lines",
]
