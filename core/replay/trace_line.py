"""One line of a trace's file, of either format."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..validation import INT32_MAX, integer, real, shown
from .trace import Tokens

MOONCAKE_HASH_TOKENS = 512
MAX_TOKEN_ID = (1 << 30) - 1
"""Larger token ids stand for answers that a file does not show."""
MAX_REQUEST_TOKENS = 1 << 22
"""The longest prompt and the longest answer of a line: their tokens are made in memory when they are read."""
_MAX_S = 1e9
_TOKEN_FIELDS = {"arrival_s", "session", "tokens", "answer_tokens", "answer_count"}
_HASH_FIELDS = {
    "arrival_s", "session", "token_count", "prefix_hashes", "answer_count", "answer_hashes", "hash_tokens"
}  # fmt: skip
_HASHED = ("arrival_s", "token_count", "answer_count", "prefix_hashes")
_MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")
"""The names of four fields in lines of our own and in Mooncake's."""

Numbers = npt.NDArray[np.int64]


HashNumbers = dict[int | str, int]
"""Small integers that stand for the hashes of a file, in the order in which they are seen."""


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
    """The request of a line of JSON; `hash_tokens` is the default of lines that do not say it."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the line is not JSON ({error}); accepted: one object a line") from None
    if not isinstance(line, dict):
        raise ValueError("the line is no JSON object; accepted: one object a line")
    if "hash_ids" in line:
        _check_fields(line, {*_MOONCAKE}, None)
        return _with_hashes(line, _MOONCAKE, MOONCAKE_HASH_TOKENS, numbers)
    if "tokens" in line:
        _check_fields(line, {"arrival_s"}, _TOKEN_FIELDS)
        return _with_tokens(line)
    _check_fields(line, {*_HASHED}, _HASH_FIELDS)
    if "hash_tokens" not in line and not hash_tokens:
        raise ValueError("hash_tokens is missing; accepted: tokens that a hash covers, at least in line 1")
    size = integer("hash_tokens", line.get("hash_tokens", hash_tokens), 1, INT32_MAX)
    return _with_hashes(line, _HASHED, size, numbers)


def _check_fields(line: Mapping[str, Any], needed: set[str], known: set[str] | None) -> None:
    if missing := sorted(needed - line.keys()):
        raise ValueError(f"{missing[0]} is missing; accepted: {', '.join(sorted(needed))}")
    if known is not None and (others := sorted(line.keys() - known)):
        raise ValueError(f"{others[0]} is no field; accepted: {', '.join(sorted(known))}")


def _with_tokens(line: Mapping[str, Any]) -> TraceLine:
    tokens = _tokens("tokens", line["tokens"])
    answer = _tokens("answer_tokens", line["answer_tokens"]) if "answer_tokens" in line else None
    if answer is None and "answer_count" not in line:
        raise ValueError("answer_tokens is missing; accepted: answer_tokens or answer_count")
    given = line.get("answer_count", 0 if answer is None else len(answer))
    count = integer("answer_count", given, 1, MAX_REQUEST_TOKENS)
    if answer is not None and count != len(answer):
        raise ValueError(f"answer_count is {count}; accepted: {len(answer)}, as answer_tokens are")
    return TraceLine(
        arrival_s=real("arrival_s", line["arrival_s"], 0.0, _MAX_S),
        session=_session(line),
        num_prompt=len(tokens),
        num_answer=count,
        tokens=tokens,
        answer=answer,
    )


def _with_hashes(line: Mapping[str, Any], names: Sequence[str], size: int, numbers: HashNumbers) -> TraceLine:
    """A line whose fields have `names`. Mooncake's has times in ms, and the hash of every partial block."""
    is_mooncake = names is _MOONCAKE
    at, prompt, answer, prefix = names
    unit = 1e3 if is_mooncake else 1.0
    num_prompt = integer(prompt, line[prompt], 1, MAX_REQUEST_TOKENS)
    num_answer = integer(answer, line[answer], 1, MAX_REQUEST_TOKENS)
    hashes = _numbers(prefix, line[prefix], numbers)
    whole, rest = divmod(num_prompt, size)
    accepted = {whole + bool(rest)} if is_mooncake else {whole, whole + bool(rest)}
    if len(hashes) not in accepted:
        counts = " or ".join(map(str, sorted(accepted)))
        raise ValueError(
            f"{prefix} has {len(hashes)} hashes; accepted: {counts} for {num_prompt} tokens in blocks of "
            f"{size}"
        )
    blocks = hashes[:whole]
    if "answer_hashes" in line and not is_mooncake:
        more = _numbers("answer_hashes", line["answer_hashes"], numbers)
        expected = (num_prompt + num_answer) // size - whole
        if len(more) != expected:
            raise ValueError(
                f"answer_hashes has {len(more)} hashes; accepted: {expected}, one for each block of {size} "
                f"tokens that ends in the answer"
            )
        blocks = np.concatenate([blocks, more])
    return TraceLine(
        arrival_s=real(at, line[at], 0.0, unit * _MAX_S) / unit,
        session=None if is_mooncake else _session(line),
        num_prompt=num_prompt,
        num_answer=num_answer,
        blocks=blocks,
        partial=int(hashes[whole]) if len(hashes) > whole else -1,
        hash_tokens=size,
    )


def _numbers(name: str, hashes: object, numbers: HashNumbers) -> Numbers:
    if not isinstance(hashes, list):
        raise ValueError(f"{name} is {shown(hashes)[:80]}; accepted: a list of hashes")
    for one in hashes:
        if type(one) is not int and type(one) is not str:
            raise ValueError(f"{name} has {shown(one)[:80]}; accepted: integers or strings")
    return np.fromiter((numbers.setdefault(one, len(numbers)) for one in hashes), np.int64, len(hashes))


def _tokens(name: str, tokens: object) -> Tokens:
    if not isinstance(tokens, list) or not 0 < len(tokens) <= MAX_REQUEST_TOKENS:
        raise ValueError(
            f"{name} is {shown(tokens)[:80]}; accepted: a list of 1 to {MAX_REQUEST_TOKENS} token ids"
        )
    for token in tokens:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise ValueError(f"{name} has {shown(token)[:80]}; accepted: token ids from 0 to {MAX_TOKEN_ID}")
    return np.asarray(tokens, np.int32)


def _session(line: Mapping[str, Any]) -> str | int | None:
    session = line.get("session")
    if session is None or type(session) is int or type(session) is str:
        return session
    raise ValueError(f"session is {shown(session)[:80]}; accepted: an integer, a string or none")
