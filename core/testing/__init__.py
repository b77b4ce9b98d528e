"""For authors of models: `check_model` says what a model does wrong, and what to do about it."""

from .check_model import check_model
from .rules import ModelError

__all__ = ["ModelError", "check_model"]
