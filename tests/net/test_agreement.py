"""Ranks that serve together compare what they decide; each kind of decision is made to differ on one."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import mambaslots as ms
import numpy as np
import pytest
import torch.distributed as dist
from mambaslots.inference.contexts.dynamic_request import ScheduledRequest
from mambaslots.inference.contexts.step_inputs import StepInputs
from oracle.agreement import Agreement, DisagreementError
from oracle.budget import is_quick
from oracle.distributed_world import SPLITS, World, splits
from oracle.drafters import MODES
from oracle.serving import SEED, random_tokens, small_config, small_engine
from oracle.workload import FORKS, HEADS

Engine = ms.DynamicInferenceEngine
TIGHT: dict[str, object] = {
    "max_requests": 3, "max_tokens_per_step": 13, "max_sequence_length": 96, "num_kv_blocks": 16,
    "num_mamba_slots": 3,
}  # fmt: skip


@contextmanager
def agreeing(world: World, engine: Engine, timeout_s: float = 60.0) -> Iterator[Agreement]:
    store = dist.PrefixStore("agreement", dist.distributed_c10d._get_default_store())
    agreement = Agreement(engine.context, store, world.rank, world.size, timeout_s)
    try:
        yield agreement
    finally:
        agreement.close()


# ---- ranks that agree


@pytest.mark.sampled(mode=("mixed",))
@pytest.mark.parametrize("mode", [None, "mixed", "in place", "n-grams"])
@pytest.mark.parametrize("split", splits("tp 2", "pp 2", "tp 4", "tp 2, pp 2"))
def test_a_busy_cache_decides_alike_on_all_ranks(world: World, split: str, mode: str | None) -> None:
    """Under pressure: chunked prefills, evicted states and KV, drafts, cancelled requests, resets."""
    engine = small_engine(model=world.model(split), **TIGHT, **MODES.get(mode, {}))  # type: ignore[arg-type]
    random, steps, asked, num_ghosts = np.random.default_rng(7), 0, [], 0
    with agreeing(world, engine) as agreement:
        last = 40 // (1 + is_quick())
        for turn in range(last + 20):
            if turn < last and random.random() < 0.6:
                prompt = (HEADS + FORKS)[random.integers(len(HEADS + FORKS))]
                length = int(random.integers(1, 16))
                temperature = random.choice([0.0, 0.8])
                params = ms.SamplingParams(max_tokens=length, temperature=temperature, top_k=5, seed=turn)
                asked.append(engine.add_request(prompt, params))
            if turn % 13 == 12 and asked[-1] in engine.core.requests:
                engine.cancel(asked[-1])
            if turn == last - 15:
                engine.reset_prefix_cache()
            engine.step()
            engine.context.check_integrity()
            num_ghosts = max(num_ghosts, len(engine.context.prefix_cache.kv_blocks.tree.ghosts))
            steps += 1
        while engine.has_unfinished_requests():
            engine.step()
            steps += 1
        agreement.compare()
    stats = engine.context.cache_stats()
    assert stats.num_states_evicted
    assert num_ghosts  # blocks were evicted
    assert stats.num_resumed_tokens
    print(f"rank {world.rank}: {steps} steps agreed upon, {stats}, {engine.stats().speculation}")
    assert (
        not MODES.get(mode or "", {}).get("num_speculative_tokens") or engine.stats().speculation.num_drafted
    )


# ---- one rank that does not


def serve(engine: Engine, seeds: range) -> list[list[int]]:
    params = ms.SamplingParams(max_tokens=4)
    return [result.tokens for result in engine.generate([random_tokens(21, seed) for seed in seeds], params)]


def another_free_block(engine: Engine) -> None:
    engine.context.prefix_cache.kv_blocks.free_blocks.reverse()
    serve(engine, range(20, 21))


def another_free_slot(engine: Engine) -> None:
    engine.context.prefix_cache.slots.free_slots.reverse()
    serve(engine, range(20, 21))


def another_victim(engine: Engine) -> None:
    slots = engine.context.prefix_cache.slots
    slots.cached_states.record_use(min(slots.cached_states.slot_of_block.values()))
    serve(engine, range(10, 18))


def another_token(engine: Engine) -> None:
    request_id = engine.add_request(random_tokens(5, 0), ms.SamplingParams(max_tokens=5))
    engine.step()
    request = engine.core.requests[request_id]
    request.tokens[-1] = (request.tokens[-1] + 1) % 256
    engine.step()


def another_request(engine: Engine) -> None:
    engine.add_request(random_tokens(9, 77))
    serve(engine, range(20, 21))


def another_prompt(engine: Engine) -> None:
    serve(engine, range(21, 22))


def another_plan_of_a_request(engine: Engine) -> None:
    plan = ms.CheckpointPlan(marks=(8,))
    engine.add_request(random_tokens(21, 0), checkpoint_plan=plan)
    engine.step()


def a_cancelled_request(engine: Engine) -> None:
    request_id = engine.add_request(random_tokens(9, 0))
    engine.step()
    engine.cancel(request_id)
    serve(engine, range(1, 2))


def a_reset_cache(engine: Engine) -> None:
    engine.reset_prefix_cache()
    serve(engine, range(20, 21))


def a_lost_state(engine: Engine) -> None:
    slots = engine.context.prefix_cache.slots
    slots.remove([next(iter(slots.cached_states.slot_of_block))])
    serve(engine, range(20, 21))


def another_padding(engine: Engine) -> None:
    begin = engine.context.begin_step

    def begin_wider(chunks: Sequence[ScheduledRequest], *_: object) -> StepInputs:
        return begin(chunks, lambda shape: shape._replace(block_columns=shape.block_columns + 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.context, "begin_step", begin_wider)
        serve(engine, range(20, 21))


def nothing_but(engine: Engine) -> None:
    """What the other ranks do."""
    serve(engine, range(20, 21))


def nothing_but_one_step_of_two(engine: Engine) -> None:
    engine.add_request(random_tokens(5, 0), ms.SamplingParams(max_tokens=5))
    engine.step()
    engine.step()


def nothing_but_pressure(engine: Engine) -> None:
    serve(engine, range(10, 18))


def nothing_but_a_plain_request(engine: Engine) -> None:
    engine.add_request(random_tokens(21, 0))
    engine.step()


def nothing_but_going_on(engine: Engine) -> None:
    engine.add_request(random_tokens(9, 0))
    engine.step()
    serve(engine, range(1, 2))


Deed = Callable[[Engine], None]
FAULTS: list[tuple[Deed, Deed, str, str]] = [  # of the odd rank, of the others; what each of them decided
    (another_free_block, nothing_but, r"KV blocks \[\d+.*\] for request", r"KV blocks \[\d+.*\] for request"),
    (another_free_slot, nothing_but, r"slot \d+ reserved for the state", r"slot \d+ reserved for the state"),
    # which state leaves decides which slot the next state gets, too
    (
        another_victim, nothing_but_pressure,
        r"slot \d+ (lost|reserved for) the state", r"slot \d+ (lost|reserved for) the state",
    ),
    (another_token, nothing_but_one_step_of_two, r"token 0 of request \d+ is", r"token 0 of request \d+ is"),
    (another_request, nothing_but, r"prompt of request \d+ .* 9 tokens", r"prompt of .* 21 tokens"),
    (another_prompt, nothing_but, r"prompt of request \d+ .* 21 tokens", r"prompt of .* 21 tokens"),
    (
        another_plan_of_a_request, nothing_but_a_plain_request,
        r"plan of request .* CheckpointPlan\(.*marks=\(8,\)", r"plan of .* CheckpointPlan\(.*marks=\(\)",
    ),
    (a_cancelled_request, nothing_but_going_on, r"request \d+ left row", r"step of request"),
    (a_reset_cache, nothing_but, r"KV block \d+ deregistered", r"prompt of request \d+ has 21 tokens"),
    (a_lost_state, nothing_but, r"slot \d+ lost the state of block", r"prompt of request \d+ has 21 tokens"),
    (another_padding, nothing_but, r"step of shape StepShape\(", r"step of shape StepShape\("),
]  # fmt: skip


def disagree(world: World, engine: Engine, deed: Deed, timeout_s: float = 60.0) -> DisagreementError:
    """The error that this rank ends with; the engine is whole after it, and serves again with all others'."""
    with agreeing(world, engine, timeout_s), pytest.raises(DisagreementError) as caught:
        deed(engine)
    engine.context.check_integrity()
    error = caught.value
    reports = world.gathered((str(error), error.ranks))
    assert reports == [(str(error), error.ranks)] * world.size, "the ranks do not say the same"
    engine.reset()
    answers = serve(engine, range(2))
    assert world.gathered(answers) == [answers] * world.size
    return error


