"""KV blocks: who holds them, which prefix each one stores, and which goes when memory is needed."""

import heapq
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from ...config import EVICTION_POLICIES
from ...errors import KVBlockCapacityError
from ...validation import INT32_MAX, boolean, integer, integers, one_of, shown
from ..policies.ghost_list import GhostList

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

    Attributes (CPU tensors for hosts to read; writing them is not supported):
        block_ref_counts: [total_count] int32.
        block_hashes: [total_count] int64; -1 where not registered.
        block_timestamps: [total_count] int64; a counter of uses.
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
        self.block_ref_counts = torch.zeros(total_count, dtype=torch.int32)
        self.block_hashes = torch.full((total_count,), -1, dtype=torch.int64)
        self.block_timestamps = torch.zeros(total_count, dtype=torch.int64)
        self.kv_hash_to_block_id: dict[int, int] = {}
        self.departures = 0
        self.ghosts = GhostList(2 * self.total_count)
        self.holds_state: Callable[[int], bool] = lambda block_id: False
        self.on_blocks_deregistered: DeregistrationObserver | None = None
        self._observers: list[DeregistrationObserver] = []
        # Views of the tensors' memory: a list of blocks at once through numpy, one block through a
        # memoryview, which costs a fortieth of indexing the tensor.
        self._hashes_of = self.block_hashes.numpy()
        self._refs_of = self.block_ref_counts.numpy()
        self._refs = memoryview(self._refs_of)
        self._hashes = memoryview(self._hashes_of)
        self._timestamps = memoryview(self.block_timestamps.numpy())
        self._clear_maps()

    def _clear_maps(self) -> None:
        self._free = list(range(self.total_count - 1, -1, -1))
        self._clock = 0
        self._forget_content()

    def _forget_content(self) -> None:
        self._content: dict[int, tuple[Parent, bytes]] = {}
        self._child_count = [0] * self.total_count
        self._held_child_count = [0] * self.total_count
        # The eviction order: a heap, and of each cached leaf its entry in it that counts.
        self._leaves: list[LeafEntry] = []
        self._leaf_entry: dict[int, LeafEntry] = {}
        self._cached_count = 0

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
        self._refs_of[blocks] = 1
        return blocks

    def add_references(self, block_ids: Sequence[int]) -> None:
        """One more holder for each of these held or registered blocks, parents before children."""
        blocks = self._checked(block_ids)
        seen: set[Parent] = set()
        for block in blocks:
            seen.add(block)
            if self._refs[block]:
                continue
            if block not in self._content:
                raise ValueError(
                    f"block_ids names {block}; accepted: held or registered blocks, this one is free"
                )
            parent = self._content[block][0]
            if isinstance(parent, int) and not self._refs[parent] and parent not in seen:
                raise ValueError(
                    f"block_ids names {block}; accepted: after its parent {parent}, which nobody holds"
                )
        for block in blocks:
            if self._refs[block] == 0:
                self._cached_count -= 1
                self._leaf_entry.pop(block, None)
                parent = self._content[block][0]
                if isinstance(parent, int):
                    self._held_child_count[parent] += 1
            self._refs[block] += 1

    def release_memory_blocks(self, block_ids: Sequence[int]) -> None:
        """Give back one reference of each block, a sequence's blocks in order.

        Blocks without a hash become free; registered ones stay cached ("lru") or are deregistered
        ("ref_zero"). A block named twice loses two references.
        """
        blocks = self._checked(block_ids)
        self._check_release(Counter(blocks))
        self._clock += 1
        cached = []
        refs, content_of, held_children = self._refs, self._content, self._held_child_count
        for block in reversed(blocks):
            refs[block] = left = refs[block] - 1
            if left:
                continue
            content = content_of.get(block)
            if content is None:
                self._free.append(block)
                continue
            cached.append(block)
            if isinstance(content[0], int):
                held_children[content[0]] -= 1
        self._cached_count += len(cached)
        if self.prefix_caching_eviction_policy == "ref_zero":
            for block in cached:
                self._detach(block)
            self._deregister(cached)
            return
        for block in cached:
            self._timestamps[block] = self._clock
            if not self._child_count[block]:
                self._offer_leaf(block)

    def _check_release(self, counts: Counter[int]) -> None:
        """Enough references, and no parent let go while a child of it stays held."""
        refs, content_of, held_children = self._refs, self._content, self._held_child_count
        leaving: dict[Parent, int] = {}  # children that leave, by parent
        parents = []
        for block, count in counts.items():
            held = refs[block]
            if held < count:
                raise ValueError(
                    f"block_ids names {block} {count} times; accepted: at most as often as it has "
                    f"references ({held})"
                )
            if held == count and block in content_of:
                parent = content_of[block][0]
                leaving[parent] = leaving.get(parent, 0) + 1
                if held_children[block]:
                    parents.append(block)
        for block in parents:
            if held_children[block] > leaving.get(block, 0):
                raise ValueError(f"block_ids names {block}; accepted: with the held blocks that continue it")

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
        for key, content in zip(keys, contents, strict=True):  # checked as far as it is looked at
            if type(key) is not int or type(content) is not bytes:
                key = integer(f"hashes[{len(matched)}]", key, 1, MAX_HASH)
                content = _checked_contents([content])[0]
            block = self.kv_hash_to_block_id.get(key, -1)
            if block < 0:
                integer(f"hashes[{len(matched)}]", key, 1, MAX_HASH)
                break
            if self._content[block] != (parent, content):
                break
            matched.append(block)
            parent = block
        return matched

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
        keys = integers("hashes", hashes, 1, MAX_HASH)
        tokens = _checked_contents(tokens)
        if not len(blocks) == len(keys) == len(tokens):
            raise ValueError(
                f"block_ids, hashes and tokens have {len(blocks)}, {len(keys)} and {len(tokens)} entries; "
                "accepted: equally many"
            )
        parent = self._checked_parent(parent)
        registered = not self._content.keys().isdisjoint(blocks)
        if registered or len(set(blocks)) < len(blocks) or not all(map(self._refs.__getitem__, blocks)):
            raise ValueError(
                f"block_ids is {blocks}; accepted: distinct, held blocks that are not registered yet"
            )
        canonical: list[int] = []
        for block, key, content in zip(blocks, keys, tokens, strict=True):
            twin = self.kv_hash_to_block_id.get(key)
            if twin is None:
                self._enter(block, key, parent, content)
                twin = block
            elif self._content[twin] != (parent, content):
                break
            canonical.append(twin)
            parent = twin
        return canonical

    def _checked_parent(self, parent: object) -> Parent:
        if isinstance(parent, bytes):
            return parent
        block = integer("parent", parent, 0, self.total_count - 1)
        if block not in self._content or not self._refs[block]:
            raise ValueError(
                f"parent is {block}; accepted: a held, registered block, or the salt for a first one"
            )
        return block

    def _enter(self, block: int, key: int, parent: Parent, content: bytes) -> None:
        self.kv_hash_to_block_id[key] = block
        self._hashes[block] = key
        self._content[block] = (parent, content)
        if isinstance(parent, int):
            self._child_count[parent] += 1
            self._held_child_count[parent] += 1
            self._leaf_entry.pop(parent, None)  # it may be a twin that nobody holds yet
        self.ghosts.discard(key)

    def child_count(self, block_id: int) -> int:
        """Registered blocks that continue this one; two or more make it a fork."""
        return self._child_count[integer("block_id", block_id, 0, self.total_count - 1)]

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
        while len(victims) < num_blocks:
            entry = heapq.heappop(self._leaves)
            held_state, _, block = entry
            if entry_of.get(block) is not entry:
                continue
            if holds_state(block) != held_state:
                self._offer_leaf(block)
                continue
            del entry_of[block]
            victims.append(block)
            parent = self._detach(block)
            if parent >= 0 and not self._refs[parent]:
                self._offer_leaf(parent)
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

    def _offer_leaf(self, block: int) -> None:
        """Give a cached block without children its place in the eviction order, in place of an older one."""
        entry = (self.holds_state(block), self._timestamps[block], block)
        self._leaf_entry[block] = entry
        heapq.heappush(self._leaves, entry)
        if len(self._leaves) > 2 * len(self._leaf_entry) + 64:
            self._leaves = list(self._leaf_entry.values())  # without those that count no longer
            heapq.heapify(self._leaves)

    def _detach(self, block: int) -> int:
        """Take a block out of its chain; its parent if that is left without children, else -1."""
        parent, _ = self._content.pop(block)
        if not isinstance(parent, int):
            return -1
        self._child_count[parent] = left = self._child_count[parent] - 1
        return -1 if left else parent

    def _deregister(self, blocks: list[int]) -> None:
        """Forget the hashes of detached blocks and free them.

        They go to the free list before anyone is told, so a raising observer loses none.
        """
        if not blocks:
            return
        keys: list[int] = self._hashes_of[blocks].tolist()
        for key in keys:
            del self.kv_hash_to_block_id[key]
            self.ghosts.add(key, "evicted")
        self._hashes_of[blocks] = -1
        self.departures += len(blocks)
        self._cached_count -= len(blocks)
        self._free.extend(reversed(blocks))
        self._notify(blocks, set(keys))

    def _notify(self, blocks: list[int], hashes: set[int]) -> None:
        observers = [self.on_blocks_deregistered] if self.on_blocks_deregistered else []
        for observer in observers + self._observers:
            try:
                observer(list(blocks), set(hashes))
            except Exception:
                logger.exception("deregistration observer %r failed for blocks %s", observer, blocks)

    def deregister_all(self) -> None:
        """Forget every prefix and ghost: cached blocks become free, held ones stay with their holders."""
        registered = list(self._content)
        self.departures += len(registered)
        hashes = set(self.kv_hash_to_block_id)
        cached = [block for block in registered if self._refs[block] == 0]
        self.kv_hash_to_block_id.clear()
        self.ghosts.clear()
        self._hashes_of[registered] = -1
        self._forget_content()
        self._free.extend(cached)
        self._notify(registered, hashes)

    def reset(self) -> None:
        """Forget every reference and prefix. Observers are not called: their owner resets them too."""
        self.departures += len(self._content)
        self.block_ref_counts.zero_()
        self.block_hashes.fill_(-1)
        self.block_timestamps.zero_()
        self.kv_hash_to_block_id.clear()
        self.ghosts.clear()
        self._clear_maps()

    # ---- checks

    def _checked(self, block_ids: Sequence[int]) -> list[int]:
        return integers("block_ids", block_ids, 0, self.total_count - 1)

    def check_integrity(self) -> None:
        """Raise AssertionError where the maps contradict each other; O(pool)."""
        free, registered = set(self._free), set(self._content)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & registered, "a free block is registered"
        assert all(self._refs[block] == 0 for block in free), "a free block is held"
        held = {block for block in range(self.total_count) if self._refs[block] > 0}
        cached = registered - held
        assert (self._refs_of >= 0).all(), "a reference count is negative"
        assert len(free) + len(held | registered) == self.total_count, "a block is nowhere"
        assert len(cached) == self._cached_count, "the count of cached blocks is off"
        assert {self._hashes[b]: b for b in registered} == self.kv_hash_to_block_id
        assert all(self._hashes[b] == -1 for b in range(self.total_count) if b not in registered)
        children = Counter(parent for parent, _ in self._content.values() if isinstance(parent, int))
        assert [children[b] for b in range(self.total_count)] == self._child_count, "a child count is off"
        assert set(children) <= registered, "a registered block's parent is not registered"
        held_children = Counter(p for b, (p, _) in self._content.items() if isinstance(p, int) and b in held)
        counts = [held_children[b] for b in range(self.total_count)]
        assert counts == self._held_child_count, "a count of held children is off"
        assert set(held_children) <= held, "a block is held, its parent is not"
        assert cached - set(children) == self._leaf_entry.keys(), "the cached leaves are others"
        offered = set(map(id, self._leaves))
        for block, entry in self._leaf_entry.items():
            assert id(entry) in offered, "an evictable leaf is not offered"
            assert entry[1:] == (self._timestamps[block], block), "a leaf is offered under another time"


def _checked_contents(tokens: Sequence[bytes]) -> Sequence[bytes]:
    if not isinstance(tokens, Sequence) or set(map(type, tokens)) - {bytes}:
        raise ValueError(f"tokens is {shown(tokens)}; accepted: a list of bytes, the token ids of each block")
    return tokens
