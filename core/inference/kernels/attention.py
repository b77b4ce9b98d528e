"""Attention over the paged KV cache on a GPU, by the first backend that accepts the cache.

1. FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608), from the package tokenspeed-fa3.
2. torch's variable-length attention, in versions of torch that accept a block table.
3. torch operations whose shapes depend on no value, for every cache and device. Queries are cut into tiles,
   and the cache into segments with a running softmax (Milakov & Gimelshein 2018, arXiv 1805.02867), so that
   scratch memory stays bounded. Sums and softmax are in float32 or wider; products of 16-bit queries with a
   cache of their dtype are in that dtype on a GPU.

The reference is `reference.paged_attention`.
"""

import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import varlen

from .reference.attention import AttentionRows, score_scale
from .reference.chunks import compute_dtype

if TYPE_CHECKING:
    from .attention_segments import SegmentRows

PACKAGE, MODULE = "tokenspeed-fa3", "flash_attn_interface"
MAX_HEAD_DIM = 256
"""The package has kernels for heads of 64, 128 and 256 numbers; the next larger one computes others."""
_NARROW = (torch.bfloat16, torch.float16)
SPLITS_VARIABLE = "MAMBASLOTS_ATTENTION_SPLITS"
MAX_SPLITS = 128


@cache
def num_splits() -> int:
    """Into how many parts each sequence's KV is cut for more thread blocks; 0: FlashAttention-3 chooses.

    The environment variable MAMBASLOTS_ATTENTION_SPLITS gives the number. With 1 the bits of a row do not
    depend on the other rows of the step. With 0 they do, and a few long sequences take less time.

    Raises:
        ValueError: the variable is no integer from 0 to 128.
    """
    value = os.environ.get(SPLITS_VARIABLE, "0")
    if not value.isdecimal() or int(value) > MAX_SPLITS:
        raise ValueError(f"{SPLITS_VARIABLE} is {value!r}; accepted: 0 to {MAX_SPLITS}")
    return int(value)


def flash_attention(query: Tensor, kv_cache: Tensor, rows: AttentionRows, scale: float | None) -> Tensor:
    """`attention.paged_attention` of all rows in one call.

    With `one_split`, rows that may be longer than a segment are cut as `attention_segments` says.
    """
    if rows.one_split:
        from . import attention_segments

        if attention_segments.num_segments(rows, kv_cache.shape[2]) > 1:
            return attention_segments.segmented_attention(query, kv_cache, rows, scale, _attend_pairs)
    splits = 1 if rows.one_split else num_splits()
    attended = _attend_pairs(query.to(kv_cache.dtype), kv_cache, rows, scale, is_causal=True, splits=splits)
    return attended[0].to(query.dtype)


