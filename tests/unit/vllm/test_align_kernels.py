"""The align kernels and their torch reference, against bytes moved by hand and a rule counted by hand."""

import math
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.kernels import ssd
from mambaslots.inference.kernels.kernel_set import KernelSet
from mambaslots.vllm import align_kernels as align
from mambaslots.vllm import align_reference
from mambaslots.vllm.align_reference import AlignLayout, AlignState
from oracle.align_lives import Lives
from oracle.budget import costly, thinned
from oracle.synchronisation import no_synchronisation

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2]
INDEX_DTYPES = [torch.int32, torch.int64]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where a kernel runs: on the GPU if there is one, else on the CPU in Triton's interpreter."""
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("the kernels run on the GPU, or in the interpreter")
    return request.param


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda"


def random_bytes(count, seed):
    """Random bytes: as floats they are NaNs with payloads, infinities and denormals too."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


class Memory:
    """State tensors cut out of random bytes, at any offset and with gaps."""

    def __init__(self, device, seed):
        self.device, self.seed = device, seed
        self.memories = []

    def states(self, slots, shape, dtype, first=0, slot_gap=0, row_gap=0):
        """[slots, *shape]: `first` elements into the memory, gaps in elements behind slots and rows."""
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        if row_gap:
            strides[0] += row_gap
        slot = shape[0] * strides[0] + slot_gap
        count = (first + slots * slot) * dtype.itemsize
        memory = random_bytes(count, self.seed + len(self.memories)).to(self.device)
        self.memories.append(memory)
        return memory.view(dtype).as_strided((slots, *shape), (slot, *strides), first)

    def bytes(self):
        return [memory.clone() for memory in self.memories]

    def put_back(self, before):
        for memory, earlier in zip(self.memories, before, strict=True):
            memory.copy_(earlier)


def by_hand(states, tables, conv_dim_first, row, source, destination, bias):
    """Copy one row's states byte by byte, in Python lists."""
    for tensor, width, group in states:
        table = tables[group].tolist()[row]
        column = source if width else source + bias
        if not (0 <= column < len(table) and 0 <= destination < len(table)):
            continue
        of, to = table[column], table[destination]
        if not (0 <= of < len(tensor) and 0 <= to < len(tensor)):
            continue
        as_bytes = tensor.contiguous().view(torch.uint8).reshape(len(tensor), -1, tensor.itemsize).tolist()
        new, old = list(as_bytes[to]), as_bytes[of]
        for place in range(len(new)):
            if not width:
                new[place] = old[place]
                continue
            inner = tensor.shape[2]
            token = place % inner if conv_dim_first else place // inner
            if token + bias < width:
                new[place] = old[place + (bias if conv_dim_first else bias * inner)]
        values = torch.tensor(new, dtype=torch.uint8).reshape(-1)
        tensor[to].copy_(values.view(tensor.dtype).reshape(tensor.shape[1:]))


def rule_by_hand(computed, scheduled, drafted, accepted, column, block):
    """(source, bias, destination, new count), or None where no boundary was reached: each count is tried."""
    before, after = computed + scheduled - drafted, computed + scheduled - drafted + accepted - 1
    reached = [tokens for tokens in range(before, after + 1) if tokens > 0 and tokens % block == 0]
    if not reached or column < 0:
        return None
    destination = reached[-1] // block - 1
    return column, reached[-1] - before, destination, 1 if destination == column else accepted


def numbers(values, dtype, device):
    return torch.tensor(values, dtype=dtype, device=device)


@st.composite
def memory_shapes(draw):
    """How one conv state and one SSM state lie in memory."""
    return {
        "dtype": draw(st.sampled_from(DTYPES)),
        "first": draw(st.sampled_from([0, 0, 1, 16])),
        "slot_gap": draw(st.sampled_from([0, 0, 1, 16])),
    }


