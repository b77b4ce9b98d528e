"""Who makes the calls that change an engine: this rank alone, or all ranks of a split model."""

from collections.abc import Callable
from typing import Protocol


class CallMaker(Protocol):
    """Makes the calls that change an engine's books or pools; each has a name.

    Attributes:
        reach_all_ranks: whether the other ranks of a split model make each call, too.
        may_end_requests: whether requests whose leases have ended may be cancelled now.
    """

    @property
    def reach_all_ranks(self) -> bool: ...

    @property
    def may_end_requests(self) -> bool: ...

    def make[T](self, name: str, change: Callable[[], T], *told: object) -> T:
        """Make a call.

        Args:
            name: of the call; `mambaslots.net` has a method of this name for ranks that follow.
            change: this rank's part.
            told: the arguments of that method.

        Returns:
            What `change` returns.
        """
        ...

    def check_changes(self) -> None:
        """Raise RuntimeError where the books are about to change outside `make`."""


class CallsHere:
    """Makes the calls that change an engine, on this rank alone."""

    reach_all_ranks = False

    def __init__(self, may_end_requests: bool = True) -> None:
        self.may_end_requests = may_end_requests

    def make[T](self, name: str, change: Callable[[], T], *told: object) -> T:
        return change()

    def check_changes(self) -> None:
        pass
