"""Which matrix products and attentions a model makes, found by watching steps of different sizes."""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

KERNELS = __name__.rpartition(".engines.")[0] + ".kernels."
"""Products that these modules make inside are a part of their kernels, with tiles that rows do not change."""
_HEAD = "head_product"  # of every kernel set; a product of the model

_CONTRACTED: dict[str, tuple[tuple[int, int], ...]] = {
    "aten.mm": ((0, 1), (1, 0)),
    "aten.addmm": ((1, 1), (2, 0)),
    "aten.bmm": ((0, 2), (1, 1)),
    "aten.baddbmm": ((1, 2), (2, 1)),
    "aten._grouped_mm": ((0, 1), (1, 1)),
    "transformers.grouped_mm_fallback": ((0, 1), (1, 1)),
    "aten.topk": (),  # see `_contracted`
}
"""The dimensions that a product adds over, as (argument, dimension)."""
CHOICE = "aten.topk"
"""Chooses a row's experts. What it takes of equal scores could depend on the number of rows."""
GROUPED = ("aten._grouped_mm", "transformers.grouped_mm_fallback")
ATTENTION = "flash_attn_3.fwd"
_UNKNOWN = ("addbmm", "addr", "addmv", "mv", "dot", "vdot")
_UNKNOWN_PARTS = (
    "scaled_mm", "scaled_grouped_mm", "int_mm", "convolution", "scaled_dot_product", "flash_attention",
    "efficient_attention", "sparse_mm", "addmm_activation", "mkldnn_linear",
)  # fmt: skip
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class BatchVarianceError(ValueError):
    """An operation of a model may give a row other bits where the number of rows differs."""


class Call(NamedTuple):
    """One product or attention of a step.

    Attributes:
        name: of the operator, as "aten.mm".
        func: the operator.
        arguments, structure: the leaves of its (args, kwargs), and how they are put together.
    """

    name: str
    func: Any
    arguments: list[Any]
    structure: Any

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by name, with defaults."""
        args, kwargs = tree_unflatten(self.arguments, self.structure)
        declared = self.func._schema.arguments
        values: dict[str, Any] = {argument.name: argument.default_value for argument in declared}
        values |= dict(zip(values, args, strict=False))
        return values | dict(kwargs)

    @property
    def shapes(self) -> list[tuple[int, ...] | None]:
        return [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in self.arguments]

    def run(self, arguments: Sequence[Any]) -> Tensor:
        """The operator with other arguments."""
        args, kwargs = tree_unflatten(list(arguments), self.structure)
        result: Tensor = self.func(*args, **kwargs)
        return result

    def __str__(self) -> str:
        tensors = [leaf for leaf in self.arguments if isinstance(leaf, Tensor)]
        shapes = " x ".join(str(list(tensor.shape)) for tensor in tensors)
        return f"{self.name} of {shapes} in {str(tensors[0].dtype).removeprefix('torch.')}"


class DecomposingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators that run, in place of those that torch makes of others, as `linear` of `mm`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            result = func.decompose(*args, **kwargs)
        return self.run(func, args, kwargs) if result is NotImplemented else result

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator."""
        return func(*args, **kwargs)


class CallRecorder(DecomposingMode):  # type: ignore[no-untyped-call]
    """Notes the products and attentions of a model while it is the current mode.

    Attributes:
        calls: in their order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = operator_name(func)
        if name == ATTENTION or (_may_add_over_rows(name) and not _inside_a_kernel()):
            self.calls.append(Call(name, func, *tree_flatten((args, kwargs))))
        return func(*args, **kwargs)


class RowArgument(NamedTuple):
    """A tensor argument that has rows of the step: `per_row` entries of dimension `dim` for each."""

    argument: int
    dim: int
    per_row: int


class Product(NamedTuple):
    """A product of a model.

    Attributes:
        call: with its own weights.
        rows: the arguments that have rows of the step.
        of_logits: whether the rows are those of the logits; else they are the step's tokens.
        out_dim: the dimension of the result that has the rows.
    """

    call: Call
    rows: tuple[RowArgument, ...]
    of_logits: bool
    out_dim: int

    @property
    def name(self) -> str:
        """The operator, sizes and dtypes, with "rows" in place of their number."""
        parts, has = [], {row.argument: row for row in self.rows}
        for index, leaf in enumerate(self.call.arguments):
            if isinstance(leaf, Tensor):
                sizes = [str(size) for size in leaf.shape]
                if index in has:
                    dim, per_row = has[index].dim, has[index].per_row
                    sizes[dim] = "rows" if per_row == 1 else f"{per_row} rows"
                parts.append(f"[{', '.join(sizes)}] {str(leaf.dtype).removeprefix('torch.')}")
        others = [str(leaf) for leaf in self.call.arguments if isinstance(leaf, torch.dtype)]
        return f"{self.call.name} of {' x '.join(parts)}" + (f" to {others[0]}" if others else "")

    @property
    def weight_key(self) -> tuple[Any, ...]:
        return weight_key(self.call.name, self.call.arguments)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for products that run the same kernels."""
        layouts = tuple(
            tuple(sorted(range(leaf.dim()), key=leaf.stride, reverse=True))
            for leaf in self.call.arguments
            if isinstance(leaf, Tensor)
        )
        others = tuple(str(leaf) for leaf in self.call.arguments if not isinstance(leaf, Tensor))
        return self.name, self.of_logits, layouts, others


