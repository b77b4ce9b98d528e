"""Where a text can be cut without a change of its tokens."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .chat_branches import Branch


class Cut(NamedTuple):
    """A special token in a text: what goes before it has the same tokens whatever follows it.

    Attributes:
        start, stop: its characters in the text.
        token: its place in the tokens.
    """

    start: int
    stop: int
    token: int


_BEGINNING = Cut(0, 0, 0)


def branch_tokens(
    text: str,
    tokens: Sequence[int],
    cuts: Sequence[Cut],
    branches: Iterable[Branch],
    encode: Callable[[str], Sequence[int]],
) -> tuple[int, ...]:
    """The number of leading tokens that `text` shares with each other chat, without repeats and zeros.

    A character before a branch may be part of a token that goes on behind it, differently in the two texts.
    So the other chat is encoded, from the last cut before the branch on, and compared token by token.

    Args:
        text, tokens: the chat and its tokens.
        cuts: of `text`, ascending.
        branches: where other chats leave `text`.
        encode: text to tokens, without added special tokens.
    """
    found: dict[int, None] = {}
    stops = [cut.stop for cut in cuts]
    for branch in dict.fromkeys(branches):
        after = bisect_right(stops, branch.num_characters)  # a cut that both texts have
        cut = cuts[after - 1] if after else _BEGINNING
        other = encode(text[cut.start : branch.num_characters] + branch.other_text)
        position = cut.token + _common_length(other, tokens, cut.token)
        if position:
            found[position] = None
    return tuple(found)


def _common_length(first: Sequence[int], second: Sequence[int], start: int) -> int:
    """Items of the longest common prefix of `first` and `second[start:]`."""
    stop = min(len(first), len(second) - start)
    return next((i for i in range(stop) if first[i] != second[start + i]), stop)
