"""megatron-core's own engine for the tests here; see `examples/mcore_rig`."""

import gc
from collections.abc import Iterator

import mcore_rig
import pytest


@pytest.fixture(scope="module")
def machine() -> Iterator[None]:
    """For this module only: other tests of the process find torch as it is."""
    gc.freeze()  # interpreted kernels make much garbage, and what is here already need not be searched for it
    with mcore_rig.on_this_machine():
        yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def model(machine: None) -> mcore_rig.HybridModel:
    return mcore_rig.hybrid_model()
