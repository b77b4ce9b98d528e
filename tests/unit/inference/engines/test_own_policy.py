"""Policies of a user's own that choose wrong slots are refused by a sentence, and cost no token."""

from collections.abc import Callable

import mambaslots as ms
import pytest
from mambaslots.inference.contexts.cache.eviction import LRUEviction
from oracle.serving import expected_answer, random_tokens, run_checked, serve_checked, small_engine

ONE = ms.SamplingParams(max_tokens=1)


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ([-1], r"victims of Wrong returned \[-1\]; accepted: up to \d of"),
        ([99], r"victims of Wrong returned \[99\]; accepted: up to \d of"),
        ([0, 0, 0, 0, 0], "each once"),
        ([], r"victims of Wrong returned 0 slots; accepted: \d"),
    ],
    ids=["negative", "too large", "too many", "none"],
)
def test_wrong_victims_are_refused(chosen: list[int], text: str) -> None:
    wrong = False

    class Wrong(LRUEviction):
        def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
            return chosen if wrong else super().victims(count, evictable)

    engine = small_engine(num_mamba_slots=1, max_requests=3, num_kv_blocks=60, eviction_policy=Wrong())
    for seed in range(4):
        serve_checked(engine, [random_tokens(40, seed)], length=1)
    for seed in range(3):
        engine.add_request(random_tokens(40, 10 + seed), ONE)
    wrong = True
    with pytest.raises(ValueError, match=text):
        run_checked(engine)
    engine.check_integrity()
    wrong = False
    results = run_checked(engine).values()
    answers = sorted(expected_answer(tuple(random_tokens(40, 10 + seed)), 1)[0] for seed in range(3))
    assert sorted(result.tokens for result in results) == answers
    serve_checked(engine, [random_tokens(40, seed) for seed in range(8)], length=3)
