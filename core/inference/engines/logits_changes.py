"""What requests change in their logits before a token is drawn: penalties, biases, min_tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...devices import tensor_on
from ..contexts.dynamic_request import DynamicInferenceRequest, ScheduledRequest
from ..kernels.kernel_set import runs_triton
from ..kernels.reference import torch_penalties

Row = tuple[ScheduledRequest, int]
"""A row of logits: its scheduled request, and its index among the rows of this request."""


@dataclass
class _Counted:
    """A request's row of the counts, and how many tokens of its answer are counted there."""

    row: int
    num_tokens: int


@dataclass(frozen=True)
class _Changes:
    """What the rows of a step need on the device; the next step needs the same, if it `is_of` them."""

    requests: list[tuple[DynamicInferenceRequest, bool]]  # of each row, and whether it has its `min_tokens`
    counted: list[tuple[int, _Counted]]  # of requests with penalties and without drafts, by their rows
    drawn: Tensor | None  # [2, counted]: these rows, and their rows of the counts
    penalties: tuple[Tensor, Tensor] | None  # [rows]: the row of the counts, or -1; [3, rows]: the factors
    copied: Tensor | None  # rows of the counts, where drafts count, too; `penalties` has places among these
    drafts: Tensor | None  # [2, drafts]: those places, and tokens
    biases: tuple[Tensor, Tensor] | None  # places in the logits, row by row, and what is added there

    def is_of(self, rows: Sequence[Row]) -> bool:
        """Whether these are its requests, in its order, counted up to here and forbidden the same tokens."""
        return (
            not any(scheduled.drafts for scheduled, _ in rows)
            and _requests(rows) == self.requests
            and all(counted.num_tokens == rows[row][0].answer_length for row, counted in self.counted)
        )


def _requests(rows: Sequence[Row]) -> list[tuple[DynamicInferenceRequest, bool]]:
    """The request of each row, and whether it has its `min_tokens`."""
    return [
        (scheduled.request, scheduled.answer_length + index >= scheduled.request.sampling.min_tokens)
        for scheduled, index in rows
    ]


