"""KV blocks: references, prefixes, leaf-first eviction, deregistration."""

import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mambaslots.errors import KVBlockCapacityError
from mambaslots.inference.contexts.cache.kv_block_allocator import KVBlockAllocator, logger

A, B, C, D = b"aaaa", b"bbbb", b"cccc", b"dddd"


def written(kv, parent, *contents, key=1):
    """A held, registered chain; keys count up from `key`."""
    blocks = kv.allocate_memory_blocks(len(contents))
    keys = list(range(key, key + len(contents)))
    assert kv.register_chain(parent, blocks, keys, contents) == blocks
    return blocks


def cached(kv, parent, *contents, key=1):
    blocks = written(kv, parent, *contents, key=key)
    kv.release_memory_blocks(blocks)
    return blocks


def hashes_of(kv, blocks=None):
    return [kv.tree.hash_of(block) for block in (range(kv.total_count) if blocks is None else blocks)]


def references_of(kv, blocks):
    return [kv.tree.references[block] for block in blocks]


def picture(kv):
    """Everything a caller can see, to show that a failed call changed nothing."""
    return (
        list(kv.tree.references),
        hashes_of(kv),
        list(kv.tree.leaves.timestamps),
        dict(kv.tree.block_of_hash),
        kv.total_avail,
        kv.num_cached,
        [kv.tree.num_children[block] for block in range(kv.total_count)],
        len(kv.tree.ghosts),
    )


def lines_run(call):
    """How many lines of Python `call` executes: its cost, without a clock."""
    count = 0

    def tracer(frame, event, argument):
        nonlocal count
        count += 1
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


# ---- allocation and references


def test_a_new_pool_is_all_free():
    kv = KVBlockAllocator(5)
    assert (kv.total_avail, kv.num_cached, kv.num_held) == (5, 0, 0)
    assert hashes_of(kv) == [0] * 5


def test_allocated_blocks_are_distinct_and_held_once():
    kv = KVBlockAllocator(5)
    blocks = kv.allocate_memory_blocks(3)
    assert len(set(blocks)) == 3
    assert references_of(kv, blocks) == [1, 1, 1]
    assert (kv.total_avail, kv.num_held) == (2, 3)


def test_no_blocks_can_be_asked_for():
    kv = KVBlockAllocator(2)
    assert kv.allocate_memory_blocks(0) == []
    assert kv.total_avail == 2


def test_a_block_without_a_hash_is_free_after_its_last_release():
    kv = KVBlockAllocator(3)
    blocks = kv.allocate_memory_blocks(2)
    kv.add_references(blocks)
    kv.release_memory_blocks(blocks)
    assert kv.total_avail == 1
    kv.release_memory_blocks(blocks)
    assert kv.total_avail == 3


def test_a_block_loses_one_reference_a_call():
    kv = KVBlockAllocator(2)
    (block,) = kv.allocate_memory_blocks(1)
    kv.add_references([block])
    with pytest.raises(ValueError, match="distinct"):
        kv.release_memory_blocks([block, block])
    assert kv.tree.references[block] == 2
    kv.release_memory_blocks([block])
    assert kv.tree.references[block] == 1
    kv.release_memory_blocks([block])
    assert kv.total_avail == 2


def test_a_registered_block_stays_cached_after_its_last_release():
    kv = KVBlockAllocator(3)
    blocks = cached(kv, b"", A, B)
    assert (kv.total_avail, kv.num_cached, kv.num_held) == (1, 2, 0)
    assert kv.tree.match(b"", [1, 2], [A, B]) == blocks


def test_a_cached_block_can_be_held_again():
    kv = KVBlockAllocator(3)
    blocks = cached(kv, b"", A, B)
    kv.add_references(blocks)
    assert (kv.num_cached, kv.num_held) == (0, 2)
    with pytest.raises(KVBlockCapacityError):
        kv.allocate_memory_blocks(2)


def test_blocks_may_come_as_an_array():
    kv = KVBlockAllocator(3)
    blocks = np.array(kv.allocate_memory_blocks(2), np.int32)
    kv.add_references(blocks)
    kv.release_memory_blocks(blocks)
    assert references_of(kv, blocks) == [1, 1]


