"""The index of a tier: against a list of copies, and the bytes that the index points to."""

from random import Random
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from mambaslots.inference.contexts.cache.state_slots import StateSlots
from mambaslots.inference.contexts.cache.state_tiers import StateTiers, Tier
from mambaslots.inference.contexts.row_checksum import RowChecksum
from mambaslots.inference.contexts.tier_copies import HostCopies
from oracle.faulty_copies import CopyFailedError, FaultyCopies
from oracle.kv_index import HashedTree, host_tree

MODULUS = 1 << 64
BYTES = 24


def test_the_copy_used_longest_ago_leaves_first() -> None:
    tier = Tier(2)
    for key in (11, 12):
        tier.insert(key, tier.allocate()[0], key)
    tier.use(11)
    slot, left = tier.allocate()
    assert left == 12
    tier.insert(13, slot, 13)
    assert list(tier.entries) == [11, 13]
    tier.pin(11)
    assert tier.allocate()[1] == 13
    assert tier.allocate() == (-1, 0)
    tier.repair()
    tier.check_integrity()


def test_a_tier_without_slots_allocates_none() -> None:
    assert Tier(0).allocate() == (-1, 0)


def test_a_slot_that_an_interrupt_lost_is_found_again() -> None:
    tier = Tier(2)
    tier.insert(11, tier.allocate()[0], 1)
    tier.allocate()
    with pytest.raises(AssertionError, match="nowhere"):
        tier.check_integrity()
    tier.repair()
    tier.check_integrity()
    assert len(tier) == 1


