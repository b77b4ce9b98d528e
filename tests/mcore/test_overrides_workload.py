"""Random traffic through megatron-core's context on our allocator."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import mambaslots as ms
import mambaslots.mcore
import pytest
from mambaslots.mcore.recurrence import BLOCK, KV_BLOCK_BYTES, RecurrenceDriver, make_context, tokens
from mcore.async_host import AsyncHost
from mcore_rig import cpu_as_gpu
from oracle.plans import SwitchedPlan


@pytest.fixture(scope="module", autouse=True)
def _machine() -> Iterator[None]:
    with cpu_as_gpu():
        yield


class Traffic:
    """Prompts with shared beginnings, repeats, and conversations."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.said = [tokens(self.random.randint(1, 5 * BLOCK), 100 * seed + i) for i in range(3)]

    def prompt(self, longest: int) -> list[int]:
        said = self.random.choice(self.said)
        cut = self.random.choice([len(said), len(said), self.random.randint(0, len(said))])
        more = tokens(self.random.choice([0, 1, 2, 7, BLOCK, 2 * BLOCK + 1]), self.random.randint(0, 9))
        return (said[:cut] + more)[:longest] or said[:1]

    def note(self, sequence: list[int]) -> None:
        self.said[self.random.randrange(len(self.said))] = sequence[: 12 * BLOCK]


def legacy_traffic(seed: int, steps: int, **sizes: Any) -> RecurrenceDriver:
    traffic, random = Traffic(seed), Random(seed)
    host = RecurrenceDriver(make_context(**sizes))
    context = host.context
    again: list[list[int]] = []  # evicted by the host, to be added anew
    for _ in range(steps):
        partial = context.chunked_prefill_request_id
        if partial != -1:
            left = host.running[partial].request.remaining_prompt_length
            room = context.max_tokens - context.active_token_count
            chunk = min(left, room, random.choice([2, BLOCK, 2 * BLOCK + 3]))
            if room >= left or chunk < left:
                fits(host.add_chunk, partial, chunk)
        while context.chunked_prefill_request_id == -1 and random.random() < 0.7:
            prompt = again.pop() if again else traffic.prompt(10 * BLOCK)
            chunk = random.choice([None, random.randint(1, len(prompt))])
            if context.paused_request_count or not fits(host.add, prompt, chunk):
                break
        if not context.total_request_count:
            continue
        before = {number: one.sequence for number, one in host.running.items()}
        ready = [n for n in host._active() if host.running[n].is_prefilled]
        finish = tuple(n for n in ready if random.random() < 0.1)
        result = host.step(finish)
        for number in finish:
            traffic.note(before[number])
        evicted = result.get("evict_request_ids")
        again += [before[n] for n in ([] if evicted is None else evicted.tolist())]
    while host.running:
        if (partial := context.chunked_prefill_request_id) != -1:
            left = host.running[partial].request.remaining_prompt_length
            fits(host.add_chunk, partial, min(left, context.max_tokens - context.active_token_count))
        host.step(tuple(n for n in host._active() if host.running[n].is_prefilled))
    return host


def fits(add: Callable[..., object], *arguments: Any) -> bool:
    """Add, unless the host says that there is no room."""
    try:
        add(*arguments)
    except Exception as error:
        if type(error).__name__.endswith("OverflowError"):
            return False
        raise
    return True


def async_traffic(seed: int, steps: int, **sizes: Any) -> AsyncHost:
    """As the engine does it: overlapped steps while all requests decode, else update, admit and launch."""
    traffic, random = Traffic(seed), Random(seed)
    host = AsyncHost(make_context(**sizes))
    context = host.context

    def admit() -> None:
        for _ in range(random.randint(0, 3)):
            if context.paused_request_count or not fits(host.add, traffic.prompt(7 * BLOCK)):
                return

    for step in range(steps):
        ids = host._active()
        finish = tuple(n for n in ids if random.random() < 0.1)
        for number in finish:
            traffic.note(host.running[number].sequence)
        if ids and context.can_prepare_requests() and random.random() < 0.8:
            host.overlapped_step(finish)
        else:
            host.async_step(finish, admit if step < steps - 10 else lambda: None)
    while host.running:
        host.async_step(tuple(host._active()))
    return host


PAUSES = {"blocks": 14, "slots": 4, "paused_buffer_size_gb": 3 * KV_BLOCK_BYTES / 2**30}


@pytest.mark.sampled(seed=4)
@pytest.mark.parametrize("seed", range(36))
@pytest.mark.parametrize("traffic", [legacy_traffic, async_traffic])
def test_states_and_kv_are_right_after_every_step(
    traffic: Callable[..., RecurrenceDriver], seed: int
) -> None:
    sizes: dict[str, Any] = [{}, {"slots": 2}, PAUSES, {"policy": "ref_zero"}][seed % 4]
    plans = [None, ms.CheckpointPlan.every_block(BLOCK), SwitchedPlan(decode="off", branch=False)]
    with mambaslots.mcore.installed(plan=plans[seed % 3]):
        host = traffic(seed, 60, **sizes)
        host.check_idle()
        stats = mambaslots.mcore.stats(host.context)
    assert stats.num_prompt_tokens == stats.num_resumed_tokens + sum(stats.computed_by_reason.values())
    assert stats.num_hits > 0 or sizes
