"""Trees of prefixes: what lies below a split is found where it was, and no partial block is ever found.

Elsewhere a node was registered under the key that it had before a split, and an eviction stopped at it later;
and the hash of a partly filled block came back once the block was full.
"""

from collections.abc import Iterable, Sequence

import mambaslots as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.cache.value_eviction import ValueEviction
from oracle.budget import costly, thinned
from oracle.cached_prefixes import assert_cache_is_right, tokens_to
from oracle.drafters import MODES
from oracle.serving import (
    assert_answers,
    expected_answer,
    random_tokens,
    resumable,
    serve_checked,
    small_engine,
)
from oracle.toy_engine import ask, toy_engine

TEXT = [(7 * i * i + 3 * i) % 29 for i in range(40)]
Path = tuple[int, ...]


# ---- nodes that are split


class PlainTree:
    """Which prefixes a policy knows, as a set."""

    def __init__(self) -> None:
        self.policy, self.known = ValueEviction(), set[Path]()

    def add(self, path: Path, present: bool) -> None:
        if path in self.known:
            self.remove(path)
        self.policy.insert_planned(path, len(path), "tail", -1)
        if not present:
            self.policy.remove_planned(path[-1])
        self.known.add(path)

    def remove(self, path: Path) -> None:
        self.policy.insert([0])
        self.policy.set_hashes([0], [path[-1]], lambda i: path)
        self.policy.remove([0], remember=False)
        self.known.remove(path)

    def check(self, probes: Iterable[Path]) -> None:
        self.policy.check_integrity([])
        assert self.policy._tree.nodes.keys() == {path[-1] for path in self.known}
        for path in probes:
            for stop in range(len(path) + 1):
                wanted = [p for p in self.known if p == path[: len(p)] and len(p) <= stop]
                found = self.policy._tree.deepest(path, stop)
                assert (found.depth, found.prefix_hash) == max(
                    ((len(p), p[-1]) for p in wanted), default=(0, 0)
                )


def hashed(parts: Sequence[int]) -> Path:
    """A hash for each prefix of the parts."""
    return tuple(int("1" + "".join(map(str, parts[: n + 1]))) for n in range(len(parts)))


@pytest.mark.disaster(number=19)
def test_a_path_is_split_at_every_depth_in_every_order() -> None:
    long = hashed([1] * 9)
    forks = [hashed([1] * depth + [2, 3]) for depth in range(9)]
    for step in (1, 2, 4, 5, 7, 8):
        plain = PlainTree()
        plain.add(long, True)
        order = [forks[step * i % 9] for i in range(9)]
        for number, path in enumerate(order):
            plain.add(path, number % 3 != 0)
            plain.check([long, *forks])
            plain.add(path[: 1 + number % len(path)], True)
            plain.check([long, *forks])
        for path in sorted(plain.known, key=lambda path: path[-1] % 7):
            plain.remove(path)
            plain.check([long, *forks])
        assert plain.policy._tree.num_edge_hashes == 0


@pytest.mark.disaster(number=19)
@given(st.lists(st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=7), st.sampled_from("apr"))))
def test_any_paths_come_and_go(calls: list[tuple[list[int], str]]) -> None:
    """`a`: a ghost; `p`: a state that is present; `r`: it leaves."""
    plain, seen = PlainTree(), set[Path]()
    for parts, call in calls:
        path = hashed(parts)
        seen.add(path)
        if call != "r":
            plain.add(path, call == "p")
        elif path in plain.known:
            plain.remove(path)
        plain.check(seen)


def cached_prefixes(engine: ms.DynamicInferenceEngine) -> set[Path]:
    """The token prefixes that have a state, read from the maps; matching has no part in it."""
    cache = engine.context.prefix_cache
    return {
        tokens_to(cache.kv_blocks.tree, block)
        for block in cache.slots.cached_states.state_block_of_hash.values()
    }


def assert_found(engine: ms.DynamicInferenceEngine, prompts: Iterable[Sequence[int]]) -> int:
    """Each prompt resumes from its deepest prefix that has a state; returns how many resume."""
    engine.check_integrity()
    known, hits = cached_prefixes(engine), 0
    for prompt in prompts:
        depths = (len(prefix) for prefix in known if prefix == tuple(prompt[: len(prefix)]))
        wanted = max(depths, default=0)
        assert resumable(engine.context, prompt) == wanted
        hits += wanted > 0
    return hits


@pytest.mark.disaster(number=19)
@pytest.mark.sampled
@pytest.mark.parametrize("policy", ["value", "lru"])
@pytest.mark.parametrize(("slots", "blocks"), [(2, 30), (6, 60), (60, 400)])
def test_forks_at_every_depth_leave_every_prefix_where_it_was(policy: str, slots: int, blocks: int) -> None:
    engine = toy_engine(slots, num_kv_blocks=blocks, eviction_policy=policy)
    forks = [[*TEXT[:depth], 28 - depth % 7, 28, depth % 29, 5, 6] for depth in range(1, 40)]
    hits = 0
    for number in thinned(range(80), every=3):
        fork = forks[11 * number % 39]
        ask(engine, fork, 1 + number % 6)
        ask(engine, TEXT[: 20 + number % 20], 1)
        hits += assert_found(engine, [TEXT, *forks[::5]])
        if number % 12 == 0:
            assert_cache_is_right(engine)
    assert hits > 0
    assert engine.stats().cache.num_resumed_tokens > 0


