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
    broadcast, cast = TritonSemantic.broadcast_impl_value, TritonSemantic.cast

    def broadcast_unless_alike(self: Any, lhs: Any, rhs: Any) -> Any:
        ours = lhs.type.shape if isinstance(lhs.type, core.block_type) else None
        theirs = rhs.type.shape if isinstance(rhs.type, core.block_type) else None
        return (lhs, rhs) if ours is theirs else broadcast(self, lhs, rhs)

    def cast_unless_alike(self: Any, value: Any, to: Any, *rounding: Any, **named: Any) -> Any:
        return value if value.dtype is to else cast(self, value, to, *rounding, **named)

    TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast_unless_alike, cast_unless_alike
    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch
    interpreter._get_np_dtype = np_dtype
    core.block_type.__init__, core.tensor.__init__ = init_block_type, init_tensor


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
