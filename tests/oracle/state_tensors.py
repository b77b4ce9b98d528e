"""States as small models of tests declare them."""

import torch
from mambaslots.state_spec import StateTensor


def conv_and_ssm(
    layers: int,
    conv_shape: tuple[int, ...],
    ssm_shape: tuple[int, ...],
    conv_dtype: torch.dtype,
    ssm_dtype: torch.dtype,
    grid: int = 4,
) -> tuple[StateTensor, StateTensor]:
    """A window that exists after each token, and a state that exists on a grid."""
    return (
        StateTensor("conv", layers, conv_shape, conv_dtype),
        StateTensor("ssm", layers, ssm_shape, ssm_dtype, grid),
    )
