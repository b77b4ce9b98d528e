"""The command `mambaslots`, and what its commands share."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import shtab

from ..mcore import run_script
from ..version import VERSION
from . import chat, doctor, replay, serve
from .options import Parser

HEADLINE = "The prefix cache for hybrid language models: Mamba-2, gated delta nets, short convolutions."
RUN = "Run a script of megatron-core on the drop-in, and say what it replaced and what was resumed."
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOG_LEVELS = ("debug", "info", "warning", "error")


class Command(NamedTuple):
    """One command: what it does, its options, what runs it and returns the exit code, and what it logs."""

    text: str
    add_options: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]
    log_level: str = "warning"


COMMANDS = {
    "serve": Command(serve.TEXT, serve.add_options, serve.run, "info"),
    "chat": Command(chat.TEXT, chat.add_options, chat.run),
    "replay": Command(replay.TEXT, replay.add_options, replay.run),
    "doctor": Command(doctor.TEXT, doctor.add_options, doctor.run),
}


def make_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(prog="mambaslots", description=HEADLINE)
    parser.add_argument("--version", action="version", version=f"mambaslots {VERSION}")
    shtab.add_argument_to(parser, ["--print-completion"], help="print a completion script for this shell")
    listed = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, command in COMMANDS.items():
        own = listed.add_parser(name, help=command.text.splitlines()[0], description=command.text)
        command.add_options(own)
        own.add_argument(
            "--log-level", choices=LOG_LEVELS, default=command.log_level,
            help="what is logged on stderr (default: %(default)s)",
        )  # fmt: skip
        own.set_defaults(run=command.run)
    run_script.add_options(listed.add_parser("run", help=RUN, description=RUN))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (by default those of the process); return the exit code.

    What the user can mend is said in one line on stderr, with exit code 1; a wrong command line has exit
    code 2.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["run"]:  # its script's own options are not ours
        return run_script.main(words[1:], "mambaslots run")
    options = make_parser().parse_args(words)
    logging.basicConfig(level=options.log_level.upper(), format=LOG_FORMAT)
    try:
        return int(options.run(options))
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of stdout has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"mambaslots {options.command}: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
