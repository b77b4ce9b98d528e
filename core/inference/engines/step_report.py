"""What one step did."""

from dataclasses import dataclass, field

from ...request import RequestResult
from ...validation import brief_repr
from ..contexts.request import GeneratedToken

NewTokens = dict[int, tuple[GeneratedToken, ...]]


@dataclass(frozen=True)
class StepReport:
    """What one `step` did.

    Attributes:
        admitted: ids of the requests that got a row.
        generated: request id -> newest token, for each request with a new token.
        finished: results of the requests that ended.
        tokens: request id -> all new tokens, in order; more than one only where drafts were accepted.
    """

    admitted: tuple[int, ...] = ()
    generated: dict[int, GeneratedToken] = field(default_factory=dict)
    finished: tuple[RequestResult, ...] = ()
    tokens: NewTokens = field(default_factory=dict)

    def __repr__(self) -> str:
        return brief_repr(self)
