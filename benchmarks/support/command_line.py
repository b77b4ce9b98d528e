"""The arguments that benchmarks share with the examples; see `examples/arguments.py`."""

import argparse
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import arguments
from arguments import add_count as add_count
from arguments import add_device as add_device
from arguments import make_parser as make_parser
from arguments import new_file as new_file


def parse_on_gpu(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of a script that measures a GPU; ends it with exit code 0 where there is none."""
    parsed = parser.parse_args()
    if not torch.cuda.is_available():
        print("nothing measured: this needs a GPU")
        sys.exit()
    return parsed


def check_device(parser: argparse.ArgumentParser, device: str) -> None:
    """End the script where a GPU is missing: with exit code 0 where `--device` was not given."""
    if (
        device == "cuda"
        and not torch.cuda.is_available()
        and not any("--device" in word for word in sys.argv)
    ):
        print("nothing measured: this needs a GPU (or --device cpu; see --help)")
        sys.exit()
    arguments.check_device(parser, device)
