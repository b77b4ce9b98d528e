"""Triton's interpreter as our tests use it."""

import inspect
from dataclasses import replace
from typing import Any

import numpy as np


def accept_masks_of_any_integer() -> None:
    """Let masked loads and stores of Triton 3.9's interpreter read what compiled kernels read.

    Its `block & scalar` of two int1 values has 32-bit integers, and its loads and stores take bools alone.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    def with_bool_mask(method: Any, place: int) -> Any:
        def call(builder: Any, *handles: Any) -> Any:
            mask = handles[place]
            if mask.data.dtype != np.bool_:
                mask.data = mask.data != 0
            return method(builder, *handles)

        return call

    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(InterpreterBuilder, name, with_bool_mask(getattr(InterpreterBuilder, name), place))


def add_products_in_order() -> None:
    """Add products of float32 in one order: 16 terms, the depth of a tensor core's instruction, then more.

    OpenBLAS has an order for each size, layout and processor, so that slices of a product had other bits than
    the whole. Sums of 16 are rounded once, from float64; how a GPU rounds inside of 16 is not modelled.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *rules: Any) -> Any:
        if d.data.dtype != np.float32 or a.data.dtype.kind != "f" or a.dtype.primitive_bitwidth == 8:
            return multiply(builder, a, b, d, *rules)
        sums, left, right = d.data, a.data.astype(np.float64), b.data.astype(np.float64)
        for first in range(0, left.shape[-1], 16):
            terms = slice(first, first + 16)
            sums = sums + (left[..., terms] @ right[..., terms, :]).astype(np.float32)
        return TensorHandle(sums, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def prepare_launches_once() -> None:
    """Spare launches what they have in common: it spares three quarters of the time of a test of kernels.

    Each launch would look through triton.language for what to replace, and so would each function that a
    kernel calls; each value would describe its type and shape anew; each sum of two integers would be
    computed a second time, in 64 bits, for an assertion that is made in debug mode alone.
    """
    from triton import language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    core, semantic = tl.core, interpreter.interpreter_semantic
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    places = (tl, core, tl.math, tl.tensor, core.tensor_descriptor_base)
    builtins = {
        id(place): {
            name: _with_semantic(member, semantic)
            for name, member in inspect.getmembers(place)
            if core.is_builtin(member)
        }
        for place in places
    }
    patch_others, patch_lang, dtype_of = (
        interpreter._patch_builtin,
        interpreter._patch_lang,
        interpreter._get_np_dtype,
    )
    replaced: list[set[int]] = []  # by the launch that runs: ids of modules
    dtypes: dict[str, np.dtype[Any]] = {}

    def patch_builtin(place: Any, builder: Any, scope: Any) -> None:
        if id(place) not in builtins:
            patch_others(place, builder, scope)
            return
        for name, member in builtins[id(place)].items():
            if core.is_builtin(getattr(place, name)):
                scope.set_attr(place, name, member)

    def patch(fn: Any) -> Any:
        modules = {id(value) for value in fn.__globals__.values() if value is tl or value is core}
        if replaced and modules <= replaced[-1]:
            return interpreter._LangPatchScope()
        scope = patch_lang(fn)
        if not replaced:
            replaced.append(modules)
            scope._changes.insert(0, (_End(replaced), "ended", True))  # restored last
        else:
            replaced[-1] |= modules
        return scope

    def np_dtype(dtype: Any) -> Any:
        if isinstance(dtype, core.block_type):
            dtype = dtype.element_ty
        if isinstance(dtype, core.pointer_type):
            return np.dtype(np.uint64)
        if dtype.name not in dtypes:
            dtypes[dtype.name] = dtype_of(dtype)
        return dtypes[dtype.name]

    shapes: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    shapes_of_tensors: dict[int, tuple[Any, Any]] = {}  # by the id of a shape of `shapes`; 0: of scalars
    new_block_type, new_tensor = core.block_type.__init__, core.tensor.__init__

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if sizes in shapes:
            self.element_ty = element_ty
            self.shape, self.numel, shown = shapes[sizes]
            self.name = f"<{shown}, {element_ty}>"
        else:
            new_block_type(self, element_ty, shape)
            shapes[sizes] = self.shape, self.numel, str(self.shape)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        place = id(type.shape) if isinstance(type, core.block_type) else 0
        if place in shapes_of_tensors:
            self.handle, self.type = handle, type
            self.dtype = type.element_ty if place else type.scalar
            self.numel, self.shape = shapes_of_tensors[place]
        else:
            new_tensor(self, handle, type)
            if not place or any(type.shape is known for known, _, _ in shapes.values()):
                shapes_of_tensors[place] = self.numel, self.shape

    # What most operands need nothing of is left out: same shapes need no broadcast, same types no cast.
    eq_dtype, eq_pointer = core.dtype.__eq__, core.pointer_type.__eq__
    core.dtype.__eq__ = lambda self, other: self is other or eq_dtype(self, other)
    core.pointer_type.__eq__ = lambda self, other: self is other or eq_pointer(self, other)
    eq_tuple = core.tuple.__eq__
    core.tuple.__eq__ = lambda self, other: (
        core.constexpr(self.values == other.values) if type(other) is core.tuple else eq_tuple(self, other)
    )
    broadcast, cast = TritonSemantic.broadcast_impl_value, TritonSemantic.cast

    def broadcast_unless_alike(self: Any, lhs: Any, rhs: Any) -> Any:
        ours = lhs.type.shape if isinstance(lhs.type, core.block_type) else None
        theirs = rhs.type.shape if isinstance(rhs.type, core.block_type) else None
        return (lhs, rhs) if ours is theirs else broadcast(self, lhs, rhs)

    def cast_unless_alike(self: Any, value: Any, to: Any, *rounding: Any, **named: Any) -> Any:
        return value if value.dtype is to else cast(self, value, to, *rounding, **named)

    TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast_unless_alike, cast_unless_alike
    TritonSemantic.binary_op_type_checking_impl = _operands_of_one_dtype(
        TritonSemantic.binary_op_type_checking_impl
    )
    interpreter.InterpreterBuilder.create_expand_dims = _expand_dims
    interpreter.TensorHandle.__init__ = _init_handle(interpreter.TensorHandle)
    core._unwrap_if_constexpr = _unwrapped(core._unwrap_if_constexpr)
    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch
    interpreter._get_np_dtype = np_dtype
    core.block_type.__init__, core.tensor.__init__ = init_block_type, init_tensor


def _operands_of_one_dtype(check: Any) -> Any:
    """`check` of two operands, without what two of one dtype, or one and a plain number, need nothing of.

    numpy broadcasts the operands of an operation by itself: here they are only given the shape of the result.
    """
    from triton.language import core
    from triton.runtime.interpreter import TensorHandle

    numbers = {core.int32: int, core.int64: int, core.float32: float, core.float64: float}
    kinds = {id(dtype): kind for dtype, kind in numbers.items()}  # those that no arithmetic promotes
    ranges = {id(dtype): 2 ** (dtype.primitive_bitwidth - 1) for dtype in (core.int32, core.int64)}
    arrays = {id(dtype): np.dtype(dtype.name.replace("fp", "float")) for dtype in numbers}
    constants: dict[tuple[int, Any], Any] = {}
    of_shapes: dict[tuple[Any, Any], Any] = {}
    types: dict[tuple[int, Any], Any] = {}

    def constant(value: Any, dtype: Any) -> Any:
        """The tensor that `value` is beside one of `dtype`; None: `check` knows."""
        key = id(dtype), value
        if key not in constants:
            if id(dtype) in ranges and not -ranges[id(dtype)] <= value < ranges[id(dtype)]:
                return None
            data = np.array([value or 0], arrays[id(dtype)])  # -0.0 is a null value, too
            data.flags.writeable = False
            if value != value:
                return core.tensor(TensorHandle(data, dtype), dtype)
            constants[key] = core.tensor(TensorHandle(data, dtype), dtype)
        return constants[key]

    def broadcast(lhs: Any, rhs: Any) -> Any:
        """The shape of both; None: `check` knows."""
        if len(lhs) != len(rhs):
            return None
        pairs = list(zip(lhs, rhs, strict=True))
        fit = all(1 in pair or pair[0] == pair[1] for pair in pairs)
        return tuple(max(pair) for pair in pairs) if fit else None

    def shaped(operand: Any, shape: Any) -> Any:
        of = operand.type
        if shape is None or (isinstance(of, core.block_type) and of.shape == shape):
            return operand
        if id(operand.dtype) not in kinds:  # pointers
            return core.tensor(operand.handle, core.block_type(operand.dtype, list(shape)))
        key = id(operand.dtype), shape
        if key not in types:
            types[key] = core.block_type(operand.dtype, list(shape))
        return core.tensor(operand.handle, types[key])

    def check_operands(self: Any, lhs: Any, rhs: Any, *rules: Any, **named: Any) -> Any:
        left, right = lhs, rhs
        if type(right) in (int, float) and isinstance(left, core.tensor):
            kind = kinds.get(id(left.dtype))
            right = constant(right, left.dtype) if kind and kind in (float, type(right)) else None
        elif type(left) in (int, float) and isinstance(right, core.tensor):
            kind = kinds.get(id(right.dtype))
            left = constant(left, right.dtype) if kind and kind in (float, type(left)) else None
        if not isinstance(left, core.tensor) or not isinstance(right, core.tensor):
            return check(self, lhs, rhs, *rules, **named)
        if isinstance(left.dtype, core.pointer_type):
            fits = rules[:1] == (True,) and id(right.dtype) in ranges
        else:
            fits = left.dtype is right.dtype and id(left.dtype) in kinds
        if not fits:
            return check(self, lhs, rhs, *rules, **named)
        ours = left.type.shape if isinstance(left.type, core.block_type) else None
        theirs = right.type.shape if isinstance(right.type, core.block_type) else None
        if ours is theirs:
            return left, right
        if ours is not None and theirs is not None:
            if (ours, theirs) not in of_shapes:
                of_shapes[ours, theirs] = broadcast(ours, theirs)
            shape = of_shapes[ours, theirs]
            if shape is None:
                return check(self, lhs, rhs, *rules, **named)
        else:
            shape = ours or theirs
        return shaped(left, shape), shaped(right, shape)

    return check_operands


def _expand_dims(builder: Any, value: Any, axis: int) -> Any:
    return type(value)(value.data[(slice(None),) * axis + (None,)], value.dtype.scalar)


def _unwrapped(unwrap: Any) -> Any:
    """`unwrap`, which most values need nothing of: they are no constants, and hold none."""
    from triton.language import core

    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, bool, float, str, type(None)}
    return lambda value: value if type(value) in plain else unwrap(value)


def _init_handle(handle: Any) -> Any:
    """The constructor of a dataclass, with its check in a line."""
    from triton.language import core

    check = handle.__post_init__

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        size = data.itemsize
        if size > 1 and not isinstance(dtype, core.pointer_type) and 8 * size > dtype.primitive_bitwidth:
            check(self)

    return init


def _with_semantic(member: Any, semantic: Any) -> Any:
    """A builtin as a kernel calls it, without its own check that it is called so."""
    inner = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    return call


class _End:
    """Empties a list when the attribute `ended` is set."""

    def __init__(self, running: list[set[int]]) -> None:
        object.__setattr__(self, "running", running)

    def __setattr__(self, name: str, value: Any) -> None:
        self.running.clear()
