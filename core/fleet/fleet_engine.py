"""A `ServedEngine` over replicas: requests continue on another replica where one is lost."""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from typing import Any

from prometheus_client.core import Metric

from ..errors import NoReplicaError, QueueFullError
from ..inference.contexts.cache.checkpoint_plan import CheckpointPlan
from ..inference.contexts.cache.hashing import PrefixHashChain, SaltKey
from ..inference.engines.streams import AsyncStream, TokenStream
from ..params_and_results import EarlyEnd, SamplingParams
from ..serve.served_engine import EngineFacts
from .replica_answers import AnswerPart, EngineRequest, FleetAnswer, ReplicaLostError
from .replica_reports import ReplicaReport, counts_of_all, fleet_metrics, merged_snapshot

logger = logging.getLogger(__name__)

MAX_RETRIES = 2  # a request survives the loss of so many replicas
RETRY_DELAY_S = 0.1  # before the second retry of a request, and once more before each further one
_LONGEST_END_S = 10.0  # how long `drain` waits for calls that it cancelled


class FleetEngine:
    """Sends each request to a replica, and to another one where that is lost: a `ServedEngine`.

    A retry continues after the tokens that have come: token i has the random number of the seed and i,
    wherever it is computed. The answer is the same where prefill and decode have the same bits.
    """

    def __init__(
        self,
        facts: EngineFacts,
        salt_key: SaltKey,
        send_request: Callable[[EngineRequest], AsyncGenerator[AnswerPart]],
        *,
        num_replicas: Callable[[], int],
        reports: Callable[[], Awaitable[Sequence[ReplicaReport]]],
        max_waiting_requests: int = 1024,
    ) -> None:
        """`send_request` chooses a replica, yields its `answer_parts`; the queue's limit is this ingress'."""
        self.facts = facts
        self._salt_key = salt_key  # that of the replicas
        self._send_request = send_request
        self._num_replicas = num_replicas
        self._reports = reports
        self._max_waiting = max_waiting_requests
        self._new_ids = count()
        self.name = secrets.token_hex(6)  # other ingresses of the same replicas have other names
        self._counts: Counter[str] = Counter()
        self._task_of: dict[FleetAnswer, asyncio.Task[None]] = {}
        self._is_draining = False

    @property
    def max_running(self) -> int:
        """Requests that all replicas together can run at once now."""
        return self.facts.max_requests * max(1, self._num_replicas())

    @property
    def num_waiting(self) -> int:
        """Requests that no replica has confirmed."""
        return sum(not answer.opened.is_set() for answer in self._task_of)

    @property
    def num_running(self) -> int:
        """Requests that replicas have; they may wait there."""
        return len(self._task_of) - self.num_waiting

    @property
    def failure(self) -> BaseException | None:
        """A `NoReplicaError` while no replica serves."""
        return None if self._num_replicas() else NoReplicaError("no replica serves now")

    @property
    def counts(self) -> dict[str, int]:
        """What this ingress adds to the fleet's metrics."""
        return {**self._counts, "requests_waiting": self.num_waiting, "requests_running": self.num_running}

    def start(self) -> None:
        """Nothing runs without requests."""

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and wait for the others. Returns whether none was cancelled at last."""
        self._is_draining = True
        if await self._all_end(timeout_s):
            return True
        self._cancel_all()
        await self._all_end(_LONGEST_END_S)
        return False

    async def close(self, timeout_s: float | None = None) -> bool:
        """Cancel all requests; the replicas continue. Returns whether all calls ended within `timeout_s`."""
        self._is_draining = True
        self._cancel_all()
        return await self._all_end(timeout_s)

    async def _all_end(self, timeout_s: float | None) -> bool:
        if self._task_of:
            await asyncio.wait(self._task_of.values(), timeout=timeout_s)
        return not self._task_of

    def _cancel_all(self) -> None:
        for answer in list(self._task_of):
            self._end(answer, "cancelled")

    async def stream(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        *,
        cache_salt: bytes | None = None,
        checkpoint_plan: CheckpointPlan | None = None,
        tenant: str | None = None,
    ) -> AsyncStream:
        """Send a prompt to a replica; returns once one has it. Errors are those of `ServedEngine`."""
        if self._is_draining:
            raise RuntimeError("the FleetEngine is closing; it accepts no more requests")
        if self.failure is not None:
            raise self.failure
        num_waiting = len(self._task_of) - self.max_running
        if num_waiting >= self._max_waiting:
            raise QueueFullError(num_waiting, self._max_waiting)
        if sampling_params.seed is None:
            sampling_params = replace(sampling_params, seed=secrets.randbits(63))
        number = next(self._new_ids)
        request = EngineRequest(
            request_id=f"{self.name}-{number}", prompt=tuple(prompt), num_given_tokens=0,
            sampling=sampling_params, cache_salt=cache_salt, plan=checkpoint_plan,
            block_size_tokens=self.facts.block_size_tokens, tenant=tenant if cache_salt is not None else None,
        )  # fmt: skip
        chain = None
        if self.facts.caches_prefixes:
            chain = PrefixHashChain(self.facts.block_size_tokens, self._salt_key.root(cache_salt))
        answer = FleetAnswer(number, request, chain, self._end)
        task = self._task_of[answer] = asyncio.create_task(self._call_replicas(answer))
        task.add_done_callback(lambda task: self._on_task_done(answer, task))  # also where it never begins
        self._counts["requests"] += 1
        try:
            await answer.opened.wait()
        except BaseException:
            self._end(answer, "cancelled")
            raise
        if answer.error is not None and not answer.tokens:
            raise answer.error
        return TokenStream(answer)

    def _end(self, answer: FleetAnswer, reason: EarlyEnd) -> None:
        """End a request early, unless it has ended or is ending."""
        task = self._task_of.get(answer)
        if task is not None and not answer.has_ended and answer.early_end is None:
            answer.early_end = reason
            task.cancel()

    def _on_task_done(self, answer: FleetAnswer, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and answer.early_end is None:
            answer.end(None, error)
        answer.end_as(answer.early_end or "cancelled")  # unless it has ended
        answer.wake()
        del self._task_of[answer]

    async def _call_replicas(self, answer: FleetAnswer) -> None:
        """Send the request to one replica after the other until the answer has ended."""
        num_lost = 0
        while True:
            try:
                await self._call_replica(answer, is_retry=num_lost > 0)
                return
            except ReplicaLostError as error:
                num_lost += 1
                self._counts["replicas_lost"] += 1
                logger.warning(
                    "request %s lost its replica after %d tokens, loss %d: %s",
                    answer.request_id, len(answer.tokens), num_lost, str(error)[:200],
                )  # fmt: skip
                if answer.early_end is not None or answer.end_if_complete():
                    return
                if num_lost > MAX_RETRIES:
                    self._counts["requests_given_up"] += 1
                    raise NoReplicaError(f"{num_lost} replicas were lost, one after the other") from error
            self._counts["retries"] += 1
            await asyncio.sleep(RETRY_DELAY_S * (num_lost - 1))

    async def _call_replica(self, answer: FleetAnswer, is_retry: bool) -> None:
        """Send the rest of an answer to one replica, and add its parts to the answer."""
        replica = ""
        try:
            async with aclosing(self._send_request(answer.next_request())) as parts:
                async for part in parts:
                    replica = replica or part.replica
                    if is_retry and isinstance(part.error, QueueFullError):
                        raise ReplicaLostError(str(part.error))  # it stops no answer that has begun elsewhere
                    if part.error is not None:
                        raise part.error
                    answer.add(part)
                    if answer.has_ended:
                        return
            raise ReplicaLostError("the replica's answer has no end")
        except ReplicaLostError:
            if replica:
                answer.lost += (replica,)
            raise

    async def metrics(self) -> list[Metric]:
        """The replicas' metrics, each with the label `replica`, and those of all ingresses together."""
        reports = await self._reports()
        counts = counts_of_all(self.name, self.counts, reports)
        counts["replicas"] = self._num_replicas()
        return await asyncio.to_thread(fleet_metrics, counts, reports)

    async def snapshot(self) -> dict[str, Any] | None:
        """The figures of all replicas; None where none reports."""
        snapshots = {report.replica: report.snapshot for report in await self._reports()}
        return await asyncio.to_thread(merged_snapshot, snapshots) if snapshots else None
