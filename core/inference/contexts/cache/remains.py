"""What is left of large containers, freed a little at a time."""

from typing import Any


class Remains:
    """Lists and dicts that nobody reads any more.

    Freeing half a million entries takes as long as a hundred decode steps. So who forgets a large container
    leaves it here, and frees a few entries whenever there is other work.
    """

    def __init__(self) -> None:
        self._containers: list[list[Any] | dict[Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._containers)

    def leave(self, *containers: list[Any] | dict[Any, Any]) -> None:
        """Take over these containers, and free all earlier ones; the caller keeps no reference to them."""
        self._containers = list(containers)

    def free(self, num_entries: int) -> None:
        """Free up to so many entries."""
        while self._containers and num_entries > 0:
            container = self._containers[-1]
            count = min(num_entries, len(container))
            if isinstance(container, list):
                del container[len(container) - count :]
            else:
                for _ in range(count):
                    container.popitem()
            if not container:
                self._containers.pop()
            num_entries -= max(count, 1)
