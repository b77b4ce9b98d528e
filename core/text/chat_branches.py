"""Where conversations that begin alike branch, in the text of a chat."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""Messages and whether an answer is to follow, to the text of the chat."""

MAX_MARKED_MESSAGES = 16
"""Of more marked messages the last ones count: each costs a rendering."""
_MAX_RENDERED = 20_000
"""Messages of all renderings together: a chat of thousands of messages has fewer marks, not late ones."""
_NUM_TURNS = 3
"""User turns, counted from the end, whose branches are looked for."""
_CALL_ID = "abcde1234"
"""Some templates accept no id of another length."""
_NUM_DATES = 2
"""One may be the template's and one the client's."""
_NUM_CHARACTERS_AFTER = 64
"""Characters after a branch on which the tokens before it may depend."""
_DATE_FORMS = (
    "%Y-%m-%d", "%Y/%m/%d", "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%A, %B %d", "%A, %b %d", "%A, %d %B",
    "%A %d %B", "%B %d, %Y", "%b %d, %Y", "%B %d %Y", "%b %d %Y", "%d %B %Y", "%d %b %Y",
)  # fmt: skip


class Branch(NamedTuple):
    """Another chat leaves the text after `num_characters`; that chat goes on with `other_text`."""

    num_characters: int
    other_text: str


class ChatBranches:
    """Renders the chats that clients send next, and finds where each leaves the text.

    A template may change what it wrote before: it drops the thinking of earlier answers, moves the tools to
    the last user message, or merges messages. So no position is computed from one text. Each is the length
    of the longest common prefix with another chat's text. A chat that the template refuses gives no branch.

    A chat of one turn takes 3 renderings beside its own, a longer one at most 8. Tools take one more, and so
    does each marked message. A rendering with which `_MAX_RENDERED` messages are exceeded is left out.

    Args:
        text: of `messages`, as `render` gave it.
        messages: the chat, oldest message first.
        render: the template.
        has_tools: whether the answer may call a tool.
    """

    def __init__(self, text: str, messages: Sequence[Message], render: Render, has_tools: bool) -> None:
        self._text = text
        self._messages = list(messages)
        self._render = render
        self._has_tools = has_tools
        self._num_rendered = 0
        self._other = _character_outside(text)
        users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
        self._first_user = users[0] if users else None
        self._last_users = users[-_NUM_TURNS:][::-1]

    def find(self, marked_messages: Sequence[int] = ()) -> Iterator[Branch]:
        """The branches, the worthiest first; some may be equal.

        1. After each marked message.
        2. Before the first user message: another conversation with the same system prompt and tools.
        3. Where the next turn leaves the text, where the result of a tool does, and before the generation
           prompt.
        4. Before the last user message, which is edited.
        5. Before the first dates of today in the system prompt.
        6. The two user turns before: after the message, whose answer is made anew, and before it.
        """
        for message in sorted(set(marked_messages))[-MAX_MARKED_MESSAGES:]:
            yield from self._after(message)
        system = [] if self._first_user is None else [*self._before(self._first_user)]
        yield from system
        yield from self._next_turn(self._messages)
        if self._has_tools:
            yield from self._tool_result()
        yield from self._leaves(self._messages, False)
        for user in self._last_users[:1]:
            yield from self._edited(user)
        for branch in system:
            yield from self._dates(branch.num_characters)
        for user in self._last_users[1:]:
            if self._messages[user + 1].get("role") == "assistant":
                yield from self._leaves(self._messages[: user + 1], True)
            yield from self._edited(user)

    def _after(self, index: int) -> Iterator[Branch]:
        if index + 1 == len(self._messages):
            return self._next_turn(self._messages)
        if self._messages[index + 1].get("role") == "assistant":
            return self._next_turn(self._messages[: index + 1])
        return self._before(index + 1)

    def _edited(self, user: int) -> Iterator[Branch]:
        return iter(()) if user == self._first_user else self._before(user)

    def _before(self, index: int) -> Iterator[Branch]:
        """Message `index` has another text, and no answer yet."""
        other = {**self._messages[index], "content": self._text_like(self._messages[index])}
        return self._leaves([*self._messages[:index], other], True)

    def _next_turn(self, messages: Sequence[Message]) -> Iterator[Branch]:
        """After `messages` come an answer and another user message."""
        answer = {"role": "assistant", "content": self._other}
        question = {"role": "user", "content": self._other}
        is_answered = bool(messages) and messages[-1].get("role") == "assistant"
        return self._leaves([*messages, *([] if is_answered else [answer]), question], True)

    def _tool_result(self) -> Iterator[Branch]:
        """After the messages come thoughts, the call of a tool, and its result."""
        function = {"name": self._other, "arguments": {}}
        call = {"id": _CALL_ID, "type": "function", "function": function}
        calling = {
            "role": "assistant", "content": "", "reasoning_content": self._other, "tool_calls": [call],
        }  # fmt: skip
        result = {"role": "tool", "content": self._other, "tool_call_id": _CALL_ID, "name": self._other}
        return self._leaves([*self._messages, calling, result], True)

    def _dates(self, stop: int) -> Iterator[Branch]:
        dates = re.finditer("|".join(map(re.escape, _dates_of_today())), self._text[:stop])
        for date in islice(dates, _NUM_DATES):
            yield Branch(date.start(), self._other)

    def _leaves(self, messages: Sequence[Message], add_generation_prompt: bool) -> Iterator[Branch]:
        if self._num_rendered + len(messages) > _MAX_RENDERED:
            return
        self._num_rendered += len(messages)
        try:
            other = self._render(messages, add_generation_prompt)
        except Exception:  # a template is code
            return
        length = _common_length(self._text, other)
        if add_generation_prompt and 0 < length == len(other):  # its last token is always computed
            length -= 1
            other = other[:length] + self._other
        yield Branch(length, other[length : length + _NUM_CHARACTERS_AFTER])

    def _text_like(self, message: Message) -> Any:
        """Another text, in parts where the message has parts."""
        has_parts = isinstance(message.get("content"), Sequence) and not isinstance(message["content"], str)
        return [{"type": "text", "text": self._other}] if has_parts else self._other


def _character_outside(text: str) -> str:
    """A character that `text` does not have: a chat that goes on with this character leaves the text."""
    present = set(text)  # one pass, because a client may send any number of these characters
    return next((one for one in map(chr, range(0xE000, 0xF900)) if one not in present), "\0")


def _common_length(first: str, second: str) -> int:
    """Characters of the longest common prefix."""
    same, other = 0, min(len(first), len(second)) + 1
    while other - same > 1:
        middle = (same + other) // 2
        if first[same:middle] == second[same:middle]:
            same = middle
        else:
            other = middle
    return same


def _dates_of_today() -> list[str]:
    """Today, yesterday and tomorrow, because clients are in other time zones, in usual forms."""
    days = [datetime.now() + timedelta(days) for days in (-1, 0, 1)]
    return [
        date
        for day in days
        for written in map(day.strftime, _DATE_FORMS)
        for date in dict.fromkeys([written, written.replace(" 0", " ").removeprefix("0")])
    ]
