"""Whole states moved between pools: the same bits, in their slots and nowhere else."""

import math
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.request_states import StatePool
from mambaslots.inference.kernels import state_move
from mambaslots.inference.kernels.reference import torch_state_copy as reference
from mambaslots.inference.kernels.state_copy import copy_states
from mambaslots.inference.kernels.state_move import PartMove, move_states
from mambaslots.inference.kernels.state_pools import ConvAndSsm
from oracle.budget import costly
from oracle.state_tensors import conv_and_ssm
from oracle.synchronisation import no_synchronisation

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.complex128]
LAYOUTS = ["contiguous", "gaps", "slot major", "misaligned"]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where a kernel runs: on the CPU in triton's interpreter, which is off where there is a GPU."""
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("the kernels run on the GPU, or in the interpreter")
    return request.param


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda"


def random_bytes(*shape, dtype, seed):
    """Every kind of float: NaNs with payloads, infinities, denormals."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def laid_out(layout, layers, slots, shape, dtype, device, seed):
    """States [layers, slots, *shape] of random bits, and all bytes of the memory they lie in."""
    size = math.prod(shape)
    slot, layer, first = size, slots * size, 0
    if layout == "gaps":
        slot = (size + 15) // 16 * 16 + 16
        layer = slots * slot + 32
    elif layout == "slot major":
        slot, layer = layers * size, size
    elif layout == "misaligned":
        first = 1
    memory = random_bytes(first + layers * slots * slot + layers * 32, dtype=dtype, seed=seed).to(device)
    inner = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return memory.as_strided((layers, slots, *shape), (layer, slot, *inner), first), memory.view(torch.uint8)


def pools(layout, slots, shapes, dtypes, device, seed, layers=2):
    """A pool, and the bytes of its two memories."""
    made = [
        laid_out(layout, layers, slots, shape, dtype, device, seed + i)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    return ConvAndSsm(*(states for states, _ in made)), [memory for _, memory in made]


def states(slots, dtype=torch.float32, seed=0):
    return pools("contiguous", slots, [(3, 4), (2, 3, 2)], [dtype, dtype], "cpu", seed)[0]


def nemotron_h_8b():
    """A pool of 64 of Nemotron-H-8B's states, without memory."""
    return ConvAndSsm(
        torch.empty(24, 64, 10240, 3, dtype=torch.bfloat16, device="meta"),
        torch.empty(24, 64, 128, 64, 128, dtype=torch.float32, device="meta"),
    )


def bits(tensors):
    return [tensor.contiguous().view(torch.uint8).tolist() for tensor in tensors]


def after(memories, pool, pairs, source):
    """What the memories must hold once `pairs` have been copied from `source`; undone here."""
    before = [memory.clone() for memory in memories]
    for i, to in enumerate(pool):
        for read, write in pairs:
            for layer in range(to.shape[0]):
                slot = to[layer, write].view(-1).view(torch.uint8)
                slot.copy_(source[i][layer, read].view(-1).view(torch.uint8))
    expected = [memory.clone() for memory in memories]
    for memory, earlier in zip(memories, before, strict=True):
        memory.copy_(earlier)
    return expected


def same(memories, expected):
    return all(torch.equal(memory, other) for memory, other in zip(memories, expected, strict=True))


def indices(listed, device):
    return torch.tensor(listed, dtype=torch.int64, device=device)


def draw_pairs(data, sources, destinations):
    """Pairs, some with -1, no destination twice; and the pairs that are meant."""
    write = data.draw(st.lists(st.integers(-destinations, destinations - 1), max_size=6, unique=True))
    write = [max(slot, -1) for slot in write]
    read = data.draw(st.lists(st.integers(-1, sources - 1), min_size=len(write), max_size=len(write)))
    return read, write, [(i, j) for i, j in zip(read, write, strict=True) if min(i, j) >= 0]


