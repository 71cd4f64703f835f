"""Requests of the OpenAI protocol, and its errors.

A request is checked completely before anything is generated. Fields that would change the distribution of the sampled tokens are
either refused or ignored, because the sampling settings of the run count; see docs/openai-endpoint.md for the list.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, from_json

from quartet.config.template_inputs import check_template_input
from quartet.data.assistant_messages import template_message
from quartet.data.chat_template import Message, TemplateInputs, content_problem

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
MAX_CHOICES = 128
"""Maximum of ``n``, as in OpenAI's API."""
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 16, 1000
"""Maximum number of stop strings of a request, and length of one."""
COMPLETION_TOKENS = 16
"""``max_tokens`` of /v1/completions if it is not given, as in OpenAI's API."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages that chat templates know. Some know others, too."""
MAX_SHOWN = 100
"""Characters of an invalid value that an error repeats."""


class ProtocolError(Exception):
    """An error response in OpenAI's shape. ``param`` is the field of the request that is wrong, ``code`` names the cause."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.headers = status, message, code, param, headers

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ProtocolError:
    """Return the error of a request that is wrong (400)."""
    return ProtocolError(400, message, code, param)


def unsupported(param: str, why: str) -> ProtocolError:
    """Return the error of a field that this server cannot honour (400)."""
    return invalid(f"{param}: {why}", param, "unsupported_parameter")


@dataclass(frozen=True, slots=True)
class Call:
    """A request, checked. ``digest``: 16 bytes of the fields that have an effect, streamed or not.

    ``body``: as it was sent. ``max_tokens`` limits each choice; None leaves the limit to the run. ``logprobs``: report those of
    the sampled tokens. ``store``: the answer may be trained, if it is to a user.
    """

    path: ClassVar[str]
    digest: bytes
    body: bytes
    choices: int
    max_tokens: int | None
    stop: tuple[str, ...]
    logprobs: bool
    stream: bool
    include_usage: bool
    store: bool


@dataclass(frozen=True, slots=True)
class ChatCall(Call):
    """Request of /v1/chat/completions. ``messages`` are as chat templates read them.

    ``inputs`` are those of the request for the template. ``tools``: the answer may call tools. ``forced``: name of the tool that
    it must call, "" for any of them, None for no such condition.
    """

    path = CHAT_PATH
    messages: tuple[Message, ...]
    inputs: TemplateInputs
    tools: bool
    forced: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionCall(Call):
    """Request of /v1/completions. ``prompts`` are texts or token ids; each gets ``choices`` answers."""

    path = COMPLETION_PATH
    prompts: tuple[str | tuple[int, ...], ...]


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _Function(BaseModel):
    name: Annotated[str, Field(min_length=1, max_length=256)]


class _Tool(BaseModel):
    type: Literal["function"]
    function: _Function


def _default(value: Any) -> Any:
    """Return a field with its default for null, which means "not given" in OpenAI's API."""
    return False if value is None else value


