"""The prefixes that a policy knows: which lies on the way to which, and what falls back on which."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain

GHOST, PLANNED = -2, -1  # in the place of a slot: the state is gone, or refused; the state will be stored
_MAX_HASHES_PER_GHOST = 32


class Role(Enum):
    """What a state is to requests."""

    FRONTIER = 0  # the deepest state of its request
    FORK = 1  # prompts branch there; stays one
    SUPERSEDED = 2  # its request has a deeper state


Entry = tuple[int, int, "StateNode"]
"""The value of a node, its serial number, and the node: the smallest entry goes first."""


@dataclass(slots=True, eq=False)
class StateNode:
    """A known prefix: its state is in a slot, planned, or a ghost, whose demand still counts."""

    prefix_hash: int  # hash of the prefix
    depth: int  # in blocks
    edge: list[int]  # hashes after the parent's depth; the last one is `prefix_hash`
    slot: int = GHOST  # or `PLANNED`
    parent: "StateNode | None" = None  # None for a state without a hash, and for the root, always present
    children: dict[int, list["StateNode"]] = field(default_factory=dict)
    demand_below: int = 0  # the rates of all ghosts below, down to the next states that are present
    rate: int = 0  # how often it is expected to be used, by class and age
    role: Role = Role.FRONTIER
    is_abandoned: bool = False  # its session went another way above
    boundary_kind: str = ""
    turn: int = 1
    num_uses: int = 0
    is_running: bool = False  # the deepest state of a running request, which does not grow old
    state_class: int = 0
    bucket: int = 0  # of its age, since `bucket_since`; the next one begins at `bucket_ends_at`
    bucket_since: int = 0
    bucket_ends_at: int = -1
    serial: int = 0  # orders states of one value: the last change of class longest ago goes first
    entry: Entry | None = None

    @property
    def is_present(self) -> bool:
        return self.slot != GHOST

    @property
    def demand(self) -> int:
        """What this node adds to `demand_below` of its parent."""
        return 0 if self.is_present else self.demand_below + self.rate

    @property
    def child_nodes(self) -> "Iterator[StateNode]":
        """The children, one by one."""
        return chain.from_iterable(self.children.values())

    def attach(self, child: "StateNode") -> None:
        self.children.setdefault(child.edge[0], []).append(child)
        child.parent = self

    def detach(self, child: "StateNode") -> None:
        siblings = self.children[child.edge[0]]
        siblings.remove(child)
        if not siblings:
            del self.children[child.edge[0]]
        child.parent = None

    def present_above(self) -> "StateNode":
        """The next shallower state that is present."""
        above = self.parent
        while above is not None and above.slot == GHOST:
            above = above.parent
        assert above is not None
        return above

    def present_below(self) -> "Iterator[StateNode]":
        """The present nodes below, as far as no other present one lies between."""
        stack = list(self.child_nodes)
        while stack:
            node = stack.pop()
            if node.slot != GHOST:
                yield node
            else:
                stack.extend(node.child_nodes)

    def add_demand(self, change: int) -> "list[StateNode]":
        """Add `change` to what falls back on the nodes above; returns the present one whose value changes."""
        above = self.parent
        while change and above is not None:
            above.demand_below += change
            if above.slot != GHOST:
                return [above] if above.parent is not None else []
            above = above.parent
        return []


class StateTree:
    """A radix tree of the known prefixes, and a bounded number of ghosts among them."""

    def __init__(self, max_ghosts: int) -> None:
        self.root = StateNode(0, 0, [], slot=PLANNED)
        self.nodes: dict[int, StateNode] = {}  # by hash, without the root
        self.ghosts: OrderedDict[int, StateNode] = OrderedDict()  # used longest ago first
        self.num_edge_hashes = 0  # on all edges
        self._max_ghosts = max_ghosts

    def deepest(self, hashes: Sequence[int], stop: int) -> StateNode:
        """The deepest known node on the way of `hashes[:stop]`; the root where there is none."""
        nodes = (self.nodes[prefix_hash] for prefix_hash in self.nodes.keys() & hashes[:stop])
        on_the_way = (n for n in nodes if n.depth <= stop and hashes[n.depth - 1] == n.prefix_hash)
        return max(on_the_way, key=lambda node: node.depth, default=self.root)

    def insert(self, hashes: Sequence[int], depth: int) -> StateNode:
        """A new node at the end of `hashes[:depth]`, between the nodes above and below."""
        parent = self.deepest(hashes, depth - 1)
        node = StateNode(hashes[depth - 1], depth, list(hashes[parent.depth : depth]))
        length = len(node.edge)
        siblings = parent.children.get(node.edge[0], ())
        below = [n for n in siblings if n.depth > depth and n.edge[length - 1] == node.prefix_hash]
        for child in below:
            parent.detach(child)
            child.edge = child.edge[length:]
            node.attach(child)
            node.demand_below += child.demand
        parent.attach(node)
        self.num_edge_hashes += length * (1 - len(below))
        self.nodes[node.prefix_hash] = node
        return node

    def make_present(self, node: StateNode, slot: int) -> list[StateNode]:
        """The node's state is in a slot, or planned, from now on; returns nodes whose values change."""
        self.ghosts.pop(node.prefix_hash, None)
        changed = node.add_demand(-node.demand)
        node.slot = slot
        return [*changed, *node.present_below()]

    def make_ghost(self, node: StateNode) -> list[StateNode]:
        """The node becomes a ghost; returns a node whose value changes, if there is one."""
        node.slot = GHOST
        self.ghosts[node.prefix_hash] = node
        return node.add_demand(node.demand)

    def surplus_ghost(self) -> StateNode | None:
        """A ghost to remove, where there are too many, or the ways to them take the host's memory."""
        num_ghosts, most = len(self.ghosts), self._max_ghosts
        too_long = self.num_edge_hashes > _MAX_HASHES_PER_GHOST * most and num_ghosts > 1
        return next(iter(self.ghosts.values())) if num_ghosts > most or too_long else None

    def remove(self, ghost: StateNode) -> list[StateNode]:
        """Remove a ghost; what is below continues the node above. Returns a node whose value changes."""
        del self.ghosts[ghost.prefix_hash], self.nodes[ghost.prefix_hash]
        changed = ghost.add_demand(-ghost.rate)
        parent, below = ghost.parent, list(ghost.child_nodes)
        assert parent is not None
        parent.detach(ghost)
        for child in below:
            child.edge = ghost.edge + child.edge
            parent.attach(child)
        self.num_edge_hashes -= len(ghost.edge) * (1 - len(below))
        return changed

    def check_integrity(self) -> None:
        """Raise AssertionError where edges, demands or counts are off."""
        nodes = [self.root, *self.nodes.values()]
        for node in nodes:
            children = list(node.child_nodes)
            assert node.demand_below == sum(child.demand for child in children), "the demand of ghosts is off"
            for child in children:
                assert child.parent is node, "a node is below another parent"
                assert self.nodes.get(child.prefix_hash) is child, "a node in the tree is not known"
                assert child.depth == node.depth + len(child.edge), "an edge is too long"
                assert child.edge[-1] == child.prefix_hash, "an edge leads to another prefix"
        assert sum(len(list(node.child_nodes)) for node in nodes) == len(self.nodes), "a node is in no tree"
        assert sum(len(node.edge) for node in nodes) == self.num_edge_hashes, "the count of edges is off"
        ghosts = {prefix_hash for prefix_hash, node in self.nodes.items() if not node.is_present}
        assert ghosts == self.ghosts.keys(), "a ghost is lost"
