"""Every scenario of the engine's own tests once more, on models that are split over ranks.

Their answers are held against a token-by-token recurrence of the whole model, and their hits against the
numbers that hold in one process.
"""

import pytest
from oracle import serving
from oracle.distributed_world import World, splits
from oracle.scenarios import scenarios

ONE_PROCESS = {"test_float32_is_equal_or_nearly_tied"}  # makes its engines itself
globals().update({k: v for k, v in scenarios("test_dynamic_engine").items() if k not in ONE_PROCESS})


@pytest.fixture(autouse=True, params=splits())
def _split(world: World, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(serving.DEFAULTS, "model", world.model(request.param))
