"""Requests of which only hashes are known: tokens that are equal where the hashes are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..validation import ceil_div
from .trace import Tokens, TraceLine, TraceRequest

_MAX_ENDS = 8  # candidates per block for the request before


@dataclass(frozen=True)
class Lineage:
    """What is inferred of requests in the order of their arrival."""

    sessions: list[int]  # request -> the first request of its session
    successors: list[int]  # request -> the first later one whose prompt has its prompt and answer, or -1
    partials: dict[int, int]  # hash of a partial block -> a request whose whole blocks have its tokens


def infer_lineage(lines: Sequence[TraceLine], head: int) -> Lineage:
    """Infer sessions, and which prompts have the answers of earlier requests.

    A request continues an earlier one if it came later, has all its whole blocks, and is longer than its
    prompt and answer; of several the deepest, then the latest. The first `head` blocks show no session.
    """
    sessions, successors = list(range(len(lines))), [-1] * len(lines)
    partials: dict[int, int] = {}
    ends: dict[int, list[int]] = {}
    owners: dict[tuple[int, int], int] = {}
    for index, line in enumerate(lines):
        path, size = line.blocks, line.hash_tokens
        whole = line.num_prompt // size
        if (before := _before(line, lines, ends, head)) is not None:
            sessions[index] = sessions[before]
            earlier, depth = lines[before], len(lines[before].blocks)
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


def _before(line: TraceLine, lines: Sequence[TraceLine], ends: dict[int, list[int]], head: int) -> int | None:
    """The request that `line` continues."""
    for depth in range(line.num_prompt // line.hash_tokens, head, -1):
        for other in reversed(ends.get(int(line.blocks[depth - 1]), ())):
            earlier = lines[other]
            num_known = earlier.num_prompt + earlier.num_answer
            if num_known < line.num_prompt and earlier.arrival_s < line.arrival_s:
                return other
    return None


@dataclass(frozen=True, eq=False)
class HashedRequests(Sequence[TraceRequest]):
    """The requests of a file of hashes, whose tokens are made when a request is read.

    All tokens of a block are the number of the block's hash; tokens without a known hash are a number that no
    other request has. Blocks of 4 tokens, hashes 0 and 1, prompt of 10: [0 0 0 0 1 1 1 1 n n].
    """

    lines: Sequence[TraceLine]
    lineage: Lineage
    sessions: Sequence[int]
    num_hashes: int

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        line = self.lines[index]
        size, num_prompt = line.hash_tokens, line.num_prompt
        length = num_prompt + line.num_answer
        whole = num_prompt // size  # the block after it may hold both: it is made once as each
        prompt = [self._in_prompt(index, block) for block in range(ceil_div(num_prompt, size))]
        answer = [self._in_answer(index, block) for block in range(whole, ceil_div(length, size))]
        return TraceRequest(
            line.arrival_s,
            self.sessions[index],
            _spread(prompt, size)[:num_prompt],
            _spread(answer, size)[num_prompt - whole * size : length - whole * size],
        )

    def _in_prompt(self, index: int, block: int) -> int:
        """The token of a block of a prompt."""
        while True:
            line = self.lines[index]
            if block < len(line.blocks):
                return int(line.blocks[block])
            if line.partial < 0:
                following = self.lineage.successors[index]
            else:
                following = self.lineage.partials.get(line.partial, -1)
            if following >= 0 and block < len(self.lines[following].blocks):
                return int(self.lines[following].blocks[block])
            # A longer prompt each time: a file whose partial hashes contradict themselves ends, too.
            if following < 0 or self.lines[following].num_prompt <= line.num_prompt:
                return line.partial if line.partial >= 0 else self.num_hashes + index
            index = following

    def _in_answer(self, index: int, block: int) -> int:
        """The token of a block after a prompt."""
        line, following = self.lines[index], self.lineage.successors[index]
        if block < len(line.blocks):
            return int(line.blocks[block])
        return self._in_prompt(following, block) if following >= 0 else self.num_hashes + index


def _spread(blocks: list[int], size: int) -> Tokens:
    """Each number `size` times."""
    return np.repeat(np.asarray(blocks, np.int32), size)
