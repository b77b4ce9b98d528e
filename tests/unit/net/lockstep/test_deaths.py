"""Ranks that die while they lead or follow, and ranks that idle for long: in processes of their own."""

import signal
import time
from collections.abc import Sequence

import pytest
from oracle.lockstep_rank import SERVED, SILENCE_S, RankProcess, led_ranks

SLACK_S = 8.0  # to notice and to end where others keep the machine busy


def assert_all_say(survivors: Sequence[RankProcess], said: str, silence_s: float = SILENCE_S) -> None:
    """They end within the stated time, by an error that says this and names no other rank."""
    began = time.monotonic()
    for process in survivors:
        status, seconds = process.status(), time.monotonic() - began
        last = process.said.splitlines()[-1]
        print(f"process {process.pid} ended after {seconds:.2f} s with status {status}: {last}")
        assert status == 1
        assert said in last, process.said
        assert "; rank" not in last
        assert seconds < 1.3 * silence_s + SLACK_S


def test_ranks_idle_for_longer_than_their_groups_wait() -> None:
    with led_ranks("idles") as ranks:
        for rank in ranks:
            assert rank.status() == 0, rank.said
            assert "ended well" in rank.said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_whose_leader_dies_or_stands_still_ends(number: signal.Signals) -> None:
    with led_ranks("waits") as (leader, follower):
        leader.signal(number)
        assert_all_say([follower], "RankDiedError: rank 0 died, or left: its connection is")


def test_a_leader_whose_follower_died_says_so_at_the_next_call() -> None:
    with led_ranks("waits") as (leader, follower):
        follower.signal(signal.SIGKILL)
        follower.status()
        leader.signal(signal.SIGUSR1)
        assert_all_say([leader], "RankDiedError: rank 1 died, or left: its connection is")


@pytest.mark.sampled(killed=(1,))
@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_during_a_step_is_named(killed: int, number: signal.Signals) -> None:
    with led_ranks("serves") as ranks:
        ranks.pop(killed).signal(number)
        assert_all_say(ranks, f"RankDiedError: rank {killed} died, or left")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_all_ranks_name_a_follower_that_dies_during_a_step(number: signal.Signals) -> None:
    with led_ranks("serves", 4) as ranks:
        ranks.pop(1).signal(number)
        assert_all_say(ranks, "RankDiedError: rank 1 died, or left")


@pytest.mark.long
def test_by_default_a_rank_that_stands_still_is_named_after_10_s_of_silence() -> None:
    with led_ranks("serves", silence_s=10.0) as (leader, follower):
        follower.signal(signal.SIGSTOP)
        assert_all_say([leader], "RankDiedError: rank 1 died, or left", 10.0)


@pytest.mark.sampled(number=(signal.SIGSTOP,))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_all_ranks_name_a_follower_that_dies_between_steps(number: signal.Signals) -> None:
    """Other followers at once, and the leader at its next call."""
    with led_ranks("waits", 4) as (leader, *followers):
        followers.pop(1).signal(number)
        assert_all_say(followers, "RankDiedError: rank 2 died, or left: its connection is")
        leader.signal(signal.SIGUSR1)
        assert_all_say([leader], "RankDiedError: rank 2 died, or left: its connection is")


def test_a_leader_that_checks_its_ranks_needs_no_call() -> None:
    with led_ranks("checks") as (leader, follower):
        follower.signal(signal.SIGSTOP)
        assert_all_say([leader], "RankDiedError: rank 1 died, or left: its connection is")


def test_a_follower_that_exits_in_a_call_is_named_with_its_reason() -> None:
    with led_ranks("exits") as (leader, follower):
        assert_all_say([leader], "RankDiedError: rank 1 ended with SystemExit('what this rank cannot do')")
        assert follower.status() == 1


@pytest.mark.long
def test_ranks_that_pause_together_accuse_none() -> None:
    """As in a virtual machine that is suspended."""
    with led_ranks("serves") as ranks:
        for _ in range(3):
            for process in ranks:
                process.signal(signal.SIGSTOP)
            time.sleep(SILENCE_S / 2)
            ranks.reverse()  # the one that sends last has not received a message of the other since
            for process in ranks:
                process.signal(signal.SIGCONT)
                time.sleep(0.1)
            time.sleep(SILENCE_S / 2)
        time.sleep(1.5 * SILENCE_S)
        for process in ranks:
            assert process.is_alive(), process.said
            assert process.said in (f"{SERVED}\n", "")
