"""One request blocks no other: pins, prompts that do not fit now, promised states, drafts."""

import mambaslots as ms
import pytest
from mambaslots.inference.engines.drafter import Drafter
from oracle.budget import thinned
from oracle.serving import random_tokens, small_engine
from oracle.workload import TEXTS, Asked, Client, assert_idle

pytestmark = pytest.mark.usefixtures("kind")

LONG = TEXTS[0]  # 56 tokens, 7 blocks of 8
SHORT = ms.SamplingParams(max_tokens=2)


def pinned_engine(num_kv_blocks: int = 16, **settings: object) -> ms.DynamicInferenceEngine:
    """Seven of the KV blocks are pinned."""
    engine = small_engine(num_kv_blocks=num_kv_blocks, **settings)
    engine.warm(LONG)
    engine.pin(LONG)
    return engine


# ---- pins


def test_a_request_for_which_pins_leave_too_little_holds_no_other_up() -> None:
    client = Client(pinned_engine())
    too_long = client.engine.add_request(random_tokens(80, 1), SHORT)  # 10 blocks, and 9 are left
    others = [client.ask(Asked(tuple(random_tokens(9, seed)), 3)) for seed in thinned(range(2, 200), 10)]
    while client.asked:
        client.step()
    assert {result.request_id for result in client.results} == set(others)
    with pytest.raises(ms.KVBlockCapacityError, match=f"for request {too_long}") as raised:
        client.engine.step()
    error = raised.value
    assert (error.required, error.available, error.request_id) == (10, 9, too_long)
    client.engine.check_integrity()
    client.engine.cancel(error.request_id)
    assert_idle(client.engine, pinned_blocks=7)


def test_any_number_of_requests_for_which_pins_leave_too_little_hold_no_other_up() -> None:
    client = Client(pinned_engine())
    for _ in range(300):
        client.engine.add_request(random_tokens(80, 1), SHORT)
    client.ask(Asked(tuple(random_tokens(9, 2)), 3))
    while client.asked:
        client.step()
    with pytest.raises(ms.KVBlockCapacityError):
        client.engine.step()
    (pinned,) = client.engine.pins()
    client.engine.unpin(pinned)
    assert client.engine.step().admitted


def test_unpinning_lets_the_request_in() -> None:
    engine = pinned_engine()
    request_id = engine.add_request(random_tokens(80, 1), SHORT)
    with pytest.raises(ms.KVBlockCapacityError):
        engine.step()
    (pinned,) = engine.pins()
    engine.unpin(pinned)
    assert engine.pins() == []
    assert engine.step().admitted == (request_id,)


def test_an_answer_that_outgrows_what_pins_leave_holds_no_other_up() -> None:
    client = Client(pinned_engine(num_kv_blocks=10))
    growing = client.ask(Asked(tuple(TEXTS[1][:17]), 24))
    for _ in range(6):
        client.step()
    others = {client.ask(Asked(tuple(TEXTS[1][:9]), 2)) for _ in range(4)}
    for _ in range(40):
        if client.asked.keys() == {growing}:
            break
        client.step()
    assert {result.request_id for result in client.results} == others


# ---- prompts that do not fit now


def test_no_later_request_overtakes_one_that_waits_for_memory() -> None:
    client = Client(small_engine(num_kv_blocks=16))
    for seed in (1, 2):
        client.ask(Asked(tuple(random_tokens(31, seed)), 24))  # 4 blocks, later 7
    client.step()
    large = client.ask(Asked(tuple(random_tokens(96, 3)), 2))  # 12 blocks
    later = [client.ask(Asked(tuple(random_tokens(9, seed)), 2)) for seed in range(10, 14)]
    admitted: list[int] = []
    while len(admitted) < 5:
        admitted += client.step().admitted
    assert admitted == [large, *later]
    client.finish()


# ---- promised states


def sharing(count: int) -> list[list[int]]:
    """Prompts of 97 tokens that share 96."""
    head = random_tokens(96, 7)
    return [[*head, token] for token in range(count)]


def wide_client() -> Client:
    """Of an engine that could take 64 requests in one step."""
    return Client(
        small_engine(num_kv_blocks=1200, max_requests=64, max_tokens_per_step=8192, num_mamba_slots=70)
    )


def test_where_pins_keep_all_other_slots_the_promised_state_is_in_the_slot_of_an_idle_row() -> None:
    """The last request to get a row takes that slot over, and resumes."""
    engine = small_engine(
        num_mamba_slots=1,
        num_kv_blocks=1200,
        max_requests=64,
        max_tokens_per_step=8192,
        max_sequence_length=128,
    )
    engine.warm(LONG[:8])
    engine.pin(LONG[:8])
    for prompt in sharing(64):
        engine.add_request(prompt, SHORT)
    assert len(engine.step().admitted) == 1
    slots = engine.context.prefix_cache.slots
    assert len(slots.cached_states.slot_of_block) == 2 > slots.counts.evicted_total == 0
    assert len(engine.step().admitted) == 63
    engine.check_integrity()
    assert engine.context.cache_stats().num_resumed_tokens == 63 * 96
    assert (len(slots.cached_states.slot_of_block), len(slots.pins), slots.counts.live) == (
        1,
        1,
        63,
    )  # one has ended
    assert slots.cached_states.turnover.by_cause["live_state"] == 1


