"""Durable slots, as an engine with a KV cache of its own holds them."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mambaslots.errors import MambaSlotCapacityError
from mambaslots.inference.contexts.cache.eviction import LRUEviction
from mambaslots.inference.contexts.cache.kv_block_allocator import KVBlockAllocator
from mambaslots.inference.contexts.mamba_slot_allocator import MambaSlotAllocator
from oracle.fake_host import CONV_SHAPE, SSM_SHAPE, FakeHost, FakeRequest, durable, same_bytes


def make(max_slots=3, **host):
    fake = FakeHost(**host)
    return fake, fake.allocator(max_slots, MambaSlotAllocator)


def committed(host, slots, *blocks):
    """States of these blocks, registered in KV under hash 100 + block, through a reservation."""
    host.kv_block_allocator.register(blocks, [100 + block for block in blocks])
    return slots.commit(slots.reserve(blocks))


def picture(slots):
    """Everything a host can see, to show that a failed call changed nothing."""
    return (
        dict(slots.slots.cached_states.slot_of_block),
        list(slots.slots.free_slots),
        dict(slots.hash_to_block_id),
        dict(slots.slots.reserved),
        dict(slots.slots.pins),
        len(slots.slots.tree.ghosts),
        slots.conv_states.tolist(),
        slots.ssm_states.tolist(),
    )


def tokens(count):
    return list(range(count))


# ---- construction


@pytest.mark.parametrize("names", ["0.19", "0.20"])
def test_a_new_pool_is_all_free_for_either_host(names):
    host, slots = make(3, names=names)
    assert (slots.max_slots, slots.num_mamba_layers, slots.free_count) == (3, 2, 3)
    assert not any(slots.has_state(block) for block in range(host.num_blocks))
    assert slots.hash_to_block_id == {}
    slots.check_integrity()


def test_tensors_have_the_shapes_of_the_arguments():
    host, slots = make(3, dtype=torch.float64)
    assert slots.conv_states.shape == (2, 3, *CONV_SHAPE)
    assert slots.ssm_states.shape == (2, 3, *SSM_SHAPE)
    assert {states.dtype for states in (slots.conv_states, slots.ssm_states)} == {host.dtype}


def test_an_evicted_state_leaves_a_ghost_until_it_is_taken_again():
    host, slots = make(1)
    committed(host, slots, 1)
    committed(host, slots, 2)
    assert slots.slots.tree.ghosts.has(101, "state")
    committed(host, slots, 1)
    assert not slots.slots.tree.ghosts.has(101, "state")


# ---- the KV side


class Elsewhere(SimpleNamespace):
    """A context of another engine: our two allocators, and live states."""

    def __init__(self, num_blocks):
        live = torch.zeros(1, 1, 2), torch.zeros(1, 1, 2, 2)
        super().__init__(
            kv_block_allocator=KVBlockAllocator(num_blocks),
            mamba_conv_states=live[0],
            mamba_ssm_states=live[1],
        )
        self.slots = MambaSlotAllocator(self, 2, 1, (2,), (2, 2), torch.float32, torch.float32)

    def cache(self, *keys):
        """Blocks registered under these hashes, each with a state."""
        kv = self.kv_block_allocator
        blocks = kv.allocate_memory_blocks(len(keys))
        for block, key in zip(blocks, keys, strict=True):
            kv.register_chain(b"%d" % key, [block], [key], [b"x"])
        self.slots.commit(self.slots.reserve(blocks))
        return blocks


def test_a_reused_block_of_our_kv_allocator_has_no_state_of_its_former_prefix():
    context = Elsewhere(2)
    kv, slots = context.kv_block_allocator, context.slots
    blocks = context.cache(11, 12)
    kv.release_memory_blocks(blocks)
    reused = kv.allocate_memory_blocks(2)
    assert sorted(reused) == sorted(blocks)
    assert not any(map(slots.has_state, reused))
    assert (slots.hash_to_block_id, slots.free_count) == ({}, 2)
    slots.check_integrity()


def test_a_hosts_observer_is_kept_where_the_constructor_subscribes():
    received = []
    kv = KVBlockAllocator(2)
    kv.observe_deregistration(lambda blocks, hashes: received.append(hashes))
    host = FakeHost(num_blocks=2)
    host.kv_block_allocator = kv
    host.allocator(1, MambaSlotAllocator)
    kv.register_chain(b"", kv.allocate_memory_blocks(1), [7], [b"x"])
    kv.release_memory_blocks([0], discard=True)
    kv.deregister_all()
    assert {7} in received


def test_megatrons_single_observer_is_the_allocator():
    host = FakeHost()
    host.kv_block_allocator.on_blocks_deregistered = None
    slots = host.allocator(2, MambaSlotAllocator)
    committed(host, slots, 1)
    host.kv_block_allocator.on_blocks_deregistered([1], {101})
    assert not slots.has_state(1)


def test_of_our_kv_allocators_leaves_those_without_a_state_go_first():
    context = Elsewhere(8)
    kv, slots = context.kv_block_allocator, context.slots
    blocks = context.cache(11, 12)
    (plain,) = kv.allocate_memory_blocks(1)
    kv.register_chain(b"13", [plain], [13], [b"x"])
    kv.release_memory_blocks([*blocks, plain])
    slots.invalidate_block(blocks[1])
    assert kv.evict_lru_blocks(3) == [blocks[1], plain, blocks[0]]
    assert slots.free_count == 2
    slots.check_integrity()


@pytest.mark.parametrize("inference", [False, True])
def test_an_allocator_built_in_inference_mode_is_written_outside_of_it(inference):
    with torch.inference_mode(inference):
        _, slots = make()
    slots.conv_states.fill_(1)
    slots.ssm_states.fill_(1)


def test_hashes_of_a_deregistration_alone_free_nothing():
    host, slots = make(2)
    committed(host, slots, 1)
    slots.on_kv_blocks_deregistered([], {101})
    assert slots.has_state(1)


# ---- states


def patterned(shape, dtype):
    """Random bytes: NaNs with payloads, infinities, denormals."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_states_stored_layer_by_layer_come_back_to_the_bit(dtype):
    host, slots = make(2, dtype=dtype)
    (slot,) = slots.allocate_slots_batch([1])
    conv, ssm = patterned((2, *CONV_SHAPE), dtype), patterned((2, *SSM_SHAPE), dtype)
    for layer in range(2):
        slots.store_from_tensors(1, layer, ssm[layer], conv[layer])
    assert same_bytes(durable(slots, slot), (conv, ssm))
    assert slots.restore_to_live(2, 1)
    assert same_bytes(host.live(2), (conv, ssm))
    assert same_bytes(durable(slots, slot), (conv, ssm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_live_states_are_stored_to_the_bit_and_nothing_else_is_written(dtype):
    host, slots = make(3, dtype=dtype)
    live = [(patterned((2, *CONV_SHAPE), dtype), patterned((2, *SSM_SHAPE), dtype)) for _ in range(4)]
    for row, state in enumerate(live):
        host.set_live(row, state)
    slots.conv_states.fill_(7)
    slots.ssm_states.fill_(7)
    first, second = slots.allocate_slots_batch([1, 2])
    slots.store_from_live_batch([first, second], [3, 0])
    assert same_bytes(durable(slots, first), live[3])
    assert same_bytes(durable(slots, second), live[0])
    (other,) = {0, 1, 2} - {first, second}
    assert all(part.eq(7).all() for part in durable(slots, other))
    assert all(same_bytes(host.live(row), state) for row, state in enumerate(live))


def test_nothing_is_restored_of_a_block_without_a_state():
    host, slots = make(2)
    host.set_live(0, host.state_after(FakeRequest(1, []), 5))
    before = [part.clone() for part in host.live(0)]
    assert slots.restore_to_live(0, 1) is False
    assert same_bytes(host.live(0), before)


# ---- hashes


def test_a_registered_hash_names_the_block_with_the_state():
    host, slots = make(3)
    host.kv_block_allocator.register([1, 2], [11, 12])
    slots.allocate_slots_batch([1, 2, 3])
    slots.register_block_hashes_batch([1, 2, 3, 3], [11, 12, -1, 0])
    assert slots.hash_to_block_id == {11: 1, 12: 2}
    slots.register_block_hashes_batch([], [])
    slots.check_integrity()


def test_a_duplicate_hash_keeps_naming_the_first_block():
    host, slots = make(3)
    host.kv_block_allocator.register([1, 2], [11, 11])
    slots.allocate_slots_batch([1, 2])
    slots.register_block_hashes_batch([1, 2], [11, 11])
    assert slots.hash_to_block_id == {11: 1}
    slots.invalidate_block(2)
    assert slots.hash_to_block_id == {11: 1}
    slots.check_integrity()


def test_a_block_registered_under_a_new_hash_leaves_the_old_one():
    host, slots = make(2)
    slots.allocate_slots_batch([1])
    for key in (11, 12):
        host.kv_block_allocator.register([1], [key])
        slots.register_block_hashes_batch([1], [key])
        slots.check_integrity()
    assert slots.hash_to_block_id == {12: 1}
    slots.invalidate_block(1)
    assert slots.hash_to_block_id == {}


# ---- reset


def test_reset_forgets_states_reservations_pins_and_ghosts():
    host, slots = make(3)
    slots.pin(committed(host, slots, 1)[0])
    slots.reserve([2])
    committed(host, slots, 3)
    committed(host, slots, 4)
    slots.reset()
    counts = slots.slots.counts
    assert (counts.free, counts.reserved, counts.committed, slots.slots.pins) == (3, 0, 0, {})
    assert slots.hash_to_block_id == {}
    assert len(slots.slots.tree.ghosts) == 0
    assert sorted(slots.reserve([1, 2, 3])) == [0, 1, 2]
    slots.check_integrity()


# ---- any order of calls, against a model


class SlotMachine(RuleBasedStateMachine):
    """A host does anything, in any order; the model scans dicts and lists.

    The model knows of each slot who has it: a committed block, a reservation (for a block or, once that left,
    for none), or no owner; the committed slots in order of use; and a number that stands for the state in it.
    """

    num_blocks = 10

    @initialize(
        max_slots=st.integers(0, 6),
        policy=st.sampled_from(["lru", LRUEviction]),
        names=st.sampled_from(["0.19", "0.20"]),
    )
    def start(self, max_slots, policy, names):
        self.host = FakeHost(num_blocks=self.num_blocks, policy=policy, names=names, layers=1)
        self.kv = self.host.kv_block_allocator
        self.slots = self.host.allocator(max_slots, MambaSlotAllocator)
        self.next_key = 1
        self.next_state = 1
        self.forget()

    def forget(self):
        self.block_in = {}  # committed slot -> block
        self.reserved = {}  # slot -> block or None
        self.pins = Counter()
        self.keys = {}  # key -> block
        self.order = []  # committed slots, least recently used first
        self.state = dict.fromkeys(range(self.slots.max_slots), None)  # None: anything

    # ---- the model

    def slot_of(self, block):
        return next((slot for slot, other in self.block_in.items() if other == block), -1)

    def free(self):
        return set(range(self.slots.max_slots)) - self.block_in.keys() - self.reserved.keys()

    def victims(self, keep=()):
        return [slot for slot in self.order if not self.pins[slot] and slot not in keep]

    def take(self, call, count, keep=()):
        """`call` must return `count` slots: free ones, then victims; or fail and change nothing."""
        free, victims = self.free(), self.victims(keep)
        if count > len(free) + len(victims):
            before = picture(self.slots)
            with pytest.raises(MambaSlotCapacityError) as error:
                call()
            assert (error.value.required, error.value.available) == (count, len(free) + len(victims))
            assert picture(self.slots) == before
            return None
        got = call()
        evicted = victims[: max(0, count - len(free))]
        for slot in evicted:
            self.leave(slot)
        return got, free, evicted

    def leave(self, slot):
        block = self.block_in.pop(slot)
        self.order.remove(slot)
        self.keys = {key: other for key, other in self.keys.items() if other != block}

    def enter(self, slot, block):
        self.block_in[slot] = block
        self.order.append(slot)

    def remove(self, block):
        slot = self.slot_of(block)
        if slot >= 0:
            self.leave(slot)
            if self.pins[slot]:
                self.reserved[slot] = None

    def own_reservations(self):
        return sorted(slot for slot in self.reserved if not self.pins[slot])

    def named(self):
        return {self.slot_of(block) for block in self.keys.values()}

    def writable(self):
        unread = {slot for slot in self.block_in if not self.pins[slot]} - self.named()
        return unread.union(self.own_reservations())

    def some(self, data, of, **size):
        return data.draw(st.lists(st.sampled_from(sorted(of)), unique=True, **size)) if of else []

    # ---- what a host does

    @rule(data=st.data())
    def blocks_are_registered_in_kv(self, data):
        for block in self.some(data, range(self.num_blocks), max_size=4):
            if self.kv.block_hashes[block] < 0:
                self.kv.register([block], [self.next_key])
                self.kv.block_ref_counts[block] = 1
                self.next_key += 1

    @rule(data=st.data())
    def references_change(self, data):
        block = data.draw(st.integers(0, self.num_blocks - 1))
        self.kv.block_ref_counts[block] ^= 1

    @rule(data=st.data(), clear_first=st.booleans(), kind=st.sampled_from([list, torch.tensor]))
    def blocks_are_deregistered(self, data, clear_first, kind):
        blocks = self.some(data, range(self.num_blocks), min_size=1, max_size=4)
        callback = self.slots.on_kv_blocks_deregistered
        self.kv.deregister(blocks, lambda left, hashes: callback(kind(left), hashes), clear_first)
        for block in blocks:
            self.remove(block)
            self.reserved = {slot: None if b == block else b for slot, b in self.reserved.items()}

    @rule(data=st.data())
    def blocks_are_invalidated(self, data):
        blocks = self.some(data, range(self.num_blocks), max_size=2)
        for block in blocks:
            self.slots.invalidate_block(block)
            self.remove(block)

    @rule(blocks=st.lists(st.integers(0, 9), max_size=4))
    def slots_are_allocated(self, blocks):
        blocks = [block for block in blocks if block not in self.reserved.values()]
        new = [block for block in dict.fromkeys(blocks) if self.slot_of(block) < 0]
        keep = {self.slot_of(block) for block in blocks}
        taken = self.take(lambda: self.slots.allocate_slots_batch(blocks), len(new), keep)
        if taken is None:
            return
        got, free, evicted = taken
        fresh = [got[blocks.index(block)] for block in new]
        assert set(evicted) <= set(fresh) <= free | set(evicted)
        assert len(set(fresh)) == len(new)
        for block, slot in zip(new, fresh, strict=True):
            self.enter(slot, block)
        assert got == [self.slot_of(block) for block in blocks]
        self.fill(fresh)

    def fill(self, slots):
        """The caller writes a new state into each, one way or another."""
        for i, slot in enumerate(slots):
            row = i % self.host.max_requests
            number = self.next_state
            self.next_state += 1
            state = self.host.state_after(FakeRequest(0, []), number)
            if slot in self.block_in and number % 2:
                conv, ssm = state
                self.slots.store_from_tensors(self.block_in[slot], 0, ssm[0], conv[0])
            else:
                self.host.set_live(row, state)
                self.slots.store_from_live_batch([slot], [row])
            self.state[slot] = number

    @rule(data=st.data())
    def unread_slots_are_written_again(self, data):
        self.fill(self.some(data, self.writable()))

    @precondition(lambda self: self.block_in)
    @rule(data=st.data())
    def hashes_are_registered(self, data):
        blocks = self.some(data, self.block_in.values(), max_size=4)
        hashes = self.kv.block_hashes[blocks].tolist()
        self.slots.register_block_hashes_batch(blocks, hashes)
        self.keys.update({key: block for key, block in zip(hashes, blocks, strict=True) if key > 0})

    @rule(data=st.data())
    def slots_are_reserved(self, data):
        able = set(range(self.num_blocks)) - set(self.block_in.values()) - set(self.reserved.values())
        blocks = self.some(data, able, max_size=4)
        taken = self.take(lambda: self.slots.reserve(blocks), len(blocks))
        if taken is None:
            return
        got, free, evicted = taken
        assert set(evicted) <= set(got) <= free | set(evicted)
        assert len(set(got)) == len(blocks)
        self.reserved.update(zip(got, blocks, strict=True))
        self.fill(got)

    @precondition(lambda self: self.own_reservations())
    @rule(data=st.data(), explicit=st.booleans())
    def reservations_are_committed(self, data, explicit):
        chosen = self.some(data, self.own_reservations(), min_size=1)
        blocks = [self.reserved[slot] for slot in chosen]
        if explicit:
            blocks = [data.draw(st.integers(0, self.num_blocks - 1)) for _ in chosen]
            results = self.slots.commit(chosen, blocks)
        else:
            results = self.slots.commit(chosen)
        for slot, block, result in zip(chosen, blocks, results, strict=True):
            if self.reserved.pop(slot) is None:
                assert result == -1
                continue
            key, earlier = int(self.kv.block_hashes[block]), self.slot_of(block)
            if earlier >= 0 or key < 0:
                assert result == earlier
                continue
            assert result == slot
            self.enter(slot, block)
            self.keys[key] = block

    @precondition(lambda self: self.own_reservations())
    @rule(data=st.data())
    def reservations_are_released(self, data):
        for slot in self.some(data, self.own_reservations()):
            self.slots.release_reservation([slot])
            del self.reserved[slot]

    @precondition(lambda self: self.block_in)
    @rule(data=st.data())
    def a_state_is_pinned(self, data):
        slot = data.draw(st.sampled_from(self.order))
        self.slots.pin(slot)
        self.pins[slot] += 1

    @precondition(lambda self: +self.pins)
    @rule(data=st.data())
    def a_state_is_unpinned(self, data):
        slot = data.draw(st.sampled_from(sorted(+self.pins)))
        self.slots.unpin(slot)
        self.pins[slot] -= 1
        if not self.pins[slot]:
            self.reserved.pop(slot, None)

    @precondition(lambda self: self.block_in)
    @rule(data=st.data(), restore=st.booleans())
    def a_state_is_used(self, data, restore):
        slot = data.draw(st.sampled_from(self.order))
        if restore:
            assert self.slots.restore_to_live(1, self.block_in[slot])
            expected = self.host.state_after(FakeRequest(0, []), self.state[slot])
            assert same_bytes(self.host.live(1), expected)
        else:
            self.slots.record_use(slot)
        self.order.remove(slot)
        self.order.append(slot)

    @rule(data=st.data())
    def a_bad_call_changes_nothing(self, data):
        slots = self.slots
        calls = [
            (slots.reserve, [self.num_blocks]),
            (slots.allocate_slots_batch, [0, -1]),
            (slots.on_kv_blocks_deregistered, [0, self.num_blocks], set()),
            (slots.pin, slots.max_slots),
            (slots.unpin, [0]),
        ]
        unwritable = set(range(slots.max_slots)) - self.writable()
        calls += [(slots.store_from_live_batch, [slot], [0]) for slot in unwritable]
        calls += [(slots.store_from_live_batch, [slot, slot], [0, 1]) for slot in self.writable()]
        calls += [(slots.allocate_slots_batch, [b]) for b in self.reserved.values() if b is not None]
        calls += [(slots.reserve, [block]) for block in self.block_in.values()]
        calls += [(slots.reserve, [block]) for block in self.reserved.values() if block is not None]
        calls += [(slots.commit, [slot]) for slot in self.block_in]
        calls += [(slots.release_reservation, [slot]) for slot in self.free()]
        calls += [(slots.release_reservation, [slot]) for slot in self.reserved if self.pins[slot]]
        calls += [(slots.pin, slot) for slot in self.reserved]
        calls += [(slots.unpin, slot) for slot in self.free()]
        call, *arguments = data.draw(st.sampled_from(calls))
        before = picture(slots)
        with pytest.raises(ValueError, match="accepted"):
            call(*arguments)
        assert picture(slots) == before

    @rule()
    def all_is_reset(self):
        self.slots.reset()
        self.forget()

    @invariant()
    def the_allocator_agrees_with_the_model(self):
        if not hasattr(self, "slots"):
            return
        slots = self.slots
        slots.check_integrity()
        assert slots.hash_to_block_id == self.keys
        assert slots.free_count == len(self.free())
        assert slots.slots.reserved.keys() == self.reserved.keys()
        assert set(slots.slots.reserved.values()) - {-1} == set(self.reserved.values()) - {None}
        assert slots.slots.counts.committed == len(self.block_in)
        assert slots.slots.num_available == len(self.free()) + len(self.victims())
        assert slots.slots.pins == +self.pins
        assert set(slots.slots.free_slots) == self.free()
        for block in range(self.num_blocks):
            assert slots.get_slot(block) == self.slot_of(block)
        for slot, number in self.state.items():
            if number is not None:
                expected = self.host.state_after(FakeRequest(0, []), number)
                assert same_bytes(durable(slots, slot), expected)


TestSlotsInAnyOrder = SlotMachine.TestCase
