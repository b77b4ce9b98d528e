"""Every scenario of the engine's own tests once more: with drafts of each kind, and with steps ahead."""

import pytest
from oracle.drafters import MODES, speculating
from oracle.scenarios import scenarios

COUNTS_STEPS = {
    "test_cancelling_frees_everything_and_keeps_what_was_computed",
    "test_a_failing_forward_costs_time_and_no_tokens",
    "test_an_evicted_request_restarts_from_its_last_checkpoint",
    "test_float32_is_equal_or_nearly_tied",  # makes its engines itself
}
pytestmark = [
    pytest.mark.in_turn("mode"),
    pytest.mark.sampled(2),
    pytest.mark.usefixtures("kind"),
]
globals().update({k: v for k, v in scenarios("test_dynamic_engine").items() if k not in COUNTS_STEPS})


@pytest.fixture(autouse=True, params=list(MODES))
def mode(kind: str, request: pytest.FixtureRequest):
    with speculating(request.param):
        yield request.param