def test_available_memory_counts_free_and_cached_blocks_less_those_about_to_be_held():
    kv = KVBlockAllocator(4)
    cached(kv, b"", A, B)
    assert kv.is_memory_available(4)
    assert not kv.is_memory_available(5)
    assert kv.is_memory_available(2, potential_matched_count=2)
    assert not kv.is_memory_available(3, potential_matched_count=2)


# ---- prefixes


def test_the_longest_known_prefix_matches():
    kv = KVBlockAllocator(4)
    blocks = written(kv, b"", A, B)
    assert kv.tree.match(b"", [1, 2, 9], [A, B, C]) == blocks
    assert kv.tree.match(b"", [1, 9], [A, C]) == blocks[:1]
    assert kv.tree.match(b"", [9], [C]) == []


def test_matching_holds_and_refreshes_nothing():
    kv = KVBlockAllocator(4)
    cached(kv, b"", A)
    before = picture(kv)
    kv.tree.match(b"", [1], [A])
    assert picture(kv) == before


def test_other_salts_share_nothing_even_under_one_hash():
    kv = KVBlockAllocator(4)
    written(kv, b"mine", A)
    assert kv.tree.match(b"yours", [1], [A]) == []


def test_equal_hashes_of_other_tokens_do_not_match():
    kv = KVBlockAllocator(4)
    written(kv, b"", A)
    assert kv.tree.match(b"", [1], [B]) == []


def test_equal_hashes_and_tokens_below_another_parent_do_not_match():
    kv = KVBlockAllocator(4)
    first = written(kv, b"", A, C)
    other = written(kv, b"", B, key=7)
    assert kv.tree.match(b"", [7, 2], [B, C]) == other
    assert kv.tree.match(b"", [1, 2], [A, C]) == first


def test_the_first_to_register_a_prefix_wins():
    kv = KVBlockAllocator(4)
    first = written(kv, b"", A, B)
    second = kv.allocate_memory_blocks(2)
    assert kv.register_chain(b"", second, [1, 2], [A, B]) == first
    assert hashes_of(kv, second) == [0, 0]
    kv.release_memory_blocks(second)
    assert kv.total_avail == 2


def test_a_chain_continues_below_its_twins():
    kv = KVBlockAllocator(6)
    first = cached(kv, b"", A, B)
    second = kv.allocate_memory_blocks(3)
    chain = kv.register_chain(b"", second, [1, 2, 3], [A, B, C])
    assert chain == [*first, second[2]]
    kv.add_references(first)
    kv.release_memory_blocks(second[:2])
    kv.check_integrity()
    assert kv.tree.match(b"", [1, 2, 3], [A, B, C]) == chain
    assert kv.tree.num_children[first[1]] == 1


def test_a_block_below_a_twin_that_was_not_taken_up_can_be_released():
    kv = KVBlockAllocator(4)
    (twin,) = cached(kv, b"", A)
    mine, below = kv.allocate_memory_blocks(2)
    assert kv.register_chain(b"", [mine, below], [1, 2], [A, B]) == [twin, below]
    kv.release_memory_blocks([mine, below])
    assert (kv.num_cached, kv.total_avail) == (2, 2)
    kv.check_integrity()


def test_what_a_held_block_continues_is_no_leaf_before_it_is_taken_up():
    kv = KVBlockAllocator(4)
    twin, leaf = cached(kv, b"", A, B)
    mine, below = kv.allocate_memory_blocks(2)
    assert kv.register_chain(b"", [mine, below], [1, 3], [A, C]) == [twin, below]
    assert kv.evict_lru_blocks(1) == [leaf]
    assert not kv.tree.leaves.blocks
    kv.add_references([twin])
    kv.release_memory_blocks([mine])
    kv.release_memory_blocks([twin, below])
    kv.check_integrity()
    assert list(kv.tree.leaves.blocks) == [below]


def test_registration_ends_before_a_colliding_hash():
    kv = KVBlockAllocator(6)
    written(kv, b"", A)
    blocks = kv.allocate_memory_blocks(3)
    assert kv.register_chain(b"", blocks, [5, 1, 6], [B, C, D]) == blocks[:1]
    assert hashes_of(kv, blocks) == [5, 0, 0]
    kv.check_integrity()
    assert kv.tree.match(b"", [5, 1, 6], [B, C, D]) == blocks[:1]


