"""Prompts: read from a file, tokenized once, and assigned to the steps in an order that the seed determines."""

from quartet.data.prompt_cache import cached_prompts, load_prompts
from quartet.data.prompt_encoding import (
    ENCODE_LINES,
    EncodedPrompts,
    PromptEncoder,
    PromptSet,
    PromptSummary,
    encode_lines,
    encode_prompts,
    select_prompts,
    summarize_prompts,
)
from quartet.data.prompt_files import FORMATS, MAX_LINE_BYTES
from quartet.data.prompt_lines import (
    MAX_FIELDS_BYTES,
    MAX_MESSAGES,
    PromptLine,
    iterate_prompt_lines,
    prompt_of,
    read_prompt_lines,
)
from quartet.data.prompt_order import PromptOrder
from quartet.data.prompt_settings import PromptSettings

__all__ = [
    "ENCODE_LINES",
    "FORMATS",
    "MAX_FIELDS_BYTES",
    "MAX_LINE_BYTES",
    "MAX_MESSAGES",
    "EncodedPrompts",
    "PromptEncoder",
    "PromptLine",
    "PromptOrder",
    "PromptSet",
    "PromptSettings",
    "PromptSummary",
    "cached_prompts",
    "encode_lines",
    "encode_prompts",
    "iterate_prompt_lines",
    "load_prompts",
    "prompt_of",
    "read_prompt_lines",
    "select_prompts",
    "summarize_prompts",
]
