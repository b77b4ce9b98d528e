"""fla-core's kernels without their tuning."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mambaslots.inference.kernels import delta


@contextlib.contextmanager
def one_configuration() -> Iterator[None]:
    """fla-core's stages run one configuration each within it.

    They would time several: on a GPU that takes minutes for each shape, and a CPU cannot. Their launchers
    also enter the device of their tensors, which a CPU is not.
    """
    delta.stages()
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        for name, owner in list(sys.modules.items()):
            if name.startswith("fla.ops."):
                for kernel in vars(owner).values():
                    tuner = getattr(kernel, "fn", None)
                    configs = getattr(tuner, "configs", ())
                    if len(configs) > 1:
                        ordered = [config for config in configs if _has_fixed_order(config)]
                        patch.setattr(tuner, "configs", (ordered or configs)[-1:])
        yield


def _has_fixed_order(config: Any) -> bool:
    """Whether `delta.fix_orders_of_addition` leaves this configuration."""
    return config.num_warps == 2 and config.kwargs.get("DOT_PRECISION", "ieee") == "ieee"
