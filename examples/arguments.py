"""The arguments that scripts share: `--json PATH`, `--device {cpu,cuda}`, counts, and files to write."""

import argparse
from importlib.util import find_spec
from pathlib import Path


def make_parser(text: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with `text`, a script's docstring, and that has `--json`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=new_file, metavar="PATH", help="write the figures to this file")
    return parser


def add_device(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=default, help="where to compute (default: %(default)s)"
    )


def check_device(parser: argparse.ArgumentParser, device: str) -> None:
    """End the script with a message where `device` is "cuda" and torch sees no GPU."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: 'cuda', and torch sees no GPU; accepted: cpu")


def add_count(parser: argparse.ArgumentParser, name: str, default: int, text: str, at_least: int = 1) -> None:
    def count(value: str) -> int:
        if not value.isdecimal() or int(value) < at_least:
            raise argparse.ArgumentTypeError(f"{value!r}; accepted: an integer >= {at_least}")
        return int(value)

    parser.add_argument(name, type=count, default=default, metavar="N", help=f"{text} (default: %(default)s)")


def add_minutes(parser: argparse.ArgumentParser, default: float) -> None:
    def minutes(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not 0 < number < 1e6:
            raise argparse.ArgumentTypeError(f"{value!r}; accepted: a number of minutes above 0")
        return number

    text = "how long (default: %(default)s)"
    parser.add_argument("--minutes", type=minutes, default=default, help=text)


def new_file(text: str) -> Path:
    if not (path := Path(text)).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a path in an existing directory")
    return path


def new_picture(text: str) -> Path:
    """A file to write whose suffix names a format that matplotlib has."""
    path = new_file(text)
    if not find_spec("matplotlib"):
        raise argparse.ArgumentTypeError("a picture needs matplotlib: pip install 'mambaslots[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in formats:
        accepted = ", ".join(f".{suffix}" for suffix in formats)
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a path that ends in one of {accepted}")
    return path


if __name__ == "__main__":
    print(__doc__)