def expected_checksum(row: bytes, seed: int, checksum: RowChecksum) -> int:
    """The definition, one word after the other, in integers."""
    size = checksum._word.itemsize
    words = [int.from_bytes(row[i : i + size], "little") for i in range(0, len(row), size)]
    columns, rows = checksum._columns.tolist(), checksum._rows.tolist()
    num_inner = len(rows) * len(columns)
    total = sum(word * columns[i] for i, word in enumerate(words[num_inner:])) % MODULUS ^ seed
    for i, word in enumerate(words[:num_inner]):
        total += word * columns[i % len(columns)] * rows[i // len(columns)]
    total %= MODULUS
    return total - MODULUS if total >= MODULUS // 2 else total


@pytest.mark.parametrize("num_bytes", [0, 8, 13, 1016, 8 * 1024, 8 * 3100, 1029])
def test_the_checksum_is_the_weighted_sum_of_words(num_bytes: int) -> None:
    checksum = RowChecksum(num_bytes, torch.device("cpu"))
    checksum._rows_at_once = 2
    checksum._scratch = torch.empty(2, 1024, dtype=torch.int64)
    row = Random(num_bytes).randbytes(num_bytes)
    seed = (1 << 63) - 5
    tensor = torch.frombuffer(bytearray(row), dtype=torch.uint8) if row else torch.empty(0, dtype=torch.uint8)
    assert int(checksum(tensor, seed)) == expected_checksum(row, seed, checksum)


@given(st.data())
def test_a_byte_that_changes_changes_the_checksum(data: st.DataObject) -> None:
    num_bytes = 8 * data.draw(st.sampled_from([1, 5, 1024, 1030]))
    checksum = RowChecksum(num_bytes, torch.device("cpu"))
    row = torch.zeros(num_bytes, dtype=torch.uint8)
    row[data.draw(st.integers(0, num_bytes - 1))] = data.draw(st.integers(0, 255))
    before = int(checksum(row, 7))
    row[data.draw(st.integers(0, num_bytes - 1))] ^= data.draw(st.integers(1, 255))
    assert int(checksum(row, 7)) != before
    assert int(checksum(row, 7)) != int(checksum(row, 8))


class BooksMachine(RuleBasedStateMachine):
    """Durable slots over a tier; each state is the bytes of its key, so that any wrong byte is seen."""

    @initialize(
        slots=st.integers(1, 3),
        host_slots=st.integers(1, 6),
        share=st.sampled_from([0.0, 0.3]),
        seed=st.integers(0, 999),
    )
    def start(self, slots: int, host_slots: int, share: float, seed: int) -> None:
        self.memory = torch.zeros(slots, BYTES, dtype=torch.uint8)
        copies = HostCopies(host_slots, BYTES, self.memory.__getitem__, torch.device("cpu"))
        self.tier = StateTiers(host_slots, FaultyCopies(copies, Random(seed), share))
        self.registered: set[int] = set()
        self.share = share
        self.slots = StateSlots(slots, "lru", HashedTree(10, self.hash_of), tiers=self.tier)
        self.ever: set[int] = set()  # keys whose states were taken since they were registered

    def hash_of(self, block: int) -> int:
        return block + 100 if block in self.registered else -1

    @staticmethod
    def content(block: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(Random(block).randbytes(BYTES)), dtype=torch.uint8)

    @rule(block=st.integers(0, 9))
    def take(self, block: int) -> None:
        self.registered.add(block)
        if block not in self.slots.cached_states.slot_of_block:
            (slot,) = self.slots.reserve_slots([block])
            self.memory[slot] = 255  # a reader of what was here must have read it
            self.memory[slot] = self.content(block)
            self.slots.commit_slots([slot])
            self.ever.add(block)

    @rule(block=st.integers(0, 9))
    def fetch(self, block: int) -> None:
        if block in self.registered:
            there = block in self.slots.cached_states.slot_of_block
            came = self.slots.fetch_state([block], [block + 100], 0, 1)
            assert not (came and there)
            assert not came or self.share or block in self.slots.cached_states.slot_of_block
            assert came or self.share or there or block + 100 not in self.tier

    @rule(block=st.integers(0, 9))
    def kv_leaves(self, block: int) -> None:
        if block in self.registered:
            self.slots.remove([block], with_blocks=True)
            self.registered.discard(block)
            self.ever.discard(block)

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.slots.clear()
        self.ever.clear()

    @rule(block=st.integers(0, 9))
    def use(self, block: int) -> None:
        if block in self.slots.cached_states.slot_of_block:
            self.slots.cached_states.record_use(self.slots.cached_states.slot_of(block))

    @invariant()
    def every_state_is_its_own(self) -> None:
        if not hasattr(self, "slots"):
            return
        self.slots.check_integrity()
        self.tier.check_integrity(lambda key: key - 100 in self.registered)
        for block in range(10):
            slot = self.slots.cached_states.slot_of(block)
            if slot >= 0:
                assert torch.equal(self.memory[slot], self.content(block))
            if slot >= 0 or block + 100 in self.tier:
                assert block in self.ever


TestBooks = BooksMachine.TestCase


def test_the_least_recent_states_are_in_host_memory() -> None:
    """A byte-level oracle: the tier holds what left, the least recently used copies gone first."""
    memory = torch.zeros(2, BYTES, dtype=torch.uint8)
    copies = HostCopies(3, BYTES, memory.__getitem__, torch.device("cpu"))
    tier = StateTiers(3, copies)
    slots = StateSlots(2, "lru", host_tree(100), tiers=tier)
    for block in range(7):
        (slot,) = slots.reserve_slots([block])
        memory[slot] = BooksMachine.content(block)
        slots.commit_slots([slot])
    assert list(tier.host.entries) == [102, 103, 104]
    for block in (2, 3, 4):
        assert torch.equal(copies.memory[tier.host.entries[block + 100][0]], BooksMachine.content(block))


def test_a_copy_that_takes_the_row_of_a_copy_that_failed_is_not_zeroed() -> None:
    states = torch.arange(1, 129, dtype=torch.uint8).view(2, 64)
    copies = HostCopies(1, 64, states.__getitem__, torch.device("cpu"), None, True)
    tier = StateTiers(1, copies, scrubs=True)
    with patch.object(copies, "store", side_effect=CopyFailedError):
        tier.spill([0], [11])
    tier.spill([1], [22])
    tier.host.dirty.scrub_all()
    assert 22 in tier
    assert torch.equal(copies.memory[0], states[1])


def test_a_removed_copy_is_zeroed() -> None:
    states = torch.arange(1, 129, dtype=torch.uint8).view(2, 64)
    copies = HostCopies(2, 64, states.__getitem__, torch.device("cpu"), None, True)
    tiers = StateTiers(2, copies, scrubs=True)
    tiers.spill([0, 1], [11, 22])
    kept, _ = tiers.host.entries[22]
    tiers.remove([11])
    tiers.host.dirty.scrub_all()
    assert not copies.memory[1 - kept].any()
    assert torch.equal(copies.memory[kept], states[1])


def test_a_bad_copy_that_cost_another_state_is_reported() -> None:
    """The sequence would have resumed from the state that left for the bad copy."""
    memory = torch.zeros(1, BYTES, dtype=torch.uint8)
    copies = HostCopies(3, BYTES, memory.__getitem__, torch.device("cpu"))
    tier = StateTiers(3, copies)
    slots = StateSlots(1, "lru", host_tree(100), tiers=tier)
    for block in (5, 4):
        slots.commit_slots(slots.reserve_slots([block]))
    copies.memory ^= 1
    assert slots.fetch_state([4, 5], [104, 105], 1, 1)
    assert not slots.cached_states.slot_of_block
    assert list(tier.host.entries) == [104]
    assert slots.fetch_state([4], [104], 0, 1)
    assert 4 in slots.cached_states.slot_of_block


def test_a_tier_without_tensors_finds_every_copy() -> None:
    tier = StateTiers(4)
    slots = StateSlots(1, "lru", host_tree(100), tiers=tier)
    for block in (1, 2):
        slots.commit_slots(slots.reserve_slots([block]))
    assert slots.fetch_state([1], [101], 3, 4)  # a request has computed 3 tokens of this block
    assert 1 in slots.cached_states.slot_of_block
    assert tier.stats().num_states_fetched == 1


@pytest.mark.parametrize(
    ("state_bytes", "from_host", "from_file"),
    [(0, 1, 1), (4096, 1, 1), (50 << 20, 50, 800), (3 << 19, 1, 24)],
)
def test_a_copy_is_fetched_where_it_saves_tokens_for_its_size(state_bytes, from_host, from_file) -> None:
    tier = StateTiers(1, num_files=2, state_bytes=state_bytes)
    tier.spill([0, 1], [11, 22])  # 11 is in a file alone now
    for key, least in ((22, from_host), (11, from_file)):
        assert tier.is_worth_fetching(key, least)
        assert not tier.is_worth_fetching(key, least - 1)
