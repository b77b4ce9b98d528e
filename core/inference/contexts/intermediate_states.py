"""The half of a slot allocator for hosts whose kernels cannot store a state into a slot.

Such kernels (megatron-core's own) write the states inside a prefill to scratch rows of fixed address, and
leave the state at the end of the prefill in the live slot. This module plans the scratch rows before the
step, and moves the states into durable slots after the step.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...validation import INT32_MAX, instance, integer, shown
from ..kernels.state_tensors import StateTensors
from .cache.checkpoint_plan import CheckpointPlan, checked_boundaries
from .cache.eviction import PolicyChoice, checked_policy
from .cache.kv_block_allocator import KVBlockAllocator
from .cache.state_slots import StateSlots

MAX_INTERMEDIATE_OFFSETS_PER_REQUEST = 3
"""Offsets per request where the host does not state `max_intermediate_offsets_per_request`."""


@dataclass(frozen=True)
class HostSettings:
    """Settings from the attributes of megatron-core's context, each read where it exists.

    Attributes:
        num_blocks: blocks of `kv_block_allocator`: its `total_count`, or `pool_size` in newer hosts.
        eviction_policy: `prefix_caching_eviction_policy`: a name, an enumeration, an `EvictionPolicy`; "lru"
            without one.
        plan: `checkpoint_plan`; the default plan without one.
        max_requests: rows of requests.
        max_offsets_per_request: states inside a prefill that a request can store in one step.
        max_intermediate_states: scratch rows for the states of one step
            (`max_mamba_intermediate_states_per_step`); 0 where the host states none.
        block_size_tokens: tokens of a KV block; 0 where the host states none.
        ssd_chunk_size: `ssm_chunk_alignment` or `mamba_chunk_size`. Kernels can store states inside a prefill
            at multiples of this number only.
    """

    num_blocks: int
    eviction_policy: PolicyChoice
    plan: CheckpointPlan
    max_requests: int
    max_offsets_per_request: int
    max_intermediate_states: int
    block_size_tokens: int
    ssd_chunk_size: int

    @classmethod
    def of(cls, context: Any) -> "HostSettings":
        """Read a host's settings; ValueError for an object that is no host, and for impossible settings."""
        plan = getattr(context, "checkpoint_plan", None)
        return cls(
            num_blocks=_block_count(context),
            eviction_policy=_eviction_policy(getattr(context, "prefix_caching_eviction_policy", "lru")),
            plan=instance(
                "context.checkpoint_plan", CheckpointPlan() if plan is None else plan, CheckpointPlan
            ),
            max_requests=_size(context, "max_requests", 0),
            max_offsets_per_request=_size(
                context, "max_intermediate_offsets_per_request", MAX_INTERMEDIATE_OFFSETS_PER_REQUEST
            ),
            max_intermediate_states=_size(context, "max_mamba_intermediate_states_per_step", 0),
            block_size_tokens=_size(context, "block_size_tokens", 0, minimum=1),
            ssd_chunk_size=_size(context, "ssm_chunk_alignment", 0)
            or _size(context, "mamba_chunk_size", 0)
            or 1,
        )


def _eviction_policy(policy: object) -> PolicyChoice:
    """The policy that a host states.

    megatron-core's "ref_zero" is about KV blocks: the host frees them with their last request, and their
    states with them. The states of blocks in use are evicted as under "lru".
    """
    policy = getattr(policy, "value", policy)
    if isinstance(policy, str):
        policy = "lru" if policy.lower() == "ref_zero" else policy.lower()
    return checked_policy("context.prefix_caching_eviction_policy", policy)


def _size(context: Any, name: str, default: int, minimum: int = 0) -> int:
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


@dataclass(frozen=True)
class StateSource:
    """Where a launched step's state is: in scratch row `index`, or the live slot of request row `index`."""

    in_scratch: bool
    index: int