class TestKernel:
    """The launchers, against bytes copied one slot at a time."""

    @costly()
    @given(data=st.data())
    def test_states_arrive_to_the_bit_and_nothing_else_is_written(self, device, data):
        shape = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
        shapes = data.draw(st.tuples(shape, shape))
        dtypes = data.draw(st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)))
        layouts = data.draw(st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)))
        source, source_memory = pools(layouts[0], 4, shapes, dtypes, device, 0)
        destination, memory = pools(layouts[1], 5, shapes, dtypes, device, 7)
        read, write, meant = draw_pairs(data, 4, 5)
        unchanged = [part.clone() for part in source_memory]
        expected = after(memory, destination, meant, source)
        with mock.patch.object(state_move, "PROGRAMS", data.draw(st.sampled_from([1, 5, 4224]))):
            read, write = ([pair[side] for pair in meant] for side in (0, 1))
            state_move.copy_states(source, indices(read, device), destination, indices(write, device))
        assert same(memory, expected)
        assert same(source_memory, unchanged)

    @pytest.mark.sampled(size=(16384 + 16, 16384 * 2 + 7), layout=("gaps",))
    @pytest.mark.parametrize("size", [16384, 16384 + 16, 16384 * 2 + 7, 61440])
    @pytest.mark.parametrize("layout", ["gaps", "misaligned"])
    def test_slots_of_several_tiles_and_a_tail(self, device, layout, size):
        shapes, dtypes = [(size,), (3, 5000)], [torch.uint8, torch.int16]
        source, _ = pools(layout, 3, shapes, dtypes, device, 0)
        destination, memory = pools("gaps", 2, shapes, dtypes, device, 5)
        expected = after(memory, destination, [(2, 0), (0, 1)], source)
        state_move.copy_states(source, indices([2, 0], device), destination, indices([0, 1], device))
        assert same(memory, expected)

    def test_a_pool_is_copied_into_itself(self, device):
        pool, memory = pools("contiguous", 6, [(3, 4), (5,)], [torch.bfloat16] * 2, device, 0)
        expected = after(memory, pool, [(1, 0), (2, 2), (1, 4)], pool)
        state_move.copy_states(pool, indices([1, 2, 1], device), pool, indices([0, 2, 4], device))
        assert same(memory, expected)

    def test_addresses_beyond_two_to_the_31(self, device):
        """Strides of 2^31 elements and more between layers and slots; the memory between is never touched."""
        far = 2**31 + 48
        memory = torch.empty(far * 2 + 64, dtype=torch.uint8, device=device)
        layers_apart = memory.as_strided((2, 1, 33), (far, 64, 1))
        slots_apart = memory.as_strided((1, 2, 33), (64, far, 1), 4096)
        near = [
            random_bytes(*shape, dtype=torch.uint8, seed=1).to(device) for shape in [(2, 3, 33), (1, 3, 33)]
        ]
        for pool, outside in zip((layers_apart, slots_apart), near, strict=True):
            of, to = ConvAndSsm(outside, outside), ConvAndSsm(pool, pool)
            here = list(range(pool.shape[1]))
            state_move.copy_states(of, indices(here, device), to, indices(here, device))
            assert torch.equal(pool, outside[:, : len(here)])
            back = ConvAndSsm(torch.zeros_like(outside), torch.zeros_like(outside))
            state_move.copy_states(to, indices(here, device), back, indices([2, 1][: len(here)], device))
            assert torch.equal(back.ssm[:, 2], pool[:, 0])

    def test_states_without_bytes_or_layers_or_pairs_are_nothing(self, device):
        for layers, shape, pairs in [(2, (0,), [0]), (0, (3,), [0]), (2, (3,), [])]:
            pool = ConvAndSsm(*torch.ones(2, layers, 4, *shape, device=device))
            state_move.copy_states(pool, indices(pairs, device), pool, indices(pairs, device))
            assert all(bool(states.all()) for states in pool)

    def test_states_of_a_real_model_move_in_wide_accesses(self):
        pool = nemotron_h_8b()
        parts = [PartMove.between(states, states) for states in pool]
        assert [part.tiles for part in parts] == [4, 256]
        assert [part.align for part in parts] == [16, 16]

    def test_pools_between_which_bits_cannot_move_are_refused(self, device):
        pool = ConvAndSsm(*torch.ones(2, 2, 4, 6, 4, device=device))
        others = {
            "shape": ConvAndSsm(pool.conv[..., :2], pool.ssm),
            "dtype": ConvAndSsm(pool.conv, pool.ssm.int()),
            "layers": ConvAndSsm(pool.conv[:1], pool.ssm[:1]),
            "device": ConvAndSsm(pool.conv.to("meta"), pool.ssm),
            "gaps": ConvAndSsm(pool.conv, pool.ssm.mT.contiguous().mT),
        }
        for other in others.values():
            with pytest.raises(ValueError, match="accepted"):
                state_move.copy_states(pool, indices([0], device), other, indices([1], device))


