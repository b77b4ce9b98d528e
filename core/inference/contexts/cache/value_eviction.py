"""The default policy: evicts the state whose loss is expected to cost the fewest recomputed blocks."""

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from .eviction import EvictionPolicy
from .state_tree import GHOST, PLANNED, Entry, Role, StateNode, StateTree
from .use_rates import AGE_BOUNDS, NUM_BUCKETS, UseRates

# The classes of states are numbers: places in `_PRIORS`.
_FRONTIERS = (0, 0, 1, 2, 3, 3, 4)  # by turns before the state; more turns: the last one
_FORKS = (5, 6, 7, 8, 8, 9, 9, 9, 9, 10)  # by uses; more uses: the last one
_SUPERSEDED, _SUPERSEDED_TAIL, _STEP_END, _ABANDONED, _ABANDONED_FORK = 11, 12, 13, 14, 15
# For each class, how many uses the next request is expected to bring a state that came into the class just
# now, before `UseRates` has learned any: longer sessions and forks of more uses are used sooner, superseded
# and abandoned states seldom. Two states' worth of evidence.
_PRIORS = (
    0.3, 0.4, 0.6, 0.7, 0.8,  # frontiers
    0.4, 0.5, 0.8, 1.0, 1.2, 1.5,  # forks
    0.04, 0.04, 0.02,  # superseded
    0.02, 0.04,  # abandoned
)  # fmt: skip
_RESCORED_PER_REQUEST = 16
_MAX_SESSION_USES = 6  # a place that more requests ended at is no place of one session
_MAX_ABANDONED_USES = 4
_MAX_ABANDONED = 256  # places that a request looks at
_REFRESH_REQUESTS = 64  # requests from one computation of the rates to the next, at least
_WITHOUT_HASH = 1 << 80  # a state that its host has not named yet is the last to go
_INNER = ("step_end", "interval")


@dataclass(slots=True)
class _Request:
    """A request that runs: its deepest state, and its turn."""

    deepest: StateNode
    turn: int
    superseded: StateNode | None = None  # by the deepest one


