"""What do the Triton kernels become on a Hopper GPU? Compiled here, without one.

`kernel_shapes.py` lists the launches of a step of Nemotron-H-8B, `delta_shapes.py` those of the gated
delta rule in Qwen3.5-4B and models of its kind, `pointwise_shapes.py` those of norms and gates, and
`segment_shapes.py` those of attention in segments, `codec_shapes.py` those that encode and decode cached
states. This script compiles every launch for sm_90 and prints what the PTX and the assembler say, which runs
with Triton's options:

registers   of a thread; 65,536 on a multiprocessor
spilled     bytes of registers that went to local memory, stored and loaded
stack       bytes of local memory of a thread
shared      bytes of shared memory of a program; 232,448 at most on an H200
loads       how many global loads of which width in bytes, as 8 x 16; asynchronous copies count as loads
stores      the same for stores

Exits 1 when a kernel spills (with capped registers, which two programs on a multiprocessor need: more than
64 bytes), or when one that moves states lacks the 16-byte accesses it must have.
"""

import io
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass

import triton
from launches.align_shapes import hopper_specialisations as align_specialisations
from launches.codec_shapes import CODEC_SHAPES
from launches.delta_shapes import DELTA_SHAPES
from launches.gate_shapes import GATE_SHAPES
from launches.kernel_shapes import SHAPES
from launches.pointwise_shapes import POINTWISE_SHAPES
from launches.segment_shapes import SEGMENT_SHAPES
from launches.specialisation import Specialisation
from launches.ssd_shapes import SSD_SHAPES
from support.command_line import make_parser
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KERNELS: dict[str, tuple[Callable[[], list[Specialisation]], ...]] = {"align": (align_specialisations,)}
"""Each file that has kernels -> its launches."""
for table in (
    *(SHAPES, DELTA_SHAPES, GATE_SHAPES, SSD_SHAPES),
    *(POINTWISE_SHAPES, SEGMENT_SHAPES, CODEC_SHAPES),
):
    for file, launches in table.items():
        KERNELS[file] = (*KERNELS.get(file, ()), *launches)
HOPPER = GPUTarget("cuda", 90, 32)
ARCHITECTURE = "sm_90a"
WIDEST = 16
CAPPED_SPILL_BYTES = 64

Widths = dict[int, int]
"""Bytes of an access -> how many such instructions."""


@dataclass(frozen=True)
class Compiled:
    """One specialisation's machine code in numbers."""

    name: str
    file: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    loads: Widths
    stores: Widths
    faults: tuple[str, ...]


def specialisations(names: tuple[str, ...]) -> Iterator[tuple[str, Specialisation]]:
    """The launches of these kernel files, in order; exits when two launches have the same name."""
    seen: set[str] = set()
    for name in names:
        for specialisation in (found for launches in KERNELS[name] for found in launches()):
            if specialisation.name in seen:
                sys.exit(f"two specialisations are called {specialisation.name!r}")
            seen.add(specialisation.name)
            yield name, specialisation


def compiled(file: str, wanted: Specialisation) -> Compiled:
    """Compile one specialisation for sm_90 and read its code; exits when arguments are missing."""
    names = wanted.kernel.arg_names
    given = wanted.signature.keys() | wanted.constexprs.keys()
    if given != set(names) or wanted.signature.keys() & wanted.constexprs.keys():
        sys.exit(f"{wanted.name}: of {names} the specialisation names {sorted(given)}")
    source = ASTSource(
        wanted.kernel,
        {name: wanted.signature.get(name, "constexpr") for name in names},
        dict(wanted.constexprs),
        {(names.index(name),): [["tt.divisibility", 16]] for name in wanted.divisible_by_16},
    )
    options = {"num_warps": wanted.num_warps, "num_stages": wanted.num_stages, "maxnreg": wanted.maxnreg}
    log = io.StringIO()
    with redirect_stdout(log):  # Triton prints there what its assembler says
        binary = triton.compile(source, target=HOPPER, options=options)
    ptx = binary.asm["ptx"]
    resources = resources_in(log.getvalue())
    loads, stores = access_widths(ptx)
    faults = []
    if resources["spill_stores"] > (CAPPED_SPILL_BYTES if wanted.maxnreg else 0):
        faults.append("spills")
    found = {"load": loads, "store": stores}
    faults += [f"no {WIDEST}-byte {access}s" for access in wanted.wide if WIDEST not in found[access]]
    return Compiled(
        wanted.name, file, **resources, shared=binary.metadata.shared, loads=loads, stores=stores,
        faults=tuple(faults),
    )  # fmt: skip


def resources_in(said: str) -> dict[str, int]:
    """What the assembler says of the kernel: registers, bytes spilled each way, stack."""
    if "Used" not in said:
        sys.exit(f"the assembler said nothing of registers: {said!r}")
    patterns = {
        "registers": r"Used (\d+) registers",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
        "stack": r"(\d+) bytes stack frame",
    }
    return {name: sum(map(int, re.findall(pattern, said))) for name, pattern in patterns.items()}


def access_widths(ptx: str) -> tuple[Widths, Widths]:
    """Global loads and stores of a PTX text, by bytes of one thread's access; atomics are neither."""
    widths: dict[str, Counter[int]] = {"ld": Counter(), "st": Counter()}
    for access, lanes, bits in re.findall(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\s", ptx):
        widths[access][int(lanes or 1) * int(bits) // 8] += 1
    for size in re.findall(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?\],\s*\[[^\]]*\],\s*(0x\w+|\d+)", ptx):
        widths["ld"][int(size, 0)] += 1
    loads, stores = (dict(sorted(widths[access].items(), reverse=True)) for access in ("ld", "st"))
    return loads, stores


def row_of(kernel: Compiled) -> str:
    def shown(widths: Widths) -> str:
        return ", ".join(f"{number} x {width}" for width, number in widths.items()) or "-"

    spilled = f"{kernel.spill_stores}/{kernel.spill_loads}"
    numbers = f"{kernel.registers:>9}{spilled:>9}{kernel.stack:>7}{kernel.shared:>8}"
    faults = f"  << {', '.join(kernel.faults)}" if kernel.faults else ""
    return f"{kernel.name:<48}{numbers}  {shown(kernel.loads):<28}{shown(kernel.stores)}{faults}"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("kernels", nargs="*", help=f"kernel files (default: {', '.join(KERNELS)})")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET is 1, which makes kernels that cannot be compiled; unset it")
    triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True
    names: tuple[str, ...] = tuple(arguments.kernels or KERNELS)
    if unknown := set(names) - KERNELS.keys():
        parser.error(f"kernels are {sorted(unknown)}; accepted: {', '.join(KERNELS)}")

    header = f"{'registers':>9}{'spilled':>9}{'stack':>7}{'shared':>8}  {'loads':<28}stores"
    print(f"compiled for {ARCHITECTURE} by triton {triton.__version__}\n\n{'kernel':<48}{header}")
    kernels = []
    for file, specialisation in specialisations(names):
        kernels.append(compiled(file, specialisation))
        print(row_of(kernels[-1]), flush=True)
    faulty = [kernel.name for kernel in kernels if kernel.faults]
    verdict = f"NOT as they must be: {', '.join(faulty)}" if faulty else "all as they must be"
    print(f"\n{len(kernels)} kernels; {verdict}")
    if arguments.json:
        figures = {
            "architecture": ARCHITECTURE,
            "triton": triton.__version__,
            "kernels": [asdict(kernel) for kernel in kernels],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
