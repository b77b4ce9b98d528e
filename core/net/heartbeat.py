"""Which rank died: each rank is connected with every other one, and watches the connections."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from ..errors import KVBlockCapacityError, MambaSlotCapacityError
from ..validation import LONGEST_TIMEOUT_S, boolean, instance, integer, real, shown
from .channel import Address, Link, Listener, PeerLostError

STUCK = 70
"""The exit status (EX_SOFTWARE) of a process that ended itself because a collective held a thread of it."""

# `timeout_s` is the time from a rank's death to the end of the survivors. Of 10 s: 1.5 s (a quarter of the
# silence) until it begins, 6 s of silence, 1 s (two looks) until it is found, 1 s until survivors end.
_LOOKS = 20
_SILENCE = 0.6
_CAPACITY = (KVBlockCapacityError, MambaSlotCapacityError)


class RankDiedError(RuntimeError):
    """Other ranks are dead; what was computed together with them since their death cannot be relied on.

    Attributes:
        ranks: the dead ranks, in order.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        """`reasons`: dead rank -> how its death is known, a text that follows "rank 3 "."""
        self.ranks = tuple(sorted(reasons))
        super().__init__("; ".join(f"rank {rank} {reasons[rank]}" for rank in self.ranks))


class _Beat(msgspec.Struct, tag=True):
    """The thread of this rank runs."""

    rank: int


class _Ended(msgspec.Struct, tag=True):
    """The heartbeat of this rank ends; `reason` says why where the rank counts as dead."""

    rank: int
    reason: str = ""


class _Seen(msgspec.Struct, tag=True):
    """The answer to `_Ended`."""

    rank: int


_Message = _Beat | _Ended | _Seen


@dataclass(eq=False)
class _Peer:
    """Another rank, whose own messages take another connection: its last may come after `link` is gone."""

    link: Link  # for messages to it
    beats: int = 0  # that it has sent
    has_ended: bool = False
    is_gone: bool = False  # at the last look


