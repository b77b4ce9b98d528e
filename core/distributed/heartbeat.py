"""Which rank died: each rank bumps a key of its own in a store, and watches those of the others."""

import atexit
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Self

from torch.distributed import Store  # type: ignore[attr-defined]

from ..errors import KVBlockCapacityError, MambaSlotCapacityError, RequestOverflowError
from ..validation import LONGEST_TIMEOUT_S, boolean, instance, integer, real, shown

STUCK = 70
"""The exit status of a process that ended because a collective held its main thread (EX_SOFTWARE)."""
LEAST_INTERVALS = 9
"""In a timeout. Four are kept (below), and when all ranks pause together a living one may seem silent for
nearly four: up to two before the pause, and two that one late look counts. One is to spare."""
# Of the timeout, what is kept for noticing that a beat is the last (1), for looking (1) and for leaving the
# block (2).
_INTERVALS_KEPT = 4
_CAPACITY = (KVBlockCapacityError, MambaSlotCapacityError, RequestOverflowError)


class RankDiedError(RuntimeError):
    """Other ranks are dead; nothing that was computed together with them since can be relied on.

    Attributes:
        ranks: the dead ones, in order.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        """`reasons`: of each dead rank, how that is known."""
        self.ranks = tuple(sorted(reasons))
        super().__init__("; ".join(f"rank {rank} {reasons[rank]}" for rank in self.ranks))


class StoreLostError(RuntimeError):
    """The store does not answer: the process that hosts it died, and nobody can tell who else did."""


class Heartbeat:
    """Tells within `timeout_s` that another rank died, and which: one that was killed, stopped or cut off.

    A thread bumps this rank's key every `interval_s` and looks at those of the others. A key that does not
    change any more is a dead rank's. Silence is counted by the looks of whoever watches, each worth at most
    two intervals: clocks of two machines are never compared, and a process that was stopped itself, alone or
    with all others, accuses nobody when it goes on. A rank is not dead that left (`close`), and one that ends
    its `with` block with an error is dead at once, for the reason it gives.

    The thread needs the interpreter: C code that holds its lock for `timeout_s` looks like death. A rank that
    waits, or computes for long, beats on: what it does is not watched.

    What ends a wait for a dead rank:

    - gloo raises at once where a peer's sockets close (its process died), else at the group's timeout. A
      rank without a socket to the dead one waits for a neighbour that failed, until that one ends.
    - nccl raises nothing in the thread that waits for the GPU; its own watchdog ends the process at the
      group's timeout.
    - Nothing else: `abort` and `shutdown` of a gloo group, called by another thread, leave the waiting one
      waiting (torch 2.13), and closing its sockets behind its back needs to tell them from all others. So
      with `exit_when_stuck` the process ends itself, as the last resort.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        interval_s: float = 1.0,
        timeout_s: float = 10.0,
        exit_when_stuck: bool = False,
    ) -> None:
        """Blocks until all ranks have made theirs, at most `store.timeout`; RankDiedError names who did not.

        `store`: all ranks reach it, and its host outlives them (torchrun's agent, a launcher); it is cloned,
        so that other threads may use it. Where it outlives a start that failed, the next one needs another
        `dist.PrefixStore` of it. `timeout_s`: at least nine intervals; the time in which survivors
        end. `exit_when_stuck`: where a thread is still inside `naming_the_dead` an interval after a death is
        known, print the error and the thread's stack to stderr and end the process with status 70. Buffers of
        stdout and stderr are flushed, if nothing holds that up for an interval; no `finally`, no `atexit`
        runs.
        """
        self._world_size = integer("world_size", world_size, 1)
        self._rank = integer("rank", rank, 0, self._world_size - 1)
        self._interval_s = real("interval_s", interval_s, 0.001, LONGEST_TIMEOUT_S)
        self._timeout_s = real("timeout_s", timeout_s, LEAST_INTERVALS * self._interval_s, LONGEST_TIMEOUT_S)
        self._exit_when_stuck = boolean("exit_when_stuck", exit_when_stuck)
        self._silence_s = self._timeout_s - _INTERVALS_KEPT * self._interval_s
        self._store = instance("store", store, Store).clone()  # type: ignore[attr-defined]
        made = self._store.add(f"heartbeats of {self._rank}", 1)  # one made later uses other keys
        self._keys = [f"heartbeat {made} of {rank}" for rank in range(self._world_size)]
        self._beats = 0
        self._beat()
        self._await_all()
        self._store.set_timeout(timedelta(seconds=self._timeout_s))

        self._watched = {rank: _Silence[bytes]() for rank in range(self._world_size) if rank != self._rank}
        self._looked = time.monotonic()
        self._dead: dict[int, str] = {}
        self._lost: str | None = None
        self._known = threading.Event()  # that somebody is dead, or the store lost
        self._inside: list[int] = []  # threads in `naming_the_dead`, once for each block they are in
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"heartbeat, {work.__name__}", daemon=True)
            for work in (self._beat_and_look, self._watch_the_store)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self._stop)  # a daemon thread that the interpreter's end finds in the store aborts it

    def _await_all(self) -> None:
        try:
            self._store.wait(self._keys, self._store.timeout)
        except RuntimeError as error:
            absent = [rank for rank, key in enumerate(self._keys) if not self._store.check([key])]
            waited = self._store.timeout.total_seconds()
            if absent:
                reason = f"did not begin its heartbeat within {waited:g} s"
                raise RankDiedError(dict.fromkeys(absent, reason)) from error

    def close(self) -> None:
        """Leave: this rank's silence is no death from now on. Blocks for two intervals at most."""
        self._leave({})

    def _leave(self, deaths: Mapping[int, str]) -> None:
        """`deaths`: what the others are to hear."""
        if self._closing.is_set():
            return
        atexit.unregister(self._stop)
        self._stop()
        if not self._threads[0].is_alive():  # else it is the store that keeps it, and nobody would hear
            with suppress(RuntimeError):
                self._store.set(self._keys[self._rank], json.dumps(deaths))

    def _stop(self) -> None:
        """Beat no more, without a word to the others."""
        self._closing.set()
        for thread in self._threads:
            thread.join(self._interval_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._leave({})
        elif isinstance(error, (RankDiedError, StoreLostError)):
            self._leave(self._dead)
        else:
            self._leave({self._rank: f"ended with {shown(error)[:500]}"})

    # ---- for the thread that serves

    def check(self) -> None:
        """Raise RankDiedError if a rank is known to be dead, StoreLostError if nobody can tell; at once."""
        error = self._error()
        if error is not None:
            raise error

    def _error(self) -> RankDiedError | StoreLostError | None:
        if self._dead:
            return RankDiedError(dict(self._dead))
        return None if self._lost is None else StoreLostError(self._lost)

    @contextmanager
    def naming_the_dead(self) -> Iterator[None]:
        """Around what ranks do together: an error of theirs becomes one that names the dead.

        After a RuntimeError it waits, at most `timeout_s`, until it is known who died; where nobody did, and
        where capacity ran out, the same error is raised again. Where somebody died, a block that ends without
        error raises too: an aborted collective need not. See `exit_when_stuck` for a block that does not end.
        """
        self.check()
        try:
            with self._being_inside():
                yield
        except RuntimeError as error:
            if not isinstance(error, (RankDiedError, StoreLostError, *_CAPACITY)):
                self._await_verdict()
                named = self._error()
                if named is not None:
                    raise named from error
            raise
        self.check()

    @contextmanager
    def _being_inside(self) -> Iterator[None]:
        thread = threading.get_ident()
        self._inside.append(thread)
        try:
            yield
        finally:
            self._inside.remove(thread)

    def _await_verdict(self) -> None:
        """Until somebody is known to be dead, or everybody to have lived on."""
        deadline = time.monotonic() + self._timeout_s
        before = {rank: silence.changes for rank, silence in self._watched.items()}
        while not self._known.wait(self._interval_s / 2) and time.monotonic() < deadline:
            watched = self._watched
            # The first beat seen now may be older than the error; the second is not.
            if all(watched[rank].changes >= before[rank] + 2 for rank in before.keys() & watched.keys()):
                return

    # ---- the threads

    def _beat_and_look(self) -> None:
        try:
            while not self._closing.wait(self._interval_s) and self._lost is None:
                if self._watched:
                    self._beat()
                    self._look()
                else:  # nobody is left to hear or to be heard; the store may go
                    self._looked = time.monotonic()
        except Exception as error:  # the store's host closed the connection, or never answered
            if not self._closing.is_set():
                self._lose_the_store(f"answers no more: {error}")

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(self._keys[self._rank], str(self._beats))

    def _look(self) -> None:
        watched = dict(self._watched)
        values = self._store.multi_get([self._keys[rank] for rank in watched])
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * self._interval_s), now
        found: dict[int, str] = {}
        for rank, value in zip(tuple(watched), values, strict=True):
            silence = watched[rank]
            if not value.isdigit():
                del watched[rank]
                found |= self._told(rank, value)
            elif silence.grown(value, passed) >= self._silence_s:
                del watched[rank]
                found[rank] = f"died, or stands still: no heartbeat for {silence.seconds:.1f} s"
        self._watched = watched
        if found:
            self._dead = found | self._dead
            self._known.set()

    def _told(self, rank: int, value: bytes) -> dict[int, str]:
        """The deaths that a rank knew of when it left."""
        deaths = {int(dead): str(reason) for dead, reason in json.loads(value).items()}
        if deaths.pop(self._rank, None) is not None:
            deaths[rank] = "ended: it took this rank for dead"
        return deaths

    def _lose_the_store(self, reason: str) -> None:
        self._lost = f"the store, or the process that hosts it, {reason}"
        self._known.set()

    def _watch_the_store(self) -> None:
        """Only looks at clocks, so that a store that does not answer cannot hold it; ends a stuck process."""
        looks, stuck = _Silence[float](), 0
        while not self._closing.wait(self._interval_s):
            if looks.grown(self._looked, self._interval_s) >= self._silence_s and self._lost is None:
                self._lose_the_store(f"has not answered for {looks.seconds:.1f} s")
            inside = set(self._inside)
            stuck = stuck + 1 if self._known.is_set() and inside else 0
            if stuck > 1 and self._exit_when_stuck:
                self._exit(inside)

    def _exit(self, threads: Collection[int]) -> None:
        """End the process: these threads wait in code that nothing but its own timeout ends.

        Whatever the process may still say is said by another thread: pipes may be full, and locks of the
        streams held.
        """
        speaker = threading.Thread(target=self._say_where, args=(threads,), daemon=True)
        try:
            speaker.start()
            speaker.join(self._interval_s)
        finally:
            os._exit(STUCK)

    def _say_where(self, threads: Collection[int]) -> None:
        error, frames = self._error(), sys._current_frames()
        stacks = ["".join(traceback.format_stack(frames[thread])) for thread in threads if thread in frames]
        said = f"{type(error).__name__}: {error}; this rank waits for it in\n" + "\n".join(stacks)
        os.write(2, said.encode(errors="backslashreplace"))
        sys.stderr.flush()
        sys.stdout.flush()


class _Silence[T]:
    """For how long a value has not changed, and how often it did."""

    def __init__(self) -> None:
        self.value: T | None = None
        self.seconds = 0.0
        self.changes = 0

    def grown(self, value: T, passed_s: float) -> float:
        """`value` is seen `passed_s` after the last look; the silence up to now."""
        changed = value != self.value
        self.seconds = 0.0 if changed else self.seconds + passed_s
        self.changes += changed
        self.value = value
        return self.seconds
