"""Every scenario of the engine's own tests once more, on models that are split over ranks.

Their answers are held against a token-by-token recurrence of the whole model, and their hits against the
numbers that hold in one process.
"""

import pytest
from oracle import serving
from oracle.distributed_world import World, splits
from oracle.scenarios import scenarios

NOT_SPLIT = {
    # make their engines themselves
    "test_float32_is_equal_or_nearly_tied",
    "test_blocks_of_one_token_keep_one_state_of_the_answer",
    # a split model's engine is broken by a failed step, which other ranks may have made
    "test_a_failing_forward_costs_time_and_no_tokens",
}
# What `test_random_traffic` of a split model shows as well, step by step beside a whole one.
LONG = {
    "test_a_paused_request_keeps_a_state_that_only_a_durable_slot_holds",
    "test_a_repeated_prompt_takes_no_second_slot_and_evicts_none",
    "test_any_state_pool_serves_many_at_once",
    "test_cancelling_frees_everything_and_keeps_what_was_computed",
    "test_chunks_of_any_size_compute_the_same",
    "test_sampling_depends_on_the_seed_and_not_on_the_cache",
}
pytestmark = [
    pytest.mark.in_turn("_split"),
    pytest.mark.sampled(2),
    pytest.mark.usefixtures("kind"),
]
tests = {k: v for k, v in scenarios("test_dynamic_engine").items() if k not in NOT_SPLIT}
globals().update({k: pytest.mark.long(v) if k in LONG else v for k, v in tests.items()})


@pytest.fixture(autouse=True, params=splits())
def _split(kind: str, world: World, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(serving.DEFAULTS, "model", world.model(request.param))
