"""Chat templates get tools, documents, variables and text parts, from the row or the config."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import transformers

from quartet.config.loading import config_of
from quartet.config.root import Config
from quartet.config.template_inputs import TEMPLATE_KEYS, check_template_input
from quartet.data.chat_template import ChatTemplate, TemplateInputs
from quartet.data.prompt_cache import FileDigest, cache_key
from quartet.data.prompt_encoding import PromptEncoder, encode_lines, select_prompts
from quartet.data.prompt_lines import iterate_prompts
from quartet.data.prompt_settings import PromptSettings
from quartet.errors import ConfigError, DataError
from quartet.run_directory.identity import check_settings, fixed_settings
from tests.environments import chats

ALL = """{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }} {% endfor %}</tools>{% endif %}{%
if documents %}<docs>{% for each in documents %}{{ each.title }} {% endfor %}</docs>{% endif %}{%
for message in messages %}{{ message.role }}:{{ '' + message.content }}{%
for call in message.tool_calls or [] %}<call>{{ call.function.arguments | tojson }}</call>{% endfor %};{% endfor %}{%
if add_generation_prompt %}assistant:{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{%
endif %}"""
"""A template in the style of those with tools and a switch for reasoning."""
PARTS = """{% for message in messages %}{{ message.role }}:{% if message.content is string %}{{ message.content }}{% else %}{%
for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}"""
"""A template that reads texts and parts."""
ONLY_PARTS = """{% for message in messages %}{{ message.role }}:{% for part in message.content %}{% if part['type'] == 'text' %}{{
part['text'] }}{% endif %}{% endfor %};{% endfor %}"""
"""A template that reads parts, as some for images do."""
AS_JSON = "{% for message in messages %}{{ message | tojson }};{% endfor %}"

WEATHER, CLOCK = ({"type": "function", "function": {"name": name}} for name in ("weather", "clock"))
QUIET = {"enable_thinking": False}
USER = {"role": "user", "content": "hi"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "clock", "arguments": {"zone": None}}}],
}


def text(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


def render(template: str, messages: Sequence[dict[str, Any]], ending: Any = "nothing", **inputs: Any) -> str:
    return ChatTemplate(chats.tokenizer(template)).render(messages, ending, TemplateInputs(**inputs))


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (chats.CHATML, text("a", "b"), "<|im_start|>user\na\nb<|im_end|>\n"),
        (ALL, text("a", "b"), "user:a\nb;"),
        (ALL, [], "user:;"),
        (PARTS, text("a", "b"), "user:ab;"),
        (ONLY_PARTS, text("a", "b"), "user:ab;"),
        (ONLY_PARTS, "ab", "user:ab;"),
        (AS_JSON, text("a", "b"), '{"role": "user", "content": "a\\nb"};'),
        (chats.DROPS_ALL_THOUGHTS, text("<think>a</think>b"), "<|im_start|>user\nb<|im_end|>\n"),
    ],
)
def test_text_parts_reach_templates_that_read_them_and_are_joined_for_others(
    template: str, content: Any, expected: str
) -> None:
    assert render(template, [{"role": "user", "content": content}]) == expected


def test_content_that_is_null_or_missing_beside_tool_calls_is_an_empty_text() -> None:
    missing = {name: value for name, value in CALL.items() if name != "content"}
    expected = 'user:hi;assistant:<call>{"zone": null}</call>;'
    assert render(ALL, [USER, CALL]) == render(ALL, [USER, missing]) == expected
    assert render(chats.HEADERS, [CALL]).endswith("<|end_header_id|>\n\n<|eot_id|>")


def test_the_last_of_text_parts_is_continued() -> None:
    continued = {"role": "assistant", "content": text("a", "b")}
    assert render(ALL, [USER, continued], "open message") == "user:hi;assistant:a\nb"
    assert render(PARTS, [USER, continued], "open message") == "user:hi;assistant:ab"


def config_with(sections: Mapping[str, Any] = MappingProxyType({}), /, **data: Any) -> Config:
    data = {"prompts": "p.jsonl", **data}
    return config_of({"data": data, "actor": {"model": "a"}, "reward": {"model": "b"}, **sections})


def texts(
    path: Path,
    rows: Sequence[dict[str, Any]],
    template: str = ALL,
    sections: Mapping[str, Any] = MappingProxyType({}),
    **data: Any,
) -> tuple[list[str], list[str]]:
    """Return the prompts of rows as text, and the notes about them."""
    path = path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [settings] = PromptSettings.for_training(config_with(sections, prompts=str(path), **data))
    settings = PromptSettings.from_json(json.loads(json.dumps(settings.to_json())))
    tokenizer = chats.tokenizer(template)
    encoded = encode_lines(settings, iterate_prompts(settings, path), PromptEncoder.of(tokenizer, "m"), frozenset())
    prompts = select_prompts(encoded, settings, len(tokenizer))
    return [tokenizer.decode(prompt.token_ids) for prompt in prompts.prompts], prompts.notes


def test_values_of_a_row_replace_those_of_the_config(tmp_path: Path) -> None:
    messages = [USER]
    rows: list[dict[str, Any]] = [
        {"messages": messages},
        {"messages": messages, "tools": [WEATHER, CLOCK], "documents": [{"title": "c", "text": "d"}]},
        {"prompt": messages, "tools": json.dumps([CLOCK]), "chat_template_kwargs": json.dumps({"other": 1})},
        {"messages": messages, "tools": [], "documents": "", "chat_template_kwargs": {"enable_thinking": True}},
        {"messages": messages, "tools": None, "documents": None, "chat_template_kwargs": None},
    ]
    start, end = "<tools>weather </tools><docs>a </docs>", "user:hi;assistant:<think></think>"
    written, notes = texts(
        tmp_path, rows, tools=[WEATHER], documents=[{"title": "a", "text": "b"}], chat_template_kwargs=QUIET
    )
    assert written == [
        f"{start}{end}",
        f"<tools>weather clock </tools><docs>c </docs>{end}",
        f"<tools>clock </tools><docs>a </docs>{end}",
        "<docs>a </docs>user:hi;assistant:",
        f"{start}{end}",
    ]
    assert [note for note in notes if "warning" in note] == [
        "warning: chat_template_kwargs other: not used: the template of a reads no variable of this name; correct it, or remove "
        "it"
    ]
    assert texts(tmp_path, rows[:1])[0] == ["user:hi;assistant:"]


def test_chats_of_message_templates_get_the_values_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"question": "hi"}\n')
    chats_of = {
        "name": "a",
        "path": str(tmp_path / "p.jsonl"),
        "message_templates": [{"role": "user", "content": "{question}"}],
    }
    [settings] = PromptSettings.for_training(config_with(prompts=None, sets=[chats_of], chat_template_kwargs=QUIET))
    encoder = PromptEncoder.of(tokenizer := chats.tokenizer(ALL), "m")
    encoded = encode_lines(settings, iterate_prompts(settings, settings.path), encoder, frozenset())
    assert tokenizer.decode(encoded.token_ids) == "user:hi;assistant:<think></think>"


def test_functions_get_messages_and_tools_as_the_row_has_them(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": text("a")}, CALL, USER], "tools": json.dumps([CLOCK])}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    [settings] = PromptSettings.for_training(config_with(prompts=str(tmp_path / "p.jsonl")))
    [line] = iterate_prompts(settings, settings.path)
    assert json.loads(line.fields) == row


def test_columns_of_a_prompt_that_is_text_are_for_functions_only(tmp_path: Path) -> None:
    written, _ = texts(tmp_path, [{"prompt": "hi", "documents": ["a text"], "tools": 5}])
    assert written == ["hi"]


def test_a_template_that_ignores_what_it_gets_is_warned_of(tmp_path: Path) -> None:
    rows = [{"messages": [USER]}, {"messages": [USER], "tools": [CLOCK], "chat_template_kwargs": QUIET}]
    _, notes = texts(tmp_path, rows, chats.CHATML)
    warnings = [note.removeprefix("warning: ") for note in notes if note.startswith("warning: ")]
    assert [warning.rpartition(": ")[0] or warning.partition(";")[0] for warning in warnings] == [
        "the template of a writes the same with and without tools",
        "chat_template_kwargs enable_thinking: not used",
    ]


def unread(path: Path, template: str, environment: Mapping[str, Any] | None = None, **variables: Any) -> str:
    """Return the variables that a template is warned not to read."""
    sections = {} if environment is None else {"environment": environment, "rollout": {"max_turns": 2}}
    _, notes = texts(path, [{"messages": [USER]}], template, sections, chat_template_kwargs=variables)
    found = [note.removeprefix("warning: chat_template_kwargs ") for note in notes if "reads no variable" in note]
    return found[0].partition(":")[0] if found else ""


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (ALL, "other"),
        ("{% macro turn(m) %}{{ m.content ~ enable_thinking }}{% endmacro %}{{ turn(messages[0]) }}{{ other }}", ""),
        (
            "{% for m in messages %}{% generation %}{{ m.content ~ other }}{%- endgeneration -%}{% break %}{% endfor %}",
            "enable_thinking",
        ),
        ("{{ messages[0].content }}{% set enable_thinking = true %}{{ enable_thinking }}", "enable_thinking, other"),
    ],
    ids=["plain", "macro", "tags of transformers", "set by the template"],
)
def test_variables_that_a_template_never_reads_are_warned_of(template: str, names: str, tmp_path: Path) -> None:
    """A value that happens to change nothing, such as that of the template's default, is not."""
    for value in (True, False, None):
        assert unread(tmp_path, template, enable_thinking=value, other=value) == names


def test_a_long_list_of_unread_variables_is_cut(tmp_path: Path) -> None:
    many = {f"a{number}": number for number in range(10, 22)}
    assert unread(tmp_path, ALL, **many).endswith("a16, a17 and 4 more")


def test_variables_may_be_for_any_template_of_the_tokenizer_or_for_that_of_the_environment(tmp_path: Path) -> None:
    several: Any = {"default": chats.CHATML, "tool_use": ALL}
    assert unread(tmp_path, several, enable_thinking=True, other=1) == "other"
    (tmp_path / "turns.jinja").write_text("{{ other }}")
    chat = {"class_name": "a:B", "observations": "chat"}
    assert unread(tmp_path, ALL, chat, other=1) == "other"
    assert unread(tmp_path, ALL, {**chat, "chat_template": str(tmp_path / "turns.jinja")}, other=1) == ""


def test_no_argument_of_transformers_can_be_set_as_a_variable() -> None:
    functions: list[Callable[..., Any]] = [
        transformers.PreTrainedTokenizerBase.apply_chat_template,
        transformers.utils.chat_template_utils.render_jinja_template,
    ]
    names = {name for function in functions for name in inspect.signature(function).parameters} - {"kwargs"}
    assert {"conversation", "conversations", "tokenize", "return_dict", "self"} <= names
    for name in names:
        with pytest.raises(ValueError, match=f"{name}: is not a variable that can be set here"):
            check_template_input("chat_template_kwargs", {name: 1})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"tools": {"a": 1}},
            r":1: tools: is of type dict; expected a list of objects such as .*if it is for something else",
        ),
        ({"tools": ["weather"]}, r":1: tools: item 1 is of type str; expected a list of objects"),
        ({"tools": "weather"}, r":1: tools: Expecting value"),
        ({"documents": ["a"]}, r":1: documents: item 1 is of type str; expected .*title"),
        ({"chat_template_kwargs": [1]}, r":1: chat_template_kwargs: is of type list; expected an object"),
        (
            {"chat_template_kwargs": {"tokenize": True}},
            r":1: chat_template_kwargs: tokenize: is not a variable .* remove",
        ),
        ({"chat_template_kwargs": {"tools": []}}, r":1: chat_template_kwargs: tools: is not .*; give tools beside it"),
        *(
            (
                {"chat_template_kwargs": {name: 1}},
                r":1: chat_template_kwargs: '.*': is not the name of a variable; expected",
            )
            for name in ("", "a-b", "1a", "a.b", "a" * 65)
        ),
        (
            {"chat_template_kwargs": {f"a{number}": 1 for number in range(65)}},
            r":1: chat_template_kwargs: has 65 variables, expected at most 64",
        ),
    ],
)
def test_values_that_no_template_can_get_are_refused_with_row_and_column(
    row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        texts(tmp_path, [{"messages": [USER], **row}])
    if not isinstance(value := next(iter(row.values())), str):
        with pytest.raises(ConfigError, match=rf"data\.{next(iter(row))}"):
            config_with(**{next(iter(row)): value})


@pytest.mark.parametrize("key", TEMPLATE_KEYS)
def test_values_that_are_too_large_are_refused(key: str) -> None:
    fits = {"a": "\N{EURO SIGN}" * 340_000}
    config_with(**{key: fits if key == "chat_template_kwargs" else [fits]})
    large = {**fits, "b": fits["a"]}
    with pytest.raises(
        ConfigError, match=rf"data\.{key}: 20400\d\d bytes as JSON, expected at most 1048576; shorten it"
    ):
        config_with(**{key: large if key == "chat_template_kwargs" else [large]})


def test_text_parts_and_tools_of_parquet_are_read_without_added_nulls(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"messages": [{"role": "user", "content": text("a")}], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [{"role": "user", "content": text("b")}], "chat_template_kwargs": {"other": 1}},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    [settings] = PromptSettings.for_training(config_with(prompts=str(tmp_path / "p.parquet")))
    lines = list(iterate_prompts(settings, settings.path))
    assert [line.inputs.chat_template_kwargs for line in lines] == [{"enable_thinking": False}, {"other": 1}]
    assert [json.loads(line.fields) for line in lines] == rows


def test_a_run_records_them_and_resumes_with_the_same_only() -> None:
    before = fixed_settings(config_with(tools=[CLOCK], chat_template_kwargs=QUIET))
    check_settings(before, fixed_settings(config_with(tools=[CLOCK], chat_template_kwargs=QUIET)), Path("runs/a"))
    for other in (
        {"tools": [WEATHER], "chat_template_kwargs": QUIET},
        {"tools": [CLOCK], "chat_template_kwargs": {"enable_thinking": True}},
        {"tools": [CLOCK], "chat_template_kwargs": {"enable_thinking": 0}},
        {"tools": [CLOCK]},
        {"tools": [CLOCK], "chat_template_kwargs": QUIET, "documents": [{"title": "a"}]},
    ):
        with pytest.raises(ConfigError, match=r"--resume: data\.(tools|documents|chat_template_kwargs)"):
            check_settings(before, fixed_settings(config_with(**other)), Path("runs/a"))


def test_other_values_of_the_config_miss_the_cache(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')

    def key(**data: Any) -> str | None:
        tree = {
            "data": {"prompts": str(tmp_path / "p.jsonl"), **data},
            "actor": {"model": str(tmp_path)},
            "reward": {"model": "b"},
        }
        [settings] = PromptSettings.for_training(config_of(tree))
        return cache_key(settings, settings.path, FileDigest.of(settings.path))

    # A template may write an object, whose keys have an order.
    turned = dict(reversed(CLOCK.items()))
    keys = [key(), key(tools=[CLOCK]), key(tools=[turned]), key(documents=[{"title": "a"}])]
    keys += [key(chat_template_kwargs=each) for each in (QUIET, {"enable_thinking": 0})]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key() == key(tools=[]) == keys[0]
