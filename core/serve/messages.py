"""The messages and tools of a chat, in the form that chat templates read."""

import json
from dataclasses import dataclass
from typing import Any

from .errors import bad_field
from .fields import Fields, short

MAX_MESSAGES = 10_000
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOL_CHOICES = ("none", "auto", "required")
_NOT_VARIABLES = frozenset((
    "self", "messages", "conversation", "add_generation_prompt", "marked_messages", "max_prompt_tokens",
    "tools", "tool_choice",
    "chat_template", "continue_final_message", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "documents",
    "sanitize_control_tokens",
))  # fmt: skip
"""Names that mean something to whoever renders a template; the rest are a template's own."""


@dataclass(frozen=True)
class Chat:
    """A chat for a template.

    Attributes:
        messages: role, content as one string, and what else clients and templates agree on.
        marked: the messages at whose end the client wants a checkpoint.
        variables: what else the template is given: tools, tool_choice and the client's own variables.
    """

    messages: list[dict[str, Any]]
    marked: tuple[int, ...]
    variables: dict[str, Any]


def read_chat(body: Fields) -> Chat:
    """The chat of a request; a RequestError names the first field that is wrong."""
    messages = body.objects("messages")
    if not messages or len(messages) > MAX_MESSAGES:
        found = "missing" if messages is None else f"a list of {len(messages)}"
        raise bad_field("messages", f"messages is {found}; accepted: a list of 1 to {MAX_MESSAGES} messages")
    read = [_message(message) for message in messages]
    marked = tuple(i for i, message in enumerate(messages) if _has_mark(message))
    return Chat(read, marked, _variables(body))


def _message(message: Fields) -> dict[str, Any]:
    role = message.text("role")
    if role not in _ROLES:
        raise message.wrong("role", ", ".join(_ROLES))
    plain = {name: value for name, value in message.values.items() if value is not None}
    plain.pop("cache_control", None)
    tool_calls = message.objects("tool_calls")
    if tool_calls is not None:
        plain["tool_calls"] = [_tool_call(call) for call in tool_calls]
    message.text("name")
    message.text("tool_call_id")
    may_be_empty = role == "assistant" and bool(tool_calls)
    plain["content"] = _content(message, may_be_empty)
    return plain


def _content(message: Fields, may_be_empty: bool) -> str:
    content = message.values.get("content")
    if content is None and may_be_empty:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise message.wrong("content", "a string, or a list of parts of type text")
    return "\n".join(_part(part) for part in message.objects("content") or [])


def _part(part: Fields) -> str:
    kind = part.text("type")
    if kind != "text":
        raise part.wrong("type", "'text', because the model reads text only")
    text = part.text("text")
    if text is None:
        raise part.wrong("text", "a string")
    return text


def _tool_call(call: Fields) -> dict[str, Any]:
    """A tool call whose arguments are an object, which is what templates of transformers expect."""
    function = call.object("function")
    if not function.text("name"):
        raise function.wrong("name", "a string that is not empty")
    arguments = function.values.get("arguments")
    if not isinstance(arguments, (str, dict, type(None))):
        raise function.wrong("arguments", "a string with a JSON object")
    return {**call.values, "function": {**function.values, "arguments": _arguments(arguments)}}


def _arguments(arguments: str | dict[str, Any] | None) -> Any:
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments  # a model may have written it; the template decides
    return parsed if isinstance(parsed, dict) else arguments


def _has_mark(message: Fields) -> bool:
    """Whether the message, or one of its parts, has the field `cache_control`."""
    content = message.values.get("content")
    holders = [message, *((message.objects("content") or []) if isinstance(content, list) else [])]
    found = False
    for holder in holders:
        if holder.values.get("cache_control") is not None:
            if holder.object("cache_control").text("type") != "ephemeral":
                raise holder.wrong("cache_control", "an object of type 'ephemeral'")
            found = True
    return found


def _variables(body: Fields) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    has_own = body.values.get("chat_template_kwargs") is not None
    for name, value in (body.object("chat_template_kwargs").values if has_own else {}).items():
        if name in _NOT_VARIABLES or not name.isidentifier():
            message = f"chat_template_kwargs has the name {short(name)}; accepted: a template's own variables"
            raise bad_field("chat_template_kwargs", message)
        variables[name] = value
    tools = body.objects("tools")
    names = [_tool_name(tool) for tool in tools or []]
    if tools:
        variables["tools"] = [dict(tool.values) for tool in tools]
    choice = body.values.get("tool_choice")
    if choice is not None:
        variables["tool_choice"] = _tool_choice(body, names)
    return variables


def _tool_name(tool: Fields) -> str:
    if tool.text("type") != "function":
        raise tool.wrong("type", "'function'")
    function = tool.object("function")
    name = function.text("name")
    if not name:
        raise function.wrong("name", "a string that is not empty")
    return name


def _tool_choice(body: Fields, names: list[str]) -> Any:
    choice = body.values["tool_choice"]
    if isinstance(choice, str):
        if choice not in _TOOL_CHOICES or (choice == "required" and not names):
            raise body.wrong("tool_choice", "'none', 'auto', 'required' (with tools) or one of the tools")
        return choice
    function = body.object("tool_choice").object("function")
    if function.values.get("name") not in names:
        raise function.wrong("name", "the name of one of the tools")
    return choice
