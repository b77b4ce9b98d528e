"""The command `mambaslots`, and what its commands share."""

import importlib
import logging
import os
import sys
from collections.abc import Sequence

import shtab

from ..version import VERSION
from .options import Parser

HEADLINE = "The prefix cache for hybrid language models: Mamba-2, gated delta nets, short convolutions."
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOG_LEVELS = ("debug", "info", "warning", "error")


COMMANDS = {
    "serve": "Serve a model behind an OpenAI-compatible HTTP API, with a page for operators at /.",
    "chat": "Hold a conversation in the terminal, and see what each turn resumed from the cache.",
    "replay": "Replay traces of requests without a model, and say how much memory the cache should get.",
    "doctor": "Say what is installed and which kernels would run, and test them on a small model.",
    "run": "Run a script of megatron-core on the drop-in, and say what it replaced and what was resumed.",
}
"""Each but `run`, which is `mcore.__main__`, is a module here with TEXT, `add_options` and `run`."""


def make_parser(command: str | None = None) -> Parser:
    """The parser of the whole command line; with `command`, options of that command alone are known."""
    parser = Parser(prog="mambaslots", description=HEADLINE)
    parser.add_argument("--version", action="version", version=f"mambaslots {VERSION}")
    shtab.add_argument_to(parser, ["--print-completion"], help="print a completion script for this shell")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, headline in COMMANDS.items():
        command_parser = commands.add_parser(name, help=headline, description=headline)
        if command not in (None, name):
            continue  # its module takes time to import
        if name == "run":
            from ..mcore import __main__ as runner

            runner.add_options(command_parser)
            continue
        module = importlib.import_module(f".{name}", __package__)
        command_parser.description = f"{headline}\n\n{module.TEXT}"
        module.add_options(command_parser)
        command_parser.add_argument(
            "--log-level", choices=LOG_LEVELS, default="info" if name == "serve" else "warning",
            help="what is logged on stderr (default: %(default)s)",
        )  # fmt: skip
        command_parser.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 2 where what was asked for is refused, 1 for other errors."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["run"]:  # its script's own options are not ours
        from ..mcore import __main__ as runner

        return runner.main(words[1:], "mambaslots run")
    parser = make_parser(None if "--print-completion" in words else "".join(words[:1]))
    if not words:
        parser.error(f"the following arguments are required: COMMAND; accepted: {', '.join(COMMANDS)}")
    options = parser.parse_args(words)
    logging.basicConfig(level=options.log_level.upper(), format=LOG_FORMAT)
    try:
        return int(options.run(options))
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of stdout has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        logging.getLogger(__name__).debug("the command fails", exc_info=True)
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"mambaslots {options.command}: {message}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130
