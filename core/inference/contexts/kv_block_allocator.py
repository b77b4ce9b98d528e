"""KV blocks: who holds them, which prefix each one stores, and which goes when memory is needed."""

import heapq
import logging
from collections import Counter
from collections.abc import Callable, KeysView, Sequence
from operator import countOf

import torch

from ...errors import KVBlockCapacityError
from ...validation import INT32_MAX, boolean, checked_integers, integer, integers, one_of, shown
from ..policies.ghost_list import GhostList
from ..policies.slot_eviction import EVICTION_POLICIES

logger = logging.getLogger(__name__)

DeregistrationObserver = Callable[[list[int], set[int]], None]
MAX_HASH = (1 << 63) - 1
LeafEntry = tuple[bool, int, int]  # holds a state, when it was used last, block
Parent = int | bytes
"""What precedes a registered block: the block before it, or the salt for a prefix's first block."""


class KVBlockAllocator:
    """The bookkeeping of a pool of KV blocks; the tensors belong to the context.

    A block is *free*, *held* (reference count > 0) or *cached* (registered under its prefix hash and held
    by nobody). A registered block's parent is the registered block before it in the sequence. Whoever holds
    a block holds its parents, so cached blocks hang below held ones and can all be evicted, leaf first.
    Costs grow with the blocks named in a call (times the logarithm of the cached ones), not with the pool.

    Attributes (for hosts to read; writing them is not supported):
        block_ref_counts [total_count] int32, block_hashes [total_count] int64, -1 where not registered, and
        block_timestamps [total_count] int64, a counter of uses: CPU tensors, brought up to date when the
        attribute is read, in O(total_count) where something changed. Each stays one tensor for ever, but
        what a host keeps shows the last read of an attribute: index `allocator.block_hashes[...]` anew.
        kv_hash_to_block_id: dict from prefix hash to registered block.
        ghosts: hashes of evicted blocks.
        departures: blocks deregistered since the beginning; a match made before may not hold.
        holds_state: callable(block_id) -> bool; cached leaves without a state are evicted first.
        on_blocks_deregistered: megatron-core's single observer; `observe_deregistration` adds more.
    """

    def __init__(
        self,
        total_count: int,
        enable_prefix_caching: bool = True,
        prefix_caching_eviction_policy: str = "lru",
    ) -> None:
        self.total_count = integer("total_count", total_count, 1, INT32_MAX)
        self.enable_prefix_caching = boolean("enable_prefix_caching", enable_prefix_caching)
        self.prefix_caching_eviction_policy = one_of(
            "prefix_caching_eviction_policy", prefix_caching_eviction_policy, EVICTION_POLICIES
        )
        self._block_ref_counts = torch.zeros(total_count, dtype=torch.int32)
        self._block_hashes = torch.full((total_count,), -1, dtype=torch.int64)
        self._block_timestamps = torch.zeros(total_count, dtype=torch.int64)
        self._mirrored = True  # the three tensors are up to date
        # A prefix's first block has this parent: it counts like a block, and is always held.
        self._origin = self.total_count
        self.kv_hash_to_block_id: dict[int, int] = {}
        self.departures = 0
        self.ghosts = GhostList(2 * self.total_count, self.kv_hash_to_block_id)
        self.holds_state: Callable[[int], bool] = lambda block_id: False
        self.on_blocks_deregistered: DeregistrationObserver | None = None
        self._observers: list[DeregistrationObserver] = []
        self._clear_maps()

    def _clear_maps(self) -> None:
        self._free = list(range(self.total_count - 1, -1, -1))
        self._refs = [0] * self.total_count + [1]
        self._timestamps = [0] * self.total_count
        self._clock = 0
        self._forget_content()

    def _forget_content(self) -> None:
        self._parents = [-1] * self.total_count  # -1 for blocks that are not registered
        self._held_child_count = [0] * (self.total_count + 1)
        self._cached_child_count = [0] * (self.total_count + 1)
        # What each block was last registered with; of no meaning once it is deregistered.
        self._key_of = [-1] * self.total_count
        self._tokens_of = [b""] * self.total_count
        self._salt_of: dict[int, bytes] = {}
        # The eviction order: a heap, and of each cached leaf its entry in it that counts.
        self._leaves: list[LeafEntry] = []
        self._leaf_entry: dict[int, LeafEntry] = {}
        self._cached_count = 0

    # ---- the tensors

    @property
    def block_ref_counts(self) -> torch.Tensor:
        self._mirror()
        return self._block_ref_counts

    @property
    def block_hashes(self) -> torch.Tensor:
        self._mirror()
        return self._block_hashes

    @property
    def block_timestamps(self) -> torch.Tensor:
        self._mirror()
        return self._block_timestamps

    def _mirror(self) -> None:
        if self._mirrored:
            return
        self._block_ref_counts.numpy()[:] = self._refs[: self.total_count]
        self._block_timestamps.numpy()[:] = self._timestamps
        hashes = self._block_hashes.numpy()
        hashes.fill(-1)
        hashes[list(self.kv_hash_to_block_id.values())] = list(self.kv_hash_to_block_id)
        self._mirrored = True

    @property
    def references(self) -> dict[int, int]:
        """The reference counts of the held blocks."""
        return {block: count for block, count in enumerate(self._refs[: self.total_count]) if count}

    def hash_of(self, block_id: int) -> int:
        """The block's entry of `block_hashes`, at O(1)."""
        block = integer("block_id", block_id, 0, self.total_count - 1)
        return self._key_of[block] if self._parents[block] >= 0 else -1

    # ---- how much there is

    @property
    def total_avail(self) -> int:
        """Free blocks, cached ones not counted."""
        return len(self._free)

    @property
    def cached_count(self) -> int:
        """Registered blocks that nobody holds."""
        return self._cached_count

    @property
    def evictable_leaves(self) -> KeysView[int]:
        """The cached blocks that no registered one continues: the next to go. A view of what is now."""
        return self._leaf_entry.keys()

    @property
    def held_count(self) -> int:
        return self.total_count - len(self._free) - self._cached_count

    def is_memory_available(self, num_blocks: int, potential_matched_count: int = 0) -> bool:
        """Whether `num_blocks` can be allocated once `potential_matched_count` cached blocks are held."""
        needed = integer("num_blocks", num_blocks, 0)
        matched = integer("potential_matched_count", potential_matched_count, 0)
        return len(self._free) + self._cached_count - matched >= needed

    def count_cached(self, block_ids: Sequence[int]) -> int:
        """How many of these registered blocks nobody holds."""
        return sum(1 for block in self._checked(block_ids) if self._refs[block] == 0)

    # ---- allocation and references

    def allocate_memory_blocks(self, num_blocks: int) -> list[int]:
        """`num_blocks` unregistered blocks with one reference each, evicting cached ones where needed.

        Raises KVBlockCapacityError, with nothing evicted, when too few are free or cached.
        """
        num_blocks = integer("num_blocks", num_blocks, 0)
        if not self.is_memory_available(num_blocks):
            raise KVBlockCapacityError(num_blocks, len(self._free) + self._cached_count)
        self.evict_lru_blocks(num_blocks - len(self._free))
        cut = len(self._free) - num_blocks
        blocks = self._free[cut:][::-1]
        del self._free[cut:]
        refs = self._refs
        for block in blocks:
            refs[block] = 1
        self._mirrored = False
        return blocks

    def add_references(self, block_ids: Sequence[int]) -> None:
        """One more holder for each of these held or registered blocks, parents before children."""
        blocks = self._checked(block_ids)
        refs, parents = self._refs, self._parents
        seen: set[int] = set()
        for block in blocks:
            seen.add(block)
            if refs[block]:
                continue
            parent = parents[block]
            if parent < 0:
                raise ValueError(
                    f"block_ids names {block}; accepted: held or registered blocks, this one is free"
                )
            if not refs[parent] and parent not in seen:
                raise ValueError(
                    f"block_ids names {block}; accepted: after its parent {parent}, which nobody holds"
                )
        for block in blocks:
            if refs[block] == 0:
                self._cached_count -= 1
                self._leaf_entry.pop(block, None)
                self._cached_child_count[parents[block]] -= 1
                self._held_child_count[parents[block]] += 1
            refs[block] += 1
        self._mirrored = False

    def release_memory_blocks(self, block_ids: Sequence[int]) -> None:
        """Give back one reference of each block, a sequence's blocks in order.

        Blocks without a hash become free; registered ones stay cached ("lru") or are deregistered
        ("ref_zero"). A block named twice loses two references.
        """
        blocks = self._checked(block_ids)
        refs, parents, held_children = self._refs, self._parents, self._held_child_count
        if len(set(blocks)) == len(blocks):
            left = [refs[block] - 1 for block in blocks]
        else:
            counts = Counter(blocks)
            blocks, left = list(counts), [refs[block] - count for block, count in counts.items()]
        leaving = blocks
        if any(left):
            if min(left) < 0:
                block, less = next((b, less) for b, less in zip(blocks, left, strict=True) if less < 0)
                raise ValueError(
                    f"block_ids names {block} {refs[block] - less} times; accepted: at most as often as it "
                    f"has references ({refs[block]})"
                )
            leaving = [block for block, held in zip(blocks, left, strict=True) if not held]
        cached = [block for block in leaving if parents[block] >= 0]
        for block in cached:
            held_children[parents[block]] -= 1
        if sum([held_children[block] for block in cached]):
            block = next(block for block in cached if held_children[block])
            for child in cached:
                held_children[parents[child]] += 1
            raise ValueError(f"block_ids names {block}; accepted: with the held blocks that continue it")
        for block, held in zip(blocks, left, strict=True):
            refs[block] = held
        self._mirrored = False
        if len(cached) < len(leaving):
            self._free.extend([block for block in reversed(leaving) if parents[block] < 0])
        cached.reverse()
        self._cached_count += len(cached)
        if self.prefix_caching_eviction_policy == "ref_zero":
            self._deregister(cached)
            return
        self._clock += 1
        timestamps, clock, cached_children = self._timestamps, self._clock, self._cached_child_count
        for block in cached:
            timestamps[block] = clock
            cached_children[parents[block]] += 1
        for block in cached:
            if not cached_children[block]:
                self._offer_leaf(block)

    # ---- prefixes

    def match_chain(self, parent: Parent, hashes: Sequence[int], tokens: Sequence[bytes]) -> list[int]:
        """The registered blocks that continue `parent`, a registered block or the salt, as far as known.

        Token ids are compared, not only hashes.
        """
        if not isinstance(parent, bytes):
            parent = integer("parent", parent, 0, self.total_count - 1)
        keys = hashes if type(hashes) is list else integers("hashes", hashes, 1, MAX_HASH)
        contents = tokens if type(tokens) is list else _checked_contents(tokens)
        if len(keys) != len(contents):
            raise ValueError(
                f"hashes has {len(keys)} entries and tokens {len(contents)}; accepted: equally many"
            )
        matched: list[int] = []
        parents, tokens_of = self._parents, self._tokens_of
        for key, content in zip(keys, contents, strict=True):  # checked as far as it is looked at
            if type(key) is not int or type(content) is not bytes:
                key = integer(f"hashes[{len(matched)}]", key, 1, MAX_HASH)
                content = _checked_contents([content])[0]
            block = self.kv_hash_to_block_id.get(key, -1)
            if block < 0:
                integer(f"hashes[{len(matched)}]", key, 1, MAX_HASH)
                break
            if tokens_of[block] != content or (parents[block] != parent and not self._begins(block, parent)):
                break
            matched.append(block)
            parent = block
        return matched

    def _begins(self, block: int, parent: Parent) -> bool:
        """Whether a registered block is the first one of a prefix with this salt."""
        return self._parents[block] == self._origin and self._salt_of[block] == parent

    def register_chain(
        self, parent: Parent, block_ids: Sequence[int], hashes: Sequence[int], tokens: Sequence[bytes]
    ) -> list[int]:
        """Make consecutive, fully written blocks of one sequence findable; the first to register wins.

        `parent` is the registered block before them, or the salt. Returns for each block the registered
        one that stores its prefix: itself, or the earlier twin, in whose place the caller should use it.
        The list ends early where a hash collides with another prefix (2**-63): nothing below can be found.
        """
        if not self.enable_prefix_caching:
            raise ValueError(
                "enable_prefix_caching is False; accepted: no registration without prefix caching"
            )
        blocks = self._checked(block_ids)
        keys = checked_integers("hashes", hashes, 1, MAX_HASH)
        tokens = _checked_contents(tokens)
        if not len(blocks) == len(keys) == len(tokens):
            raise ValueError(
                f"block_ids, hashes and tokens have {len(blocks)}, {len(keys)} and {len(tokens)} entries; "
                "accepted: equally many"
            )
        parent = self._checked_parent(parent)
        refs, parents = self._refs, self._parents
        registered = [parents[block] for block in blocks] != [-1] * len(blocks)
        if registered or len(set(blocks)) < len(blocks) or 0 in [refs[block] for block in blocks]:
            raise ValueError(
                f"block_ids is {blocks}; accepted: distinct, held blocks that are not registered yet"
            )
        canonical = self.match_chain(parent, keys, tokens)
        found = len(canonical)
        above = before = canonical[-1] if canonical else self._origin if isinstance(parent, bytes) else parent
        block_named, key_of, tokens_of = self.kv_hash_to_block_id, self._key_of, self._tokens_of
        held_children = self._held_child_count
        for block, key, content in zip(blocks[found:], keys[found:], tokens[found:], strict=True):
            if key in block_named:  # by another prefix, or `match_chain` would have gone on
                break
            block_named[key] = block
            key_of[block] = key
            tokens_of[block] = content
            parents[block] = before
            held_children[before] += 1
            canonical.append(block)
            before = block
        if before != above:
            self._mirrored = False
            self._leaf_entry.pop(above, None)  # a twin that nobody holds yet
            if isinstance(parent, bytes) and above == self._origin:
                self._salt_of[canonical[0]] = parent
        return canonical

    def _checked_parent(self, parent: object) -> Parent:
        if isinstance(parent, bytes):
            return parent
        block = integer("parent", parent, 0, self.total_count - 1)
        if self._parents[block] < 0 or not self._refs[block]:
            raise ValueError(
                f"parent is {block}; accepted: a held, registered block, or the salt for a first one"
            )
        return block

    def is_registered(self, block_id: int) -> bool:
        return self._parents[integer("block_id", block_id, 0, self.total_count - 1)] >= 0

    def content_of(self, block_id: int) -> tuple[Parent, bytes]:
        """Of a registered block: the block before it, or the salt, and its token ids' bytes."""
        parent = self._parents[integer("block_id", block_id, 0, self.total_count - 1)]
        if parent < 0:
            raise ValueError(f"block_id is {block_id}; accepted: a registered block")
        return self._salt_of[block_id] if parent == self._origin else parent, self._tokens_of[block_id]

    def child_count(self, block_id: int) -> int:
        """Registered blocks that continue this one; two or more make it a fork."""
        block = integer("block_id", block_id, 0, self.total_count - 1)
        return self._held_child_count[block] + self._cached_child_count[block]

    # ---- eviction

    def evict_lru_blocks(self, num_blocks: int) -> list[int]:
        """Deregister and free `num_blocks` cached blocks and return them (none for a number <= 0).

        Only leaves go, so no chain loses its middle: those that hold no state first (nothing can resume
        there), then by last use. Raises KVBlockCapacityError with nothing changed.
        """
        num_blocks = integer("num_blocks", num_blocks)
        if num_blocks <= 0:
            return []
        if num_blocks > self._cached_count:
            raise KVBlockCapacityError(num_blocks, self._cached_count)
        victims: list[int] = []
        entry_of, holds_state = self._leaf_entry, self.holds_state
        refs, parents = self._refs, self._parents
        children, held_children = self._cached_child_count, self._held_child_count
        newest: LeafEntry | None = None  # the leaf that the last victim left behind: often the next to go
        while len(victims) < num_blocks:
            entry = heapq.heappushpop(self._leaves, newest) if newest else heapq.heappop(self._leaves)
            held_state, _, block = entry
            outdated = entry is not newest and (
                entry_of.get(block) is not entry or holds_state(block) != held_state
            )
            newest = None
            if outdated:
                if entry_of.get(block) is entry:
                    self._offer_leaf(block)
                continue
            del entry_of[block]
            victims.append(block)
            parent = parents[block]
            children[parent] = left = children[parent] - 1
            if not left and not refs[parent] and not held_children[parent]:
                newest = entry_of[parent] = self._leaf(parent)
        if newest:
            heapq.heappush(self._leaves, newest)
        self._deregister(victims)
        return victims

    def note_state_changed(self, block_id: int) -> None:
        """A cached block gained or lost its state: its place in the eviction order follows."""
        if integer("block_id", block_id, 0, self.total_count - 1) in self._leaf_entry:
            self._offer_leaf(block_id)

    def observe_deregistration(self, observer: DeregistrationObserver) -> None:
        """Have `observer(block_ids, hashes)` called after each deregistration, before blocks are reused.

        One that raises is logged; the others are called and the blocks are freed all the same.
        """
        if not callable(observer):
            raise ValueError(f"observer is {shown(observer)}; accepted: a callable of blocks and hashes")
        self._observers.append(observer)

    def unobserve_deregistration(self, observer: DeregistrationObserver) -> None:
        """Call `observer` no more; ValueError for one that is not called."""
        if not callable(observer) or observer not in self._observers:
            raise ValueError(f"observer is {shown(observer)}; accepted: one that observes this allocator")
        self._observers = [known for known in self._observers if known != observer]

    def _leaf(self, block: int) -> LeafEntry:
        return self.holds_state(block), self._timestamps[block], block

    def _offer_leaf(self, block: int) -> None:
        """Give a cached block without children its place in the eviction order, in place of an older one."""
        self._leaf_entry[block] = entry = self._leaf(block)
        heapq.heappush(self._leaves, entry)
        if len(self._leaves) > 2 * len(self._leaf_entry) + 64:
            self._leaves = list(self._leaf_entry.values())  # without those that count no longer
            heapq.heapify(self._leaves)

    def _deregister(self, blocks: list[int]) -> None:
        """Forget the hashes of cached blocks that nothing continues any more, and free them.

        They go to the free list before anyone is told, so a raising observer loses none.
        """
        if not blocks:
            return
        key_of, parents, block_named = self._key_of, self._parents, self.kv_hash_to_block_id
        keys = [key_of[block] for block in blocks]
        for key in keys:
            del block_named[key]
        self.ghosts.add_all(keys, "evicted")
        for block in blocks:
            parents[block] = -1
        self._mirrored = False
        self.departures += len(blocks)
        self._cached_count -= len(blocks)
        self._free.extend(reversed(blocks))
        self._notify(blocks, keys)

    def _notify(self, blocks: list[int], hashes: list[int]) -> None:
        observers = [self.on_blocks_deregistered] if self.on_blocks_deregistered else []
        for observer in observers + self._observers:
            try:
                observer(list(blocks), set(hashes))
            except Exception:
                logger.exception("deregistration observer %r failed for blocks %s", observer, blocks)

    def deregister_all(self) -> None:
        """Forget every prefix and ghost: cached blocks become free, held ones stay with their holders."""
        registered, hashes = list(self.kv_hash_to_block_id.values()), list(self.kv_hash_to_block_id)
        self.departures += len(registered)
        cached = [block for block in registered if self._refs[block] == 0]
        self.kv_hash_to_block_id.clear()
        self.ghosts.clear()
        self._mirrored = False
        self._forget_content()
        self._free.extend(cached)
        self._notify(registered, hashes)

    def reset(self) -> None:
        """Forget every reference and prefix. Observers are not called: their owner resets them too."""
        self.departures += len(self.kv_hash_to_block_id)
        self._mirrored = False
        self.kv_hash_to_block_id.clear()
        self.ghosts.clear()
        self._clear_maps()

    # ---- checks

    def _checked(self, block_ids: Sequence[int]) -> list[int]:
        return checked_integers("block_ids", block_ids, 0, self.total_count - 1)

    def check_integrity(self) -> None:
        """Raise AssertionError where the maps contradict each other; O(pool)."""
        free, registered = set(self._free), {b for b, p in enumerate(self._parents) if p >= 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & registered, "a free block is registered"
        assert all(self._refs[block] == 0 for block in free), "a free block is held"
        held = {block for block in range(self.total_count) if self._refs[block] > 0}
        cached = registered - held
        assert min(self._refs) >= 0, "a reference count is negative"
        assert len(free) + len(held | registered) == self.total_count, "a block is nowhere"
        assert len(cached) == self._cached_count, "the count of cached blocks is off"
        assert {self._key_of[b]: b for b in registered} == self.kv_hash_to_block_id
        if self._mirrored:
            assert self._block_ref_counts.tolist() == self._refs[:-1], "block_ref_counts shows others"
            assert self._block_timestamps.tolist() == self._timestamps, "block_timestamps shows others"
            hashes = [self.hash_of(block) for block in range(self.total_count)]
            assert self._block_hashes.tolist() == hashes, "block_hashes shows others"
        held_children = Counter(self._parents[block] for block in registered & held)
        cached_children = Counter(self._parents[block] for block in cached)
        for counts, counted in (
            (self._held_child_count, held_children),
            (self._cached_child_count, cached_children),
        ):
            expected = [counted[block] for block in range(self.total_count + 1)]
            assert counts == expected, "a count of children is off"
        real = registered | {self._origin}
        children = held_children.keys() | cached_children.keys()
        assert children <= real, "a registered block's parent is not registered"
        assert set(held_children) <= held | {self._origin}, "a block is held, its parent is not"
        assert self._refs[self._origin] == 1, "the origin of all prefixes is not held"
        assert cached - children == self._leaf_entry.keys(), "the cached leaves are others"
        offered = set(map(id, self._leaves))
        for block, entry in self._leaf_entry.items():
            assert id(entry) in offered, "an evictable leaf is not offered"
            assert entry[1:] == (self._timestamps[block], block), "a leaf is offered under another time"


def _checked_contents(tokens: Sequence[bytes]) -> list[bytes]:
    if not isinstance(tokens, Sequence) or countOf(map(type, tokens), bytes) < len(tokens):
        raise ValueError(f"tokens is {shown(tokens)}; accepted: a list of bytes, the token ids of each block")
    return tokens if type(tokens) is list else list(tokens)
