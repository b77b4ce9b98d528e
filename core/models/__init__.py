"""The small real model of ours, and the steps of layers that it shares with `hf`.

hybrid_config    its shape, and the part of it that a rank of a split model has
hybrid_lm        the model: embedding, layers, head; loaded from and saved to a folder
mixers           its layers, by the letters of `HybridConfig.pattern`
layer_steps      a mixer's step: decode rows by one kernel, prefill rows by another; states written
weights          its parameters: drawn, saved, read back
weight_part      the rows or columns of weights that a rank keeps
"""

from .hybrid_config import HybridConfig
from .hybrid_lm import HybridLM

__all__ = ["HybridConfig", "HybridLM"]
