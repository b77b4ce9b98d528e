"""The prefix cache: paths, registered blocks, states, pins, and what becomes of all of them."""

import itertools
import sys
from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mambaslots.errors import KVBlockCapacityError, MambaSlotCapacityError
from mambaslots.inference.contexts.cache.cached_states import CachedStates
from mambaslots.inference.contexts.cache.checkpoint_plan import Boundary, CheckpointPlan
from mambaslots.inference.contexts.cache.eviction import LRUEviction
from mambaslots.inference.contexts.cache.hashing import PrefixHashChain
from mambaslots.inference.contexts.cache.memory import MemoryDivision, UnitShape
from mambaslots.inference.contexts.cache.paths import PathStep
from mambaslots.inference.contexts.cache.pool_stats import AGE_BOUNDS_S
from mambaslots.inference.contexts.cache.prefix_cache import PrefixCache
from mambaslots.inference.contexts.cache.unit_borrower import UnitBorrower
from oracle.kv_index import eviction_order

SIZE = 2  # tokens of a block
MAX_BLOCKS = 32
PLAN = CheckpointPlan()


def chain_of(tokens, salt=b""):
    chain = PrefixHashChain(SIZE, salt)
    chain.extend_to(tokens)
    return chain


def num_blocks_of(tokens):
    return -(-len(tokens) // SIZE)


def table_row():
    return np.full(MAX_BLOCKS, -1, np.int32)


def opened(cache, tokens, salt=b""):
    """A path with blocks for all tokens, those of the match shared."""
    chain = chain_of(tokens, salt)
    match = cache.match(chain, len(tokens))
    path = cache.open(chain, PLAN, table_row())
    cache.hold(path, match)
    cache.grow(path, num_blocks_of(tokens))
    return path


def step_of(path, tokens, stop, positions):
    """A prefill up to `stop` that stores the states at these positions."""
    boundaries = tuple(Boundary(position, "mark") for position in positions)
    return PathStep(path, tokens, path.num_registered * SIZE, stop, boundaries=boundaries)


def computed(cache, tokens, positions=(), salt=b""):
    """A path of a sequence that was computed to its end, with the states at these positions."""
    path = opened(cache, tokens, salt)
    (step,) = cache.reserve([step_of(path, tokens, len(tokens), positions)])
    cache.register(path, tokens, len(tokens))
    cache.commit(step)
    return path


def picture(cache, paths=()):
    """Everything a caller can see, to show that a failed call changed nothing."""
    return (
        cache.stats(),
        cache.kv_blocks.tree.version,
        cache.kv_blocks.references,
        dict(cache.kv_blocks.tree.block_of_hash),
        dict(cache.slots.cached_states.slot_of_block),
        dict(cache.slots.pins),
        eviction_order(cache.slots),
        [(list(path.blocks), path.num_registered, path.state_slot) for path in paths],
    )


# ---- one thing at a time


def test_a_sequence_computed_before_is_resumed_before_its_last_token():
    cache = PrefixCache(8, 4, SIZE)
    path = computed(cache, [1, 2, 3, 4], positions=[2, 4])
    match = cache.match(chain_of([1, 2, 3, 4]), 4)
    assert match.blocks == tuple(path.blocks)
    assert (match.resume_tokens, match.resume_slot) == (2, cache.slots.cached_states.slot_of(path.blocks[0]))
    assert cache.match(chain_of([1, 2, 3, 4, 5]), 5).resume_tokens == 4
    assert cache.resumable_tokens(chain_of([1, 2, 3, 4])) == 4
    cache.check_integrity([path])


def test_without_resuming_kv_is_shared_and_every_token_is_computed():
    cache = PrefixCache(8, 4, SIZE)
    path = computed(cache, [1, 2, 3, 4], positions=[2])
    match = cache.match(chain_of([1, 2, 3, 4]), 4, max_resume_tokens=0)
    assert (match.blocks, match.resume_tokens, match.resume_slot) == (tuple(path.blocks), 0, -1)
    assert [(span.start, span.stop, span.reason) for span in match.spans] == [(0, 4, "disabled")]


def test_another_salt_shares_nothing():
    cache = PrefixCache(8, 4, SIZE)
    computed(cache, [1, 2, 3, 4], positions=[2])
    assert cache.match(chain_of([1, 2, 3, 4], b"salt"), 4).blocks == ()


def test_a_cache_that_is_off_lends_blocks_and_keeps_nothing():
    cache = PrefixCache(4, 4, SIZE, enabled=False)
    path = computed(cache, [1, 2, 3], positions=[])
    assert (len(path.blocks), path.num_registered, path.caches) == (2, 0, False)
    assert cache.match(chain_of([1, 2, 3]), 3).blocks == ()
    assert cache.stats().num_free_slots == 0
    with pytest.raises(ValueError, match="chain has 1 whole blocks; accepted: one of a prefix with a cached"):
        cache.pin(chain_of([1, 2]))
    cache.release(path)
    cache.check_integrity([])
    assert cache.stats().num_free_kv_blocks == 4


class StrictPolicy(LRUEviction):
    """Fails for a planned state that it was not told of."""

    def __init__(self):
        super().__init__()
        self.planned = set()

    def insert_planned(self, hashes, depth, kind, ticket):
        self.planned.add(hashes[depth - 1])

    def set_hashes(self, slots, hashes, hashes_to):
        super().set_hashes(slots, hashes, hashes_to)
        self.planned.difference_update(hashes)

    def remove_planned(self, prefix_hash):
        self.planned.clear() if prefix_hash is None else self.planned.remove(prefix_hash)


@pytest.mark.parametrize("policy", ["lru", "value", StrictPolicy], ids=str)
def test_a_state_that_a_token_still_on_the_device_may_repeat_evicts_none(policy):
    cache = PrefixCache(12, 3, SIZE, policy)
    paths = [computed(cache, tokens, [len(tokens)]) for tokens in ([1, 2, 3, 4], [9, 9])]
    former = cache.slots.cached_states.slot_of(paths[0].blocks[1])

    def decodes(known):
        """A decode whose token, which is not known yet, completes the second block; with its slot."""
        paths.append(path := opened(cache, known))
        return cache.reserve(
            [PathStep(path, known, 3, 4, decoding=True, boundaries=(Boundary(4, "decode"),))]
        )[0]

    def committed(step):
        cache.register(step.path, [*step.sequence, 4], 4)
        slots = cache.commit(step)
        cache.check_integrity(paths)
        return slots

    repeats = decodes([1, 2, 3])
    assert cache.stats().num_reserved_slots == 1  # a free one
    assert committed(repeats) == {4: former}
    assert cache.stats().num_free_slots == 1
    other = decodes([1, 2, 5])
    assert decodes([1, 2, 3]).destinations == {}  # no slot is free
    assert committed(other) == other.destinations != {}
    assert cache.stats().num_states_evicted == 0
    decodes([1, 2, 6])
    assert cache.stats().num_states_evicted == 1


def test_only_states_that_are_not_cached_borrow_memory_from_kv(monkeypatch):
    division = MemoryDivision(UnitShape(1, 2), 0, 7, 2)
    cache = PrefixCache(division.num_kv_blocks, division.num_durable_slots, SIZE, division=division)
    computed(cache, [1, 2, 3, 4], [4])
    borrowed = []
    monkeypatch.setattr(UnitBorrower, "borrow_slots", lambda self, num_slots: borrowed.append(num_slots))
    monkeypatch.setattr(cache.slots, "free_slots", [])
    for known, count in ([1, 2, 3], 0), ([1, 2, 5], 1):
        path, boundaries = opened(cache, known), (Boundary(4, "decode"),)
        cache.reserve([PathStep(path, known, 3, 4, decoding=True, boundaries=boundaries)])
        assert borrowed == [1] * count


def test_a_path_holds_no_more_blocks_than_its_table_row_has_entries():
    cache = PrefixCache(8, 4, SIZE)
    tokens = [1, 2, 3, 4, 5, 6]
    first = computed(cache, tokens, positions=[4])
    chain = chain_of(tokens)
    path = cache.open(chain, PLAN, np.full(2, -1, np.int32))
    before = picture(cache, [first, path])
    refusal = r"table_row has 2 entries; accepted: at least 3, one for each block that the path will hold"
    for call in (lambda: cache.grow(path, 3), lambda: cache.hold(path, cache.match(chain, 6))):
        with pytest.raises(ValueError, match=refusal):
            call()
        assert picture(cache, [first, path]) == before
    cache.grow(path, 2)
    cache.release(path)
    cache.check_integrity([first])


@pytest.mark.parametrize(("limit", "reachable"), [(None, 3), (6, 3), (5, 2), (0, 0)])
def test_the_policy_learns_of_every_sequence_that_is_opened(limit, reachable, monkeypatch):
    cache, arrivals = PrefixCache(8, 4, SIZE), []
    monkeypatch.setattr(cache.slots.policy, "add_request", lambda *arrival: arrivals.append(arrival) or 7)
    chain = chain_of([1, 2, 3, 4, 5, 6, 7])
    path = cache.open(chain, PLAN, table_row(), max_resume_tokens=limit)
    assert (path.policy_ticket, arrivals) == (7, [(chain.hashes, reachable, False)])


def test_a_state_leaves_with_its_block():
    cache = PrefixCache(4, 4, SIZE)
    cache.release(computed(cache, [1, 2, 3, 4], positions=[4]))
    cache.kv_blocks.evict_lru_blocks(1)
    assert cache.stats().num_committed_slots == 0
    assert cache.stats().num_free_slots == 4
    cache.check_integrity([])


def test_a_block_that_lost_its_state_goes_before_one_that_has_it():
    cache = PrefixCache(4, 4, SIZE, "lru")
    for tokens in ([1, 2], [3, 4]):
        cache.release(computed(cache, tokens, positions=[2]))
    cache.slots.cached_states.record_use(cache.match(chain_of([1, 2, 9]), 3).resume_slot)
    cache.slots.evict(1)  # of [3, 4], whose block was used last
    cache.kv_blocks.evict_lru_blocks(1)
    assert cache.match(chain_of([1, 2, 9]), 3).resume_tokens == 2
    assert cache.match(chain_of([3, 4, 9]), 3).blocks == ()


def test_after_a_reset_counts_start_at_zero_and_pins_are_gone():
    cache = PrefixCache(4, 4, SIZE)
    cache.release(computed(cache, [1, 2], positions=[2]))
    prefix = cache.pin(chain_of([1, 2]))
    cache.reset()
    stats = cache.stats()
    assert (stats.num_free_kv_blocks, stats.num_free_slots, stats.num_states_committed) == (4, 4, 0)
    with pytest.raises(ValueError, match="accepted: a prefix that is pinned here"):
        cache.pins.unpin(prefix)
    cache.check_integrity([])


def test_pins_are_listed_in_order_and_given_back_without_the_handle():
    cache = PrefixCache(16, 4, SIZE)
    for tokens in ([1, 2, 3, 4], [1, 2, 5, 6, 7, 8]):
        cache.release(computed(cache, tokens, positions=[len(tokens)]))
        cache.pin(chain_of(tokens))
    first, second = cache.pins.prefixes
    assert [pin.num_tokens for pin in cache.pins.prefixes] == [4, 6]
    assert (first.prefix_hash, second.prefix_hash) == (
        chain_of([1, 2, 3, 4]).hashes[-1],
        chain_of([1, 2, 5, 6, 7, 8]).hashes[-1],
    )
    assert (len(cache.pins.prefixes), cache.pins.num_blocks) == (2, 4)  # they share one
    shared = cache.match(chain_of([1, 2, 3, 4, 9]), 5).blocks
    assert set(shared) <= cache.pins.block_references.keys()
    assert (cache.pins.max_sequence_blocks(), cache.pins.max_sequence_blocks(shared)) == (12, 14)
    for pin in list(cache.pins.prefixes):
        cache.pins.unpin(pin)
        cache.check_integrity([])
    assert (len(cache.pins.prefixes), cache.pins.num_blocks) == (0, 0)


def test_what_is_discarded_is_not_found_again():
    cache = PrefixCache(16, 4, SIZE)
    path = computed(cache, [1, 2, 3, 4, 5, 6], positions=[4, 6])
    cache.discard(path)
    assert cache.match(chain_of([1, 2, 3, 4, 5, 6, 7]), 7).blocks == ()
    stats = cache.stats()
    assert (stats.num_committed_slots, stats.num_cached_kv_blocks, stats.num_free_kv_blocks) == (0, 0, 16)
    cache.check_integrity([])


def test_what_others_hold_of_a_discarded_path_stays():
    cache = PrefixCache(16, 8, SIZE)
    cache.release(computed(cache, [1, 2, 3, 4], positions=[2, 4]))
    pin = cache.pin(chain_of([1, 2]))
    path = computed(cache, [1, 2, 3, 4, 5, 6], positions=[6])
    match = cache.match(chain_of([1, 2, 3, 4, 5]), 5)
    cache.pin_state(path, match.resume_slot, resumes=True)  # the state at 4
    other = opened(cache, [1, 2, 3, 4, 9, 9])
    cache.discard(path)
    again = cache.match(chain_of([1, 2, 3, 4, 5, 6, 7]), 7)
    assert (len(again.blocks), again.resume_tokens) == (2, 2)  # the pinned state; that at 4 is gone
    cache.check_integrity([other])
    cache.release(other)
    cache.pins.unpin(pin)
    cache.check_integrity([])


# ---- states and blocks leave together


def states_outlive_blocks(cache):
    """Blocks whose state can be found though they are free, or are registered no more."""
    kv, states = cache.kv_blocks, cache.cached_states
    free = {
        block for block in range(kv.total_count) if not kv.tree.references[block] and block not in kv.tree
    }
    return free & (set(states.state_block_of_hash.values()) | set(states.slot_of_block))


def test_a_state_that_cannot_be_forgotten_keeps_its_block(monkeypatch):
    cache = PrefixCache(4, 4, SIZE)
    cache.release(computed(cache, [1, 2, 3, 4], positions=[2, 4]))

    def fail(blocks, cause):
        raise MemoryError("no memory for the list of states")

    monkeypatch.setattr(cache.cached_states, "remove", fail)
    for call in (
        lambda: cache.kv_blocks.evict_lru_blocks(2),
        lambda: cache.kv_blocks.allocate_memory_blocks(4),
    ):
        with pytest.raises(MemoryError):
            call()
        assert cache.match(chain_of([1, 2, 3, 4, 5]), 5).resume_tokens == 4
        cache.check_integrity([])
    monkeypatch.undo()
    cache.kv_blocks.evict_lru_blocks(2)
    assert cache.stats().num_free_slots == 4
    cache.check_integrity([])


def test_a_refused_pin_keeps_the_pin_before_it(monkeypatch):
    cache = PrefixCache(8, 4, SIZE)
    cache.release(computed(cache, [1, 2, 3, 4], positions=[2, 4]))
    path = opened(cache, [1, 2, 3, 4, 5])
    first, second = (cache.cached_states.slot_of(block) for block in path.blocks[:2])
    cache.pin_state(path, first, resumes=False)

    def refuse(slot):
        raise MemoryError("no memory for a pin")

    monkeypatch.setattr(cache.slots, "pin", refuse)
    with pytest.raises(MemoryError):
        cache.pin_state(path, second, resumes=True)
    assert (path.state_slot, dict(cache.slots.pins)) == (first, {first: 1})
    monkeypatch.undo()
    cache.pin_state(path, second, resumes=True)
    cache.pin_state(path, second, resumes=True)  # the same again
    assert (path.state_slot, dict(cache.slots.pins)) == (second, {second: 1})
    cache.check_integrity([path])


def test_an_error_in_the_removal_of_a_block_without_a_state_has_no_other_context():
    def interrupted_at(line, frame, event, arg):
        if frame.f_code is not CachedStates.remove.__code__ or event == "call":
            return partial(interrupted_at, line)
        lines.add(frame.f_lineno)
        if event == "line" and frame.f_lineno == line:
            raise KeyboardInterrupt
        return partial(interrupted_at, line)

    def contexts_of_errors(line):
        cache = PrefixCache(4, 4, SIZE)
        path = computed(cache, [1, 2, 3, 4], positions=[4])
        former = sys.gettrace()
        sys.settrace(partial(interrupted_at, line))
        try:
            cache.cached_states.remove(path.blocks[:2], "by_host")
        except KeyboardInterrupt as error:
            return [error.__context__]
        finally:
            sys.settrace(former)
        return []

    lines: set[int] = set()
    assert contexts_of_errors(0) == []
    assert len(lines) > 10
    for line in sorted(lines):
        assert contexts_of_errors(line) == [None], f"line {line}"


def test_a_host_that_observes_does_not_take_the_states_place():
    cache = PrefixCache(4, 4, SIZE)
    cache.release(computed(cache, [1, 2, 3, 4], positions=[2, 4]))
    calls = []
    cache.kv_blocks.observe_deregistration(
        lambda blocks, hashes: calls.append((sorted(blocks), cache.slots.counts.committed))
    )
    blocks = sorted(cache.match(chain_of([1, 2, 3, 4, 5]), 5).blocks)
    cache.kv_blocks.evict_lru_blocks(2)
    assert calls == [(blocks, 0)]
    cache.check_integrity([])


LEAVING = {
    "evict": lambda cache, path: cache.kv_blocks.evict_lru_blocks(cache.kv_blocks.num_cached),
    "release": lambda cache, path: cache.release(path),
    "discard": lambda cache, path: cache.discard(path),
    "forget": lambda cache, path: cache.clear([path]),
    "reset": lambda cache, path: cache.reset(),
    "grow": lambda cache, path: cache.grow(path, 12),
}


@pytest.mark.sampled
@pytest.mark.parametrize("policy", ["lru", "value"])
@pytest.mark.parametrize("leaving", LEAVING)
def test_an_interrupt_at_any_line_leaves_no_state_of_a_free_block(leaving, policy):
    num_lines, line = 0, 0
    while line <= num_lines:
        cache = PrefixCache(12, 8, SIZE, policy)
        path = computed(cache, [1, 2, 3, 4, 5, 6], positions=[2, 4, 6])
        cache.release(computed(cache, [1, 2, 7, 8, 9, 9], positions=[4, 6]))
        num_lines = 0

        def interrupt(frame, event, arg, line=line):
            nonlocal num_lines
            if event == "line":
                if num_lines == line:
                    raise KeyboardInterrupt
                num_lines += 1
            return interrupt

        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            LEAVING[leaving](cache, path)
        except KeyboardInterrupt:
            num_lines = line + 1  # there may be more
        finally:
            sys.settrace(before)
        assert states_outlive_blocks(cache) == set(), f"interrupted at line {line}"
        line += 1
    assert num_lines > 1


# ---- any order of calls, against a model

SALTS = st.sampled_from([b"", b"", b"", b"salt"])
PROMPTS = st.tuples(
    st.lists(st.sampled_from([[0, 0], [1, 1]]), min_size=1, max_size=4), st.lists(st.just(2), max_size=1)
).map(lambda parts: [*itertools.chain.from_iterable(parts[0]), *parts[1]])
"""Whole blocks of two kinds, then perhaps a token more: many begin alike."""


class Sequence:
    """One sequence and what the model says its path holds."""

    def __init__(self, salt, tokens, path):
        self.salt = salt
        self.tokens = tokens
        self.path = path
        self.blocks = []
        self.num_registered = 0
        self.caches = True
        self.state_block = -1  # the block whose state is pinned

    def prefix(self, depth):
        return self.salt, tuple(self.tokens[: depth * SIZE])


class PrefixCacheMachine(RuleBasedStateMachine):
    """Sequences come, grow, share, resume, take states and go, and the cache is pinned, evicted and reset.

    A prefix is (salt, tokens). The model has a dict of registered prefixes, and the blocks with states in the
    order in which their states are evicted; all else it finds out by looking at everything. Between two rules
    `TICK_NS` pass.
    """

    TICK_NS = 700_000_000

    @initialize(
        num_blocks=st.integers(1, 20),
        num_slots=st.integers(0, 8),
    )
    def start(self, num_blocks, num_slots):
        self.num_slots = num_slots
        self.now_ns = 1
        self.cache = PrefixCache(num_blocks, num_slots, SIZE, "lru", clock=lambda: self.now_ns)
        self.departed = []
        self.cache.kv_blocks.observe_deregistration(lambda blocks, hashes: self.departed.extend(blocks))
        self.start_over()

    def start_over(self):
        self.sequences = []
        self.pins = {}  # PinnedPrefix -> its blocks
        self.prefix_of = {}  # registered block -> its prefix
        self.states = []  # blocks with states, the next to be evicted first
        self.used = set()  # blocks whose states some sequence resumed from
        self.num_evicted = self.num_refused = self.num_unused = 0
        self.left, self.kv_left = Counter(), Counter()  # causes of states and of blocks that left
        self.used_ns = {}  # block with a state -> when the state was committed, or last used
        self.ages_ns = []

    # ---- the model

    @property
    def paths(self):
        return [sequence.path for sequence in self.sequences]

    def refs(self):
        counts = Counter(block for sequence in self.sequences for block in sequence.blocks)
        counts.update(block for blocks in self.pins.values() for block in blocks)
        return counts

    def block_of(self, prefix):
        return next((block for block, other in self.prefix_of.items() if other == prefix), -1)

    def known(self, salt, tokens):
        """The registered blocks of a sequence's longest known prefix."""
        blocks = []
        for depth in range(1, len(tokens) // SIZE + 1):
            block = self.block_of((salt, tuple(tokens[: depth * SIZE])))
            if block < 0:
                break
            blocks.append(block)
        return blocks

    def cached(self):
        refs = self.refs()
        return {block for block in self.prefix_of if not refs[block]}

    def free_blocks(self):
        refs = self.refs()
        total = self.cache.kv_blocks.total_count
        return {block for block in range(total) if not refs[block] and block not in self.prefix_of}

    def leaves(self):
        parents = {(salt, tokens[:-SIZE]) for salt, tokens in self.prefix_of.values()}
        return {block for block in self.cached() if self.prefix_of[block] not in parents}

    def pinned_states(self):
        return {s.state_block for s in self.sequences} | {blocks[-1] for blocks in self.pins.values()}

    def leave(self, block, cause):
        self.kv_left[cause] += 1
        del self.prefix_of[block]
        if block in self.states:
            of_state = {"new_block": "kv_evicted", "discarded": "discarded"}
            self.lose_state(block, of_state[cause])

    def lose_state(self, block, cause):
        self.left[cause] += 1
        used_ns = self.used_ns.pop(block)
        if cause in ("new_state", "kv_evicted"):
            self.ages_ns.append(self.now_ns - used_ns)
            self.num_unused += block not in self.used
        self.states.remove(block)
        self.used.discard(block)

    def expect_evicted_blocks(self, count):
        """So many cached blocks left, each of them a leaf when it did, those without states first."""
        assert len(self.departed) == count
        for block in self.departed:
            leaves = self.leaves()
            assert block in leaves
            assert block not in self.states or leaves <= set(self.states)
            self.leave(block, "new_block")
        self.departed.clear()

    def expect_dropped_blocks(self):
        assert self.departed == []

    def evict_states(self, count):
        pinned = self.pinned_states()
        for block in [block for block in self.states if block not in pinned][:count]:
            self.lose_state(block, "new_state")
            self.num_evicted += 1

    def num_evictable_states(self):
        return len(set(self.states) - self.pinned_states())

    def checked_match(self, sequence, limit=None):
        """What the cache finds of all tokens of a sequence, compared with what the model does."""
        chain, length = sequence.path.chain, len(sequence.tokens)
        chain.extend_to(sequence.tokens)
        before = picture(self.cache, self.paths)
        held = sequence.path if sequence in self.sequences else None
        match = self.cache.match(chain, length, held, limit)
        assert picture(self.cache, self.paths) == before
        blocks = self.known(sequence.salt, sequence.tokens) if sequence.caches else []
        assert list(match.blocks) == blocks
        most = length - 1 if limit is None else min(limit, length - 1)
        first, reachable = sequence.num_registered, min(len(blocks), most // SIZE)
        depths = [d for d in range(first + 1, reachable + 1) if blocks[d - 1] in self.states]
        assert match.resume_tokens == SIZE * max(depths, default=0)
        if depths:
            assert match.resume_slot == self.cache.slots.cached_states.slot_of(blocks[depths[-1] - 1]) >= 0
        else:
            assert match.resume_slot == -1
        assert len(blocks) * SIZE <= match.seen_tokens <= length
        edges = [match.resume_tokens, *(span.stop for span in match.spans)]
        assert [span.start for span in match.spans] == edges[:-1]
        assert edges[-1] == length
        return match

    def hold(self, sequence, match):
        shared = list(match.blocks[sequence.num_registered :])
        self.cache.hold(sequence.path, match)
        if shared:
            sequence.blocks = sequence.blocks[: sequence.num_registered] + shared
            sequence.num_registered = len(sequence.blocks)
        self.expect_dropped_blocks()

    def grow(self, sequence):
        """Whether there were blocks enough."""
        needed = max(0, num_blocks_of(sequence.tokens) - len(sequence.blocks))
        free, cached = self.free_blocks(), self.cached()
        if needed > len(free) + len(cached):
            before = picture(self.cache, self.paths)
            with pytest.raises(KVBlockCapacityError):
                self.cache.grow(sequence.path, num_blocks_of(sequence.tokens))
            assert picture(self.cache, self.paths) == before
            return False
        self.cache.grow(sequence.path, num_blocks_of(sequence.tokens))
        new = sequence.path.blocks[len(sequence.blocks) :]
        assert len(set(new)) == len(new) == needed
        assert set(new) <= free | set(self.departed)
        self.expect_evicted_blocks(max(0, needed - len(free)))
        sequence.blocks = sequence.blocks + new
        return True

    def resume(self, sequence, match):
        if match.resume_slot < 0:
            return
        self.cache.pin_state(sequence.path, match.resume_slot, resumes=True)
        block = match.blocks[match.resume_tokens // SIZE - 1]
        sequence.state_block = block
        self.used.add(block)
        self.used_ns[block] = self.now_ns
        self.states.remove(block)
        self.states.append(block)

    def register(self, sequence, num_computed):
        self.cache.register(sequence.path, sequence.tokens, num_computed)
        if sequence.caches:
            for depth in range(sequence.num_registered + 1, num_computed // SIZE + 1):
                theirs = self.block_of(sequence.prefix(depth))
                if theirs >= 0:
                    sequence.blocks[depth - 1] = theirs
                else:
                    self.prefix_of[sequence.blocks[depth - 1]] = sequence.prefix(depth)
                sequence.num_registered = depth
        self.expect_dropped_blocks()

    def drawn(self, data):
        return data.draw(st.sampled_from(self.sequences))

    # ---- what callers do

    @rule(salt=SALTS, tokens=PROMPTS, limit=st.none() | st.integers(0, 9))
    def a_sequence_comes(self, salt, tokens, limit):
        chain = PrefixHashChain(SIZE, salt)
        sequence = Sequence(salt, tokens, self.cache.open(chain, PLAN, table_row()))
        match = self.checked_match(sequence, limit)
        can_hold = self.cache.can_hold(num_blocks_of(tokens), match, None)
        self.sequences.append(sequence)
        self.hold(sequence, match)
        assert self.grow(sequence) == can_hold
        if can_hold:
            self.resume(sequence, match)
        else:
            self.leaves_the_cache(sequence)

    @rule(data=st.data(), salt=SALTS, tokens=PROMPTS, stays=st.booleans())
    def a_sequence_is_served(self, data, salt, tokens, stays):
        """It comes and is computed to its end, and perhaps leaves."""
        running = len(self.sequences)
        self.a_sequence_comes(salt, tokens, None)
        if len(self.sequences) > running:
            sequence = self.sequences[-1]
            self.take_states(data, [sequence], [len(tokens)], fails=False)
            if not stays:
                self.leaves_the_cache(sequence)

    def leaves_the_cache(self, sequence):
        self.sequences.remove(sequence)
        self.cache.release(sequence.path)
        self.expect_dropped_blocks()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=PROMPTS)
    def a_sequence_goes_on(self, data, tokens):
        sequence = self.drawn(data)
        if len(sequence.tokens) + len(tokens) > MAX_BLOCKS * SIZE:
            return
        known = sequence.tokens
        sequence.tokens = known + tokens
        if not self.grow(sequence):
            sequence.tokens = known

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def a_sequence_jumps_ahead(self, data):
        """Matched again, it goes on with blocks and states that others computed since."""
        sequence = self.drawn(data)
        match = self.checked_match(sequence)
        if self.cache.can_hold(num_blocks_of(sequence.tokens), match, sequence.path):
            self.hold(sequence, match)
            assert self.grow(sequence)
            self.resume(sequence, match)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), fails=st.booleans())
    def a_step_takes_states(self, data, fails):
        """One or two sequences are computed a part further."""
        count = data.draw(st.integers(1, 2))
        chosen = data.draw(
            st.lists(st.sampled_from(self.sequences), min_size=1, max_size=count, unique_by=id)
        )
        stops = [data.draw(st.integers(s.num_registered * SIZE, len(s.tokens))) for s in chosen]
        self.take_states(data, chosen, stops, fails)

    def take_states(self, data, chosen, stops, fails):
        steps, wanted = [], {}
        for row, (sequence, stop) in enumerate(zip(chosen, stops, strict=True)):
            first = sequence.num_registered
            depths = range(first + 1, stop // SIZE + 1) if sequence.caches else ()
            positions = [depth * SIZE for depth in depths if data.draw(st.sampled_from([True, True, False]))]
            steps.append(step_of(sequence.path, sequence.tokens, stop, positions))
            for position in positions:
                prefix = sequence.prefix(position // SIZE)
                if self.block_of(prefix) not in self.states:
                    wanted.setdefault(prefix, (row, position))
        num_free = self.num_slots - len(self.states)
        served = list(wanted.values())[: num_free + self.num_evictable_states()]
        self.evict_states(max(0, len(served) - num_free))
        self.num_refused += len(wanted) - len(served)
        reserved = self.cache.reserve(steps)
        got = [(row, position) for row, step in enumerate(reserved) for position in step.destinations]
        assert sorted(got) == sorted(served)
        self.cache.check_integrity(self.paths, during_step=True)
        if fails:
            self.cache.abort()
            return
        for sequence, step in zip(chosen, reserved, strict=True):
            if sequence.state_block >= 0:
                self.cache.unpin_state(sequence.path)
                sequence.state_block = -1
            self.register(sequence, step.stop)
            committed = self.cache.commit(step)
            assert committed == step.destinations
            for position in sorted(step.destinations):
                self.states.append(sequence.blocks[position // SIZE - 1])
                self.used_ns[self.states[-1]] = self.now_ns
            if committed.get(step.stop, -1) >= 0:  # the sequence continues from there
                self.cache.pin_state(sequence.path, committed[step.stop], resumes=False)
                sequence.state_block = sequence.blocks[step.stop // SIZE - 1]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def a_sequence_registers_what_it_computed(self, data):
        sequence = self.drawn(data)
        self.register(sequence, data.draw(st.integers(0, len(sequence.tokens))))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def a_sequence_gives_blocks_back(self, data):
        sequence = self.drawn(data)
        keep = data.draw(st.integers(sequence.num_registered, len(sequence.blocks)))
        self.cache.trim(sequence.path, keep)
        del sequence.blocks[keep:]
        sequence.tokens = sequence.tokens[: keep * SIZE] if keep else sequence.tokens[:1]
        sequence.path.chain.cut_to(len(sequence.tokens))
        self.expect_dropped_blocks()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def a_sequence_leaves(self, data):
        self.leaves_the_cache(self.drawn(data))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def a_sequence_is_discarded(self, data):
        """Its states go unless they are pinned, and its blocks unless they are held or continued."""
        sequence = self.drawn(data)
        self.sequences.remove(sequence)
        self.cache.discard(sequence.path)
        pinned, cached = self.pinned_states(), self.cached()
        for depth in range(sequence.num_registered, 0, -1) if sequence.caches else ():
            block = sequence.blocks[depth - 1]
            if block in self.states and block not in pinned:
                self.lose_state(block, "discarded")
        for block in reversed(sequence.blocks[: sequence.num_registered] if sequence.caches else []):
            if block in cached and block in self.leaves():
                self.leave(block, "discarded")
                self.departed.remove(block)
        assert self.departed == []

    @rule(data=st.data(), salt=SALTS, tokens=PROMPTS)
    def a_prefix_is_pinned(self, data, salt, tokens):
        if self.states and data.draw(st.booleans()):
            salt, known = self.prefix_of[data.draw(st.sampled_from(self.states))]
            tokens = [*known, *tokens]
        blocks = self.known(salt, tokens)
        while blocks and blocks[-1] not in self.states:
            blocks.pop()
        chain = chain_of(tokens, salt)
        assert self.cache.resumable_tokens(chain) == len(blocks) * SIZE
        if not blocks:
            before = picture(self.cache, self.paths)
            with pytest.raises(ValueError, match="accepted: one of a prefix with a cached state"):
                self.cache.pin(chain)
            assert picture(self.cache, self.paths) == before
            return
        prefix = self.cache.pin(chain)
        assert prefix.num_tokens == len(blocks) * SIZE
        self.pins[prefix] = blocks
        assert list(self.cache.pins.prefixes) == list(self.pins)
        assert self.cache.pins.num_blocks == len({block for pinned in self.pins.values() for block in pinned})

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def a_prefix_is_unpinned(self, data):
        prefix = data.draw(st.sampled_from(list(self.pins)))
        self.cache.pins.unpin(prefix)
        del self.pins[prefix]
        self.expect_dropped_blocks()
        with pytest.raises(ValueError, match="accepted: a prefix that is pinned here"):
            self.cache.pins.unpin(prefix)

    @rule(num_states=st.integers(0, 3))
    def states_are_evicted(self, num_states):
        if num_states > self.num_evictable_states():
            before = picture(self.cache, self.paths)
            with pytest.raises(MambaSlotCapacityError):
                self.cache.slots.evict(num_states)
            assert picture(self.cache, self.paths) == before
            return
        self.cache.slots.evict(num_states)
        self.evict_states(num_states)

    @rule(num_blocks=st.integers(0, 4))
    def blocks_are_evicted(self, num_blocks):
        if num_blocks > len(self.cached()):
            before = picture(self.cache, self.paths)
            with pytest.raises(KVBlockCapacityError):
                self.cache.kv_blocks.evict_lru_blocks(num_blocks)
            assert picture(self.cache, self.paths) == before
            return
        self.cache.kv_blocks.evict_lru_blocks(num_blocks)
        self.expect_evicted_blocks(num_blocks)

    @precondition(lambda self: len(self.prefix_of) > 4)
    @rule()
    def all_prefixes_are_forgotten(self):
        for sequence in self.sequences:
            self.cache.unpin_state(sequence.path)
            sequence.state_block = -1
        self.cache.clear(self.paths)
        assert set(self.departed) == set(self.prefix_of)
        self.departed.clear()
        self.left["reset"] += len(self.states)
        self.kv_left["reset"] += len(self.prefix_of)
        self.used_ns.clear()
        self.pins.clear()
        self.prefix_of.clear()
        self.states.clear()
        self.used.clear()
        for sequence in self.sequences:
            sequence.caches = False

    @precondition(lambda self: len(self.prefix_of) > 4)
    @rule()
    def all_is_reset(self):
        self.cache.reset()
        assert set(self.departed) == set(self.prefix_of)
        self.departed.clear()
        self.start_over()

    @invariant()
    def the_cache_agrees_with_the_model(self):
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        cache.check_integrity(self.paths)
        assert self.departed == []
        assert cache.kv_blocks.references == +self.refs()
        assert set(cache.kv_blocks.tree.block_of_hash.values()) == self.prefix_of.keys()
        assert [
            cache.slots.cached_states.block_of(slot) for slot in eviction_order(cache.slots)
        ] == self.states
        slots = cache.slots.cached_states.slot_of_block
        assert {block for block, slot in slots.items() if slot in cache.cached_states.used_slots} == self.used
        for sequence in self.sequences:
            assert sequence.path.blocks == sequence.blocks
            assert sequence.path.caches == sequence.caches
            held = cache.slots.cached_states.slot_of(sequence.state_block)
            assert sequence.path.state_slot == held
            if sequence.caches:
                assert sequence.path.num_registered == sequence.num_registered
        stats = cache.stats()
        assert stats.num_free_slots == self.num_slots - len(self.states)
        assert (stats.num_committed_slots, stats.num_reserved_slots) == (len(self.states), 0)
        assert stats.num_states_evicted == self.num_evicted
        assert stats.num_free_kv_blocks == len(self.free_blocks())
        assert stats.num_cached_kv_blocks == len(self.cached())
        assert stats.num_held_kv_blocks == len(+self.refs())
        self.check_counts(stats)
        self.now_ns += self.TICK_NS

    def check_counts(self, stats):
        """Who left, why and how old, against a count of each one that left."""
        assert +Counter(stats.states_removed_by_cause) == self.left
        assert +Counter(stats.kv_blocks_removed_by_cause) == self.kv_left
        assert stats.num_states_committed == len(self.states) + self.left.total()
        assert stats.num_kv_blocks_registered == len(self.prefix_of) + self.kv_left.total()
        assert stats.num_states_refused == self.num_refused
        assert stats.num_states_evicted_unused == self.num_unused
        assert stats.num_pinned_slots == len(self.cache.slots.pins)
        recent_s = [age / 1e9 for age in self.ages_ns[-256:]]
        assert sorted(stats.state_ages.recent_s) == pytest.approx(sorted(recent_s))
        counts = [0] * (len(AGE_BOUNDS_S) + 1)
        for age in self.ages_ns:
            counts[sum(age / 1e9 > bound for bound in AGE_BOUNDS_S)] += 1
        assert list(stats.state_ages.counts) == counts
        assert stats.state_ages.sum_s == pytest.approx(sum(self.ages_ns) / 1e9, abs=1e-6)


TestPrefixCacheInAnyOrder = PrefixCacheMachine.TestCase
TestPrefixCacheInAnyOrder.settings = settings(max_examples=2 * settings.default.max_examples)
