"""Our slot allocator as megatron-core's context holds it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..inference.contexts.mamba_slot_allocator import MambaSlotAllocator
from ..inference.kernels.state_copy import copy_states
from ..inference.policies.checkpoint_plan import CheckpointPlan
from .answers import Crossing, crossings, register_block, rows_of
from .host_record import record_of


@dataclass(frozen=True)
class Settings:
    """What `install` was called with."""

    plan: CheckpointPlan = field(default_factory=CheckpointPlan)
    eviction: str | None = None
    cache_answers: bool = True


@dataclass(frozen=True)
class _Source:
    """Where a state is copied from: a scratch row, or the live slot of a request row.

    `crossing`, of a decode row; `settled`: whether all tokens before it are known.
    """

    from_scratch: bool
    index: int
    crossing: Crossing | None = None
    settled: bool = True


@dataclass(frozen=True)
class _Unsettled:
    """A decode state in a reserved slot, whose last token is not on the CPU yet."""

    crossing: Crossing
    slot: int


class HostSlotAllocator(MambaSlotAllocator):
    """`MambaSlotAllocator` with what this host needs beyond the contract.

    Restores and commits of a step are batched, a state that waits to be restored is pinned, states are
    taken while decoding, and the durable pool can be released and brought back.
    """

    settings = Settings()

    def __init__(self, context: Any, *args: Any, **kwargs: Any) -> None:
        self.settings.plan.check_block_size(context.block_size_tokens)
        context.checkpoint_plan = self.settings.plan
        counted = hasattr(context, "max_mamba_intermediate_states_per_step")
        if not counted:  # megatron-core 0.18, whose mixer writes as many scratch rows as its metadata has
            context.max_mamba_intermediate_states_per_step = context.mamba_metadata.max_intermediate_count
        super().__init__(context, *args, **kwargs)
        if not counted:
            del context.max_mamba_intermediate_states_per_step
        # What transfer_intermediate_to_gpu fills, under the host's names.
        self._intermediate_offsets_gpu = self._intermediate._offsets_device
        self._intermediate_counts_gpu = self._intermediate._counts_device
        self.planned_rows: set[int] = set()
        self._restore_pins: list[int] = []
        self._unsettled: list[_Unsettled] = []
        self._backup: tuple[Tensor, Tensor] | None = None

    def _policy(self) -> object:
        return super()._policy() if self.settings.eviction is None else self.settings.eviction

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
        copy_states(self._durable_states(), slots, self._live_states(), live)
        self.unpin_restores()

    def unpin_restores(self) -> None:
        for slot in self._restore_pins:
            self.unpin(slot)
        self._restore_pins.clear()

    # ---- checkpoints

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
        super().compute_and_store_offsets(
            req,
            current_id,
            skip_tokens,
            prefill_chunk_length,
            num_matched_blocks,
            matched_block_ids,
            overall_required_blocks,
        )
        self.planned_rows.add(current_id)

    def commit_intermediate_states(self) -> None:
        """Copy what the step's kernels left in scratch and in live slots into durable ones; see the base.

        Live states are those of chunks that ended on a boundary and of decode rows that reached one. One
        copy from each of the two pools.
        """
        try:
            self._commit_step()
        finally:
            self._intermediate.clear()
            self.planned_rows.clear()

    def _commit_step(self) -> None:
        sources = self._answer_sources()  # first to go where slots are short
        sources.update(self._prompt_sources())
        self._make_room(sources)
        chosen = list(sources)[-self.available_count :] if self.available_count else []
        for block in sources.keys() - set(chosen):
            key = int(self.context.kv_block_allocator.block_hashes[block])
            self.ghosts.add(key, "capacity")
        slots = self.reserve(chosen)
        try:
            taken = [(sources[block], slot) for block, slot in zip(chosen, slots, strict=True)]
            scratch = [(source.index, slot) for source, slot in taken if source.from_scratch]
            live = [(source.index, slot) for source, slot in taken if not source.from_scratch]
            if scratch:
                self._copy_intermediate_to_cache([i for i, _ in scratch], [slot for _, slot in scratch])
            if live:
                self.store_from_live_batch([slot for _, slot in live], [row for row, _ in live])
        except BaseException:
            self.release_reservation(slots)
            raise
        for block, (source, slot) in zip(chosen, taken, strict=True):
            if source.crossing is not None and not source.settled:
                self._unsettled.append(_Unsettled(source.crossing, slot))
                continue
            self.commit([slot])
            if source.crossing is not None:
                self._roll(source.crossing, block, slot)

    def _prompt_sources(self) -> "dict[int, _Source]":
        """Planned boundaries of this step's chunks, shallow ones first, chunk ends last."""
        collected = self._intermediate.collect()
        if collected is None:
            return {}
        blocks, scratch, end_blocks, end_rows, hashes = collected
        origins = [_Source(True, row) for row in scratch] + [_Source(False, row) for row in end_rows]
        sources: dict[int, _Source] = {}
        for block, key, source in zip(blocks + end_blocks, hashes, origins, strict=True):
            if key > 0 and self._lacks_state(block) and self.hash_to_block_id.get(key, block) == block:
                sources.setdefault(block, source)
        return sources

    def _answer_sources(self) -> "dict[int, _Source]":
        """Boundaries that decode rows reached; where its tokens are known the KV block is registered."""
        if not self.settings.cache_answers:
            return {}
        context, tracks = self.context, record_of(self.context).tracks
        sources: dict[int, _Source] = {}
        for crossing in crossings(context):
            track = tracks.get(crossing.request_id)
            if track is None:
                continue
            settled = track.known_tokens >= crossing.position
            if settled:
                block = register_block(context, crossing.row, track, crossing.position)
            else:  # async scheduling: the last token is on the device only
                index = crossing.position // context.block_size_tokens - 1
                block = int(context.request_to_kv_block_ids[crossing.row, index])
            if block >= 0 and self.settings.plan.decode != "off" and self._lacks_state(block):
                sources[block] = _Source(False, crossing.row, crossing, settled)
        return sources

    def _lacks_state(self, block: int) -> bool:
        return not self.has_state(block) and block not in self.reserved_blocks

    def _make_room(self, sources: "dict[int, _Source]") -> None:
        """Where slots are short, a request's older decode state goes before anybody else's state."""
        for source in sources.values():
            if self.free_count >= len(sources):
                return
            if source.crossing is not None:
                self._drop_rolling(source.crossing)

    def _roll(self, crossing: Crossing, block: int, slot: int) -> None:
        """The newer decode state of a request replaces its older one."""
        self._drop_rolling(crossing)
        track = record_of(self.context).tracks[crossing.request_id]
        if self.get_slot(block) == slot and not self.settings.plan.keeps_decode_state(crossing.position):
            track.rolling_block = block

    def _drop_rolling(self, crossing: Crossing) -> None:
        """Unless somebody resumed from it."""
        track = record_of(self.context).tracks[crossing.request_id]
        slot = self.get_slot(track.rolling_block) if track.rolling_block >= 0 else -1
        if slot < 0 or self.was_used(slot) or self.drop_state(track.rolling_block):
            track.rolling_block = -1

    def settle_answers(self) -> None:
        """Make decode states findable whose last token has become known."""
        waiting, self._unsettled = self._unsettled, []
        tracks = record_of(self.context).tracks
        rows = rows_of(self.context, [each.crossing.request_id for each in waiting]) if waiting else {}
        for each in waiting:
            crossing, track = each.crossing, tracks.get(each.crossing.request_id)
            row = rows.get(crossing.request_id)
            if track is None or row is None:
                self.release_reservation([each.slot])
            elif track.known_tokens < crossing.position:
                self._unsettled.append(each)
            else:
                block = register_block(self.context, row, track, crossing.position)
                if block < 0:
                    self.release_reservation([each.slot])
                elif self.commit([each.slot], [block]) == [each.slot]:
                    self._roll(crossing, block, each.slot)

    def drop_unsettled(self, request_ids: Sequence[int]) -> None:
        """These requests leave before the last token of a state became known."""
        if not self._unsettled:
            return
        gone = [each for each in self._unsettled if each.crossing.request_id in request_ids]
        self._unsettled = [each for each in self._unsettled if each not in gone]
        self.release_reservation([each.slot for each in gone])

    def on_kv_blocks_deregistered(self, block_ids_list: list[int], hashes_to_delete: set[int]) -> None:
        super().on_kv_blocks_deregistered(block_ids_list, hashes_to_delete)
        ghosts = record_of(self.context).kv_ghosts
        for key in hashes_to_delete:
            ghosts.add(key, "evicted")

    # ---- lifetime

    def abandon_step(self) -> None:
        """The rows of the host are gone: nothing planned, pinned or reserved for them remains."""
        self.unpin_restores()
        self._intermediate.reset()
        self.planned_rows.clear()
        self._unsettled.clear()
        self.release_reservation([slot for slot in list(self._reserved) if self.is_reserved(slot)])

    def reset(self) -> None:
        super().reset()
        self._restore_pins.clear()
        self._unsettled.clear()
        self.planned_rows.clear()

    # ---- the pool while the host is suspended

    def release_pool(self) -> None:
        """Forget every state and free the durable tensors; scratch stays, because graphs may write it."""
        self.reset()
        self._own_conv, self._own_ssm = self._emptied()
        self._backup = None

    def retire(self) -> None:
        """Free scratch, too: the host drops its graphs, and builds another allocator."""
        self.intermediate_conv_out = self._intermediate.conv_out = self._own_conv
        self.intermediate_ssm_out = self._intermediate.ssm_out = self._own_ssm

    def offload_pool(self) -> None:
        """Move the durable tensors to host memory; synchronises."""
        self._backup = (_to_host(self._own_conv), _to_host(self._own_ssm))
        self._own_conv, self._own_ssm = self._emptied()

    def resume_pool(self) -> None:
        """Allocate the durable tensors again: as they were offloaded, else as zeros. Addresses are new."""
        if self._own_conv.shape[1] == self.max_slots:
            return
        shape = (self.num_mamba_layers, self.max_slots)
        device = self._own_conv.device
        if self._backup is None:
            self._own_conv = self._own_conv.new_zeros(*shape, *self._own_conv.shape[2:])
            self._own_ssm = self._own_ssm.new_zeros(*shape, *self._own_ssm.shape[2:])
        else:
            self._own_conv, self._own_ssm = (part.to(device) for part in self._backup)
        self._backup = None

    def _emptied(self) -> tuple[Tensor, Tensor]:
        return (
            self._own_conv.new_empty(self.num_mamba_layers, 0, *self._own_conv.shape[2:]),
            self._own_ssm.new_empty(self.num_mamba_layers, 0, *self._own_ssm.shape[2:]),
        )


def _to_host(states: Tensor) -> Tensor:
    backup = torch.empty_like(states, device="cpu", pin_memory=states.is_cuda)
    return backup.copy_(states)
