"""What routers resume of a trace with four replicas, beside one cache that has all their memory."""

import pytest
from mambaslots.replay.compared_caches import config_of, spec_of
from mambaslots.replay.generate import generate
from mambaslots.replay.setting import ReplaySetting, StepCost, model_shape
from mambaslots.replay.trace import Trace
from routed_replay import RoutedReplay, RoutedResult
from routers import ROUTERS

NUM_REPLICAS = 4
STATE_GB, KV_GB, NUM_ROWS = 2.0, 5.0, 8


def serve(trace: Trace, router: str, num_replicas: int = NUM_REPLICAS, slower: float = 1.0) -> RoutedResult:
    """Serve the trace; all replicas together have the same memory. `slower`: how long steps take."""
    share = NUM_REPLICAS // num_replicas
    cost = StepCost(0.007 * slower, 40e-6 * slower, 50e-6 * slower)
    setting = ReplaySetting(
        model_shape("nemotron-h-8b"),
        STATE_GB * share,
        KV_GB * share,
        max_requests=NUM_ROWS * share,
        cost=cost,
    )
    config = config_of(trace, setting, {})
    return RoutedReplay(
        trace, spec_of(setting.shape), config, cost, ROUTERS[router](0), num_replicas, event_delay_ms=50.0
    ).run()


WHOLE = [(seed, 1, slower) for seed in (0, 1, 2) for slower in (1, 15)]


@pytest.mark.parametrize(
    ("seed", "scale", "slower"),
    [(0, 0.2, 1.0), *(pytest.param(*case, marks=pytest.mark.long) for case in WHOLE)],
)
def test_by_state_a_chat_resumes_as_from_one_cache_and_no_replica_has_much_more_to_do(
    seed: int, scale: float, slower: float
) -> None:
    """A fifth of a trace is 48 sessions: with other seeds one of them makes a replica's tokens too many."""
    trace = generate("chat", seed, scale=scale)
    one_cache = serve(trace, "round-robin", 1, slower)
    by_state = serve(trace, "state", slower=slower)
    print(
        f"resumed {by_state.share:.3f} of {one_cache.share:.3f}; most tokens of a replica / mean: "
        f"{by_state.token_imbalance:.3f}; moved {by_state.num_moved_sessions} of {by_state.num_sessions}"
    )
    assert by_state.share >= 0.9 * one_cache.share
    assert by_state.token_imbalance <= 1.25
    assert serve(trace, "power-of-two", slower=slower).share < 0.9 * one_cache.share
