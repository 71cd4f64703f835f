"""Requests of the official OpenAI SDK to the policy of a run and to a vLLM server, side by side.

python -m benchmarks openai_requests needs build/vllm-venv, which `make engines` installs. The agent of a run sends them,
each in an episode of its own. Both servers have the policy of examples/agents.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.options import add_page, page_of, parser_of

MODEL, KEY = "policy", "secret-key-of-the-server"
PAGE = Path("docs/evidence/openai-protocol.md")
VLLM = Path("build/vllm-venv/bin")
START_SECONDS = 300
RESULTS = "QUARTET_REQUESTS"
"""Environment variable with the folder for the answers of the run."""
ASK = [{"role": "user", "content": "apple plus pear ?"}]
CALLS = [
    {"id": f"call_{item}", "type": "function", "function": {"name": "lookup", "arguments": json.dumps({"item": item})}}
    for item in ("apple", "pear")
]
TOLD = [
    *ASK,
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    *(
        {"role": "tool", "tool_call_id": call["id"], "content": str(price)}
        for call, price in zip(CALLS, (3, 4), strict=True)
    ),
]
SUMMED = [
    *TOLD,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_sum",
                "type": "function",
                "function": {"name": "calculate", "arguments": '{"expression": "3+4"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_sum", "content": "7"},
]


def _tool(name: str, parameter: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [_tool("lookup", "item"), _tool("calculate", "expression")]
Request = Callable[[Any], Awaitable[str]]


def chat(messages: Any = SUMMED, **settings: Any) -> Request:
    """Return a chat request without streaming."""

    async def request(client: Any) -> str:
        answer = await client.chat.completions.create(**{"model": MODEL, "messages": messages, **settings})
        return "; ".join([*map(_choice, answer.choices), _usage(answer.usage)])

    return request


def stream(messages: Any = SUMMED, **settings: Any) -> Request:
    """Return a chat request with streaming."""

    async def request(client: Any) -> str:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                **{"model": MODEL, "messages": messages, "stream": True, **settings}
            )
        ]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        shown = []
        for index in sorted({choice.index for choice in choices}):
            own = [choice for choice in choices if choice.index == index]
            calls = [call for choice in own for call in choice.delta.tool_calls or ()]
            names = [call.function.name for call in calls if call.function and call.function.name]
            has_arguments = any(call.function and call.function.arguments for call in calls)
            parts = [
                f"first role {own[0].delta.role}",
                "text" if any(choice.delta.content for choice in own) else "no text",
                *([f"calls {', '.join(names)}" + (" with arguments" if has_arguments else "")] if names else []),
                *(["log-probs"] if any(choice.logprobs for choice in own) else []),
                f"end {own[-1].finish_reason}",
            ]
            shown.append(" ".join(parts))
        usages = [chunk.usage for chunk in chunks if chunk.usage]
        return "; ".join([*shown, _usage(usages[-1]) if usages else "no usage"])

    return request


def completion(**settings: Any) -> Request:
    """Return a request of /v1/completions."""

    async def request(client: Any) -> str:
        answer = await client.completions.create(**{"model": MODEL, "max_tokens": 1, **settings})
        if settings.get("stream"):
            chunks = [chunk async for chunk in answer]
            ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
            return f"ends {', '.join(ends)}"
        shown = [
            f"text, {choice.finish_reason}" + (", log-probs" if choice.logprobs else "") for choice in answer.choices
        ]
        return "; ".join([*shown, _usage(answer.usage)])

    return request


def raw(method: str, path: str, content: str = "", key: str | None = None) -> Request:
    """Return a request that the SDK would not send."""

    async def request(client: Any) -> str:
        import httpx

        headers = {"content-type": "application/json", "authorization": f"Bearer {key or client.api_key}"}
        async with httpx.AsyncClient() as http:
            answer = await http.request(
                method, f"{str(client.base_url).rstrip('/')}{path}", content=content, headers=headers
            )
        return _error(answer.status_code, answer.json() if answer.content else {})

    return request


async def models(client: Any) -> str:
    return ", ".join([f"{model.object} {model.id}" async for model in client.models.list()])


async def model(client: Any) -> str:
    found = await client.models.retrieve(MODEL)
    return f"{found.object} {found.id}"


REQUESTS: dict[str, Request] = {
    "plain": chat(),
    "max_tokens 1": chat(max_tokens=1),
    "max_completion_tokens 2": chat(TOLD, max_completion_tokens=2),
    "stop, a text": chat(TOLD, stop="calc"),
    "stop, a list": chat(TOLD, stop=["calc", "unused"]),
    "n 2": chat(n=2),
    "logprobs": chat(logprobs=True),
    "top_logprobs 2": chat(logprobs=True, top_logprobs=2),
    "temperature 0": chat(temperature=0),
    "seed and user": chat(seed=1, user="me"),
    "a field that is unknown": chat(extra_body={"unknown_field": 1}),
    "text parts": chat([{"role": "user", "content": [{"type": "text", "text": "apple plus pear ?"}]}]),
    "system and developer": chat([{"role": "developer", "content": "shop"}, *ASK]),
    "tools, auto": chat(ASK, tools=TOOLS),
    "tools, the results": chat(TOLD, tools=TOOLS),
    "tools, the answer": chat(SUMMED, tools=TOOLS),
    "tool_choice none": chat(SUMMED, tools=TOOLS, tool_choice="none"),
    "tool_choice without tools": chat(tool_choice="required"),
    "tool_choice, an unknown name": chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "other"}}),
    "stream": stream(),
    "stream with usage": stream(stream_options={"include_usage": True}),
    "stream, n 2": stream(n=2),
    "stream with log-probs": stream(logprobs=True),
    "stream, max_tokens 1": stream(max_tokens=1),
    "stream with tools": stream(ASK, tools=TOOLS),
    "completion of a text": completion(prompt="apple plus"),
    "completion of ids": completion(prompt=[5, 6, 7]),
    "completion of two texts": completion(prompt=["apple", "pear"]),
    "completion, log-probs": completion(prompt="apple plus", logprobs=0),
    "completion, stream": completion(prompt="apple plus", stream=True),
    "models": models,
    "one model": model,
    "no messages": chat([]),
    "a missing field": raw("POST", "/chat/completions", json.dumps({"model": MODEL})),
    "another model": chat(model="other"),
    "a wrong key": raw("POST", "/chat/completions", json.dumps({"model": MODEL, "messages": ASK}), key="wrong"),
    "a prompt that is too long": chat([{"role": "user", "content": "apple " * 3000}]),
    "max_tokens that are too many": chat(max_tokens=100_000),
    "n 0": chat(n=0),
    "max_tokens -1": chat(max_tokens=-1),
    "a message without role": chat([{"content": "apple"}]),
    "content that is an image": chat(
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    ),
    "a body that is no JSON": raw("POST", "/chat/completions", "{"),
    "a body that is a list": raw("POST", "/chat/completions", "[]"),
    "another path": raw("GET", "/unknown"),
    "another method": raw("GET", "/chat/completions"),
}


def _choice(choice: Any) -> str:
    message = choice.message
    calls = [call.function.name for call in message.tool_calls or ()]
    valid = all(isinstance(json.loads(call.function.arguments), dict) for call in message.tool_calls or ())
    parts = [
        "text" if message.content else "no text",
        *([f"calls {', '.join(calls)}" + (" with arguments" if valid else " with invalid arguments")] if calls else []),
        *(["log-probs"] if choice.logprobs and choice.logprobs.content else []),
    ]
    return f"{choice.finish_reason}: {' '.join(parts)}"


def _usage(usage: Any) -> str:
    consistent = usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
    return f"usage {'adds up' if consistent else 'does not add up'}"


def _error(status: int, body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    is_whole = isinstance(error, dict) and {"message", "type", "param", "code"} <= set(error)
    shape = "OpenAI's" if is_whole else "another"
    return f"{status}, {shape} shape"


async def ask(client: Any, request: Request) -> str:
    """Return what a request shows, in words."""
    from openai import APIStatusError, OpenAIError

    try:
        return await request(client)
    except APIStatusError as error:
        return f"{type(error).__name__}, {_error(error.status_code, error.response.json())}"
    except OpenAIError as error:
        return type(error).__name__


async def agent(fields: Mapping[str, Any], base_url: str, api_key: str) -> float:
    """Send the request of a row: the agent of the run."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        shown = await ask(client, REQUESTS[fields["request"]])
        # Every episode needs a turn.
        await client.chat.completions.create(model=MODEL, messages=SUMMED, max_tokens=1)
    (Path(os.environ[RESULTS]) / f"{list(REQUESTS).index(fields['request'])}.json").write_text(json.dumps(shown))
    return 0.0


