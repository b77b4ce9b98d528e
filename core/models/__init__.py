"""Models that run on a `DynamicInferenceContext`."""

from .hybrid_lm import HybridConfig, HybridLM

__all__ = ["HybridConfig", "HybridLM"]
