"""Eviction that thins the states of a path evenly, instead of taking the oldest one."""

from .blocks import ROOT, BlockIndex
from .states import StateSlots


class CoverageSlots(StateSlots):
    """The state used longest ago names a path; of the path's states the one goes that leaves the least gap.

    As pull request 38000 of SGLang ("Thin cached states by coverage instead of evicting the LRU tail",
    open in September 2026) describes it. A path reaches from the root through the oldest state down to
    the next fork. The gap of a state lies between its neighbours on the path; of the deepest one, between
    its neighbour and itself. Equal gaps go in order of last use. Left out: what the pull request says
    beyond its description.
    """

    def __init__(self, index: BlockIndex, capacity: int) -> None:
        super().__init__(index, capacity)
        self._children: list[list[int]] = [[] for _ in range(index.num_nodes)]
        for node in range(1, index.num_nodes):
            self._children[index.parent[node]].append(node)

    def victim(self, newcomer: int) -> int | None:
        oldest = super().victim(newcomer)
        if oldest is None:
            return None
        holders = self._holders(oldest)
        depth = self.index.depth
        best, least = oldest, 1 << 60
        recency = self.last_use
        for place, node in enumerate(holders):
            if self.pinned(node):
                continue
            above = depth[holders[place - 1]] if place else 0
            below = depth[holders[place + 1]] if place + 1 < len(holders) else depth[node]
            gap = below - above
            if gap < least or (gap == least and recency[node] < recency[best]):
                best, least = node, gap
        return best

    def _holders(self, node: int) -> list[int]:
        """States on the path of a node, shallow first, down to the next fork."""
        found = []
        at = node
        while at != ROOT:
            if at in self.slots:
                found.append(at)
            at = self.index.parent[at]
        found.reverse()
        at = node
        while self.kv.children[at] == 1:
            at = next(child for child in self._children[at] if self.kv.cached[child])
            if at in self.slots:
                found.append(at)
        return found
