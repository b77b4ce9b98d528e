"""Chats as the text that a model was trained on, and where chats that begin alike branch."""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from jinja2 import TemplateError, pass_context
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""Messages and whether an answer is to follow, to the text of the chat."""

MAX_MARKED_MESSAGES = 16  # of more marked messages the last ones count: each costs a rendering
_MAX_RENDERED = 20_000
"""Messages of all renderings together: a chat of thousands of messages has fewer marks, not late ones."""
_NUM_TURNS = 3  # user turns, counted from the end, whose branches are looked for
_CALL_ID = "abcde1234"  # some templates accept no id of another length
_NUM_DATES = 2  # one may be the template's and one the client's
_NUM_CHARACTERS_AFTER = 64  # characters after a branch on which the tokens before it may depend
_DATE_FORMS = ("%Y-%m-%d", "%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d")


class ChatTemplate:
    """A Jinja template, as a model's `chat_template.jinja` holds it.

    The template runs in a sandbox: it sees `messages`, `add_generation_prompt` and the given variables only.
    How long it runs and how much it writes is its own: a model's folder is trusted with that.

    Args:
        source: the template.
        variables: more names for the template, for example {"bos_token": "<s>"}.

    Raises:
        ValueError: `source` is no template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], optimized=False,
            finalize=_as_it_is,
        )  # fmt: skip
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # no escapes of HTML
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise ValueError(f"the chat template is no Jinja template: {error}") from error
        self._variables = dict(variables or {})

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a chat.

        Args:
            messages: mappings with at least "role" and "content", oldest first; plain JSON values.
            add_generation_prompt: whether the text ends with the beginning of an answer.
            variables: more names for this text, for example `enable_thinking`.

        Raises:
            ValueError: the template refuses the messages, or they hold something else than JSON.
        """
        try:
            names = {"messages": messages} | self._variables | variables
            json_values = json.loads(json.dumps(names, default=_as_dict))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the messages cannot be given to a template: {error}") from error
        try:
            return self._template.render(json_values, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is code
            raise ValueError(f"the chat template refuses the messages: {error}") from error


@pass_context
def _as_it_is(context: Context, value: Any) -> Any:
    """`value`. Because this asks for the context, Jinja computes no constant when a template is only read."""
    return value


def _as_dict(value: object) -> dict[Any, Any]:
    """A mapping as JSON's encoder takes it."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")


def _raise(message: str) -> None:
    raise TemplateError(message)


class Branch(NamedTuple):
    """Another chat shares `num_characters` of the text, and continues with `other_text`."""

    num_characters: int
    other_text: str


