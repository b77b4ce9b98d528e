"""Requests that decode by replay: the tokens of each step, drawn at random."""

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """A sequence that resumes at `resumed`, a grid point, prefills up to `prompt` and decodes up to `end`."""

    resumed: int
    prompt: int
    end: int


@dataclass(frozen=True)
class Move:
    """What one row of a decode step does; request -1 is padding.

    Of `length` tokens from `start`, the first `accepted` are the request's own, the others rejected drafts.
    """

    request: int = -1
    start: int = 0
    length: int = 0
    accepted: int = 0


def decode_steps(requests: list[Request], chunk: int, tokens: int, seed: int) -> Iterator[list[Move]]:
    """Steps of up to `tokens` tokens a row, until all requests are at their ends.

    Rows come in any order and company, with padding between. No draft completes a chunk.
    """
    drawn = random.Random(seed)
    at = [request.prompt for request in requests]
    while running := [index for index, request in enumerate(requests) if at[index] < request.end]:
        moves = []
        for index in drawn.sample(running, drawn.randint(1, len(running))):
            room = chunk - 1 - at[index] % chunk
            length = drawn.randint(1, max(1, min(tokens, room)))
            accepted = min(drawn.randint(1, length), requests[index].end - at[index])
            moves.append(Move(index, at[index], length, accepted))
            at[index] += accepted
        moves += [Move()] * drawn.randint(0, 1)
        drawn.shuffle(moves)
        yield moves
