"""Correction of the Mamba mixer: a short chunk carries the convolution window before it."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .host_record import MAMBA_MIXER
from .overrides import override


@override(MAMBA_MIXER, "_ssm_prefill", part="mixer", faults=(3,))
def ssm_prefill(
    original: Callable[..., Tensor],
    self: Any,
    zxBCdt: Tensor,
    conv_state: Tensor | None,
    ssm_state: Tensor | None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    batch_indices: Tensor | None = None,
    **rest: Any,
) -> Tensor:
    """Keep in the window what a chunk shorter than the convolution leaves of the one before.

    The stock method pads such a window with zeros on the left. Fixed shapes and no synchronisation, so it
    is captured with the rest of a CUDA graph; its cost is four gathers of [prefills, channels, width].
    """
    named = dict(seq_idx=seq_idx, cu_seqlens=cu_seqlens, batch_indices=batch_indices, **rest)
    if conv_state is None or seq_idx is None or cu_seqlens is None or batch_indices is None:
        return original(self, zxBCdt, conv_state, ssm_state, **named)
    before = conv_state[batch_indices]
    output = original(self, zxBCdt, conv_state, ssm_state, **named)
    windows = carried_windows(before, conv_state[batch_indices], cu_seqlens)
    module = importlib.import_module(MAMBA_MIXER.partition(":")[0])
    module.tensor_masked_update(conv_state, batch_indices, windows)  # leaves rows of index -1 alone
    return output


def carried_windows(before: Tensor, after: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[sequences, channels, width]: `after`, its zero padded head replaced by the end of `before`.

    Sequence i has `cu_seqlens[i + 1] - cu_seqlens[i]` new inputs, which end its window `after`.
    """
    width = before.shape[-1]
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).to(torch.int64)[:, None]
    columns = torch.arange(width, device=before.device)[None, :]
    source = (columns + lengths).clamp(max=width - 1)[:, None, :].expand_as(before)
    return torch.where((columns < width - lengths)[:, None, :], before.gather(2, source), after)
