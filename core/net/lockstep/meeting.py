"""How the ranks of a split model find each other for their calls, over the process groups that they have."""

import torch

from ...parallel_groups import ParallelGroups
from ..all_ranks import AllRanks, Notes
from ..heartbeat import RankDiedError
from .connection import Connection, Listener, MeetingPoint, connect, host_name
from .followers import Followers


def meet_followers(groups: ParallelGroups, device: torch.device, timeout_s: float) -> Followers:
    """Wait on rank 0 until all other ranks of the model are in `meet_leader`.

    Raises:
        RankDiedError: a rank did not connect within `timeout_s`.
        RuntimeError: this rank cannot listen.
    """
    ranks = AllRanks(groups, device)
    alone = len(set(groups.gather(host_name(), device))) == 1

    def listen(notes: Notes) -> Listener:
        listener = Listener(alone)
        notes["point"] = listener.point
        return listener

    listener = ranks.attempt(listen).result(RuntimeError)
    try:
        connections = listener.accept(set(range(1, groups.size)), timeout_s)
    except TimeoutError as error:
        missing: list[int] = error.args[0]
        raise RankDiedError(dict.fromkeys(missing, f"did not follow within {timeout_s:g} s")) from None
    finally:
        listener.close()
    return Followers(connections, timeout_s)


def meet_leader(groups: ParallelGroups, device: torch.device, timeout_s: float) -> Connection:
    """Connect another rank of the model with rank 0, which is in `meet_followers`.

    Raises:
        RankDiedError: rank 0 cannot be reached.
        RuntimeError: rank 0 cannot listen.
    """
    ranks = AllRanks(groups, device)
    groups.gather(host_name(), device)
    attempt = ranks.attempt(lambda notes: None)
    attempt.result(RuntimeError)
    point: MeetingPoint = attempt.notes[0]["point"]
    try:
        return connect(point, ranks.rank, timeout_s)
    except ConnectionError as error:
        raise RankDiedError({0: str(error)}) from error
