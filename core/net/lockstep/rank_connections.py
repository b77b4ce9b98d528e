"""The leading rank's view of the ranks that follow: which calls were sent, and how each rank made them."""

import math
import threading
import time

import msgspec
import torch

from ...parallel_groups import ParallelGroups
from ..all_ranks import Notes, RankDiedError, attempt
from ..message_sockets import Listener, PeerLostError, host_name
from .call_messages import Abort, Close, Failure, Hello, Lost, Outcome
from .follower import WATCH_S

_CLOSING_S = 5.0
_POLL_INTERVAL_S = 0.1
_END_S = 5.0  # a rank may be inside a function of all ranks for so long after another rank failed in it


class RankConnections:
    """The connections to all followers, and what each of them answered.

    Every rank has an outcome for each call: what it raised. A call whose outcome is not the same on all ranks
    has been made by some of them alone. A thread receives outcomes while rank 0 makes a call: where a rank is
    broken or lost, all ranks abort their process groups, so that none waits for it in a collective.
    """

    def __init__(self, groups: ParallelGroups, device: torch.device, timeout_s: float) -> None:
        """Wait until all ranks follow, `timeout_s` at most, as later for a call; else RankDiedError."""
        is_one_host = len(set(groups.gather(host_name(), device))) == 1

        def listen(notes: Notes) -> Listener:
            hosts = ("127.0.0.1",) if is_one_host else ()
            listener = Listener(Hello | Outcome | Failure, hosts=hosts, max_queued=0)
            notes["address"] = listener.address.to_bytes()
            return listener

        self._listener = attempt(groups, device, listen).result(RuntimeError)
        self._timeout_s = timeout_s
        self._groups = groups
        self._lock = threading.RLock()  # of the listener, and what its messages change
        self._closed = threading.Event()
        self._ranks: dict[bytes, int] = {}  # connection -> rank
        self._num_sent = 0  # calls, of which `_own_outcomes` and `_outcomes_of` have the outcomes
        self._own_outcomes: list[Outcome] = []
        self._outcomes_of: dict[int, list[Outcome]] = {rank: [] for rank in range(1, groups.size)}
        self.lost: dict[int, str] = {}  # rank -> how its loss is known, a text that follows "rank 3 "
        self._gone_ranks: set[int] = set()  # those lost, and those that left for that
        self._has_sent_lost = False
        self.has_broken_rank = False  # as far as answers say; groups are aborted then
        self._failed_s = math.inf  # when a rank failed in a call that another one is still in
        self._accept()
        threading.Thread(target=self._watch, name="followers", daemon=True).start()

    def _accept(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while missing := self._outcomes_of.keys() - self._ranks.values():
            received = self._listener.receive(max(0.0, deadline - time.monotonic()))
            if received is None:
                self._listener.close()
                raise RankDiedError(dict.fromkeys(missing, f"did not follow within {self._timeout_s:g} s"))
            peer, message, _ = received
            if isinstance(message, Hello) and message.rank in missing:
                self._ranks[peer] = message.rank

    def send(self, call: msgspec.Struct) -> None:
        """Send a call to all ranks; RankDiedError where one is lost."""
        while self._receive(0.0):  # ranks that ended while nothing was called
            pass
        self.check_ranks()
        with self._lock:
            self._num_sent += 1
            self._send_to_all(call)
        self.check_ranks()

    def _send_to_all(self, message: msgspec.Struct) -> None:
        for peer, rank in self._ranks.items():
            try:
                self._listener.send(peer, message)
            except PeerLostError as error:
                self._mark_lost(rank, f"died, or left: {error}")

    def record_own(self, outcome: Outcome) -> None:
        """Record how the last call ended on the leading rank."""
        self._own_outcomes.append(outcome)

    def abort(self, reason: str) -> None:
        """Let no rank wait in a collective until `reset`; where one waits, it raises `reason`."""
        with self._lock:
            if not self.has_broken_rank:
                self.has_broken_rank = True
                self._send_to_all(Abort(reason))
                self._groups.abort(reason)

    def _watch(self) -> None:
        """Receive outcomes in time, whatever rank 0 waits for."""
        try:
            while not self._closed.wait(WATCH_S):
                with self._lock:
                    while not self._closed.is_set() and self._receive(0.0):
                        pass
                    self._handle_losses()
        except Exception:
            if not self._closed.is_set():  # the collector may close it at any place
                raise

    def await_differences(self) -> list[str]:
        """Wait for all calls; how ranks differ from rank 0. RankDiedError, TimeoutError for a late rank."""
        self.await_answers(self._timeout_s)
        self.check_ranks()
        if missing := self._missing():
            raise TimeoutError(f"ranks {missing} have not ended a call within {self._timeout_s:g} s")
        texts = [
            f"rank {rank} {answered}, and rank 0 {expected}"
            for rank, outcomes in self._outcomes_of.items()
            for answered, expected in zip(outcomes, self._own_outcomes, strict=False)
            if answered.kind != expected.kind or answered.is_broken
        ]
        with self._lock:
            self._num_sent = 0
            for ended in (self._own_outcomes, *self._outcomes_of.values()):
                ended.clear()
        return texts

    def _missing(self) -> list[int]:
        """Ranks that have not made all calls."""
        return [rank for rank, outcomes in self._outcomes_of.items() if len(outcomes) < self._num_sent]

    def await_answers(self, timeout_s: float) -> None:
        """Wait until each rank has made all calls or is lost, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._gone_ranks.issuperset(self._missing()):
            remaining_s = deadline - time.monotonic()
            if not self._receive(max(0.0, min(_POLL_INTERVAL_S, remaining_s))):
                self._handle_losses()
                if remaining_s <= 0:
                    return

    def _receive(self, timeout_s: float) -> bool:
        """Receive a message; False if none comes in time."""
        with self._lock:
            if (received := self._listener.receive(timeout_s)) is None:
                return False
            peer, message, _ = received
            rank = self._ranks.get(peer)
            if rank is not None and isinstance(message, Outcome):
                if message.is_broken:
                    self.abort(f"rank {rank} {message}; call reset()")
                # From now on `await_answers`, which takes no lock, may return.
                self._outcomes_of[rank].append(message)
            elif rank is not None and isinstance(message, Failure):
                self._mark_lost(rank, message.reason)
            return True

    def _handle_losses(self) -> None:
        """Find who is lost; where a rank failed, or is lost, let no other one wait for it."""
        with self._lock:
            for peer, rank in self._ranks.items():
                if rank in self._gone_ranks or self._listener.is_connected(peer):
                    continue
                if not self._receive(0.0):
                    self._mark_lost(rank, "died, or left: its connection is closed")
            if self._closed.is_set():
                return
            if self.lost:
                self.abort(str(RankDiedError(self.lost)))
                if not self._has_sent_lost:
                    self._has_sent_lost = True
                    self._send_to_all(Lost(self.lost))
            outcomes_of_rank = [self._own_outcomes, *self._outcomes_of.values()]
            num_alike = min(map(len, outcomes_of_rank))  # calls that ended on all ranks
            failed = [
                f"rank {rank} {outcome}"
                for rank, outcomes in enumerate(outcomes_of_rank)
                for outcome in outcomes[num_alike:]
                if outcome.kind
            ]
            if not failed:
                self._failed_s = math.inf
            elif (now_s := time.monotonic()) > self._failed_s + _END_S:
                self.abort(f"{failed[0]}; {_END_S:g} s later another rank was in this call; call reset()")
            else:
                self._failed_s = min(self._failed_s, now_s)

    def _mark_lost(self, rank: int, reason: str) -> None:
        self._gone_ranks.add(rank)
        if not (self._has_sent_lost or self._closed.is_set()):  # else it left for that
            self.lost.setdefault(rank, reason)

    def check_ranks(self) -> None:
        """Raise RankDiedError where a rank is lost."""
        if self.lost:
            raise RankDiedError(self.lost)

    def close(self) -> None:
        """Let all ranks return from `follow`; waits 5 s at most until they have."""
        deadline = time.monotonic() + _CLOSING_S
        self.await_answers(_CLOSING_S)
        self._closed.set()
        with self._lock:
            self._send_to_all(Lost(self.lost) if self.lost else Close())
        while self._outcomes_of.keys() - self._gone_ranks and time.monotonic() < deadline:
            if not self._receive(0.01):
                self._handle_losses()
        with self._lock:
            self._listener.close()
