"""What keeps ranks together refuses bad arguments before it sends the other ranks anything."""

from typing import Any

import pytest
import torch.distributed as dist
from mambaslots.inference.contexts.dynamic_context import DynamicInferenceContext
from oracle import bad_values as bad
from oracle.agreement import Agreement
from oracle.bad_values import Bad, refuse_all
from oracle.serving import small_engine

ENGINE = small_engine()
STORE = dist.HashStore()

AGREEMENT: dict[str, tuple[object, Bad]] = {
    "context": (ENGINE.context, bad.anything(DynamicInferenceContext)),
    "store": (STORE, bad.anything(dist.Store)),
    "rank": (0, bad.integer(0, 1)),
    "world_size": (2, bad.integer(1)),
    "timeout_s": (1.0, bad.real(0.001, 1e6)),
}


@pytest.mark.parametrize("name", AGREEMENT)
def test_a_bad_argument_is_refused_by_name(name: str) -> None:
    good: dict[str, Any] = {argument: value for argument, (value, _) in AGREEMENT.items()}

    def unchanged() -> None:
        assert STORE.num_keys() == 0
        assert not ENGINE.context.observers

    refuse_all(
        "Agreement", AGREEMENT[name][1], lambda value: Agreement(**good | {name: value}), name, unchanged
    )
