"""Which request goes on from which, where a file tells hashes of prefixes alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from .trace_line import Numbers, TraceLine

_MAX_ENDS = 8
"""Requests that end in the same block and are looked at as the one that went before."""


@dataclass(frozen=True)
class Lineage:
    """What is inferred of requests in the order of their arrival.

    Attributes:
        sessions: for each request, the first request of its session.
        successors: for each request, the first later request whose prompt holds its prompt and its answer;
            -1 for none.
        partials: number of the hash of a partial block -> a request in whose blocks its tokens stand.
    """

    sessions: list[int]
    successors: list[int]
    partials: dict[int, int]


def infer_lineage(lines: Sequence[TraceLine], paths: Sequence[Numbers], size: int, head: int) -> Lineage:
    """Infer sessions, and where the answers of earlier requests stand.

    A request goes on from an earlier one if it came later, has all whole blocks of the earlier one, and is
    longer than the earlier one's prompt and answer. Of several such requests the deepest counts, then the
    latest. Blocks that more than half of all requests begin with show no session.

    Args:
        lines: the requests, earliest first.
        paths: the whole blocks of each prompt, and those of its answer where they are known.
        size: tokens of a block.
        head: leading blocks that show no session.
    """
    sessions, successors = list(range(len(lines))), [-1] * len(lines)
    partials: dict[int, int] = {}
    ends: dict[int, list[int]] = {}
    owners: dict[tuple[int, int], int] = {}
    for index, (line, path) in enumerate(zip(lines, paths, strict=True)):
        whole = line.num_prompt // size
        before = _before(index, lines, path[:whole], ends, head)
        if before is not None:
            sessions[index] = sessions[before]
            earlier, depth = lines[before], len(paths[before])
            block = int(path[depth]) if depth < len(path) else line.partial
            covered = earlier.num_prompt - depth * size
            owner = owners.setdefault((block, covered), earlier.partial) if covered > 0 else earlier.partial
            if owner == earlier.partial and successors[before] < 0:
                successors[before] = index
                if earlier.partial >= 0:
                    partials.setdefault(earlier.partial, index)
        if line.partial >= 0 and len(path) > whole:
            partials.setdefault(line.partial, index)
        if len(path) > head:
            same_end = ends.setdefault(int(path[-1]), [])
            same_end.append(index)
            del same_end[:-_MAX_ENDS]
    return Lineage(sessions, successors, partials)


def _before(
    index: int, lines: Sequence[TraceLine], path: Numbers, ends: dict[int, list[int]], head: int
) -> int | None:
    """The request that this one goes on from."""
    line = lines[index]
    for depth in range(len(path), head, -1):
        for other in reversed(ends.get(int(path[depth - 1]), ())):
            earlier = lines[other]
            if (
                earlier.num_prompt + earlier.num_answer < line.num_prompt
                and earlier.arrival_s < line.arrival_s
            ):
                return other
    return None
