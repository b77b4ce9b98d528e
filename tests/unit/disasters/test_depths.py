"""A state was stored under a prefix of another length: grids of states, blocks and steps were confused."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mambaslots as ms
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mambaslots.inference.contexts.dynamic_request import ScheduledRequest
from oracle.budget import costly
from oracle.cached_states import assert_cached_states
from oracle.drafters import MODES, speculating
from oracle.model_kinds import kind_of_model, kinds
from oracle.recurrent_lm import RecurrentLM
from oracle.serving import (
    assert_answers,
    random_tokens,
    run_checked,
    serve_checked,
    small_config,
    small_engine,
    small_model,
)
from oracle.workload import Asked, Client, engine_settings, requests

BLOCK = 8
LONG = random_tokens(70, seed=50)
GREEDY = ms.SamplingParams(max_tokens=5, return_log_probs=True)


# ---- a state carries the prefix that it is reserved for


class Confused:
    """Observes a context: in one step it gives each boundary's state to the next boundary of the request."""

    def __init__(self, engine: ms.DynamicInferenceEngine) -> None:
        self._context = engine.context
        self.num_confused = 0
        self._context.observers.append(self)

    def step_begun(self, batch: Sequence[ScheduledRequest], inputs: object) -> None:
        for scheduled in batch:
            if len(scheduled.destinations) > 1 and not self.num_confused:
                positions = sorted(scheduled.destinations)
                slots = [scheduled.destinations[position] for position in positions]
                scheduled.destinations.update(zip(positions, slots[-1:] + slots[:-1], strict=True))
                self.num_confused += 1

    def step_ended(self, batch: Sequence[ScheduledRequest]) -> None:
        """Nothing is to be done."""


@pytest.mark.disaster(number=4)
@pytest.mark.usefixtures("kind")
def test_a_state_of_one_depth_is_not_committed_under_a_key_of_another() -> None:
    """The cache is damaged between reserve and commit: the step fails and is made again, rightly."""
    engine = small_engine(checkpoint_plan=ms.CheckpointPlan.every_block(BLOCK), max_tokens_per_step=24)
    confused = Confused(engine)
    request = engine.add_request(LONG, GREEDY)
    with pytest.raises(
        ValueError, match=r"blocks has \d+, registered under hash \d+, for slot \d+; accepted"
    ):
        run_checked(engine)
    assert confused.num_confused == 1
    engine.check_integrity()
    assert_cached_states(engine.context)
    assert_answers(LONG, run_checked(engine)[request])
    assert assert_cached_states(engine.context) == len(LONG) // BLOCK + (len(LONG) % BLOCK + 4) // BLOCK
    (again,) = serve_checked(engine, [LONG])
    assert again.num_resumed_tokens == 64


@pytest.mark.disaster(number=4)
def test_a_refused_commit_changes_nothing() -> None:
    engine = small_engine()
    serve_checked(engine, [LONG[:33]])
    cache = engine.context.prefix_cache
    slots, tree, reservations = cache.slots, cache.tree, cache.reservations
    one, other, *_ = (
        block for block in tree.block_of_hash.values() if block not in slots.cached_states.slot_of_block
    )
    (slot,) = reservations.reserve_planned([one], [tree.hash_of(one)])
    before = slots.counts, dict(slots.reserved), dict(reservations._planned)
    with pytest.raises(ValueError, match=f"the block of hash {tree.hash_of(one)}, whose state the slot"):
        reservations.commit(slot, other)
    assert (slots.counts, slots.reserved, reservations._planned) == before
    slots.reserved[slot] = other
    with pytest.raises(AssertionError, match="a slot is reserved for another prefix's block"):
        reservations.check_integrity()
    slots.reserved[slot] = one
    reservations.check_integrity()
    reservations.release([slot])


class StatesChecked(Client):
    """Holds all cached states against the recurrence, too, behind every step."""

    num_states = 0

    def step(self) -> ms.StepReport:
        report = super().step()
        self.num_states += assert_cached_states(self.engine.context)
        return report


