"""Corrections: states and KV blocks of decode steps are cached, so that the next turn reuses an answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..inference.contexts.cache.checkpoint_plan import Boundary, CheckpointPlan, checked_boundaries
from ..inference.contexts.cache.state_slots import StateSlots
from .host_record import RequestTrack, record_of
from .overrides import override
from .prefill_chunks import adopt_twin
from .versions import DYNAMIC_CONTEXT


@dataclass(frozen=True)
class Crossing:
    """A decode row whose step ended on a block boundary, after `position` tokens of its sequence."""

    row: int
    request_id: int
    position: int


def crossings(context: Any) -> list[Crossing]:
    """The block boundaries that the decode rows of the launched step reach. Reads CPU numbers only."""
    num_decodes = context.batch_dimensions.decode_req_count
    if not num_decodes or context.num_speculative_tokens:
        return []  # accepted drafts are not known yet when states could be copied
    start = context.paused_request_count
    size = context.block_size_tokens
    lengths = context.request_kv_length_offsets[start : start + num_decodes].tolist()
    ends = enumerate((length + 1 for length in lengths), start)  # each row computes one token
    return [Crossing(row, int(context.request_ids[row]), end) for row, end in ends if end % size == 0]


def register_block(context: Any, row: int, track: RequestTrack, position: int) -> int:
    """Make the KV block that ends at `position` findable; returns the row's block then, or -1."""
    index = position // context.block_size_tokens - 1
    hashes = track.hashes_to(index + 1)
    kv = context.kv_block_allocator
    if hashes is None or (index and hashes[index - 1] not in kv.kv_hash_to_block_id):
        return -1
    if not adopt_twin(context, row, index, hashes[index]):
        block = int(context.request_to_kv_block_ids[row, index])
        kv.register_kv_block_hashes([block], [hashes[index]], [hashes[index - 1] if index else 0])
    return int(context.request_to_kv_block_ids[row, index])


class AnswerStates:
    """The states that decode steps reach at block boundaries.

    With async scheduling, the last token before a boundary becomes known only later: until then the state
    waits in a reserved slot.
    """

    def __init__(self, context: Any, slots: StateSlots, plan: CheckpointPlan, enabled: bool) -> None:
        """`enabled`: whether answers are cached; if not, no state and no block of a decode is findable."""
        self._context = context
        self._slots = slots
        self._plan = plan
        self._enabled = enabled
        # In reserved slots: with async scheduling, the last token before a boundary becomes known later.
        self.uncommitted: list[tuple[Crossing, int]] = []

    def find_crossings(self) -> dict[int, Crossing]:
        """Block -> the boundary at its end that a decode row reached, and where the plan stores a state."""
        context = self._context
        slots = self._slots
        crossing_of_block: dict[int, Crossing] = {}
        tracks = record_of(context).tracks
        if not tracks or not self._enabled:
            return crossing_of_block
        for crossing in crossings(context):
            track = tracks.get(crossing.request_id)
            if track is None:
                continue
            if track.num_known_tokens >= crossing.position:
                block = register_block(context, crossing.row, track, crossing.position)
            else:
                index = crossing.position // context.block_size_tokens - 1
                block = int(context.request_to_kv_block_ids[crossing.row, index])
            has_slot = block in slots.cached_states.slot_of_block or block in slots.reserved.values()
            if block >= 0 and not has_slot and self._boundary(crossing) is not None:
                crossing_of_block[block] = crossing
        return crossing_of_block

    def _boundary(self, crossing: Crossing) -> Boundary | None:
        """What the plan says of the boundary; None where it stores no state there."""
        stop = crossing.position
        boundaries = checked_boundaries(self._plan, stop - 1, stop, 0, self._context.block_size_tokens, 0)
        return boundaries[0] if boundaries else None

    def commit(self, states: Sequence[tuple[Crossing, int]]) -> None:
        """Make states in reserved slots findable, of which all tokens are known; the others wait."""
        tracks = record_of(self._context).tracks
        for crossing, slot in states:
            if tracks[crossing.request_id].num_known_tokens < crossing.position:
                self.uncommitted.append((crossing, slot))
                continue
            block = self._slots.reserved[slot]
            self._slots.commit_slots([slot])
            self._roll(tracks[crossing.request_id], crossing, block, slot)

    def commit_known(self) -> None:
        """Make the states findable whose last token has become known."""
        if not self.uncommitted:
            return
        states = self.uncommitted
        self.uncommitted = []
        tracks = record_of(self._context).tracks
        ids = self._context.request_ids[: self._context.total_request_count].tolist()
        rows = {request_id: row for row, request_id in enumerate(ids)}
        for crossing, slot in states:
            track = tracks.get(crossing.request_id)
            row = rows.get(crossing.request_id)
            if track is None or row is None:
                self._slots.release([slot])
            elif track.num_known_tokens < crossing.position:
                self.uncommitted.append((crossing, slot))
            else:
                block = register_block(self._context, row, track, crossing.position)
                if block < 0:
                    self._slots.release([slot])
                elif self._slots.commit_slots([slot], [block]) == [slot]:
                    self._roll(track, crossing, block, slot)

    def remove(self, request_ids: Sequence[int]) -> None:
        """Release the states of these requests whose last tokens are not known: the requests end."""
        ended_states = [state for state in self.uncommitted if state[0].request_id in request_ids]
        self.uncommitted = [state for state in self.uncommitted if state not in ended_states]
        self._slots.release([slot for _, slot in ended_states])

    def _roll(self, track: RequestTrack, crossing: Crossing, block: int, slot: int) -> None:
        """The newer decode state of a request replaces its older one."""
        boundary = self._boundary(crossing)
        is_cached = self._slots.cached_states.slot_of(block) == slot
        self._slots.remove_rolling(track)
        if is_cached and boundary is not None and not boundary.is_kept:
            track.rolling_block = block