class ValueEviction(EvictionPolicy):
    """Orders states by value: blocks saved, times how often a request is expected to want them.

    A state saves the blocks between it and the next shallower cached state. It serves the requests that want
    it, and those that want a ghost below: a state that was evicted, or refused a slot. A request counts as a
    use of the deepest state on its way, cached or ghost. How soon one comes back is learned for each class
    (`UseRates`):

        frontier     the deepest state of its request, by the number of turns before it
        fork         where prompts branch, by the number of uses
        superseded   a state whose request has a deeper one, by the kind of its boundary
        abandoned    below a place where its session went another way; forks apart

    The order is a heap, in which a node's newest entry counts. A call that lowers a value pushes an entry.
    One that raises a value may leave the lower entry: when that comes up, the node gets another. The rates
    change slowly: after each request a few states are scored anew.
    """

    refuses = True

    def __init__(self, num_ghosts: int = 1024) -> None:
        """`num_ghosts`: how many evicted states are remembered."""
        self._max_ghosts = num_ghosts
        self._rates = UseRates(_PRIORS)
        self._num_requests = 0
        self.clear()

    def clear(self) -> None:
        """Remove all states, ghosts and requests. What was learned of rates stays."""
        self._tree = StateTree(self._max_ghosts)
        self._slots: dict[int, StateNode] = {}
        self._planned: dict[int, StateNode] = {}
        self._requests: dict[int, _Request] = {}
        self._sees_requests = False
        self._now = 0  # requests so far
        self._calendar: dict[int, list[StateNode]] = {}  # request -> nodes whose next bucket begins then
        self._to_rescore: list[StateNode] = []  # nodes to score anew, with new rates
        self._serial = 0
        self._heap: list[Entry] = []

    # ---- requests

    def add_request(self, hashes: Sequence[int], stop: int, was_preempted: bool = False) -> int:
        """A request arrives; preempted ones (`was_preempted`) count as no use. Returns its ticket."""
        self._sees_requests = True
        if not was_preempted:
            self._tick()
        node = self._tree.deepest(hashes, stop)
        turn = 1
        if node.parent is not None:
            if not was_preempted:
                forks = len(hashes) <= node.depth or hashes[node.depth] not in node.children
                self._count_use(node, is_fork=node.role is Role.SUPERSEDED or (bool(node.children) and forks))
                if node.children and node.num_uses <= _MAX_SESSION_USES:
                    self._abandon_below(node)
            turn = node.turn if node.role is Role.FORK else node.turn + 1
        self._num_requests += 1
        self._requests[self._num_requests] = _Request(node, turn)
        return self._num_requests

    def end_request(self, ticket: int) -> None:
        """The request ends, or is preempted."""
        request = self._requests.pop(ticket, None)
        if request is None or request.deepest.parent is None:
            return
        node = request.deepest
        node.turn = max(node.turn, request.turn)
        if node.is_running:
            node.is_running = False
            self._update_class(node)

    def _tick(self) -> None:
        self._now = now = self._now + 1
        for node in self._calendar.pop(now, ()):
            if node.bucket_ends_at == now and node.parent is not None:
                self._count_wait(node)
                self._schedule(node, node.bucket + 1)
                self._update_rate(node)
        if not self._to_rescore and now % _REFRESH_REQUESTS == 0:
            self._rates.refresh()
            self._to_rescore = list(self._tree.nodes.values())
        for node in self._to_rescore[-_RESCORED_PER_REQUEST:]:
            if node.parent is not None:
                self._update_rate(node)
        del self._to_rescore[-_RESCORED_PER_REQUEST:]

    def _count_use(self, node: StateNode, *, is_fork: bool) -> None:
        self._rates.uses[node.state_class][node.bucket] += 1
        self._count_wait(node)
        node.num_uses += 1
        node.is_abandoned = False
        if is_fork:
            node.role, node.is_running = Role.FORK, False
        if not node.is_present:
            self._tree.ghosts.move_to_end(node.prefix_hash)
        self._update_class(node)

    def _abandon_below(self, node: StateNode) -> None:
        """A request branches off at `node`, a place of one session, which abandons the states below."""
        places = list(node.child_nodes)
        for below in places:
            if len(places) > _MAX_ABANDONED or below.num_uses > _MAX_ABANDONED_USES or below.is_running:
                continue
            places.extend(below.child_nodes)
            if not below.is_abandoned:
                below.is_abandoned = True
                self._count_wait(below)
                self._update_class(below)

    # ---- states

    def insert_planned(self, hashes: Sequence[int], depth: int, kind: str, ticket: int) -> None:
        """A state will be stored after `hashes[:depth]`; it counts as cached from now on."""
        node = self._tree.nodes.get(hashes[depth - 1])
        if node is None:
            node = self._tree.insert(hashes, depth)
            node.boundary_kind = kind
        elif node.is_present:
            return
        if (running := self._requests.get(ticket)) is not None:
            self._set_role(node, running)
        self._planned[node.prefix_hash] = node
        self._push(self._tree.make_present(node, PLANNED))
        self._update_class(node)

    def _set_role(self, node: StateNode, request: _Request) -> None:
        """Give the new state of a request its role; the request's former deepest one is superseded."""
        former = request.deepest
        passed = node.boundary_kind in _INNER or node.depth < former.depth
        node.turn, node.is_abandoned = request.turn, False
        if node.boundary_kind in ("branch", "mark"):
            node.role = Role.FORK
        elif node.role is not Role.FORK:
            node.role = Role.SUPERSEDED if passed else Role.FRONTIER
        if passed:
            return
        if former is not node:
            request.superseded = None
            if former.parent is not None and former.role is Role.FRONTIER:
                former.role, former.is_running = Role.SUPERSEDED, False
                self._count_wait(former)
                self._update_class(former)
                request.superseded = former
            request.deepest = node
        node.is_running = node.role is not Role.FORK

    def remove_planned(self, prefix_hash: int | None) -> None:
        """A planned state (None: all) was not stored, or found no slot: its demand is remembered."""
        for planned in list(self._planned) if prefix_hash is None else (prefix_hash,):
            if (node := self._planned.pop(planned, None)) is not None:
                self._make_ghost(node, remember=True)

    def discard_planned(self, prefix_hash: int) -> None:
        """As if the state had not been planned: what it superseded is its request's deepest one again."""
        if (node := self._planned.pop(prefix_hash, None)) is None:
            return
        for request in self._requests.values():
            former = request.superseded
            if request.deepest is node and former is not None and former.parent is not None:
                former.role, former.is_running = Role.FRONTIER, True
                self._update_class(former)
                request.deepest, request.superseded = former, None
        self._make_ghost(node, remember=False)

    def least_valuable(
        self, evictable: Callable[[int], bool], planned: Collection[int] = ()
    ) -> tuple[int, int]:
        """The least of the evictable slots and the planned states: (slot, 0), (-1, hash) or (-1, 0)."""
        wanted = set(planned)
        for node in self._in_order(lambda n: evictable(n.slot) if n.slot >= 0 else n.prefix_hash in wanted):
            return (node.slot, 0) if node.slot >= 0 else (-1, node.prefix_hash)
        return -1, 0

    def insert(self, slots: Sequence[int]) -> None:
        """States were committed in these slots; `set_hashes` says which."""
        if not self._sees_requests:
            self._tick()
        for slot in slots:
            self._slots[slot] = node = StateNode(0, 1, [], slot=slot, rate=_WITHOUT_HASH)
            self._new_serial(node)
            self._push([node])

    def set_hashes(
        self, slots: Sequence[int], hashes: Sequence[int], hashes_to: Callable[[int], Sequence[int]]
    ) -> None:
        """The states in `slots` are found under `hashes`; `hashes_to(i)`: the hashes of one's prefix."""
        for i, (slot, prefix_hash) in enumerate(zip(slots, hashes, strict=True)):
            unnamed = self._slots[slot]
            if unnamed.parent is not None:
                if unnamed.prefix_hash == prefix_hash:
                    continue
                self.remove([slot], remember=False)
                self.insert([slot])
                unnamed = self._slots[slot]
            node = self._tree.nodes.get(prefix_hash)
            if node is not None and node.slot >= 0:
                unnamed.rate = 0  # no request finds the state
                self._push([unnamed])
                continue
            if node is None or not node.is_present:
                self.insert_planned(prefix := hashes_to(i), len(prefix), "", -1)
                node = self._tree.nodes[prefix_hash]
            del self._planned[prefix_hash]
            unnamed.entry, node.slot = None, slot
            self._slots[slot] = node
            self._push([node])

    def use(self, slot: int) -> None:
        """A request resumed from `slot`."""
        node = self._slots[slot]
        if not self._sees_requests:
            self._tick()
            if node.parent is not None:
                self._count_use(node, is_fork=bool(node.num_uses))
            else:
                self._new_serial(node)
                self._push([node])

    def remove(self, slots: Sequence[int], remember: bool = True) -> None:
        """These slots hold no state any more; `remember`: the demand for the states is remembered."""
        for slot in slots:
            node = self._slots.pop(slot)
            if node.parent is None:
                node.slot, node.entry = GHOST, None
            else:
                self._make_ghost(node, remember)

    def _make_ghost(self, node: StateNode, remember: bool) -> None:
        node.entry = None
        self._push(self._tree.make_ghost(node))
        ghost = self._tree.surplus_ghost() if remember else node
        while ghost is not None:
            self._push(self._tree.remove(ghost))
            self._count_wait(ghost)
            ghost.bucket_ends_at = -1
            ghost = self._tree.surplus_ghost()

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Up to `count` evictable slots by value, the least first, as if all of them stayed."""
        return [n.slot for n in self._in_order(lambda n: n.slot >= 0 and evictable(n.slot), count)]

    def check_integrity(self, slots: Collection[int]) -> None:
        """Raise AssertionError where the tree or the order is off; `slots`: the committed slots."""
        assert self._slots.keys() == set(slots), "the eviction policy orders other slots than the committed"
        assert all(node.slot == slot for slot, node in self._slots.items()), "a state is in another slot"
        entries = {id(entry) for entry in self._heap}
        assert all(id(node.entry) in entries for node in self._slots.values()), "a state is not in the heap"
        planned = {node.prefix_hash: node for node in self._tree.nodes.values() if node.slot == PLANNED}
        assert planned == self._planned, "a planned state is lost"
        self._tree.check_integrity()

    # ---- classes and rates

    def _update_class(self, node: StateNode) -> None:
        """Give the node its class; its age begins anew."""
        if node.is_abandoned:
            node.state_class = _ABANDONED_FORK if node.role is Role.FORK else _ABANDONED
        elif node.role is Role.FORK:
            node.state_class = _FORKS[min(node.num_uses, len(_FORKS) - 1)]
        elif node.role is Role.FRONTIER:
            node.state_class = _FRONTIERS[min(node.turn, len(_FRONTIERS) - 1)]
        elif node.boundary_kind in _INNER:
            node.state_class = _STEP_END
        else:
            node.state_class = _SUPERSEDED_TAIL if node.boundary_kind == "tail" else _SUPERSEDED
        self._new_serial(node)
        self._schedule(node, 0)
        self._update_rate(node)

    def _schedule(self, node: StateNode, bucket: int) -> None:
        """The node's age is in this bucket from now on."""
        node.bucket, node.bucket_since, node.bucket_ends_at = bucket, self._now, -1
        if bucket + 1 < NUM_BUCKETS and not node.is_running:
            node.bucket_ends_at = self._now + AGE_BOUNDS[bucket + 1] - AGE_BOUNDS[bucket]
            self._calendar.setdefault(node.bucket_ends_at, []).append(node)

    def _count_wait(self, node: StateNode) -> None:
        """Count how many requests the node has waited in its bucket."""
        if not node.is_running:
            self._rates.waits[node.state_class][node.bucket] += self._now - node.bucket_since
        node.bucket_since = self._now

    def _update_rate(self, node: StateNode) -> None:
        rate = self._rates.rates[node.state_class][node.bucket]
        change, node.rate = rate - node.rate, rate
        self._push([node] if node.slot != GHOST else node.add_demand(change))

    # ---- the order

    def value(self, node: StateNode) -> int:
        """What the loss of a present node's state is expected to cost: blocks a request, scaled as rates.

        A superseded state above does not count against a state that will be stored: it goes soon, also where
        the request reads it now. A state at a step's end counts half, and without the ghosts below: it goes
        first.
        """
        if node.parent is None:
            return node.rate
        above = node.present_above()
        if node.slot == PLANNED:
            while above.role is Role.SUPERSEDED:
                above = above.present_above()
        blocks = node.depth - above.depth
        if node.state_class == _STEP_END:
            return blocks * node.rate // 2
        return blocks * (node.rate + node.demand_below)

    def _new_serial(self, node: StateNode) -> None:
        self._serial += 1
        node.serial = self._serial

    def _push(self, nodes: Iterable[StateNode]) -> None:
        """Give these present nodes entries of their values now."""
        for node in nodes:
            value, former = self.value(node), node.entry
            if former is not None and former[0] == value and former[1] == node.serial:
                continue
            node.entry = entry = (value, node.serial, node)
            heapq.heappush(self._heap, entry)
            if len(self._heap) > 4 * len(self._slots) + 256:
                self._heap = [entry for entry in self._heap if entry[2].entry is entry]
                heapq.heapify(self._heap)

    def _in_order(self, wanted: Callable[[StateNode], bool], count: int = 1) -> list[StateNode]:
        """The first `count` wanted present nodes by value."""
        found: list[StateNode] = []
        taken: list[Entry] = []
        while self._heap and len(found) < count:
            entry = heapq.heappop(self._heap)
            value, _, node = entry
            if node.entry is not entry:
                continue
            if self.value(node) != value:  # the next shallower state is gone
                self._push([node])
                continue
            taken.append(entry)
            if wanted(node):
                found.append(node)
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return found
