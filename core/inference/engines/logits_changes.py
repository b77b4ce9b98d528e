"""What requests change in their logits before a token is drawn: penalties, biases, min_p, min_tokens."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contexts.request import DynamicInferenceRequest, RequestStep
from ..contexts.step_inputs import on_device
from ..kernels import penalties
from ..kernels.kernel_set import runs_triton

Settings = tuple[float, float, float]
"""A row's repetition, frequency and presence penalty."""


@dataclass
class _Counted:
    """A request's row of the counts, and how many of its generated tokens are counted there."""

    row: int
    num_generated: int


Penalties = tuple[Tensor, Tensor, Tensor]
"""Rows of logits, their rows of counts, and settings [3, rows]."""
Biases = tuple[Tensor, Tensor, Tensor]
"""Rows of logits, tokens, and what is added to their logits."""


@dataclass(frozen=True)
class _Batch:
    """What steps of the same requests, without drafts, need on the device.

    Attributes:
        requests: of each row.
        is_free: of each row, whether it has its `min_tokens`.
        counted: the rows' counts, of requests with penalties.
        places: which rows these are.
        penalties: for `counted`; None without any.
        biases: None without any.
        limits: of each row, by how much a logit may be below the largest one; None without limits.
    """

    requests: list[DynamicInferenceRequest]
    is_free: list[bool]
    counted: list[_Counted]
    places: list[int]
    penalties: Penalties | None
    biases: Biases | None
    limits: Tensor | None

    def is_of(self, steps: Sequence[RequestStep]) -> bool:
        """Whether these are its requests, in its order, counted up to here and forbidden the same tokens."""
        return (
            len(steps) == len(self.requests)
            and all(
                step.request is request and not step.drafts
                for step, request in zip(steps, self.requests, strict=True)
            )
            and _free_ones(steps) == self.is_free
            and all(
                counted.num_generated == steps[place].num_generated
                for counted, place in zip(self.counted, self.places, strict=True)
            )
        )


