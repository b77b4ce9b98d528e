"""What `oracle.toy_lm` must answer: one sequence, token by token, without the package.

Of the package nothing is used. Of the model only the weights are. Tokens are drawn by the plain rule: one row
after the other, from the definition of temperature, top-k and top-p.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from .toy_lm import DIM, TAPS, TOYS, Array, ToyKind, Weights, weights_of


@dataclass(frozen=True)
class Ask:
    """What a request asks: its prompt, how its tokens are drawn, what ends it, and the model."""

    prompt: tuple[int, ...]
    length: int
    version: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stops: tuple[int, ...] = ()
    kind: ToyKind = TOYS["one sum"]


@dataclass(frozen=True)
class Answer:
    """A complete answer."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str


class Steps(Protocol):
    """A sequence of any model."""

    def step(self, token: int) -> Array:
        """Take a token; the logits behind it."""
        ...


class Sequence:
    """One sequence; `step` takes a token and gives the logits behind it."""

    def __init__(self, weights: Weights, kind: ToyKind) -> None:
        self._weights = weights
        self._kind = kind
        self._window = [np.zeros(DIM) for _ in range(TAPS - 1)]
        self._sums = [np.zeros(DIM) for _ in kind.grids]
        self._keys: list[Array] = []
        self._values: list[Array] = []

    def step(self, token: int) -> Array:
        w = self._weights
        x = w.embedding[token]
        seen = [*self._window, x]
        mixed = sum(tap * part for tap, part in zip(w.taps, seen, strict=True))
        self._window = seen[1:]
        for number, old in enumerate(self._sums):
            self._sums[number] = w.decay ** (number + 1) * old + mixed
        x = x + np.tanh(sum(self._sums) if self._sums else mixed)
        if not self._kind.attention:
            return np.asarray(x @ w.head)
        turn = math.cos(0.3 * len(self._keys))
        self._keys.append(x @ w.key * turn)
        self._values.append(x @ w.value)
        scores = np.array([(x @ w.query * turn) @ key / math.sqrt(DIM) for key in self._keys])
        parts = np.exp(scores - scores.max())
        attended = sum(part * value for part, value in zip(parts / parts.sum(), self._values, strict=True))
        return np.asarray((x + attended) @ w.head)


@lru_cache(maxsize=4096)
def answer(ask: Ask) -> Answer:
    """The whole answer."""
    return answer_of(Sequence(weights_of(ask.version), ask.kind), ask)


def answer_of(sequence: Steps, ask: Ask) -> Answer:
    """What a model answers, of which `sequence` is at its beginning."""
    for token in ask.prompt:
        logits = sequence.step(token)
    tokens: list[int] = []
    log_probs: list[float] = []
    while True:
        token = draw(logits, ask, len(tokens))
        tokens.append(token)
        log_probs.append(float(log_softmax(logits)[token]))
        if token in ask.stops:
            return Answer(tuple(tokens), tuple(log_probs), "stop")
        if len(tokens) == ask.length:
            return Answer(tuple(tokens), tuple(log_probs), "length")
        logits = sequence.step(token)


@lru_cache(maxsize=4096)
def prompt_log_probs(prompt: tuple[int, ...], version: int, kind: ToyKind) -> tuple[float, ...]:
    """The log-probs of prompt tokens 1 .. N-1."""
    return prompt_log_probs_of(Sequence(weights_of(version), kind), prompt)


def prompt_log_probs_of(sequence: Steps, prompt: tuple[int, ...]) -> tuple[float, ...]:
    """`prompt_log_probs` of a model of which `sequence` is at its beginning."""
    rows = [log_softmax(sequence.step(token)) for token in prompt[:-1]]
    return tuple(float(row[token]) for row, token in zip(rows, prompt[1:], strict=True))


def log_softmax(logits: Array) -> Array:
    return np.asarray(logits - logits.max() - math.log(np.exp(logits - logits.max()).sum()))


def draw(logits: Array, ask: Ask, position: int) -> int:
    """The token at `position` of an answer."""
    sampled = ask.temperature is not None or ask.top_k or ask.top_p is not None
    if not sampled or ask.temperature == 0.0 or ask.top_k == 1:
        return int(logits.argmax())
    scores = logits / (1.0 if ask.temperature is None else ask.temperature)
    chances = {token: math.exp(score - scores.max()) for token, score in enumerate(scores.tolist())}
    likeliest = sorted(chances, key=lambda token: -chances[token])
    if ask.top_k:
        likeliest = likeliest[: ask.top_k]
    total = sum(chances[token] for token in likeliest)
    if ask.top_p is not None:
        before, staying = 0.0, []
        for token in likeliest:
            if before >= ask.top_p:
                break
            staying.append(token)
            before += chances[token] / total
        likeliest = staying
        total = sum(chances[token] for token in likeliest)
    left = uniform(ask.seed, position) * total
    for token in sorted(likeliest):
        left -= chances[token]
        if left < 0:
            return token
    return max(likeliest)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a request's token at `position`: the first 53 bits of a digest."""
    digest = hashlib.sha256(f"{seed} {position}".encode()).digest()
    return float((int.from_bytes(digest[:8], "big") >> 11) / 2**53)
