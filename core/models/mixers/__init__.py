"""The kinds of layer that a `HybridLM` is made of, a file each."""

from .attention import Attention
from .gated_delta_net import GatedDeltaNet
from .mamba import MambaMixer
from .mlp import MLP
from .short_conv import ShortConv

Mixer = type[MambaMixer] | type[GatedDeltaNet] | type[ShortConv] | type[Attention] | type[MLP]

MIXERS: dict[str, Mixer] = {
    "M": MambaMixer,
    "G": GatedDeltaNet,
    "C": ShortConv,
    "*": Attention,
    "-": MLP,
}
"""By the letters of `HybridConfig.pattern`."""

__all__ = ["MIXERS", "Mixer"]
