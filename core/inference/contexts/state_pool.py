"""The tensors that hold recurrent states."""

import torch
from torch import Tensor

from ...validation import float_dtype, integer, integers


class StatePool:
    """Live and durable states of all Mamba layers in one index space.

    A pool index in [0, num_live) is a live slot, updated in place by the request that owns it; one in
    [num_live, num_live + num_durable) is a durable slot, immutable once committed:

        pool index   0 ........ num_live-1 | num_live ........ num_live+num_durable-1
        holds        live slot 0 ..        | durable slot 0 ..

    Kernels address both parts through one base pointer, so a resumed request reads its durable slot and
    writes its live one without a copy in between.

    Attributes: `conv_states` [layers, slots, *conv_shape], the convolution's window of raw inputs;
    `ssm_states` [layers, slots, *ssm_shape], the SSM state. Both start as zeros.
    """

    def __init__(
        self,
        num_mamba_layers: int,
        num_live: int,
        num_durable: int,
        conv_states_shape: tuple[int, ...],
        ssm_states_shape: tuple[int, ...],
        conv_states_dtype: torch.dtype,
        ssm_states_dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        layers = integer("num_mamba_layers", num_mamba_layers, 0)
        self.num_live = integer("num_live", num_live, 0)
        self.num_durable = integer("num_durable", num_durable, 0)
        conv_shape = integers("conv_states_shape", conv_states_shape, 0)
        ssm_shape = integers("ssm_states_shape", ssm_states_shape, 0)
        slots = self.num_live + self.num_durable
        self.conv_states = torch.zeros(
            layers,
            slots,
            *conv_shape,
            dtype=float_dtype("conv_states_dtype", conv_states_dtype),
            device=device,
        )
        self.ssm_states = torch.zeros(
            layers, slots, *ssm_shape, dtype=float_dtype("ssm_states_dtype", ssm_states_dtype), device=device
        )

    @property
    def live_conv_states(self) -> Tensor:
        """[layers, num_live, *conv_shape], a view."""
        return self.conv_states[:, : self.num_live]

    @property
    def live_ssm_states(self) -> Tensor:
        """[layers, num_live, *ssm_shape], a view."""
        return self.ssm_states[:, : self.num_live]

    @property
    def durable_conv_states(self) -> Tensor:
        """[layers, num_durable, *conv_shape], a view."""
        return self.conv_states[:, self.num_live :]

    @property
    def durable_ssm_states(self) -> Tensor:
        """[layers, num_durable, *ssm_shape], a view."""
        return self.ssm_states[:, self.num_live :]

    def durable_index(self, slot: int) -> int:
        """The pool index of durable slot `slot`."""
        return self.num_live + slot

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one state: both tensors, all layers."""
        return state_bytes(self.conv_states, self.ssm_states)


def state_bytes(conv_states: Tensor, ssm_states: Tensor) -> int:
    """Bytes of one slot of `[layers, slots, ...]` tensors, also of ones without slots."""
    return sum(
        t.shape[0] * int(torch.Size(t.shape[2:]).numel()) * t.element_size()
        for t in (conv_states, ssm_states)
    )
