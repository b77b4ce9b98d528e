"""What a replica publishes is what it can resume from, whatever happens to it and to its messages."""

import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace

import mambaslots as ms
import mambaslots.net as msd
import pytest
from mambaslots.inference.contexts.cache.hashing import PrefixHashChain
from mambaslots.inference.contexts.cache.prefix_cache import PrefixCache
from mambaslots.net.routing.state_events import StateEvents
from mambaslots.net.routing.state_index import StateIndex
from mambaslots.replay.engine_replay import ContextWithoutMemory
from oracle.budget import is_quick
from oracle.everything import Fuzzer
from oracle.ledger import LeftWrongError
from oracle.state_channel import LossyChannel, keys_of, resumable_keys
from oracle.toy_lm import ToyLM

BLOCK = 4


def toy_engine(**settings: object) -> ms.DynamicInferenceEngine:
    config = ms.InferenceConfig(
        **{
            "block_size_tokens": BLOCK, "max_requests": 2, "max_tokens_per_step": 32,
            "max_sequence_length": 96,
            "num_kv_blocks": 100, "num_mamba_slots": 6,
        } | settings
    )  # type: ignore[arg-type]  # fmt: skip
    return ms.DynamicInferenceEngine(ToyLM(), config)


def prompt(number: int, length: int = 18) -> list[int]:
    return [(number * 7 + position * 3) % 29 for position in range(length)]


def serve(engine: ms.DynamicInferenceEngine, number: int, length: int = 18) -> None:
    engine.generate([prompt(number, length)], ms.SamplingParams(max_tokens=5))


# ---- all that an engine goes through


class PublishingFuzzer(Fuzzer):
    """Also publishes what the engine can resume from; interrupts come in the middle of that, too."""

    def __init__(self, seed: int, interrupts: float, faults: float) -> None:
        super().__init__(seed, interrupts)
        self._cache = self.engine.context.prefix_cache
        self._channel = LossyChannel(msd.StatePublisher(self.engine, "a"), seed, faults)
        self._operations += [self._channel.publish] * 6

    def check_integrity(self) -> None:
        super().check_integrity()
        if self.random.random() < 0.5:
            self._channel.publish()
        else:
            self._channel.settle()
            published, there = keys_of(self._channel.index, "a"), resumable_keys(self._cache)
            if published != there:
                raise LeftWrongError("stale", f"too many: {published - there}; missing: {there - published}")


@pytest.mark.parametrize("faults", [0.0, 0.3])
@pytest.mark.parametrize("first", [0, *(pytest.param(40 * n, marks=pytest.mark.long) for n in range(1, 6))])
def test_a_router_knows_what_a_replica_can_resume_from(first: int, faults: float) -> None:
    for seed in range(first, first + (40 if first else 1 if is_quick() else 2)):
        PublishingFuzzer(seed, interrupts=0.15, faults=faults).run(100)


# ---- messages


def test_the_first_message_is_a_snapshot_and_the_others_are_changes() -> None:
    engine = toy_engine()
    serve(engine, 0)
    publisher = msd.StatePublisher(engine, "a")
    first = publisher.take()
    assert first is not None
    assert first.is_snapshot
    assert first.sequence == 0
    assert set(first.inserted) == resumable_keys(engine.context.prefix_cache)
    assert publisher.take() is None
    index = StateIndex()
    assert index.apply(first)
    for number in range(1, 9):  # more than the slots hold: states leave, too
        serve(engine, number)
        events = publisher.take()
        assert events is not None
        assert not events.is_snapshot
        assert events.sequence == number
        assert index.apply(events)
        assert keys_of(index, "a") == resumable_keys(engine.context.prefix_cache)
    assert publisher.snapshot() == StateEvents("a", first.epoch, 8, publisher.snapshot().inserted, (), True)


def test_what_came_and_left_between_two_messages_is_not_published() -> None:
    engine = toy_engine(num_mamba_slots=2, max_requests=1)
    publisher = msd.StatePublisher(engine, "a")
    publisher.take()
    for number in range(9):
        serve(engine, number)
    events = publisher.take()
    assert events is not None
    assert set(events.inserted) == resumable_keys(engine.context.prefix_cache)
    assert not events.removed


@pytest.mark.parametrize(
    "forget",
    [
        lambda engine: engine.set_weights_version("new"),
        lambda engine: engine.reset_prefix_cache(),
        lambda engine: engine.reset(),
        lambda engine: (engine.suspend(), engine.resume()),
    ],
    ids=["weights", "reset_prefix_cache", "reset", "suspend"],
)
def test_a_cache_that_begins_anew_holds_nothing(forget: object) -> None:
    engine = toy_engine()
    publisher, index = msd.StatePublisher(engine, "a"), StateIndex()
    serve(engine, 0)
    before = publisher.take()
    assert before is not None
    assert index.apply(before)
    assert keys_of(index, "a")
    forget(engine)  # type: ignore[operator]
    after = publisher.take()
    assert after is not None
    assert (after.sequence, after.inserted, set(after.removed)) == (1, (), set(before.inserted))
    assert msd.StatePublisher(engine, "a").snapshot().epoch > after.epoch == before.epoch
    assert index.apply(after)
    assert not keys_of(index, "a")
    assert index.apply(before), "a late message"
    assert not keys_of(index, "a")