def test_registration_ends_before_an_equal_block_of_another_parent():
    kv = KVBlockAllocator(6)
    written(kv, b"", A, C)
    (other,) = written(kv, b"", B, key=7)
    (block,) = kv.allocate_memory_blocks(1)
    assert kv.register_chain(other, [block], [2], [C]) == []
    kv.check_integrity()


def test_a_fork_is_a_block_with_two_children():
    kv = KVBlockAllocator(6)
    (root,) = written(kv, b"", A)
    written(kv, root, B, key=2)
    assert kv.tree.num_children[root] == 1
    (second,) = written(kv, root, C, key=3)
    assert kv.tree.num_children[root] == 2
    kv.release_memory_blocks([second])
    kv.evict_lru_blocks(1)
    assert kv.tree.num_children[root] == 1


def test_without_prefix_caching_nothing_is_registered():
    kv = KVBlockAllocator(3, enable_prefix_caching=False)
    blocks = kv.allocate_memory_blocks(1)
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        kv.register_chain(b"", blocks, [1], [A])
    kv.release_memory_blocks(blocks)
    assert kv.total_avail == 3


# ---- eviction


def test_allocation_evicts_only_what_is_missing():
    kv = KVBlockAllocator(4)
    blocks = cached(kv, b"", A, B, C)
    new = kv.allocate_memory_blocks(2)
    assert kv.tree.match(b"", [1, 2, 3], [A, B, C]) == blocks[:2]
    assert blocks[2] in new


def test_leaves_go_before_their_parents():
    kv = KVBlockAllocator(4)
    blocks = cached(kv, b"", A, B, C)
    assert kv.evict_lru_blocks(2) == [blocks[2], blocks[1]]


def test_among_leaves_the_least_recently_used_goes_first():
    kv = KVBlockAllocator(4)
    (first,) = cached(kv, b"", A, key=1)
    (second,) = cached(kv, b"", B, key=2)
    kv.add_references([first])
    kv.release_memory_blocks([first])
    assert kv.evict_lru_blocks(1) == [second]


def test_leaves_without_a_state_go_before_older_ones_with_a_state():
    kv = KVBlockAllocator(4)
    (old,) = cached(kv, b"", A, key=1)
    (young,) = cached(kv, b"", B, key=2)
    kv.tree.leaves.connect({old}.__contains__)
    kv.tree.leaves.reorder([old])
    assert kv.evict_lru_blocks(2) == [young, old]


def test_a_leaf_that_lost_its_state_goes_like_any_other_once_noted():
    kv = KVBlockAllocator(4)
    states = set()
    kv.tree.leaves.connect(states.__contains__)
    held = written(kv, b"", A, key=1) + written(kv, b"", B, key=2)
    states.update(held)
    for block in held:
        kv.release_memory_blocks([block])
    states.discard(held[1])
    kv.tree.leaves.reorder([held[1]])
    assert kv.evict_lru_blocks(1) == [held[1]]


def test_a_leaf_that_gained_a_state_stays_longer():
    kv = KVBlockAllocator(4)
    states = set()
    kv.tree.leaves.connect(states.__contains__)
    (old,) = cached(kv, b"", A, key=1)
    (young,) = cached(kv, b"", B, key=2)
    states.add(old)
    kv.tree.leaves.reorder([old])
    assert kv.evict_lru_blocks(1) == [young]


def test_evicting_none_evicts_none():
    kv = KVBlockAllocator(4)
    cached(kv, b"", A)
    assert kv.evict_lru_blocks(0) == kv.evict_lru_blocks(-3) == []
    assert kv.num_cached == 1


def test_evicted_prefixes_leave_a_ghost():
    kv = KVBlockAllocator(4)
    cached(kv, b"", A)
    kv.evict_lru_blocks(1)
    assert kv.tree.ghosts.has(1, "block")
    assert not kv.tree.ghosts.has(1, "state")


def test_too_much_to_evict_evicts_nothing():
    kv = KVBlockAllocator(4)
    written(kv, b"", A)
    cached(kv, b"", B, key=2)
    before = picture(kv)
    with pytest.raises(KVBlockCapacityError, match="2 KV blocks required, 1 available") as error:
        kv.evict_lru_blocks(2)
    assert (error.value.required, error.value.available) == (2, 1)
    assert picture(kv) == before


