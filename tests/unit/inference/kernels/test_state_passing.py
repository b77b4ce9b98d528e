"""The recurrence between chunks against a loop over them in float64."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mambaslots.inference.kernels.ssd import state_passing
from oracle.budget import costly
from oracle.ssd import DEVICES, kernel_device, randn, relative_error, same_bits
from oracle.traffic import traffic_of

few = settings(costly(), derandomize=True)

H, P, N, CHUNK = 3, 5, 4, 8


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    return kernel_device(request.param)


class Case:
    """Random updates of rows of `counts` chunks, with `padding` chunks and rows behind, and a pool of NaN.

    places: (source, destination) of each row; checkpoints: chunk -> slot.
    """

    def __init__(self, counts, places, checkpoints=(), padding=(0, 0), shape=(H, P, N), dtype=torch.float32):
        self.counts, self.places, self.checkpoints = counts, places, dict(checkpoints)
        rows, self.chunks = padding[0], sum(counts)
        total = self.chunks + padding[1]
        self.updates = randn(total, *shape, seed=1).float()
        self.updates[self.chunks :] = torch.nan
        self.log_decays = -randn(shape[0], total, CHUNK, seed=2).float().abs()
        slots = 1 + max([1, *(max(pair) for pair in places), *self.checkpoints.values()])
        self.pool = torch.full((slots, *shape), torch.nan, dtype=dtype)
        for source, _ in places:
            if source >= 0:
                self.pool[source] = randn(*shape, seed=10 + source).to(dtype)
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        self.starts = torch.tensor(starts + [self.chunks] * rows, dtype=torch.int32)
        self.sources, self.destinations = (
            torch.tensor([*values, *[-1] * rows], dtype=torch.int64) for values in zip(*places, strict=True)
        )
        self.chunk_destinations = torch.tensor(
            [self.checkpoints.get(chunk, -1) for chunk in range(total)], dtype=torch.int64
        )

    def run(self, device, pool=None):
        """The states entering each chunk and the pool after, on the CPU."""
        updates = self.updates.to(device, copy=True)
        pool = self.pool.to(device, copy=True) if pool is None else pool
        state_passing(
            updates, self.log_decays.to(device), pool, self.sources.to(device), self.destinations.to(device),
            self.starts.to(device), self.chunk_destinations.to(device),
        )  # fmt: skip
        return updates.cpu(), pool.cpu()

    def expected(self):
        entering, pool = self.updates.double(), self.pool.double()
        first = 0
        for count, (source, destination) in zip(self.counts, self.places, strict=True):
            state = self.pool[source].double() if source >= 0 else torch.zeros(self.pool.shape[1:])
            for chunk in range(first, first + count):
                entering[chunk] = state
                decay = self.log_decays[:, chunk, -1].double().exp()
                state = decay[:, None, None] * state + self.updates[chunk].double()
                if chunk in self.checkpoints:
                    pool[self.checkpoints[chunk]] = state
            if destination >= 0:
                pool[destination] = state
            first += count
        return entering, pool

    def check(self, device):
        entering, pool = self.run(device)
        expected_entering, expected_pool = self.expected()
        for found, expected in ((entering, expected_entering), (pool, expected_pool)):
            assert torch.equal(found.isnan(), expected.isnan())
            for part, expected_part in zip(found, expected, strict=True):
                if not expected_part.isnan().any():
                    assert relative_error(part, expected_part) <= 1e-6
        assert same_bits(entering[self.chunks :], self.updates[self.chunks :])


@few
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.booleans(), st.sampled_from(["nowhere", "elsewhere", "in place"])),
        min_size=1,
        max_size=4,
    ),
    st.sets(st.integers(0, 15)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
@example([(2, True, "in place"), (0, True, "in place"), (0, True, "elsewhere")], {0}, (1, 1))
@example([(0, False, "elsewhere"), (0, True, "nowhere"), (3, False, "nowhere")], set(), (0, 0))
def test_any_rows_and_checkpoints(device, drawn, checkpointed, padding):
    counts, places = [], []
    for row, (count, carried, target) in enumerate(drawn):
        source = 2 * row if carried else -1
        counts.append(count)
        places.append((source, {"nowhere": -1, "elsewhere": 2 * row + 1, "in place": source}[target]))
    slots = {chunk: 8 + chunk for chunk in checkpointed if chunk < sum(counts)}
    Case(counts, places, slots, padding).check(device)


@pytest.mark.parametrize("shape", [(2, 33, 64), (1, 16, 64), (2, 17, 61)])
def test_states_of_several_blocks(device, shape):
    Case([2, 3], [(0, 1), (2, 2)], {0: 3, 3: 4}, (1, 1), shape=shape).check(device)


@pytest.mark.parametrize("shape", [(H, P, N), (2, 33, 64)])
def test_a_checkpoint_may_replace_its_rows_source(device, shape):
    """Of a row that goes nowhere and of one that goes elsewhere, in the middle and at the end."""
    places = [(0, -1), (1, 2), (3, -1)]
    Case([3, 2, 2], places, {1: 0, 3: 1, 6: 3}, (1, 1), shape=shape).check(device)


def test_slots_of_any_stride(device):
    """As one layer's part of a pool `[slots, layers, ...]`."""
    case = Case([2], [(0, 1)])
    pools = torch.full((2, 3, H, P, N), 7.0, device=device)
    pools[:, 1] = case.pool
    entering, pool = case.run(device, pools[:, 1])
    expected_entering, expected = case.run(device)
    assert same_bits(entering, expected_entering)
    assert same_bits(pool, expected)
    assert pools[:, [0, 2]].eq(7.0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrow_pool_is_widened_and_rounded(device, dtype):
    case = Case([3], [(0, 1)], {1: 2}, dtype=dtype)
    entering, pool = case.run(device)
    expected_entering, expected = case.expected()
    assert relative_error(entering, expected_entering) <= 1e-6
    # The interpreter cuts float32 to bfloat16, where a GPU rounds.
    assert relative_error(pool[1:], expected[1:]) <= torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_without_chunks_moves_bits(device, dtype):
    case = Case([0, 0], [(0, 1), (-1, 2)], dtype=dtype)
    words = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    case.pool[0].view(words).copy_(torch.randint(-(2**15), 2**15, case.pool[0].shape, dtype=words))
    case.pool[0].view(words)[0, 0, 0] = -5  # NaN, of a payload that arithmetic would not keep
    _, pool = case.run(device)
    assert same_bits(pool[1], case.pool[0])
    assert pool[2].eq(0).all()


def test_slots_beyond_2_31_elements(device):
    """Neither the index nor the stride needs 64 bits. What is not touched takes no memory of a CPU."""
    case = Case([2, 1, 0], [(0, 4), (5, 1), (5, 2)], shape=(1, 2, 16), dtype=torch.bfloat16)
    far = torch.empty_strided((6, 1, 2, 16), (2**29 + 16, 32, 16, 1), dtype=torch.bfloat16, device=device)
    far.copy_(case.pool)
    state_passing(
        case.updates.to(device, copy=True), case.log_decays.to(device), far, case.sources.to(device),
        case.destinations.to(device), case.starts.to(device), case.chunk_destinations.to(device),
    )  # fmt: skip
    _, expected = case.run(device)
    assert same_bits(far.cpu().contiguous(), expected)


def test_the_pool_is_accessed_once_a_source_and_a_destination():
    case = Case(
        [3, 1, 0, 0, 0, 2, 2],
        [(0, 1), (2, 2), (3, 4), (5, 5), (6, -1), (-1, -1), (-1, 7)],
        {0: 8, 2: 9, 5: 10},
        (2, 3),
    )
    pool = case.pool.clone()
    with traffic_of(pool) as traffic:
        case.run("cpu", pool)
    state = pool[0].numel() * pool.element_size()
    assert traffic.loaded == 3 * state  # of rows 0, 1 and 2
    assert traffic.stored == (1 + 1 + 1 + 1 + 3) * state  # of rows 0, 1, 2 and 6, and three checkpoints


def test_states_in_pieces_are_refused():
    case = Case([1], [(0, 1)])
    with pytest.raises(ValueError, match="contiguous slots of any stride"):
        case.run("cpu", case.pool.mT)