class StepSizes(NamedTuple):
    """The numbers of rows of a recorded step."""

    tokens: int
    logits: int


def weight_key(name: str, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Equal for calls of an operator whose results differ in their number of rows alone."""
    tensors = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
    others = tuple(leaf for leaf in arguments if not isinstance(leaf, Tensor))
    return name, len(tensors), tuple(tensors[-1].shape), tensors[-1].dtype, others


def operator_name(func: Any) -> str:
    """The name without the overload, as "aten.mm"."""
    name: str = func.name().partition(".")[0].replace("::", ".")
    return name


def products(
    small: Sequence[Call], large: Sequence[Call], small_sizes: StepSizes, large_sizes: StepSizes
) -> list[Product]:
    """The products of two steps of one kind: what differs between them says where the rows are."""
    for call in (*small, *large):
        if call.name != ATTENTION:
            _check_known(call)
    if [call.name for call in small] != [call.name for call in large]:
        names = next(
            (f"{a} and {b}" for a, b in zip(small, large, strict=False) if a.name != b.name),
            f"{len(small)} and {len(large)} products",
        )
        raise BatchVarianceError(f"the model makes other products for other numbers of rows: {names}")
    found = [
        _product(one, other, small_sizes, large_sizes)
        for one, other in zip(small, large, strict=True)
        if one.name != ATTENTION
    ]
    return [product for product in found if product is not None]


def _product(one: Call, other: Call, small: StepSizes, large: StepSizes) -> Product | None:
    rows: list[RowArgument] = []
    kinds: set[bool] = set()
    tensors = [index for index, shape in enumerate(one.shapes) if shape is not None]
    for index in tensors:
        for dim, sizes in enumerate(
            zip(one.arguments[index].shape, other.arguments[index].shape, strict=True)
        ):
            if sizes[0] == sizes[1]:
                continue
            if (tensors.index(index), dim) in _contracted(one):
                raise BatchVarianceError(f"{one} adds over the rows of the step")
            of_logits = sizes[0] * large.tokens != sizes[1] * small.tokens
            unit = small.logits if of_logits else small.tokens
            if sizes[0] % unit or sizes[1] * unit != sizes[0] * (large.logits if of_logits else large.tokens):
                raise BatchVarianceError(f"{one} has {sizes[0]} rows, and {sizes[1]} in a larger step")
            rows.append(RowArgument(index, dim, sizes[0] // unit))
            kinds.add(of_logits)
    if not rows:
        return None  # of weights alone: the same in every step
    if (
        len(kinds) > 1
        or len({row.dim for row in rows}) > 1
        or len({row.argument for row in rows}) < len(rows)
    ):
        raise BatchVarianceError(f"{one} multiplies rows of the step with rows of the step")
    out_dim = rows[-1].dim if one.name not in GROUPED else 0
    return Product(one, tuple(rows), kinds.pop(), out_dim)


def _contracted(call: Call) -> tuple[tuple[int, int], ...]:
    if call.name != CHOICE:
        return _CONTRACTED[call.name]
    named = call.named
    return ((0, named["dim"] % named["self"].dim()),)


def _check_known(call: Call) -> None:
    if call.name not in _CONTRACTED:
        raise BatchVarianceError(f"{call} is none of {', '.join(_CONTRACTED)}")
    for leaf in call.arguments:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype not in _DTYPES:
            raise BatchVarianceError(f"{call} multiplies {leaf.dtype}")


def _may_add_over_rows(name: str) -> bool:
    operator = name.partition(".")[2]
    return name in _CONTRACTED or operator in _UNKNOWN or any(part in operator for part in _UNKNOWN_PARTS)


def _inside_a_kernel() -> bool:
    frame = sys._getframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(KERNELS):
            return frame.f_code.co_name != _HEAD
        frame = frame.f_back  # type: ignore[assignment]
    return False
