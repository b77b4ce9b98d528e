"""`python -m mambaslots.mcore [OPTIONS] SCRIPT [ARGUMENTS...]`: a script with the drop-in."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
