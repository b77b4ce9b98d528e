"""What clients send one after the other in a conversation, for `chat_marks.py`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

Message = dict[str, Any]

SYSTEM = (
    "You help the staff of a library. You know its rules: a book is lent for four weeks, a film for one; "
    "whoever returns either late pays ten cents a day, and nobody borrows more than twenty things at once. "
    "Answer in the language of the question, briefly, and name the rule that you apply. Today is {date}. "
    "The library is open from ten to seven, on Saturdays until two, and closed on Sundays and on holidays."
)
PARAMETERS = {
    "type": "object",
    "properties": {"title": {"type": "string", "description": "the title of a book, or a part of it"}},
    "required": ["title"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "find_book", "description": "Where is a book?", "parameters": PARAMETERS},
    }
]
THINKING = "The rule for books says four weeks."


@dataclass(frozen=True)
class Request:
    """One request of a client.

    Attributes:
        messages, variables: for the chat template.
        answer: what the model says then: an assistant's message, perhaps with thinking and tool calls.
    """

    messages: list[Message]
    answer: Message
    variables: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class History:
    """Requests of which the last is the one in question.

    Attributes:
        name: what the client did.
        requests: in order.
        needs: what a template must know: "tools", "thinking", or nothing.
    """

    name: str
    requests: list[Request]
    needs: str = ""


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, thinking: str = "") -> Message:
    message = {"role": "assistant", "content": text}
    return message | {"reasoning_content": thinking} if thinking else message


def question(number: int) -> str:
    return f"{number}: for how long may someone borrow book number {number * 7919}, and from when on?"


def answer(number: int) -> str:
    return f"Book {number * 7919}: four weeks, from the next day on."


def turns(num_turns: int, system: str = "", thinking: str = "", **variables: Any) -> list[Request]:
    """The requests of a conversation of `num_turns` turns, each with all before it and no thinking."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    requests = []
    for number in range(1, num_turns + 1):
        messages = [*messages, user(question(number))]
        requests.append(Request(messages, assistant(answer(number), thinking), variables))
        messages = [*messages, assistant(answer(number))]
    return requests


def edited(request: Request, index: int) -> Request:
    """The request with another text in user message `index`, the last one then."""
    messages = [*request.messages[:index], user("Another question: are two films lent for two weeks?")]
    return Request(messages, assistant(answer(99)), request.variables)


def histories(with_system: bool = True, with_tools: bool = True) -> Iterator[History]:
    """The histories for a template, with a system prompt and tools or without."""
    today, tomorrow = (f"{datetime.now() + timedelta(days):%A, %d %B %Y}" for days in (0, 1))
    system = SYSTEM.format(date=today) if with_system else ""
    variables = {"tools": TOOLS} if with_tools else {}
    first = int(with_system)  # the first user message
    three = turns(3, system, **variables)
    last = three[-1]
    yield History("next turn", three)
    yield History("answer regenerated", [*three, last])
    yield History("last turn edited", [*three, edited(last, first + 4)])
    yield History("earlier turn edited", [*three, edited(last, first + 2)])
    yield History("another conversation", [*three, edited(last, first)])
    yield History("sent whole, last turn edited", [last, edited(last, first + 4)])
    yield History("sent whole, earlier turn edited", [last, edited(last, first + 2)])
    yield History("sent whole, earlier answer regenerated", [last, three[1]])
    yield History("thinking stripped", turns(3, system, THINKING, **variables), "thinking")
    if with_system:
        other = SYSTEM.format(date=tomorrow)
        changed = [{"role": "system", "content": other}, *three[0].messages[1:]]
        yield History("new system date", [three[0], Request(changed, three[0].answer, variables)])
    if with_tools:
        yield from tool_histories(system)


def tool_histories(system: str) -> Iterator[History]:
    """A tool is called, its result is sent, and the next question follows."""
    variables = {"tools": TOOLS}
    function = {"name": "find_book", "arguments": {"title": "The Name of the Rose"}}
    call = {"id": "call00001", "type": "function", "function": function}
    called = assistant("", THINKING) | {"tool_calls": [call]}
    result = {
        "role": "tool", "content": '{"floor": 2, "shelf": "E 17", "lent": false}', "name": "find_book",
        "tool_call_id": "call00001",
    }  # fmt: skip
    messages = turns(1, system)[0].messages
    asked = Request(messages, called, variables)
    found = Request([*messages, called, result], assistant("On floor 2.", THINKING), variables)
    then = [*found.messages, assistant("On floor 2."), user(question(2))]
    yield History("tool result", [asked, found], "tools")
    yield History(
        "turn after a tool", [asked, found, Request(then, assistant(answer(2)), variables)], "tools"
    )
