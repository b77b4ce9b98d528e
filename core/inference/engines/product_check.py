"""Whether the rows of a product have the same bits in any number of rows, and a product that has."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..contexts.step_inputs import StepInputs, rungs
from .recorded_products import CHOICE, GROUPED, DecomposingMode, Product, operator_name, weight_key
from .runner import Model

BASE_ROWS = 256
"""Different rows of the operands. Larger products repeat them, so that a row comes at several places."""
SHIFT = 37
_SEED = 16


def first_difference(
    product: Product, most_rows: int, run: Callable[[Sequence[object]], Tensor] | None = None
) -> str:
    """Where a row of a product has other bits than the same row among 256; empty where nowhere."""
    rows = rungs(most_rows)
    num_base = min(BASE_ROWS, rows[-1])
    check = (_GroupedCheck if product.call.name in GROUPED else _DenseCheck)(
        product, num_base, run or product.call.run
    )
    return first_case((text, check.differs(ids)) for text, ids in check.cases(rows))


def first_case(cases: Iterable[tuple[str, Tensor]]) -> str:
    """The first text whose flag, one bool on the device, is set; empty where none is. Synchronises once."""
    listed = list(cases)
    if not listed:
        return ""
    flags = torch.stack([flag for _, flag in listed]).tolist()
    return next((text for (text, _), differs in zip(listed, flags, strict=True) if differs), "")


class _DenseCheck:
    """Runs a product on chosen rows of one set of random rows."""

    def __init__(self, product: Product, num_base: int, run: Callable[[Sequence[object]], Tensor]) -> None:
        self._product, self._num_base, self._run = product, num_base, run
        self._device = product.call.arguments[product.rows[0].argument].device
        generator = torch.Generator(self._device).manual_seed(_SEED)
        self._base = {
            row.argument: _random(
                product.call.arguments[row.argument],
                row.dim,
                row.per_row * num_base,
                generator,
                product.call.name == CHOICE,
            )
            for row in product.rows
        }
        self._reference = self._compute(self._all())

    def _all(self) -> Tensor:
        return torch.arange(self._num_base, device=self._device)

    def cases(self, rows: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        """The rows to compute, by what is said of them."""
        base = self._all()
        for count in rows:
            ids = torch.arange(count, device=self._device) % self._num_base
            yield f"among {count} rows", ids
            if count <= self._num_base:
                yield f"at another place among {count} rows", base.roll(-SHIFT)[:count]

    def differs(self, ids: Tensor) -> Tensor:
        """Whether any of these rows has other bits than in the reference: one bool on the device."""
        return self._unequal(self._compute(ids), self._entries(ids, self._per_row_out()))

    def _unequal(self, result: Tensor, entries: Tensor) -> Tensor:
        flags = [
            bits(part).ne(bits(self._reference[here])).any()
            for part, here in zip(
                torch.split(result, BASE_ROWS), torch.split(entries, BASE_ROWS), strict=True
            )
        ]
        return torch.stack(flags).any()

    def _per_row_out(self) -> int:
        return len(self._reference) // self._num_base

    def _compute(self, ids: Tensor) -> Tensor:
        """The result's rows, first dimension."""
        arguments = list(self._product.call.arguments)
        for row in self._product.rows:
            chosen = self._base[row.argument].index_select(row.dim, self._entries(ids, row.per_row))
            arguments[row.argument] = _laid_out_like(chosen, arguments[row.argument])
        result: Any = self._run(arguments)
        if self._product.call.name == CHOICE:
            _, result = result  # where the values were
        rows_first: Tensor = result.movedim(self._product.out_dim, 0)
        return rows_first

    def _entries(self, ids: Tensor, per_row: int) -> Tensor:
        if per_row == 1:
            return ids
        return (ids[:, None] * per_row + torch.arange(per_row, device=ids.device)).flatten()


