"""A trace: requests with their tokens, in the order in which they came; and a line of its file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from ..validation import INT32_MAX, ceil_div

Tokens = npt.NDArray[np.integer[Any]]
"""[n] int32 token ids. Where a trace has hashes only, ids that are equal where the hashes are."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request, `arrival_s` after the trace began; prompt and answer have one or more tokens each."""

    arrival_s: float
    session: int  # a request arrives after the answers of its session have ended
    prompt: Tokens
    answer: Tokens


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of their arrival, and what tables call them."""

    name: str
    requests: Sequence[TraceRequest] = field(repr=False)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and answer together; 0 for no request."""
        return max(self._lengths, default=0)

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts and answers."""
        return sum(self._lengths)

    @property
    def _lengths(self) -> Iterator[int]:
        return (len(request.prompt) + len(request.answer) for request in self.requests)


# ---- lines of files

MOONCAKE_HASH_TOKENS = 512
MAX_TOKEN_ID = (1 << 30) - 1  # larger token ids stand for answers that a file does not show
MAX_REQUEST_TOKENS = 1 << 22
"""The longest prompt and the longest answer of a line: their tokens are made in memory when they are read."""

Numbers = npt.NDArray[np.int64]
Hashes = list[int | str]
HashNumbers = dict[int | str, int]
"""Small integers that stand for the hashes of a file, in the order in which they are seen."""
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
TokenCount = Annotated[int, Meta(ge=1, le=MAX_REQUEST_TOKENS)]
TokenIds = Annotated[
    list[Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]], Meta(min_length=1, max_length=MAX_REQUEST_TOKENS)
]


class TokenLine(msgspec.Struct, forbid_unknown_fields=True):
    """A request with its tokens. Of an answer the count is enough."""

    arrival_s: Seconds
    tokens: TokenIds
    answer_tokens: TokenIds | None = None
    answer_count: TokenCount | None = None
    session: int | str | None = None


class HashLine(msgspec.Struct, forbid_unknown_fields=True):
    """A request with the hashes of its blocks. `hash_tokens` is that of the line before where it is None."""

    arrival_s: Seconds
    token_count: TokenCount
    prefix_hashes: Hashes
    answer_count: TokenCount
    answer_hashes: Hashes | None = None
    hash_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    session: int | str | None = None


class MooncakeLine(msgspec.Struct):
    """A request in Mooncake's format: milliseconds, and the hash of a partial block, too."""

    timestamp: Annotated[float, Meta(ge=0.0, le=1e12)]
    input_length: TokenCount
    output_length: TokenCount
    hash_ids: Hashes


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TraceLine:
    """One request of a file, with tokens or with the numbers of its hashes."""

    arrival_s: float
    session: str | int | None = None
    num_prompt: int
    num_answer: int
    tokens: Tokens | None = None
    answer: Tokens | None = None
    blocks: Numbers = field(default_factory=lambda: np.empty(0, np.int64))  # of the prompt, then the answer
    partial: int = -1  # number of the hash of the prompt's last, partial block
    hash_tokens: int = 0  # tokens of a block; 0 where the line has tokens

    @property
    def known_prompt(self) -> list[int]:
        """The numbers of the prompt's blocks, the partial one too where it is known."""
        blocks: list[int] = self.blocks[: self.num_prompt // self.hash_tokens].tolist()
        return blocks if self.partial < 0 else [*blocks, self.partial]


def parse_line(text: bytes, numbers: HashNumbers, hash_tokens: int | None) -> TraceLine:
    """The request of a line of JSON; `hash_tokens` is the default. A ValueError names the wrong field."""
    try:
        line = msgspec.json.decode(text)
    except RecursionError as error:
        raise ValueError(f"the line is nested too deeply ({error}); accepted: an object") from None
    names = line if isinstance(line, dict) else ()
    if "hash_ids" in names:
        return _of_mooncake(msgspec.convert(line, MooncakeLine), numbers)
    if "tokens" in names:
        return _of_tokens(msgspec.convert(line, TokenLine))
    return _of_hashes(msgspec.convert(line, HashLine), numbers, hash_tokens)


def _of_tokens(line: TokenLine) -> TraceLine:
    if (line.answer_tokens is None) == (line.answer_count is None):
        raise ValueError("accepted: either answer_tokens or answer_count")
    return TraceLine(
        arrival_s=line.arrival_s,
        session=line.session,
        num_prompt=len(line.tokens),
        num_answer=line.answer_count or len(line.answer_tokens or ()),
        tokens=np.asarray(line.tokens, np.int32),
        answer=None if line.answer_tokens is None else np.asarray(line.answer_tokens, np.int32),
    )


def _of_hashes(line: HashLine, numbers: HashNumbers, hash_tokens: int | None) -> TraceLine:
    size = line.hash_tokens or hash_tokens
    if not size:
        raise ValueError("hash_tokens is missing; accepted: tokens that a hash covers, at least in line 1")
    whole, rest = divmod(line.token_count, size)
    _check_length("prefix_hashes", line.prefix_hashes, (whole, whole + 1) if rest else (whole,))
    hashes = _numbers(line.prefix_hashes, numbers)
    blocks = hashes[:whole]
    if line.answer_hashes is not None:
        num_ends = (line.token_count + line.answer_count) // size - whole
        _check_length("answer_hashes", line.answer_hashes, (num_ends,))
        blocks = np.concatenate([blocks, _numbers(line.answer_hashes, numbers)])
    return TraceLine(
        arrival_s=line.arrival_s,
        session=line.session,
        num_prompt=line.token_count,
        num_answer=line.answer_count,
        blocks=blocks,
        partial=int(hashes[whole]) if len(hashes) > whole else -1,
        hash_tokens=size,
    )


def _of_mooncake(line: MooncakeLine, numbers: HashNumbers) -> TraceLine:
    _check_length("hash_ids", line.hash_ids, (ceil_div(line.input_length, MOONCAKE_HASH_TOKENS),))
    own = HashLine(line.timestamp / 1e3, line.input_length, line.hash_ids, line.output_length)
    return _of_hashes(own, numbers, MOONCAKE_HASH_TOKENS)


def _check_length(name: str, hashes: Hashes, accepted: Sequence[int]) -> None:
    if len(hashes) not in accepted:
        counts = " or ".join(map(str, accepted))
        raise ValueError(f"{name} has {len(hashes)} hashes; accepted: {counts}, one for each block")


def _numbers(hashes: Hashes, numbers: HashNumbers) -> Numbers:
    found = (numbers.setdefault(prefix_hash, len(numbers)) for prefix_hash in hashes)
    return np.fromiter(found, np.int64, len(hashes))
