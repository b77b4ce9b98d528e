"""Small traces for replays: sessions that grow, share heads, edit and repeat their prompts."""

import random

import numpy as np
from mambaslots.replay.trace import Trace, TraceRequest


def small_trace(
    seed: int, num_sessions: int = 4, max_turns: int = 4, longest: int = 30, vocab_size: int = 100
) -> Trace:
    """Requests of a few sessions. Some arrive at one time; some prompts are edited at an earlier turn."""
    draw = random.Random(seed)
    heads = [_tokens(draw, draw.randrange(1, longest), vocab_size) for _ in range(2)]
    requests = []
    for session in range(num_sessions):
        history = list(draw.choice(heads))
        at_s = draw.choice([0.0, draw.uniform(0, 2)])
        for _ in range(draw.randint(1, max_turns)):
            if draw.random() < 0.2:
                del history[draw.randrange(1, len(history) + 1) :]
            history += _tokens(draw, draw.randrange(1, longest), vocab_size)
            answer = _tokens(draw, draw.randrange(1, longest), vocab_size)
            requests.append(
                TraceRequest(at_s, session, np.array(history, np.int32), np.array(answer, np.int32))
            )
            history += answer
            at_s += draw.choice([0.0, draw.uniform(0, 2)])
    return Trace(f"small {seed}", sorted(requests, key=lambda request: request.arrival_s))


def _tokens(draw: random.Random, number: int, vocab_size: int) -> list[int]:
    return [draw.randrange(vocab_size) for _ in range(number)]
