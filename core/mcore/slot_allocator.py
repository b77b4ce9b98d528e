"""Our slot allocator as megatron-core's context holds it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..inference.contexts.cache.checkpoint_plan import (
    Boundary,
    CheckpointPlan,
    checked_boundaries,
    drop_rolling,
    make_room_by_rolling,
)
from ..inference.contexts.cache.eviction import PolicyChoice
from ..inference.contexts.mamba_slot_allocator import MambaSlotAllocator, StateSource
from ..inference.kernels.state_copy import copy_states
from ..inference.kernels.state_tensors import StateTensors
from ..validation import integers
from .cached_answers import Crossing, crossings, register_block, rows_of
from .host_record import RequestTrack, check_lengths, record_of

_logger = logging.getLogger(__package__)


@dataclass(frozen=True)
class Settings:
    """What `install` was called with."""

    plan: CheckpointPlan = field(default_factory=CheckpointPlan)
    eviction: PolicyChoice | None = None
    cache_answers: bool = True


class HostSlotAllocator(MambaSlotAllocator):
    """`MambaSlotAllocator` with what this host needs beyond the contract.

    Restores and commits of a step are batched, a state that waits to be restored is pinned, states are
    taken while decoding, and the durable pool can be released and brought back.
    """

    settings = Settings()

    def __init__(self, context: Any, *args: Any, **kwargs: Any) -> None:
        self.settings.plan.check_block_size(context.block_size_tokens)
        super().__init__(context, *args, **kwargs)
        self._restore_pins: list[int] = []
        self._unsettled: list[tuple[Crossing, int]] = []
        """Decode states in reserved slots, whose last token is not on the CPU yet."""
        self._backup: StateTensors | None = None

    def _choices(self) -> tuple[CheckpointPlan, PolicyChoice]:
        """What `install` was called with; the policy of the host where it was called with none."""
        return self.settings.plan, self.settings.eviction or super()._choices()[1]

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

    # ---- hashes

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

    # ---- checkpoints

    def commit_intermediate_states(self) -> None:
        """Copy what the step's kernels left in scratch and in live slots into durable ones; see the base.

        Live states are those of chunks that ended on a boundary and of decode rows that reached one. One
        copy from each of the two pools.
        """
        try:
            self._commit_step()
        finally:
            self._clear_intermediate_state()
            record = record_of(self.context)
            record.slots, record.dropped = self.slots.counts, self.num_dropped

    def _commit_step(self) -> None:
        prompts = self._collect_commit_data()
        decoded = {block: state for block, state in self._decode_states().items() if block not in prompts}
        sources = {block: StateSource(False, crossing.row) for block, (crossing, _) in decoded.items()}
        sources |= prompts  # last: where slots are short, the decode states are dropped first
        tracks = [self._track(crossing) for crossing, _ in decoded.values()]
        make_room_by_rolling(self.slots, tracks, len(sources))
        for block, slot in self._take(sources).items():
            crossing, settled = decoded.get(block, (None, True))
            if crossing is not None and not settled:
                self._unsettled.append((crossing, slot))
                continue
            self.slots.commit([slot])
            if crossing is not None:
                self._roll(crossing, block, slot)

    def _decode_states(self) -> dict[int, tuple[Crossing, bool]]:
        """Block -> the boundary there that a decode row reached, and whether all tokens before it are known.

        Only boundaries without a state. Where the tokens before one are known, its KV block is registered
        here.
        """
        if not self.settings.cache_answers:
            return {}
        context, tracks = self.context, record_of(self.context).tracks
        states: dict[int, tuple[Crossing, bool]] = {}
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
            if block >= 0 and self._decode_boundary(crossing) and self._lacks_state(block):
                states[block] = crossing, settled
        return states

    def _lacks_state(self, block: int) -> bool:
        return block not in self.slots.tree.slot_by_block and block not in self.slots.reserved.values()

    def _track(self, crossing: Crossing) -> RequestTrack:
        return record_of(self.context).tracks[crossing.request_id]

    def _roll(self, crossing: Crossing, block: int, slot: int) -> None:
        """The newer decode state of a request replaces its older one."""
        boundary = self._decode_boundary(crossing)
        own = self.slots.tree.slot_of(block) == slot
        rolls = own and boundary is not None and not boundary.keeps
        drop_rolling(self.slots, self._track(crossing))
        if rolls:
            self._track(crossing).rolling_block = block

    def _decode_boundary(self, crossing: Crossing) -> Boundary | None:
        """What the plan says of the boundary; None where it stores no state there."""
        stop, size = crossing.position, self.context.block_size_tokens
        found = checked_boundaries(self.settings.plan, stop - 1, stop, 0, size, 0)
        return found[0] if found else None

    def settle_answers(self) -> None:
        """Make decode states findable whose last token has become known."""
        waiting, self._unsettled = self._unsettled, []
        tracks = record_of(self.context).tracks
        rows = rows_of(self.context, [crossing.request_id for crossing, _ in waiting]) if waiting else {}
        for crossing, slot in waiting:
            track, row = tracks.get(crossing.request_id), rows.get(crossing.request_id)
            if track is None or row is None:
                self.slots.release([slot])
            elif track.known_tokens < crossing.position:
                self._unsettled.append((crossing, slot))
            else:
                block = register_block(self.context, row, track, crossing.position)
                if block < 0:
                    self.slots.release([slot])
                elif self.slots.commit([slot], [block]) == [slot]:
                    self._roll(crossing, block, slot)

    def drop_unsettled(self, request_ids: Sequence[int]) -> None:
        """Release the states of these requests whose last tokens are not known: the requests end."""
        if not self._unsettled:
            return
        gone = [state for state in self._unsettled if state[0].request_id in request_ids]
        self._unsettled = [state for state in self._unsettled if state not in gone]
        self.slots.release([slot for _, slot in gone])

    def on_kv_blocks_deregistered(self, block_ids_list: list[int], hashes_to_delete: set[int]) -> None:
        super().on_kv_blocks_deregistered(block_ids_list, hashes_to_delete)
        record_of(self.context).kv_ghosts.add_all(hashes_to_delete, "block")

    # ---- lifetime

    def abandon_step(self) -> None:
        """The rows of the host are gone: nothing planned, pinned or reserved for them remains."""
        self.unpin_restores()
        self._reset_intermediates()
        self._unsettled.clear()
        self.slots.release()

    def reset(self) -> None:
        super().reset()
        self._restore_pins.clear()
        self._unsettled.clear()

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


@torch.inference_mode(False)
def _to_host(states: Tensor) -> Tensor:
    backup = torch.empty_like(states, device="cpu", pin_memory=states.is_cuda)
    return backup.copy_(states)
