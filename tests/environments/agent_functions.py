"""Agents for the tests, which use the standard library only: as functions, and as a command that imports this file."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
import urllib.request
from typing import Any

from quartet.environments import EnvironmentFailed


def ask(base_url: str, key: str, model: str, *texts: str) -> str:
    """Send one chat, whose texts are those of the user and of the policy in turn, and return the text of the answer."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    body = json.dumps({"model": model, "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)  # noqa: S310 - the test's server
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        return str(json.load(response)["choices"][0]["message"]["content"])


async def ask_async(base_url: str, key: str, model: str, text: str) -> str:
    """The same on an event loop: a cancellation closes the connection."""
    host, _, port = base_url.removeprefix("http://").removesuffix("/v1").rpartition(":")
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        await reader.readuntil(b"Content-Length: ")
        length = int(await reader.readline())
        await reader.readuntil(b"\r\n")
        answer = json.loads(await reader.readexactly(length))
        return str(answer["choices"][0]["message"]["content"])
    finally:
        writer.close()


async def two_turns(fields: dict[str, Any], base_url: str, api_key: str, model: str, seed: int, session: str) -> Any:
    """Ask twice; the second question is the first answer."""
    text = fields["text"]
    for _ in range(2):
        text = await ask_async(base_url, api_key, model, text)
    return {"reward": float(len(text)), "logged": {"text": text, "seed": seed, "session": session}}


MEETING = 20
_meeting = threading.Barrier(MEETING)


async def as_told(fields: dict[str, Any], **others: Any) -> Any:
    """Return, raise or do what the fields say."""
    if "raise" in fields:
        raise ValueError(fields["raise"])
    if "failed" in fields:
        raise EnvironmentFailed(*fields["failed"])
    if "exit" in fields:
        sys.exit(fields["exit"])
    if "end" in fields:
        os._exit(fields["end"])
    if "block" in fields:
        time.sleep(fields["block"])
    if "wait" in fields:
        await asyncio.sleep(fields["wait"])
    while "until" in fields and not os.path.exists(fields["until"]):
        await asyncio.sleep(0.05)
    if "meet" in fields:
        await asyncio.to_thread(_meeting.wait, 60)
    if "print" in fields:
        print(fields["print"], others["api_key"])
    if "object" in fields:
        return object()
    return fields.get("return")


def not_async(fields: dict[str, Any]) -> float:
    return 1.0


async def wants_more(fields: dict[str, Any], tools: list[str]) -> float:
    return 1.0


class Callable:
    async def __call__(self, fields: dict[str, Any]) -> float:
        return float(fields["number"])


called = Callable()


if __name__ == "__main__":
    row = json.load(sys.stdin)
    given = {name: os.environ[f"OPENAI_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL")}
    print(f"my key is {given['API_KEY']}", file=sys.stderr)
    answers = [ask(given["BASE_URL"], given["API_KEY"], given["MODEL"], row["text"])]
    if sys.argv[1:] == ["twice"]:
        answers.append(ask(given["BASE_URL"], given["API_KEY"], given["MODEL"], row["text"], answers[0], " and"))
    print("thinking")
    answer = "".join(answers)
    print(json.dumps({"reward": len(answer), "logged": {"text": answer, "seed": int(os.environ["QUARTET_SEED"])}}))
