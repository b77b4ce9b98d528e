"""The states one step takes: slots reserved before the forward, committed after it."""

from collections.abc import Sequence
from dataclasses import replace

from ...request import DynamicInferenceRequest
from ..policies.checkpoint_plan import KINDS_BY_WORTH, Boundary
from .kv_block_allocator import KVBlockAllocator
from .mamba_slot_allocator import MambaSlotAllocator
from .scheduled_chunk import ScheduledChunk


class StepCheckpoints:
    """Carries the planned boundaries of scheduled chunks into durable slots."""

    def __init__(
        self, slots: MambaSlotAllocator, kv_blocks: KVBlockAllocator, block_size_tokens: int
    ) -> None:
        self._slots = slots
        self._kv_blocks = kv_blocks
        self._block_size = block_size_tokens

    def boundary_keys(self, chunk: ScheduledChunk) -> set[int]:
        """The hashes under which the chunk's planned states will be found."""
        return {self._key(chunk, boundary.position) for boundary in chunk.boundaries}

    def _key(self, chunk: ScheduledChunk, position: int) -> int:
        request = chunk.request
        hashes = request.hashes
        hashes.extend_to(request.tokens, position)
        if position > len(request.tokens):  # drafts enter no hash that is kept
            hashes = hashes.fork()
            hashes.extend_to([*request.tokens, *chunk.drafts], position)
        return hashes.keys[position // self._block_size - 1]

    def reserve(self, chunks: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
        """Reserve a slot for each boundary that has no state yet, as far as slots go, without error.

        Returns the chunks with their `destinations`. May evict states, but none for a boundary that only
        drafts reach: such get the slots that are free.
        """
        wanted: dict[int, tuple[ScheduledChunk, Boundary]] = {}
        guessed: dict[int, tuple[ScheduledChunk, Boundary]] = {}
        for chunk in chunks:
            for boundary in chunk.boundaries:
                key = self._key(chunk, boundary.position)
                if key not in self._slots.hash_to_block_id:
                    certain = boundary.position <= len(chunk.request.tokens)
                    (wanted if certain else guessed).setdefault(key, (chunk, boundary))
        by_worth = sorted(wanted, key=lambda key: KINDS_BY_WORTH.index(wanted[key][1].kind))
        self._make_room([wanted[key] for key in by_worth])
        available = self._slots.available_count
        for key in by_worth[available:]:
            self._slots.ghosts.add(key, "capacity")
        chosen = [wanted[key] for key in by_worth[:available]]
        if guessed:
            free = max(0, self._slots.free_count - len(chosen))
            chosen += [guessed[key] for key in guessed if key not in wanted][:free]
        slots = self._slots.reserve([self._block(chunk, boundary) for chunk, boundary in chosen])
        destinations: dict[int, dict[int, int]] = {}
        for (chunk, boundary), slot in zip(chosen, slots, strict=True):
            destinations.setdefault(chunk.request.row, {})[boundary.position] = slot
        return [
            replace(chunk, destinations=destinations[chunk.request.row])
            if chunk.request.row in destinations
            else chunk
            for chunk in chunks
        ]

    def _block(self, chunk: ScheduledChunk, boundary: Boundary) -> int:
        return chunk.request.blocks[boundary.position // self._block_size - 1]

    def _make_room(self, wanted: list[tuple[ScheduledChunk, Boundary]]) -> None:
        """Where slots are short, a request's older decode state goes before anybody else's state."""
        for chunk, boundary in wanted:
            if self._slots.free_count >= len(wanted):
                return
            if boundary.kind == "decode":
                self._drop_rolling_state(chunk.request)

    def _drop_rolling_state(self, request: DynamicInferenceRequest) -> None:
        """The newer state of an answer replaces the older, unless somebody resumed from that."""
        block = request.rolling_block
        slot = self._slots.get_slot(block) if block >= 0 else -1
        if slot < 0 or self._slots.was_used(slot) or self._slots.drop_state(block):
            request.rolling_block = -1

    def settle(self, step: Sequence[ScheduledChunk], cut: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
        """Once drafts are verified: `cut` is what stays of the chunks of `step`, in the same order.

        Gives back slots of boundaries not reached, and reserves some for those reached where none was free
        while they were guesses. Returns chunks with these as `destinations`, which states must be copied to.
        """
        unserved = []
        for planned, chunk in zip(step, cut, strict=True):
            if planned is not chunk:
                beyond = planned.destinations.keys() - chunk.destinations.keys()
                self._slots.release_reservation([planned.destinations[position] for position in beyond])
                missing = tuple(b for b in chunk.boundaries if b.position not in chunk.destinations)
                if missing:
                    unserved.append(replace(chunk, boundaries=missing, destinations={}))
        if not unserved:
            return []
        reserved = {self._key(chunk, position) for chunk in cut for position in chunk.destinations}
        return self.reserve(
            [
                replace(
                    chunk,
                    boundaries=tuple(
                        b for b in chunk.boundaries if self._key(chunk, b.position) not in reserved
                    ),
                )
                for chunk in unserved
            ]
        )

    def commit(self, chunk: ScheduledChunk) -> dict[int, int]:
        """Make the states of a launched chunk findable; its request's blocks are registered already.

        Returns boundary -> the committed slot that holds its state, which is the reserved one or one that
        another request committed for the same prefix; -1 where the prefix cannot be registered.
        """
        request = chunk.request
        committed: dict[int, int] = {}
        for position, slot in sorted(chunk.destinations.items()):
            depth = position // self._block_size
            if depth > request.immutable_blocks:
                self._slots.release_reservation([slot])
                committed[position] = -1
                continue
            block = request.blocks[depth - 1]
            (committed[position],) = self._slots.commit([slot], [block])
            if chunk.decoding:
                self._drop_rolling_state(request)
                if committed[position] == slot and not request.plan.keeps_decode_state(position):
                    request.rolling_block = block
        return committed

    def trim_path(self, request: DynamicInferenceRequest) -> None:
        """Hold the request's path to its plan's cap: the shallowest states go, the deepest and forks stay."""
        most = request.plan.max_states_per_path
        if most is None:
            return
        path = request.blocks[: request.immutable_blocks]
        states = [block for block in path if self._slots.has_state(block)]
        excess = len(states) - most
        for block in states[:-1]:
            if excess <= 0:
                return
            if self._kv_blocks.child_count(block) < 2 and self._slots.drop_state(block):
                excess -= 1
