"""Drafters for `bits.py`: one that knows the answers, and one that guesses."""

import random
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from promise.answers import Answer
from promise.traffic import BitsRequest

SHARE_WRONG = 0.2


class RandomDrafter:
    """Drafts random tokens; at some calls fewer than may be, or none."""

    def __init__(self, vocabulary: int) -> None:
        self._draw, self._vocabulary = random.Random(4), vocabulary

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        count = self._draw.choice((0, max_drafts, self._draw.randint(1, max_drafts)))
        return [self._draw.randrange(self._vocabulary) for _ in range(count)]


class KnowingDrafter:
    """Drafts what is expected, and puts a wrong token in the place of every fifth draft."""

    def __init__(self, requests: Sequence[BitsRequest], expected: Sequence[Answer]) -> None:
        self._draw = random.Random(5)
        self._known = [
            (request.prompt, answer.tokens) for request, answer in zip(requests, expected, strict=True)
        ]
        self._answers: WeakKeyDictionary[Sequence[int], tuple[int, list[int]]] = WeakKeyDictionary()

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        if tokens not in self._answers:
            self._answers[tokens] = self._find(tokens)
        prompt, answer = self._answers[tokens]
        drafts = answer[len(tokens) - prompt :][:max_drafts]
        return [0 if self._draw.random() < SHARE_WRONG else token for token in drafts]

    def _find(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """The length of the request's prompt, and its answer; an empty answer for another request."""
        for prompt, answer in self._known:
            if len(prompt) < len(tokens) and tokens[: len(prompt)] == prompt:
                return len(prompt), answer
        return len(tokens), []
