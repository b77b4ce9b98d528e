"""Traces from files: JSON lines of one's own, and Mooncake's published format."""

import hashlib
import zlib
from collections import Counter
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np

from ..validation import INT32_MAX, integer
from .hashed_requests import HashedRequests, Lineage, infer_lineage
from .trace import Trace, TraceRequest
from .trace_line import HashNumbers, Numbers, TraceLine, number_of, parse_line

_ROUTING_TOKENS = 64  # tokens of a block that shows common heads and sessions, where a file has tokens
_MIN_BRANCHES = 8
_MULTIPLIER = 2654435761  # Knuth's multiplicative hash: 2**32 divided by the golden ratio, as a prime


def read_trace(path: str | PathLike[str], *, shards: int = 1, shard: int = 0) -> Trace:
    """The requests of a file, one JSON object a line, in the order of their arrival.

    A line has token ids or hashes of blocks, or is Mooncake's (`hash_ids`); docs/replay.md describes the
    fields. Where a file has hashes, token ids are made: equal where hashes are equal, else different. A
    prompt that has all whole blocks of an earlier one, and is longer than its prompt and answer, continues
    it: both are one session, unless the file names sessions.

    Args:
        path: of the file.
        shards, shard: read what replica `shard` of `shards` gets of a router that hashes the first block
            after the head that more than half of all requests have in common.

    Raises:
        ValueError: an argument or a line is not accepted; the message names file, line and field.
        OSError: the file cannot be read.

    Example:
        Mooncake's conversation trace has 12,031 requests; with `shards=8, shard=0` 1,546 of them.
    """
    shards = integer("shards", shards, 1)
    shard = integer("shard", shard, 0, shards - 1)
    file = Path(path)
    numbers: HashNumbers = {}
    lines = _read_lines(file, numbers)
    size = lines[0].hash_tokens
    paths = [line.blocks if size else _path(line, numbers) for line in lines]
    heads = [_head(line, path, size or _ROUTING_TOKENS) for line, path in zip(lines, paths, strict=True)]
    head = _shared_head(heads)
    if shards > 1:
        known_as = list(numbers)  # number -> hash
        routes = (known_as[blocks[min(head, len(blocks) - 1)]] if blocks else 0 for blocks in heads)
        chosen = [index for index, route in enumerate(routes) if _shard_of(route, shards) == shard]
        lines, paths = [lines[index] for index in chosen], [paths[index] for index in chosen]
    lineage = infer_lineage(lines, paths, size or _ROUTING_TOKENS, head)
    known: dict[object, int] = {}
    sessions = [
        known.setdefault((inferred,) if line.session is None else line.session, len(known))
        for line, inferred in zip(lines, lineage.sessions, strict=True)
    ]
    requests: Sequence[TraceRequest]
    if size:
        requests = HashedRequests(lines, lineage, sessions, len(numbers))
    else:
        requests = [_request(lines, lineage, index, sessions[index]) for index in range(len(lines))]
    name = file.name if shards == 1 else f"{file.name}, shard {shard} of {shards}"
    return Trace(name, requests, size or 1)


def _shared_head(paths: Sequence[Sequence[int]]) -> int:
    """Leading blocks that more than half of all paths have, up to where 8 or more different blocks follow.

    So a common system prompt is a head, and the only conversation of a file is none.
    """
    head, depth, rest = 0, 0, list(paths)
    while rest := [path for path in rest if len(path) > depth]:
        counts = Counter(path[depth] for path in rest)
        if len(counts) >= _MIN_BRANCHES:
            head = depth
        block, count = counts.most_common(1)[0]
        if 2 * count <= len(paths):
            break
        rest = [path for path in rest if path[depth] == block]
        depth += 1
    return head


def _shard_of(known: int | str, num_shards: int) -> int:
    """By the leading bits of the multiplicative hash."""
    route = known if isinstance(known, int) else zlib.crc32(known.encode("utf-8", "surrogatepass"))
    return (route * _MULTIPLIER % (1 << 32)) * num_shards >> 32


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
        found.append(number_of(int.from_bytes(digest, "big"), numbers))
    return np.asarray(found, np.int64)


def _head(line: TraceLine, path: Numbers, size: int) -> list[int]:
    """What a router hashes of a prompt: the numbers of its blocks, the partial one too where it is known."""
    blocks: list[int] = path[: line.num_prompt // size].tolist()
    return blocks if line.partial < 0 else [*blocks, line.partial]


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
