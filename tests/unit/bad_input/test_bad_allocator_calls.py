"""Bad calls of the pools' bookkeeping: refused by name, with nothing changed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mambaslots as ms
import pytest
import torch
from mambaslots.inference.contexts.cache.prefix_cache import PrefixCache
from oracle import bad_values as bad
from oracle.bad_values import INT32_MAX, UNPRINTABLE, Bad, meta, refuse, refuse_all
from oracle.fake_host import CONV_SHAPE, SSM_SHAPE, Chunk, FakeHost, FakeRequest
from oracle.picture import picture

MAX_HASH = 2**63 - 1


def unchanged_of(*things: Any) -> Callable[[], None]:
    before = picture(things)

    def unchanged() -> None:
        assert picture(things) == before
        for thing in things:
            thing.check_integrity()

    return unchanged


def with_argument(
    method: Callable[..., object], good: tuple[Any, ...], place: int
) -> Callable[[Any], object]:
    return lambda value: method(*good[:place], value, *good[place + 1 :])


# ---- MambaSlotAllocator


class Slots:
    """7 slots for 16 blocks: 1's is pinned, 2's findable, 4's unnamed, 3's reserved."""

    def __init__(self) -> None:
        self.host = FakeHost()
        self.slots = self.host.allocator(7, ms.MambaSlotAllocator)
        self.host.kv_block_allocator.register([1, 2], [11, 12])
        self.pinned, self.known, self.unnamed = self.slots.allocate_slots_batch([1, 2, 4])
        self.slots.register_block_hashes_batch([1, 2], [11, 12])
        self.slots.pin(self.pinned)
        (self.reserved,) = self.slots.reserve([3])
        self.free = self.slots.slots.free_slots[0]
        self.host.mamba_metadata.request_to_mamba_state_idx[3] = -1  # row 3 has no live slot
        self.slots.ssm_states.fill_(7)
        self.slots.conv_states.fill_(7)
        self.unchanged = unchanged_of(self.slots)


_pool = Slots()
_block, _slot, _row = bad.integer(0, 15), bad.integer(0, 6), bad.integer(0, 3)
_ssm, _conv = torch.zeros(SSM_SHAPE), torch.zeros(CONV_SHAPE)

SLOT_CALLS: list[tuple[str, tuple[Any, ...], int, Bad, str]] = [
    ("has_state", (0,), 0, _block, "block_id"),
    ("get_slot", (0,), 0, _block, "block_id"),
    ("reserve", ([5],), 0, bad.ids(0, 15, good=(5,)).also([1], [4], [3], [5, 5], [5, 1]), "block_ids"),
    (
        "commit",
        ([_pool.reserved],),
        0,
        bad.ids(0, 6, good=(_pool.reserved,)).also(
            [_pool.free], [_pool.known], [_pool.pinned], [_pool.unnamed], [_pool.reserved] * 2
        ),
        "slots",
    ),
    (
        "commit",
        ([_pool.reserved], [3]),
        1,
        bad.ids(0, 15).also([], [3, 4]).only(lambda value: value is None),
        "block_ids",
    ),
    (
        "release_reservation",
        ([_pool.reserved],),
        0,
        bad.ids(0, 6, good=(_pool.reserved,)).also(
            [_pool.free], [_pool.known], [_pool.pinned], [_pool.reserved] * 2
        ),
        "slots",
    ),
    ("pin", (_pool.known,), 0, _slot.also(_pool.free, _pool.reserved), "slot"),
    ("unpin", (_pool.pinned,), 0, _slot.also(_pool.free, _pool.reserved, _pool.known), "slot"),
    ("record_use", (_pool.known,), 0, _slot.also(_pool.free, _pool.reserved), "slot"),
    ("allocate_slots_batch", ([5],), 0, bad.ids(0, 15, good=(5,)).also([3], [5, 3]), "block_ids"),
    ("invalidate_block", (4,), 0, _block, "block_id"),
    ("on_kv_blocks_deregistered", ([4], {1}), 0, bad.ids(0, 15, good=(4,)), "block_ids_list"),
    # Not of blocks without a slot, nor whose state may still be read.
    ("store_from_tensors", (4, 0, _ssm, _conv), 0, _block.also(1, 2, 3, 5), "block_id|slot"),
    ("store_from_tensors", (4, 0, _ssm, _conv), 1, bad.integer(0, 1), "layer_idx"),
    ("store_from_tensors", (4, 0, _ssm, _conv), 2, bad.tensor(SSM_SHAPE), "ssm_state"),
    ("store_from_tensors", (4, 0, _ssm, _conv), 3, bad.tensor(CONV_SHAPE), "conv_state"),
    (
        "store_from_live_batch",
        ([_pool.reserved], [0]),
        0,
        bad.ids(0, 6).also([_pool.free], [_pool.pinned], [_pool.known], [_pool.reserved] * 2),
        "slots?|request_indices",
    ),
    (
        "store_from_live_batch",
        ([_pool.reserved], [0]),
        1,
        bad.ids(0, 3).also([], [0, 1], [3]),
        "request_indices|request_idx",
    ),
    ("restore_to_live", (0, 2), 0, _row.also(3), "request_idx"),
    ("restore_to_live", (0, 5), 0, _row, "request_idx"),
    ("restore_to_live", (0, 2), 1, _block, "block_id"),
    ("register_block_hashes_batch", ([4], [7]), 0, bad.ids(0, 15).also([5], [3]), "block_ids|hashes"),
    (
        "register_block_hashes_batch",
        ([4], [7]),
        1,
        bad.ids(-(2**63), MAX_HASH).also([], [7, 8]),
        "hashes",
    ),
]  # fmt: skip


@pytest.mark.disaster(number=12)
@pytest.mark.parametrize(
    ("method", "good", "place", "bad_values", "named"),
    SLOT_CALLS,
    ids=[f"{call[0]}-{call[2]}" for call in SLOT_CALLS],
)
def test_a_bad_call_of_the_slots(method: str, good: tuple[Any, ...], place: int, bad_values: Bad, named: str):
    pool = Slots()
    call = with_argument(getattr(pool.slots, method), good, place)
    refuse_all("MambaSlotAllocator", bad_values, call, f"({named})", pool.unchanged)


@pytest.mark.parametrize(
    "call",
    [
        ("reserve", list(range(5, 16))),
        ("allocate_slots_batch", list(range(4, 16))),
    ],
    ids=lambda call: call[0],
)
def test_more_slots_than_can_be_had(call: tuple[str, Any]):
    pool = Slots()
    refuse("MambaSlotAllocator", lambda: getattr(pool.slots, call[0])(call[1]), "", ms.MambaSlotCapacityError)
    pool.unchanged()


def test_a_pool_without_slots_refuses_every_slot():
    slots = FakeHost().allocator(0, ms.MambaSlotAllocator)
    for method in (slots.pin, slots.unpin, slots.record_use):
        refuse("MambaSlotAllocator", partial(method, 0), "slot")
    refuse("MambaSlotAllocator", lambda: slots.commit([0]), "slots")


SLOTS = {
    "max_slots": 4, "num_mamba_layers": 2, "conv_states_shape": CONV_SHAPE, "ssm_states_shape": SSM_SHAPE,
    "conv_states_dtype": torch.float32, "ssm_states_dtype": torch.float32,
}  # fmt: skip
SLOTS_ARGUMENTS = {
    "max_slots": bad.integer(0, INT32_MAX),
    "num_mamba_layers": bad.integer(0, INT32_MAX),
    "conv_states_shape": bad.shape(1).also((INT32_MAX,) * 3),
    "ssm_states_shape": bad.shape(1).also((INT32_MAX,) * 3),
    "conv_states_dtype": bad.dtype(),
    "ssm_states_dtype": bad.dtype(),
}


@pytest.mark.parametrize("name", SLOTS_ARGUMENTS)
def test_bad_sizes_of_the_slots(name: str):
    host = FakeHost()
    refuse_all(
        "MambaSlotAllocator",
        SLOTS_ARGUMENTS[name],
        lambda value: ms.MambaSlotAllocator(host, **SLOTS | {name: value}),
        name,
    )


def test_slots_are_made_for_a_host():
    refuse_all(
        "MambaSlotAllocator",
        bad.anything(),
        lambda value: ms.MambaSlotAllocator(value, **SLOTS),
        "context",
    )


HOST_ATTRIBUTES = {
    "kv_block_allocator": bad.anything(),
    "mamba_ssm_states": bad.anything(torch.Tensor).also(meta(2, 4, *SSM_SHAPE)),
    "prefix_caching_eviction_policy": bad.choice("lru", "value"),
}


@pytest.mark.parametrize("name", HOST_ATTRIBUTES)
def test_a_host_says_what_cannot_be(name: str):
    def construct(value: Any) -> None:
        host = FakeHost()
        setattr(host, name, value)
        host.allocator(4, ms.MambaSlotAllocator)

    refuse_all("MambaSlotAllocator", HOST_ATTRIBUTES[name], construct, rf"context(\.{name})?")


# ---- HostSlotAllocator

_plan = (FakeRequest(1, range(12)), 1, 0, 12, 0, [], 3)


@pytest.mark.parametrize(
    ("place", "bad_values", "named"),
    [
        (0, bad.anything().also(FakeRequest(1, 5)), "req"),
        (1, _row, "current_id"),
        (2, bad.integer(0), "skip_tokens"),
        (3, bad.integer(0).also(65, 2**40), "prefill_chunk_length"),
        (4, bad.integer(0), "num_matched_blocks"),
    ],
)
def test_a_bad_chunk_of_a_host(place: int, bad_values: Bad, named: str):
    host = FakeHost()
    slots = host.mcore_allocator(7)
    host.plan(slots, Chunk(FakeRequest(1, range(12)), 0, 0, 12), [5, 6, 7])
    call = with_argument(slots.compute_and_store_offsets, _plan, place)
    refuse_all("HostSlotAllocator", bad_values, call, f"({named})", unchanged_of(slots))


# ---- KVBlockAllocator


class Blocks:
    """12 blocks: 0, 1 registered and held, 2, 3 cached below 1, 4 held, the rest free."""

    def __init__(self) -> None:
        self.kv = ms.KVBlockAllocator(12)
        blocks = self.kv.allocate_memory_blocks(5)
        assert blocks == [0, 1, 2, 3, 4]
        self.kv.register_chain(b"salt", blocks[:4], [11, 12, 13, 14], [b"a", b"b", b"c", b"d"])
        self.kv.release_memory_blocks([2, 3])
        self.unchanged = unchanged_of(self.kv)


_held = bad.ids(0, 11, good=(4,))
_parent = bad.anything(bytes).also(-1, 12, 2, 4, 5)  # out of range, not held, not registered, free
_new = (1, [4], [15], [b"e"])
_any_of_three = "block_ids|block_ids, hashes and tokens"
_contents = (
    bad.anything(bytes).inside(lambda value: [value]).also([], [b"e", b"f"], None, 1, "e", b"e", [[b"e"]])
)
BLOCK_CALLS: list[tuple[str, tuple[Any, ...], int, Bad, str]] = [
    ("is_memory_available", (1, 0), 0, bad.integer(0), "num_blocks"),
    ("is_memory_available", (1, 0), 1, bad.integer(0), "potential_matched_count"),
    ("allocate_memory_blocks", (1,), 0, bad.integer(0), "num_blocks"),
    ("add_references", ([4],), 0, _held.also([5], [4, 5], [3], [3, 2]), "block_ids"),
    ("release_memory_blocks", ([4],), 0, _held.also([5], [4, 4], [2], [0], [4, 0]), "block_ids"),
    ("register_chain", _new, 0, _parent, "parent"),
    ("register_chain", _new, 1, bad.ids(0, 11).also([0], [2], [5], [4, 4], []), _any_of_three),
    ("register_chain", _new, 2, bad.ids(1, MAX_HASH).also([], [15, 16]), f"hashes|{_any_of_three}"),
    ("register_chain", _new, 3, _contents, f"tokens|{_any_of_three}"),
    ("evict_lru_blocks", (1,), 0, bad.integer(), "num_blocks"),
    ("observe_deregistration", (print,), 0, bad.anything().only(callable), "observer"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "good", "place", "bad_values", "named"),
    BLOCK_CALLS,
    ids=[f"{call[0]}-{call[2]}" for call in BLOCK_CALLS],
)
def test_a_bad_call_of_the_blocks(
    method: str, good: tuple[Any, ...], place: int, bad_values: Bad, named: str
):
    pool = Blocks()
    call = with_argument(getattr(pool.kv, method), good, place)
    refuse_all("KVBlockAllocator", bad_values, call, f"({named})", pool.unchanged)


@pytest.mark.parametrize("method", ["allocate_memory_blocks", "evict_lru_blocks"])
@pytest.mark.parametrize("count", [12, 2**31, 10**30, UNPRINTABLE], ids=["12", "2**31", "10**30", "10**5000"])
def test_more_blocks_than_can_be_had(method: str, count: int):
    pool = Blocks()
    refuse("KVBlockAllocator", lambda: getattr(pool.kv, method)(count), "", ms.KVBlockCapacityError)
    pool.unchanged()


@pytest.mark.parametrize(
    ("name", "bad_values"),
    [
        ("total_count", bad.integer(1, INT32_MAX)),
        ("enable_prefix_caching", bad.boolean()),
    ],
)
def test_a_bad_pool_of_blocks(name: str, bad_values: Bad):
    refuse_all(
        "KVBlockAllocator",
        bad_values,
        lambda value: ms.KVBlockAllocator(**{"total_count": 4} | {name: value}),
        name,
    )


# ---- PrefixCache

CACHE: dict[str, Any] = {"num_kv_blocks": 12, "num_slots": 4, "block_size_tokens": 8}
CACHE_ARGUMENTS = {
    "num_kv_blocks": bad.integer(1, INT32_MAX),
    "num_slots": bad.integer(0, INT32_MAX),
    "block_size_tokens": bad.integer(1, INT32_MAX),
    "eviction_policy": bad.choice("lru", "value"),
    "enabled": bad.boolean(),
}


@pytest.mark.parametrize("name", CACHE_ARGUMENTS)
@pytest.mark.parametrize("enabled", [True, False])
def test_a_bad_prefix_cache(name: str, enabled: bool):
    """Whether the cache is on makes no difference."""
    good = CACHE | {"enabled": enabled}
    refuse_all("PrefixCache", CACHE_ARGUMENTS[name], lambda value: PrefixCache(**good | {name: value}), name)
