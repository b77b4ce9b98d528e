"""The tensors that hold recurrent states."""

import torch
from torch import Tensor

from ...tensor_validation import addressable, float_dtype
from ...tensor_validation import device as checked_device
from ...validation import INT32_MAX, integer, integers
from ..kernels.state_tensors import StateTensors


class StatePool:
    """Live and durable states of all Mamba layers in one index space.

    A pool index below num_live is a live slot, which the owning request updates in place. The other pool
    indices are durable slots, which are immutable once committed:

        pool index   0 ........ num_live-1 | num_live ........ num_live+num_durable-1
        holds        live slot 0 ..        | durable slot 0 ..

    Kernels address both parts through one base pointer. So a resumed request reads a durable slot and writes
    its live slot without a copy in between.

    Attributes: `conv_states` [layers, slots, *conv_shape], the convolution's window of raw inputs;
    `ssm_states` [layers, slots, *ssm_shape], the SSM state. Both start as zeros. `allocated`: whether both
    have all their slots.
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
        self._layers = integer("num_mamba_layers", num_mamba_layers, 0, INT32_MAX)
        self.num_live = integer("num_live", num_live, 0, INT32_MAX)
        self.num_durable = integer("num_durable", num_durable, 0, INT32_MAX)
        self._conv_shape = integers("conv_states_shape", conv_states_shape, 0, INT32_MAX)
        self._ssm_shape = integers("ssm_states_shape", ssm_states_shape, 0, INT32_MAX)
        self._conv_dtype = float_dtype("conv_states_dtype", conv_states_dtype)
        self._ssm_dtype = float_dtype("ssm_states_dtype", ssm_states_dtype)
        self._device = checked_device("device", device)
        slots = (self._layers, self.num_live + self.num_durable)
        addressable("conv_states_shape", self._conv_shape, (*slots, *self._conv_shape), self._conv_dtype)
        addressable("ssm_states_shape", self._ssm_shape, (*slots, *self._ssm_shape), self._ssm_dtype)
        self.allocate()

    def allocate(self) -> None:
        """Make the tensors, as zeros; their addresses are new. A call that raises changes nothing."""
        self.put(self.new_states())

    def new_states(self) -> StateTensors:
        """Tensors for the pool, as zeros, for `put`."""
        return self._zeros(self.num_live + self.num_durable)

    def put(self, states: StateTensors) -> None:
        """Use these tensors, a result of `new_states`, from now on."""
        self.conv_states, self.ssm_states = states
        self.allocated = True

    def free(self) -> None:
        """Free the tensors' memory; tensors without slots remain."""
        self.allocated = False
        self.conv_states, self.ssm_states = self._zeros(0)

    @torch.inference_mode(False)  # others than inference tensors can be written anywhere
    def _zeros(self, num_slots: int) -> StateTensors:
        slots, device = (self._layers, num_slots), self._device
        return StateTensors(
            torch.zeros(*slots, *self._conv_shape, dtype=self._conv_dtype, device=device),
            torch.zeros(*slots, *self._ssm_shape, dtype=self._ssm_dtype, device=device),
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
        if type(slot) is not int or not 0 <= slot < self.num_durable:
            slot = integer("slot", slot, 0, self.num_durable - 1)
        return self.num_live + slot
