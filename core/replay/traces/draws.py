"""Seeded draws that generated traces are made of."""

import math
from collections.abc import Sequence

import numpy as np

from ..trace import Tokens

NUM_TOKEN_IDS = 1 << 17
"""Drawn token ids are less than this, so that two drawn texts part with their first tokens."""


class Draws:
    """Random numbers and texts of one seed.

    Each draw takes uniform numbers of one generator, and turns them into the distribution here. So a trace
    depends on numpy's bit stream alone, which numpy keeps from version to version.

    Args:
        seed: integers from 0 on; equal seeds give equal draws.
    """

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
        """A length, `median` in the middle, held to [low, high]. The normal number is Box and Muller's."""
        radius = math.sqrt(-2.0 * math.log(1.0 - self.uniform()))
        normal = radius * math.cos(2.0 * math.pi * self.uniform())
        return min(max(round(median * math.exp(sigma * normal)), low), high)

    def log_uniform(self, low: int, high: int) -> int:
        """A length in [low, high], as likely in each octave."""
        return min(int(low * math.exp(self.uniform() * math.log((high + 1) / low))), high)

    def zipf(self, num_ranks: int, exponent: float = 1.0) -> int:
        """A rank in [0, num_ranks); rank r is drawn in proportion to (r + 1) ** -exponent."""
        weights = [(rank + 1) ** -exponent for rank in range(num_ranks)]
        left = self.uniform() * sum(weights)
        for rank, weight in enumerate(weights):
            left -= weight
            if left < 0.0:
                return rank
        return num_ranks - 1

    def text(self, num_tokens: int) -> Tokens:
        """[num_tokens] int32 token ids."""
        return (self._generator.random(num_tokens) * NUM_TOKEN_IDS).astype(np.int32)


def joined(parts: Sequence[Tokens]) -> Tokens:
    """The tokens of all parts, one behind another, int32."""
    return np.concatenate(parts).astype(np.int32, copy=False)
