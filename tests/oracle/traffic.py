"""How many bytes of a tensor Triton kernels load and store, counted in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor


@dataclass
class Traffic:
    """Bytes that unmasked lanes moved; an element counts every time it moves."""

    loaded: int = 0
    stored: int = 0


@contextmanager
def traffic_of(tensor: Tensor) -> Iterator[Traffic]:
    """Count what kernels load from and store to `tensor`, on the CPU, while the context lasts.

    For a view: all accesses between its first and its last element. Contexts of several tensors may be
    nested. Only kernels' own accesses count; those of torch do not. Skips the test where kernels are not
    interpreted.
    """
    from triton import knobs
    from triton.runtime.interpreter import interpreter_builder as builder

    if not knobs.runtime.interpret:
        pytest.skip("bytes are counted in Triton's interpreter, which is off here")
    assert tensor.device == torch.device("cpu"), "the interpreter copies other tensors"
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin, end = tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
    traffic = Traffic()
    load, store = builder.create_masked_load, builder.create_masked_store

    def bytes_of(pointers, mask) -> int:
        addresses, wanted = np.broadcast_arrays(pointers.data, mask.data)
        hits = wanted & (addresses >= begin) & (addresses < end)
        return int(np.count_nonzero(hits)) * pointers.get_element_ty().primitive_bitwidth // 8

    def counted_load(pointers, mask, *others):
        traffic.loaded += bytes_of(pointers, mask)
        return load(pointers, mask, *others)

    def counted_store(pointers, value, mask, *others):
        traffic.stored += bytes_of(pointers, mask)
        return store(pointers, value, mask, *others)

    # Unmasked accesses and those through descriptors come through these two as well.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", counted_load)
        patch.setattr(builder, "create_masked_store", counted_store)
        yield traffic
