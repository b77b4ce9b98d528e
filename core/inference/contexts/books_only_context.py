"""A context that keeps books and serves no model."""

from collections.abc import Iterable, Sequence

from ...state_spec import HybridStateSpec
from .dynamic_context import DynamicInferenceContext
from .request import DynamicInferenceRequest
from .request_step import RequestStep


class BooksOnlyContext(DynamicInferenceContext):
    """The rows, slots, blocks and decisions of a `DynamicInferenceContext`, with pools that take no memory.

    A step consists of `schedule` for each request, `begin_books` and `end_step`. Decodes that change nothing
    but their requests' positions are passed over, many at once.
    """

    def _spec_of_memory(self) -> HybridStateSpec:
        return self.spec.without_bytes()

    def begin_books(self, steps: Sequence[RequestStep]) -> tuple[RequestStep, ...]:
        """Begin a step as `begin_step` does, but publish nothing: no model computes the step.

        Args:
            steps: as `begin_step` takes them; none of them follows another.

        Returns:
            The steps with the slots that are reserved for them, decodes first.
        """
        self._begin_books(steps, None)
        return self._steps

    def num_quiet_decodes(self, request: DynamicInferenceRequest) -> int:
        """How many next decodes of a request change no book but the request's position; O(1).

        Such decodes need no KV block, complete none, take no state, and leave no pinned state.
        """
        holding = request.holding
        if holding is None or not holding.decoding or holding.path.state_slot >= 0:
            return 0
        size, start = self.config.block_size_tokens, holding.num_computed
        if start == len(holding.path.blocks) * size or start + 1 != len(request.tokens):
            return 0
        return size - 1 - start % size

    def pass_decodes(self, requests: Iterable[DynamicInferenceRequest], num_tokens: int) -> None:
        """Count `num_tokens` decodes of each request as made, at most `num_quiet_decodes` of each.

        The caller appends the tokens that the decodes generate to the requests.
        """
        for request in requests:
            if request.holding is not None:
                self._states.pass_over(request.holding, num_tokens)
                request.num_counted = max(request.num_counted, request.holding.num_computed)
