"""Attention by FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608), from the package tokenspeed-fa3."""

import importlib
import importlib.metadata
import os
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .attention_rows import AttentionRows

if TYPE_CHECKING:
    from .segment_rows import SegmentRows

PACKAGE, MODULE = "tokenspeed-fa3", "flash_attn_interface"
MAX_HEAD_DIM = 256
"""The package has kernels for heads of 64, 128 and 256 numbers; the next larger one computes others."""
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


def paged_attention(query: Tensor, kv_cache: Tensor, rows: AttentionRows, scale: float | None) -> Tensor:
    """`attention.paged_attention` of all rows in one call.

    With `one_split`, rows that may be longer than a segment are cut as `attention_segments` says.
    """
    if rows.one_split:
        from . import attention_segments

        if attention_segments.num_segments(rows, kv_cache.shape[2]) > 1:
            return attention_segments.paged_attention(query, kv_cache, rows, scale, _attend_pairs)
    out: Tensor = torch.ops.flash_attn_3.fwd.default(
        query.to(kv_cache.dtype),
        kv_cache[0],
        kv_cache[1],
        cu_seqlens_q=rows.query_start_loc,
        seqused_q=rows.query_lengths,
        seqused_k=rows.kv_lengths,
        max_seqlen_q=rows.longest_query,
        page_table=rows.block_table,
        softmax_scale=scale,
        is_causal=True,
        num_splits=1 if rows.one_split else num_splits(),
    )[0]
    return out.to(query.dtype)


def _attend_pairs(
    query: Tensor,
    kv_cache: Tensor,
    pairs: "SegmentRows",
    scale: float | None,
    *,
    is_causal: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention_segments.Attend`."""
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
        num_splits=1,
    )
    return found, log_sums


def name() -> str:
    """The words of `attention.describe`."""
    splits = num_splits()
    return f"FlashAttention-3 ({PACKAGE} {_version()})" + (f", splits {splits}" if splits else "")


def fixed_splits(block_size: int) -> str:
    """The words of `attention.fixed_splits`."""
    from .attention_segments import SEGMENT_TOKENS

    if SEGMENT_TOKENS % block_size:
        return "one split"
    return f"split at multiples of {SEGMENT_TOKENS} tokens"


def rejection(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str:
    """Why FlashAttention-3 does not take a cache; empty where it does. It takes every block size."""
    if device.type != "cuda":
        return f"FlashAttention-3 needs a GPU, this is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"FlashAttention-3 needs compute capability 9.0, this GPU has {major}.{minor}"
    if dtype not in (torch.bfloat16, torch.float16):
        shown = str(dtype).removeprefix("torch.")
        return f"FlashAttention-3 needs KV in bfloat16 or float16, this is {shown}"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return (
            f"FlashAttention-3 needs heads of at most {MAX_HEAD_DIM} numbers, a multiple of 8, "
            f"these have {head_dim}"
        )
    return _import_failure()


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
