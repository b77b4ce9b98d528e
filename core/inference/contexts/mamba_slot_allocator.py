"""The slot allocator that an engine with a paged KV cache of its own plugs in."""

from collections.abc import Sequence
from operator import countOf
from typing import Any

import torch
from torch import Tensor

from ...validation import (
    INT32_MAX,
    addressable,
    checked_integers,
    described,
    float_dtype,
    holds_data,
    integer,
    integers,
    ints_within,
    numbers,
    shown,
)
from ..kernels.state_copy import copy_states
from ..kernels.state_tensors import StateTensors
from .cache.eviction import PolicyChoice, checked_policy
from .cache.kv_block_allocator import MAX_HASH, KVBlockAllocator
from .cache.prefix_tree import PrefixTree
from .cache.state_slots import StateSlots


class _HostTree(PrefixTree):
    """The index of states over a host's own index of KV blocks, which are not registered here."""

    def __init__(self, num_blocks: int, host_kv: Any) -> None:
        super().__init__(num_blocks)
        self.host_kv = host_kv

    def hash_of(self, block: int) -> int:
        return int(self.host_kv.block_hashes[block])

    def keys_to(self, block: int) -> list[int]:
        """The hash of the block alone: a host does not say what precedes it."""
        return [self.hash_of(block)]


