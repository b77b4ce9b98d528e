"""Generated traces: a kind, a seed and a scale give the same requests everywhere."""

import math
from collections.abc import Iterator

import numpy as np

from ..validation import integer, one_of, real
from .trace import Tokens, Trace, TraceRequest

_NUM_TOKEN_IDS = 1 << 17  # two drawn texts differ from their first tokens on
_DECODE_S = 0.02  # a session waits so long for each token of an answer
_TOKENS_PER_S = 2.0  # a person reads and writes 1.5 words a second, at 0.75 words a token


class Draws:
    """Random numbers and texts of one seed, from numpy's bit stream alone, which every version keeps."""

    def __init__(self, *seed: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))

    def uniform(self) -> float:
        """A number in [0, 1)."""
        return float(self._generator.random())

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return low + int(self.uniform() * (high - low + 1))

    def exponential(self, mean: float) -> float:
        return -mean * math.log(1.0 - self.uniform())

    def geometric(self, mean: float) -> int:
        """A number of trials up to the first success, 1 or more."""
        return 1 + int(math.log(1.0 - self.uniform()) / math.log(1.0 - 1.0 / mean))

    def lognormal(self, median: float, sigma: float, low: int, high: int) -> int:
        """A length held to [low, high], its normal number by Box and Muller."""
        radius = math.sqrt(-2.0 * math.log(1.0 - self.uniform()))
        normal = radius * math.cos(2.0 * math.pi * self.uniform())
        return min(max(round(median * math.exp(sigma * normal)), low), high)

    def log_uniform(self, low: int, high: int) -> int:
        """A length in [low, high], as likely in each octave."""
        return min(int(low * math.exp(self.uniform() * math.log((high + 1) / low))), high)

    def zipf(self, num_ranks: int) -> int:
        """A rank in [0, num_ranks); rank r is drawn in proportion to 1 / (r + 1)."""
        weights = [1.0 / (rank + 1) for rank in range(num_ranks)]
        rest = self.uniform() * sum(weights)
        for rank, weight in enumerate(weights):
            rest -= weight
            if rest < 0.0:
                return rank
        return num_ranks - 1

    def text(self, num_tokens: int) -> Tokens:
        """[num_tokens] int32 token ids."""
        return (self._generator.random(num_tokens) * _NUM_TOKEN_IDS).astype(np.int32)


def _sessions(draws: Draws, count: float, gap_s: float) -> Iterator[tuple[int, float]]:
    """(session, seconds) of sessions that begin as a Poisson process, `gap_s` apart on average."""
    at_s = 0.0
    for session in range(max(1, round(count))):
        at_s += draws.exponential(gap_s)
        yield session, at_s


def _chat(draws: Draws, scale: float) -> Iterator[TraceRequest]:
    """Sessions begin as a Poisson process, about 90 at once; 8 system prompts by Zipf, geometric turns."""
    systems = [draws.text(draws.lognormal(1000, 0.5, 300, 4000)) for _ in range(8)]
    for session, at_s in _sessions(draws, 240 * scale, 1.7):
        history = [systems[draws.zipf(len(systems))]]
        for _ in range(draws.geometric(11.0)):
            user = draws.text(draws.lognormal(60, 0.8, 4, 2000))
            reply = draws.text(draws.lognormal(200, 0.6, 8, 2000))
            history.append(user)
            yield TraceRequest(at_s, session, np.concatenate(history), reply)
            history.append(reply)
            words = draws.lognormal(60, 1.5, 2, 2400)
            at_s += len(reply) * _DECODE_S + words / _TOKENS_PER_S


