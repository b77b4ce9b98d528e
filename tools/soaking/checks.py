"""What all rounds of a soak share: what they must not leave behind, and how answers are compared."""

import gc
import logging
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random

import mambaslots as ms
import torch
from soaking.clients import Client
from soaking.model import Oracle
from soaking.tally import RoundTally

QUIET_S = 20.0
LOGGED = ("CopyFailedError", "mambaslots.monitor")
"""Words of warnings that are in order: of copies that fail, and of what the cache cannot do."""


class Watch:
    """What a round must not leave behind: threads, file descriptors, and words of warning in the log."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._before = self._held()

    @staticmethod
    def _held() -> tuple[set[str], list[str]]:
        files = []
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # that of the folder itself
                files.append(os.readlink(f"/proc/self/fd/{number}").split(":")[0])
        return {f"{thread.name} {thread.ident}" for thread in threading.enumerate()}, sorted(files)

    def left(self) -> str:
        """What is there that was not there before, after a while in which it may go."""
        threads, files = self._before
        for _ in range(10):
            gc.collect()
            now, open_now = self._held()
            if now <= threads and len(open_now) <= len(files):
                return ""
            time.sleep(0.5)
        return f"left behind: threads {sorted(now - threads)}, files {Counter(open_now) - Counter(files)}"

    @contextmanager
    def listening(self, expected: Sequence[str]) -> Iterator[None]:
        """Note what is logged as a warning or worse; `expected`: words of lines that are in order."""
        said = self.said

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                text = f"{record.name}: {record.getMessage()}"
                if record.exc_info:
                    text += f": {''.join(traceback.format_exception(*record.exc_info))[-700:]}"
                if not any(word in text for word in expected):
                    said.append(text)

        handler, root = Handler(logging.WARNING), logging.getLogger()
        root.addHandler(handler)
        try:
            yield
        finally:
            root.removeHandler(handler)


def counts_of(stats: ms.EngineStats) -> dict[str, int]:
    """What an engine has met, by the names of events."""
    cache = stats.cache
    return {
        "evicted states": cache.num_states_evicted,
        "refused by value": cache.num_states_refused,
        "recomputed tokens": cache.num_recomputed_tokens,
        "host-tier fetches": cache.tiers.num_states_fetched,
        "disk fetches": cache.tiers.num_states_fetched_from_disk,
        "drafts accepted": stats.speculation.num_accepted,
    }


def watched_round(
    name: str, serve: Callable[[RoundTally], None], expected: Sequence[str] = LOGGED
) -> RoundTally:
    """Serve a round; whatever goes wrong is a mismatch.

    Args:
        name: what repeats the round.
        serve: counts in the tally.
        expected: as for `Watch.listening`.
    """
    tally, watch = RoundTally(), Watch()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with watch.listening(expected):
            serve(tally)
    except Exception as error:
        tally.mismatches.append(f"{name}: {''.join(traceback.format_exception(error))[-1500:]}")
    finally:
        torch.set_num_threads(num_threads)
    tally.mismatches += [f"{name}: logged: {text}" for text in watch.said[:5]]
    left = watch.left()
    if left:
        tally.mismatches.append(f"{name}: {left}")
    return tally


def quiet(stats: Callable[[], ms.EngineStats], name: str, tally: RoundTally) -> None:
    """Wait until nothing runs or waits: clients that left may still have requests."""
    deadline = time.monotonic() + QUIET_S
    while time.monotonic() < deadline:
        now = stats()
        if not now.num_running + now.num_waiting:
            return
        time.sleep(0.01)
    tally.mismatches.append(f"{name}: requests of clients that are gone go on: {now}")


def check_end(engine: ms.DynamicInferenceEngine, name: str, tally: RoundTally) -> None:
    """Nothing runs, waits or is held, and all books are in order."""
    engine.check_integrity()
    stats = engine.stats()
    cache = stats.cache
    left = (
        stats.num_running, stats.num_waiting, cache.num_held_kv_blocks, cache.num_reserved_slots,
        cache.num_pinned_slots, cache.num_live_slots, len(engine.pins()),
    )  # fmt: skip
    if any(left):
        tally.mismatches.append(f"{name}: left running, waiting, held, reserved, pinned, live, pins: {left}")


def compare(
    kind: str, asking: Sequence[Client], until_s: float, name: str, random: Random, tally: RoundTally
) -> None:
    """Hold a sample of the answers against the recurrence, as many as there is time for, sixteen at least."""
    for client in asking:
        tally.add(client.tally)
    records = [record for client in asking for record in client.records]
    random.shuffle(records)
    records.sort(key=lambda one: not one.num_cached)  # what resumed something first
    oracle = Oracle(kind)
    for start in range(0, len(records), 16):
        if start and time.monotonic() > until_s:
            break
        some = records[start : start + 16]
        for record in sorted(some, key=lambda one: (one.version, one.query.prompts[0])):
            num_tokens, fault = record.check(oracle)
            tally.comparisons += len(record.choices)
            tally.tokens_compared += num_tokens
            if fault:
                tally.mismatches.append(fault)
    if not tally.comparisons:
        tally.events["rounds without a comparison"] += 1


class RecallingDrafter:
    """Drafts what followed the same tokens before, in any request.

    It is right where a prompt is repeated, wrong where seeds or weights differ.
    """

    def __init__(self, length: int = 4, most: int = 4096) -> None:
        self._length, self._most = length, most
        self._next: dict[tuple[int, ...], int] = {}

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        last, size = list(tokens[-2 * self._length :]), self._length
        for at in range(len(last) - size):
            self._next[tuple(last[at : at + size])] = last[at + size]
        while len(self._next) > self._most:
            del self._next[next(iter(self._next))]
        drafts: list[int] = []
        while len(drafts) < max_drafts:
            following = self._next.get(tuple((last + drafts)[-size:]))
            if following is None:
                break
            drafts.append(following)
        return drafts
