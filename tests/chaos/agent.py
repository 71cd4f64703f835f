"""An agent with a process for each episode, which can hold the run at a turn. It starts often, so it imports little."""

from __future__ import annotations

import http.client
import json
import os
import random
import sys
import time
from pathlib import Path


def main() -> None:
    row, path = json.load(sys.stdin), os.environ["OPENAI_BASE_URL"].removeprefix("http://")
    address, _, base = path.partition("/")
    connection = http.client.HTTPConnection(address)
    messages = [{"role": "user", "content": row["text"]}]
    state, reward = os.environ["QUARTET_SEED"], 0.0
    turns = int(sys.argv[1])
    for turn in range(1, turns + 1):
        hold(turn)
        body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages})
        headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
        connection.request("POST", f"/{base}/chat/completions", body, headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != http.client.OK:
            raise SystemExit(f"status {answer.status}: {content.decode()}")
        message = json.loads(content)["choices"][0]["message"]
        # What follows depends on the seed and on all answers so far.
        state = f"{state} {message['content']}"
        draws = random.Random(state)
        reward += draws.random() / turns
        messages += [message, {"role": "user", "content": str(draws.randrange(10))}]
    print(json.dumps({"reward": reward}))


def hold(turn: int) -> None:
    """Hold the run before a turn, as a failpoint does, if no other agent has."""
    step = os.environ["QUARTET_SESSION"].split("/")[1]
    if os.environ.get("CHAOS_HOLD") != f"{step}/{turn}":
        return
    folder = Path(os.environ["QUARTET_FAILPOINTS_FOLDER"])
    try:
        (folder / "agent.fired").touch(exist_ok=False)
    except FileExistsError:
        return
    (folder / ".agent.partial").write_text(f"{os.getpid()}\n")
    (folder / ".agent.partial").rename(folder / "agent.reached")
    while not (folder / "agent.go").exists():
        time.sleep(0.01)


if __name__ == "__main__":
    main()
