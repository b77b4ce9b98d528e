"""The state goes whose loss is expected to cost the fewest recomputed blocks."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from .eviction import EvictionPolicy
from .use_rates import AGE_BOUNDS, NUM_BUCKETS, UseRates

_FRONTIER, _FORK, _SUPERSEDED, _ABANDONED = 0, 5, 11, 14  # first number of each kind of class
_CHUNK_END = _SUPERSEDED + 2
_TURN_CLASSES = (0, 0, 1, 2, 3, 3, 4)  # turns before a frontier state -> class; more turns: the last one
_USE_CLASSES = (0, 1, 2, 3, 3, 4, 4, 4, 4, 5)  # uses of a fork -> class; more uses: the last one
# Expected uses a request at age 0 of the 16 classes, before `UseRates` has learned any: longer sessions and
# forks of more uses are used sooner, superseded and abandoned states seldom. Two states' worth of evidence.
_PRIORS = (0.3, 0.4, 0.6, 0.7, 0.8, 0.4, 0.5, 0.8, 1.0, 1.2, 1.5, 0.04, 0.04, 0.02, 0.02, 0.04)
_RESCORED_A_REQUEST = 16
_MOST_SESSION_USES = 6  # a place that more requests ended at is no place of one session
_MOST_ABANDONED_USES = 4
_MOST_ABANDONED = 256  # places that a request looks at
_REFRESH_REQUESTS = 64  # requests from one computation of the rates to the next, at least
_MOST_KEYS_A_GHOST = 32
_UNNAMED = 1 << 80  # a state that its host has not named yet is the last to go

Entry = tuple[int, int, int, "StateNode"]


@dataclass(slots=True, eq=False)
class StateNode:
    """A prefix whose state is present (cached, or planned), or a ghost: gone, and its demand still counts.

    Attributes:
        key: the hash of the prefix.
        depth: its blocks.
        edge: the hashes from the parent's depth (exclusive) on; the last one is `key`.
        parent: the longest shorter prefix that is known; None for a state without a hash, and for the root:
            the empty prefix, which is always present.
        children: first hash of an edge -> the nodes that continue this one with such an edge.
        rate: how often the state is expected to be used, an integer.
        below: the rates of all ghosts that fall back on this place: those below, as far as no state that is
            present lies between.
    """

    key: int
    depth: int
    edge: list[int]
    present: bool = False
    parent: "StateNode | None" = None
    children: dict[int, list["StateNode"]] = field(default_factory=dict)
    rate: int = 0
    below: int = 0
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
    entry: Entry | None = None

    @property
    def demand(self) -> int:
        """What this node adds to `below` of the nodes above it."""
        return 0 if self.present else self.below + self.rate

    @property
    def continued(self) -> "Iterator[StateNode]":
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
        while above is not None and not above.present:
            above = above.parent
        assert above is not None
        return above

    def present_below(self) -> "Iterator[StateNode]":
        """The present nodes below, as far as no other present one lies between."""
        stack = list(self.continued)
        while stack:
            node = stack.pop()
            if node.present:
                yield node
            else:
                stack.extend(node.continued)


@dataclass(slots=True)
class _Request:
    """A request that runs: its deepest state, and its turn."""

    deepest: StateNode
    turn: int


class ValueEviction(EvictionPolicy):
    """Orders states by value: blocks saved, times how often a request is expected to want them.

    A state saves the blocks between it and the next shallower cached state. It serves the requests that want
    the state itself, and those that want a state below that is gone: evicted, or refused a slot. Such ghosts
    are remembered, with their demand.

    How soon a request comes back is learned for each class of states (`UseRates`), ages in numbers of
    requests:

        frontier     the deepest state of its request, by the number of turns before it
        fork         where prompts branch, by the number of uses
        superseded   a state whose request has a deeper one, by what it was taken as
        abandoned    below a place where its session went another way: an answer was generated again, or an
                     earlier turn edited; forks apart

    A request counts as a use of the deepest state on its way, cached or ghost. No clock and no random draw
    decide, so that ranks that see the same calls choose alike.

    A change costs O(log slots + known states above it); a choice O(log slots + pinned). The rates change
    slowly: after each request a few states are scored anew.
    """

    refuses = True

    def __init__(self, num_ghosts: int = 1024) -> None:
        """`num_ghosts`: how many evicted states are remembered."""
        self._max_ghosts = num_ghosts
        self._rates = UseRates(_PRIORS)
        self._num_requests = 0
        self.clear()

    def clear(self) -> None:
        """Forget all states, ghosts and requests. What was learned of rates stays."""
        self._root = StateNode(0, 0, [], present=True)
        self._num_edge_keys = 0
        self._now = 0
        self._sees_requests = False
        self._serial = 0
        self._slots: dict[int, StateNode] = {}
        self._nodes: dict[int, StateNode] = {}  # known ones by key
        self._ghosts: OrderedDict[int, StateNode] = OrderedDict()
        self._requests: dict[int, _Request] = {}
        self._planned: dict[int, StateNode] = {}
        self._calendar: dict[int, list[StateNode]] = {}
        self._heap: list[Entry] = []
        self._num_pushed = 0
        self._sweep: list[StateNode] = []

    # ---- requests

    def arrive(self, keys: Sequence[int], stop: int, again: bool = False) -> int:
        """A request arrives; preempted ones (`again`) count as no use. Returns its number."""
        self._sees_requests = True
        if not again:
            self._tick()
        node = self._deepest_known(keys, stop)
        turn = 1
        if node.parent is not None:
            if not again:
                leaves = len(keys) <= node.depth or keys[node.depth] not in node.children
                self._note_use(node, is_fork=node.superseded or (bool(node.children) and leaves))
                if node.children and node.num_uses <= _MOST_SESSION_USES:
                    self._note_abandoned(node)
            turn = node.turn if node.fork else node.turn + 1
        self._num_requests += 1
        self._requests[self._num_requests] = _Request(node, turn)
        return self._num_requests

    def end(self, request: int) -> None:
        """The request ends, or is preempted."""
        gone = self._requests.pop(request, None)
        if gone is None:
            return
        node = gone.deepest
        if node.parent is None:
            return
        node.turn = max(node.turn, gone.turn)
        if node.frozen:
            node.frozen = False
            self._reclass(node)

    def _tick(self) -> None:
        self._now = now = self._now + 1
        for node in self._calendar.pop(now, ()):
            if node.due == now and node.parent is not None:
                self._count_wait(node)
                node.bucket += 1
                self._schedule(node, now)
                self._rerate(node)
        sweep = self._sweep
        if not sweep and now % _REFRESH_REQUESTS == 0:
            self._rates.refresh()
            self._sweep = sweep = list(self._nodes.values())
        for node in sweep[-_RESCORED_A_REQUEST:]:
            if node.parent is not None:
                self._rerate(node)
        del sweep[-_RESCORED_A_REQUEST:]

    def _note_use(self, node: StateNode, *, is_fork: bool) -> None:
        self._rates.uses[node.kind][node.bucket] += 1
        self._count_wait(node)
        node.num_uses += 1
        node.abandoned = False
        if is_fork:
            node.fork, node.superseded, node.frozen = True, False, False
        if not node.present:
            self._ghosts.move_to_end(node.key)
        self._reclass(node)

    def _note_abandoned(self, node: StateNode) -> None:
        """A request branches off at `node`, a place of one session, which abandons the states below."""
        places = list(node.continued)
        for below in places:
            if len(places) > _MOST_ABANDONED or below.num_uses > _MOST_ABANDONED_USES or below.frozen:
                continue
            places.extend(below.continued)
            if not below.abandoned:
                below.abandoned = True
                self._count_wait(below)
                self._reclass(below)

    # ---- states

    def plan(self, keys: Sequence[int], depth: int, taken_as: str, request: int) -> None:
        """A state will be stored after `keys[:depth]`; it counts as cached from now on."""
        node = self._nodes.get(keys[depth - 1])
        if node is not None and node.present:
            return
        if node is None:
            node = self._enter(keys, depth)
            node.taken_as = taken_as
        running = self._requests.get(request)
        if running is not None:
            self._place(node, running)
        self._planned[node.key] = node
        self._appear(node)
        self._reclass(node)

    def _place(self, node: StateNode, request: _Request) -> None:
        former = request.deepest
        node.turn = request.turn
        node.superseded = node.abandoned = False
        if node.taken_as in ("branch", "mark"):
            node.fork = True
        elif node.taken_as in ("chunk_end", "interval"):
            node.superseded = True
            return
        elif node.depth < former.depth:
            node.superseded = not node.fork
            return
        if former is not node and node.depth >= former.depth:
            if former.parent is not None and not former.fork and not former.superseded:
                former.superseded, former.frozen = True, False
                self._count_wait(former)
                self._reclass(former)
            request.deepest = node
        node.frozen = not node.fork

    def unplan(self, key: int | None) -> None:
        """A planned state (None: all) was not stored, or found no slot: its demand is remembered."""
        for planned in list(self._planned) if key is None else (key,):
            node = self._planned.pop(planned, None)
            if node is not None:
                self._vanish(node, remember=True)

    def least(self, evictable: Callable[[int], bool], planned: Collection[int] = ()) -> tuple[int, int]:
        """The least of the evictable slots and the planned states: (slot, -1), (-1, key) or (-1, -1)."""
        wanted = set(planned)
        for node in self._in_order(lambda n: evictable(n.slot) if n.slot >= 0 else n.key in wanted, 1):
            return (node.slot, -1) if node.slot >= 0 else (-1, node.key)
        return -1, -1

    def insert(self, slots: Sequence[int]) -> None:
        """States were committed in these slots; `name` says which."""
        if not self._sees_requests:
            self._tick()
        for slot in slots:
            self._slots[slot] = node = StateNode(0, 1, [], present=True)
            node.slot, node.rate = slot, _UNNAMED
            self._new_serial(node)
            self._push(node)

    def name(self, slots: Sequence[int], keys: Sequence[int], path: Callable[[int], Sequence[int]]) -> None:
        """The states in `slots` are found under `keys`; `path(i)` returns the hashes of one's prefix."""
        for i, (slot, key) in enumerate(zip(slots, keys, strict=True)):
            self._name(slot, key, partial(path, i))

    def _name(self, slot: int, key: int, path: Callable[[], Sequence[int]]) -> None:
        unnamed = self._slots[slot]
        if unnamed.parent is not None:
            if unnamed.key == key:
                return
            self.remove([slot], remember=False)
            self.insert([slot])
            unnamed = self._slots[slot]
        node = self._nodes.get(key)
        if node is not None and node.slot >= 0:
            unnamed.rate = 0  # no request finds the state
            self._push(unnamed)
            return
        if node is None or not node.present:
            keys = path()
            self.plan(keys, len(keys), "", -1)
            node = self._nodes[key]
        del self._planned[key]
        node.slot = slot
        unnamed.slot, unnamed.entry = -1, None
        self._slots[slot] = node
        self._push(node)

    def use(self, slot: int) -> None:
        """A request resumed from `slot`."""
        node = self._slots[slot]
        if not self._sees_requests:
            self._tick()
            if node.parent is not None:
                self._note_use(node, is_fork=bool(node.num_uses))
            else:
                self._new_serial(node)
                self._push(node)

    def remove(self, slots: Sequence[int], remember: bool = True) -> None:
        """These slots hold no state any more; `remember`: the demand for the states is remembered."""
        for slot in slots:
            node = self._slots.pop(slot)
            node.slot = -1
            if node.parent is None:
                node.entry = None
            else:
                self._vanish(node, remember)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Up to `count` evictable slots by value, the least first, as if all of them stayed."""
        return [n.slot for n in self._in_order(lambda n: n.slot >= 0 and evictable(n.slot), count)]

    def check_integrity(self, slots: Collection[int]) -> None:
        """Raise AssertionError where the tree or the order is off; `slots`: the committed slots."""
        assert self._slots.keys() == set(slots), "the eviction policy orders other slots than the committed"
        assert all(node.slot == slot for slot, node in self._slots.items()), "a state is in another slot"
        offered = {id(entry) for entry in self._heap}
        assert all(id(node.entry) in offered for node in self._slots.values()), "a state is not offered"
        nodes = [self._root, *self._nodes.values()]
        for node in nodes:
            children = list(node.continued)
            assert node.below == sum(child.demand for child in children), "the demand of ghosts is off"
            for child in children:
                assert child.parent is node, "a node is below another parent"
                assert self._nodes.get(child.key) is child, "a node in the tree is not known"
                assert child.depth == node.depth + len(child.edge), "an edge is too long"
                assert child.edge[-1] == child.key, "an edge leads to another prefix"
        assert sum(len(list(node.continued)) for node in nodes) == len(self._nodes), "a node is in no tree"
        assert sum(len(node.edge) for node in nodes) == self._num_edge_keys, "the count of edges is off"
        ghosts = {key for key, node in self._nodes.items() if not node.present}
        assert ghosts == self._ghosts.keys(), "a ghost is lost"
        planned = {key: node for key, node in self._nodes.items() if node.present and node.slot < 0}
        assert planned == self._planned, "a planned state is lost"

    # ---- which states lie on the way to which

    def _deepest_known(self, keys: Sequence[int], stop: int) -> StateNode:
        """The deepest known node on the way of `keys[:stop]`; the root where there is none."""
        known = (self._nodes[key] for key in self._nodes.keys() & keys[:stop])
        on_the_way = (node for node in known if node.depth <= stop and keys[node.depth - 1] == node.key)
        return max(on_the_way, key=lambda node: node.depth, default=self._root)

    def _enter(self, keys: Sequence[int], depth: int) -> StateNode:
        """A new node at the end of `keys[:depth]`, between the nodes above and below."""
        parent = self._deepest_known(keys, depth - 1)
        node = StateNode(keys[depth - 1], depth, list(keys[parent.depth : depth]))
        length = len(node.edge)
        siblings = parent.children.get(node.edge[0], ())
        below = [each for each in siblings if each.depth > depth and each.edge[length - 1] == node.key]
        for child in below:
            parent.detach(child)
            child.edge = child.edge[length:]
            node.attach(child)
            node.below += child.demand
        parent.attach(node)
        self._num_edge_keys += length * (1 - len(below))
        self._nodes[node.key] = node
        return node

    def _forget(self, ghost: StateNode) -> None:
        """Forget a ghost; what is below continues the node above."""
        del self._ghosts[ghost.key], self._nodes[ghost.key]
        self._shift(ghost, -ghost.rate)
        self._count_wait(ghost)
        ghost.due = -1
        parent, below = ghost.parent, list(ghost.continued)
        assert parent is not None
        parent.detach(ghost)
        for child in below:
            child.edge = ghost.edge + child.edge
            parent.attach(child)
        self._num_edge_keys -= len(ghost.edge) * (1 - len(below))

    def _shift(self, node: StateNode, change: int) -> None:
        """Add `change` to what falls back on the nodes above, up to one that is present."""
        above = node.parent
        while change and above is not None:
            above.below += change
            if above.present:
                if above.parent is not None:
                    self._push(above)
                return
            above = above.parent

    def _appear(self, node: StateNode) -> None:
        """The node's state is cached, or planned, from now on."""
        self._ghosts.pop(node.key, None)
        self._shift(node, -node.demand)
        node.present = True
        for below in node.present_below():
            self._push(below)

    def _vanish(self, node: StateNode, remember: bool) -> None:
        """The node's state is gone."""
        node.entry = None
        node.present = False
        self._shift(node, node.demand)
        self._ghosts[node.key] = node
        if not remember:
            self._forget(node)
        while len(self._ghosts) > self._max_ghosts or (
            # The hashes on the ways to ghosts of long prefixes take the host's memory, too.
            self._num_edge_keys > _MOST_KEYS_A_GHOST * self._max_ghosts and len(self._ghosts) > 1
        ):
            self._forget(next(iter(self._ghosts.values())))

    # ---- classes and rates

    def _reclass(self, node: StateNode) -> None:
        """Give the node its class; its age begins anew."""
        if node.abandoned:
            node.kind = _ABANDONED + node.fork
        elif node.fork:
            node.kind = _FORK + _USE_CLASSES[min(node.num_uses, len(_USE_CLASSES) - 1)]
        elif node.superseded:
            node.kind = _SUPERSEDED + (
                2 if node.taken_as in ("chunk_end", "interval") else int(node.taken_as == "tail")
            )
        else:
            node.kind = _FRONTIER + _TURN_CLASSES[min(node.turn, len(_TURN_CLASSES) - 1)]
        node.bucket, node.entered = 0, self._now
        self._new_serial(node)
        self._schedule(node, self._now)
        self._rerate(node)

    def _schedule(self, node: StateNode, now: int) -> None:
        node.entered = now
        node.due = -1
        if node.bucket + 1 < NUM_BUCKETS and not node.frozen:
            node.due = now + AGE_BOUNDS[node.bucket + 1] - AGE_BOUNDS[node.bucket]
            self._calendar.setdefault(node.due, []).append(node)

    def _count_wait(self, node: StateNode) -> None:
        """Count how many requests the node has waited in its bucket."""
        if not node.frozen:
            self._rates.waits[node.kind][node.bucket] += self._now - node.entered
        node.entered = self._now

    def _rerate(self, node: StateNode) -> None:
        rate = self._rates.rates[node.kind][node.bucket]
        change = rate - node.rate
        node.rate = rate
        if node.present:
            self._push(node)
        else:
            self._shift(node, change)

    # ---- the order

    def value(self, node: StateNode) -> int:
        """What the loss of a present node's state is expected to cost: blocks a request, in units.

        A superseded state above does not count against a state that will be stored: it goes soon, also where
        the request reads it now. A chunk end counts half, and without the ghosts below: it goes first.
        """
        if node.parent is None:
            return node.rate
        above = node.present_above()
        if node.slot < 0:
            while above.parent is not None and above.superseded and not above.fork:
                above = above.present_above()
        blocks = node.depth - above.depth
        if node.kind == _CHUNK_END:
            return blocks * node.rate // 2
        return blocks * (node.rate + node.below)

    def _new_serial(self, node: StateNode) -> None:
        self._serial += 1
        node.serial = self._serial

    def _push(self, node: StateNode) -> None:
        self._num_pushed += 1
        entry = (self.value(node), node.serial, self._num_pushed, node)
        former = node.entry
        if former is not None and former[:2] == entry[:2]:
            return
        node.entry = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 4 * len(self._slots) + 256:
            self._heap = [e for e in self._heap if e[3].entry is e]
            heapq.heapify(self._heap)

    def _in_order(self, wanted: Callable[[StateNode], bool], count: int) -> list[StateNode]:
        """The first `count` wanted present nodes by value."""
        found: list[StateNode] = []
        taken: list[Entry] = []
        heap = self._heap
        while heap and len(found) < count:
            entry = heapq.heappop(heap)
            node = entry[3]
            if node.entry is not entry:
                continue
            value = self.value(node)
            if value != entry[0]:  # the next shallower state is gone
                node.entry = None
                self._push(node)
                heap = self._heap
                continue
            taken.append(entry)
            if wanted(node):
                found.append(node)
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return found