@costly()
@given(
    st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 2), max_size=9)), min_size=4, max_size=20),
    st.sampled_from([1, 3, 30]),
    st.sampled_from([26, 100]),
)
def test_any_forks_are_found_again(forks: list[tuple[int, list[int]]], slots: int, blocks: int) -> None:
    engine = toy_engine(slots, num_kv_blocks=blocks)
    prompts = [[*TEXT[:depth], *tail] or [1] for depth, tail in forks]
    for prompt in prompts:
        ask(engine, prompt, 3)
        assert_found(engine, prompts)


# ---- partial blocks


@pytest.mark.disaster(number=20)
@pytest.mark.usefixtures("kind")
@pytest.mark.in_turn("mode")
@pytest.mark.parametrize(
    "mode", ["async", "mixed", "wrong", "encoded", "replay", "replay, mixed", "in place"]
)
def test_what_a_partial_block_holds_is_not_found_before_the_block_is_full(mode: str) -> None:
    """Two requests share a head that ends inside a block, and part inside it; each step is looked at."""
    engine = small_engine(**MODES[mode])
    head = random_tokens(19, seed=1)
    prompts = [head, [*head, 7], [*head, 7, 8, 9], head[:13]]
    params = ms.SamplingParams(max_tokens=20, return_log_probs=True)
    ids = {engine.add_request(prompt, params): prompt for prompt in prompts}
    wholes = [tuple(prompt + expected_answer(tuple(prompt), 20)[0]) for prompt in prompts]
    index, retired = set[int](), set[int]()
    while engine.has_unfinished_requests():
        for result in engine.step().finished:
            assert_answers(ids[result.request_id], result)
        engine.context.check_integrity()
        tree = engine.context.prefix_cache.kv_blocks.tree
        now = set(tree.block_of_hash)
        retired |= index - now
        assert not retired & now, "a hash came back that had left"
        index = now
        for block in tree.block_of_hash.values():
            tokens = tokens_to(tree, block)
            assert len(tokens) % 8 == 0
            assert any(tokens == whole[: len(tokens)] for whole in wholes), "wrong tokens are in the index"
        for whole in wholes:  # heads that end inside a block, and go on in another way
            other = (*whole[:21], whole[21] ^ 1, *random_tokens(9, seed=5))
            assert resumable(engine.context, other) <= 16
            assert len(engine.context.prefix_cache.kv_blocks.tree.match(*chained(other))) <= 2
    assert_cache_is_right(engine)
    for prompt, whole in zip(prompts, wholes, strict=True):
        result = serve_checked(engine, [[*whole, 3]], length=2)[0]
        assert result.num_resumed_tokens >= 8
        (result,) = serve_checked(engine, [[*whole[:21], whole[21] ^ 1, 4]], length=2)
        assert result.num_resumed_tokens == len(prompt) // 8 * 8
    assert_cache_is_right(engine)


def chained(tokens: Sequence[int]) -> tuple[bytes, list[int], list[bytes]]:
    """What the KV index is asked: the root, and of each whole block the hash and the tokens."""
    from hashlib import sha256

    digest = root = sha256(b"mambaslots.root\0").digest()
    keys, contents = [], []
    for first in range(0, len(tokens) // 8 * 8, 8):
        contents.append(np.asarray(tokens[first : first + 8], "<u4").tobytes())
        digest = sha256(digest + contents[-1]).digest()
        keys.append(int.from_bytes(digest[:8], "big") >> 1)
    return root, keys, contents


@pytest.mark.disaster(number=20)
@pytest.mark.usefixtures("kind")
def test_a_block_that_becomes_full_is_found_under_its_one_hash() -> None:
    """One request fills the block in its prompt, one while it decodes: the shorter content is never found."""
    engine = small_engine()
    text = random_tokens(21, seed=2)
    answer = expected_answer(tuple(text), 12)[0]
    params = ms.SamplingParams(max_tokens=12, return_log_probs=True)
    running = engine.add_request(text, params)
    found: list[int] = []
    while engine.has_unfinished_requests():
        for result in engine.step().finished:
            assert result.request_id == running
            assert_answers(text, result)
        found.append(resumable(engine.context, text + answer))
        assert resumable(engine.context, [*text, 1 ^ answer[0], *answer[1:]]) == 16
    assert sorted(found) == found
    assert (found[0], set(found), found[-1]) == (16, {16, 24, 32}, 32)
    assert assert_cache_is_right(engine).blocks == 4
