"""Whether the bits of logits depend on how a sequence is cut into steps, and on what runs beside it."""

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from ...contexts.padding import MIN_CUBLAS_ROWS, Padding, invariant_padding
from ...contexts.step_inputs import StepShape
from .dummy_steps import DummySteps
from .products import bits

TAIL = 19  # tokens after the last whole chunk
DECODES = 5  # decodes without drafts, of which the third is of the first token of a chunk


def checked_length(chunk_tokens: int) -> int:
    """The tokens of the checked sequence: two chunks, and a part of one."""
    return 2 * chunk_tokens + TAIL


def forward_difference(
    steps: DummySteps, chunk_tokens: int, most_tokens: int, min_decode_tokens: int = MIN_CUBLAS_ROWS
) -> str | None:
    """Where logits have other bits than in one prefill of the whole sequence; None where nowhere."""
    padded = partial(invariant_padding, min_decode_tokens=min_decode_tokens)
    cases = _cases(steps, chunk_tokens, most_tokens, padded)
    return next((text for text, differs in cases if bool(differs)), None)


def _cases(steps: DummySteps, chunk: int, most_tokens: int, padded: Padding) -> Iterator[tuple[str, Tensor]]:
    """Parts of one sequence in steps of all kinds, and whether their logits differ."""
    tokens = steps.tokens(checked_length(chunk))

    def as_large_as_can_be(shape: StepShape) -> StepShape:
        return invariant_padding(shape._replace(prefill_tokens=max(shape.prefill_tokens, most_tokens)))

    def among_more(shape: StepShape) -> StepShape:
        """Decodes padded to the second bucket: kernels may share their work otherwise there."""
        return invariant_padding(shape if shape.prefills else shape._replace(decodes=MIN_CUBLAS_ROWS + 1))

    def differs(logits: Tensor, start: int) -> Tensor:
        """Whether logits of the tokens from `start` on have other bits than in the whole prefill."""
        return bits(logits).ne(bits(whole[start : start + len(logits)])).any()

    request = steps.request(tokens)
    whole = steps.run([(request, len(tokens))], invariant_padding)[0]
    steps.release(request)

    request = steps.request(tokens)
    logits = steps.run([(request, chunk)], invariant_padding)[0]
    yield "in the first chunk of a prefill in parts", differs(logits, 0)
    neighbour = steps.request(steps.tokens(chunk + 1, seed=1))
    work = [(request, len(tokens)), (neighbour, len(tokens))]
    logits, _ = steps.run(work, as_large_as_can_be)
    yield "in the last part of a prefill, beside another", differs(logits, chunk)
    steps.release(request)
    steps.release(neighbour)

    start = max(1, 2 * chunk - 2)
    request = steps.request(tokens[:start])
    yield "in a shorter prefill", differs(steps.run([(request, start)], invariant_padding)[0], 0)
    neighbour = steps.request(steps.tokens(TAIL, seed=1))
    for position in range(start, start + DECODES):
        request.append(tokens[position : position + 1], [None], 0.0)
        work = [(request, 1)]
        if position == start + DECODES - 1:
            work.append((neighbour, TAIL))
        logits = steps.run(work, among_more if position % 2 else padded)[0]
        where = "alone" if len(work) == 1 else "beside a prefill"
        yield f"in a decode at position {position}, {where}", differs(logits, position)
    position = start + DECODES
    drafts = tokens[position + 1 : position + 1 + steps.num_drafts]
    if drafts:
        request.append(tokens[position : position + 1], [None], 0.0)
        logits = steps.run([(request, 1)], padded, drafts)[0]
        yield f"in a decode at position {position}, with drafts", differs(logits, position)
    steps.release(request)
    steps.release(neighbour)