def test_too_much_to_allocate_evicts_nothing():
    kv = KVBlockAllocator(4)
    written(kv, b"", A)
    cached(kv, b"", B, key=2)
    before = picture(kv)
    with pytest.raises(KVBlockCapacityError) as error:
        kv.allocate_memory_blocks(4)
    assert (error.value.required, error.value.available) == (4, 3)
    assert picture(kv) == before


# ---- deregistration observers


def test_every_observer_is_notified_of_blocks_and_hashes_that_left():
    kv = KVBlockAllocator(4)
    calls = []
    kv.observe_deregistration(lambda *news: calls.append(("zeroth", *news)))
    kv.observe_deregistration(lambda *news: calls.append(("first", *news)))
    kv.observe_deregistration(lambda *news: calls.append(("second", *news)))
    blocks = cached(kv, b"", A, B)
    kv.evict_lru_blocks(2)
    assert [name for name, _, _ in calls] == ["zeroth", "first", "second"]
    assert all((sorted(ids), hashes) == (sorted(blocks), {1, 2}) for _, ids, hashes in calls)


def test_observers_are_not_notified_of_blocks_without_a_hash():
    kv = KVBlockAllocator(4)
    calls = []
    kv.observe_deregistration(lambda *news: calls.append(news))
    kv.release_memory_blocks(kv.allocate_memory_blocks(2))
    assert calls == []


def test_an_observer_that_raises_loses_nothing(caplog):
    def fail(blocks, hashes):
        raise RuntimeError("observer")

    kv = KVBlockAllocator(3)
    calls = []
    kv.observe_deregistration(lambda *news: calls.append("first"))
    kv.observe_deregistration(fail)
    kv.observe_deregistration(lambda *news: calls.append("second"))
    blocks = cached(kv, b"", A, B, C)
    assert sorted(kv.allocate_memory_blocks(3)) == sorted(blocks)
    assert len(calls) == 2
    assert "observer" in caplog.text
    kv.check_integrity()


def test_what_one_observer_does_to_its_arguments_reaches_no_other():
    kv = KVBlockAllocator(3)
    calls = []
    kv.observe_deregistration(lambda blocks, hashes: (blocks.clear(), hashes.clear()))
    kv.observe_deregistration(lambda *news: calls.append(news))
    (block,) = cached(kv, b"", A)
    assert kv.evict_lru_blocks(1) == [block]
    assert calls == [([block], {1})]


def test_blocks_are_free_and_unknown_when_observers_are_notified():
    kv = KVBlockAllocator(3)
    seen = []

    def look(blocks, hashes):
        seen.append((kv.total_avail, hashes_of(kv, blocks), kv.tree.match(b"", [1], [A])))
        kv.check_integrity()

    kv.observe_deregistration(look)
    cached(kv, b"", A)
    kv.evict_lru_blocks(1)
    assert seen == [(3, [0], [])]


# ---- reset


def test_without_a_prefix_held_blocks_stay_held():
    kv = KVBlockAllocator(4)
    (held,), (free,) = written(kv, b"", A), cached(kv, b"", B, key=2)
    assert hashes_of(kv, [held, free]) == [1, 2]
    kv.deregister_all()
    assert hashes_of(kv) == [0] * 4
    assert (kv.total_avail, kv.num_cached, kv.references) == (3, 0, {held: 1})
    kv.check_integrity()


def test_reset_forgets_all_without_a_notification():
    kv = KVBlockAllocator(4)
    calls = []
    kv.observe_deregistration(lambda *news: calls.append(news))
    written(kv, b"", A)
    cached(kv, b"", B, key=2)
    kv.evict_lru_blocks(1)
    calls.clear()
    kv.reset()
    assert (kv.total_avail, kv.num_cached, kv.num_held, len(kv.tree.ghosts)) == (4, 0, 0, 0)
    assert kv.tree.match(b"", [1], [A]) == []
    assert calls == []
    kv.check_integrity()


