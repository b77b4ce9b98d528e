"""An observer that believes nothing: it counts for itself, and compares."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import mambaslots as ms
from mambaslots.inference.contexts.dynamic_request import DynamicInferenceRequest, ScheduledRequest


class Recorder:
    """Notes every call of an engine, and objects to calls that contradict each other."""

    def __init__(self) -> None:
        self.requests: dict[int, DynamicInferenceRequest] = {}
        self.tokens: dict[int, list[int]] = {}
        self.reasons: Counter[str] = Counter()
        self.num_resumed = 0
        self.ended: list[tuple[int, ms.RequestResult]] = []
        self.resumed: list[ScheduledRequest] = []
        self.num_steps = 0
        self._counted: dict[int, int] = {}  # request -> leading tokens that were counted

    def request_added(self, request: DynamicInferenceRequest) -> None:
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request

    def request_resumed(self, scheduled: ScheduledRequest) -> None:
        assert scheduled.request.request_id in self.requests
        assert scheduled.num_resumed or not scheduled.start
        self.resumed.append(scheduled)

    def step_made(self, batch: Sequence[ScheduledRequest], tokens: Any, duration_s: float) -> None:
        assert duration_s > 0
        self.num_steps += 1
        for scheduled in batch:
            self._count(scheduled)
        for request_id, new in tokens.items():
            self.tokens.setdefault(request_id, []).extend(generated.token for generated in new)

    def request_ended(self, request: DynamicInferenceRequest, result: ms.RequestResult) -> None:
        assert self.requests.pop(request.request_id) is request
        self.ended.append((request.request_id, result))

    def _count(self, scheduled: ScheduledRequest) -> None:
        """Count each prompt token when a step first passes it, one by one."""
        request_id, last = scheduled.request.request_id, len(scheduled.request.prompt_tokens)
        for position in range(self._counted.get(request_id, 0), min(scheduled.stop, last)):
            if position < scheduled.start:
                self.num_resumed += 1
            else:
                (reason,) = {span.reason for span in scheduled.spans if span.start <= position < span.stop}
                self.reasons[reason] += 1
            self._counted[request_id] = position + 1
