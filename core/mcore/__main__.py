"""`python -m mambaslots.mcore [OPTIONS] SCRIPT [ARGUMENTS...]`: a script with the drop-in.

`mambaslots run` is the same command. Its line is parsed before torch is imported.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..files import can_be_written
from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..inference.contexts.cache.eviction import EVICTION_POLICIES
from ..named_policies import PLAN_SYNTAX, parse_plan


def main(arguments: Sequence[str], command: str = "python -m mambaslots.mcore") -> int:
    """Install, run the script and report; the exit code is 2 for a wrong command line, else `run`'s."""
    parser = _Parser(
        prog=command,
        usage=f"{command} [OPTIONS] SCRIPT [ARGUMENTS...]",
        description="Run a script of megatron-core with mambaslots as its cache of Mamba states.",
        allow_abbrev=False,
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    from .run_script import run

    return run(options)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"mambaslots.mcore: {message}; usage: {self.prog} [OPTIONS] SCRIPT [ARGUMENTS...]\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command, the script and the script's arguments."""

    def plan(spec: str) -> CheckpointPlan:
        try:
            return parse_plan(spec)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def script(name: str) -> Path:
        if not os.path.isfile(name):  # False for a name that is too long, too
            raise argparse.ArgumentTypeError(f"{name} is no file")
        return Path(name)

    def new_file(name: str) -> Path:
        path = Path(name).absolute()  # the script may change the directory
        if not can_be_written(path):
            raise argparse.ArgumentTypeError(f"{name}; accepted: a path in an existing directory")
        return path

    parser.add_argument(
        "--plan", type=plan, metavar="SPEC", help=f"which states are taken: {PLAN_SYNTAX}".replace("%", "%%")
    )
    parser.add_argument(
        "--eviction", choices=EVICTION_POLICIES, help="of states; default: what the script sets"
    )
    parser.add_argument(
        "--no-answers", dest="cache_answers", action="store_false", help="do not cache generated tokens"
    )
    parser.add_argument(
        "--json",
        type=new_file,
        metavar="PATH",
        help="write the report there as JSON; rank N > 0 of torchrun adds -rankN to the file's name",
    )
    parser.add_argument("--version", action=_ShowVersions, nargs=0, help="print the versions")
    parser.add_argument("script", type=script, metavar="SCRIPT", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="the script's own")


class _ShowVersions(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *parsed: Any) -> NoReturn:
        from .installation import shown_versions

        print(shown_versions())
        parser.exit()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
