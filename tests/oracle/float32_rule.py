"""The rule for float32: equal tokens, or a first difference where the model all but tied."""

from collections.abc import Sequence
from dataclasses import dataclass

import mambaslots as ms
from oracle.recurrent_lm import RecurrentLM

TIE = 1e-4
"""How close the two best logits are where a first difference is no fault."""


@dataclass
class Comparison:
    """Greedy answers held against others: how many were the same, and how many parted at a tie."""

    same: int = 0
    ties: int = 0

    def add(
        self, model: ms.models.HybridLM, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]
    ) -> None:
        """AssertionError where they differ and the recurrence, token by token in float64, sees no tie."""
        assert len(expected) == len(got)
        if list(expected) == list(got):
            self.same += 1
            return
        first = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
        best = RecurrentLM(model).logits([*prompt, *expected[:first]])[-1].topk(2).values
        gap = float(best[0] - best[1])
        assert gap < TIE, f"token {first} is {got[first]}, not {expected[first]}, and the gap is {gap:.1e}"
        self.ties += 1