def check(world: World, error: DisagreementError, odd: int, odds: str, others: str) -> None:
    print(error)
    assert error.ranks == ((odd,) if world.size > 2 else (0, 1))
    for rank, decision in error.decisions.items():
        assert re.match(odds if rank == odd else others, decision)
    wanted = f"ranks [{odd}] differ from" if world.size > 2 else "ranks [0, 1] differ at decision"
    assert wanted in str(error)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0].__name__)
@pytest.mark.parametrize("split", splits("tp 2", "tp 4"))
def test_the_first_differing_decision_and_the_ranks_are_named(
    world: World, split: str, fault: tuple[Deed, Deed, str, str]
) -> None:
    deed, others_deed, odds, others = fault
    odd = world.size - 1
    engine = small_engine(model=world.model(split), num_mamba_slots=10, eviction_policy="lru")
    serve(engine, range(3))  # a cache that holds something
    error = disagree(world, engine, deed if world.rank == odd else others_deed)
    check(world, error, odd, odds, others)


OTHER_SETTINGS = {
    "another plan": ({"checkpoint_plan": ms.CheckpointPlan(marks=(8,))}, "built with checkpoint_plan "),
    "more requests": ({"max_requests": 5}, "built with max_requests "),
    "another policy": ({"eviction_policy": "lru"}, "built with eviction_policy"),
    "longer chunks": ({"max_tokens_per_step": 72}, "built with max_tokens_per_step "),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHER_SETTINGS)
