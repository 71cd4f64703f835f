"""A run with chats: every turn's tokens are written with the variables of the config or the row."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from quartet.cli.inference.generate import template_inputs
from quartet.contract.status import Role
from quartet.demo.toy_task import ToyTask
from quartet.rpc.security.credentials import LOCAL
from quartet.rpc.server import Server
from quartet.services.__main__ import _environment
from quartet.services.observability import Observability
from tests.training.conftest import MakeConfig
from tests.training.runs import json_lines, run_to_completion

TEMPLATE = """{% for message in messages %}{{ message.role }} : {{ message.content }} . {% endfor %}{%
if add_generation_prompt %}assistant :{% if enable_thinking is false %} no thought{% endif %}{% endif %}"""


def test_every_turn_of_training_and_evaluation_gets_the_variables(
    make: MakeConfig, toy_task: ToyTask, tmp_path: Path
) -> None:
    policy = shutil.copytree(toy_task.policy, tmp_path / "policy")
    (policy / "chat_template.jinja").write_text(TEMPLATE)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    rows = [chat, chat, chat, {**chat, "chat_template_kwargs": {"enable_thinking": True}}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes: dict[str, Any] = {
        "run": {"steps": 1},
        "data": {
            "prompts": str(tmp_path / "prompts.jsonl"),
            "validation": str(tmp_path / "prompts.jsonl"),
            "chat_template_kwargs": {"enable_thinking": False},
        },
        "actor": {"model": str(policy)},
        "rollout": {"max_turns": 2, "max_turn_tokens": 4, "max_response_tokens": 60},
        "environment": {"class_name": "quartet.environments.examples:WordPuzzle", "observations": "chat"},
        "evaluation": {"every_steps": 1},
    }
    config = make(**changes)
    server = Server(_environment(config, 1, LOCAL, Observability([Role.ENVIRONMENT], config)), "127.0.0.1:0")
    try:
        run = run_to_completion(make(**changes, services={"environment": {"address": server.address}}))
    finally:
        server.stop(5.0)
    quiet, thinking = "assistant : no thought", "assistant :"
    openings = [quiet, quiet, quiet, thinking]
    for row in run.trajectories(1):
        opening = openings[int(row["id"].split("/")[2])]
        first, second = (each["text"] for each in row["segments"] if each["role"] == "observation")
        assert first == f"user : ___ . {opening}"
        assert second.startswith(" . user : ")
        assert second.endswith(f" . {opening}")
    for step in (0, 1):
        for row in json_lines(run.files.root / f"evaluations/step-{step:06d}.jsonl"):
            turns = row["greedy"].split("user : ")[1:]
            assert ["no thought" in turn for turn in turns] == [openings[row["index"]] == quiet] * 2
    # The run has them for a resume, and for commands that use its policy.
    assert json.loads(run.files.identity.read_text())["settings"]["data.chat_template_kwargs.enable_thinking"] is False
    assert template_inputs(str(run.files.policy), "").chat_template_kwargs == {"enable_thinking": False}
