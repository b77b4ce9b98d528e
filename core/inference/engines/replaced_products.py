"""Products of a model that another kernel computes: because their bits differ, or for speed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..contexts.row_ladder import FEW_ROWS
from ..contexts.step_inputs import StepInputs
from .recorded_products import DecomposingMode, Product, operator_name, weight_key
from .runner import Model

_REPLACED = ("aten.mm", "aten.addmm")


def sequential_for_few_rows(arguments: Sequence[Any]) -> Tensor:
    return sequential(arguments, few_rows=True)


def sequential(arguments: Sequence[Any], few_rows: bool = False) -> Tensor:
    """A product from its arguments, by `kernels.sequential_product`."""
    from ..kernels.products import matmul

    tensors = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
    out_dtype = next((leaf for leaf in arguments if isinstance(leaf, torch.dtype)), None)
    bias = tensors[0] if len(tensors) == 3 else None
    result: Tensor = matmul(tensors[-2], tensors[-1], bias, out_dtype, few_rows=few_rows)
    return result


class WithReplacedProducts(DecomposingMode):  # type: ignore[no-untyped-call]
    """A model some of whose products are others; it can be captured as the model can."""

    def __init__(self, model: Model, replaced: set[Any], for_few_rows: set[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._replaced, self._for_few_rows = model, replaced, for_few_rows
        self.state_spec = model.state_spec

    def __call__(self, inputs: StepInputs) -> Tensor:
        if not self._replaced and inputs.shape.tokens > FEW_ROWS:
            return self._model(inputs)  # a mode takes the host time at every operator
        with self:
            return self._model(inputs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = operator_name(func)
        if name in _REPLACED:
            arguments = tree_leaves((args, kwargs))
            key = weight_key(name, arguments)
            if key in self._replaced:
                return sequential(arguments)
            if key in self._for_few_rows:
                rows = [leaf for leaf in arguments if isinstance(leaf, Tensor)][-2]
                if len(rows) <= FEW_ROWS:
                    return sequential_for_few_rows(arguments)
        return func(*args, **kwargs)


def is_replaceable(product: Product) -> bool:
    """Whether the product is x @ weight, or x @ weight + bias, of the rows x of a step."""
    arguments = product.call.arguments
    tensors = [index for index, leaf in enumerate(arguments) if isinstance(leaf, Tensor)]
    scaled = any(isinstance(leaf, (int, float)) for leaf in arguments)  # alpha and beta
    is_linear = [row[:2] for row in product.rows] == [(tensors[-2], 0)]
    return product.call.name in _REPLACED and is_linear and not scaled and arguments[tensors[0]].dim() < 3
