"""RMS norms in one Triton launch: of the residual stream, of mixers with their gates, of queries and keys.

The references are the functions of the same names in `torch_pointwise`. Nothing synchronises, and a row
has the same bits in every batch: a program's tile follows from the model's shape alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...validation import ceil_div
from .dtypes_and_strides import check_last_stride, dense
from .tiles import sigmoid

BLOCK = 1024  # elements of a program, at least
ELEMENTS_PER_WARP = 512  # 16 a thread: two loads of 16 bytes in 16-bit floats
MAX_WARPS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """As `torch_pointwise.rms_norm`. Views whose last dimension is dense are not copied."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(out, None, x, None, weight, eps, offset)
    return out


def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As `torch_pointwise.add_rms_norm`, with the promises of `rms_norm`."""
    total, out = (torch.empty(x.shape, dtype=residual.dtype, device=x.device) for _ in range(2))
    _launch_norm(out, total, x, residual, weight, eps, offset)
    return total, out


def norm_tile(width: int) -> tuple[int, int, int]:
    """Rows and columns of a program, and its warps, for rows of `width` numbers."""
    columns = triton.next_power_of_2(width)
    rows = max(1, BLOCK // columns)
    return rows, columns, min(MAX_WARPS, max(1, rows * columns // ELEMENTS_PER_WARP))


def _launch_norm(
    out: Tensor, total: Tensor | None, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float,
    offset: float,
) -> None:  # fmt: skip
    if not out.numel():
        return
    x = dense(x.reshape(-1, x.shape[-1]))
    residual = None if residual is None else dense(residual.reshape(x.shape))
    num_rows, width = x.shape
    rows, columns, warps = norm_tile(width)
    rms_norm_kernel[(ceil_div(num_rows, rows),)](
        out, total, x, residual, weight, eps, offset, num_rows,
        x.stride(0), 0 if residual is None else residual.stride(0),
        WIDTH=width, ADD=residual is not None, BLOCK_ROWS=rows, BLOCK_COLUMNS=columns, num_warps=warps,
    )  # fmt: skip


@triton.jit
def rms_norm_kernel(
    # Pointers
    out, total, x, residual, weight,
    # Scalars
    eps, offset,
    # Dimensions
    num_rows,
    # Strides
    x_row_stride, residual_row_stride,
    # Meta-parameters
    WIDTH: tl.constexpr, ADD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program has whole rows. The norm reads the sum as it is stored."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    values = tl.load(x + row * x_row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        before = tl.load(residual + row * residual_row_stride + column, mask=inside, other=0.0)
        values += before.to(tl.float32)
        stored = values.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + column, stored, mask=inside)
        values = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / WIDTH + eps)[:, None]
    weights = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + offset
    tl.store(out + row * WIDTH + column, (values * scale * weights).to(out.dtype.element_ty), mask=inside)


_TILE_ELEMENTS = 2048


def gate_then_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """As `torch_pointwise.gate_then_rms_norm`; a ValueError where a last stride is not 1."""
    x, gate = (torch.unflatten(tensor, -1, (groups, 1, -1)) for tensor in (x, gate))
    return _gated_norm(x, gate, weight, eps, gate_first=True).flatten(1)


def rms_norm_then_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `torch_pointwise.rms_norm_then_gate`; a ValueError where a last stride is not 1."""
    heads = gate.shape[1:3] if gate.dim() == 4 else (1, gate.shape[1])
    gates = gate if gate.dim() == 4 else gate[:, None]
    return _gated_norm(torch.unflatten(x, 1, heads), gates, weight, eps, gate_first=False)


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gate_first: bool) -> Tensor:
    """x and gate [T, outer, inner, D], weight [D] or [outer * inner * D] numbers: [T, outer * inner, D]."""
    check_last_stride(x=x, gate=gate)
    tokens, outer, inner, dim = x.shape
    heads = outer * inner
    out = torch.empty(tokens, heads, dim, dtype=x.dtype, device=x.device)
    block_h, block_d, num_warps = gated_blocks(heads, dim)
    gated_norm_kernel[(tokens * ceil_div(heads, block_h),)](
        x, gate, weight, out, eps, *x.stride()[:3], *gate.stride()[:3],
        HEADS=heads, INNER=inner, DIM=dim, WEIGHTS=weight.numel(), GATE_FIRST=gate_first,
        BLOCK_H=block_h, BLOCK_D=block_d, num_warps=num_warps,
    )  # fmt: skip
    return out


