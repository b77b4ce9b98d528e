"""The SSD chunks of a host with vLLM's attention backend."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.vllm.chunk_metadata import (
    Mamba2AttentionBackend,
    Mamba2AttentionMetadata,
    Mamba2AttentionMetadataBuilder,
    build_chunk_metadata,
    compute_varlen_chunk_metadata,
)

chunk_sizes = st.integers(1, 9)
all_lengths = st.lists(st.integers(0, 40), max_size=6)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def starts_of(lengths):
    return int32([0, *lengths]).cumsum(0, dtype=torch.int32)


def lists(tensors):
    return tuple(tensor.tolist() for tensor in tensors)


def builder(chunk_size=8):
    config = SimpleNamespace(model_config=SimpleNamespace(get_mamba_chunk_size=lambda: chunk_size))
    return Mamba2AttentionBackend.get_builder_cls()(None, ["layers.0"], config, torch.device("cpu"))


def absolute(computed, lengths, chunk_size):
    """(cu, seq_idx, last) of the builder."""
    return builder(chunk_size)._compute_chunk_metadata(len(lengths), int32(computed), starts_of(lengths))


def walk(lengths, chunk_size, position_of):
    """(cu, seq_idx, last): cuts where a sequence begins and where `position_of` gives a multiple."""
    cu, seq_idx, last, packed = [], [], [], 0
    for row, count in enumerate(lengths):
        for i in range(count):
            if i == 0 or position_of(row, i, packed) % chunk_size == 0:
                cu.append(packed)
                seq_idx.append(row)
            packed += 1
        last.append(len(cu) - 1 if count else -1)
    return [*cu, packed], seq_idx, last


# The two grids


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6), chunk_sizes)
def test_absolute_grid_equals_a_walk_over_the_tokens(rows, chunk_size):
    computed, lengths = [c for c, _ in rows], [n for _, n in rows]
    expected = walk(lengths, chunk_size, lambda row, i, packed: computed[row] + i)
    assert lists(absolute(computed, lengths, chunk_size)) == expected


@given(all_lengths, chunk_sizes)
def test_packed_grid_equals_a_walk_over_the_tokens(lengths, chunk_size):
    cu, seq_idx, last = walk(lengths, chunk_size, lambda row, i, packed: packed)
    # mind the order
    assert lists(compute_varlen_chunk_metadata(starts_of(lengths), chunk_size)) == (cu, last, seq_idx)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6), chunk_sizes)
def test_the_function_and_the_builder_cut_alike(rows, chunk_size):
    computed, lengths = [c for c, _ in rows], [n for _, n in rows]
    chunks = build_chunk_metadata(int32(computed), starts_of(lengths), chunk_size)
    assert lists(chunks) == lists(absolute(computed, lengths, chunk_size))
    assert {(tensor.dtype, tensor.device.type) for tensor in chunks} == {(torch.int32, "cpu")}


def test_the_grids_differ():
    lengths = [5, 10]
    assert absolute([0, 0], lengths, 8)[0].tolist() == [0, 5, 13, 15]
    assert compute_varlen_chunk_metadata(starts_of(lengths), 8)[0].tolist() == [0, 5, 8, 15]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), chunk_sizes)
def test_the_grids_agree_on_whole_chunks(chunks, chunk_size):
    lengths = [count * chunk_size for count in chunks]
    cu, last, seq_idx = compute_varlen_chunk_metadata(starts_of(lengths), chunk_size)
    assert lists(absolute([0] * len(lengths), lengths, chunk_size)) == lists((cu, seq_idx, last))


def test_metadata_is_1d_int32_on_the_cpu():
    for tensor in (*absolute([3], [9], 8), *compute_varlen_chunk_metadata(starts_of([9]), 8)):
        assert (tensor.dtype, tensor.dim(), tensor.device.type) == (torch.int32, 1, "cpu")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_may_be_int32_or_int64(dtype):
    starts = torch.tensor([0, 9], dtype=dtype)
    assert lists(compute_varlen_chunk_metadata(starts, 8)) == ([0, 8, 9], [1], [0, 0])
    metadata = builder()._compute_chunk_metadata(1, torch.tensor([3], dtype=dtype), starts)
    assert lists(metadata) == ([0, 5, 9], [0, 0], [1])


def test_sequences_without_tokens_have_no_chunk():
    """Pointing at the chunk of the sequence before would read that sequence's state."""
    assert lists(absolute([3, 8, 0, 0], [0, 5, 0, 0], 8)) == ([0, 5], [1], [-1, 0, -1, -1])
    assert lists(compute_varlen_chunk_metadata(int32([0, 0, 5, 5]), 8)) == ([0, 5], [-1, 0, -1], [1])


def test_no_sequences():
    assert lists(absolute([], [], 8)) == ([0], [], [])
    assert lists(compute_varlen_chunk_metadata(int32([0]), 8)) == ([0], [], [])


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


def test_chunk_metadata_reads_only_the_chunk_size_of_its_builder():
    metadata = Mamba2AttentionMetadataBuilder._compute_chunk_metadata(
        SimpleNamespace(chunk_size=8), 1, int32([0]), int32([0, 9])
    )
    assert lists(metadata) == ([0, 8, 9], [0, 0], [1])


def test_inputs_are_left_alone():
    computed, starts = int32([3]), int32([0, 9])
    builder()._compute_chunk_metadata(1, computed, starts)
    compute_varlen_chunk_metadata(starts, 8)
    assert lists((computed, starts)) == ([3], [0, 9])


