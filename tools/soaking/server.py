"""Rounds of a server: clients, an operator, and what must hold in the end."""

import gc
import logging
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from random import Random
from typing import Any

import mambaslots as ms
import torch
from fuzzing.malformed_bodies import MAX_BODY_BYTES
from mambaslots.serve import ServerSettings, make_app
from mambaslots.serve.api_keys import engine_salt
from oracle.faulty_copies import make_faulty
from oracle.random_engine import random_plan, with_tier
from oracle.served import Served, serving_app
from oracle.stored_states import stored_apart
from prometheus_client.parser import text_string_to_metric_families
from soaking.clients import Client, World, clients
from soaking.model import KINDS, NUM_VERSIONS, Oracle, loaded_of, model_of
from soaking.requests import LONGEST, Query, Talk
from soaking.rounds import RoundTally

QUIET_S = 20.0
LOGGED = ("CopyFailedError", "mambaslots.monitor")
"""Words of warnings that are in order: of copies that fail, and of what the cache cannot do."""


class Watch:
    """What a round must not leave behind: threads, file descriptors, and words of warning in the log."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._before = self._held()

    @staticmethod
    def _held() -> tuple[set[str], list[str]]:
        files = []
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # that of the folder itself
                files.append(os.readlink(f"/proc/self/fd/{number}").split(":")[0])
        return {f"{thread.name} {thread.ident}" for thread in threading.enumerate()}, sorted(files)

    def left(self) -> str:
        """What is there that was not there before, after a while in which it may go."""
        threads, files = self._before
        for _ in range(10):
            gc.collect()
            now, open_now = self._held()
            if now <= threads and len(open_now) <= len(files):
                return ""
            time.sleep(0.5)
        return f"left behind: threads {sorted(now - threads)}, files {Counter(open_now) - Counter(files)}"

    @contextmanager
    def listening(self, expected: Sequence[str]) -> Iterator[None]:
        """Note what is logged as a warning or worse; `expected`: words of lines that are in order."""
        said = self.said

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                text = f"{record.name}: {record.getMessage()}"
                if record.exc_info:
                    text += f": {''.join(traceback.format_exception(*record.exc_info))[-700:]}"
                if not any(word in text for word in expected):
                    said.append(text)

        handler, root = Handler(logging.WARNING), logging.getLogger()
        root.addHandler(handler)
        try:
            yield
        finally:
            root.removeHandler(handler)


def counts_of(stats: ms.EngineStats) -> dict[str, int]:
    """What an engine has met, by the names of events."""
    cache = stats.cache
    return {
        "evicted states": cache.num_states_evicted,
        "refused by value": cache.num_states_refused,
        "recomputed tokens": cache.num_recomputed_tokens,
        "host-tier fetches": cache.tiers.num_states_fetched,
        "disk fetches": cache.tiers.num_states_fetched_from_disk,
        "drafts accepted": stats.speculation.num_accepted,
    }


def watched_round(
    name: str, serve: Callable[[RoundTally], None], expected: Sequence[str] = LOGGED
) -> RoundTally:
    """Serve a round; whatever goes wrong is a mismatch."""
    tally, watch = RoundTally(), Watch()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with watch.listening(expected):
            serve(tally)
    except Exception as error:
        tally.mismatches.append(f"{name}: {''.join(traceback.format_exception(error))[-1500:]}")
    finally:
        torch.set_num_threads(num_threads)
    tally.mismatches += [f"{name}: logged: {text}" for text in watch.said[:5]]
    left = watch.left()
    if left:
        tally.mismatches.append(f"{name}: {left}")
    return tally


def quiet(stats: Callable[[], ms.EngineStats], name: str, tally: RoundTally) -> None:
    """Wait until nothing runs or waits: clients that left may still have requests."""
    deadline = time.monotonic() + QUIET_S
    while time.monotonic() < deadline:
        now = stats()
        if not now.num_running + now.num_waiting:
            return
        time.sleep(0.01)
    tally.mismatches.append(f"{name}: requests of clients that are gone go on: {now}")


def check_end(engine: ms.DynamicInferenceEngine, name: str, tally: RoundTally) -> None:
    """Nothing runs, waits or is held, and integrity holds."""
    engine.check_integrity()
    stats = engine.stats()
    cache = stats.cache
    left = (
        stats.num_running, stats.num_waiting, cache.num_held_kv_blocks, cache.num_reserved_slots,
        cache.num_pinned_slots, cache.num_live_slots, len(engine.pins()),
    )  # fmt: skip
    if any(left):
        tally.mismatches.append(f"{name}: left running, waiting, held, reserved, pinned, live, pins: {left}")


def compare(
    kind: str, asking: Sequence[Client], until_s: float, name: str, random: Random, tally: RoundTally
) -> None:
    """Hold a sample of the answers against the recurrence, as many as there is time for, sixteen at least."""
    for client in asking:
        tally.add(client.tally)
    records = [record for client in asking for record in client.records]
    random.shuffle(records)
    records.sort(key=lambda one: not one.num_cached)  # what resumed something first
    oracle = Oracle(kind)
    for start in range(0, len(records), 16):
        if start and time.monotonic() > until_s:
            break
        some = records[start : start + 16]
        for record in sorted(some, key=lambda one: (one.version, one.query.prompts[0])):
            num_tokens, fault = record.check(oracle)
            tally.comparisons += len(record.choices)
            tally.tokens_compared += num_tokens
            if fault:
                tally.mismatches.append(fault)
    if not tally.comparisons:
        tally.events["rounds without a comparison"] += 1


class RecallingDrafter:
    """Drafts what followed the same tokens before, in any request.

    It is right where a prompt is repeated, wrong where seeds or weights differ.
    """

    def __init__(self, length: int = 4, most: int = 4096) -> None:
        self._length, self._most = length, most
        self._next: dict[tuple[int, ...], int] = {}

    def draft(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        last, size = list(tokens[-2 * self._length :]), self._length
        for at in range(len(last) - size):
            self._next[tuple(last[at : at + size])] = last[at + size]
        while len(self._next) > self._most:
            del self._next[next(iter(self._next))]
        drafts: list[int] = []
        while len(drafts) < max_drafts:
            following = self._next.get(tuple((last + drafts)[-size:]))
            if following is None:
                break
            drafts.append(following)
        return drafts


sys.path.append(str(Path(__file__).parents[2] / "tests"))

REQUIRED_EVENTS = {
    "cpu": (
        "streams", "whole answers", "left within the body", "left at once", "left before a token",
        "left in the middle", "malformed bodies", "attempts to share", "refused: queue_full", "weights",
        "reset", "suspended", "evicted states", "refused by value", "recomputed tokens", "host-tier fetches",
        "failed copies", "drafts accepted",
    )
}  # fmt: skip
"""What must happen in some minutes."""
ADMIN = "the-key-of-the-operator"


def random_config(random: Random, model: ms.models.HybridLM, folder: str) -> ms.InferenceConfig:
    """Settings of an engine with little of everything."""
    block = random.choice([8, 16])
    fewest = -(-LONGEST // block)
    drafts = random.choice([0, 0, 1, 3])
    config = ms.InferenceConfig(
        block_size_tokens=block,
        max_requests=random.randint(2, 5),
        max_tokens_per_step=random.choice([16, 32, 64, 128]),
        max_sequence_length=LONGEST,
        num_kv_blocks=fewest + random.choice([0, 3, fewest, 4 * fewest]),
        num_mamba_slots=random.choice([1, 2, 4, 12, 40]),
        eviction_policy=random.choice(["value", "value", "value", "lru"]),
        checkpoint_plan=random_plan(random, block),
        num_speculative_tokens=drafts,
        async_scheduling=not drafts and random.random() < 0.5,
        decode_by_replay=random.random() < 0.2,
        salt_key=b"the key of all replicas",
    )
    if config.decode_by_replay:  # a step holds a chunk beside the other requests' decodes
        config = replace(config, max_tokens_per_step=max(32, config.max_tokens_per_step))
    num_host_slots = random.choice([0, 0, 8, 40])
    if num_host_slots:  # states leave their slots, and their KV stays
        few = random.choice([1, 2, 4])
        config = replace(config, num_kv_blocks=6 * fewest, num_mamba_slots=few)
    config = with_tier(config, model, num_host_slots)
    if config.host_cache_gb and random.random() < 0.4:
        config = replace(config, disk_cache=(folder, config.host_cache_gb))
    return config


def new_world(random: Random, until_s: float, name: str) -> World:
    """What clients know, of a server that has no port yet; with tenants, or open to everybody."""
    keys = {"alice": "key-a", "bob": "key-b"} if random.random() < 0.7 else {}
    talk = Talk(Random(random.random()), list(keys) or ["default"])
    return World(0, keys, ADMIN if keys else None, talk, until_s, name)


@contextmanager
def lossless_encoding(config: ms.InferenceConfig, is_wanted: bool) -> Iterator[ms.InferenceConfig]:
    """Settings under which durable states are a store of their own, which rounds nothing; or as they are."""
    if not is_wanted or config.decode_by_replay:
        yield config
        return
    given: dict[str, Any] = {}
    with stored_apart(given):
        yield replace(config, **given)


class Operator:
    """Does to a served engine what operators do, while clients ask."""

    def __init__(self, served: Served, world: World, random: Random, models: Sequence[Any]) -> None:
        self.world = world
        self.events = RoundTally().events
        self._served, self._random, self._models = served, random, models
        self._pins: list[Any] = []
        rare: list[Callable[[], None]] = [self._reset] if "cancelled" in world.may_refuse else []
        pins: list[Callable[[], None]] = [self._pin, self._unpin] if "capacity" in world.may_refuse else []
        drops = [*[self._change_weights] * 2, self._suspend, self._forget, *rare]
        self._operations: list[Callable[[], None]] = [*drops, *([self._check, *pins] * len(drops))]

    def work(self) -> None:
        """Operate until the time is over."""
        while not self.world.is_over:
            self._random.choice(self._operations)()
            time.sleep(self._random.uniform(0.05, 0.8))
        self.unpin_all()

    def _change_weights(self) -> None:
        version = (self.world.weights.version + self._random.randint(1, NUM_VERSIONS - 1)) % NUM_VERSIONS

        def change(engine: ms.DynamicInferenceEngine) -> None:
            model: Any = engine.model
            model.load_state_dict(self._models[version].state_dict())
            engine.set_weights_version(version)

        with self.world.weights.changing(version):
            self._served.call(change)
        self._pins.clear()
        self.events["weights"] += 1

    def _suspend(self) -> None:
        self.count()
        self._served.call(lambda engine: engine.suspend())
        time.sleep(self._random.choice([0.0, 0.02, 0.1]))
        self._served.call(lambda engine: engine.resume())
        self._pins.clear()
        self.events["suspended"] += 1

    def _forget(self) -> None:
        self._served.call(lambda engine: engine.reset_prefix_cache())
        self._pins.clear()
        self.events["reset"] += 1

    def _reset(self) -> None:
        self.count()
        self._served.call(_reset_engine)
        self._pins.clear()
        self.events["reset engines"] += 1

    def _check(self) -> None:
        self._served.call(lambda engine: engine.check_integrity())
        self.events["checks of integrity"] += 1

    def _pin(self) -> None:
        query: Query = self.world.talk.draw(self._random)
        salt = engine_salt(query.tenant, query.salt, bool(self.world.keys))
        with suppress(ValueError, ms.MambaSlotCapacityError):  # nothing of it is cached, or pins have all
            self._pins.append(self._served.call(lambda engine: engine.pin(query.prompts[0], cache_salt=salt)))
            self.events["pins"] += 1

    def _unpin(self) -> None:
        if self._pins:
            pin = self._pins.pop(self._random.randrange(len(self._pins)))
            self._served.call(lambda engine: engine.unpin(pin))

    def unpin_all(self) -> None:
        for pin in self._pins:
            self._served.call(methodcaller("unpin", pin))
        self._pins.clear()

    def count(self) -> None:
        """Take over what the engine has counted; it may forget its counts next."""
        for name, number in counts_of(self._served.stats()).items():
            self.events[name] = max(self.events[name], number)


def _reset_engine(engine: ms.DynamicInferenceEngine) -> None:
    version = engine.weights_version
    engine.reset()
    engine.set_weights_version(version)


# ---- a round


def run_round(seed: int, seconds: float, device: str) -> RoundTally:
    """One server, its clients and its operator."""
    name = f"server round, seed {seed}"
    return watched_round(name, lambda tally: _serve(seed, seconds, name, tally))


def _serve(seed: int, seconds: float, name: str, tally: RoundTally) -> None:
    random = Random(seed)
    kind = random.choice(list(KINDS))
    models = [model_of(kind, version) for version in range(NUM_VERSIONS)]
    model = model_of(kind, 0)
    begun = time.monotonic()
    world = new_world(random, begun + 0.5 * seconds, name)
    for code, share in (("capacity", 0.4), ("cancelled", 0.2), ("timeout", 0.15)):
        if random.random() < share:
            world.may_refuse.add(code)
    settings = ServerSettings(
        model_name="soak", api_keys=world.keys, admin_key=world.admin_key, max_body_bytes=MAX_BODY_BYTES,
        max_waiting_requests=random.randint(3, 6), drain_timeout_s=random.choice([0.0, 0.05, 5.0]),
        request_timeout_s=random.choice([0.2, 0.5]) if "timeout" in world.may_refuse else 60.0,
    )  # fmt: skip
    is_cut = random.random() < 0.3
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        config = random_config(random, model, folder)
        config = stack.enter_context(lossless_encoding(config, random.random() < 0.2))
        drafter = RecallingDrafter() if config.num_speculative_tokens and random.random() < 0.8 else None
        engine = ms.DynamicInferenceEngine(model, config, drafter=drafter)
        engine.set_weights_version(0)
        tier = engine.context.prefix_cache.tiers
        copies = None if tier is None else make_faulty(tier, Random(random.random()))
        app = make_app(engine, loaded_of(model), settings)
        with serving_app(app, loaded_of(model), config) as served:
            world.port = served.port
            operator = Operator(served, world, Random(random.random()), models)
            with clients(world, random.randint(4, 10)) as asking:
                operator.work()
                if is_cut:
                    world.may_refuse |= {"draining", "cancelled"}
                    world.is_closing = True
                    served.do(app.state.service.drain)
                    tally.events["drained while busy"] += 1
            quiet(served.stats, name, tally)
            operator.count()
            if not is_cut:
                check_leaving(served, world, name, tally)
            check_metrics(served, world, asking, name, tally)
        check_end(engine, name, tally)
    tally.events.update(operator.events)
    tally.events["failed copies"] += copies.num_faults if copies is not None else 0
    compare(kind, asking, begun + seconds, name, random, tally)


def metrics(served: Served, world: World) -> Callable[[str], dict[str, float]]:
    """By name of a metric: its values by label."""
    text = served.get("/metrics", **world.of_path("/metrics")).body.decode()
    found = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    def of(metric: str) -> dict[str, float]:
        return {"".join(labels): value for (one, labels), value in found.items() if one == metric}

    return of


def check_leaving(served: Served, world: World, name: str, tally: RoundTally) -> None:
    """With nothing else under way: the answer to a client that leaves after its first token is cancelled."""
    query = world.talk.draw(Random(0))
    room = LONGEST - max(map(len, query.prompts))
    query.body |= {"stream": True, "max_tokens": room, "stop_token_ids": [], "stop": [], "n": 1}

    def num_cancelled() -> float:
        return metrics(served, world)("mambaslots_requests_ended_total")["cancelled"]

    before = num_cancelled()
    with socket.create_connection(("127.0.0.1", served.port), timeout=QUIET_S) as client:
        client.sendall(world.sent(query))
        client.recv(200)
    quiet(served.stats, name, tally)
    if num_cancelled() == before:
        tally.mismatches.append(f"{name}: the request of a client that left was not cancelled")
    tally.events["cancelled"] += int(num_cancelled())


def check_metrics(
    served: Served, world: World, asking: Sequence[Client], name: str, tally: RoundTally
) -> None:
    """What the metrics count agrees with what clients asked and got."""
    of = metrics(served, world)
    added, ended = of("mambaslots_requests_added_total")[""], of("mambaslots_requests_ended_total")
    complete = sum(one.num_answers for one in asking)
    unknown = sum(one.num_unknown for one in asking) + len(asking)  # and those of `check_leaving`
    whole = ended["stop"] + ended["length"]
    generated = of("mambaslots_generated_tokens_total")[""]
    prompt = of("mambaslots_prompt_tokens_total")[""]
    accounted = of("mambaslots_resumed_prompt_tokens_total")[""] + sum(
        of("mambaslots_computed_prompt_tokens_total").values()
    )
    wrong = {
        "requests that were added have not ended": added != sum(ended.values()),
        "fewer answers than clients have got": whole < complete,
        "more requests than clients have sent": added > complete + unknown,
        "fewer tokens than clients have got": generated < sum(one.num_answer_tokens for one in asking),
        "prompt tokens that are neither resumed nor computed": prompt != accounted,
        "requests that run or wait": bool(
            of("mambaslots_requests_running")[""] + of("mambaslots_requests_waiting")[""]
        ),
    }
    for what in (one for one, is_so in wrong.items() if is_so):
        tally.mismatches.append(
            f"{name}: metrics: {what}: added {added}, ended {ended}, answered {complete}, unknown {unknown}, "
            f"prompt tokens {prompt}, {accounted}"
        )
