"""Attention in segments by FlashAttention-3 on a GPU: bits of rows in all company, and errors."""

import pytest
import torch
from mambaslots.inference.kernels import attention, attention_segments
from mambaslots.inference.kernels.attention_segments import Segments
from mambaslots.inference.kernels.step_rows import AttentionRows
from oracle.attention_batch import AttentionBatch, Padding
from oracle.synchronisation import no_synchronisation
from torch import Tensor

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SIZES = [(32, 8, 128, 256), (16, 4, 256, 256), (8, 2, 64, 64), (32, 8, 128, 16), (32, 2, 128, 256)]
"""Heads, KV heads, head dim, block size."""


@pytest.fixture(autouse=True)
def _flash() -> None:
    reason = attention.flash_rejection(CUDA, torch.bfloat16, 128)
    if reason:
        pytest.skip(reason)


class Sequences:
    """Two sequences in a cache, and steps of any of their tokens."""

    def __init__(self, lengths: tuple[int, int], sizes: tuple[int, int, int, int]) -> None:
        heads, kv_heads, head_dim, self.block = sizes
        generator = torch.Generator("cuda").manual_seed(5)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=CUDA).bfloat16()

        self.columns = -(-max(lengths) // self.block)
        self.cache = randn(2, 2 * self.columns, self.block, kv_heads, head_dim)
        places = torch.randperm(2 * self.columns, generator=generator, device=CUDA)
        self.blocks = places.view(2, self.columns).int()
        self.queries = [randn(length, heads, head_dim) for length in lengths]

    def attend(
        self, decodes=(), prefills=(), *, width: int = 1, padded: int = 0, columns: int = 0
    ) -> list[Tensor]:
        """What the real tokens of rows (sequence, first position, end) get, row by row."""
        real = [*decodes, *prefills]
        laid = [*decodes, *[(0, 0, 0)] * padded, *prefills]
        num_decodes = len(decodes) + padded
        table = torch.zeros(len(laid), columns or self.columns, dtype=torch.int32, device=CUDA)
        queries, positions, starts = [], [], [0]
        for row, (sequence, first, end) in enumerate(laid):
            table[row, : self.columns] = self.blocks[sequence] if end else 0
            token = self.queries[sequence][first:end]
            behind = width - (end - first) if row < num_decodes else 0
            queries += [token, token.new_zeros(behind, *token.shape[1:])]
            positions += [*range(first, end), *[0] * behind]
            starts.append(len(positions))
        counts = [end - first for _, first, end in laid]
        index = {"dtype": torch.int32, "device": CUDA}
        rows = AttentionRows(
            block_table=table,
            kv_lengths=torch.tensor([end for _, _, end in laid], **index),
            query_start_loc=torch.tensor(starts, **index),
            query_lengths=torch.tensor(counts, **index),
            positions=torch.tensor(positions, device=CUDA),
            num_decodes=num_decodes,
            decode_tokens=width,
            max_query_tokens=max(counts[num_decodes:], default=0),
            batch_invariant=True,
        )
        out = attention.paged_attention(torch.cat(queries), self.cache, rows)
        begins = [start for row, start in enumerate(starts[:-1]) if not len(decodes) <= row < num_decodes]
        return [out[start : start + end - first] for start, (_, first, end) in zip(begins, real, strict=True)]


@pytest.mark.parametrize(
    ("segment", "length", "sizes"),
    [
        *((256, 1000, sizes) for sizes in SIZES),
        *((512, 1700, sizes) for sizes in SIZES),
        *((None, length, SIZES[0]) for length in (9000, 40_000)),
        (None, 5000, SIZES[1]),
    ],
)
def test_bits_of_decodes_drafts_and_prefills_alone_and_together(monkeypatch, segment, length, sizes):
    """`segment` None: the segments in use."""
    if segment:
        monkeypatch.setattr(attention_segments, "SEGMENTS", Segments(segment, 0, segment))
    short, stop, segment = attention_segments.SEGMENTS
    cuts = [*range(short, stop, short), *range(stop or segment, length, segment)]
    model = Sequences((length, segment + 70), sizes)
    whole = torch.cat([
        part
        for first in range(0, length, 8192)
        for part in model.attend(prefills=[(0, first, min(length, first + 8192))])
    ])  # fmt: skip
    ends = sorted({*cuts, length, 1, short + 1, short - 1, stop + 1, segment + 1, segment - 1, length - 37})

    def check(what: str, rows, found: list[Tensor]) -> None:
        for (sequence, first, end), part in zip(rows, found, strict=True):
            if sequence == 0:
                assert torch.equal(part.view(torch.int16), whole[first:end].view(torch.int16)), (what, end)

    starts = (1, segment - 1, segment, segment + 1, 2 * segment, length - 130, length - 1)
    other = (1, 0, segment + 70)
    for start in starts:
        row = (0, start, min(length, start + 3000))
        check("suffix", [row], model.attend(prefills=[row]))
        wide = 2 * model.columns + 3
        check("wide", [row, other], model.attend(prefills=[row, other], columns=wide))
    for width in (1, 2, 4):
        rows = [(0, max(0, end - width), max(0, end - width) + min(width, end)) for end in ends]
        for row in rows:
            check(f"{width} alone", [row], model.attend([row], width=width))
        check(f"{width} together", rows, model.attend(rows, width=width, padded=3))
        all_rows = [*rows, other, (0, length - 300, length)]
        check(f"{width} mixed", all_rows, model.attend(rows, all_rows[-2:], width=width, padded=2))
    monkeypatch.setattr(attention_segments, "_SCRATCH_BYTES", 1)
    row = (0, length - 600, length)
    check("by heads", [row], model.attend(prefills=[row]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("segment", [256, 1024])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("sizes", [(8, 2, 64), (32, 8, 128), (16, 2, 256), (8, 2, 80)])
def test_errors_are_those_of_two_roundings(monkeypatch, dtype, segment, width, sizes):
    monkeypatch.setattr(attention_segments, "SEGMENTS", Segments(segment, 1024, 1024))
    batch = AttentionBatch(
        [(0, 1), (3000, width), (255, width), (256, 1), (1023, width)], [(0, 700), (2512, 77), (256, 900)],
        decode_tokens=width, padding=Padding(2, 1, 5, 3), sizes=sizes, block=64, dtype=dtype, device="cuda",
        unwritten=0.0,
    )  # fmt: skip
    for scale in (None, 0.03):
        out = attention.paged_attention(
            batch.query, batch.cache, batch.rows._replace(batch_invariant=True), scale=scale
        )
        error = (batch.real_tokens(out) - batch.exact(scale)).abs()
        unit = torch.finfo(dtype).eps / 2
        assert (error <= 2 * batch.rounding_error(unit, scale) + 1e-5).all(), float(error.max())


@pytest.mark.parametrize("width", [1, 2])
def test_bits_of_a_graph_are_those_of_a_step(monkeypatch, width):
    monkeypatch.setattr(attention_segments, "SEGMENTS", Segments(256, 512, 512))
    batch = AttentionBatch(
        [(900, width), (3, 1), (255, width)], [(500, 300), (0, 77)], decode_tokens=width,
        padding=Padding(1, 1, 5, 3), sizes=(32, 8, 128), block=64, dtype=torch.bfloat16, device="cuda",
        unwritten=0.0,
    )  # fmt: skip
    rows = batch.rows._replace(batch_invariant=True)
    tensors = {name: value for name, value in rows._asdict().items() if isinstance(value, Tensor)}
    static = rows._replace(**{name: torch.zeros_like(value) for name, value in tensors.items()})
    expected = attention.paged_attention(batch.query, batch.cache, rows)
    attention.paged_attention(batch.query, batch.cache, static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.paged_attention(batch.query, batch.cache, static)
    with no_synchronisation():
        for name, value in tensors.items():
            getattr(static, name).copy_(value)
        graph.replay()
    assert torch.equal(out[batch.real].view(torch.int16), expected[batch.real].view(torch.int16))
