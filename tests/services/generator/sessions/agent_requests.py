"""Requests that tests send as agents do."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import httpx2 as httpx
import openai

from quartet.contract.agent import AgentRun
from tests.services.generator.sessions.harness import Script


@lru_cache(16)
def client_of(base_url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)


def ask(start: AgentRun, messages: Sequence[Any], **settings: Any) -> Any:
    client = client_of(start.base_url, start.api_key)
    return client.chat.completions.create(model=start.model, messages=messages, **settings)


def post(
    start: AgentRun,
    messages: Sequence[Any],
    headers: Mapping[str, str] | None = None,
    client: Any = httpx,
    timeout: float = 20,
    **fields: Any,
) -> httpx.Response:
    response: httpx.Response = client.post(
        f"{start.base_url}/chat/completions",
        json={"model": start.model, "messages": messages, **fields},
        headers={"authorization": f"Bearer {start.api_key}", **(headers or {})},
        timeout=timeout,
    )
    return response


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def fine_after(event: threading.Event) -> Script:
    """Return a script that answers "fine" once an event is set."""

    def script(prompt: str) -> str:
        assert event.wait(20)
        return "fine"

    return script
