"""Which rank died: each rank counts up a key of its own in a store, and watches the keys of the others."""

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
"""The exit status (EX_SOFTWARE) of a process that ended itself because a collective held a thread of it."""

# A timeout of n intervals runs from the last beat of a dead rank to the end of the survivors:
#
#   intervals   what for
#   1           until the next look, which sees the last beat; the silence begins there
#   n - 4       the silence that counts as death
#   1           until the next look, which finds that the silence is long enough
#   2           until a survivor has left its block, or has ended its process (`exit_when_stuck`)
#
# The silence that counts as death is at least 5 intervals. When all ranks pause together and go on, a living
# rank may seem silent for nearly 4: for 2 before the pause, and for 2 that the first look afterwards counts.
_INTERVALS_BESIDE_SILENCE = 4
_MIN_SILENCE_INTERVALS = 5
MIN_TIMEOUT_INTERVALS = _MIN_SILENCE_INTERVALS + _INTERVALS_BESIDE_SILENCE
"""The shortest timeout, in intervals."""

_CAPACITY = (KVBlockCapacityError, MambaSlotCapacityError, RequestOverflowError)


class RankDiedError(RuntimeError):
    """Other ranks are dead; what was computed together with them since their death cannot be relied on.

    Attributes:
        ranks: the dead ranks, in order.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        """`reasons`: dead rank -> how its death is known, a text that follows "rank 3 "."""
        self.ranks = tuple(sorted(reasons))
        super().__init__("; ".join(f"rank {rank} {reasons[rank]}" for rank in self.ranks))


class StoreLostError(RuntimeError):
    """The store does not answer: its host may be dead, and whether ranks are dead is not known."""


class Heartbeat:
    """Tells within `timeout_s` that another rank died, and which: it was killed, stopped or cut off.

    A thread counts up this rank's key every `interval_s`, and looks at the keys of the other ranks. A rank
    whose key stands still is dead. Each rank measures the silence of others by its own looks, each of which
    counts two intervals at most. So clocks of two machines are never compared, and a process that was stopped
    itself, alone or with all others, accuses no rank when it goes on. A rank that leaves (`close`) is not
    dead. A rank whose `with` block ends with an error is dead at once, and its error is the reason.

    The thread needs Python's interpreter lock: C code that holds the lock for `timeout_s` looks like death.
    A rank that waits or computes for long is not dead: only its beats are watched, not its work.

    What ends a wait for a dead rank:

    - gloo raises at once where a peer's sockets close, because the peer's process died. Otherwise it raises
      at the group's timeout. A rank without a socket to the dead one waits for a neighbour to fail.
    - nccl raises nothing in the thread that waits for the GPU. Its watchdog ends the process at the group's
      timeout.
    - Nothing else does. `abort` and `shutdown` of a gloo group, called from another thread, leave the waiting
      thread waiting (torch 2.13). Closing the group's sockets would need to tell them from all other sockets.
      So with `exit_when_stuck` the process ends itself, as the last resort.
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
        """Begin to beat; blocks until all ranks have begun, at most `store.timeout`.

        Args:
            store: a client of a store that all ranks reach, and whose host outlives them (torchrun's agent, a
                launcher). It is cloned, so other threads may use the client. Where the store outlives a start
                that failed, the next start needs another `dist.PrefixStore` of it.
            rank: this rank.
            world_size: the number of ranks.
            interval_s: the time between two beats, in seconds.
            timeout_s: the time from a rank's death to the end of the survivors, in seconds; at least nine
                intervals.
            exit_when_stuck: end the process with status 70 where a thread is still inside `naming_the_dead`
                an interval after a death is known. The error and the thread's stack go to stderr, and the
                buffers of stdout and stderr are flushed if that takes no longer than an interval. No
                `finally` and no `atexit` runs.

        Raises:
            ValueError: a bad argument.
            RankDiedError: other ranks have not begun in time; it names them.
        """
        self._world_size = integer("world_size", world_size, 1)
        self._rank = integer("rank", rank, 0, self._world_size - 1)
        self._interval_s = real("interval_s", interval_s, 0.001, LONGEST_TIMEOUT_S)
        self._timeout_s = real(
            "timeout_s", timeout_s, MIN_TIMEOUT_INTERVALS * self._interval_s, LONGEST_TIMEOUT_S
        )
        self._exit_when_stuck = boolean("exit_when_stuck", exit_when_stuck)
        self._silence_s = self._timeout_s - _INTERVALS_BESIDE_SILENCE * self._interval_s
        self._store = instance("store", store, Store).clone()  # type: ignore[attr-defined]
        serial = self._store.add(f"heartbeats of {self._rank}", 1)  # a heartbeat made later uses other keys
        self._keys = [f"heartbeat {serial} of {rank}" for rank in range(self._world_size)]
        self._beats = 0
        self._beat()
        self._await_all()
        self._store.set_timeout(timedelta(seconds=self._timeout_s))

        self._watched = {rank: _Silence[bytes]() for rank in range(self._world_size) if rank != self._rank}
        self._looked = time.monotonic()  # when this rank looked at the others' keys last
        self._dead: dict[int, str] = {}  # rank -> how its death is known
        self._lost: str | None = None  # how the loss of the store is known
        self._known = threading.Event()  # a rank is dead, or the store is lost
        self._inside: list[int] = []  # the threads in `naming_the_dead`, once per block that they are in
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"heartbeat, {work.__name__}", daemon=True)
            for work in (self._beat_and_look, self._watch_the_store)
        ]
        for thread in self._threads:
            thread.start()
        # The process would abort if the interpreter ended while a daemon thread is in a call of the store.
        atexit.register(self._stop)

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
        """Leave: from now on this rank's silence is no death. Blocks for two intervals at most."""
        self._leave({})

    def _leave(self, deaths: Mapping[int, str]) -> None:
        """Stop beating, and tell the other ranks `deaths`: dead rank -> how its death is known."""
        if self._closing.is_set():
            return
        self._stop()
        if not any(thread.is_alive() for thread in self._threads):
            atexit.unregister(self._stop)
        beats = self._threads[0]
        if not beats.is_alive():  # else it hangs in a store that answers nothing
            with suppress(RuntimeError):
                self._store.set(self._keys[self._rank], json.dumps(deaths))

    def _stop(self) -> None:
        """Stop beating, and tell the other ranks nothing."""
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

    # ---- called by the thread that serves

    def check(self) -> None:
        """Return at once where all is well.

        Raises:
            RankDiedError: a rank is known to be dead.
            StoreLostError: the store is lost.
        """
        error = self._error()
        if error is not None:
            raise error

    def _error(self) -> RankDiedError | StoreLostError | None:
        if self._dead:
            return RankDiedError(dict(self._dead))
        return None if self._lost is None else StoreLostError(self._lost)

    @contextmanager
    def naming_the_dead(self) -> Iterator[None]:
        """A context for what ranks do together; where a rank has died, its error names the dead.

        After a RuntimeError in the block, the context waits at most `timeout_s` until it is known who died.
        An error of capacity (KV blocks, slots, requests) is raised again without waiting. A block that ends
        without an error also raises where a rank died, because an aborted collective need not raise. For a
        block that does not end see `exit_when_stuck`.

        Raises:
            RankDiedError: a rank died, now or before the block.
            StoreLostError: the store is lost.
            The block's own error: no rank died.
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
        """Block until a rank is known to be dead, or every rank is known to live; at most `timeout_s`."""
        deadline = time.monotonic() + self._timeout_s
        before = {rank: silence.changes for rank, silence in self._watched.items()}
        while not self._known.wait(self._interval_s / 2) and time.monotonic() < deadline:
            watched = self._watched
            # The first beat that is seen now may be older than the error. The second is not.
            if all(watched[rank].changes >= before[rank] + 2 for rank in before.keys() & watched.keys()):
                return

    # ---- the threads

    def _beat_and_look(self) -> None:
        try:
            while not self._closing.wait(self._interval_s) and self._lost is None:
                if self._watched:
                    self._beat()
                    self._look()
                else:  # all other ranks have left: the store's host may end
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
                found |= self._deaths_known_to(rank, value)
            elif silence.grown(value, passed) >= self._silence_s:
                del watched[rank]
                found[rank] = f"died, or stands still: no heartbeat for {silence.seconds:.1f} s"
        self._watched = watched
        if found:
            self._dead = found | self._dead
            self._known.set()

    def _deaths_known_to(self, rank: int, value: bytes) -> dict[int, str]:
        """The deaths that `rank` knew of when it left `value` in its key."""
        deaths = {int(dead): str(reason) for dead, reason in json.loads(value).items()}
        if deaths.pop(self._rank, None) is not None:
            deaths[rank] = "ended: it took this rank for dead"
        return deaths

    def _lose_the_store(self, reason: str) -> None:
        self._lost = f"the store, or the process that hosts it, {reason}"
        self._known.set()

    def _watch_the_store(self) -> None:
        """Note that the store is lost; end a process that is stuck.

        This thread calls nothing of the store, so a store that does not answer cannot hold it up.
        """
        looks, stuck = _Silence[float](), 0
        while not self._closing.wait(self._interval_s):
            if looks.grown(self._looked, self._interval_s) >= self._silence_s and self._lost is None:
                self._lose_the_store(f"has not answered for {looks.seconds:.1f} s")
            inside = set(self._inside)
            stuck = stuck + 1 if self._known.is_set() and inside else 0
            if stuck > 1 and self._exit_when_stuck:
                self._exit(inside)

    def _exit(self, threads: Collection[int]) -> None:
        """End the process: `threads` wait in code that ends only with its own timeout.

        Another thread writes the last words, and is not waited for longer than an interval: pipes may be
            full,
        and locks of the streams may be held.
        """
        writer = threading.Thread(target=self._report_stuck, args=(threads,), daemon=True)
        try:
            writer.start()
            writer.join(self._interval_s)
        finally:
            os._exit(STUCK)

    def _report_stuck(self, threads: Collection[int]) -> None:
        """Write the error and the stacks of `threads` to stderr; flush stdout and stderr."""
        error, frames = self._error(), sys._current_frames()
        stacks = ["".join(traceback.format_stack(frames[thread])) for thread in threads if thread in frames]
        report = f"{type(error).__name__}: {error}; this rank waits for it in\n" + "\n".join(stacks)
        os.write(2, report.encode(errors="backslashreplace"))
        sys.stderr.flush()
        sys.stdout.flush()


class _Silence[T]:
    """How long a value has stood still, and how often it has changed.

    Attributes:
        value: the value at the last look.
        seconds: the time since it changed, as far as looks count it.
        changes: how often it has changed.
    """

    def __init__(self) -> None:
        self.value: T | None = None
        self.seconds = 0.0
        self.changes = 0

    def grown(self, value: T, passed_s: float) -> float:
        """Look at `value`, `passed_s` seconds after the last look; returns `seconds`."""
        changed = value != self.value
        self.seconds = 0.0 if changed else self.seconds + passed_s
        self.changes += changed
        self.value = value
        return self.seconds
