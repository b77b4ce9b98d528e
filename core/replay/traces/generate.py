"""Generated traces: a kind, a seed and a scale give the same requests everywhere."""

from ...validation import integer, one_of, real
from ..trace import Trace
from .agents import agent
from .chats import chat, fork
from .documents import documents, unique
from .draws import Draws

_GENERATORS = {"chat": chat, "agent": agent, "documents": documents, "fork": fork, "unique": unique}
KINDS = tuple(_GENERATORS)
"""What `generate` makes."""


def generate(kind: str, seed: int, *, scale: float = 1.0) -> Trace:
    """A trace of 1,500 to 3,000 requests with drawn tokens.

    Args:
        kind: one of `KINDS`. "chat" and "fork" are conversations, "agent" are tasks with many turns,
            "documents" are questions about long texts, and the prompts of "unique" share no prefix.
        seed: from 0 on. Equal arguments give equal traces on every machine.
        scale: a multiple of the number of sessions. Sessions come as often as before, so the trace is longer.

    Raises:
        ValueError: an argument is not accepted.
    """
    kind = one_of("kind", kind, KINDS)
    seed = integer("seed", seed, 0, 2**63 - 1)
    scale = real("scale", scale, 0.0)
    requests = _GENERATORS[kind](Draws(seed, KINDS.index(kind)), scale)
    requests.sort(key=lambda request: (request.arrival_s, request.session))
    return Trace(f"{kind}, seed {seed}", requests)
