"""Where an import goes in the pools of a rank: blocks and slots, and the report of what became of them."""

import hashlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import MambaSlotCapacityError
from .exports import CacheAccess, entries_at_once
from .format import KV, PrefixForest


@dataclass(frozen=True)
class PrefixCounts:
    """How much of an export.

    Attributes:
        prefixes: prefixes that no other prefix of the export continues, by the state at their end.
        blocks: KV blocks.
        states: states.
        tokens: the tokens of `blocks`.
    """

    prefixes: int = 0
    blocks: int = 0
    states: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class ImportReport:
    """What became of the prefixes of an export; the same on every rank of a replica.

    Attributes:
        imported: what was written into this cache.
        known: what this cache held already. An import changes only its recency.
        left_out: what found no room: too few free KV blocks or state slots.
        other_key: prefixes with salts that were hashed under another key. They are left out, because no
            request of this engine could find them.
        failure: why nothing was imported; empty where nothing failed.
    """

    imported: PrefixCounts = PrefixCounts()
    known: PrefixCounts = PrefixCounts()
    left_out: PrefixCounts = PrefixCounts()
    other_key: PrefixCounts = PrefixCounts()
    failure: str = ""


class Placement:
    """The place of each block and state of one import in the pools of this rank.

    Call `place` and `commit`, each once and in this order, and `release` whatever happened. In between, fill
    the new blocks and slots. No request can find anything new before `commit`.

    The *path* of a state is the blocks that the state needs and that no earlier path holds, known ones before
    new ones. Paths are made in the order of `forest.states`, and `release` gives them back in the opposite
    order, which makes blocks as recent among themselves as they were at the exporter. A state that finds no
    room is left out; a less recently used one further up needs fewer blocks, and may still find room.
    """

    def __init__(self, access: CacheAccess, forest: PrefixForest) -> None:
        self._access, self._kv_blocks, self._slots = access, access.kv_blocks, access.slots
        self._forest = forest
        self._other_key = forest.under_other_key(access.engine.salt_key.key_id)
        self._states = [node for node in forest.states if node not in self._other_key]
        # Per state to import: the blocks of its path, with one reference each.
        self._paths: list[list[int]] = []
        self._new_paths: list[list[int]] = []  # per path with new blocks: the nodes of those, in order
        self._block_of: dict[int, int] = {}  # node -> block, for every node that a path holds
        self._known_slots: dict[int, int] = {}  # node -> slot, pinned, of each state that is known
        self.new_slots: dict[int, int] = {}  # node -> slot, reserved, of each state to fill

    def place(self) -> None:
        """Hold what is known, and make room for the rest by eviction; all ranks of a replica decide alike."""
        self._hold_known()
        num_available = self._slots.num_available
        placed: list[tuple[int, list[int]]] = []
        for node, path in zip(self._states, self._paths, strict=True):
            if node not in self._known_slots and len(placed) < num_available and self._allocate(node, path):
                placed.append((node, path))
        try:
            self._reserve(placed)
        except MambaSlotCapacityError as error:  # where states and KV share memory, blocks took that of slots
            for place in reversed(placed[error.available :]):
                self._give_back(*place)
            self._reserve(placed[: error.available])

    def _reserve(self, placed: Sequence[tuple[int, list[int]]]) -> None:
        nodes = [node for node, _ in placed]
        slots = self._slots.reserve_slots([self._block_of[node] for node in nodes])
        self.new_slots = dict(zip(nodes, slots, strict=True))

    def _hold_known(self) -> None:
        """Begin every path with its known blocks; pin the known states."""
        forest = self._forest
        visited: set[int] = set()
        for state in self._states:
            path: list[int] = []
            self._paths.append(path)
            nodes = self._nodes_down_to(state, visited)
            if nodes and self._parent_is_held(nodes[0]):
                hashes = [forest.hashes[node] for node in nodes]
                tokens = [forest.tokens[node] for node in nodes]
                blocks = self._kv_blocks.tree.match(self._parent_of(nodes[0]), hashes, tokens)
                self._kv_blocks.add_references(blocks)
                path += blocks
                self._block_of.update(zip(nodes, blocks, strict=False))
            visited.update(nodes)
            if state in self._block_of:
                slot = self._slots.cached_states.slot_of(self._block_of[state])
                if slot >= 0:
                    self._slots.pin(slot)
                    self._known_slots[state] = slot

    def _allocate(self, state: int, path: list[int]) -> bool:
        """Extend `path` by new blocks down to `state`; where they find no room, False and nothing changed."""
        nodes = self._nodes_down_to(state, self._block_of)
        if not self._kv_blocks.is_memory_available(len(nodes)):
            return False
        blocks = self._kv_blocks.allocate_memory_blocks(len(nodes))
        path += blocks
        self._block_of.update(zip(nodes, blocks, strict=True))
        if nodes:
            self._new_paths.append(nodes)
        return True

    def _give_back(self, state: int, path: list[int]) -> None:
        """Undo the last `_allocate`, of this state."""
        if self._new_paths and self._new_paths[-1][-1] == state:
            blocks = [self._block_of.pop(node) for node in self._new_paths.pop()]
            del path[-len(blocks) :]
            self._kv_blocks.release_memory_blocks(blocks)

    def _nodes_down_to(self, state: int, ancestors: Container[int]) -> list[int]:
        """The nodes from below the nearest one of `ancestors`, or from the root, down to `state`."""
        nodes: list[int] = []
        node = state
        while node >= 0 and node not in ancestors:
            nodes.append(node)
            node = self._forest.parents[node]
        return nodes[::-1]

    def _parent_is_held(self, node: int) -> bool:
        parent = self._forest.parents[node]
        return parent < 0 or parent in self._block_of

    def _parent_of(self, node: int) -> int | bytes:
        """What precedes `node` in the KV index: a block that a path holds, or a root digest."""
        parent = self._forest.parents[node]
        return self._block_of[parent] if parent >= 0 else self._forest.roots[-1 - parent]

    @property
    def new_blocks(self) -> dict[int, int]:
        """Node -> block, of each block to fill."""
        return {node: self._block_of[node] for path in self._new_paths for node in path}

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy KV and states of this rank's part into the new blocks and slots, on the current stream."""
        entry_of = {node: entry for entry, node in enumerate(self._forest.states)}
        blocks = list(self.new_blocks.values()), list(self.new_blocks)
        slots = list(self.new_slots.values()), [entry_of[node] for node in self.new_slots]
        with torch.inference_mode():
            for name, pool in self._access.pools.items():
                write_entries(pool, *(blocks if name == KV else slots), tensors[name])

    def digest(self) -> str:
        """Equal on ranks whose `place` decided alike."""
        places = [self._paths, sorted(self.new_slots.items()), sorted(self._known_slots.items())]
        return hashlib.sha256(repr(places).encode()).hexdigest()

    def commit(self) -> ImportReport:
        """Register the new blocks; commit the new states and use the known ones, the most recent last."""
        forest, known_states = self._forest, set(self._known_slots)
        registered = self._register()
        committed: set[int] = set()
        for node in reversed(forest.states):
            if node in self._known_slots:
                self._slots.cached_states.record_use(self._known_slots[node])
            elif node in self.new_slots:
                slot = self.new_slots[node]
                holders = self._slots.commit_slots([slot])  # commits or frees the slot
                del self.new_slots[node]
                if holders == [slot]:
                    committed.add(node)
        known_nodes = self._block_of.keys() - {node for path in self._new_paths for node in path}
        left_out = set(range(len(forest))) - known_nodes - registered - self._other_key
        own_states, other_states = set(self._states), set(forest.states) & self._other_key
        return ImportReport(
            imported=self._counts(registered, committed),
            known=self._counts(known_nodes, known_states),
            left_out=self._counts(left_out, own_states - known_states - committed),
            other_key=self._counts(self._other_key, other_states),
        )

    def _register(self) -> set[int]:
        """Enter the new blocks into the KV index; the nodes whose blocks it took."""
        forest = self._forest
        registered: set[int] = set()
        for nodes in self._new_paths:
            parent = self._parent_of(nodes[0])
            if isinstance(parent, int) and parent not in self._kv_blocks.tree:
                continue  # a hash collision above kept the parent out of the index
            blocks = [self._block_of[node] for node in nodes]
            hashes, tokens = [forest.hashes[node] for node in nodes], [forest.tokens[node] for node in nodes]
            registered_blocks = self._kv_blocks.register_chain(parent, blocks, hashes, tokens)
            registered.update(nodes[: len(registered_blocks)])
        return registered

    def _counts(self, nodes: Iterable[int], states: set[int]) -> PrefixCounts:
        num_blocks = len(set(nodes))
        return PrefixCounts(
            prefixes=len(states & self._forest.leaves), blocks=num_blocks, states=len(states),
            tokens=num_blocks * self._access.block_size_tokens,
        )  # fmt: skip

    def release(self) -> None:
        """Let go of all: what was published stays cached, what was only allocated becomes free."""
        self._slots.release(list(self.new_slots.values()))
        self.new_slots.clear()
        while self._known_slots:
            self._slots.unpin(self._known_slots.popitem()[1])
        while self._paths:
            self._kv_blocks.release_memory_blocks(self._paths.pop())


def write_entries(pool: Tensor, entries: Sequence[int], sources: Sequence[int], values: Tensor) -> None:
    """Overwrite distinct `entries` (blocks or slots) of a pool by the entries `sources` of `values`."""
    for first, some in entries_at_once(pool, entries):
        staged = values[:, list(sources[first : first + len(some)])].to(pool.device)
        pool.index_copy_(1, torch.tensor(some, dtype=torch.int64, device=pool.device), staged)
