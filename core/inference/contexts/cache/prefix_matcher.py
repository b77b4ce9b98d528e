"""How a match is found, and how an earlier one is made right again."""

from collections.abc import Sequence

from .compute_reasons import Span, compute_spans
from .durable_slots import DurableSlots
from .prefix_hash import PrefixHashChain
from .prefix_match import MatchBasis, PrefixMatch
from .prefix_tree import PrefixTree

WINDOW = 512
"""How many blocks are looked up at once, so that a long prompt that matches little is not read whole."""


class PrefixMatcher:
    """Matches hash chains with the tree of registered blocks and the map of states. Changes neither.

    An earlier match of the same sequence is judged by these rules, each of which costs O(1):

        blocks  Only leaves leave the tree. So all matched blocks stand if the last one stands: it is
                registered, and was registered before the match. A block that left and came back was
                registered later. More blocks match only if the hash behind the last one is registered.
        states  The known state is there if its block still has its slot. A deeper one can only have come
                where the tree noted a change in the prefix's family, or behind the known blocks.
        ghosts  The sequence follows a known path further only if the hash behind that path is a ghost now.
                Ghosts of states come and go with changes in the family. All other ghosts that go are counted
                as lapses.

    What does not stand any more is looked up again, from the deepest block that stands. Tokens are compared
    wherever blocks are matched; ghosts are known by their 63-bit hashes alone.
    """

    def __init__(self, tree: PrefixTree, slots: DurableSlots, block_size_tokens: int) -> None:
        self._tree = tree
        self._slots = slots
        self._size = block_size_tokens

    def match(
        self,
        chain: PrefixHashChain,
        num_tokens: int,
        path_blocks: Sequence[int],
        num_held: int,
        max_resume_tokens: int | None,
        known: PrefixMatch | None,
    ) -> PrefixMatch:
        """What is cached of the first `num_tokens` tokens; see `PrefixCache.match`.

        Args:
            path_blocks: the blocks of the sequence's path.
            num_held: leading ones of these that are registered. States within these do not count.
        """
        if known is None or not self._fits(known.basis, chain, num_tokens, num_held, max_resume_tokens):
            blocks = tuple(path_blocks[:num_held])
            basis = MatchBasis(0, 0, num_held, max_resume_tokens, clock=self._tree.clock)
            known = PrefixMatch(blocks, 0, -1, 0, (), basis)
        elif self._is_right(known, chain.keys, num_tokens):
            return known
        return self._continued(known, chain, num_tokens)

    def _fits(
        self, basis: MatchBasis, chain: PrefixHashChain, num_tokens: int, num_held: int, limit: int | None
    ) -> bool:
        """Whether a match on this basis is one of the same sequence, or of its beginning."""
        if basis.num_held != num_held or basis.max_resume_tokens != limit or basis.num_tokens > num_tokens:
            return False
        whole = basis.num_tokens // self._size
        return basis.last_key == (chain.keys[whole - 1] if whole else 0)

    def _is_right(self, known: PrefixMatch, keys: Sequence[int], num_tokens: int) -> bool:
        """Whether nothing has changed that concerns a match of this sequence; O(1)."""
        tree, basis, blocks, size = self._tree, known.basis, known.blocks, self._size
        whole, num_blocks, num_seen = num_tokens // size, len(blocks), known.seen_tokens // size
        if num_tokens != basis.num_tokens or self._num_lapses != basis.num_lapses:
            return False
        if num_blocks < whole and keys[num_blocks] in tree.block_of_hash:
            return False
        if num_seen < whole and keys[num_seen] in tree.ghosts:
            return False
        if not blocks:
            return True
        if not tree.stands(blocks[-1], basis.clock):
            return False
        depth = known.resume_tokens // size
        if depth and self._slots.map.slot_of(blocks[depth - 1]) != known.resume_slot:
            return False
        at_the_end = depth == self._num_reachable(num_blocks, num_tokens, basis)
        return at_the_end or tree.family_changes[blocks[0]] == basis.family_change

    def _continued(self, known: PrefixMatch, chain: PrefixHashChain, num_tokens: int) -> PrefixMatch:
        """The match that `known`, of the same sequence or its beginning, has become."""
        tree, states, ghosts = self._tree, self._slots.map, self._slots.ghosts
        basis, keys, size = known.basis, chain.keys, self._size
        whole, num_lapses = num_tokens // size, self._num_lapses
        standing = self._standing(known.blocks, basis.clock)
        blocks = self._extended(standing, chain, whole)
        num_blocks = len(blocks)
        reachable = self._num_reachable(num_blocks, num_tokens, basis)
        family_change = tree.family_changes[blocks[0]] if blocks else -1
        quiet = num_lapses == basis.num_lapses and family_change == basis.family_change
        num_seen = self._num_seen(known, num_blocks, keys, whole, num_lapses == basis.num_lapses)

        depth, slot, lost = known.resume_tokens // size, known.resume_slot, basis.num_lost
        if depth and (depth > len(standing) or states.slot_of(blocks[depth - 1]) != slot):
            depth, quiet = 0, False
        # Where all is quiet, no state and no ghost of the known part is deeper than the known ones.
        searched = self._num_reachable(len(standing), basis.num_tokens, basis) if quiet else depth
        deeper = self._deepest_state(blocks, max(searched, depth, basis.num_held), reachable)
        if deeper or not quiet or lost > reachable:
            depth = searched = lost = deeper or depth
        slot = states.slot_of(blocks[depth - 1]) if depth else -1
        searched = max(searched, depth)
        newly_lost = ghosts.deepest(keys, searched, reachable)
        lost = newly_lost if newly_lost > searched else max(lost, depth)
        limit = basis.max_resume_tokens
        limited = limit is not None and limit < num_tokens - 1
        asked = limit // size if limit is not None and limited else whole
        spans = compute_spans(
            keys if len(keys) == asked else keys[:asked],
            num_resumed=depth,
            num_reachable=reachable,
            num_matched=min(num_blocks, asked),
            num_seen=min(num_seen, asked),
            num_tokens=asked * size if limited else num_tokens,
            block_size_tokens=size,
            state_ghosts=ghosts,
            num_lost=lost,
        )
        if limited:
            spans = (*spans, Span(asked * size, num_tokens, "disabled"))
        last_key = keys[whole - 1] if whole else 0
        basis = MatchBasis(
            num_tokens, last_key, basis.num_held, limit, lost, tree.clock, family_change, num_lapses
        )
        match = PrefixMatch(blocks, depth * size, slot, num_seen * size, spans, basis)
        if known.basis.num_tokens == num_tokens and match == known:
            self._refresh(known.basis, basis)
            return known
        return match

    def _num_reachable(self, num_blocks: int, num_tokens: int, basis: MatchBasis) -> int:
        """How many of the leading blocks a sequence of `num_tokens` tokens may resume behind."""
        limit = basis.max_resume_tokens
        most = num_tokens - 1 if limit is None else min(limit, num_tokens - 1)
        return min(num_blocks, most // self._size)

    @staticmethod
    def _refresh(old: MatchBasis, new: MatchBasis) -> None:
        old.num_lost, old.clock = new.num_lost, new.clock
        old.family_change, old.num_lapses = new.family_change, new.num_lapses

    @property
    def _num_lapses(self) -> int:
        return self._tree.ghosts.num_lapses + self._slots.ghosts.num_lapses

    def _standing(self, blocks: tuple[int, ...], clock: int) -> tuple[int, ...]:
        """The leading blocks that have not left since `clock`."""
        tree = self._tree
        if not blocks or tree.stands(blocks[-1], clock):
            return blocks
        low, high = 0, len(blocks) - 1
        while low < high:
            middle = (low + high) // 2
            if tree.stands(blocks[middle], clock):
                low = middle + 1
            else:
                high = middle
        return blocks[:low]

    def _extended(self, blocks: tuple[int, ...], chain: PrefixHashChain, whole: int) -> tuple[int, ...]:
        """These blocks, and the registered ones that continue them."""
        keys, tokens, first = chain.keys, chain.tokens, len(blocks)
        parent = blocks[-1] if blocks else chain.root
        found: list[int] = []
        while first < whole and keys[first] in self._tree.block_of_hash:
            stop = min(first + WINDOW, whole)
            window = self._tree.match(parent, keys[first:stop], tokens[first:stop])
            found += window
            if len(window) < stop - first:
                break
            parent, first = window[-1], stop
        return (*blocks, *found) if found else blocks

    def _num_seen(
        self, known: PrefixMatch, num_blocks: int, keys: Sequence[int], whole: int, no_lapse: bool
    ) -> int:
        """How many leading blocks follow a known path: `num_blocks` registered ones, then ghosts."""
        ghosts, seen = self._tree.ghosts, num_blocks
        num_known = len(known.blocks) if no_lapse else whole
        while seen < num_known and keys[seen] in ghosts:
            seen += 1
        if seen < num_known:
            return seen
        seen = max(seen, known.seen_tokens // self._size) if no_lapse else seen
        while seen < whole and keys[seen] in ghosts:
            seen += 1
        return seen

    def _deepest_state(self, blocks: tuple[int, ...], start: int, stop: int) -> int:
        """The largest d in (start, stop] where `blocks[d - 1]` has a state, or 0."""
        slot_by_block = self._slots.map.slot_by_block
        if start >= stop or slot_by_block.keys().isdisjoint(blocks[start:stop][::-1]):
            return 0
        return next(d for d in range(stop, start, -1) if blocks[d - 1] in slot_by_block)
