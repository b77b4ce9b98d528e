"""megatron-core's own engine for the tests here; see `examples/mcore_rig`."""

from collections.abc import Iterator

import mcore_rig
import pytest


@pytest.fixture(scope="module")
def machine() -> Iterator[None]:
    """For this module only: other tests of the process find torch as it is."""
    with mcore_rig.on_this_machine():
        yield


@pytest.fixture(scope="module")
def model(machine: None) -> mcore_rig.HybridModel:
    return mcore_rig.hybrid_model()