# ---- bad arguments


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"total_count": 0}, "total_count"),
        ({"total_count": 2.0}, "total_count"),
        ({"total_count": True}, "total_count"),
        ({"total_count": 2, "enable_prefix_caching": 1}, "enable_prefix_caching"),
    ],
)
def test_a_bad_setting_is_refused_by_name(arguments, named):
    with pytest.raises(ValueError, match=rf"{named} is .*accepted"):
        KVBlockAllocator(**arguments)


def pool_for_bad_calls():
    """Blocks 0, 1: held chain A B; 2: its cached end C; 3: held, unregistered; 4: cached root; 5: free."""
    kv = KVBlockAllocator(6)
    kv.release_memory_blocks(written(kv, b"", A, B, C)[2:])
    kv.allocate_memory_blocks(1)
    cached(kv, b"", D, key=9)
    assert (kv.total_avail, kv.num_cached) == (1, 2)
    return kv


@pytest.mark.parametrize(
    "call",
    [
        ("allocate_memory_blocks", -1),
        ("allocate_memory_blocks", 1.0),
        ("allocate_memory_blocks", True),
        ("evict_lru_blocks", 1.5),
        ("evict_lru_blocks", "1"),
        ("add_references", [5]),
        ("add_references", [0, 6]),
        ("add_references", [0, -1]),
        ("add_references", 0),
        ("add_references", [0, 0.0]),
        ("release_memory_blocks", [2]),
        ("release_memory_blocks", [5]),
        ("release_memory_blocks", [3, 3]),
        ("release_memory_blocks", [0]),
        ("release_memory_blocks", [1, 0, 0]),
        ("release_memory_blocks", [3, 6]),
        ("register_chain", b"", [5], [7], [A]),
        ("register_chain", b"", [2], [7], [A]),
        ("register_chain", b"", [0], [7], [A]),
        ("register_chain", 4, [3], [7], [A]),
        ("register_chain", 5, [3], [7], [A]),
        ("register_chain", 3, [3], [7], [A]),
        ("register_chain", -1, [3], [7], [A]),
        ("register_chain", b"", [3], [0], [A]),
        ("register_chain", b"", [3], [-1], [A]),
        ("register_chain", b"", [3], [2**63], [A]),
        ("register_chain", b"", [3, 3], [7, 8], [A, B]),
        ("register_chain", b"", [3], [7, 8], [A]),
        ("register_chain", b"", [3], [7], []),
        ("register_chain", None, [3], [7], [A]),
    ],
    ids=str,
)
def test_a_bad_call_is_a_value_error_and_changes_nothing(call):
    method, *arguments = call
    kv = pool_for_bad_calls()
    before = picture(kv)
    with pytest.raises(ValueError, match="accepted"):
        getattr(kv, method)(*arguments)
    assert picture(kv) == before
    kv.check_integrity()


def test_a_cached_child_is_held_only_after_its_parent():
    kv = KVBlockAllocator(3)
    parent, child = cached(kv, b"", A, B)
    before = picture(kv)
    for order in ([child], [child, parent]):
        with pytest.raises(ValueError, match="accepted"):
            kv.add_references(order)
    assert picture(kv) == before
    kv.add_references([parent, child])
    kv.check_integrity()


@pytest.mark.parametrize("kind", [np.array, tuple])
def test_hashes_of_any_integer_sequence_are_found_again(kind):
    kv = KVBlockAllocator(3)
    blocks = kv.allocate_memory_blocks(2)
    assert kv.register_chain(b"", blocks, kind([5, 6]), [A, B]) == blocks
    assert kv.tree.match(b"", [5, 6], [A, B]) == blocks
    kv.check_integrity()


def test_a_parent_of_any_integer_type_counts_its_child():
    kv = KVBlockAllocator(3)
    (root,) = written(kv, b"", A)
    block = kv.allocate_memory_blocks(1)
    kv.register_chain(np.int64(root), block, [2], [B])
    kv.check_integrity()
    assert kv.tree.num_children[root] == 1


# ---- costs


def lone_blocks(size):
    """A pool of `size` cached blocks without children, and how often their states were asked for."""
    kv = KVBlockAllocator(size)
    asked = Counter()

    def holds_state(block):
        asked[block] += 1
        return block % 2 == 0

    kv.tree.leaves.connect(holds_state)
    blocks = kv.allocate_memory_blocks(size)
    for block in blocks:
        kv.register_chain(b"%d" % block, [block], [block + 1], [A])
    kv.release_memory_blocks(blocks)
    asked.clear()
    return kv, asked


