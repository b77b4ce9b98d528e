"""The matrix products that a model makes, and whether their rows keep their bits in any number of rows."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from ....config import InferenceConfig
from ....state_spec import HybridStateSpec
from ...contexts.dynamic_request import DynamicInferenceRequest
from ...contexts.padding import invariant_buckets
from ...contexts.step_inputs import Model, StepShape
from ...kernels.step_rows import FEW_ROWS
from .dummy_steps import DummySteps

BASE_ROWS = 256
"""Different rows of the operands. Larger products repeat them, so that a row comes at several places."""
SHIFT = 37
_SEED = 16
_PREFILL_ROWS, _DECODE_ROWS = 64, 32  # tokens of the recorded steps, and twice as many

KERNELS = __name__.rpartition(".engines.")[0] + ".kernels."
"""Products that these modules make inside are a part of their kernels, with tiles that rows do not change."""
_HEAD = "head_product"  # of every kernel set; a product of the model

_GROUPED = ("aten._grouped_mm", "transformers.grouped_mm_fallback")
_CHOICE = "aten.topk"
"""Chooses a row's experts. What it takes of equal scores could depend on the number of rows."""
_CONTRACTED: dict[str, tuple[tuple[int, int], ...]] = {
    "aten.mm": ((0, 1), (1, 0)),
    "aten.addmm": ((1, 1), (2, 0)),
    "aten.bmm": ((0, 2), (1, 1)),
    "aten.baddbmm": ((1, 2), (2, 1)),
    **dict.fromkeys(_GROUPED, ((0, 1), (1, 1))),
    _CHOICE: (),  # see `_contracted`
}
"""The dimensions that a product adds over, as (tensor, dimension)."""
_BY_CUBLAS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
_ATTENTION = "flash_attn_3.fwd"
_UNKNOWN = ("addbmm", "addr", "addmv", "mv", "dot", "vdot")
_UNKNOWN_PARTS = (
    "scaled_mm", "scaled_grouped_mm", "int_mm", "convolution", "scaled_dot_product", "flash_attention",
    "efficient_attention", "sparse_mm", "addmm_activation", "mkldnn_linear",
)  # fmt: skip
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class BatchVarianceError(ValueError):
    """An operation of a model may give a row other bits where the number of rows differs."""


# ---- which products a model makes


