"""An agent that reads a list number by number and keeps only its summary of what came before, with the openai SDK.

Each summary begins a new conversation, and so a new branch of the episode: quartet train examples/agents/compaction.yaml
"""

from __future__ import annotations

from functools import cache
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient


@cache
def http_client() -> DefaultAsyncHttpxClient:
    """Return the HTTP client of all runs in this process. A new one for each would take longer than its requests."""
    return DefaultAsyncHttpxClient()


async def agent(fields: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Add the numbers of a row, and return the reward."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client())

    async def ask(messages: list[Any]) -> str:
        answer = await client.chat.completions.create(model=model, messages=messages)
        return answer.choices[0].message.content or ""

    context, messages = "total 0", list[Any]()
    for number in fields["numbers"]:
        messages = [{"role": "user", "content": f"{context} , then {number} . summarize"}]
        context = (await ask(messages))[:40]
        messages.append({"role": "assistant", "content": context})
    messages.append({"role": "user", "content": "how much ?"})
    answer = await ask(messages)
    return float(answer.strip() == str(fields["answer"]))