class LogitsChanges:
    """Changes logits as their requests' sampling parameters say; counts tokens on the device.

    Counts lie outside the pools: 4 bytes for each token of the vocabulary and each request with a penalty
    (128 of them, a vocabulary of 248,320: 127 MB), and in a step with drafts as much for each of its rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._counted: dict[DynamicInferenceRequest, _Counted] = {}
        self._changes: _Changes | None = None  # of the last step
        self._counts = torch.empty(0, 0, dtype=torch.int32, device=device)
        self._apply_penalties = torch_penalties.penalize
        if runs_triton(device):
            from ..kernels.penalties import penalize

            self._apply_penalties = penalize

    def apply(self, rows: Sequence[Row], logits: Tensor) -> Tensor:
        """The logits to draw from, a copy in float32 or float64."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        changes, self._changes = self._changes, None  # after an error nothing is kept
        if changes is None or not changes.is_of(rows):
            changes = self._new_changes(rows, logits.shape[1], dtype)
        if changes.penalties is not None:
            counts = self._counts
            if changes.copied is not None:
                counts = counts.index_select(0, changes.copied)
            if changes.drafts is not None:
                _add(counts, *changes.drafts)
            out = self._apply_penalties(logits, counts, *changes.penalties)
        else:
            out = logits.to(dtype, copy=True, memory_format=torch.contiguous_format)
        if changes.biases is not None:
            # A token that is biased and forbidden is listed twice: sums with -inf depend on no order.
            out.view(-1).index_add_(0, *changes.biases)
        self._changes = changes
        return out

    def count(self, drawn: Tensor) -> None:
        """Count what was drawn, a token for each row of the last `apply`; not where drafts may be wrong."""
        if self._changes is not None and self._changes.drawn is not None:
            rows, count_rows = self._changes.drawn
            for _, counted in self._changes.counted:
                counted.num_tokens += 1
            _add(self._counts, count_rows, drawn if len(rows) == len(drawn) else drawn.index_select(0, rows))

    def release_row(self, request: DynamicInferenceRequest) -> None:
        """Give the row of a request that has ended to the next one."""
        self._counted.pop(request, None)
        self._changes = None
        if not self._counted:
            self.clear()

    def clear(self) -> None:
        """Remove all counts, and free their memory: the next step counts what requests then have."""
        self._counted.clear()
        self._changes = None
        self._counts = self._counts.new_empty(0, 0)

    def _new_changes(self, rows: Sequence[Row], vocabulary: int, dtype: torch.dtype) -> _Changes:
        count_rows, factors = [-1] * len(rows), [(1.0, 0.0, 0.0)] * len(rows)
        has_drafts = any(scheduled.drafts for scheduled, _ in rows)
        counted: list[tuple[int, _Counted]] = []
        copied: list[int] = []
        drafts: list[tuple[int, int]] = []
        for row, (scheduled, index) in enumerate(rows):
            sampling = scheduled.request.sampling
            if not sampling.has_penalties:
                continue
            counts = self._up_to_date(scheduled, vocabulary)
            if not scheduled.drafts:
                counted.append((row, counts))
            drafts += [(len(copied), draft) for draft in scheduled.drafts[:index]]
            count_rows[row] = len(copied) if has_drafts else counts.row
            copied.append(counts.row)
            factors[row] = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
        columns = _columns(factors)
        return _Changes(
            requests=_requests(rows),
            counted=counted,
            drawn=self._to_device(_columns([(row, c.row) for row, c in counted])) if counted else None,
            penalties=(self._to_device(count_rows), self._to_device(columns, dtype)) if copied else None,
            copied=self._to_device(copied) if has_drafts else None,
            drafts=self._to_device(_columns(drafts)) if drafts else None,
            biases=self._biases(rows, vocabulary, dtype),
        )

    def _up_to_date(self, scheduled: ScheduledRequest, vocabulary: int) -> _Counted:
        """The request's counts of its prompt and of all tokens before this step."""
        request, answer_length = scheduled.request, scheduled.answer_length
        counted = self._counted.get(request)
        # A new request, or one of which an unread token was dropped, is counted from its start.
        if counted is None or counted.num_tokens > answer_length:
            row = self._free_row(vocabulary) if counted is None else counted.row
            self._counts[row].zero_()
            if request.sampling.repetition_penalty != 1.0:
                self._counts[row].index_fill_(0, self._to_device(request.prompt_tokens), 1)
            counted = self._counted[request] = _Counted(row, 0)
        new = request.tokens[len(request.prompt_tokens) + counted.num_tokens :]
        new = new[: answer_length - counted.num_tokens]
        if new:
            _add(self._counts, self._to_device([counted.row] * len(new)), self._to_device(new))
            counted.num_tokens += len(new)
        assert counted.num_tokens == answer_length, "an unread token is counted when it is drawn"
        return counted

    def _free_row(self, vocabulary: int) -> int:
        used_rows = {counted.row for counted in self._counted.values()}
        row = next(row for row in range(len(used_rows) + 1) if row not in used_rows)
        if row >= len(self._counts):
            larger = self._counts.new_zeros(max(4, 2 * len(self._counts)), vocabulary)
            if len(self._counts):
                larger[: len(self._counts)] = self._counts
            self._counts = larger
        return row

    def _biases(self, rows: Sequence[Row], width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """`logit_bias`, and -inf for what would end an answer before `min_tokens`."""
        entries: list[tuple[int, float]] = []
        for row, (scheduled, index) in enumerate(rows):
            sampling = scheduled.request.sampling
            first = row * width
            entries += [(first + token, bias) for token, bias in sampling.biases]
            if scheduled.answer_length + index < sampling.min_tokens:
                entries += [(first + token, -math.inf) for token in sorted({*sampling.stops})]
        if not entries:
            return None
        places, biases = zip(*entries, strict=True)
        return self._to_device(places), self._to_device(biases, dtype)

    def _to_device(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return tensor_on(self._counts.device, values, dtype)


def _columns(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return list(zip(*rows, strict=True))


def _add(counts: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Count each token once more in its row of `counts`."""
    twos = torch.full_like(tokens, 2, dtype=torch.int32)
    counts.view(-1).index_add_(0, rows * counts.shape[1] + tokens, twos)
