"""Faults that a sanitizer must report: run by `sanitize.py`, once for each tool, under that tool."""

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from arguments import make_parser
from torch import Tensor


@triton.jit
def planted_kernel(out, source, count, BLOCK: tl.constexpr):
    """Adds 1 to `count` numbers, whatever memory they lie in."""
    place = tl.arange(0, BLOCK)
    inside = place < count
    tl.store(out + place, tl.load(source + place, mask=inside) + 1.0, mask=inside)


RACE = """
extern "C" __global__ void planted_race(float* out) {
  __shared__ float shared[64];
  shared[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = shared[63 - threadIdx.x];
}
"""
BARRIER = """
extern "C" __global__ void planted_barrier(float* out) {
  if (threadIdx.x < 16) __syncthreads();
  out[threadIdx.x] = threadIdx.x;
}
"""


def plant(tool: str) -> Tensor:
    """One launch that breaks what `tool` watches over; "product" reads what cuBLAS has written."""
    device = torch.device("cuda")
    out = torch.zeros(64, device=device)
    if tool == "product":
        factors = [torch.ones(64, 64, dtype=torch.bfloat16).to(device) for _ in range(2)]
        planted_kernel[(1,)](out, factors[0] @ factors[1], 64, BLOCK=64)
    elif tool == "memcheck":  # one number beyond a whole allocation
        size = 1 << 19
        source = torch.zeros(size, device=device)
        planted_kernel[(1,)](out, source[size - 63 :], 64, BLOCK=64)
    elif tool == "initcheck":
        planted_kernel[(1,)](out, torch.empty(1 << 19, device=device), 64, BLOCK=64)
    else:
        name, code = ("planted_race", RACE) if tool == "racecheck" else ("planted_barrier", BARRIER)
        torch.cuda._compile_kernel(code, name)((1, 1, 1), (64, 1, 1), (out,))
    return out


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("tool", choices=("memcheck", "racecheck", "initcheck", "synccheck", "product"))
    plant(parser.parse_args().tool)
    torch.cuda.synchronize()
    print("launched")
    sys.exit()