Body = TypeVar("Body", bound="_Body")
Flag = Annotated[bool, BeforeValidator(_default)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _Body(BaseModel):
    """Fields of both endpoints. Unknown fields are ignored, as by other servers of this protocol."""

    model_config = ConfigDict(strict=True)

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    stream: Flag = False
    stream_options: _StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    store: bool | None = None


class _ChatBody(_Body):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _Tool | None = None
    functions: Any = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    documents: Any = None
    chat_template_kwargs: Any = None
    chat_template: Any = None
    continue_final_message: Flag = False
    add_generation_prompt: bool | None = None


class _CompletionBody(_Body):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: Flag = False
    suffix: str | None = None
    best_of: int | None = None


def parse_chat(body: bytes) -> tuple[str, ChatCall]:
    """Return the model and the request of a body of /v1/chat/completions. Raises ProtocolError."""
    fields, given, digest = _read(_ChatBody, body)
    for name in ("functions", "function_call"):
        if getattr(fields, name):
            raise unsupported(name, "deprecated; use tools and tool_choice")
    for name in ("chat_template", "audio"):
        if getattr(fields, name) is not None:
            raise unsupported(name, "not supported; remove it")
    if fields.continue_final_message or fields.add_generation_prompt is False:
        name = "continue_final_message" if fields.continue_final_message else "add_generation_prompt"
        raise unsupported(name, "an answer is always a new message; remove it")
    if fields.modalities not in (None, ["text"]):
        raise unsupported("modalities", "the policy writes text only")
    if (fields.response_format or {}).get("type", "text") != "text":
        raise unsupported(
            "response_format",
            "the policy's tokens are sampled without a grammar; ask for the format in a message, or use tools",
        )
    if fields.top_logprobs:
        raise unsupported("top_logprobs", "only the log-probs of the sampled tokens are known; set 0")
    limits = [limit for limit in (fields.max_completion_tokens, fields.max_tokens) if limit is not None]
    # Templates get the tools as they were given.
    choice, tools = fields.tool_choice, list[dict[str, Any]](given.get("tools") or ())
    return fields.model, ChatCall(
        digest=digest,
        body=body,
        choices=fields.n or 1,
        max_tokens=min(limits, default=None),
        stop=_stop_strings(fields.stop),
        logprobs=fields.logprobs,
        stream=fields.stream,
        include_usage=fields.stream_options is not None and fields.stream_options.include_usage,
        store=fields.store is not False,
        messages=tuple(read_message(message, f"messages[{at}]") for at, message in enumerate(fields.messages)),
        inputs=_inputs(fields, tools),
        tools=bool(tools) and choice != "none",
        forced=_forced(choice, tools),
    )


def parse_completion(body: bytes) -> tuple[str, CompletionCall]:
    """Return the model and the request of a body of /v1/completions. Raises ProtocolError."""
    fields, _, digest = _read(_CompletionBody, body)
    choices = fields.n or 1
    if fields.echo:
        raise unsupported("echo", "the prompt is not repeated; remove it")
    if fields.suffix:
        raise unsupported("suffix", "the policy continues a text only; remove it")
    if fields.best_of not in (None, choices):
        raise unsupported("best_of", f"every answer is returned; set it to n ({choices}), or remove it")
    if fields.logprobs:
        raise unsupported("logprobs", "only the log-probs of the sampled tokens are known; set 0 for them, or null")
    prompts = _prompts(fields.prompt)
    if len(prompts) * choices > MAX_CHOICES:
        raise invalid(
            f"prompt: {len(prompts)} prompts with n {choices}; expected at most {MAX_CHOICES} answers", "prompt"
        )
    return fields.model, CompletionCall(
        digest=digest,
        body=body,
        choices=choices,
        max_tokens=COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens,
        stop=_stop_strings(fields.stop),
        logprobs=fields.logprobs is not None,
        stream=fields.stream,
        include_usage=fields.stream_options is not None and fields.stream_options.include_usage,
        store=fields.store is not False,
        prompts=prompts,
    )


def _read(kind: type[Body], body: bytes) -> tuple[Body, dict[str, Any], bytes]:
    """Return the fields of a body, all that it gives, and the digest of the request."""
    try:
        given = from_json(body)
        if not isinstance(given, dict):
            raise ValueError(f"is of type {type(given).__name__}")
        fields = kind.model_validate(given)
        # Fields without an effect, such as metadata and seed, may differ in a repetition.
        names = kind.model_fields.keys() - {"stream", "stream_options"}
        same = {name: value for name, value in given.items() if name in names}
        canonical = json.dumps([kind.__name__, same], sort_keys=True, separators=(",", ":"))
    except ValidationError as error:
        raise _explained(error, given) from None
    except (ValueError, RecursionError) as error:  # Such as a number of thousands of digits.
        raise invalid(f"body: {str(error)[:MAX_SHOWN]}; expected a JSON object") from None
    if fields.logit_bias:
        raise unsupported("logit_bias", "the sampling settings of the run count; remove it")
    return fields, given, hashlib.blake2b(canonical.encode(errors="surrogatepass"), digest_size=16).digest()


def _explained(error: ValidationError, given: Mapping[str, Any]) -> ProtocolError:
    """Return the problem of the first field of a body that has one: the innermost, which says most."""
    items = error.errors(include_url=False, include_context=False)
    found = [(_path(item, given), item) for item in items if item["loc"][:1] == items[0]["loc"][:1]]
    path = max((path for path, _ in found), key=len)
    same = [item for other, item in found if other == path]
    where, param = ".".join(path) or "body", path[0] if path else None
    if any(item["type"] == "missing" for item in same):
        return invalid(f"{where}: missing", param, "missing_required_parameter")
    value = repr(same[0].get("input"))
    shown = value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}…"
    # One for each type that the field may have. pydantic names the classes of objects.
    problems = [re.sub(r"dictionary or instance of \w+", "object", item["msg"]) for item in same]
    first, *others = dict.fromkeys(problems)
    expected = " or ".join([first, *(other.removeprefix("Input should be ") for other in others)])
    return invalid(f"{where}: {expected}, not {shown}", param, "invalid_value")


