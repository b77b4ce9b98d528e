"""Traces from files: JSON lines of one's own, and Mooncake's published format."""

import hashlib
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np

from ...validation import INT32_MAX, integer
from ..trace import Trace, TraceRequest
from .hash_numbers import HashNumbers
from .hashed_requests import HashedRequests
from .lineage import Lineage, infer_lineage
from .routing import shard_of, shared_head
from .trace_line import Numbers, TraceLine, parse_line

_ROUTING_TOKENS = 64
"""Where a file has tokens, the blocks that show common heads and sessions have so many."""


def read_trace(path: str | PathLike[str], *, shards: int = 1, shard: int = 0) -> Trace:
    """The requests of a file, one JSON object a line, in the order of their arrival.

    docs/traces.md describes both formats; a line with `hash_ids` is Mooncake's. The file is read line by
    line.

    Where a file has hashes, token ids are made: equal where hashes are equal, else different. What no file
    tells is inferred. A request *goes on* from an earlier one if its prompt has all whole blocks of the
    earlier one, and is longer than the earlier one's prompt and answer. A head that more than half of all
    requests have in common does not count. Where a request goes on:

    - it belongs to the session of the earlier one, unless the file names sessions;
    - its prompt shows the tokens behind the last whole block of the earlier prompt;
    - its prompt shows the tokens of the earlier answer.

    An answer that no request goes on from has tokens of its own.

    Args:
        path: of the file.
        shards: read the part of the traffic that one of so many replicas gets. The router hashes the first
            block behind the head that more than half of all requests have in common. So requests with equal
            prefixes, and those of a session, go to one replica.
        shard: which replica, from 0 on.

    Raises:
        ValueError: an argument or a line is not accepted; the message names file, line and field.
        OSError: the file cannot be read.
    """
    shards = integer("shards", shards, 1)
    shard = integer("shard", shard, 0, shards - 1)
    file = Path(path)
    numbers = HashNumbers()
    lines = _read_lines(file, numbers)
    size = lines[0].hash_tokens
    paths = [line.blocks if size else _path(line, numbers) for line in lines]
    heads = [_head(line, path, size or _ROUTING_TOKENS) for line, path in zip(lines, paths, strict=True)]
    head = shared_head(heads)
    if shards > 1:
        routes = (numbers.routes[blocks[min(head, len(blocks) - 1)]] if blocks else 0 for blocks in heads)
        chosen = [index for index, route in enumerate(routes) if shard_of(route, shards) == shard]
        lines, paths = [lines[index] for index in chosen], [paths[index] for index in chosen]
    lineage = infer_lineage(lines, paths, size or _ROUTING_TOKENS, head)
    sessions = _sessions(lines, lineage)
    requests: Sequence[TraceRequest]
    if size:
        requests = HashedRequests(lines, lineage, sessions, len(numbers))
    else:
        requests = [_request(lines, lineage, index, sessions[index]) for index in range(len(lines))]
    name = file.name if shards == 1 else f"{file.name}, shard {shard} of {shards}"
    return Trace(name, requests, size or 1)


def _read_lines(path: Path, numbers: HashNumbers) -> list[TraceLine]:
    """All lines, in the order of their arrival."""
    lines: list[TraceLine] = []
    size: int | None = None
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                line = parse_line(text, numbers, size)
                if size is not None and line.hash_tokens != size:
                    kinds = [
                        f"hashes of {one} tokens" if one else "tokens" for one in (line.hash_tokens, size)
                    ]
                    raise ValueError(f"hash_tokens: the line has {kinds[0]}; accepted: {kinds[1]}, as before")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            size = line.hash_tokens
            lines.append(line)
    if not lines:
        raise ValueError(f"{path} has no line; accepted: one JSON object a line")
    lines.sort(key=lambda line: line.arrival_s)
    return lines


def _path(line: TraceLine, numbers: HashNumbers) -> Numbers:
    """Numbers of the chained hashes of a sequence's blocks of `_ROUTING_TOKENS` tokens."""
    assert line.tokens is not None
    sequence = line.tokens if line.answer is None else np.concatenate([line.tokens, line.answer])
    content, width = sequence.astype("<i4").tobytes(), 4 * _ROUTING_TOKENS
    digest, found = b"", []
    for start in range(0, len(content) - width + 1, width):
        digest = hashlib.blake2b(digest + content[start : start + width], digest_size=16).digest()
        found.append(numbers.number(int.from_bytes(digest, "big")))
    return np.asarray(found, np.int64)


def _head(line: TraceLine, path: Numbers, size: int) -> list[int]:
    """What a router sees of a prompt: the numbers of its blocks, the partial one too where that is known."""
    blocks: list[int] = path[: line.num_prompt // size].tolist()
    return blocks if line.partial < 0 else [*blocks, line.partial]


def _sessions(lines: Sequence[TraceLine], lineage: Lineage) -> list[int]:
    """A number for each request's session."""
    known: dict[tuple[bool, str | int], int] = {}
    sessions = []
    for line, inferred in zip(lines, lineage.sessions, strict=True):
        name = (False, inferred) if line.session is None else (True, line.session)
        sessions.append(known.setdefault(name, len(known)))
    return sessions


def _request(lines: Sequence[TraceLine], lineage: Lineage, index: int, session: int) -> TraceRequest:
    """A request whose tokens the file has."""
    line, following = lines[index], lineage.successors[index]
    assert line.tokens is not None
    answer = line.answer
    if answer is None and following >= 0:
        later = lines[following].tokens
        assert later is not None
        if np.array_equal(later[: line.num_prompt], line.tokens):
            answer = later[line.num_prompt : line.num_prompt + line.num_answer]
    if answer is None:
        unknown = np.int32(INT32_MAX - 1 - index)  # one number, however long the answer is
        answer = np.broadcast_to(unknown, line.num_answer)
    return TraceRequest(line.arrival_s, session, line.tokens, answer)
