"""`python -m mambaslots.replay`: the command `mambaslots replay`."""

import sys

from ..cli.main import main

if __name__ == "__main__":
    sys.exit(main(["replay", *sys.argv[1:]]))
