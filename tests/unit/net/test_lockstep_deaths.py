"""Ranks that die while they lead or follow, and ranks that idle for long: in processes of their own."""

import signal
import socket
import threading
from pathlib import Path

import pytest
from mambaslots.net.lockstep.connection import Listener, connect
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
def test_a_rank_that_dies_during_a_step_is_named(tmp_path: Path, killed: int) -> None:
    with two_ranks(tmp_path, "serves") as ranks:
        ranks[killed].signal(signal.SIGKILL)
        other = ranks[1 - killed]
        assert other.status() == 1
        assert f"RankDiedError: rank {killed} died, or left" in other.said


def test_strangers_are_turned_away() -> None:
    listener = Listener(alone_on_host=True)
    point = listener.point
    stranger = socket.create_connection((point.hosts[0], point.port))
    stranger.sendall(bytes(200))
    failures: list[BaseException] = []

    def come_with_another_key() -> None:
        try:
            connect(point._replace(key=bytes(32)), 1, timeout_s=5.0)
        except ConnectionError as error:
            failures.append(error)

    liar = threading.Thread(target=come_with_another_key)
    liar.start()
    with pytest.raises(TimeoutError) as raised:
        listener.accept({1}, timeout_s=0.3)
    liar.join()
    assert raised.value.args == ([1],)
    assert "the leading rank cannot be reached" in str(failures[0])
    stranger.close()


def test_messages_of_any_length_arrive_whole() -> None:
    listener = Listener(alone_on_host=True)
    ends = {}
    follower = threading.Thread(target=lambda: ends.update(far=connect(listener.point, 1, timeout_s=5.0)))
    follower.start()
    near = listener.accept({1}, timeout_s=5.0)[1]
    follower.join()
    listener.close()
    messages = [b"", b"x", bytes(range(256)) * 40_000]
    sender = threading.Thread(target=lambda: [near.send(message) for message in messages])
    sender.start()
    assert [ends["far"].receive() for _ in messages] == messages
    sender.join()
    assert not near.is_readable()
    ends["far"].close()
    assert near.is_readable(5.0)
    with pytest.raises(ConnectionError, match="its connection is"):
        near.receive()
    near.close()
