"""States and KV in one memory: numbers keep their addresses, and no two that are in use share a byte."""

import math
from types import SimpleNamespace

import mambaslots as ms
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mambaslots.errors import MambaSlotCapacityError
from mambaslots.inference.contexts.cache.checkpoint_plan import CheckpointPlan
from mambaslots.inference.contexts.cache.hashing import PrefixHashChain
from mambaslots.inference.contexts.cache.memory import (
    UNIT_ALIGNMENT,
    MemoryDivision,
    MemoryUnits,
    RankBudget,
    UnitShape,
    UnitSizes,
)
from mambaslots.inference.contexts.cache.prefix_cache import PrefixCache
from mambaslots.inference.contexts.cache.unit_borrower import KVUnit, UnitBorrower
from mambaslots.inference.contexts.device_memory import DeviceMemory
from mambaslots.inference.contexts.pool_sizes import PoolSizes
from oracle.serving import small_model

SIZE = 2
SIZES = UnitSizes(slot=1000, block=300)
BYTES = st.integers(1, 40_000)


# ---- the division


@given(slot=BYTES, block=BYTES, others=st.lists(st.tuples(BYTES, BYTES), max_size=2))
def test_slots_and_blocks_divide_a_unit_evenly_on_every_rank(slot, block, others):
    ranks = [UnitSizes(slot, block), *(UnitSizes(*other) for other in others)]
    shape = UnitShape.of(ranks)
    for sizes in ranks:
        unit = shape.unit_bytes(sizes)
        strides = shape.slot_stride(sizes), shape.block_stride(sizes)
        assert (shape.slots * strides[0], shape.blocks * strides[1]) == (unit, unit)
        assert strides[0] >= sizes.slot
        assert strides[1] >= sizes.block
        assert not any(stride % UNIT_ALIGNMENT for stride in strides)


@pytest.mark.parametrize(
    ("slot", "block"),
    [(97, 4), (725, 5), (47, 1.5), (74, 6), (290, 36), (25, 36)],
)
def test_units_of_real_models_are_small_and_waste_little(slot, block):
    slot, block = slot << 20, int(block * (1 << 20))
    shape = UnitShape.of([UnitSizes(slot, block)])
    assert shape.waste([UnitSizes(slot, block)]) < 0.02
    assert shape.unit_bytes(UnitSizes(slot, block)) < 10 * max(slot, block)


def test_a_pipeline_stage_without_states_and_kv_follows_the_others() -> None:
    some = RankBudget(SIZES, 100_000, 2)
    alone = MemoryDivision.of([some], 4)
    assert MemoryDivision.of([some, RankBudget(UnitSizes(0, 0), 100_000, 2)], 4) == alone
    assert alone.shape.unit_bytes(UnitSizes(0, 0)) < 100_000 / alone.num_units


@given(memory=st.integers(0, 200_000), num_live=st.integers(1, 5), longest=st.integers(1, 9))
def test_a_division_fits_into_its_budget_and_holds_what_it_must(memory, num_live, longest):
    division = MemoryDivision.of([RankBudget(SIZES, memory, num_live)], longest)
    fits = division.num_units >= division.num_kv_units
    assert fits == (division.least_bytes(SIZES) <= memory)
    if fits:
        assert (
            division.total_bytes(SIZES)
            <= memory
            < division.total_bytes(SIZES) + division.shape.unit_bytes(SIZES)
        )
        assert division.num_kv_units * division.shape.blocks >= longest
        assert not any(MemoryUnits(division).for_states[: division.num_kv_units])


# ---- which unit


class Units:
    """What `borrow_slots` asks of its parts; `left` are the units that it has emptied."""

    def __init__(self, units, victims=()):
        self.candidates, self.left = units, []
        self.lending = UnitBorrower.__new__(UnitBorrower)
        self.lending.units = SimpleNamespace(num_kv_units=0, slots_per_unit=1)
        self.lending._free_list = SimpleNamespace(whole_units=[])
        self.lending._slots = SimpleNamespace(free_slots=[], next_victims=lambda count: list(victims[:count]))
        self.lending._kv_blocks = SimpleNamespace(evict_leaves=lambda leaves: None)
        self.lending._candidates = lambda: [one for one in units if one.unit not in self.left]
        self.lending._give_to_states = self.give

    def give(self, unit):
        self.left.append(unit)
        self.lending._slots.free_slots.append(unit)