def gated_blocks(heads: int, dim: int) -> tuple[int, int, int]:
    """A program's heads and channels, and its warps. The number of rows has no say in them."""
    block_d = triton.next_power_of_2(dim)
    block_h = min(triton.next_power_of_2(heads), max(1, _TILE_ELEMENTS // block_d))
    return block_h, block_d, min(MAX_WARPS, max(1, block_h * block_d // ELEMENTS_PER_WARP))


@triton.jit
def gated_norm_kernel(
    # Pointers
    x, gate, weight, out,
    # Added to the mean square
    eps,
    # Strides
    x_token_stride, x_outer_stride, x_inner_stride,
    gate_token_stride, gate_outer_stride, gate_inner_stride,
    # Meta-parameters
    HEADS: tl.constexpr, INNER: tl.constexpr, DIM: tl.constexpr, WEIGHTS: tl.constexpr,
    GATE_FIRST: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program has a token and BLOCK_H heads, or groups, of it."""
    blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    inside = (head < HEADS)[:, None] & (d < DIM)[None, :]
    x += token * x_token_stride + (head // INNER * x_outer_stride + head % INNER * x_inner_stride)[:, None]
    gate += token * gate_token_stride
    gate += (head // INNER * gate_outer_stride + head % INNER * gate_inner_stride)[:, None]
    values = tl.load(x + d[None, :], mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if WEIGHTS == DIM:
        weights = tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
    else:
        weights = tl.load(weight + head[:, None] * DIM + d[None, :], mask=inside, other=0.0).to(tl.float32)
    gates *= sigmoid(gates)
    if GATE_FIRST:
        values *= gates
    scale = tl.rsqrt(tl.sum(values * values, axis=1) * (1.0 / DIM) + eps)
    values = values * scale[:, None] * weights
    if not GATE_FIRST:
        values *= gates
    place = out + (token * HEADS + head[:, None]) * DIM + d[None, :]
    tl.store(place, values.to(out.dtype.element_ty), mask=inside)


QK_BLOCK = 2048  # elements of a program
QK_WARPS = 4


def qk_norm_rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, query_weight: Tensor | None = None,
    key_weight: Tensor | None = None, eps: float = 0.0, *, offset: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `torch_pointwise.qk_norm_rotary`; heads may be slices whose last dimension is dense."""
    tokens, query_heads, dim = query.shape
    key_heads, rotary = key.shape[1], cos.shape[-1]
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_out = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    if not tokens:
        return query_out, key_out
    query, key, cos, sin = map(dense, (query, key, cos, sin))
    block_dim = triton.next_power_of_2(dim)
    block_heads = min(max(1, QK_BLOCK // block_dim), triton.next_power_of_2(query_heads))
    query_blocks = ceil_div(query_heads, block_heads)
    qk_norm_rotary_kernel[(tokens, query_blocks + ceil_div(key_heads, block_heads))](
        query_out, key_out, query, key, cos, sin, query_weight, key_weight,
        eps, offset,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), cos.stride(0), sin.stride(0),
        QUERY_HEADS=query_heads, KEY_HEADS=key_heads, DIM=dim, ROTARY=rotary,
        NORM=query_weight is not None, QUERY_BLOCKS=query_blocks,
        BLOCK_HEADS=block_heads, BLOCK_DIM=block_dim, num_warps=QK_WARPS,
    )  # fmt: skip
    return query_out, key_out


@triton.jit
def qk_norm_rotary_kernel(
    # Pointers
    query_out, key_out, query, key, cos, sin, query_weight, key_weight,
    # Scalars
    eps, offset,
    # Strides
    query_token_stride, query_head_stride, key_token_stride, key_head_stride,
    cos_token_stride, sin_token_stride,
    # Meta-parameters
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    NORM: tl.constexpr, QUERY_BLOCKS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """A program has a token and a block of its query heads, or of its key heads."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cos += token * cos_token_stride
    sin += token * sin_token_stride
    if block < QUERY_BLOCKS:
        _norm_rotary(
            query_out + token * QUERY_HEADS * DIM, query + token * query_token_stride, query_head_stride,
            block, query_weight, eps, offset, cos, sin,
            QUERY_HEADS, DIM, ROTARY, NORM, BLOCK_HEADS, BLOCK_DIM,
        )  # fmt: skip
    else:
        _norm_rotary(
            key_out + token * KEY_HEADS * DIM, key + token * key_token_stride, key_head_stride,
            block - QUERY_BLOCKS, key_weight, eps, offset, cos, sin,
            KEY_HEADS, DIM, ROTARY, NORM, BLOCK_HEADS, BLOCK_DIM,
        )  # fmt: skip


@triton.jit
def _norm_rotary(
    out, x, head_stride, block, weight, eps, offset, cos, sin,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """A block of one token's heads. Each channel is read a second time as its partner's partner."""
    HALF: tl.constexpr = ROTARY // 2
    head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    channel = tl.arange(0, BLOCK_DIM)[None, :]
    partner = tl.where(channel < HALF, channel + HALF, tl.where(channel < ROTARY, channel - HALF, channel))
    inside = (head < HEADS) & (channel < DIM)
    values = tl.load(x + head * head_stride + channel, mask=inside, other=0.0).to(tl.float32)
    partners = tl.load(x + head * head_stride + partner, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(values * values, axis=1) / DIM + eps)[:, None]
        weights = tl.load(weight + channel, mask=channel < DIM, other=0.0).to(tl.float32)
        partner_weights = tl.load(weight + partner, mask=channel < DIM, other=0.0).to(tl.float32)
        values = values * scale * (weights + offset)
        partners = partners * scale * (partner_weights + offset)
    cosines = tl.load(cos + channel, mask=channel < ROTARY, other=0.0).to(tl.float32)
    sines = tl.load(sin + channel, mask=channel < ROTARY, other=0.0).to(tl.float32)
    turned = values * cosines + tl.where(channel < HALF, -partners, partners) * sines
    turned = tl.where(channel < ROTARY, turned, values)
    tl.store(out + head * DIM + channel, turned.to(out.dtype.element_ty), mask=inside)
