"""What a drafter may see of a request's tokens."""

from collections.abc import Iterator, Sequence
from typing import overload


class TokenView(Sequence[int]):
    """A request's prompt and answer so far, to be read but not changed.

    A view only grows: the tokens that it has shown stay. A request whose tokens are cut back, because the
    step that generated them failed, gets another view. So what a drafter derives from a view's tokens holds
    as long as the view lives. A view equals lists and tuples of its tokens. Among themselves, views are
    compared and hashed by identity, and they can be weakly referenced: they are keys for a
    `WeakKeyDictionary`.
    """

    __slots__ = ("__weakref__", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        """`tokens`: the list to show. It may only grow."""
        self._tokens = tokens

    def shows(self, tokens: list[int]) -> bool:
        """Whether this is a view of this very list."""
        return tokens is self._tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        """A token, or a list of the tokens in a slice."""
        return self._tokens[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __contains__(self, token: object) -> bool:
        return token in self._tokens

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, list | tuple) and self._tokens == list(other))

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"TokenView({self._tokens})"
