"""What a replica tells a channel that fails now and then."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from mambaslots.fleet.state_channel import Orders, StateChannel
from mambaslots.net.routing.state_events import StateEvents, decode_events


class Publisher:
    """States that the test changes."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.new: list[int] = []
        self.sequence = -1

    def take(self) -> StateEvents | None:
        if not self.new and self.sequence >= 0:
            return None
        self.sequence += 1
        new, self.new = self.new, []
        self.told += new
        return StateEvents("a", 1, self.sequence, tuple(new), (), is_snapshot=not self.sequence)

    def snapshot(self) -> StateEvents:
        return StateEvents("a", 1, self.sequence, tuple(self.told), (), is_snapshot=True)


async def call(function: Any) -> Any:
    """`AsyncEngine.call` of no engine."""
    return function(None)


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_message_that_fails_is_made_up_for_by_the_next_look(
    monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    """Also where nothing changes any more; `is_taken`: whether only the reply was lost."""
    from mambaslots.fleet import state_channel
    from ray.exceptions import ActorUnavailableError

    channel, publisher, failures = StateChannel(), Publisher(), [False, True, False]

    async def publish(replica: str, events: Any) -> Orders:
        fails = failures.pop(0) if failures else False
        orders = await channel.publish(replica, events) if is_taken or not fails else None
        if fails or orders is None:
            raise ActorUnavailableError("the network is away", None)
        return orders

    actor = SimpleNamespace(publish=SimpleNamespace(remote=publish))
    monkeypatch.setattr(state_channel, "find_channel", lambda name: actor)

    async def held() -> set[int]:
        (data,) = (await channel.read("", 0, 0.0)).events
        return set(decode_events(data).inserted)

    async def main() -> None:
        engine: Any = SimpleNamespace(call=call)
        feed = state_channel.StateFeed("a", "states", engine, publisher, lambda order: asyncio.sleep(0))
        publisher.new = [1]
        await feed._publish()
        publisher.new = [2]
        with pytest.raises(ActorUnavailableError):
            await feed._publish()
        await feed._publish()
        assert await held() == {1, 2}
        sequence = channel._version
        await feed._publish()
        assert channel._version == sequence  # nothing is told twice

    asyncio.run(main())
