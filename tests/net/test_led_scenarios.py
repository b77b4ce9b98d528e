"""The scenarios of the engine's own tests, called on rank 0 alone of a model that is split over ranks."""

import pytest
from oracle.distributed_world import World, splits
from oracle.led_ranks import begin, on_leader
from oracle.scenarios import scenarios

NOT_LED = {
    # make their engines themselves
    "test_float32_is_equal_or_nearly_tied",
    "test_blocks_of_one_token_keep_one_state_of_the_answer",
    # a split model's engine is broken by a failed step, which other ranks may have made
    "test_a_failing_forward_costs_time_and_no_tokens",
    # reach into the engine of rank 0, where no other rank can follow
    "test_an_evicted_request_restarts_from_its_last_checkpoint",
}
pytestmark = [
    pytest.mark.in_turn("_led"),
    pytest.mark.sampled,
    pytest.mark.long,
    pytest.mark.usefixtures("kind"),
]
globals().update({k: on_leader(v) for k, v in scenarios("test_dynamic_engine").items() if k not in NOT_LED})  # type: ignore[arg-type]


@pytest.fixture(autouse=True, params=splits())
def _led(kind: str, world: World, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(world, request.param, monkeypatch)
