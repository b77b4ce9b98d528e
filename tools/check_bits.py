"""Batch invariance at length, on a GPU: attention in many batches.

    python tools/check_bits.py                          # attention of usual sizes

Run it on a new kind of GPU, and with a new version of torch or FlashAttention. An engine with
`batch_invariant` checks its own products and whole forwards when it starts.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from mambaslots.inference.engines.invariance.products import bits, first_case
from mambaslots.inference.kernels.attention import paged_attention
from mambaslots.inference.kernels.step_rows import AttentionRows
from torch import Tensor

BEYOND = 1536
"""Tokens of the longest sequence behind its short segments."""
_OTHER = 300
_SEED = 17


class AttentionSizes(NamedTuple):
    """What distinguishes two attentions of a model."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scale: float | None

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"attention of {self.heads} heads and {self.kv_heads} KV heads of {self.head_dim} numbers in "
            f"{dtype}, blocks of {self.block_size} tokens"
        )


def attention_difference(sizes: AttentionSizes, device: torch.device) -> str | None:
    """Where a row has other bits than in one prefill of its whole sequence; None where nowhere.

    Compared are suffixes of the prefill, decodes alone, of several tokens and in batches, beside a prefill of
    another sequence, and beside padding, in the short segments of `attention_segments` and behind them.
    Synchronises. Rows of the KV cache that no sequence has are zeros.

    Returns: the case, in words.
    """
    from mambaslots.inference.kernels.attention_segments import SEGMENTS

    return first_case(_AttentionCheck(sizes, device, SEGMENTS.end).cases())


class _AttentionCheck:
    def __init__(self, sizes: AttentionSizes, device: torch.device, segment: int) -> None:
        longest = segment + BEYOND
        self._sizes, self._device, self._segment, self._longest = sizes, device, segment, longest
        self._columns = -(-longest // sizes.block_size)
        generator = torch.Generator(device).manual_seed(_SEED)
        shape = 2, 2 * self._columns, sizes.block_size, sizes.kv_heads, sizes.head_dim
        self._kv = torch.randn(shape, generator=generator, device=device).to(sizes.dtype)
        flat = self._kv.view(2, 2, -1, sizes.kv_heads, sizes.head_dim)
        flat[:, 0, longest:] = 0  # as `write_kv` leaves them
        flat[:, 1, _OTHER:] = 0
        query = longest + _OTHER, sizes.heads, sizes.head_dim
        self._query = torch.randn(query, generator=generator, device=device).to(sizes.dtype)
        self._whole = self._attend([(0, 0, longest)])

    def cases(self) -> Iterator[tuple[str, Tensor]]:
        longest, size = self._longest, self._sizes.block_size
        starts = {1, 33, size, longest // 2, self._segment, longest - 130, longest - 1}
        for start in sorted(start for start in starts if 0 < start < longest):
            length = longest - start
            yield f"the last {length} of {longest} rows", self._differs([(0, start, longest)])
            yield f"its first {start} rows", self._differs([(0, 0, start)])
            yield f"row {start} alone", self._differs([(0, start, start + 1)])
            beside = [(0, start, longest), (1, 0, _OTHER)]
            yield f"the last {length} of {longest} rows beside others", self._differs(beside)
        ends = [min(longest, end) for end in (2, 40, size + 1, longest // 2 + 3, self._segment + 1, longest)]
        for width in (1, 2, 4):
            decodes = [(0, max(0, end - width), max(0, end - width) + width) for end in ends]
            yield f"decodes of {width} tokens", self._differs(decodes, width)
            yield f"padded decodes of {width} tokens", self._differs(decodes, width, 32 // width)
            beside = [*decodes, (1, 0, _OTHER)]
            yield (
                f"decodes of {width} tokens beside a prefill",
                self._differs(beside, width, len(ends), len(ends)),
            )

    def _differs(
        self,
        rows: Sequence[tuple[int, int, int]],
        width: int = 0,
        padded: int = 0,
        decodes: int | None = None,
    ) -> Tensor:
        """Whether the rows of sequence 0 have other bits than in the whole prefill."""
        real = 0 if not width else len(rows) if decodes is None else decodes
        out = self._attend(rows, width, padded, real)
        expected = torch.cat([self._whole[start:stop] for sequence, start, stop in rows if sequence == 0])
        places, at = [], 0
        for index, (sequence, start, stop) in enumerate(rows):
            if index == real:
                at = max(padded, real) * width
            if sequence == 0:
                places.append(out[at : at + stop - start])
            at += stop - start
        return bits(torch.cat(places)).ne(bits(expected)).any()

    def _attend(
        self, rows: Sequence[tuple[int, int, int]], width: int = 0, padded: int = 0, decodes: int = 0
    ) -> Tensor:
        """The rows' attention, packed; behind padding of decode rows where there is some."""
        num_decodes = max(padded, decodes)
        laid = [*rows[:decodes], *[(0, 0, 0)] * (num_decodes - decodes), *rows[decodes:]]
        tables, lengths, counts, starts = [], [], [], [0]
        positions: list[int] = []
        query: list[int] = []
        for sequence, start, stop in laid:
            is_padding = start == stop
            tables.append([0 if is_padding else sequence * self._columns + c for c in range(self._columns)])
            lengths.append(stop)
            counts.append(stop - start)
            tokens = width if is_padding else stop - start
            positions += [0] * tokens if is_padding else range(start, stop)
            query += [(sequence and self._longest) + position for position in range(start, start + tokens)]
            starts.append(starts[-1] + tokens)

        def tensor(values: object, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        step = AttentionRows(
            block_table=tensor(tables, torch.int32),
            kv_lengths=tensor(lengths, torch.int32),
            query_start_loc=tensor(starts, torch.int32),
            query_lengths=tensor(counts, torch.int32),
            positions=tensor(positions, torch.int64),
            num_decodes=num_decodes,
            decode_tokens=width or 1,
            max_query_tokens=max(counts[num_decodes:], default=0),
            batch_invariant=True,
        )
        return paged_attention(
            self._query[tensor(query, torch.int64)], self._kv, step, scale=self._sizes.scale
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing is compared; run it where one is")
        return 0
    device, differ = torch.device("cuda"), 0
    shapes = ((32, 8, 128, 256), (16, 2, 256, 64), (32, 2, 128, 16))
    for dtype, shape in itertools.product((torch.bfloat16, torch.float16), shapes):
        sizes = AttentionSizes(*shape, dtype, None)
        case = attention_difference(sizes, device)
        differ += case is not None
        print(f"{sizes}: {case or 'the same bits in all cases'}")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
