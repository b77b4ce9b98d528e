"""Attention in segments of fixed positions: against its definition, and bits of rows in all company.

`PlainAttention` stands in for FlashAttention-3; `test_attention_segments_gpu.py` runs FlashAttention-3.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mambaslots.inference.kernels import attention_segments
from mambaslots.inference.kernels.attention_segments import (
    Readers,
    SegmentRows,
    Segments,
    combine_segments,
    segment_rows,
)
from mambaslots.inference.kernels.step_rows import AttentionRows
from oracle.attention_batch import AttentionBatch, Padding
from oracle.budget import profile
from oracle.segment_attention import PlainAttention
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK = 4
few = settings(derandomize=True, max_examples=min(25, profile().examples // 2))


EIGHT, GROWING = Segments(8, 0, 8), Segments(4, 24, 8)


@pytest.fixture
def segment_of_8(monkeypatch) -> None:
    monkeypatch.setattr(attention_segments, "SEGMENTS", EIGHT)


@pytest.fixture(scope="module", params=["even", "growing"])
def cut(request) -> Iterator[Segments]:
    """Where sequences are cut."""
    with pytest.MonkeyPatch.context() as patched:
        segments = EIGHT if request.param == "even" else GROWING
        patched.setattr(attention_segments, "SEGMENTS", segments)
        yield segments


def attend(batch: AttentionBatch, scale: float | None = None) -> Tensor:
    return attention_segments.segmented_attention(
        batch.query, batch.cache, batch.rows, scale, PlainAttention()
    )


@st.composite
def steps(draw: st.DrawFn) -> dict:
    """Arguments of `AttentionBatch`: decodes with or without drafts, prefills, padding of every kind."""
    width = draw(st.sampled_from([1, 1, 3]))
    contexts = st.integers(0, 26)
    decodes = draw(st.lists(st.tuples(contexts, st.integers(1, width)), max_size=3))
    prefills = draw(st.lists(st.tuples(contexts, st.integers(1, 20)), min_size=not decodes, max_size=2))
    padding = Padding(
        draw(st.integers(0, 2)) if decodes else 0,
        draw(st.integers(0, 1)) if prefills else 0,
        draw(st.integers(0, 3)) if prefills else 0,
        draw(st.integers(3, 6)),
    )
    return {"decodes": decodes, "prefills": prefills, "decode_tokens": width, "padding": padding}


@pytest.mark.in_turn("cut")
@pytest.mark.usefixtures("cut")
class TestDefinition:
    @few
    @given(step=steps(), block=st.sampled_from([1, 2, 4, 8]))
    def test_every_mix_of_rows_in_whatever_padding(self, step, block):
        step["padding"] = step["padding"]._replace(columns=16)
        batch = AttentionBatch(**step, block=block, dtype=torch.float32)
        torch.testing.assert_close(batch.real_tokens(attend(batch)), batch.exact(), rtol=0, atol=2e-6)

    @pytest.mark.sampled
    @pytest.mark.parametrize("sizes", [(4, 4, 16), (6, 2, 10), (3, 1, 40)])
    @pytest.mark.parametrize("scale", [None, 3.0])
    @pytest.mark.parametrize("width", [1, 2])
    def test_heads_of_any_size_and_any_scale(self, sizes, scale, width):
        batch = AttentionBatch(
            [(25, width)], [(7, 12)], decode_tokens=width, sizes=sizes, dtype=torch.float32
        )
        torch.testing.assert_close(
            batch.real_tokens(attend(batch, scale)), batch.exact(scale), rtol=0, atol=2e-6
        )

    @pytest.mark.sampled(width=(2,))
    @pytest.mark.parametrize("width", [1, 2])
    def test_results_of_segments_in_16_bits_add_one_rounding(self, width):
        batch = AttentionBatch(
            [(50, width), (17, 1)], [(7, 60)], decode_tokens=width, sizes=(8, 2, 32), dtype=torch.float16
        )
        error = (batch.real_tokens(attend(batch)) - batch.exact()).abs()
        assert (error <= 2 * batch.rounding_error(2.0**-11) + 1e-6).all()
        assert error.max() > 0

    def test_the_result_has_the_dtype_of_the_query(self):
        batch = AttentionBatch([(20, 1)], [(3, 9)], dtype=torch.float16, query_dtype=torch.float32)
        torch.testing.assert_close(batch.real_tokens(attend(batch)), batch.exact(), rtol=2**-9, atol=2**-9)


class Sequences:
    """Two sequences, and steps of any of their tokens."""

    def __init__(self, lengths: tuple[int, int]) -> None:
        generator = torch.Generator().manual_seed(3)
        self.columns = -(-max(lengths) // BLOCK)
        self.cache = torch.randn(2, 2 * self.columns, BLOCK, 2, 8, generator=generator)
        self.blocks = torch.randperm(2 * self.columns, generator=generator).view(2, -1).int()
        self.queries = [torch.randn(length, 4, 8, generator=generator) for length in lengths]

    def attend(self, decodes=(), prefills=(), *, width: int = 1, columns: int = 0) -> list[Tensor]:
        """What the tokens of rows (sequence, first position, end) get; a decode row may be padding."""
        laid = [*decodes, *prefills]
        table = torch.full((len(laid), self.columns + columns), 0, dtype=torch.int32)
        queries, positions, starts = [], [], [0]
        for row, (sequence, first, end) in enumerate(laid):
            table[row, : self.columns] = self.blocks[sequence]
            behind = width - (end - first) if row < len(decodes) else 0
            queries += [self.queries[sequence][first:end], torch.full((behind, 4, 8), math.nan)]
            positions += [*range(first, end), *[0] * behind]
            starts.append(len(positions))
        counts = [end - first for _, first, end in laid]
        rows = AttentionRows(
            block_table=table,
            kv_lengths=torch.tensor([end for _, _, end in laid], dtype=torch.int32),
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            query_lengths=torch.tensor(counts, dtype=torch.int32),
            positions=torch.tensor(positions),
            num_decodes=len(decodes),
            decode_tokens=width,
            max_query_tokens=max(counts[len(decodes) :], default=0),
        )
        out = attention_segments.segmented_attention(
            torch.cat(queries), self.cache, rows, None, PlainAttention()
        )
        return [out[start : start + count] for start, count in zip(starts, counts, strict=False)]


@pytest.fixture(scope="module")
def sequences() -> Sequences:
    return Sequences((43, 21))


@pytest.fixture(scope="module")
def whole(sequences, cut) -> Tensor:
    return sequences.attend(prefills=[(0, 0, 43)])[0]


@pytest.mark.in_turn("cut")
@pytest.mark.usefixtures("cut")
class TestBits:
    """Float32 on a CPU: every row against one prefill of the whole sequence."""

    @pytest.mark.sampled(start=(8,))
    @pytest.mark.parametrize("start", [1, 7, 8, 9, 24, 42])
    def test_bits_of_a_suffix_and_of_a_prefix(self, sequences, whole, start):
        other = (1, 3, 21)
        alone = sequences.attend(prefills=[(0, start, 43)])[0]
        beside = sequences.attend(prefills=[other, (0, 0, start), (0, start, 43)])
        assert torch.equal(alone, whole[start:])
        assert torch.equal(torch.cat(beside[1:]), whole)

    @pytest.mark.sampled(width=(2,))
    @pytest.mark.parametrize("width", [1, 2, 4])
    def test_bits_of_decodes_alone_and_beside_others(self, sequences, whole, width):
        ends = [1, 2, 8, 9, 11, 16, 25, 43]
        rows = [(0, max(0, end - width), end) for end in ends]
        for first in (4, 6):
            _, start, end = rows[first]
            assert torch.equal(sequences.attend([rows[first]], width=width)[0], whole[start:end])
        beside = sequences.attend([*rows, (0, 0, 0)], [(1, 2, 21), (0, 20, 43)], width=width)
        for (_, start, end), found in zip(rows, beside, strict=False):
            assert torch.equal(found, whole[start:end])
        assert torch.equal(beside[-1], whole[20:])

    @pytest.mark.sampled(width=1)
    @pytest.mark.parametrize("width", [1, 2])
    def test_bits_do_not_depend_on_the_width_of_the_block_table(self, sequences, whole, width):
        rows = [(0, 43 - width, 43), (0, 8 - width, 8), (0, 0, 1)]
        for columns in (1, 40):
            found = sequences.attend(rows, [(0, 5, 31)], width=width, columns=columns)
            for (_, start, end), part in zip([*rows, (0, 5, 31)], found, strict=True):
                assert torch.equal(part, whole[start:end])

    def test_bits_do_not_depend_on_how_many_heads_are_computed_together(self, sequences, whole, monkeypatch):
        monkeypatch.setattr(attention_segments, "_SCRATCH_BYTES", 1)
        assert torch.equal(sequences.attend(prefills=[(0, 5, 43)])[0], whole[5:])

    def test_bits_of_queries_in_the_first_segment_are_those_of_one_call(self, sequences, whole, cut):
        first = cut.short
        count = torch.tensor([first], dtype=torch.int32)
        starts = torch.tensor([0, first], dtype=torch.int32)
        pairs = SegmentRows(sequences.blocks[:1], count, starts, count, first)
        queries = sequences.queries[0][:first]
        plain = PlainAttention()(queries, sequences.cache, pairs, None, is_causal=True)[0]
        assert torch.equal(plain, whole[:first])


class TestCalls:
    @pytest.mark.parametrize(
        ("segments", "cases"),
        [
            (Segments(16, 0, 16), ((4, 4, 1), (5, 4, 2), (9, 4, 3), (1, 16, 1), (2, 16, 2), (50, 6, 1))),
            (Segments(8, 32, 16), ((2, 4, 1), (3, 4, 2), (8, 4, 4), (9, 4, 5), (13, 4, 6), (50, 6, 1))),
            # Blocks that do not divide the short segments, but the long ones.
            (Segments(8, 32, 16), ((1, 16, 1), (2, 16, 2), (3, 16, 3))),
        ],
    )
    def test_one_segment_where_no_sequence_is_longer_or_the_block_size_does_not_divide(
        self, monkeypatch, segments, cases
    ):
        monkeypatch.setattr(attention_segments, "SEGMENTS", segments)
        for columns, block, expected in cases:
            rows = AttentionBatch([(0, 1)]).rows._replace(
                block_table=torch.zeros(1, columns, dtype=torch.int32)
            )
            assert attention_segments.num_segments(rows, block) == expected

    def test_decodes_without_drafts_are_one_call(self, segment_of_8):
        batch = AttentionBatch([(30, 1), (5, 1), (8, 1)], dtype=torch.float32, padding=Padding(decodes=2))
        plain = PlainAttention()
        attention_segments.segmented_attention(batch.query, batch.cache, batch.rows, None, plain)
        assert plain.calls == [(4 + 1 + 2, True)]

    def test_prefills_and_drafts_read_a_segment_once(self, segment_of_8):
        batch = AttentionBatch(
            [(15, 2), (5, 1)], [(10, 9), (0, 7)], decode_tokens=2, dtype=torch.float32,
            padding=Padding(1, 1, 2),
        )  # fmt: skip
        plain = PlainAttention()
        attention_segments.segmented_attention(batch.query, batch.cache, batch.rows, None, plain)
        # Own segments of drafts; segments before; own segments of prefills; segments 0 and 1 before.
        assert plain.calls == [(2 + 1, True), (2, False), (2 + 1, True), (1, False), (1, False)]

    @pytest.mark.parametrize("width", [1, 2])
    def test_no_operation_reads_a_value_back(self, segment_of_8, width):
        """Where shapes depend on values a graph cannot be captured."""

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                name = func.name()
                assert not any(word in name for word in ("_local_scalar", "nonzero", "item", "masked_select"))
                return func(*args, **(kwargs or {}))

        def attend(query, kv_cache, pairs, scale, *, is_causal, out=None):
            found = torch.zeros_like(query) if out is None else out.zero_()
            return found, query.new_zeros(query.shape[1::-1][:2])

        batch = AttentionBatch([(30, 1)], [(17, 9)], decode_tokens=width, dtype=torch.float32)
        with pytest.MonkeyPatch.context() as patched, Watch():
            for name in ("segment_rows", "combine_segments"):  # Triton's interpreter reads values
                real = getattr(attention_segments, name)
                patched.setattr(attention_segments, name, outside(real))
            attention_segments.segmented_attention(batch.query, batch.cache, batch.rows, None, attend)


def outside(function):
    """The function, unseen by dispatch modes."""

    def call(*args, **kwargs):
        with torch.utils._python_dispatch._disable_current_modes():
            return function(*args, **kwargs)

    return call


@few
@given(
    step=steps(),
    kind=st.sampled_from([
        (Readers.ALL, True), (Readers.WITHIN, False), (Readers.AFTER, True),
        (Readers.AFTER, False),
    ]),
    segments=st.sampled_from([EIGHT, Segments(12, 0, 12), Segments(4, 8, 8), Segments(8, 24, 12)]),
)  # fmt: skip
def test_pairs_of_rows_and_segments(step, kind, segments):
    """Which queries read which KV, written down token by token."""
    readers, has_copies = kind
    batch = AttentionBatch(**step, block=BLOCK)
    short, end, long = segments
    cuts = [*range(0, end, short), *range(end, 200, long)]
    rows = batch.rows
    for first_row, num_rows in ((0, rows.num_decodes), (rows.num_decodes, rows.num_rows - rows.num_decodes)):
        if not num_rows:
            continue
        first_token = int(rows.query_start_loc[first_row])
        is_decodes = first_row < rows.num_decodes
        tokens = rows.num_decode_tokens if is_decodes else len(batch.query) - first_token
        num_segments = sum(begin < rows.block_table.shape[1] * BLOCK for begin in cuts)
        query = batch.query[first_token : first_token + tokens]
        copies = query.new_full((num_segments, *query.shape), math.nan) if has_copies else None
        pairs = segment_rows(
            rows, segments, BLOCK, query, first_row, num_rows, readers, num_segments, 99, copies
        )
        separate = readers == Readers.AFTER and not has_copies
        found = []
        for part in range(num_segments) if separate else [None]:
            table, lengths, starts, counts = (x if part is None else x[part] for x in pairs[:4])
            assert starts[-1] == (num_segments * tokens if has_copies else tokens)
            assert (starts.diff() >= counts).all()
            for blocks, length, start, count in zip(
                table.tolist(), lengths.tolist(), starts.tolist(), counts.tolist(), strict=False
            ):
                assert count or not (length or any(blocks))
                found += [
                    (start + i, tuple(blocks[: -(-length // BLOCK)]), length, part) for i in range(count)
                ]
        assert sorted(found, key=str) == sorted(
            expected_pairs(rows, first_row, num_rows, readers, cuts, has_copies, tokens, separate), key=str
        )
        if copies is not None:
            for place, *_ in found:
                assert torch.equal(copies.flatten(0, 1)[place], query[place % tokens])


def expected_pairs(rows, first_row, num_rows, readers, cuts, copies, tokens, separate):
    """(place, blocks, KV of the pair's last query, call) of each query and segment."""
    for row in range(first_row, first_row + num_rows):
        length, count = int(rows.kv_lengths[row]), int(rows.query_lengths[row])
        place = int(rows.query_start_loc[row] - rows.query_start_loc[first_row])
        for query in range(count):
            position = length - count + query
            for index, (begin, end) in enumerate(pairwise(cuts)):
                own = begin <= position < end
                if not (own if readers == Readers.WITHIN else begin <= position):
                    continue
                if readers == Readers.AFTER and own:
                    continue
                seen = min(length, end) - begin
                blocks = rows.block_table[row, begin // BLOCK :][: -(-seen // BLOCK)]
                yield (
                    place + query + index * tokens * copies, tuple(blocks.tolist()), seen,
                    index if separate else None,
                )  # fmt: skip


class TestCombination:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("sizes", [(5, 3, 8), (2, 17, 80)])
    def test_weights_are_shares_of_the_sums_of_exponentials(self, dtype, sizes):
        tokens, heads, _ = sizes
        generator = torch.Generator().manual_seed(1)
        parts = torch.randn(4, *sizes, generator=generator).to(dtype)
        log_sums = 30 * torch.randn(4, heads, tokens, generator=generator)
        positions = torch.tensor([0, 29, 8, 20, 31])[:tokens]
        own, own_sums = parts.roll(1, 1).contiguous(), log_sums.roll(1, 0).contiguous()
        out = torch.empty(sizes, dtype=dtype)
        combine_segments(parts, log_sums, own, own_sums, positions, EIGHT, out)
        for token, position in enumerate(positions.tolist()):
            last = position // 8
            values = torch.cat([parts[:last, token], own[last : last + 1, token]]).double()
            sums = torch.cat([log_sums[:last, :, token], own_sums[last : last + 1, :, token]]).double()
            expected = (sums.softmax(0)[..., None] * values).sum(0)
            unit = 1e-6 if dtype == torch.float32 else 2.0**-10
            torch.testing.assert_close(out[token].double(), expected, rtol=unit, atol=1e-6)

    def test_bits_of_a_query_with_one_segment_are_its_own(self):
        own = torch.tensor([-0.0, 0.0, 1.1, -65504.0, 6e-8, math.inf, -1.0, 3.0], dtype=torch.float16)
        own = own.expand(2, 3, 1, 8).contiguous()
        unread = torch.full_like(own, math.nan)
        sums = torch.full((2, 1, 3), math.nan)
        out = torch.empty(3, 1, 8, dtype=torch.float16)
        combine_segments(unread, sums, own, sums, torch.tensor([0, 5, 7]), EIGHT, out)
        assert torch.equal(out.view(torch.int16), own[0].view(torch.int16))

    def test_what_lies_at_other_segments_reaches_nothing(self):
        parts, sums = torch.full((5, 1, 2, 8), math.nan), torch.full((5, 2, 1), math.nan)
        parts[:2], sums[:2] = 2.0, torch.tensor([[[3.0], [-1e30]], [[1.0], [0.0]]])
        own, own_sums = torch.full_like(parts, math.nan), torch.full_like(sums, math.nan)
        own[2], own_sums[2] = 2.0, 700.0
        out = combine_segments(parts, sums, own, own_sums, torch.tensor([16]), EIGHT, torch.empty(1, 2, 8))
        assert torch.equal(out, torch.full_like(out, 2.0))
