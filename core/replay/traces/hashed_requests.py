"""Requests of which hashes are known: tokens that are equal where the hashes are."""

from collections.abc import Sequence
from typing import overload

import numpy as np

from ..trace import Tokens, TraceRequest
from .lineage import Lineage
from .trace_line import TraceLine


class HashedRequests(Sequence[TraceRequest]):
    """The requests of a file of hashes. A request's tokens are made when the request is read.

    All tokens of a block are the number of the block's hash. Tokens that no hash tells are a number that no
    other request has.

    Args:
        lines: the requests, earliest first.
        lineage: what is inferred of them.
        sessions: the session of each request.
        num_hashes: numbers that hashes have are less than this.
    """

    def __init__(
        self, lines: Sequence[TraceLine], lineage: Lineage, sessions: Sequence[int], num_hashes: int
    ) -> None:
        self._lines = lines
        self._lineage = lineage
        self._sessions = sessions
        self._num_hashes = num_hashes

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> TraceRequest: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TraceRequest]: ...

    def __getitem__(self, index: int | slice) -> TraceRequest | Sequence[TraceRequest]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        line = self._lines[index]
        prompt, stop = line.num_prompt, line.num_prompt + line.num_answer
        return TraceRequest(
            line.arrival_s, self._sessions[index], self._prompt(index), self._answer(index, prompt, stop)
        )

    def _prompt(self, index: int) -> Tokens:
        line = self._lines[index]
        return self._repeated(
            [self._in_prompt(index, block) for block in range(-(-line.num_prompt // line.hash_tokens))],
            0, line.num_prompt, line.hash_tokens,
        )  # fmt: skip

    def _answer(self, index: int, start: int, stop: int) -> Tokens:
        size = self._lines[index].hash_tokens
        blocks = range(start // size, -(-stop // size))
        return self._repeated([self._in_answer(index, block) for block in blocks], start, stop, size)

    def _repeated(self, numbers: list[int], start: int, stop: int, size: int) -> Tokens:
        first = start - start % size
        return np.repeat(np.asarray(numbers, np.int32), size)[start - first : stop - first]

    def _in_prompt(self, index: int, block: int) -> int:
        """The token of a block of a prompt."""
        while True:
            line = self._lines[index]
            if block < len(line.blocks):
                return int(line.blocks[block])
            if line.partial < 0:
                following = self._lineage.successors[index]
            else:
                following = self._lineage.partials.get(line.partial, -1)
            if following >= 0 and block < len(self._lines[following].blocks):
                return int(self._lines[following].blocks[block])
            # A longer prompt each time: a file whose partial hashes contradict themselves ends, too.
            if following < 0 or self._lines[following].num_prompt <= line.num_prompt:
                return line.partial if line.partial >= 0 else self._num_hashes + index
            index = following

    def _in_answer(self, index: int, block: int) -> int:
        """The token of a block behind a prompt."""
        line, following = self._lines[index], self._lineage.successors[index]
        if block < len(line.blocks):
            return int(line.blocks[block])
        return self._in_prompt(following, block) if following >= 0 else self._num_hashes + index