class TestWrapper:
    """What callers call; on the CPU, the reference."""

    @given(data=st.data(), dtype=st.sampled_from(FLOATS))
    def test_states_arrive_to_the_bit_and_nothing_else_is_written(self, data, dtype):
        source, memory_before = pools("contiguous", 4, [(3, 4), (2, 3, 2)], [dtype] * 2, "cpu", 0)
        destination, memory = pools("contiguous", 5, [(3, 4), (2, 3, 2)], [dtype] * 2, "cpu", 7)
        read, write, meant = draw_pairs(data, 4, 5)
        unchanged = [part.clone() for part in memory_before]
        expected = after(memory, destination, meant, source)
        copy_states(source, read, destination, write)
        assert same(memory, expected)
        assert same(memory_before, unchanged)

    def test_copying_nothing_is_nothing(self):
        source, destination = states(2), states(2, seed=5)
        before = bits(destination)
        copy_states(source, [], destination, [])
        copy_states(source, [-1, 1], destination, [1, -1])
        assert bits(destination) == before

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_views_of_one_pool_are_copied_through(self, dtype):
        pool = StatePool(conv_and_ssm(2, (3, 4), (2, 3, 2), dtype, dtype), 3, 4)
        pool["conv"].copy_(random_bytes(2, 7, 3, 4, dtype=dtype, seed=1))
        pool["ssm"].copy_(random_bytes(2, 7, 2, 3, 2, dtype=dtype, seed=2))
        live = ConvAndSsm(pool["conv"][:, : pool.num_live], pool["ssm"][:, : pool.num_live])
        durable = ConvAndSsm(pool.durable("conv"), pool.durable("ssm"))
        expected = bits([pool["conv"][:, 1], pool["ssm"][:, 1]])
        copy_states(live, [1], durable, [3])
        index = pool.durable_index(3)
        assert bits([pool["conv"][:, index], pool["ssm"][:, index]]) == expected

    @pytest.mark.parametrize(
        ("read", "write", "said"),
        [
            ([0], [0, 1], "destinations has 2 entries"),
            ([4], [0], "sources is .4."),
            ([0, 1], [0, -2], "destinations is .0, -2."),
        ],
    )
    def test_indices_that_name_no_slots_are_refused(self, read, write, said):
        pool = states(4)
        with pytest.raises(ValueError, match=said):
            copy_states(pool, read, pool, write)


