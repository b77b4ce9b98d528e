"""The SSD chunks of a host with vLLM's attention backend."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.vllm import build_chunk_metadata

chunk_sizes = st.integers(1, 9)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def starts_of(lengths):
    return int32([0, *lengths]).cumsum(0, dtype=torch.int32)


def lists(tensors):
    return tuple(tensor.tolist() for tensor in tensors)


def absolute(computed, lengths, chunk_size):
    return build_chunk_metadata(int32(computed), starts_of(lengths), chunk_size)


def walk(computed, lengths, chunk_size):
    """(cu, seq_idx, last): cuts where a sequence begins and where its position is a multiple."""
    cu, seq_idx, last, packed = [], [], [], 0
    for row, count in enumerate(lengths):
        for i in range(count):
            if i == 0 or (computed[row] + i) % chunk_size == 0:
                cu.append(packed)
                seq_idx.append(row)
            packed += 1
        last.append(len(cu) - 1 if count else -1)
    return [*cu, packed], seq_idx, last


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6), chunk_sizes)
def test_absolute_grid_equals_a_walk_over_the_tokens(rows, chunk_size):
    computed, lengths = [c for c, _ in rows], [n for _, n in rows]
    assert lists(absolute(computed, lengths, chunk_size)) == walk(computed, lengths, chunk_size)


def test_metadata_is_1d_int32_on_the_cpu():
    for tensor in absolute([3], [9], 8):
        assert (tensor.dtype, tensor.dim(), tensor.device.type) == (torch.int32, 1, "cpu")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_may_be_int32_or_int64(dtype):
    metadata = build_chunk_metadata(torch.tensor([3], dtype=dtype), torch.tensor([0, 9], dtype=dtype), 8)
    assert lists(metadata) == ([0, 5, 9], [0, 0], [1])


def test_sequences_without_tokens_have_no_chunk():
    """Pointing at the chunk of the sequence before would read that sequence's state."""
    assert lists(absolute([3, 8, 0, 0], [0, 5, 0, 0], 8)) == ([0, 5], [1], [-1, 0, -1, -1])


def test_no_sequences():
    assert lists(absolute([], [], 8)) == ([0], [], [])


def test_states_are_per_chunk_not_per_request():
    """Kernels return one state a chunk of the whole batch. Indexed by request they fit the first two here."""
    computed, lengths = [0, 16, 8, 0], [8, 3, 20, 5]
    cu, seq_idx, last = lists(absolute(computed, lengths, 8))
    starts = starts_of(lengths).tolist()
    state_of_chunk = [
        (row, computed[row] + end - starts[row]) for row, end in zip(seq_idx, cu[1:], strict=True)
    ]

    by_request = state_of_chunk[: len(lengths)]
    by_last_chunk = [state_of_chunk[chunk] for chunk in last]

    assert by_last_chunk == [(0, 8), (1, 19), (2, 28), (3, 5)]
    assert by_request[:2] == by_last_chunk[:2]
    assert by_request[2:] == [(2, 16), (2, 24)]


def test_inputs_are_left_alone():
    computed, starts = int32([3]), int32([0, 9])
    build_chunk_metadata(computed, starts, 8)
    assert lists((computed, starts)) == ([3], [0, 9])


@pytest.mark.parametrize(
    "starts",
    [int32([]), int32([1, 5]), int32([[0, 5]]), torch.tensor(0), torch.tensor([0.0, 5.0]), int32([0, 5, 4])],
    ids=["empty", "not from 0 on", "2-D", "0-D", "floats", "falling"],
)
def test_bad_query_start_loc(starts):
    requests = max(starts.numel() - 1, 0)
    with pytest.raises(ValueError, match="query_start_loc"):
        build_chunk_metadata(torch.zeros(requests, dtype=torch.int32), starts, 8)


@pytest.mark.parametrize("chunk_size", [0, -8, None, 8.0])
def test_bad_chunk_size(chunk_size):
    with pytest.raises(ValueError, match="chunk_size"):
        build_chunk_metadata(int32([0]), int32([0, 5]), chunk_size)


def test_bad_computed_counts():
    with pytest.raises(ValueError, match="num_computed_tokens is -1 in row 1"):
        build_chunk_metadata(int32([0, -1]), int32([0, 5, 6]), 8)
    with pytest.raises(ValueError, match="2 entries from 0 on for 2 rows"):
        build_chunk_metadata(int32([0, 0]), int32([0, 5]), 8)
