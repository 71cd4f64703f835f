"""The shop with the OpenAI Agents SDK, as a service with an environment of its own.

python -m venv build/agents-sdk && build/agents-sdk/bin/pip install "openai-agents==0.24.0" starlette uvicorn
build/agents-sdk/bin/python examples/agents/agents_sdk_service.py --port 8765 &
quartet train examples/agents/agents_sdk.yaml
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import uvicorn
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    Runner,
    UserError,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

sys.path.append(str(Path(__file__).parent))
import shop

MAX_TURNS = 6
HTTP = DefaultAsyncHttpxClient()
"""HTTP client of all runs. A new one for each would take longer than its requests."""


async def run(request: Request) -> JSONResponse:
    """Answer the question of a row, and return the reward."""
    body = await request.json()
    fields = body["fields"]

    @function_tool(failure_error_function=None)
    def lookup(item: str) -> int:
        """Return the price of an item."""
        return shop.lookup(fields["prices"], item)

    @function_tool(failure_error_function=None)
    def calculate(expression: str) -> int:
        """Return a sum such as "3+4"."""
        return shop.calculate(expression)

    client = AsyncOpenAI(base_url=body["base_url"], api_key=body["api_key"], http_client=HTTP)
    policy = OpenAIChatCompletionsModel(model=body["model"], openai_client=client)
    shopper = Agent(name="shopper", model=policy, tools=[lookup, calculate])
    try:
        result = await Runner.run(shopper, fields["text"], max_turns=MAX_TURNS)
    except (UserError, MaxTurnsExceeded, ModelBehaviorError, BadRequestError):
        return JSONResponse({"reward": 0.0})  # The policy has called a tool wrongly, or too often.
    return JSONResponse({"reward": shop.reward(str(result.final_output), fields["answer"])})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=8765)
    # Traces would be sent to OpenAI.
    set_tracing_disabled(True)
    uvicorn.run(
        Starlette(routes=[Route("/", run, methods=["POST"])]), port=parser.parse_args().port, log_level="warning"
    )