def unit(number, slots, last_use):
    return KVUnit(number, [], slots, last_use)


def test_units_without_states_go_first_the_one_used_longest_ago_before_others():
    units = Units([unit(0, [5], 1), unit(1, [], 9), unit(2, [], 3)])
    units.lending.borrow_slots(3)
    assert units.left == [2, 1]


@pytest.mark.parametrize(("victims", "taken"), [([5, 6, 7], True), ([6, 5], True), ([6, 7, 5], False)])
def test_a_unit_with_states_goes_where_they_would_go_anyway(victims, taken):
    units = Units([unit(0, [5], 1)], victims)
    units.lending.borrow_slots(1)
    assert units.left == [0] * taken


# ---- the indices, against a map of bytes


def interval(first, size):
    return range(first, first + size)


class Bytes:
    """Where slots and blocks lie, by the drawing of `MemoryDivision` alone."""

    def __init__(self, division, sizes):
        unit = max(division.shape.slots * sizes.slot, division.shape.blocks * sizes.block)
        granule = UNIT_ALIGNMENT * math.lcm(*division.shape)
        unit = -(-unit // granule) * granule
        self.sizes = sizes
        self.slot_stride, self.block_stride = unit // division.shape.slots, unit // division.shape.blocks
        self.units = (division.num_live + 1) * self.slot_stride
        self.total = self.units + division.num_units * unit

    def slot(self, slot):
        return interval(slot * self.slot_stride, self.sizes.slot)

    def block(self, block):
        return interval(self.units + block * self.block_stride, self.sizes.block)


def assert_disjoint(ranges, total):
    """Whether no two of these ranges share a byte, and all lie within the memory."""
    owners = np.zeros(total, np.int32)
    for one in ranges:
        assert one.start >= 0
        assert one.stop <= total
        owners[one.start : one.stop] += 1
    assert owners.max(initial=0) <= 1, "two numbers in use share a byte"


def usable(cache):
    """The slots and blocks that may be used now."""
    slots, kv = cache.slots, cache.kv_blocks
    numbers = {
        *slots.free_slots,
        *slots.cached_states.slot_of_block.values(),
        *slots.reserved,
        *slots.live_slots,
    }
    free = list(kv.free_blocks)
    blocks = {*free, *kv.tree.block_of_hash.values(), *kv.references}
    return numbers, blocks


PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=9).map(
    lambda tokens: [token for token in tokens for _ in range(SIZE)]
)
PLAN = CheckpointPlan()


def division_of(shape, num_units, num_kv_units, num_live=2):
    return MemoryDivision(UnitShape(*shape), num_live, num_units, num_kv_units)