class MambaSlotAllocator:
    """A pool of durable state slots, which a host's context holds for its prefix cache.

    `allocate_slots_batch` returns slots that enter the maps at once; the caller fills them (`store_from_*`)
    before it registers a hash. `reserve` returns slots that no index contains until `commit`. The context
    must have a `kv_block_allocator` with a block count and `block_hashes`, and live states
    (`mamba_conv_states`, `mamba_ssm_states`, [layers, live slots, ...]). Where the KV allocator reports
    deregistered blocks (`observe_deregistration`, or megatron-core's `on_blocks_deregistered`), the
    constructor subscribes, so that a reused KV block never keeps the state of its former prefix. Copies from
    and to live states read `mamba_metadata.request_to_mamba_state_idx`. `prefix_caching_eviction_policy` is
    a name or an `EvictionPolicy`, by default "lru".

    Example: `MambaSlotAllocator(context, 64, 24, (4096, 4), (64, 64, 128), torch.bfloat16, torch.float32)`
    keeps 64 states of 24 layers.

    Attributes:
        hash_to_block_id: dict from prefix hash to the block whose slot holds the state after that prefix.
        conv_states, ssm_states [layers, max_slots, ...]: the durable states.
        slots: which slots are free, reserved, committed or pinned, and which is evicted next; its `counts`,
            `pins` and `num_available`, and `slots.tree.ghosts`, why states are gone.
    """

    def __init__(
        self,
        context: Any,
        max_slots: int,
        num_mamba_layers: int,
        conv_states_shape: tuple[int, ...],
        ssm_states_shape: tuple[int, ...],
        conv_states_dtype: torch.dtype,
        ssm_states_dtype: torch.dtype,
    ) -> None:
        """Shapes are those of one layer's state. ValueError for a size out of range, or a wrong context."""
        self.context = context
        self.max_slots = integer("max_slots", max_slots, 0, INT32_MAX)
        self.num_mamba_layers = integer("num_mamba_layers", num_mamba_layers, 0, INT32_MAX)
        self._conv_shape = tuple(integers("conv_states_shape", conv_states_shape, 1, INT32_MAX))
        self._ssm_shape = tuple(integers("ssm_states_shape", ssm_states_shape, 1, INT32_MAX))
        float_dtype("conv_states_dtype", conv_states_dtype)
        float_dtype("ssm_states_dtype", ssm_states_dtype)
        rows = (self.num_mamba_layers, self.max_slots)
        addressable("conv_states_shape", self._conv_shape, (*rows, *self._conv_shape), conv_states_dtype)
        addressable("ssm_states_shape", self._ssm_shape, (*rows, *self._ssm_shape), ssm_states_dtype)
        self._dtypes = conv_states_dtype, ssm_states_dtype
        self._num_blocks = _block_count(context)
        policy = checked_policy("context.prefix_caching_eviction_policy", self._policy())
        self._durable = self._new_states(self.max_slots, self._device())
        kv = context.kv_block_allocator
        tree = kv.tree if isinstance(kv, KVBlockAllocator) else _HostTree(self._num_blocks, kv)
        self.slots = StateSlots(self.max_slots, policy, tree)
        self.hash_to_block_id = tree.hash_to_block_id
        if isinstance(kv, KVBlockAllocator):
            kv.observe_deregistration(self.on_kv_blocks_deregistered)
        elif hasattr(kv, "on_blocks_deregistered"):
            kv.on_blocks_deregistered = self.on_kv_blocks_deregistered

    def _device(self) -> torch.device:
        """Where the live states are."""
        return _device_of_live_states(self.context)

    def _hashes_of(self, blocks: Sequence[int]) -> list[int]:
        kv = self.context.kv_block_allocator
        if isinstance(kv, KVBlockAllocator):
            return [kv.tree.hash_of(block) for block in blocks]
        listed = torch.tensor(blocks, dtype=torch.int64, device="cpu")
        return kv.block_hashes[listed].tolist()  # type: ignore[no-any-return]

    def _policy(self) -> PolicyChoice:
        """The eviction policy that the host states."""
        policy: PolicyChoice = getattr(self.context, "prefix_caching_eviction_policy", "lru")
        return policy

    @torch.inference_mode(False)  # inference tensors cannot be written outside of that mode
    def _new_states(self, num_slots: int, device: torch.device) -> StateTensors:
        rows = (self.num_mamba_layers, num_slots)
        conv_dtype, ssm_dtype = self._dtypes
        return StateTensors(
            torch.zeros(*rows, *self._conv_shape, dtype=conv_dtype, device=device),
            torch.zeros(*rows, *self._ssm_shape, dtype=ssm_dtype, device=device),
        )

    @property
    def conv_states(self) -> Tensor:
        return self._durable.conv

    @property
    def ssm_states(self) -> Tensor:
        return self._durable.ssm

    def _live_states(self) -> StateTensors:
        return StateTensors(self.context.mamba_conv_states, self.context.mamba_ssm_states)

    # ---- lookup

    @property
    def free_count(self) -> int:
        return len(self.slots.free)

    def has_state(self, block_id: int) -> bool:
        """Whether a committed slot holds the state after block `block_id`."""
        if type(block_id) is int and 0 <= block_id < self._num_blocks:
            return block_id in self.slots.tree.slot_by_block
        return self.get_slot(block_id) >= 0

    def get_slot(self, block_id: int) -> int:
        """The committed slot of `block_id`, or -1."""
        return self.slots.tree.slot_of(integer("block_id", block_id, 0, self._num_blocks - 1))

    # ---- reservations

    def reserve(self, block_ids: Sequence[int]) -> list[int]:
        """See `StateSlots.reserve`."""
        blocks = self._checked_blocks(block_ids)
        taken = {*self.slots.reserved.values(), *self.slots.tree.slot_by_block}
        if len(set(blocks)) < len(blocks) or not taken.isdisjoint(blocks):
            raise ValueError(f"block_ids is {blocks}; accepted: distinct blocks without state or reservation")
        return self.slots.reserve(blocks)

    def commit(self, slots: Sequence[int], block_ids: Sequence[int] | None = None) -> list[int]:
        """See `StateSlots.commit`."""
        slots = self._checked_reserved(slots)
        blocks = None if block_ids is None else self._checked_blocks(block_ids)
        if blocks is not None and len(blocks) != len(slots):
            raise ValueError(
                f"block_ids has {len(blocks)} entries; accepted: one for each of the {len(slots)} slots"
            )
        return self.slots.commit(slots, blocks)

    def release_reservation(self, slots: Sequence[int]) -> None:
        """See `StateSlots.release`."""
        self.slots.release(self._checked_reserved(slots))

    def pin(self, slot: int) -> None:
        """See `StateSlots.pin`."""
        self.slots.pin(self._checked_committed(slot))

    def unpin(self, slot: int) -> None:
        slot = self._checked_slot(slot)
        if slot not in self.slots.pins:
            raise ValueError(f"slot is {slot}; accepted: a pinned slot")
        self.slots.unpin(slot)

    def note_use(self, slot: int) -> None:
        """See `StateSlots.note_use`."""
        self.slots.note_use(self._checked_committed(slot))

    # ---- slots that enter the maps at once, and invalidation

    def allocate_slots_batch(self, block_ids: list[int]) -> list[int]:
        """Commit a slot, without a hash, for each block; a block with a slot, or named twice, keeps one slot.

        Raises:
            MambaSlotCapacityError: too few slots can be freed; nothing is changed.
        """
        blocks = self._checked_blocks(block_ids)
        if self.slots.reserved and (both := set(self.slots.reserved.values()).intersection(blocks)):
            raise ValueError(f"block_ids names {min(both)}; accepted: blocks that no reservation will commit")
        return self.slots.allocate(blocks)

    def invalidate_block(self, block_id: int) -> None:
        """Free the slot of `block_id`, if any, and drop its index key."""
        self.slots.forget([integer("block_id", block_id, 0, self._num_blocks - 1)])

    def on_kv_blocks_deregistered(self, block_ids_list: list[int], hashes_to_delete: set[int]) -> None:
        """Free the slot of every listed block, at every deregistration; `hashes_to_delete` is not needed."""
        listed = self._checked_blocks(block_ids_list, "block_ids_list")
        self.slots.forget(listed, with_blocks=True)

    def register_block_hashes_batch(self, block_ids: list[int], hashes: list[int]) -> None:
        """Make the states of blocks findable by prefix hash; hashes <= 0 are skipped.

        A hash in use keeps finding its older state.
        """
        keys = hashes if ints_within(hashes, 1, MAX_HASH) else integers("hashes", hashes, ~MAX_HASH, MAX_HASH)
        # Blocks with a slot are in range: the look-up below says so.
        exact = type(block_ids) is list and countOf(map(type, block_ids), int) == len(block_ids)
        blocks = block_ids if exact and keys is hashes else self._checked_blocks(block_ids)
        if len(blocks) != len(keys):
            raise ValueError(f"hashes has {len(keys)} entries; accepted: {len(blocks)}, as block_ids")
        if keys is not hashes:  # some may be <= 0
            named = [(block, key) for block, key in zip(blocks, keys, strict=True) if key > 0]
            blocks, keys = [block for block, _ in named], [key for _, key in named]
        slot_by_block = self.slots.tree.slot_by_block
        try:
            slots = [slot_by_block[block] for block in blocks]
        except KeyError:
            raise ValueError(f"block_ids is {shown(block_ids)}; accepted: blocks with a slot") from None
        self.slots.name(blocks, slots, keys)

    # ---- states

    def store_from_tensors(
        self, block_id: int, layer_idx: int, ssm_state: Tensor, conv_state: Tensor
    ) -> None:
        """Write one layer's state into the slot of `block_id`, without synchronising."""
        slot = self.get_slot(block_id)
        if slot < 0:
            raise ValueError(f"block_id is {block_id}; accepted: a block with a slot")
        self._check_writable(slot)
        integer("layer_idx", layer_idx, 0, self.num_mamba_layers - 1)
        numbers("ssm_state", ssm_state, self._ssm_shape)
        numbers("conv_state", conv_state, self._conv_shape)
        self.ssm_states[layer_idx, slot].copy_(ssm_state)
        self.conv_states[layer_idx, slot].copy_(conv_state)

    def store_from_live_batch(self, slots: list[int], request_indices: list[int]) -> None:
        """Copy the live states of context requests into slots, all layers, in one batched copy."""
        slots = self._checked_slots(slots)
        request_indices = integers("request_indices", request_indices, 0)
        if len(slots) != len(request_indices):
            raise ValueError(
                f"request_indices has {len(request_indices)} entries; accepted: {len(slots)}, as slots"
            )
        if len(set(slots)) < len(slots):
            raise ValueError(f"slots is {slots}; accepted: distinct slots")
        for slot in slots:
            self._check_writable(slot)
        live = [self._live_index(request) for request in request_indices]
        copy_states(self._live_states(), live, self._durable, slots)

    def restore_to_live(self, request_idx: int, block_id: int) -> bool:
        """Copy the state of `block_id` into the request's live slot, which counts as a use of the state.

        Returns:
            Whether the block has a state; False, with nothing done, where it has none.
        """
        slot = self.get_slot(block_id)
        rows = self.context.mamba_metadata.request_to_mamba_state_idx
        integer("request_idx", request_idx, 0, len(rows) - 1)
        if slot < 0:
            return False
        live = self._live_index(request_idx)
        self.slots.note_use(slot)
        copy_states(self._durable, [slot], self._live_states(), [live])
        return True

    def _live_index(self, request_idx: int) -> int:
        rows = self.context.mamba_metadata.request_to_mamba_state_idx
        index = int(rows[integer("request_idx", request_idx, 0, len(rows) - 1)])
        if index < 0:
            raise ValueError(f"request_idx is {request_idx}; accepted: a request with a live slot")
        return index

    def _check_writable(self, slot: int) -> None:
        """ValueError for a slot whose state a request can find or is reading, and for a free slot."""
        slots = self.slots
        block = slots.tree.block_of(slot)
        unowned = block < 0 and slot not in slots.reserved
        if slot in slots.pins or unowned or slots.tree.key_of(block) > 0:
            raise ValueError(f"slot is {slot}; accepted: one reserved, or allocated and not registered yet")

    # ---- reset and checks

    def reset(self) -> None:
        """Drop every state, reservation, pin and ghost."""
        self.slots.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError where slots, blocks and KV hashes contradict each other; O(blocks + slots)."""
        self.slots.check_integrity()

    def _checked_blocks(self, block_ids: Sequence[int], name: str = "block_ids") -> list[int]:
        return checked_integers(name, block_ids, 0, self._num_blocks - 1)

    def _checked_slot(self, slot: int) -> int:
        return integer("slot", slot, 0, self.max_slots - 1)

    def _checked_slots(self, slots: Sequence[int]) -> list[int]:
        return integers("slots", slots, 0, self.max_slots - 1)

    def _checked_reserved(self, slots: Sequence[int]) -> list[int]:
        slots, pins = self._checked_slots(slots), self.slots.pins
        reserved = all(slot in self.slots.reserved and slot not in pins for slot in slots)
        if len(set(slots)) < len(slots) or not reserved:
            raise ValueError(f"slots is {list(slots)}; accepted: distinct reserved slots")
        return slots

    def _checked_committed(self, slot: int) -> int:
        if self.slots.tree.block_of(self._checked_slot(slot)) < 0:
            raise ValueError(f"slot is {slot}; accepted: a committed slot")
        return int(slot)


def _device_of_live_states(context: Any) -> torch.device:
    live = getattr(context, "mamba_ssm_states", None)
    if not isinstance(live, Tensor) or not holds_data(live):
        raise ValueError(
            f"context.mamba_ssm_states {described(live)}; accepted: the live states, a tensor that holds data"
        )
    return live.device


def _block_count(context: object) -> int:
    """The number of KV blocks of a host; a ValueError for an object that is no host."""
    kv = getattr(context, "kv_block_allocator", None)
    if kv is None:
        raise ValueError(f"context is {shown(context)}; accepted: a host that has a kv_block_allocator")
    name = next((name for name in ("total_count", "pool_size") if hasattr(kv, name)), "")
    if not name or not (isinstance(kv, KVBlockAllocator) or hasattr(kv, "block_hashes")):
        raise ValueError(
            f"context.kv_block_allocator is {shown(kv)}; accepted: what has block_hashes, and total_count or "
            "pool_size"
        )
    return integer(f"context.kv_block_allocator.{name}", getattr(kv, name), 0, INT32_MAX)
