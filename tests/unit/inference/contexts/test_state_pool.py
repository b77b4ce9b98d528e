"""One index space for live and durable states."""

import pytest
import torch
from mambaslots.inference.contexts.state_pool import StatePool


def make(**changed):
    arguments = {
        "num_mamba_layers": 2,
        "num_live": 3,
        "num_durable": 4,
        "conv_states_shape": (5, 4),
        "ssm_states_shape": (2, 3, 6),
        "conv_states_dtype": torch.bfloat16,
        "ssm_states_dtype": torch.float32,
    }
    return StatePool(**{**arguments, **changed})


def test_states_start_as_zeros_of_the_given_shapes_and_dtypes():
    pool = make()
    assert pool.conv_states.shape == (2, 7, 5, 4)
    assert pool.ssm_states.shape == (2, 7, 2, 3, 6)
    assert (pool.conv_states.dtype, pool.ssm_states.dtype) == (torch.bfloat16, torch.float32)
    assert not pool.conv_states.any()
    assert not pool.ssm_states.any()


def test_live_and_durable_states_are_views_of_one_allocation():
    pool = make()
    pool.live_conv_states[1, 2] = 1
    pool.live_ssm_states[1, 2] = 2
    pool.durable_conv_states[0, 3] = 3
    pool.durable_ssm_states[0, 3] = 4
    assert pool.conv_states[1, 2].eq(1).all()
    assert pool.ssm_states[1, 2].eq(2).all()
    assert pool.conv_states[0, pool.durable_index(3)].eq(3).all()
    assert pool.ssm_states[0, pool.durable_index(3)].eq(4).all()
    assert pool.live_conv_states.shape[1] == pool.live_ssm_states.shape[1] == 3
    assert pool.durable_conv_states.shape[1] == pool.durable_ssm_states.shape[1] == 4


def test_durable_slots_follow_the_live_ones():
    assert [make().durable_index(slot) for slot in range(4)] == [3, 4, 5, 6]


def test_a_freed_pool_holds_no_bytes_and_comes_back_as_zeros():
    pool = make()
    pool.ssm_states.fill_(7)
    pool.free()
    assert (pool.allocated, pool.ssm_states.nbytes, pool.conv_states.nbytes) == (False, 0, 0)
    assert pool.durable_ssm_states.shape == (2, 0, 2, 3, 6)
    pool.allocate()
    assert pool.allocated
    assert pool.ssm_states.shape == (2, 7, 2, 3, 6)
    assert not pool.ssm_states.any()


def test_a_pool_may_have_no_live_or_no_durable_states():
    assert make(num_live=0).durable_conv_states.shape[1] == 4
    assert make(num_durable=0).durable_ssm_states.shape[1] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_mamba_layers", -1),
        ("num_live", 1.5),
        ("num_durable", True),
        ("conv_states_shape", (5, -4)),
        ("ssm_states_shape", 6),
        ("conv_states_dtype", torch.int8),
        ("ssm_states_dtype", "float32"),
    ],
)
def test_a_bad_argument_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"{name}.* is .*accepted"):
        make(**{name: value})
