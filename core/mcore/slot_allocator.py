"""Our slot allocator as megatron-core's context holds it."""

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import MambaSlotCapacityError
from ..inference.contexts.cache.checkpoint_plan import (
    CheckpointPlan,
    checked_boundaries,
    make_room_by_rolling,
)
from ..inference.contexts.cache.eviction import PolicyChoice
from ..inference.contexts.mamba_slot_allocator import MambaSlotAllocator
from ..inference.kernels.state_copy import copy_states
from ..inference.kernels.state_tensors import StateTensors
from ..validation import integer, integers, shown
from .cached_answers import AnswerStates
from .host_record import HostCallError, check_lengths, record_of

_MOST_OFFSETS = 3  # a request's, as megatron-core sizes its scratch
_logger = logging.getLogger(__package__)


@dataclass(frozen=True)
class Settings:
    """What `install` was called with."""

    plan: CheckpointPlan = field(default_factory=CheckpointPlan)
    eviction: PolicyChoice | None = None
    cache_answers: bool = True


class HostCapacityError(MambaSlotCapacityError):
    """Fewer durable slots are free or can be freed than the host asks for; says it in the host's words."""

    def __str__(self) -> str:
        return (
            f"Mamba cache requires {self.required} new durable slots, but only {self.available} free or "
            "evictable slots are available"
        )


@dataclass(frozen=True)
class StateSource:
    """Where a launched step's state is: in scratch row `index`, or the live slot of request row `index`."""

    in_scratch: bool
    index: int


