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
THINKING = "The question is about a rule of the house. The rule says four weeks for books, so that is it."


@dataclass(frozen=True)
class Request:
    """One request of a client.

    Attributes:
        messages, variables: for the chat template.
        answer: what the model says then, thinking and tool calls included.
        thinking: what the model thinks before.
    """

    messages: list[Message]
    answer: str
    thinking: str = ""
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


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def question(number: int) -> str:
    return f"{number}: for how long may someone borrow book number {number * 7919}, and from when on?"


def answer(number: int) -> str:
    return f"Book {number * 7919} is lent for four weeks, which begin on the day after it was collected."


def turns(num_turns: int, system: str = "", thinking: str = "", **variables: Any) -> list[Request]:
    """The requests of a conversation of `num_turns` turns, each with all before it and no thinking."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    requests = []
    for number in range(1, num_turns + 1):
        messages = [*messages, user(question(number))]
        requests.append(Request(messages, answer(number), thinking, variables))
        messages = [*messages, assistant(answer(number))]
    return requests


def edited(request: Request, index: int) -> Request:
    """The request with another text in user message `index`, the last one then."""
    messages = [*request.messages[:index], user("Another question: are two films lent for two weeks?")]
    return Request(messages, answer(99), request.thinking, request.variables)


def histories(with_system: bool = True, with_tools: bool = True) -> Iterator[History]:
    """The histories that a template can render, if it knows system prompts and tools or not."""
    today, tomorrow = (f"{datetime.now() + timedelta(days):%A, %d %B %Y}" for days in (0, 1))
    system = SYSTEM.format(date=today) if with_system else ""
    variables = {"tools": TOOLS} if with_tools else {}
    first = int(with_system)  # the first user message
    three = turns(3, system, **variables)
    yield History("next turn", three)
    yield History("answer regenerated", [*three, three[-1]])
    yield History("last turn edited", [*three, edited(three[-1], first + 4)])
    yield History("earlier turn edited", [*three, edited(three[-1], first + 2)])
    yield History("first turn edited", [*three, edited(three[-1], first)])
    yield History("sent whole, last turn edited", [three[-1], edited(three[-1], first + 4)])
    yield History("sent whole, earlier turn edited", [three[-1], edited(three[-1], first + 2)])
    yield History("sent whole, earlier answer regenerated", [three[-1], three[1]])
    yield History("thinking stripped", turns(3, system, THINKING, **variables), "thinking")
    if with_system:
        other = SYSTEM.format(date=tomorrow)
        changed = [{"role": "system", "content": other}, *three[0].messages[1:]]
        yield History("new system date", [three[0], Request(changed, answer(1), "", variables)])
    if with_tools:
        yield from tool_histories(system)


def tool_histories(system: str) -> Iterator[History]:
    """A tool is called, its result is sent, and the next question follows."""
    variables = {"tools": TOOLS}
    (asked,) = turns(1, system, THINKING, **variables)
    function = {"name": "find_book", "arguments": {"title": "The Name of the Rose"}}
    call = {"id": "call00001", "type": "function", "function": function}
    called = {
        "role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": THINKING,
    }  # fmt: skip
    result = {
        "role": "tool", "content": '{"floor": 2, "shelf": "E 17", "lent": false}', "name": "find_book",
        "tool_call_id": "call00001",
    }  # fmt: skip
    told = Request([*asked.messages, called, result], "It stands on floor 2.", THINKING, variables)
    then = [*told.messages, assistant(told.answer), user(question(2))]
    yield History("tool result", [asked, told], "tools")
    yield History("turn after a tool", [asked, told, Request(then, answer(2), "", variables)], "tools")


if __name__ == "__main__":
    print(__doc__)
