"""States by value: what is kept, what is refused, and an oracle that scores all states anew."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mambaslots.inference.contexts.cache.state_tree import Role
from mambaslots.inference.contexts.cache.value_eviction import ValueEviction


def anything(slot):
    return True


def stored(policy, slot, keys, visit, kind="tail"):
    policy.insert_planned(keys, len(keys), kind, visit)
    policy.insert([slot])
    policy.set_hashes([slot], [keys[-1]], lambda i: keys)


def one_request(policy, slot, keys, kind="tail"):
    visit = policy.add_request(keys, len(keys))
    stored(policy, slot, keys, visit, kind)
    policy.end_request(visit)


def test_a_long_prefix_outlives_a_short_one():
    policy = ValueEviction()
    one_request(policy, 0, [1])
    one_request(policy, 1, list(range(2, 30)))
    one_request(policy, 2, [40, 41])
    assert policy.victims(3, anything) == [0, 2, 1]


def test_a_state_close_behind_another_is_worth_its_distance_only():
    policy = ValueEviction()
    one_request(policy, 0, list(range(1, 30)))
    one_request(policy, 1, [90, 91, 92, 93])
    one_request(policy, 2, list(range(1, 31)))
    assert policy.victims(1, anything) == [2]
    policy.remove([2])  # whose requests fall back on the other one
    assert policy.victims(2, anything) == [1, 0]


def test_a_superseded_state_goes_before_its_successor():
    policy = ValueEviction()
    keys = list(range(1, 20))
    visit = policy.add_request(keys, len(keys))
    stored(policy, 0, keys[:10], visit)
    stored(policy, 1, keys, visit, "decode")
    assert policy.victims(1, anything) == [0]


def test_a_step_end_goes_first():
    policy = ValueEviction()
    keys = list(range(1, 20))
    visit = policy.add_request(keys, len(keys))
    stored(policy, 0, keys[:16], visit, "step_end")
    one_request(policy, 1, [90])
    stored(policy, 2, keys, visit)
    assert policy.victims(1, anything) == [0]


def test_a_branch_that_its_session_has_left_goes_first():
    policy = ValueEviction()
    head = list(range(1, 11))
    one_request(policy, 0, head)
    one_request(policy, 1, [*head, *range(20, 30)])
    one_request(policy, 2, [*head, *range(30, 40)])  # an earlier turn, edited
    assert policy.victims(1, anything) == [1]
    policy.add_request([*head, *range(20, 40)], 30)  # the session comes back
    assert policy.victims(1, anything) != [1]


def test_sessions_that_share_a_head_leave_no_branch():
    policy = ValueEviction()
    head = list(range(1, 11))
    one_request(policy, 0, head)
    for session in range(20, 40):
        one_request(policy, 1, [*head, session])
        policy.remove([1])
    one_request(policy, 1, [*head, *range(50, 60)])
    one_request(policy, 2, [*head, *range(60, 70)])
    assert policy.victims(1, anything) == [1]
    assert policy.victims(2, anything) == [1, 2]
    assert policy._slots[1].is_abandoned is False


def test_a_fork_is_kept_for_the_requests_that_fell_back_on_it():
    policy = ValueEviction()
    head = list(range(1, 11))
    one_request(policy, 0, head, "branch")
    for question in range(20, 26):
        one_request(policy, 1, [*head, question])
        policy.remove([1])
    one_request(policy, 1, list(range(50, 61)))
    assert policy.victims(2, anything) == [1, 0]


def test_a_newcomer_worth_less_than_all_states_is_the_least():
    policy = ValueEviction()
    one_request(policy, 0, list(range(1, 20)))
    visit = policy.add_request([90, 91], 1)
    policy.insert_planned([90, 91], 1, "tail", visit)
    assert policy.least_valuable(anything, [90]) == (-1, 90)
    policy.remove_planned(90)
    assert policy.least_valuable(anything, [90]) == (0, 0)
    assert policy.least_valuable(lambda slot: False) == (-1, 0)


def test_a_host_that_notifies_of_nothing_gets_the_order_of_use():
    policy = ValueEviction()
    for slot in range(4):
        policy.insert([slot])
    assert policy.victims(2, anything) == [0, 1]
    for slot in range(4):
        policy.set_hashes([slot], [70 + slot], lambda i, slot=slot: [70 + slot])
    policy.use(0)
    assert policy.victims(3, anything) == [1, 2, 3]


def test_classes_whose_requests_return_are_learned():
    policy = ValueEviction()
    for session in range(1, 400):
        first = [1000 * session + block for block in range(1, 4)]
        one_request(policy, 0, first)
        policy.remove([0])
        if session % 2:  # a session of two turns; none has a third
            one_request(policy, 0, [*first, 1000 * session + 9, 1000 * session + 10, 1000 * session + 11])
            policy.remove([0])
    one_request(policy, 1, [4, 5, 6])
    one_request(policy, 2, [4, 5, 6, 7, 8, 9])
    policy.remove([1])
    one_request(policy, 0, [1, 2, 3])
    assert policy.victims(2, anything) == [2, 0]


def test_an_unknown_slot_is_an_error():
    for call in ("use", "remove"):
        with pytest.raises(KeyError):
            getattr(ValueEviction(), call)(1 if call == "use" else [1])


def brute_value(policy, node):
    """The value by its definition, from the list of all known prefixes."""
    if node.parent is None:
        return node.rate
    nodes = list(policy._tree.nodes.values())
    path = path_of(node)
    above = [n for n in nodes if n is not node and n.is_present and path[: n.depth] == path_of(n)]
    if node.slot < 0:
        above = [n for n in above if n.role is not Role.SUPERSEDED]
    depth = max((n.depth for n in above), default=0)
    rate = node.rate
    for ghost in nodes:
        way = path_of(ghost)
        if not ghost.is_present and ghost.depth > node.depth and way[: node.depth] == path:
            between = [n for n in nodes if n.is_present and node.depth < n.depth < ghost.depth]
            if not any(way[: n.depth] == path_of(n) for n in between):
                rate += ghost.rate
    is_superseded = node.role is Role.SUPERSEDED and not node.is_abandoned
    if is_superseded and node.boundary_kind in ("step_end", "interval"):
        return (node.depth - depth) * node.rate // 2
    return (node.depth - depth) * rate


def path_of(node):
    keys = []
    while node.parent is not None:
        keys = node.edge + keys
        node = node.parent
    return keys


class ValueMachine(RuleBasedStateMachine):
    """Any calls, checked against values that are computed anew for all states."""

    SLOTS = 6

    def __init__(self):
        super().__init__()
        self.policy = ValueEviction(num_ghosts=5)
        self.held = {}  # slot -> key
        self.is_running = []

    keys = st.lists(st.integers(1, 2), min_size=1, max_size=6)

    @staticmethod
    def hashed(parts):
        """A hash for each prefix of the parts."""
        return [int("".join(map(str, parts[: n + 1]))) for n in range(len(parts))]

    @rule(parts=keys, again=st.booleans(), data=st.data())
    def arrive(self, parts, again, data):
        keys = self.hashed(parts)
        stop = data.draw(st.integers(0, len(keys)))
        self.is_running.append((self.policy.add_request(keys, stop, again), keys))

    @precondition(lambda self: self.is_running)
    @rule(data=st.data(), kind=st.sampled_from(["tail", "branch", "decode", "step_end", "mark"]))
    def store(self, data, kind):
        visit, keys = data.draw(st.sampled_from(self.is_running))
        depth = data.draw(st.integers(1, len(keys)))
        key = keys[depth - 1]
        if key in self.held.values():
            return
        self.policy.insert_planned(keys, depth, kind, visit)
        if len(self.held) == self.SLOTS:
            slot, refused = self.policy.least_valuable(anything, [key])
            if refused == key:
                self.policy.remove_planned(key)
                return
            self.policy.remove([slot])
            del self.held[slot]
        slot = min(set(range(self.SLOTS)) - self.held.keys())
        self.policy.insert([slot])
        self.policy.set_hashes([slot], [key], lambda i: keys[:depth])
        self.held[slot] = key

    @rule(parts=keys)
    def bring(self, parts):
        keys = self.hashed(parts)
        free = set(range(self.SLOTS)) - self.held.keys()
        if free and keys[-1] not in self.held.values():
            self.policy.insert([min(free)])
            self.policy.set_hashes([min(free)], [keys[-1]], lambda i: keys)
            self.held[min(free)] = keys[-1]

    @precondition(lambda self: self.is_running)
    @rule(data=st.data())
    def end(self, data):
        gone = data.draw(st.sampled_from(self.is_running))
        self.is_running.remove(gone)
        self.policy.end_request(gone[0])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), remember=st.booleans())
    def leave(self, data, remember):
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.policy.remove([slot], remember=remember)
        del self.held[slot]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def use(self, data):
        self.policy.use(data.draw(st.sampled_from(sorted(self.held))))

    @rule(num_requests=st.integers(1, 40))
    def wait(self, num_requests):
        for _ in range(num_requests):
            self.policy.end_request(self.policy.add_request([7], 0))

    @invariant()
    def order_is_that_of_values_computed_anew(self):
        self.policy.check_integrity(self.held.keys())
        by_slot = {node.slot: node for node in self.policy._slots.values()}
        assert {slot: node.prefix_hash for slot, node in by_slot.items()} == self.held
        expected = sorted(by_slot, key=lambda s: (brute_value(self.policy, by_slot[s]), by_slot[s].serial))
        assert self.policy.victims(self.SLOTS, anything) == expected


TestValueMachine = ValueMachine.TestCase
TestValueMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_long_prefixes_that_are_gone_take_bounded_memory():
    policy = ValueEviction(num_ghosts=64)
    for number in range(100):
        one_request(policy, 0, list(range(1 + 1000 * number, 501 + 1000 * number)))
        policy.remove([0])
        assert policy._tree.num_edge_hashes <= 32 * 64 + 500
        policy.check_integrity([])
    assert len(policy._tree.ghosts) == 4
