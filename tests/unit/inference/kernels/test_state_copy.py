"""Whole states moved between pools."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mambaslots.inference.contexts.state_pool import StatePool
from mambaslots.inference.kernels.state_copy import StateTensors, copy_states

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def random_bytes(*shape, dtype, seed):
    """Every kind of float: NaNs with payloads, infinities, denormals."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def states(slots, dtype=torch.float32, seed=0):
    return StateTensors(
        random_bytes(2, slots, 3, 4, dtype=dtype, seed=seed),
        random_bytes(2, slots, 2, 3, 2, dtype=dtype, seed=seed + 1),
    )


def bits(tensors):
    return [tensor.contiguous().view(torch.uint8).tolist() for tensor in tensors]


def copied_one_by_one(source, read, destination, write):
    result = StateTensors(*(tensor.clone() for tensor in destination))
    for of, to in zip(source, result, strict=True):
        for i, j in zip(read, write, strict=True):
            for layer in range(of.shape[0]):
                to[layer, j] = of[layer, i]
    return result


@settings(max_examples=80, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_states_arrive_to_the_bit_and_nothing_else_is_written(data, dtype):
    source, destination = states(4, dtype, 0), states(5, dtype, 7)
    write = data.draw(st.lists(st.integers(0, 4), unique=True))
    read = data.draw(st.lists(st.integers(0, 3), min_size=len(write), max_size=len(write)))
    expected = copied_one_by_one(source, read, destination, write)
    before = bits(source)
    copy_states(source, read, destination, write)
    assert bits(destination) == bits(expected)
    assert bits(source) == before


def test_copying_nothing_is_nothing():
    source, destination = states(2), states(2, seed=5)
    before = bits(destination)
    copy_states(source, [], destination, [])
    assert bits(destination) == before


def test_within_one_pool_all_are_read_before_any_is_written():
    pool = states(3)
    expected = copied_one_by_one(StateTensors(*(t.clone() for t in pool)), [1, 2, 0], pool, [0, 1, 2])
    copy_states(pool, [1, 2, 0], pool, [0, 1, 2])
    assert bits(pool) == bits(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_one_pool_are_copied_through(dtype):
    pool = StatePool(2, 3, 4, (3, 4), (2, 3, 2), dtype, dtype)
    pool.conv_states.copy_(random_bytes(2, 7, 3, 4, dtype=dtype, seed=1))
    pool.ssm_states.copy_(random_bytes(2, 7, 2, 3, 2, dtype=dtype, seed=2))
    live = StateTensors(pool.live_conv_states, pool.live_ssm_states)
    durable = StateTensors(pool.durable_conv_states, pool.durable_ssm_states)
    expected = bits([pool.conv_states[:, 1], pool.ssm_states[:, 1]])
    copy_states(live, [1], durable, [3])
    index = pool.durable_index(3)
    assert bits([pool.conv_states[:, index], pool.ssm_states[:, index]]) == expected
