"""`mambaslots serve`: an OpenAI-compatible server."""

import argparse
import logging
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from ..fleet.fleet_settings import CLUSTER
from ..serve.server_settings import ServerSettings, listen
from ..version import VERSION, untested
from .options import add_engine, add_group, add_model, chosen_model, count, new_file, positive

TEXT = """\
    mambaslots serve models/tiny-code
    curl -N localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Write a class."}], "stream": true}'

Needs the extra `mambaslots[serve]`; replicas need `mambaslots[fleet]`."""
logger = logging.getLogger(__name__)
ADMIN_KEY = "MAMBASLOTS_ADMIN_KEY"


def count_or_range(text: str) -> tuple[int, int]:
    """A type of arguments: an integer >= 1, or two of them as "1:4", the smaller one first."""
    fewest, colon, most = text.partition(":")
    numbers = [int(part) if part.isdecimal() else 0 for part in (fewest, most if colon else fewest)]
    if not 0 < numbers[0] <= numbers[1]:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: an integer >= 1, or two of them, as in 1:4")
    return numbers[0], numbers[1]


def text_file(text: str) -> Path:
    """A type of arguments: a file that holds text."""
    if not os.path.isfile(text):  # False for what can be no name, too
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a file")
    path = Path(text)
    try:
        path.read_text("utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no text in UTF-8: {error}") from error
    return path


def unused_path(text: str) -> Path:
    """A type of arguments: a file to make, where no file is."""
    if (path := new_file(text)).exists() or path.is_symlink():
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a path where no file is")
    return path


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_engine(parser)
    group = add_group(parser, "server", None, (
        ("--host", str, "127.0.0.1", "HOST", "address to listen on"),
        ("--port", count(0, 65535), 8000, "PORT", "0 for any free one"),
        ("--model-name", str, None, "NAME", "what clients call it (default: the folder's name)"),
        ("--api-keys", text_file, None, "FILE",
         "lines `tenant:key`; tenants share no cached state (default: no keys, one tenant)"),
        ("--max-waiting-requests", count(), 256, "N", "queue limit; further requests get 429"),
        ("--max-body-mb", positive, None, "MB",
         "longest body of a request (default: 1 MiB, and 16 bytes a token of --max-sequence-length)"),
        ("--body-timeout-s", positive, 30.0, "S", "for a request to arrive whole"),
        ("--request-timeout-s", positive, 600.0, "S", "for a request to be answered"),
        ("--drain-timeout-s", positive, 30.0, "S",
         "for running requests, after SIGTERM or Control-C"),
        ("--record", unused_path, None, "FILE",
         "write a trace of the traffic for `mambaslots replay`: lengths and keyed hashes, no token"),
    ))  # fmt: skip
    group.add_argument(
        "--allowed-origin", dest="allowed_origins", action="append", default=[], metavar="URL",
        help="of browsers (CORS); repeatable",
    )  # fmt: skip
    group.add_argument(
        "--allowed-host", dest="allowed_hosts", action="append", default=[], metavar="NAME",
        help="name in the header Host that is served besides --host and loopback; repeatable",
    )  # fmt: skip
    group.add_argument(
        "--trace", action="store_true", help="log a line of JSON for each request, without text"
    )
    about = "several engines behind one address, each in a process of its own, on Ray Serve"
    add_group(parser, "replicas", about, (
        ("--replicas", count_or_range, None, "N|MIN:MAX",
         "engines; with MIN:MAX as many as the requests need. They run on this machine, or on the cluster "
         "that RAY_ADDRESS names (default: one engine, without Ray)"),
        ("--tp", count(), None, "N", "processes that split a replica's model"),
        ("--ingresses", count(), None, "N",
         "processes that serve HTTP and choose replicas; with 2, one may be lost (default: 1)"),
    ))  # fmt: skip
    parser.epilog = (
        f"With --api-keys, the page and /metrics need the key in the environment variable {ADMIN_KEY}."
    )


def run(options: argparse.Namespace) -> int:
    settings = _checked_settings(options)
    folder, cache = chosen_model(options)
    logger.info("mambaslots %s begins; importing torch", VERSION)
    from ..replay.recorder import TraceRecorder
    from ..serve import serve
    from .engine_setup import load_model, make_engine
    from .serve_processes import serve_replicated, serve_split

    if newer := untested():
        logger.warning("not tested with %s", ", ".join(newer))
    if _is_under_torchrun():
        return serve_split(options, settings, folder, cache)
    if options.replicas is not None or options.tp is not None:
        return serve_replicated(options, settings, folder)
    loaded = load_model(options, folder)
    engine = make_engine(loaded, options, cache)
    with nullcontext() if options.record is None else TraceRecorder(engine, options.record):
        return serve(engine, loaded, settings)


def _checked_settings(options: argparse.Namespace) -> ServerSettings:
    """The server's settings; what is wrong with the options, or a port in use, is said without torch."""
    settings = server_settings(options)
    has_replicas = options.replicas is not None or options.tp is not None
    if options.ingresses is not None and not has_replicas:
        raise ValueError(f"--ingresses is {options.ingresses} without --replicas; accepted: both, or neither")
    if has_replicas and options.record is not None:
        accepted = "one of them, because a trace is of one engine"
        raise ValueError(f"--record and --replicas are both given; accepted: {accepted}")
    if has_replicas and _is_under_torchrun():
        mistake = "--replicas or --tp is given under torchrun, which has started the ranks"
        raise ValueError(f"{mistake}; accepted: neither")
    joins_cluster = has_replicas and os.environ.get(CLUSTER)  # whose Ray Serve may listen there already
    if not joins_cluster and os.environ.get("RANK", "0") == "0":  # of torchrun's ranks this one alone serves
        listen(options.host, options.port).close()
    return settings


def _is_under_torchrun() -> bool:
    """Whether this process is one of several ranks that torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ


def server_settings(options: argparse.Namespace) -> ServerSettings:
    """The settings that the options and the environment name."""
    same_names = (
        "host", "port", "max_waiting_requests", "body_timeout_s", "request_timeout_s", "drain_timeout_s",
        "trace", "allowed_origins", "allowed_hosts",
    )  # fmt: skip
    return ServerSettings(
        model_name=options.model_name or Path(options.model).resolve().name,
        api_keys=read_keys(options.api_keys) if options.api_keys else {},
        admin_key=os.environ.get(ADMIN_KEY) or None,
        max_body_bytes=int(options.max_body_mb * (1 << 20)) if options.max_body_mb else None,
        **{name: getattr(options, name) for name in same_names},
    )


def read_keys(path: Path) -> Mapping[str, str]:
    """Tenant -> key, from lines `tenant:key`; empty lines and those that begin with "#" are left out."""
    keys: dict[str, str] = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not (line := line.strip()) or line.startswith("#"):
            continue
        tenant, colon, key = (part.strip() for part in line.partition(":"))
        if not (tenant and colon and key) or tenant in keys or key in keys.values():
            raise ValueError(f"{path}:{number}; accepted: `tenant:key`, each tenant and each key once")
        keys[tenant] = key
    if not keys:
        raise ValueError(f"{path} is empty; accepted: at least one line `tenant:key`")
    return keys
