"""Linear modules that read the same input, multiplied as one product: a narrow one leaves a GPU idle."""

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ATTRIBUTE = "mambaslots_joint_linear"


class JointLinear:
    """The linear modules `names` of `owner`, as one.

    `join` lays their weights in one tensor. Each module's parameter stays the same object and becomes a view
    of its rows: a state dict does not change, and a write into a parameter is one into the joint weight.
    Where one no longer lies there, was replaced or moved, the modules are called one by one.
    """

    def __init__(self, owner: nn.Module, names: tuple[str, ...]) -> None:
        self._modules: Any = owner._modules
        self._names = names
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._places: list[tuple[object, ...]] = []
        setattr(owner, _ATTRIBUTE, self)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., n] -> [..., sum of the modules' outputs], the outputs side by side."""
        if self._is_joined():
            return F.linear(x, self._weight, self._bias)  # type: ignore[arg-type]
        return torch.cat([self._modules[name](x) for name in self._names], dim=-1)

    def join(self, num_users: Counter[int]) -> bool:
        """Lay plain weights without other users in one tensor; returns whether that was done now."""
        if self._is_joined():
            return False
        self._weight = self._bias = None
        parts = [self._modules[name] for name in self._names]
        if any(type(part) is not nn.Linear for part in parts):
            return False
        weights: list[nn.Parameter] = [part.weight for part in parts]
        biases: list[nn.Parameter] = [part.bias for part in parts if part.bias is not None]
        parameters = weights + biases
        kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
        if len(kinds) > 1 or len(biases) not in (0, len(parts)):
            return False
        if not all(_has_address(tensor) and num_users[tensor.data_ptr()] == 1 for tensor in parameters):
            return False
        self._weight = _side_by_side(weights)
        self._bias = _side_by_side(biases) if biases else None
        self._places = [_place(part) for part in parts]
        return True

    def _is_joined(self) -> bool:
        """Whether all parameters lie where `join` put them."""
        places = [_place(self._modules[name]) for name in self._names]
        return self._weight is not None and places == self._places


def _place(part: nn.Module) -> tuple[object, ...]:
    """A module, and where its parameters begin; parameters of a class of their own have no address."""
    return part, *(
        (name, parameter.data_ptr(), parameter.dtype) if type(parameter) is nn.Parameter else name
        for name, parameter in part._parameters.items()
        if parameter is not None
    )


def join_weights(model: nn.Module) -> None:
    """Join the weights of every `JointLinear` in a model, one by one; synchronises if it joined one."""
    parameters = (parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    num_users = Counter(parameter.data_ptr() for parameter in parameters if _has_address(parameter))
    joints = [vars(module)[_ATTRIBUTE] for module in model.modules() if _ATTRIBUTE in vars(module)]
    has_joined = False
    for joint in joints:
        if joint.join(num_users):
            has_joined = True
    if has_joined:
        torch.cuda.empty_cache()


def _side_by_side(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor with the rows of all parameters, of which each becomes a view."""
    joint = torch.cat([parameter.data for parameter in parameters])
    views = torch.split(joint, list(map(len, parameters)))
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view
    return joint


def _has_address(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a plain tensor in memory: not on the meta device, and of no class of its own."""
    return type(parameter) is nn.Parameter and not parameter.is_meta
