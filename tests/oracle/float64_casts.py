"""transformers' modules in float64: what they cast to float32 is cast to float64."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64Casts(TorchFunctionMode):
    """While it is active, every function of torch that is asked for float32 gives float64.

    transformers computes norms, softmaxes, decays and routers in float32, whatever the model's dtype. Their
    float64 is float32 with noise; under this mode it is float64.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide_args = [_widened(arg) for arg in args]
        return func(*wide_args, **{name: _widened(arg) for name, arg in (kwargs or {}).items()})


def _widened(arg: Any) -> Any:
    return torch.float64 if arg is torch.float32 else arg