class Borrowers(RuleBasedStateMachine):
    """Sequences come and go, states are taken, pinned and evicted; units change sides as it goes."""

    @initialize(
        shape=st.sampled_from([(1, 3), (1, 1), (2, 3), (3, 1), (1, 5)]),
        num_units=st.integers(2, 8),
        policy=st.sampled_from(["lru", "value"]),
    )
    def start(self, shape, num_units, policy):
        self.division = division_of(shape, num_units, 1)
        self.cache = PrefixCache(
            self.division.num_kv_blocks,
            self.division.num_durable_slots,
            SIZE,
            policy,
            num_live_slots=self.division.num_live,
            division=self.division,
        )
        self.bytes = Bytes(self.division, SIZES)
        self.paths = []

    def draw(self, data, of):
        return data.draw(st.sampled_from(sorted(of) if isinstance(of, set) else of))

    @rule(tokens=PROMPTS, takes=st.integers(0, 3))
    def a_sequence_comes(self, tokens, takes):
        """It resumes where it can, and takes states at its last boundaries."""
        cache, chain = self.cache, PrefixHashChain(SIZE)
        chain.extend_to(tokens)
        match, num_blocks = cache.match(chain, len(tokens)), len(tokens) // SIZE
        if not cache.can_hold(num_blocks, match, None):
            return
        path = cache.open(chain, PLAN, np.full(64, -1, np.int32))
        path.tokens = tokens
        self.paths.append(path)
        cache.hold(path, match)
        if match.resume_slot >= 0:
            cache.pin_state(path, match.resume_slot, resumes=True)
        cache.grow(path, num_blocks)
        assert (
            match.resume_slot < 0
            or cache.slots.cached_states.slot_of(path.blocks[match.resume_tokens // SIZE - 1]) >= 0
        )
        cache.register(path, tokens, len(tokens))
        for block in path.blocks[-takes:] if takes else ():
            cache._unit_borrower.borrow_slots(1)
            if block not in cache.slots.cached_states.slot_of_block and cache.slots.num_available:
                cache.slots.commit_slots(cache.slots.reserve_slots([block]))

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def a_sequence_grows(self, data):
        path = self.draw(data, self.paths)
        kv, before = self.cache.kv_blocks, len(path.blocks)
        if before < 60 and kv.is_memory_available(2):
            self.cache.grow(path, before + 2)
            assert len(path.blocks) == before + 2

    @precondition(lambda self: self.paths)
    @rule(data=st.data(), discards=st.booleans())
    def a_sequence_leaves(self, data, discards):
        path = self.draw(data, self.paths)
        self.paths.remove(path)
        (self.cache.discard if discards else self.cache.release)(path)

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def a_sequence_stops_reading(self, data):
        self.cache.unpin_state(self.draw(data, self.paths))

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def a_prefix_is_pinned(self, data):
        path = self.draw(data, self.paths)
        if path.caches and self.cache.resumable_tokens(path.chain):
            try:
                self.cache.pin(path.chain)
            except MambaSlotCapacityError:
                assert len(set(self.cache.pins.slot_pins)) >= self.cache.pins.max_slots

    @precondition(lambda self: self.cache.pins.prefixes)
    @rule(data=st.data())
    def a_prefix_is_unpinned(self, data):
        self.cache.pins.unpin(self.draw(data, list(self.cache.pins.prefixes)))

    @rule(count=st.integers(1, 5))
    def slots_are_wanted(self, count):
        before = len(self.cache.slots.cached_states.slot_of_block)
        self.cache._unit_borrower.borrow_slots(count)
        gone = before - len(self.cache.slots.cached_states.slot_of_block)
        assert gone <= before

    @rule(count=st.integers(1, 9))
    def blocks_are_wanted(self, count):
        kv = self.cache.kv_blocks
        could = kv.is_memory_available(count)
        self.cache._unit_borrower.borrow_blocks(count)
        assert not could or kv.total_avail + kv.num_cached >= count

    @rule(count=st.integers(1, 2))
    def live_slots_are_taken(self, count):
        """As an idle row does; there are so many as the pins of running requests leave."""
        slots = self.cache.slots
        if len(slots.live_slots) + count <= self.division.num_live and slots.num_available >= count:
            slots.allocate_live(count)

    @precondition(lambda self: self.cache.slots.live_slots)
    @rule()
    def a_row_gets_idle(self):
        self.cache.slots.free_live([min(self.cache.slots.live_slots)])

    @rule(count=st.integers(1, 3))
    def states_are_evicted(self, count):
        slots = self.cache.slots
        slots.evict(min(count, len(slots.next_victims(count))))

    @precondition(lambda self: len(self.paths) > 2)
    @rule(hard=st.booleans())
    def all_is_forgotten(self, hard):
        if hard:
            self.cache.reset()
            self.paths.clear()
        else:
            for path in self.paths:
                self.cache.unpin_state(path)
            self.cache.clear(self.paths)

    @invariant()
    def no_two_share_a_byte_and_none_is_lost(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity(self.paths)
        slots, blocks = usable(self.cache)
        ranges = [*map(self.bytes.slot, slots), *map(self.bytes.block, blocks)]
        assert_disjoint(ranges, self.bytes.total)
        shape = self.division.shape
        whole = (len(slots) - self.division.num_fixed_slots) * shape.blocks + len(blocks) * shape.slots
        assert whole == self.division.num_units * shape.slots * shape.blocks, "a unit is nowhere"
        stats = self.cache.stats()
        assert stats.num_held_kv_blocks == len(self.cache.kv_blocks.references)
        pins, kv = self.cache.pins, self.cache.kv_blocks
        if not (
            self.paths or self.cache.slots.live_slots
        ):  # what pins leave is within reach, and so are the live slots of all rows
            assert kv.is_memory_available(pins.max_sequence_blocks(), 0, ())
            assert self.cache.slots.num_available >= self.division.num_live - len(self.cache.slots.live_slots)


def test_the_lowest_free_slots_are_allocated_first_so_that_units_become_free():
    """Else a state in each unit keeps all units: KV runs short, and evicts states while slots are free."""
    division = division_of((4, 7), num_units=4, num_kv_units=1)
    cache = PrefixCache(
        division.num_kv_blocks, division.num_durable_slots, SIZE, "lru",
        num_live_slots=division.num_live, division=division,
    )  # fmt: skip
    slots = cache.slots
    num_fixed, first, second = division.num_fixed_slots, *map(cache._unit_borrower.units.slots_of, (2, 3))
    taken = slots.reserve_slots(range(num_fixed + 6))  # all of the first unit, and two of the second
    assert sorted(taken) == [*range(num_fixed), *first, *second[:2]]
    slots.release([first[0], second[1], first[2], 0, second[0]])
    assert cache._unit_borrower._free_state_unit() == 3
    assert sorted(slots.reserve_slots([90, 91, 92])) == [0, first[0], first[2]]
    assert cache._unit_borrower._free_state_unit() == 3
    cache._unit_borrower.borrow_blocks(15)  # more than the 14 of the two units that hold KV
    assert cache.kv_blocks.total_avail == 21
    assert slots.free_slots == []


TestBorrowers = Borrowers.TestCase
TestBorrowers.settings = settings(max_examples=2 * settings.default.max_examples)


# ---- the tensors


@pytest.mark.parametrize("shape", [(1, 3), (2, 3), (3, 1)])
def test_tensors_lie_where_the_map_of_bytes_says(shape):
    spec = small_model().state_spec()
    division = division_of(shape, 4, 1)
    sizes = UnitSizes(spec.slot_bytes, spec.kv_block_bytes(8))
    sizes_of_pools = PoolSizes(division.num_kv_blocks, division.num_durable_slots, division)
    config = ms.InferenceConfig(
        block_size_tokens=8, max_requests=division.num_live, num_kv_blocks=1, num_mamba_slots=1
    )
    memory = DeviceMemory(spec, config, sizes_of_pools)
    places = Bytes(division, sizes)
    start = memory.state_pool.memory.untyped_storage().data_ptr()
    assert memory.kv_cache.untyped_storage().data_ptr() == start
    assert memory.kv_cache.untyped_storage().nbytes() == places.total
    for slot in range(division.num_live + division.num_durable_slots):
        row = memory.state_pool.memory[slot]
        assert interval(row.data_ptr() - start, row.nbytes) == places.slot(slot)
        for name in [tensor.name for tensor in spec.states]:
            part = memory.state_pool.durable(name)[:, slot]
            assert part.data_ptr() - start in places.slot(slot)
    for block in range(division.num_kv_blocks):
        parts = memory.kv_cache[:, :, block].flatten(0, 1)
        found = [interval(part.data_ptr() - start, part.nbytes) for part in parts]
        assert all(part.is_contiguous() for part in parts)
        assert found[0].start == places.block(block).start
        assert [one.stop for one in found[:-1]] == [one.start for one in found[1:]]
        assert found[-1].stop == places.block(block).stop
    memory.deallocate()
    assert memory.kv_cache.untyped_storage().nbytes() == 0
    memory.allocate()
    assert memory.kv_cache.untyped_storage().nbytes() == places.total
    assert torch.equal(memory.kv_cache, torch.zeros_like(memory.kv_cache))
