"""What a launcher asks triton to compile, written down so that it can be compiled without a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Specialisation:
    """One kernel with the argument types and constants of one launch.

    Every kernel file lists its own as `hopper_specialisations()`, at the shapes of Nemotron-H-8B;
    `benchmarks/compile_kernels.py` compiles them for sm_90 and reads what came out.
    """

    name: str
    """Unique among all kernels: the kernel and what is special here, as "state_copy fp32"."""
    kernel: Any
    """The `@triton.jit` function."""
    signature: Mapping[str, str]
    """Argument -> triton type ("*fp32", "*i64", "i32", "i64", "fp32", ...), without the constants."""
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    """Argument -> value: every `tl.constexpr`, and arguments that are 1 or None at this launch."""
    divisible_by_16: tuple[str, ...] = ()
    """Arguments of `signature` that the launcher's are multiples of 16: aligned pointers, even strides."""
    num_warps: int = 4
    num_stages: int = 3
    wide: tuple[Literal["load", "store"], ...] = ()
    """The global accesses that must be 16 bytes wide: those of copy and state kernels."""