def test_eviction_looks_at_the_blocks_it_evicts_not_at_the_pool():
    kv, asked = lone_blocks(100_000)
    kv.evict_lru_blocks(8)
    assert sum(asked.values()) <= 16


def test_calls_cost_the_same_in_a_large_pool_as_in_a_small_one():
    def costs(size):
        kv, _ = lone_blocks(size)
        got = []
        return [
            lines_run(lambda: got.extend(kv.allocate_memory_blocks(8))),
            lines_run(lambda: kv.register_chain(b"new", got, list(range(10**6, 10**6 + 8)), [A] * 8)),
            lines_run(lambda: kv.add_references(got)),
            lines_run(lambda: kv.release_memory_blocks(got)),
            lines_run(lambda: kv.release_memory_blocks(got)),
            lines_run(lambda: kv.evict_lru_blocks(4)),
            lines_run(lambda: kv.is_memory_available(4)),
            lines_run(lambda: kv.tree.match(b"new", [10**6], [A])),
        ]

    assert costs(5_000) == costs(100)


def test_noting_state_changes_costs_the_same_in_a_large_pool_as_in_a_small_one():
    def cost(size):
        kv = KVBlockAllocator(size)
        states = set(range(size))
        kv.tree.leaves.connect(states.__contains__)
        blocks = kv.allocate_memory_blocks(size)
        for block in blocks:
            kv.register_chain(b"%d" % block, [block], [block + 1], [A])
        kv.release_memory_blocks(blocks)

        def each_loses_and_gains_its_state():
            for change in (states.discard, states.add, states.discard):
                for block in blocks:
                    change(block)
                    kv.tree.leaves.reorder([block])

        return lines_run(each_loses_and_gains_its_state) / size

    assert cost(4_000) < 3 * cost(200)


# ---- any order of calls, against a model

SALTS = (b"", b"salt")


