"""Which kernels a model runs."""

from types import ModuleType

import torch

from . import reference


def kernel_set(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The module with the kernels for weights of `dtype` on `device`.

    `reference` is plain torch: what the CPU runs, and float64 anywhere, which the Triton kernels would narrow
    to float32. On a GPU it synchronises, and cannot be captured. `fused` has the same names and signatures;
    it imports triton and three SSD stages of megatron-core, and this module only then.

    Raises ImportError where one of them is not installed.
    """
    if device.type != "cuda" or dtype == torch.float64:
        return reference
    try:
        from . import fused
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the kernels for {device} need {error.name}; install it with: pip install 'mambaslots[megatron]'"
        ) from error
    return fused
