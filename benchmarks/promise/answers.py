"""Answers that are compared: tokens one by one, log-probs by the bits of their float32 numbers."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mambaslots as ms
import numpy as np


@dataclass(frozen=True)
class Answer:
    """What one request returned.

    Attributes:
        tokens: the generated tokens.
        log_probs: one a generated token.
        prompt_log_probs: of prompt tokens 1 .. N-1; empty where not asked for.
    """

    tokens: list[int]
    log_probs: list[float]
    prompt_log_probs: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, result: ms.RequestResult) -> "Answer":
        return cls(result.tokens, result.log_probs or [], result.prompt_log_probs or [])

    def write(self) -> dict[str, Any]:
        """As JSON takes it; JSON keeps every bit of a float."""
        return asdict(self)


@dataclass
class Differences:
    """How answers differ from those that were expected.

    Attributes:
        condition: how the requests were served.
        requests, positions: how many requests and log-probs were compared.
        differing_requests: requests with a token or a log-prob that differs.
        differing_tokens: generated tokens that differ, or are missing on one side.
        differing_log_probs: log-probs that differ.
        differing_bits: bits in which their float32 numbers differ.
        largest: the largest difference of two log-probs of the same token.
        evidence: what shows that the condition was met, such as how many tokens were resumed.
        seconds: how long serving took.
    """

    condition: str
    requests: int = 0
    positions: int = 0
    differing_requests: int = 0
    differing_tokens: int = 0
    differing_log_probs: int = 0
    differing_bits: int = 0
    largest: float = 0.0
    evidence: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, expected: Answer, got: Answer, tolerance: float = 0.0) -> None:
        """Compare two answers.

        Args:
            expected: may have more tokens, and prompt log-probs that `got` lacks.
            got: what was served now.
            tolerance: how far log-probs may differ; 0.0 compares bits.
        """
        length = len(got.tokens)
        tokens = sum(a != b for a, b in zip(expected.tokens, got.tokens, strict=False))
        tokens += max(0, length - len(expected.tokens))
        own, theirs = list(got.log_probs), list(expected.log_probs[: len(got.log_probs)])
        if got.prompt_log_probs:
            own += got.prompt_log_probs
            theirs += expected.prompt_log_probs
        differing = self.add_log_probs(theirs, own, tolerance)
        self.requests += 1
        self.differing_tokens += tokens
        self.differing_requests += bool(tokens or differing)

    def add_log_probs(self, expected: Sequence[float], got: Sequence[float], tolerance: float) -> int:
        """Compare log-probs of the same positions; returns how many differ."""
        if len(expected) != len(got):
            raise ValueError(f"got has {len(got)} log-probs; accepted: {len(expected)}")
        ours, theirs = np.asarray(got), np.asarray(expected)
        off = np.abs(ours - theirs)
        bad = ~(off <= tolerance)  # NaN differs
        bits = _float32_bits(ours[bad]) ^ _float32_bits(theirs[bad])
        self.positions += len(ours)
        self.differing_log_probs += int(bad.sum())
        self.differing_bits += int(np.bitwise_count(bits).sum())
        if off.size:
            self.largest = max(self.largest, float(off.max()))
        return int(bad.sum())

    @property
    def equal(self) -> bool:
        return not self.differing_requests

    def line(self) -> str:
        """One line of the table."""
        evidence = ", ".join(f"{what} {count:,}" for what, count in self.evidence.items() if count)
        return (
            f"{self.condition:44} {self.requests:8,} {self.positions:9,} {self.differing_requests:8,} "
            f"{self.differing_tokens:7,} {self.differing_log_probs:9,} {self.differing_bits:9,} "
            f"{self.largest:8.1e} {self.seconds:6.1f}  {evidence}"
        )


HEADING = (
    f"{'condition':44} {'requests':>8} {'positions':>9} {'differ':>8} {'tokens':>7} {'log-probs':>9} "
    f"{'bits':>9} {'largest':>8} {'s':>6}  evidence"
)


def total(rows: Iterable[Differences]) -> Differences:
    """The sums of all rows."""
    whole = Differences("all")
    for row in rows:
        for name in ("requests", "positions", "differing_requests", "differing_tokens"):
            setattr(whole, name, getattr(whole, name) + getattr(row, name))
        whole.differing_log_probs += row.differing_log_probs
        whole.differing_bits += row.differing_bits
        whole.largest = max(whole.largest, row.largest)
        whole.seconds += row.seconds
    return whole


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    path.write_text(json.dumps([answer.write() for answer in answers]))


def read_answers(path: Path) -> list[Answer]:
    return [Answer(**written) for written in json.loads(path.read_text())]


def _float32_bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.astype(np.float32).view(np.uint32)
