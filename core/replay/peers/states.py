"""Cached states of a replayed cache, and which goes when a slot is needed: by its last use, or its KV's."""

from collections import OrderedDict

from .blocks import ROOT, BlockIndex
from .kv_pool import KVPool
from .lazy_heap import LazyHeap


class StateSlots:
    """States by node, least recently used first. A state counts as used when it is stored, and when a request
    resumes from it.

    Args:
        index: the nodes.
        capacity: slots.
    """

    def __init__(self, index: BlockIndex, capacity: int) -> None:
        self.index = index
        self.capacity = capacity
        self.num_taken = 0
        self.slots: OrderedDict[int, None] = OrderedDict()
        self.last_use: dict[int, int] = {}
        self._clock = 0
        self._pins: dict[int, int] = {}

    def __contains__(self, node: int) -> bool:
        return node in self.slots

    def bind(self, kv: KVPool) -> None:
        """Called once with the KV that the states lie beside."""
        self.kv = kv

    def came(self, number: int) -> None:
        """Called with the place in the trace of each request, before it is matched."""

    def deepest(self, path: list[int], limit: int) -> int:
        """Blocks up to the deepest state on a path, at most `limit`; 0 for none."""
        slots = self.slots
        for depth in range(min(limit, len(path)), 0, -1):
            if path[depth - 1] in slots:
                return depth
        return 0

    def use(self, node: int) -> None:
        """A request resumes from the state, and keeps it from eviction until `unpin`."""
        self.pin(node)
        self.refresh(node)

    def pin(self, node: int) -> None:
        """Keep the state from eviction until `unpin`."""
        self._pins[node] = self._pins.get(node, 0) + 1

    def refresh(self, node: int) -> None:
        """Count the state as used now."""
        self.slots.move_to_end(node)
        self._clock += 1
        self.last_use[node] = self._clock

    def unpin(self, node: int) -> None:
        left = self._pins.pop(node) - 1
        if left:
            self._pins[node] = left

    def pinned(self, node: int) -> bool:
        return node in self._pins

    def store(self, node: int) -> bool:
        """Take a slot for a state, evicting where none is free.

        Returns:
            False where the state is refused, or every other one is pinned.
        """
        if node in self.slots:
            self.stored_again(node)
            return True
        while len(self.slots) >= self.capacity:
            victim = self.victim(node)
            if victim is None:
                return False
            self.drop(victim)
        self.slots[node] = None
        self.refresh(node)
        self.num_taken += 1
        self.stored(node)
        return True

    def shrink(self, num_slots: int) -> None:
        """Give up slots, evicting states; states that are pinned stay."""
        self.capacity -= num_slots
        while len(self.slots) > self.capacity:
            victim = self.victim(ROOT)
            if victim is None:
                return
            self.drop(victim)

    def drop(self, node: int) -> None:
        """Free the slot of a state."""
        del self.slots[node], self.last_use[node]
        self.kv.offer(node)

    def forget(self, node: int) -> None:
        """Free the slot of a node that loses its KV, if it has one."""
        if node in self.slots:
            del self.slots[node], self.last_use[node]

    def check_integrity(self) -> None:
        """Raise AssertionError where there are too many states, or one without KV."""
        assert len(self.slots) <= max(0, self.capacity)
        assert self.last_use.keys() == self.slots.keys()
        assert self._pins.keys() <= self.slots.keys()
        assert all(self.kv.cached[node] for node in self.slots)

    def stored(self, node: int) -> None:
        """Called after a new state."""

    def stored_again(self, node: int) -> None:
        """Called where the state to store is there already."""

    def victim(self, newcomer: int) -> int | None:
        """The state that goes next; None where none may."""
        for node in self.slots:
            if node not in self._pins:
                return node
        return None


class PathCapSlots(StateSlots):
    """Least recently used first, and at most `cap` states on the path of a new one.

    As `mamba_max_states_per_path` of SGLang: beyond the cap the shallowest state goes that is not the new
    one, has exactly one registered child, and is not in use.
    """

    def __init__(self, index: BlockIndex, capacity: int, cap: int) -> None:
        super().__init__(index, capacity)
        self._cap = cap

    def stored(self, node: int) -> None:
        holders = []
        parent = self.index.parent
        at = node
        while at != ROOT:
            if at in self.slots:
                holders.append(at)
            at = parent[at]
        excess = len(holders) - self._cap
        for holder in reversed(holders):
            if excess <= 0 or holder == node:
                break
            if holder not in self._pins and self.kv.children[holder] == 1:
                self.drop(holder)
                excess -= 1


class KVRecencySlots(StateSlots):
    """The state goes whose KV block was used longest ago, and that no request holds.

    As megatron-core evicts states. All blocks of a matched path are used at once, so their states are equally
    recent; the shallower of two goes first.
    """

    def __init__(self, index: BlockIndex, capacity: int) -> None:
        super().__init__(index, capacity)
        self._heap = LazyHeap(self._key)

    def _key(self, node: int) -> tuple[int, int] | None:
        if node not in self.slots:
            return None
        held = self.kv.refs[node] > 0
        return (self.kv.stamp[node] + (1 << 60 if held else 0), self.index.depth[node])

    def stored(self, node: int) -> None:
        self._heap.push(node)

    def victim(self, newcomer: int) -> int | None:
        node = self._heap.least()
        if node is None or self.kv.refs[node]:
            return None
        return node
