"""A kernel set that counts the calls of its functions between mixers."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from mambaslots.inference.kernels.kernel_set import KernelSet

POINTWISE = (
    "rms_norm", "add_rms_norm", "relu_squared", "silu_mul", "sigmoid_mul", "qk_norm_rotary", "head_product",
)  # fmt: skip


class CountingKernels(SimpleNamespace):
    """The reference, with `calls` of the functions in `POINTWISE`."""

    def __init__(self) -> None:
        super().__init__(**{name: getattr(KernelSet, name) for name in dir(KernelSet)})
        self.calls: Counter[str] = Counter()
        for name in POINTWISE:
            setattr(self, name, self._counted(name))

    def _counted(self, name: str) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return getattr(KernelSet, name)(*args, **kwargs)

        return function