def test_a_state_that_only_the_tier_has_is_published_until_the_tier_forgets_it() -> None:
    bytes_each = ToyLM().state_spec().slot_bytes
    engine = toy_engine(num_mamba_slots=1, max_requests=1, host_cache_gb=6 * bytes_each / (1 << 30))
    cache = engine.context.prefix_cache
    publisher, index = msd.StatePublisher(engine, "a"), StateIndex()
    num_in_tier_alone = 0
    for number in range(12):
        serve(engine, number)
        events = publisher.take()
        assert events is not None
        assert index.apply(events)
        published = keys_of(index, "a")
        assert published == resumable_keys(cache)
        num_in_tier_alone += len(published - cache.slots.cached_states.state_block_of_hash.keys())
    assert num_in_tier_alone


def test_states_that_are_imported_are_published() -> None:
    source, target = toy_engine(), toy_engine()
    for engine in (source, target):
        engine.set_weights_version("same")
    publisher = msd.StatePublisher(target, "a")
    publisher.take()
    serve(source, 0)
    msd.import_prefixes(target, msd.encode_prefixes(msd.export_prefixes(source)))
    events = publisher.take()
    assert events is not None
    assert set(events.inserted) == resumable_keys(target.context.prefix_cache) != set()


def taken(publisher: msd.StatePublisher) -> StateEvents:
    events = publisher.take()
    assert events is not None
    return events


# ---- bounds


def small_cache(num_slots: int = 8) -> PrefixCache:
    return PrefixCache(1000, num_slots, BLOCK)


def commit(cache: PrefixCache, number: int) -> int:
    """Register a block of its own with a state; returns its hash."""
    chain = PrefixHashChain(BLOCK)
    chain.extend_to([number] * BLOCK)
    (block,) = cache.kv_blocks.allocate_memory_blocks(1)
    cache.kv_blocks.register_chain(chain.root, [block], chain.hashes, chain.tokens)
    cache.slots.commit_slots(cache.slots.reserve_slots([block]))
    cache.kv_blocks.release_memory_blocks([block])
    return chain.hashes[0]


def test_a_step_without_changes_takes_no_memory() -> None:
    cache = small_cache()
    publisher = msd.StatePublisher(SimpleNamespace(prefix_cache=cache), "a")
    commit(cache, 1)
    publisher.take()
    tracemalloc.start()
    for _ in range(100):
        assert publisher.take() is None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2000


def test_a_message_costs_its_changes_and_not_all_states() -> None:
    class Unlisted(dict[int, int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("all states are read")

    cache = small_cache(64)
    publisher = msd.StatePublisher(SimpleNamespace(prefix_cache=cache), "a")
    before = {commit(cache, number) for number in range(60)}
    assert set(taken(publisher).inserted) == before
    cache.cached_states.state_block_of_hash = Unlisted(cache.cached_states.state_block_of_hash)
    after = {commit(cache, number) for number in range(100, 120)}  # 16 are evicted
    events = taken(publisher)
    assert set(events.inserted) <= after
    assert len(events.inserted) == len(events.removed) + 4
    assert publisher.take() is None


def test_a_context_without_tensors_can_be_published() -> None:
    config = ms.InferenceConfig(
        block_size_tokens=BLOCK,
        max_tokens_per_step=32,
        num_kv_blocks=20,
        num_mamba_slots=4,
        max_sequence_length=40,
    )
    events = msd.StatePublisher(ContextWithoutMemory(ToyLM().state_spec(), config), "a").take()
    assert events is not None
    assert events.is_snapshot


@pytest.mark.parametrize("source", [None, 3, SimpleNamespace(prefix_cache=None)], ids=str)
def test_what_has_no_prefix_cache_is_refused(source: object) -> None:
    with pytest.raises(ValueError, match="source is"):
        msd.StatePublisher(source, "a")


@pytest.mark.parametrize("replica", ["", None, 3], ids=repr)
def test_a_replica_needs_a_name(replica: object) -> None:
    with pytest.raises(ValueError, match="replica is"):
        msd.StatePublisher(SimpleNamespace(prefix_cache=small_cache()), replica)  # type: ignore[arg-type]


def test_other_ranks_than_the_first_do_not_publish() -> None:
    spec = SimpleNamespace(groups=SimpleNamespace(rank=1))
    with pytest.raises(ValueError, match="of rank 1"):
        msd.StatePublisher(SimpleNamespace(prefix_cache=small_cache(), spec=spec), "a")
