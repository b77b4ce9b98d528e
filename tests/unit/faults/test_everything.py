"""Everything at once, at random: no token is wrong, and nothing is left.

python -m tests.oracle.everything --seed N --runs 1       # repeats the run of a seed
"""

from unittest.mock import patch

import mambaslots as ms
import pytest
from oracle.everything import Totals

pytestmark = pytest.mark.usefixtures("without_logs")


@pytest.mark.parametrize("first", [0, *(pytest.param(100 * n, marks=pytest.mark.long) for n in range(1, 9))])
def test_nothing_is_wrong_and_nothing_is_left(first: int) -> None:
    totals = Totals()
    found = [totals.run(first + n) for n in range(100 if first else 2)]
    print(f"seeds from {first}: {totals}")
    assert not any(found), "\n".join(filter(None, found))


def test_a_step_whose_undoing_is_interrupted_is_undone_again_and_checked() -> None:
    """The model fails in a step of this seed, and the release of its rows is interrupted."""
    assert not Totals().run(103003)


def test_a_cache_that_keeps_states_of_old_weights_is_noticed() -> None:
    totals = Totals()
    with patch.object(ms.DynamicInferenceEngine, "set_weights_version", lambda engine, version: None):
        for seed in range(4, 16):
            totals.run(seed, interrupts=0.0)
            if totals.outcomes["answer"] or totals.outcomes["stale"]:
                return
    pytest.fail(f"not noticed: {totals}")
