"""Errors of capacity, and of an engine's thread. Bad arguments and configurations raise `ValueError`."""

from .validation import shown


class _CapacityError(RuntimeError):
    """A pool or the rows ran out. The call that raised has changed nothing."""

    what = "units"

    def __init__(self, required: int, available: int) -> None:
        super().__init__(required, available)
        self.required = required
        self.available = available

    def __str__(self) -> str:
        return f"{shown(self.required)} {self.what} required, {self.available} available"


class MambaSlotCapacityError(_CapacityError):
    """Fewer durable slots can be freed than the call needs: the others are reserved or pinned."""

    what = "Mamba state slots"


class KVBlockCapacityError(_CapacityError):
    """Fewer KV blocks can be freed than the call needs: the others are in use.

    Attributes:
        request_id: the request that cannot go on; None where the call named blocks, not a request.
    """

    what = "KV blocks"

    def __init__(self, required: int, available: int, request_id: int | None = None) -> None:
        super().__init__(required, available)
        self.request_id = request_id

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.request_id is None else f"{message} for request {self.request_id}"


class LiveSlotCapacityError(KVBlockCapacityError):
    """Fewer live slots can be freed than a request needs: the others are reserved or pinned.

    The class is one of `KVBlockCapacityError`, so that callers handle a request without memory in one way.
    """

    what = "live slots"


class QueueFullError(RuntimeError):
    """An `AsyncEngine` accepts no further request now, because `limit` requests wait. Retry later.

    Attributes:
        num_waiting: requests that wait for a row.
        limit: how many may.
    """

    def __init__(self, num_waiting: int, limit: int) -> None:
        super().__init__(num_waiting, limit)
        self.num_waiting = num_waiting
        self.limit = limit

    def __str__(self) -> str:
        return f"{self.num_waiting} requests wait, {self.limit} may"


class EngineDeadError(RuntimeError):
    """The thread of an `AsyncEngine` has ended; the error's cause says why."""


class NoReplicaError(RuntimeError):
    """No replica serves now, or replica after replica was lost while it answered. Retry later."""
