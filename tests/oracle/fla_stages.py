"""fla-core's kernels without their tuning."""

import contextlib
import sys
from collections.abc import Iterator

import pytest
import torch
from mambaslots.inference.kernels import gated_delta_rule


@contextlib.contextmanager
def one_configuration() -> Iterator[None]:
    """fla-core's stages run one configuration each within it.

    They would time several: on a GPU that takes minutes for each shape, and a CPU cannot. Their launchers
    also enter the device of their tensors, which a CPU is not.
    """
    gated_delta_rule.stages()
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        for name, owner in list(sys.modules.items()):
            if name.startswith("fla.ops."):
                for kernel in vars(owner).values():
                    tuner = getattr(kernel, "fn", None)
                    if len(getattr(tuner, "configs", ())) > 1:
                        patch.setattr(tuner, "configs", tuner.configs[-1:])
        yield