class _GroupedCheck(_DenseCheck):
    """Each random row belongs to one group for good; rows are sorted by group, as experts' rows are."""

    def __init__(self, product: Product, num_base: int, run: Callable[[Sequence[object]], Tensor]) -> None:
        arguments = product.call.arguments
        tensors = [index for index, leaf in enumerate(arguments) if isinstance(leaf, Tensor)]
        self._ends = tensors[2]
        ends = arguments[self._ends]
        self._num_groups = len(ends)
        generator = torch.Generator(ends.device).manual_seed(_SEED)
        entries = num_base * product.rows[0].per_row
        self._groups = torch.randint(self._num_groups, (entries,), generator=generator, device=ends.device)
        super().__init__(product, num_base, run)

    def cases(self, rows: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        yield from super().cases(rows)
        per_row = self._product.rows[0].per_row
        groups = self._groups.view(-1, per_row)
        for group in (0, self._num_groups - 1):
            alone = self._all()[(groups == group).any(1)]
            if len(alone):
                yield f"of group {group} alone among {len(alone)} rows", alone
                yield f"of group {group} alone", alone[:1]

    def _compute(self, ids: Tensor) -> Tensor:
        row = self._product.rows[0]
        entries = self._entries(ids, row.per_row)
        groups, order = torch.sort(self._groups[entries], stable=True)
        numbers = torch.arange(self._num_groups, device=ids.device)
        arguments = list(self._product.call.arguments)
        ends = arguments[self._ends]
        arguments[self._ends] = torch.searchsorted(groups, numbers, right=True).to(ends.dtype)
        arguments[row.argument] = self._base[row.argument][entries[order]]
        result = self._run(arguments)
        unsorted = torch.empty_like(result)
        unsorted[order] = result
        return unsorted


def _random(like: Tensor, dim: int, size: int, generator: torch.Generator, ties: bool) -> Tensor:
    """Normal numbers; with `ties`, some of few different ones."""
    shape = [*like.shape]
    shape[dim] = size
    values = torch.randn(shape, generator=generator, device=like.device)
    return (values.round() if ties else values).to(like.dtype)


def _laid_out_like(values: Tensor, like: Tensor) -> Tensor:
    """`values` with the order of dimensions in memory of `like`, and its distance of matrix rows."""
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
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


_REPLACED = ("aten.mm", "aten.addmm")


def sequential(arguments: Sequence[Any]) -> Tensor:
    """A product from its arguments, by `kernels.sequential_product`."""
    from ..kernels.products import matmul

    tensors = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
    out_dtype = next((leaf for leaf in arguments if isinstance(leaf, torch.dtype)), None)
    bias = tensors[0] if len(tensors) == 3 else None
    result: Tensor = matmul(tensors[-2], tensors[-1], bias, out_dtype)
    return result


class WithReplacedProducts(DecomposingMode):  # type: ignore[no-untyped-call]
    """A model some of whose products `sequential` computes; it can be captured as the model can."""

    def __init__(self, model: Model, replaced: set[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self._replaced = model, replaced
        self.state_spec = model.state_spec

    def __call__(self, inputs: StepInputs) -> Tensor:
        with self:
            return self.model(inputs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = operator_name(func)
        if name in _REPLACED:
            arguments = tree_leaves((args, kwargs))
            if weight_key(name, arguments) in self._replaced:
                return sequential(arguments)
        return func(*args, **kwargs)


def is_replaceable(product: Product) -> bool:
    """Whether the product is x @ weight, or x @ weight + bias, of the rows x of a step."""
    arguments = product.call.arguments
    tensors = [index for index, leaf in enumerate(arguments) if isinstance(leaf, Tensor)]
    scaled = any(isinstance(leaf, (int, float)) for leaf in arguments)  # alpha and beta
    is_linear = [row[:2] for row in product.rows] == [(tensors[-2], 0)]
    return product.call.name in _REPLACED and is_linear and not scaled and arguments[tensors[0]].dim() < 3
