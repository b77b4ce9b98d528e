"""Where a request can resume: one look-up over KV blocks and states."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...cache_stats import ComputeReason, Span
from ..policies.prefix_hash import PrefixHashChain
from .kv_block_allocator import KVBlockAllocator, Parent
from .mamba_slot_allocator import MambaSlotAllocator


@dataclass(frozen=True)
class PrefixMatch:
    """What the cache knows of a sequence; nothing is held or pinned by it.

    Attributes:
        blocks: the registered KV blocks of its longest known prefix.
        resume_tokens: the deepest boundary <= N-1 within them that has a state; 0 = start from zeros.
        resume_slot: the durable slot of that state, or -1.
        seen_tokens: how far the sequence follows a known path, evicted blocks included.
        version: of the index; the match holds as long as `PrefixIndex.version` is this.
        spans: why each token from `resume_tokens` to N is computed, in order and without gaps.
    """

    blocks: tuple[int, ...]
    resume_tokens: int
    resume_slot: int
    seen_tokens: int
    spans: tuple[Span, ...]
    version: tuple[int, int] = (0, 0)


class PrefixIndex:
    """Matches token sequences against both allocators of a context."""

    def __init__(
        self, block_size_tokens: int, kv_blocks: KVBlockAllocator, slots: MambaSlotAllocator | None
    ) -> None:
        self._block_size = block_size_tokens
        self._kv_blocks = kv_blocks
        self._slots = slots

    @property
    def version(self) -> tuple[int, int]:
        """Changes with every departure of a block or a state."""
        return self._kv_blocks.departures, self._slots.departures if self._slots else 0

    def match(
        self, chain: PrefixHashChain, length: int, held: Sequence[int] = (), resume: bool = True
    ) -> PrefixMatch:
        """Match the first `length` tokens of the sequence that `chain` hashes (at least their whole blocks).

        `held`: the registered blocks of its head that the caller holds already; states within them are not
        looked for. `resume` False shares KV but starts from zeros: every token is computed.
        """
        slots = self._slots
        if slots is None:
            return PrefixMatch((), 0, -1, 0, (Span(0, length, "disabled"),), self.version)
        size = self._block_size
        whole = length // size
        keys = chain.keys[:whole]
        first = len(held)
        parent: Parent = held[-1] if held else chain.salt
        found = self._kv_blocks.match_chain(parent, keys[first:], chain.tokens[first:whole])
        blocks = [*held, *found]
        seen = len(blocks)
        while seen < whole and keys[seen] in self._kv_blocks.ghosts:
            seen += 1
        if not resume:
            return PrefixMatch(
                tuple(blocks), 0, -1, seen * size, (Span(0, length, "disabled"),), self.version
            )

        reachable = min(len(blocks), (length - 1) // size)
        depth = next((d for d in range(reachable, first, -1) if slots.has_state(blocks[d - 1])), 0)
        slot = slots.get_slot(blocks[depth - 1]) if depth else -1
        spans = tuple(self._spans(keys, depth, reachable, len(blocks), seen, length))
        return PrefixMatch(tuple(blocks), depth * size, slot, seen * size, spans, self.version)

    def resumable_blocks(self, chain: PrefixHashChain) -> list[int]:
        """The KV blocks up to the deepest state of the sequence that `chain` hashes."""
        if self._slots is None:
            return []
        blocks = self._kv_blocks.match_chain(chain.salt, chain.keys, chain.tokens)
        while blocks and not self._slots.has_state(blocks[-1]):
            blocks.pop()
        return blocks

    def _spans(
        self, keys: list[int], depth: int, reachable: int, matched: int, seen: int, length: int
    ) -> Iterator[Span]:
        """From the resume point on: lost states, states never taken, lost KV, the unknown. In blocks."""
        ghosts = self._slots.ghosts if self._slots is not None else ()
        lost = next((d for d in range(reachable, depth, -1) if keys[d - 1] in ghosts), depth)
        lost_reason: ComputeReason = "state_evicted"
        if (
            lost > depth
            and self._slots is not None
            and self._slots.ghosts.reason(keys[lost - 1]) == "capacity"
        ):
            lost_reason = "capacity"
        whole = len(keys)
        not_taken: ComputeReason = "branch_first_seen" if seen < whole else "state_not_taken"
        tail: ComputeReason = "partial_block" if seen == whole else "never_seen"
        start = depth * self._block_size
        ends: tuple[tuple[int, ComputeReason], ...] = (
            (lost, lost_reason),
            (reachable, not_taken),
            (matched, "last_token"),
            (seen, "kv_evicted"),
        )
        for end_block, reason in ends:
            if end_block * self._block_size > start:
                yield Span(start, end_block * self._block_size, reason)
                start = end_block * self._block_size
        if length > start:
            yield Span(start, length, tail)
