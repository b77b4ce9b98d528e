"""For authors of models: `check_model` says what a model does wrong, and what to do about it.

May import `engines`, `contexts`, `cache`; a model through `engines.model_protocol`.
"""

from .check_model import ModelError, check_model

__all__ = ["ModelError", "check_model"]
