"""Questions about long documents, and prompts that share nothing."""

from ..trace import TraceRequest
from .draws import Draws, joined

NUM_DOCUMENTS, DOCUMENT_GAP_S = 120, 22.0
NUM_UNIQUE, UNIQUE_GAP_S = 1500, 0.5


def documents(draws: Draws, scale: float) -> list[TraceRequest]:
    """Documents of 4,000 to 32,000 tokens, and questions of 30 to 300 tokens about each.

    A request is the document and one question: a long shared head, and an end that is unique.
    """
    requests: list[TraceRequest] = []
    start_s = 0.0
    for session in range(max(1, round(NUM_DOCUMENTS * scale))):
        start_s += draws.exponential(DOCUMENT_GAP_S)
        document = draws.text(draws.log_uniform(4000, 32000))
        at_s = start_s
        for _ in range(draws.geometric(14.0)):
            question = draws.text(draws.integer(30, 300))
            answer = draws.text(draws.lognormal(150, 0.6, 8, 1000))
            requests.append(TraceRequest(at_s, session, joined([document, question]), answer))
            at_s += draws.lognormal(20, 1.8, 1, 3600)
    return requests


def unique(draws: Draws, scale: float) -> list[TraceRequest]:
    """Prompts that share nothing, each a session of its own: the traffic that no cache helps."""
    requests: list[TraceRequest] = []
    at_s = 0.0
    for session in range(max(1, round(NUM_UNIQUE * scale))):
        at_s += draws.exponential(UNIQUE_GAP_S)
        prompt = draws.text(draws.lognormal(1200, 0.8, 20, 16000))
        requests.append(TraceRequest(at_s, session, prompt, draws.text(draws.lognormal(150, 0.6, 8, 1000))))
    return requests