class Case:
    """Random states, tables and batch rows."""

    def __init__(self, data, device, rows=3, columns=5, slots=12):
        draw = data.draw
        self.memory = Memory(device, draw(st.integers(0, 1000)))
        self.rows, self.columns = rows, columns
        self.conv_dim_first = draw(st.booleans())
        self.width = draw(st.integers(1, 6))
        self.states = []
        groups = draw(st.integers(1, 2))
        for group in range(groups):
            dim, gap = draw(st.sampled_from([1, 3, 8, 40])), draw(st.sampled_from([0, 0, 1, 8]))
            shape = (dim, self.width) if self.conv_dim_first else (self.width, dim)
            conv = self.memory.states(slots, shape, **draw(memory_shapes()), row_gap=gap)
            shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
            ssm = self.memory.states(slots, shape, **draw(memory_shapes()))
            self.states += [AlignState(conv, self.width, group), AlignState(ssm, 0, group)]
        self.tables = [self.table(draw, slots) for _ in range(groups)]
        self.on_device = [table.to(device) for table in self.tables]
        self.layout = AlignLayout.from_tensors(self.states, self.on_device, self.conv_dim_first)

    def table(self, draw, slots):
        """Each slot once, besides missing slots, slots out of range, and columns that share one."""
        free = draw(st.permutations(range(slots)))
        table = torch.full((self.rows, self.columns), -1, dtype=torch.int32)
        for row in range(self.rows):
            for column in range(self.columns):
                kind = draw(st.sampled_from(["free"] * 6 + ["null", "outside", "shared"]))
                if kind == "outside":
                    table[row, column] = draw(st.sampled_from([slots, slots + 3, 2**31 - 1]))
                elif kind == "shared" and column:
                    table[row, column] = table[row, column - 1]
                elif kind == "free" and free:
                    table[row, column] = free.pop()
        return table

    def lists(self, values):
        return st.lists(values, min_size=self.rows, max_size=self.rows)

    def copy_by_hand(self, row, source, destination, bias):
        by_hand(self.states, self.tables, self.conv_dim_first, row, source, destination, bias)

    def written_by(self, call):
        """The memories as `call` leaves them; afterwards they are as before the call."""
        before = self.memory.bytes()
        call()
        after = self.memory.bytes()
        self.memory.put_back(before)
        return after


def same(memories, expected):
    return all(map(torch.equal, memories, expected))


def programs(draw):
    """Few programs: the interpreter runs them one after another."""
    return mock.patch.object(align, "PROGRAMS", draw(st.sampled_from([1, 2, 3])))


class TestPrecopy:
    @costly()
    @given(data=st.data())
    def test_states_move_as_by_hand_and_nothing_else_is_written(self, device, data):
        case = Case(data, device)
        index = data.draw(st.sampled_from(INDEX_DTYPES))
        column = st.integers(-2, case.columns + 1)
        source, destination = data.draw(case.lists(column)), data.draw(case.lists(column))
        bias = data.draw(case.lists(st.integers(0, case.width + 1)))
        count = data.draw(st.integers(0, case.rows))

        def copies_by_hand():
            for row in range(count):
                if source[row] >= 0 and source[row] != destination[row]:
                    case.copy_by_hand(row, source[row], destination[row], bias[row])

        expected = case.written_by(copies_by_hand)
        arguments = [numbers(values, index, device)[:count] for values in (destination, source, bias)]
        with programs(data.draw):
            for kernels in (align_reference, align):
                copied = case.written_by(
                    lambda kernels=kernels: kernels.precopy_align(case.layout, *arguments)
                )
                assert same(copied, expected), kernels.__name__

    @pytest.mark.sampled
    @pytest.mark.parametrize("conv_dim_first", [True, False])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("bias", [0, 1, 2, 3])
    def test_a_window_moves_within_its_own_slot(self, device, conv_dim_first, dtype, bias):
        """In two columns that share a slot, SSM states stay and a window moves over itself.

        A bias of 2 or 3 puts the SSM source outside the table.
        """
        memory = Memory(device, bias)
        dim = 700
        conv = memory.states(2, (dim, 6) if conv_dim_first else (6, dim), dtype)
        ssm = memory.states(2, (3, 4), dtype)
        tables = [numbers([[1, 1]], torch.int32, device)]
        states = [AlignState(conv, 6), AlignState(ssm, 0)]
        layout = AlignLayout.from_tensors(states, tables, conv_dim_first)
        before = memory.bytes()
        window = 1 if conv_dim_first else 0
        moved = conv[1].view(align_reference._BITS[dtype.itemsize]).narrow(window, bias, 6 - bias).clone()
        conv[1].view(align_reference._BITS[dtype.itemsize]).narrow(window, 0, 6 - bias).copy_(moved)
        expected = memory.bytes()
        for kernels in (align_reference, align):
            memory.put_back(before)
            columns = [numbers([value], torch.int32, device) for value in (1, 0, bias)]
            kernels.precopy_align(layout, *columns)
            assert same(memory.memories, expected)

    def test_long_states_are_tiled(self, device):
        """A state has more pieces than tiles, and bytes behind the last whole access."""
        memory = Memory(device, 3)
        ssm = memory.states(3, (5 * 16384 + 13,), torch.uint8)
        aligned = memory.states(3, (9 * 16384 + 7,), torch.uint8, slot_gap=9)
        layout = AlignLayout.from_tensors(
            [AlignState(ssm, 0), AlignState(aligned, 0)], [numbers([[2, 0, 1]], torch.int32, device)], True
        )
        before = memory.bytes()
        ssm[1], aligned[1] = ssm[0].clone(), aligned[0].clone()
        expected = memory.bytes()
        memory.put_back(before)
        columns = [numbers([value], torch.int32, device) for value in (2, 0, 1)]
        with mock.patch.object(align, "TILES", 2), mock.patch.object(align, "PROGRAMS", 3):
            align.precopy_align(layout, *columns)
        assert same(memory.memories, expected)

    def test_fresh_rows_and_padding_copy_nothing(self, device):
        memory = Memory(device, 0)
        layout = AlignLayout.from_tensors(
            [AlignState(memory.states(2, (4,), torch.float32), 0)],
            [numbers([[0, 1]] * 2, torch.int32, device)],
            True,
        )
        before = memory.bytes()
        columns = [numbers(values, torch.int64, device) for values in ([1, 1], [-1, -2], [0, 0])]
        for kernels in (align_reference, align):
            kernels.precopy_align(layout, *columns)
            assert same(memory.memories, before)