@pytest.mark.parametrize("split", splits("tp 2", "tp 4"))
def test_contexts_that_were_built_otherwise_are_named_at_the_first_step(
    world: World, split: str, other: str
) -> None:
    settings, wanted = OTHER_SETTINGS[other]
    engine = small_engine(model=world.model(split), **settings if world.rank == 1 else {})
    with agreeing(world, engine), pytest.raises(DisagreementError) as caught:
        serve(engine, range(1))
    check(world, caught.value, 1, wanted, wanted)
    assert caught.value.step == 0
    engine.context.check_integrity()


@pytest.mark.parametrize("split", splits("tp 2", "tp 4"))
def test_other_weights_are_named(world: World, split: str) -> None:
    seed = SEED + (world.rank == 1)
    model = ms.models.HybridLM(small_config(), seed, groups=world.groups(*SPLITS[split])).to(world.device)
    with agreeing(world, small_engine(model=model)) as agreement, pytest.raises(DisagreementError) as caught:
        agreement.compare()
    check(
        world, caught.value, 1, f"built with model .*, seed {SEED + 1}", f"built with model .*, seed {SEED}"
    )


@pytest.mark.parametrize("split", splits("tp 2", "tp 4"))
def test_other_drafts_are_named(world: World, split: str) -> None:
    class Drafter:
        def draft(self, tokens: list[int], max_drafts: int) -> list[int]:
            return [world.rank] * max_drafts if world.rank == 1 else [0] * max_drafts

    engine = small_engine(model=world.model(split), num_speculative_tokens=2, make_drafter=Drafter)
    with agreeing(world, engine), pytest.raises(DisagreementError) as caught:
        serve(engine, range(1))
    check(world, caught.value, 1, r"step of request 0 .* drafts \[1, 1\]", r"step .* drafts \[0, 0\]")
    engine.context.check_integrity()


@pytest.mark.parametrize("split", splits("tp 2", "tp 4"))
def test_a_rank_that_makes_no_step_is_named_within_the_timeout(world: World, split: str) -> None:
    engine = small_engine(model=world.model(split))

    def stay_away(engine: Engine) -> None:
        world.gathered(None)  # until the others have given up
        serve(engine, range(1))

    def wait_for_it(engine: Engine) -> None:
        try:
            serve(engine, range(1))
        finally:
            world.gathered(None)

    error = disagree(world, engine, stay_away if world.rank == 1 else wait_for_it, timeout_s=1.0)
    print(error)
    assert error.ranks == (1,)
    assert str(error).startswith("step 0: ranks [1] did not come to compare decisions within 1 s")