class HostSlotAllocator(MambaSlotAllocator):
    """`MambaSlotAllocator` with what megatron-core's context calls beyond it, under its names.

    When a chunk is added, `compute_and_store_offsets` plans its row. The step's kernels write states inside
    prefills to scratch. `commit_intermediate_states` copies them, and those at the ends of chunks and of
    decodes, to durable slots. Restores of a step are batched, a state that waits to be restored is pinned,
    and the durable pool can be released and brought back.

    Attributes:
        block_to_slot [blocks] int32, slot_to_block [max_slots] int32: CPU tensors, made at each read.
        intermediate_conv_out, intermediate_ssm_out [layers, max_intermediate_count, ...]: the scratch.
        num_dropped: planned boundaries whose states could not be stored.
        answers: the states that are taken while decoding.
    """

    settings = Settings()

    def __init__(self, context: Any, *args: Any, **kwargs: Any) -> None:
        self._plan = self.settings.plan
        self._grid = grid = _kernels_grid(context)
        self._block_size = block = int(getattr(context, "block_size_tokens", grid))
        self._plan.check_block_size(block)
        super().__init__(context, *args, **kwargs)
        if block % grid:
            warnings.warn(
                f"block_size_tokens is {block}, no multiple of the SSD chunk ({grid}): most block boundaries "
                "have no state inside a prefill, and few prompts will resume",
                stacklevel=2,
            )
        self.max_intermediate_count = int(context.max_mamba_intermediate_states_per_step)
        self._scratch = self._new_states(self.max_intermediate_count, self.ssm_states.device)
        self._has_intermediates = False
        self.num_dropped = 0
        shape = int(context.max_requests), _MOST_OFFSETS
        with torch.inference_mode(False):  # others than inference tensors can be written anywhere
            self._intermediate_offsets_cpu = torch.zeros(shape, dtype=torch.int32, device="cpu")
            self._intermediate_counts_cpu = torch.zeros(shape[0], dtype=torch.int32, device="cpu")
            self._intermediate_block_ids_cpu = torch.full(shape, -1, dtype=torch.int32, device="cpu")
            self._eos_cache_block_id_cpu = torch.full(shape[:1], -1, dtype=torch.int32, device="cpu")
        self.answers = AnswerStates(context, self.slots, self._plan) if self.settings.cache_answers else None
        self._restore_pins: list[int] = []
        self._backup: StateTensors | None = None

    def _policy(self) -> PolicyChoice:
        """What `install` was called with; the policy of the host where it was called with none.

        megatron-core's "ref_zero" is about KV blocks: the host frees them with their last request, and their
        states with them. The states of blocks in use are evicted as under "lru".
        """
        policy = self.settings.eviction or super()._policy()
        policy = getattr(policy, "value", policy)
        if isinstance(policy, str):
            policy = "lru" if policy.lower() == "ref_zero" else policy.lower()
        return policy

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
    def intermediate_conv_out(self) -> Tensor:
        return self._scratch.conv

    @property
    def intermediate_ssm_out(self) -> Tensor:
        return self._scratch.ssm

    def _device(self) -> torch.device:
        """Where the live states are; as the host's own, on the current device where there are none."""
        if getattr(self.context, "mamba_ssm_states", None) is None:
            return torch.device(torch.cuda.current_device())
        return super()._device()

    # ---- restores

    def pin_restore(self, block_id: int) -> None:
        """Keep a state that the next step restores."""
        slot = self.get_slot(block_id)
        self.pin(slot)
        self._restore_pins.append(slot)

    def restore_batch(self, pending: Sequence[tuple[int, int]]) -> None:
        """Copy the states of blocks into live slots, (block, live slot) pairs, in one call; unpins them.

        RuntimeError, with nothing copied, where a block has no state: its tokens were skipped already.
        """
        slots = [self.get_slot(block) for block, _ in pending]
        if min(slots) < 0:
            missing = [block for (block, _), slot in zip(pending, slots, strict=True) if slot < 0]
            raise RuntimeError(f"blocks {missing} were to be restored, and have no state")
        for slot in slots:
            self.note_use(slot)
        live = [live for _, live in pending]
        copy_states(self._durable, slots, self._live_states(), live)
        self.unpin_restores()

    def unpin_restores(self) -> None:
        for slot in self._restore_pins:
            self.unpin(slot)
        self._restore_pins.clear()

    # ---- slots of the host's own calls, and hashes

    def allocate_slots_batch(self, block_ids: list[int]) -> list[int]:
        """See the base. In 0.20 as the host's own, which frees no state of a block that a request holds.

        Raises:
            HostCapacityError: too few slots can be freed; nothing is changed.
        """
        blocks = self._checked_blocks(block_ids)
        if hasattr(self.context.kv_block_allocator, "pool_size"):
            self._evict_as_host(blocks)
        return self.slots.allocate(blocks)

    def _evict_as_host(self, blocks: Sequence[int]) -> None:
        """Make room for the blocks' states by evicting states of blocks that no request holds.

        Where neither `install` nor the host chose otherwise, the state of the block that the host used
        longest ago goes first.
        """
        kv, slot_of = self.context.kv_block_allocator, self.slots.tree.slot_by_block
        required = len({block for block in blocks if block not in slot_of})
        missing = required - self.free_count
        if missing <= 0:
            return
        fixed = {*self.slots.pins, *map(slot_of.get, blocks)}
        block_of = {slot: block for block, slot in slot_of.items() if slot not in fixed}
        listed = torch.tensor(list(block_of.values()), dtype=torch.int64, device="cpu")
        holders = kv.block_ref_counts[listed].tolist()
        block_of = {slot: block_of[slot] for slot, held in zip(block_of, holders, strict=True) if not held}
        if len(block_of) < missing:
            raise HostCapacityError(required, len(block_of) + self.free_count)
        states = set(slot_of.values())
        victims = self.slots.next_victims(len(block_of), states.difference(block_of))
        if self.settings.eviction is None and hasattr(kv, "block_timestamps"):
            victims.sort(key=lambda slot: int(kv.block_timestamps[block_of[slot]]))
        self.slots.evict(missing, states.difference(victims[:missing]))

    def register_block_hashes_batch(self, block_ids: list[int], hashes: list[int]) -> None:
        """See the base; a block without a slot gets one with a zero state, where a slot is free.

        megatron-core's own allocator lists such a block, and starts a request that resumes there from zeros.
        """
        blocks, keys = self._checked_blocks(block_ids), integers("hashes", hashes)
        check_lengths(blocks, hashes=keys)
        states = self.slots.tree.slot_by_block
        lacking = [b for b, key in zip(blocks, keys, strict=True) if b not in states and key > 0]
        if lacking:
            reserved = self.slots.reserved.values()
            stateless = [b for b in dict.fromkeys(lacking) if b not in reserved][: self.free_count]
            if stateless:
                _logger.warning("blocks %s are registered without a state; they get a zero state", stateless)
                slots = self.slots.allocate(stateless)
                for tensor in self._durable:
                    tensor[:, slots] = 0
            found = [(b, key) for b, key in zip(blocks, keys, strict=True) if b in states]
            blocks, keys = [b for b, _ in found], [key for _, key in found]  # one without a slot is not found
        super().register_block_hashes_batch(blocks, keys)

    def on_kv_blocks_deregistered(self, block_ids_list: list[int], hashes_to_delete: set[int]) -> None:
        super().on_kv_blocks_deregistered(block_ids_list, hashes_to_delete)
        record_of(self.context).kv_ghosts.add_all(hashes_to_delete, "block")

    # ---- before the step

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
        num_free = self.max_intermediate_count - int(self._intermediate_counts_cpu.sum())
        chosen = sorted(on_grid[: max(0, min(_MOST_OFFSETS, num_free))])
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

    # ---- after the step

    def commit_intermediate_states(self) -> None:
        """Copy what the step's kernels left in scratch and in live slots into durable slots.

        Call once a step, after the forward or the graph replay. Live states are those of chunks that ended on
        a boundary and of decode rows that reached one. Makes one batched copy from each of the two pools.
        Where slots are short, states are not kept; the call does not fail.
        """
        try:
            prompts, answers = self._prompt_states(), self.answers
            reached = {} if answers is None else answers.reached()
            decoded = {block: crossing for block, crossing in reached.items() if block not in prompts}
            sources = {block: StateSource(False, crossing.row) for block, crossing in decoded.items()}
            sources |= prompts  # last: where slots are short, the decode states are dropped first
            if answers is not None:
                make_room_by_rolling(self.slots, answers.tracks(decoded.values()), len(sources))
            taken = self._take(sources)
            if answers is not None:
                answers.commit([(decoded[block], slot) for block, slot in taken.items() if block in decoded])
            self.slots.commit([slot for block, slot in taken.items() if block in prompts])
        finally:
            self._clear_rows(self._prefill_rows())
            self._has_intermediates = False
            record = record_of(self.context)
            record.slots, record.dropped = self.slots.counts, self.num_dropped

    def _prompt_states(self) -> dict[int, StateSource]:
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
        slots, blocks = self.slots, list(sources)
        num_refused = max(0, len(blocks) - slots.num_available)
        chosen, refused = blocks[num_refused:], blocks[:num_refused]
        slots.tree.note_refused(self._hashes_of(refused))
        reserved = slots.reserve(chosen)
        try:
            for in_scratch in (True, False):
                pairs = [
                    (sources[block].index, slot)
                    for block, slot in zip(chosen, reserved, strict=True)
                    if sources[block].in_scratch is in_scratch
                ]
                indices, taken = [index for index, _ in pairs], [slot for _, slot in pairs]
                if pairs and in_scratch:
                    copy_states(self._scratch, indices, self._durable, taken)
                elif pairs:
                    self.store_from_live_batch(taken, indices)
        except BaseException:
            slots.release(reserved)
            raise
        return dict(zip(chosen, reserved, strict=True))

    def _clear_rows(self, rows: slice) -> None:
        self._intermediate_offsets_cpu[rows] = 0
        self._intermediate_counts_cpu[rows] = 0
        self._intermediate_block_ids_cpu[rows] = -1
        self._eos_cache_block_id_cpu[rows] = -1

    # ---- lifetime

    def abandon_step(self) -> None:
        """The rows of the host are gone: nothing planned, pinned or reserved for them remains."""
        self.unpin_restores()
        self._clear_pending()
        self.slots.release()

    def reset(self) -> None:
        """Drop every state, reservation, pin, pending checkpoint and ghost, and zero the scratch."""
        super().reset()
        self._restore_pins.clear()
        self._clear_pending()

    def _clear_pending(self) -> None:
        self._clear_rows(slice(None))
        self._has_intermediates = False
        for tensor in self._scratch:
            tensor.zero_()
        if self.answers is not None:
            self.answers.unsettled.clear()

    # ---- the pool while the host is suspended

    def release_pool(self) -> None:
        """Forget every state and free the durable tensors; scratch stays, because graphs may write it."""
        self.reset()
        self._durable = self._new_states(0, self.ssm_states.device)
        self._backup = None

    def retire(self) -> None:
        """Free scratch, too: the host drops its graphs, and builds another allocator."""
        conv, ssm = self._scratch
        self._scratch = StateTensors(conv[:, :0].clone(), ssm[:, :0].clone())

    def offload_pool(self) -> None:
        """Move the durable tensors to host memory; synchronises."""
        self._backup = StateTensors(_to_host(self.conv_states), _to_host(self.ssm_states))
        self._durable = self._new_states(0, self.ssm_states.device)

    def resume_pool(self) -> None:
        """Allocate the durable tensors again: as they were offloaded, else as zeros. Addresses are new.

        A call that raises, because memory is short, changes nothing; it can be repeated.
        """
        own, backup, device = self._durable, self._backup, self.ssm_states.device
        if any(states.shape[1] != self.max_slots for states in own):
            with torch.inference_mode(False):  # others than inference tensors can be written anywhere
                self._durable = (
                    StateTensors(backup.conv.to(device), backup.ssm.to(device))
                    if backup is not None
                    else self._new_states(self.max_slots, device)
                )
        self._backup = None


def _kernels_grid(context: Any) -> int:
    """The tokens after which the kernels can store a state; a HostCallError where they cannot store any."""
    if householder := getattr(context, "gdp_num_householder", 0):
        raise HostCallError(
            f"context.gdp_num_householder is {householder}; accepted: 0, as megatron-core's kernels of gated "
            "delta products store no states for a prefix cache; pass enable_prefix_caching=False"
        )
    chunk = int(context.mamba_chunk_size)
    grid = int(getattr(context, "ssm_chunk_alignment", None) or chunk)
    if grid % chunk:
        raise HostCallError(f"context.ssm_chunk_alignment is {grid}; accepted: a multiple of {chunk}")
    return grid


@torch.inference_mode(False)
def _to_host(states: Tensor) -> Tensor:
    backup = torch.empty_like(states, device="cpu", pin_memory=states.is_cuda)
    return backup.copy_(states)