class LogitsChanges:
    """Changes logits as their requests' sampling parameters say; counts tokens on the device.

    Memory is allocated with the first request that has a penalty, outside the pools: 4 bytes for each token
    of the vocabulary and each such request (128 requests, a vocabulary of 248,320: 127 MB), and in a step as
    much for each row after a draft. Where a step fails, all counts are made anew.
    """

    def __init__(self, device: torch.device) -> None:
        self._counted: dict[DynamicInferenceRequest, _Counted] = {}
        self._batch: _Batch | None = None
        self._counts = torch.empty(0, 0, dtype=torch.int32, device=device)
        self._apply_penalties = penalties.penalize
        if runs_triton(device):
            from ..kernels import penalties_gpu

            self._apply_penalties = penalties_gpu.penalize

    def changed(self, steps: Sequence[RequestStep], logits: Tensor) -> Tensor:
        """The logits to draw from, a copy in float32 or float64.

        `logits`: the rows of `steps`, 1 + drafts each; a draft is counted in the rows after it.
        """
        out = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        if any(step.drafts for step in steps):
            self._batch = None
            self._penalize_with_drafts(steps, out)
            self._add_biases(self._biases(steps, out), out)
            self._cut_to_min_p(self._limits(steps, out), out)
            return out
        batch, self._batch = self._batch, None  # after an error nothing is kept
        if batch is None or not batch.is_of(steps):
            batch = self._new_batch(steps, out)
        if batch.penalties is not None:
            self._apply_penalties(out, self._counts, *batch.penalties)
        self._add_biases(batch.biases, out)
        self._cut_to_min_p(batch.limits, out)
        self._batch = batch
        return out

    def count(self, steps: Sequence[RequestStep], drawn: Tensor) -> None:
        """Count the drawn tokens of requests without drafts, whose logits `changed` has just changed.

        `drawn`: a token for each row of `steps`. Of drafts it is not known yet which are right: the next step
        counts their tokens.
        """
        if self._batch is None:
            self._count_with_drafts(steps, drawn)
        elif self._batch.penalties is not None:
            rows, count_rows, _ = self._batch.penalties
            for counted in self._batch.counted:
                counted.num_generated += 1
            _add(self._counts, count_rows, drawn if len(rows) == len(drawn) else drawn.index_select(0, rows))

    def _count_with_drafts(self, steps: Sequence[RequestStep], drawn: Tensor) -> None:
        rows, places = [], []
        for first, step in _with_first_rows(steps):
            counted = self._counted.get(step.request)
            if counted is not None and not step.drafts:
                counted.num_generated += 1
                rows.append(counted.row)
                places.append(first)
        if rows:
            _add(self._counts, self._sent(rows), drawn.index_select(0, self._sent(places)))

    def free(self, request: DynamicInferenceRequest) -> None:
        """Give the row of a request that has ended to the next one."""
        self._counted.pop(request, None)
        self._batch = None
        if not self._counted:
            self.clear()

    def clear(self) -> None:
        """Forget all counts, and free their memory: the next step counts what requests then have."""
        self._counted.clear()
        self._batch = None
        self._counts = self._counts.new_empty(0, 0)

    def _new_batch(self, steps: Sequence[RequestStep], out: Tensor) -> _Batch:
        counted, places, settings = [], [], []
        for place, step in enumerate(steps):
            if step.request.sampling.has_penalties:
                counted.append(self._up_to_date(step, out))
                places.append(place)
                settings.append(_settings_of(step))
        rows = [one.row for one in counted]
        return _Batch(
            requests=[step.request for step in steps],
            is_free=_free_ones(steps),
            counted=counted,
            places=places,
            penalties=self._penalties(places, rows, settings, out) if places else None,
            biases=self._biases(steps, out),
            limits=self._limits(steps, out),
        )

    def _penalize_with_drafts(self, steps: Sequence[RequestStep], out: Tensor) -> None:
        plain: list[tuple[int, int, Settings]] = []  # rows of logits and of counts
        after_drafts: list[tuple[int, int, Settings]] = []
        drafted: list[tuple[int, int]] = []  # tokens that count too, each by a number in `after_drafts`
        for first, step in _with_first_rows(steps):
            if step.request.sampling.has_penalties:
                row, one = self._up_to_date(step, out).row, _settings_of(step)
                plain.append((first, row, one))
                for number in range(1, 1 + len(step.drafts)):
                    drafted += [(len(after_drafts), draft) for draft in step.drafts[:number]]
                    after_drafts.append((first + number, row, one))
        if plain:
            rows, count_rows, settings = zip(*plain, strict=True)
            self._apply_penalties(out, self._counts, *self._penalties(rows, count_rows, settings, out))
        if after_drafts:
            rows, count_rows, settings = zip(*after_drafts, strict=True)
            counts = self._counts.index_select(0, self._sent(count_rows))
            _add(counts, *(self._sent(column) for column in zip(*drafted, strict=True)))
            self._apply_penalties(out, counts, *self._penalties(rows, range(len(rows)), settings, out))

    def _penalties(
        self, rows: Sequence[int], count_rows: Sequence[int], settings: Sequence[Settings], out: Tensor
    ) -> Penalties:
        numbers = torch.tensor(settings, dtype=out.dtype, device="cpu").T.contiguous()
        return self._sent(rows), self._sent(count_rows), on_device(numbers, out.device)

    def _up_to_date(self, step: RequestStep, out: Tensor) -> _Counted:
        """The request's counts of its prompt and of all tokens before this step."""
        request, known = step.request, step.num_generated
        counted = self._counted.get(request)
        # A new request, or one of which a token that was drawn ahead was dropped, is counted from its start.
        if counted is None or counted.num_generated > known:
            row = self._free_row(out) if counted is None else counted.row
            self._counts[row].zero_()
            if request.sampling.repetition_penalty != 1.0:
                self._counts[row].index_fill_(0, self._sent(request.prompt_tokens), 1)
            counted = self._counted[request] = _Counted(row, 0)
        new = request.tokens[len(request.prompt_tokens) + counted.num_generated :]
        new = new[: known - counted.num_generated]
        if new:
            _add(self._counts, self._sent([counted.row] * len(new)), self._sent(new))
            counted.num_generated += len(new)
        assert counted.num_generated == known, "a token that was drawn ahead is counted when it is drawn"
        return counted

    def _free_row(self, out: Tensor) -> int:
        taken = {counted.row for counted in self._counted.values()}
        row = next(row for row in range(len(taken) + 1) if row not in taken)
        if row >= len(self._counts):
            size = max(4, 2 * len(self._counts))
            larger = torch.zeros(size, out.shape[1], dtype=torch.int32, device=out.device)
            if len(self._counts):
                larger[: len(self._counts)] = self._counts
            self._counts = larger
        return row

    def _biases(self, steps: Sequence[RequestStep], out: Tensor) -> Biases | None:
        """`logit_bias`, and -inf for what would end an answer before `min_tokens`."""
        listed: list[tuple[int, int, float]] = []
        for first, step in _with_first_rows(steps):
            sampling = step.request.sampling
            for row in range(first, first + 1 + len(step.drafts)):
                listed += [(row, token, bias) for token, bias in sampling.biases]
                if step.num_generated + row - first < sampling.min_tokens:
                    ends = {token for token in sampling.stops if token is not None and token >= 0}
                    listed += [(row, token, -math.inf) for token in sorted(ends)]
        if not listed:
            return None
        rows, tokens, biases = zip(*listed, strict=True)
        added = on_device(torch.tensor(biases, dtype=out.dtype, device="cpu"), out.device)
        return self._sent(rows), self._sent(tokens), added

    def _add_biases(self, biases: Biases | None, out: Tensor) -> None:
        if biases is not None:
            rows, tokens, added = biases
            # A token that is biased and forbidden is listed twice: sums with -inf depend on no order.
            out.index_put_((rows, tokens), added, accumulate=True)

    def _limits(self, steps: Sequence[RequestStep], out: Tensor) -> Tensor | None:
        limits: list[float] = []
        for step in steps:
            sampling = step.request.sampling
            least = -math.inf
            if sampling.min_p and not sampling.greedy:
                temperature = 1.0 if sampling.temperature is None else sampling.temperature
                least = temperature * math.log(sampling.min_p)
            limits += [least] * (1 + len(step.drafts))
        if max(limits) == -math.inf:
            return None
        return on_device(torch.tensor(limits, dtype=out.dtype, device="cpu"), out.device)

    def _cut_to_min_p(self, limits: Tensor | None, out: Tensor) -> None:
        """Forbid what is less likely than min_p times the most likely token, after the temperature."""
        if limits is not None:
            out.masked_fill_(out < (out.amax(dim=-1) + limits)[:, None], -math.inf)

    def _sent(self, values: Sequence[int]) -> Tensor:
        return on_device(torch.tensor(list(values), dtype=torch.int64, device="cpu"), self._counts.device)


def _with_first_rows(steps: Sequence[RequestStep]) -> Iterator[tuple[int, RequestStep]]:
    """Each step with the first of its rows of logits, which are 1 + drafts."""
    first = 0
    for step in steps:
        yield first, step
        first += 1 + len(step.drafts)


def _settings_of(step: RequestStep) -> Settings:
    sampling = step.request.sampling
    return sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty


def _free_ones(steps: Sequence[RequestStep]) -> list[bool]:
    """Of each step without drafts, whether its answer may end."""
    return [step.num_generated >= step.request.sampling.min_tokens for step in steps]


def _add(counts: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Count each token once more in its row of `counts`."""
    twos = torch.full_like(tokens, 2, dtype=torch.int32)
    counts.view(-1).index_add_(0, rows * counts.shape[1] + tokens, twos)
