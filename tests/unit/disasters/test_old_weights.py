"""New weights while requests run, copies wait and prefixes travel: no state of the old weights is ever found.

Elsewhere the prefix cache, and the coordinator that routes by it, still had states of the weights before a
refit. Here every findable state and block is held to the recurrence of the weights that the model has now.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import mambaslots as ms
import mambaslots.net as msd
import pytest
import torch.distributed as dist
from mambaslots.inference.contexts.tier_copies import HostCopies
from mambaslots.net.routing.state_index import StateIndex
from mambaslots.net.transfer.format import TransferError
from mambaslots.net.transfer.placement import ImportReport
from oracle.budget import thinned
from oracle.cached_prefixes import assert_cache_is_right
from oracle.disaggregated import Place, answers, run
from oracle.file_starts import wait_for
from oracle.late_streams import late_copies
from oracle.serving import random_tokens, resumable
from oracle.state_channel import keys_of, resumable_keys
from oracle.toy_answers import Ask, answer
from oracle.toy_engine import ask, tiers_of, toy_engine
from oracle.toy_lm import TOYS, ToyLM
from oracle.transfers import engine_of
from oracle.workload import assert_idle

TEXTS = [[(7 * i * i + 3 * i + 5 * seed) % 29 for i in range(24)] for seed in range(5)]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {}, "async": {"async_scheduling": True}, "drafts": {"num_speculative_tokens": 3},
    "short steps": {"max_tokens_per_step": 8}, "one slot": {"num_slots": 1},
    "few blocks": {"num_kv_blocks": 26},
}  # fmt: skip


def named(version: int = 0, num_slots: int = 6, **settings: Any) -> tuple[ms.DynamicInferenceEngine, ToyLM]:
    model = ToyLM(kind=settings.pop("kind", TOYS["one sum"]))
    engine = toy_engine(num_slots, model=model, **({"max_requests": 3} | settings))
    bump(engine, version)
    return engine, model


def bump(engine: ms.DynamicInferenceEngine, version: int) -> None:
    """The model has other weights, and the engine is notified."""
    assert isinstance(engine.model, ToyLM)
    engine.model.version = version
    engine.set_weights_version(version)


def ask_all(engine: ms.DynamicInferenceEngine, version: int, tail: int) -> int:
    """Answers of these weights alone; how many tokens were resumed."""
    hits = 0
    for text in TEXTS:
        hits += ask(engine, [*text, tail], 3, version).num_resumed_tokens
        assert_cache_is_right(engine)
    return hits


@pytest.mark.sampled
@pytest.mark.disaster(number=24)
@pytest.mark.in_turn("toy")
@pytest.mark.parametrize("toy", list(TOYS))
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_weights_that_change_while_requests_run(setting: str, toy: str) -> None:
    """At every step of a few requests; a router receives the states, late."""
    fresh = 0
    for moment in thinned((3, 0, 1, 12, 8, 5), every=3):
        engine, model = named(kind=TOYS[toy], **SETTINGS[setting])
        publisher, index = msd.StatePublisher(engine, "a"), StateIndex()
        ask_all(engine, 0, 1)
        for text in TEXTS[:4]:
            engine.add_request([*text, 2, 3], ms.SamplingParams(max_tokens=14))
        late = [publisher.take()]
        for _ in range(moment):
            engine.step()
        late.append(publisher.take())
        bump(engine, 1)
        assert resumable_keys(engine.context.prefix_cache) == set()
        assert all(resumable(engine.context, text) == 0 for text in TEXTS)
        late.append(publisher.take())
        running = engine.add_request(TEXTS[4], ms.SamplingParams(max_tokens=5))
        while engine.has_unfinished_requests():
            for result in engine.step().finished:
                if result.request_id == running:
                    assert tuple(result.tokens) == answer(Ask(tuple(TEXTS[4]), 5, 1, kind=model.kind)).tokens
            engine.check_integrity()
            assert_cache_is_right(engine)
            late.append(publisher.take())
        for events in late:
            assert events is None or index.apply(events)
        assert keys_of(index, "a") == resumable_keys(engine.context.prefix_cache)
        ask_all(engine, 1, 4)
        for tail in (5, 6):
            fresh += ask(engine, [*TEXTS[1], tail], 3, 1).num_resumed_tokens
        assert_cache_is_right(engine)
        assert_idle(engine)
    assert fresh > 0


@pytest.mark.disaster(number=24)
@pytest.mark.sampled
@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_copies_of_old_states_in_host_memory_and_files_never_come_back(
    running: bool, is_late: bool, in_files: bool, tmp_path: Path
) -> None:
    """Copies out may still be under way when the weights change, and are made after it."""
    with late_copies() as streams:
        files = {"disk_cache": (str(tmp_path), 1e-4)} if in_files else {}
        engine, _ = named(num_slots=1, num_host_slots=2 if in_files else 40, max_requests=2, **files)
        for version in range(3):
            bump(engine, version)
            hits = 0
            for turn in range(3):
                hits += ask_all(engine, version, turn) if turn else first(engine, version)
                copies = tiers_of(engine).copies
                assert isinstance(copies, HostCopies)
                if copies._files is not None:
                    wait_for(copies._files)
            assert hits > 0
            if running:
                for text in TEXTS[:3]:
                    engine.add_request([*text, 9], ms.SamplingParams(max_tokens=9))
                engine.step()
            if not is_late:
                for stream in streams:
                    stream.synchronize()
        tiers = engine.stats().cache.tiers
        assert tiers.num_states_fetched > 0
        assert (tiers.num_states_fetched_from_disk > 0) == in_files


def first(engine: ms.DynamicInferenceEngine, version: int) -> int:
    """The first answers of these weights: nothing of an equal prompt under other weights is resumed."""
    found = ask(engine, [*TEXTS[0], 1], 3, version)
    assert found.num_resumed_tokens == 0
    assert_cache_is_right(engine)
    return 0


@pytest.mark.disaster(number=24)
@pytest.mark.sampled
@pytest.mark.parametrize("way", ["bytes", "shard", "files"])
@pytest.mark.parametrize("whose", ["exporter", "importer", "both"])
def test_an_export_of_old_weights_that_arrives_behind_the_change(
    whose: str, way: str, tmp_path: Path
) -> None:
    """With requests running in both; the next export, of the new weights, is a hit."""
    (source, _), (target, _) = named(), named()
    ask_all(source, 0, 1)
    travelling: Any = msd.export_prefixes(source)
    if way == "bytes":
        travelling = msd.encode_prefixes(travelling)
    elif way == "files":
        msd.save_prefixes(source, tmp_path)
    for engine in (source, target):
        engine.add_request([*TEXTS[0], 8], ms.SamplingParams(max_tokens=20))
        engine.step()
    if whose != "importer":
        bump(source, 1)
    if whose != "exporter":
        bump(target, 1)
    version = int(whose != "exporter")

    def arrive() -> ImportReport:
        if way == "files":
            return msd.load_prefixes(target, tmp_path)
        return msd.import_prefixes(target, travelling)

    if version:
        with pytest.raises(TransferError, match="weights_version is 0; accepted: 1"):
            arrive()
        assert resumable_keys(target.context.prefix_cache) == set()
    else:
        assert arrive().imported.states > 0
    assert_cache_is_right(target)
    bump(source, 1)
    bump(target, 1)
    assert all(resumable(target.context, text) == 0 for text in TEXTS)
    ask_all(source, 1, 1)
    assert msd.import_prefixes(target, msd.encode_prefixes(msd.export_prefixes(source))).imported.states > 0
    assert_cache_is_right(target)
    assert ask_all(target, 1, 2) > 0
    assert ask_all(source, 1, 3) > 0


@pytest.mark.disaster(number=24)
@pytest.mark.parametrize("first_side", ["source", "destination"])
def test_a_hand_over_between_the_changes_of_both_sides_brings_nothing(first_side: str) -> None:
    """One channel, three hand-overs: of the old weights, with one side changed, with both changed."""
    minute = timedelta(seconds=60)
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=minute)
    (source, _), (target, _) = named(), named()

    def client() -> Any:
        return dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=minute)

    ends = [
        msd.TransferChannel(engine, client(), "a to b", side, timeout_s=4.0)  # type: ignore[arg-type]
        for engine, side in ((source, "source"), (target, "destination"))
    ]

    def hand_over() -> Sequence[Any]:
        with ThreadPoolExecutor(1) as threads:
            sent = threads.submit(ends[0].send)
            received = ends[1].receive()
            return sent.result(), received

    ask_all(source, 0, 1)
    sent, received = hand_over()
    assert (sent.failure, received.failure) == ("", "")
    assert ask_all(target, 0, 2) > 0
    changes = [source, target] if first_side == "source" else [target, source]
    bump(changes[0], 1)
    sent, received = hand_over()
    assert "weights_version is" in sent.failure
    assert "weights_version is" in received.failure
    assert_cache_is_right(target)
    bump(changes[1], 1)
    assert all(resumable(target.context, text) == 0 for text in TEXTS)
    ask_all(source, 1, 1)
    sent, received = hand_over()
    assert (sent.failure, received.failure) == ("", "")
    assert received.imported.states > 0
    assert_cache_is_right(target)
    assert ask_all(target, 1, 2) > 0
    for end in ends:
        end.close()


def test_what_a_prefill_worker_of_old_weights_sends_is_not_taken() -> None:
    place, prefill, decode = Place(), engine_of(), engine_of()
    prompts = [random_tokens(50, seed) for seed in range(4)]

    async def body() -> None:
        async with place.worker(prefill), place.server(decode) as server:
            (result,) = await answers(server, prompts[:1])
            assert result.num_resumed_tokens == 48
            await server.call(lambda engine: engine.set_weights_version("weights 2"))
            results = await answers(server, prompts)
            assert [result.num_resumed_tokens for result in results] == [0] * 4
            (result,) = await answers(server, [[*prompts[1], 1]])
            assert result.num_resumed_tokens == 48  # its own state, of the new weights

    run(body())
    assert_cache_is_right(decode)
