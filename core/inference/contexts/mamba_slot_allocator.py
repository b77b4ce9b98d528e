"""The slot allocator that an engine with a paged KV cache of its own plugs in."""

import warnings
from bisect import bisect_left
from collections.abc import Sequence
from operator import countOf
from typing import Any

import torch
from torch import Tensor

from ...validation import (
    INT32_MAX,
    addressable,
    ceil_div,
    checked_integers,
    float_dtype,
    integer,
    integers,
    ints_within,
    numbers,
    refused,
)
from ..kernels.state_pools import ConvAndSsm
from .cache.checkpoint_plan import checked_boundaries
from .cache.eviction import checked_policy
from .cache.kv_block_allocator import MAX_HASH, KVBlockAllocator
from .cache.state_slots import StateSlots
from .hosts.states import HostSettings, HostStates, HostTree, block_count, size_of
from .hosts.step_plan import StepPlan, WrittenStates


class MambaSlotAllocator:
    """A pool of durable state slots, which a host's context holds for its prefix cache.

    `allocate_slots_batch` returns slots that enter the maps at once; the caller fills them (`store_from_*`)
    before it registers a hash. `reserve` returns slots that no index contains until `commit`. The context
    must have a `kv_block_allocator` with a block count and `block_hashes`, and live states
    (`mamba_conv_states`, `mamba_ssm_states`, [layers, live slots, ...]). A reused KV block must not keep the
    state of its former prefix: the constructor subscribes to a `KVBlockAllocator`, or to an allocator with
    megatron-core's `on_blocks_deregistered`; with another one, the host calls `on_kv_blocks_deregistered`.
    Copies from and to live states read `mamba_metadata.request_to_mamba_state_idx`.

    States inside a prefill: `compute_and_store_offsets` plans the row of a request when a chunk is added; the
    step's kernels write states to scratch; `commit_intermediate_states` copies them, and those at the ends of
    chunks, to durable slots. These calls read the context's rows (`request_to_kv_block_ids`,
    `paused_request_count`, `batch_dimensions`, `mamba_metadata`), and the constructor these settings:

        prefix_caching_eviction_policy           a name or an `EvictionPolicy`, by default "lru"
        checkpoint_plan                          by default `CheckpointPlan()`
        max_requests                             rows of requests, by default 0
        max_mamba_intermediate_states_per_step   scratch for so many states of one step, by default 0
        mamba_chunk_size, ssm_chunk_alignment    kernels store states inside a prefill at multiples of it
        block_size_tokens                        tokens of a KV block, by default as the kernels' multiple

    A subclass may override what the host answers (`_host_settings`, `_shared_tokens`), and what a step calls
    (`_commit`, `_clear_planned`).

    Example: `MambaSlotAllocator(context, 64, 24, (4096, 4), (64, 64, 128), torch.bfloat16, torch.float32)`
    keeps 64 states of 24 layers. With blocks of 256 tokens, 600 tokens of a prompt planned and a `marks` plan
    at 256, the state after token 256 is scratch state 0 until it is committed.

    Attributes:
        block_to_slot [blocks] int32, slot_to_block [max_slots] int32: CPU tensors, made at each read.
        hash_to_block_id: dict from prefix hash to the block whose slot holds the state after that prefix.
        conv_states, ssm_states [layers, max_slots, ...]: the durable states.
        intermediate_conv_out, intermediate_ssm_out [layers, max_intermediate_count, ...]: the scratch.
        num_dropped: planned boundaries whose states could not be stored.
        slots: which slots are free, reserved, committed or pinned, and which is evicted next; its `counts`,
            `pins` and `num_available`, and `slots.tree.ghosts`, why states are gone.
    """

    def __init__(
        self, context: Any, max_slots: int, num_mamba_layers: int, conv_states_shape: tuple[int, ...],
        ssm_states_shape: tuple[int, ...], conv_states_dtype: torch.dtype, ssm_states_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """Shapes are those of one layer's state. ValueError for a size out of range, or a wrong context."""
        self.context = context
        self.max_slots = integer("max_slots", max_slots, 0, INT32_MAX)
        self.num_mamba_layers = integer("num_mamba_layers", num_mamba_layers, 0, INT32_MAX)
        self._num_blocks = block_count(context)
        settings = self._host_settings()
        empty = ConvAndSsm(
            self._empty("conv", conv_states_shape, conv_states_dtype, settings.device),
            self._empty("ssm", ssm_states_shape, ssm_states_dtype, settings.device),
        )
        policy = checked_policy("context.prefix_caching_eviction_policy", settings.policy)
        self._plan = settings.plan
        self._block_size = size_of(context, "block_size_tokens", settings.grid, minimum=1)
        self._plan.check_block_size(self._block_size)
        kv = context.kv_block_allocator
        tree = kv.tree if isinstance(kv, KVBlockAllocator) else HostTree(self._num_blocks, kv)
        self.slots = StateSlots(self.max_slots, policy, tree)
        self.hash_to_block_id = self.slots.cached_states.state_block_of_hash
        if self._block_size % settings.grid:
            warnings.warn(
                f"block_size_tokens is {self._block_size}, no multiple of the SSD chunk ({settings.grid}): "
                "most block boundaries have no state inside a prefill, and few prompts will resume",
                stacklevel=2,
            )
        self.max_intermediate_count = size_of(context, "max_mamba_intermediate_states_per_step")
        self._host_states = HostStates(context, empty, self.max_slots, self.max_intermediate_count)
        self._planned = StepPlan(
            size_of(context, "max_requests"), self.max_intermediate_count, settings.grid, self._block_size
        )
        self.num_dropped = 0
        if isinstance(kv, KVBlockAllocator):
            kv.observe_deregistration(self.on_kv_blocks_deregistered)
        elif hasattr(kv, "on_blocks_deregistered"):
            kv.on_blocks_deregistered = self.on_kv_blocks_deregistered

    def _empty(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """[layers, 0, *shape], without a slot; ValueError where there can be no pool of such states."""
        sizes = tuple(integers(f"{kind}_states_shape", shape, 1, INT32_MAX))
        float_dtype(f"{kind}_states_dtype", dtype)
        pool_shape = self.num_mamba_layers, self.max_slots, *sizes
        addressable(f"{kind}_states_shape", sizes, pool_shape, dtype)
        return torch.empty(self.num_mamba_layers, 0, *sizes, dtype=dtype, device=device)

    def _host_settings(self) -> HostSettings:
        return HostSettings.of(self.context)

    # ---- tensors

    @property
    def conv_states(self) -> Tensor:
        return self._host_states.durable.conv

    @property
    def ssm_states(self) -> Tensor:
        return self._host_states.durable.ssm

    @property
    def intermediate_conv_out(self) -> Tensor:
        return self._host_states.scratch.conv

    @property
    def intermediate_ssm_out(self) -> Tensor:
        return self._host_states.scratch.ssm

    # ---- lookup

    @property
    def block_to_slot(self) -> Tensor:
        slots = torch.full((self._num_blocks,), -1, dtype=torch.int32, device="cpu")
        by_block = self.slots.cached_states.slot_of_block
        slots[list(by_block)] = torch.tensor(list(by_block.values()), dtype=torch.int32, device="cpu")
        return slots

    @property
    def slot_to_block(self) -> Tensor:
        blocks = [self.slots.cached_states.block_of(slot) for slot in range(self.max_slots)]
        return torch.tensor(blocks, dtype=torch.int32, device="cpu")

    @property
    def free_count(self) -> int:
        return len(self.slots.free_slots)

    def has_state(self, block_id: int) -> bool:
        """Whether a committed slot holds the state after block `block_id`."""
        return self.get_slot(block_id) >= 0

    def get_slot(self, block_id: int) -> int:
        """The committed slot of `block_id`, or -1."""
        return self.slots.cached_states.slot_of(integer("block_id", block_id, 0, self._num_blocks - 1))

    # ---- reservations

    def reserve(self, block_ids: Sequence[int]) -> list[int]:
        """See `StateSlots.reserve_slots`."""
        blocks = self._checked_blocks(block_ids)
        used_blocks = {*self.slots.reserved.values(), *self.slots.cached_states.slot_of_block}
        if len(set(blocks)) < len(blocks) or not used_blocks.isdisjoint(blocks):
            raise ValueError(f"block_ids is {blocks}; accepted: distinct blocks without state or reservation")
        return self.slots.reserve_slots(blocks)

    def commit(self, slots: Sequence[int], block_ids: Sequence[int] | None = None) -> list[int]:
        """Make reserved, written slots findable, for `block_ids`; None for those they are reserved for.

        Returns for each slot the one that holds the block's state now: itself, or an earlier one; -1 where
        the block is not registered. Other slots are freed. A block of another prefix is a ValueError.
        """
        slots = self._checked_reserved(slots)
        blocks = None if block_ids is None else self._checked_blocks(block_ids)
        if blocks is not None and len(blocks) != len(slots):
            raise ValueError(
                f"block_ids has {len(blocks)} entries; accepted: one for each of the {len(slots)} slots"
            )
        return self.slots.commit_slots(slots, blocks)

    def release_reservation(self, slots: Sequence[int]) -> None:
        """See `StateSlots.release`."""
        self.slots.release(self._checked_reserved(slots))

    def pin(self, slot: int) -> None:
        """See `StateSlots.pin`."""
        self.slots.pin(self._checked_committed(slot))

    def unpin(self, slot: int) -> None:
        if integer("slot", slot, 0, self.max_slots - 1) not in self.slots.pins:
            raise ValueError(f"slot is {slot}; accepted: a pinned slot")
        self.slots.unpin(slot)

    def record_use(self, slot: int) -> None:
        """See `CachedStates.record_use`."""
        self.slots.cached_states.record_use(self._checked_committed(slot))

    # ---- slots that enter the maps at once, and invalidation

    def allocate_slots_batch(self, block_ids: list[int]) -> list[int]:
        """Commit a slot, without a hash, for each block; a block with a slot, or named twice, keeps one slot.

        Raises:
            MambaSlotCapacityError: too few slots can be freed; nothing is changed.
        """
        blocks = self._checked_blocks(block_ids)
        if self.slots.reserved and (ids := set(self.slots.reserved.values()).intersection(blocks)):
            raise ValueError(f"block_ids names {min(ids)}; accepted: blocks that no reservation will commit")
        return self.slots.allocate_committed(blocks)

    def invalidate_block(self, block_id: int) -> None:
        """Free the slot of `block_id`, if any, and remove its hash from the index."""
        self.slots.remove([integer("block_id", block_id, 0, self._num_blocks - 1)])

    def on_kv_blocks_deregistered(self, block_ids_list: list[int], hashes_to_delete: set[int]) -> None:
        """Free the slot of every listed block, at every deregistration; `hashes_to_delete` is not needed."""
        self.slots.remove(self._checked_blocks(block_ids_list, "block_ids_list"), with_blocks=True)

    def register_block_hashes_batch(self, block_ids: list[int], hashes: list[int]) -> None:
        """Make the states of blocks findable by prefix hash; hashes <= 0 are skipped.

        A hash in use keeps finding its older state.
        """
        findable = ints_within(hashes, 1, MAX_HASH)
        hashes = hashes if findable else integers("hashes", hashes, ~MAX_HASH, MAX_HASH)
        # Blocks with a slot are in range: the look-up below says so.
        exact = type(block_ids) is list and countOf(map(type, block_ids), int) == len(block_ids)
        blocks = block_ids if exact and findable else self._checked_blocks(block_ids)
        if len(blocks) != len(hashes):
            raise ValueError(f"hashes has {len(hashes)} entries; accepted: {len(blocks)}, as block_ids")
        if not findable:  # some may be <= 0
            blocks = [block for block, prefix_hash in zip(blocks, hashes, strict=True) if prefix_hash > 0]
            hashes = [prefix_hash for prefix_hash in hashes if prefix_hash > 0]
        slot_of_block = self.slots.cached_states.slot_of_block
        try:
            slots = [slot_of_block[block] for block in blocks]
        except KeyError:
            raise refused("block_ids", block_ids, "blocks with a slot") from None
        self.slots.cached_states.set_hashes(blocks, slots, hashes)

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
        self._host_states.store_live(list(map(self._host_states.live_slot, request_indices)), slots)

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
        live_slot = self._host_states.live_slot(request_idx)
        self.slots.cached_states.record_use(slot)
        self._host_states.restore([slot], [live_slot])
        return True

    def _check_writable(self, slot: int) -> None:
        """ValueError for a slot whose state a request can find or is reading, and for a free slot."""
        slots = self.slots
        unowned = slots.cached_states.block_of(slot) < 0 and slot not in slots.reserved
        if slot in slots.pins or unowned or slots.cached_states.hash_of(slot):
            raise ValueError(f"slot is {slot}; accepted: one reserved, or allocated and not registered yet")

    # ---- before the step

    def compute_and_store_offsets(
        self, req: Any, current_id: int, skip_tokens: int, prefill_chunk_length: int, num_matched_blocks: int,
        matched_block_ids: list[int], overall_required_blocks: int,
    ) -> None:  # fmt: skip
        """Choose the boundaries to store in the part of a prompt that request row `current_id` computes.

        The part is tokens [finished + skip_tokens, finished + prefill_chunk_length) of `req.prompt_tokens`,
        where finished is `req.finished_chunk_token_count`. Of the blocks after those that earlier parts
        allocated, `num_matched_blocks` were found in the KV cache. A request without block hashes
        (`req.precomputed_block_hashes` is empty) stores no state, because no request could find the state.
        `matched_block_ids` and `overall_required_blocks` are megatron-core's arguments, and not used.
        """
        context, block = self.context, self._block_size
        row = integer("current_id", current_id, 0, len(self._planned.counts) - 1)
        try:
            finished, prompt = int(req.finished_chunk_token_count), len(req.prompt_tokens)
        except (AttributeError, TypeError, ValueError) as error:
            raise refused("req", req, "what has prompt_tokens and finished_chunk_token_count") from error
        longest = context.request_to_kv_block_ids.shape[1] * block - finished
        start = finished + integer("skip_tokens", skip_tokens, 0)
        stop = finished + integer("prefill_chunk_length", prefill_chunk_length, 0, longest)
        num_matched_blocks = integer("num_matched_blocks", num_matched_blocks, 0)
        self._planned.clear_row(row)
        if not getattr(req, "precomputed_block_hashes", True) or stop // block <= start // block:
            return
        branch_tokens = (ceil_div(finished, block) + num_matched_blocks) * block if num_matched_blocks else 0
        branch_tokens = max(branch_tokens, self._shared_tokens(req, start // block))
        if boundaries := checked_boundaries(self._plan, start, stop, prompt, block, branch_tokens):
            blocks = context.request_to_kv_block_ids[row].tolist()
            self.num_dropped += self._planned.add(row, start, stop, boundaries, blocks)

    def _shared_tokens(self, req: Any, num_known: int) -> int:
        """Leading tokens, more than `num_known` blocks, that waiting requests share; 0 for none."""
        return 0

    def _prefill_rows(self) -> slice:
        context = self.context
        start = context.paused_request_count + context.batch_dimensions.decode_req_count
        return slice(start, start + context.batch_dimensions.prefill_req_count)

    def get_intermediate_cpu_data(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Offsets [prefills, width] and counts [prefills], int32 on the CPU; (None, None) without a plan."""
        rows = self._prefill_rows()
        if not self._planned.has_planned or rows.start == rows.stop:
            return None, None
        return self._planned.offsets[rows], self._planned.counts[rows]

    # ---- after the step

    def commit_intermediate_states(self) -> None:
        """Copy states from scratch, and those at the ends of chunks, into durable slots.

        Call once a step, after the forward or the launch of a graph. Makes one batched copy from each of the
        two pools. Where slots are short, the boundaries that the plan values most get them; the call does
        not fail.
        """
        try:
            self._commit(WrittenStates(*self._collect_commit_data()))  # a host may return five lists
        finally:
            self._clear_intermediate_state()

    def _commit(self, written: WrittenStates) -> None:
        """Copy and commit the states, as far as slots go."""
        blocks, sources = written.inner_blocks + written.end_blocks, written.scratch_indices + written.rows
        ranks = self._planned.ranks()
        by_worth = sorted(range(len(blocks)), key=lambda i: ranks.get(blocks[i], 0))
        count = min(len(blocks), self.slots.num_available) if blocks else 0
        self.slots.cached_states.remember_refused([written.hashes[i] for i in by_worth[count:]])
        self.num_dropped += len(blocks) - count
        if not count:
            return
        order = sorted(by_worth[:count])
        blocks, sources, hashes = ([values[i] for i in order] for values in (blocks, sources, written.hashes))
        num_inner = bisect_left(order, len(written.inner_blocks))
        slots = self.slots.allocate_committed(blocks)
        try:
            self._copy_intermediate_to_cache(sources[:num_inner], slots[:num_inner])
            self.store_from_live_batch(slots[num_inner:], sources[num_inner:])
        except BaseException:
            self.slots.remove(blocks)
            raise
        self.register_block_hashes_batch(blocks, hashes)

    # megatron-core's own tests replace and call the next three, under these names.

    def _collect_commit_data(self) -> WrittenStates:
        """The states at the step's planned boundaries whose blocks have none yet."""
        metadata = self.context.mamba_metadata
        counts = metadata.per_request_intermediate_counts if metadata.intermediate_count > 0 else ()
        return self._planned.unstored(self._prefill_rows(), counts, self.slots)

    def _copy_intermediate_to_cache(self, src_offsets: list[int], slots: list[int]) -> None:
        self._host_states.store_scratch(src_offsets, slots)

    def _clear_intermediate_state(self) -> None:
        self._planned.clear_step(self._prefill_rows())

    # ---- reset and checks

    def reset(self) -> None:
        """Remove every state, reservation, pin, planned boundary and ghost, and zero the scratch."""
        self.slots.clear()
        self._clear_planned()

    def _clear_planned(self) -> None:
        self._planned.clear_step(slice(None))
        self._host_states.clear_scratch()

    def check_integrity(self) -> None:
        """Raise AssertionError where slots, blocks and KV hashes contradict each other; O(blocks + slots)."""
        self.slots.check_integrity()

    def _checked_blocks(self, block_ids: Sequence[int], name: str = "block_ids") -> list[int]:
        return checked_integers(name, block_ids, 0, self._num_blocks - 1)

    def _checked_slots(self, slots: Sequence[int]) -> list[int]:
        return integers("slots", slots, 0, self.max_slots - 1)

    def _checked_reserved(self, slots: Sequence[int]) -> list[int]:
        slots, pins = self._checked_slots(slots), self.slots.pins
        reserved = all(slot in self.slots.reserved and slot not in pins for slot in slots)
        if len(set(slots)) < len(slots) or not reserved:
            raise ValueError(f"slots is {list(slots)}; accepted: distinct reserved slots")
        return slots

    def _checked_committed(self, slot: int) -> int:
        if self.slots.cached_states.block_of(integer("slot", slot, 0, self.max_slots - 1)) < 0:
            raise ValueError(f"slot is {slot}; accepted: a committed slot")
        return int(slot)
