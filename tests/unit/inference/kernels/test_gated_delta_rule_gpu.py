"""The gated delta rule by slots against the recurrence in float64 numpy, and against the torch reference.

On the CPU in Triton's interpreter, fla-core's stages included; the same cases on CUDA under the gpu mark.
"""

import pytest
import torch
import triton
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mambaslots.inference.kernels import delta as module
from mambaslots.inference.kernels.delta import (
    check_sizes,
    delta_operands,
    delta_state_passing,
    gated_delta_rule_scan,
    gated_delta_rule_update,
)
from mambaslots.inference.kernels.kernel_set import KernelSet
from mambaslots.inference.kernels.step_rows import ScanRows
from oracle.budget import example_or_dear
from oracle.fla_stages import one_configuration
from oracle.fresh_process import printed_by
from oracle.gated_delta import Batch, Layer, decode_inputs, error
from oracle.scan_rows import Row, drawn_rows, poisoned_pool, rows_of
from oracle.ssd import DEVICES, kernel_device, poisoned_allocations, same_bits
from oracle.synchronisation import no_synchronisation
from oracle.traffic import traffic_of
from torch import Tensor

# numpy's, in the interpreter, of numbers that are masked out: those behind a chunk, or above a diagonal.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
few = settings(example_or_dear(), derandomize=True)
# The interpreter cuts float32 to bfloat16, where a GPU rounds.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# The interpreter would multiply the bits of bfloat16 as integers.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    return kernel_device(request.param)


@pytest.fixture(autouse=True, scope="module")
def _one_configuration():
    with one_configuration():
        yield


def scan(batch: Batch, pool: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """o and the pool after, on the CPU; `pool` stays."""
    pool = pool.to(device, copy=True)
    with poisoned_allocations():
        o = batch.scan(gated_delta_rule_scan, pool)
    return o, pool.cpu()


def scan_and_check(batch: Batch, pool: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    dtype = batch.layer.dtype
    o, after = scan(batch, pool, device)
    assert o.dtype == dtype
    rounding = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-10}[pool.dtype]
    batch.check(pool, after, o, TOLERANCES[dtype], TOLERANCES[dtype] + rounding)
    return o, after


class TestScan:
    layer = Layer(jumps=False)

    @few
    @given(drawn_rows(3), st.tuples(*[st.integers(0, 3)] * 3))
    @example([(0, 0, True, "elsewhere", False), (0, 0, False, "elsewhere", False)], (0, 0, 0))
    @example([(3, 0, True, "in place", False), (16, 32, True, "in place", True)], (2, 3, 1))
    def test_any_layout_is_the_recurrence_and_the_reference(self, device, drawn, padding):
        rows = rows_of(drawn, 16)
        batch = Batch(self.layer, rows, 16, padding)
        before = poisoned_pool(self.layer, rows, 4 * len(rows))
        o, pool = scan_and_check(batch, before, device)

        reference_pool = before.clone()
        expected = batch.scan(KernelSet.gated_delta_rule_scan, reference_pool)
        assert error(o[: batch.num_tokens], expected[: batch.num_tokens].double()) <= 2e-5
        assert torch.equal(pool.isnan(), reference_pool.isnan())
        assert error(pool.nan_to_num(), reference_pool.nan_to_num().double()) <= 2e-5

    @pytest.mark.sampled(chunk_size=(64,), dtype=1)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("chunk_size", module.CHUNK_SIZES)
    def test_chunk_sizes_dtypes_and_single_tokens(self, device, chunk_size, dtype):
        layer = Layer(dtype=dtype, Dk=16, Dv=16, jumps=False)
        rows = [
            Row(0, chunk_size - 1, 1, source=0, destination=1),
            Row(1, 2 * chunk_size - 1, 2, source=2, destination=3, checkpoints={2 * chunk_size: 4}),
            Row(2, 0, chunk_size + 1, destination=5, checkpoints={chunk_size: 6}),
            Row(3, 7, 1, source=8, destination=8),
        ]
        scan_and_check(Batch(layer, rows, chunk_size, (1, 1, 1)), poisoned_pool(layer, rows, 9), device)

    @pytest.mark.sampled(sizes=((1, 3, 80, 40),), dtype=1)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        "sizes", [(1, 1, 16, 48), (1, 3, 80, 40), (2, 2, 128, 128), (2, 4, 96, 64), (1, 1, 256, 256)]
    )
    def test_sizes(self, device, sizes, dtype):
        """Dk, Dv of no power of two, more than one block of Dv, one value head a key head and several."""
        Hk, Hv, Dk, Dv = sizes
        layer = Layer(Hk=Hk, Hv=Hv, Dk=Dk, Dv=Dv, dtype=dtype, jumps=False)
        rows = [Row(0, 3, 80, source=1, destination=2, checkpoints={64: 3})]
        scan_and_check(Batch(layer, rows, 64), poisoned_pool(layer, rows, 4), device)

    @pytest.mark.sampled(stored=1)
    @pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
    def test_a_narrow_pool(self, device, stored):
        rows = [Row(0, 5, 40, source=0, destination=1, checkpoints={32: 2}), Row(1, 0, 3, destination=3)]
        scan_and_check(Batch(self.layer, rows, 16), poisoned_pool(self.layer, rows, 4, stored), device)

    @pytest.mark.sampled(dtype=1)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_checkpoint_may_replace_its_rows_source(self, device, dtype):
        """In the middle of a row that goes elsewhere, and at the end of one that goes nowhere."""
        layer = Layer(Hk=1, Hv=2, dtype=dtype, jumps=False)
        rows = [
            Row(0, 5, 40, source=0, destination=1, checkpoints={32: 0}),
            Row(1, 16, 16, source=2, checkpoints={32: 2}),
        ]
        scan_and_check(Batch(layer, rows, 16, (1, 1, 1)), poisoned_pool(layer, rows, 3), device)

    @pytest.mark.long
    def test_doubled_beta_and_strong_decays(self, device):
        layer = Layer(decay=3.0, doubled=True)
        rows = [Row(0, 5, 100, source=0, destination=1)]
        o, pool = scan(Batch(layer, rows, 64), layer.pool(2), device)
        Batch(layer, rows, 64).check(layer.pool(2), pool, o, 1e-3)

    def test_what_the_stages_do_not_take_is_named(self):
        with pytest.raises(ValueError, match="chunk_size is 48; accepted on a GPU"):
            check_sizes(48, 128)
        with pytest.raises(ValueError, match="keys have 260 numbers; accepted on a GPU: at most 256"):
            check_sizes(16, 260)


