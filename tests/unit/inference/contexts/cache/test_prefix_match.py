"""Matches that are remembered: made right again, they are what a match without memory finds."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mambaslots.inference.contexts.cache import cached_states
from mambaslots.inference.contexts.cache.block_tree import BlockTree
from mambaslots.inference.contexts.cache.cached_states import PrefixMatch, compute_spans
from mambaslots.inference.contexts.cache.checkpoint_plan import CheckpointPlan, best_shared_depth
from mambaslots.inference.contexts.cache.hashing import PrefixHashChain
from mambaslots.inference.contexts.cache.prefix_cache import PrefixCache
from oracle.kv_index import eviction_order

SIZE = 2
PLAN = CheckpointPlan()


def chain_of(tokens, salt=b""):
    chain = PrefixHashChain(SIZE, salt)
    chain.extend_to(tokens)
    return chain


@given(st.lists(st.text("ab", max_size=5), max_size=5), st.text("ab", max_size=5), st.integers(0, 5))
def test_a_state_is_stored_where_it_saves_the_most_blocks(
    others: list[str], text: str, num_known: int
) -> None:
    keys, *other_keys = (
        [hash(each[:depth]) for depth in range(1, len(each) + 1)] for each in (text, *others)
    )
    saved = {
        depth: (depth - num_known) * sum(other[:depth] == text[:depth] for other in others)
        for depth in range(num_known + 1, len(text) + 1)
    }
    depth = best_shared_depth(keys, other_keys, num_known)
    most = max(saved.values(), default=0)
    assert saved.get(depth, 0) == most
    assert (depth > 0) == (most > 0)


def opened(cache, tokens, salt=b""):
    """A path whose blocks are allocated, those that match shared."""
    chain = chain_of(tokens, salt)
    path = cache.open(chain, PLAN, np.full(2048, -1, np.int32))
    cache.hold(path, cache.match(chain, len(tokens)))
    cache.grow(path, -(-len(tokens) // SIZE))
    return path


def computed(cache, tokens, depths=(), salt=b""):
    """A path that is registered to its end, with states after so many blocks."""
    path = opened(cache, tokens, salt)
    cache.register(path, tokens, len(tokens))
    for depth in depths:
        take_state(cache, path, depth)
    return path


def take_state(cache, path, depth):
    cache.slots.commit_slots(cache.slots.reserve_slots([path.blocks[depth - 1]]))


def copied(match):
    """A match whose basis is its own, so that the original stays as old as it is."""
    return replace(match)


def looked_up(cache, chain, num_tokens, held=(), limit=None):
    """What a match must be, by looking at everything: no path, no memory, one token after the other."""
    tree, slots = cache.kv_blocks.tree, cache.slots
    whole = num_tokens // SIZE
    blocks, parent = [], chain.root
    for key, content in zip(chain.hashes[:whole], chain.tokens[:whole], strict=True):
        found = [b for b in tree.block_of_hash.values() if tree.content_of(b) == (parent, content)]
        assert found == ([tree.block_of_hash[key]] if key in tree.block_of_hash else [])
        if not found:
            break
        blocks += found
        parent = found[0]
    assert blocks[: len(held)] == list(held)
    gone = itertools.takewhile(lambda key: tree.ghosts.has(key, "block"), chain.hashes[len(blocks) : whole])
    seen = len(blocks) + len(list(gone))
    limited = limit is not None and limit < num_tokens - 1
    reachable = min(len(blocks), (limit if limited else num_tokens - 1) // SIZE)
    asked = limit // SIZE if limited else whole  # blocks whose states count
    with_state = [d for d in range(1, reachable + 1) if slots.cached_states.slot_of(blocks[d - 1]) >= 0]
    depth = max([d for d in with_state if d > len(held)], default=0)
    slot = slots.cached_states.slot_of(blocks[depth - 1]) if depth else -1
    reasons = []

    def is_gone(key):
        return tree.ghosts.has(key, "state") or tree.ghosts.has(key, "refused state")

    for token in range(depth * SIZE, num_tokens):
        inside = token // SIZE + 1
        ghosts = [d for d in range(inside, reachable + 1) if is_gone(chain.hashes[d - 1])]
        if limited and token >= asked * SIZE:
            reasons.append("disabled")
        elif ghosts:
            capacity = tree.ghosts.has(chain.hashes[ghosts[-1] - 1], "refused state")
            reasons.append("capacity" if capacity else "state_evicted")
        elif inside <= reachable:
            reasons.append("state_not_taken" if seen >= asked else "branch_first_seen")
        elif inside <= len(blocks):
            reasons.append("last_token")
        elif inside <= seen:
            reasons.append("kv_evicted")
        else:
            reasons.append("partial_block" if seen >= asked else "never_seen")
    return tuple(blocks), depth * SIZE, slot, seen * SIZE, reasons


def facts_of(match):
    """The same of a match."""
    reasons = [span.reason for span in match.spans for _ in range(span.start, span.stop)]
    return match.blocks, match.resume_tokens, match.resume_slot, match.seen_tokens, reasons


# ---- one thing at a time


@pytest.fixture
def cache():
    return PrefixCache(64, 8, SIZE, "lru")


DOCUMENT = list(range(1, 21))  # 10 blocks


def test_a_match_is_itself_as_long_as_nothing_changes(cache):
    path = computed(cache, DOCUMENT, [3, 7])
    match = cache.match(path.chain, 20)
    assert cache.match(path.chain, 20, known=match) is match
    nothing = cache.match(chain_of([90] * 8), 8)
    assert cache.match(chain_of([90] * 8), 8, known=nothing) is nothing


@pytest.fixture
def span_calls(monkeypatch):
    """One entry for each time that the spans of a match are computed."""
    calls = []

    def counting(*args, **kwargs):
        calls.append(args)
        return compute_spans(*args, **kwargs)

    monkeypatch.setattr(cached_states, "compute_spans", counting)
    return calls


@pytest.mark.parametrize("capacity", [None, 1])
def test_the_spans_of_a_match_are_computed_once_until_something_changes(cache, span_calls, capacity):
    path = computed(cache, DOCUMENT, [3])
    if capacity is not None:  # every ghost is a lapse
        cache.tree.ghosts.capacity = capacity
    other = computed(cache, [50, 51, 52, 53], [1])
    span_calls.clear()
    match = cache.match(path.chain, 20)
    assert len(span_calls) == 1
    for _ in range(3):
        assert cache.match(path.chain, 20, known=match) is match
    assert len(span_calls) == 1
    take_state(cache, other, 2)
    assert cache.match(path.chain, 20, known=match) is match
    assert len(span_calls) == 2  # states have changed
    cache.tree.ghosts.add_all([901, 902], "block")
    cache.tree.ghosts.add_all([903, 904], "block")
    assert cache.match(path.chain, 20, known=match) is match
    assert len(span_calls) == 2 + (capacity is not None)  # ghosts were forgotten
    assert cache.match(path.chain, 20, known=match) is match
    assert len(span_calls) == 2 + (capacity is not None)


def test_what_happens_to_other_prefixes_leaves_a_match_alone(cache):
    path = computed(cache, DOCUMENT, [3])
    other = computed(cache, [50, 51, 52, 53, 54, 55], [1, 2])
    cache.slots.evict(1)  # the state of the document goes first
    take_state(cache, path, 3)
    match = cache.match(path.chain, 20)
    take_state(cache, other, 3)
    cache.slots.remove_unpinned(other.blocks[0])
    cache.release(other)
    cache.kv_blocks.evict_lru_blocks(3)
    assert cache.match(path.chain, 20, known=match) is match


@pytest.mark.parametrize(
    "change",
    [
        lambda cache, path: take_state(cache, path, 9),
        lambda cache, path: cache.slots.remove_unpinned(path.blocks[4]),
        lambda cache, path: cache.slots.evict(1),
        lambda cache, path: cache.cached_states.remember_refused([path.chain.hashes[6]]),
        lambda cache, path: (cache.release(path), cache.kv_blocks.evict_lru_blocks(1)),
        lambda cache, path: (cache.release(path), cache.kv_blocks.evict_lru_blocks(7)),
        lambda cache, path: (cache.release(path), cache.kv_blocks.evict_lru_blocks(10)),
        lambda cache, path: (
            cache.release(path),
            cache.kv_blocks.evict_lru_blocks(5),
            opened(cache, [80, 81, 82, 83]),  # the same blocks, for other tokens
            computed(cache, DOCUMENT, [8]),
        ),
        lambda cache, path: cache.clear([path]),
        lambda cache, path: cache.reset(),
    ],
    ids=[
        "a deeper state", "its state goes", "its state is evicted", "no slot was left", "its last block goes",
        "most blocks go", "all blocks go", "blocks go and come back", "all is forgotten", "reset",
    ],
)  # fmt: skip
def test_what_happens_to_the_prefix_changes_the_match(cache, change):
    path = computed(cache, DOCUMENT, [5])
    chain = chain_of([*DOCUMENT, 30, 31, 32])
    match = cache.match(chain, 23)
    change(cache, path)
    again = cache.match(chain, 23, known=match)
    assert again != match
    assert again == cache.match(chain, 23)
    assert facts_of(again) == looked_up(cache, chain, 23)


def test_a_match_of_other_tokens_or_of_more_is_no_help_and_does_no_harm(cache):
    path = computed(cache, DOCUMENT, [5])
    match = cache.match(path.chain, 20)
    for tokens in ([1, 2, 3, 4, 9, 9], DOCUMENT[:9], [7] * 30):
        chain = chain_of(tokens)
        assert cache.match(chain, len(tokens), known=match) == cache.match(chain, len(tokens))
    salted = chain_of(DOCUMENT, b"salt")
    assert cache.match(salted, 20, known=match).blocks == ()
    assert cache.match(path.chain, 20, max_resume_tokens=0, known=match).resume_tokens == 0
    assert cache.match(path.chain, 20, path, known=match).resume_tokens == 0
    by_hand = PrefixMatch(match.blocks, 12, 3, 20, match.spans)
    assert cache.match(path.chain, 20, known=by_hand) == match


def test_a_path_that_shares_no_more_matches_nothing(cache):
    path = computed(cache, DOCUMENT, [5])
    match = cache.match(path.chain, 20, path)
    cache.clear([path])
    assert cache.match(path.chain, 20, path, known=match).blocks == ()
    other = computed(cache, DOCUMENT, [5])
    disabled = cache.match(path.chain, 20, path)
    assert cache.match(path.chain, 20, path, known=disabled) is disabled
    assert cache.match(path.chain, 20, known=disabled).blocks == tuple(other.blocks)


def test_a_crowd_behind_a_document_costs_what_each_step_adds(monkeypatch):
    """1,250 blocks are computed 128 a step; each waiting request looks up only the new ones."""
    cache = PrefixCache(2000, 16, SIZE)
    document = [token % 97 for token in range(2500)]
    path = opened(cache, document)
    crowd = [chain_of([*document, 100 + i]) for i in range(8)]
    matches = [cache.match(chain, 2501) for chain in crowd]
    looked_at = 0
    original = BlockTree.match

    def counting(tree, parent, hashes, tokens):
        nonlocal looked_at
        found = original(tree, parent, hashes, tokens)
        looked_at += len(found)
        return found

    monkeypatch.setattr(BlockTree, "match", counting)
    for stop in [*range(256, 2500, 256), 2500]:
        cache.register(path, document, stop)
        if stop % 512 == 0:
            take_state(cache, path, stop // SIZE)
        looked_at = 0
        matches = [cache.match(chain, 2501, known=match) for chain, match in zip(crowd, matches, strict=True)]
        assert [match.blocks for match in matches] == [tuple(path.blocks[: stop // SIZE])] * 8
        assert looked_at <= 8 * 128  # only the new ones
        looked_at = 0
        assert all(
            cache.match(chain, 2501, known=match) is match
            for chain, match in zip(crowd, matches, strict=True)
        )
        assert looked_at == 0
    assert {match.resume_tokens for match in matches} == {2048}


# ---- any order of events

PROMPTS = st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=7).map(
    lambda kinds: [token for kind in kinds for token in (kind, kind)]
)
SALTS = st.sampled_from([b"", b"", b"salt"])


class Remembered:
    """A match to be made again: for whom, and what earlier matches found."""

    def __init__(self, chain, num_tokens, sequence, limit):
        self.chain = chain
        self.num_tokens = num_tokens
        self.path = sequence
        self.limit = limit
        self.known = []  # of all ages


class RememberedMatches(RuleBasedStateMachine):
    """Blocks and states come and go; matches of all ages are compared with fresh ones and with the oracle."""

    @initialize(
        policy=st.sampled_from(["value", "lru"]),
        num_blocks=st.integers(4, 24),
        num_slots=st.integers(0, 6),
        num_ghosts=st.integers(0, 12),
    )
    def start(self, policy, num_blocks, num_slots, num_ghosts):
        self.cache = cache = PrefixCache(num_blocks, num_slots, SIZE, policy)
        cache.tree.ghosts.capacity = num_ghosts  # short, so that ghosts lapse
        self.paths, self.pins, self.remembered = [], [], []

    def path(self, data):
        return data.draw(st.sampled_from(self.paths))

    @rule(tokens=PROMPTS, salt=SALTS)
    def a_sequence_comes(self, tokens, salt):
        chain = chain_of(tokens, salt)
        match = self.cache.match(chain, len(tokens))
        if self.cache.can_hold(len(tokens) // SIZE, match, None):
            path = opened(self.cache, tokens, salt)
            path.tokens = tokens
            self.paths.append(path)

    @rule(data=st.data(), tokens=PROMPTS, salt=SALTS, known=st.booleans())
    def a_sequence_is_served(self, data, tokens, salt, known):
        """It comes, registers all, takes a state and leaves; perhaps the prompt of a remembered match."""
        if known and self.remembered:
            chain = data.draw(st.sampled_from(self.remembered)).chain
            tokens = [int.from_bytes(content[:4], "little") for content in chain.tokens for _ in range(SIZE)]
            salt = chain.root
        match = self.cache.match(chain_of(tokens, salt), len(tokens))
        if not self.cache.can_hold(len(tokens) // SIZE, match, None):
            return
        path = opened(self.cache, tokens, salt)
        self.cache.register(path, tokens, len(tokens))
        block = data.draw(st.sampled_from(path.blocks))
        if block not in self.cache.slots.cached_states.slot_of_block and self.cache.slots.num_available:
            self.cache.slots.commit_slots(self.cache.slots.reserve_slots([block]))
        self.cache.release(path)

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def blocks_are_registered(self, data):
        path = self.path(data)
        self.cache.register(path, path.tokens, data.draw(st.integers(0, len(path.tokens))))

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def a_path_looks_again(self, data):
        path = self.path(data)
        match, num_blocks = self.cache.match(path.chain, len(path.tokens), path), len(path.blocks)
        if self.cache.can_hold(num_blocks, match, path):
            self.cache.hold(path, match)
            self.cache.grow(path, num_blocks)

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def states_are_taken(self, data):
        path, slots = self.path(data), self.cache.slots
        blocks = [b for b in path.blocks[: path.num_registered] if b not in slots.cached_states.slot_of_block]
        if blocks and slots.num_available:
            slots.commit_slots(slots.reserve_slots([data.draw(st.sampled_from(blocks))]))

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def a_state_is_refused(self, data):
        path = self.path(data)
        self.cache.cached_states.remember_refused([data.draw(st.sampled_from(path.chain.hashes))])

    @rule(data=st.data())
    def a_state_is_dropped(self, data):
        blocks = list(self.cache.slots.cached_states.slot_of_block)
        if blocks:
            self.cache.slots.remove_unpinned(data.draw(st.sampled_from(blocks)))

    @rule(count=st.integers(1, 3))
    def states_are_evicted(self, count):
        slots = self.cache.slots
        evictable = [slot for slot in eviction_order(slots) if slot not in slots.pins]
        slots.evict(min(count, len(evictable)))

    @rule(count=st.integers(1, 6))
    def blocks_are_evicted(self, count):
        kv = self.cache.kv_blocks
        kv.evict_lru_blocks(min(count, kv.num_cached))

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def a_sequence_leaves(self, data):
        path = self.path(data)
        self.paths.remove(path)
        self.cache.release(path)

    @precondition(lambda self: len(self.paths) > 3)
    @rule(hard=st.booleans())
    def all_is_forgotten(self, hard):
        if hard:
            self.cache.reset()
            self.paths.clear()
            self.remembered = [one for one in self.remembered if one.path is None]
        else:
            self.cache.clear(self.paths)

    @rule(data=st.data(), tokens=PROMPTS, salt=SALTS, limit=st.none() | st.integers(0, 12))
    def a_match_is_remembered(self, data, tokens, salt, limit):
        path = None
        if self.paths and data.draw(st.integers(0, 3)) == 0:
            path = self.path(data)
            chain, tokens = path.chain, path.tokens
        else:
            chain = chain_of(tokens, salt)
        num_tokens = data.draw(st.integers(max(1, len(tokens) - 5), len(tokens)))
        if len(self.remembered) < 8:
            one = Remembered(chain, num_tokens, path, limit)
            one.known.append(self.matched(one))
            self.remembered.append(one)

    @precondition(lambda self: self.remembered)
    @rule(data=st.data())
    def a_match_ages(self, data):
        """The newest result becomes one of those that later matches continue from."""
        one = data.draw(st.sampled_from(self.remembered))
        known = one.known[-1] if one.known else None
        one.known = [*one.known[-2:], self.matched(one, known)]

    @precondition(lambda self: self.remembered)
    @rule(data=st.data())
    def more_tokens_count(self, data):
        one = data.draw(st.sampled_from(self.remembered))
        longest = len(one.chain.hashes) * SIZE + 1
        one.num_tokens = data.draw(st.integers(one.num_tokens, longest))

    def matched(self, one, known=None):
        return self.cache.match(one.chain, one.num_tokens, one.path, one.limit, known)

    @invariant()
    def every_known_match_becomes_the_fresh_one(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity(self.paths)
        self.remembered = [one for one in self.remembered if one.path is None or one.path in self.paths]
        for one in self.remembered:
            fresh = self.matched(one)
            if one.path is None or one.path.caches:
                held = one.path.blocks[: one.path.num_registered] if one.path is not None else ()
                # A path may have registered more than a shorter match asks for.
                if len(held) <= one.num_tokens // SIZE:
                    oracle = looked_up(self.cache, one.chain, one.num_tokens, held, one.limit)
                    assert facts_of(fresh) == oracle
            for known in one.known:
                again = copied(known)
                result = self.matched(one, again)
                assert result == fresh
                assert (result is again) == (again == fresh)
                assert self.matched(one, result) is result


TestRememberedMatches = RememberedMatches.TestCase
TestRememberedMatches.settings = settings(max_examples=2 * settings.default.max_examples)
