"""The tokens of a request as a drafter reads them."""

from collections.abc import Iterator, Sequence
from typing import Any


class TokenView(Sequence[int]):
    """A request's prompt and answer so far, read only.

    A view only grows; a request whose tokens are cut back, because a step failed, gets another view. Views
    equal lists and tuples of their tokens, and are keys for a `WeakKeyDictionary` by identity.
    """

    __slots__ = ("__weakref__", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: Any) -> Any:
        """One token, or a list of those of a slice."""
        return self._tokens[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, list | tuple) and self._tokens == list(other))

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"TokenView({self._tokens})"
