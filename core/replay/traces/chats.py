"""Conversations: each turn sends the whole history again; some are generated again or edited."""

from ..trace import TraceRequest
from .draws import Draws, joined

DECODE_S = 0.02
"""Seconds that a session waits for each token of an answer."""
TOKENS_PER_S = 2.0
"""How fast a person reads and writes: 1.5 words a second, at 0.75 words a token."""

CHAT_SESSIONS, CHAT_GAP_S, NUM_SYSTEM_PROMPTS = 240, 1.7, 8
FORK_SESSIONS, FORK_GAP_S = 150, 9.0


def chat(draws: Draws, scale: float) -> list[TraceRequest]:
    """Sessions that begin as a Poisson process, about 120 of them alive at once.

    A session has one of eight system prompts, chosen by Zipf, and a geometric number of turns.
    """
    systems = [draws.text(draws.lognormal(1000, 0.5, 300, 4000)) for _ in range(NUM_SYSTEM_PROMPTS)]
    requests: list[TraceRequest] = []
    start_s = 0.0
    for session in range(max(1, round(CHAT_SESSIONS * scale))):
        start_s += draws.exponential(CHAT_GAP_S)
        history = [systems[draws.zipf(NUM_SYSTEM_PROMPTS)]]
        at_s = start_s
        for _ in range(draws.geometric(11.0)):
            user = draws.text(draws.lognormal(60, 0.8, 4, 2000))
            reply = draws.text(draws.lognormal(200, 0.6, 8, 2000))
            history.append(user)
            requests.append(TraceRequest(at_s, session, joined(history), reply))
            history.append(reply)
            words = draws.lognormal(60, 1.5, 2, 2400)
            at_s += len(reply) * DECODE_S + words / TOKENS_PER_S
    return requests


def fork(draws: Draws, scale: float) -> list[TraceRequest]:
    """Conversations whose owner generates an answer again, or goes back to an earlier turn and edits it."""
    system = draws.text(900)
    requests: list[TraceRequest] = []
    start_s = 0.0
    for session in range(max(1, round(FORK_SESSIONS * scale))):
        start_s += draws.exponential(FORK_GAP_S)
        turns = [[system, draws.text(draws.lognormal(60, 0.8, 4, 2000))]]
        at_s = start_s
        for _ in range(draws.geometric(14.0)):
            prompt = joined([part for turn in turns for part in turn])
            reply = draws.text(draws.lognormal(250, 0.6, 8, 2000))
            requests.append(TraceRequest(at_s, session, prompt, reply))
            at_s += len(reply) * DECODE_S + draws.lognormal(60, 1.0, 2, 2000) / TOKENS_PER_S
            action = draws.uniform()
            if action < 0.2:
                continue
            if action < 0.4:
                del turns[draws.integer(1, len(turns)) :]
                turns[-1][-1] = draws.text(draws.lognormal(60, 0.8, 4, 2000))
                continue
            turns[-1].append(reply)
            turns.append([draws.text(draws.lognormal(60, 0.8, 4, 2000))])
    return requests
