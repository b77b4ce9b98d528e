"""Models that run on a `DynamicInferenceContext`."""

from .hybrid_config import HybridConfig
from .hybrid_lm import HybridLM

__all__ = ["HybridConfig", "HybridLM"]
