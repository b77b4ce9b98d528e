"""Ranks that die while they lead or follow, and ranks that idle for long: in processes of their own."""

import signal
from pathlib import Path

import pytest
from oracle.lockstep_rank import two_ranks


def test_ranks_idle_for_longer_than_their_groups_wait(tmp_path: Path) -> None:
    with two_ranks(tmp_path, "idles") as ranks:
        for rank in ranks:
            assert rank.status() == 0, rank.said
            assert "ended well" in rank.said


def test_a_follower_whose_leader_dies_ends(tmp_path: Path) -> None:
    with two_ranks(tmp_path, "waits") as (leader, follower):
        leader.signal(signal.SIGKILL)
        assert follower.status() == 1
        assert "RankDiedError: rank 0 died, or left: its connection is" in follower.said


def test_a_leader_whose_follower_died_says_so_at_the_next_call(tmp_path: Path) -> None:
    with two_ranks(tmp_path, "waits") as (leader, follower):
        follower.signal(signal.SIGKILL)
        follower.status()
        leader.signal(signal.SIGUSR1)
        assert leader.status() == 1
        assert "RankDiedError: rank 1 died, or left: its connection is" in leader.said


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_during_a_step_is_named(tmp_path: Path, killed: int, number: int) -> None:
    with two_ranks(tmp_path, "serves") as ranks:
        ranks[killed].signal(number)
        other = ranks[1 - killed]
        assert other.status() == 1
        assert f"RankDiedError: rank {killed} died, or left" in other.said


def test_a_follower_whose_leader_stands_still_ends(tmp_path: Path) -> None:
    with two_ranks(tmp_path, "waits") as (leader, follower):
        leader.signal(signal.SIGSTOP)
        assert follower.status() == 1
        assert "RankDiedError: rank 0 died, or left: its connection is" in follower.said