@pytest.mark.disaster(number=4)
@costly()
@given(
    mode=st.sampled_from(list(MODES)),
    kind=kinds,
    sizes=engine_settings,
    asked=st.lists(requests, min_size=2, max_size=4),
)
def test_no_state_is_ever_found_under_a_prefix_of_another_length(
    mode: str, kind: str, sizes: dict[str, Any], asked: list[Asked]
) -> None:
    """Any settings, drafts and requests: behind every step, each state is that after its own prefix."""
    with kind_of_model(kind):
        with speculating(mode):
            client = StatesChecked(small_engine(**sizes))
        plan = ms.CheckpointPlan.every_block(BLOCK)
        for one in [*asked, Asked(tuple(LONG[:30]), 4), Asked(tuple(LONG[:33]), 4)]:
            client.ask(one, plan if one.prompt[:3] == tuple(LONG[:3]) else None)
            client.finish()
        assert client.num_states > 0
        resumed = client.results[-1].num_resumed_tokens
        assert resumed == 24 or sizes["num_kv_blocks"] < 100 or sizes["num_mamba_slots"] < 40


# ---- blocks, chunks and steps of any sizes


def serve_on_every_boundary(model: ms.models.HybridLM, block: int, budget: int, **settings: Any) -> None:
    """Repeat, extend and fork a prompt of four blocks; all states and answers are the recurrence's."""
    engine = small_engine(
        model=model, block_size_tokens=block, max_tokens_per_step=budget, max_requests=2,
        checkpoint_plan=ms.CheckpointPlan.every_block(block), **settings,
    )  # fmt: skip
    text = random_tokens(4 * block + 3, seed=51)
    lm, params = RecurrentLM(model), ms.SamplingParams(max_tokens=3, return_log_probs=True)
    asked = [text, text, text[: 2 * block + 1] + random_tokens(5, seed=52), text[: 3 * block], text[:-2]]
    resumed = []
    for prompt in asked:
        request = engine.add_request(prompt, params)
        result = run_checked(engine)[request]
        tokens, log_probs = lm.generate_greedy(prompt, 3)
        assert result.tokens == tokens
        assert result.log_probs == pytest.approx(log_probs, abs=1e-9)
        resumed.append(result.num_resumed_tokens // block)
        assert_cached_states(engine.context, model)
    assert resumed == [0, 4, 2, 2, 4]


@pytest.mark.disaster(number=6)
@pytest.mark.sampled
@pytest.mark.parametrize("replay", [False, True], ids=["", "replay"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("pattern", ["GM*C", "M*-M", "G*-G", "MG-"])
def test_a_block_of_k_chunks_holds_the_state_of_its_last_chunk(pattern: str, k: int, replay: bool) -> None:
    model = ms.models.HybridLM(small_config(chunk_size=5, pattern=pattern), seed=3)
    serve_on_every_boundary(model, 5 * k, 5 * k + 2, decode_by_replay=replay)


@pytest.mark.disaster(number=5)
@pytest.mark.sampled
@pytest.mark.parametrize("budget", [5, 7, 11, 16, 25], ids=lambda n: f"steps of {n}")
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("grids", [(3, 6), (6, 3), (4, 12), (5, 5)], ids=lambda g: f"grids {g[0]} and {g[1]}")
def test_blocks_grids_and_steps_that_share_no_factor(grids: tuple[int, int], k: int, budget: int) -> None:
    """Two kinds of states on grids of their own; a block is k times both, a step a multiple of none."""
    ssd, delta = grids
    config = replace(small_config(pattern="GM*"), ssd_chunk_size=ssd, delta_chunk_size=delta)
    serve_on_every_boundary(ms.models.HybridLM(config, seed=3), k * max(grids), max(budget, k * max(grids)))


@pytest.mark.disaster(number=5)
@pytest.mark.parametrize("block", [4, 6, 7, 9, 20])
def test_a_block_at_whose_end_not_every_state_exists_is_refused(block: int) -> None:
    with (
        kind_of_model("mix of all"),
        pytest.raises(ValueError, match=r"block_size_tokens is .*a multiple of 8"),
    ):
        small_engine(model=small_model(), block_size_tokens=block)
