"""The small real model of ours, `HybridLM`; the steps of its layers are in `layers`.

hybrid_config    its shape, and the part of it that a rank of a split model has
hybrid_lm        the model: embedding, layers, head; loaded from and saved to a folder
mixers           its layers, by the letters of `HybridConfig.pattern`
weights          its parameters: drawn, saved, read back
"""

from .hybrid_config import HybridConfig
from .hybrid_lm import HybridLM

__all__ = ["HybridConfig", "HybridLM"]