class KVBlockMachine(RuleBasedStateMachine):
    """Requests come, grow, share, and go as a context drives them; dicts and scans say what must happen.

    A prefix is (salt, contents...). The model knows of a block its reference count, the prefix it is
    registered under, and when its last reference went.
    """

    keys = 1 << 40  # so many hashes: no collisions

    @initialize(size=st.integers(1, 12))
    def start(self, size):
        self.kv = KVBlockAllocator(size)
        self.kv.tree.leaves.connect(lambda block: block in self.states)
        logger.disabled = True  # one observer fails, on purpose
        self.news = []
        self.kv.observe_deregistration(lambda *news: self.news.append(news))
        self.kv.observe_deregistration(self.fail)
        self.kv.observe_deregistration(lambda *news: self.news.append(news))
        self.forget()

    def teardown(self):
        logger.disabled = False

    @staticmethod
    def fail(blocks, hashes):
        raise RuntimeError("an observer")

    def forget(self):
        self.refs = Counter()
        self.prefix_of = {}
        self.block_of = {}
        self.by_key = {}
        self.last_use = Counter()
        self.time = 0
        self.states = set()
        self.requests = []  # [salt, contents, blocks, number registered]

    # ---- the model

    def key_of(self, prefix):
        number = int.from_bytes(b"|".join(prefix), "big")
        return 1 + number % self.keys

    def chain_of(self, request):
        salt, contents, _, _ = request
        prefixes = [(salt, *contents[: i + 1]) for i in range(len(contents))]
        return prefixes, [self.key_of(prefix) for prefix in prefixes]

    def free(self):
        blocks = range(self.kv.total_count)
        return [block for block in blocks if not self.refs[block] and block not in self.prefix_of]

    def cached(self):
        return [block for block in self.prefix_of if not self.refs[block]]

    def children(self, block):
        return [other for other in self.prefix_of.values() if other[:-1] == self.prefix_of[block]]

    def drop(self, block):
        prefix = self.prefix_of.pop(block)
        del self.block_of[prefix]
        del self.by_key[self.key_of(prefix)]
        self.states.discard(block)

    def expect_evicted(self, blocks):
        """Each of these, in order, was the best choice there was."""
        keys = set()
        for block in blocks:
            worth = {
                leaf: (leaf in self.states, self.last_use[leaf])
                for leaf in self.cached()
                if not self.children(leaf)
            }
            assert worth[block] == min(worth.values())
            keys.add(self.key_of(self.prefix_of[block]))
            self.drop(block)
        self.expect_news(blocks, keys)

    def expect_news(self, blocks, keys):
        expected = [(sorted(blocks), keys)] * 2 if blocks else []
        assert [(sorted(ids), hashes) for ids, hashes in self.news] == expected
        self.news.clear()

    def release(self, blocks):
        self.time += 1
        self.kv.release_memory_blocks(blocks)
        self.refs.subtract(blocks)
        dropped = {block for block in blocks if not self.refs[block] and block in self.prefix_of}
        for block in dropped:
            self.last_use[block] = self.time

    def allocate(self, count):
        """The blocks, or None when there are too few."""
        free, before = self.free(), list(self.cached())
        if len(free) + len(before) < count:
            snapshot = picture(self.kv)
            with pytest.raises(KVBlockCapacityError) as error:
                self.kv.allocate_memory_blocks(count)
            assert (error.value.required, error.value.available) == (count, len(free) + len(before))
            assert picture(self.kv) == snapshot
            return None
        blocks = self.kv.allocate_memory_blocks(count)
        assert len(set(blocks)) == len(blocks) == count
        evicted = self.news[0][0] if self.news else []
        assert len(evicted) == max(0, count - len(free))
        self.expect_evicted(evicted)
        assert set(blocks) <= {*free, *evicted}
        self.refs.update(blocks)
        return blocks

    # ---- what callers do

    @rule(
        salt=st.sampled_from(SALTS),
        contents=st.lists(st.sampled_from([b"a", b"b"]), min_size=1, max_size=5),
    )
    def a_request_comes(self, salt, contents):
        request = [salt, contents, [], 0]
        prefixes, keys = self.chain_of(request)
        known = next((i for i, p in enumerate(prefixes) if p not in self.block_of), len(prefixes))
        matched = self.kv.tree.match(salt, keys, contents)
        assert matched == [self.block_of[prefix] for prefix in prefixes[:known]]
        missing = len(contents) - known
        held_soon = sum(1 for block in matched if not self.refs[block])
        fits = self.kv.is_memory_available(missing, held_soon)
        self.kv.add_references(matched)
        self.refs.update(matched)
        new = self.allocate(missing)
        assert fits == (new is not None)
        if new is None:
            self.release(matched)
        else:
            self.requests.append([salt, contents, matched + new, known])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def a_request_registers_what_it_computed(self, data):
        request = data.draw(st.sampled_from(self.requests))
        self.register(request, data.draw(st.integers(request[3], len(request[1]))))

    def register(self, request, stop):
        salt, contents, blocks, first = request
        prefixes, keys = self.chain_of(request)
        parent = blocks[first - 1] if first else salt
        own = blocks[first:stop]
        canonical = self.kv.register_chain(parent, own, keys[first:stop], contents[first:stop])
        expected = []
        for block, prefix, key in zip(own, prefixes[first:], keys[first:], strict=False):
            holder = self.by_key.get(key)
            if holder is None:
                self.prefix_of[block] = prefix
                self.block_of[prefix] = self.by_key[key] = block
            elif self.prefix_of[holder] != prefix:
                break
            expected.append(self.block_of[prefix])
        assert canonical == expected
        for i, (mine, theirs) in enumerate(zip(own, canonical, strict=False), start=first):
            if mine != theirs:
                self.kv.add_references([theirs])
                self.refs[theirs] += 1
                self.release([mine])
                blocks[i] = theirs
        request[3] = first + len(canonical)

    @rule(
        salt=st.sampled_from(SALTS),
        contents=st.lists(st.sampled_from([b"a", b"b"]), min_size=1, max_size=3),
    )
    def a_request_is_served_at_once(self, salt, contents):
        running = len(self.requests)
        self.a_request_comes(salt, contents)
        if len(self.requests) > running:
            request = self.requests.pop()
            self.register(request, len(contents))
            self.release(request[2])

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), content=st.sampled_from([b"a", b"b"]))
    def a_request_grows(self, data, content):
        request = data.draw(st.sampled_from(self.requests))
        new = self.allocate(1)
        if new is not None:
            request[1] = [*request[1], content]
            request[2] = request[2] + new

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def a_request_is_held_once_more(self, data):
        salt, contents, blocks, registered = data.draw(st.sampled_from(self.requests))
        keep = data.draw(st.integers(0, registered))
        self.kv.add_references(blocks[:keep])
        self.refs.update(blocks[:keep])
        self.requests.append([salt, contents[:keep], blocks[:keep], keep])

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 3))
    def requests_leave_together(self, data, count):
        paths = [
            self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))[2]
            for _ in range(min(count, len(self.requests)))
        ]
        leaving = [block for path in paths for block in path]
        if len(set(leaving)) == len(leaving):
            self.release(leaving)
            return
        snapshot = picture(self.kv)
        with pytest.raises(ValueError, match="distinct blocks"):
            self.kv.release_memory_blocks(leaving)
        assert picture(self.kv) == snapshot
        for path in paths:
            self.release(path)

    @rule(count=st.integers(-1, 5))
    def blocks_are_evicted(self, count):
        if count > len(self.cached()):
            snapshot = picture(self.kv)
            with pytest.raises(KVBlockCapacityError):
                self.kv.evict_lru_blocks(count)
            assert picture(self.kv) == snapshot
            return
        victims = self.kv.evict_lru_blocks(count)
        assert len(victims) == max(0, count)
        self.expect_evicted(victims)

    @precondition(lambda self: self.prefix_of)
    @rule(data=st.data())
    def states_come_and_go(self, data):
        for block in data.draw(st.lists(st.sampled_from(sorted(self.prefix_of)), max_size=4)):
            self.states ^= {block}
            self.kv.tree.leaves.reorder([block])

    @rule(data=st.data())
    def a_bad_call_changes_nothing(self, data):
        free, cached, held = self.free(), self.cached(), [b for b in self.refs if self.refs[b] > 0]
        kv = self.kv
        calls = [(kv.allocate_memory_blocks, -1)]
        if free:
            block = data.draw(st.sampled_from(free))
            calls += [
                (kv.add_references, [*held, block]),
                (kv.release_memory_blocks, [block]),
                (kv.register_chain, b"", [block], [1 << 50], [b"x"]),
            ]
        if cached:
            block = data.draw(st.sampled_from(cached))
            calls += [
                (kv.release_memory_blocks, [block]),
                (kv.register_chain, block, [], [], []),
                (kv.register_chain, b"", [block], [1 << 50], [b"x"]),
            ]
            if len(self.prefix_of[block]) > 2 and not self.refs[self.block_of[self.prefix_of[block][:-1]]]:
                calls.append((kv.add_references, [block]))
        if held:
            block = data.draw(st.sampled_from(held))
            calls.append((kv.release_memory_blocks, [block, block]))
            children = [] if block not in self.prefix_of else self.children(block)
            if any(self.refs[self.block_of[child]] for child in children):
                calls.append((kv.release_memory_blocks, [block] * self.refs[block]))
        call, *arguments = data.draw(st.sampled_from(calls))
        snapshot = picture(kv)
        with pytest.raises(ValueError, match="accepted"):
            call(*arguments)
        assert picture(kv) == snapshot

    @rule()
    def all_is_reset(self):
        self.kv.reset()
        self.forget()

    @invariant()
    def the_allocator_agrees_with_the_model(self):
        if not hasattr(self, "kv"):
            return
        kv = self.kv
        kv.check_integrity()
        assert references_of(kv, range(kv.total_count)) == [
            self.refs[block] for block in range(kv.total_count)
        ]
        assert kv.total_avail == len(self.free())
        assert kv.num_cached == len(self.cached())
        assert kv.num_held == len(+self.refs)
        assert kv.tree.block_of_hash == self.by_key
        assert self.news == []
        for block in self.prefix_of:
            assert kv.tree.num_children[block] == len(self.children(block))


class CollidingKVBlockMachine(KVBlockMachine):
    """The same with three hashes for everything: nearly every prefix collides with another."""

    keys = 3


TestKVBlocksInAnyOrder = KVBlockMachine.TestCase
TestKVBlocksWithCollidingHashes = CollidingKVBlockMachine.TestCase
