"""megatron-core's own engine for the tests here; see `examples/mcore_rig`.

    MEGATRON=CHECKOUT pytest tests/mcore

runs them on the megatron-core of a checkout of NVIDIA/Megatron-LM instead of the installed one.
"""

import os
import sys
from collections.abc import Iterator

import pytest

if checkout := os.environ.get("MEGATRON"):  # before anything imports megatron, here and in processes of tests
    sys.path.insert(0, checkout)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (checkout, os.environ.get("PYTHONPATH"))))

import mcore_rig


@pytest.fixture(scope="module")
def machine() -> Iterator[None]:
    """For this module only: other tests of the process find torch as it is."""
    with mcore_rig.on_this_machine():
        yield


@pytest.fixture(scope="module")
def model(machine: None) -> mcore_rig.HybridModel:
    return mcore_rig.hybrid_model()
