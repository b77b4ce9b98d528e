"""Live slots, and the names that moved to `mambaslots.vllm`."""

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mambaslots.errors import RequestOverflowError
from mambaslots.inference.contexts import admission as mamba_metadata
from mambaslots.inference.contexts.admission import MambaMetadata


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def test_other_names_are_not_found():
    with pytest.raises(AttributeError, match="has no attribute 'Mamba3'"):
        mamba_metadata.Mamba3  # noqa: B018
    assert not hasattr(mamba_metadata, "chunk_metadata")


# Live slots


def test_every_slot_is_given_out_once():
    metadata = MambaMetadata(max_requests=3)
    assert sorted(metadata.allocate_slot() for _ in range(3)) == [0, 1, 2]
    assert metadata.free_count == 0
    with pytest.raises(RequestOverflowError, match="1 request rows required, 0 available"):
        metadata.allocate_slot()


def test_a_slot_is_a_plain_int_that_keeps_its_value():
    metadata = MambaMetadata(max_requests=2)
    slot = metadata.allocate_slot()
    assert type(slot) is int
    metadata.free_slot(slot)
    metadata.allocate_slot()
    metadata.allocate_slot()
    assert slot == 0


def test_rows_start_empty():
    metadata = MambaMetadata(max_requests=2, num_live_slots=6)
    rows = metadata.request_to_mamba_state_idx
    assert (rows.tolist(), rows.dtype, rows.device.type) == ([-1, -1], torch.int32, "cpu")
    assert metadata.free_count == 6
    assert (metadata.intermediate_count, metadata.per_request_intermediate_counts) == (0, [])


def test_free_slots_clears_the_rows_and_passes_over_empty_ones():
    metadata = MambaMetadata(max_requests=4)
    metadata.request_to_mamba_state_idx[:2] = int32([metadata.allocate_slot(), metadata.allocate_slot()])
    metadata.free_slots(torch.tensor([1, 3]))
    assert metadata.request_to_mamba_state_idx.tolist() == [0, -1, -1, -1]
    assert metadata.free_count == 3
    metadata.check_integrity()


@pytest.mark.parametrize("rows", [[0, 0], [0, 4], [0, -1], [0, 1.0]])
def test_a_refused_batch_frees_nothing(rows):
    metadata = MambaMetadata(max_requests=4)
    metadata.request_to_mamba_state_idx[0] = metadata.allocate_slot()
    with pytest.raises(ValueError, match=r"request_indices|twice"):
        metadata.free_slots(rows)
    assert metadata.request_to_mamba_state_idx.tolist() == [0, -1, -1, -1]
    assert metadata.free_count == 3


def test_reset_frees_everything_in_place():
    metadata = MambaMetadata(max_requests=2)
    rows = metadata.request_to_mamba_state_idx
    rows[0] = metadata.allocate_slot()
    metadata.intermediate_count, metadata.per_request_intermediate_counts = 2, [2]
    metadata.reset()
    assert metadata.request_to_mamba_state_idx is rows
    assert (rows.tolist(), metadata.free_count) == ([-1, -1], 2)
    assert (metadata.intermediate_count, metadata.per_request_intermediate_counts) == (0, [])


@pytest.mark.parametrize(("name", "arguments"), [("max_requests", (0,)), ("num_live_slots", (2, 0))])
def test_bad_sizes_are_named(name, arguments):
    with pytest.raises(ValueError, match=name):
        MambaMetadata(*arguments)


@pytest.mark.parametrize("rows", [[0, 0], [1, -1], [5, -1]], ids=["shared", "free", "out of range"])
def test_integrity_sees_rows_that_name_a_wrong_slot(rows):
    metadata = MambaMetadata(max_requests=2)
    metadata.allocate_slot()
    metadata.request_to_mamba_state_idx.copy_(int32(rows))
    with pytest.raises(AssertionError):
        metadata.check_integrity()


class LiveSlots(RuleBasedStateMachine):
    """Requests come, move between rows and leave; a list of owned slots is the model."""

    def __init__(self):
        super().__init__()
        self.slots, self.requests = 5, 4
        self.metadata = MambaMetadata(self.requests, self.slots)
        self.rows = [-1] * self.requests
        self.loose = []  # owned, in no row: a draft's slots

    def owned(self):
        return [slot for slot in self.rows if slot != -1] + self.loose

    def write_rows(self):
        self.metadata.request_to_mamba_state_idx.copy_(int32(self.rows))

    @precondition(lambda self: len(self.owned()) < self.slots)
    @rule(row=st.integers(0, 3))
    def allocate(self, row):
        slot = self.metadata.allocate_slot()
        assert slot not in self.owned()
        assert 0 <= slot < self.slots
        if self.rows[row] == -1:
            self.rows[row] = slot
            self.write_rows()
        else:
            self.loose.append(slot)

    @precondition(lambda self: len(self.owned()) == self.slots)
    @rule()
    def overflow(self):
        with pytest.raises(RequestOverflowError):
            self.metadata.allocate_slot()

    @precondition(lambda self: self.loose)
    @rule()
    def free_one(self):
        self.metadata.free_slot(self.loose.pop())

    @rule(rows=st.sets(st.integers(0, 3)))
    def free_rows(self, rows):
        self.metadata.free_slots(sorted(rows))
        for row in rows:
            self.rows[row] = -1

    @rule(a=st.integers(0, 3), b=st.integers(0, 3))
    def swap_rows(self, a, b):
        self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
        self.write_rows()

    @rule(slot=st.integers(-1, 5))
    def free_what_is_not_owned(self, slot):
        if slot not in self.owned():
            with pytest.raises(ValueError, match="slot"):
                self.metadata.free_slot(slot)

    @rule()
    def reset(self):
        self.metadata.reset()
        self.rows, self.loose = [-1] * self.requests, []

    @invariant()
    def agrees_with_the_model(self):
        self.metadata.check_integrity()
        assert self.metadata.free_count == self.slots - len(self.owned())
        assert self.metadata.request_to_mamba_state_idx.tolist() == self.rows


TestLiveSlots = LiveSlots.TestCase
