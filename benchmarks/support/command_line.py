"""The arguments that benchmarks share with the examples; see `examples/arguments.py`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from arguments import add_count as add_count
from arguments import add_device as add_device
from arguments import check_device as check_device
from arguments import make_parser as make_parser
from arguments import new_file as new_file