class Product(NamedTuple):
    """One product of a step."""

    name: str  # of the operator, as "aten.mm"
    func: Any
    arguments: list[Any]  # the leaves of its (args, kwargs)
    structure: Any  # how they are put together
    rows: tuple[tuple[int, int, int], ...] = ()  # index of each argument with rows, its dim, entries a row

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for products that run the same kernels."""
        layouts = tuple(tuple(_order(leaf)) for leaf in self.arguments if isinstance(leaf, Tensor))
        values = tuple(str(leaf) for leaf in self.arguments if not isinstance(leaf, Tensor))
        return str(self), layouts, values

    def run(self, arguments: Sequence[Any]) -> Any:
        """The operator with other arguments."""
        args, kwargs = tree_unflatten(list(arguments), self.structure)
        return self.func(*args, **kwargs)

    def __str__(self) -> str:
        """The operator, sizes and dtypes, with "rows" in place of their number."""
        parts, rows = [], {index: (dim, per_row) for index, dim, per_row in self.rows}
        for index, leaf in enumerate(self.arguments):
            if isinstance(leaf, Tensor):
                sizes = [str(size) for size in leaf.shape]
                if index in rows:
                    dim, per_row = rows[index]
                    sizes[dim] = "rows" if per_row == 1 else f"{per_row} rows"
                parts.append(f"[{', '.join(sizes)}] {str(leaf.dtype).removeprefix('torch.')}")
        dtypes = [str(leaf) for leaf in self.arguments if isinstance(leaf, torch.dtype)]
        return f"{self.name} of {' x '.join(parts)}" + (f" to {dtypes[0]}" if dtypes else "")


class ProductRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the products of a model while it is the current mode, and refuses what cannot be checked."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # sees the operators that run, not those that torch makes of others, as `linear` of `mm`
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        name = func.name().partition(".")[0].replace("::", ".")  # without the overload
        if name == _ATTENTION:
            splits = _argument(func, args, kwargs, "num_splits")
            if splits != 1:
                raise BatchVarianceError(
                    f"the model calls {name} with num_splits {splits}; accepted: 1, as "
                    "kernels.paged_attention has it for inputs.attention_rows"
                )
        elif _may_add_over_rows(name) and not _inside_a_kernel():
            product = Product(name, func, *tree_flatten((args, kwargs)))
            _check_known(product)
            self.products.append(product)
        return func(*args, **kwargs)


def record_products(model: Model, spec: HybridStateSpec, config: InferenceConfig) -> list[Product]:
    """The different products that a model makes in prefills and in decodes."""
    steps = DummySteps(model, spec, config, longest=4 * _PREFILL_ROWS)
    requests = [steps.request(steps.tokens(_PREFILL_ROWS // 2, seed)) for seed in range(2)]
    by_key: dict[object, Product] = {}
    for num_rows in (_PREFILL_ROWS, _DECODE_ROWS):  # a prefill, then a decode
        small, large = (
            _recorded(steps, request, rows)
            for request, rows in zip(requests, (num_rows, 2 * num_rows), strict=True)
        )
        for product in with_rows(small, large, num_rows):
            by_key.setdefault(product.key, product)
        for request in requests:
            request.append(steps.tokens(1), [None], 0.0)
    return list(by_key.values())


def _recorded(steps: DummySteps, request: DynamicInferenceRequest, num_rows: int) -> list[Product]:
    """The products of a step that is padded to so many tokens and logits."""

    def padded(shape: StepShape) -> StepShape:
        if shape.prefills:
            return shape._replace(prefill_tokens=num_rows, logits=num_rows)
        return shape._replace(decodes=num_rows, logits=num_rows)

    recorder = ProductRecorder()
    with recorder:
        steps.run([(request, steps.longest)], padded)
    return recorder.products


def with_rows(small: Sequence[Product], large: Sequence[Product], num_rows: int) -> list[Product]:
    """The products of a step of `num_rows` tokens and logits, with their rows: what doubles in `large`."""
    small_names, large_names = [[product.name for product in step] for step in (small, large)]
    if small_names != large_names:
        first = next((f"{a} and {b}" for a, b in zip(small_names, large_names, strict=False) if a != b), "")
        counts = f"{len(small_names)} and {len(large_names)} products"
        raise BatchVarianceError(
            f"the model makes other products for other numbers of rows: {first or counts}"
        )
    products = [_with_rows(*pair, num_rows) for pair in zip(small, large, strict=True)]
    return [product for product in products if product.rows]  # others are of weights alone


def _with_rows(product: Product, large: Product, num_rows: int) -> Product:
    rows: list[tuple[int, int, int]] = []
    tensors = [index for index, leaf in enumerate(product.arguments) if isinstance(leaf, Tensor)]
    for index in tensors:
        shapes = product.arguments[index].shape, large.arguments[index].shape
        for dim, (size, larger) in enumerate(zip(*shapes, strict=True)):
            if size == larger:
                continue
            if (tensors.index(index), dim) in _contracted(product):
                raise BatchVarianceError(f"{product} adds over the rows of the step")
            if size % num_rows or larger != 2 * size:
                raise BatchVarianceError(f"{product} has {size} rows, and {larger} in a larger step")
            rows.append((index, dim, size // num_rows))
    arguments, dims = {index for index, _, _ in rows}, {dim for _, dim, _ in rows}
    if len(dims) > 1 or len(arguments) < len(rows):
        raise BatchVarianceError(f"{product} multiplies rows of the step with rows of the step")
    return product._replace(rows=tuple(rows))


def _contracted(product: Product) -> tuple[tuple[int, int], ...]:
    if product.name != _CHOICE:
        return _CONTRACTED[product.name]
    args, kwargs = tree_unflatten(product.arguments, product.structure)
    return ((0, _argument(product.func, args, kwargs, "dim") % args[0].dim()),)


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """The argument of an operator by its name, or its default."""
    values = {argument.name: argument.default_value for argument in func._schema.arguments}
    values |= dict(zip(values, args, strict=False))
    return (values | kwargs)[name]


def _check_known(product: Product) -> None:
    if product.name not in _CONTRACTED:
        raise BatchVarianceError(f"{product} is none of {', '.join(_CONTRACTED)}")
    for leaf in product.arguments:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype not in _DTYPES:
            raise BatchVarianceError(f"{product} multiplies {leaf.dtype}")


def _may_add_over_rows(name: str) -> bool:
    operator = name.partition(".")[2]
    return name in _CONTRACTED or operator in _UNKNOWN or any(part in operator for part in _UNKNOWN_PARTS)


def _inside_a_kernel() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(KERNELS):
            return frame.f_code.co_name != _HEAD
        frame = frame.f_back  # type: ignore[assignment]
    return False


# ---- whether their rows keep their bits


def product_difference(
    product: Product, most_rows: int, run: Callable[[Sequence[Any]], Any] | None = None
) -> str | None:
    """Where a row of a product has other bits than the same row among 256; None where nowhere."""
    check = _Check(product, invariant_buckets(most_rows), run or product.run)
    return first_case((text, check.differs(ids)) for text, ids in check.cases())


def why_not_in_few_rows(product: Product) -> str | None:
    """Why `FewRowsProducts` shall not make 8 rows: cuBLAS would, or other bits than among 256; or None."""
    from ...kernels.few_rows import FewRowsProducts  # here, because it imports triton

    mode = FewRowsProducts()

    def run(arguments: Sequence[Any]) -> Any:
        with mode:
            return product.run(arguments)

    try:
        check = _Check(product, (FEW_ROWS, BASE_ROWS), run)
        case = first_case((text, check.differs(ids)) for text, ids in check.cases())
    except Exception as error:  # other ranks wait; without few rows the engine works
        return f"{product} raises {type(error).__name__}: {error}"
    if case is not None:
        return f"{product} differs {case}"
    return f"cuBLAS makes {product}" if product.name in _BY_CUBLAS and not mode.num_made else None


def first_case(cases: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first text whose flag, one bool on the device, is set; None where none is. Synchronises once."""
    cases = list(cases)
    if not cases:
        return None
    flags = torch.stack([flag for _, flag in cases]).tolist()
    return next((text for (text, _), differs in zip(cases, flags, strict=True) if differs), None)


