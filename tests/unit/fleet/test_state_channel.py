"""The channel of states: what routers receive, and what replicas are asked for."""

import asyncio
from collections.abc import Coroutine
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.fleet import state_channel
from mambaslots.fleet.state_channel import ChannelReader, HandOver, Orders, StateChannel
from mambaslots.net.routing.state_events import StateEvents, decode_events, encode_events
from mambaslots.net.routing.state_router import StateRouter
from ray.exceptions import ActorUnavailableError


def run[T](coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


class Replica:
    """Sends a channel its states, as a `StateFeed` does."""

    def __init__(self, name: str, epoch: int = 1) -> None:
        self.name, self.epoch, self.sequence = name, epoch, -1
        self.keys: set[int] = set()

    def change(self, inserted: set[int], removed: set[int]) -> bytes:
        self.keys = (self.keys | inserted) - removed
        self.sequence += 1
        first = not self.sequence
        keys = (tuple(self.keys), ()) if first else (tuple(inserted), tuple(removed))
        return encode_events(StateEvents(self.name, self.epoch, self.sequence, *keys, is_snapshot=first))

    def snapshot(self) -> bytes:
        return encode_events(StateEvents(self.name, self.epoch, self.sequence, tuple(self.keys), (), True))

    async def publish(self, channel: StateChannel, *events: bytes) -> None:
        orders = await channel.publish(self.name, events)
        if orders.wants_snapshot:
            assert not (await channel.publish(self.name, (self.snapshot(),))).wants_snapshot


def test_a_channel_that_knows_nothing_asks_for_a_snapshot_and_a_late_reader_gets_it() -> None:
    async def scenario() -> None:
        channel, replica = StateChannel(), Replica("a")
        replica.change({1, 2}, set())
        await replica.publish(channel, replica.change({3}, {1}))  # the channel has missed the first message
        news = await channel.read("", 0, 0.0)
        (events,) = (decode_events(data) for data in news.events)
        assert (set(events.inserted), events.is_snapshot) == ({2, 3}, True)
        assert news.replicas == ("a",)

    run(scenario())


def test_a_replica_publishes_its_own_states_alone() -> None:
    """Else one replica could take the requests of another, or make routers forget its states."""

    async def scenario() -> None:
        channel, replica, liar = StateChannel(), Replica("a"), Replica("a", epoch=9)
        await replica.publish(channel, replica.change({1, 2}, set()))
        before = await channel.read("", 0, 0.0)
        for lie in (liar.change({7}, set()), liar.snapshot(), b"no events"):
            with pytest.raises(ValueError, match=r"events.replica is 'a'; accepted: 'b'|data is no message"):
                await channel.publish("b", (Replica("b").change({3}, set()), lie))
        assert await channel.read("", 0, 0.0) == before

    run(scenario())


def test_a_reader_waits_for_what_is_new_and_gets_it_once() -> None:
    async def scenario() -> None:
        channel, replica = StateChannel(), Replica("a")
        await replica.publish(channel, replica.change({1}, set()))
        news = await channel.read("", 0, 0.0)
        waiting = asyncio.create_task(channel.read(news.instance, news.version, 60.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await replica.publish(channel, replica.change({2}, set()), replica.change(set(), {1}))
        later = await waiting
        assert [decode_events(data).sequence for data in later.events] == [1, 2]
        assert (await channel.read(later.instance, later.version, 0.0)).events == ()

    run(scenario())


@pytest.mark.parametrize("size", [200, 1])
def test_a_reader_that_was_slow_or_knew_another_channel_gets_snapshots(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(state_channel, "_LOG_BYTES", size)

    async def scenario() -> None:
        channel, replica = StateChannel(), Replica("a")
        await replica.publish(channel, *(replica.change({number}, set()) for number in range(1, 20)))
        for instance, version in ((channel._instance, 3), ("another", 19), (channel._instance, 99)):
            (data,) = (await channel.read(instance, version, 0.0)).events
            assert set(decode_events(data).inserted) == replica.keys
        assert sum(map(len, channel._log)) == channel._log_bytes
        assert channel._log_bytes <= size

    run(scenario())


def test_the_replica_with_most_states_hands_over_and_silent_ones_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(state_channel.time, "monotonic", lambda: now[0])

    async def scenario() -> None:
        channel, small, large = StateChannel(), Replica("small"), Replica("large")
        order = HandOver("one", "127.0.0.1", 1)
        assert await channel.order_hand_over("new", order) is None
        await small.publish(channel, small.change({1}, set()))
        assert await channel.order_hand_over("small", order) is None
        await large.publish(channel, large.change({1, 2}, set()))
        assert await channel.order_hand_over("large", order) == "small"
        assert (await channel.publish("small")).hand_overs == (order,)
        assert await channel.order_hand_over("new", order) == "large"
        assert (await channel.publish("small")).hand_overs == ()
        assert (await channel.publish("large")).hand_overs == (order,)
        assert (await channel.publish("large")).hand_overs == ()
        now[0] = 20.0
        await channel.publish("small")
        assert await channel.order_hand_over("new", order) == "small"  # the other one may be dead
        now[0] = 40.0
        assert await channel.order_hand_over("new", order) == "small"
        assert (await channel.read("", 0, 0.0)).replicas == ("small",)
        now[0] = 51.0
        assert await channel.order_hand_over("new", order) is None
        assert (await channel.read("", 0, 0.0)).replicas == ()

    run(scenario())


def test_a_replica_that_is_forgotten_in_the_news_that_bring_its_events_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(state_channel.time, "monotonic", lambda: now[0])

    async def scenario() -> None:
        channel, gone, other = StateChannel(), Replica("a"), Replica("b")
        router = StateRouter(0)
        reader = ChannelReader("states", router)
        await other.publish(channel, other.change({1}, set()))
        reader.apply(await channel.read("", 0, 0.0))
        await gone.publish(channel, gone.change({1, 2}, set()))
        now[0] = 20.0
        await channel.publish("b")
        now[0] = 31.0
        await channel.publish("b")
        news = await channel.read(reader._instance, reader._version, 0.0)
        assert (len(news.events), news.replicas) == (1, ("b",))
        reader.apply(news)
        assert router.index.replicas == ["b"]

    run(scenario())


@given(data=st.data())
def test_whatever_is_lost_a_router_ends_up_with_what_the_replicas_hold(data: st.DataObject) -> None:
    """Messages and channels get lost, replicas begin anew, and readers fall behind."""

    async def scenario() -> None:
        channel = StateChannel()
        replicas = {name: Replica(name) for name in ("a", "b")}
        router = StateRouter(0)
        reader = ChannelReader("states", router)

        async def read() -> None:
            for _ in range(2):  # a gap makes the next read one of snapshots
                reader.apply(await channel.read(reader._instance, reader._version, 0.0))

        for _ in range(data.draw(st.integers(1, 12))):
            replica = replicas[data.draw(st.sampled_from("ab"))]
            event = data.draw(st.sampled_from(["publish", "lose", "restart", "new channel", "read"]))
            keys = st.sets(st.integers(1, 6), max_size=3)
            if event in ("publish", "lose"):
                inserted = data.draw(keys) - replica.keys
                removed = data.draw(keys) & replica.keys
                message = replica.change(inserted, removed)
                if event == "publish":
                    await replica.publish(channel, message)
            elif event == "restart":
                replicas[replica.name] = Replica(replica.name, replica.epoch + 1)
            elif event == "new channel":
                channel = StateChannel()
            else:
                await read()
        for replica in replicas.values():
            await replica.publish(channel, replica.change(set(), set()))
        await read()
        for replica in replicas.values():
            assert router.index.keys_of(replica.name) == replica.keys

    run(scenario())


# ---- what a replica publishes


class Publisher:
    """States that the test changes."""

    def __init__(self) -> None:
        self.published: list[int] = []
        self.new: list[int] = []
        self.sequence = -1

    def take(self) -> StateEvents | None:
        if not self.new and self.sequence >= 0:
            return None
        self.sequence += 1
        new, self.new = self.new, []
        self.published += new
        return StateEvents("a", 1, self.sequence, tuple(new), (), is_snapshot=not self.sequence)

    def snapshot(self) -> StateEvents:
        return StateEvents("a", 1, self.sequence, tuple(self.published), (), is_snapshot=True)


async def call(function: Any) -> Any:
    """`AsyncEngine.call` of no engine."""
    return function(None)


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_message_that_fails_is_made_up_for_by_the_next_look(
    monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    """Also where nothing changes any more; `is_taken`: whether only the reply was lost."""
    publisher: Any = Publisher()
    channel, failures = StateChannel(), [False, True, False]

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
        assert channel._version == sequence  # nothing is sent twice

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_hand_overs_are_served_whatever_becomes_of_the_snapshot(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    orders = [HandOver("one", "127.0.0.1", 1), HandOver("two", "127.0.0.1", 1)]
    served: list[HandOver] = []

    async def publish(replica: str, events: Any) -> Orders:
        is_snapshot = decode_events(events[0]).is_snapshot
        if is_snapshot and fails:
            raise ActorUnavailableError("the network is away", None)
        return Orders(not is_snapshot, (orders[is_snapshot],))

    async def serve(hand_over: HandOver) -> None:
        served.append(hand_over)

    async def main() -> None:
        publisher: Any = Publisher()
        publisher.take()
        publisher.new = [1]
        engine: Any = SimpleNamespace(call=call)
        feed = state_channel.StateFeed("a", "states", engine, publisher, serve)
        with pytest.raises(ActorUnavailableError) if fails else nullcontext():
            await feed._publish()
        await asyncio.sleep(0)
        assert served == (orders[:1] if fails else orders)

    actor = SimpleNamespace(publish=SimpleNamespace(remote=publish))
    monkeypatch.setattr(state_channel, "find_channel", lambda name: actor)
    asyncio.run(main())