def _append_tokens(context: Any, tokens: Tensor) -> None:
    """Append the `tokens` that the running requests have sampled, one each."""
    tracks = record_of(context).tracks  # empty where no states are cached
    if not tracks or not len(tokens):
        return
    first_row = context.paused_request_count
    ids = context.request_ids[first_row : first_row + len(tokens)].tolist()
    unfinished_id = context.chunked_prefill_request_id
    for request_id, token in zip(ids, tokens.tolist(), strict=True):
        track = tracks.get(request_id)
        if track is not None and request_id != unfinished_id:
            track.generated.append(token)
    if (allocator := getattr(context, "mamba_slot_allocator", None)) is not None:
        allocator.answers.commit_known()


@override(DYNAMIC_CONTEXT, "update_requests", faults=(18,))
def update_requests(
    original: Callable[..., Any],
    self: Any,
    active_requests_mask: Tensor,
    new_tokens: Tensor,
    new_speculative_tokens: Tensor | None = None,
) -> Any:
    """Also record what each request has sampled, before rows are released and moved."""
    _append_tokens(self, new_tokens)
    return original(self, active_requests_mask, new_tokens, new_speculative_tokens)


@override(DYNAMIC_CONTEXT, "commit_sampled_tokens", faults=(18,))
def commit_sampled_tokens(
    original: Callable[..., None], self: Any, sampled_tokens_cpu: Tensor, *drafts: Any, **options: Any
) -> None:
    """Also record what each request has sampled; with async scheduling the next step runs already."""
    original(self, sampled_tokens_cpu, *drafts, **options)
    _append_tokens(self, sampled_tokens_cpu)


@override(DYNAMIC_CONTEXT, "release_memory_blocks_from_request_indexes", faults=(18,))
def release_memory_blocks_from_request_indexes(
    original: Callable[..., None], self: Any, request_indexes: Tensor
) -> None:
    """Also release what was reserved for the leaving requests."""
    request_ids = self.request_ids[request_indexes].tolist()
    if (allocator := getattr(self, "mamba_slot_allocator", None)) is not None:
        allocator.answers.remove(request_ids)
    original(self, request_indexes)
    record_of(self).remove(request_ids)