class Heartbeat:
    """Names within `timeout_s` another rank that died: it was killed, stopped or cut off.

    The ranks are connected by the channel of all messages (`net/channel.py`), whose own heartbeats end the
    connection of a rank that stands still. A rank that ends its heartbeat (`close`) is not dead. A rank whose
    `with` block ends with an error is dead at once, and its error is the reason. A rank that waits or
    computes for long is not dead. A process that was stopped together with all others accuses no rank when
    it goes on.

    What ends a wait for a dead rank:

    - gloo raises at once where a peer's sockets close, because the peer's process died. Otherwise it raises
      at the group's timeout. A rank without a socket to the dead one waits for a neighbour to fail.
    - nccl raises nothing in the thread that waits for the GPU. Its watchdog ends the process at the group's
      timeout.
    - `ParallelGroups.abort` ends both; a `LeadingEngine` calls it on all ranks. Nothing else does, so with
      `exit_when_stuck` the process ends itself, as the last resort.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, timeout_s: float = 10.0, exit_when_stuck: bool = False
    ) -> None:
        """Blocks until all ranks have begun, at most `store.timeout`.

        Args:
            store: a client of a store that all ranks reach; it is used here alone. Where the store outlives a
                start that failed, the next start needs another `dist.PrefixStore` of it.
            rank: this rank.
            world_size: the number of ranks.
            timeout_s: the time from a rank's death to the end of the survivors, in seconds.
            exit_when_stuck: end the process with status 70 where a thread is still inside `naming_the_dead`
                a tenth of `timeout_s` after a death is known. The error and the thread's stack go to stderr,
                and the buffers of stdout and stderr are flushed if that is possible. No `finally` and no
                `atexit` runs.

        Raises:
            ValueError: a bad argument.
            RankDiedError: other ranks have not begun in time; it names them.
        """
        size = integer("world_size", world_size, 1)
        self._rank = integer("rank", rank, 0, size - 1)
        self._timeout_s = real("timeout_s", timeout_s, 0.01, LONGEST_TIMEOUT_S)
        self._exit_when_stuck = boolean("exit_when_stuck", exit_when_stuck)
        self._interval_s, self._silence_s = self._timeout_s / _LOOKS, _SILENCE * self._timeout_s
        self._peers: dict[int, _Peer] = {}
        self._dead: dict[int, str] = {}  # rank -> how its death is known
        self._known = threading.Event()  # a rank is dead
        self._inside: list[int] = []  # the threads in `naming_the_dead`, once per block that they are in
        self._closing = threading.Event()
        instance("store", store, Store)
        self._listener = Listener(_Message, silence_s=self._silence_s)
        try:
            self._connect(store, size)
        except BaseException:
            self._close_connections()
            raise
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def _connect(self, store: Store, size: int) -> None:
        waits_s = store.timeout.total_seconds()  # type: ignore[attr-defined]
        deadline = time.monotonic() + waits_s
        serial = store.add(f"heartbeats of {self._rank}", 1)  # a heartbeat made later uses other keys
        keys = [f"heartbeat {serial} of {rank}" for rank in range(size)]
        store.set(keys[self._rank], self._listener.address.to_bytes().decode())
        missing = set(range(size)) - {self._rank}
        try:
            store.wait(keys, timedelta(seconds=waits_s))
            for rank in sorted(missing):
                remaining_s = max(0.1, deadline - time.monotonic())
                address = Address.from_bytes(store.get(keys[rank]))
                self._peers[rank] = _Peer(Link(address, _Message, remaining_s, silence_s=self._silence_s))
                missing.remove(rank)
        except (RuntimeError, PeerLostError) as error:
            if isinstance(error, RuntimeError):
                missing = {rank for rank in missing if not store.check([keys[rank]])} or missing
            reason = f"did not begin its heartbeat within {waits_s:g} s"
            raise RankDiedError(dict.fromkeys(missing, reason)) from error

    def _note(self, message: _Message) -> None:
        peer = self._peers[message.rank]
        if isinstance(message, _Beat):
            peer.beats += 1
            return
        peer.has_ended = True
        if isinstance(message, _Ended):
            with suppress(PeerLostError):
                peer.link.send(_Seen(self._rank))
            if message.reason:
                self._note_dead(message.rank, message.reason)

    def _note_dead(self, rank: int, reason: str) -> None:
        self._peers[rank].has_ended = True
        self._dead = {rank: reason} | self._dead
        self._known.set()

    def close(self) -> None:
        """End the heartbeat: then silence is no death. Blocks for a tenth of `timeout_s` at most."""
        self._stop("")

    def _stop(self, reason: str) -> None:
        """End the heartbeat; the other ranks get `reason`."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        deadline = time.monotonic() + 2 * self._interval_s
        self._send_to_all(_Ended(self._rank, reason))
        while any(not peer.has_ended for peer in self._peers.values()) and time.monotonic() < deadline:
            time.sleep(self._interval_s / 50)
            self._receive()
        self._close_connections()

    def _close_connections(self) -> None:
        for peer in self._peers.values():
            peer.link.close()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ends_well = error is None or (isinstance(error, SystemExit) and not error.code)
        is_known = isinstance(error, RankDiedError)  # the dead are to blame, and all ranks find them
        self._stop("" if ends_well or is_known else f"ended with {shown(error)[:500]}")

    # ---- called by the thread that serves

    def check(self) -> None:
        """Raise RankDiedError where a rank is known to be dead; returns at once."""
        if self._dead:
            raise RankDiedError(self._dead)

    @contextmanager
    def naming_the_dead(self) -> Iterator[None]:
        """A context for what ranks do together; where a rank has died, its error names the dead.

        After a RuntimeError in the block, the context waits at most `timeout_s` until it is known who died.
        An error of capacity (KV blocks, slots, requests) is raised again without waiting. A block that ends
        without an error also raises where a rank died, because an aborted collective need not raise. For a
        block that does not end see `exit_when_stuck`.

        Raises:
            RankDiedError: a rank died, now or before the block.
            The block's own error: no rank died.
        """
        self.check()
        thread = threading.get_ident()
        try:
            self._inside.append(thread)
            try:
                yield
            finally:
                self._inside.remove(thread)
        except RuntimeError as error:
            if not isinstance(error, (RankDiedError, *_CAPACITY)):
                self._await_verdict()
                if self._dead:
                    raise RankDiedError(self._dead) from error
            raise
        self.check()

    def _await_verdict(self) -> None:
        """Block until a rank is known to be dead, or every rank is known to live; at most `timeout_s`."""
        deadline = time.monotonic() + self._timeout_s
        before = {rank: peer.beats for rank, peer in self._peers.items()}
        while not self._known.wait(self._interval_s / 2) and time.monotonic() < deadline:
            # The first beat that is seen now may be older than the error. The second is not.
            if all(peer.has_ended or peer.beats >= before[rank] + 2 for rank, peer in self._peers.items()):
                return

    # ---- the thread

    def _watch(self) -> None:
        """Beat, and note who is lost; end a process that is stuck."""
        stuck = 0
        while not self._closing.wait(self._interval_s):
            self._send_to_all(_Beat(self._rank))
            self._receive()
            inside = set(self._inside)
            stuck = stuck + 1 if self._dead and inside else 0
            if stuck > 1 and self._exit_when_stuck:
                self._exit(inside)

    def _send_to_all(self, message: _Message) -> None:
        for peer in self._peers.values():
            if not peer.has_ended:
                with suppress(PeerLostError):  # `_receive` finds it
                    peer.link.send(message)

    def _receive(self) -> None:
        """Note what has come; lost is a rank whose connection is gone at two looks, and that did not end."""
        while (received := self._listener.receive(0.0)) is not None:
            self._note(received[1])
        for rank, peer in self._peers.items():
            if peer.is_gone and not peer.has_ended:
                self._note_dead(rank, "died, or stands still: its connection is closed")
            peer.is_gone = not peer.link.is_connected()

    def _exit(self, threads: Collection[int]) -> None:
        """End the process, once another thread has reported, or hangs: pipes may be full, and locks held."""
        writer = threading.Thread(target=self._report_stuck, args=(threads,), daemon=True)
        try:
            writer.start()
            writer.join(2 * self._interval_s)
        finally:
            os._exit(STUCK)

    def _report_stuck(self, threads: Collection[int]) -> None:
        """Write the error and the stacks of `threads` to stderr; flush stdout and stderr."""
        error, frames = RankDiedError(self._dead), sys._current_frames()
        stacks = ["".join(traceback.format_stack(frames[thread])) for thread in threads if thread in frames]
        report = f"{type(error).__name__}: {error}; this rank waits for it in\n" + "\n".join(stacks)
        os.write(2, report.encode(errors="backslashreplace"))
        sys.stderr.flush()
        sys.stdout.flush()
