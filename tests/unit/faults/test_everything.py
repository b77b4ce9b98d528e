"""Everything at once, at random: no token is wrong, and nothing is left.

python -m tests.oracle.everything --seed N --runs 1       # repeats the run of a seed
"""

from collections.abc import Iterator
from unittest.mock import patch

import mambaslots as ms
import pytest
from oracle.everything import Totals
from oracle.places import Monitor, monitored


@pytest.fixture(scope="module")
def monitor() -> Iterator[Monitor]:
    with monitored() as monitor:
        yield monitor


@pytest.mark.parametrize("first", [0, *(pytest.param(100 * n, marks=pytest.mark.long) for n in range(1, 9))])
def test_nothing_is_wrong_and_nothing_is_left(first: int, monitor: Monitor) -> None:
    totals = Totals()
    found = [totals.run(first + n, monitor) for n in range(100 if first else 4)]
    print(f"seeds from {first}: {totals}")
    assert not any(found), "\n".join(filter(None, found))


def test_a_cache_that_keeps_states_of_old_weights_is_noticed(monitor: Monitor) -> None:
    totals = Totals()
    with patch.object(ms.DynamicInferenceEngine, "set_weights_version", lambda engine, version: None):
        for seed in range(4, 16):
            totals.run(seed, monitor, interrupts=0.0)
            if totals.outcomes["answer"] or totals.outcomes["stale"]:
                return
    pytest.fail(f"not noticed: {totals}")
