"""One model and one engine setting under test: what is served, what is expected, and how it is compared."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import mambaslots as ms
from promise.answers import Answer, Differences
from promise.traffic import BitsRequest, Sizes, Traffic, serve
from serving.models import ServingModel
from serving.prefill import free

Results = Sequence[Any]
"""Of requests, or of scored sequences."""


class BitsBench:
    """Serves the same requests again and again, and compares each time with the first.

    Attributes:
        served, sizes: the model, and how large traffic and engine are.
        requests: what every condition serves.
        expected: their answers, with the prompts' log-probs: each request alone, its prompt in one step, no
            cache, decodes by CUDA graph. `serve_alone` computes them.
        rows: what was compared so far.
        cuts: where steps have ended inside prompts, in tokens from the prompt's start.
        arguments: with which the script serves this model in this shape, in another process.
        description: what the first engine says of itself.
    """

    def __init__(
        self,
        served: ServingModel,
        sizes: Sizes,
        settings: dict[str, Any],
        *,
        tolerance: float = 0.0,
        deadline: float = float("inf"),
        report: Callable[[Differences], None] = lambda row: None,
    ) -> None:
        """
        Args:
            served: a model that an engine takes as it is.
            sizes: requests and engine.
            settings: of `ms.InferenceConfig`, what every engine has.
            tolerance: how far log-probs may differ; 0.0 compares bits.
            deadline: by `time.perf_counter()`; `late` says whether it has passed.
            report: called with each row.
        """
        self.served, self.sizes = served, sizes
        self.grid = served.model.state_spec().chunk_size or sizes.block
        self.requests = Traffic(self.vocabulary, seed=1).requests(sizes, self.grid)
        self.expected: list[Answer] = []
        self.rows: list[Differences] = []
        self.cuts: set[int] = set()
        self.arguments: list[str] = []
        self.description = ""
        self._settings, self._tolerance = settings, tolerance
        self._deadline, self._report = deadline, report
        self._plain: ms.DynamicInferenceEngine | None = None

    @property
    def vocabulary(self) -> int:
        return len(self.served.head)

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return time.perf_counter() > self._deadline

    def engine(self, drafter: ms.Drafter | None = None, **overrides: Any) -> ms.DynamicInferenceEngine:
        """An engine without cache, whose step takes every prompt whole; `overrides`: other settings."""
        sizes = self.sizes
        settings: dict[str, Any] = {
            "block_size_tokens": sizes.block,
            "max_requests": sizes.rows,
            "max_tokens_per_step": sizes.step,
            "max_sequence_length": sizes.max_length,
            "num_kv_blocks": sizes.rows * sizes.max_length // sizes.block // 2,
            "enable_prefix_caching": False,
            "num_cuda_graphs": 16,
        }
        settings |= self._settings | overrides
        if settings["enable_prefix_caching"]:
            settings.setdefault("num_mamba_slots", sizes.slots)
        engine = ms.DynamicInferenceEngine(self.served.model, ms.InferenceConfig(**settings), drafter=drafter)
        self.description = self.description or engine.describe()
        return engine

    def free(self) -> None:
        """Free the memory of engines that are not referenced any more."""
        self._plain = None
        free(self.served.device)

    def serve_alone(self) -> float:
        """Compute `expected`; returns the seconds that it took."""
        engine = self.engine()
        started = time.perf_counter()
        for request in self.requests:
            (result,) = serve(engine, [request.with_prompt_log_probs()])
            self.expected.append(Answer.of(result))
        return time.perf_counter() - started

    def expect(self, requests: Sequence[BitsRequest]) -> list[Answer]:
        """What further requests are to answer: in a batch, without cache."""
        if self._plain is None:
            self._plain = self.engine()
        return [Answer.of(result) for result in serve(self._plain, requests)]

    def compare(
        self,
        condition: str,
        call: Callable[[], Results],
        expected: Sequence[Answer] | None = None,
        evidence: Callable[[Results], dict[str, int]] | None = None,
        answer_of: Callable[[Any], Answer] = Answer.of,
    ) -> None:
        """Serve under a condition, and compare.

        Args:
            condition: its name in the table.
            call: serves; returns the results in the order of `expected`.
            expected: the answers; None for those of `requests`.
            evidence: what the results show of the condition.
            answer_of: what of a result is compared.
        """
        row = Differences(condition)
        started = time.perf_counter()
        results = call()
        row.seconds = time.perf_counter() - started
        for answer, result in zip(self.expected if expected is None else expected, results, strict=True):
            row.add(answer, answer_of(result), self._tolerance)
        row.evidence = evidence(results) if evidence is not None else {}
        self.note(row)

    def note(self, row: Differences) -> None:
        """Add a row to those that were compared."""
        self.rows.append(row)
        self._report(row)

    def reordered(
        self, engine: ms.DynamicInferenceEngine, order: Sequence[int], **how: Any
    ) -> list[ms.RequestResult]:
        """Serve `requests` in another order; the results come in the order of `requests`."""
        results: list[Any] = [None] * len(order)
        for index, result in zip(
            order, serve(engine, [self.requests[index] for index in order], **how), strict=True
        ):
            results[index] = result
        return results


def num_resumed(results: Results) -> dict[str, int]:
    """Evidence of a cache."""
    return {
        "resumed requests": sum(result.num_resumed_tokens > 0 for result in results),
        "resumed tokens": sum(result.num_resumed_tokens for result in results),
    }


def num_preempted(results: Results) -> dict[str, int]:
    """Evidence of preemption."""
    return {
        "preempted requests": sum(result.num_recomputed_tokens > 0 for result in results),
        "computed again": sum(result.num_recomputed_tokens for result in results),
    }
