"""The state goes whose loss is expected to cost the fewest recomputed blocks."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from .eviction import EvictionPolicy
from .state_tree import StateNode, StateTree

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

Entry = tuple[int, int, int, StateNode]
AGE_BOUNDS = (
    0, 1, 2, 3,
    *(bound for exponent in range(2, 14) for bound in (2**exponent, 3 * 2 ** (exponent - 1))),
)  # fmt: skip
"""Ages, in numbers of requests, at which the buckets begin; the last bucket has no end."""
NUM_BUCKETS = len(AGE_BOUNDS)
_WIDTHS = tuple(
    stop - start for start, stop in zip(AGE_BOUNDS, (*AGE_BOUNDS[1:], 2 * AGE_BOUNDS[-1]), strict=True)
)
_BUCKETS = tuple(zip(AGE_BOUNDS, _WIDTHS, strict=True))
UNIT = 1 << 40
"""Rates are integers in units of 1 / UNIT uses a request, so that sums of rates are exact on every rank."""


class UseRates:
    """For each class of states and each bucket of ages the best rate of use per request of waiting.

    The hazard of a bucket is uses / requests waited, over all states of the class that were ever in the
    bucket. The rate of a state is its Gittins index: the maximum, over how long one is willing to wait, of
    P(use within the wait) / E(requests until the use or the end of the wait). (J. C. Gittins, Bandit
    Processes and Dynamic Allocation Indices, 1979.) So a class whose uses come late is not given up early.

    What is expected before anything is learned counts like the uses of a few states.
    """

    def __init__(self, prior_weights: Sequence[float], prior_states: float = 2.0) -> None:
        self._priors = [
            [(prior_states * width * weight / (start + 2), prior_states * width) for start, width in _BUCKETS]
            for weight in prior_weights
        ]
        self.clear()

    def clear(self) -> None:
        """Forget what was learned."""
        self._uses = [[uses for uses, _ in prior] for prior in self._priors]
        self._waits = [[waited for _, waited in prior] for prior in self._priors]
        self._table = [[0] * NUM_BUCKETS for _ in self._priors]
        self.refresh()

    def note_use(self, kind: int, bucket: int) -> None:
        self._uses[kind][bucket] += 1

    def note_wait(self, kind: int, bucket: int, num_requests: int) -> None:
        self._waits[kind][bucket] += num_requests

    def rate(self, kind: int, bucket: int) -> int:
        return self._table[kind][bucket]

    def refresh(self) -> None:
        """Compute all rates anew; O(classes x buckets^2)."""
        for uses, waits, row in zip(self._uses, self._waits, self._table, strict=True):
            spans = [
                (use / wait, width / (1 + use / wait * width))
                for use, wait, width in zip(uses, waits, _WIDTHS, strict=True)
            ]
            for bucket in range(NUM_BUCKETS):
                row[bucket] = int(UNIT * _gittins(spans[bucket:]))


def _gittins(spans: Sequence[tuple[float, float]]) -> float:
    """The maximum of P / E over all horizons; `spans`: (hazard, expected wait) of each bucket from now on."""
    best = used = waited = 0.0
    alive = 1.0
    for hazard, wait in spans:
        used += alive * hazard * wait
        waited += alive * wait
        if used > best * waited:
            best = used / waited
        alive *= 1 - hazard * wait
        if alive < 1e-3:
            break
    return best


class _Request:
    """A request that runs: its deepest state, and its turn."""

    __slots__ = ("deepest", "turn")

    def __init__(self, deepest: StateNode, turn: int) -> None:
        self.deepest = deepest
        self.turn = turn


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
        self._tree = StateTree()
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
        node = self._tree.find(keys, stop)
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
                self._flush(node)
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
        self._rates.note_use(node.kind, node.bucket)
        self._flush(node)
        node.num_uses += 1
        node.abandoned = False
        if is_fork:
            node.fork, node.superseded, node.frozen = True, False, False
        if node.ghost:
            self._ghosts.move_to_end(node.key)
        self._reclass(node)

    def _note_abandoned(self, node: StateNode) -> None:
        """A request branches off at `node`, a place of one session, which abandons the states below."""
        places = list(node.children.values())
        for below in places:
            if len(places) > _MOST_ABANDONED or below.num_uses > _MOST_ABANDONED_USES or below.frozen:
                continue
            places.extend(below.children.values())
            if below.known and not below.abandoned:
                below.abandoned = True
                self._flush(below)
                self._reclass(below)

    # ---- states

    def plan(self, keys: Sequence[int], depth: int, taken_as: str, request: int) -> None:
        """A state will be stored after `keys[:depth]`; it counts as cached from now on."""
        node = self._nodes.get(keys[depth - 1])
        if node is not None and node.present:
            return
        if node is None:
            node = self._tree.node_at(keys, depth)
            self._nodes[node.key] = node
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
                self._flush(former)
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
            self._slots[slot] = node = StateNode(0, 1, [])
            node.slot, node.present, node.rate = slot, True, _UNNAMED
            self._new_serial(node)
            self._push(node)

    def name(self, slot: int, key: int, path: Callable[[], Sequence[int]]) -> None:
        """The state in `slot` is found under `key`; `path()` returns the hashes of its prefix, `key` last."""
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
        self._tree.check_integrity()
        known = {node.key: node for node in self._tree.nodes() if node.known}
        assert known == self._nodes, "a known state is not in the tree"
        assert {key for key, node in known.items() if node.ghost} == set(self._ghosts), "a ghost is lost"
        planned = {key: node for key, node in known.items() if node.present and node.slot < 0}
        assert planned == self._planned, "a planned state is lost"

    # ---- presence

    def _appear(self, node: StateNode) -> None:
        """The node's state is cached, or planned, from now on."""
        tree = self._tree
        if node.ghost:
            del self._ghosts[node.key]
        change = -node.demand
        node.ghost, node.present = False, True
        tree.count(node, 1)
        if change:
            self._push_present(tree.shift(node, change))
        for below in tree.next_present(node):
            self._push(below)

    def _vanish(self, node: StateNode, remember: bool) -> None:
        """The node's state is gone."""
        tree = self._tree
        node.entry = None
        node.present, node.ghost = False, remember
        tree.count(node, -1)
        if not remember:
            self._forget(node)
            return
        self._ghosts[node.key] = node
        self._push_present(tree.shift(node, node.demand))
        while len(self._ghosts) > self._max_ghosts or self._forgets_for_room:
            _, oldest = self._ghosts.popitem(last=False)
            oldest.ghost = False
            if oldest.rate:
                self._push_present(tree.shift(oldest, -oldest.rate))
            self._drop(oldest)

    @property
    def _forgets_for_room(self) -> bool:
        """Whether the hashes on the ways to ghosts of long prefixes take too much of the host's memory."""
        return self._tree.num_edge_keys > _MOST_KEYS_A_GHOST * self._max_ghosts and len(self._ghosts) > 1

    def _forget(self, node: StateNode) -> None:
        if node.below:
            self._push_present(self._tree.shift(node, node.below))
        self._drop(node)

    def _drop(self, node: StateNode) -> None:
        self._flush(node)
        del self._nodes[node.key]
        node.due = -1
        self._tree.prune(node)

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

    def _flush(self, node: StateNode) -> None:
        """Count how long the node was in its bucket."""
        if not node.frozen:
            self._rates.note_wait(node.kind, node.bucket, self._now - node.entered)
        node.entered = self._now

    def _rerate(self, node: StateNode) -> None:
        rate = self._rates.rate(node.kind, node.bucket)
        change = rate - node.rate
        node.rate = rate
        if node.present:
            self._push(node)
        elif node.ghost and change:
            self._push_present(self._tree.shift(node, change))

    # ---- the order

    def value(self, node: StateNode) -> int:
        """What the loss of a present node's state is expected to cost: blocks a request, in units.

        A superseded state above does not count against a state that will be stored: it goes soon, also where
        the request reads it now. A chunk end counts half, and without the ghosts below: it goes first.
        """
        if node.parent is None:
            return node.rate
        above = self._tree.present_above(node)
        if node.slot < 0:
            while above.parent is not None and above.superseded and not above.fork:
                above = self._tree.present_above(above)
        blocks = node.depth - above.depth
        if node.kind == _CHUNK_END:
            return blocks * node.rate // 2
        return blocks * (node.rate + node.below)

    def _new_serial(self, node: StateNode) -> None:
        self._serial += 1
        node.serial = self._serial

    def _push_present(self, node: StateNode) -> None:
        if node.parent is not None:
            self._push(node)

    def _push(self, node: StateNode) -> None:
        self._num_pushed += 1
        entry = (self.value(node), node.serial, self._num_pushed, node)
        former = node.entry
        if former is not None and former[:2] == entry[:2]:  # type: ignore[index]
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
