"""The options that commands share, and the model that they name: its mistakes are said without torch."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from ..files import CONFIG, can_be_written, check_served, model_folder
from ..named_policies import cache_changes

DTYPES = ("bfloat16", "float16", "float32", "float64")
Group = argparse._ActionsContainer


class Parser(argparse.ArgumentParser):
    """A parser that says a mistake in one line, and keeps the lines of its description."""

    def __init__(self, **options: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=formatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def count(at_least: int = 1, at_most: int | None = None) -> Callable[[str], int]:
    """A type of arguments: integers from `at_least` on, and to `at_most` where it is given."""
    accepted = f"an integer >= {at_least}" if at_most is None else f"an integer from {at_least} to {at_most}"

    def integer(text: str) -> int:
        value = int(text) if text.isdecimal() else -1
        if value < at_least or (at_most is not None and value > at_most):
            raise argparse.ArgumentTypeError(f"{text!r}; accepted: {accepted}")
        return value

    return integer


def positive(text: str) -> float:
    """A type of arguments: numbers above 0."""
    with suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r}; accepted: a number > 0")


def directory_and_gb(text: str) -> tuple[str, float]:
    """A type of arguments: a directory and gigabytes, as "/cache:100"."""
    directory, _, size = text.rpartition(":")
    if not directory:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a directory and GB, as in /cache:100")
    return directory, positive(size)


def comma_list[T](entry: Callable[[str], T | list[T]]) -> Callable[[str], list[T]]:
    """A type of arguments: entries divided by commas."""

    def entries(text: str) -> list[T]:
        values: list[T] = []
        for part in filter(None, (part.strip() for part in text.split(","))):
            value = entry(part)
            values += value if isinstance(value, list) else [value]
        if not values:
            raise argparse.ArgumentTypeError(f"{text!r}; accepted: one or more, divided by commas")
        return values

    return entries


def new_file(text: str) -> Path:
    """A type of arguments: a file to write."""
    if not can_be_written(path := Path(text)):
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a path in an existing directory")
    return path


Row = tuple[str, Callable[[str], Any], Any, str, str]
"""An option with a value: its name, type, default, what stands for the value in the help, and the help."""


def add_group(parser: argparse.ArgumentParser, title: str, about: str | None, rows: Iterable[Row]) -> Group:
    """A group of options; the help of each ends with its default, where it has one."""
    group = parser.add_argument_group(title, about)
    for name, kind, default, metavar, text in rows:
        default_text = "" if default is None else " (default: %(default)s)"
        group.add_argument(name, type=kind, default=default, metavar=metavar, help=text + default_text)
    return group


def add_json(parser: Group, content: str) -> None:
    parser.add_argument("--json", type=new_file, metavar="PATH", help=f"write {content} to this file")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="where to compute (default: cuda where torch sees a GPU, else cpu)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=count(), metavar="N", help="threads of torch on the CPU (default: torch's choice)"
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model, and where it runs."""
    parser.add_argument("model", metavar="MODEL", help="a folder with config.json, or a name on the hub")
    add_device(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES,
        help="of the weights (default: the model's; on a CPU float32 for 16-bit weights)",
    )  # fmt: skip


def add_engine(parser: argparse.ArgumentParser, *, max_requests: int | None = None) -> None:
    """The sizes and switches of an engine, under the names of `InferenceConfig`."""
    group = add_group(parser, "engine", "fields of InferenceConfig, by their names; lengths in tokens", (
        ("--memory-gb", positive, None, "GB",
         "for all pools together, where no pool has a size of its own (default: once the model is loaded, "
         "85 %% of what is free on the GPU, or half of what is free on a CPU, at most 16)"),
        ("--num-mamba-slots", count(), None, "N", "states in the cache"),
        ("--num-kv-blocks", count(), None, "N", "blocks of the KV pool"),
        ("--max-sequence-length", count(2), None, "N",
         "longest prompt and answer together (default: the model's own, or less where memory is short)"),
        ("--max-requests", count(), max_requests, "N",
         "requests that run at once" + ("" if max_requests else
         " (default: 32 on a CPU, 128 on a GPU, or fewer where memory is short)")),
        ("--max-tokens-per-step", count(), None, "N", "tokens computed in one step (default: 2048)"),
        ("--block-size-tokens", count(), None, "N",
         "tokens of a KV block (default: the model's grid, but at least 16, on a GPU 64)"),
        ("--num-speculative-tokens", count(0), 0, "N", "drafts a step"),
        ("--plan", str, None, "PLAN", "which states are cached: as replay's, or FILE.py:Class"),
        ("--eviction", str, None, "POLICY", "the eviction policy: a name, or FILE.py:Class"),
        ("--host-gb", positive, 0.0, "GB", "host memory for evicted states, `host_cache_gb`"),
        ("--disk", directory_and_gb, None, "DIR:GB",
         "files for states that host memory has no room for, `disk_cache`"),
    ))  # fmt: skip
    group.add_argument(
        "--no-prefix-caching", dest="enable_prefix_caching", action="store_false",
        help="compute every prompt from its start",
    )  # fmt: skip
    group.add_argument(
        "--durable-state-dtype", choices=("bfloat16", "int8"),
        help="store cached states in fewer bytes: more fit, and a resumed request starts from a rounded one",
    )  # fmt: skip
    group.add_argument(
        "--batch-invariant", action=argparse.BooleanOptionalAction,
        help="answers depend on the request alone, to the bit (default: where GPU and model allow it)",
    )  # fmt: skip
    group.add_argument(
        "--free-memory", choices=("keep", "zero"), default="keep",
        help="what free memory holds: stale values, or zeros (default: %(default)s)",
    )  # fmt: skip


_OPTIONS_BY_FIELD = {
    "total_gb": "--memory-gb",
    "max_requests": "--max-requests",
    "max_sequence_length": "--max-sequence-length",
    "policy is": "--eviction is",
    "plan is": "--plan is",
    "plan has": "--plan has",
}


def chosen_model(options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """The model's folder, perhaps downloaded, and new `cache_changes` of --eviction and --plan."""
    if options.num_kv_blocks is None and options.num_mamba_slots is not None:
        raise ValueError("--num-kv-blocks is missing; accepted: both pools with sizes, or none")
    with naming_options():
        cache = cache_changes(options.eviction, options.plan)
    folder = model_folder("MODEL", options.model)
    check_served(folder / CONFIG)
    return folder, cache


@contextmanager
def naming_options() -> Iterator[None]:
    """Let a ValueError that names fields of `InferenceConfig` name the options of the command line."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        for field, option in _OPTIONS_BY_FIELD.items():
            message = message.replace(field, option)
        raise ValueError(message) from error