def _path(item: ErrorDetails, given: Any) -> tuple[str, ...]:
    """Return the place of a problem in a body, without the names of types that pydantic adds for alternatives."""
    result = list[str]()
    for part in item["loc"]:
        is_index = isinstance(given, list) and isinstance(part, int)
        if is_index or (isinstance(given, dict) and part in given):
            given = given[part]
            result.append(str(part))
    if item["type"] == "missing":
        result.append(str(item["loc"][-1]))
    return tuple(result)


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    # An empty text would be completed by every token. OpenAI's API ignores it, too.
    strings = tuple(string for string in strings if string)
    if len(strings) > MAX_STOP_STRINGS or any(len(string) > MAX_STOP_CHARACTERS for string in strings):
        raise invalid(
            f"stop: expected at most {MAX_STOP_STRINGS} texts of at most {MAX_STOP_CHARACTERS} characters", "stop"
        )
    return strings


def _prompts(prompt: str | Sequence[Any]) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts of a request: one text, several, the ids of one, or the ids of several."""
    prompts: tuple[Any, ...]
    if isinstance(prompt, str):
        prompts = (prompt,)
    elif prompt and isinstance(prompt[0], int):
        prompts = (tuple(prompt),)
    else:
        prompts = tuple(each if isinstance(each, str) else tuple(each) for each in prompt)
    if not prompts or not all(prompts):
        raise invalid("prompt: is empty; expected a text or token ids", "prompt")
    return prompts


def _inputs(fields: _ChatBody, tools: list[dict[str, Any]]) -> TemplateInputs:
    given = {"documents": fields.documents, "chat_template_kwargs": fields.chat_template_kwargs}
    for name, value in given.items():
        if value is not None:
            try:
                check_template_input(name, value)
            except (ValueError, RecursionError) as error:
                raise invalid(f"{name}: {error}", name) from None
    return TemplateInputs(tools or None, fields.documents, fields.chat_template_kwargs)


def _forced(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of the tool that the answer must call, "" for any, None if it may do without. Raises ProtocolError."""
    if choice in (None, "none", "auto"):
        return None
    if not tools:
        raise invalid("tool_choice: needs tools; give them, or remove it", "tool_choice")
    if choice == "required":
        return ""
    name, names = choice.function.name, [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise invalid(f"tool_choice: no tool is named {name[:MAX_SHOWN]!r}", "tool_choice")
    return str(name)


def read_message(message: Mapping[str, Any], where: str) -> Message:
    """Return a message as templates read it: only what is given, and the arguments of tool calls as objects.

    ``where`` names it in errors. Raises ProtocolError.
    """
    result = {name: value for name, value in message.items() if value is not None}
    role = result.get("role")
    if not isinstance(role, str) or not role:
        raise invalid(f"{where}.role: missing; expected {', '.join(ROLES[:-1])} or {ROLES[-1]}", "messages")
    if role == "developer":
        # The name of newer models for the same. Templates do not know it.
        result["role"] = "system"
    if "reasoning" in result and "reasoning_content" not in result:
        result["reasoning_content"] = result.pop("reasoning")
    calls = result.get("tool_calls", [])
    if not isinstance(calls, list) or not all(map(_is_tool_call, calls)):
        raise invalid(
            f"{where}.tool_calls: expected a list of objects, each with a function of a name and arguments", "messages"
        )
    try:
        result = template_message(result)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{where}.tool_calls: {str(error)[:200]}", "messages") from None
    if role == "assistant":
        result.setdefault("content", "")
    if problem := content_problem(result):
        raise invalid(f"{where}: {problem}", "messages")
    return result


def _is_tool_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def answer_message(content: str | None, reasoning: str | None, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an answer as a message, as it is sent to a client."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message
