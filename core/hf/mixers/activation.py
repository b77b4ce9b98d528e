"""The activation behind a mixer's convolution."""

from torch import nn


def check_silu(mixer: nn.Module) -> None:
    """Raise a ValueError unless the mixer's convolution ends in SiLU, which the kernels compute."""
    if mixer.activation not in ("silu", "swish"):
        raise ValueError(
            f"{type(mixer).__name__} has the activation {mixer.activation!r} behind its convolution; "
            "accepted: 'silu'"
        )
