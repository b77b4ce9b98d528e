"""The buffer in which a step's metadata crosses: where things lie, and for how long."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.step_builder import StepBuffer
from mambaslots.inference.contexts.step_inputs import StepShape
from oracle.synchronisation import no_synchronisation

MOST = StepShape(*[20] * len(StepShape._fields))
shapes = st.builds(StepShape, **{name: st.integers(0, 20) for name in StepShape._fields})


@given(st.lists(shapes, min_size=1, max_size=6))
def test_what_is_filled_in_arrives_whatever_was_there_before(steps):
    buffer = StepBuffer(MOST, torch.device("cpu"))
    for step, shape in enumerate(steps):
        into = buffer.arrays(shape)
        for number, array in enumerate(into.values()):
            array.flat[:] = np.arange(array.size) + 1000 * number + step
        tensors = buffer.send(shape)
        for number, (name, array) in enumerate(into.items()):
            assert tensors[name].numpy().shape == array.shape
            assert tensors[name].flatten().tolist() == [i + 1000 * number + step for i in range(array.size)]


@given(shapes)
def test_sizes_types_and_alignment(shape):
    buffer = StepBuffer(MOST, torch.device("cpu"))
    buffer.arrays(shape)
    tensors = buffer.send(shape)
    assert tensors["token_ids"].shape == (shape.decodes * shape.decode_tokens + shape.prefill_tokens,)
    written = shape.decodes * shape.decode_tokens + shape.prefills
    assert tensors["state_destinations"].shape == (written,)
    assert tensors["block_table"].shape == (shape.decodes + shape.prefills, shape.block_columns)
    assert (
        tensors["chunks.query_start_loc"].shape
        == tensors["chunks.row_chunk_starts"].shape
        == (shape.prefills + 1,)
    )
    assert tensors["chunks.cu_chunk_seqlens"].shape == (shape.chunks + 1,)
    assert tensors["query_start_loc"].shape == (shape.decodes + shape.prefills + 1,)
    narrow = {"chunks.cu_chunk_seqlens", "chunks.seq_idx", "chunks.row_chunk_starts"}
    narrow |= {
        "kv_lengths",
        "block_table",
        "query_start_loc",
        "query_lengths",
        "replay.starts",
        "replay.input_blocks",
    }
    assert {name for name, tensor in tensors.items() if tensor.dtype == torch.int32} == narrow
    assert all(tensor.dtype == torch.int64 for name, tensor in tensors.items() if name not in narrow)
    begin = min(tensor.data_ptr() for tensor in tensors.values())
    assert all((tensor.data_ptr() - begin) % 16 == 0 for tensor in tensors.values())


def test_a_step_survives_the_preparation_of_the_next():
    buffer = StepBuffer(MOST, torch.device("cpu"))
    buffer.arrays(MOST)["token_ids"][:] = 1
    first = buffer.send(MOST)
    buffer.arrays(MOST)["token_ids"][:] = 2
    assert first["token_ids"].tolist() == [1] * MOST.tokens
    assert buffer.send(MOST)["token_ids"].tolist() == [2] * MOST.tokens


def test_a_larger_step_is_refused():
    buffer = StepBuffer(MOST, torch.device("cpu"))
    with pytest.raises(ValueError, match="accepted: at most"):
        buffer.arrays(MOST._replace(prefill_tokens=500))


def test_many_shapes_do_not_fill_the_memory():
    buffer = StepBuffer(MOST._replace(block_columns=2000), torch.device("cpu"))
    for columns in range(600):
        buffer.arrays(MOST._replace(block_columns=columns))
        buffer.send(MOST._replace(block_columns=columns))
    caches = [*buffer._arrays, *buffer._tensors]
    assert sum(cache.cache_info().currsize for cache in caches) <= 1024


@pytest.mark.gpu
def test_on_a_gpu_addresses_stay_and_one_copy_is_made():
    buffer = StepBuffer(MOST, torch.device("cuda"))
    addresses = set()
    torch.cuda.synchronize()
    with no_synchronisation():
        for value in range(6):
            buffer.arrays(MOST)["token_ids"][:] = value
            tensors = buffer.send(MOST)
            addresses.add(tuple(tensor.data_ptr() for tensor in tensors.values()))
            last = tensors["token_ids"].clone()
    assert len(addresses) == 1
    assert last.tolist() == [5] * MOST.tokens
    buffer.arrays(MOST)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        buffer.send(MOST)
        torch.cuda.synchronize()
    assert sum("Memcpy HtoD" in event.name for event in profile.events()) == 1


@pytest.mark.gpu
def test_a_host_buffer_is_filled_again_only_once_it_has_crossed():
    """The device is far behind: without the events the third step would overwrite the first on its way."""
    buffer = StepBuffer(MOST, torch.device("cuda"))
    torch.cuda._sleep(1_000_000_000)  # about half a second
    arrived = []
    for value in range(8):
        buffer.arrays(MOST)["token_ids"][:] = value
        arrived.append(buffer.send(MOST)["token_ids"].clone())
        if value < 3:
            torch.cuda._sleep(200_000_000)
    assert [tensor.unique().tolist() for tensor in arrived] == [[value] for value in range(8)]
