"""The shop with pydantic-ai, as an async function: quartet train examples/agents/pydantic_ai.yaml"""

from __future__ import annotations

from functools import cache
from typing import Any

from openai import DefaultAsyncHttpxClient
from pydantic_ai import Agent, ModelRetry, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from examples.agents import shop


@cache
def http_client() -> DefaultAsyncHttpxClient:
    """Return the HTTP client of all runs in this process. A new one for each would take longer than its requests."""
    return DefaultAsyncHttpxClient()


async def agent(fields: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Answer the question of a row, and return the reward."""
    provider = OpenAIProvider(base_url=base_url, api_key=api_key, http_client=http_client())
    policy = OpenAIChatModel(model, provider=provider)
    shopper = Agent(policy, retries=0)

    @shopper.tool_plain
    def lookup(item: str) -> int:
        """Return the price of an item."""
        try:
            return shop.lookup(fields["prices"], item)
        except shop.ToolFailed as error:
            raise ModelRetry(str(error)) from None

    @shopper.tool_plain
    def calculate(expression: str) -> int:
        """Return a sum such as "3+4"."""
        try:
            return shop.calculate(expression)
        except shop.ToolFailed as error:
            raise ModelRetry(str(error)) from None

    try:
        result = await shopper.run(fields["text"])
    except UnexpectedModelBehavior:
        return 0.0  # The policy has called a tool wrongly.
    return shop.reward(result.output, fields["answer"])
