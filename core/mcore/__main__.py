"""Run a script with megatron-core on our slot allocator: `python -m mambaslots.mcore SCRIPT ARGS...`."""

import runpy
import sys
from pathlib import Path

from .install import install

USAGE = "usage: python -m mambaslots.mcore SCRIPT [ARGUMENTS...]"


def main(arguments: list[str]) -> None:
    """Install with the defaults, then run the script as Python would: its folder first on the path."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stderr)
        raise SystemExit(0 if arguments else 2)
    script = Path(arguments[0])
    if not script.is_file():
        print(f"{USAGE}\n{script} is no file", file=sys.stderr)
        raise SystemExit(2)
    install()
    sys.argv[:] = arguments
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
