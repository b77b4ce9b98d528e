"""Steps for tests of attention: rows in blocks scattered over a cache, and what they attend to in float64."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from mambaslots.inference.kernels.step_rows import AttentionRows
from torch import Tensor


class Padding(NamedTuple):
    """Of every kind that a captured step has."""

    decodes: int = 0
    prefills: int = 0
    tokens: int = 0
    columns: int = 0


NO_PADDING = Padding()


class AttentionBatch:
    """Decode rows and prefill rows of (tokens before, real tokens).

    Blocks of the cache that no row holds are full of NaN, and padding tokens have NaN for queries.
    """

    def __init__(
        self,
        decodes: Sequence[tuple[int, int]] = (),
        prefills: Sequence[tuple[int, int]] = (),
        *,
        block: int = 4,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
        decode_tokens: int = 1,
        padding: Padding = NO_PADDING,
        sizes: tuple[int, int, int] = (4, 2, 8),
        unwritten: float = math.nan,
        query_dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            sizes: heads, KV heads and head dim.
            unwritten: what the rows' last blocks hold behind the rows' tokens.
            query_dtype: of the queries; None is `dtype`.
        """
        heads, kv_heads, head_dim = sizes
        self._rows = [*decodes, *[(0, 0)] * padding.decodes, *prefills, *[(0, 0)] * padding.prefills]
        generator = torch.Generator().manual_seed(sum(before + new for before, new in self._rows))

        def randn(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype)

        counts = [-(-(before + new) // block) for before, new in self._rows]
        free = torch.randperm(sum(counts) + 1, generator=generator).tolist()
        self.cache = torch.full((2, len(free), block, kv_heads, head_dim), math.nan, dtype=dtype)
        table = torch.zeros(len(self._rows), max(counts) + padding.columns, dtype=torch.int32)
        self._kv: list[Tensor] = []
        for row, (before, new) in enumerate(self._rows):
            blocks = torch.tensor([free.pop() for _ in range(counts[row])], dtype=torch.int64)
            table[row, : counts[row]] = blocks
            self.cache[:, blocks] = unwritten
            kv = randn(2, before + new, kv_heads, head_dim, dtype=dtype)
            at = torch.arange(before + new)
            self.cache[:, blocks[at // block], at % block] = kv
            self._kv.append(kv)

        num_decodes = len(decodes) + padding.decodes
        prefill_lengths = [new for _, new in self._rows[num_decodes:]]
        starts = [row * decode_tokens for row in range(num_decodes)]
        for length in [0, *prefill_lengths]:
            starts.append((starts[-1] if len(starts) > num_decodes else num_decodes * decode_tokens) + length)
        tokens = starts[-1] + padding.tokens
        self.real = [starts[row] + i for row, (_, new) in enumerate(self._rows) for i in range(new)]
        positions = torch.zeros(tokens, dtype=torch.int64)
        positions[self.real] = torch.tensor(
            [before + i for before, new in self._rows for i in range(new)], dtype=torch.int64
        )
        self.query = torch.full((tokens, heads, head_dim), math.nan, dtype=query_dtype or dtype)
        self.query[self.real] = randn(len(self.real), heads, head_dim, dtype=dtype).to(query_dtype or dtype)
        self.cache, self.query = self.cache.to(device), self.query.to(device)
        self._kv = [kv.to(device) for kv in self._kv]
        self._queries = self.query[self.real].double().split([new for _, new in self._rows])
        self.rows = AttentionRows(
            block_table=table.to(device),
            kv_lengths=torch.tensor([sum(row) for row in self._rows], dtype=torch.int32, device=device),
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            query_lengths=torch.tensor([new for _, new in self._rows], dtype=torch.int32, device=device),
            positions=positions.to(device),
            num_decodes=num_decodes,
            decode_tokens=decode_tokens,
            max_query_tokens=max(prefill_lengths, default=0) + padding.tokens,
        )

    def real_tokens(self, out: Tensor) -> Tensor:
        """What `out`, of the shape and dtype of the queries, has for real tokens, in float64."""
        assert (out.shape, out.dtype, out.device) == (self.query.shape, self.query.dtype, self.query.device)
        return out[self.real].double()

    def exact(self, scale: float | None = None) -> Tensor:
        """The definition in float64, row by row, for the real tokens."""
        return self._attended(scale, lambda values: values)

    def rounding_error(self, unit: float, scale: float | None = None) -> Tensor:
        """The largest error of each number of `exact` where weights and outputs are rounded by `unit`."""
        return unit * (self._attended(scale, Tensor.abs) + self.exact(scale).abs())

    def _attended(self, scale: float | None, part: Callable[[Tensor], Tensor]) -> Tensor:
        outputs = []
        for (before, new), query, kv in zip(self._rows, self._queries, self._kv, strict=True):
            keys, values = kv.double().repeat_interleave(query.shape[1] // kv.shape[2], dim=2).transpose(1, 2)
            scores = query.transpose(0, 1) @ keys.mT * (query.shape[2] ** -0.5 if scale is None else scale)
            at = torch.arange(before + new, device=query.device)
            seen = at <= at[before:, None]
            weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
            outputs.append((weights @ part(values)).transpose(0, 1))
        return torch.cat(outputs)
