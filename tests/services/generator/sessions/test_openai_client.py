"""The official client of OpenAI, unmodified, with the torch engine and with answers by a script."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest
import torch

from quartet.contract.agent import AgentResult, AgentRun
from quartet.contract.trajectory import FinishReason, Outcome, SegmentRole, Trajectory
from tests.services.generator.sessions.agent_requests import user
from tests.services.generator.sessions.harness import TEMPLATE, Rig, Script

Scripted = Callable[[Script], Rig]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}


def client_of(run: AgentRun, **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=run.base_url, api_key=run.api_key, **{"max_retries": 0, **settings})


def ids_of(trajectory: Trajectory) -> list[list[tuple[str, list[int]]]]:
    return [
        [(segment.role, segment.token_ids.tolist()) for segment in branch.segments] for branch in trajectory.branches
    ]


def test_a_dialogue_is_one_branch_with_the_ids_of_the_engine(rig: Rig, run: str) -> None:
    answers: list[Any] = []

    def agent(start: AgentRun) -> AgentResult:
        client = client_of(start)
        assert [model.id for model in client.models.list()] == [start.model]
        messages: list[Any] = [user("one two")]
        for _ in range(3):
            answer = client.chat.completions.create(model=start.model, messages=messages, max_tokens=6)
            answers.append(answer)
            messages += [answer.choices[0].message, user("three")]
        return AgentResult(0.25, logged={"steps": 3})

    [trajectory] = rig.checked(rig.batch(run, limit=200), agent)
    [branch] = trajectory.branches
    roles = [segment.role for segment in branch.segments]
    assert roles == [SegmentRole.PROMPT, *[SegmentRole.POLICY, SegmentRole.OBSERVATION] * 2, SegmentRole.POLICY]
    assert (trajectory.turn_rewards, trajectory.logged) == ((0, 0, 0.25), {"steps": 3})
    assert (trajectory.finish_reason, trajectory.outcome) == (FinishReason.DONE, Outcome.OK)
    assert (trajectory.policy_version, trajectory.weights_digest, trajectory.generator) == (2, b"d" * 16, "me:1")
    assert rig.text(branch.prompt_ids) == "<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n"
    tokens = 0
    for answer, turn in zip(answers, trajectory.turns, strict=True):
        assert answer.usage.completion_tokens == len(turn.token_ids) <= 6
        tokens += answer.usage.completion_tokens
        assert answer.model == run
        assert answer.object == "chat.completion"
    # The log-probs are those of the whole sequence, in one pass of the model.
    whole = np.concatenate([segment.token_ids for segment in branch.segments])
    with torch.no_grad():
        logits = rig.engine._model(input_ids=torch.from_numpy(whole.astype(np.int64))[None]).logits[0].float()
    expected = (
        logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(whole[1:].astype(np.int64))[:, None])[:, 0].numpy()
    )
    mask = np.concatenate([np.zeros(len(branch.prompt_ids), bool), branch.response_mask])[1:]
    assert mask.sum() == tokens
    recorded = np.concatenate([np.zeros(len(branch.prompt_ids), np.float32), branch.log_probs])[1:]
    np.testing.assert_allclose(recorded[mask], expected[mask], atol=1e-5)


def test_an_episode_is_the_same_whenever_and_with_whatever_else_it_is_played(rig: Rig, run: str) -> None:
    def agent(start: AgentRun) -> AgentResult:
        client, messages = client_of(start), [user(f"one {start.fields}")]
        for _ in range(4):
            answer = client.chat.completions.create(model=start.model, messages=messages, max_tokens=5)
            messages += [answer.choices[0].message.model_dump(), user("two")]
        return AgentResult(1.0)

    def played(name: str, episodes: int, max_open: int) -> list[Any]:
        rig.max_open = max_open
        result = rig.checked(rig.batch(name, episodes, limit=150), agent)
        return [(ids_of(item), np.concatenate([turn.log_probs for turn in item.turns]).tolist()) for item in result]

    expected = played(f"{run}1", 6, 64)
    assert played(f"{run}2", 6, 2) == expected
    assert played(f"{run}3", 1, 1) == expected[:1]


def test_the_asynchronous_client_and_requests_at_once(rig: Rig, run: str) -> None:
    async def conversation(start: AgentRun) -> None:
        async with openai.AsyncOpenAI(base_url=start.base_url, api_key=start.api_key, max_retries=0) as client:
            results = await asyncio.gather(
                *(
                    client.chat.completions.create(model=start.model, messages=[user(word)], max_tokens=4)
                    for word in ("one", "two", "three")
                )
            )
            assert len({result.id for result in results}) == 3

    def agent(start: AgentRun) -> AgentResult:
        asyncio.run(conversation(start))
        return AgentResult(1.0)

    [trajectory] = rig.checked(rig.batch(run), agent)
    assert len(trajectory.branches) == 3
    prompts = {rig.text(branch.prompt_ids) for branch in trajectory.branches}
    assert prompts == {
        f"<|im_start|>user\n{word}<|im_end|>\n<|im_start|>assistant\n" for word in ("one", "two", "three")
    }


def test_several_choices_are_branches_of_one_prompt(rig: Rig, run: str) -> None:
    def agent(start: AgentRun) -> AgentResult:
        answer = client_of(start).chat.completions.create(
            model=start.model,
            messages=[user("one")],
            n=3,
            max_tokens=5,
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage is not None
        # The prompt counts once.
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        return AgentResult(1.0)

    [trajectory] = rig.checked(rig.batch(run), agent)
    first, *rest = trajectory.branches
    size = len(first.prompt_ids)
    assert [(branch.parent, branch.shared_tokens) for branch in rest] == [(0, size), (0, size)]
    assert len({branch.response_ids.tobytes() for branch in trajectory.branches}) == 3


def test_log_probs_are_those_of_the_sampled_tokens(rig: Rig, run: str) -> None:
    seen: list[Any] = []

    def agent(start: AgentRun) -> AgentResult:
        client = client_of(start)
        chat = client.chat.completions.create(
            model=start.model,
            messages=[user("one")],
            logprobs=True,
            max_tokens=6,
        )
        plain = client.completions.create(model=start.model, prompt="one two", logprobs=0, max_tokens=6)
        seen.extend([chat.choices[0].logprobs.content, plain.choices[0].logprobs])
        return AgentResult(1.0)

    [trajectory] = rig.checked(rig.batch(run), agent)
    chat, plain = trajectory.turns
    assert [token.logprob for token in seen[0]] == chat.log_probs.tolist()
    assert [token.token for token in seen[0]] == [rig.text([token]) for token in chat.token_ids]
    assert seen[1].token_logprobs == plain.log_probs.tolist()
    assert seen[1].text_offset[0] == 0


def streamed(chunks: Any) -> tuple[str, str, list[Any], list[str], Any]:
    """Return content, reasoning, tool calls, finish reasons and usage of a stream."""
    content, reasoning, reasons, usage = "", "", list[str](), None
    calls: dict[int, dict[str, str]] = {}
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or ():
                entry = calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
                entry["id"] += call.id or ""
                entry["name"] += call.function.name or ""
                entry["arguments"] += call.function.arguments or ""
    return content, reasoning, list(calls.values()), reasons, usage


def test_a_stream_has_the_same_answer(scripted: Scripted, run: str) -> None:
    long = "word " * 1000
    rig = scripted(lambda prompt: f"<think>\nhm\n</think>\n\n{long}" if "one" in prompt else "ß🦊 end")

    def agent(start: AgentRun) -> AgentResult:
        client = client_of(start)
        options = {"include_usage": True}
        chunks = client.chat.completions.create(
            model=start.model,
            messages=[user("one")],
            stream=True,
            stream_options=options,
        )
        content, reasoning, _, reasons, usage = streamed(chunks)
        assert (content.strip(), reasoning.strip(), reasons) == (long.strip(), "hm", ["stop"])
        assert usage.completion_tokens > 1000
        text = client.completions.create(model=start.model, prompt="two", stream=True, max_tokens=50)
        assert "".join(chunk.choices[0].text for chunk in text) == "ß🦊 end"
        with client.chat.completions.stream(model=start.model, messages=[user("two")]) as events:
            final = events.get_final_completion()
        assert final.choices[0].message.content == "ß🦊 end"
        return AgentResult(1.0)

    [trajectory] = rig.checked(rig.batch(run, limit=20_000), agent)
    assert len(trajectory.turns) == 3


def test_tool_calls_in_both_forms_and_the_way_back(scripted: Scripted, run: str) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'

    def script(prompt: str) -> str:
        return "It is 3." if "<|im_start|>tool" in prompt else f"I add.\n{call}"

    rig = scripted(script)

    def agent(start: AgentRun) -> AgentResult:
        client = client_of(start)
        for stream in (False, True):
            messages: list[Any] = [user("1 and 2?")]
            if stream:
                chunks = client.chat.completions.create(model=start.model, messages=messages, tools=[ADD], stream=True)
                content, _, calls, reasons, _ = streamed(chunks)
                name, arguments, id = calls[0]["name"], calls[0]["arguments"], calls[0]["id"]
                assert reasons == ["tool_calls"]
                messages.append(
                    {
                        "role": "assistant",
                        "content": content,
                        "tool_calls": [
                            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                        ],
                    }
                )
            else:
                answer = client.chat.completions.create(model=start.model, messages=messages, tools=[ADD])
                [choice] = answer.choices
                assert choice.finish_reason == "tool_calls"
                [given] = choice.message.tool_calls or []
                assert given.type == "function"
                name, arguments, id = given.function.name, given.function.arguments, given.id
                messages.append(choice.message)
            assert (name, json.loads(arguments)) == ("add", {"a": 1, "b": 2})
            messages.append({"role": "tool", "tool_call_id": id, "content": "3"})
            final = client.chat.completions.create(model=start.model, messages=messages, tools=[ADD])
            assert final.choices[0].message.content == "It is 3."
            assert final.choices[0].finish_reason == "stop"
        return AgentResult(1.0)

    [trajectory] = rig.checked(rig.batch(run, limit=1000), agent)
    assert len(trajectory.branches) == 2
    for branch in trajectory.branches:
        assert [rig.text(turn.token_ids) for turn in branch.turns] == [
            f"I add.\n{call}<|im_end|>",
            "It is 3.<|im_end|>",
        ]
        observation = branch.segments[2]
        assert rig.text(observation.token_ids) == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["add", r"\u0061dd"])
def test_text_before_a_call_that_the_template_leaves_out_begins_a_branch(
    scripted: Scripted, run: str, name: str
) -> None:
    written = f'<think>\n</think>\n\n<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    rig = scripted(lambda prompt: "Done." if "<|im_start|>tool" in prompt else written)

    def agent(start: AgentRun) -> AgentResult:
        client, messages = client_of(start), [user("1?")]
        answer = client.chat.completions.create(model=start.model, messages=messages, tools=[ADD])
        [call] = answer.choices[0].message.tool_calls or []
        assert call.function.name == "add"
        messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "1"}]
        client.chat.completions.create(model=start.model, messages=messages, tools=[ADD])
        return AgentResult(1.0)

    [trajectory] = rig.checked(rig.batch(run, limit=1000), agent)
    assert len(trajectory.branches) == 2


def test_tools_that_are_not_given_or_not_chosen_are_text(scripted: Scripted, run: str) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    rig = scripted(lambda prompt: call)

    def agent(start: AgentRun) -> AgentResult:
        client = client_of(start)
        for settings in ({}, {"tools": [ADD], "tool_choice": "none"}):
            answer = client.chat.completions.create(model=start.model, messages=[user("x")], **settings)
            assert answer.choices[0].message.tool_calls is None
            assert answer.choices[0].message.content == call
        return AgentResult(1.0)

    rig.checked(rig.batch(run, limit=1000), agent)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("tools", [[ADD], [ADD, OTHER]])
def test_a_tool_call_that_is_required_begins_in_the_prompt(
    scripted: Scripted, run: str, choice: Any, tools: Any
) -> None:
    def script(prompt: str) -> str:
        if prompt.endswith('{"name": "'):
            return 'add", "arguments": {"a": 1}}\n</tool_call>'
        return ' {"a": 1}}\n</tool_call>' if prompt.endswith('"arguments":') else "It is 1."

    rig = scripted(script)

    def agent(start: AgentRun) -> AgentResult:
        client, messages = client_of(start), [user("1?")]
        answer = client.chat.completions.create(model=start.model, messages=messages, tools=tools, tool_choice=choice)
        [call] = answer.choices[0].message.tool_calls or []
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
        messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "1"}]
        final = client.chat.completions.create(model=start.model, messages=messages, tools=tools)
        assert final.choices[0].message.content == "It is 1."
        return AgentResult(1.0)

    [trajectory] = rig.checked(rig.batch(run, limit=1000), agent)
    text = rig.text(trajectory.branches[0].prompt_ids)
    assert text.partition("assistant\n")[2].startswith('<tool_call>\n{"name": "')
    # The template writes the call as the policy did.
    assert len(trajectory.branches) == 1


@pytest.mark.parametrize("echoes", [True, False])
def test_reasoning_that_the_agent_drops_begins_a_branch(scripted: Scripted, run: str, echoes: bool) -> None:
    rig = scripted(lambda prompt: "<think>\nhm\n</think>\n\nyes")
    keeps = {"chat_template_kwargs": {"keep_thinking": True}}

    def agent(start: AgentRun) -> AgentResult:
        client, messages = client_of(start), [user("really?")]
        for _ in range(2):
            answer = client.chat.completions.create(model=start.model, messages=messages, extra_body=keeps)
            message = answer.choices[0].message
            assert (message.content, message.model_extra) == ("yes", {"reasoning_content": "hm"})
            sent = message.model_dump() if echoes else {"role": "assistant", "content": message.content}
            messages += [sent, user("sure?")]
        return AgentResult(1.0)

    [trajectory] = rig.checked(rig.batch(run, limit=500), agent)
    assert len(trajectory.branches) == (1 if echoes else 2)
    if not echoes:
        assert "hm" not in rig.text(trajectory.branches[1].prompt_ids)


def test_a_template_that_drops_earlier_reasoning_begins_a_branch(scripted: Scripted, run: str) -> None:
    rig = scripted(lambda prompt: "<think>\nhm\n</think>\n\nyes")

    def agent(start: AgentRun) -> AgentResult:
        client, messages = client_of(start), [user("really?")]
        for _ in range(2):
            answer = client.chat.completions.create(model=start.model, messages=messages)
            messages += [answer.choices[0].message.model_dump(), user("sure?")]
        return AgentResult(1.0)

    [trajectory] = rig.checked(rig.batch(run, limit=500), agent)
    assert len(trajectory.branches) == 2
    assert "hm" not in rig.text(trajectory.branches[1].prompt_ids)


EMPTY = "{{- '<think>\\n\\n</think>\\n\\n' }}"
"""Part of a template that writes empty reasoning."""


@pytest.mark.parametrize(("condition", "branches"), [("loop.last", 1), ("true", 2)])
def test_empty_reasoning_that_the_template_adds_is_no_part_of_a_branch(
    scripted: Scripted, run: str, condition: str, branches: int
) -> None:
    """Qwen3 writes it for the last message only, GLM for all: then the next prompt is not what the policy has seen."""
    rig = scripted(lambda prompt: "yes")
    rig.tokenizer = copy.deepcopy(rig.tokenizer)
    content = "{{- message.content }}"
    assert content in TEMPLATE
    rig.tokenizer.chat_template = TEMPLATE.replace(
        content, f"{{%- if message.role == 'assistant' and {condition} %}}{EMPTY}{{% endif %}}{content}"
    )

    def agent(start: AgentRun) -> AgentResult:
        client, messages = client_of(start), [user("really?")]
        for _ in range(2):
            answer = client.chat.completions.create(model=start.model, messages=messages)
            messages += [answer.choices[0].message.model_dump(), user("sure?")]
        return AgentResult(1.0)

    [trajectory] = rig.checked(rig.batch(run, limit=500), agent)
    assert len(trajectory.branches) == branches
    assert ("<think>" in rig.text(trajectory.branches[-1].prompt_ids)) == (branches == 2)


def test_stop_strings_end_an_answer_and_are_no_part_of_it(scripted: Scripted, run: str) -> None:
    rig = scripted(lambda prompt: "one two three four five")

    def agent(start: AgentRun) -> AgentResult:
        client = client_of(start)
        answer = client.chat.completions.create(model=start.model, messages=[user("count")], stop=["three", "x"])
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one two ", "stop")
        messages = [user("count"), answer.choices[0].message, user("go on")]
        client.chat.completions.create(model=start.model, messages=messages)
        text = client.completions.create(model=start.model, prompt="count", stop="two", max_tokens=50)
        assert (text.choices[0].text, text.choices[0].finish_reason) == ("one ", "stop")
        return AgentResult(1.0)

    [trajectory] = rig.checked(rig.batch(run, limit=500), agent)
    first, _, second = trajectory.turns
    # The conversation goes on after all that the policy wrote.
    assert [len(branch.turns) for branch in trajectory.branches] == [2, 1]
    # The policy's tokens end with the token that completes the string, with their log-probs.
    assert rig.text(first.token_ids).startswith("one two three")
    assert "four" not in rig.text(first.token_ids)
    assert len(first.log_probs) == len(first.token_ids)
    assert "three" not in rig.text(second.token_ids)


def test_max_tokens_cuts_an_answer_and_the_next_request_continues_it(scripted: Scripted, run: str) -> None:
    rig = scripted(lambda prompt: "one two three four five")

    def agent(start: AgentRun) -> AgentResult:
        client = client_of(start)
        answer = client.chat.completions.create(
            model=start.model,
            messages=[user("count")],
            max_completion_tokens=3,
        )
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        messages = [user("count"), answer.choices[0].message, user("go on")]
        client.chat.completions.create(model=start.model, messages=messages)
        return AgentResult(1.0)

    [trajectory] = rig.checked(rig.batch(run, limit=500), agent)
    [branch] = trajectory.branches
    # The end token is missing, so the observation begins with it.
    assert rig.text(branch.segments[2].token_ids).startswith("<|im_end|>\n<|im_start|>user\ngo on")


def test_completions_continue_their_text_and_token_ids(scripted: Scripted, run: str) -> None:
    rig = scripted(lambda prompt: " two…" if prompt.endswith("one") else " end")
    tokens: list[int] = rig.tokenizer("one")["input_ids"]

    def agent(start: AgentRun) -> AgentResult:
        client = client_of(start)
        first = client.completions.create(model=start.model, prompt="one", max_tokens=2)
        text = "one" + first.choices[0].text
        client.completions.create(model=start.model, prompt=f"{text} three", max_tokens=9)
        by_ids = client.completions.create(model=start.model, prompt=tokens, max_tokens=2)
        assert by_ids.choices[0].text == first.choices[0].text
        several = client.completions.create(model=start.model, prompt=["a", "b"], n=2, max_tokens=2)
        assert len(several.choices) == 4
        return AgentResult(1.0)

    [trajectory] = rig.checked(rig.batch(run, limit=500), agent)
    first = trajectory.branches[0]
    assert [segment.role for segment in first.segments] == ["prompt", "policy", "observation", "policy"]
    assert rig.text(first.segments[2].token_ids) == " three"
    assert len(trajectory.branches) == 6


def test_the_branch_of_the_last_answer_is_the_last_one(scripted: Callable[[Script], Rig], run: str) -> None:
    """A sub-agent between two turns of the main conversation does not end the episode."""
    rig = scripted(lambda prompt: "sub" if "SUB" in prompt else "one")

    def agent(start: AgentRun) -> AgentResult:
        client = client_of(start)

        def ask(messages: list[Any]) -> Any:
            return client.chat.completions.create(model=start.model, messages=messages).choices[0].message

        messages: list[Any] = [user("main")]
        messages += [ask(messages), user("two")]
        ask([user("SUB task")])
        ask(messages)
        return AgentResult(1.0)

    [trajectory] = rig.checked(rig.batch(run, limit=200), agent)
    assert [rig.text(branch.policy_ids).replace("<|im_end|>", "") for branch in trajectory.branches] == [
        "sub",
        "oneone",
    ]
    assert trajectory.turn_rewards == (0, 0, 1.0)
    # They begin with the same ids of the template.
    assert [branch.parent for branch in trajectory.branches] == [-1, 0]
