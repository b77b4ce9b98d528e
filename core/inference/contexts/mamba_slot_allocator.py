"""Durable slots: which block's state each one holds, who may write it, and which goes when one is needed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import MambaSlotCapacityError
from ...tensor_validation import addressable, float_dtype, numbers
from ...validation import (
    INT32_MAX,
    all_ints,
    checked_integers,
    described,
    holds_data,
    integer,
    integers,
    ints_within,
    one_of,
    shown,
)
from ..kernels.state_copy import copy_states
from ..kernels.state_tensors import StateTensors
from ..policies.ghost_list import GhostList
from ..policies.slot_eviction import EVICTION_POLICIES, LRUEviction, RefZeroEviction, SlotEvictionPolicy
from .intermediate_states import MAX_INTERMEDIATE_OFFSETS_PER_REQUEST, IntermediateStates
from .kv_block_allocator import MAX_HASH
from .state_index import StateIndex
from .state_pool import StatePool

__all__ = ["MAX_INTERMEDIATE_OFFSETS_PER_REQUEST", "MambaSlotAllocator"]


class MambaSlotAllocator:
    """A pool of durable state slots for the prefix cache of a hybrid model.

    A slot is FREE, RESERVED or COMMITTED:

        FREE -- reserve --> RESERVED -- commit --> COMMITTED (its block is in the maps)
          ^                    |                       |
          +- release_reservation / evict, invalidate, deregistration

    A reserved slot is written by one step and read by nobody; a committed one is immutable, and a pinned
    one is not evicted. `allocate_slots_batch` is the host's shorthand for slots that enter the maps at once
    and that the caller fills (`store_from_*`) before registering a hash.

    The constructor and the names of its upper half are megatron-core's. From its host it needs
    `kv_block_allocator` (`block_hashes` and a block count) and, where they exist, uses `state_pool`,
    `max_requests`, `mamba_metadata`, the live states and the step's batch dimensions.

    Attributes (for hosts to read):
        block_to_slot [blocks] int32, slot_to_block [max_slots] int32, free_slots [max_slots] int32 (the
        first `free_count` are free): CPU tensors, brought up to date when the attribute is read, in
        O(blocks + slots) where something changed. Each stays one tensor for ever, but what a host keeps
        shows the last read of the attribute: index `allocator.block_to_slot[...]` anew, as stock does.
        hash_to_block_id: dict from prefix hash to the block whose slot holds the state after that prefix.
        conv_states, ssm_states [layers, max_slots, ...]: the durable states.
        intermediate_conv_out, intermediate_ssm_out [layers, max_intermediate_count, ...]: scratch that
        kernels without source/destination indices write.
        ghosts: hashes whose state was evicted, or was not taken for want of a slot.
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
        self.context = context
        self.max_slots = integer("max_slots", max_slots, 0, INT32_MAX)
        self.num_mamba_layers = integer("num_mamba_layers", num_mamba_layers, 0, INT32_MAX)
        conv_shape = tuple(integers("conv_states_shape", conv_states_shape, 1, INT32_MAX))
        ssm_shape = tuple(integers("ssm_states_shape", ssm_states_shape, 1, INT32_MAX))
        float_dtype("conv_states_dtype", conv_states_dtype)
        float_dtype("ssm_states_dtype", ssm_states_dtype)
        slots = (self.num_mamba_layers, self.max_slots)
        addressable("conv_states_shape", conv_shape, (*slots, *conv_shape), conv_states_dtype)
        addressable("ssm_states_shape", ssm_shape, (*slots, *ssm_shape), ssm_states_dtype)
        self.num_blocks = _block_count(context)

        self._pool: StatePool | None = getattr(context, "state_pool", None)
        if self._pool is not None:
            _check_pool(
                self._pool,
                [((*slots, *conv_shape), conv_states_dtype), ((*slots, *ssm_shape), ssm_states_dtype)],
            )
        else:
            live = getattr(context, "mamba_ssm_states", None)
            if not isinstance(live, Tensor) or not holds_data(live):
                raise ValueError(
                    f"context.mamba_ssm_states {described(live)}; accepted: the live states, a tensor that "
                    "holds data"
                )
            device = live.device
            self._own_conv = torch.zeros(*slots, *conv_shape, dtype=conv_states_dtype, device=device)
            self._own_ssm = torch.zeros(*slots, *ssm_shape, dtype=ssm_states_dtype, device=device)

        self._index = StateIndex(self.num_blocks, self.max_slots)
        self.hash_to_block_id = self._index.hash_to_block_id
        self._free = list(range(self.max_slots))
        self._free_slots = torch.arange(self.max_slots, dtype=torch.int32)
        self._free_mirrored = True  # `_free_slots` is up to date
        self.ghosts = GhostList(8 * self.max_slots)
        self._reserved: dict[int, int] = {}  # slot -> the block it is reserved for, -1 once that block left
        self._pins: dict[int, int] = {}
        self._used: set[int] = set()  # slots some request resumed from
        self._eviction = self._make_policy()
        self.committed_total = 0
        self.evicted_total = 0

        self._intermediate = IntermediateStates(self, conv_states_dtype, ssm_states_dtype)
        self.max_intermediate_count = self._intermediate.max_count
        self.intermediate_ssm_out = self._intermediate.ssm_out
        self.intermediate_conv_out = self._intermediate.conv_out
        self._intermediate_offsets_cpu = self._intermediate.offsets_cpu
        self._intermediate_counts_cpu = self._intermediate.counts_cpu
        self._intermediate_block_ids_cpu = self._intermediate.block_ids_cpu
        self._eos_cache_block_id_cpu = self._intermediate.eos_block_id_cpu

    def _policy(self) -> object:
        """The eviction policy by name, or as an enumeration of the host's."""
        return getattr(self.context, "prefix_caching_eviction_policy", "lru")

    def _make_policy(self) -> SlotEvictionPolicy:
        policy = self._policy()
        policy = getattr(policy, "value", policy)
        policy = policy.lower() if isinstance(policy, str) else policy
        name = one_of("context.prefix_caching_eviction_policy", policy, EVICTION_POLICIES)
        return RefZeroEviction() if name == "ref_zero" else LRUEviction()

    @property
    def conv_states(self) -> Tensor:
        """[layers, max_slots, *conv_states_shape]: the durable part of the host's pool, or our own tensor."""
        return self._own_conv if self._pool is None else self._pool.durable_conv_states

    @property
    def ssm_states(self) -> Tensor:
        """[layers, max_slots, *ssm_states_shape]: likewise."""
        return self._own_ssm if self._pool is None else self._pool.durable_ssm_states

    # ---- lookup

    @property
    def block_to_slot(self) -> Tensor:
        return self._index.block_to_slot

    @property
    def slot_to_block(self) -> Tensor:
        return self._index.slot_to_block

    @property
    def free_slots(self) -> Tensor:
        if not self._free_mirrored:
            self._free_slots[: self.free_count] = torch.tensor(self._free, dtype=torch.int32)
            self._free_mirrored = True
        return self._free_slots

    @property
    def free_count(self) -> int:
        return len(self._free)

    def has_state(self, block_id: int) -> bool:
        """Whether a committed slot holds the state after block `block_id`."""
        if type(block_id) is int and 0 <= block_id < self.num_blocks:
            return block_id in self._index.slot_by_block
        return self.get_slot(block_id) >= 0

    def get_slot(self, block_id: int) -> int:
        """The committed slot of `block_id`, or -1."""
        return self._index.slot_of(integer("block_id", block_id, 0, self.num_blocks - 1))

    def is_reserved(self, slot: int) -> bool:
        """Whether a step under way may write `slot`."""
        slot = integer("slot", slot, 0, self.max_slots - 1)
        return slot in self._reserved and slot not in self._pins

    @property
    def reserved_blocks(self) -> set[int]:
        """The blocks whose states a step under way will store."""
        return set(self._reserved.values()) - {-1}

    @property
    def reserved_count(self) -> int:
        return len(self._reserved)

    @property
    def committed_count(self) -> int:
        return len(self._index)

    @property
    def departures(self) -> int:
        """States that have left; a slot looked up before another departure may hold another state."""
        return self._index.departures

    @property
    def slots_by_use(self) -> list[int]:
        """The committed slots, the next to be evicted first; pinned ones are among them."""
        return self._eviction.victims(self.max_slots, lambda slot: True)

    @property
    def available_count(self) -> int:
        """Slots that `reserve` could hand out: free ones and unpinned committed ones."""
        pinned = sum(1 for slot in self._pins if slot not in self._reserved)
        return self.free_count + len(self._index) - pinned

    # ---- reservations: how our own host stores states

    def reserve(self, block_ids: Sequence[int]) -> list[int]:
        """Take one slot for the state of each block, evicting unpinned states if it must.

        Enters no map. Blocks are distinct and have neither a state nor a reservation (ValueError). Raises
        MambaSlotCapacityError with nothing changed.
        """
        blocks = self._checked(block_ids)
        taken = self.reserved_blocks
        for i, block in enumerate(blocks):
            if block in self._index or block in taken:
                raise ValueError(
                    f"block_ids[{i}] is {block}; accepted: distinct blocks without state or reservation"
                )
            taken.add(block)
        slots = self._take_slots(len(blocks), keep=())
        self._reserved.update(zip(slots, blocks, strict=True))
        return slots

    def commit(self, slots: Sequence[int], block_ids: Sequence[int] | None = None) -> list[int]:
        """Make reserved, written slots findable as the states of `block_ids` (default: as reserved).

        Returns for each the committed slot that now holds the block's state: this one, or an earlier one
        (ours is then freed; both hold the state after the same tokens), or -1 where the block is not
        registered in the KV index, so that nobody could find it (freed). Reads `block_hashes`.
        """
        slots = integers("slots", slots, 0, self.max_slots - 1)
        self._check_reserved(slots)
        blocks = [self._reserved[slot] for slot in slots] if block_ids is None else self._checked(block_ids)
        if len(blocks) != len(slots):
            raise ValueError(
                f"block_ids has {len(blocks)} entries; accepted: one for each of the {len(slots)} slots"
            )
        results = []
        for slot, block in zip(slots, blocks, strict=True):
            # Where its block was deregistered since, the same id may mean another prefix by now.
            gone = self._reserved.pop(slot) < 0
            key = -1 if gone or block < 0 else self._kv_hash(block)
            if key > 0 and block not in self._index:
                self._enter([block], [slot])
                self._name([block], [slot], [key])
            else:
                self._push_free([slot])
            results.append(-1 if gone else self._index.slot_of(block))
        return results

    def release_reservation(self, slots: Sequence[int]) -> None:
        """Free reserved slots that were not, or not usefully, written."""
        slots = integers("slots", slots, 0, self.max_slots - 1)
        self._check_reserved(slots)
        for slot in slots:
            del self._reserved[slot]
        self._push_free(slots)

    def pin(self, slot: int) -> None:
        """Keep a committed slot from eviction until `unpin`; pins nest."""
        self._check_committed(slot)
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        if integer("slot", slot, 0, self.max_slots - 1) not in self._pins:
            raise ValueError(f"slot is {slot}; accepted: a pinned slot")
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot in self._reserved:  # its block left while it was being read
                del self._reserved[slot]
                self._push_free([slot])

    def note_use(self, slot: int) -> None:
        """A request resumes from this committed slot, or an import brought its state once more.

        Nothing else refreshes its recency.
        """
        self._check_committed(slot)
        self._eviction.use(slot)
        self._used.add(slot)

    def was_used(self, slot: int) -> bool:
        """Whether `note_use` was ever called of what this slot holds now."""
        return integer("slot", slot, 0, self.max_slots - 1) in self._used

    @property
    def pins(self) -> dict[int, int]:
        """Pinned slots and how often each is pinned."""
        return dict(self._pins)

    # ---- allocation and eviction under megatron-core's names

    def allocate_slots_batch(self, block_ids: list[int]) -> list[int]:
        """A slot for each block, evicting where needed; a block that has one, or comes twice, keeps one.

        The maps change at once; the caller fills the slots. Raises MambaSlotCapacityError with nothing
        changed.
        """
        blocks = self._checked(block_ids)
        reserved = self.reserved_blocks.intersection(blocks) if self._reserved else None
        if reserved:
            raise ValueError(
                f"block_ids names {min(reserved)}; accepted: blocks that no reservation will commit"
            )
        slot_by_block = self._index.slot_by_block
        if slot_by_block.keys().isdisjoint(blocks) and len(set(blocks)) == len(blocks):
            slots = self._take_slots(len(blocks), keep=())
            self._enter(blocks, slots)
            return slots
        new = [block for block in dict.fromkeys(blocks) if block not in slot_by_block]
        keep = [slot_by_block[block] for block in blocks if block in slot_by_block]
        self._enter(new, self._take_slots(len(new), keep))
        return [slot_by_block[block] for block in blocks]

    def _evict_lru_slots_batch(self, num_needed: int) -> list[int]:
        """Evict states; the caller owns the returned slots, as reserved ones, until `release_reservation`."""
        slots = self._evict(integer("num_needed", num_needed, 0), keep=())
        self._reserved.update(dict.fromkeys(slots, -1))
        return slots

    def _take_slots(self, count: int, keep: Sequence[int]) -> list[int]:
        from_free = min(count, len(self._free))
        evicted = self._evict(count - from_free, keep, free=from_free)
        if not from_free:
            return evicted
        cut = len(self._free) - from_free
        taken = self._free[cut:]
        del self._free[cut:]
        self._free_mirrored = False
        return taken + evicted

    def _evict(self, count: int, keep: Sequence[int], free: int = 0) -> list[int]:
        if count == 0:
            return []
        kept = self._pins.keys() | keep
        victims = self._eviction.victims(count, lambda slot: slot not in kept)
        if len(victims) < count:
            raise MambaSlotCapacityError(count + free, len(victims) + free)
        blocks = self._index.blocks_of(victims)
        self.ghosts.add_all(self._index.keys_of(victims), "evicted")
        self._leave(blocks)
        self._tell_kv(blocks)
        self.evicted_total += len(victims)
        return victims

    def drop_state(self, block_id: int) -> bool:
        """Free the slot of a state that its owner wants no longer; False, and nothing done, while pinned.

        No eviction: it is not counted as one, and leaves no ghost.
        """
        if self.get_slot(block_id) in self._pins:
            return False
        self.invalidate_block(block_id)
        return True

    # ---- invalidation

    def invalidate_block(self, block_id: int) -> None:
        """Free the slot of `block_id`, if any, and drop its index key."""
        self._invalidate([integer("block_id", block_id, 0, self.num_blocks - 1)])

    def _invalidate_blocks_batch(self, block_ids_list: list[int]) -> None:
        self._invalidate(self._checked(block_ids_list, "block_ids_list"))

    def _invalidate(self, blocks: list[int]) -> None:
        slots = self._leave(blocks)
        if self._pins and not self._pins.keys().isdisjoint(slots):
            pinned = [slot for slot in slots if slot in self._pins]
            self._reserved.update(dict.fromkeys(pinned, -1))  # still being read: free when unpinned
            slots = [slot for slot in slots if slot not in self._pins]
        self._push_free(slots)
        self._tell_kv(blocks)

    def on_kv_blocks_deregistered(self, block_ids_list: list[int], hashes_to_delete: set[int]) -> None:
        """Free the slot of every listed block, with a registered hash or without.

        `hashes_to_delete` is not needed: the keys are remembered here, because newer hosts call after
        clearing `block_hashes`.
        """
        listed = self._checked(block_ids_list, "block_ids_list")
        self._invalidate(listed)
        if self._reserved:
            gone = set(listed)
            self._reserved = {slot: -1 if block in gone else block for slot, block in self._reserved.items()}

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
        numbers("ssm_state", ssm_state, self.ssm_states.shape[2:])
        numbers("conv_state", conv_state, self.conv_states.shape[2:])
        self.ssm_states[layer_idx, slot].copy_(ssm_state)
        self.conv_states[layer_idx, slot].copy_(conv_state)

    def store_from_live_batch(self, slots: list[int], request_indices: list[int]) -> None:
        """Copy the live states of context requests into slots, all layers, in one batched copy."""
        slots = integers("slots", slots, 0, self.max_slots - 1)
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
        copy_states(self._live_states(), live, self._durable_states(), slots)

    def restore_to_live(self, request_idx: int, block_id: int) -> bool:
        """Copy the state of `block_id` into the request's live slot; False, and nothing done, without one.

        Counts as a use of the state.
        """
        slot = self.get_slot(block_id)
        rows = self.context.mamba_metadata.request_to_mamba_state_idx
        integer("request_idx", request_idx, 0, len(rows) - 1)
        if slot < 0:
            return False
        live = self._live_index(request_idx)
        self.note_use(slot)
        copy_states(self._durable_states(), [slot], self._live_states(), [live])
        return True

    def _live_index(self, request_idx: int) -> int:
        rows = self.context.mamba_metadata.request_to_mamba_state_idx
        index = int(rows[integer("request_idx", request_idx, 0, len(rows) - 1)])
        if index < 0:
            raise ValueError(f"request_idx is {request_idx}; accepted: a request with a live slot")
        return index

    def _live_states(self) -> StateTensors:
        return StateTensors(self.context.mamba_conv_states, self.context.mamba_ssm_states)

    def _durable_states(self) -> StateTensors:
        return StateTensors(self.conv_states, self.ssm_states)

    # ---- hashes

    def register_block_hashes_batch(self, block_ids: list[int], hashes: list[int]) -> None:
        """Make the states of blocks findable by prefix hash; hashes <= 0 are skipped.

        A hash that names another block's state already keeps naming it.
        """
        blocks = block_ids if all_ints(block_ids) else self._checked(block_ids)
        skips = not ints_within(hashes, 1, MAX_HASH)
        keys = integers("hashes", hashes, -MAX_HASH - 1, MAX_HASH) if skips else hashes
        if len(blocks) != len(keys):
            raise ValueError(f"hashes has {len(keys)} entries; accepted: {len(blocks)}, as block_ids")
        if skips:
            wanted = [(block, key) for block, key in zip(blocks, keys, strict=True) if key > 0]
            blocks, keys = [block for block, _ in wanted], [key for _, key in wanted]
        try:
            slots = self._index.slots_of(blocks)
        except KeyError:
            raise ValueError(
                f"block_ids is {self._checked(block_ids)}; accepted: blocks with a slot"
            ) from None
        self._name(blocks, slots, keys)

    # ---- intermediate states of hosts whose kernels write scratch

    @property
    def _has_intermediates(self) -> bool:
        return self._intermediate.pending

    def compute_and_store_offsets(
        self,
        req: Any,
        current_id: int,
        skip_tokens: int,
        prefill_chunk_length: int,
        num_matched_blocks: int,
        matched_block_ids: list[int],
        overall_required_blocks: int,
    ) -> None:
        """Plan this prefill chunk's checkpoints; see `IntermediateStates.plan`."""
        self._intermediate.plan(req, current_id, skip_tokens, prefill_chunk_length, num_matched_blocks)

    def get_intermediate_cpu_data(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Offsets [prefills, width] and counts [prefills], int32 on the CPU, or (None, None)."""
        return self._intermediate.step_rows()

    def get_intermediate_gpu_data(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """The same on the states' device (megatron-core 0.17)."""
        offsets, counts = self._intermediate.step_rows()
        if offsets is None or counts is None:
            return None, None
        device = self.ssm_states.device
        return offsets.to(device, non_blocking=True), counts.to(device, non_blocking=True)

    def transfer_intermediate_to_gpu(
        self, prefill_start: int, prefill_count: int
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Rows [prefill_start, +prefill_count) of offsets and counts in fixed device buffers."""
        return self._intermediate.transfer(prefill_start, prefill_count)

    def commit_intermediate_states(self) -> None:
        """Copy what this step's kernels wrote to scratch, and states at chunk ends, into durable slots.

        After the forward or the graph replay, once a step. Two batched copies; a full pool costs states.
        """
        self._intermediate.commit()

    @property
    def dropped_checkpoints(self) -> int:
        """Planned boundaries that this host's offset rows or scratch had no room for."""
        return self._intermediate.dropped

    def _collect_commit_data(self) -> tuple[list[int], list[int], list[int], list[int], list[int]] | None:
        return self._intermediate.collect()

    def _copy_intermediate_to_cache(self, src_offsets: list[int], slots: list[int]) -> None:
        """Copy scratch states to slots: both tensors, all layers, batched."""
        scratch = StateTensors(self.intermediate_conv_out, self.intermediate_ssm_out)
        copy_states(scratch, src_offsets, self._durable_states(), slots)

    def _clear_intermediate_state(self) -> None:
        self._intermediate.clear()

    # ---- reset and checks

    def reset(self) -> None:
        """Forget every state, reservation, pin, pending checkpoint and ghost, and zero the scratch."""
        self._free = list(range(self.max_slots))
        self._free_mirrored = False
        for part in (self._index, self.ghosts, self._reserved, self._pins, self._used, self._eviction):
            part.clear()
        self._intermediate.reset()

    def _checked(self, block_ids: Sequence[int], name: str = "block_ids") -> list[int]:
        return checked_integers(name, block_ids, 0, self.num_blocks - 1)

    def _check_committed(self, slot: int) -> None:
        if self._index.block_of(integer("slot", slot, 0, self.max_slots - 1)) < 0:
            raise ValueError(f"slot is {slot}; accepted: a committed slot")

    def _check_writable(self, slot: int) -> None:
        """A slot may be written while reserved, or while no request can find or is reading what it holds."""
        block = self._index.block_of(slot)
        if slot in self._pins or (block < 0 and slot not in self._reserved) or self._index.key_of(block) > 0:
            raise ValueError(f"slot is {slot}; accepted: one reserved, or allocated and not registered yet")

    def _check_reserved(self, slots: list[int]) -> None:
        if len(set(slots)) < len(slots) or not all(map(self.is_reserved, slots)):
            raise ValueError(f"slots is {slots}; accepted: distinct reserved slots")

    def _enter(self, blocks: list[int], slots: list[int]) -> None:
        self._index.enter(blocks, slots)
        self._eviction.insert(*slots)
        self.committed_total += len(blocks)
        self._tell_kv(blocks)

    def _name(self, blocks: list[int], slots: list[int], keys: list[int]) -> None:
        self._index.name(blocks, slots, keys)
        self.ghosts.discard_all(keys)

    def _leave(self, blocks: list[int]) -> list[int]:
        slots = self._index.leave(blocks)
        self._eviction.remove(*slots)
        if self._used:
            self._used.difference_update(slots)
        return slots

    def _push_free(self, slots: Sequence[int]) -> None:
        self._free.extend(slots)
        self._free_mirrored = False

    def _kv_hash(self, block: int) -> int:
        """The block's prefix hash in the KV index, or -1."""
        kv = self.context.kv_block_allocator
        hash_of = getattr(kv, "hash_of", None)  # ours, whose tensors are brought up to date when read
        return int(kv.block_hashes[block] if hash_of is None else hash_of(block))

    def _tell_kv(self, blocks: list[int]) -> None:
        kv = self.context.kv_block_allocator
        note = getattr(kv, "note_state_changed", None)
        if note is None:
            return
        leaves = getattr(kv, "evictable_leaves", None)  # ours: the only ones whose place depends on states
        if leaves is None or (leaves and not leaves.isdisjoint(blocks)):
            for block in blocks:
                note(block)

    def check_integrity(self) -> None:
        """Raise AssertionError where the maps contradict each other or the KV hashes; O(blocks + slots)."""
        self._index.check_integrity(self._kv_hash)
        free = set(self._free)
        if self._free_mirrored:
            assert self._free_slots[: self.free_count].tolist() == self._free, "free_slots shows others"
        committed, reserved = set(self._index.slots), set(self._reserved)
        assert len(free) == self.free_count, "a slot is free twice"
        assert free.isdisjoint(committed | reserved), "a slot is free and in use"
        assert committed.isdisjoint(reserved), "a slot is committed and reserved"
        assert len(free) + len(reserved) + len(committed) == self.max_slots, "a slot is nowhere"
        targets = [block for block in self._reserved.values() if block >= 0]
        assert len(targets) == len(set(targets)), "two slots are reserved for one block"
        ordered = self._eviction.victims(self.max_slots, lambda slot: True)
        assert sorted(ordered) == sorted(committed), (
            "the eviction policy orders other slots than the committed"
        )
        assert self._pins.keys() <= committed | reserved, "a free slot is pinned"
        assert self._used <= committed, "a slot without a state counts as used"


def _block_count(context: object) -> int:
    """The KV blocks of a host; a ValueError for what is no host."""
    kv = getattr(context, "kv_block_allocator", None)
    if kv is None:
        raise ValueError(f"context is {shown(context)}; accepted: a host that has a kv_block_allocator")
    name = next((name for name in ("total_count", "pool_size") if hasattr(kv, name)), "")
    if not name or not hasattr(kv, "block_hashes"):
        raise ValueError(
            f"context.kv_block_allocator is {shown(kv)}; accepted: what has block_hashes, and total_count or "
            "pool_size"
        )
    return integer(f"context.kv_block_allocator.{name}", getattr(kv, name), 0, INT32_MAX)


def _check_pool(pool: object, expected: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
    if not isinstance(pool, StatePool):
        raise ValueError(f"context.state_pool is {shown(pool)}; accepted: a StatePool")
    durable = (pool.durable_conv_states, pool.durable_ssm_states)
    found = [(tuple(states.shape), states.dtype) for states in durable]
    if found != expected:
        raise ValueError(
            f"context.state_pool has durable states {found[0]} and {found[1]}; accepted: {expected[0]} and "
            f"{expected[1]}"
        )
