"""Ranks that die in several ways, as processes of a model that serves; and the heartbeat by itself."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from mambaslots import KVBlockCapacityError
from mambaslots.net import Heartbeat
from mambaslots.net.heartbeat import RankDiedError
from oracle.heartbeat_rank import SERVED, TIMEOUT_S, RankProcess, rank_processes, store_process

BRISK_S = 1.2
SLACK_S = 8.0  # to notice and to end where others keep the machine busy
STUCK = 70


def assert_all_say(
    survivors: Sequence[RankProcess], said: str, statuses: tuple[int, ...] = (1, STUCK)
) -> None:
    """They end, by an error or from inside the collective that held them, and say this on stderr."""
    began = time.monotonic()
    for process in survivors:
        status, seconds = process.status(), time.monotonic() - began
        line = next((line for line in process.said.splitlines() if said in line), process.said)
        print(f"{process.log.name} ended after {seconds:.2f} s with status {status}: {line}")
        assert said in line
        assert status in statuses
        assert seconds < TIMEOUT_S + SLACK_S


# ---- as processes


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_killed_rank_is_named_by_the_others_within_the_timeout(tmp_path: Path, count: int) -> None:
    with rank_processes(tmp_path, *["serves"] * count) as ranks:
        killed = ranks.pop(1)
        killed.signal(signal.SIGKILL)
        assert_all_say(ranks, "RankDiedError: rank 1 died, or stands still")


def test_a_stopped_rank_is_named_though_the_others_hang_in_a_collective(tmp_path: Path) -> None:
    with rank_processes(tmp_path, "serves", "serves") as (stopped, other):
        stopped.signal(signal.SIGSTOP)
        assert_all_say([other], "RankDiedError: rank 0 died, or stands still", (STUCK,))


@pytest.mark.sampled(unread=("stdout",))
@pytest.mark.parametrize(("unread", "said"), [("stdout", "RankDiedError: rank 0 died"), ("stderr", SERVED)])
def test_a_stuck_rank_ends_though_its_output_is_not_read(tmp_path: Path, unread: str, said: str) -> None:
    with rank_processes(tmp_path, "serves", f"serves unread {unread}") as (stopped, other):
        stopped.signal(signal.SIGSTOP)
        assert_all_say([other], said, (STUCK,))


@pytest.mark.long
def test_ranks_that_pause_together_accuse_none(tmp_path: Path) -> None:
    """As in a virtual machine that is suspended."""
    with rank_processes(tmp_path, "serves", "serves", timeout_s=3.6) as ranks:
        for _ in range(3):
            for process in ranks:
                process.signal(signal.SIGSTOP)
            time.sleep(1.2)
            ranks.reverse()  # the one that beats last has not received a beat of the other since
            for process in ranks:
                process.signal(signal.SIGCONT)
                time.sleep(0.1)
            time.sleep(1.0)
        time.sleep(3.6)
        for process in ranks:
            assert process.process.is_alive(), process.said
            assert process.said == f"{SERVED}\n"


def test_a_rank_that_raises_is_named_with_its_error(tmp_path: Path) -> None:
    with rank_processes(tmp_path, "serves", "raises") as (other, raises):
        assert_all_say([other], "RankDiedError: rank 1 ended with KeyError('what this rank cannot find')")
        assert_all_say([raises], "KeyError: 'what this rank cannot find'", (1,))


def test_a_rank_that_has_finished_is_not_dead(tmp_path: Path) -> None:
    with rank_processes(tmp_path, "leaves", "stays", timeout_s=BRISK_S) as ranks:
        for process in ranks:
            assert process.status() == 0, process.said
            assert process.said.endswith("ended well\n")


def test_ranks_serve_on_without_the_store(tmp_path: Path) -> None:
    with (
        store_process(tmp_path) as (host, port),
        rank_processes(tmp_path, *["serves"] * 2, port=port, timeout_s=BRISK_S) as ranks,
    ):
        host.end()
        time.sleep(2 * BRISK_S)
        killed = ranks.pop(1)
        killed.signal(signal.SIGKILL)
        assert_all_say(ranks, "RankDiedError: rank 1 died, or stands still")


# ---- by itself


@contextmanager
def beating(ranks: int, store: dist.Store | None = None) -> Iterator[list[Heartbeat]]:
    """Heartbeats of several ranks in this process."""
    store = dist.HashStore() if store is None else store
    with ThreadPoolExecutor(ranks) as threads:  # each waits for all the others
        hearts = list(threads.map(lambda rank: Heartbeat(store, rank, ranks, BRISK_S), range(ranks)))
    with ExitStack() as stack:
        yield [stack.enter_context(heart) for heart in hearts]


def die(heart: Heartbeat) -> None:
    """As a process dies: without a word."""
    heart._closing.set()
    heart._thread.join()
    heart._close_connections()


def test_several_dead_are_all_named() -> None:
    with beating(4) as hearts:
        die(hearts[1])
        die(hearts[3])
        for rank in (0, 2):
            while len(hearts[rank]._dead) < 2:
                time.sleep(0.01)
            with pytest.raises(RankDiedError, match=r"rank 1 died.*; rank 3 died") as caught:
                hearts[rank].check()
            assert caught.value.ranks == (1, 3)


def test_the_dead_are_named_in_place_of_what_their_death_caused() -> None:
    with beating(2) as hearts:
        die(hearts[1])
        with pytest.raises(RankDiedError) as caught, hearts[0].naming_the_dead():
            raise RuntimeError("Connection closed by peer")
        assert caught.value.ranks == (1,)
        assert str(caught.value.__cause__) == "Connection closed by peer"
        with pytest.raises(RankDiedError), hearts[0].naming_the_dead():
            pytest.fail("a block after that raises at once")


def test_what_ends_well_after_a_death_is_not_believed() -> None:
    with beating(2) as hearts:

        def step() -> None:
            with hearts[0].naming_the_dead():
                die(hearts[1])
                hearts[0]._known.wait()

        with pytest.raises(RankDiedError):
            step()


@pytest.mark.parametrize(
    "error", [RuntimeError("for another reason"), KVBlockCapacityError(2, 1), ValueError("no"), SystemExit()]
)
def test_where_no_rank_died_an_error_stays_what_it_is(error: BaseException) -> None:
    with beating(2) as hearts:
        began = time.monotonic()
        with pytest.raises(type(error)) as caught, hearts[0].naming_the_dead():
            raise error
        assert caught.value is error
        assert time.monotonic() - began < BRISK_S / 2


@pytest.mark.parametrize("who", ["this thread", "another"])
def test_a_thread_is_inside_though_an_inner_block_or_another_thread_ends(
    monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    ended = threading.Event()
    monkeypatch.setattr("os._exit", lambda status: ended.set() if status == STUCK else None)
    monkeypatch.setattr(Heartbeat, "_report_stuck", lambda *_: None)
    with beating(2) as hearts:
        hearts[0]._exit_when_stuck = True

        def end_a_block() -> None:
            with hearts[0].naming_the_dead():
                pass

        def be_stuck() -> None:
            with hearts[0].naming_the_dead():
                if who == "another":
                    thread = threading.Thread(target=end_a_block)
                    thread.start()
                    thread.join()
                else:
                    end_a_block()
                die(hearts[1])
                assert ended.wait(SLACK_S)

        with pytest.raises(RankDiedError):
            be_stuck()


def test_ranks_that_leave_are_not_dead() -> None:
    with beating(3) as hearts:
        for heart in hearts[:2]:
            began = time.monotonic()
            heart.close()
            heart.close()
            assert time.monotonic() - began < BRISK_S / 4
        time.sleep(2 * BRISK_S)
        hearts[2].check()


def test_a_rank_that_ends_with_an_error_is_dead() -> None:
    with beating(3) as hearts:
        with pytest.raises(KeyError), hearts[1]:
            raise KeyError("here")
        for rank in (0, 2):
            assert hearts[rank]._known.wait(BRISK_S)
            with pytest.raises(RankDiedError, match=r"^rank 1 ended with KeyError\('here'\)$"):
                hearts[rank].check()


def test_a_rank_that_does_not_begin_is_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    store.set("heartbeat 1 of 2", "0")
    with pytest.raises(RankDiedError, match="rank 1 did not begin its heartbeat within") as caught:
        Heartbeat(store, 0, 3, BRISK_S)
    assert caught.value.ranks == (1,)


def test_a_second_heartbeat_over_the_same_store_begins_anew() -> None:
    store = dist.HashStore()
    for _ in range(2):
        with beating(2, store) as hearts:
            hearts[1].close()
            hearts[0].check()
