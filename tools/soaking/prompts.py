"""The prompts of a soak: the generated traces of the replay in small, and what clients do with prompts."""

from collections import Counter, deque
from collections.abc import Sequence
from random import Random

from mambaslots.replay.generate import GENERATORS, Draws
from mambaslots.replay.trace import Tokens, TraceRequest

SESSIONS = 4
KEPT = 24
SHAPES: dict[str, tuple[float, int]] = {
    "chat": (SESSIONS / 240, 2000),
    "agent": (SESSIONS / 72, 9000),
    "documents": (SESSIONS / 120, 16000),
    "fork": (SESSIONS / 150, 2000),
    "unique": (SESSIONS / 1500, 1800),
}
"""Of each generated trace: the scale of a few sessions, and tokens of a usual prompt."""


class SmallDraws(Draws):
    """Draws lengths as traces have them; texts are shorter by one factor, at least one token."""

    def __init__(self, factor: float, *seed: int) -> None:
        super().__init__(*seed)
        self._factor = factor

    def text(self, num_tokens: int) -> Tokens:
        return super().text(max(1, round(num_tokens * self._factor)))


class Prompts:
    """Draws prompts.

    Most are the next request of one of several traces. Others repeat an earlier prompt, part from it
    somewhere, or go on from an answer. `finished` is to be told of answers.

    Attributes:
        counts: how many prompts of which kind were drawn.
    """

    def __init__(self, random: Random, longest: int, alphabet: int) -> None:
        """
        Args:
            random: draws all.
            longest: tokens of the longest prompt.
            alphabet: token ids are less than this.
        """
        self._random, self._longest, self._alphabet = random, longest, alphabet
        self.counts: Counter[str] = Counter()
        self._coming: dict[str, list[TraceRequest]] = {shape: [] for shape in SHAPES}
        self._asked: deque[list[int]] = deque(maxlen=KEPT)
        self._finished: deque[list[int]] = deque(maxlen=KEPT)

    def tokens(self, count: int) -> list[int]:
        """Random token ids."""
        return [self._random.randrange(self._alphabet) for _ in range(count)]

    def finished(self, tokens: Sequence[int]) -> None:
        """A prompt and its answer: a later turn may go on from them."""
        self._finished.append(list(tokens))

    def prompt(self) -> list[int]:
        """The next prompt."""
        chance = self._random.random()
        if self._asked and chance < 0.15:
            what, prompt = "repeated", self._random.choice(self._asked)
        elif self._asked and chance < 0.3:
            what, prompt = "forked", self._random.choice(self._asked)
            prompt = prompt[: self._random.randint(1, len(prompt))] + self.tokens(self._random.randint(1, 9))
        elif self._finished and chance < 0.5:
            what, prompt = "behind an answer", self._random.choice(self._finished)
            prompt = prompt + self.tokens(self._random.randint(1, 9))
        else:
            what, prompt = self._of_a_trace()
        self.counts[f"prompts: {what}"] += 1
        prompt = prompt[: self._longest]
        self._asked.append(prompt)
        return prompt

    def _of_a_trace(self) -> tuple[str, list[int]]:
        shape = self._random.choice(list(SHAPES))
        coming = self._coming[shape]
        if not coming:
            scale, usual = SHAPES[shape]
            factor = self._longest / usual / self._random.choice([1, 2, 4])
            coming += GENERATORS[shape](SmallDraws(factor, self._random.randrange(1 << 30)), scale)
            coming.sort(key=lambda request: (-request.arrival_s, -request.session))
        return shape, (coming.pop().prompt % self._alphabet).tolist()
