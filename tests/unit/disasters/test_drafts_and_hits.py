"""Drafts and the cache: states were rewound by drafts, a hit lay one block off, or some lengths had none."""

import mambaslots as ms
import pytest
from oracle.budget import thinned
from oracle.cached_states import assert_cached_states
from oracle.drafters import MODES, MixedDrafter, RightDrafter, WrongDrafter
from oracle.serving import random_tokens, serve_checked, small_engine

pytestmark = pytest.mark.usefixtures("kind")

BLOCK = 8
TEXT = random_tokens(4 * BLOCK + 1, seed=80)
DRAFTERS = {"right": RightDrafter, "wrong": WrongDrafter, "mixed": MixedDrafter}
WAYS = ["separate", "in place", "encoded", "replay"]


def engine_of(k: int, drafter: str, way: str = "separate") -> ms.DynamicInferenceEngine:
    """`k`: drafts; 0 for none."""
    drafts = {"num_speculative_tokens": k, "make_drafter": DRAFTERS[drafter]} if k else {}
    ways = {"separate": {}, "in place": {"in_place": True}, "encoded": {"encoded": True},
            "replay": {"decode_by_replay": True}}  # fmt: skip
    return small_engine(**drafts, **ways[way])


def whole(num_tokens: int) -> int:
    """What a prompt may resume whose first `num_tokens` tokens are computed."""
    return num_tokens // BLOCK * BLOCK


@pytest.mark.disaster(number=10)
@pytest.mark.sampled(k=(3, 8))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafter", list(DRAFTERS))
@pytest.mark.parametrize("k", [1, 2, 3, 4, 7, 8, 9])
def test_repeats_extensions_and_forks_at_every_residue_with_drafts(k: int, drafter: str, way: str) -> None:
    """For each residue of a prompt in a block, and answers that end at each residue of the drafts."""
    for residue in thinned(range(BLOCK), every=5):
        engine = engine_of(k, drafter, way)
        prompt = TEXT[: 2 * BLOCK + residue]
        length = BLOCK + k + 1 + residue % (k + 1)
        first, second = (serve_checked(engine, [prompt], length)[0] for _ in range(2))
        assert first.num_resumed_tokens == 0
        assert second.num_resumed_tokens == whole(len(prompt) - 1) > 0
        history = prompt + first.tokens
        (extended,) = serve_checked(engine, [history + random_tokens(3, seed=81)], length)
        assert extended.num_resumed_tokens == whole(len(history) - 1)  # the last token is not computed
        assert_cached_states(engine.context)
        for cut in thinned(range(1, len(history)), every=17):  # a fork of a fork has the branch's state
            fork = history[:cut] + random_tokens(4, seed=82 + cut)
            (result,) = serve_checked(engine, [fork], 3)
            assert result.num_resumed_tokens % BLOCK == 0
            assert result.num_resumed_tokens <= cut
            (again,) = serve_checked(engine, [[*fork[:-1], 255 - fork[-1]]], 3)
            assert again.num_resumed_tokens >= whole(cut)
        assert assert_cached_states(engine.context) > 3
        assert k == 0 or engine.stats().speculation.num_drafted > 0


def hits_by_length(engine: ms.DynamicInferenceEngine, tail: int) -> list[int]:
    """What a prompt of each length resumes whose like, with another tail, has just been answered."""
    hits = []
    for length in thinned(range(1, 4 * BLOCK + 1), every=15):
        engine.reset_prefix_cache()
        serve_checked(engine, [TEXT[:length]], length=4)
        (result,) = serve_checked(engine, [TEXT[:length] + random_tokens(tail, seed=83)], length=4)
        hits.append(result.num_resumed_tokens)
    return hits


@pytest.mark.disaster(number=11)
@pytest.mark.sampled(mode=("3 wrong", "4 mixed"), way=("in place", "replay"))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["1 right", "3 wrong", "4 mixed", "7 right", "9 mixed"])
def test_hits_of_every_prompt_length_are_the_same_with_drafts_and_without(mode: str, way: str) -> None:
    """Repeated, and continued by other tokens: as many hits as the whole blocks that were computed."""
    k, drafter = mode.split()
    lengths = thinned(range(1, 4 * BLOCK + 1), every=15)
    for tail in (0, 2):
        plain, drafted = (hits_by_length(engine_of(n, drafter, way), tail) for n in (0, int(k)))
        expected = [whole(length - 1 if not tail else length) for length in lengths]
        assert plain == drafted == expected
        assert sum(drafted) > 0


@pytest.mark.disaster(number=11)
@pytest.mark.sampled(mode=("", "wrong", "replay, mixed", "encoded"))
@pytest.mark.parametrize("mode", ["", *(mode for mode in MODES if mode != "n-grams")])
def test_every_length_of_a_prompt_has_the_hits_of_its_whole_blocks(mode: str) -> None:
    """One engine, prompts that grow by one token: each resumes all whole blocks of the one before."""
    engine, hits = small_engine(**MODES.get(mode, {})), []
    for length in range(1, 4 * BLOCK + 2):
        (result,) = serve_checked(engine, [TEXT[:length]], length=1)
        hits.append(result.num_resumed_tokens)
    assert hits == [whole(length - 1) for length in range(1, 4 * BLOCK + 2)]