class IntermediateStates:
    """What one step stores: for each request some boundaries inside its prefill, and perhaps the end.

    Rows are the host's request rows, `max_requests` of them. Hosts move and clear rows of the four `*_cpu`
    tensors.

    Attributes:
        offsets_cpu: [rows, width] int32, tokens from the first token that the step computes to the boundary.
        counts_cpu: [rows] int32, how many offsets a row has.
        block_ids_cpu: [rows, width] int32, the blocks that end at these boundaries, -1 for none.
        eos_block_id_cpu: [rows] int32, the block whose boundary the step ends on, or -1.
        offsets_device, counts_device: the same on the states' device; `transfer` fills them.
        conv_out, ssm_out: [layers, scratch rows, ...]: the scratch that the host's kernels write.
        pending: whether a state is planned.
        num_dropped: planned boundaries for which offsets or scratch had no room, since the beginning.
    """

    def __init__(
        self,
        context: Any,
        settings: HostSettings,
        slots: StateSlots,
        scratch: StateTensors,
        copy_to_slots: Callable[[StateSource, list[int], list[int]], None],
    ) -> None:
        """
        Args:
            context: the host. `plan` and `commit` read the host's step.
            settings: the host's settings.
            slots: the durable slots.
            scratch: tensors for the states of one step.
            copy_to_slots: copies states of one kind; called with (a source of this kind, indices, slots).
        """
        self._context = context
        self._settings = settings
        self._slots = slots
        self._copy_to_slots = copy_to_slots
        self.pending = False
        self.num_dropped = 0
        block, grid = settings.block_size_tokens, settings.ssd_chunk_size
        if block and block % grid:
            warnings.warn(
                f"block_size_tokens is {block}, no multiple of the SSD chunk ({grid}): most block boundaries "
                "have no state inside a prefill, and few prompts will resume",
                stacklevel=4,
            )
        rows, width = settings.max_requests, settings.max_offsets_per_request
        with torch.inference_mode(False):  # others than inference tensors can be written anywhere
            self.offsets_cpu = torch.zeros(rows, width, dtype=torch.int32, device="cpu")
            self.counts_cpu = torch.zeros(rows, dtype=torch.int32, device="cpu")
            self.block_ids_cpu = torch.full((rows, width), -1, dtype=torch.int32, device="cpu")
            self.eos_block_id_cpu = torch.full((rows,), -1, dtype=torch.int32, device="cpu")
            self.offsets_device = torch.zeros_like(self.offsets_cpu, device=scratch.ssm.device)
            self.counts_device = torch.zeros_like(self.counts_cpu, device=scratch.ssm.device)
        self.conv_out, self.ssm_out = scratch.conv, scratch.ssm
        self.max_count = scratch.ssm.shape[1]

    # ---- before the step

    def plan(
        self, req: Any, row: int, skip_tokens: int, prefill_chunk_length: int, num_matched_blocks: int
    ) -> None:
        """Choose the boundaries to store in the part of a prompt that request row `row` computes.

        The part is tokens [finished + skip_tokens, finished + prefill_chunk_length) of `req.prompt_tokens`,
        where finished is `req.finished_chunk_token_count`. Of the blocks after those that earlier parts
        allocated, `num_matched_blocks` were found in the KV cache. A request without block hashes
        (`req.precomputed_block_hashes` is empty) stores no state, because no request could find the state.
        """
        context, settings = self._context, self._settings
        row = integer("current_id", row, 0, len(self.counts_cpu) - 1)
        block = settings.block_size_tokens
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
        boundaries = checked_boundaries(settings.plan, start, stop, prompt, block, seen)
        blocks = context.request_to_kv_block_ids[row]
        inside = [b.position for b in boundaries if b.position < stop]
        on_grid = [position for position in inside if (position - start) % settings.ssd_chunk_size == 0]
        room = max(0, min(self.offsets_cpu.shape[1], self.max_count - int(self.counts_cpu.sum())))
        chosen = sorted(on_grid[:room])
        self.num_dropped += len(inside) - len(chosen)
        for column, position in enumerate(chosen):
            self.offsets_cpu[row, column] = position - start
            self.block_ids_cpu[row, column] = blocks[position // block - 1]
        self.counts_cpu[row] = len(chosen)
        if any(b.position == stop for b in boundaries):
            self.eos_block_id_cpu[row] = blocks[stop // block - 1]
            self.pending = True
        self.pending |= bool(chosen)

    # ---- the step's rows

    def _prefill_rows(self) -> slice:
        context = self._context
        start = context.paused_request_count + context.batch_dimensions.decode_req_count
        return slice(start, start + context.batch_dimensions.prefill_req_count)

    def step_rows(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Offsets and counts of the step's prefill rows, or (None, None) where nothing is planned."""
        rows = self._prefill_rows()
        if not self.pending or rows.start == rows.stop:
            return None, None
        return self.offsets_cpu[rows], self.counts_cpu[rows]

    def transfer(self, start: int, count: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Copy rows [start, start + count) to the device tensors, without synchronising; returns views."""
        integer("prefill_start", start, 0, len(self.counts_cpu))
        integer("prefill_count", count, 0, len(self.counts_cpu) - start)
        if count == 0:
            return None, None
        rows = slice(start, start + count)
        offsets, counts = self.offsets_device[rows], self.counts_device[rows]
        offsets.copy_(self.offsets_cpu[rows], non_blocking=True)
        counts.copy_(self.counts_cpu[rows], non_blocking=True)
        return offsets, counts

    # ---- after the step

    def collect(self) -> tuple[list[int], list[int], list[int], list[int], list[int]] | None:
        """(blocks, scratch rows, blocks of step ends, their request rows, hashes of both), or None.

        The kernels fill scratch rows request after request; `mamba_metadata.per_request_intermediate_counts`
        says how many rows each request has.
        """
        context = self._context
        rows = self._prefill_rows()
        if rows.start == rows.stop:
            return None
        taken: list[tuple[int, int]] = []
        metadata = context.mamba_metadata
        if metadata.intermediate_count > 0:
            planned = self.block_ids_cpu[rows].tolist()
            counts = metadata.per_request_intermediate_counts
            in_order = [block for row, count in zip(planned, counts, strict=False) for block in row[:count]]
            taken = [(block, row) for row, block in enumerate(in_order) if block >= 0]
        ended = zip(self.eos_block_id_cpu[rows].tolist(), range(rows.start, rows.stop), strict=True)
        ends = [(block, row) for block, row in ended if block >= 0]
        blocks, scratch_rows = [b for b, _ in taken], [r for _, r in taken]
        end_blocks, end_rows = [b for b, _ in ends], [r for _, r in ends]
        if not blocks and not end_blocks:
            return None
        listed = torch.tensor(blocks + end_blocks, device="cpu")
        hashes = context.kv_block_allocator.block_hashes[listed].tolist()
        return blocks, scratch_rows, end_blocks, end_rows, hashes

    def sources(self) -> dict[int, StateSource]:
        """Block -> where its state is, for the step's planned boundaries that have no state yet.

        Boundaries inside a prefill come first, ends of steps last. Unregistered blocks are skipped.
        """
        collected = self.collect()
        if collected is None:
            return {}
        blocks, scratch, end_blocks, end_rows, hashes = collected
        places = [StateSource(True, row) for row in scratch] + [StateSource(False, row) for row in end_rows]
        tree = self._slots.tree
        reserved = set(self._slots.reserved.values())
        sources: dict[int, StateSource] = {}
        for block, key, place in zip(blocks + end_blocks, hashes, places, strict=True):
            findable = key > 0 and tree.hash_to_block_id.get(key, block) == block
            if findable and block not in reserved and block not in tree.slot_by_block:
                sources.setdefault(block, place)
        return sources

    def take(self, sources: Mapping[int, StateSource]) -> dict[int, int]:
        """Reserve slots for states of blocks and copy the states there, with one copy per kind of source.

        Where slots are short, the last of `sources` get slots, and the others become ghosts.

        Returns:
            Block -> reserved slot. Where a copy raises, nothing stays reserved.
        """
        slots = self._slots
        blocks = list(sources)
        num_refused = max(0, len(blocks) - slots.num_available)
        chosen, refused = blocks[num_refused:], blocks[:num_refused]
        if refused:
            hashes = self._context.kv_block_allocator.block_hashes
            slots.tree.note_refused([int(hashes[block]) for block in refused])
        reserved = slots.reserve(chosen)
        try:
            for in_scratch in (True, False):
                pairs = [
                    (sources[block], slot)
                    for block, slot in zip(chosen, reserved, strict=True)
                    if sources[block].in_scratch is in_scratch
                ]
                if pairs:
                    self._copy_to_slots(
                        pairs[0][0], [source.index for source, _ in pairs], [slot for _, slot in pairs]
                    )
        except BaseException:
            slots.release(reserved)
            raise
        return dict(zip(chosen, reserved, strict=True))

    def commit(self) -> None:
        """Reserve slots, copy the states and commit them. A state without a slot is lost without an error."""
        try:
            sources = self.sources()
            if sources:
                self._slots.commit(list(self.take(sources).values()))
        finally:
            self.clear()

    def clear(self) -> None:
        """Forget this step's rows."""
        self._clear_rows(self._prefill_rows())
        self.pending = False

    def reset(self) -> None:
        """Forget all rows, and zero the scratch."""
        self._clear_rows(slice(None))
        self.pending = False
        self.conv_out.zero_()
        self.ssm_out.zero_()

    def free_scratch(self) -> None:
        """Free the scratch's memory; tensors without rows remain."""
        self.conv_out, self.ssm_out = self.conv_out[:, :0].clone(), self.ssm_out[:, :0].clone()

    def _clear_rows(self, rows: slice) -> None:
        self.offsets_cpu[rows] = 0
        self.counts_cpu[rows] = 0
        self.block_ids_cpu[rows] = -1
        self.eos_block_id_cpu[rows] = -1
