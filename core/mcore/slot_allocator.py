"""Our slot allocator as megatron-core's context holds it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from ..errors import MambaSlotCapacityError
from ..inference.contexts.cache.checkpoint_plan import MAX_COMPARED, CheckpointPlan, best_shared_depth
from ..inference.contexts.cache.eviction import PolicyChoice
from ..inference.contexts.hosts.states import HostSettings, device_of
from ..inference.contexts.hosts.step_plan import WrittenStates
from ..inference.contexts.mamba_slot_allocator import MambaSlotAllocator
from ..inference.kernels.state_pools import ConvAndSsm
from ..validation import integers
from .cached_answers import AnswerStates
from .host_record import HostCallError, check_lengths, record_of

_logger = logging.getLogger(__package__)


def _kernel_grid(context: Any) -> int:
    """The tokens after which the kernels can store a state; a HostCallError where they store none."""
    if householder := getattr(context, "gdp_num_householder", 0):
        raise HostCallError(
            f"context.gdp_num_householder is {householder}; accepted: 0, as megatron-core's kernels of "
            "gated delta products store no states for a prefix cache; pass enable_prefix_caching=False"
        )
    chunk = int(context.mamba_chunk_size)
    grid = int(getattr(context, "ssm_chunk_alignment", None) or chunk)
    if grid % chunk:
        raise HostCallError(f"context.ssm_chunk_alignment is {grid}; accepted: a multiple of {chunk}")
    return grid


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


class HostSlotAllocator(MambaSlotAllocator):
    """`MambaSlotAllocator` with what megatron-core's context calls beyond it, under its names."""

    settings = Settings()

    def __init__(self, context: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(context, *args, **kwargs)
        # The host's tests read and write what is planned by the host's names.
        self._intermediate_offsets_cpu = self._planned.offsets
        self._intermediate_counts_cpu = self._planned.counts
        self._intermediate_block_ids_cpu = self._planned.inner_blocks
        self._eos_cache_block_id_cpu = self._planned.end_blocks
        self.answers = AnswerStates(context, self.slots, self._plan, self.settings.cache_answers)
        self._record = record_of(context)
        if self._record.turnover is not None:
            self.slots.cached_states.turnover = self._record.turnover
        self._record.turnover = self.slots.cached_states.turnover
        self.num_dropped = self._record.num_dropped
        self._restore_pins: list[int] = []
        self._backup: ConvAndSsm | None = None

    @property
    def _has_intermediates(self) -> bool:
        return self._planned.has_planned

    @_has_intermediates.setter
    def _has_intermediates(self, value: bool) -> None:
        self._planned.has_planned = value

    def _host_settings(self) -> HostSettings:
        """With what `install` was called with; the live states may be on the device of tensors to come."""
        context = self.context
        is_absent = getattr(context, "mamba_ssm_states", None) is None
        device = torch.device(torch.cuda.current_device()) if is_absent else device_of(context)
        host_policy = getattr(context, "prefix_caching_eviction_policy", "lru")
        policy: Any = self.settings.eviction or getattr(host_policy, "value", host_policy)
        if isinstance(policy, str):  # "ref_zero" is about KV blocks
            policy = "lru" if policy.lower() == "ref_zero" else policy.lower()
        return HostSettings(policy, self.settings.plan, _kernel_grid(context), device)

    def _shared_tokens(self, req: Any, num_known: int) -> int:
        """See the base; those that wait in the engine to which a request of this context was added."""
        engine = self._record.engine()
        if engine is None or num_known >= len(req.precomputed_block_hashes):
            return 0
        waiting_ids = islice(chain(engine.waiting_request_ids, self._record.unqueued_ids), MAX_COMPARED)
        requests = [engine.get_request(number) for number in waiting_ids if number != req.request_id]
        waiting_hashes = [request.precomputed_block_hashes for request in requests]
        return best_shared_depth(req.precomputed_block_hashes, waiting_hashes, num_known) * self._block_size

    def get_intermediate_cpu_data(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """See the base; a step without a CUDA graph needs no rows of padding."""
        self.context.mamba_metadata._mambaslots_graph = self.context.using_cuda_graph_this_step()
        return super().get_intermediate_cpu_data()

    def pin_restore(self, block_id: int) -> None:
        """Keep a state that the next step restores."""
        slot = self.get_slot(block_id)
        self.pin(slot)
        self._restore_pins.append(slot)

    def restore_batch(self, restores: Sequence[tuple[int, int]]) -> None:
        """Copy the states of (block, live slot) pairs in one call, and unpin them.

        RuntimeError, with nothing copied, where a block has no state: its tokens were skipped already.
        """
        slots = [self.get_slot(block) for block, _ in restores]
        if min(slots) < 0:
            blocks = [block for (block, _), slot in zip(restores, slots, strict=True) if slot < 0]
            raise RuntimeError(f"blocks {blocks} were to be restored, and have no state")
        for slot in slots:
            self.slots.cached_states.record_use(slot)
        self._host_states.restore(slots, [live_slot for _, live_slot in restores])
        self.unpin_restores()

    def unpin_restores(self) -> None:
        for slot in self._restore_pins:
            self.slots.unpin(slot)
        self._restore_pins.clear()

    def allocate_slots_batch(self, block_ids: list[int]) -> list[int]:
        """See the base; HostCapacityError, with nothing changed, where 0.20's own would not free so many."""
        blocks = self._checked_blocks(block_ids)
        if hasattr(self.context.kv_block_allocator, "pool_size"):
            self._evict_as_host(blocks)
        return self.slots.allocate_committed(blocks)

    def _evict_as_host(self, blocks: Sequence[int]) -> None:
        """Make room by evicting states of blocks that no request holds, by default the oldest of the host."""
        kv = self.context.kv_block_allocator
        slot_of_block = self.slots.cached_states.slot_of_block
        num_required = len({block for block in blocks if block not in slot_of_block})
        num_missing = num_required - self.free_count
        if num_missing <= 0:
            return
        fixed_slots = {*self.slots.pins, *map(slot_of_block.get, blocks)}
        candidates = [block for block, slot in slot_of_block.items() if slot not in fixed_slots]
        ref_counts = kv.block_ref_counts[torch.tensor(candidates, dtype=torch.int64, device="cpu")].tolist()
        blocks_and_counts = zip(candidates, ref_counts, strict=True)
        block_of_slot = {slot_of_block[block]: block for block, count in blocks_and_counts if not count}
        if len(block_of_slot) < num_missing:
            raise HostCapacityError(num_required, len(block_of_slot) + self.free_count)
        committed_slots = set(slot_of_block.values())
        victims = self.slots.next_victims(len(block_of_slot), committed_slots.difference(block_of_slot))
        if self.settings.eviction is None and hasattr(kv, "block_timestamps"):
            victims.sort(key=lambda slot: int(kv.block_timestamps[block_of_slot[slot]]))
        self.slots.evict(num_missing, committed_slots.difference(victims[:num_missing]))

    def register_block_hashes_batch(self, block_ids: list[int], hashes: list[int]) -> None:
        """See the base; a block without a slot gets one with a zero state, where a slot is free."""
        blocks = self._checked_blocks(block_ids)
        hashes = integers("hashes", hashes)
        check_lengths(blocks, hashes=hashes)
        slot_of_block = self.slots.cached_states.slot_of_block
        pairs = list(zip(blocks, hashes, strict=True))
        slotless = [block for block, prefix_hash in pairs if block not in slot_of_block and prefix_hash > 0]
        if slotless:
            reserved = self.slots.reserved.values()
            stateless = [block for block in dict.fromkeys(slotless) if block not in reserved]
            del stateless[self.free_count :]
            if stateless:
                _logger.warning("blocks %s are registered without a state; they get a zero state", stateless)
                slots = self.slots.allocate_committed(stateless)
                for tensor in self._host_states.durable:
                    tensor[:, slots] = 0
            hashes = [prefix_hash for block, prefix_hash in pairs if block in slot_of_block]
            blocks = [block for block in blocks if block in slot_of_block]  # one without a slot is not found
        super().register_block_hashes_batch(blocks, hashes)

    def on_kv_blocks_deregistered(self, block_ids_list: list[int], hashes_to_delete: set[int]) -> None:
        super().on_kv_blocks_deregistered(block_ids_list, hashes_to_delete)
        self._record.kv_ghosts.add_all(hashes_to_delete, "block")

    def commit_intermediate_states(self) -> None:
        """See the base; decode rows that reached a boundary have their states committed, too."""
        try:
            super().commit_intermediate_states()
        finally:
            self.save_counts()

    def save_counts(self) -> None:
        """Let the context's record have the counts of now; it outlives the context."""
        self._record.slots = self.slots.counts
        self._record.num_dropped = self.num_dropped

    def _commit(self, written: WrittenStates) -> None:
        prompt_blocks = {*written.inner_blocks, *written.end_blocks}
        crossing_of_block = self.answers.find_crossings()
        blocks = [block for block in crossing_of_block if block not in prompt_blocks]
        if not blocks:
            super()._commit(written)
            return
        tracks = [self._record.tracks[crossing_of_block[block].request_id] for block in blocks]
        self.slots.remove_rolling_states(tracks, len(blocks) + len(prompt_blocks))
        room = max(0, self.slots.num_available - len(prompt_blocks))  # the states of prompts come first
        self.slots.cached_states.remember_refused(list(map(self.slots.tree.hash_of, blocks[room:])))
        self.num_dropped += len(blocks[room:])
        del blocks[room:]
        slots = self.slots.reserve_slots(blocks)
        crossings = [crossing_of_block[block] for block in blocks]
        try:
            self.store_from_live_batch(slots, [crossing.row for crossing in crossings])
            super()._commit(written)
        except BaseException:
            self.slots.release(slots)
            raise
        self.answers.commit(list(zip(crossings, slots, strict=True)))

    def abort_step(self) -> None:
        """The rows of the host are gone: nothing planned, pinned or reserved for them remains."""
        self.unpin_restores()
        self._clear_planned()
        self.slots.release_all()

    def reset(self) -> None:
        super().reset()
        self._restore_pins.clear()

    def _clear_planned(self) -> None:
        super()._clear_planned()
        self.answers.uncommitted.clear()

    def deallocate_pool(self) -> None:
        """Forget every state and free the durable tensors; scratch stays, because graphs may write it."""
        self.reset()
        self._host_states.durable = self._host_states.zeros(0)
        self._backup = None

    def deallocate_scratch(self) -> None:
        """Free scratch, too: the host drops its graphs, and builds another allocator."""
        self.save_counts()
        self._host_states.scratch = self._host_states.zeros(0)

    @torch.inference_mode(False)  # others than inference tensors can be written anywhere
    def offload_pool(self) -> None:
        """Move the durable tensors to the CPU's memory; synchronises."""
        copies = [
            torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
            for tensor in self._host_states.durable
        ]
        self._backup = ConvAndSsm(*copies)
        self._host_states.durable = self._host_states.zeros(0)

    @torch.inference_mode(False)
    def allocate_pool(self) -> None:
        """Allocate the durable tensors again, offloaded or zero. A call that raises can be repeated."""
        if self.ssm_states.shape[1] != self.max_slots:
            device = self.ssm_states.device
            self._host_states.durable = (
                self._host_states.zeros(self.max_slots)
                if self._backup is None
                else ConvAndSsm(self._backup.conv.to(device), self._backup.ssm.to(device))
            )
        self._backup = None
