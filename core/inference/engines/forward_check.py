"""Whether a model's logits of a token have the same bits however the token comes to be computed."""

from collections.abc import Iterator
from itertools import chain

from torch import Tensor

from ..contexts.request import DynamicInferenceRequest
from ..contexts.row_ladder import FEWEST_ROWS, padded_to_ladder
from ..contexts.step_inputs import StepShape
from .dummy_steps import DummySteps
from .product_check import bits

TAIL = 19
"""Tokens behind the last whole chunk."""
DECODES = 5
"""Decodes without drafts, of which the third is of the first token of a chunk."""


def longest(chunk_tokens: int) -> int:
    """The tokens of the checked sequence: two chunks, and a part of one."""
    return 2 * chunk_tokens + TAIL


def first_difference(steps: DummySteps, chunk_tokens: int, most_tokens: int, decodes: bool) -> str:
    """Where logits have other bits than in one prefill of the whole sequence; empty where nowhere."""
    check = _ForwardCheck(steps, chunk_tokens, most_tokens)
    cases = chain(check.prefills(), check.decodes() if decodes else ())
    return next((text for text, differs in cases if bool(differs)), "")


class _ForwardCheck:
    def __init__(self, steps: DummySteps, chunk_tokens: int, most_tokens: int) -> None:
        self._steps, self._chunk, self._most_tokens = steps, chunk_tokens, most_tokens
        self._tokens = steps.tokens(longest(chunk_tokens))
        request = steps.request(self._tokens)
        self._whole = self._run(request)
        steps.release(request)

    def prefills(self) -> Iterator[tuple[str, Tensor]]:
        """Each case, and whether it differs."""
        request = self._steps.request(self._tokens)
        yield "in the first chunk of a prefill in parts", self._differs(self._run(request, self._chunk), 0)
        other = self._steps.request(self._steps.tokens(self._chunk + 1, seed=1))
        work = [(request, len(self._tokens)), (other, len(self._tokens))]
        rest, _ = self._steps.run(work, self._as_large_as_can_be)
        yield "in the last part of a prefill, beside another", self._differs(rest, self._chunk)
        self._steps.release(request)
        self._steps.release(other)

    def decodes(self) -> Iterator[tuple[str, Tensor]]:
        """Each case, and whether it differs."""
        start = max(1, 2 * self._chunk - 2)
        request = self._steps.request(self._tokens[:start])
        yield "in a shorter prefill", self._differs(self._run(request), 0)
        other = self._steps.request(self._steps.tokens(TAIL, seed=1))
        for position in range(start, start + DECODES):
            request.append(self._tokens[position : position + 1], [None], 0.0)
            work = [(request, 1)]
            if position == start + DECODES - 1:
                work.append((other, TAIL))
            logits = self._steps.run(work, _among_more if position % 2 else padded_to_ladder)[0]
            where = "alone" if len(work) == 1 else "beside a prefill"
            yield f"in a decode at position {position}, {where}", self._differs(logits, position)
        position = start + DECODES
        drafts = self._tokens[position + 1 : position + 1 + self._steps.num_drafts]
        if drafts:
            request.append(self._tokens[position : position + 1], [None], 0.0)
            logits = self._steps.run([(request, 1)], padded_to_ladder, drafts)[0]
            yield f"in a decode at position {position}, with drafts", self._differs(logits, position)
        self._steps.release(request)
        self._steps.release(other)

    def _run(self, request: DynamicInferenceRequest, budget: int | None = None) -> Tensor:
        return self._steps.run([(request, budget or len(self._tokens))], padded_to_ladder)[0]

    def _differs(self, logits: Tensor, start: int) -> Tensor:
        """Whether logits of the tokens from `start` on have other bits than in the whole prefill."""
        expected = self._whole[start : start + len(logits)]
        return bits(logits).ne(bits(expected)).any()

    def _as_large_as_can_be(self, shape: StepShape) -> StepShape:
        return padded_to_ladder(shape._replace(prefill_tokens=max(shape.prefill_tokens, self._most_tokens)))


def _among_more(shape: StepShape) -> StepShape:
    """Decodes padded to the second rung: kernels may share their work otherwise there."""
    return padded_to_ladder(shape if shape.prefills else shape._replace(decodes=FEWEST_ROWS + 1))