class _Check:
    """Runs a product on chosen rows of one set of random rows; in a grouped one each keeps its group."""

    def __init__(self, product: Product, counts: Sequence[int], run: Callable[[Sequence[Any]], Any]) -> None:
        self._product, self._counts, self._run = product, counts, run
        first, _, per_row = product.rows[0]
        self._device = product.arguments[first].device
        self._num_base = min(BASE_ROWS, counts[-1])
        generator = torch.Generator(self._device).manual_seed(_SEED)
        ties = product.name == _CHOICE
        self._base = {
            index: _random(product.arguments[index], dim, entries * self._num_base, generator, ties)
            for index, dim, entries in product.rows
        }
        self._groups: Tensor | None = None
        if product.name in _GROUPED:
            tensors = [index for index, leaf in enumerate(product.arguments) if isinstance(leaf, Tensor)]
            self._ends = tensors[2]
            self._num_groups = len(product.arguments[self._ends])
            size = (per_row * self._num_base,)
            self._groups = torch.randint(self._num_groups, size, generator=generator, device=self._device)
        self._all = torch.arange(self._num_base, device=self._device)
        self._reference = self._compute(self._all)

    def cases(self) -> Iterator[tuple[str, Tensor]]:
        """The rows to compute, by what is said of them."""
        for count in self._counts:
            yield f"among {count} rows", torch.arange(count, device=self._device) % self._num_base
            if count <= self._num_base:
                yield f"at another place among {count} rows", self._all.roll(-SHIFT)[:count]
        if self._groups is not None:
            for group in (0, self._num_groups - 1):
                alone = self._all[(self._groups.view(self._num_base, -1) == group).any(1)]
                if len(alone):
                    yield f"of group {group} alone among {len(alone)} rows", alone
                    yield f"of group {group} alone", alone[:1]

    def differs(self, ids: Tensor) -> Tensor:
        """Whether any of these rows has other bits than in the reference: one bool on the device."""
        results = torch.split(self._compute(ids), BASE_ROWS)
        expected = torch.split(_entries(ids, len(self._reference) // self._num_base), BASE_ROWS)
        parts = zip(results, expected, strict=True)
        return torch.stack([bits(part).ne(bits(self._reference[here])).any() for part, here in parts]).any()

    def _compute(self, ids: Tensor) -> Tensor:
        """The result's rows, first dimension."""
        arguments, order = list(self._product.arguments), None
        for index, dim, per_row in self._product.rows:
            entries = _entries(ids, per_row)
            if self._groups is not None:
                groups, order = torch.sort(self._groups[entries], stable=True)
                entries = entries[order]
                group_ids = torch.arange(self._num_groups, device=self._device)
                ends = torch.searchsorted(groups, group_ids, right=True)
                arguments[self._ends] = ends.to(arguments[self._ends].dtype)
            chosen = self._base[index].index_select(dim, entries)
            arguments[index] = _laid_out_like(chosen, arguments[index])
        result = self._run(arguments)
        if self._product.name == _CHOICE:
            _, result = result  # where the values were
        rows: Tensor = result.movedim(dim, 0)
        return rows if order is None else torch.empty_like(rows).index_copy_(0, order, rows)


def _entries(ids: Tensor, per_row: int) -> Tensor:
    return (ids[:, None] * per_row + torch.arange(per_row, device=ids.device)).flatten()


def _random(like: Tensor, dim: int, size: int, generator: torch.Generator, ties: bool) -> Tensor:
    """Normal numbers; with `ties`, some of few different ones."""
    shape = [*like.shape]
    shape[dim] = size
    values = torch.randn(shape, generator=generator, device=like.device)
    return (values.round() if ties else values).to(like.dtype)


def _order(tensor: Tensor) -> list[int]:
    """The dimensions of a tensor in the order in which they lie in memory."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _laid_out_like(values: Tensor, like: Tensor) -> Tensor:
    """`values` with the order of dimensions in memory of `like`, and its distance of matrix rows."""
    order = _order(like)
    ordered = values.permute(order)
    if like.dim() == 2 and like.stride(order[1]) == 1 and like.stride(order[0]) > ordered.shape[1]:
        wide = ordered.new_empty(len(ordered), like.stride(order[0]))
        ordered = wide[:, : ordered.shape[1]].copy_(ordered)
    else:
        ordered = ordered.contiguous()
    return ordered.permute([order.index(dim) for dim in range(like.dim())])


def bits(values: Tensor) -> Tensor:
    """Floating-point numbers as integers, so that a NaN equals itself."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(integers[values.element_size()])
