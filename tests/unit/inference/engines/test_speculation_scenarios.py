"""Every scenario of the engine's own tests once more: with drafts of each kind, and with async scheduling."""

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
    pytest.mark.sampled(2),
    pytest.mark.usefixtures("kind"),
]
TESTS = {k: v for k, v in scenarios("test_dynamic_engine").items() if k not in COUNTS_STEPS}
globals().update(TESTS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """In quick runs the next mode for each test: thousands of products need not be made."""
    modes = list(MODES)
    if "not long" in metafunc.config.option.markexpr:
        place = list(TESTS).index(metafunc.function.__name__) % len(modes)
        modes = modes[place : place + 1]
    metafunc.parametrize("mode", modes, indirect=True)


@pytest.fixture(autouse=True)
def mode(kind: str, request: pytest.FixtureRequest):
    with speculating(request.param):
        yield request.param