def test_with_slots_they_wait_one_step_and_share() -> None:
    client = wide_client()
    for prompt in sharing(64):
        client.ask(Asked(tuple(prompt), 2))
    assert len(client.step().admitted) == 1
    assert len(client.step().admitted) == 63
    client.finish()
    assert sorted(result.num_resumed_tokens for result in client.results) == [0] + [96] * 63


def test_prompts_that_part_behind_a_common_head_share_it_from_the_first_on() -> None:
    """Each has 40 tokens of its own: the first stores a state where the others part from it, as well."""
    client = wide_client()
    for prompt in sharing(12):
        client.ask(Asked((*prompt, *random_tokens(40, prompt[-1])), 2))
    assert len(client.step().admitted) == 1
    assert len(client.step().admitted) == 11
    client.finish()
    assert sorted(result.num_resumed_tokens for result in client.results) == [0] + [96] * 11


def test_prompts_behind_many_others_share_their_head_too() -> None:
    engine = small_engine(
        num_kv_blocks=2400, max_requests=128, max_tokens_per_step=1 << 14, num_mamba_slots=200
    )
    client = Client(engine)
    for number in range(64):
        client.ask(Asked(tuple(random_tokens(9, 100 + number)), 2))
    for prompt in sharing(12):
        client.ask(Asked((*prompt, *random_tokens(40, prompt[-1])), 2))
    client.finish()
    assert sum(result.num_resumed_tokens for result in client.results) == 11 * 96


def test_a_waiting_prompt_with_less_in_common_costs_no_branch() -> None:
    """A head is cached, then continued otherwise beside a prompt with one block of it: a third resumes it."""
    engine = small_engine()
    (cached, second, third), other = sharing(3), random_tokens(40, 9)
    for prompt in ((*cached, *random_tokens(20, 1)), (*second, *random_tokens(20, 2))):
        engine.add_request(list(prompt), SHORT)
        engine.add_request([*prompt[:8], *other], SHORT)
        while engine.has_unfinished_requests():
            engine.step()
    (result,) = engine.generate([[*third, *random_tokens(20, 3)]], SHORT)
    assert result.num_resumed_tokens == 96


def test_a_request_waits_in_vain_once() -> None:
    """The slot that was promised goes to a state of more worth."""
    engine = small_engine(num_mamba_slots=2, num_kv_blocks=200, max_requests=8, max_tokens_per_step=64)
    prompts = sharing(6)
    for prompt in prompts:
        engine.add_request(prompt, ms.SamplingParams(max_tokens=1))
    num_steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        num_steps += 1
    without = small_engine(
        enable_prefix_caching=False, num_kv_blocks=200, max_requests=8, max_tokens_per_step=64
    )
    for prompt in prompts:
        without.add_request(prompt, ms.SamplingParams(max_tokens=1))
    num_without = 0
    while without.has_unfinished_requests():
        without.step()
        num_without += 1
    assert num_steps <= num_without + 1


# ---- drafts


class Guesses(Drafter):
    """Wrong guesses, as many as are asked for."""

    def draft(self, tokens: object, max_drafts: int) -> list[int]:
        return [255] * max_drafts


def test_drafts_evict_no_prefix() -> None:
    engine = small_engine(num_kv_blocks=9, num_speculative_tokens=4, make_drafter=Guesses)
    (result,) = engine.generate([random_tokens(24, 1)], ms.SamplingParams(max_tokens=1))
    assert result.finish_reason == "length"
    resumable = engine.warm(random_tokens(24, 1))
    assert resumable == 24
    engine.add_request(random_tokens(46, 2), ms.SamplingParams(max_tokens=10))  # 6 blocks
    for _ in range(2):  # the prompt, and a decode whose drafts reach into a seventh block
        engine.step()
        engine.check_integrity()
    cache = engine.context.prefix_cache
    chain = ms.PrefixHashChain(8)
    chain.extend_to(random_tokens(24, 1))
    assert cache.resumable_tokens(chain) == resumable


# ---- hosts


def test_a_host_that_schedules_on_the_same_context_takes_no_row_from_under_the_engine() -> None:
    engine, other = small_engine(max_requests=2), small_engine(max_requests=2)
    for seed in (1, 2):
        engine.add_request(random_tokens(9, seed), SHORT)
        other.add_request(random_tokens(9, seed + 2), SHORT)
    (request, _) = other.core.scheduler.waiting.values()
    assert engine.context.admission.schedule_request(request, 64) is not None
    assert len(engine.step().admitted) == 1
