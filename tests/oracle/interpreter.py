"""Triton's interpreter as our tests use it."""

from typing import Any

import numpy as np


def accept_masks_of_any_integer() -> None:
    """Let masked loads and stores of Triton 3.9's interpreter read what compiled kernels read.

    Its `block & scalar` of two int1 values has 32-bit integers, and its loads and stores take bools alone.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    def with_bool_mask(method: Any, place: int) -> Any:
        def call(builder: Any, *handles: Any) -> Any:
            mask = handles[place]
            if mask.data.dtype != np.bool_:
                mask.data = mask.data != 0
            return method(builder, *handles)

        return call

    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(InterpreterBuilder, name, with_bool_mask(getattr(InterpreterBuilder, name), place))