@pytest.mark.gpu
class TestGpu:
    """What only a GPU can show: captured launches, and calls that do not wait."""

    DTYPES = (torch.bfloat16, torch.float32)

    def pools(self, slots, seed):
        return pools("contiguous", slots, [(96, 3), (8, 16, 32)], self.DTYPES, "cuda", seed, layers=3)

    def test_a_captured_launch_follows_its_index_tensors(self, cuda):
        source, _ = self.pools(9, 0)
        destination, memory = self.pools(9, 5)
        read, write = indices([0, 1, 2], cuda), indices([0, 1, 2], cuda)
        state_move.copy_states(source, read, destination, write)  # compiled before it is captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            state_move.copy_states(source, read, destination, write)
        for pairs in ([(8, 0), (4, 1), (3, 7)], [(2, 4), (5, 5), (1, 1)]):
            for tensor, place in ((read, 0), (write, 1)):
                tensor.copy_(indices([pair[place] for pair in pairs], cuda))
            expected = after(memory, destination, pairs, source)
            graph.replay()
            assert same(memory, expected)

    @pytest.mark.parametrize("commit", ["fancy indexing", "one launch"])
    def test_what_a_replay_wrote_to_scratch_is_committed(self, cuda, commit):
        scratch, _ = self.pools(4, 0)
        durable, memory = self.pools(9, 5)
        computed = [random_bytes(*part.shape, dtype=part.dtype, seed=9).to(cuda) for part in scratch]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for part, new in zip(scratch, computed, strict=True):
                part.copy_(new)
        for turn, write in enumerate(([7, 2], [0, 8])):
            for new in computed:
                new.view(torch.uint8).add_(turn)
            expected = after(memory, durable, list(zip([3, 1], write, strict=True)), ConvAndSsm(*computed))
            graph.replay()
            if commit == "one launch":
                copy_states(scratch, [3, 1], durable, write)
            else:
                reference.copy_states(scratch, indices([3, 1], cuda), durable, indices(write, cuda))
            assert same(memory, expected)

    def test_nothing_waits_for_the_gpu(self, cuda):
        source, _ = self.pools(9, 0)
        destination, memory = self.pools(9, 5)
        expected = after(memory, destination, [(1, 0), (2, 1)], source)
        for watched in (nullcontext(), no_synchronisation()):  # compiled before it is watched
            with watched:
                copy_states(source, [1, 2, -1], destination, [0, 1, 3])
        assert same(memory, expected)

    @pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
    def test_lists_cannot_be_captured(self, cuda):
        pool, _ = self.pools(3, 0)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(ValueError, match="captured"), torch.cuda.graph(graph):
            copy_states(pool, [0], pool, [1])

    @pytest.mark.parametrize("length", [1, 17])
    def test_lists_cross_many_times_without_mixing(self, cuda, length):
        """Pinned memory is used again only once its copy is over."""
        source, _ = self.pools(16 * length, 0)
        destination, memory = self.pools(16 * length, 5)
        slots = list(range(16 * length))
        expected = after(memory, destination, list(zip(slots, reversed(slots), strict=True)), source)
        for first in range(0, len(slots), length):
            read = slots[first : first + length]
            copy_states(source, read, destination, [len(slots) - 1 - slot for slot in read])
        assert same(memory, expected)

    def test_other_slots_compile_nothing_anew(self, cuda):
        pool, _ = self.pools(64, 0)
        copy_states(pool, [5], pool, [6])
        # Values that triton would otherwise specialise by: 0, 1, multiples of 16, more than 32 bits.
        refused = AssertionError("compiled anew")
        with mock.patch.object(move_states, "_do_compile", side_effect=refused):
            for read, write in ([0], [1]), ([1], [0]), ([16], [32]), ([0, 1, 2], [16, 17, 18]):
                copy_states(pool, read, pool, write)

    def test_a_pool_of_more_than_two_to_the_31_elements(self, cuda, needs_gpu_memory):
        needs_gpu_memory(9)
        slots = 2**31 // (128 * 64 * 128) + 3
        pool = StatePool(
            conv_and_ssm(2, (64, 3), (128, 64, 128), torch.bfloat16, torch.bfloat16), 1, slots, cuda
        )
        far = ConvAndSsm(pool.durable("conv"), pool.durable("ssm"))
        new = ConvAndSsm(*(random_bytes(2, 1, *t.shape[2:], dtype=t.dtype, seed=3).to(cuda) for t in far))
        copy_states(new, [0], far, [slots - 1])
        copy_states(far, [slots - 1], far, [slots - 2])
        for states, expected in zip(far, new, strict=True):
            for slot in (slots - 1, slots - 2):
                assert torch.equal(states[:, slot].view(torch.int16), expected[:, 0].view(torch.int16))
            assert not states[:, 0].any()
            assert not states[:, slots - 3].any()
