"""An agent as a user writes one: a loop of its own with the official client of OpenAI, in a process of each episode.

Turns 0 and 1 are a conversation. Turn 2 begins anew with a summary, as agents do that compact their context.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from openai import OpenAI


def main() -> None:
    row = json.load(sys.stdin)
    client, model = OpenAI(max_retries=0), os.environ["OPENAI_MODEL"]
    messages: list[Any] = [{"role": "user", "content": row["text"]}]
    answers: list[str] = []
    for turn in range(3):
        if turn == 2:
            messages = [{"role": "user", "content": f"{len(answers)} answers"}]
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=5)
        answers.append(answer.choices[0].message.content or "")
        messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
        # A test kills a process while the episodes are here.
        if turn == 1 and (hook := os.environ.get("AGENT_HOOK")):
            open(hook, "a").close()
    text = "".join(answers)
    print(json.dumps({"reward": sum(character.isalnum() for character in text) / max(1, len(text))}))


if __name__ == "__main__":
    main()
