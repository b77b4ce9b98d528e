"""The slot allocator that hosts plug in, under megatron-core's names."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    instance,
    integer,
    integers,
    ints_within,
    numbers,
    shown,
)
from ..kernels.state_copy import copy_states
from ..kernels.state_tensors import StateTensors
from .cache.checkpoint_plan import CheckpointPlan, checked_boundaries
from .cache.eviction import PolicyChoice, checked_policy
from .cache.kv_block_allocator import MAX_HASH, KVBlockAllocator
from .cache.prefix_tree import PrefixTree
from .cache.state_slots import StateSlots

MAX_INTERMEDIATE_OFFSETS_PER_REQUEST = 3
"""Offsets per request where the host does not state `max_intermediate_offsets_per_request`."""


@dataclass(frozen=True)
class StateSource:
    """Where a launched step's state is: in scratch row `index`, or the live slot of request row `index`."""

    in_scratch: bool
    index: int


class MambaSlotAllocator:
    """A pool of durable state slots, which a host's context holds for its prefix cache.

    `allocate_slots_batch` returns slots that enter the maps at once; the caller fills them (`store_from_*`)
    before it registers a hash. The context must have a `kv_block_allocator` with a block count and
    `block_hashes`, and live states (`mamba_conv_states`, `mamba_ssm_states`, [layers, live slots, ...]).
    Where the KV allocator reports deregistered blocks (`observe_deregistration`, or megatron-core's
    `on_blocks_deregistered`), the constructor subscribes, so that a reused KV block never keeps the state of
    its former prefix. Also used where they exist: `mamba_metadata`, `request_to_kv_block_ids`, the step's
    batch dimensions, and these settings, of which sizes are 0 by default:

        prefix_caching_eviction_policy           a name, an enumeration, an `EvictionPolicy`; by default "lru"
        checkpoint_plan                          by default `CheckpointPlan()`
        max_requests                             rows of requests
        max_intermediate_offsets_per_request     states inside a prefill that a request can store in one step
        max_mamba_intermediate_states_per_step   scratch rows for the states of one step
        block_size_tokens                        tokens of a KV block
        ssm_chunk_alignment, mamba_chunk_size    kernels store states inside a prefill at multiples of it only

    Example: `MambaSlotAllocator(context, 64, 24, (4096, 4), (64, 64, 128), torch.bfloat16, torch.float32)`
    keeps 64 states of 24 layers.

    Attributes (for hosts to read):
        block_to_slot [blocks] int32, slot_to_block [max_slots] int32, free_slots [max_slots] int32 (the
        first `free_count` are free): CPU tensors, made at each read.
        hash_to_block_id: dict from prefix hash to the block whose slot holds the state after that prefix.
        conv_states, ssm_states [layers, max_slots, ...]: the durable states.
        intermediate_conv_out, intermediate_ssm_out [layers, max_intermediate_count, ...]: scratch that
        kernels without source/destination indices write.
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
        self._plan, policy = self._choices()
        self._block_size = block = _size(context, "block_size_tokens", minimum=1)
        grid = _size(context, "ssm_chunk_alignment") or _size(context, "mamba_chunk_size") or 1
        self._grid = grid
        self._durable = self._new_states(self.max_slots, _device_of_live_states(context))
        kv = context.kv_block_allocator
        tree = kv.tree if isinstance(kv, KVBlockAllocator) else PrefixTree(self._num_blocks, self._hash_of)
        self.slots = StateSlots(self.max_slots, policy, tree)
        self.hash_to_block_id = tree.hash_to_block_id
        device = self.ssm_states.device
        self.max_intermediate_count = _size(context, "max_mamba_intermediate_states_per_step")
        self._scratch = self._new_states(self.max_intermediate_count, device)
        self._has_intermediates = False
        self.num_dropped = 0
        if block and block % grid:
            warnings.warn(
                f"block_size_tokens is {block}, no multiple of the SSD chunk ({grid}): most block boundaries "
                "have no state inside a prefill, and few prompts will resume",
                stacklevel=3,
            )
        width = _size(context, "max_intermediate_offsets_per_request", MAX_INTERMEDIATE_OFFSETS_PER_REQUEST)
        shape = _size(context, "max_requests"), width
        with torch.inference_mode(False):  # others than inference tensors can be written anywhere
            self._intermediate_offsets_cpu = torch.zeros(shape, dtype=torch.int32, device="cpu")
            self._intermediate_counts_cpu = torch.zeros(shape[0], dtype=torch.int32, device="cpu")
            self._intermediate_block_ids_cpu = torch.full(shape, -1, dtype=torch.int32, device="cpu")
            self._eos_cache_block_id_cpu = torch.full(shape[:1], -1, dtype=torch.int32, device="cpu")
            self._intermediate_offsets_gpu = torch.zeros_like(self._intermediate_offsets_cpu, device=device)
            self._intermediate_counts_gpu = torch.zeros_like(self._intermediate_counts_cpu, device=device)
        if isinstance(kv, KVBlockAllocator):
            kv.observe_deregistration(self.on_kv_blocks_deregistered)
        elif hasattr(kv, "on_blocks_deregistered"):
            kv.on_blocks_deregistered = self.on_kv_blocks_deregistered

    def _hash_of(self, block: int) -> int:
        """The block's prefix hash in the host's KV index, or -1."""
        return int(self.context.kv_block_allocator.block_hashes[block])

    def _hashes_of(self, blocks: Sequence[int]) -> list[int]:
        kv = self.context.kv_block_allocator
        if isinstance(kv, KVBlockAllocator):
            return [kv.tree.hash_of(block) for block in blocks]
        listed = torch.tensor(blocks, dtype=torch.int64, device="cpu")
        return kv.block_hashes[listed].tolist()  # type: ignore[no-any-return]

    def _choices(self) -> tuple[CheckpointPlan, PolicyChoice]:
        """The checkpoint plan and the eviction policy that the host states.

        megatron-core's "ref_zero" is about KV blocks: the host frees them with their last request, and their
        states with them. The states of blocks in use are evicted as under "lru".
        """
        plan = getattr(self.context, "checkpoint_plan", None)
        plan = instance("context.checkpoint_plan", CheckpointPlan() if plan is None else plan, CheckpointPlan)
        policy = getattr(self.context, "prefix_caching_eviction_policy", "lru")
        policy = getattr(policy, "value", policy)
        if isinstance(policy, str):
            policy = "lru" if policy.lower() == "ref_zero" else policy.lower()
        return plan, checked_policy("context.prefix_caching_eviction_policy", policy)

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
    def block_to_slot(self) -> Tensor:
        slots = torch.full((self._num_blocks,), -1, dtype=torch.int32, device="cpu")
        by_block = self.slots.tree.slot_by_block
        slots[list(by_block)] = torch.tensor(list(by_block.values()), dtype=torch.int32, device="cpu")
        return slots

    @property
    def slot_to_block(self) -> Tensor:
        blocks = [self.slots.tree.block_of(slot) for slot in range(self.max_slots)]
        return torch.tensor(blocks, dtype=torch.int32, device="cpu")

    @property
    def free_slots(self) -> Tensor:
        slots = torch.arange(self.max_slots, dtype=torch.int32, device="cpu")
        slots[: self.free_count] = torch.tensor(self.slots.free, dtype=torch.int32, device="cpu")
        return slots

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
        return self.slots.reserve(self._checked_blocks(block_ids))

    def commit(self, slots: Sequence[int], block_ids: Sequence[int] | None = None) -> list[int]:
        """See `StateSlots.commit`."""
        slots = self._checked_slots(slots)
        blocks = None if block_ids is None else self._checked_blocks(block_ids)
        if blocks is not None and len(blocks) != len(slots):
            raise ValueError(
                f"block_ids has {len(blocks)} entries; accepted: one for each of the {len(slots)} slots"
            )
        return self.slots.commit(slots, blocks)

    def release_reservation(self, slots: Sequence[int]) -> None:
        """See `StateSlots.release`."""
        self.slots.release(self._checked_slots(slots))

    def pin(self, slot: int) -> None:
        """See `StateSlots.pin`."""
        self.slots.pin(self._checked_slot(slot))

    def unpin(self, slot: int) -> None:
        self.slots.unpin(self._checked_slot(slot))

    def note_use(self, slot: int) -> None:
        """See `StateSlots.note_use`."""
        self.slots.note_use(self._checked_slot(slot))

    # ---- allocation, eviction and invalidation under megatron-core's names

    def allocate_slots_batch(self, block_ids: list[int]) -> list[int]:
        """Commit a slot, without a hash, for each block; a block with a slot, or named twice, keeps one slot.

        Raises:
            MambaSlotCapacityError: too few slots can be freed; nothing is changed.
        """
        return self.slots.allocate(self._checked_blocks(block_ids))

    def _evict_lru_slots_batch(self, num_needed: int) -> list[int]:
        """Evict states. The returned slots are reserved for the caller until `release_reservation`."""
        return self.slots.evict(integer("num_needed", num_needed, 0))

    def invalidate_block(self, block_id: int) -> None:
        """Free the slot of `block_id`, if any, and drop its index key."""
        self.slots.forget([integer("block_id", block_id, 0, self._num_blocks - 1)])

    def _invalidate_blocks_batch(self, block_ids_list: list[int]) -> None:
        self.slots.forget(self._checked_blocks(block_ids_list, "block_ids_list"))

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

    # ---- states of kernels that write scratch: before the step

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
        """Choose the boundaries to store in the part of a prompt that request row `current_id` computes.

        The part is tokens [finished + skip_tokens, finished + prefill_chunk_length) of `req.prompt_tokens`,
        where finished is `req.finished_chunk_token_count`. Of the blocks after those that earlier parts
        allocated, `num_matched_blocks` were found in the KV cache. A request without block hashes
        (`req.precomputed_block_hashes` is empty) stores no state, because no request could find the state.
        """
        context, block = self.context, self._block_size
        row = integer("current_id", current_id, 0, len(self._intermediate_counts_cpu) - 1)
        try:
            finished, prompt = int(req.finished_chunk_token_count), len(req.prompt_tokens)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"req is {shown(req)}; accepted: what has prompt_tokens and finished_chunk_token_count"
            ) from error
        longest = context.request_to_kv_block_ids.shape[1] * block - finished
        start = finished + integer("skip_tokens", skip_tokens, 0)
        stop = finished + integer("prefill_chunk_length", prefill_chunk_length, 0, longest)
        num_matched_blocks = integer("num_matched_blocks", num_matched_blocks, 0)
        self._clear_rows(slice(row, row + 1))
        if not getattr(req, "precomputed_block_hashes", True) or stop <= start:
            return
        seen = (-(-finished // block) + num_matched_blocks) * block if num_matched_blocks else 0
        boundaries = checked_boundaries(self._plan, start, stop, prompt, block, seen)
        blocks = context.request_to_kv_block_ids[row]
        inside = [b.position for b in boundaries if b.position < stop]
        on_grid = [position for position in inside if (position - start) % self._grid == 0]
        room = max(
            0,
            min(
                self._intermediate_offsets_cpu.shape[1],
                self.max_intermediate_count - int(self._intermediate_counts_cpu.sum()),
            ),
        )
        chosen = sorted(on_grid[:room])
        self.num_dropped += len(inside) - len(chosen)
        for column, position in enumerate(chosen):
            self._intermediate_offsets_cpu[row, column] = position - start
            self._intermediate_block_ids_cpu[row, column] = blocks[position // block - 1]
        self._intermediate_counts_cpu[row] = len(chosen)
        if any(b.position == stop for b in boundaries):
            self._eos_cache_block_id_cpu[row] = blocks[stop // block - 1]
            self._has_intermediates = True
        self._has_intermediates |= bool(chosen)

    def _prefill_rows(self) -> slice:
        context = self.context
        start = context.paused_request_count + context.batch_dimensions.decode_req_count
        return slice(start, start + context.batch_dimensions.prefill_req_count)

    def get_intermediate_cpu_data(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Offsets [prefills, width] and counts [prefills], int32 on the CPU; (None, None) without a plan."""
        rows = self._prefill_rows()
        if not self._has_intermediates or rows.start == rows.stop:
            return None, None
        return self._intermediate_offsets_cpu[rows], self._intermediate_counts_cpu[rows]

    def get_intermediate_gpu_data(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """As `get_intermediate_cpu_data`, on the states' device."""
        offsets, counts = self.get_intermediate_cpu_data()
        if offsets is None or counts is None:
            return None, None
        device = self.ssm_states.device
        return offsets.to(device, non_blocking=True), counts.to(device, non_blocking=True)

    def transfer_intermediate_to_gpu(
        self, prefill_start: int, prefill_count: int
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Copy `prefill_count` rows from `prefill_start` on to the device tensors; returns views of them."""
        start = integer("prefill_start", prefill_start, 0, len(self._intermediate_counts_cpu))
        count = integer("prefill_count", prefill_count, 0, len(self._intermediate_counts_cpu) - start)
        if count == 0:
            return None, None
        rows = slice(start, start + count)
        offsets, counts = self._intermediate_offsets_gpu[rows], self._intermediate_counts_gpu[rows]
        offsets.copy_(self._intermediate_offsets_cpu[rows], non_blocking=True)
        counts.copy_(self._intermediate_counts_cpu[rows], non_blocking=True)
        return offsets, counts

    # ---- after the step

    def _collect_commit_data(self) -> dict[int, StateSource]:
        """Block -> where its state is, for the step's planned boundaries that have no state yet.

        Boundaries inside a prefill come first, ends of steps last. Unregistered blocks are skipped. The
        kernels fill scratch rows request after request; `mamba_metadata.per_request_intermediate_counts`
        says how many rows each request has.
        """
        context, rows = self.context, self._prefill_rows()
        if rows.start == rows.stop:
            return {}
        places: list[tuple[int, StateSource]] = []
        if context.mamba_metadata.intermediate_count > 0:
            planned = self._intermediate_block_ids_cpu[rows].tolist()
            counts = context.mamba_metadata.per_request_intermediate_counts
            in_order = [block for row, count in zip(planned, counts, strict=False) for block in row[:count]]
            places += [(block, StateSource(True, row)) for row, block in enumerate(in_order)]
        ends = enumerate(self._eos_cache_block_id_cpu[rows].tolist(), rows.start)
        places += [(block, StateSource(False, row)) for row, block in ends]
        places = [(block, place) for block, place in places if block >= 0]
        hashes = self._hashes_of([block for block, _ in places])
        tree, reserved = self.slots.tree, set(self.slots.reserved.values())
        sources: dict[int, StateSource] = {}
        for (block, place), key in zip(places, hashes, strict=True):
            findable = key > 0 and tree.hash_to_block_id.get(key, block) == block
            if findable and block not in reserved and block not in tree.slot_by_block:
                sources.setdefault(block, place)
        return sources

    def _take(self, sources: Mapping[int, StateSource]) -> dict[int, int]:
        """Reserve slots for states of blocks and copy the states there, with one copy per kind of source.

        Where slots are short, the last of `sources` get slots, and the others become ghosts.

        Returns:
            Block -> reserved slot. Where a copy raises, nothing stays reserved.
        """
        slots = self.slots
        blocks = list(sources)
        num_refused = max(0, len(blocks) - slots.num_available)
        chosen, refused = blocks[num_refused:], blocks[:num_refused]
        if refused:
            slots.tree.note_refused(self._hashes_of(refused))
        reserved = slots.reserve(chosen)
        try:
            for in_scratch in (True, False):
                pairs = [
                    (sources[block], slot)
                    for block, slot in zip(chosen, reserved, strict=True)
                    if sources[block].in_scratch is in_scratch
                ]
                indices, taken = [source.index for source, _ in pairs], [slot for _, slot in pairs]
                if pairs and in_scratch:
                    self._copy_intermediate_to_cache(indices, taken)
                elif pairs:
                    self.store_from_live_batch(taken, indices)
        except BaseException:
            slots.release(reserved)
            raise
        return dict(zip(chosen, reserved, strict=True))

    def commit_intermediate_states(self) -> None:
        """Copy what this step's kernels wrote to scratch, and states at step ends, into durable slots.

        Call once a step, after the forward or the graph replay. Makes two batched copies. Where slots are
        short, states are not kept; the call does not fail.
        """
        try:
            if sources := self._collect_commit_data():
                self.slots.commit(list(self._take(sources).values()))
        finally:
            self._clear_intermediate_state()

    def _copy_intermediate_to_cache(self, src_offsets: list[int], slots: list[int]) -> None:
        """Copy scratch states to slots: both tensors, all layers, batched."""
        copy_states(self._scratch, src_offsets, self._durable, slots)

    @property
    def intermediate_conv_out(self) -> Tensor:
        return self._scratch.conv

    @property
    def intermediate_ssm_out(self) -> Tensor:
        return self._scratch.ssm

    def _clear_intermediate_state(self) -> None:
        """Forget this step's rows."""
        self._clear_rows(self._prefill_rows())
        self._has_intermediates = False

    def _reset_intermediates(self) -> None:
        """Forget all rows, and zero the scratch."""
        self._clear_rows(slice(None))
        self._has_intermediates = False
        for tensor in self._scratch:
            tensor.zero_()

    def _clear_rows(self, rows: slice) -> None:
        self._intermediate_offsets_cpu[rows] = 0
        self._intermediate_counts_cpu[rows] = 0
        self._intermediate_block_ids_cpu[rows] = -1
        self._eos_cache_block_id_cpu[rows] = -1

    # ---- reset and checks

    def reset(self) -> None:
        """Drop every state, reservation, pin, pending checkpoint and ghost, and zero the scratch."""
        self.slots.clear()
        self._reset_intermediates()

    def check_integrity(self) -> None:
        """Raise AssertionError where slots, blocks and KV hashes contradict each other; O(blocks + slots)."""
        self.slots.check_integrity()

    def _checked_blocks(self, block_ids: Sequence[int], name: str = "block_ids") -> list[int]:
        return checked_integers(name, block_ids, 0, self._num_blocks - 1)

    def _checked_slot(self, slot: int) -> int:
        return integer("slot", slot, 0, self.max_slots - 1)

    def _checked_slots(self, slots: Sequence[int]) -> list[int]:
        return integers("slots", slots, 0, self.max_slots - 1)


def _device_of_live_states(context: Any) -> torch.device:
    live = getattr(context, "mamba_ssm_states", None)
    if not isinstance(live, Tensor) or not holds_data(live):
        raise ValueError(
            f"context.mamba_ssm_states {described(live)}; accepted: the live states, a tensor that holds data"
        )
    return live.device


def _size(context: Any, name: str, default: int = 0, minimum: int = 0) -> int:
    """The size that the host states, or `default`."""
    value = getattr(context, name, None)
    return default if value is None else integer(f"context.{name}", value, minimum, INT32_MAX)


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
