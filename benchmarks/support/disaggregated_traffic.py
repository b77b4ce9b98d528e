"""The traffic of `disaggregated_prefill.py`: long prompts that arrive beside requests that decode."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import mambaslots as ms
import mambaslots.net as msd

SHORT_PROMPT, SHORT_ANSWER = 256, 256


@dataclass(frozen=True)
class Row:
    """What is served at once.

    Attributes:
        prompt, answer: tokens of each long prompt, and of its answer.
        count: long prompts.
        interval_s: one arrives every so many seconds.
        streams: requests beside them, each followed by the next one, that decode all the time.
        short_prompt, short_answer: their lengths.
        seed: other prompts have another one.
    """

    prompt: int
    answer: int
    count: int
    interval_s: float
    streams: int
    short_prompt: int = SHORT_PROMPT
    short_answer: int = SHORT_ANSWER
    seed: int = 0

    def long_prompts(self, vocabulary: int) -> list[list[int]]:
        """The same in every process."""
        draw = random.Random(f"{self.prompt} {self.answer} {self.seed}")
        return [[draw.randrange(vocabulary) for _ in range(self.prompt)] for _ in range(self.count)]


@dataclass
class Served:
    """What one engine has served of a row; times in seconds.

    Attributes:
        first: from the arrival of each long prompt to its first token.
        gaps: between two tokens of a request, of all requests, while long prompts were under way.
        tokens: that were generated in that time.
        seconds: of that time.
        prefills, hand_overs: of the long prompts that a prefill worker has computed.
        missed: long prompts that it should have computed, and did not.
        failures: why.
    """

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    prefills: list[float] = field(default_factory=list)
    hand_overs: list[float] = field(default_factory=list)
    missed: int = 0
    failures: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def joined(cls, texts: Sequence[bytes]) -> "Served":
        """What several engines have served of one row, at the same time."""
        joined = cls()
        for one in (cls(**json.loads(text)) for text in texts):
            for name in ("first", "gaps", "prefills", "hand_overs", "failures"):
                getattr(joined, name).extend(getattr(one, name))
            joined.tokens += one.tokens
            joined.missed += one.missed
            joined.seconds = max(joined.seconds, one.seconds)
        return joined

    def figures(self) -> dict[str, float]:
        """Milliseconds, tokens a second, and counts."""
        found = dict(_percentiles("first token", self.first)) | dict(_percentiles("gap", self.gaps))
        found["tokens/s"] = self.tokens / self.seconds
        if self.prefills:
            found["prefill median"] = 1e3 * statistics.median(self.prefills)
            found["hand-over median"] = 1e3 * statistics.median(self.hand_overs)
            found["hand-over max"] = 1e3 * max(self.hand_overs)
        found["missed"] = self.missed
        return found


def _percentiles(name: str, seconds: Sequence[float]) -> Iterator[tuple[str, float]]:
    ordered = sorted(seconds)
    for part, share in (("median", 0.5), ("p95", 0.95), ("max", 1.0)):
        yield f"{name} {part}", 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Traffic:
    """One engine's share of a row."""

    def __init__(
        self, server: ms.AsyncEngine, row: Row, share: int, num_shares: int, vocabulary: int
    ) -> None:
        self._server, self._row = server, row
        self._share, self._num_shares, self._vocabulary = share, num_shares, vocabulary
        self._served = Served()
        self._counts = False
        self._draw = random.Random(f"{share} {row}")

    async def serve(self) -> Served:
        """Serve until all long prompts of the share are answered."""
        row, step = self._row, self._num_shares
        beside = [asyncio.create_task(self._decode()) for _ in range(row.streams // step)]
        await asyncio.sleep(min(1.0, row.interval_s))  # they decode by then
        prompts = row.long_prompts(self._vocabulary)
        began, self._counts = time.perf_counter(), True
        arrivals = (
            self._answer(prompts[number], began + number * row.interval_s)
            for number in range(self._share, row.count, step)
        )
        await asyncio.gather(*arrivals)
        self._served.seconds, self._counts = time.perf_counter() - began, False
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        return self._served

    async def _answer(self, prompt: list[int], arrival_s: float) -> None:
        """Serve a long prompt that arrives at a time of `time.perf_counter`."""
        await asyncio.sleep(max(0.0, arrival_s - time.perf_counter()))
        if isinstance(self._server, msd.DisaggregatedEngine):
            prefill = await self._server.prefill(prompt[:-1])
            if prefill is not None and not prefill.failure:
                self._served.prefills.append(prefill.prefill_s)
                self._served.hand_overs.append(prefill.hand_over_s)
            elif prefill is not None:
                self._served.missed += 1
                self._served.failures.append(prefill.failure)
        await self._stream(prompt, self._row.answer, arrival_s)

    async def _decode(self) -> None:
        while True:
            prompt = [self._draw.randrange(self._vocabulary) for _ in range(self._row.short_prompt)]
            await self._stream(prompt, self._row.short_answer)

    async def _stream(self, prompt: list[int], length: int, arrival_s: float | None = None) -> None:
        params = ms.SamplingParams(max_tokens=length)
        before_s = None
        async with await self._server.stream(prompt, params) as stream:
            async for tokens in stream:
                now_s = time.perf_counter()
                if before_s is None and arrival_s is not None:
                    self._served.first.append(now_s - arrival_s)
                if self._counts:
                    self._served.tokens += len(tokens)
                    if before_s is not None:
                        self._served.gaps.append(now_s - before_s)
                before_s = now_s
