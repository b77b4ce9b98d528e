"""The order in which cached KV blocks go, against a scan over all leaves."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from mambaslots.inference.contexts.cache.block_tree import LeafOrder


def no_parent(block):
    return -1


def pop(leaves, num_blocks, leaf_parent):
    """Remove the next blocks; `leaf_parent(block)`: the parent that becomes a leaf then, or -1."""
    taken = []
    for _ in range(num_blocks):
        block = leaves.first
        assert leaves.pop() == block
        taken.append(block)
        if (parent := leaf_parent(block)) >= 0:
            leaves.push(parent)
    return taken


def made(times, states=()):
    leaves = LeafOrder(times)
    leaves.connect(set(states).__contains__)
    for block in range(len(times)):
        leaves.push(block)
    return leaves


def test_leaves_without_a_state_go_first_then_those_used_longest_ago():
    assert pop(made([3, 1, 2, 0], states=[3]), 4, no_parent) == [1, 2, 0, 3]


def test_blocks_used_at_one_time_go_by_number():
    assert pop(made([1, 1, 1]), 2, no_parent) == [0, 1]


def test_a_parent_left_as_a_leaf_can_be_the_next_to_go():
    parents = {0: 5}
    leaves = LeafOrder([1, 2, 9, 9, 9, 1])
    for block in (0, 1):
        leaves.push(block)
    assert pop(leaves, 2, lambda block: parents.get(block, -1)) == [0, 5]
    assert list(leaves.blocks) == [1]
    leaves.check_integrity()


def test_a_parent_that_was_not_taken_stays_as_a_leaf():
    leaves = LeafOrder([1, 2])
    leaves.push(0)
    assert pop(leaves, 1, lambda block: 1) == [0]
    assert list(leaves.blocks) == [1]
    leaves.check_integrity()


def test_a_state_that_goes_moves_its_leaf_to_the_front():
    states = {0, 1}
    leaves = made([1, 2], states)
    leaves.connect(states.__contains__)
    states.remove(1)
    leaves.reorder([1])
    leaves.check_integrity()
    assert pop(leaves, 1, no_parent) == [1]


def test_a_withdrawn_block_does_not_go():
    leaves = made([1, 2, 3])
    leaves.remove(0)
    leaves.remove(0)
    assert pop(leaves, 2, no_parent) == [1, 2]
    leaves.check_integrity()


def test_a_cleared_order_has_no_leaves():
    leaves = made([1, 2])
    leaves.clear()
    assert not leaves.blocks
    leaves.check_integrity()


class LeafMachine(RuleBasedStateMachine):
    """Blocks of a forest (a block's parent has a smaller number) are cached, held, used and evicted.

    The model is the set of cached blocks that are in the order, and scans over it.
    """

    num_blocks = 10

    @initialize(data=st.data())
    def start(self, data):
        self.times = [0] * self.num_blocks
        self.time = 0
        self.parent = [data.draw(st.integers(-1, block - 1)) for block in range(self.num_blocks)]
        self.states = set()
        self.cached = set()
        self.leaves = LeafOrder(self.times)
        self.leaves.connect(self.states.__contains__)

    def children(self, block):
        return {other for other in self.cached if self.parent[other] == block}

    def expected_leaves(self):
        return {block for block in self.cached if not self.children(block)}

    @rule(block=st.integers(0, 9))
    def a_chain_is_cached(self, block):
        """The block and what is above it: used now, as when its last holder leaves."""
        self.time += 1
        chain = []
        while block >= 0:
            chain.append(block)
            block = self.parent[block]
        for block in chain:
            self.leaves.remove(block)
            self.cached.add(block)
            self.times[block] = self.time
        for block in chain:
            if not self.children(block):
                self.leaves.push(block)

    @rule(block=st.integers(0, 9))
    def a_leaf_is_held(self, block):
        if block in self.expected_leaves():
            self.leaves.remove(block)
            self.cached.discard(block)
            parent = self.parent[block]
            if parent >= 0 and not self.children(parent):
                self.leaves.push(parent)

    @rule(blocks=st.lists(st.integers(0, 9), max_size=4))
    def states_come_and_go(self, blocks):
        for block in blocks:
            self.states ^= {block}
        self.leaves.reorder(blocks)

    @rule(data=st.data())
    def leaves_are_taken(self, data):
        count = data.draw(st.integers(0, len(self.cached)))
        expected, remaining = [], set(self.cached)
        for _ in range(count):
            ends = {b for b in remaining if not any(self.parent[other] == b for other in remaining)}
            best = min(ends, key=lambda block: (block in self.states, self.times[block], block))
            expected.append(best)
            remaining.discard(best)

        def leaf_parent(block):
            self.cached.discard(block)
            parent = self.parent[block]
            return parent if parent >= 0 and not self.children(parent) else -1

        assert pop(self.leaves, count, leaf_parent) == expected
        assert self.cached == remaining

    @rule()
    def all_is_forgotten(self):
        self.leaves.clear()
        self.cached.clear()

    @invariant()
    def the_leaves_are_the_models(self):
        if hasattr(self, "leaves"):
            self.leaves.check_integrity()
            assert self.leaves.blocks == self.expected_leaves()


TestLeavesInAnyOrder = LeafMachine.TestCase
TestLeavesInAnyOrder.settings = settings(max_examples=2 * settings.default.max_examples)