async def ask_all(base_url: str, key: str) -> dict[str, str]:
    """Return what every request shows at a server."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        return {name: await ask(client, request) for name, request in REQUESTS.items()}


def of_vllm(policy: Path, port: int) -> dict[str, str]:
    """Return what every request shows at a vLLM server."""
    options = ["--served-model-name", MODEL, "--max-model-len", "256", "--enforce-eager", "--api-key", KEY]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    parsers = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    command = [str(VLLM / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(policy)]
    server = subprocess.Popen(
        [*command, *options, *address, *parsers],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"},
        stdout=sys.stderr,
        start_new_session=True,
    )
    try:
        base_url = f"http://127.0.0.1:{port}/v1"
        asyncio.run(_ready(base_url, server))
        return asyncio.run(ask_all(base_url, KEY))
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()


async def _ready(base_url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers. Raises SystemExit."""
    from openai import APIConnectionError, AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and server.poll() is None:
            try:
                await client.models.list()
                return
            except APIConnectionError:
                await asyncio.sleep(0.5)
    raise SystemExit("error: the vLLM server does not start; see its log above")


def of_run(policy: Path, folder: Path) -> dict[str, str]:
    """Return what every request shows at the endpoint of a run's generator."""
    rows = ({"text": "a request", "request": name} for name in REQUESTS)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = {
        "run": {"name": MODEL, "steps": 1, "directory": str(folder / "runs")},
        "data": {"prompts": str(folder / "prompts.jsonl"), "max_prompt_tokens": 64},
        "algorithm": {"estimator": "reinforce", "kl_coefficient": 0.0},
        "rollout": {
            "prompts_per_step": len(REQUESTS),
            "max_turns": 16,
            "max_turn_tokens": 64,
            "max_response_tokens": 160,
            # Both sample: the answers differ, and what is compared does not.
            "temperature": 0.05,
        },
        "environment": {
            "kind": "agent",
            "agent": {"function": "benchmarks.openai_requests:agent", "pass_variables": [RESULTS]},
        },
        "actor": {"model": str(policy)},
        "reward": {"source": "none"},
    }
    # JSON is YAML.
    (folder / "run.yaml").write_text(json.dumps(config), encoding="utf-8")
    answers = folder / "answers"
    answers.mkdir()
    subprocess.run(
        [str(Path(sys.executable).parent / "quartet"), "train", str(folder / "run.yaml")],
        env={**os.environ, RESULTS: str(answers)},
        stdout=sys.stderr,
        check=True,
    )
    return {name: json.loads((answers / f"{index}.json").read_text()) for index, name in enumerate(REQUESTS)}


def table(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the comparison as lines of Markdown."""
    same = sum(ours[name] == theirs[name] for name in REQUESTS)
    rows = [
        f"| {name} | {ours[name]} | {'the same' if theirs[name] == ours[name] else theirs[name]} |" for name in REQUESTS
    ]
    return [f"{same} of {len(REQUESTS)} show the same.", "", "| request | Quartet | vLLM |", "|---|---|---|", *rows]


def main() -> int:
    parser = parser_of("openai_requests", __doc__)
    parser.add_argument("--port", type=int, default=8766)
    add_page(parser, PAGE)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [sys.executable, "examples/agents/prepare.py", str(folder / "agents"), "--tasks", "shop"], check=True
        )
        policy = folder / "agents/shop/policy"
        theirs = of_vllm(policy, options.port)
        lines = table(of_run(policy, folder), theirs)
    print("\n".join(lines))
    page.write(page_of(parser, options), "openai_requests", "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