@pytest.mark.parametrize(
    "starts",
    [int32([]), int32([1, 5]), int32([[0, 5]]), torch.tensor(0), torch.tensor([0.0, 5.0]), int32([0, 5, 4])],
    ids=["empty", "not from 0 on", "2-D", "0-D", "floats", "falling"],
)
def test_bad_query_start_loc(starts):
    with pytest.raises(ValueError, match="query_start_loc"):
        compute_varlen_chunk_metadata(starts, 8)
    requests = max(starts.numel() - 1, 0)
    with pytest.raises(ValueError, match="query_start_loc"):
        builder()._compute_chunk_metadata(requests, torch.zeros(requests, dtype=torch.int32), starts)


@pytest.mark.parametrize("chunk_size", [0, -8, None, 8.0])
def test_bad_chunk_size(chunk_size):
    with pytest.raises(ValueError, match="chunk_size"):
        compute_varlen_chunk_metadata(int32([0, 5]), chunk_size)
    with pytest.raises(ValueError, match="chunk_size"):
        builder(chunk_size)


def test_bad_computed_counts():
    with pytest.raises(ValueError, match="computed is -1 in row 1"):
        builder()._compute_chunk_metadata(2, int32([0, -1]), int32([0, 5, 6]))
    with pytest.raises(ValueError, match="num_prefills is 2"):
        builder()._compute_chunk_metadata(2, int32([0]), int32([0, 5]))
    with pytest.raises(ValueError, match="2 entries from 0 on for 2 rows"):
        builder()._compute_chunk_metadata(2, int32([0, 0]), int32([0, 5]))


# The builder


def common(computed, lengths, **more):
    return SimpleNamespace(
        query_start_loc_cpu=starts_of(lengths), compute_num_computed_tokens=lambda: int32(computed), **more
    )


def test_build_splits_decodes_from_prefills():
    block_table = int32([[3, 9], [7, 9], [5, 9], [0, 9]])
    metadata = builder().build(0, common([30, 12, 3, 0], [1, 1, 10, 9], block_table_tensor=block_table))

    assert (metadata.num_reqs, metadata.chunk_size) == (4, 8)
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (2, 2)
    assert (metadata.num_prefills, metadata.num_prefill_tokens) == (2, 19)
    assert metadata.query_start_loc_p.tolist() == [0, 10, 19]
    assert metadata.num_computed_tokens_p.tolist() == [3, 0]
    assert metadata.has_initial_states_p.tolist() == [True, False]
    assert metadata.prep_initial_states is True
    assert metadata.state_indices_tensor.tolist() == [3, 7, 5, 0]
    assert metadata.cu_chunk_seqlen_p.tolist() == [0, 5, 10, 18, 19]
    assert metadata.seq_idx_p.tolist() == [0, 0, 1, 1]
    assert metadata.last_chunk_indices_p.tolist() == [1, 3]


@given(
    st.lists(st.integers(1, 50), max_size=4),
    st.lists(st.tuples(st.integers(0, 40), st.integers(2, 40)), max_size=4),
    chunk_sizes,
)
def test_decodes_do_not_change_the_prefills(decodes, prefills, chunk_size):
    computed, lengths = [c for c, _ in prefills], [n for _, n in prefills]
    metadata = builder(chunk_size).build(0, common(decodes + computed, [1] * len(decodes) + lengths))
    assert (metadata.num_decodes, metadata.num_prefills) == (len(decodes), len(prefills))
    if prefills:
        chunks = (metadata.cu_chunk_seqlen_p, metadata.seq_idx_p, metadata.last_chunk_indices_p)
        assert lists(chunks) == lists(absolute(computed, lengths, chunk_size))
        assert metadata.prep_initial_states == any(computed)


def test_build_without_initial_states():
    metadata = builder().build(0, common([4, 0, 0], [1, 5, 6]))
    assert metadata.prep_initial_states is False
    assert metadata.state_indices_tensor is None


@pytest.mark.parametrize(("computed", "lengths"), [([30, 12], [1, 1]), ([30, 0], [1, 0]), ([], [])])
def test_build_without_prefills(computed, lengths):
    metadata = builder().build(0, common(computed, lengths), fast_build=True)
    assert metadata == Mamba2AttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decodes=len(lengths),
        num_decode_tokens=sum(lengths),
        num_reqs=len(lengths),
        chunk_size=8,
    )


def test_a_prompt_of_one_token_is_a_prefill():
    """As a decode it would start from whatever its slot holds."""
    metadata = builder().build(0, common([30, 0, 6], [1, 1, 1]))
    assert (metadata.num_decodes, metadata.num_prefills) == (1, 2)
    assert metadata.has_initial_states_p.tolist() == [False, True]
    assert metadata.last_chunk_indices_p.tolist() == [0, 1]


def test_a_prefill_without_tokens_has_no_chunk():
    metadata = builder().build(0, common([30, 3, 8, 16], [1, 10, 0, 2]))
    assert metadata.num_prefills == 3
    assert metadata.last_chunk_indices_p.tolist() == [1, -1, 2]


def test_defaults_of_the_metadata():
    metadata = Mamba2AttentionMetadata(
        num_prefills=0, num_prefill_tokens=0, num_decodes=0, num_decode_tokens=0, num_reqs=0
    )
    assert (metadata.prep_initial_states, metadata.chunk_size) == (False, 0)
    assert metadata.seq_idx_p is metadata.cu_chunk_seqlen_p is metadata.last_chunk_indices_p is None


def test_build_refuses_counts_that_do_not_fit():
    with pytest.raises(ValueError, match="3 entries from 0 on for 1 rows"):
        builder().build(0, common([0], [5, 6]))
