"""Run a script with megatron-core on our slot allocator: `python -m mambaslots.mcore SCRIPT ARGS...`."""

import os
import runpy
import sys
from pathlib import Path

import torch

from .install import install

USAGE = "usage: python -m mambaslots.mcore SCRIPT [ARGUMENTS...]"
WITHOUT_CUDA = {
    "TRITON_INTERPRET": "1",  # Triton has no compiler for a CPU
    "MAMBA_DETERMINISTIC": "1",  # megatron-core tries one configuration of a kernel, and times none
}
"""The environment that megatron-core's kernels need without a CUDA device, when they are imported."""


def main(arguments: list[str]) -> None:
    """Install with the defaults, then run the script as Python would: its folder first on the path."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stderr)
        raise SystemExit(0 if arguments else 2)
    script = Path(arguments[0])
    if not script.is_file():
        print(f"{USAGE}\n{script} is no file", file=sys.stderr)
        raise SystemExit(2)
    interpret_without_cuda()
    install()
    sys.argv[:] = arguments
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


def interpret_without_cuda() -> None:
    """Set `WITHOUT_CUDA` where no CUDA device is visible, unless TRITON_INTERPRET is set; says so on stderr.

    Triton and megatron-core read these variables at their import, which `install` causes.
    """
    if torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ:
        return
    os.environ.update(WITHOUT_CUDA)
    settings = " ".join(f"{name}={value}" for name, value in WITHOUT_CUDA.items())
    print(f"mambaslots.mcore: no CUDA device is visible; setting {settings}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
