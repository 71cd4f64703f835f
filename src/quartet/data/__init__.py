"""Prompts: read from files and data sets, tokenized once, and assigned to the steps in an order that the seed determines."""

from quartet.data.chat_template import NO_INPUTS, ChatTemplate, TemplateInputs, content_problem
from quartet.data.prompt_cache import cached_prompts, load_prompts
from quartet.data.prompt_contents import set_contents
from quartet.data.prompt_datasets import RowsFile, cached_rows_file, on_the_hub, rows_file
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
from quartet.data.prompt_files import FORMATS, MAX_LINE_BYTES, check_regular_file
from quartet.data.prompt_lines import (
    MAX_FIELDS_BYTES,
    MAX_MESSAGES,
    PromptLine,
    iterate_prompt_lines,
    iterate_prompts,
    prompt_of,
    read_prompt_lines,
)
from quartet.data.prompt_mixing import MixedPromptOrder, WeightedPrompts, max_parts, shares_of_rest
from quartet.data.prompt_order import PromptDraw, PromptOrder, PromptSequence, StepPrompts
from quartet.data.prompt_settings import NO_REVISIONS, PromptSettings

__all__ = [
    "ENCODE_LINES",
    "FORMATS",
    "MAX_FIELDS_BYTES",
    "MAX_LINE_BYTES",
    "MAX_MESSAGES",
    "NO_INPUTS",
    "NO_REVISIONS",
    "ChatTemplate",
    "EncodedPrompts",
    "MixedPromptOrder",
    "PromptDraw",
    "PromptEncoder",
    "PromptLine",
    "PromptOrder",
    "PromptSequence",
    "PromptSet",
    "PromptSettings",
    "PromptSummary",
    "RowsFile",
    "StepPrompts",
    "TemplateInputs",
    "WeightedPrompts",
    "cached_prompts",
    "cached_rows_file",
    "check_regular_file",
    "content_problem",
    "encode_lines",
    "encode_prompts",
    "iterate_prompt_lines",
    "iterate_prompts",
    "load_prompts",
    "max_parts",
    "on_the_hub",
    "prompt_of",
    "read_prompt_lines",
    "rows_file",
    "select_prompts",
    "set_contents",
    "shares_of_rest",
    "summarize_prompts",
]
