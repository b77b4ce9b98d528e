"""Traces from files: JSON lines of one's own, and Mooncake's published format."""

from collections import Counter
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np

from ..validation import INT32_MAX
from .hashed_requests import HashedRequests, infer_lineage
from .trace import HashNumbers, Trace, TraceLine, TraceRequest, parse_line

_MIN_BRANCHES = 8


def read_trace(path: str | PathLike[str]) -> Trace:
    """The requests of a file, one JSON object a line, in the order of their arrival.

    A line has token ids or hashes of blocks, or is Mooncake's (`hash_ids`); docs/replay.md describes the
    fields. Where a file has hashes, token ids are made: equal where hashes are equal, else different. A
    prompt that has all whole blocks of an earlier one, and is longer than its prompt and answer, continues
    it: both are one session, unless the file names sessions.

    Args:
        path: of the file.

    Raises:
        ValueError: a line is not accepted; the message names file, line and field.
        OSError: the file cannot be read.

    Example:
        Mooncake's conversation trace has 12,031 requests.
    """
    file = Path(path)
    numbers: HashNumbers = {}
    lines = _read_lines(file, numbers)
    if not lines[0].hash_tokens:
        sessions = _sessions(lines, range(len(lines)))
        return Trace(file.name, list(map(_request, range(len(lines)), lines, sessions)))
    lineage = infer_lineage(lines, _shared_head(lines))
    return Trace(file.name, HashedRequests(lines, lineage, _sessions(lines, lineage.sessions), len(numbers)))


def _sessions(lines: Sequence[TraceLine], inferred: Sequence[int]) -> list[int]:
    """Numbers of sessions: the ones that lines name, else `inferred` ones."""
    known: dict[object, int] = {}
    return [
        known.setdefault((other,) if line.session is None else line.session, len(known))
        for line, other in zip(lines, inferred, strict=True)
    ]


def _shared_head(lines: Sequence[TraceLine]) -> int:
    """Leading blocks that more than half of all prompts have, up to where 8 or more blocks follow."""
    paths = [line.known_prompt for line in lines]
    head, depth, rest = 0, 0, paths
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
                        f"hashes of {each} tokens" if each else "tokens" for each in (line.hash_tokens, size)
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


def _request(index: int, line: TraceLine, session: int) -> TraceRequest:
    """A request whose tokens the file has; an answer of which only the length is known has one token id."""
    assert line.tokens is not None
    answer = line.answer
    if answer is None:
        answer = np.broadcast_to(np.int32(INT32_MAX - 1 - index), line.num_answer)
    return TraceRequest(line.arrival_s, session, line.tokens, answer)