def _fork(draws: Draws, scale: float) -> Iterator[TraceRequest]:
    """Conversations where answers are generated again, or an earlier turn is edited."""
    system = draws.text(900)
    for session, at_s in _sessions(draws, 150 * scale, 9.0):
        turns = [[system, draws.text(draws.lognormal(60, 0.8, 4, 2000))]]
        for _ in range(draws.geometric(14.0)):
            prompt = np.concatenate([part for turn in turns for part in turn])
            reply = draws.text(draws.lognormal(250, 0.6, 8, 2000))
            yield TraceRequest(at_s, session, prompt, reply)
            at_s += len(reply) * _DECODE_S + draws.lognormal(60, 1.0, 2, 2000) / _TOKENS_PER_S
            action = draws.uniform()
            if action < 0.2:
                continue
            if action < 0.4:
                del turns[draws.integer(1, len(turns)) :]
                turns[-1].pop()
            else:
                turns[-1].append(reply)
                turns.append([])
            turns[-1].append(draws.text(draws.lognormal(60, 0.8, 4, 2000)))


def _agent(draws: Draws, scale: float) -> Iterator[TraceRequest]:
    """Tasks of about 30 turns of action and observation on 5 templates; old observations are removed."""
    templates = [draws.text(draws.log_uniform(2000, 8000)) for _ in range(5)]
    removed = draws.text(12)
    for session, at_s in _sessions(draws, 72 * scale, 8.0):
        template = templates[draws.integer(0, len(templates) - 1)]
        head = [template, draws.text(draws.lognormal(150, 0.6, 20, 2000))]
        turns: list[list[Tokens]] = []
        for turn in range(draws.integer(20, 40)):
            if turn > 5:
                turns[turn - 6][1] = removed
            prompt = np.concatenate(head + [part for parts in turns for part in parts])
            action = draws.text(draws.lognormal(100, 0.6, 10, 1000))
            yield TraceRequest(at_s, session, prompt, action)
            turns.append([action, draws.text(draws.lognormal(250, 1.2, 10, 8000))])
            at_s += len(action) * _DECODE_S + draws.lognormal(8, 1.2, 1, 600)


def _documents(draws: Draws, scale: float) -> Iterator[TraceRequest]:
    """Documents of 4,000 to 32,000 tokens, each with questions of 30 to 300 tokens."""
    for session, at_s in _sessions(draws, 120 * scale, 22.0):
        document = draws.text(draws.log_uniform(4000, 32000))
        for _ in range(draws.geometric(14.0)):
            question = draws.text(draws.integer(30, 300))
            answer = draws.text(draws.lognormal(150, 0.6, 8, 1000))
            yield TraceRequest(at_s, session, np.concatenate([document, question]), answer)
            at_s += draws.lognormal(20, 1.8, 1, 3600)


def _unique(draws: Draws, scale: float) -> Iterator[TraceRequest]:
    """Prompts that share nothing, each a session of its own: traffic that no cache helps."""
    for session, at_s in _sessions(draws, 1500 * scale, 0.5):
        prompt = draws.text(draws.lognormal(1200, 0.8, 20, 16000))
        yield TraceRequest(at_s, session, prompt, draws.text(draws.lognormal(150, 0.6, 8, 1000)))


GENERATORS = {"chat": _chat, "agent": _agent, "documents": _documents, "fork": _fork, "unique": _unique}
KINDS = tuple(GENERATORS)


def generate(kind: str, seed: int, *, scale: float = 1.0) -> Trace:
    """A trace of 1,500 to 3,000 requests with drawn tokens.

    Args:
        kind: "chat" and "fork" are conversations, "agent" are tasks with many turns, "documents" are
            questions about long texts, and the prompts of "unique" share no prefix.
        seed: from 0 on. Equal arguments give equal traces on every machine.
        scale: a multiple of the number of sessions: 2 makes the trace twice as long, with the same arrivals
            per second.

    Raises:
        ValueError: an argument is not accepted.

    Example:
        `generate("chat", 5)` has 2,642 requests with 11,650,355 prompt tokens.
    """
    kind = one_of("kind", kind, KINDS)
    seed = integer("seed", seed, 0, 2**63 - 1)
    scale = real("scale", scale, 0.0)
    drawn = GENERATORS[kind](Draws(seed, KINDS.index(kind)), scale)
    requests = sorted(drawn, key=lambda request: (request.arrival_s, request.session))
    return Trace(f"{kind}, seed {seed}", requests)
