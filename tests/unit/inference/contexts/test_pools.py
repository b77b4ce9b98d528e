"""One index space for live and durable states."""

import torch
from mambaslots.inference.contexts.request_states import StatePool
from mambaslots.state_spec import STATE_ALIGNMENT, StateTensor

STATES = (
    StateTensor("conv", 2, (5, 4), torch.bfloat16),
    StateTensor("ssm", 2, (2, 3, 6), torch.float32, grid=4),
    StateTensor("window", 3, (7,), torch.float16),
)


def make(**changed):
    return StatePool(**{"states": STATES, "num_live": 3, "num_durable": 4, **changed})


def test_states_start_as_zeros_of_the_given_shapes_and_dtypes():
    pool = make()
    assert pool["conv"].shape == (2, 7, 5, 4)
    assert pool["ssm"].shape == (2, 7, 2, 3, 6)
    assert (pool["conv"].dtype, pool["ssm"].dtype) == (torch.bfloat16, torch.float32)
    assert not pool["conv"].any()
    assert not pool["ssm"].any()


def test_live_and_durable_states_are_views_of_one_allocation():
    pool = make()
    pool["conv"][:, : pool.num_live][1, 2] = 1
    pool["ssm"][:, : pool.num_live][1, 2] = 2
    pool.durable("conv")[0, 3] = 3
    pool.durable("ssm")[0, 3] = 4
    assert pool["conv"][1, 2].eq(1).all()
    assert pool["ssm"][1, 2].eq(2).all()
    assert pool["conv"][0, pool.durable_index(3)].eq(3).all()
    assert pool["ssm"][0, pool.durable_index(3)].eq(4).all()
    assert pool["conv"][:, : pool.num_live].shape[1] == pool["ssm"][:, : pool.num_live].shape[1] == 3
    assert pool.durable("conv").shape[1] == pool.durable("ssm").shape[1] == 4


def test_durable_slots_follow_the_live_ones():
    assert [make().durable_index(slot) for slot in range(4)] == [3, 4, 5, 6]


def test_a_freed_pool_holds_no_bytes_and_comes_back_as_zeros():
    pool = make()
    pool["ssm"].fill_(7)
    pool.deallocate()
    assert (pool["ssm"].nbytes, pool["conv"].nbytes) == (0, 0)
    assert pool.durable("ssm").shape == (2, 0, 2, 3, 6)
    pool.allocate()
    assert pool["ssm"].shape == (2, 7, 2, 3, 6)
    assert not pool["ssm"].any()


def test_a_pool_may_have_no_live_or_no_durable_states():
    assert make(num_live=0).durable("conv").shape[1] == 4
    assert make(num_durable=0).durable("ssm").shape[1] == 0


def test_a_slot_is_one_piece_of_memory():
    pool = make()
    for tensor in pool.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    expected = [tensor[:, 2].clone() for tensor in pool.tensors]
    others = pool.memory[[0, 1, 3, 4, 6]].clone()
    pool.copy([2, -1], [5, 4])
    for tensor, state in zip(pool.tensors, expected, strict=True):
        assert torch.equal(tensor[:, 5], state)
    assert torch.equal(pool.memory[[0, 1, 3, 4, 6]], others)
    assert torch.equal(pool.memory[5], pool.memory[2])


def test_the_tensors_of_a_slot_do_not_overlap_and_are_aligned():
    pool = make()
    for number, tensor in enumerate(pool.tensors):
        tensor.fill_(number + 1)
        assert tensor.data_ptr() % STATE_ALIGNMENT == pool.memory.data_ptr() % STATE_ALIGNMENT
    for number, tensor in enumerate(pool.tensors):
        assert tensor.eq(number + 1).all()
    assert pool.memory.shape[1] % STATE_ALIGNMENT == 0


def test_a_state_may_have_no_layers_or_no_tensors():
    empty = make(states=(StateTensor("conv", 0, (5, 4), torch.float32),))
    assert empty["conv"].shape == (0, 7, 5, 4)
    empty.copy([1], [2])
    assert make(states=()).memory.shape == (7, 0)
