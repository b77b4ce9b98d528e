"""Drafters that are right, wrong, or both by turns; and a model whose kernels update states in place."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import mambaslots as ms
import numpy as np
import torch
from oracle import serving

FAR = 24


class RightDrafter:
    """Knows what greedy decoding will say."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], list[int]] = {}  # a sequence -> what follows it

    def right(self, tokens: Sequence[int]) -> list[int]:
        """At least one token."""
        sequence = tuple(tokens)
        for back in range(min(FAR, len(sequence))):
            follows = self._known.get(sequence[: len(sequence) - back])
            if (
                follows is not None
                and follows[:back] == list(sequence[len(sequence) - back :])
                and back < FAR
            ):
                return follows[back:]
        self._known[sequence], _ = serving.expected_answer(sequence, FAR)
        return self._known[sequence]

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        return self.right(tokens)[:max_drafts]


class WrongDrafter(RightDrafter):
    """Never right."""

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        return [(self.right(tokens)[0] + 1 + i) % 256 for i in range(max_drafts)]


class MixedDrafter(RightDrafter):
    """Right up to somewhere, then at random; any number of drafts, also more than may be used."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = np.random.default_rng(seed)

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        wrong = self._random.integers(0, 256, max_drafts + 2).tolist()
        right = self.right(tokens)[: self._random.integers(0, max_drafts + 2)]
        return (right + wrong)[: self._random.integers(0, max_drafts + 3)]


class RememberingDrafter:
    """Drafts what the same sequence went on with the time before; until then, wrong ones."""

    def __init__(self) -> None:
        self.sequences: list[list[int]] = []

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        for sequence in self.sequences:
            if sequence[: len(tokens)] == list(tokens):
                return sequence[len(tokens) : len(tokens) + max_drafts]
        return [0] * max_drafts


class InPlaceModel:
    """A model for whose kernels a row's state is in one place; asserts that it is."""

    def __init__(self, model: ms.models.HybridLM) -> None:
        self._model = model

    def state_spec(self) -> ms.HybridStateSpec:
        return replace(self._model.state_spec(), separate_states=False)

    def __call__(self, inputs: ms.StepInputs) -> torch.Tensor:
        sources, decodes = inputs.state_sources, inputs.num_decodes
        assert torch.equal(sources[:decodes], inputs.decode_destinations[:, 0])
        prefilled = sources[decodes:]
        assert torch.equal(prefilled[prefilled >= 0], inputs.prefill_destinations[prefilled >= 0])
        return self._model(inputs)


MODES: dict[str, dict[str, object]] = {
    "right": {"num_speculative_tokens": 3, "make_drafter": RightDrafter},
    "wrong": {"num_speculative_tokens": 2, "make_drafter": WrongDrafter},
    "mixed": {"num_speculative_tokens": 4, "make_drafter": MixedDrafter},
    "over two blocks": {"num_speculative_tokens": 17, "make_drafter": RightDrafter},
    "in place": {"num_speculative_tokens": 3, "make_drafter": MixedDrafter, "in_place": True},
    "n-grams": {"num_speculative_tokens": 3, "make_drafter": lambda: ms.NgramDrafter(2, 1)},
    "in place, no drafts": {"in_place": True},
    "async": {"async_scheduling": True},
    "in place, async": {"in_place": True, "async_scheduling": True},
    "encoded": {"encoded": True},
    "encoded, async": {"encoded": True, "async_scheduling": True},
    "encoded, mixed": {"encoded": True, "num_speculative_tokens": 4, "make_drafter": MixedDrafter},
    "encoded, in place": {"encoded": True, "in_place": True, "num_speculative_tokens": 2}
    | {"make_drafter": RightDrafter},
    "replay": {"decode_by_replay": True},
    "replay, async": {"decode_by_replay": True, "async_scheduling": True},
    "replay, mixed": {"decode_by_replay": True, "num_speculative_tokens": 4, "make_drafter": MixedDrafter},
    "replay, right": {"decode_by_replay": True, "num_speculative_tokens": 17, "make_drafter": RightDrafter},
}


@contextmanager
def speculating(mode: str) -> Iterator[None]:
    """Engines that `small_engine` makes within it speculate, or have such a model."""
    before = dict(serving.DEFAULTS)
    serving.DEFAULTS.update(MODES[mode])
    try:
        yield
    finally:
        serving.DEFAULTS.clear()
        serving.DEFAULTS.update(before)