class TestPostprocess:
    @costly()
    @given(data=st.data())
    def test_the_reached_boundary_is_put_in_its_column(self, device, data):
        case = Case(data, device)
        draw = data.draw
        index = draw(st.sampled_from(INDEX_DTYPES))
        block = draw(st.integers(1, 5))
        drafted = draw(case.lists(st.integers(0, 4)))
        accepted = [draw(st.integers(0, 1 + most)) for most in drafted]
        prefill = draw(case.lists(st.integers(1, 2 * block)))
        scheduled = [
            1 + drafts if drafts else tokens for drafts, tokens in zip(drafted, prefill, strict=True)
        ]
        computed = draw(case.lists(st.integers(0, 4 * block)))
        columns = [-(-(c + s) // block) - 1 for c, s in zip(computed, scheduled, strict=True)]
        columns = [column if draw(st.integers(0, 5)) else -1 for column in columns]
        count = draw(st.integers(0, case.rows))
        counts = list(accepted)

        def by_rule():
            for row in range(count):
                step = computed[row], scheduled[row], drafted[row], accepted[row], columns[row]
                if found := rule_by_hand(*step, block):
                    source, bias, destination, counts[row] = found
                    if bias or source != destination:
                        case.copy_by_hand(row, source, destination, bias)

        expected = case.written_by(by_rule)
        columns, *tokens = (
            numbers(values, index, device)[:count] for values in (columns, computed, scheduled, drafted)
        )
        with programs(draw):
            for kernels in (align_reference, align):
                out = numbers(accepted, index, device)
                copied = case.written_by(
                    lambda kernels=kernels, out=out: kernels.postprocess_align(
                        case.layout, out[:count], columns, *tokens, block
                    )
                )
                assert same(copied, expected), kernels.__name__
                assert out.tolist() == counts


class DeviceLives(Lives):
    """Lives whose copies the kernels decide; their decisions must equal those of `AlignRows`."""

    kernels = align_reference

    def bound(self, rows):
        forward = self.forward
        conv = torch.from_numpy(forward.conv)[:, :, None]  # the same memory, [slots, window, dim]
        ssm = torch.from_numpy(forward.ssm.view("int64"))
        states = [AlignState(conv, conv.shape[1]), AlignState(ssm, 0)]
        return AlignLayout.from_tensors(states, [self.state.slot_table[torch.from_numpy(rows)]], False)

    def copy_before(self, rows, computed, scheduled, before):
        columns = map(torch.from_numpy, (before.columns, before.sources, before.biases))
        self.kernels.precopy_align(self.bound(rows), *columns)

    def copy_after(self, rows, accepted, computed, scheduled, drafted, after):
        counts, *tokens = map(
            torch.from_numpy, (accepted.copy(), after.sources, computed, scheduled, drafted)
        )
        self.kernels.postprocess_align(self.bound(rows), counts, *tokens, self.block)
        assert counts.tolist() == after.accepted.tolist()


class KernelLives(DeviceLives):
    kernels = align


class TestLives:
    """Whole lives of requests whose copies the kernels decide."""

    @pytest.mark.parametrize("copy_free", [False, True])
    def test_reference(self, copy_free, record_property):
        count = 0
        for seed in range(4):
            found = DeviceLives(seed, 50, copy_free).run(24)
            assert found["mismatches"] == 0
            count += found["boundaries"]
        assert count > 100
        record_property("cases", {"random sequences in align mode, torch kernels": 200})

    @pytest.mark.sampled(copy_free=(True,))
    @pytest.mark.parametrize("copy_free", [False, True])
    def test_kernels(self, copy_free, record_property):
        if torch.cuda.is_available():
            pytest.skip("the interpreter shares the oracle's memory; a GPU does not")
        seeds = thinned(range(3), every=3)
        for seed in seeds:
            with mock.patch.object(align, "PROGRAMS", 1):
                assert KernelLives(seed, 8, copy_free).run(10)["mismatches"] == 0
        record_property("cases", {"random sequences in align mode, Triton kernels": 8 * len(seeds)})


class TestCopyFree:
    @pytest.mark.parametrize("kernels", [KernelSet, ssd])
    def test_an_update_that_reads_the_old_column_leaves_what_one_after_a_copy_does(self, device, kernels):
        """Two requests change their column, one of them with two accepted tokens; the third is fresh."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.rand(shape, generator=generator).to(device)

        rows, tokens, columns, heads, head_dim, state_dim = 3, 3, 6, 2, 4, 8
        pool = random(rows * columns, heads, head_dim, state_dim)
        table = torch.randperm(rows * columns, generator=generator).reshape(rows, columns).to(device)
        layout = AlignLayout.from_tensors([AlignState(pool, 0)], [table.int()], True)
        x, dt = random(rows, tokens, heads, head_dim), random(rows, tokens, heads)
        B, C = random(rows, tokens, 1, state_dim), random(rows, tokens, 1, state_dim)
        A, D = -random(heads), random(heads)
        row, running = torch.arange(rows, device=device), numbers([2, 2, 0], torch.int64, device)
        source, bias = numbers([0, 1, -1], torch.int64, device), numbers([1, 1, 0], torch.int64, device)
        written = table[row[:, None], running[:, None] + torch.arange(tokens, device=device)]
        fresh = source < 0
        before = pool.clone()
        found = []
        for copied in (False, True):
            pool.copy_(before)
            if copied:
                align.precopy_align(layout, running, source, bias)
            read = table[row, running if copied else (source + bias).clamp(min=0)].masked_fill(fresh, -1)
            y = kernels.selective_state_update(x, dt, A, B, C, D, pool, read, written)
            found.append((y, pool[written]))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])


class TestLayout:
    def states(self, *shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype)

    def test_other_memory_is_another_layout(self):
        states, tables = [AlignState(self.states(2, 8, 6), 6)], [torch.zeros(2, 3, dtype=torch.int32)]
        layout = AlignLayout.from_tensors(states, tables, True)
        assert layout.lies_in(states, tables)
        assert not layout.lies_in([AlignState(self.states(2, 8, 6), 6)], tables)
        assert not layout.lies_in(states, [tables[0].clone()])
        assert not layout.lies_in(states * 2, tables)

    @pytest.mark.parametrize(
        ("state", "said"),
        [
            (AlignState(torch.zeros(2, 6, 8), 6), "dim, window"),
            (AlignState(torch.zeros(2, 8), 6), "window 6 has shape"),
            (AlignState(torch.zeros(2, 8, 4)[..., ::2], 0), "without gaps"),
            (AlignState(torch.zeros(2, 8, 12)[..., ::2], 6), "without gaps"),
            (AlignState(torch.zeros(2, 8, dtype=torch.complex128), 0), "up to 8 bytes"),
        ],
    )
    def test_states_that_cannot_be_copied_are_refused(self, state, said):
        with pytest.raises(ValueError, match=said):
            AlignLayout.from_tensors([state], [torch.zeros(2, 3, dtype=torch.int32)], True)

    @pytest.mark.parametrize(
        "tables",
        [
            [],
            [torch.zeros(2, 3)],
            [torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)],
            [torch.zeros(3, 2, dtype=torch.int32).T],
        ],
    )
    def test_tables_that_are_none_are_refused(self, tables):
        with pytest.raises(ValueError, match=r"block.tables"):
            AlignLayout.from_tensors([AlignState(torch.zeros(2, 8), 0)], tables, True)


@pytest.mark.gpu
class TestGpu:
    """What only a GPU shows: captured launches, calls that do not wait, addresses beyond 32 bits."""

    def case(self, seed=0):
        memory = Memory("cuda", seed)
        states = []
        for _ in range(3):
            states.append(AlignState(memory.states(12, (640, 7), torch.bfloat16), 7))
            states.append(AlignState(memory.states(12, (16, 16, 64), torch.float32), 0))
        tables = [numbers([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], torch.int32, "cuda")]
        return memory, AlignLayout.from_tensors(states, tables, True)

    def vectors(self, *values):
        return [numbers(listed, torch.int32, "cuda") for listed in values]

    def step(self, kernels, layout, state):
        columns, source, bias, counts, *tokens = state
        kernels.precopy_align(layout, columns, source, bias)
        kernels.postprocess_align(layout, counts, columns, *tokens, 4)

    def state(self):
        # Row 0 changes its column, row 1 reaches a boundary within its step, row 2 is padding.
        return self.vectors([1, 0, -2], [0, 0, -2], [1, 0, 0], [3, 2, 1], [2, 2, 0], [3, 3, 0], [2, 2, 0])

    def test_nothing_waits_for_the_gpu(self, cuda):
        memory, layout = self.case()
        before = memory.bytes()
        self.step(align_reference, layout, reference := self.state())
        expected = memory.bytes()
        assert not same(before, expected)
        for watched in (nullcontext(), no_synchronisation()):  # compiled before it is watched
            memory.put_back(before)
            state = self.state()
            with watched:
                self.step(align, layout, state)
            assert same(memory.memories, expected)
            assert all(map(torch.equal, state, reference))

    def test_a_captured_step_follows_its_buffers(self, cuda):
        memory, layout = self.case()
        before = memory.bytes()
        state, first = self.state(), self.state()
        self.step(align, layout, state)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(align, layout, state)
        for columns in ([1, 0, -2], [-2, -2, -2], [0, 1, 1]):
            for buffer, values in zip(state, first, strict=True):
                buffer.copy_(values)
            state[0].copy_(numbers(columns, torch.int32, cuda))
            other = [buffer.clone() for buffer in state]
            memory.put_back(before)
            self.step(align_reference, layout, other)
            expected = memory.bytes()
            memory.put_back(before)
            graph.replay()
            assert same(memory.memories, expected)
            assert all(map(torch.equal, state, other))

    def test_strides_beyond_two_to_the_31(self, cuda, needs_gpu_memory):
        needs_gpu_memory(8)
        slots = 2**31 // (1 << 20) + 3
        ssm = torch.zeros(slots, 1 << 20, dtype=torch.int16, device=cuda)  # more than 2**31 elements
        ssm[slots - 1].random_(-(2**15), 2**15)
        tables = self.vectors([[slots - 1, slots - 2]])
        layout = AlignLayout.from_tensors([AlignState(ssm, 0)], [tables[0]], True)
        align.precopy_align(layout, *self.vectors([1], [0], [0]))
        assert torch.equal(ssm[slots - 2], ssm[slots - 1])
        assert not ssm[: slots - 2].any()