class ChatBranches:
    """Renders the chats that clients send next, and finds where each branches off the text.

    A template may change what it wrote before: it drops the thinking of earlier answers, moves the tools to
    the last user message, or merges messages. So each position is the length of the longest common prefix
    with another chat's text. A chat that the template refuses gives no branch.

    A chat of one turn takes 3 renderings besides its own, a longer one at most 8. Tools take one more, and so
    does each marked message. Renderings stop at `_MAX_RENDERED` messages.
    """

    def __init__(self, text: str, messages: Sequence[Message], render: Render, has_tools: bool) -> None:
        self._text = text
        self._messages = list(messages)
        self._render = render
        self._has_tools = has_tools
        self._num_rendered = 0
        self._absent = _absent_character(text)
        users = [i for i, message in enumerate(messages) if message.get("role") == "user"]
        self._first_user = users[0] if users else None
        self._last_users = users[-_NUM_TURNS:][::-1]

    def find(self, marked_messages: Sequence[int] = ()) -> Iterator[Branch]:
        """The branches, the most valuable first; some may be equal.

        1. After each marked message.
        2. Before the first user message: another conversation with the same system prompt and tools.
        3. Where the next turn branches off, where a tool's result does, and before the generation prompt.
        4. Before the last user message, which is edited.
        5. Before the first dates of today in the system prompt.
        6. The two user turns before: after the message, whose answer is made anew, and before it.
        """
        for message in sorted(set(marked_messages))[-MAX_MARKED_MESSAGES:]:
            yield from self._after(message)
        system_branches = [] if self._first_user is None else [*self._before(self._first_user)]
        yield from system_branches
        yield from self._next_turn(self._messages)
        if self._has_tools:
            yield from self._tool_result()
        yield from self._branch(self._messages, False)
        later_users = [user for user in self._last_users if user != self._first_user]
        for user in later_users[:1]:
            yield from self._before(user)
        for branch in system_branches:
            yield from self._dates(branch.num_characters)
        for user in self._last_users[1:]:
            if self._messages[user + 1].get("role") == "assistant":
                yield from self._branch(self._messages[: user + 1], True)
            if user in later_users:
                yield from self._before(user)

    def _after(self, index: int) -> Iterator[Branch]:
        if index + 1 == len(self._messages):
            return self._next_turn(self._messages)
        if self._messages[index + 1].get("role") == "assistant":
            return self._next_turn(self._messages[: index + 1])
        return self._before(index + 1)

    def _before(self, index: int) -> Iterator[Branch]:
        """Message `index` has another text, and no answer yet."""
        edited = {**self._messages[index], "content": self._text_like(self._messages[index])}
        return self._branch([*self._messages[:index], edited], True)

    def _next_turn(self, messages: Sequence[Message]) -> Iterator[Branch]:
        """After `messages` come an answer and another user message."""
        answer = {"role": "assistant", "content": self._absent}
        question = {"role": "user", "content": self._absent}
        is_answered = bool(messages) and messages[-1].get("role") == "assistant"
        return self._branch([*messages, *([] if is_answered else [answer]), question], True)

    def _tool_result(self) -> Iterator[Branch]:
        """After the messages come thoughts, the call of a tool, and its result."""
        function = {"name": self._absent, "arguments": {}}
        call = {"id": _CALL_ID, "type": "function", "function": function}
        calling = {
            "role": "assistant", "content": "", "reasoning_content": self._absent, "tool_calls": [call],
        }  # fmt: skip
        result = {"role": "tool", "content": self._absent, "tool_call_id": _CALL_ID, "name": self._absent}
        return self._branch([*self._messages, calling, result], True)

    def _dates(self, stop: int) -> Iterator[Branch]:
        now = datetime.now()
        today = "|".join(re.escape(now.strftime(form)) for form in _DATE_FORMS)
        dates = re.finditer(f"(?:{now:%A},? )?(?:{today})", self._text[:stop])
        for date in islice(dates, _NUM_DATES):
            yield Branch(date.start(), self._absent)

    def _branch(self, messages: Sequence[Message], add_generation_prompt: bool) -> Iterator[Branch]:
        if self._num_rendered + len(messages) > _MAX_RENDERED:
            return
        self._num_rendered += len(messages)
        try:
            other_text = self._render(messages, add_generation_prompt)
        except Exception:  # a template is code
            return
        length = _common_length(self._text, other_text)
        if add_generation_prompt and 0 < length == len(other_text):  # its last token is always computed
            length -= 1
            other_text = other_text[:length] + self._absent
        yield Branch(length, other_text[length : length + _NUM_CHARACTERS_AFTER])

    def _text_like(self, message: Message) -> Any:
        """Another text, in parts where the message has parts."""
        has_parts = isinstance(message.get("content"), Sequence) and not isinstance(message["content"], str)
        return [{"type": "text", "text": self._absent}] if has_parts else self._absent


def _absent_character(text: str) -> str:
    """A character that `text` does not have, so that a chat that continues with it branches off."""
    present = set(text)  # one pass, because a client may send any number of these characters
    return next((mark for mark in map(chr, range(0xE000, 0xF900)) if mark not in present), "\0")


def _common_length(first: str, second: str) -> int:
    """Characters of the longest common prefix."""
    common = 0
    too_long = min(len(first), len(second)) + 1
    while too_long - common > 1:
        middle = (common + too_long) // 2
        if first[common:middle] == second[common:middle]:
            common = middle
        else:
            too_long = middle
    return common


class Cut(NamedTuple):
    """A special token in a text, at [start, stop): the tokens before it do not depend on what follows it."""

    start: int
    stop: int
    token: int


def branch_tokens(
    text: str,
    tokens: Sequence[int],
    cuts: Sequence[Cut],
    branches: Iterable[Branch],
    encode: Callable[[str], Sequence[int]],
) -> tuple[int, ...]:
    """The number of leading tokens that `text` shares with each other chat, without repeats and zeros.

    A character before a branch may be part of a token that differs between the two texts. So the other chat
    is encoded, from the last cut before the branch on, and compared token by token.
    """
    positions: dict[int, None] = {}
    stops = [cut.stop for cut in cuts]
    for branch in dict.fromkeys(branches):
        num_cuts = bisect_right(stops, branch.num_characters)  # a cut that both texts have
        cut = cuts[num_cuts - 1] if num_cuts else Cut(0, 0, 0)
        other_tokens = encode(text[cut.start : branch.num_characters] + branch.other_text)
        position = cut.token + _common_tokens(other_tokens, tokens, cut.token)
        if position:
            positions[position] = None
    return tuple(positions)


def _common_tokens(first: Sequence[int], second: Sequence[int], start: int) -> int:
    """Items of the longest common prefix of `first` and `second[start:]`."""
    stop = min(len(first), len(second) - start)
    return next((i for i in range(stop) if first[i] != second[start + i]), stop)
