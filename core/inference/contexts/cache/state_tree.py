"""A radix tree of cached states and their ghosts, by the hashes of their prefixes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class StateNode:
    """The end of a prefix: a state that is cached, a ghost, or a branch point of known prefixes.

    Attributes:
        key: the hash of the prefix.
        depth: its blocks.
        edge: the hashes from the parent's depth (exclusive) on; the last one is `key`.
        parent: the node before; None for the root and for a removed node.
        children: first hash of a child's edge -> the child.
        present: whether a slot holds, or will hold, the state.
        ghost: whether the state is gone, and its demand is still counted.
        rate: how often the state is expected to be used, an integer.
        below: the rates of all ghosts that fall back on this place: those below, as far as no state that is
            present lies between.
        num_present: nodes below that are present.
    """

    key: int
    depth: int
    edge: list[int]
    parent: "StateNode | None" = None
    children: dict[int, "StateNode"] = field(default_factory=dict)
    present: bool = False
    ghost: bool = False
    rate: int = 0
    below: int = 0
    num_present: int = 0
    # What a policy knows of the state.
    slot: int = -1
    kind: int = 0
    taken_as: str = ""
    turn: int = 1
    num_uses: int = 0
    fork: bool = False
    superseded: bool = False
    frozen: bool = False
    abandoned: bool = False
    entered: int = 0
    bucket: int = 0
    due: int = -1
    serial: int = 0
    entry: object = None

    @property
    def known(self) -> bool:
        """Whether a state is or was here; else the node is a branch point."""
        return self.present or self.ghost

    @property
    def demand(self) -> int:
        """What this node adds to `below` of the nodes above it."""
        if self.present:
            return 0
        return self.below + self.rate if self.ghost else self.below


class StateTree:
    """Which states lie on the way to which. The root stands for the empty prefix, and is always present."""

    def __init__(self) -> None:
        self.root = StateNode(0, 0, [])
        self.root.present = True
        self.num_edge_keys = 0

    def find(self, keys: Sequence[int], stop: int) -> StateNode:
        """The deepest known node on the way of `keys[:stop]`; the root where there is none."""
        node = found = self.root
        while node.depth < stop:
            child = node.children.get(keys[node.depth])
            if child is None or child.depth > stop or child.edge != keys[node.depth : child.depth]:
                break
            node = child
            if node.known:
                found = node
        return found

    def node_at(self, keys: Sequence[int], depth: int) -> StateNode:
        """The node at the end of `keys[:depth]`, which may be new."""
        node = self.root
        while node.depth < depth:
            start = node.depth
            child = node.children.get(keys[start])
            if child is None:
                return self._attach(node, StateNode(keys[depth - 1], depth, list(keys[start:depth])))
            if child.depth <= depth and child.edge == keys[start : child.depth]:
                node = child
                continue
            common = 1
            while start + common < min(depth, child.depth) and child.edge[common] == keys[start + common]:
                common += 1
            node = self._split(child, common)
        return node

    def _attach(self, parent: StateNode, child: StateNode) -> StateNode:
        parent.children[child.edge[0]] = child
        child.parent = parent
        self.num_edge_keys += len(child.edge)
        return child

    def _split(self, child: StateNode, length: int) -> StateNode:
        parent = child.parent
        assert parent is not None
        middle = StateNode(child.edge[length - 1], parent.depth + length, child.edge[:length])
        middle.below = child.demand
        middle.num_present = child.num_present + child.present
        child.edge = child.edge[length:]
        parent.children[middle.edge[0]] = middle
        middle.parent = parent
        middle.children[child.edge[0]] = child
        child.parent = middle
        return middle

    def prune(self, node: StateNode) -> None:
        """Remove a node that is not known, and nodes above it that only led there."""
        while node.parent is not None and not node.known and len(node.children) < 2:
            parent = node.parent
            if node.children:
                (child,) = node.children.values()
                child.edge = node.edge + child.edge
                child.parent = parent
                parent.children[child.edge[0]] = child
                node.parent = None
                node.children = {}
                return
            del parent.children[node.edge[0]]
            self.num_edge_keys -= len(node.edge)
            node.parent = None
            node = parent

    def present_above(self, node: StateNode) -> StateNode:
        """The next shallower state that is present."""
        above = node.parent
        while above is not None and not above.present:
            above = above.parent
        return above or self.root

    def shift(self, node: StateNode, change: int) -> StateNode:
        """Add `change` to what falls back on the nodes above; returns the one that is present."""
        above = node.parent
        while above is not None:
            above.below += change
            if above.present:
                return above
            above = above.parent
        return self.root

    def count(self, node: StateNode, change: int) -> None:
        """Add `change` to the number of present nodes below the nodes above."""
        above = node.parent
        while above is not None:
            above.num_present += change
            above = above.parent

    def nodes(self) -> Iterator[StateNode]:
        """All nodes but the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Raise AssertionError where a node is in the wrong place, or a sum is off; O(nodes)."""
        for node in (self.root, *self.nodes()):
            children = list(node.children.values())
            for first, child in node.children.items():
                assert child.parent is node, "a node is below another parent"
                assert child.edge[0] == first, "an edge begins elsewhere"
                assert child.depth == node.depth + len(child.edge), "an edge is too long"
                assert child.edge[-1] == child.key, "an edge leads to another prefix"
            assert not (node.present and node.ghost), "a state is there and gone"
            assert node.known or len(children) > 1, "a node leads nowhere"
            assert node.below == sum(child.demand for child in children), "the demand of ghosts is off"
            num_present = sum(child.num_present + child.present for child in children)
            assert node.num_present == num_present, "the count of present states is off"
        num_keys = sum(len(node.edge) for node in self.nodes())
        assert num_keys == self.num_edge_keys, "the count of edges is off"

    def next_present(self, node: StateNode) -> Iterator[StateNode]:
        """The present nodes below, as far as no other present one lies between."""
        if not node.num_present:
            return
        stack = list(node.children.values())
        while stack:
            below = stack.pop()
            if below.present:
                yield below
            elif below.num_present:
                stack.extend(below.children.values())
