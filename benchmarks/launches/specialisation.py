"""A kernel with the types and constants of one launch, from which Triton compiles it without a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Specialisation:
    """One kernel with the argument types and constants of one launch.

    `benchmarks/launches/kernel_shapes.py` lists the launches at the shapes of Nemotron-H-8B.
    `benchmarks/compile_kernels.py` compiles them for sm_90 and reports the machine code.
    """

    name: str
    """Unique among all launches: the kernel, then this launch, as "copy_states float32"."""
    kernel: Any
    """The `@triton.jit` function."""
    signature: Mapping[str, str]
    """Argument -> triton type ("*fp32", "*i64", "i32", "i64", "fp32", ...), without the constants."""
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    """Argument -> value: every `tl.constexpr`, and arguments that are 1 or None at this launch."""
    divisible_by_16: tuple[str, ...] = ()
    """Arguments of `signature` whose values are multiples of 16: aligned pointers, even strides."""
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None
    """The most registers of a thread; None leaves them to the assembler."""
    wide: tuple[Literal["load", "store"], ...] = ()
    """Which global accesses must be 16 bytes wide; kernels that move states name theirs."""