def _attend_pairs(
    query: Tensor, kv_cache: Tensor, pairs: "SegmentRows | AttentionRows", scale: float | None, *,
    is_causal: bool, out: Tensor | None = None, splits: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attention_segments.Attend`, and all rows of a step in `splits` parts."""
    found: Tensor
    log_sums: Tensor
    found, log_sums, *_ = torch.ops.flash_attn_3.fwd.default(
        query,
        kv_cache[0],
        kv_cache[1],
        out=out,
        cu_seqlens_q=pairs.query_start_loc,
        seqused_q=pairs.query_lengths,
        seqused_k=pairs.kv_lengths,
        max_seqlen_q=pairs.longest_query,
        page_table=pairs.block_table,
        softmax_scale=scale,
        is_causal=is_causal,
        num_splits=splits,
    )
    return found, log_sums


def flash_name() -> str:
    """The words of `attention.describe`."""
    splits = num_splits()
    return f"FlashAttention-3 ({PACKAGE} {_version()})" + (f", splits {splits}" if splits else "")


def flash_rejection(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str:
    """Why FlashAttention-3 does not take a cache; empty where it does. It takes every block size."""
    if device.type != "cuda":
        return f"FlashAttention-3 needs a GPU, this is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"FlashAttention-3 needs compute capability 9.0, this GPU has {major}.{minor}"
    return _unfit_numbers("FlashAttention-3", dtype, head_dim) or _import_failure()


def _unfit_numbers(name: str, dtype: torch.dtype, head_dim: int) -> str:
    """Why no kernel for 16-bit floats takes KV of this dtype and head dim; empty where one does."""
    if dtype not in _NARROW:
        return f"{name} needs KV in bfloat16 or float16, this is {str(dtype).removeprefix('torch.')}"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"{name} needs heads of at most {MAX_HEAD_DIM} numbers, a multiple of 8, these have {head_dim}"
    return ""


@cache
def _import_failure() -> str:
    """Import the package, which registers its operators; why that fails, or nothing."""
    try:
        importlib.import_module(MODULE)
        torch.ops.flash_attn_3.fwd.default  # noqa: B018
    except ModuleNotFoundError as error:
        if error.name == MODULE:
            return "FlashAttention-3 is not installed: pip install 'mambaslots[gpu]'"
        return f"FlashAttention-3 needs {error.name}, which is not installed"
    except Exception as error:
        said = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        return f"FlashAttention-3 cannot be imported: {said}"
    return ""


def _version() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


PAGE_TOKENS = 256


def varlen_attention(query: Tensor, kv_cache: Tensor, rows: AttentionRows, scale: float | None) -> Tensor:
    """`attention.paged_attention` of all rows in one call.

    torch aligns a row's queries with the row's end, but padding tokens may lie there in decode rows of
    several tokens. Each token of these rows is therefore a row of its own.
    """
    table, lengths, starts = rows.block_table, rows.kv_lengths, rows.query_start_loc
    longest, width = rows.longest_query, rows.decode_tokens
    if rows.num_decodes and width > 1:
        decodes, decoded = rows.num_decodes, rows.num_decode_tokens
        seen = torch.minimum(
            rows.positions[:decoded].view(decodes, width) + 1, lengths[:decodes, None]
        ).flatten()
        table = torch.cat([table[:decodes].repeat_interleave(width, dim=0), table[decodes:]])
        lengths = torch.cat([seen.int(), lengths[decodes:]])
        ones = torch.arange(decoded, dtype=torch.int32, device=starts.device)
        starts = torch.cat([ones, starts[decodes:]])
        longest = max(1, rows.max_query_tokens)
    out = varlen.varlen_attn(
        query.to(kv_cache.dtype),
        kv_cache[0],
        kv_cache[1],
        starts,
        None,
        longest,
        table.shape[1] * kv_cache.shape[2],
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != kv_cache.shape[3],
        seqused_k=lengths,
        block_table=table,
        num_splits=1 if rows.one_split else num_splits() or None,
    )
    assert isinstance(out, Tensor)  # a tuple where log-sums are asked for
    return out.to(query.dtype)


def varlen_name() -> str:
    """The words of `attention.describe`."""
    return f"varlen_attn of torch {torch.__version__}"


def varlen_rejection(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str:
    """Why torch's attention does not take a cache; empty where it does."""
    if device.type != "cuda":
        return f"varlen_attn needs a GPU, this is {device.type}"
    if not _takes_block_tables():
        return f"varlen_attn needs torch 2.12, this is {torch.__version__}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"varlen_attn needs compute capability 8.0, this GPU has {major}.{minor}"
    if block_size % PAGE_TOKENS:
        return f"varlen_attn needs KV blocks of multiples of {PAGE_TOKENS} tokens, these have {block_size}"
    return _unfit_numbers("varlen_attn", dtype, head_dim)


@cache
def _takes_block_tables() -> bool:
    return "block_table" in inspect.signature(varlen.varlen_attn).parameters


_TILE_TOKENS = 128
_SEGMENT_TOKENS = 1024
_SCRATCH_BYTES = 1 << 29


def torch_name(dtype: torch.dtype) -> str:
    """The words of `attention.describe`."""
    return f"torch operations in {str(dtype).removeprefix('torch.')}"


def torch_attention(query: Tensor, kv_cache: Tensor, rows: AttentionRows, scale: float | None) -> Tensor:
    """`attention.paged_attention`. Padding rows, and padding tokens of prefills, give zeros.

    Decode rows of several tokens read their KV once.
    """
    decodes, decoded = rows.num_decodes, rows.num_decode_tokens
    outputs = []
    if decodes:
        lengths = rows.kv_lengths[:decodes]
        positions = rows.positions[:decoded].view(decodes, rows.decode_tokens)
        positions = torch.minimum(positions, lengths[:, None] - 1)
        tiles = torch.unflatten(query[:decoded], 0, positions.shape)
        table = rows.block_table[:decodes]
        outputs.append(_attend(tiles, positions, kv_cache, table, lengths, scale).flatten(0, 1))
    if decodes < rows.num_rows:
        outputs.append(_attend_prefills(query[decoded:], kv_cache, rows, scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_prefills(query: Tensor, kv_cache: Tensor, rows: AttentionRows, scale: float | None) -> Tensor:
    """Attention of the tokens after the decode rows, in tiles that each read the whole width of the block
    table.
    """
    block_table, kv_lengths = rows.block_table[rows.num_decodes :], rows.kv_lengths[rows.num_decodes :]
    query_start_loc = rows.query_start_loc[rows.num_decodes :] - rows.num_decode_tokens
    tokens, num_rows = query.shape[0], block_table.shape[0]
    size = max(1, min(_TILE_TOKENS, rows.max_query_tokens))
    new = query_start_loc.diff()
    tile_ends = ((new + size - 1) // size).cumsum(0)
    tiles = torch.arange(tokens // size + num_rows, device=query.device)
    row = torch.searchsorted(tile_ends, tiles, right=True)  # `num_rows` for tiles beyond the last
    behind = row >= num_rows
    row = row.clamp(max=num_rows - 1)
    first = (tiles - torch.where(row > 0, tile_ends[row - 1], 0)) * size
    places = first[:, None] + torch.arange(size, device=query.device)
    inside = (places < new[row, None]) & ~behind[:, None]
    positions = torch.where(inside, places + (kv_lengths - new)[row, None], -1)
    packed = torch.where(inside, places + query_start_loc[row, None], tokens)

    padded = torch.cat([query, query.new_zeros(1, *query.shape[1:])])
    attended = _attend(padded[packed], positions, kv_cache, block_table[row], kv_lengths[row], scale)
    out = attended.new_zeros(tokens + 1, *query.shape[1:])
    return out.index_copy_(0, packed.flatten(), attended.flatten(0, 1))[:tokens]


def _attend(
    query: Tensor,
    positions: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    kv_lengths: Tensor,
    scale: float | None,
) -> Tensor:
    """Attention of tiles of queries [tiles, T, heads, head dim]; a query at position -1 sees nothing."""
    tokens, heads, head_dim = query.shape[1:]
    block_size, kv_heads = kv_cache.shape[2:4]
    segment = max(1, min(block_table.shape[1], _SEGMENT_TOKENS // block_size))
    numbers = segment * block_size * 2 * (tokens * heads + kv_heads * head_dim)
    together = max(1, _SCRATCH_BYTES // (numbers * compute_dtype(query.dtype).itemsize))
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    scale = score_scale(scale, head_dim)
    for first in range(0, query.shape[0], together):
        part = slice(first, first + together)
        out[part] = _attend_group(
            query[part], positions[part], block_table[part], kv_lengths[part], kv_cache, segment, scale
        )
    return out


def _attend_group(
    query: Tensor, positions: Tensor, block_table: Tensor, kv_lengths: Tensor, kv_cache: Tensor,
    segment: int, scale: float,
) -> Tensor:  # fmt: skip
    """`_attend`, in the compute dtype."""
    dtype = compute_dtype(query.dtype)
    # 16-bit products are summed in float32, on tensor cores; torch offers such products on a GPU alone.
    narrow = query.is_cuda and query.dtype == kv_cache.dtype and query.dtype in _NARROW
    product_dtype = query.dtype if narrow else dtype
    tokens = query.shape[1]
    block_size, kv_heads = kv_cache.shape[2:4]
    grouped = torch.unflatten(query.to(dtype), 2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if not narrow:  # else the scores are scaled, which rounds less
        grouped = grouped * scale  # [tiles, kv heads, heads of one x T, head dim]
    grouped = grouped.to(product_dtype)
    best = grouped.new_full((*grouped.shape[:3], 1), float("-inf"), dtype=dtype)
    total, out = torch.zeros_like(best), torch.zeros_like(grouped, dtype=dtype)
    for first in range(0, block_table.shape[1], segment):
        blocks = block_table[:, first : first + segment]
        at = first * block_size + torch.arange(blocks.shape[1] * block_size, device=query.device)
        keys, values = (cache[blocks].flatten(1, 2).to(product_dtype).movedim(1, 2) for cache in kv_cache)
        # Memory beyond a row's length may hold NaN, and 0 * NaN is NaN.
        values = values.masked_fill((at >= kv_lengths[:, None])[:, None, :, None], 0.0)
        hidden = at > positions[:, :, None]
        scores = _product(grouped, keys.mT, dtype)
        if narrow:
            scores *= scale
        scores = torch.unflatten(scores, 2, (-1, tokens))
        scores = scores.masked_fill_(hidden[:, None, None], float("-inf")).flatten(2, 3)
        highest = torch.maximum(best, scores.amax(-1, keepdim=True))
        shift = highest.masked_fill(highest == float("-inf"), 0.0)
        weights = scores.sub_(shift).exp_()
        decay = (best - shift).exp()
        total = total * decay + weights.sum(-1, keepdim=True)
        out = out * decay + _product(weights.to(product_dtype), values, dtype)
        best = highest
    out = out / total.masked_fill(total == 0, 1.0)
    return torch.unflatten(out, 2, (-1, tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right of batches in two dimensions, summed and returned in `dtype`."""
    if left.dtype == dtype:
        return left @ right
    flat = torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out_dtype=dtype)
    return torch.unflatten(flat, 0, left.shape[:2])


class Backend(NamedTuple):
    """One way to compute attention: the words of `describe`, a function, and why each better backend is not
    used.
    """

    name: str
    attend: Callable[[Tensor, Tensor, AttentionRows, float | None], Tensor]
    rejected: tuple[str, ...] = ()


def paged_attention(
    query: Tensor, kv_cache: Tensor, rows: AttentionRows, *, scale: float | None = None
) -> Tensor:
    """`reference.paged_attention`. Does not synchronise, and a CUDA graph can capture it.

    A backend for 16-bit floats rounds the queries to the dtype of the cache. All rows of a block that holds
    any token must be finite, as `write_kv` makes them: FlashAttention multiplies rows that were never written
    by 0, and 0 * NaN is NaN. The result for padding tokens is unspecified.
    """
    block_size, _, head_dim = kv_cache.shape[2:]
    attend = backend(query.device, kv_cache.dtype, head_dim, block_size).attend
    return attend(query, kv_cache, rows, scale)


@cache
def backend(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> Backend:
    """The backend for a KV cache of this dtype, head dim and block size. A broken package is rejected."""
    rejected: list[str] = []
    for name, attend, rejection in (
        (flash_name, flash_attention, flash_rejection),
        (varlen_name, varlen_attention, varlen_rejection),
    ):
        reason = rejection(device, dtype, head_dim, block_size)
        if not reason:
            return Backend(name(), attend, tuple(rejected))
        rejected.append(reason)
    return Backend(torch_name(dtype), torch_attention, tuple(rejected))


def describe(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str:
    """Which backend computes attention over a KV cache of this dtype, and why no better one does."""
    if device.type != "cuda" or dtype == torch.float64:  # `kernel_set` returns the torch functions
        return f"attention: {torch_name(dtype)}"
    chosen = backend(device, dtype, head_dim, block_size)
    return "; ".join([f"attention: {chosen.name}", *chosen.rejected])
