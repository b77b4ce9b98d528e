"""Models that run on a `DynamicInferenceContext`.

May import `contexts` (what a step reads) and `kernels`; no engine.
"""

from .hybrid_config import HybridConfig
from .hybrid_lm import HybridLM

__all__ = ["HybridConfig", "HybridLM"]
