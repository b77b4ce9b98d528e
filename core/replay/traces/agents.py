"""Agents: long templates, many turns, and a window of observations."""

from ..trace import Tokens, TraceRequest
from .draws import Draws, joined

NUM_AGENTS, AGENT_GAP_S = 72, 8.0
NUM_TEMPLATES = 5
WINDOW_TURNS = 5
DECODE_S = 0.02


def agent(draws: Draws, scale: float) -> list[TraceRequest]:
    """Tasks of about 30 turns on one of five templates of 2,000 to 8,000 tokens.

    Each turn is an action, which the model writes, and an observation. Observations older than five turns
    are removed, so that two prompts of a task part in their middle.
    """
    templates = [draws.text(draws.log_uniform(2000, 8000)) for _ in range(NUM_TEMPLATES)]
    removed = draws.text(12)
    requests: list[TraceRequest] = []
    start_s = 0.0
    for session in range(max(1, round(NUM_AGENTS * scale))):
        start_s += draws.exponential(AGENT_GAP_S)
        at_s = start_s
        template = templates[draws.integer(0, NUM_TEMPLATES - 1)]
        head = [template, draws.text(draws.lognormal(150, 0.6, 20, 2000))]
        turns: list[list[Tokens]] = []
        for turn in range(draws.integer(20, 40)):
            if turn > WINDOW_TURNS:
                turns[turn - WINDOW_TURNS - 1][1] = removed
            prompt = joined(head + [part for parts in turns for part in parts])
            action = draws.text(draws.lognormal(100, 0.6, 10, 1000))
            requests.append(TraceRequest(at_s, session, prompt, action))
            turns.append([action, draws.text(draws.lognormal(250, 1.2, 10, 8000))])
            at_s += len(action) * DECODE_S + draws.lognormal(8, 1.2, 1, 600)
    return requests