class TestBits:
    """The same inputs and cuts on the chunk grid: the same bits, in any company and in several calls."""

    @pytest.mark.sampled(start=(5,), dtype=1)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("start", "length", "at"), [(5, 50, 1), (0, 16, 0), (9, 33, 0)])
    def test_a_cut_on_the_grid_changes_nothing(self, device, dtype, start, length, at):
        layer = Layer(Hk=1, Hv=2, dtype=dtype)
        end = start + length
        cut = min(end, (start // 16 + 1 + at) * 16)
        pool = layer.pool(8, torch.float32)
        o, uncut = scan(Batch(layer, [Row(0, start, length, 0, 1, {cut: 2})], 16), pool, device)

        other = Row(1, 3, 20, source=5, destination=6)
        first, pool = scan(Batch(layer, [other, Row(0, start, cut - start, 0, 0)], 16), pool, device)
        assert same_bits(pool[0], uncut[2] if cut % 16 == 0 else uncut[1])
        resumed = Batch(layer, [Row(0, cut, end - cut, 0, 4), other], 16, (1, 2, 3))
        second, final = scan(resumed, pool, device)
        assert same_bits(final[4], uncut[1])
        assert same_bits(torch.cat([first[20:], second[: end - cut]]), o)

    def test_a_row_is_the_same_in_any_company(self, device):
        layer = Layer(Hk=1, Hv=2)
        row = Row(0, 7, 50, source=0, destination=1, checkpoints={32: 2})
        company = [Row(i, 5 * i, 11 * i, source=2 * i + 2, destination=2 * i + 3) for i in range(1, 4)]
        pool = layer.pool(12)
        alone, expected = scan(Batch(layer, [row], 16), pool, device)
        together, found = scan(Batch(layer, [*company, row], 16, (1, 1, 1)), pool, device)
        assert same_bits(found[1:3], expected[1:3])
        assert same_bits(together[66:116], alone)


class TestStages:
    def test_operands(self, device):
        layer = Layer(Hk=3, Hv=6, Dk=5, Dv=12)
        inputs = {name: tensor[:40] for name, tensor in layer.tokens(0).items()}
        q, k, v = (inputs[name].to(device) for name in ("q", "k", "v"))
        with poisoned_allocations():
            found = delta_operands(q, k, v.mT.contiguous().mT)
        for x, raw in zip(found[:2], (q, k), strict=True):
            expected = raw.double() / (raw.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
            assert error(x, expected.cpu()) <= 1e-6
        assert torch.equal(found[2], v)
        assert all(x.is_contiguous() for x in found)

    @pytest.mark.sampled(Dk=(16, 24))
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("Dk", "Dv"), [(16, 16), (24, 40), (64, 33)])
    def test_between_chunks(self, device, dtype, Dk, Dv):
        """Random parts of the WY form, some rows without chunks, in place and elsewhere, against a loop."""
        Hk, Hv, chunk = 2, 4, 16
        generator = torch.Generator().manual_seed(Dk)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        lengths, starts = [5, 16, 16, 1, 3], [0, 3, 3, 4, 5, 5]
        places = [(0, 1), (2, 2), (3, 4), (-1, 5), (6, 6)]
        cuts = [0, 5, 21, 37, 38, 41, 41]  # a padding chunk behind
        tokens, chunks = 43, 6
        keys, read_keys = normal(tokens, Hk, Dk) / Dk**0.5, normal(tokens, Hv, Dk) / Dk**0.5
        written = normal(tokens, Hv, Dv)
        keys, read_keys, written = (x.to(dtype) for x in (keys, read_keys, written))
        decays = -normal(tokens, Hv).abs()
        pool = torch.full((9, 2, Hv, Dk, Dv), torch.nan)[:, 1]  # one layer of slots of two
        for source in (0, 2, 3, 6):
            pool[source] = normal(Hv, Dk, Dv)
        stored = {1: 7, 3: 8}
        expected = pool.double()
        entering, new_values = torch.zeros(5, Hv, Dk, Dv).double(), torch.zeros(41, Hv, Dv).double()
        for row, (source, destination) in enumerate(places):
            state = pool[source].double() if source >= 0 else torch.zeros(Hv, Dk, Dv).double()
            for index in range(starts[row], starts[row + 1]):
                entering[index] = state
                last = cuts[index + 1] - 1
                decay = (2.0 ** decays[last].double())[:, None, None] * state
                for t in range(cuts[index], cuts[index + 1]):
                    held = torch.einsum("hkv,hk->hv", state, read_keys[t].double())
                    new_values[t] = written[t].double() - held
                    key = keys[t].double().repeat_interleave(Hv // Hk, dim=0)
                    scale = 2.0 ** (decays[last] - decays[t]).double()
                    decay = decay + torch.einsum("h,hk,hv->hkv", scale, key, new_values[t])
                state = decay
                if index in stored:
                    expected[stored[index]] = state
            expected[destination] = state
        assert len(lengths) == 5

        def index(values: list[int], integers: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=integers, device=device)

        moved = torch.full((9, 2, Hv, Dk, Dv), 7.0, device=device)
        moved[:, 1] = pool
        with poisoned_allocations():
            found_entering, found_values = delta_state_passing(
                keys.to(device), read_keys.to(device), written.to(device), decays.to(device), moved[:, 1],
                ScanRows(
                    index([source for source, _ in places] + [-1]),
                    index([into for _, into in places] + [-1]), chunk, index(cuts, torch.int32),
                    index([0] * chunks, torch.int32), index([*starts, 5], torch.int32),
                    index([stored.get(c, -1) for c in range(chunks)]),
                ),
            )  # fmt: skip
        tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
        assert error(found_entering[:5], entering) <= tolerance
        assert error(found_values[:41], new_values) <= tolerance
        after = moved[:, 1].cpu()
        assert torch.equal(after.isnan(), expected.isnan())
        assert error(after.nan_to_num(), expected.nan_to_num()) <= tolerance
        assert same_bits(after[6], pool[6])
        assert moved[:, 0].eq(7).all()

    def test_states_that_are_not_contiguous_are_refused(self, device):
        layer = Layer()
        pool = layer.pool(2).mT.contiguous().mT.to(device)
        with pytest.raises(ValueError, match="accepted: contiguous slots of any stride"):
            Batch(layer, [Row(0, 0, 3)], 16).scan(gated_delta_rule_scan, pool)


def layout(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Sources and destinations: in place, elsewhere, nowhere, from zeros, and padding between."""
    free = iter(range(rows, 1000))
    sources, destinations = [], []
    for row in range(rows):
        padding = row % 5 == 4
        source = -1 if padding or row % 3 == 2 else row
        into = [-1 if padding or (row + token) % 2 else next(free) for token in range(tokens)]
        if source >= 0 and row % 2:
            into[row % tokens] = source
        sources.append(source)
        destinations.append(into)
    return torch.tensor(sources), torch.tensor(destinations).view(rows, tokens)


class TestUpdate:
    def run(self, layer: Layer, sources: Tensor, destinations: Tensor, pool: Tensor, device) -> Tensor:
        """o on the CPU; `pool`, on `device`, is written. Inputs of padding rows are NaN."""
        inputs = decode_inputs(layer, *destinations.shape, device)
        padding = (sources < 0) & (destinations < 0).all(1)
        for tensor in inputs.values():
            tensor[padding.to(device)] = torch.nan
        with poisoned_allocations():
            o = gated_delta_rule_update(
                **inputs, states=pool, sources=sources.to(device), destinations=destinations.to(device)
            )
        assert o.dtype == layer.dtype
        return o.cpu()

    @pytest.mark.sampled(tokens=(1, 2))
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("tokens", [1, 2, 5])
    def test_the_recurrence_and_the_reference(self, device, tokens, pool_dtype, dtype):
        layer = Layer(dtype=dtype)
        sources, destinations = layout(9, tokens)
        before = layer.pool(60, pool_dtype)
        wide = torch.full((60, 2, layer.Hv, layer.Dk, layer.Dv), 7.0, dtype=pool_dtype, device=device)
        wide[:, 1] = before.to(device)  # one layer of slots of two
        o = self.run(layer, sources, destinations, wide[:, 1], device)
        pool = wide[:, 1].cpu()
        rounding = 0.0 if pool_dtype == torch.float32 else 2**-7
        output_rounding = 0.0 if dtype == torch.float32 else 2**-7
        inputs = decode_inputs(layer, *destinations.shape)
        written = set()
        for row in range(9):
            if sources[row] < 0 and (destinations[row] < 0).all():
                continue
            initial = None if sources[row] < 0 else before[sources[row]]
            expected, states = layer.run({name: part[row] for name, part in inputs.items()}, initial)
            assert error(o[row], expected) <= 1e-5 + output_rounding
            for token, slot in enumerate(destinations[row].tolist()):
                if slot >= 0:
                    assert error(pool[slot], states[token + 1]) <= 1e-5 + rounding
                    written.add(slot)
        untouched = [slot for slot in range(60) if slot not in written]
        assert same_bits(pool[untouched], before[untouched])
        assert wide[:, 0].eq(7).all()

        other = before.clone()
        theirs = KernelSet.gated_delta_rule_update(
            **inputs, states=other, sources=sources, destinations=destinations
        )
        real = (sources >= 0) | (destinations >= 0).any(1)
        assert error(o[real], theirs[real].double()) <= 1e-5 + 2 * output_rounding

    @pytest.mark.parametrize(
        "sizes", [(1, 1, 1, 1), (3, 3, 7, 5), (1, 4, 24, 96), (2, 4, 128, 128), (1, 1, 256, 20)]
    )
    def test_sizes(self, device, sizes):
        Hk, Hv, Dk, Dv = sizes
        layer = Layer(Hk=Hk, Hv=Hv, Dk=Dk, Dv=Dv)
        before = layer.pool(3)
        pool = before.to(device, copy=True)
        o = self.run(layer, torch.tensor([0]), torch.tensor([[1, 0]]), pool, device)
        inputs = {name: part[0] for name, part in decode_inputs(layer, 1, 2).items()}
        expected, states = layer.run(inputs, before[0])
        assert error(o[0], expected) <= 1e-5
        assert error(pool[[1, 0]], states[1:]) <= 1e-5

    def test_company_and_calls_of_several_tokens_change_no_bit(self, device):
        layer = Layer(Dk=128, Dv=40)
        sources, destinations = torch.tensor([0, 1, -1]), torch.arange(4, 16).view(3, 4)
        pool = layer.pool(20).to(device)
        o = self.run(layer, sources, destinations, pool, device)
        one_by_one = layer.pool(20).to(device)
        inputs = decode_inputs(layer, 3, 4, device)
        for token in range(4):
            part = {name: tensor[:1, token : token + 1] for name, tensor in inputs.items()}
            source = sources[:1] if token == 0 else destinations[:1, token - 1]
            into = destinations[:1, token : token + 1].to(device)
            alone = gated_delta_rule_update(
                **part, states=one_by_one, sources=source.to(device), destinations=into
            )
            assert same_bits(alone[0, 0].cpu(), o[0, token])
        assert same_bits(one_by_one[4:8], pool[4:8])

    @pytest.mark.parametrize("tokens", [1, 3])
    def test_moves_no_byte_too_many(self, tokens):
        """Each source once and each destination once, whatever the padding and the blocks."""
        layer = Layer(Hk=1, Hv=2, Dk=20, Dv=24)
        sources, destinations = layout(9, tokens)
        pool = layer.pool(60)
        state = pool[0].numel() * pool.element_size()
        with traffic_of(pool) as traffic:
            self.run(layer, sources, destinations, pool, torch.device("cpu"))
        assert traffic.loaded == state * int((sources >= 0).sum())
        assert traffic.stored == state * int((destinations >= 0).sum())


class TestCost:
    def test_the_pool_is_read_once_a_cached_row_and_written_once_a_destination(self):
        layer = Layer(Hk=1, Hv=2)
        rows = [
            Row(0, 16, 48, source=0, destination=1, checkpoints={32: 2, 48: 3}),
            Row(1, 5, 1, source=4, destination=4),
            Row(2, 0, 40, destination=5, checkpoints={16: 6}),
            Row(3, 9, 20, source=7),
            Row(4, 9, 0, source=8, destination=9),
            Row(5, 9, 0, source=10, destination=10),
            Row(6, 0, 0),
        ]
        pool = poisoned_pool(layer, rows, 12)
        before = pool.clone()
        batch = Batch(layer, rows, 16, (3, 3, 3))
        with traffic_of(pool) as traffic:
            o = batch.scan(gated_delta_rule_scan, pool)
        batch.check(before, pool, o, 1e-4)
        state = pool[0].numel() * pool.element_size()
        assert traffic.loaded == 4 * state
        assert traffic.stored == 7 * state

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_no_synchronisation_and_a_graph_follows_its_indices(self, dtype):
        """A captured graph reads what its buffers hold when it is launched, padding included."""
        device = kernel_device("cuda")
        layer = Layer(Dk=64, Dv=64, dtype=dtype, jumps=False)
        plans = [
            Batch(layer, [Row(0, 0, 40, -1, 1), Row(1, 16, 24, 2, 3, {32: 4})], 16, (1, 3, 0)),
            Batch(layer, [Row(2, 0, 10, -1, 5), Row(3, 8, 20, 6, 6), Row(4, 8, 0, 7, 0)], 16, (0, 5, 34)),
        ]
        arguments = plans[0].arguments(device)
        rows = arguments.pop("rows")
        pool = layer.pool(8, torch.float32).to(device)

        def launch() -> Tensor:
            return gated_delta_rule_scan(states=pool, rows=rows, **arguments)

        launch()  # tunes and compiles
        torch.cuda.synchronize()
        with no_synchronisation():
            launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = launch()
        for plan in plans:
            given = plan.arguments(device)
            for index, values in zip(rows, given.pop("rows"), strict=True):
                if isinstance(index, Tensor):
                    index.copy_(values)
            for name, tensor in given.items():
                arguments[name].copy_(tensor)
            before = layer.pool(8, torch.float32, seed=9)
            pool.copy_(before)
            graph.replay()
            plan.check(before, pool, o.cpu(), TOLERANCES[dtype])

    @pytest.mark.gpu
    def test_a_decode_replays_in_a_graph_without_synchronising(self):
        """Captured as padding only, launched with rows."""
        device = kernel_device("cuda")
        layer = Layer(Dk=128, Dv=128, dtype=torch.bfloat16)
        sources, destinations = (tensor.to(device) for tensor in layout(9, 2))
        inputs = decode_inputs(layer, 9, 2, device)
        pool = layer.pool(60, torch.float32).to(device)
        eager_pool = pool.clone()
        static = [torch.full_like(tensor, -1) for tensor in (sources, destinations)]
        gated_delta_rule_update(**inputs, states=pool, sources=static[0], destinations=static[1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = gated_delta_rule_update(**inputs, states=pool, sources=static[0], destinations=static[1])
        with no_synchronisation():
            static[0].copy_(sources)
            static[1].copy_(destinations)
            graph.replay()
            eager = gated_delta_rule_update(
                **inputs, states=eager_pool, sources=sources, destinations=destinations
            )
        real = (sources >= 0) | (destinations >= 0).any(1)
        assert torch.equal(o[real], eager[real])
        assert same_bits(pool.cpu(), eager_pool.cpu())

    @pytest.mark.gpu
    @pytest.mark.parametrize("value_heads", [32, 48])
    def test_at_full_size(self, value_heads):
        """Qwen3.5-4B's and a larger layer: prefill of 400 tokens and decode, many times over: equal bits."""
        device = kernel_device("cuda")
        layer = Layer(Hk=16, Hv=value_heads, Dk=128, Dv=128, dtype=torch.bfloat16, jumps=False)
        rows = [Row(0, 0, 400, -1, 0, {256: 1}), Row(1, 37, 300, 2, 2), Row(2, 64, 63, 3, 4)]
        batch, before = Batch(layer, rows, 64, (2, 3, 70)), layer.pool(6, torch.float32)
        o, pool = scan_and_check(batch, before, device)
        for _ in range(10):
            again, again_pool = scan(batch, before, device)
            assert same_bits(again[: batch.num_tokens], o[: batch.num_tokens])
            assert same_bits(again_pool, pool)

    @pytest.mark.gpu
    def test_slots_beyond_two_to_the_31(self, needs_gpu_memory):
        needs_gpu_memory(6)
        device = kernel_device("cuda")
        layer = Layer(Dk=16, Dv=16, dtype=torch.bfloat16)
        near = layer.pool(4, torch.bfloat16).to(device)
        stride = (1 << 31) // 48 * 16 + 160  # a multiple of 16, as the near pool's: one kernel serves both
        memory = torch.zeros(4 * stride, dtype=torch.bfloat16, device=device)
        far = memory.as_strided(near.shape, (stride, *near.stride()[1:]))
        far.copy_(near)
        batch = Batch(layer, [Row(0, 0, 40, 3, 2, {32: 1})], 16)
        assert same_bits(batch.scan(gated_delta_rule_scan, far), batch.scan(gated_delta_rule_scan, near))
        assert same_bits(far.contiguous().cpu(), near.cpu())
        indices = {"sources": torch.tensor([3], device=device)}
        indices["destinations"] = torch.tensor([[0, 3]], device=device)
        inputs = decode_inputs(layer, 1, 2, device)
        outputs = [gated_delta_rule_update(**inputs, states=pool, **indices) for pool in (far, near)]
        assert same_bits(outputs[0].cpu(), outputs[1].cpu())
        assert same_bits(far.contiguous().cpu(), near.cpu())


def test_importing_the_kernels_needs_no_fla():
    """What is missing is named when a model of this kind runs."""
    printed = printed_by(WITHOUT_FLA)
    assert "needs fla-core (fla.ops is missing)" in printed
    assert "pip install 'mambaslots[fla]'" in printed


WITHOUT_FLA = """
import sys
sys.modules["fla"] = None
from mambaslots.inference.kernels import delta, gpu_kernels
assert "fla.ops" not in sys.modules
try:
    delta.stages()
except ImportError as error:
    print(error)
"""


@pytest.mark.long  # its parts: the test below
def test_fixed_orders_of_addition_leave_one_number_of_warps():
    """In a process of its own, because fla-core's kernels stay changed."""
    printed = printed_by(FIXED_ORDERS)
    assert printed.split() == ["2"] * 5


FIXED_ORDERS = """
from mambaslots.inference.kernels import delta
delta.fix_orders_of_addition()
delta.fix_orders_of_addition()
for kernel in delta.stages().kernels_that_add:
    print(*{config.num_warps for config in kernel.fn.configs})
"""


def test_fixed_orders_of_addition_in_tuners_of_one_or_more_configurations(monkeypatch):
    """One configuration is one order and stays; configurations that came back are left out again."""
    kernel = module.stages().kernels_that_add[0]
    several = [triton.Config({}, num_warps=warps) for warps in (1, 2, 4)]
    for configurations, left in ((several[2:], [4]), (several, [2]), (several, [2])):
        monkeypatch.setattr(kernel.fn, "configs", configurations)
        module.fix_orders_of_addition()
        assert [config.num_warps for config in kernel.fn.configs] == left
    monkeypatch.setattr(kernel.fn, "configs", several[::2])
    with pytest.raises(RuntimeError, match="has no configuration of 2 warps"):
        module.fix_orders_of_addition()
